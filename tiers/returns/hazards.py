"""Hazards: how likely each class of requests returns at each age, learned online, and the order that follows from it.

A class that was seen little is drawn towards its group, a group towards all requests, and all of them towards a hazard
that falls as one over the age. Under that last one alone the order is LRU's.
"""

from bisect import bisect_right
from typing import Final

import numpy as np
from numpy.typing import NDArray

NUM_AGES: Final = 28
NUM_TURNS: Final = 4  # first, second, third or fourth, later
NUM_ANSWERS: Final = 4  # by length
NUM_HINTS: Final = 4  # none, and those of `Hint`
NUM_CLASSES: Final = NUM_TURNS * NUM_ANSWERS * NUM_HINTS
UNTOLD: Final = NUM_CLASSES  # the row of blocks whose request has told no end: as all requests are

_ANSWER_TOKENS: Final = (48, 160, 512)
_HALF_LIFE: Final = 7200.0  # seconds in which what was seen counts half
_OLDEST: Final = 4000.0  # seconds that the last, open age counts as
_BELIEF: Final = 3.0  # returns that a class, a group or all need before they are half what was seen of them

EDGES: Final[NDArray[np.float64]] = np.concatenate([[0.0], 2.0 * 1.36 ** np.arange(NUM_AGES - 1)])  # s, to about 2 h
MOST_AHEAD: Final = float(EDGES[-1])  # seconds
_WIDTHS: Final[NDArray[np.float64]] = np.append(np.diff(EDGES), _OLDEST)
_WHOLE: Final[NDArray[np.float64]] = np.append(np.diff(EDGES), 0.0)  # none goes beyond the last
_MIDDLES: Final[NDArray[np.float64]] = np.append((EDGES[:-1] + EDGES[1:]) / 2, EDGES[-1] * 1.3)
_PRIOR: Final[NDArray[np.float64]] = 0.25 / (_MIDDLES + 20.0)  # returns a second


def class_of(turn: int, num_output_tokens: int, hint: int) -> int:
    """The class of a request: `turn` from 0, the length of its answer, and its hint's number, 0 for none."""
    turns = turn if turn < 2 else 2 if turn < 4 else 3
    answer = bisect_right(_ANSWER_TOKENS, num_output_tokens)
    return (turns * NUM_HINTS + hint) * NUM_ANSWERS + answer


def age_of(seconds: NDArray[np.float64]) -> NDArray[np.intp]:
    """The number of the age that each of these lies in."""
    return np.searchsorted(EDGES, seconds, "right").clip(1) - 1


def expected(hazard: NDArray[np.float64], start: NDArray[np.float64], end: NDArray[np.float64]) -> NDArray[np.float64]:
    """`[n]`: the returns that a hazard by age has from one age to another, both in seconds."""
    until = np.append(0.0, np.cumsum(hazard[:-1] * np.diff(EDGES)))
    at_start, at_end = age_of(start), age_of(end)
    before = until[at_start] + hazard[at_start] * (start - EDGES[at_start])
    return until[at_end] + hazard[at_end] * (end - EDGES[at_end]) - before


