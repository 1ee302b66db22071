"""The last hour's lookups in memory: bounded, and what the best policy would have found of them."""

import pytest
from doubles import FakeClock, chain_of, wait_until
from http_rig import ServePages
from service_rig import Attach, load, store

from kvtier.service.node import lookups
from kvtier.service.node.lookups import PastLookups
from kvtier.service.observe.statuses import OptimumFigures


def look(past: PastLookups, capacity: int) -> OptimumFigures:
    past.convert()
    found = past.look(capacity)
    assert found is not None
    return found


def test_the_best_policy_keeps_what_returns() -> None:
    clock = FakeClock()
    past = PastLookups(1 << 10, clock)
    assert past.look(8) is None
    kept, passing = chain_of(4), [chain_of(4, first_token=1000 * number) for number in range(1, 6)]
    # One chain returns after each of five that never do: with room for four blocks an LRU would find nothing.
    for other in passing:
        for chain in (kept, other):
            past.record(chain.hashes, len(chain.hashes), 0, 0)
            clock.advance(1)
    found = look(past, 4)
    assert (found.asked, found.found, found.optimum, found.capacity) == (40, 0, 16, 4)
    assert found.seconds == 10
    assert len(found.steps) == 60
    assert all(optimum <= asked for _, asked, _, optimum in found.steps)
    assert found.steps[0][0] > found.steps[-1][0] > 0
    assert look(past, 2).optimum == 8


def test_what_an_answer_left_could_be_found() -> None:
    past = PastLookups(1 << 10, FakeClock())
    whole = chain_of(6)
    past.record(whole.hashes[:4], len(whole.hashes[:4]), 0, 0)
    past.record(whole.hashes)  # the prompt's blocks, and two of the answer
    past.record(whole.hashes, len(whole.hashes), 5, 0)
    assert (look(past, 6).optimum, look(past, 6).asked) == (6, 10)
    assert look(past, 3).optimum == 5  # no bound below what was found


def test_it_is_bounded_in_time_blocks_and_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    past = PastLookups(10, clock)
    for number in range(5):
        past.record(chain_of(4, first_token=1000 * number).hashes, 4, 4, 0)
    assert look(past, 8).asked == 8  # two chains of four are within ten blocks
    clock.advance(3601)
    past.convert()
    assert past.look(8) is None
    monkeypatch.setattr(lookups, "_MOST_WAITING", 6)
    for _ in range(4):
        past.record(chain_of(4).hashes, 4, 0, 0)
    assert past.num_dropped == 2
    past.convert()
    past.record(chain_of(2).hashes, 2, 2, 0)  # there is room again
    assert look(past, 8).asked == 10
    assert past.num_dropped == 2


@pytest.mark.parametrize("kept", [1 << 10, 0])
def test_a_daemon_tells_what_was_possible(
    kept: int, monkeypatch: pytest.MonkeyPatch, serve_pages: ServePages, attach: Attach
) -> None:
    monkeypatch.setattr(lookups, "_TICK", 0.05)
    monkeypatch.setattr(lookups, "_PAUSE", 0.05)
    monkeypatch.setattr(lookups, "_RARELY", 0.0)
    daemon = serve_pages(host={"size": 1 << 20}, service={"kept_lookups": kept})
    tiers, chain = attach(), chain_of(6)
    load(tiers, chain_of(6, first_token=1000))  # in vain
    store(tiers, chain)
    load(tiers, chain)

    def told() -> object:
        [model] = daemon.client.get("/status").json()["models"]
        return model["optimum"]

    if kept:
        wait_until(lambda: told() is not None and told()["asked"] == 12)  # type: ignore[index]
        optimum = told()
        assert isinstance(optimum, dict)
        assert (optimum["found"], optimum["optimum"], optimum["capacity"]) == (6, 6, 64)
        page = daemon.client.get("/metrics").text
        assert "kvtier_optimum_share{" in page
        assert "} 0.5\n" in page
    else:
        assert told() is None
