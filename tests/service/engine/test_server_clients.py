"""Stories of the clients that people have: litellm and LangChain. Each runs where it is installed.

They bring many packages, and litellm's boto3 has no version that fits `.ci/constraints.txt`: so they are no part of
`dev`. Run this file in an environment of its own: `make setup VENV=.venv-clients`, then there
`pip install litellm langchain-openai`.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from server_rig import MODEL, WITH_TOOLS, ServerThread, save_checkpoint, serving

pytestmark = pytest.mark.filterwarnings("ignore")  # what these clients' own packages warn of

QUESTION = "Which pet is it?"
PET: dict[str, Any] = {
    "title": "pet",
    "description": "A pet.",
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "is_old": {"type": "boolean"}},
    "required": ["kind", "is_old"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "pet", "description": "A pet.", "parameters": PET}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerThread]:
    with serving(save_checkpoint(tmp_path_factory.mktemp("model"), template=WITH_TOOLS)) as made:
        yield made


def test_litellm(server: ServerThread) -> None:
    litellm: Any = pytest.importorskip("litellm", reason="litellm: see the top of this file")
    part = {"type": "text", "text": QUESTION, "cache_control": {"type": "ephemeral"}}
    own: dict[str, Any] = {"api_base": f"{server.url}/v1", "api_key": "none", "timeout": 400, "max_tokens": 100}
    ask = {"model": f"openai/{MODEL}", "messages": [{"role": "user", "content": [part]}], **own}
    chosen = {"type": "function", "function": {"name": "pet"}}
    answer = litellm.completion(**ask, tools=[TOOL], tool_choice=chosen)
    message = answer.choices[0].message
    (call,) = message.tool_calls
    assert call.function.name == "pet"
    turns = [*ask["messages"], message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "yes"}]
    chunks = list(litellm.completion(**{**ask, "messages": turns, "max_tokens": 5}, tools=[TOOL], stream=True))
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")
    logprobs = litellm.completion(**{**ask, "max_tokens": 2}, logprobs=True, top_logprobs=1).choices[0].logprobs
    assert len(logprobs.content) == 2
    assert "cache_control" not in server.loop.tally.ignored.counts


def test_langchain(server: ServerThread) -> None:
    langchain: Any = pytest.importorskip("langchain_openai", reason="langchain-openai: see the top of this file")
    from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage

    model = langchain.ChatOpenAI(
        model=MODEL, base_url=f"{server.url}/v1", api_key="none", timeout=400, max_retries=0, max_tokens=100
    )
    turns: list[Any] = [SystemMessage("You know pets."), HumanMessage(QUESTION)]
    structured = model.with_structured_output(PET, method="json_schema").invoke(turns)
    assert set(structured) == {"kind", "is_old"}
    called = model.bind_tools([TOOL], tool_choice="pet").invoke(turns)
    (call,) = called.tool_calls
    assert (call["name"], set(call["args"])) == ("pet", {"kind", "is_old"})
    turns += [called, ToolMessage("a cat", tool_call_id=call["id"])]
    short = model.bind_tools([TOOL]).bind(max_tokens=5)
    pieces = list(short.stream(turns))
    assert sum((piece.usage_metadata or {}).get("output_tokens", 0) for piece in pieces) <= 5
    assert short.invoke(turns).response_metadata["finish_reason"] in ("stop", "length")
