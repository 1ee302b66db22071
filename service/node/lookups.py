"""The daemon's lookups: recorded as a trace on disk, and the last hour compared with the best possible policy."""

import asyncio
import contextlib
import itertools
import json
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtier.service.observe import statuses
from kvtier.service.simulation import Optimum
from kvtier.service.web import LoopFile
from kvtier.tiers import ChainHash, KVTierError
from kvtier.tiers.pool import to_words
from kvtier.tiers.reuse import RequestEnd

_log = logging.getLogger(__name__)

_MAX_UNWRITTEN: Final = 1 << 19  # blocks of lookups not written yet
_MAX_KNOWN: Final = 1 << 18  # blocks with a number
_MAX_BYTES: Final = 4 << 30  # of one trace
_PERIOD: Final = 0.1  # seconds between writes
_PATIENCE: Final = 60.0  # seconds a lookup waits for its request's end: lines keep the order of lookups
_LAST: Final = 2  # last blocks of a prompt that may end its lookup: a lookup may omit the last


@dataclass(frozen=True, slots=True)
class TraceCounts:
    num_recorded: int
    num_dropped: int  # the writer had fallen behind, the trace was full, or the disk refused it
    num_bytes: int


@dataclass(eq=False, slots=True)
class _RecordedLookup:
    when: float
    hashes: Sequence[ChainHash]
    input_length: int
    output_length: int
    block_size: int
    ended: float | None = None
    answer: Sequence[ChainHash] = ()
    labels: dict[str, Any] = field(default_factory=dict)  # hint and tenant, if the request's end names them

    @property
    def size(self) -> int:
        return len(self.hashes) + len(self.answer) + 1


