"""Load, recompute or both: measured rates of every tier and of the engine decide which is fastest."""

import math
from collections.abc import Mapping
from threading import Lock
from typing import Final, Literal, NamedTuple

_WEIGHT: Final = 0.2  # of the newest sample in the moving average
_RETRY: Final = 32  # every so many refusals one load goes through, so that a stale rate can recover
_GAIN: Final = 0.85  # of the best single way: both ends have to be faster than that …
_SAVED: Final = 0.005  # … and to save so many seconds, or their steps and claims are not worth it
MIN_FRONT: Final = 32  # tokens: what is worth a step of its own
_MIN_SPREAD: Final = 256.0  # tokens between the positions of samples, before attention's growth is read off them

LoadPolicy = Literal["auto", "load", "recompute"]


class Span(NamedTuple):
    """Consecutive held tokens of a prompt that could be loaded, and where their bytes are."""

    start: int  # tokens before them
    num_tokens: int
    bytes_by_tier: Mapping[str, int]


class Meeting(NamedTuple):
    """Where computing from the front and loading from the back meet."""

    block: int  # of the chain: the first that is loaded
    seconds: float  # until then, as measured rates foretell


class Rates:
    """Moving averages: bytes per second by tier, tokens per second of prefill. Thread-safe."""

    def __init__(self, policy: LoadPolicy) -> None:
        self.policy = policy
        self._lock = Lock()
        self._bytes_per_second: dict[str, float] = {}
        self._tokens_per_second: float | None = None
        self._growth = _Growth()
        self._refused = 0

    def loaded(self, tier: str, num_bytes: int, seconds: float) -> None:
        """A tier delivered `num_bytes` in `seconds`, however many reads that were (`BusyTime` adds them up).

        A read that delivered nothing says nothing about the rate.
        """
        if seconds > 0 and num_bytes > 0:
            with self._lock:
                self._bytes_per_second[tier] = _average(self._bytes_per_second.get(tier), num_bytes / seconds)

    def computed(self, num_tokens: int, seconds: float, position: float = 0.0) -> None:
        """A step prefilled `num_tokens` in `seconds`; `position` is how many tokens they followed, on average."""
        if seconds > 0 and num_tokens > 0:
            with self._lock:
                self._tokens_per_second = _average(self._tokens_per_second, num_tokens / seconds)
                self._growth.add(position, seconds / num_tokens)

    @property
    def tokens_per_second(self) -> float | None:
        """Of prefill, as engines measured it; None until one has."""
        return self._tokens_per_second

    def prefill_seconds(self, start: int, num_tokens: int) -> float | None:
        """What it would take to prefill so many tokens behind the first `start`; None until an engine measured it."""
        with self._lock:
            return None if self._tokens_per_second is None else self._compute(start, num_tokens)

    def worth_loading(self, num_tokens: int, bytes_by_tier: Mapping[str, int]) -> bool:
        """Whether loading these bytes beats computing these tokens. Unknown rates: load, and learn."""
        if not self.is_quicker_computed(num_tokens, bytes_by_tier):
            return True
        if self.policy != "auto":
            return False
        with self._lock:
            self._refused += 1
            return self._refused % _RETRY == 0

    def is_quicker_computed(self, num_tokens: int, bytes_by_tier: Mapping[str, int]) -> bool:
        """Whether computing these tokens is known, or set, to beat loading these bytes. Learns nothing."""
        if self.policy != "auto":
            return self.policy == "recompute"
        with self._lock:
            rate = self._tokens_per_second
            return rate is not None and self._load(bytes_by_tier) > num_tokens / rate

    def spared(self, num_tokens: int, bytes_by_tier: Mapping[str, int]) -> float:
        """Seconds by which loading these bytes beats computing these tokens; inf where that is not known or weighed."""
        with self._lock:
            if self.policy != "auto" or self._tokens_per_second is None:
                return math.inf
            return max(0.0, num_tokens / self._tokens_per_second - self._load(bytes_by_tier))

    def meeting(self, span: Span, block_size: int) -> Meeting | None:
        """Where to meet, if computing a front and loading the rest at once beats either way alone; else None.

        As long as one of the rates is unknown, it is None: one way is tried, and teaches it.
        """
        with self._lock:
            needed = [tier for tier, num_bytes in span.bytes_by_tier.items() if num_bytes]
            if self.policy != "auto" or self._tokens_per_second is None or not needed:
                return None
            if any(tier not in self._bytes_per_second for tier in needed):
                return None
            load = sum(span.bytes_by_tier[tier] / self._bytes_per_second[tier] for tier in needed)
            num_blocks = span.num_tokens // block_size
            first, end = 0, num_blocks  # the front: the most blocks that are computed before the others are loaded
            while first < end:
                middle = (first + end + 1) // 2
                if self._compute(span.start, middle * block_size) <= load * (1 - middle / num_blocks):
                    first = middle
                else:
                    end = middle - 1
            best_alone = min(load, self._compute(span.start, span.num_tokens))
            seconds = load * (1 - first / num_blocks)
            if first * block_size < MIN_FRONT or seconds > min(_GAIN * best_alone, best_alone - _SAVED):
                return None
            return Meeting(span.start // block_size + first, seconds)

    def _load(self, bytes_by_tier: Mapping[str, int]) -> float:
        """Seconds to load so many bytes of each tier; those of unknown rate take none. The caller holds the lock."""
        return sum(n / self._bytes_per_second[t] for t, n in bytes_by_tier.items() if t in self._bytes_per_second)

    def _compute(self, start: int, num_tokens: int) -> float:
        """Seconds to prefill so many tokens behind the first `start`. The caller holds the lock and knows a rate."""
        assert self._tokens_per_second is not None
        per_token = 1 / self._tokens_per_second
        more = self._growth.slope * (start + num_tokens / 2 - self._growth.position)
        return num_tokens * max(per_token + more, per_token / 8)


class _Growth:
    """How much dearer a token is for each token before it: a line through moving averages of what steps took."""

    def __init__(self) -> None:
        self.position = 0.0  # the samples' average
        self._seconds = 0.0
        self._variance = 0.0  # of the positions
        self._covariance = 0.0
        self._is_first = True

    def add(self, position: float, seconds: float) -> None:
        """One step: tokens at that position took so long each."""
        weight, self._is_first = (1.0 if self._is_first else _WEIGHT), False
        further, longer = position - self.position, seconds - self._seconds
        self.position += weight * further
        self._seconds += weight * longer
        self._variance = (1 - weight) * (self._variance + weight * further * further)
        self._covariance = (1 - weight) * (self._covariance + weight * further * longer)

    @property
    def slope(self) -> float:
        """Seconds a token more for each token before it; 0 while all samples were at about one place."""
        return max(0.0, self._covariance / self._variance) if self._variance > _MIN_SPREAD**2 else 0.0


def _average(old: float | None, new: float) -> float:
    return new if old is None else old + _WEIGHT * (new - old)
