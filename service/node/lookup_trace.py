"""Records lookups as a trace in Mooncake's JSON lines while the daemon serves."""

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Final

from kvtier.service.web import LoopFile
from kvtier.tiers import ChainHash, KVTierError

_log = logging.getLogger(__name__)

_MAX_WAITING: Final = 1 << 19  # blocks of lookups not written yet
_MAX_KNOWN: Final = 1 << 18  # blocks whose number is remembered
_MAX_BYTES: Final = 4 << 30  # of one trace
_PERIOD: Final = 0.1  # seconds between writes


@dataclass(frozen=True, slots=True)
class TraceCounts:
    """What became of the lookups told to a recorder so far."""

    num_recorded: int
    num_dropped: int  # the writer had fallen behind, the trace was full, or the disk refused it
    num_bytes: int


class TraceRecorder:
    """Writes lookups to a file. `record` may be called on any thread and never waits; all else belongs to one loop.

    At most `max_waiting` blocks wait to be written; lookups beyond are dropped and counted, as are all once the trace
    has `max_bytes` or the disk has refused it. A block's number is remembered while it is among the `max_known` / 2
    seen last, at least: one that comes back later gets a new number, so that a trace may show less reuse over long
    distances than there was, never more.
    """

    def __init__(
        self,
        file: LoopFile,
        *,
        max_waiting: int = _MAX_WAITING,
        max_known: int = _MAX_KNOWN,
        max_bytes: int = _MAX_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Use `start`."""
        self._file = file
        self._max_waiting = max_waiting
        self._max_bytes = max_bytes
        self._clock = clock
        self._start = clock()
        self._ids = _Numbers(max_known)
        self._lock = Lock()  # guards what follows; never held across I/O
        self._waiting: deque[tuple[float, Sequence[ChainHash], int, int]] = deque()
        self._num_waiting = 0  # blocks
        self._num_recorded = self._num_dropped = self._num_bytes = 0
        self._ended = False
        self._stopping = asyncio.Event()
        self._writer = asyncio.create_task(self._write_on())

    @classmethod
    async def start(cls, path: Path, *, max_bytes: int = _MAX_BYTES) -> "TraceRecorder":
        """Record into a new file, which only its owner can read. ConfigError if it cannot be made, or is there."""
        return cls(await LoopFile.create(Path(path)), max_bytes=max_bytes)

    def record(self, hashes: Sequence[ChainHash], input_length: int, output_length: int = 0) -> bool:
        """Note a request: its full blocks, a list nobody changes any more, and its tokens. False: it was dropped."""
        with self._lock:
            room = self._max_waiting - self._num_waiting
            taken = not self._ended and len(hashes) + 1 <= room
            if taken:
                self._waiting.append((self._clock(), hashes, input_length, output_length))
                self._num_waiting += len(hashes) + 1
            else:
                self._num_dropped += 1
        return taken

    def counts(self) -> TraceCounts:
        with self._lock:
            return TraceCounts(self._num_recorded, self._num_dropped, self._num_bytes)

    async def stop(self) -> TraceCounts:
        """Write what waits, and close the file. Idempotent."""
        self._stopping.set()
        await self._writer
        return self.counts()

    async def _write_on(self) -> None:
        try:
            stopping = False
            while not stopping:
                stopping = await _is_set_within(self._stopping, _PERIOD)
                await self._write_waiting()
        except KVTierError as error:
            _log.warning("trace: recording ends: %s", error)
        finally:
            self._end()
            try:
                await self._file.close()
            except KVTierError as error:
                _log.warning("trace: %s", error)

    async def _write_waiting(self) -> None:
        with self._lock:
            lookups = [self._waiting.popleft() for _ in range(len(self._waiting))]
        if not lookups:
            return
        try:
            lines = await asyncio.to_thread(self._lines, lookups)
            fitting = self._fitting(lines)
            await self._file.write(lines[:fitting])
        except BaseException:
            self._settle(lookups, 0, 0)
            raise
        self._settle(lookups, fitting, sum(map(len, lines[:fitting])))
        if fitting < len(lines):
            raise KVTierError(f"{self._file.path}: the trace has {self._num_bytes} bytes, all it may have")

    def _lines(self, lookups: Sequence[tuple[float, Sequence[ChainHash], int, int]]) -> list[bytes]:
        lines = []
        for when, hashes, input_length, output_length in lookups:
            line = {
                "timestamp": int(1000 * (when - self._start)),
                "input_length": input_length,
                "output_length": output_length,
                "hash_ids": self._ids.of(hashes),
            }
            lines.append(json.dumps(line).encode() + b"\n")
        return lines

    def _fitting(self, lines: Sequence[bytes]) -> int:
        room = self._max_bytes - self._num_bytes
        for count, line in enumerate(lines):
            room -= len(line)
            if room < 0:
                return count
        return len(lines)

    def _settle(
        self, lookups: Sequence[tuple[float, Sequence[ChainHash], int, int]], num_written: int, num_bytes: int
    ) -> None:
        with self._lock:
            self._num_waiting -= sum(len(hashes) + 1 for _, hashes, _, _ in lookups)
            self._num_recorded += num_written
            self._num_dropped += len(lookups) - num_written
            self._num_bytes += num_bytes

    def _end(self) -> None:
        """Nothing is taken any more; what waits is dropped."""
        with self._lock:
            self._ended = True
            self._num_dropped += len(self._waiting)
            self._waiting.clear()
            self._num_waiting = 0


class _Numbers:
    """Small integers for names, in the order of their first sight. Two generations of at most half of `most` names."""

    def __init__(self, most: int) -> None:
        self._half = max(1, most // 2)
        self._young: dict[ChainHash, int] = {}
        self._old: dict[ChainHash, int] = {}
        self._next = 0

    def of(self, names: Sequence[ChainHash]) -> list[int]:
        return [known if (known := self._young.get(name)) is not None else self._admit(name) for name in names]

    def _admit(self, name: ChainHash) -> int:
        """To the young ones, under its old number or the next."""
        number = self._old.get(name)
        if number is None:
            number, self._next = self._next, self._next + 1
        if len(self._young) >= self._half:
            self._old, self._young = self._young, {}
        self._young[name] = number
        return number


async def _is_set_within(event: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False
