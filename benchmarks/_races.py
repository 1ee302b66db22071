"""How programs race: the time of an action, actions by turns, speeds that are compared, the core's two forms."""

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any, Final, NamedTuple, TypeVar
from unittest.mock import patch

import numpy as np

from kvtier.tiers.compiled import extension
from kvtier.tiers.config import COMPILED

PYTHON: Final = "Python alone"  # a form of the core; the other one has extension modules

K = TypeVar("K")
V = TypeVar("V")


class Speed(NamedTuple):
    """What one run moved."""

    gb_per_s: float
    cpu_s_per_gb: float


class Race:
    """Speeds of sides, whatever tells them apart; a ratio is the median over pairs of one round."""

    def __init__(self) -> None:
        self.speeds: defaultdict[Any, list[Speed]] = defaultdict(list)

    def add(self, side: object, speed: Speed) -> None:
        self.speeds[side].append(speed)

    def rate(self, side: object) -> float:
        return median(speed.gb_per_s for speed in self.speeds[side])

    def cpu(self, side: object) -> float:
        """CPU seconds a GB."""
        return median(speed.cpu_s_per_gb for speed in self.speeds[side])

    def ratio(self, side: object, other: object) -> float:
        """How many times as fast one side was as the other."""
        ours, theirs = ([speed.gb_per_s for speed in self.speeds[each]] for each in (side, other))
        return of_pairs(ours, theirs)

    def best(self, sides: Iterable[K]) -> K:
        return max(sides, key=self.rate)


def of_pairs(
    ours: Sequence[float], theirs: Sequence[float], compare: Callable[[float, float], float] = lambda a, b: a / b
) -> float:
    """The median over rounds of what our time is by theirs of the same round, or `compare`d in another way."""
    return median(compare(a, b) for a, b in zip(ours, theirs, strict=True))


def took(action: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    start = clock()
    action()
    return clock() - start


def speed_of(
    action: Callable[[], object], num_bytes: float, cpu_clock: Callable[[], float] = time.process_time
) -> Speed:
    cpu, wall = cpu_clock(), took(action)
    return Speed(num_bytes / wall / 1e9, (cpu_clock() - cpu) / num_bytes * 1e9)


def in_turns(actions: Mapping[K, Callable[[], V]], rounds: int, *, warm_up: int = 0) -> dict[K, list[V]]:
    """What each action returned: one after the other, every second round from the last to the first."""
    found: dict[K, list[V]] = {name: [] for name in actions}
    for number in range(-warm_up, rounds):
        for name in actions if number % 2 else reversed([*actions]):
            result = actions[name]()
            if number >= 0:
                found[name].append(result)
    return found


def interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Geometric mean and its 95 % interval, from a bootstrap."""
    logs = np.log(np.array(ratios))
    draws = np.random.default_rng(0).choice(logs, (10_000, len(logs))).mean(axis=1)
    low, high = np.quantile(draws, [0.025, 0.975])
    return float(np.exp(logs.mean())), float(np.exp(low)), float(np.exp(high))


def is_built(module: str = "kvtier.tiers.pool.core_compiled") -> bool:
    return extension(module) is not None


@contextmanager
def form(name: str) -> Iterator[None]:
    """What is opened now finds no extension module, if it is `PYTHON`."""
    with patch.dict(os.environ, {COMPILED: "off"} if name == PYTHON else {}):
        yield
