"""GilWatch: whether another thread wants the GIL, told by how long calls that gave it up wait to get it back."""

import resource
import time
from collections.abc import Callable
from typing import Final

_CHUNK: Final = 1 << 20  # bytes between two looks
_PACE: Final = 2e9  # bytes a second: what is slower than this may have waited
_LOOK_AGAIN: Final = 0.5  # seconds: beside a busy Python thread a try costs some 5 ms, its turn of the GIL


def num_sleeps() -> int:
    """How often the calling thread gave its core up of its own accord, as who waits for a lock does."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


class GilWatch:
    """One for each copier; any thread may use it.

    A copy never sleeps. So if one took long and its thread has slept, it waited for the GIL. If the thread has not,
    memory is slow or others had the core, and that holds up any way to copy.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, sleeps: Callable[[], int] = num_sleeps) -> None:
        """`clock` in seconds; `sleeps` is of the calling thread."""
        self._clock, self._sleeps = clock, sleeps
        self._wanted_until = 0.0

    def copy_each(self, copy: Callable[[int], None], num_pieces: int, piece_bytes: int) -> int:
        """Call `copy` with 0, 1, … while nobody else wants the GIL. Returns how many pieces were copied so."""
        clock = self._clock
        began = clock()
        if began < self._wanted_until:
            return 0
        slept = self._sleeps()
        most, step, at = max(1, _CHUNK // piece_bytes), 1, 0  # the first look after one piece: each may wait 5 ms
        while at < num_pieces:
            step = min(step, num_pieces - at)
            for i in range(at, at + step):
                copy(i)
            at, now = at + step, clock()
            if now - began > step * piece_bytes / _PACE and self._sleeps() > slept:
                self._wanted_until = now + _LOOK_AGAIN
                break
            began, step = now, min(2 * step, most)
        return at
