"""The slab's system calls: whole transfers or OSError, many reads in flight, one sync for many writers.

Tests replace `FileIO` to inject faults. `ReadQueue` is Linux's own asynchronous I/O (`man io_submit`). One call gives
sixteen reads to the kernel, so a disk has that depth without a thread for each. A thread costs 30 us of CPU a block,
a place in the queue 2. Only direct I/O gains by it: `io_submit` does buffered reads one after the other. The extension
module does it all without the interpreter's lock; where it was not built, blocks are read one after the other.
"""

import errno
import fcntl
import logging
import math
import mmap
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property, partial, partialmethod
from pathlib import Path
from types import ModuleType
from typing import Final, Literal, NamedTuple

import numpy as np

from kvtier.tiers import BlockRecord, ChainHash, forget_descriptor, hide_from_children
from kvtier.tiers.compiled import extension
from kvtier.tiers.host import memory

_log = logging.getLogger(__name__)


def compiled_reads() -> ModuleType | None:
    """The extension module that reads. None: it was not built, and reads run in Python."""
    return extension("kvtier.tiers.file.read_queue_compiled")


class SlabLayout(NamedTuple):
    """What the extension module needs of a slab."""

    places: tuple[
        object, ...
    ]  # offsets of extents' rows and payloads; slots of an extent; bytes of a row, a payload; longest read
    rule: tuple[int, ...]  # of a whole row: READY, most tokens, from which seq to before which, the checksum's seed


def round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


class ReadQueue:
    """Reads of one thread at a time, up to `depth` in flight, by the extension module. The caller repeats failed ones.

    Slots ascend; buffers are as large as a payload, whole pages. `fds`: of payloads and table.
    """

    def __init__(self, depth: int, compiled: ModuleType) -> None:
        """OSError if the kernel gives no queue: a sandbox, or too many queues."""
        self._depth = depth
        self._compiled = compiled
        self._queue: int = compiled.open_queue(depth)
        self.is_open = True  # until it is closed, by its owner or by a failure

    def read_blocks(
        self, fds: tuple[int, int], layout: SlabLayout, slots: list[int], names: list[ChainHash], into: list[memoryview]
    ) -> list[BlockRecord | None]:
        """Read and verify blocks of a slab in the clear.

        Returns records, or None for a row or payload that is not whole: the Python path finds the reason.
        """
        reads = self._compiled.BlockReads(self._queue, self._depth, *fds, slots, into, *layout.places)
        found: list[BlockRecord | None] = reads.run(names, BlockRecord, *layout.rule)
        self.is_open = not reads.is_lost
        return found

    def read_payloads(
        self, fds: tuple[int, int], layout: SlabLayout, slots: list[int], into: Sequence[memoryview]
    ) -> list[bool]:
        """Which payloads came whole."""
        reads = self._compiled.BlockReads(self._queue, self._depth, *fds, slots, list(into), *layout.places)
        came: list[bool] = reads.fill()
        self.is_open = not reads.is_lost
        return came

    def close(self) -> None:
        """Give the queue back. Idempotent."""
        if self.is_open:
            self.is_open = False
            self._compiled.close_queue(self._queue)


PAGE: Final = 4096  # alignment of addresses, lengths and offsets that every O_DIRECT file system accepts
CALL_BYTES: Final = 8 << 20  # largest coalesced transfer
IOV_MAX: Final = 1024  # iovecs one call may carry (Linux)
_MOST_AHEAD: Final = 256  # read-aheads that wait to be sent
_IN_MEMORY: Final = ("tmpfs", "ramfs", "hugetlbfs")
_MAX_STALLS: Final = 16  # calls in a row without progress that count as a failure

ReadEach = Callable[[int, Sequence[memoryview], Sequence[int]], list[bool]]
"""Reads of a descriptor, each into its buffer from its offset on; returns which came whole."""


