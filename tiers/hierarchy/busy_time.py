"""How long a tier was read from, however many reads ran side by side: what its rate is measured by."""

import math
from threading import Lock
from typing import Final

_MAX_SPANS: Final = 8  # reads in one sample, where reads follow each other without a pause


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
