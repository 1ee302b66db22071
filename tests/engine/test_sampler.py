"""Stories of the sampler: greedy, temperature, top-k, top-p, and draws that depend on seed and position alone."""

import numpy as np
import pytest
from numpy.typing import NDArray

from kvtier.engine.requests import SamplingParams
from kvtier.engine.sampler import sample, uniform
from kvtier.tiers import RequestError

LOGITS = np.log(np.array([0.1, 0.4, 0.2, 0.3], np.float32))


def draws(params: SamplingParams, count: int = 4000, logits: NDArray[np.float32] = LOGITS) -> NDArray[np.float64]:
    """Shares of each token in `count` draws of one seed."""
    tokens = [sample(logits, params, 7, position) for position in range(count)]
    return np.bincount(tokens, minlength=len(logits)) / count


def test_greedy_takes_the_likeliest() -> None:
    assert sample(LOGITS, SamplingParams(temperature=0), 1, 0) == 1


def test_draws_follow_the_probabilities() -> None:
    assert np.allclose(draws(SamplingParams(temperature=1.0)), [0.1, 0.4, 0.2, 0.3], atol=0.03)
    # A low temperature sharpens (p ** 2, normalised), a high one flattens.
    assert np.allclose(draws(SamplingParams(temperature=0.5)), np.array([1, 16, 4, 9]) / 30, atol=0.03)
    assert np.allclose(draws(SamplingParams(temperature=100.0)), 0.25, atol=0.03)


def test_top_k_keeps_the_likeliest() -> None:
    assert np.allclose(draws(SamplingParams(temperature=1.0, top_k=2)), [0, 4 / 7, 0, 3 / 7], atol=0.03)
    assert np.allclose(
        draws(SamplingParams(temperature=1.0, top_k=9)), [0.1, 0.4, 0.2, 0.3], atol=0.03
    )  # more than there are
    assert draws(SamplingParams(temperature=1.0, top_k=1))[1] == 1.0


def test_top_k_of_equals_keeps_exactly_k() -> None:
    shares = draws(SamplingParams(temperature=1.0, top_k=2), logits=np.zeros(5, np.float32))
    assert np.count_nonzero(shares) == 2


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    assert np.allclose(draws(SamplingParams(temperature=1.0, top_p=0.65)), [0, 4 / 7, 0, 3 / 7], atol=0.03)
    assert draws(SamplingParams(temperature=1.0, top_p=0.01))[1] == 1.0  # never fewer than one token
    # Both together: the three likeliest, then what reaches 0.5 of those.
    assert np.allclose(draws(SamplingParams(temperature=1.0, top_k=3, top_p=0.7)), [0, 4 / 7, 0, 3 / 7], atol=0.03)


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    params = SamplingParams(temperature=1.0)
    answer = [sample(LOGITS, params, 42, position) for position in range(32)]
    assert [sample(LOGITS, params, 42, position) for position in reversed(range(32))] == answer[::-1]
    assert [sample(LOGITS, params, 43, position) for position in range(32)] != answer


def test_uniform_numbers_are_uniform() -> None:
    numbers = np.array([uniform(seed, position) for seed in range(50) for position in range(200)])
    assert 0.0 <= numbers.min() < 0.01
    assert 0.99 < numbers.max() < 1.0
    assert abs(numbers.mean() - 0.5) < 0.01


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", value) for value in (-0.1, float("nan"), float("inf"), "hot", True)),
        *(("top_p", value) for value in (0.0, 1.01, float("nan"), None)),
        *(("top_k", value) for value in (-1, 1.5, None)),
        *(("max_tokens", value) for value in (0, -3, 2.0, True)),
        *(("seed", value) for value in (-1, 2**64, 1.0, "x")),
    ],
)
def test_values_out_of_range_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(RequestError, match=f"{field} .*: use"):
        SamplingParams(**{field: value})  # type: ignore[arg-type]
