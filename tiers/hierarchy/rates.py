"""Load or recompute: measured rates of every tier and of the engine decide which of the two is faster."""

from collections.abc import Mapping
from threading import Lock
from typing import Final, Literal

_WEIGHT: Final = 0.2  # of the newest sample in the moving average
_RETRY: Final = 32  # every so many refusals one load goes through, so that a stale rate can recover

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


def _average(old: float | None, new: float) -> float:
    return new if old is None else old + _WEIGHT * (new - old)
