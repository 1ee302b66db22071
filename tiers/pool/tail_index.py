"""TailIndex: the order of eviction learned from how requests return. Where nobody tells their ends, it is LRU's.

An LRU queue of slots, as LRU has it. When a request ends, its slots carry its number, and one row says when it ended
and of which class it is (`Cohorts`). The rows, not the slots, are ranked (`Returns.places`), and victims are planned
from the lowest row on for many at once, so that one victim costs little. While LRU would have hit more (`LruRival`),
the queue's own order holds.
"""

import time
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvtier.tiers.pool.cohorts import NOBODYS, Cohorts
from kvtier.tiers.pool.index import NAME_MIX, Slots, Words
from kvtier.tiers.pool.slot_queue import NO_TICKET, SlotQueue
from kvtier.tiers.returns import UNTOLD, LruRival, RequestEnd, Returns, ToldEnd

_SHARE: Final = 32  # a plan is for one slot in so many,
_LEAST: Final = 256  # or for so many,
_GOOD_FOR: Final = 2.0  # and good for so many seconds,
_AT_LEAST: Final = 32  # or until so many of it have gone,
_AT_MOST: Final = 15.0  # but no longer than so many seconds
_FEW: Final = 8  # victims that are looked at one by one
_UNTRIED: Final = 3.2  # slots asked for so often: before, what was learned of a few requests keeps less than LRU


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
        self._plan = self._plan_tickets = self._plan_owners = np.zeros(0, np.int64)
        self._planned_at, self._cursor = 0.0, 0

    # --- what requests tell -------------------------------------------------------------------------------------

    def ended(self, end: RequestEnd, words: Words, slots: Slots) -> ToldEnd:
        """A request has ended whose names are `words` `[n, 4]`, and whose blocks are in these slots, idle or in use.

        -1 for what is not there. Returns what was found out about the request.
        """
        now, num_prompt = self.clock(), end.num_prompt
        are_known = (self.owners[slots] != NOBODYS) & (slots >= 0)
        tags = (words[:num_prompt] if num_prompt else words) @ NAME_MIX
        told = self.returns.note(end, tags[:num_prompt], tags, now, are_known, self.clock)
        tickets = self._tickets[slots]
        first, last = (int(tickets.min()), int(tickets.max())) if len(slots) else (NO_TICKET, NO_TICKET)
        if first == NO_TICKET or last - first != len(slots) - 1 or (len(slots) and slots.min() < 0):
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
            self._make_plan(count)
        while count:
            if self._cursor >= len(self._plan) and not self._make_plan(count):
                break
            part = slice(self._cursor, self._cursor + count)
            slots = self._plan[part]
            self._cursor += len(slots)
            good = self._tickets[slots] == self._plan_tickets[part]
            good &= self._cohorts.owners[slots] == self._plan_owners[part]
            chosen = slots if good.all() else slots[good]
            self._tickets[chosen] = NO_TICKET
            parts.append(chosen)
            count -= len(chosen)
        return parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def _planned_few(self, count: int) -> list[int]:
        """As `_planned`, one by one."""
        victims: list[int] = []
        if self._is_old():
            self._make_plan(count)
        while len(victims) < count:
            if self._cursor >= len(self._plan) and not self._make_plan(count):
                break
            slot = int(self._plan[self._cursor])
            ticket, owner = self._plan_tickets[self._cursor], self._plan_owners[self._cursor]
            if self._ticket[slot] == ticket and self._owner[slot] == owner:
                self._ticket[slot] = NO_TICKET
                victims.append(slot)
            self._cursor += 1
        return victims

    def _is_old(self) -> bool:
        age = self.clock() - self._planned_at
        return age > _GOOD_FOR and (self._cursor >= _AT_LEAST or age > _AT_MOST)

    def _make_plan(self, count: int) -> bool:
        """The first of all idle slots, a share of them. False if there are none."""
        now, cohorts = self.clock(), self._cohorts
        self._take_in(now)
        n = cohorts.num_rows
        places = self.returns.places(cohorts.kind[:n], now - cohorts.ended_at[:n])
        wanted = max(count, len(self._tickets) // _SHARE, _LEAST)
        self._plan, self._plan_tickets = cohorts.choose(places, wanted, self._ring, self._tickets)
        self._plan_owners = cohorts.owners[self._plan]
        self._planned_at, self._cursor = now, 0
        return len(self._plan) > 0

    def _take_in(self, now: float) -> None:
        """Have every entry of the queue in a cohort."""
        start = max(self._seen, self._head, self._front_end)
        tickets = np.arange(start, self._tail)
        slots = self._ring[tickets & (self._capacity - 1)].astype(np.int64)
        good = self._tickets[slots] == tickets
        self._cohorts.take_in(slots[good], tickets[good], UNTOLD, now)
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
