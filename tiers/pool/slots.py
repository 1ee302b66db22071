"""SlotTable: each slot's state, references and name, in numpy arrays: what pools are made of. It takes no lock.

`SlotPool` and `BlockPool` are verbs over this table, called under their lock. Slots in one batch are distinct and in
chain order, parents first.
"""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from kvtier.tiers import ChainHash
from kvtier.tiers.pool.changes import ChangeLog
from kvtier.tiers.pool.departures import Departures
from kvtier.tiers.pool.idle import IdleSlots, no_slots
from kvtier.tiers.pool.index import HashIndex, Slots, Words, int_type
from kvtier.tiers.pool.lease import Reservation
from kvtier.tiers.pool.links import ChainLinks, slots_before
from kvtier.tiers.pool.policy import make_policy
from kvtier.tiers.pool.states import FILLING, FREE, QUARANTINED, READY, AnySlots


class SlotTable:
    """Arrays over `num_slots` slots, and one more row that belongs to nobody and is always free.

    The index names the ready slots and the reserved ones; a filling slot without a name is L1's, or outlived a reset.
    """

    def __init__(self, num_slots: int, policy: str, max_tails: int | None = None) -> None:
        """`max_tails`: so many unfinished last blocks at most; None: no bound of their own."""
        if num_slots < 1:
            raise ValueError(f"num_slots {num_slots}: must be at least 1")
        rows = num_slots + 1
        self.num_slots = num_slots
        self.state = np.zeros(rows, np.uint8)
        self.refs = np.zeros(rows, np.int32)
        self.generation = np.zeros(rows, np.int64)
        self.index = HashIndex(num_slots)
        # hashes → the ready slot of each block, -1 where there is none; and the slots of the leading ready blocks
        self.find = partial(self.index.find_in, self.state, READY)
        self.find_run = partial(self.index.find_run, self.state, READY)
        self.links = ChainLinks(self.generation)
        self.policy = make_policy(policy, num_slots, self.index.words)
        self.idle = IdleSlots(self.links, self.policy)
        self.num_free = num_slots
        self.num_ready = 0
        self.num_leased = 0  # ready slots with references
        self.num_quarantined = 0
        self.num_evicted = 0
        self.num_dirty_dropped = 0
        self.changes: ChangeLog | None = None  # while somebody listens: of whole blocks
        self.departures: Departures | None = None  # where what leaves is remembered
        self.tails: dict[int, None] = {}  # slots of the ready blocks that are not whole, oldest first
        self.is_tail = np.zeros(rows, np.bool_)
        self._max_tails = num_slots if max_tails is None else max_tails
        self.free_slots: Slots = np.arange(num_slots - 1, -1, -1).astype(int_type(rows))  # a stack to `num_free`

    # --- a slot's life ------------------------------------------------------------------------------------------

    def take(self, count: int, *, spare_parents: bool = True) -> Slots | None:
        """Take `count` slots (→ FILLING, next generation), free ones first, then by eviction; all or nothing."""
        short = count - self.num_free
        if short > 0:
            if short > self.num_ready - self.num_leased:
                return None
            victims = self.idle.choose(short, spare_parents=spare_parents)
            if victims is None:
                return None
            self.num_evicted += short
            if self.departures is not None:
                self.departures.evicted(victims, self.index.words(victims))
            self.forget(victims)
            self.free(victims)
        self.num_free -= count
        slots = self.free_slots[self.num_free : self.num_free + count][::-1].astype(np.int64)
        self.generation[slots] = self.generation.take(slots) + 1
        self.state[slots] = FILLING
        self.links.children[slots] = 0
        if self.departures is not None:
            self.departures.came(slots)
        return slots

    def publish(self, slots: Slots, *, is_tail: bool = False) -> None:
        """FILLING → READY. The slots are named and have references, so none is a victim yet.

        `is_tail`: they are unfinished last blocks, of which nobody who follows the changes is told. Too many of them
        push the oldest out.
        """
        self.state[slots] = READY
        self.num_ready += len(slots)
        self.num_leased += len(slots)
        if (admit := self.policy.admit) is not None:
            admit(slots)
        if is_tail:
            self.is_tail[slots] = True
            self.tails.update(dict.fromkeys(slots.tolist()))
            if len(self.tails) > self._max_tails:
                oldest = islice(self.tails, len(self.tails) - self._max_tails)
                self.drop(np.fromiter(oldest, np.int64))
        elif self.changes is not None:
            self.changes.stored(slots)

    def free(self, slots: Slots) -> None:
        """→ FREE, whatever they were; they have no name. The first of them is taken again first."""
        self.state[slots] = FREE
        self.free_slots[self.num_free : self.num_free + len(slots)] = slots[::-1]
        self.num_free += len(slots)

    def drop(self, slots: Slots) -> int:
        """READY → FREE, even if they have children; those with references lose their name now, their slot at the end.

        Returns how many went.
        """
        slots = slots[self.state[slots] == READY]
        used = self.refs[slots] > 0
        self.idle.withdraw(slots[~used])
        self.idle.unlink(slots)
        self.forget(slots)
        self.free(slots[~used])
        self.state[slots[used]] = FILLING
        self.num_leased -= int(np.count_nonzero(used))
        return len(slots)

    def drop_idle(self, hashes: Sequence[ChainHash]) -> list[bool]:
        """Drop those of these blocks, tail first, that have no lease and no resident child but such as go with them.

        True for each block that is gone now or was not here.
        """
        slots = self.index.find(hashes)[1].tolist()
        going: dict[int, None] = {}
        orphaned: Counter[int] = Counter()  # slot → its children that go
        for slot in slots:
            is_idle = slot >= 0 and self.state[slot] == READY and not self.refs[slot]
            if is_idle and self.links.children[slot] == orphaned[slot]:
                going[slot] = None
                orphaned[self.links.parent_of(slot)] += 1
        self.drop(np.array(list(going), np.int64))
        return [slot < 0 or slot in going for slot in slots]

    def oldest_dirty(self, n: int) -> list[ChainHash]:
        """Up to `n` dirty blocks, those evicted next first, but each after its dirty parents."""
        chosen: dict[int, None] = {}
        for slot in self.idle.dirty_slots().tolist():
            if len(chosen) >= n:
                break
            branch = []
            while slot not in chosen and self.idle.dirty[slot]:  # nobody's row is clean: that ends a chain
                branch.append(slot)
                slot = self.links.parent_of(slot)
            chosen.update(dict.fromkeys(reversed(branch)))
        return self.index.names(np.array(list(chosen)[:n], np.int64))

    def reset(self) -> None:
        """Forget every name. Idle slots are freed; those with references become FILLING ones without a name."""
        if self.changes is not None:
            self.changes.cleared(self.index.words)
        state, refs = self.state[: self.num_slots], self.refs[: self.num_slots]
        ready = state == READY
        self.free(np.flatnonzero(ready & (refs == 0)))
        state[ready & (refs > 0)] = FILLING
        self.index.reset()
        self.links.reset()
        self.idle.reset()
        self.num_ready = self.num_leased = 0
        self.tails.clear()
        self.is_tail[:] = False

    def forget(self, slots: Slots) -> None:
        """Ready slots lose their blocks: their names and what hangs on these."""
        self.index.remove(slots)
        if self.changes is not None:
            self.changes.removed(slots, self.index.words(slots))
        if self.tails:
            for slot in slots[self.is_tail[slots]].tolist():
                del self.tails[slot]
            self.is_tail[slots] = False
        if self.idle.num_dirty:
            self.num_dirty_dropped += self.idle.mark_clean(slots)
        self.num_ready -= len(slots)
        self.links.clear(slots)

    def listen(self) -> None:
        """Keep a log of the ready slots that come and go, for a reader who knows none of them."""
        self.changes = ChangeLog(self.num_slots)
        order = self.links.chain_order()
        self.changes.stored(order[(self.state[order] == READY) & ~self.is_tail[order]])

    # --- stores -------------------------------------------------------------------------------------------------

    def reserve(
        self, hashes: Sequence[ChainHash], parent: ChainHash | None
    ) -> tuple[list[int], AnySlots, AnySlots] | None:
        """Take slots for the blocks of a chain that have none, name them and link them to it; None: no room.

        Returns the blocks' positions in `hashes`, their slots and these slots' generations. ValueError if a hash is
        given twice.
        """
        taken = self.reserve_chains(hashes, [0], [parent])
        if taken is None:
            return None
        held, is_new = taken
        at = np.flatnonzero(is_new)
        slots = held[at]
        return at.tolist(), slots, self.generation[slots]

    def reserve_chains(
        self, names: Sequence[ChainHash], starts: list[int], parents: Sequence[ChainHash | None]
    ) -> tuple[Slots, NDArray[np.bool_]] | None:
        """As `reserve`, of chains that begin at `starts` behind `parents`: each name's slot, and whether it is new."""
        words, found = self.index.find([*names, *(parent for parent in parents if parent is not None)])
        before = np.full(len(parents), -1, np.int64)
        before[[parent is not None for parent in parents]] = found[len(names) :]
        words, held = words[: len(names)], found[: len(names)]
        is_new = held < 0
        return (held, is_new) if self._take_into(held, names, words, starts, before) else None

    def _take_into(
        self, held: Slots, hashes: Sequence[ChainHash], words: Words, starts: list[int], parents: Slots
    ) -> bool:
        """Take slots where `held` has none (-1), name them and link them to their chain. False: no room."""
        missing = np.flatnonzero(held < 0)
        if not len(missing):
            return True
        orphans, anchors = no_slots(), no_slots()
        if len(missing) < len(held):
            orphans = np.flatnonzero((held[:-1] < 0) & (held[1:] >= 0)) + 1  # held blocks whose parent comes back now
            if len(starts) > 1 and len(orphans):
                orphans = np.setdiff1d(orphans, starts)
        if len(missing) > self.num_free:
            anchors = slots_before(held, starts, parents)[missing]
            anchors = anchors[anchors >= 0]
        if len(anchors):
            self.links.add_children(anchors)  # the blocks these hang on must not go to make room for them
        slots = self.take(len(missing))
        if slots is not None:
            if not self.index.add(words[missing], slots):
                self.free(slots)
                self.idle.release_parents(anchors)
                raise ValueError(f"reserve: a hash comes twice among {len(held)}")
            held[missing] = slots
            self.links.link(slots, slots_before(held, starts, parents)[missing])
            for i in orphans.tolist():
                # It may just have been evicted, or its link may live: only its parent's index entry was missing.
                if self.index.find_one(hashes[i]) == held[i] and self._is_orphan(int(held[i])):
                    self.links.link(held[i : i + 1], held[i - 1 : i])
        if len(anchors):
            self.idle.release_parents(anchors)
        return slots is not None

    def _is_orphan(self, slot: int) -> bool:
        parent = self.links.parent_of(slot)
        return parent == self.num_slots or self.state[parent] not in (FILLING, READY)

    def in_state(self, reservation: Reservation, positions: Sequence[int] | None, state: int) -> NDArray[np.intp]:
        """Those of the positions whose slot is still this reservation's, in `state` and not leased."""
        at = np.arange(len(reservation.hashes)) if positions is None else np.unique(np.asarray(positions, np.intp))
        slots = reservation.slots[at]
        own = (self.state[slots] == state) & (self.generation[slots] == reservation.generations[at])
        own &= self.refs[slots] == 0
        return at if own.all() else at[own]

    def seal(
        self, reservation: Reservation, positions: Sequence[int] | None, *, named: bool
    ) -> tuple[list[int], AnySlots, AnySlots]:
        """Give a reservation's blocks, at `positions` or all still filling, one reference each and publish them.

        Returns their positions, slots and generations. Without a name they stay FILLING. ValueError if a position
        given is not filling any more.
        """
        at = self.in_state(reservation, positions, FILLING)
        if positions is not None and len(at) != len(positions):
            gone = sorted(set(positions) - set(at.tolist()))
            raise ValueError(f"seal: positions {gone} are not filling any more, or one is given twice")
        slots = reservation.slots[at]
        self.refs[slots] = 1
        if named:
            self.publish(slots, is_tail=reservation.is_tail)
        return at.tolist(), slots, reservation.generations[at]

    # --- references ---------------------------------------------------------------------------------------------

    def allocate(self, count: int) -> Slots | None:
        """Take slots, with one reference each, whether parents must go for them or not."""
        slots = self.take(count, spare_parents=False)
        if slots is not None:
            self.refs[slots] = 1
        return slots

    def lease(self, hashes: Sequence[ChainHash]) -> tuple[Slots, Slots]:
        """One more reference to each of the leading ready blocks. Returns their slots and generations."""
        slots: Slots = self.find_run(hashes)
        self.ref(slots)
        return slots, self.generation[slots]

    def lease_at(self, slots: Slots, generations: Slots) -> tuple[Slots, Slots]:
        """As `lease`, of blocks that were ready in these slots at these generations; up to the first that has left."""
        left = (self.state[slots] != READY) | (self.generation[slots] != generations)
        if left.any():
            end = int(left.argmax())
            slots, generations = slots[:end], generations[:end]
        self.ref(slots)
        return slots, generations

    def ref(self, slots: Slots) -> None:
        """One more reference to each slot, which must be READY."""
        if len(slots) > 1 and not self.idle.are_distinct(slots):
            is_first = _are_first(slots)
            self.ref(slots[~is_first])
            slots = slots[is_first]
        refs = self.refs[slots]
        self.refs[slots] = refs + 1
        self.num_leased += len(slots) - int(np.count_nonzero(refs))
        self.idle.withdraw(slots)

    def unref(self, slots: AnySlots) -> None:
        """One reference fewer. Ready slots left without any become idle, the chain's tail first; others are freed.

        ValueError, and no change, where a slot has no reference, or fewer than it is given times.
        """
        slots = np.asarray(slots, np.int64)
        if len(slots) > 1 and not self.idle.are_distinct(slots):
            slots = self._unref_repeated(slots)
        refs = self.refs.take(slots)
        if not refs.all():
            raise ValueError(f"slots {slots[refs == 0].tolist()} have no reference")
        refs -= 1
        self.refs[slots] = refs
        idle = slots[refs == 0] if refs.any() else slots
        ready = self.state.take(idle) == READY
        if not ready.all():
            self.free(idle[~ready] if ready.any() else idle)
            idle = idle[ready]
        if len(idle):
            self.num_leased -= len(idle)
            self.policy.enter(idle[::-1])

    def _unref_repeated(self, slots: Slots) -> Slots:
        """Give up what is given more than once, all but the first time; returns each slot once, in order."""
        each, times = np.unique(slots, return_counts=True)
        if (lacking := each[self.refs[each] < times]).size:
            raise ValueError(f"slots {lacking.tolist()} have no reference")
        is_first = _are_first(slots)
        self.unref(slots[~is_first])
        return slots[is_first]

    def use(self, slots: Slots) -> None:
        """Count a use of the idle ones among READY slots, as a lease released at once would."""
        idle = slots[self.refs[slots] == 0]
        self.idle.withdraw(idle)
        self.policy.enter(idle[::-1])

    def check(self) -> None:
        """Raise AssertionError where the table contradicts itself. A full scan."""
        state, refs = self.state[: self.num_slots], self.refs[: self.num_slots]
        ready, filling = state == READY, state == FILLING
        free = self.free_slots[: self.num_free]
        assert len(np.unique(free)) == self.num_free, "a slot is free twice"
        assert (state[free] == FREE).all(), "a slot in use is in the free list"
        assert np.count_nonzero(state == FREE) == self.num_free, "free count"
        assert np.count_nonzero(state == QUARANTINED) == self.num_quarantined, "quarantined count"
        assert np.count_nonzero(ready) == self.num_ready, "ready count"
        assert (refs >= 0).all(), "negative references"
        assert not refs[~(ready | filling)].any(), "references to slots that are not in use"
        assert np.count_nonzero(ready & (refs > 0)) == self.num_leased, "leased count"
        assert not self.idle.dirty[: self.num_slots][~ready].any(), "a slot that is not ready is dirty"
        self.idle.check(np.flatnonzero(ready & (refs == 0)))
        self.links.check(np.flatnonzero(ready | filling))
        assert self.state[self.num_slots] == FREE, "nobody's row is taken"
        if self.changes is not None:
            self.changes.check(np.flatnonzero(ready & ~self.is_tail[: self.num_slots]))
        assert sorted(self.tails) == np.flatnonzero(self.is_tail).tolist(), "tails"
        assert ready[list(self.tails)].all(), "a tail that is not ready"
        named = self.index.check()
        assert np.count_nonzero(ready[named]) == self.num_ready, "a ready slot has no name"
        assert (ready | (filling & (refs == 0)))[named].all(), (
            "a name leads to a slot that is neither ready nor reserved"
        )


def _are_first(slots: Slots) -> NDArray[np.bool_]:
    """Whether each slot comes for the first time in the batch."""
    is_first = np.zeros(len(slots), np.bool_)
    is_first[np.unique(slots, return_index=True)[1]] = True
    return is_first
