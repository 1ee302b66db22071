"""Load or recompute: measured rates of every tier and of the engine decide which of the two is faster."""

import math
from collections.abc import Mapping
from threading import Lock
from typing import Final, Literal

_WEIGHT: Final = 0.2  # of the newest sample in the moving average
_RETRY: Final = 32  # every so many refusals one load goes through, so that a stale rate can recover

_MAX_SPANS: Final = 8  # reads in one sample, where reads follow each other without a pause

LoadPolicy = Literal["auto", "load", "recompute"]


class Rates:
    """Moving averages: bytes per second by tier, tokens per second of prefill. Thread-safe."""

    def __init__(self, policy: LoadPolicy) -> None:
        self._policy = policy
        self._lock = Lock()
        self._bytes_per_second: dict[str, float] = {}
        self._tokens_per_second: float | None = None
        self._refused = 0

    def loaded(self, tier: str, num_bytes: int, seconds: float) -> None:
        """A tier delivered `num_bytes` in `seconds`, however many reads that were (`BusyTime` adds them up).

        A read that delivered nothing says nothing about the rate.
        """
        if seconds > 0 and num_bytes > 0:
            with self._lock:
                self._bytes_per_second[tier] = _average(self._bytes_per_second.get(tier), num_bytes / seconds)

    def computed(self, num_tokens: int, seconds: float) -> None:
        """The engine prefilled `num_tokens` in `seconds`."""
        if seconds > 0 and num_tokens > 0:
            with self._lock:
                self._tokens_per_second = _average(self._tokens_per_second, num_tokens / seconds)

    def worth_loading(self, num_tokens: int, bytes_by_tier: Mapping[str, int]) -> bool:
        """Whether loading these bytes beats computing these tokens. Unknown rates: load, and learn."""
        if self._policy != "auto":
            return self._policy == "load"
        with self._lock:
            if self._tokens_per_second is None:
                return True
            load = sum(n / self._bytes_per_second[t] for t, n in bytes_by_tier.items() if t in self._bytes_per_second)
            if load <= num_tokens / self._tokens_per_second:
                return True
            self._refused += 1
            return self._refused % _RETRY == 0


class BusyTime:
    """What reads of one tier that run side by side came to: their bytes, over the time in which at least one ran.

    Threads that share a tier's bandwidth each see a part of it; timed one by one, the tier would look that much slower.
    A read that brought nothing, or hangs, adds no time. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._num_running = 0
        self._num_bytes = 0
        self._spans: list[tuple[float, float]] = []  # of reads since the last sample
        self._counted_until = -math.inf  # what ran before is in an earlier sample

    def begin(self) -> None:
        """A read starts; `end` must follow."""
        with self._lock:
            self._num_running += 1

    def end(self, num_bytes: int, began: float, ended: float) -> tuple[int, float] | None:
        """A read of `num_bytes` (0: it brought nothing) ran from `began` to `ended`, in seconds of one clock.

        Returns a sample (bytes, seconds) as soon as nobody reads any more, or after eight reads.
        """
        with self._lock:
            self._num_running -= 1
            if num_bytes:
                self._num_bytes += num_bytes
                self._spans.append((began, ended))
            if not self._spans or (self._num_running and len(self._spans) < _MAX_SPANS):
                return None
            seconds, at = 0.0, self._counted_until
            for start, end in sorted(self._spans):
                seconds += max(0.0, end - max(start, at))
                at = max(at, end)
            sample = self._num_bytes, seconds
            self._num_bytes, self._spans, self._counted_until = 0, [], at
            return sample


def _average(old: float | None, new: float) -> float:
    return new if old is None else old + _WEIGHT * (new - old)
