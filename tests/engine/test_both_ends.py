"""Stories of requests whose front is computed while their back is loaded, on a scripted clock."""

from collections.abc import Callable

import pytest
from extent import brief
from scripted_tiers import ScriptedEngine

from kvtier.connector.plan import WorkerReport
from kvtier.tiers.hierarchy.cache_tiers import Overlap

TOKENS = 4096


def linear(seconds: float, num_tokens: int = TOKENS) -> Callable[[int, int], float]:
    """Compute that takes so long for all tokens; a step costs 2 ms besides."""
    return lambda start, end: 0.002 + (end - start) * seconds / num_tokens


def growing(seconds: float, num_tokens: int = TOKENS) -> Callable[[int, int], float]:
    """The same, the last tokens being three times as dear as the first."""
    per_token = seconds / num_tokens / 2
    return lambda start, end: 0.002 + (end - start) * per_token * (1 + (start + end) / num_tokens)


def ttft(policy: str, load: float, cost: Callable[[int, int], float], num_tokens: int = TOKENS) -> float:
    engine = ScriptedEngine(policy, num_tokens, load, cost)  # type: ignore[arg-type] # a policy
    engine.add()
    return engine.run()


RATIOS = [1 / 50, 1 / 20, 1 / 10, 1 / 5, 1 / 2, 1 / 1.4, 1, 1.4, 2, 5, 10, 20, 50]


@pytest.mark.parametrize("cost", [linear, growing])
@pytest.mark.parametrize("ratio", brief([1 / 20, 1, 5], RATIOS))
def test_both_ends_beat_the_best_single_way_or_cost_next_to_nothing(
    ratio: float, cost: Callable[[float], Callable[[int, int], float]]
) -> None:
    model = cost(4.0)
    best = min(ttft("load", 4.0 * ratio, model), ttft("recompute", 4.0 * ratio, model))
    both = ttft("auto", 4.0 * ratio, model)
    assert both <= 1.05 * best
    if 1 / 1.4 <= ratio <= 1.4:
        assert both <= 0.8 * best


@pytest.mark.parametrize(("num_tokens", "load"), [(64, 0.03), (4096, 0.03)])
def test_short_prompts_and_fast_tiers_are_loaded_as_ever(num_tokens: int, load: float) -> None:
    engine = ScriptedEngine("auto", num_tokens, load, linear(4.0))
    engine.add()
    engine.run()
    assert [ends for ends, _ in engine.tiers.asked] == [Overlap.ALLOWED]
    assert engine.chunks == [("a", num_tokens, num_tokens + 1)]


def test_as_long_as_a_rate_is_unknown_one_way_is_tried() -> None:
    engine = ScriptedEngine("auto", TOKENS, 4.0, linear(4.0))
    engine.rates._bytes_per_second.clear()
    engine.add()
    assert engine.run() == pytest.approx(4.0, rel=0.05)
    assert engine.scheduler.stats["skipped_tokens"] == 0


@pytest.mark.parametrize("believed", [0.5, 2.0, 4.0])
def test_a_tier_that_is_not_what_it_was_costs_little(believed: float) -> None:
    """It was measured so many times as fast as it is now."""
    for ratio in (0.5, 1.0, 2.0):
        best = min(ttft(policy, 4.0 * ratio, linear(4.0)) for policy in ("load", "recompute"))
        engine = ScriptedEngine("auto", TOKENS, 4.0 * ratio, linear(4.0), believed)
        engine.add()
        assert engine.run() <= best


def test_a_tier_that_hangs_costs_no_more_than_a_short_wait() -> None:
    engine = ScriptedEngine("auto", TOKENS, 4.0, linear(4.0))
    engine.tiers.stalled = True
    live = engine.add()
    assert engine.run() <= 1.2 * ttft("recompute", 4.0, linear(4.0))
    assert (live.num_external_tokens, engine.scheduler.stats["skipped_tokens"]) == (0, TOKENS)


def test_when_somebody_else_wants_the_compute_the_rest_is_loaded() -> None:
    engine = ScriptedEngine("auto", TOKENS, 4.0, linear(4.0))
    first = engine.add("a")
    for _ in range(2):
        engine.step()
    front = first.num_computed
    assert front > 0
    engine.rates._token_seconds = None  # the other one is loaded, whatever it takes
    engine.add("b", 256, first_token=50_000)
    engine.run()
    assert sum(end - start for name, start, end in engine.chunks if name == "a") == front + 1
    assert first.num_external_tokens == TOKENS - front


def test_a_request_that_is_not_alone_is_loaded_or_computed() -> None:
    engine = ScriptedEngine("auto", 1024, 1.0, linear(1.0, 1024))
    engine.add("a")
    engine.add("b", first_token=50_000)
    engine.run()
    assert {ends for ends, _ in engine.tiers.asked} == {Overlap.NONE}


def test_blocks_that_a_copy_writes_to_outlive_their_request() -> None:
    engine = ScriptedEngine("auto", TOKENS, 4.0, linear(4.0))
    engine.add()
    while not engine.side.writing:
        engine.step()
    writing = engine.side.writing
    assert engine.scheduler.abort("a")
    assert engine.scheduler.has_copies
    assert set(writing) <= set(engine.scheduler._held.left)
    assert engine.pool.num_free_blocks <= engine.pool.num_blocks - len(writing)
    engine.run()


def test_a_step_that_raised_is_made_again() -> None:
    engine = ScriptedEngine("auto", TOKENS, 4.0, linear(4.0))
    live = engine.add()
    engine.step()
    batch = engine.scheduler.schedule(WorkerReport())
    engine.scheduler.fail(batch, ())
    engine.report_failed(batch)
    engine.run()
    assert live.num_generated == 1


def test_promises_that_lapse_are_computed() -> None:
    engine = ScriptedEngine("auto", TOKENS, 4.0, linear(4.0))
    live = engine.add()
    engine.step()
    engine.tiers.lapse()
    engine.run()
    assert live.num_external_tokens < TOKENS // 2
    assert live.num_generated == 1


def test_where_l2_has_little_room_groups_are_asked_for_bit_by_bit() -> None:
    engine = ScriptedEngine("auto", TOKENS, 4.0, linear(4.0))
    engine.tiers.max_waiting = 32  # blocks: two groups
    live = engine.add()
    seconds = engine.run()
    assert live.num_external_tokens > TOKENS // 4
    assert seconds <= 0.8 * 4.0
