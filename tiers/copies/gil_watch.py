"""GilWatch: whether another thread wants the GIL, told by how long calls that gave it up wait to get it back."""

import resource
import time
from collections.abc import Callable
from typing import Final

_CHUNK: Final = 1 << 20  # bytes between two looks: these take a hundredth of its time
_WAITED: Final = 0.25  # of a chunk's time; to give the GIL up once for all of it costs a tenth
_LOOK_AGAIN: Final = 0.1  # seconds: beside a busy Python thread a try costs some 5 ms, its turn of the GIL


def num_sleeps() -> int:
    """How often the calling thread gave its core up of its own accord, as who waits for a lock does."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


class GilWatch:
    """One for each copier; any thread may use it.

    A copy needs its core all the time. Where the clock ran on and the thread's CPU time did not, it either waited for
    the GIL, which is a sleep, or others had the core, which is none and would hold up any way to copy.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        cpu_time: Callable[[], float] = time.thread_time,
        sleeps: Callable[[], int] = num_sleeps,
    ) -> None:
        """The two last are of the calling thread; times are in seconds."""
        self._clock, self._cpu_time, self._sleeps = clock, cpu_time, sleeps
        self._wanted_until = 0.0

    def copy_each(self, copy: Callable[[int], None], num_pieces: int, piece_bytes: int) -> int:
        """Call `copy` with 0, 1, … while nobody else wants the GIL. Returns how many pieces were copied so."""
        clock, cpu_time = self._clock, self._cpu_time
        began = clock()
        if began < self._wanted_until:
            return 0
        busy, slept = cpu_time(), self._sleeps()
        most, step, at = max(1, _CHUNK // piece_bytes), 1, 0  # the first look after one piece: each may wait 5 ms
        while at < num_pieces:
            end = min(at + step, num_pieces)
            for i in range(at, end):
                copy(i)
            at, step = end, min(2 * step, most)
            now, worked = clock(), cpu_time()
            if (now - began) - (worked - busy) > _WAITED * (now - began):
                if (sleeps := self._sleeps()) > slept:
                    self._wanted_until = now + _LOOK_AGAIN
                    break
                slept = sleeps
            began, busy = now, worked
        return at
