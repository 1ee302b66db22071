# Pieces copied from address to address, and rows hashed, without the GIL. Twin of memory.py's copies and of host.py's sums.
# cython: boundscheck=False, wraparound=False
"""The kernel's scattered copy looks up a page for every 4 KiB and costs a system call; memcpy needs neither."""

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


_GIL_BYTES = 256 << 10  # by measurement: a thread beside it may keep the GIL for 5 ms


def copy_blocks(
    uint8_t[:, :] device, const int64_t[:] blocks, uint8_t[:, :] host, const int64_t[:] slots,
    Py_ssize_t offset, Py_ssize_t length, bint is_load,
    Py_ssize_t gil_bytes=_GIL_BYTES,
):
    """Copy bytes `offset … offset + length` of row `blocks[i]` of L1 and row `slots[i]` of L2, for each i.

    To L1 if `is_load`, else to L2. Up to `gil_bytes` altogether the GIL is kept. IndexError, and nothing is copied, for a row that there is not; ValueError for bytes
    outside a row, rows that are not whole, or another number of slots than of blocks.
    """
    cdef Py_ssize_t count = blocks.shape[0], i, columns = min(device.shape[1], host.shape[1])
    cdef Py_ssize_t device_stride = device.strides[0], host_stride = host.strides[0]
    cdef bint is_whole = length == device_stride and length == host_stride  # then neighbours are one piece
    if slots.shape[0] != count:
        raise ValueError(f"{count} blocks for {slots.shape[0]} slots")
    if not 1 <= length <= columns or not 0 <= offset <= columns - length:
        raise ValueError(f"bytes {offset}..{offset + length} of rows of {device.shape[1]} and {host.shape[1]}")
    if device.strides[1] != 1 or host.strides[1] != 1:
        raise ValueError("rows that are not whole")
    for i in range(count):
        if not 0 <= blocks[i] < device.shape[0] or not 0 <= slots[i] < host.shape[0]:
            raise IndexError(f"block {blocks[i]} of {device.shape[0]}, slot {slots[i]} of {host.shape[0]}")
    if not count:
        return
    if count * length <= gil_bytes:
        _copy(&device[0, offset], &host[0, offset], device_stride, host_stride, blocks, slots, length, is_whole, is_load)
    else:
        with nogil:
            _copy(
                &device[0, offset], &host[0, offset], device_stride, host_stride, blocks, slots, length, is_whole, is_load
            )


cdef void _copy(
    uint8_t *device, uint8_t *host, Py_ssize_t device_stride, Py_ssize_t host_stride,
    const int64_t[:] blocks, const int64_t[:] slots, Py_ssize_t length, bint is_whole, bint is_load,
) noexcept nogil:
    cdef Py_ssize_t i = 0, run
    cdef uint8_t *here
    cdef uint8_t *there
    while i < blocks.shape[0]:
        run = 1
        while (
            is_whole and i + run < blocks.shape[0]
            and blocks[i + run] == blocks[i] + run and slots[i + run] == slots[i] + run
        ):
            run += 1
        here = device + blocks[i] * device_stride
        there = host + slots[i] * host_stride
        memcpy(here if is_load else there, there if is_load else here, <size_t> (run * length))
        i += run


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
