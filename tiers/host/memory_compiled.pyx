# Pieces copied from address to address, and rows hashed, without the GIL. Twin of memory.py's copies and of host.py's sums.
# cython: boundscheck=False, wraparound=False
"""The kernel's scattered copy looks up a page for every 4 KiB and is asked by a call; memcpy needs neither."""

from libc.stdint cimport int64_t, uint8_t, uint64_t
from libc.stdlib cimport free, malloc
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


cdef extern from "digests.h" nogil:
    uint64_t kvtier_xxh3_64(const void *data, size_t size)


def checksums(const uint8_t[:, :] rows, const int64_t[:] places, Py_ssize_t num_bytes):
    """xxh3-64 of the first `num_bytes` of each of these rows; the GIL is given up once for all of them.

    IndexError for a row that there is not, ValueError for one that is not whole.
    """
    cdef Py_ssize_t count = places.shape[0], i
    cdef uint64_t *sums
    if not 0 <= num_bytes <= rows.shape[1] or rows.strides[1] != 1:
        raise ValueError(f"{num_bytes} bytes of rows of {rows.shape[1]}")
    for i in range(count):
        if not 0 <= places[i] < rows.shape[0]:
            raise IndexError(f"row {places[i]}: there are {rows.shape[0]}")
    if not count:
        return []
    if not num_bytes:
        raise ValueError("rows of no bytes")
    sums = <uint64_t *> malloc(count * sizeof(uint64_t))
    if sums == NULL:
        raise MemoryError
    try:
        with nogil:
            for i in range(count):
                sums[i] = kvtier_xxh3_64(&rows[places[i], 0], num_bytes)
        return [sums[i] for i in range(count)]
    finally:
        free(sums)
