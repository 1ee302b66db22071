"""Stories of requests whose front is computed while their back is loaded, on a scripted clock."""

from collections.abc import Callable

import pytest
from scripted_tiers import ScriptedEngine

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


@pytest.mark.parametrize("cost", [linear, growing])
@pytest.mark.parametrize("ratio", [1 / 50, 1 / 20, 1 / 10, 1 / 5, 1 / 2, 1 / 1.4, 1, 1.4, 2, 5, 10, 20, 50])
def test_both_ends_beat_the_best_single_way_or_cost_next_to_nothing(
    ratio: float, cost: Callable[[float], Callable[[int, int], float]]
) -> None:
    model = cost(4.0)
    best = min(ttft("load", 4.0 * ratio, model), ttft("recompute", 4.0 * ratio, model))
    both = ttft("auto", 4.0 * ratio, model)
    assert both <= 1.05 * best
    if 1 / 1.4 <= ratio <= 1.4:
        assert both <= 0.8 * best
