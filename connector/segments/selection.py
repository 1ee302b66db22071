"""Which of the reused tokens are computed anew: the rules that need no more than places or scores."""

from collections.abc import Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

Positions = NDArray[np.int64]
"""Positions in a prompt, rising."""

_SEED: Final = 5  # of "random": equal requests are repaired alike


def highest(candidates: Positions, scores: NDArray[np.floating], share: float) -> Positions:
    """The share of the candidates that scores highest; `scores` has one for each. Of equal ones, the earliest."""
    chosen = np.argsort(-scores, kind="stable")[: _count(share, len(candidates))]
    return np.sort(candidates[chosen])


def drawn(candidates: Positions, share: float) -> Positions:
    """A random share, the same for the same number of candidates."""
    generator = np.random.default_rng((_SEED, len(candidates)))
    return np.sort(generator.choice(candidates, _count(share, len(candidates)), replace=False))


def first_of(parts: Iterable[Positions], share: float) -> Positions:
    """The share of every part that it begins with."""
    return np.concatenate([part[: _count(share, len(part))] for part in parts])


def borders_of(parts: Iterable[Positions], share: float) -> Positions:
    """The share of every part, half of it at its beginning and half at its end."""
    return np.concatenate([_both_ends(part, _count(share, len(part))) for part in parts])


def _both_ends(part: Positions, number: int) -> Positions:
    return np.concatenate([part[: number - number // 2], part[len(part) - number // 2 :]])


def _count(share: float, number: int) -> int:
    return round(share * number)