class FileIO:
    """The system calls a slab needs, one method each, each of which may raise OSError.

    `preadv` and `pwritev` are raw: they may move fewer bytes than requested or raise InterruptedError. `read_all` and
    `write_all` below turn them into whole transfers. Subclass and override to fail, delay, reorder or drop.
    """

    def open(self, path: Path, flags: int) -> int:
        """A descriptor (close-on-exec, of no use in forked children); new files are readable by their owner alone."""
        return hide_from_children(os.open(path, flags | os.O_CLOEXEC, 0o600))

    def close(self, fd: int) -> None:
        forget_descriptor(fd)
        os.close(fd)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def lock(self, fd: int) -> bool:
        """Take the exclusive `flock`, without waiting; False when another open file holds it."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def unlock(self, fd: int) -> None:
        """Release the lock at once, even if others have the file open."""
        fcntl.flock(fd, fcntl.LOCK_UN)

    def allocate(self, fd: int, offset: int, length: int) -> None:
        """Reserve disk space for a byte range, extending the file; ENOSPC here means none will follow later."""
        os.posix_fallocate(fd, offset, length)

    def truncate(self, fd: int, length: int) -> None:
        os.ftruncate(fd, length)

    def sync(self, fd: int) -> None:
        """`fdatasync`: earlier writes are on stable storage."""
        os.fdatasync(fd)

    def free_bytes(self, directory: Path) -> int:
        """Bytes a user may still allocate on the file system of `directory`."""
        usage = os.statvfs(directory)
        return usage.f_bavail * usage.f_frsize

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """One scattered read; returns bytes read, 0 at the end of the file."""
        return os.preadv(fd, buffers, offset)

    @cached_property
    def compiled(self) -> ModuleType | None:
        """The extension module that reads, if it was built."""
        return compiled_reads()

    def queue(self, depth: int) -> ReadQueue | None:
        """A queue of `depth` reads in flight. OSError: the kernel has none.

        None: there is no extension module, or `preadv` was replaced; use that.
        """
        return ReadQueue(depth, self.compiled) if self.compiled and type(self).preadv is _PREADV else None

    def read_rows(self, fd: int, offsets: Sequence[int], size: int, into: memoryview) -> bytes | None:
        """Read `size` bytes from each offset in one call. Returns a byte for each: whether they came whole.

        None, and nothing done, without the extension module or if `preadv` was replaced.
        """
        if self.compiled is None or type(self).preadv is not _PREADV:
            return None
        came: bytes = self.compiled.read_rows(fd, offsets, size, into)
        return came

    def peek(self, fd: int, buffers: Sequence[memoryview], offsets: Sequence[int]) -> list[bool]:
        """A `ReadEach` of pages in the page cache, never waiting. For others the read-ahead starts.

        Only if the file system knows such reads: see `peeking`.
        """
        came = list[bool]()
        for buffer, offset in zip(buffers, offsets, strict=True):
            moved = 0
            with suppress(OSError):
                moved = os.preadv(fd, [buffer], offset, os.RWF_NOWAIT)
            if missing := buffer.nbytes - moved:  # also behind what was read: no kernel does it
                _READ_AHEAD.send(fd, offset + moved, missing)
            came.append(not missing)
        return came

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """One gathered write; returns bytes written."""
        return os.pwritev(fd, buffers, offset)


def peeking(io: FileIO, fd: int) -> ReadEach:
    """What reads this file without waiting: `peek`, in memory plain reads, else nothing. This call may wait."""
    try:
        os.preadv(fd, [bytearray(1)], 0, os.RWF_NOWAIT)
    except BlockingIOError:
        pass
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        return partial(read_each, io) if _is_in_memory(fd) else _nothing
    return io.peek


def _is_in_memory(fd: int) -> bool:
    """Whether the file's file system has no disk behind it, by the table of mounts."""
    device = os.fstat(fd).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
            about, _, kind = line.partition(" - ")
            if about.split()[2] == number:
                return kind.split()[0] in _IN_MEMORY
    return False


def _nothing(fd: int, buffers: Sequence[memoryview], offsets: Sequence[int]) -> list[bool]:
    return [False] * len(buffers)


class _ReadAhead:
    """Starts read-ahead on a thread: on a disk that hangs, that call may wait, too."""

    def __init__(self) -> None:
        self._wanted: queue.Queue[tuple[int, int, int]] = queue.Queue(_MOST_AHEAD)
        self._lock = threading.Lock()
        self._pid = 0  # of the process whose thread reads the queue

    def send(self, fd: int, offset: int, num_bytes: int) -> None:
        """Drop the read-ahead if too many wait. If the descriptor is another file's by then, one read is wasted."""
        with self._lock:
            if self._pid != os.getpid():
                self._pid, self._wanted = os.getpid(), queue.Queue(_MOST_AHEAD)
                threading.Thread(target=self._run, name="kvtier-read-ahead", daemon=True).start()
        with suppress(queue.Full):
            self._wanted.put_nowait((fd, offset, num_bytes))

    def _run(self) -> None:
        while True:
            fd, offset, num_bytes = self._wanted.get()
            with suppress(OSError):
                os.posix_fadvise(fd, offset, num_bytes, os.POSIX_FADV_WILLNEED)


_READ_AHEAD: Final = _ReadAhead()
_PREADV: Final = FileIO.preadv  # a test that replaces it, to see or to fail every read, gets every read


def read_each(io: FileIO, fd: int, buffers: Sequence[memoryview], offsets: Sequence[int]) -> list[bool]:
    """A `ReadEach` that waits for the disk."""
    came = list[bool]()
    for buffer, offset in zip(buffers, offsets, strict=True):
        try:
            moved = 0
            with suppress(InterruptedError):
                moved = io.preadv(fd, [buffer], offset)
            if moved < buffer.nbytes:  # hardly ever: a row is a microsecond
                read_all(io, fd, [buffer], offset)
            came.append(True)
        except OSError:
            came.append(False)
    return came


