# Pieces copied from address to address, one memcpy each, without the GIL. Twin of memory.py's scattered copy.
# cython: boundscheck=False, wraparound=False
"""The kernel's scattered copy looks up a page for every 4 KiB and is asked by a call; memcpy needs neither."""

from libc.stdint cimport int64_t
from libc.string cimport memcpy


def copy_pieces(const int64_t[:] targets, const int64_t[:] sources, const int64_t[:] lengths):
    """Copy `lengths[i]` bytes from address `sources[i]` to `targets[i]`, for each i.

    The caller vouches that all of it is mapped and that no target overlaps another piece. ValueError, and nothing is
    copied, where the three are not as many or a length is negative.
    """
    cdef Py_ssize_t count = targets.shape[0], i
    if sources.shape[0] != count or lengths.shape[0] != count:
        raise ValueError(f"{count} targets, {sources.shape[0]} sources, {lengths.shape[0]} lengths")
    for i in range(count):
        if lengths[i] < 0:
            raise ValueError(f"length {lengths[i]}: must not be negative")
    with nogil:
        for i in range(count):
            memcpy(<void *> targets[i], <const void *> sources[i], <size_t> lengths[i])
