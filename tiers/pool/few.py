"""FewSlots: what a SlotTable does to many slots in numpy, done to a few, one by one; and the choice between the two."""

from collections.abc import Sequence
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from kvtier.tiers import ChainHash
from kvtier.tiers.compiled import twin
from kvtier.tiers.pool.departures import EVICTED_CODE, Departures
from kvtier.tiers.pool.index import NAME_MIX, Slots
from kvtier.tiers.pool.lease import Reservation
from kvtier.tiers.pool.policy import LRU, S3FIFO
from kvtier.tiers.pool.slots import SlotTable
from kvtier.tiers.pool.states import FILLING, FREE, READY, AnySlots
from kvtier.tiers.pool.tail_index import EndedBlocks, TailIndex

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

    def blocks_of(self, hashes: Sequence[ChainHash], num_prompt: int, arrived: float) -> EndedBlocks:
        """What the policy, a TailIndex, and the index know of the blocks of a request that has ended."""
        words, slots = self._index.find(hashes)  # those that still fill, too
        policy = cast(TailIndex, self._policy)
        return policy.blocks_of(slots, words @ NAME_MIX, num_prompt, arrived)

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
        state, refs, generation, find = self._state, self._refs, self._generation, self._index.find_one
        slots: list[int] = []
        for name in hashes:
            slot = find(name)
            if state[slot] != READY:  # -1 is nobody's row
                break
            slots.append(slot)
        num_idle = 0
        for slot in slots:  # nothing changes before every name was one
            if count := refs[slot]:
                refs[slot] = count + 1
            else:
                refs[slot] = 1
                num_idle += 1
        self._table.num_leased += num_idle
        self._idle.withdraw_few(slots)
        return slots, [generation[slot] for slot in slots]

    def lease_at(self, slots: Slots, generations: Slots) -> tuple[Slots, Slots]:
        """As `lease`, of blocks that were ready in these slots, as the table does it."""
        return self._table.lease_at(slots, generations)

    def unref(self, slots: AnySlots) -> None:
        """One reference fewer, as the table does it."""
        places = slots if isinstance(slots, list) else slots.tolist()
        if len(places) > 1 and len(set(places)) < len(places):
            return self._table.unref(places)
        table, refs, state = self._table, self._refs, self._state
        counts = [refs[slot] for slot in places]
        if 0 in counts:
            raise ValueError(f"slots {[each for each in places if not refs[each]]} have no reference")
        idle = []
        for slot in reversed(places):
            if (count := counts.pop()) > 1:
                refs[slot] = count - 1
                continue
            refs[slot] = 0
            if state[slot] == READY:
                idle.append(slot)
            else:
                state[slot] = FREE
                self._free[table.num_free] = slot
                table.num_free += 1
        if idle:
            table.num_leased -= len(idle)
            self._policy.enter_few(idle)

    def allocate(self, count: int) -> list[int] | None:
        """Take slots (→ FILLING, next generation), with one reference each, parents or not, as the table does it."""
        slots = self._room_for(count, spare_parents=False)
        if slots is None:
            return None
        state, refs, generation, num_children = self._state, self._refs, self._generation, self._links.num_children
        for slot in slots:
            generation[slot] += 1
            state[slot] = FILLING
            refs[slot] = 1
            num_children[slot] = 0
        return slots

    def reserve(
        self, hashes: Sequence[ChainHash], parent: ChainHash | None
    ) -> tuple[list[int], AnySlots, AnySlots] | None:
        """Take slots for the blocks of a chain that have none, as the table does it."""
        index, links = self._index, self._links
        held = list(map(index.find_one, hashes))
        num_new = held.count(-1)
        if not num_new:
            return [], [], []
        num_held = held.index(-1)
        new = hashes[num_held:] if num_held else hashes
        if len(new) != num_new or (num_new > 1 and len(set(new)) < num_new):
            return self._table.reserve(hashes, parent)  # a parent comes back to its child; or names that are no chain
        before = held[num_held - 1] if num_held else -1 if parent is None else index.find_one(parent)
        guarded = before >= 0 and num_new > self._table.num_free
        if guarded:
            links.num_children[before] += 1  # it must not go to make room for what hangs on it
        anchor, slots = before, self._room_for(num_new)
        state, generation, num_children, times = self._state, self._generation, links.num_children, list[int]()
        for name, slot in zip(new, slots or (), strict=slots is not None):
            generation[slot] = time = generation[slot] + 1
            times.append(time)
            state[slot] = FILLING
            num_children[slot] = 0
            index.add_one(name, slot)
            links.link_one(slot, before)
            before = slot
        if guarded:
            self._idle.release_few([anchor])
        return None if slots is None else (list(range(num_held, len(held))), slots, times)

    def seal(
        self, reservation: Reservation, positions: Sequence[int] | None, *, named: bool
    ) -> tuple[Sequence[int], AnySlots, AnySlots]:
        """Publish a reservation's blocks with one reference each, as the table does it."""
        slots = reservation.places
        if positions is not None or not reservation.is_whole or reservation.is_tail or not isinstance(slots, list):
            return self._table.seal(reservation, positions, named=named)
        table, state, refs = self._table, self._state, self._refs
        for slot in slots:
            refs[slot] = 1
            if named:
                state[slot] = READY
        if named:
            table.num_ready += len(slots)
            table.num_leased += len(slots)
            if table.policy.admit is not None:
                self._policy.admit_few(slots)
            if table.changes is not None:
                table.changes.stored(np.array(slots, np.int64))
        return reservation.indices, slots, reservation.times

    def _room_for(self, count: int, *, spare_parents: bool = True) -> list[int] | None:
        """Slots that are nobody's, still marked as they were: free ones, or of evicted blocks. None: no room."""
        table, free = self._table, self._free
        num_left = table.num_free - count
        if num_left >= 0:
            slots = [free[num_left]] if count == 1 else free[num_left : table.num_free].tolist()[::-1]
            table.num_free = num_left
            if table.departures is not None:
                table.departures.came_few(slots)
            return slots
        short = -num_left
        if short > table.num_ready - table.num_leased:
            return None
        victims = self._idle.choose_few(short, spare_parents=spare_parents)
        if victims is None:
            return None
        table.num_evicted += short
        if (departures := table.departures) is not None:
            departures.evicted_few(victims, self._index.name_bytes)
        if table.changes is not None or table.tails or self._idle.num_dirty:
            table.forget(np.array(victims, np.int64))
        else:
            for slot in victims:
                self._index.remove_one(slot)
                self._links.clear_one(slot)
            table.num_ready -= short
        if table.num_free:
            victims += free[: table.num_free].tolist()[::-1]
            table.num_free = 0
        if departures is not None:
            departures.came_few(victims)
        return victims


