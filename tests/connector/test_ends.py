"""Stories of requests' ends: told once, behind the last stores, in this process or to the daemon, with their hints."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from connector_rig import Bench, request_of
from doubles import SLOT_BYTES, chain_of, wait_until
from service_rig import DaemonThread, attach
from tokenizers import Tokenizer, models

from kvtier.connector.request import Answered
from kvtier.connector.vllm.requests import AnswerReader, answered_of
from kvtier.engine.requests import SamplingParams
from kvtier.tiers.errors import RequestError
from kvtier.tiers.hierarchy.hierarchy import Hierarchy
from kvtier.tiers.reuse import Hint, RequestEnd


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[RequestEnd]:
    """What any hierarchy of this process was told."""
    ends: list[RequestEnd] = []
    original = Hierarchy.ended

    def ended(tiers: Hierarchy, end: RequestEnd) -> None:
        ends.append(end)
        original(tiers, end)

    monkeypatch.setattr(Hierarchy, "ended", ended)
    return ends


def test_a_finished_request_is_reported_once_and_after_the_last_stores(bench: Bench, told: list[RequestEnd]) -> None:
    request = request_of(3)
    bench.scheduler.lookup(request, 0)
    bench.scheduler.allocated("a", [0, 1, 2, 3], 0)
    bench.compute(request, 0, [0, 1, 2])
    bench.scheduler.store("a", 0, [0, 1, 2])
    bench.scheduler.finished("a", Answered(2 * request.chain.block_size + 1, 9, Hint.GOES_ON, True, 1.5))
    assert not told
    bench.step()
    tenant = int.from_bytes(request.chain.tenant[:4], "little")
    assert told == [RequestEnd(request.chain.hashes, 2, 9, Hint.GOES_ON, tenant, True, 1.5, "a", 2 * 4 + 1)]
    bench.stream.complete_all()
    bench.update()
    bench.scheduler.finished("a", Answered(2, 9))
    bench.scheduler.build_plan()
    assert len(told) == 1


def test_an_idle_engines_last_finished_request_is_reported_at_once(bench: Bench, told: list[RequestEnd]) -> None:
    """Nothing is left to store, and an engine without requests makes no more plans."""
    request = request_of(3)
    bench.scheduler.lookup(request, 0)
    bench.scheduler.finished("a", Answered(40, 9))
    assert [end.num_output_tokens for end in told] == [9]


def test_an_aborted_request_is_not_reported_as_finished(bench: Bench, told: list[RequestEnd]) -> None:
    bench.scheduler.lookup(request_of(3), 0)
    bench.scheduler.finished("a")
    bench.scheduler.build_plan()
    assert not told


def test_the_daemon_hears_it_and_notes_itself_whose_it_is(home: Path, told: list[RequestEnd]) -> None:
    daemon = DaemonThread(home / "s", host={"size": 64 * SLOT_BYTES})
    tiers, other, names = attach(home / "s"), attach(home / "s"), chain_of(600).hashes
    tiers.ended(RequestEnd(names, 590, 7, Hint.TOOL, 99, True, 2.5))
    other.ended(RequestEnd(names[:1], 1, 3))
    for each in (tiers, other):
        each.tick()
    wait_until(lambda: len(told) == 2)
    first, second = sorted(told, key=lambda end: -len(end.names))
    assert tuple(first)[:7] == (names[-512:], 502, 7, Hint.TOOL, first.client, True, 2.5)
    assert (list(second.names), second.num_prompt, second.hint) == (names[:1], 1, None)
    assert first.client != second.client
    assert 99 not in (first.client, second.client)
    for each in (tiers, other):
        each.close()
    daemon.check()
    daemon.close()


@pytest.mark.parametrize(
    ("params", "hint"),
    [
        (None, None),
        ({"kvtier_hint": "tool"}, Hint.TOOL),
        ({"kvtier_hint": "whatever"}, None),
        ({"kvtier_hint": ["tool"]}, None),
        ("kvtier_hint", None),
    ],
)
def test_vllms_requests_bring_their_hint_among_the_transfers_parameters(params: Any, hint: Hint | None) -> None:
    request, ignored = vllms_request(params), list[str]()
    answered = answered_of(request, lambda _: False, ignored.append)
    assert answered is not None
    assert answered._replace(seconds=0.0) == Answered(40, 5, hint)
    assert 3.0 <= answered.seconds < 60.0
    is_word = isinstance(params, dict) and hint is None
    assert ignored == ["unknown_word"] * is_word  # counted by its reason
    request.num_output_tokens = 0
    assert answered_of(request, lambda _: False, ignored.append) is None


ACTION = {"action_id": "a", "action_type": "kv.retain", "action_version": "1.0"}
PRIORITY = {**ACTION, "action_type": "vllm.set_priority"}


@pytest.mark.parametrize(
    ("actions", "hint", "reasons"),
    [
        ([], None, []),
        ([{**ACTION, "payload": {"directives": [{"priority": 90, "end": 512}, {"priority": 0}]}}], Hint.GOES_ON, []),
        ([{**ACTION, "payload": {"directives": [{"priority": 0, "start": 512}]}}], None, []),  # of a part of it
        ([{**ACTION, "payload": {"directives": [{"priority": 0, "covers_output": True}]}}], None, []),
        ([{**ACTION, "payload": {"directives": [{"priority": 0}]}}], Hint.FINISHED, []),
        ([{**PRIORITY, "payload": {"value": 10, "ttl_seconds": 60}}], Hint.GOES_ON, []),
        ([{**PRIORITY, "payload": {"value": -1, "ttl_seconds": 60}}], Hint.FINISHED, []),
        ([{**PRIORITY, "payload": {"value": None}}], None, []),
        ([{**ACTION, "action_version": "2.0", "payload": {}}, {**ACTION, "action_type": "x", "payload": {}}], None,
         ["unknown_action"] * 2),
        ([{**ACTION, "payload": {"directives": [{"priority": True}]}}, {**ACTION, "payload": {}}, 7], None,
         ["malformed"] * 3),
        ("actions", None, ["malformed"]),
    ],
)  # fmt: skip
def test_vllms_kv_hints_are_heard_where_no_word_of_ours_is_said(
    actions: Any, hint: Hint | None, reasons: list[str]
) -> None:
    as_object = [SimpleNamespace(**each) if isinstance(each, dict) else each for each in actions]
    for made in (actions, as_object) if isinstance(actions, list) else (actions,):
        request, ignored = vllms_request(None), list[str]()
        request.kv_hints = SimpleNamespace(protocol_version="0.1", message_id="m", actions=made)
        answered = answered_of(request, lambda _: True, ignored.append)
        assert answered is not None
        assert (answered.hint, answered.is_derived) == ((hint, False) if hint else (Hint.TOOL, True))
        assert ignored == reasons
        request.kv_transfer_params = {"kvtier_hint": "tool"}
        said = answered_of(request, lambda _: False, ignored.append)
        assert said is not None
        assert (said.hint, ignored) == (Hint.TOOL, reasons)


def vllms_request(params: Any, status: str = "FINISHED_STOPPED") -> SimpleNamespace:
    """A request as vLLM's scheduler shows it, three seconds old."""
    return SimpleNamespace(
        num_output_tokens=5,
        num_prompt_tokens=40,
        kv_transfer_params=params,
        status=SimpleNamespace(name=status),
        output_token_ids=[1, 2, 3, 4, 5],
        arrival_time=time.time() - 3.0,
    )


