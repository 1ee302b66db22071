"""SlotPool: a fixed set of slots, the index of the blocks they hold, and who may take which slot when."""

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from kvtier.tiers.lease import Lease, PoolCounts, Reservation
from kvtier.tiers.policy import Slots
from kvtier.tiers.slots import FILLING, QUARANTINED, SlotTable, consume, no_slots
from kvtier.tiers.tier import ChainHash

__all__ = ["Lease", "PoolCounts", "Reservation", "SlotPool", "replay"]


class SlotPool:
    """A fixed set of slots and the index of the blocks they hold. Thread-safe.

    States: free → filling → ready (⇄ leased) → free, and filling → quarantined → free. One lock, never held across I/O
    or a copy. A slot keeps its block until it is taken again. No policy evicts a leased block, nor one that has a
    resident child. Hashes in one call are distinct.
    Law (`check()`): free + filling + ready + quarantined == num_slots; leased ⊆ ready; the index names exactly the
    ready slots. A leased block that `reset` forgot counts as filling until its lease is released.
    (Two methods past the budget of fifteen: two-phase stores, leases and write-back share this one index and lock.)
    """

    def __init__(self, num_slots: int, *, policy: str = "lru") -> None:
        self.num_slots = num_slots
        self.num_leaked = 0  # leases that were dropped, not released
        self._table = SlotTable(num_slots, policy)
        self._lock = threading.Lock()
        self._epoch = 0  # resets so far
        self._filling: dict[ChainHash, int] = {}
        # `__del__` may run anywhere, even inside this pool's own methods: it only leaves a note here.
        self._dropped: deque[Lease | Reservation] = deque()

    @property
    def num_evicted(self) -> int:
        """Blocks the policy evicted to make room, since the start."""
        return self._table.num_evicted

    @property
    def num_dirty_dropped(self) -> int:
        """Blocks evicted while dirty: no tier holds them any more."""
        return self._table.num_dirty_dropped

    # --- queries: no side effect --------------------------------------------------------------------------------

    def lookup(self, hashes: Sequence[ChainHash]) -> int:
        """How many leading blocks are ready."""
        return len(list(takewhile(self._table.index.__contains__, hashes)))

    def holds(self, hashes: Sequence[ChainHash]) -> list[bool]:
        """Which of the blocks are ready, each by itself."""
        return list(map(self._table.index.__contains__, hashes))

    def generation(self, slot: int) -> int:
        """How often the slot was taken: a copy planned for an older generation must not be made."""
        return int(self._table.generation[slot])

    def counts(self) -> PoolCounts:
        """How many slots are in each state. O(1)."""
        with self._lock:
            self._settle_dropped()
            return self._counts()

    # --- two-phase store ----------------------------------------------------------------------------------------

    def reserve(self, hashes: Sequence[ChainHash], parent: ChainHash | None = None) -> Reservation | None:
        """Take a slot for every block that is neither ready nor filling, evicting by policy; all or nothing.

        `hashes` are consecutive blocks of one chain and `parent` names the block before them. None means that leased,
        filling and quarantined slots leave too little room: the caller drops the store, nobody waits. Reserved slots
        stay invisible until `seal`. ValueError if a hash is given twice.
        """
        with self._lock:
            self._settle_dropped()
            table = self._table
            held = self._held(hashes)
            missing = np.flatnonzero(held < 0)
            if not len(missing):
                return self._reservation([], [], no_slots(), [])
            indices: list[int] = missing.tolist()
            names = [hashes[i] for i in indices]
            if len(set(names)) != len(names):
                raise ValueError(f"reserve: {len(names) - len(set(names))} of {len(hashes)} hashes are given twice")
            gaps = np.flatnonzero((held[:-1] < 0) & (held[1:] >= 0)) + 1  # held blocks whose parent comes back now
            parent_slot = self._slot(parent)
            anchors = _shifted(held, parent_slot)[missing]
            anchors = anchors[anchors >= 0]
            table.children[anchors] += 1  # the blocks these hang on must not go to make room for them
            slots = table.take(len(indices))
            if slots is not None:
                held[missing] = slots
                parents = _shifted(held, parent_slot)[missing]
                table.link(slots, np.where(parents < 0, self.num_slots, parents))
                table.names[slots] = names
                self._filling.update(zip(names, slots.tolist(), strict=True))
                self._adopt(hashes, held, gaps)
            table.release_parents(anchors)
            if slots is None:
                return None
            return self._reservation(names, indices, slots, [hashes[i - 1] if i else parent for i in indices])

    def seal(self, reservation: Reservation, positions: Sequence[int] | None = None) -> Lease:
        """Publish the reservation's blocks, at `positions` in its hashes or all still filling, and lease them.

        Nothing evicts them before the lease is released. ValueError if a position given is not filling any more.
        After a `reset` they get their lease but no name.
        """
        with self._lock:
            self._settle_dropped()
            at = self._in_state(reservation, positions, FILLING)
            if positions is not None and len(at) != len(positions):
                raise ValueError(
                    f"seal: positions {sorted(set(positions) - set(at.tolist()))} are not filling any more"
                )
            slots, names = reservation.slots[at], _pick(reservation.hashes, at)
            self._table.refs[slots] = 1
            if reservation.epoch == self._epoch:
                consume(map(self._filling.__delitem__, names))
                self._table.name(slots, names)
            reservation.num_open -= len(at)
            return Lease(names, slots, reservation.generations[at], self._on_release)

    def abandon(self, reservation: Reservation, positions: Sequence[int] | None = None) -> None:
        """Filling → free. Positions that are not filling (any more) are passed over."""
        with self._lock:
            self._settle_dropped()
            self._table.free(self._close(reservation, positions))

    def quarantine(self, reservation: Reservation, positions: Sequence[int] | None = None) -> None:
        """Filling → quarantined: an operation hangs and may still write there. The blocks can be reserved again."""
        with self._lock:
            self._settle_dropped()
            slots = self._close(reservation, positions)
            self._table.state[slots] = QUARANTINED
            self._table.num_quarantined += len(slots)

    def settle(self, reservation: Reservation, positions: Sequence[int] | None = None) -> None:
        """Quarantined → free: the operation completed. Positions that are not quarantined are passed over."""
        with self._lock:
            self._settle_dropped()
            slots = reservation.slots[self._in_state(reservation, positions, QUARANTINED)]
            self._table.num_quarantined -= len(slots)
            self._table.free(slots)

    # --- protection ---------------------------------------------------------------------------------------------

    def lease(self, hashes: Sequence[ChainHash]) -> Lease:
        """Protect the leading ready blocks; the lease is as long as there are such, maybe empty. Counts as a use."""
        with self._lock:
            self._settle_dropped()
            slots = self._table.find_run(hashes)
            self._table.ref(slots)
            return Lease(list(hashes[: len(slots)]), slots, self._table.generation[slots], self._on_release)

    def touch(self, hashes: Sequence[ChainHash]) -> None:
        """Count a use of each ready block; the last of the chain stays the first to go."""
        with self._lock:
            self._settle_dropped()
            self._table.use(self._ready(hashes))

    def evict(self, hashes: Sequence[ChainHash]) -> int:
        """Drop these blocks, even if they have children, except leased ones. Returns how many went."""
        with self._lock:
            self._settle_dropped()
            return self._table.drop(self._ready(hashes))

    # --- write-back ---------------------------------------------------------------------------------------------

    def mark_dirty(self, hashes: Sequence[ChainHash]) -> None:
        """Note that no lower tier holds these blocks: clean ones are evicted first."""
        with self._lock:
            self._table.mark_dirty(self._ready(hashes))

    def mark_clean(self, hashes: Sequence[ChainHash]) -> None:
        """Note that a lower tier holds these blocks now."""
        with self._lock:
            self._table.mark_clean(self._ready(hashes))

    def oldest_dirty(self, n: int) -> list[ChainHash]:
        """Up to `n` dirty blocks, those the policy would evict next first, but each after its dirty parents."""
        with self._lock:
            self._settle_dropped()
            table = self._table
            chosen: dict[int, None] = {}
            for slot in table.dirty_slots().tolist():
                if len(chosen) >= n:
                    break
                branch = []
                while slot not in chosen and table.dirty[slot]:
                    branch.append(slot)
                    slot = self.num_slots if table.is_orphan(slot) else int(table.parent[slot])
                chosen.update(dict.fromkeys(reversed(branch)))
            names: list[ChainHash] = table.names[list(chosen)[:n]].tolist()
            return names

    # --- the whole ----------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget every block. Leased ones lose their name and are freed at release; filling ones are never named."""
        with self._lock:
            self._settle_dropped()
            self._epoch += 1
            self._filling.clear()
            self._table.reset()

    def check(self) -> PoolCounts:
        """Raise AssertionError where a law of the pool is broken; return the counts. A full scan: at idle, in tests."""
        with self._lock:
            self._settle_dropped()
            table, counts = self._table, self._counts()
            table.check()
            assert counts.free + counts.filling + counts.ready + counts.quarantined == self.num_slots, counts
            assert counts.filling == np.count_nonzero(table.state == FILLING), "filling count"
            assert 0 <= counts.leased <= counts.ready, counts
            filling = list(self._filling.values())
            assert (table.state[filling] == FILLING).all(), "filling index names slots in other states"
            assert not table.refs[filling].any(), "a filling slot is leased"
            assert table.names[filling].tolist() == list(self._filling), "filling index names other slots"
            assert self._filling.keys().isdisjoint(table.index), "a block is ready and filling"
            return counts

    # --- under the lock -----------------------------------------------------------------------------------------

    def _counts(self) -> PoolCounts:
        table = self._table
        filling = self.num_slots - table.num_free - table.num_ready - table.num_quarantined
        return PoolCounts(
            table.num_free, filling, table.num_ready, table.num_leased, table.num_quarantined, table.num_dirty
        )

    def _ready(self, hashes: Sequence[ChainHash]) -> Slots:
        slots = self._table.find(hashes)
        return slots[slots >= 0]

    def _held(self, hashes: Sequence[ChainHash]) -> Slots:
        """The slot of each block, ready or filling; -1 where there is none."""
        slots = self._table.find(hashes)
        if self._filling:
            missing = np.flatnonzero(slots < 0)
            slots[missing] = [self._filling.get(hashes[i], -1) for i in missing.tolist()]
        return slots

    def _slot(self, name: ChainHash | None) -> int:
        if name is None:
            return -1
        return self._table.index.get(name, self._filling.get(name, -1))

    def _adopt(self, hashes: Sequence[ChainHash], held: Slots, gaps: NDArray[np.intp]) -> None:
        """Link held blocks that had lost their parent to the slot reserved for it now."""
        for i in gaps.tolist():
            slot = int(held[i])
            if self._slot(hashes[i]) == slot and self._table.is_orphan(slot):  # it may just have been evicted
                self._table.link(held[i : i + 1], held[i - 1 : i])

    def _reservation(
        self, names: list[ChainHash], indices: list[int], slots: Slots, parents: list[ChainHash | None]
    ) -> Reservation:
        generations = self._table.generation[slots]
        return Reservation(names, indices, slots, generations, parents, self._epoch, len(names), self._on_drop)

    def _in_state(self, reservation: Reservation, positions: Sequence[int] | None, state: int) -> NDArray[np.intp]:
        """Those of the positions whose slot is still this reservation's, in `state` and not leased."""
        at = np.arange(len(reservation)) if positions is None else np.unique(np.asarray(positions, np.intp))
        slots, table = reservation.slots[at], self._table
        own = (table.state[slots] == state) & (table.generation[slots] == reservation.generations[at])
        own &= table.refs[slots] == 0
        return at if own.all() else at[own]

    def _close(self, reservation: Reservation, positions: Sequence[int] | None) -> Slots:
        """Take filling slots out of the chain and the filling index; the caller decides what becomes of them."""
        at = self._in_state(reservation, positions, FILLING)
        slots = reservation.slots[at]
        if reservation.epoch == self._epoch:
            consume(map(self._filling.__delitem__, _pick(reservation.hashes, at)))
        self._table.unlink(slots)
        reservation.num_open -= len(at)
        return slots

    # --- the ends of leases and reservations --------------------------------------------------------------------

    def _on_release(self, lease: Lease, leaked: bool) -> None:
        if leaked:
            self._note_dropped(lease)
            return
        with self._lock:
            self._settle_dropped()
            if lease.disarm():
                self._table.unref(lease.slots)

    def _on_drop(self, reservation: Reservation) -> None:
        self._note_dropped(reservation)

    def _note_dropped(self, dropped: Lease | Reservation) -> None:
        self._dropped.append(dropped)
        if self._lock.acquire(blocking=False):  # else whoever is next in does it
            try:
                self._settle_dropped()
            finally:
                self._lock.release()

    def _settle_dropped(self) -> None:
        while self._dropped:
            dropped = self._dropped.popleft()
            if isinstance(dropped, Reservation):
                self._table.free(self._close(dropped, None))
            elif dropped.disarm():
                self.num_leaked += 1
                self._table.unref(dropped.slots)


def _shifted(held: Slots, first: int) -> Slots:
    """For each position, the slot of the block before it."""
    before = np.empty_like(held)
    before[0], before[1:] = first, held[:-1]
    return before


def _pick(names: list[ChainHash], at: NDArray[np.intp]) -> list[ChainHash]:
    return names.copy() if len(at) == len(names) else [names[i] for i in at.tolist()]


def replay(trace: Iterable[Sequence[ChainHash]], num_slots: int, *, policy: str = "lru") -> float:
    """The share of a trace's blocks that a pool with this policy would have held: each item is one prompt's chain."""
    pool = SlotPool(num_slots, policy=policy)
    num_blocks = num_hits = 0
    for hashes in trace:
        with pool.lease(hashes) as hits:
            num_blocks += len(hashes)
            num_hits += len(hits)
            reservation = pool.reserve(hashes)
            if reservation is not None:
                pool.seal(reservation).release()
    return num_hits / num_blocks if num_blocks else 0.0
