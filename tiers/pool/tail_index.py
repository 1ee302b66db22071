"""TailIndex: the order of eviction learned from how requests return. Where nobody tells their ends, it is LRU's.

An LRU queue of slots, as LRU has it. When a request ends, its slots carry its number, and one row says when it ended
and of which class it is (`Cohorts`). The rows, not the slots, are ranked (`Returns.places`), and victims are planned
from the lowest row on for many at once, so that one victim costs little. While LRU would have hit more (`LruRival`),
the queue's own order holds.
"""

import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtier.tiers.pool.cohorts import NOBODYS, Cohorts
from kvtier.tiers.pool.index import Slots, Words
from kvtier.tiers.pool.slot_queue import NO_TICKET, SlotQueue
from kvtier.tiers.returns import TAIL_NAMES, UNTOLD, FoundTail, LruRival, RequestEnd, Returns, ToldEnd

_SHARE: Final = 32  # a plan is for one slot in so many,
_LEAST: Final = 256  # or for so many,
_GOOD_FOR: Final = 2.0  # and good for so many seconds,
_AT_LEAST: Final = 32  # or until so many of it have gone,
_AT_MOST: Final = 15.0  # but no longer than so many seconds
_FEW: Final = 8  # victims that are looked at one by one
_UNTRIED: Final = 3.2  # slots asked for so often: before, what was learned of a few requests keeps less than LRU


Plan = tuple[Slots, Slots, Slots]
"""Victims, with the ticket and the owner that each had when it was planned."""


class EndedBlocks(NamedTuple):
    """What the pool, and the table of tails, know of the blocks of a request that has ended."""

    slots: Slots  # of each name, ready or not, -1 where there is none
    first: int  # the lowest ticket, if all are idle and have tickets in a row; else NO_TICKET
    found: FoundTail
    own: int  # of those in common with `found`, or else of the prompt's: here, and here when an earlier request ended
    num_asked: int  # blocks of the prompt
    last_tags: Sequence[int]  # the tags of the last TAIL_NAMES of `RequestEnd.tail_names`


