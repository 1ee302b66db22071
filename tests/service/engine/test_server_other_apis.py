"""Stories of the Responses API and of Anthropic's Messages API, through their official clients."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from anthropic import Anthropic
from server_rig import MODEL, WITH_TOOLS, ServerThread, save_checkpoint, tokenizer

from kvtier.engine.requests import SampledToken
from kvtier.service.engine.loop import LiveRequest, late
from kvtier.service.openai import ResponsesBody
from kvtier.tiers.hierarchy.hierarchy import Hierarchy
from kvtier.tiers.reuse import Hint, RequestEnd

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
ARGUMENTS = '{"city": "Rome"}'
USE: dict[str, Any] = {"type": "tool_use", "id": "1", "name": "weather", "input": {}}
RESULT: dict[str, Any] = {"type": "tool_result", "tool_use_id": "1", "content": "rain"}
BAD_TOOL: dict[str, Any] = {"name": "weather", "input_schema": {"type": "no"}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerThread]:
    template = "<tool_call> " + WITH_TOOLS
    started = ServerThread(save_checkpoint(tmp_path_factory.mktemp("model"), template=template))
    yield started
    started.close()


@pytest.fixture
def anthropic(server: ServerThread) -> Iterator[Anthropic]:
    with Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=400) as client:
        yield client


@pytest.fixture
def said(server: ServerThread, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the model answers: the last one."""
    texts = ["It will rain."]

    def sample(batch: Any, _: Any) -> list[SampledToken]:
        ids = [*tokenizer().encode(texts[-1]).ids, 257]
        return [SampledToken(ids[chunk.sequence.num_generated]) for chunk in batch.chunks if chunk.samples]

    monkeypatch.setattr(server.engine.runner, "sample", sample)
    return texts


