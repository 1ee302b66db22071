"""TailIndex: the order of eviction learned from how requests return. Where nobody tells their ends, it is LRU's.

An LRU queue, out of which the blocks of a request are taken as one record when it ends. A record stands where its class
and its age place it (`Returns`), and loses its last blocks first. Blocks of no record stand where the time of
their last use places them. The order is planned for many victims at once, so that one victim costs little.
"""

import time
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvtier.tiers.pool.index import NAME_MIX, Slots, Words, int_type, to_words
from kvtier.tiers.pool.slot_queue import NO_TICKET, SlotQueue
from kvtier.tiers.returns import UNTOLD, RequestEnd, Returns

_RECORDED: Final = 1 << 62  # the ticket of an idle slot that is in a record: no entry of the queue has it
_SHARE: Final = 32  # a plan is for one slot in so many,
_LEAST: Final = 256  # or for so many,
_GOOD_FOR: Final = 2.0  # and good for so many seconds
_NO_RECORD: Final = -1
_LATE: Final = 60.0  # seconds after a request's end in which its blocks still become idle as its own
_MANY: Final = 1024  # records of which some slots were in use: looked at when there are so many
_MARKS: Final = 4096  # times kept of the queue's entries


class TailIndex(SlotQueue):
    """The policy "tail". As an LRU queue of which entries may be taken out into records."""

    admit = None

    def __init__(self, num_slots: int, words_of: Callable[[Slots], Words]) -> None:
        super().__init__(num_slots)
        self.clock: Callable[[], float] = time.monotonic
        self._returns = Returns()
        self._record = np.full(num_slots, _NO_RECORD, int_type(num_slots))  # that a slot was in last
        self._start()

    def _start(self) -> None:
        """No record, no plan."""
        self._front_end = self._head  # entries before it were given back: they go first
        self._members: dict[int, Slots] = {}  # record → its slots, the first of them to go first
        self._ended_at = np.zeros(64)
        self._kind = np.zeros(64, np.int64)
        self._left = np.zeros(64, np.int64)  # slots whose last record it is; 0: the record is free
        self._free = list(range(63, -1, -1))
        self._in_use: list[int] = []  # records of which some slots were not idle yet when their request ended
        self._dead: list[int] = []  # free from the next plan on: until then the old one may name them
        self._plan, self._plan_tickets, self._plan_records = (np.zeros(0, np.int64) for _ in range(3))
        self._planned_at, self._cursor = 0.0, 0
        self._mark_tickets: list[int] = []
        self._mark_times: list[float] = []

    # --- what requests tell -------------------------------------------------------------------------------------

    def ended(self, end: RequestEnd, slots: Slots) -> None:
        """A request has ended whose blocks are in these slots, idle or in use; -1 for what is not there."""
        tags = to_words(end.tail_names) @ NAME_MIX
        kind = self._returns.note(end, tags[: end.num_prompt], tags, self.clock())
        slots = slots[slots >= 0]
        if not len(slots):
            return
        self._unrecord(slots)
        if not self._free:
            self._make_room()
        record = self._free.pop()
        self._record[slots] = record
        self._ended_at[record], self._kind[record], self._left[record] = self.clock(), kind, len(slots)
        self._members[record] = slots[::-1]
        idle = slots[self._tickets[slots] != NO_TICKET]
        self._tickets[idle] = _RECORDED
        if len(idle) < len(slots):
            self._in_use.append(record)
            if len(self._in_use) > _MANY:
                self._take_in(self._ended_at[record])

    def gaps(self) -> NDArray[np.float64]:
        """`[ages]`: requests that returned after so long, as `Returns.gaps`. May be called beside everything else."""
        return self._returns.gaps()

    # --- the policy's verbs that are not a queue's --------------------------------------------------------------

    enter = SlotQueue.append
    leave = SlotQueue.remove
    enter_few = SlotQueue.append_few
    leave_few = SlotQueue.remove_few

    def give_back(self, slots: Slots) -> None:
        """Put slots that were popped back at the front, in this order."""
        before = self._head
        if self._front_end <= before:
            self._front_end = before
        self.push_front(slots)

    def pop(self, count: int) -> Slots:
        """Remove and return the next victims, at most `count`; fewer only when nothing is left."""
        given_back = self._front(count) if self._head < self._front_end else []
        if not self._members:
            return np.concatenate([np.array(given_back, np.int64), self.take(count - len(given_back))])
        return np.array(given_back + self._planned(count - len(given_back)), np.int64)

    def pop_few(self, count: int) -> list[int]:
        """As `pop`."""
        given_back = self._front(count) if self._head < self._front_end else []
        if len(given_back) == count:
            return given_back
        if not self._members:
            return given_back + self.take_few(count - len(given_back))
        return given_back + self._planned(count - len(given_back))

    def evicted(self, slots: Slots | list[int]) -> None:
        """Nothing to note."""

    admit_few = evicted_few = evicted

    def ranks(self, slots: Slots) -> NDArray[np.int64]:
        """By what was given back, then by place, then by age."""
        tickets, records = self._tickets[slots], self._record[slots]
        is_recorded, now = tickets == _RECORDED, self.clock()
        kinds = np.where(is_recorded, self._kind[records], UNTOLD)
        since = np.where(is_recorded, self._ended_at[records], self._times_of(tickets))
        places = self._returns.places(kinds, now - since) if self._members else np.zeros(len(slots), np.int64)
        # 12 bits of place above 48 bits of age: a ticket, or a record's time in milliseconds.
        ages = np.where(is_recorded, np.clip(since * 1e3, 0, (1 << 47) - 1).astype(np.int64), tickets & ((1 << 48) - 1))
        ranks = np.where(tickets < self._front_end, tickets & ((1 << 41) - 1), ((places + 1) << 48) + ages)
        return np.where(tickets == NO_TICKET, NO_TICKET, ranks)

    def reset(self) -> None:
        super().reset()
        self._record[:] = _NO_RECORD
        self._start()

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
        if found:
            self._unrecord(np.array(found, np.int64))
        return found

    def _planned(self, count: int) -> list[int]:
        """The next of the plan that are still as they were planned; a new plan when it has ended or grown old."""
        victims: list[int] = []
        if self.clock() - self._planned_at > _GOOD_FOR:
            self._make_plan(count)
        while len(victims) < count:
            if self._cursor >= len(self._plan):
                self._make_plan(count - len(victims))
                if not len(self._plan):
                    break
            part = slice(self._cursor, self._cursor + count - len(victims))
            slots = self._plan[part]
            self._cursor += len(slots)
            good = self._tickets[slots] == self._plan_tickets[part]
            good &= self._record[slots] == self._plan_records[part]
            chosen = slots if good.all() else slots[good]
            self._tickets[chosen] = NO_TICKET
            self._unrecord(chosen)
            victims += chosen.tolist()
        return victims

    def _make_plan(self, count: int) -> None:
        """The first of all idle slots, a share of them."""
        now, wanted = self.clock(), max(count, len(self._tickets) // _SHARE, _LEAST)
        self._mark(now)
        self._take_in(now)
        self._free += self._dead
        self._dead.clear()
        slots, places, since = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], [np.zeros(0)]
        records = np.flatnonzero(self._left)
        where = self._returns.places(self._kind[records], now - self._ended_at[records])
        order, planned = np.lexsort((self._ended_at[records], where)), 0
        for i in order.tolist():
            if planned >= wanted:
                break
            members = self._still_idle(int(records[i]))
            planned += len(members)
            slots.append(members)
            places.append(np.full(len(members), where[i]))
            since.append(np.full(len(members), self._ended_at[records[i]]))
        untold = self._first_untold(wanted)
        times = self._times_of(self._tickets[untold])
        slots.append(untold)
        places.append(self._returns.places(np.full(len(untold), UNTOLD), now - times))
        since.append(times)
        every = np.concatenate(slots)
        first = np.lexsort((np.concatenate(since), np.concatenate(places)))[:wanted]
        self._plan = every[first]
        self._plan_tickets, self._plan_records = self._tickets[self._plan], self._record[self._plan].astype(np.int64)
        self._planned_at, self._cursor = now, 0

    def _take_in(self, now: float) -> None:
        """Slots that became idle after their request's end go from the queue to its record."""
        left = []
        for record in dict.fromkeys(self._in_use):
            if not self._left[record]:
                continue
            members = self._own_members(record)
            tickets = self._tickets[members]
            self._tickets[members[(tickets >= self._front_end) & (tickets != _RECORDED)]] = _RECORDED
            if (tickets == NO_TICKET).any() and now - self._ended_at[record] < _LATE:
                left.append(record)
        self._in_use = left

    def _own_members(self, record: int) -> Slots:
        """The record's slots that are in no later one."""
        members = self._members[record]
        if len(members) > self._left[record]:
            members = self._members[record] = members[self._record[members] == record]
        return members

    def _still_idle(self, record: int) -> Slots:
        """The record's slots that may go now."""
        members = self._own_members(record)
        idle: Slots = members[self._tickets[members] == _RECORDED]
        return idle

    def _first_untold(self, count: int) -> Slots:
        """The first slots of the queue, at most `count`; they stay in it."""
        found: list[Slots] = []
        place = max(self._head, self._front_end)
        while count > 0 and place < self._tail:
            at = place & (self._capacity - 1)
            window = min(max(count, _LEAST), self._tail - place, self._capacity - at)
            slots = self._ring[at : at + window].astype(np.int64)
            valid = slots[self._tickets[slots] == np.arange(place, place + window)][:count]
            if not len(valid) and place == self._head:
                self._head += window  # nothing of it is left
            found.append(valid)
            count -= len(valid)
            place += window
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    def _unrecord(self, slots: Slots) -> None:
        """The slots leave their records; one that has none left is over."""
        records = self._record[slots]
        records = records[records != _NO_RECORD]
        if not len(records):
            return
        self._record[slots] = _NO_RECORD
        each, times = np.unique(records, return_counts=True)
        self._left[each] -= times
        for record in each[self._left[each] == 0].tolist():
            del self._members[record]
            self._dead.append(record)

    def _make_room(self) -> None:
        """For another record: those that are over, or room for twice as many. No more live than there are slots."""
        self._cursor = len(self._plan)  # it may name what is used again
        self._free += self._dead
        self._dead.clear()
        if not self._free:
            size = len(self._left)
            self._ended_at, self._kind, self._left = (
                np.concatenate([array, np.zeros_like(array)]) for array in (self._ended_at, self._kind, self._left)
            )
            self._free = list(range(2 * size - 1, size - 1, -1))

    def _mark(self, now: float) -> None:
        """Note when the next entry of the queue comes, at most."""
        if not self._mark_tickets or self._mark_tickets[-1] < self._tail:
            self._mark_tickets.append(self._tail)
            self._mark_times.append(now)
        if len(self._mark_tickets) > _MARKS:
            del self._mark_tickets[: _MARKS // 2]
            del self._mark_times[: _MARKS // 2]

    def _times_of(self, tickets: Slots) -> NDArray[np.float64]:
        """When these entries of the queue were made, at the latest: the time of the first mark behind them."""
        times = np.array([*self._mark_times, self.clock()])
        made: NDArray[np.float64] = times[np.searchsorted(self._mark_tickets, tickets, "right")]
        return made

    def _compact(self) -> None:
        numbers = np.arange(self._head, self._tail)
        slots = self._ring[numbers & (self._capacity - 1)]
        alive = numbers[self._tickets[slots] == numbers]
        super()._compact()
        self._front_end = self._head + int(np.searchsorted(alive, self._front_end))
        self._mark_tickets = (self._head + np.searchsorted(alive, self._mark_tickets)).tolist()
