"""The compiled twin of `ChildIndex.enter`, for however many slots: the same entries in the same places."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memcpy

cdef enum:
    WAYS = 8


def enter(uint32_t[::1] entries, uint32_t[::1] where, list parents, list slots):
    """Enter slots under their blocks' parents. Returns whether all could be: else nothing has changed."""
    cdef Py_ssize_t count = len(slots), i, at, way
    cdef uint64_t num_buckets = entries.shape[0] // WAYS
    cdef int64_t slot
    cdef uint32_t half
    cdef bytes parent
    if len(parents) != count:
        return False
    for i in range(count):
        slot, parent = slots[i], parents[i]
        if not 0 <= slot < where.shape[0] or parent is None or PyBytes_GET_SIZE(parent) < 8:
            return False
    for i in range(count):  # all first: what one leaves, another may take
        slot = slots[i]
        if entries[where[slot]] == slot + 1:
            entries[where[slot]] = 0
    for i in range(count):
        slot, parent = slots[i], parents[i]
        memcpy(&half, PyBytes_AS_STRING(parent) + 4, 4)
        at = <Py_ssize_t>(half * num_buckets >> 32) * WAYS
        for way in range(WAYS):
            if not entries[at + way]:
                break
        else:
            way = slot % WAYS
        entries[at + way] = <uint32_t>(slot + 1)
        where[slot] = <uint32_t>(at + way)
    return True