class BatchTable(SlotTable):
    """A table that knows who handles a batch fastest: the compiled twin where it was built, of whatever size."""

    def __init__(self, num_slots: int, policy: str, max_tails: int | None = None) -> None:
        super().__init__(num_slots, policy, max_tails)
        self._few = FewSlots(self)
        self._compiled = _compiled(self)

    def remember(self, departures: Departures) -> None:
        """Tell `departures` what comes and leaves from now on."""
        self.departures = departures
        if self._compiled is not None:
            cast(Any, self._compiled).remember(departures, EVICTED_CODE)

    @property
    def is_compiled(self) -> bool:
        """Whether its verbs are the compiled twin's."""
        return self._compiled is not None

    def reserve_chains(
        self, names: Sequence[ChainHash], starts: list[int], parents: Sequence[ChainHash | None]
    ) -> tuple[Slots, NDArray[np.bool_]] | None:
        """As the table's; a decoding step's chains, of a block each, are the twin's."""
        if self._compiled is None or not len(names) == len(starts) > 1 or None in parents:
            return super().reserve_chains(names, starts, parents)
        taken: tuple[Slots, NDArray[np.bool_]] | None = cast(Any, self._compiled).reserve_ones(names, parents)
        return taken

    def blocks_of(self, hashes: Sequence[ChainHash], num_prompt: int, arrived: float) -> EndedBlocks:
        """As `FewSlots.blocks_of`."""
        return (self._compiled or self._few).blocks_of(hashes, num_prompt, arrived)

    def of(self, count: int) -> SlotTable | FewSlots:
        """Whose verbs to use for so many blocks: the outcome is the same."""
        if self._compiled is not None:
            return self._compiled
        return self._few if count <= FEW else self


def _compiled(table: SlotTable) -> FewSlots | None:
    """The twin over this table; None where none was built, for a policy it does not know, or a table too large."""
    module, kind = twin("kvtier.tiers.pool.few_compiled"), type(table.policy)
    if module is None or kind not in (LRU, S3FIFO, TailIndex) or table.index.is_wide:
        return None
    compiled: FewSlots = module.CompiledSlots(
        table, kind is not S3FIFO, kind is TailIndex, FEW
    )  # it has all of FewSlots' verbs
    return compiled
