"""PastLookups: the last hour's lookups and stores in memory, and what the best policy would have found of them."""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtier.service.simulation import Optimum
from kvtier.tiers import ChainHash, KVTierError
from kvtier.tiers.pool import to_words

_KEPT: Final = 3600.0  # seconds
_MOST_REQUESTS: Final = 1 << 16
_MOST_WAITING: Final = 1 << 16  # blocks told and not taken in yet
_NUM_STEPS: Final = 60  # points of the curve
_PAUSE: Final = 30.0  # seconds between two looks, at least
_RARELY: Final = 50.0  # times as long as a look took
_TICK: Final = 1.0  # seconds between two times that what was told is taken in
_MIX: Final = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x27D4EB2F165667C5], np.uint64)


class PastStep(NamedTuple):
    """Some time of the past hour."""

    age_s: float  # of its middle
    asked: int  # blocks
    found: int
    optimum: int  # blocks that the best policy would have found


class OptimumSoFar(NamedTuple):
    """What was found of the last hour's lookups, and what could have been with all of them known in advance."""

    capacity: int  # blocks that all tiers of this node hold
    seconds: float  # that the lookups are of
    steps: Sequence[PastStep]

    @property
    def asked(self) -> int:
        return sum(step.asked for step in self.steps)

    @property
    def found(self) -> int:
        return sum(step.found for step in self.steps)

    @property
    def optimum(self) -> int:
        return sum(step.optimum for step in self.steps)


class _PastRequest(NamedTuple):
    at: float
    blocks: NDArray[np.int64]  # a number for each, made of its name: no number leads back
    num_asked: int  # 0: they were stored
    num_found: int
    num_l1: int  # of these, the engine had


class PastLookups:
    """Told of every lookup and store by the daemon's loop, in some hundred nanoseconds; the rest is another thread's.

    Bounded: at most `most_blocks` blocks, eight bytes each, an hour and 65,536 requests; the oldest go. What is told
    while too much waits to be taken in is dropped and counted.
    """

    def __init__(self, most_blocks: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_dropped = 0  # lookups and stores
        self._most_blocks = most_blocks
        self._clock = clock
        self._told: deque[tuple[float, Sequence[ChainHash], int, int, int]] = deque()
        self._num_told = self._num_taken = 0  # blocks: each is counted by one thread alone
        self._past: deque[_PastRequest] = deque()
        self._num_blocks = 0

    def looked_up(self, hashes: Sequence[ChainHash], num_found: int, num_l1: int) -> None:
        """A request asked for these blocks, a list nobody changes any more. On the loop's thread."""
        self._tell(hashes, len(hashes), num_found, num_l1)

    def stored(self, hashes: Sequence[ChainHash]) -> None:
        """These consecutive blocks were offered. On the loop's thread."""
        self._tell(hashes, 0, 0, 0)

    def _tell(self, hashes: Sequence[ChainHash], num_asked: int, num_found: int, num_l1: int) -> None:
        if self._num_told - self._num_taken > _MOST_WAITING:
            self.num_dropped += 1
            return
        self._num_told += len(hashes)
        self._told.append((self._clock(), hashes, num_asked, num_found, num_l1))

    def take_in(self) -> None:
        """What was told becomes numbers, and what is too old or too much goes. On one thread, not the loop's."""
        while self._told:
            at, hashes, *numbers = self._told.popleft()
            blocks = (to_words(hashes) @ _MIX).view(np.int64)
            self._num_taken += len(hashes)
            self._past.append(_PastRequest(at, blocks, *numbers))
            self._num_blocks += len(blocks)
        oldest = self._clock() - _KEPT
        while self._past and (
            self._past[0].at < oldest or self._num_blocks > self._most_blocks or len(self._past) > _MOST_REQUESTS
        ):
            self._num_blocks -= len(self._past.popleft().blocks)

    def look(self, capacity: int) -> OptimumSoFar | None:
        """What was found and could have been; None if nobody has asked. On the thread of `take_in`.

        The best policy begins without a block; what was found from before it is given to it, and so is what an engine's
        L1 had.
        """
        past = list(self._past)
        if not any(request.num_asked for request in past):
            return None
        optimum = Optimum([request.blocks.tolist() for request in past], [request.num_asked for request in past])
        least = [max(request.num_found, request.num_l1) for request in past]
        best = np.maximum(optimum.hits(capacity), least)
        now, first = self._clock(), past[0].at
        width = max(now - first, 1.0) / _NUM_STEPS
        places = [min(int((request.at - first) / width), _NUM_STEPS - 1) for request in past]
        sums = [
            np.bincount(places, numbers, _NUM_STEPS).astype(np.int64).tolist()
            for numbers in ([request.num_asked for request in past], [request.num_found for request in past], best)
        ]
        ages = [now - first - width * (place + 0.5) for place in range(_NUM_STEPS)]
        steps = [PastStep(age, *counts) for age, *counts in zip(ages, *sums, strict=True)]
        return OptimumSoFar(capacity, now - first, steps)


class Watched(NamedTuple):
    """A model whose lookups are looked at."""

    fingerprint: bytes
    past: PastLookups
    capacity: Callable[[], int]  # blocks that the tiers hold


class OptimumWatch:
    """A thread that now and then computes what the best policy would have found. `of` may be called on any thread."""

    def __init__(self, models: Callable[[], Iterable[Watched]]) -> None:
        """`models` raises KVTierError where it cannot say."""
        self._models = models
        self._found: dict[bytes, OptimumSoFar] = {}
        self._due: dict[bytes, float] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvtier-optimum", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float = 10.0) -> None:
        """Idempotent; a look under way is waited for, within `timeout` seconds."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout)

    def of(self, fingerprint: bytes) -> OptimumSoFar | None:
        """The last look at a model's lookups; None before the first."""
        return self._found.get(fingerprint)

    def look(self) -> None:
        """Take in what was told, and look at what is due. On the watch's thread, or on one that stands for it."""
        models = list(self._models())
        for fingerprint, past, capacity in models:
            past.take_in()
            if time.monotonic() < self._due.get(fingerprint, 0.0):
                continue
            began = time.monotonic()
            if (found := past.look(capacity())) is not None:
                self._found[fingerprint] = found
                took = time.monotonic() - began
                self._due[fingerprint] = time.monotonic() + max(_PAUSE, _RARELY * took)
        for gone in self._found.keys() - {model.fingerprint for model in models}:
            del self._found[gone], self._due[gone]

    def _run(self) -> None:
        while not self._stopping.wait(_TICK):
            with contextlib.suppress(KVTierError):  # the daemon is stopping, or busy: later
                self.look()