class TailIndex(SlotQueue):
    """The policy "tail". An LRU queue out of whose middle victims may come."""

    admit = None

    def __init__(self, num_slots: int, words_of: Callable[[Slots], Words]) -> None:
        super().__init__(num_slots)
        self.clock: Callable[[], float] = time.monotonic
        self.rival = LruRival(num_slots, _UNTRIED * num_slots)
        self.returns = Returns(self.rival)
        self._cohorts = Cohorts(num_slots)
        self.owners = self._cohorts.owners
        self._owner = memoryview(self.owners)  # for one at a time
        self._start()

    def _start(self) -> None:
        """Nothing told, nothing planned."""
        self._front_end = self._head  # entries before it were given back: they go first
        self._seen = self._head  # entries before it are in their cohorts
        self._drop_plan()

    def _drop_plan(self) -> None:
        nothing = np.zeros(0, np.int64)
        self.plan: Plan = nothing, nothing, nothing
        self._planned_at, self.cursor = 0.0, 0  # `plan`'s entries before the cursor are done with

    # --- what requests tell -------------------------------------------------------------------------------------

    def ended(self, end: RequestEnd, slots: Slots, mixed: NDArray[np.uint64]) -> ToldEnd:
        """A request has ended whose blocks are in these slots, idle or in use; `mixed`: its names' mixed words.

        -1 for what is not there. Returns what was found out about the request.
        """
        now = self.clock()
        return self.heard(end, self.blocks_of(slots, mixed, end.num_prompt, now - end.seconds), now)

    def blocks_of(self, slots: Slots, mixed: NDArray[np.uint64], num_prompt: int, arrived: float) -> EndedBlocks:
        """What is known of a request's blocks; arguments as of `ended`. It counts as a use of the tail it continues."""
        tags = mixed[:num_prompt]
        found = self.returns.tails.find(tags, arrived)
        asked = slots[: found.num_common if found.user else len(tags)]
        own = int(np.count_nonzero((self.owners[asked] != NOBODYS) & (asked >= 0)))
        last_tags = (tags if num_prompt else mixed)[-TAIL_NAMES:].tolist()
        first = last = NO_TICKET
        if len(slots) and slots.min() >= 0:
            tickets = self._tickets[slots]
            first, last = int(tickets.min()), int(tickets.max())
        is_row = first != NO_TICKET and last - first == len(slots) - 1
        return EndedBlocks(slots, first if is_row else NO_TICKET, found, own, len(tags), last_tags)

    def heard(self, end: RequestEnd, blocks: EndedBlocks, now: float) -> ToldEnd:
        """As `ended`, with what is known of the request's blocks."""
        slots, first, found, own, num_asked, last_tags = blocks
        told = self.returns.heard(end, found, own, len(slots), num_asked, last_tags, now, self.clock)
        last = first + len(slots) - 1
        if first == NO_TICKET:
            slots = slots[slots >= 0]
            if not len(slots):
                return told
            first, last = self._bring_together(slots)
        self._cohorts.add(slots, first, last + 1, told.kind, now, is_late=last - first + 1 < len(slots))
        return told

    def _bring_together(self, slots: Slots) -> tuple[int, int]:
        """Give those of a chain's slots that are idle tickets in a row; returns the first and the last of them.

        A request used its blocks until it ended, even where only L1's copy of them was read.
        """
        idle = slots[self._tickets[slots] >= self._front_end]
        if not len(idle):
            return self._tail, self._tail - 1
        tickets = self._tickets[idle]
        first, last = int(tickets.min()), int(tickets.max())
        if last - first == len(idle) - 1:
            return first, last
        self.remove(idle)
        self.append(idle[::-1])
        return self._tail - len(idle), self._tail - 1

    def gaps(self) -> NDArray[np.float64]:
        """`[ages]`: requests that returned after so long, as `Returns.gaps`. May be called beside everything else."""
        return self.returns.gaps()

    # --- the policy's verbs that are not a queue's --------------------------------------------------------------

    enter = SlotQueue.append
    leave = SlotQueue.remove
    enter_few = SlotQueue.append_few
    leave_few = SlotQueue.remove_few

    @property
    def is_lrus(self) -> bool:
        """Whether the order is LRU's for now."""
        return not self._cohorts.num_told or self.rival.leads

    def give_back(self, slots: Slots) -> None:
        """Put slots that were popped back at the front, in this order."""
        before = self._head
        if self._front_end <= before:
            self._front_end = before
        self.push_front(slots)

    def goes_by_plan(self, count: int) -> bool:
        """Whether all of so many victims are the next of the plan, which is a new one if it had grown old."""
        if self._head < self._front_end or self.is_lrus:
            return False
        if self._is_old():
            self.make_plan(count)
        return True

    def pop(self, count: int) -> Slots:
        """Remove and return the next victims, at most `count`; fewer only when nothing is left."""
        if self._head >= self._front_end and not self.is_lrus and count > _FEW:
            return self._planned(count)
        return np.array(self.pop_few(count), np.int64)

    def pop_few(self, count: int) -> list[int]:
        """As `pop`."""
        victims = self._front(count) if self._head < self._front_end else []
        if len(victims) < count:
            left = count - len(victims)
            if self.is_lrus:
                victims += self.take_few(left)
            elif left > _FEW:
                victims += self._planned(left).tolist()
            else:
                victims += self._planned_few(left)
        return victims

    def make_plan(self, count: int) -> bool:
        """Plan anew: the first of all idle slots, a share of them, at least `count`. False if there are none."""
        now, cohorts = self.clock(), self._cohorts
        self._take_in(now)
        n = cohorts.num_rows
        places = self.returns.places(cohorts.kind[:n], now - cohorts.ended_at[:n])
        wanted = max(count, len(self._tickets) // _SHARE, _LEAST)
        slots, tickets = cohorts.choose(places, wanted, self._ring, self._tickets)
        self.plan, self._planned_at, self.cursor = (slots, tickets, cohorts.owners[slots]), now, 0
        return len(slots) > 0

    def evicted(self, slots: Slots) -> None:
        """Nobody's from now on: the next block in the slot was not here before."""
        self._cohorts.owners[slots] = NOBODYS

    def evicted_few(self, slots: list[int]) -> None:
        """As `evicted`."""
        for slot in slots:
            self._owner[slot] = NOBODYS

    def admit_few(self, slots: list[int]) -> None:
        """Nothing to note."""

    def ranks(self, slots: Slots) -> NDArray[np.int64]:
        """By what was given back, then by place, then by age."""
        tickets = self._tickets[slots]
        if self.is_lrus:
            return tickets
        cohorts, now = self._cohorts, self.clock()
        self._take_in(now)
        rows = cohorts.rows_of(slots, tickets)
        kinds = np.where(rows >= 0, cohorts.kind[rows], UNTOLD)
        since = np.where(rows >= 0, cohorts.ended_at[rows], now)
        places = self.returns.places(kinds, now - since)
        # 12 bits of place above 48 of age: a row's number, then the order of its tickets.
        order = np.argsort(np.lexsort((tickets, since)))
        ranks = np.where(tickets < self._front_end, tickets & ((1 << 41) - 1), ((places + 1) << 48) + order)
        return np.where(tickets == NO_TICKET, NO_TICKET, ranks)

    def reset(self) -> None:
        super().reset()
        self._cohorts.reset()
        self._start()

    def check(self) -> None:
        """Raise AssertionError where the policy contradicts itself."""
        self._cohorts.check()
        assert self._seen <= self._tail, "entries seen that are not there"
        idle = np.flatnonzero(self._tickets != NO_TICKET)
        at = self._ring[self._tickets[idle] & (self._capacity - 1)]
        assert (at == idle).all(), "a ticket that leads to another slot"

    # --- inside -------------------------------------------------------------------------------------------------

    def _front(self, count: int) -> list[int]:
        """Those given back, first."""
        found: list[int] = []
        while self._head < self._front_end and len(found) < count:
            slot = self._entry[self._head & (self._capacity - 1)]
            if self._ticket[slot] == self._head:
                self._ticket[slot] = NO_TICKET
                found.append(slot)
            self._head += 1
        return found

    def _planned(self, count: int) -> Slots:
        """The next of the plan that are still as they were planned; a new plan when it has ended or grown old."""
        parts: list[Slots] = []
        if self._is_old():
            self.make_plan(count)
        while count:
            if self.cursor >= len(self.plan[0]) and not self.make_plan(count):
                break
            slots, tickets, owners = (each[self.cursor : self.cursor + count] for each in self.plan)
            self.cursor += len(slots)
            good = (self._tickets[slots] == tickets) & (self._cohorts.owners[slots] == owners)
            chosen = slots if good.all() else slots[good]
            self._tickets[chosen] = NO_TICKET
            parts.append(chosen)
            count -= len(chosen)
        return parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def _planned_few(self, count: int) -> list[int]:
        """As `_planned`, one by one."""
        victims: list[int] = []
        if self._is_old():
            self.make_plan(count)
        while len(victims) < count:
            if self.cursor >= len(self.plan[0]) and not self.make_plan(count):
                break
            slot, ticket, owner = (int(each[self.cursor]) for each in self.plan)
            if self._ticket[slot] == ticket and self._owner[slot] == owner:
                self._ticket[slot] = NO_TICKET
                victims.append(slot)
            self.cursor += 1
        return victims

    def _is_old(self) -> bool:
        age = self.clock() - self._planned_at
        return age > _GOOD_FOR and (self.cursor >= _AT_LEAST or age > _AT_MOST)

    def _take_in(self, now: float) -> None:
        """Have every entry of the queue in a cohort."""
        start = max(self._seen, self._head, self._front_end)
        self._cohorts.take_in(self._ring, self._tickets, start, self._tail, UNTOLD, now)
        self._seen = self._tail

    def _compact(self) -> None:
        numbers = np.arange(self._head, self._tail)
        slots = self._ring[numbers & (self._capacity - 1)]
        alive = numbers[self._tickets[slots] == numbers]
        super()._compact()
        self._front_end = self._head + int(np.searchsorted(alive, self._front_end))
        self._seen = self._head + int(np.searchsorted(alive, self._seen))
        self._cohorts.renumber(alive, self._head)
        self._drop_plan()
