"""Cohorts: which idle slots of an LRU queue belong to which request's end, and from which of them victims come first.

A cohort is a stretch of the queue's tickets, and a number that its slots carry. A slot that was used since has another
ticket, or carries another number: nothing has to be taken out. Everything is done to all slots at once, in numpy, or
by a compiled twin.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvtier.tiers.compiled import twin
from kvtier.tiers.pool.index import Slots, int_type

NOBODYS: Final = 0  # the number of a slot whose block no end has told of
_LATE: Final = 60.0  # seconds after a request's end in which its blocks still become idle as its own
_FEWEST: Final = 64

CohortPlaces = NDArray[np.int64]


class Cohorts:
    """The rows of all cohorts that may still have slots, oldest first. `owners`: the number that each slot carries."""

    def __init__(self, num_slots: int) -> None:
        self.owners = np.zeros(num_slots, np.int64)
        self._twin = twin("kvtier.tiers.pool.cohorts_compiled") if int_type(num_slots) == np.int32 else None
        self._allot(_FEWEST)
        self.num_rows = self.num_told = 0
        self._next = 1
        self._looked_at = -np.inf  # seconds: when entries were taken in the last time

    def _allot(self, size: int) -> None:
        self.number, self.first, self.end, self.kind = (np.zeros(size, np.int64) for _ in range(4))
        self.ended_at = np.zeros(size)
        self._is_late = np.zeros(size, np.bool_)

    def reset(self) -> None:
        self.owners[:] = NOBODYS
        self.num_rows = self.num_told = 0

    def add(self, slots: Slots, first: int, end: int, kind: int, ended_at: float, *, is_late: bool) -> None:
        """A request's slots: those idle have tickets from `first` to before `end`. `is_late`: others still come."""
        if self.num_rows == len(self.number):
            self._make_room()
        row, number = self.num_rows, self._next
        self.number[row], self.first[row], self.end[row], self.kind[row] = number, first, end, kind
        self.ended_at[row], self._is_late[row] = ended_at, is_late
        self.owners[slots] = number
        self.num_rows, self._next = row + 1, number + 1
        self.num_told += 1

    def take_in(self, ring: Slots, tickets: Slots, start: int, end: int, untold: int, now: float) -> None:
        """Entries that are new in the queue since the last time: each into its request's cohort, or that of the untold.

        `ring`: the queue's entries; `tickets`: each slot's; from ticket `start` to before `end` they are new. `untold`:
        the class of what no end was told of.
        """
        # They are idle since some time after the last look. A slow cache looks seldom, and those count as early ones.
        looked_at, self._looked_at = self._looked_at, now
        n, strays = self.num_rows, _strays if self._twin is None else self._twin.strays
        slots, tickets, rows = strays(
            ring, tickets, self.owners, self.number[:n], self.first[:n], self.end[:n], start, end
        )
        if not len(slots):
            return
        is_late = (rows >= 0) & self._is_late[rows] & (looked_at - self.ended_at[rows] < _LATE)
        rows = np.where(is_late, rows, -1)
        starts = np.flatnonzero(np.append(True, rows[1:] != rows[:-1]))
        while self.num_rows + len(starts) > len(self.number):
            before = rows[starts]
            numbers = np.where(before >= 0, self.number[before], -1)
            self._make_room()
            rows = np.repeat(self._rows_of(numbers), np.diff(np.append(starts, len(rows))))
        origin = rows[starts]
        new = slice(self.num_rows, self.num_rows + len(starts))
        self.number[new] = np.arange(self._next, self._next + len(starts))
        self.first[new] = tickets[starts]
        self.end[new] = np.append(tickets[starts[1:] - 1], tickets[-1]) + 1
        self.kind[new] = np.where(origin >= 0, self.kind[origin], untold)
        self.ended_at[new] = np.where(origin >= 0, self.ended_at[origin], now)
        self._is_late[new] = False
        self.owners[slots] = np.repeat(self.number[new], np.diff(np.append(starts, len(slots))))
        self.num_rows += len(starts)
        self._next += len(starts)

    def choose(self, places: CohortPlaces, count: int, ring: Slots, tickets: Slots) -> tuple[Slots, Slots]:
        """The first `count` slots, and their tickets, of the rows by `places` (lower first), then the oldest row.

        `ring`: the queue's entries; `tickets`: each slot's. Rows that have no slot left are dropped on the way.
        """
        n, choose = self.num_rows, _choose if self._twin is None else self._twin.choose
        by_age = np.argsort(self.ended_at[:n], kind="stable")
        order = by_age[np.argsort(places[by_age].astype(np.int16), kind="stable")]  # of 16 bits: in linear time
        slots, each, is_over = choose(
            order, self.number[:n], self.first[:n], self.end[:n], ring, tickets, self.owners, count
        )
        is_over &= ~self._is_late[:n]
        if is_over.any():
            self._keep(~is_over)
        return slots, each

    def renumber(self, alive: Slots, head: int) -> None:
        """The queue was compacted: the entries with these tickets have those from `head` on now."""
        n = self.num_rows
        self.first[:n] = head + np.searchsorted(alive, self.first[:n])
        self.end[:n] = head + np.searchsorted(alive, self.end[:n])

    def rows_of(self, slots: Slots, tickets: Slots) -> Slots:
        """The row of each idle slot; -1 for one that no row has."""
        rows = self._rows_of(self.owners[slots])
        if not self.num_rows:
            return rows
        return np.where((rows >= 0) & (self.first[rows] <= tickets) & (tickets < self.end[rows]), rows, -1)

    def _rows_of(self, numbers: Slots) -> Slots:
        return _rows_of(self.number[: self.num_rows], numbers)

    def _make_room(self) -> None:
        """Rows that no slot carries the number of are over; room for twice as many as are left."""
        self._keep(np.isin(self.number[: self.num_rows], self.owners))
        if 2 * self.num_rows > len(self.number):
            old, n = (self.number, self.first, self.end, self.kind, self.ended_at, self._is_late), self.num_rows
            self._allot(2 * len(self.number))
            new = (self.number, self.first, self.end, self.kind, self.ended_at, self._is_late)
            for source, target in zip(old, new, strict=True):
                target[:n] = source[:n]

    def _keep(self, which: NDArray[np.bool_]) -> None:
        n, kept = self.num_rows, int(np.count_nonzero(which))
        for array in (self.number, self.first, self.end, self.kind, self.ended_at, self._is_late):
            array[:kept] = array[:n][which]
        self.num_rows = kept

    def check(self) -> None:
        """Raise AssertionError where the rows contradict themselves."""
        n = self.num_rows
        assert (np.diff(self.number[:n]) > 0).all(), "cohorts out of order"
        assert (self.first[:n] <= self.end[:n]).all(), "a cohort that ends before it begins"
        assert self.owners.max(initial=0) < self._next, "a slot of a cohort to come"


