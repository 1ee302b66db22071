"""SlotQueue: slots in line, taken from the front, removed from anywhere: what eviction orders are made of."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvtier.tiers.pool.index import Slots, int_type

NO_TICKET: Final = -1
_FIRST_TICKET: Final = 1 << 40  # room below for `push_front`
_MIN_WINDOW: Final = 256  # entries looked at per step: stale ones are skipped in bulk even when one victim is asked
_FEW_ENTRIES: Final = 64  # looked at one by one cost what a window costs


class SlotQueue:
    """A queue of slots on one ring: append and take in bulk, remove from the middle in O(1).

    A slot's ticket is the number of its entry. Removing a slot only tears its ticket up; the entry is skipped when it
    reaches the front. Entry number n lies at ring place n modulo capacity, so a ticket is also an address.
    """

    def __init__(self, num_slots: int) -> None:
        # Twice the slots: a compaction (O(slots)) happens at most once per `num_slots` entries added.
        self._capacity = 1 << max(6, (2 * num_slots).bit_length())
        self._ring = np.zeros(self._capacity, int_type(num_slots))
        self._tickets = np.full(num_slots, NO_TICKET, np.int64)
        self._head = self._tail = _FIRST_TICKET
        # For one at a time: an item of a memoryview costs a third of an array's.
        self._entry, self._ticket = memoryview(self._ring), memoryview(self._tickets)

    def append(self, slots: Slots) -> None:
        """Add slots that are not in the queue, in order, at the end."""
        if self._tail - self._head + len(slots) > self._capacity:
            self._compact()
        self._write(self._tail, slots)
        self._tail += len(slots)

    def push_front(self, slots: Slots) -> None:
        """Add slots that are not in the queue so that the first of them is taken next."""
        if self._tail - self._head + len(slots) > self._capacity:
            self._compact()
        self._head -= len(slots)
        self._write(self._head, slots)

    def append_few(self, slots: list[int]) -> None:
        """As `append`, of a few slots."""
        if self._tail - self._head + len(slots) > self._capacity:
            self._compact()
        ticket, entries, tickets, mask = self._tail, self._entry, self._ticket, self._capacity - 1
        for slot in slots:
            entries[ticket & mask] = slot
            tickets[slot] = ticket
            ticket += 1
        self._tail = ticket

    def remove_few(self, slots: list[int]) -> None:
        """As `remove`, of a few slots."""
        tickets = self._ticket
        for slot in slots:
            tickets[slot] = NO_TICKET

    def has_one(self, slot: int) -> bool:
        """Whether a slot is in the queue."""
        return self._ticket[slot] != NO_TICKET

    def take_few(self, count: int) -> list[int]:
        """As `take`, for few slots; behind a crowd of stale entries in bulk all the same."""
        taken: list[int] = []
        entries, tickets, mask = self._entry, self._ticket, self._capacity - 1
        end = min(self._head + _FEW_ENTRIES, self._tail)
        for ticket in range(self._head, end):
            slot = entries[ticket & mask]
            if tickets[slot] == ticket:
                tickets[slot] = NO_TICKET
                taken.append(slot)
                if len(taken) == count:
                    self._head = ticket + 1
                    return taken
        self._head = end
        return [*taken, *self.take(count - len(taken)).tolist()]

    def remove(self, slots: Slots) -> None:
        """Drop slots from the queue, wherever they are; fine if they are not in it."""
        self._tickets[slots] = NO_TICKET

    def take(self, count: int) -> Slots:
        """Remove and return the first `count` slots, or all there are."""
        taken: list[Slots] = []
        while count > 0 and self._head < self._tail:
            place = self._head & (self._capacity - 1)
            window = min(max(count, _MIN_WINDOW), self._tail - self._head, self._capacity - place)
            slots = self._ring[place : place + window]
            valid = self._valid(self._head, slots)
            if len(valid) > count:
                valid = valid[:count]
            self._head += int(valid[-1]) + 1 if len(valid) == count else window
            taken.append(slots[valid])
            count -= len(valid)
        result = np.concatenate(taken).astype(np.int64) if taken else np.zeros(0, np.int64)
        self._tickets[result] = NO_TICKET
        return result

    def tickets(self, slots: Slots) -> NDArray[np.int64]:
        """The slots' places in line, lower first; -1 where a slot is not in the queue."""
        return self._tickets[slots]

    def reset(self) -> None:
        self._tickets[:] = NO_TICKET
        self._head = self._tail = _FIRST_TICKET

    def _valid(self, first_ticket: int, slots: Slots) -> NDArray[np.intp]:
        return np.flatnonzero(self._tickets[slots] == np.arange(first_ticket, first_ticket + len(slots)))

    def _write(self, first_ticket: int, slots: Slots) -> None:
        tickets = np.arange(first_ticket, first_ticket + len(slots))
        place = first_ticket & (self._capacity - 1)
        if place + len(slots) <= self._capacity:
            self._ring[place : place + len(slots)] = slots
        else:
            self._ring[tickets & (self._capacity - 1)] = slots
        self._tickets[slots] = tickets

    def _compact(self) -> None:
        entries = self._ring[np.arange(self._head, self._tail) & (self._capacity - 1)]
        slots = entries[self._valid(self._head, entries)]
        self._head = _FIRST_TICKET
        self._tail = _FIRST_TICKET + len(slots)
        self._write(self._head, slots)
