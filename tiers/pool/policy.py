"""Eviction policies: the order in which a pool's idle blocks go. They know slots; names serve only the ghost.

A pool tells its policy when a slot is named (`admit`), becomes idle (`enter`) and is used again (`leave`), and asks for
the next victims (`pop`). What it may not evict after all it keeps aside (parks) and later gives back at the front.
Everything works on batches of slots, in numpy, at amortised O(1) per slot.
"""

from collections.abc import Callable
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from kvtier.tiers.pool.index import NAME_MIX, Slots, Words, int_type

WordsOf = Callable[[Slots], Words]

_NO_TICKET: Final = -1
_FIRST_TICKET: Final = 1 << 40  # room below for `push_front`
_MIN_WINDOW: Final = 256  # entries looked at per step: stale ones are skipped in bulk even when one victim is asked
_FEW_ENTRIES: Final = 64  # looked at one by one cost what a window costs
_SMALL_SHARE: Final = 10  # S3-FIFO: one slot in so many belongs to the small queue
_HOT: Final = 2  # S3-FIFO: uses in the small queue that earn a place in the main one
_MAX_USES: Final = 3


class EvictionPolicy(Protocol):
    """The order of idle blocks. Not thread-safe: the pool calls it under its lock. Slots in a batch are distinct."""

    @property
    def admit(self) -> Callable[[Slots], None] | None:
        """Notes that these slots were just given to new blocks; they are in use, not yet victims. None: no need."""

    def enter(self, slots: Slots) -> None:
        """Make idle slots victims, the first of them to go first. They are not victims already."""

    def leave(self, slots: Slots) -> None:
        """Count a use of the slots and make them no victims until they `enter` again; fine if they are none."""

    def pop(self, count: int) -> Slots:
        """Remove and return the next victims, at most `count`; fewer only when nothing is left."""

    def give_back(self, slots: Slots) -> None:
        """Put slots that were popped back at the front, in this order."""

    def evicted(self, slots: Slots) -> None:
        """Note that popped slots lose their blocks."""

    def enter_one(self, slot: int) -> None:
        """As `enter`, of one slot."""

    def leave_one(self, slot: int) -> None:
        """As `leave`, of one slot."""

    def pop_few(self, count: int) -> list[int]:
        """As `pop`, for few victims."""

    def evicted_few(self, slots: list[int]) -> None:
        """As `evicted`, of few."""

    def ranks(self, slots: Slots) -> NDArray[np.int64]:
        """Where each slot stands: lower goes earlier, -1 is no victim now. No side effect."""

    def reset(self) -> None:
        """Forget everything."""


class SlotQueue:
    """A queue of slots on one ring: append and take in bulk, remove from the middle in O(1).

    A slot's ticket is the number of its entry. Removing a slot only tears its ticket up; the entry is skipped when it
    reaches the front. Entry number n lies at ring place n modulo capacity, so a ticket is also an address.
    """

    def __init__(self, num_slots: int) -> None:
        # Twice the slots: a compaction (O(slots)) happens at most once per `num_slots` entries added.
        self._capacity = 1 << max(6, (2 * num_slots).bit_length())
        self._ring = np.zeros(self._capacity, int_type(num_slots))
        self._tickets = np.full(num_slots, _NO_TICKET, np.int64)
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

    def append_one(self, slot: int) -> None:
        """As `append`, of one slot."""
        if self._tail - self._head >= self._capacity:
            self._compact()
        ticket = self._tail
        self._entry[ticket & self._capacity - 1] = slot
        self._ticket[slot] = ticket
        self._tail = ticket + 1

    def remove_one(self, slot: int) -> None:
        """As `remove`, of one slot."""
        self._ticket[slot] = _NO_TICKET

    def take_few(self, count: int) -> list[int]:
        """As `take`, for few slots; behind a crowd of stale entries in bulk all the same."""
        taken: list[int] = []
        for ticket in range(self._head, min(self._head + _FEW_ENTRIES, self._tail)):
            slot = self._entry[ticket & self._capacity - 1]
            self._head = ticket + 1
            if self._ticket[slot] == ticket:
                self._ticket[slot] = _NO_TICKET
                taken.append(slot)
                if len(taken) == count:
                    return taken
        return [*taken, *self.take(count - len(taken)).tolist()]

    def remove(self, slots: Slots) -> None:
        """Drop slots from the queue, wherever they are; fine if they are not in it."""
        self._tickets[slots] = _NO_TICKET

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
        self._tickets[result] = _NO_TICKET
        return result

    def tickets(self, slots: Slots) -> NDArray[np.int64]:
        """The slots' places in line, lower first; -1 where a slot is not in the queue."""
        return self._tickets[slots]

    def reset(self) -> None:
        self._tickets[:] = _NO_TICKET
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