class TraceRecorder:
    """Writes lookups to a file. Any thread may call `record` and `ended`, which never wait; all else is a loop's.

    A line is written once its request has ended, after `patience` seconds, or when half of `max_waiting` waits;
    never before the lines above it.
    At most `max_waiting` blocks wait to be written. Lookups beyond are dropped and counted, as are all once the trace
    has `max_bytes` or the disk has refused it. A block keeps its number while it is among the `max_known`
    seen last; one that returns later gets a new number. So a trace may show less reuse over long
    distances than there was, never more.
    """

    def __init__(
        self,
        file: LoopFile,
        *,
        max_waiting: int = _MAX_UNWRITTEN,
        max_known: int = _MAX_KNOWN,
        max_bytes: int = _MAX_BYTES,
        patience: float = _PATIENCE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file, self._max_waiting, self._max_bytes = file, max_waiting, max_bytes
        self._patience, self._clock = patience, clock
        self._start = clock()
        self._ids = _Numbers(max_known)
        self._lock = Lock()  # guards what follows; never held across I/O
        self._waiting: deque[_RecordedLookup] = deque()
        self._open: dict[ChainHash, _RecordedLookup] = {}  # by the last block looked up: requests that have not ended
        self._num_waiting = 0  # blocks
        self._num_recorded = self._num_dropped = self._num_bytes = 0
        self._ended = False
        self._stopping = asyncio.Event()
        self._writer = asyncio.create_task(self._write_on())

    @classmethod
    async def start(cls, path: Path, *, max_bytes: int = _MAX_BYTES) -> "TraceRecorder":
        """Record into a new file that only its owner can read. ConfigError if it exists, or cannot be created."""
        return cls(await LoopFile.create(Path(path)), max_bytes=max_bytes)

    def record(
        self, hashes: Sequence[ChainHash], input_length: int, output_length: int = 0, *, block_size: int = 0
    ) -> bool:
        """Record a request: its full blocks, a list that no one changes any more, and its tokens. False: dropped."""
        with self._lock:
            room = self._max_waiting - self._num_waiting
            taken = not self._ended and len(hashes) + 1 <= room
            if taken:
                lookup = _RecordedLookup(self._clock(), hashes, input_length, output_length, block_size)
                self._waiting.append(lookup)
                self._num_waiting += lookup.size
                if hashes and not output_length:
                    self._open[hashes[-1]] = lookup
            else:
                self._num_dropped += 1
        return taken

    def ended(self, end: RequestEnd) -> None:
        """A request has ended: complete its lookup, if one waits, with the blocks of its answer."""
        with self._lock:
            for name in reversed(end.names[max(0, end.num_prompt - _LAST) : end.num_prompt]):
                if (lookup := self._open.pop(name, None)) is not None:
                    break
            else:
                return
            if len(end.names) - end.num_prompt <= self._max_waiting - self._num_waiting:
                lookup.answer = end.names[end.num_prompt :]
                self._num_waiting += len(lookup.answer)
            lookup.ended, lookup.output_length = self._clock(), end.num_output_tokens
            tenant = {"tenant": end.client}
            lookup.labels = tenant if end.hint is None else {"hint": end.hint.value} | tenant

    def counts(self) -> TraceCounts:
        with self._lock:
            return TraceCounts(self._num_recorded + len(self._waiting), self._num_dropped, self._num_bytes)

    async def stop(self) -> TraceCounts:
        self._stopping.set()
        await self._writer
        return self.counts()

    async def _write_on(self) -> None:
        try:
            stopping = False
            while not stopping:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_PERIOD):
                        stopping = await self._stopping.wait()
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
        lookups = self._ripe()
        if not lookups:
            return
        try:
            lines = await asyncio.to_thread(lambda: [self._line(lookup) for lookup in lookups])
            room = self._max_bytes - self._num_bytes
            fitting = sum(size <= room for size in itertools.accumulate(map(len, lines)))
            await self._file.write(lines[:fitting])
        except BaseException:
            self._settle(lookups, 0, 0)
            raise
        self._settle(lookups, fitting, sum(map(len, lines[:fitting])))
        if fitting < len(lines):
            raise KVTierError(f"{self._file.path}: the trace has {self._num_bytes} bytes, all it may have")

    def _ripe(self) -> list[_RecordedLookup]:
        """The leading lookups that wait for nothing any more."""
        lookups: list[_RecordedLookup] = []
        with self._lock:
            now, size = self._clock(), self._num_waiting
            while self._waiting:
                first = self._waiting[0]
                is_open = bool(first.hashes) and self._open.get(first.hashes[-1]) is first
                is_patient = now - first.when < self._patience and size <= self._max_waiting // 2
                if is_open and is_patient and not self._stopping.is_set():
                    break
                if is_open:
                    del self._open[first.hashes[-1]]
                size -= first.size
                lookups.append(self._waiting.popleft())
        return lookups

    def _line(self, lookup: _RecordedLookup) -> bytes:
        fields: dict[str, Any] = {
            "timestamp": int(1000 * (lookup.when - self._start)),
            "input_length": lookup.input_length,
            "output_length": lookup.output_length,
            "hash_ids": self._ids.of(lookup.hashes),
        }
        if lookup.block_size:
            fields["block_size"] = lookup.block_size
        if lookup.ended is not None:
            fields["answer_ids"] = self._ids.of(lookup.answer)
            fields["ended"] = int(1000 * (lookup.ended - self._start))
        return json.dumps(fields | lookup.labels).encode() + b"\n"

    def _settle(self, lookups: Sequence[_RecordedLookup], num_written: int, num_bytes: int) -> None:
        with self._lock:
            self._num_waiting -= sum(lookup.size for lookup in lookups)
            self._num_recorded += num_written
            self._num_dropped += len(lookups) - num_written
            self._num_bytes += num_bytes

    def _end(self) -> None:
        with self._lock:
            self._ended = True
            self._num_dropped += len(self._waiting)
            self._waiting.clear()
            self._open.clear()
            self._num_waiting = 0


