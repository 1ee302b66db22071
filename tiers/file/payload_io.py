"""Moves payloads between slab slots and scattered host slots in large calls: direct, buffered or mapped."""

import errno
import logging
import math
import mmap
import os
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Final, Literal, NamedTuple

import numpy as np

from kvtier.tiers import BlockRecord, ChainHash
from kvtier.tiers.file.file_io import (
    CALL_BYTES,
    PAGE,
    FileIO,
    Mapping,
    ReadQueue,
    Scratch,
    SlabLayout,
    read_all,
    writable_address,
    write_all,
)
from kvtier.tiers.file.slab import round_up

_log = logging.getLogger(__name__)

Mode = Literal["auto", "direct", "buffered", "mmap"]

_DEPTH: Final = 16  # scattered reads that one call keeps in flight: more only adds to their latency
_ASK_AGAIN: Final = 10.0  # seconds until the kernel is asked again for a queue that it refused
_PROBE_BYTES: Final = 1 << 20
_PROBE_SECONDS: Final = 0.1  # after this no further probe step is begun
_WORTH: Final = 0.7  # O_DIRECT stays the choice unless buffered I/O is clearly faster


class RunRead(NamedTuple):
    """What came of a run of neighbouring slots."""

    run: slice  # of the slots asked for
    readable: Sequence[bool]  # each slot's


