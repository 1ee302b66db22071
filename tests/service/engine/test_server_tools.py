"""Stories of tools through the official client: they reach the prompt, and calls come back, whole and streamed."""

import json
from pathlib import Path
from typing import Any

import pytest
from server_rig import MODEL, TEMPLATE, ServerThread, save_checkpoint, serving, tokenizer, wait_for

from kvtier.engine.requests import SampledToken
from kvtier.service.engine.request_parser import form_of
from kvtier.service.openai.prompts import Prompts
from kvtier.tiers.hierarchy.hierarchy import Hierarchy
from kvtier.tiers.reuse import Hint, RequestEnd

TOOL: dict[str, Any] = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
ASK: dict[str, Any] = {"model": MODEL, "tools": [{"type": "function", "function": TOOL}], "max_tokens": 200}
QUESTION: Any = {"role": "user", "content": "Will it rain in Rome?"}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
TOOLS = "{% if tools %}<tool_call> calls one of {{ tools | tojson }}\n{% endif %}"
CALLED = "{{ message.tool_calls | tojson if message.tool_calls else message.content }}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its template tells of tools as those of Hermes and Qwen do."""
    directory = save_checkpoint(tmp_path_factory.mktemp("model"))
    settings = directory / "tokenizer_config.json"
    template = TOOLS + TEMPLATE.replace("{{ message.content }}", CALLED)
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": template}))
    return directory


def patient_client(server: ServerThread) -> Any:  # options in a dictionary tell no type of an answer
    """These answers have many tokens: each letter is one."""
    return server.client.with_options(timeout=400)


@pytest.fixture
def answers(server: ServerThread, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the model says, to each request the last one: a model that knows tools is too large for a test."""
    said = [CALL]

    def sample(batch: Any, _: Any) -> list[SampledToken]:
        ids = [*tokenizer().encode(said[-1]).ids, 257]
        return [SampledToken(ids[chunk.sequence.num_generated]) for chunk in batch.chunks if chunk.samples]

    monkeypatch.setattr(server.engine.runner, "sample", sample)
    return said


def test_a_tool_is_called_and_its_answer_comes_back(
    server: ServerThread, answers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[RequestEnd] = []
    monkeypatch.setattr(Hierarchy, "ended", lambda _, end: ends.append(end))
    first = patient_client(server).chat.completions.create(**ASK, messages=[QUESTION])
    (choice,) = first.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    call: Any = (choice.message.tool_calls or [])[0]
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == (
        "function",
        "weather",
        {"city": "Rome"},
    )
    wait_for(lambda: len(ends) == 1)
    assert (ends[0].hint, ends[0].is_derived) == (Hint.TOOL, True)  # it comes back when the tool has answered
    # The tools were in the prompt, as the template writes them.
    told = server.http.post("/tokenize", json={"messages": [QUESTION], "tools": ASK["tools"]}).json()
    assert first.usage is not None
    assert told["count"] == first.usage.prompt_tokens
    assert '"name": "weather"' in tokenizer().decode(told["tokens"])
    # The answer comes back as the client has it, with what the tool says.
    answers.append("Yes, it will.")
    turns: list[Any] = [
        QUESTION,
        choice.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "rain"},
    ]
    second = patient_client(server).chat.completions.create(**ASK, messages=turns)
    assert (second.choices[0].message.content, second.choices[0].finish_reason) == ("Yes, it will.", "stop")
    assert second.choices[0].message.tool_calls is None


def test_calls_in_a_stream(server: ServerThread, answers: list[str]) -> None:
    answers.append(f"I look.\n{CALL}\n{CALL}")
    chunks = list(patient_client(server).chat.completions.create(**ASK, messages=[QUESTION], stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == "I look."
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert [(call.index, call.function.name if call.function else None) for call in calls] == [
        (0, "weather"),
        (1, "weather"),
    ]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    one = patient_client(server).chat.completions.create(**ASK, messages=[QUESTION], parallel_tool_calls=False)
    assert len(one.choices[0].message.tool_calls or []) == 1


def test_what_asks_for_no_call_gets_text(server: ServerThread, answers: list[str]) -> None:
    for asked in ({**ASK, "tool_choice": "none"}, {**ASK, "tools": []}):
        choice = patient_client(server).chat.completions.create(**asked, messages=[QUESTION]).choices[0]
        assert (choice.message.content, choice.finish_reason) == (answers[-1], "stop")
    wrong = server.post(
        "chat/completions", **{**ASK, "tools": [{"type": "function", "function": {}}]}, messages=[QUESTION]
    )
    assert wrong.json()["error"]["param"] == "tools.0.function.name"


def test_the_form_is_configured_or_read_from_the_checkpoint(model: Path, tmp_path: Path) -> None:
    prompts, plain = Prompts.open(model), Prompts.open(save_checkpoint(tmp_path))
    assert [form_of(name, prompts) for name in ("auto", "hermes", "llama", "none")] == [
        "hermes",
        "hermes",
        "llama",
        None,
    ]
    assert form_of("auto", plain) is None


BILLING = "x-anthropic-billing-header: cc_version=2.1.37.fbe; cc_entrypoint=cli; cch={:05x};"
DATE = "Today is 2026-11-28 12:03:{:02}"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "Where it is asked for"}, "days": {"type": "integer"}},
    "required": ["city"],
}


def same_again(number: int) -> dict[str, Any]:
    """A request that means the same as those of other numbers: keys in another order, lines of its own."""
    parameters = dict(sorted(SCHEMA.items(), reverse=bool(number % 2)))
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    system = f"{BILLING.format(number)}\n{DATE.format(number)}\nYou know the weather of all towns, and nothing else."
    return {"tools": [tool], "messages": [{"role": "system", "content": system}, QUESTION]}


ALIKE: dict[str, Any] = {"sort_tools": True, "drop_lines": ["billing"], "move_lines": ["date"]}


@pytest.mark.parametrize(
    ("chat", "behind"),
    [
        pytest.param({}, 'properties": {', id="as sent"),
        pytest.param({"sort_tools": True}, "2;\nToday", id="one order of keys"),
        pytest.param({**ALIKE, "move_lines": []}, "2\nYou know", id="no billing header"),
        pytest.param(ALIKE, "2<|end|>\n<|begin|>user", id="dates at the end"),
    ],
)
def test_chats_that_mean_the_same_find_each_other(model: Path, chat: dict[str, Any], behind: str) -> None:
    with serving(model, chat=chat) as server:
        for number in (1, 2):
            usage = server.post("chat/completions", model=MODEL, max_tokens=1, **same_again(number)).json()["usage"]
            server.settle()
        tokens = server.http.post("/tokenize", json=same_again(2)).json()["tokens"]
    found = usage["prompt_tokens_details"]["cached_tokens"]
    print(chat, found, "of", len(tokens))  # for whoever looks
    assert len(tokens) == usage["prompt_tokens"]
    assert tokenizer().decode(tokens[found:], skip_special_tokens=False).startswith(behind)
