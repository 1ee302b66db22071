"""Chats that mean the same begin alike: schemas' keys, and the lines that every request has of its own."""

import copy
from typing import Any

import pytest

from kvtier.connector.chat import AS_SENT, ChatPrefix, named_line

BILLING = "x-anthropic-billing-header: cc_version=2.1.37.fbe; cc_entrypoint=cli; cch=a1;"
DATE = "Today is 2026-11-28 12:03:22"
TOOL: dict[str, Any] = {
    "function": {
        "parameters": {"required": ["b"], "properties": {"b": {"enum": ["z", "a"]}, "a": {}}, "type": "object"},
        "name": "weather",
    },
    "type": "function",
}
OWN = ChatPrefix(True, ("billing",), ("date", "Session id:"))


def backwards(value: Any) -> Any:
    """The same with every object's keys the other way round."""
    if isinstance(value, dict):
        return {name: backwards(value[name]) for name in reversed(value)}
    return [backwards(each) for each in value] if isinstance(value, list) else value


def test_schemas_have_one_order_of_keys_and_lists_their_own() -> None:
    made = OWN.tools([TOOL])
    assert str(made) == str(OWN.tools([backwards(TOOL)])) != str([TOOL])
    assert made == [TOOL]  # nothing else about it is another
    assert list(made[0]) == ["type", "function"]
    assert list(made[0]["function"]) == ["name", "parameters"]
    parameters = made[0]["function"]["parameters"]
    assert list(parameters) == ["type", "properties", "required"]
    assert list(parameters["properties"]) == ["a", "b"]
    assert parameters["properties"]["b"]["enum"] == ["z", "a"]
    deep: list[Any] = [{}]
    for _ in range(5000):
        deep[0] = {"a": deep[0]}
    assert OWN.tools(deep) is deep  # as it was sent
    assert OWN.tools([{1: 2, "a": 3}]) == [{1: 2, "a": 3}]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (f"{BILLING}\nBe brief.", "Be brief."),
        (f"{DATE}\nBe brief.\nSession id: 7\nAnd kind.", f"Be brief.\nAnd kind.\n{DATE}\nSession id: 7"),
        (f"<env>\n  Today's date: 2026-11-28\n</env>\n{BILLING}", "<env>\n</env>\n  Today's date: 2026-11-28"),
        (DATE, DATE),
        (f"Be brief.\n{DATE}", f"Be brief.\n{DATE}"),
        ("Today is a good day.\n\nDates matter: 3", "Today is a good day.\n\nDates matter: 3"),
        ("", ""),
    ],
)
def test_lines_of_one_request_are_dropped_or_stand_at_the_end(content: str, expected: str) -> None:
    for role in ("system", "developer"):
        (made,) = OWN.messages([{"role": role, "content": content}])
        assert made == {"role": role, "content": expected}
        assert OWN.messages([made]) == [made]  # a router's work is nothing to its engine
        # in parts, as most agents send them
        (made,) = OWN.messages([{"role": role, "content": [{"type": "text", "text": content}]}])
        assert made["content"] == [{"type": "text", "text": expected}]
    said = [{"role": "user", "content": content}]
    assert OWN.messages(said) is said  # nobody changes what users say


def test_parts_keep_their_number_and_a_segment_its_text() -> None:
    mark = {"segment": True}
    billing, segment = {"type": "text", "text": BILLING}, {"type": "text", "text": DATE, "kvtier": mark}
    (made,) = OWN.messages([{"role": "system", "content": [billing, segment, {"type": "text", "text": "Be brief."}]}])
    assert made["content"] == [{"type": "text", "text": ""}, segment, {"type": "text", "text": "Be brief."}]
    (made,) = OWN.messages([{"role": "system", "content": [{"type": "text", "text": f"{DATE}\na"}, segment]}])
    assert made["content"] == [{"type": "text", "text": "a"}, segment, {"type": "text", "text": DATE}]


def test_system_text_outside_of_the_messages_is_read_alike() -> None:
    parts = [{"type": "text", "text": BILLING}, {"type": "text", "text": f"{DATE}\nBe brief.", "cache_control": {}}]
    anthropic = {"model": "m", "system": parts, "messages": [{"role": "user", "content": DATE}]}
    made = OWN.body(anthropic)
    assert made == {**anthropic, "system": [{"type": "text", "text": ""}, {**parts[1], "text": f"Be brief.\n{DATE}"}]}
    assert OWN.body(made) is made
    said = [{"type": "input_text", "text": f"{DATE}\na"}, {"type": "input_image"}]
    responses = {"instructions": f"{DATE}\nBe brief.", "input": [{"role": "developer", "content": said}]}
    made = OWN.body(responses)
    assert made["instructions"] == f"Be brief.\n{DATE}"
    assert made["input"][0]["content"] == [
        {"type": "input_text", "text": "a"}, {"type": "input_image"}, {"type": "input_text", "text": DATE},
    ]  # fmt: skip
    assert OWN.body(made) is made
    for body in ({"system": "Be brief.", "instructions": 7}, {"input": "Today is 2026-01-02"}):
        assert OWN.body(body) is body


@pytest.mark.parametrize(
    "body",
    [
        {"messages": "hi", "tools": {"a": 1}},
        {"messages": [1, {"role": "system"}, {"role": ["system"], "content": 7}], "tools": None},
        {"messages": [{"role": "system", "content": [7, {"text": 3}, {"type": "image_url"}]}], "prompt": "x"},
        {},
    ],
)
def test_what_cannot_be_read_stays_as_it_is(body: dict[str, Any]) -> None:
    sent = copy.deepcopy(body)
    assert OWN.body(body) is body
    assert body == sent


def test_without_options_nothing_is_another() -> None:
    body = {"messages": [{"role": "system", "content": f"{BILLING}\n{DATE}"}], "tools": [TOOL], "model": "m"}
    assert AS_SENT.body(body) is body
    made = OWN.body(body)
    assert (made["model"], made["messages"][0]["content"]) == ("m", DATE)
    assert body["messages"][0]["content"].startswith("x-anthropic")  # the caller's is as it was


@pytest.mark.parametrize(
    ("line", "is_date"),
    [
        *[(line, True) for line in (
            DATE, "Current date: 28 Nov 2026", "- Today's date: 2026-01-02", "**Date:** 2026-01-02",
            "## Current Date & Time: 02.01.2026", "<date>2026-01-02</date>", "It is now Friday, May 5th", "Time: 3 pm",
            "The current time (UTC) is 12:03", "Today is the 5th of May", "Today is Friday.", "Now: 1735689600",
        )],
        *[(line, False) for line in (
            "Time: 5 minutes per answer at most", "Date: see section 3 of rules and 4", "Today is a good day for 3",
            "Current time limit: 5", "Date: Monday to Friday from 9", "Now and then 12:00", "Date: " + "a" * 5000 + "7",
            "today" + ":" * 50000 + "7", "Date:" + " is" * 50000,
        )],
    ],
)  # fmt: skip
def test_a_date_is_a_line_that_says_when_it_is_now(line: str, is_date: bool) -> None:
    assert (named_line(line) == "date") is is_date
    (made,) = OWN.messages([{"role": "system", "content": f"{line}\nBe brief."}])
    assert made["content"] == (f"Be brief.\n{line}" if is_date else f"{line}\nBe brief.")


def test_a_line_is_known_by_name_or_not() -> None:
    assert [named_line(each) for each in (BILLING, f"  {DATE}", "Current date: 28 Nov 2026", "Now and then")] == [
        "billing", "date", "date", None,
    ]  # fmt: skip
