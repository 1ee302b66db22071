"""Stories of tool calls in an answer's text: both forms, cut anywhere, and what only looks like a call."""

import json
from collections.abc import Callable

import pytest

from kvtier.connector import AS_SENT
from kvtier.service.openai.bodies import ChatBody, parse
from kvtier.service.openai.prompts import CallReader, HermesReader, LlamaReader

ROME = '{"name": "weather", "arguments": {"city": "Röme"}}'
TIME = '{"name": "clock", "arguments": {}}'
LLAMA = '{"name": "weather", "parameters": {"city": "Röme"}}'


def hermes() -> CallReader:
    return HermesReader()


def llama() -> CallReader:
    return LlamaReader({"weather", "clock"})


def read(reader: CallReader, pieces: list[str]) -> tuple[str, list[tuple[str, object]]]:
    """The text, and name and arguments of the calls."""
    heard = [*(reader.push(piece) for piece in pieces), reader.end()]
    calls = [call for each in heard for call in each.calls]
    assert [call.index for call in calls] == list(range(reader.num_calls))
    assert len({call.id for call in calls}) == len(calls)
    return "".join(each.text for each in heard), [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize(
    ("make", "answer", "text", "names"),
    [
        (hermes, f"<tool_call>\n{ROME}\n</tool_call>", "", ["weather"]),
        (
            hermes,
            f"Let me look. \n<tool_call>{ROME}</tool_call>\n<tool_call>{TIME}</tool_call>\n",
            "Let me look.",
            "both",
        ),
        (hermes, f"<tool_call>{ROME}", "", ["weather"]),  # the end mark is missing
        (hermes, "<tool_call>{not json}</tool_call> so", "<tool_call>{not json}</tool_call> so", []),
        (
            hermes,
            '<tool_call>{"name": "a", "arguments": {"x": NaN}}',
            '<tool_call>{"name": "a", "arguments": {"x": NaN}}',
            [],
        ),
        (hermes, " 1 < 2 <tool", " 1 < 2 <tool", []),
        (hermes, ROME, ROME, []),
        (llama, LLAMA, "", ["weather"]),
        (llama, f"<|python_tag|>{LLAMA}; {LLAMA.replace('weather', 'clock')}", "", "both"),
        (llama, '{"name": "Rome", "parameters": {}}', '{"name": "Rome", "parameters": {}}', []),  # no tool is called so
        (llama, f"{LLAMA} is how", f"{LLAMA} is how", []),
        (llama, "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
        (llama, " <b> text", " <b> text", []),
    ],
)
def test_an_answer_is_text_and_calls_wherever_it_is_cut(
    make: Callable[[], CallReader], answer: str, text: str, names: list[str] | str
) -> None:
    expected = ["weather", "clock"] if names == "both" else names
    cuts = [[answer], list(answer), *([answer[:at], answer[at:]] for at in range(0, len(answer), 3))]
    for pieces in cuts:
        told, calls = read(make(), pieces)
        assert (told, [name for name, _ in calls]) == (text, expected), pieces
        assert calls[:1] in ([], [("weather", {"city": "Röme"})])


def test_one_call_at_a_time() -> None:
    for reader, answer in (
        (HermesReader(1), f"<tool_call>{ROME}</tool_call><tool_call>{TIME}</tool_call>"),
        (LlamaReader({"weather"}, 1), f"{LLAMA};{LLAMA}"),
    ):
        assert len(read(reader, [answer])[1]) == 1


def test_tools_and_their_turns_go_to_the_template_as_they_were_sent() -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"x": {"default": None}}}}
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Rain?"}, {"type": "input_text", "text": "In Rome."}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "yes"},
    ]
    unknown: set[str] = set()
    body = {"model": "m", "messages": messages, "tools": [{**tool, "cache_control": {}}], "reasoning_effort": "low"}
    chat = parse(ChatBody, json.dumps(body).encode(), unknown).chat(AS_SENT)
    assert unknown == {"cache_control"}
    assert [turn["role"] for turn in chat.turns] == ["user", "assistant", "tool"]
    assert chat.turns[0]["content"][1] == {"type": "text", "text": "In Rome."}
    assert chat.turns[1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Rome"}}
    assert chat.turns[2]["tool_call_id"] == "call_1"
    assert chat.tools is not None
    assert chat.tools[0]["function"]["parameters"] == {"x": {"default": None}}
    assert chat.variables["reasoning_effort"] == "low"


def test_arguments_that_utf8_cannot_write_are_told_as_escapes() -> None:
    text, [(name, arguments)] = read(
        hermes(), ['<tool_call>{"name": "clock", "arguments": {"x": "\\ud800ö"}}</tool_call>']
    )
    assert (text, name, arguments) == ("", "clock", {"x": "\ud800ö"})
    [call] = hermes().push('<tool_call>{"name": "clock", "arguments": {"x": "\\ud800"}}</tool_call>').calls
    assert json.dumps(call.content, ensure_ascii=False).encode()  # what the answer is written by