class PayloadIO:
    """Payload transfers of one slab file. Thread-safe; each thread has its own scratch memory.

    Slots in the file are `slot_bytes` padded to 4 KiB, host slots are memoryviews of `slot_bytes` anywhere. In direct
    mode an aligned host slot is read and written in place, but for a last partial page; batches with any other one go
    through scratch memory.
    """

    def __init__(
        self, io: FileIO, path: Path, table_fd: int, *, slot_bytes: int, mode: Mode, read_only: bool = False
    ) -> None:
        """Raises OSError if the file cannot be opened; direct falls back to buffered if O_DIRECT is refused."""
        self.path = path
        self.mode = mode
        self.slot_bytes = slot_bytes
        self.stride = round_up(slot_bytes, PAGE)
        self._io = io
        self._fd = table_fd
        self._own_fd: int | None = None
        self._mapping: Mapping | None = None
        self._scratch = Scratch()
        if mode == "direct":
            try:
                self._fd = self._own_fd = io.open(path, (os.O_RDONLY if read_only else os.O_RDWR) | os.O_DIRECT)
            except OSError:
                self.mode = "buffered"
        elif mode == "mmap":
            self._mapping = Mapping(table_fd, io.size(table_fd))
        self._align = PAGE if self.mode == "direct" else 1
        self._queues: list[ReadQueue] = []  # that no call uses now
        self._may_queue = self.mode == "direct" and self.slot_bytes == self.stride
        self._refused_until = -math.inf  # on the monotonic clock: the kernel gave us no queue
        self.num_refused = 0  # how often

    def runs(self, offsets: Sequence[int]) -> list[slice]:
        """Cuts slots, by their ascending offsets, into stretches that lie next to each other: one call for each."""
        longest = max(1, CALL_BYTES // self.stride)
        first, runs = 0, []
        for index in range(1, len(offsets) + 1):
            is_next = index < len(offsets) and offsets[index] == offsets[index - 1] + self.stride
            if not is_next or index - first == longest:
                runs.append(slice(first, index))
                first = index
        return runs

    def read(self, offset: int, into: Sequence[memoryview]) -> None:
        """Read adjacent slots from `offset` on, one per buffer; OSError leaves the buffers in any state."""
        self._transfer(self._read, offset, into)

    def read_each(self, offset: int, into: Sequence[memoryview]) -> list[bool]:
        """As `read`, but says which slots could be read: one bad sector costs one block, found by halving."""
        try:
            self.read(offset, into)
        except OSError as error:
            _log.debug("[file] %s: %s while reading", self.path, error)
            if len(into) == 1 or error.errno != errno.EIO:
                return [False] * len(into)
            half = len(into) // 2
            return self.read_each(offset, into[:half]) + self.read_each(offset + half * self.stride, into[half:])
        return [True] * len(into)

    def read_blocks(
        self, table_fd: int, layout: SlabLayout, slots: list[int], names: list[ChainHash], into: list[memoryview]
    ) -> list[BlockRecord | None] | None:
        """`ReadQueue.read_blocks`; None, and nothing done, where there is no queue, or no twin."""
        queue = self._take_queue() if self._io.compiled is not None else None
        if queue is None:
            return None
        try:
            return queue.read_blocks((self._fd, table_fd), layout, slots, names, into)
        finally:
            self._give_back(queue)

    def read_runs(
        self, offsets: Sequence[int], into: Sequence[memoryview], meanwhile: Callable[[], None]
    ) -> Generator[RunRead, None, None]:
        """Read slots by their ascending offsets; yields runs of neighbours as they come.

        Direct reads of whole pages are in flight together. What the queue does not bring whole is read by `read_each`.
        `meanwhile` is called once, before anything is yielded, with reads in flight if there is a queue.
        """
        runs = self.runs(offsets)
        queue = self._take_queue() if len(runs) > 1 else None
        if queue is None:
            meanwhile()
            for run in runs:
                yield RunRead(run, self.read_each(offsets[run.start], into[run]))
            return
        with ExitStack() as ends:
            ends.callback(self._give_back, queue)
            starts = [offsets[run.start] for run in runs]
            counts = [run.stop - run.start for run in runs]
            iovecs = np.full((len(into), 2), self.stride, np.uint64)
            iovecs[:, 0] = [writable_address(buffer) for buffer in into]
            # Whoever stops early waits for what is in flight before another call gets the queue.
            came = ends.enter_context(closing(queue.read(self._fd, starts, iovecs, counts, meanwhile)))
            for number, moved in came:
                run = runs[number]
                if moved == counts[number] * self.stride:
                    yield RunRead(run, [True] * counts[number])
                else:
                    yield RunRead(run, self.read_each(offsets[run.start], into[run]))

    def _give_back(self, queue: ReadQueue) -> None:
        """The next call may have it, unless it failed."""
        if queue.is_open:
            self._queues.append(queue)

    def _take_queue(self) -> ReadQueue | None:
        """A queue for one call; None where there is none to be had now."""
        if not self._may_queue:
            return None
        with suppress(IndexError):
            return self._queues.pop()
        if time.monotonic() < self._refused_until:
            return None
        try:
            queue = self._io.queue(_DEPTH)
        except OSError as error:
            if not self.num_refused:
                _log.warning("[file] %s: no queue of reads (%s): one by one for now", self.path, error)
            self.num_refused += 1
            self._refused_until = time.monotonic() + _ASK_AGAIN
            return None
        self._may_queue = queue is not None
        return queue

    def write(self, offset: int, payloads: Sequence[memoryview]) -> None:
        """Write adjacent slots from `offset` on; OSError leaves those slots in any state."""
        self._transfer(self._write, offset, payloads)

    def _transfer(
        self, move: Callable[[int, Sequence[memoryview], bool], None], offset: int, buffers: Sequence[memoryview]
    ) -> None:
        try:
            move(offset, buffers, False)
        except OSError as error:
            # The kernel knows what alignment the device needs; asking it costs nothing if all is well.
            if error.errno != errno.EINVAL or self.mode != "direct":
                raise
            move(offset, buffers, True)

    def _read(self, offset: int, into: Sequence[memoryview], bounce: bool) -> None:
        iovecs, late = self._iovecs(into, bounce)
        read_all(self._mapping or self._io, self._fd, iovecs, offset, self._align)
        for scratch, place in late:
            place[:] = scratch[: place.nbytes]

    def _write(self, offset: int, payloads: Sequence[memoryview], bounce: bool) -> None:
        iovecs, early = self._iovecs(payloads, bounce)
        for scratch, place in early:
            scratch[: place.nbytes] = place
        write_all(self._io, self._fd, iovecs, offset, self._align)

    def close(self) -> None:
        for queue in self._queues:
            queue.close()
        self._queues.clear()
        if self._mapping is not None:
            self._mapping.close()
        if self._own_fd is not None:
            self._io.close(self._own_fd)
            self._own_fd = None

    def _iovecs(
        self, buffers: Sequence[memoryview], bounce: bool
    ) -> tuple[list[memoryview], list[tuple[memoryview, memoryview]]]:
        """The iovecs of adjacent slots, and the (scratch, place) pairs whose bytes must be copied."""
        whole = 0 if bounce else self.slot_bytes // self._align * self._align
        if whole == self.stride:
            return list(buffers), []
        scratch = self._scratch.of(len(buffers) * self.stride)
        iovecs: list[memoryview] = []
        copies: list[tuple[memoryview, memoryview]] = []
        for index, buffer in enumerate(buffers):
            spare = scratch[index * self.stride : (index + 1) * self.stride]
            if whole:
                iovecs.append(buffer[:whole])
            iovecs.append(spare[whole:])
            if whole < self.slot_bytes:
                copies.append((spare[whole:], buffer[whole:]))
        return iovecs, copies


def probe_mode(io: FileIO, directory: Path) -> Mode:
    """`direct`, or `buffered` if O_DIRECT is refused or measures clearly slower; some 0.1 s, leaves nothing behind.

    Buffered writes are measured with their fdatasync, buffered reads with the page cache dropped: what the disk does.
    """
    path = directory / f".kvtier-probe-{os.getpid()}"
    try:
        fd = io.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    except OSError:
        return "direct"
    direct_fd = None
    try:
        direct_fd = io.open(path, os.O_RDWR | os.O_DIRECT)
        path.unlink()  # before any byte is written: a kill leaves nothing
        return _faster(io, fd, direct_fd)
    except OSError:
        return "buffered" if direct_fd is None else "direct"
    finally:
        path.unlink(missing_ok=True)
        for opened in (fd, direct_fd):
            if opened is not None:
                io.close(opened)


def _faster(io: FileIO, fd: int, direct_fd: int) -> Mode:
    buffer = [memoryview(mmap.mmap(-1, _PROBE_BYTES))]
    took = {fd: 0.0, direct_fd: 0.0}
    begin = time.perf_counter()
    io.allocate(fd, 0, _PROBE_BYTES)
    write_all(io, direct_fd, buffer, 0, PAGE)  # not timed: the first write also converts the allocation
    for round_fd in (direct_fd, fd, direct_fd, fd):
        start = time.perf_counter()
        if start - begin > _PROBE_SECONDS:
            return "direct"
        write_all(io, round_fd, buffer, 0, PAGE)
        io.sync(round_fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        read_all(io, round_fd, buffer, 0, PAGE)
        took[round_fd] += time.perf_counter() - start
    return "buffered" if took[fd] < _WORTH * took[direct_fd] else "direct"
