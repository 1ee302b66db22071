"""What classes of requests waited, in sums: the same as each request's own seconds at each age."""

import numpy as np
from numpy.typing import NDArray

from kvtier.tiers.reuse.predictor import EDGES, NUM_AGES, NUM_CLASSES, Hazards, expected

Ages = NDArray[np.float64]


def spans(start: Ages, end: Ages) -> Ages:
    """`[n, ages]`: how much of the time from one age to another, in seconds, lies in each of the ages."""
    upper = np.append(EDGES[1:], np.inf)
    between: Ages = np.maximum(np.minimum(end[:, None], upper) - np.maximum(start[:, None], EDGES), 0.0)
    return between


def test_sums_by_age_are_those_of_single_requests() -> None:
    draw = np.random.default_rng(3)
    start = np.append(draw.uniform(0, 1.5 * EDGES[-1], 3000), [0.0, EDGES[5], 0.0])
    end = np.append(start[:3000] + draw.choice([0.0, 1.0, 300.0, 5000.0], 3000), [0.0, EDGES[6], 9e4])
    kinds = draw.integers(0, NUM_CLASSES, len(start))
    hazards = Hazards()
    hazards.waited(kinds, start, end)
    one_by_one = np.zeros((NUM_CLASSES, NUM_AGES))
    np.add.at(one_by_one, kinds, spans(start, end))
    assert np.allclose(hazards._waited, one_by_one, rtol=1e-9, atol=1e-6)
    assert (hazards._waited >= 0).all()


def test_returns_to_be_expected_are_the_hazard_times_the_seconds() -> None:
    draw = np.random.default_rng(4)
    start, hazard = draw.uniform(0, 1.2 * EDGES[-1], 500), draw.uniform(0.001, 0.1, NUM_AGES)
    end = start + draw.choice([0.0, 5.0, 4000.0], 500)
    assert np.allclose(expected(hazard, start, end), spans(start, end) @ hazard)