def _rows_of(known: Slots, numbers: Slots) -> Slots:
    """The row of each of these numbers; -1 where there is none."""
    if not len(known):
        return np.full(len(numbers), -1, np.int64)
    rows = np.minimum(np.searchsorted(known, numbers), len(known) - 1)
    return np.where(known[rows] == numbers, rows, -1)


def _strays(
    ring: Slots, tickets: Slots, owners: Slots, number: Slots, first: Slots, end: Slots, start: int, stop: int
) -> tuple[Slots, Slots, Slots]:
    """Of the queue's entries from ticket `start` to before `stop` those that are not in the stretch of their cohort.

    Slots, tickets, and the row of the number that the slot carries, -1 where no row has it.
    """
    each = np.arange(start, stop)
    slots = ring[each & (len(ring) - 1)].astype(np.int64)
    good = tickets[slots] == each
    slots, each = slots[good], each[good]
    rows = _rows_of(number, owners[slots])
    if not len(number):
        return slots, each, rows
    left = (rows < 0) | (each < first[rows]) | (each >= end[rows])
    return slots[left], each[left], rows[left]


def _choose(
    order: Slots, number: Slots, first: Slots, end: Slots, ring: Slots, tickets: Slots, owners: Slots, count: int
) -> tuple[Slots, Slots, NDArray[np.bool_]]:
    """The first `count` slots, and their tickets, of the rows in this order; and which rows have none left."""
    n, mask = len(order), len(ring) - 1
    sizes = np.cumsum(end[order] - first[order])
    parts: list[tuple[Slots, Slots]] = []
    done, found, is_over = 0, 0, np.zeros(n, np.bool_)
    while found < count and done < n:
        already = int(sizes[done - 1]) if done else 0
        upto = int(np.searchsorted(sizes, already + max(2 * (count - found), _FEWEST))) + 1
        rows = order[done:upto]
        done += len(rows)
        lengths = end[rows] - first[rows]
        of_row = np.repeat(np.arange(len(rows)), lengths)
        each = np.arange(len(of_row)) + np.repeat(first[rows] - np.cumsum(lengths) + lengths, lengths)
        slots = ring[each & mask].astype(np.int64)
        good = (tickets[slots] == each) & (owners[slots] == number[rows][of_row])
        is_over[rows] = np.bincount(of_row[good], minlength=len(rows)) == 0
        parts.append((slots[good], each[good]))
        found += len(parts[-1][0])
    if not parts:
        return np.zeros(0, np.int64), np.zeros(0, np.int64), is_over
    slots, each = (np.concatenate(part)[:count] for part in zip(*parts, strict=True))
    return slots, each, is_over