class _Numbers:
    """Small integers for names, in order of first sight. The `most` names seen last keep theirs."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: OrderedDict[ChainHash, int] = OrderedDict()
        self._fresh = itertools.count()

    def of(self, names: Sequence[ChainHash]) -> list[int]:
        numbers = []
        for name in names:
            number = self._known.pop(name, None)
            self._known[name] = number = next(self._fresh) if number is None else number
            numbers.append(number)
            if len(self._known) > self._most:
                self._known.popitem(last=False)
        return numbers


_KEPT: Final = 3600.0  # seconds
_MOST_REQUESTS: Final = 1 << 16
_MOST_WAITING: Final = 1 << 16  # blocks recorded and not converted yet
_NUM_STEPS: Final = 60  # points of the curve
_PAUSE: Final = 30.0  # seconds between two looks, at least
_RARELY: Final = 50.0  # pause after a look, in multiples of its duration
_MIX: Final = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x27D4EB2F165667C5], np.uint64)


class _PastRequest(NamedTuple):
    at: float
    blocks: NDArray[np.int64]  # a number for each, made of its name: no number leads back
    num_asked: int  # 0: a store
    num_found: int
    num_l1: int  # of these, the engine had


class PastLookups:
    """Every lookup and store of the last hour, bounded; recorded on the loop's thread, converted on another."""

    def __init__(self, most_blocks: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_dropped = 0  # lookups and stores
        self._most_blocks, self._clock = most_blocks, clock
        self._recorded: deque[tuple[float, Sequence[ChainHash], int, int, int]] = deque()
        self._num_recorded = self._num_converted = 0  # blocks: each is counted by one thread alone
        self._past: deque[_PastRequest] = deque()
        self._num_blocks = 0

    def record(self, hashes: Sequence[ChainHash], num_asked: int = 0, num_found: int = 0, num_l1: int = 0) -> None:
        """A request looked up these blocks (`num_asked`: all), or stored them (0). On the loop's thread."""
        if self._num_recorded - self._num_converted > _MOST_WAITING:
            self.num_dropped += 1
            return
        self._num_recorded += len(hashes)
        self._recorded.append((self._clock(), hashes, num_asked, num_found, num_l1))

    def convert(self) -> None:
        """Convert recorded names to numbers, and drop what is too old or too much. On one thread, not the loop's."""
        while self._recorded:
            at, hashes, *numbers = self._recorded.popleft()
            blocks = (to_words(hashes) @ _MIX).view(np.int64)
            self._num_converted += len(hashes)
            self._past.append(_PastRequest(at, blocks, *numbers))
            self._num_blocks += len(blocks)
        oldest = self._clock() - _KEPT
        while self._past and (
            self._past[0].at < oldest or self._num_blocks > self._most_blocks or len(self._past) > _MOST_REQUESTS
        ):
            self._num_blocks -= len(self._past.popleft().blocks)

    def look(self, capacity: int) -> statuses.OptimumFigures | None:
        """Blocks found, and those the best policy could have found; None: no lookups. On the thread of `convert`."""
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
        asked, found, best_found = map(sum, sums)
        ages = [round(now - first - width * (place + 0.5), 1) for place in range(_NUM_STEPS)]
        return statuses.OptimumFigures(
            capacity=capacity,
            seconds=round(now - first, 1),
            asked=asked,
            found=found,
            optimum=best_found,
            steps=list(zip(ages, *sums, strict=True)),
        )


class WatchedModel(NamedTuple):
    fingerprint: bytes
    past: PastLookups
    capacity: Callable[[], int]  # blocks that the tiers hold


class OptimumWatch:
    """What the best policy would have found: `look` computes it, one call at a time. Any thread may call `of`."""

    def __init__(self, models: Callable[[], Iterable[WatchedModel]]) -> None:
        """`models` raises KVTierError if it cannot say."""
        self._models = models
        self._found: dict[bytes, statuses.OptimumFigures] = {}
        self._due: dict[bytes, float] = {}

    def of(self, fingerprint: bytes) -> statuses.OptimumFigures | None:
        return self._found.get(fingerprint)

    def look(self) -> None:
        """Convert what was recorded, and compute what is due: call it every second."""
        models = list(self._models())
        for fingerprint, past, capacity in models:
            past.convert()
            if time.monotonic() < self._due.get(fingerprint, 0.0):
                continue
            began = time.monotonic()
            if (found := past.look(capacity())) is not None:
                self._found[fingerprint] = found
                took = time.monotonic() - began
                self._due[fingerprint] = time.monotonic() + max(_PAUSE, _RARELY * took)
        for closed in self._found.keys() - {model.fingerprint for model in models}:
            del self._found[closed], self._due[closed]
