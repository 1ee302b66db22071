# cython: language_level=3, boundscheck=True, wraparound=False, cdivision=True, initializedcheck=False
"""The compiled twin of what `cohorts.py` does to every entry of a queue: the same entries, rows and order."""

from libc.stdint cimport int32_t, int64_t, uint8_t

import numpy as np

cdef enum:
    FEWEST = 64


def strays(
    const int32_t[::1] ring,
    const int64_t[::1] tickets,
    const int64_t[::1] owners,
    const int64_t[::1] number,
    const int64_t[::1] first,
    const int64_t[::1] end,
    int64_t start,
    int64_t stop,
):
    """Of the queue's entries from ticket `start` to before `stop` those that are not in the stretch of their cohort."""
    cdef int64_t mask = ring.shape[0] - 1, ticket, slot, owner, last_owner = -1, row = -1
    cdef Py_ssize_t found = 0, room = max(<int64_t> 0, stop - start)
    cdef int64_t[::1] at, each, rows
    found_at = found_each = found_rows = None
    for ticket in range(start, stop):
        slot = ring[ticket & mask]
        if tickets[slot] != ticket:
            continue
        owner = owners[slot]
        if owner != last_owner:
            row, last_owner = row_of(number, owner), owner
        if row >= 0 and first[row] <= ticket < end[row]:
            continue
        if found_at is None:
            found_at, found_each, found_rows = np.empty(room, np.int64), np.empty(room, np.int64), np.empty(room, np.int64)
            at, each, rows = found_at, found_each, found_rows
        at[found], each[found], rows[found] = slot, ticket, row
        found += 1
    if found_at is None:
        nothing = np.zeros(0, np.int64)
        return nothing, nothing, nothing
    return found_at[:found], found_each[:found], found_rows[:found]


cdef int64_t row_of(const int64_t[::1] number, int64_t owner) except -2:
    """The row of this number, -1 if there is none."""
    cdef Py_ssize_t low = 0, high = number.shape[0], middle
    while low < high:
        middle = (low + high) // 2
        if number[middle] < owner:
            low = middle + 1
        else:
            high = middle
    return low if low < number.shape[0] and number[low] == owner else -1


def choose(
    const int64_t[::1] order,
    const int64_t[::1] number,
    const int64_t[::1] first,
    const int64_t[::1] end,
    const int32_t[::1] ring,
    const int64_t[::1] tickets,
    const int64_t[::1] owners,
    Py_ssize_t count,
):
    """The first `count` slots, and their tickets, of the rows in this order; and which rows have none left."""
    cdef Py_ssize_t num_rows = order.shape[0], done = 0, found = 0, alive
    cdef int64_t mask = ring.shape[0] - 1, total = 0, upto, row, ticket, slot
    is_over = np.zeros(num_rows, np.bool_)
    found_at, found_each = np.empty(count, np.int64), np.empty(count, np.int64)
    cdef uint8_t[::1] over = is_over.view(np.uint8)
    cdef int64_t[::1] at = found_at, each = found_each
    while found < count and done < num_rows:
        upto = total + max(2 * (count - found), <Py_ssize_t> FEWEST)
        while done < num_rows and total < upto:
            row, alive = order[done], 0
            for ticket in range(first[row], end[row]):
                slot = ring[ticket & mask]
                if tickets[slot] == ticket and owners[slot] == number[row]:
                    if found + alive < count:
                        at[found + alive], each[found + alive] = slot, ticket
                    alive += 1
            over[row] = alive == 0
            found += alive
            total += end[row] - first[row]
            done += 1
    return found_at[:min(found, count)], found_each[:min(found, count)], is_over
