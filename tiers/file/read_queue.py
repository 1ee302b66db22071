"""ReadQueue: many reads of one thread in flight at once, by Linux's own asynchronous I/O (`man io_submit`).

One call hands sixteen reads to the kernel, so a disk sees that depth without a thread for each: a thread costs 30 us of
CPU a block, a place in the queue 2. Only direct I/O gains by it: `io_submit` does buffered reads one after the other.
The extension module reads whole blocks so, rows and checksums included, without the interpreter's lock.
"""

import ctypes
import errno
import logging
import os
import platform
from collections.abc import Callable, Generator, Sequence
from types import ModuleType
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtier.tiers import BlockRecord, ChainHash
from kvtier.tiers.compiled import extension

_log = logging.getLogger(__name__)

_CALLS: Final = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}  # setup, destroy, getevents, submit
_PREADV: Final = 7  # the operation's number
_WAKE: Final = 4  # a wait ends when a quarter of what is in flight has come: fewer wake-ups, and the disk stays busy

# `struct iocb` and `struct io_event` of linux/aio_abi.h, little-endian.
_REQUEST: Final = np.dtype(
    [
        ("number", "<u8"),
        ("key", "<u4"),
        ("rw_flags", "<u4"),
        ("operation", "<u2"),
        ("priority", "<i2"),
        ("fd", "<u4"),
        ("iovecs", "<u8"),
        ("num_iovecs", "<u8"),
        ("offset", "<i8"),
        ("unused", "<u8"),
        ("flags", "<u4"),
        ("event_fd", "<u4"),
    ]
)
_EVENT: Final = np.dtype([("number", "<u8"), ("request", "<u8"), ("moved", "<i8"), ("more", "<i8")])

_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long


def compiled_reads() -> ModuleType | None:
    """The extension module that reads; None, not built: everything goes the Python way."""
    return extension("kvtier.tiers.file.read_queue_compiled")


class SlabLayout(NamedTuple):
    """What the twin knows of a slab in the clear."""

    places: tuple[
        object, ...
    ]  # offsets of extents' rows and payloads; slots of an extent; bytes of a row, a payload; longest read
    rule: tuple[int, ...]  # of a whole row: READY, most tokens, from which seq to before which, the checksum's seed


class ReadQueue:
    """Reads of one thread at a time, up to `depth` in flight. What one does not bring whole, its caller reads anew."""

    def __init__(self, depth: int, compiled: ModuleType | None = None) -> None:
        """`compiled`: the twin that `read_blocks` takes.

        OSError if the kernel has no such queue for us: another machine's, a sandbox, or too many of them.
        """
        calls = _CALLS.get(platform.machine())
        if calls is None or ctypes.sizeof(ctypes.c_void_p) != 8:  # a 32-bit process has other numbers for its calls
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        self.depth = depth
        self._compiled = compiled
        setup, self._destroy, self._getevents, self._submit = map(ctypes.c_long, calls)
        self._queue = ctypes.c_ulong(0)
        self._events = np.zeros(depth, _EVENT)
        if _syscall(setup, ctypes.c_uint(depth), ctypes.byref(self._queue)) < 0:
            raise _last_error()

    def read(
        self,
        fd: int,
        offsets: Sequence[int],
        iovecs: NDArray[np.uint64],
        counts: Sequence[int],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> Generator[tuple[int, int], None, None]:
        """Read n stretches of a file; yields each one's number, as it ends, and the bytes read or minus the errno.

        `iovecs`, `[m, 2]`: addresses and lengths of the stretches' buffers, one after another, `counts` of them for
        each. The buffers must live until this ends; who stops early waits for what is in flight. `meanwhile` is called
        once, before anything is yielded, while the first reads are in flight.
        """
        requests = np.zeros(len(offsets), _REQUEST)
        requests["number"] = np.arange(len(offsets))
        requests["operation"], requests["fd"] = _PREADV, fd
        requests["offset"], requests["num_iovecs"] = offsets, counts
        firsts = np.cumsum(counts) - counts
        requests["iovecs"] = iovecs.ctypes.data + 16 * firsts
        pointers = (requests.ctypes.data + _REQUEST.itemsize * np.arange(len(offsets))).astype(np.uint64)
        begun = ended = 0
        is_first = True
        try:
            while ended < len(offsets):
                refusal = 0
                if room := min(len(offsets) - begun, self.depth - (begun - ended)):
                    taken = self._call(self._submit, ctypes.c_long(room), _at(pointers, begun))
                    if taken > 0:
                        begun += taken
                    elif taken != -errno.EAGAIN or begun == ended:  # with others in flight there may be room later
                        begun, ended, refusal = begun + 1, ended + 1, taken or -errno.EAGAIN
                if is_first:
                    is_first = False
                    meanwhile()
                if refusal:
                    yield begun - 1, refusal
                    continue
                came = self._wait(max(1, (begun - ended) // _WAKE))
                ended += len(came)
                yield from came
        finally:
            while ended < begun:
                ended += len(self._wait(1))

    def read_blocks(
        self,
        fds: tuple[int, int],
        layout: SlabLayout,
        slots: list[int],
        names: list[ChainHash],
        into: list[memoryview],
    ) -> list[BlockRecord | None] | None:
        """Read and verify blocks by the twin, their slots ascending; None, and nothing done, where there is none.

        `fds`: of the payloads and of the table. Returns each block's record; None where row or payload did not come,
        or is not whole: the Python way says what is wrong. Each buffer is as large as a payload, whole pages.
        """
        if self._compiled is None:
            return None
        reads = self._compiled.BlockReads(self._queue.value, self.depth, *fds, slots, into, *layout.places)
        found: list[BlockRecord | None] = reads.run(names, BlockRecord, *layout.rule)
        if reads.is_lost:
            self._queue.value = 0
        return found

    @property
    def is_open(self) -> bool:
        """Whether it was not closed, by its owner or by a failure."""
        return self._queue.value != 0

    def close(self) -> None:
        """Give the queue back. Idempotent."""
        if self._queue.value:
            _syscall(self._destroy, self._queue)
            self._queue.value = 0

    def _wait(self, least: int) -> list[tuple[int, int]]:
        """What has ended, `least` reads or more. OSError, once the kernel has ended all, if it cannot be told."""
        while True:
            bounds = ctypes.c_long(least), ctypes.c_long(self.depth)
            num_came = self._call(self._getevents, *bounds, _at(self._events, 0), None)
            if num_came > 0:
                came = self._events[:num_came]
                return list(zip(came["number"].tolist(), came["moved"].tolist(), strict=True))
            if num_came != -errno.EINTR:
                self.close()
                raise OSError(-num_came, os.strerror(-num_came))

    def _call(self, call: ctypes.c_long, *arguments: object) -> int:
        """What the kernel answers, or minus the errno."""
        answer: int = _syscall(call, self._queue, *arguments)
        return answer if answer >= 0 else -ctypes.get_errno()


def _at(array: NDArray[np.generic], index: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data + index * array.itemsize)


def _last_error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))