class LRU(SlotQueue):
    """Least recently used first: a block's last use ends when its last lease is released. One queue is all of it."""

    def __init__(self, num_slots: int, words_of: WordsOf) -> None:
        super().__init__(num_slots)

    enter = SlotQueue.append
    leave = SlotQueue.remove
    pop = SlotQueue.take
    give_back = SlotQueue.push_front
    ranks = SlotQueue.tickets
    enter_one = SlotQueue.append_one
    leave_one = SlotQueue.remove_one
    pop_few = SlotQueue.take_few
    admit = None

    def evicted(self, slots: Slots | list[int]) -> None:
        """Nothing to note."""

    evicted_few = evicted


class Ghosts:
    """The last names evicted, about as many as the pool has slots. Two names that share a place push each other out."""

    def __init__(self, num_slots: int) -> None:
        self._mask = np.uint64((1 << (4 * num_slots - 1).bit_length()) - 1)
        self._tags = np.zeros(int(self._mask) + 1, np.uint64)
        self._times = np.zeros(int(self._mask) + 1, np.int64)  # in names added; 0 is never
        self._size = self._now = num_slots

    def add(self, words: Words) -> None:
        tags = words @ NAME_MIX
        places = tags & self._mask
        self._tags[places] = tags
        self._times[places] = np.arange(self._now, self._now + len(tags)) + 1
        self._now += len(tags)

    def holds(self, words: Words) -> NDArray[np.bool_]:
        tags = words @ NAME_MIX
        places = tags & self._mask
        known: NDArray[np.bool_] = (self._tags[places] == tags) & (self._times[places] > self._now - self._size)
        return known

    def reset(self) -> None:
        self._times[:] = 0