@pytest.fixture
def asked(server: ServerThread, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The chats that requests were translated to."""
    from kvtier.service.engine import request_parser

    seen: list[dict[str, Any]] = []
    original = request_parser.completion_of

    def completion_of(served: Any, kind: Any, data: bytes, deadline: float, **more: Any) -> Any:
        seen.append(json.loads(data))
        return original(served, kind, data, deadline, **more)

    monkeypatch.setattr(request_parser, "completion_of", completion_of)
    return seen


# --- Anthropic's Messages --------------------------------------------------------------------------------------------


def test_a_message_is_answered_whole_and_its_cached_tokens_are_counted(
    server: ServerThread, anthropic: Anthropic, said: list[str]
) -> None:
    ask: Any = {
        "model": MODEL,
        "max_tokens": 50,
        "system": "Be brief.",
        "messages": [{"role": "user", "content": "?" * 99}],
    }
    first = anthropic.messages.create(**ask)
    assert [(block.type, block.text) for block in first.content] == [("text", said[-1])]
    assert (first.role, first.model, first.stop_reason, first.stop_sequence) == ("assistant", MODEL, "end_turn", None)
    assert first.usage.output_tokens == len(said[-1]) + 1
    assert first.usage.cache_read_input_tokens == 0
    server.settle()
    again = anthropic.messages.create(**ask)
    assert again.usage.cache_read_input_tokens is not None
    assert again.usage.cache_read_input_tokens > 0
    assert again.usage.cache_read_input_tokens + again.usage.input_tokens == first.usage.input_tokens
    counted = anthropic.messages.count_tokens(model=MODEL, system=ask["system"], messages=ask["messages"])
    assert counted.input_tokens == first.usage.input_tokens


def test_a_limit_and_a_stop_sequence_end_a_message(anthropic: Anthropic, said: list[str]) -> None:
    ask: Any = {"model": MODEL, "messages": [{"role": "user", "content": "Will it rain?"}]}
    cut = anthropic.messages.create(**ask, max_tokens=4)
    assert (cut.stop_reason, [getattr(each, "text", "") for each in cut.content]) == ("max_tokens", [said[-1][:4]])
    stopped = anthropic.messages.create(**ask, max_tokens=40, stop_sequences=["ain", "never"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "ain")
    assert [getattr(each, "text", "") for each in stopped.content] == ["It will r"]


def test_a_message_streams_as_its_client_expects(anthropic: Anthropic, said: list[str]) -> None:
    ask: Any = {"model": MODEL, "max_tokens": 200, "messages": [{"role": "user", "content": "Will it rain?"}]}
    with anthropic.messages.stream(**ask) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_message()
    assert "".join(getattr(each, "text", "") for each in message.content) == said[-1]
    assert message.stop_reason == "end_turn"
    assert message.usage.output_tokens == len(said[-1]) + 1
    assert [kind for kind in kinds if kind not in ("text", "content_block_delta")] == [
        "message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    said.append(f"I look. {CALL}")
    tools: Any = [{"name": "weather", "input_schema": SCHEMA}]
    with anthropic.messages.stream(**ask, tools=tools) as stream:
        message = stream.get_final_message()
    text, used = message.content
    assert (text.type, used.type, message.stop_reason) == ("text", "tool_use", "tool_use")
    assert (getattr(used, "name", ""), getattr(used, "input", {})) == ("weather", {"city": "Rome"})


def test_a_tool_is_used_and_its_result_comes_back(
    anthropic: Anthropic, said: list[str], asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[RequestEnd] = []
    monkeypatch.setattr(Hierarchy, "ended", lambda _, end: ends.append(end))
    said.append(CALL)
    tools: Any = [{"name": "weather", "description": "Of a city.", "input_schema": SCHEMA}]
    question: Any = {"role": "user", "content": [{"type": "text", "text": "Will it rain in Rome?"}]}
    ask: Any = {"model": MODEL, "max_tokens": 200, "tools": tools}
    first = anthropic.messages.create(
        **ask, messages=[question], tool_choice={"type": "auto", "disable_parallel_tool_use": True}
    )
    [used] = first.content
    assert used.type == "tool_use"
    assert (first.stop_reason, used.name, used.input) == ("tool_use", "weather", {"city": "Rome"})
    assert asked[-1]["parallel_tool_calls"] is False
    said.append("Yes.")
    result: Any = {"type": "tool_result", "tool_use_id": used.id, "content": [{"type": "text", "text": "rain"}]}
    thought: Any = {"type": "thinking", "thinking": "Rome.", "signature": "s"}
    marked: Any = {"type": "text", "text": "Well?", "cache_control": {"type": "ephemeral"}}
    second = anthropic.messages.create(
        **ask,
        messages=[
            question,
            {"role": "assistant", "content": [thought, *[block.model_dump() for block in first.content]]},  # type: ignore[list-item]
            {"role": "user", "content": [result, marked]},
        ],
    )
    assert [getattr(block, "text", "") for block in second.content] == ["Yes."]
    turns = asked[-1]["messages"]
    assert [turn["role"] for turn in turns] == ["user", "assistant", "tool", "user"]
    assert turns[1]["reasoning"] == "Rome."
    assert turns[1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": ARGUMENTS}
    assert turns[2] == {"role": "tool", "tool_call_id": used.id, "content": [{"type": "text", "text": "rain"}]}
    assert [end.hint for end in ends][-1] is Hint.GOES_ON  # by `cache_control`
    choices: list[tuple[Any, str]] = [({"type": "any"}, "required"), ({"type": "none"}, "none")]
    for choice, expected in choices:
        said.append(CALL if expected == "required" else "No.")
        anthropic.messages.create(**ask, messages=[question], tool_choice=choice)
        assert asked[-1]["tool_choice"] == expected


def test_an_answer_that_was_begun_is_continued(
    anthropic: Anthropic, said: list[str], asked: list[dict[str, Any]]
) -> None:
    said.append(" rain.")
    begun: Any = [{"role": "user", "content": "Will it?"}, {"role": "assistant", "content": "It will"}]
    answer = anthropic.messages.create(model=MODEL, max_tokens=50, messages=begun)
    assert [getattr(block, "text", "") for block in answer.content] == [" rain."]
    assert asked[-1]["continue_final_message"] is True


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "not a block of type text"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"tool_choice": {"type": "tool", "name": "none of them"}}, "tool_choice"),
        ({"tools": [{"name": "", "input_schema": {}}]}, "tools.0.name"),
        (
            {"tools": [BAD_TOOL], "tool_choice": {"type": "any"}},
            "tools.0.input_schema: a schema that cannot be followed",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]}, "messages.0"),
        ({"messages": [{"role": "user", "content": [USE]}]}, "type tool_use in a turn of role user"),
        ({"messages": [{"role": "assistant", "content": [RESULT]}]}, "type tool_result in a turn of role assistant"),
        ({"messages": [{"role": "assistant", "content": [USE] * 1025}]}, "messages"),
    ],
)
def test_a_wrong_field_is_named_in_anthropics_form(server: ServerThread, changed: dict[str, Any], named: str) -> None:
    body = {"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": "?"}], **changed}
    sent = {name: value for name, value in body.items() if value is not None}
    is_counted = changed.keys() <= {"messages", "tools"}
    for path in ("messages", *(["messages/count_tokens"] if is_counted else [])):
        answer = server.post(path, **sent)
        assert answer.status_code == 400
        assert (answer.json()["type"], answer.json()["error"]["type"]) == ("error", "invalid_request_error")
        assert named in answer.json()["error"]["message"]


def test_every_refusal_is_in_anthropics_form(server: ServerThread) -> None:
    as_text = server.http.post("/v1/messages", content="?", headers={"content-type": "text/plain"})
    other = server.post("messages/count_tokens", model="other", messages=[{"role": "user", "content": "?"}])
    for answer, status, kind in ((as_text, 415, "invalid_request_error"), (other, 404, "not_found_error")):
        assert (answer.status_code, answer.json()["type"], answer.json()["error"]["type"]) == (status, "error", kind)


def test_an_empty_system_is_none(server: ServerThread) -> None:
    ask: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "?"}]}
    bare, empty = (server.post("messages/count_tokens", **ask, **more).json() for more in ({}, {"system": []}))
    assert bare == empty


# --- OpenAI's Responses ----------------------------------------------------------------------------------------------


def responses(server: ServerThread) -> Any:
    return server.client.with_options(timeout=400).responses


def test_a_response_is_answered_whole_and_its_cached_tokens_are_counted(
    server: ServerThread, said: list[str], asked: list[dict[str, Any]]
) -> None:
    ask: Any = {"model": MODEL, "instructions": "Be brief.", "input": "!" * 99}
    first = responses(server).create(**ask)
    assert (first.status, first.output_text, first.error) == ("completed", said[-1], None)
    assert [turn["role"] for turn in asked[-1]["messages"]] == ["system", "user"]
    server.settle()
    again = responses(server).create(**ask)
    assert again.usage.input_tokens == first.usage.input_tokens
    assert again.usage.input_tokens_details.cached_tokens > first.usage.input_tokens_details.cached_tokens
    cut = responses(server).create(**ask, max_output_tokens=4)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_a_response_streams_as_its_client_expects(server: ServerThread, said: list[str]) -> None:
    tools: Any = [{"type": "function", "name": "weather", "parameters": SCHEMA}]
    said.append(f"I look. {CALL}")
    with responses(server).stream(model=MODEL, input="Will it rain?", tools=tools) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "I look."
    message, call = final.output
    assert (message.content[0].text, call.type, call.name, call.arguments) == (
        "I look.", "function_call", "weather", ARGUMENTS,
    )  # fmt: skip
    assert final.status == "completed"
    kinds = [event.type.removeprefix("response.") for event in events if "delta" not in event.type]
    assert kinds == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.done", "content_part.done",
        "output_item.done", "output_item.added", "function_call_arguments.done", "output_item.done", "completed",
    ]  # fmt: skip


def test_items_of_earlier_turns_are_turns_of_a_chat(
    server: ServerThread, said: list[str], asked: list[dict[str, Any]]
) -> None:
    items: Any = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "Will it rain in Rome?"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "Rome."}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": ARGUMENTS},
        {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"type": "function_call_output", "call_id": "c2", "output": "sun"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Yes."}], "id": "m"},
        {"role": "user", "content": "And tomorrow?"},
    ]
    tools: Any = [{"type": "function", "name": "weather", "parameters": SCHEMA}]
    answer = responses(server).create(model=MODEL, input=items, tools=tools, tool_choice="auto", store=False)
    assert answer.output_text == said[-1]
    turns = asked[-1]["messages"]
    assert [turn["role"] for turn in turns] == ["developer", "user", "assistant", "tool", "tool", "assistant", "user"]
    assert turns[2]["reasoning"] == "Rome."
    assert [call["id"] for call in turns[2]["tool_calls"]] == ["c1", "c2"]
    chosen = {"type": "function", "name": "weather"}
    said.append(CALL)
    responses(server).create(model=MODEL, input="?", tools=tools, tool_choice=chosen)
    assert asked[-1]["tool_choice"] == {"type": "function", "function": {"name": "weather"}}


def test_each_thought_stays_with_what_followed_it(
    server: ServerThread, said: list[str], asked: list[dict[str, Any]]
) -> None:
    def thought(text: str | None) -> dict[str, Any]:
        return {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}

    items: Any = [
        {"role": "user", "content": "Will it rain?"},
        thought("One. "), thought("Two."),
        {"role": "assistant", "content": "I look."},
        thought("Three."),
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        thought(None),
        {"role": "user", "content": "Well?"},
    ]  # fmt: skip
    responses(server).create(model=MODEL, input=items)
    turns = asked[-1]["messages"]
    assert [turn["role"] for turn in turns] == ["user", "assistant", "assistant", "tool", "user"]
    assert [turn.get("reasoning") for turn in turns] == [None, "One. Two.", "Three.", None, None]
    assert [sorted(turn) for turn in turns[1:3]] == [
        ["content", "reasoning", "role"], ["reasoning", "role", "tool_calls"],
    ]  # fmt: skip


def test_a_format_of_text_is_followed(server: ServerThread) -> None:
    schema = {
        "type": "object",
        "properties": {"rain": {"type": "boolean"}},
        "required": ["rain"],
        "additionalProperties": False,
    }
    wanted: Any = {"format": {"type": "json_schema", "name": "weather", "schema": schema, "strict": True}}
    answer = responses(server).create(model=MODEL, input="Will it rain?", text=wanted, temperature=0)
    assert json.loads(answer.output_text).keys() == {"rain"}


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"tools": [{"type": "web_search"}]}, "tools.0"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "not an item of type message"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": "no"}}}}, "text.format.schema"),
        ({"tools": [{"type": "function", "name": ""}]}, "tools.0.name"),
        ({"input": [{"type": "function_call", "call_id": "1", "name": "", "arguments": "{}"}]}, "input"),
        ({"max_output_tokens": 100_000}, "input"),
    ],
)
def test_a_wrong_field_of_a_response_is_named(server: ServerThread, changed: dict[str, Any], named: str) -> None:
    answer = server.post("responses", **{"model": MODEL, "input": "?", **changed})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert named in error["message"]
    assert not error["param"] or error["param"].partition(".")[0] in ResponsesBody.model_fields


@pytest.mark.parametrize("value", ["NaN", r'"\ud800"'])
def test_what_a_response_repeats_is_json(server: ServerThread, value: str) -> None:
    """It was computed, and then could not be sent."""
    parameters = (
        '{"model": "tiny", "input": "?", "tools": [{"type": "function", "name": "a", "parameters": {"a": %s}}]}'
    )
    metadata = '{"model": "tiny", "input": "?", "metadata": {"a": %s}}'
    for body, named in ((metadata, "metadata.a"), (parameters, "tools.0.parameters")):
        headers = {"content-type": "application/json"}
        answer = server.http.post("/v1/responses", content=body % value, headers=headers)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == named


def test_an_error_in_a_stream_is_of_its_kind(server: ServerThread, monkeypatch: pytest.MonkeyPatch) -> None:
    original, begun = LiveRequest.next, set[LiveRequest]()

    async def is_late(self: LiveRequest) -> Any:
        if self in begun:
            raise late()
        begun.add(self)
        return await original(self)

    monkeypatch.setattr(LiveRequest, "next", is_late)
    ask: dict[str, Any] = {"model": MODEL, "stream": True}
    for path, body in (
        ("messages", {"max_tokens": 40, "messages": [{"role": "user", "content": "?"}]}),
        ("responses", {"input": "?"}),
    ):
        last = server.post(path, **ask, **body).text.strip().splitlines()[-2:]
        assert last[0] == "event: error"
        assert json.loads(last[1].removeprefix("data: "))["error"]["type"] == "timeout_error"
        server.settle()


def test_requests_of_both_are_aborted_when_their_client_leaves(server: ServerThread) -> None:
    for path, body in (
        ("messages", {"max_tokens": 400, "messages": [{"role": "user", "content": "?"}]}),
        ("responses", {"max_output_tokens": 400, "input": "?"}),
    ):
        with server.http.stream("POST", f"/v1/{path}", json={"model": MODEL, "stream": True, **body}) as answer:
            next(answer.iter_lines())
        server.settle()
        assert server.loop.num_live == 0
