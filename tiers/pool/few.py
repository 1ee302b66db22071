"""FewSlots: what a SlotTable does to many slots in numpy, done to a few, one by one; and the choice between the two."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from kvtier.tiers import ChainHash
from kvtier.tiers.pool.lease import Reservation
from kvtier.tiers.pool.slots import SlotTable
from kvtier.tiers.pool.states import FILLING, FREE, READY, AnySlots, listed

# Blocks in a batch up to which one by one is faster. Measured with benchmarks/pool_throughput.py and batches of 16 and
# 17: a lookup took the same either way, a lease 2.8 and 3.0 us a block, a store 7.0 and 11.9.
FEW: Final = 16


class FewSlots:
    """The verbs of a `SlotTable` over the same arrays, with the same outcome. It takes no lock.

    A numpy call takes a microsecond, however small the batch; an item of a memoryview takes a twentieth of that.
    What is rare is left to the table.
    """

    def __init__(self, table: SlotTable) -> None:
        self._table, self._index = table, table.index
        self._links, self._idle, self._policy = table.links, table.idle, table.policy
        self._state, self._refs = memoryview(table.state), memoryview(table.refs)
        self._generation, self._free = memoryview(table.generation), memoryview(table.free_slots)

    def find(self, hashes: Sequence[ChainHash]) -> list[int]:
        """The ready slot of each block, -1 where there is none."""
        slots = [self._index.find_one(name) for name in hashes]
        return [slot if self._state[slot] == READY else -1 for slot in slots]  # -1 is nobody's row

    def find_run(self, hashes: Sequence[ChainHash]) -> list[int]:
        """The slots of the leading ready blocks."""
        state, find = self._state, self._index.find_one
        slots: list[int] = []
        for name in hashes:
            slot = find(name)
            if state[slot] != READY:  # -1 is nobody's row
                break
            slots.append(slot)
        return slots

    def lease(self, hashes: Sequence[ChainHash]) -> tuple[list[int], list[int]]:
        """One more reference to each of the leading ready blocks. Returns their slots and generations."""
        table, state, refs, generation = self._table, self._state, self._refs, self._generation
        find, withdraw = self._index.find_one, self._idle.withdraw_one
        slots: list[int] = []
        generations: list[int] = []
        for name in hashes:
            slot = find(name)
            if state[slot] != READY:  # -1 is nobody's row
                break
            count = refs[slot]
            refs[slot] = count + 1
            if not count:
                table.num_leased += 1
            withdraw(slot)
            slots.append(slot)
            generations.append(generation[slot])
        return slots, generations

    def unref(self, slots: AnySlots) -> None:
        """One reference fewer, as the table does it."""
        places = listed(slots)
        table, refs, state = self._table, self._refs, self._state
        for slot in places:
            if not refs[slot]:
                raise ValueError(f"slots {[each for each in places if not refs[each]]} have no reference")
        enter = self._policy.enter_one
        for slot in reversed(places):
            count = refs[slot] - 1
            refs[slot] = count
            if count:
                continue
            if state[slot] == READY:
                table.num_leased -= 1
                enter(slot)
            else:
                state[slot] = FREE
                self._free[table.num_free] = slot
                table.num_free += 1

    def take(self, count: int, *, spare_parents: bool = True) -> list[int] | None:
        """Take slots (→ FILLING, next generation), as the table does it."""
        table, state, generation = self._table, self._state, self._generation
        slots: list[int] = []
        if (short := count - table.num_free) > 0:
            if short > table.num_ready - table.num_leased:
                return None
            victims = self._idle.choose_few(short, spare_parents=spare_parents)
            if victims is None:
                return None
            table.num_evicted += short
            self._forget(victims)
            slots = victims
        if len(slots) < count:
            num_left = table.num_free - count + len(slots)
            slots += self._free[num_left : table.num_free].tolist()[::-1]
            table.num_free = num_left
        num_children = self._links.num_children
        for slot in slots:
            generation[slot] += 1
            state[slot] = FILLING
            num_children[slot] = 0
        return slots

    def allocate(self, count: int) -> list[int] | None:
        """Take slots, with one reference each, parents or not."""
        slots = self.take(count, spare_parents=False)
        if slots is not None:
            refs = self._refs
            for slot in slots:
                refs[slot] = 1
        return slots

    def reserve(
        self, hashes: Sequence[ChainHash], parent: ChainHash | None
    ) -> tuple[list[int], AnySlots, AnySlots] | None:
        """Take slots for the blocks of a chain that have none, as the table does it."""
        index, links, idle = self._index, self._links, self._idle
        find = index.find_one
        held = list(map(find, hashes))
        num_new = held.count(-1)
        if not num_new:
            return [], [], []
        num_held = held.index(-1)
        new = hashes[num_held:]
        if num_held + num_new < len(held) or (num_new > 1 and len(set(new)) < num_new):
            return self._table.reserve(hashes, parent)  # a parent comes back to its child; or names that are no chain
        anchor = held[num_held - 1] if num_held else -1 if parent is None else find(parent)
        if anchor >= 0:
            links.num_children[anchor] += 1  # it must not go to make room for what hangs on it
        slots = self.take(num_new)
        before = anchor
        if slots is not None:
            for name, slot in zip(new, slots, strict=True):
                index.add_one(name, slot)
                links.link_one(slot, before)
                before = slot
        if anchor >= 0:
            idle.release_few([anchor])
        if slots is None:
            return None
        return list(range(num_held, len(held))), slots, [self._generation[slot] for slot in slots]

    def seal(
        self, reservation: Reservation, positions: Sequence[int] | None, *, named: bool
    ) -> tuple[Sequence[int], AnySlots, AnySlots]:
        """Publish a reservation's blocks with one reference each, as the table does it."""
        table, state, refs = self._table, self._state, self._refs
        if positions is not None or reservation.is_tail:
            return table.seal(reservation, positions, named=named)
        slots, generations = reservation.places, reservation.times
        if not isinstance(slots, list) or not isinstance(generations, list):
            return table.seal(reservation, positions, named=named)
        for slot, generation in zip(slots, generations, strict=True):
            if state[slot] != FILLING or self._generation[slot] != generation or refs[slot]:
                return table.seal(reservation, positions, named=named)  # sealed or given up in part
        for slot in slots:
            refs[slot] = 1
        if named:
            self._publish(slots)
        return range(len(slots)), slots, generations

    def _publish(self, slots: list[int]) -> None:
        table, state = self._table, self._state
        for slot in slots:
            state[slot] = READY
        table.num_ready += len(slots)
        table.num_leased += len(slots)
        if (admit := self._policy.admit) is not None:
            admit(np.array(slots, np.int64))
        if table.changes is not None:
            table.changes.stored(np.array(slots, np.int64))

    def _forget(self, slots: list[int]) -> None:
        table = self._table
        if table.changes is not None or table.tails or self._idle.num_dirty:
            table.forget(np.array(slots, np.int64))
            return
        for slot in slots:
            self._index.remove_one(slot)
            self._links.clear_one(slot)
        table.num_ready -= len(slots)


class BatchTable(SlotTable):
    """A table that knows who handles a batch fastest."""

    def __init__(self, num_slots: int, policy: str, max_tails: int | None = None) -> None:
        super().__init__(num_slots, policy, max_tails)
        self._few = FewSlots(self)

    def of(self, count: int) -> SlotTable | FewSlots:
        """Whose verbs to use for so many blocks: the outcome is the same."""
        return self._few if count <= FEW else self