class S3FIFO:
    """S3-FIFO (Yang et al., SOSP 2023): a small queue filters one-hit wonders, a main queue keeps what was used again.

    New blocks enter the small queue, a tenth of the pool, and leave it for the main one if used twice meanwhile, else
    they go. The names of the gone are remembered: a block that returns enters the main queue at once. The main queue
    gives a block as many further rounds as it had uses, at most three.
    """

    def __init__(self, num_slots: int, words_of: WordsOf) -> None:
        self._small = SlotQueue(num_slots)
        self._main = SlotQueue(num_slots)
        self._small_target = max(1, num_slots // _SMALL_SHARE)
        self._num_small = 0
        self._uses = np.zeros(num_slots, np.uint8)
        self._in_use = np.zeros(num_slots, np.bool_)
        self._in_main = np.zeros(num_slots, np.bool_)
        self._ghosts = Ghosts(num_slots)
        self._words_of = words_of

    def admit(self, slots: Slots) -> None:
        """Choose each block's queue: main if its name is remembered, small if not."""
        self._num_small -= int(np.count_nonzero(self._small.tickets(slots) != _NO_TICKET))
        self._small.remove(slots)
        self._main.remove(slots)
        self._uses[slots] = 0
        self._in_use[slots] = True
        self._in_main[slots] = self._ghosts.holds(self._words_of(slots))

    def enter(self, slots: Slots) -> None:
        """A block still in its queue keeps its place there; others go to the end of the queue chosen for them."""
        self._in_use[slots] = False
        out = slots[(self._small.tickets(slots) == _NO_TICKET) & (self._main.tickets(slots) == _NO_TICKET)]
        to_main = self._in_main[out]
        self._main.append(out[to_main])
        self._small.append(out[~to_main])
        self._num_small += int(np.count_nonzero(~to_main))

    def leave(self, slots: Slots) -> None:
        """Count the use. The slots keep their places: `pop` passes over slots in use."""
        self._uses[slots] = np.minimum(self._uses[slots] + 1, _MAX_USES)
        self._in_use[slots] = True

    def pop(self, count: int) -> Slots:
        """Take from the small queue while it is above its share or the main one is empty, else from the main one."""
        victims: list[Slots] = []
        while count > 0:
            excess = self._num_small - self._small_target
            batch = self._pop_small(min(count, excess)) if excess > 0 else self._pop_main(count)
            if batch is None:  # that queue is empty
                batch = self._pop_main(count) if excess > 0 else self._pop_small(count)
            if batch is None:
                break
            victims.append(batch)
            count -= len(batch)
        return np.concatenate(victims) if victims else np.zeros(0, np.int64)

    def _pop_small(self, count: int) -> Slots | None:
        batch = self._small.take(count)
        if not len(batch):
            self._num_small = 0
            return None
        self._num_small -= len(batch)
        in_use = self._in_use[batch]
        self._in_main[batch[in_use]] = True  # used while at the end of the queue: worth keeping when it comes back
        batch = batch[~in_use]
        hot = self._uses[batch] >= _HOT
        promoted = batch[hot]
        self._in_main[promoted] = True
        self._uses[promoted] = 0
        self._main.append(promoted)
        return batch[~hot]

    def _pop_main(self, count: int) -> Slots | None:
        batch = self._main.take(count)
        if not len(batch):
            return None
        batch = batch[~self._in_use[batch]]
        again = self._uses[batch] > 0
        self._uses[batch[again]] -= 1
        self._main.append(batch[again])
        return batch[~again]

    def give_back(self, slots: Slots) -> None:
        """Put each slot in front of the queue it came from."""
        from_main = self._in_main[slots]
        self._main.push_front(slots[from_main])
        self._small.push_front(slots[~from_main])
        self._num_small += int(np.count_nonzero(~from_main))

    def evicted(self, slots: Slots) -> None:
        """Remember the blocks that leave from the small queue."""
        self._ghosts.add(self._words_of(slots[~self._in_main[slots]]))

    def enter_one(self, slot: int) -> None:
        self.enter(np.array([slot]))

    def leave_one(self, slot: int) -> None:
        self.leave(np.array([slot]))

    def pop_few(self, count: int) -> list[int]:
        return [int(slot) for slot in self.pop(count)]

    def evicted_few(self, slots: list[int]) -> None:
        self.evicted(np.array(slots, np.int64))

    def ranks(self, slots: Slots) -> NDArray[np.int64]:
        """Small queue before main queue, each by place in line: an estimate, as uses decide who gets another round."""
        small, main = self._small.tickets(slots), self._main.tickets(slots)
        ranks = np.where(small != _NO_TICKET, small, np.where(main != _NO_TICKET, main + (1 << 61), _NO_TICKET))
        return np.where(self._in_use[slots], _NO_TICKET, ranks)

    def reset(self) -> None:
        self._small.reset()
        self._main.reset()
        self._num_small = 0
        self._ghosts.reset()


POLICIES: Final[dict[str, Callable[[int, WordsOf], EvictionPolicy]]] = {"lru": LRU, "s3fifo": S3FIFO}


def make_policy(name: str, num_slots: int, words_of: WordsOf) -> EvictionPolicy:
    """The policy called `name` for slots 0 … num_slots - 1, whose names `words_of` tells.

    ValueError for a policy that is not in POLICIES.
    """
    if name not in POLICIES:
        raise ValueError(f"policy {name!r}: use one of {', '.join(POLICIES)}")
    return POLICIES[name](num_slots, words_of)
