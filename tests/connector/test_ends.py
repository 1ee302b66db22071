"""Stories of requests' ends: told once, behind the last stores, in this process or to the daemon, with their hints."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from connector_rig import Bench, request_of
from doubles import SLOT_BYTES, chain_of, wait_until
from service_rig import DaemonThread, attach

from kvtier.connector.request import Answered
from kvtier.connector.vllm.requests import answered_of
from kvtier.engine.sequence import SamplingParams
from kvtier.tiers.errors import RequestError
from kvtier.tiers.hierarchy.hierarchy import Hierarchy
from kvtier.tiers.returns import Hint, RequestEnd


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.close()


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


def test_an_end_is_told_once_and_behind_the_last_stores(bench: Bench, told: list[RequestEnd]) -> None:
    request = request_of(3)
    bench.scheduler.lookup(request, 0)
    bench.scheduler.allocated("a", [0, 1, 2, 3], 0)
    bench.compute(request, 0, [0, 1, 2])
    bench.scheduler.store("a", 0, [0, 1, 2])
    bench.scheduler.finished("a", Answered(2 * request.chain.block_size + 1, 9, Hint.GOES_ON))
    assert not told
    bench.step()
    assert told == [RequestEnd(request.chain.hashes, 2, 9, Hint.GOES_ON)]
    bench.stream.complete_all()
    bench.update()
    bench.scheduler.finished("a", Answered(2, 9))
    bench.scheduler.build_plan()
    assert len(told) == 1


def test_an_aborted_request_tells_no_end(bench: Bench, told: list[RequestEnd]) -> None:
    bench.scheduler.lookup(request_of(3), 0)
    bench.scheduler.finished("a")
    bench.scheduler.build_plan()
    assert not told


def test_the_daemon_hears_it_and_notes_itself_whose_it_is(home: Path, told: list[RequestEnd]) -> None:
    daemon = DaemonThread(home / "s", host={"size": 64 * SLOT_BYTES})
    tiers, other, names = attach(home / "s"), attach(home / "s"), chain_of(600).hashes
    tiers.ended(RequestEnd(names, 590, 7, Hint.TOOL, client=99))
    other.ended(RequestEnd(names[:1], 1, 3))
    for each in (tiers, other):
        each.tick()
    wait_until(lambda: len(told) == 2)
    first, second = sorted(told, key=lambda end: -len(end.names))
    assert (list(first.names), first.num_prompt, first.num_output_tokens, first.hint) == (
        names[-512:],
        502,
        7,
        Hint.TOOL,
    )
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
    request = SimpleNamespace(num_output_tokens=5, num_prompt_tokens=40, kv_transfer_params=params)
    assert answered_of(request) == Answered(40, 5, hint)
    request.num_output_tokens = 0
    assert answered_of(request) is None


def test_a_hint_that_is_none_is_refused() -> None:
    assert SamplingParams(hint=Hint.TOOL).hint is Hint.TOOL
    with pytest.raises(RequestError, match="hint 'maybe': use one of goes_on, tool, finished"):
        SamplingParams(hint="maybe")  # type: ignore[arg-type]