def read_all(io: "FileIO | Mapping", fd: int, buffers: Sequence[memoryview], offset: int, align: int = 1) -> None:
    """Fill every buffer from `offset` on, or raise OSError (EIO if the file ends first)."""
    _transfer(io.preadv, fd, buffers, offset, align)


def write_all(io: FileIO, fd: int, buffers: Sequence[memoryview], offset: int, align: int = 1) -> None:
    """Write every buffer from `offset` on, or raise OSError (part of it may then be written)."""
    if len(buffers) <= IOV_MAX:  # mostly one call is all
        with suppress(InterruptedError):
            moved = io.pwritev(fd, buffers, offset)
            if moved == sum([buffer.nbytes for buffer in buffers]):
                return
            kept = max(moved, 0) // align * align  # see `_transfer`
            buffers, offset = _rest(list(buffers), kept), offset + kept
    _transfer(io.pwritev, fd, buffers, offset, align)


def _transfer(
    call: Callable[[int, Sequence[memoryview], int], int],
    fd: int,
    buffers: Sequence[memoryview],
    offset: int,
    align: int,
) -> None:
    pending = list(buffers)
    stalls = 0
    while pending:
        try:
            moved = call(fd, pending[:IOV_MAX], offset)
        except InterruptedError:
            moved = -1
        # O_DIRECT continues only from an aligned offset: bytes behind the last one are moved again.
        kept = max(moved, 0) // align * align
        stalls = 0 if kept else stalls + 1
        if moved == 0 or stalls > _MAX_STALLS:
            raise OSError(errno.EIO, f"the file gave out at byte {offset}")
        offset += kept
        pending = _rest(pending, kept) if kept < sum(buffer.nbytes for buffer in pending) else []


def _rest(buffers: list[memoryview], moved: int) -> list[memoryview]:
    """The buffers less their first `moved` bytes."""
    for index, buffer in enumerate(buffers):
        if moved < buffer.nbytes:
            return [buffer[moved:], *buffers[index + 1 :]]
        moved -= buffer.nbytes
    return []


def address(buffer: memoryview) -> int:
    """Where the buffer's first byte lies in memory."""
    data: tuple[int, bool] = np.frombuffer(buffer, np.uint8).__array_interface__["data"]
    return data[0]


class Scratch(threading.local):
    _memory: mmap.mmap | None = None

    def of(self, num_bytes: int) -> memoryview:
        """At least so many bytes; the same ones at every call."""
        if self._memory is None or len(self._memory) < num_bytes:
            self._memory = mmap.mmap(-1, max(num_bytes, CALL_BYTES))
        return memoryview(self._memory)


