"""Bulk memory calls that never hold the GIL: madvise, populate, and one scattered copy per system call.

Python's own `mmap.madvise` and `memoryview` copies hold the GIL for their whole length. Every call that releases the
GIL can wait a switch interval (5 ms) to get it back. So each call here releases it once, for many bytes.
"""

import ctypes
import errno
import os
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvtier.tiers.compiled import extension

PAGE: Final = 4096
HUGE_PAGE: Final = 2 << 20

_PROT_NONE: Final = 0
_MAP_PRIVATE: Final = 0x02
_MAP_FIXED: Final = 0x10
_MAP_ANONYMOUS: Final = 0x20
_MAP_NORESERVE: Final = 0x4000
_MAP_FIXED_NOREPLACE: Final = 0x100000  # Linux 4.17
_MADV_REMOVE: Final = 9
_MADV_DONTFORK: Final = 10
_MADV_HUGEPAGE: Final = 14
_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14
_MADV_COLLAPSE: Final = 25  # Linux 6.1
_MLOCK_PIECE: Final = 2 << 20  # far below the usual RLIMIT_MEMLOCK of 8 MiB
COPY_PIECE: Final = 32 << 20  # bytes copied at once: a cancelled copy stops after at most so many

_libc = ctypes.CDLL(None, use_errno=True)  # CDLL releases the GIL around every call, PyDLL would not
_madvise = _libc.madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_mmap = _libc.mmap
_mmap.argtypes = [*(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)]
_mmap.restype = ctypes.c_void_p
_mlock, _munlock = _libc.mlock, _libc.munlock
_mlock.argtypes = _munlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_process_vm_readv = _libc.process_vm_readv
_process_vm_readv.argtypes = [
    *(ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong)
]
_process_vm_readv.restype = ctypes.c_ssize_t


def advise_huge_pages(address: int, num_bytes: int) -> bool:
    """Request huge pages before the first touch: scattered copies gain a half. False: the kernel has none."""
    start = -(-address // PAGE) * PAGE
    length = (address + num_bytes - start) // PAGE * PAGE
    return length > 0 and _madvise(start, length, _MADV_HUGEPAGE) == 0


def collapse(address: int, num_bytes: int) -> bool:
    """Put shared memory on huge pages, whatever the system's setting for those; False: it stays as it is.

    Before its first touch that is much cheaper: behind `populate` the kernel would copy all of its small pages. But it
    collapses nothing that is empty, so one page of each huge page is faulted in first. Only whole huge pages are made,
    and only if the mapping lies as its file does. Since Linux 6.1. Raises OSError as `populate`.
    """
    length = num_bytes // HUGE_PAGE * HUGE_PAGE
    for offset in range(0, length, HUGE_PAGE):
        populate(address + offset, PAGE)
    return bool(_madvise(address, length, _MADV_COLLAPSE) == 0)


def free_everywhere(address: int, num_bytes: int) -> None:
    """Give shared memory's pages back, whoever maps it: they are zeros from then on."""
    _madvise(address, num_bytes, _MADV_REMOVE)


def advise_no_fork(address: int, num_bytes: int) -> None:
    """Leave the pages out of forked children: no copy-on-write under a DMA, no second copy of a large pool."""
    _madvise(address, num_bytes, _MADV_DONTFORK)


def fence_off(address: int, num_bytes: int, *, is_mapped: bool) -> None:
    """In a forked child: make this range inaccessible, and keep mappings out; if not `is_mapped`, it is empty."""
    fixed = _MAP_FIXED if is_mapped else _MAP_FIXED_NOREPLACE
    _mmap(address, num_bytes, _PROT_NONE, _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE | fixed, -1, 0)


def populate(address: int, num_bytes: int) -> None:
    """Fault pages in for writing without changing a byte. OSError if neither MADV_POPULATE_WRITE nor mlock can."""
    while _madvise(address, num_bytes, _MADV_POPULATE_WRITE) != 0:
        code = ctypes.get_errno()
        if code == errno.EINVAL:  # kernel before 5.14
            return _populate_by_mlock(address, num_bytes)
        if code not in (errno.EINTR, errno.EAGAIN):
            raise OSError(code, os.strerror(code), "madvise(MADV_POPULATE_WRITE)")
    return None


def _populate_by_mlock(address: int, num_bytes: int) -> None:
    """Locking faults pages in for writing, too; to touch them from here could undo another thread's write."""
    for offset in range(0, num_bytes, _MLOCK_PIECE):
        length = min(_MLOCK_PIECE, num_bytes - offset)
        if _mlock(address + offset, length) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), "mlock")
        _munlock(address + offset, length)


def copy_scattered(targets: NDArray[np.int64], sources: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
    """Copy `lengths[i]` bytes from address `sources[i]` to `targets[i]` for every i, in one system call.

    At most 1,024 pieces and 2 GiB. The caller vouches that no target overlaps another piece. Addresses that are not
    mapped raise OSError (EFAULT), not a signal; the targets then hold rubbish.
    """
    vectors = np.empty((2, len(targets), 2), np.int64)
    vectors[0, :, 0], vectors[1, :, 0] = targets, sources
    vectors[:, :, 1] = lengths
    ours, count = vectors.ctypes.data, len(targets)
    copied = _process_vm_readv(os.getpid(), ours, count, ours + vectors[0].nbytes, count, 0)
    if copied != int(lengths.sum()):
        code = ctypes.get_errno() if copied < 0 else errno.EFAULT
        raise OSError(code, os.strerror(code), "process_vm_readv")


def compiled(name: str) -> Any:
    """A function of the extension module `memory_compiled`, see there; None: not built."""
    module = extension("kvtier.tiers.host.memory_compiled")
    return None if module is None else getattr(module, name)


def bytes_at(address: int, num_bytes: int) -> NDArray[np.uint8]:
    """The memory at an address as a writable array; the caller keeps it mapped while the array lives."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))
