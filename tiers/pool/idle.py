"""IdleSlots: the slots that could be evicted, and the choice of those that are."""

from functools import cached_property
from typing import Final

import numpy as np

from kvtier.tiers.pool.index import Slots
from kvtier.tiers.pool.links import ChainLinks
from kvtier.tiers.pool.policy import EvictionPolicy
from kvtier.tiers.pool.slot_queue import SlotQueue

_MOST_PASSED: Final = 4096  # dirty slots that one eviction passes over, in search of clean ones


def no_slots() -> Slots:
    return np.zeros(0, np.int64)


class IdleSlots:
    """Ready slots without references. It takes no lock.

    Each is in exactly one place: the policy; `deferred`, dirty ones that the policy offered while it had clean ones; or
    parked, those it offered although they have a resident child. A parked slot goes back to the front of the policy
    when its last child leaves. So whatever blocks a slot, it is looked at once, not at every eviction.
    """

    def __init__(self, links: ChainLinks, policy: EvictionPolicy) -> None:
        rows = links.nobody + 1
        self._links = links
        self._policy = policy
        self._parked = np.zeros(rows, np.bool_)
        self._num_parked = 0
        self.dirty = np.zeros(rows, np.bool_)
        self.num_dirty = 0
        self._places = np.zeros(rows, np.int64)  # scratch of `_split`
        self._is_parked = memoryview(self._parked)  # for one at a time

    @cached_property
    def _deferred(self) -> SlotQueue:
        """Made for the first dirty slot: most tiers have none."""
        return SlotQueue(self._links.nobody)

    def withdraw(self, slots: Slots) -> None:
        """Slots are used, or leave by force: they are not idle any more. Fine if they were not.

        They become idle by the policy's `enter` alone.
        """
        self._policy.leave(slots)
        if self._num_parked:
            self._num_parked -= int(np.count_nonzero(self._parked[slots]))
            self._parked[slots] = False
        if self.num_dirty:
            self._deferred.remove(slots)

    def choose(self, count: int, *, spare_parents: bool) -> Slots | None:
        """Take `count` victims out, unlinked from their parents, clean ones first; None if there are fewer.

        With `spare_parents` no slot that has a resident child goes; without, such slots go when nothing else is left.
        """
        batches: list[Slots] = []
        found = 0
        while found < count:
            batch = self._candidates(count - found)
            going = self._split(batch)
            if not len(batch):
                going = no_slots() if spare_parents else self._unpark_any(count - found)
                if not len(going):
                    break
            self.unlink(going)
            batches.append(going)
            found += len(going)
        victims = np.concatenate(batches) if batches else no_slots()
        if found < count:
            self._links.add_children(self._links.living_parents(victims))
            self._policy.give_back(victims)
            return None
        self._policy.evicted(victims)
        return victims

    def withdraw_few(self, slots: list[int]) -> None:
        """As `withdraw`, of few."""
        self._policy.leave_few(slots)
        if self._num_parked:
            for slot in slots:
                self._num_parked -= self._is_parked[slot]
                self._is_parked[slot] = False
        if self.num_dirty:
            self._deferred.remove_few(slots)

    def choose_few(self, count: int, *, spare_parents: bool) -> list[int] | None:
        """As `choose`, for few victims."""
        victims: list[int] = []
        while not self.num_dirty and len(victims) < count:
            batch = self._policy.pop_few(count - len(victims))
            if not batch:
                break
            going = self._split_few(batch)
            self.release_few([self._links.parent_of(slot) for slot in going])
            victims = victims + going if victims else going
        if len(victims) == count:
            self._policy.evicted_few(victims)
            return victims
        if victims:  # the rest are parked or dirty: all over again, in bulk
            taken = np.array(victims, np.int64)
            self._links.add_children(self._links.living_parents(taken))
            self._policy.give_back(taken)
        chosen = self.choose(count, spare_parents=spare_parents)
        return None if chosen is None else chosen.tolist()

    def release_few(self, parents: list[int]) -> None:
        """As `release_parents`, of few."""
        num_children, nobody = self._links.num_children, self._links.nobody
        for parent in parents:
            if parent != nobody:
                num_children[parent] -= 1
        if self._num_parked:
            for slot in dict.fromkeys(each for each in parents if self._is_parked[each] and not num_children[each]):
                self._unpark(slot)

    def unlink(self, slots: Slots) -> None:
        """Slots leave their chains: their parents have a child fewer."""
        self.release_parents(self._links.living_parents(slots))

    def release_parents(self, parents: Slots) -> None:
        """One child fewer for each (repeats count); a parked one left without children can go again."""
        self._links.remove_children(parents)
        if self._num_parked:
            lonely = parents[self._parked[parents] & (self._links.children[parents] == 0)]
            for slot in dict.fromkeys(lonely.tolist()):
                self._unpark(slot)

    def mark_dirty(self, slots: Slots) -> None:
        """Ready slots hold what no lower tier has."""
        self.num_dirty += len(slots) - int(np.count_nonzero(self.dirty[slots]))
        self.dirty[slots] = True

    def mark_clean(self, slots: Slots) -> int:
        """Slots may go like any other; those passed over for being dirty are next. Returns how many were dirty."""
        num_cleaned = int(np.count_nonzero(self.dirty[slots]))
        self.num_dirty -= num_cleaned
        self.dirty[slots] = False
        waiting = slots[self._deferred.tickets(slots) >= 0][::-1]
        self._deferred.remove(waiting)
        self._policy.give_back(waiting)
        return num_cleaned

    def dirty_slots(self) -> Slots:
        """All dirty slots, next victims first; those that cannot go now come last."""
        slots = np.flatnonzero(self.dirty)
        deferred, ranks = self._deferred.tickets(slots), self._policy.ranks(slots)
        group = np.where(deferred >= 0, 0, np.where(ranks >= 0, 1, 2))
        return slots[np.lexsort((np.where(deferred >= 0, deferred, ranks), group))]

    def are_distinct(self, slots: Slots) -> bool:
        """Whether no slot is given twice."""
        order = np.arange(len(slots))
        self._places[slots] = order
        return bool((self._places[slots] == order).all())

    def reset(self) -> None:
        self._policy.reset()
        if self.num_dirty:
            self._deferred.reset()
        self._parked[:] = False
        self.dirty[:] = False
        self._num_parked = self.num_dirty = 0

    def check(self, idle: Slots) -> None:
        """Raise AssertionError unless exactly these slots are idle, each in one place."""
        everyone = np.arange(self._links.nobody)
        if (check := getattr(self._policy, "check", None)) is not None:
            check()
        queued, deferred = self._policy.ranks(everyone) >= 0, self._deferred.tickets(everyone) >= 0
        parked = self._parked[everyone]
        expected = np.zeros(len(everyone), np.int64)
        expected[idle] = 1
        assert (queued.astype(np.int64) + deferred + parked == expected).all(), "idle slots in no place, or in two"
        assert np.count_nonzero(parked) == self._num_parked, "parked count"
        assert (self._links.children[everyone][parked] > 0).all(), "parked without children"
        assert np.count_nonzero(self.dirty) == self.num_dirty, "dirty count"

    # --- choosing -----------------------------------------------------------------------------------------------

    def _candidates(self, count: int) -> Slots:
        """The policy's next victims: clean ones if any come soon, else the dirty ones passed over before.

        It looks past no more than `_MOST_PASSED` dirty ones: where all are dirty, finding that out would take long.
        """
        num_passed, size = 0, count
        while len(batch := self._policy.pop(size)):
            if not self.num_dirty:
                return batch
            dirty = self.dirty[batch]
            clean = batch[~dirty]
            self._deferred.append(batch[dirty])
            if len(clean):
                if len(clean) > count:
                    self._policy.give_back(clean[count:])
                return clean[:count]
            num_passed += len(batch)
            if num_passed >= _MOST_PASSED:
                break
            size = min(2 * size, _MOST_PASSED)
        return self._deferred.take(count) if self.num_dirty else batch

    def _split(self, batch: Slots) -> Slots:
        """The slots of `batch` all of whose resident children are in it and go as well. The others are parked."""
        children, size = self._links.children[batch], len(batch)
        if not children.any():
            return batch
        parents, alive = self._links.parents(batch)
        self._places[batch] = np.arange(size)
        places = np.minimum(self._places[parents], size - 1)  # scratch: may hold older, larger places
        inside = alive & (batch[places] == parents)
        if (children == np.bincount(places[inside], minlength=size)).all():
            return batch
        parents = np.where(alive, parents, self._links.nobody)
        return np.array(self._split_one_by_one(batch.tolist(), children.tolist(), parents.tolist()), np.int64)

    def _split_few(self, batch: list[int]) -> list[int]:
        """As `_split`, of few."""
        links = self._links
        num_children = links.num_children
        for slot in batch:
            if num_children[slot]:
                break
        else:
            return batch
        children = [num_children[slot] for slot in batch]
        parents = [links.parent_of(slot) for slot in batch]
        if all(num == parents.count(slot) for slot, num in zip(batch, children, strict=True)):
            return batch
        return self._split_one_by_one(batch, children, parents)

    def _split_one_by_one(self, batch: list[int], children: list[int], parents: list[int]) -> list[int]:
        going: list[int] = []
        gone: dict[int, int] = {}  # parent → its children that go
        for slot, num_children, parent in zip(batch, children, parents, strict=True):
            if num_children == gone.get(slot, 0):
                going.append(slot)
                gone[parent] = gone.get(parent, 0) + 1
            else:
                self._is_parked[slot] = True
        self._num_parked += len(batch) - len(going)
        return going

    def _unpark(self, slot: int) -> None:
        """Give a parked slot back to the policy, and with it the parked ancestors that wait for it alone."""
        links, run = self._links, [slot]
        while self._is_parked[parent := links.parent_of(run[-1])] and links.num_children[parent] == 1:
            run.append(parent)
        slots = np.array(run, np.int64)
        self._parked[slots] = False
        self._num_parked -= len(run)
        self._policy.give_back(slots)

    def _unpark_any(self, count: int) -> Slots:
        """Parked slots, to go although they have children."""
        slots = np.flatnonzero(self._parked)[:count] if self._num_parked else no_slots()
        self._parked[slots] = False
        self._num_parked -= len(slots)
        return slots
