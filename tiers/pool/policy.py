"""Eviction policies: the order in which a pool's idle blocks go. They know slots; names serve only the ghost.

A pool tells its policy when a slot is named (`admit`), becomes idle (`enter`) and is used again (`leave`), and asks for
the next victims (`pop`). What it may not evict after all it keeps aside (parks) and later gives back at the front.
Everything works on batches of slots, in numpy, at amortised O(1) per slot.
"""

from collections.abc import Callable
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from kvtier.tiers.pool.index import NAME_MIX, Slots, Words
from kvtier.tiers.pool.slot_queue import NO_TICKET, SlotQueue
from kvtier.tiers.pool.tail_index import TailIndex

WordsOf = Callable[[Slots], Words]

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

    # For a few slots, one by one, with the same outcome.

    def admit_few(self, slots: list[int]) -> None:
        """As `admit`."""

    def enter_few(self, slots: list[int]) -> None:
        """As `enter`."""

    def leave_few(self, slots: list[int]) -> None:
        """As `leave`."""

    def pop_few(self, count: int) -> list[int]:
        """As `pop`."""

    def evicted_few(self, slots: list[int]) -> None:
        """As `evicted`."""

    def ranks(self, slots: Slots) -> NDArray[np.int64]:
        """Where each slot stands: lower goes earlier, -1 is no victim now. No side effect."""

    def reset(self) -> None:
        """Forget everything."""


class LRU(SlotQueue):
    """Least recently used first: a block's last use ends when its last lease is released. One queue is all of it."""

    def __init__(self, num_slots: int, words_of: WordsOf) -> None:
        super().__init__(num_slots)

    enter = SlotQueue.append
    leave = SlotQueue.remove
    pop = SlotQueue.take
    give_back = SlotQueue.push_front
    ranks = SlotQueue.tickets
    enter_few = SlotQueue.append_few
    leave_few = SlotQueue.remove_few
    pop_few = SlotQueue.take_few
    admit = None

    def evicted(self, slots: Slots | list[int]) -> None:
        """Nothing to note."""

    admit_few = evicted_few = evicted


class Ghosts:
    """The last names evicted, about as many as the pool has slots. Two names that share a place push each other out."""

    def __init__(self, num_slots: int) -> None:
        self._mask = np.uint64((1 << (4 * num_slots - 1).bit_length()) - 1)
        self._tags = np.zeros(int(self._mask) + 1, np.uint64)
        self._times = np.zeros(int(self._mask) + 1, np.int64)  # in names added; 0 is never
        self._size = self._now = num_slots
        self._tag, self._time = memoryview(self._tags), memoryview(self._times)  # for one at a time

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

    def add_few(self, words: Words) -> None:
        """As `add`, of few."""
        mask = len(self._tag) - 1
        for tag in (words @ NAME_MIX).tolist():
            self._now += 1
            self._tag[tag & mask] = tag
            self._time[tag & mask] = self._now

    def hold_few(self, words: Words) -> list[bool]:
        """As `holds`, of few."""
        mask, gone = len(self._tag) - 1, self._now - self._size
        tags: list[int] = (words @ NAME_MIX).tolist()
        return [self._tag[tag & mask] == tag and self._time[tag & mask] > gone for tag in tags]

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
        # For one at a time.
        self._use, self._used, self._of_main = (
            memoryview(flags.view(np.uint8)) for flags in (self._uses, self._in_use, self._in_main)
        )

    def admit(self, slots: Slots) -> None:
        """Choose each block's queue: main if its name is remembered, small if not."""
        self._num_small -= int(np.count_nonzero(self._small.tickets(slots) != NO_TICKET))
        self._small.remove(slots)
        self._main.remove(slots)
        self._uses[slots] = 0
        self._in_use[slots] = True
        self._in_main[slots] = self._ghosts.holds(self._words_of(slots))

    def enter(self, slots: Slots) -> None:
        """A block still in its queue keeps its place there; others go to the end of the queue chosen for them."""
        self._in_use[slots] = False
        out = slots[(self._small.tickets(slots) == NO_TICKET) & (self._main.tickets(slots) == NO_TICKET)]
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

    def admit_few(self, slots: list[int]) -> None:
        known = self._ghosts.hold_few(self._words_of(np.array(slots, np.int64)))
        for slot, is_known in zip(slots, known, strict=True):
            self._num_small -= self._small.has_one(slot)
            self._use[slot], self._used[slot], self._of_main[slot] = 0, 1, is_known
        self._small.remove_few(slots)
        self._main.remove_few(slots)

    def enter_few(self, slots: list[int]) -> None:
        for slot in slots:
            self._used[slot] = 0
            if not (self._small.has_one(slot) or self._main.has_one(slot)):
                (self._main if self._of_main[slot] else self._small).append_few([slot])
                self._num_small += not self._of_main[slot]

    def leave_few(self, slots: list[int]) -> None:
        for slot in slots:
            self._used[slot] = 1
            if self._use[slot] < _MAX_USES:
                self._use[slot] += 1

    def pop_few(self, count: int) -> list[int]:
        """One entry after the other, from the queue that `pop` would take it from."""
        victims: list[int] = []
        while len(victims) < count:
            from_small = self._num_small > self._small_target
            taken = (self._small if from_small else self._main).take_few(1)
            if not taken:
                if from_small:
                    self._num_small = 0
                from_small = not from_small
                taken = (self._small if from_small else self._main).take_few(1)
                if not taken:
                    self._num_small = 0
                    break
            slot = taken[0]
            self._num_small -= from_small
            if self._used[slot]:
                self._of_main[slot] |= from_small  # used while at the end of the queue: worth keeping
            elif from_small and self._use[slot] >= _HOT:
                self._of_main[slot], self._use[slot] = 1, 0
                self._main.append_few(taken)
            elif not from_small and self._use[slot]:
                self._use[slot] -= 1
                self._main.append_few(taken)
            else:
                victims.append(slot)
        return victims

    def evicted_few(self, slots: list[int]) -> None:
        if seen_once := [slot for slot in slots if not self._of_main[slot]]:
            self._ghosts.add_few(self._words_of(np.array(seen_once, np.int64)))

    def ranks(self, slots: Slots) -> NDArray[np.int64]:
        """Small queue before main queue, each by place in line: an estimate, as uses decide who gets another round."""
        small, main = self._small.tickets(slots), self._main.tickets(slots)
        ranks = np.where(small != NO_TICKET, small, np.where(main != NO_TICKET, main + (1 << 61), NO_TICKET))
        return np.where(self._in_use[slots], NO_TICKET, ranks)

    def reset(self) -> None:
        self._small.reset()
        self._main.reset()
        self._num_small = 0
        self._ghosts.reset()


POLICIES: Final[dict[str, Callable[[int, WordsOf], EvictionPolicy]]] = {"lru": LRU, "s3fifo": S3FIFO, "tail": TailIndex}


def make_policy(name: str, num_slots: int, words_of: WordsOf) -> EvictionPolicy:
    """The policy called `name` for slots 0 … num_slots - 1, whose names `words_of` tells.

    ValueError for a policy that is not in POLICIES.
    """
    if name not in POLICIES:
        raise ValueError(f"policy {name!r}: use one of {', '.join(POLICIES)}")
    return POLICIES[name](num_slots, words_of)