class Mapping:
    """A read-only mapping of a file whose reads fail with EFAULT if a plain copy would die of SIGBUS."""

    def __init__(self, fd: int, length: int) -> None:
        self._map = mmap.mmap(fd, length, mmap.MAP_SHARED, mmap.PROT_READ)
        self._length = length
        self._base = address(memoryview(self._map))

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Copy out of the mapping of `fd`, like `os.preadv`. OSError (EFAULT) if the file has become shorter."""
        wanted = sum(buffer.nbytes for buffer in buffers)
        length = min(wanted, self._length - offset)
        if length <= 0:
            return 0
        # Read ahead of the copy: one large read instead of a fault per 16 pages.
        os.posix_fadvise(fd, offset, length, os.POSIX_FADV_WILLNEED)
        sizes = np.array([buffer.nbytes for buffer in buffers], np.int64)
        ends = np.minimum(np.cumsum(sizes), length)  # the last ones may lie behind the end of the file
        starts = np.append(0, ends[:-1])
        targets = np.array([address(buffer) for buffer in buffers], np.int64)
        memory.copy_scattered(targets, self._base + offset + starts, ends - starts)
        return length

    def close(self) -> None:
        self._map.close()


class GroupSync:
    """Makes earlier writes durable, together. Thread-safe.

    A caller waits for a sync that began after its call; at most one runs, and any number of callers wait for the next.
    """

    def __init__(self, sync: Callable[[], None]) -> None:
        self._sync = sync
        self._changed = threading.Condition()
        self._begun = 0
        self._done = 0
        self._failed: dict[int, OSError] = {}

    def __call__(self) -> None:
        """Return once all this thread wrote is on stable storage; OSError if the sync that covers it failed."""
        with self._changed:
            mine = self._begun + 1
            while self._done < mine and self._begun > self._done:
                self._changed.wait()
            if self._done >= mine:
                self._raise_failure(mine)
                return
            self._begun = mine
        failure: OSError | None = OSError(errno.EINTR, "the sync was interrupted")
        try:
            self._sync()
            failure = None
        except OSError as error:
            failure = error
        finally:
            with self._changed:
                self._done = mine
                if failure is not None:
                    self._failed = {mine: failure}
                self._changed.notify_all()
        with self._changed:
            self._raise_failure(mine)

    def _raise_failure(self, mine: int) -> None:
        # Only the last failure is kept. A waiter that wakes late may get a later one: it errs on the safe side.
        for number, failure in self._failed.items():
            if number >= mine:
                raise OSError(failure.errno, failure.strerror)


Mode = Literal["auto", "direct", "buffered", "mmap"]

_DEPTH: Final = 16  # scattered reads that one call keeps in flight: more only adds to their latency
_RETRY: Final = 10.0  # seconds until the kernel is tried again for a queue that it refused
_PROBE_BYTES: Final = 1 << 20
_PROBE_SECONDS: Final = 0.1  # after this no further probe step is begun
_WORTH: Final = 0.7  # O_DIRECT stays the choice unless buffered I/O is clearly faster


class PayloadIO:
    """Payload transfers of one slab file. Thread-safe; each thread has its own scratch memory.

    Slots in the file are `slot_bytes` padded to 4 KiB, host slots are memoryviews of `slot_bytes` anywhere. In direct
    mode an aligned host slot is read and written in place, except a last partial page. Batches with any other one go
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
        self._whole = slot_bytes // self._align * self._align  # bytes of a slot that are moved in place
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
        """`ReadQueue.read_blocks`; None, and nothing done, without a queue."""
        if (queue := self._take_queue()) is None:
            return None
        try:
            return queue.read_blocks((self._fd, table_fd), layout, slots, names, into)
        finally:
            if queue.is_open:
                self._queues.append(queue)

    def read_slots(
        self, layout: SlabLayout, slots: list[int], offsets: Sequence[int], into: Sequence[memoryview]
    ) -> list[bool]:
        """Read ascending slots, scattered ones together if there is a queue; says which could be read.

        `read_each` repeats reads that a queue leaves short.
        """
        runs = self.runs(offsets)
        came = [False] * len(slots)
        if len(runs) > 1 and (queue := self._take_queue()) is not None:
            try:
                came = queue.read_payloads((self._fd, self._fd), layout, slots, into)
            finally:
                if queue.is_open:
                    self._queues.append(queue)
        for run in runs:
            if not all(came[run]):
                came[run] = self.read_each(offsets[run.start], into[run])
        return came

    def _take_queue(self) -> ReadQueue | None:
        """A queue for one call, which puts it back if it is still open; None if there is none now."""
        with suppress(IndexError):
            return self._queues.pop()
        if not self._may_queue or time.monotonic() < self._refused_until:
            return None
        try:
            queue = self._io.queue(_DEPTH)
        except OSError as error:
            if not self.num_refused:
                _log.warning("[file] %s: no queue of reads (%s): one by one for now", self.path, error)
            self.num_refused += 1
            self._refused_until = time.monotonic() + _RETRY
            return None
        self._may_queue = queue is not None
        return queue

    def _transfer(self, offset: int, buffers: Sequence[memoryview], *, is_read: bool) -> None:
        """Move adjacent slots from `offset` on, one per buffer; OSError leaves buffers or slots in any state."""
        for whole in (self._whole, 0):
            iovecs, copies = (buffers, []) if whole == self.stride else self._bounced(buffers, whole)
            try:
                if is_read:
                    read_all(self._mapping or self._io, self._fd, iovecs, offset, self._align)
                    for scratch, place in copies:
                        place[:] = scratch[: place.nbytes]
                else:
                    for scratch, place in copies:
                        scratch[: place.nbytes] = place
                    write_all(self._io, self._fd, iovecs, offset, self._align)
                return
            except OSError as error:
                # The device may need a larger alignment: only the kernel's error shows it.
                if not whole or error.errno != errno.EINVAL or self.mode != "direct":
                    raise

    read, write = partialmethod(_transfer, is_read=True), partialmethod(_transfer, is_read=False)

    def close(self) -> None:
        while self._queues:
            self._queues.pop().close()
        if self._mapping is not None:
            self._mapping.close()
        if self._own_fd is not None:
            self._io.close(self._own_fd)
            self._own_fd = None

    def _bounced(
        self, buffers: Sequence[memoryview], whole: int
    ) -> tuple[list[memoryview], list[tuple[memoryview, memoryview]]]:
        """The iovecs of adjacent slots whose first `whole` bytes go in place; (scratch, place) pairs to be copied."""
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
    """`direct`, or `buffered` if O_DIRECT is refused or clearly slower on this disk; 0.1 s, leaves nothing behind."""
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
