"""Stories of what the OpenAI server tells of its requests' ends: hints that clients say, and what answers show."""

from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
from scheduler_rig import ScriptedConnector, Story
from server_rig import MODEL, WITH_TOOLS, ServerThread, save_checkpoint, serving, wait_for

from kvtier.connector.models import ToolCalls
from kvtier.connector.request import Answered
from kvtier.engine.requests import FinishReason
from kvtier.tiers.hierarchy.hierarchy import Hierarchy
from kvtier.tiers.reuse import Hint, RequestEnd

PROMPT = "What is the weather in Rome, and should I take an umbrella along?"
ASK: dict[str, Any] = {"model": MODEL, "temperature": 0}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerThread]:
    with serving(save_checkpoint(tmp_path_factory.mktemp("model"), template=WITH_TOOLS)) as made:
        yield made


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[RequestEnd]:
    ends: list[RequestEnd] = []
    monkeypatch.setattr(Hierarchy, "ended", lambda _, end: ends.append(end))
    return ends


@pytest.mark.parametrize("hint", list(Hint))
def test_a_hint_comes_through_the_official_client(server: ServerThread, told: list[RequestEnd], hint: Hint) -> None:
    own: dict[str, Any] = {"extra_body": {"kvtier": {"hint": hint.value}, "ignore_eos": True}}
    server.client.completions.create(prompt=PROMPT, max_tokens=3, **ASK, **own)
    messages: list[Any] = [{"role": "user", "content": PROMPT}]
    server.client.chat.completions.create(messages=messages, max_completion_tokens=3, **ASK, **own)
    wait_for(lambda: len(told) == 2)
    assert [(end.hint, end.is_derived, end.num_output_tokens) for end in told] == [(hint, False, 3)] * 2
    assert all(0 < end.seconds < 60 for end in told)


def retain(*directives: dict[str, object], kind: str = "kv.retain", version: str = "1.0") -> dict[str, Any]:
    payload = {"directives": [*directives]}
    action = {"action_id": "a", "action_type": kind, "action_version": version, "payload": payload}
    return {"kv_hints": {"protocol_version": "0.1", "message_id": "m", "actions": [action]}}


MARK: dict[str, Any] = {"cache_control": {"type": "ephemeral"}}
PART: dict[str, Any] = {"type": "text", "text": PROMPT}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize(
    ("asked", "hint", "ignored"),
    [
        ({"content": [{**PART, **MARK}]}, Hint.GOES_ON, 0),
        ({"message": MARK}, Hint.GOES_ON, 0),
        ({"body": {"tools": [{**TOOL, **MARK}]}}, Hint.GOES_ON, 0),
        ({"body": {**MARK, "kvtier": {"hint": "finished"}}}, Hint.FINISHED, 0),  # plain words go first
        ({"body": {**MARK, **retain({"priority": 0})}}, Hint.FINISHED, 0),
        ({"body": retain({"priority": 50, "start": 0, "end": 9})}, Hint.GOES_ON, 0),
        ({"body": retain({"priority": 1}, kind="kv.prefetch")}, None, 1),
        ({"body": {"kv_hints": ["keep"]}}, None, 1),
        ({"body": {"nvext": {"agent_hints": {"priority": 5, "osl": 1024}}}}, Hint.GOES_ON, 0),  # Dynamo's
        ({"body": {"nvext": MARK}}, Hint.GOES_ON, 0),
        ({"body": {"nvext": {"session_control": {"session_id": "s", "action": "open"}}}}, Hint.GOES_ON, 0),
        ({"body": {"nvext": {"session_control": {"action": "close"}, **MARK}}}, Hint.FINISHED, 0),
        ({"body": {"nvext": {"agent_hints": {"osl": 9}, "annotations": []}}}, None, 0),
        ({"body": {"nvext": {"agent_hints": {"priority": "high"}}}}, None, 1),
        ({"content": [{**PART, "cache_control": "ephemeral"}]}, None, 1),
        ({"body": {"cache_control": {"type": ["ephemeral"]}, "tools": [{**TOOL, "cache_control": 1}]}}, None, 1),
    ],
)
def test_marks_and_hints_of_other_servers_are_heard(
    server: ServerThread, told: list[RequestEnd], asked: dict[str, Any], hint: Hint | None, ignored: int
) -> None:
    message = {"role": "user", "content": asked.get("content", PROMPT), **asked.get("message", {})}
    before = sum(server.loop.tally.ignored.counts.values())
    answer = server.post("chat/completions", messages=[message], max_tokens=1, **ASK, **asked.get("body", {}))
    assert answer.status_code == 200, answer.text
    wait_for(lambda: len(told) == 1)
    assert (told[0].hint, told[0].is_derived) == (hint, False)
    assert sum(server.loop.tally.ignored.counts.values()) == before + ignored


def test_the_last_request_of_a_session_is_finished_unless_its_body_says_otherwise(
    server: ServerThread, told: list[RequestEnd]
) -> None:
    final, messages = {"x-dynamo-session-final": "true"}, [{"role": "user", "content": PROMPT}]
    claude = {"messages": messages, "max_tokens": 1, "model": MODEL}
    for path, body in (
        ("completions", {"prompt": PROMPT, "max_tokens": 1, **ASK}),
        ("messages", claude),
        ("completions", {"prompt": PROMPT, "max_tokens": 1, **ASK, "kvtier": {"hint": "tool"}}),
    ):
        answer = server.http.post(f"/v1/{path}", json=body, headers=final)
        assert answer.status_code == 200, answer.text
    wait_for(lambda: len(told) == 3)
    assert [end.hint for end in told] == [Hint.FINISHED, Hint.FINISHED, Hint.TOOL]


def test_an_answer_that_calls_a_tool_says_so_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only an answer that ends by itself counts, and what is said wins."""
    ends: list[Answered] = []
    monkeypatch.setattr(ScriptedConnector, "finished", lambda _, name, answered: ends.append(answered))
    for said, reason, calls, hint, is_derived in (
        (None, FinishReason.STOP, True, Hint.TOOL, True),
        (None, FinishReason.STOP, False, None, False),
        (None, FinishReason.LENGTH, True, None, False),
        (Hint.FINISHED, FinishReason.STOP, True, Hint.FINISHED, False),
    ):
        story = Story(4, ScriptedConnector())
        story.scheduler.calls_tool = Mock(return_value=calls)
        story.add("r", [1, 2, 3], hint=said)
        story.step(token=0 if reason is FinishReason.STOP else 7)  # 0 ends the text
        assert story.ended == {"r": reason}
        assert (ends[-1].hint, ends[-1].is_derived) == (hint, is_derived)


def test_the_server_reads_answers(server: ServerThread) -> None:
    assert isinstance(server.engine.scheduler.calls_tool, ToolCalls)


def test_tenants_are_told_apart(server: ServerThread, told: list[RequestEnd]) -> None:
    for salt in ("one", "other", "one"):
        server.post("completions", prompt=PROMPT, max_tokens=1, cache_salt=salt, **ASK)
    wait_for(lambda: len(told) == 3)
    one, other, again = (end.client for end in told)
    assert one == again != other