class Hazards:
    """Returns seen and seconds waited, by class and age; and `places`, the order in which idle blocks go."""

    def __init__(self) -> None:
        self._returns = np.zeros((NUM_CLASSES, NUM_AGES))
        self._waited = np.zeros((NUM_CLASSES, NUM_AGES))  # request-seconds
        self.all = _PRIOR  # of all requests, returns a second
        self.unhinted = _PRIOR  # of those that came without a hint: what a promise has to exceed
        self.places = np.zeros((NUM_CLASSES + 1, NUM_AGES), np.int64)  # lower goes earlier
        self.learn()

    def returned(self, kinds: NDArray[np.int64], seconds: NDArray[np.float64]) -> None:
        """Requests of these classes returned at these ages."""
        np.add.at(self._returns, (kinds, age_of(seconds)), 1.0)

    def waited(self, kinds: NDArray[np.int64], start: NDArray[np.float64], end: NDArray[np.float64]) -> None:
        """Requests of these classes waited from one age to another more, in seconds.

        Of each class only the sums by age are made, as 65,536 may wait: what ends in an age, less what begins there,
        and the whole age for each that goes beyond it.
        """
        ends, parts_of_ends = _sums_by_age(kinds, end)
        starts, parts_of_starts = _sums_by_age(kinds, start)
        begun = ends - starts  # by age: those that end there, less those that begin there
        beyond = np.cumsum(begun[:, ::-1], 1)[:, ::-1] - begun
        self._waited += np.maximum(parts_of_ends - parts_of_starts + beyond * _WHOLE, 0.0)

    def gaps(self) -> NDArray[np.float64]:
        """`[ages]`: returns seen at each age (`EDGES`), of all classes; those of long ago count less."""
        seen: NDArray[np.float64] = self._returns.sum(0)
        return seen

    def ahead(self, kind: int) -> float:
        """As `ReturnOrder.ahead`."""
        mine, average = self.places[kind], self.places[UNTOLD]
        if mine[0] >= average[0]:
            is_below = mine < average[0]
            return float(EDGES[is_below.argmax()]) if is_below.any() else MOST_AHEAD
        is_below = average <= mine[0]
        return -float(EDGES[is_below.argmax()]) if is_below.any() else -MOST_AHEAD

    def fade(self, seconds: float) -> None:
        """What was seen so far counts less."""
        faded = 0.5 ** (seconds / _HALF_LIFE)
        self._returns *= faded
        self._waited *= faded

    def learn(self) -> None:
        """The order, from what was seen."""
        hazards = np.vstack([self._shrunk(), self.all])
        index = _gittins(hazards)
        order = np.argsort(index, axis=None, kind="stable")
        self.places.reshape(-1)[order] = np.arange(order.size)

    def _shrunk(self) -> NDArray[np.float64]:
        """Each class's hazard `[classes, ages]`: a gamma-Poisson estimate around its group's, and that around all."""
        seen, waited = self._returns, self._waited
        self.all = (seen.sum(0) + _BELIEF) / (waited.sum(0) + _BELIEF / _PRIOR)
        plain = slice(0, None, NUM_HINTS)  # groups whose hint is none
        shape = (NUM_TURNS * NUM_HINTS, NUM_ANSWERS, NUM_AGES)
        of_groups = seen.reshape(shape).sum(1), waited.reshape(shape).sum(1)
        self.unhinted = _drawn_to(self.all, *(each[plain].sum(0, keepdims=True) for each in of_groups))[0]
        groups = _drawn_to(self.all, *of_groups)
        return _drawn_to(np.repeat(groups, NUM_ANSWERS, 0), seen, waited)


def _sums_by_age(
    kinds: NDArray[np.int64], seconds: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """`[classes, ages]`: how many requests are of each age, and how many seconds above its edge they are together."""
    ages = age_of(seconds)
    cells, shape = kinds * NUM_AGES + ages, (NUM_CLASSES, NUM_AGES)
    counts = np.bincount(cells, minlength=NUM_CLASSES * NUM_AGES)
    sums = np.asarray(np.bincount(cells, seconds - EDGES[ages], NUM_CLASSES * NUM_AGES), np.float64)
    return counts.reshape(shape), sums.reshape(shape)


def _drawn_to(mean: NDArray[np.float64], seen: NDArray[np.float64], waited: NDArray[np.float64]) -> NDArray[np.float64]:
    """Hazards `[n, ages]` around `mean`: first one factor for all ages, then each age by itself."""
    expected = (mean * waited).sum(1, keepdims=True)
    scaled = (seen.sum(1, keepdims=True) + _BELIEF) / (expected + _BELIEF) * mean
    drawn: NDArray[np.float64] = (seen + _BELIEF) / (waited + _BELIEF / scaled)
    return drawn


def _gittins(hazards: NDArray[np.float64]) -> NDArray[np.float64]:
    """The best chance of a return per second of a block's place held, over all times to give up at.

    J. C. Gittins, "Bandit Processes and Dynamic Allocation Indices", 1979. `hazards` is `[classes, ages]`, returns a
    second; so is the result.
    """
    index = np.zeros_like(hazards)
    for age in range(NUM_AGES):
        widths = _WIDTHS[age:].copy()
        widths[0] *= 0.5  # on average it is in the middle of its age
        stays = np.exp(-hazards[:, age:] * widths)
        left = np.cumprod(stays, 1)
        before = np.hstack([np.ones((len(hazards), 1)), left[:, :-1]])
        held = np.cumsum(before * (1 - stays) / hazards[:, age:], 1)
        index[:, age] = ((1 - left) / held).max(1)
    return index
