"""The table behind a pool: each slot's state, references, chain links and name, in numpy arrays. It takes no lock.

`SlotPool` and `BlockPool` are verbs over this table, called under their lock. Slots in one batch are distinct and
lie in chain order, parents first. A block's link to its parent carries the parent's generation: a parent that was
dropped by force while it had children leaves stale links behind, which are told by the generation and ignored.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Final

import numpy as np

from kvtier.tiers.policy import SlotQueue, Slots, make_policy
from kvtier.tiers.tier import ChainHash

FREE: Final = 0
FILLING: Final = 1  # taken and without a name: invisible to every lookup
READY: Final = 2  # named by the index
QUARANTINED: Final = 3  # an operation that hangs may still write here

_ONE: Final = np.ones(1, np.int32)  # ufunc.at is 20 times faster when no cast is needed


def no_slots() -> Slots:
    """An empty batch."""
    return np.zeros(0, np.int64)


class SlotTable:
    """Arrays over `num_slots` slots and the index of the ready ones.

    Row `num_slots` belongs to nobody: it is the parent of blocks without one, which spares every batch a mask.
    A ready slot without references is *idle* and in exactly one place: the policy, `deferred` (dirty ones the policy
    offered while clean ones were left), or parked (the policy offered it, but it has a resident child).
    """

    def __init__(self, num_slots: int, policy: str) -> None:
        if num_slots < 1:
            raise ValueError(f"num_slots {num_slots}: must be at least 1")
        rows = num_slots + 1
        self.num_slots = num_slots
        self.state = np.zeros(rows, np.uint8)
        self.refs = np.zeros(rows, np.int32)
        self.generation = np.zeros(rows, np.int64)
        self.children = np.zeros(rows, np.int32)  # resident blocks whose parent this is
        self.parent = np.full(rows, num_slots, np.int64)
        self.parent_generation = np.zeros(rows, np.int64)
        self.parked = np.zeros(rows, np.bool_)
        self.dirty = np.zeros(rows, np.bool_)
        self.names = np.full(rows, None, np.object_)  # of ready and of reserved slots; stale for others
        self.index: dict[ChainHash, int] = {}
        self.policy = make_policy(policy, num_slots)
        self.deferred = SlotQueue(num_slots)
        self.num_free = num_slots
        self.num_leased = 0  # ready slots with references
        self.num_quarantined = 0
        self.num_dirty = 0
        self.num_evicted = 0
        self.num_dirty_dropped = 0
        self._num_parked = 0
        self._free = np.arange(num_slots - 1, -1, -1)  # a stack, its top at `num_free`
        self._places = np.zeros(rows, np.int64)  # scratch of `_split`

    @property
    def num_ready(self) -> int:
        """Slots the index names."""
        return len(self.index)

    # --- taking and freeing -------------------------------------------------------------------------------------

    def take(self, count: int, *, spare_parents: bool = True) -> Slots | None:
        """Take `count` slots (→ FILLING, next generation), free ones first, then by eviction; all or nothing.

        With `spare_parents` no block that has a resident child goes; without, such blocks go when nothing else is left.
        """
        short = count - self.num_free
        if short > 0 and not (short <= self.num_ready - self.num_leased and self._evict(short, spare_parents)):
            return None
        self.num_free -= count
        slots = self._free[self.num_free : self.num_free + count][::-1].copy()
        self.generation[slots] += 1
        self.state[slots] = FILLING
        self.children[slots] = 0
        self.parent[slots] = self.num_slots
        self.parent_generation[slots] = 0
        return slots

    def free(self, slots: Slots) -> None:
        """→ FREE, whatever they were. The first of them is taken again first."""
        self.state[slots] = FREE
        self._free[self.num_free : self.num_free + len(slots)] = slots[::-1]
        self.num_free += len(slots)

    def name(self, slots: Slots, hashes: Sequence[ChainHash]) -> None:
        """FILLING → READY under names the index does not hold. The slots have references, so none is a victim yet."""
        self.state[slots] = READY
        self.names[slots] = hashes
        self.index.update(zip(hashes, slots.tolist(), strict=True))
        self.num_leased += len(slots)
        self.policy.admit(slots, hashes)

    def drop(self, slots: Slots) -> int:
        """READY and idle → FREE, by force: parents and children stay. Returns how many were idle and went."""
        slots = slots[(self.state[slots] == READY) & (self.refs[slots] == 0)]
        self._withdraw(slots)
        self.unlink(slots)
        self._unname(slots)
        self.free(slots)
        return len(slots)

    def reset(self) -> None:
        """Forget every name. Idle slots are freed; those with references turn into unnamed FILLING ones."""
        rows = slice(0, self.num_slots)
        ready = self.state[rows] == READY
        self.free(np.flatnonzero(ready & (self.refs[rows] == 0)))
        self.state[np.flatnonzero(ready & (self.refs[rows] > 0))] = FILLING
        self.index.clear()
        self.names[:] = None
        self.policy.reset()
        self.deferred.reset()
        self.children[:] = 0
        self.parent[:] = self.num_slots
        self.parent_generation[:] = 0
        self.parked[:] = False
        self.dirty[:] = False
        self.num_leased = self.num_dirty = self._num_parked = 0

    # --- references ---------------------------------------------------------------------------------------------

    def find(self, hashes: Sequence[ChainHash]) -> Slots:
        """The ready slot of each block, -1 where there is none."""
        return np.fromiter(map(self.index.get, hashes, repeat(-1)), np.int64, len(hashes))

    def find_run(self, hashes: Sequence[ChainHash]) -> Slots:
        """The slots of the leading ready blocks."""
        slots = self.find(hashes)
        missing = slots < 0
        return slots[: int(missing.argmax())] if missing.any() else slots

    def ref(self, slots: Slots) -> None:
        """One more reference to each slot, which must be READY."""
        refs = self.refs[slots]
        self.refs[slots] = refs + 1
        self.num_leased += len(slots) - int(np.count_nonzero(refs))
        self._withdraw(slots)

    def unref(self, slots: Slots) -> None:
        """One reference fewer. Ready slots left without any become idle, the chain's tail first; unnamed ones are free."""
        refs = self.refs[slots] - 1
        self.refs[slots] = refs
        idle = slots[refs == 0][::-1]
        named = self.state[idle] == READY
        if not named.all():
            self.free(idle[~named][::-1])
            idle = idle[named]
        self.num_leased -= len(idle)
        self.policy.enter(idle)

    def use(self, slots: Slots) -> None:
        """Count a use of the idle ones among READY slots, as a lease released at once would."""
        idle = slots[self.refs[slots] == 0]
        self._withdraw(idle)
        self.policy.enter(idle[::-1])

    # --- links --------------------------------------------------------------------------------------------------

    def link(self, slots: Slots, parents: Slots) -> None:
        """Note each slot's parent (`num_slots` for none). The slots have no living link yet."""
        self.parent[slots] = parents
        self.parent_generation[slots] = self.generation[parents]
        np.add.at(self.children, parents, _ONE)

    def unlink(self, slots: Slots) -> None:
        """Take the slots from their parents' counts; a parked parent left without children can go again."""
        parents = self._living_parents(slots)
        self.release_parents(parents)

    def release_parents(self, parents: Slots) -> None:
        """One child fewer for each (repeats count)."""
        np.subtract.at(self.children, parents, _ONE)
        if self._num_parked:
            lonely = parents[self.parked[parents] & (self.children[parents] == 0)]
            for slot in dict.fromkeys(lonely.tolist()):
                self._unpark(slot)

    def is_orphan(self, slot: int) -> bool:
        """Whether the slot's link to a parent is missing or stale."""
        parent = int(self.parent[slot])
        alive = self.generation[parent] == self.parent_generation[slot] and self.state[parent] in (FILLING, READY)
        return parent == self.num_slots or not bool(alive)

    def _living_parents(self, slots: Slots) -> Slots:
        parents = self.parent[slots]
        alive = self.generation[parents] == self.parent_generation[slots]
        return parents if alive.all() else parents[alive]

    def _unpark(self, slot: int) -> None:
        """Give a parked slot back to the policy, and with it the parked ancestors that wait for it alone."""
        run = [slot]
        parent = int(self.parent[slot])
        while self.parked[parent] and self.children[parent] == 1 and self._is_link(run[-1], parent):
            run.append(parent)
            parent = int(self.parent[parent])
        slots = np.array(run, np.int64)
        self.parked[slots] = False
        self._num_parked -= len(run)
        self.policy.give_back(slots)

    def _is_link(self, child: int, parent: int) -> bool:
        return bool(self.generation[parent] == self.parent_generation[child])

    # --- dirt ---------------------------------------------------------------------------------------------------

    def mark_dirty(self, slots: Slots) -> None:
        """READY slots hold what no lower tier has."""
        self.num_dirty += len(slots) - int(np.count_nonzero(self.dirty[slots]))
        self.dirty[slots] = True

    def mark_clean(self, slots: Slots) -> None:
        """READY slots may go like any other; those passed over for being dirty are next."""
        self.num_dirty -= int(np.count_nonzero(self.dirty[slots]))
        self.dirty[slots] = False
        waiting = slots[self.deferred.tickets(slots) >= 0][::-1]
        self.deferred.remove(waiting)
        self.policy.give_back(waiting)

    def dirty_slots(self) -> Slots:
        """All dirty slots, next victims first; those that cannot go now come last."""
        slots = np.flatnonzero(self.dirty)
        deferred, ranks = self.deferred.tickets(slots), self.policy.ranks(slots)
        group = np.where(deferred >= 0, 0, np.where(ranks >= 0, 1, 2))
        return slots[np.lexsort((np.where(deferred >= 0, deferred, ranks), group))]

    # --- eviction -----------------------------------------------------------------------------------------------

    def _evict(self, count: int, spare_parents: bool) -> bool:
        """Free `count` idle slots by policy, or none."""
        batches: list[Slots] = []
        found = 0
        while found < count:
            batch = self._candidates(count - found)
            going = self._split(batch)
            if not len(batch):
                going = no_slots() if spare_parents else self._parents(count - found)
                if not len(going):
                    break
            self.unlink(going)
            batches.append(going)
            found += len(going)
        victims = np.concatenate(batches) if batches else no_slots()
        if found < count:
            np.add.at(self.children, self._living_parents(victims), _ONE)
            self.policy.give_back(victims)
            return False
        names = self._unname(victims)
        self.policy.evicted(victims, names)
        self.free(victims)
        self.num_evicted += count
        return True

    def _candidates(self, count: int) -> Slots:
        """The policy's next victims: clean ones while there are any, then the dirty ones passed over before."""
        while len(batch := self.policy.pop(count)):
            if not self.num_dirty:
                return batch
            dirty = self.dirty[batch]
            self.deferred.append(batch[dirty])
            if not dirty.all():
                return batch[~dirty]
        return self.deferred.take(count) if self.num_dirty else batch

    def _split(self, batch: Slots) -> Slots:
        """The slots of `batch` all of whose resident children go before them in it. The others are parked."""
        children, size = self.children[batch], len(batch)
        if not children.any():
            return batch
        parents = self.parent[batch]
        self._places[batch] = np.arange(size)
        places = np.minimum(self._places[parents], size - 1)  # scratch: may hold older, larger places
        before = (batch[places] == parents) & (places > np.arange(size))
        before &= self.generation[parents] == self.parent_generation[batch]
        if (children == np.bincount(places[before], minlength=size)).all():
            return batch
        return self._split_one_by_one(batch)

    def _split_one_by_one(self, batch: Slots) -> Slots:
        going: list[int] = []
        gone: dict[int, int] = {}  # parent → its children that go
        parked: list[int] = []
        slots, children, parents = batch.tolist(), self.children[batch].tolist(), self.parent[batch].tolist()
        alive = (self.generation[parents] == self.parent_generation[batch]).tolist()
        for slot, num_children, parent, is_alive in zip(slots, children, parents, alive, strict=True):
            if num_children != gone.get(slot, 0):
                parked.append(slot)
                continue
            going.append(slot)
            if is_alive:
                gone[parent] = gone.get(parent, 0) + 1
        self.parked[parked] = True
        self._num_parked += len(parked)
        return np.array(going, np.int64)

    def _parents(self, count: int) -> Slots:
        """Parked slots, to go although they have children."""
        slots = np.flatnonzero(self.parked)[:count] if self._num_parked else no_slots()
        self.parked[slots] = False
        self._num_parked -= len(slots)
        return slots

    def _withdraw(self, slots: Slots) -> None:
        """Take slots out of wherever idle ones wait."""
        self.policy.leave(slots)
        if self._num_parked:
            self._num_parked -= int(np.count_nonzero(self.parked[slots]))
            self.parked[slots] = False
        if self.num_dirty:
            self.deferred.remove(slots)

    def _unname(self, slots: Slots) -> list[ChainHash]:
        names: list[ChainHash] = self.names[slots].tolist()
        consume(map(self.index.__delitem__, names))
        if self.num_dirty:
            num_dirty = int(np.count_nonzero(self.dirty[slots]))
            self.num_dirty -= num_dirty
            self.num_dirty_dropped += num_dirty
            self.dirty[slots] = False
        return names

    # --- the law ------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise AssertionError where the table contradicts itself. A full scan."""
        size = self.num_slots
        state, refs = self.state[:size], self.refs[:size]
        ready, filling = state == READY, state == FILLING
        free = self._free[: self.num_free]
        assert len(np.unique(free)) == self.num_free, "a slot is free twice"
        assert (state[free] == FREE).all(), "a slot in use is in the free list"
        assert np.count_nonzero(state == FREE) == self.num_free, "free count"
        assert np.count_nonzero(state == QUARANTINED) == self.num_quarantined, "quarantined count"
        named = np.fromiter(self.index.values(), np.int64, len(self.index))
        assert len(np.unique(named)) == len(named) == np.count_nonzero(ready), "index and ready slots differ in number"
        assert ready[named].all(), "index names slots that are not ready"
        assert self.names[named].tolist() == list(self.index), "index and slots disagree on names"
        assert (refs >= 0).all(), "negative references"
        assert not refs[~(ready | filling)].any(), "references to slots that are not in use"
        assert np.count_nonzero(ready & (refs > 0)) == self.num_leased, "leased count"
        assert not (self.dirty[:size] & ~ready).any(), "a slot that is not ready is dirty"
        assert np.count_nonzero(self.dirty) == self.num_dirty, "dirty count"
        self._check_places(np.flatnonzero(ready & (refs == 0)))
        resident = np.flatnonzero(ready | filling)
        parents = self._living_parents(resident)
        children = np.bincount(parents, minlength=size + 1)[:size]
        assert (children[resident] == self.children[resident]).all(), "counts of children"

    def _check_places(self, idle: Slots) -> None:
        parked = self.parked[: self.num_slots]
        queued, deferred = self.policy.ranks(idle) >= 0, self.deferred.tickets(idle) >= 0
        places = queued.astype(int) + deferred + parked[idle]
        assert (places == 1).all(), "an idle slot is in no place, or in two"
        assert np.count_nonzero(parked[idle]) == np.count_nonzero(parked) == self._num_parked, "parked count"
        assert (self.children[: self.num_slots][parked] > 0).all(), "parked without children"
        everyone = np.arange(self.num_slots)
        assert np.count_nonzero(self.policy.ranks(everyone) >= 0) == np.count_nonzero(queued), "a victim in use"


def consume(iterable: Iterable[object]) -> None:
    """Run an iterator to its end, at C speed."""
    deque(iterable, maxlen=0)