@pytest.mark.parametrize(
    ("params", "status", "told"),
    [
        (None, "FINISHED_STOPPED", (Hint.TOOL, True)),
        ({"kvtier_hint": "finished"}, "FINISHED_STOPPED", (Hint.FINISHED, False)),
        (None, "FINISHED_LENGTH_CAPPED", (None, False)),  # half a call
        (None, "FINISHED_ABORTED", (None, False)),
        ({"do_remote_decode": True}, "FINISHED_LENGTH_CAPPED", None),  # the decode node tells it
    ],
)
def test_vllms_answer_that_calls_a_tool_says_so_itself(params: Any, status: str, told: Any) -> None:
    answered = answered_of(vllms_request(params, status), lambda tokens: tokens == [1, 2, 3, 4, 5], lambda _: None)
    assert (answered and (answered.hint, answered.is_derived)) == told


def test_answers_are_read_as_soon_as_the_tokenizer_is_there(tmp_path: Path) -> None:
    call = '{"name": "weather", "arguments": {}}'
    made = Tokenizer(models.WordLevel({call: 0, "no": 1}, "no"))
    made.save(str(tmp_path / "tokenizer.json"))
    reader = AnswerReader(str(tmp_path))
    wait_until(lambda: reader([0]))
    assert not reader([1])
    (tmp_path / "tokenizer.json").write_text("{")
    for unreadable in (AnswerReader(str(tmp_path)), AnswerReader("nobody/has-this"), AnswerReader(None)):
        assert not unreadable([0])


def test_a_hint_that_is_none_is_refused() -> None:
    assert SamplingParams(hint=Hint.TOOL).hint is Hint.TOOL
    with pytest.raises(RequestError, match="hint 'maybe': use one of goes_on, tool, finished"):
        SamplingParams(hint="maybe")  # type: ignore[arg-type]
