"""SlotPool: a fixed set of slots, the index of the blocks they hold, and who may take which slot when."""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from kvtier.tiers import BlockRecord, ChainHash, Changes, Outcome
from kvtier.tiers.pool.backlog import Backlog
from kvtier.tiers.pool.departures import REMOVED, RESET, Departures
from kvtier.tiers.pool.few import FEW, BatchTable
from kvtier.tiers.pool.index import Slots
from kvtier.tiers.pool.kept_places import KeptPlaces
from kvtier.tiers.pool.lease import Lease, Places, PoolCounts, Reservation
from kvtier.tiers.pool.states import FILLING, QUARANTINED, READY, AnySlots, listed, picked
from kvtier.tiers.pool.tail_index import TailIndex
from kvtier.tiers.returns import RequestEnd, ToldEnd

if TYPE_CHECKING:
    from _typeshed import SupportsGetItem

_PIECE: Final = 4096  # slots looked at while the lock is held

Chains = Sequence[tuple[Sequence[ChainHash], ChainHash | None]]  # (names, the name before them) of each


class SlotPool:
    """A fixed set of slots and the index of the blocks they hold. Thread-safe.

    States: free → filling → ready (⇄ leased) → free, and filling → quarantined → free. One lock, never held across I/O
    or a copy. A slot keeps its block until it is taken again. No policy evicts a leased block, nor one that has a
    resident child. Hashes in one call are distinct.
    Law (`check()`): free + filling + ready + quarantined == num_slots; leased ⊆ ready; the index names exactly the
    ready slots. A leased block that `reset` or `evict` forgot counts as filling until its lease is released.
    (More than fifteen methods: two-phase stores, leases and write-back work on one index under one lock.)
    """

    def __init__(self, num_slots: int, *, policy: str = "lru", clock: Callable[[], float] = time.monotonic) -> None:
        self.num_slots = num_slots
        self.num_leaked = 0  # leases that were dropped, not released
        self._table = BatchTable(num_slots, policy, max(1, num_slots // 8))
        if isinstance(self._table.policy, TailIndex):
            self._table.policy.clock = clock
        self._places = KeptPlaces(self._table)
        self._lock = threading.Lock()
        self._epoch = 0  # resets so far
        self._backlogs: list[Backlog] = []
        # `__del__` may run anywhere, even inside this pool's own methods: it only leaves a note here.
        self._dropped: deque[Lease | Reservation] = deque()

    @property
    def num_evicted(self) -> int:
        """Blocks the policy evicted to make room, since the start."""
        return self._table.num_evicted

    @property
    def departures(self) -> Departures | None:
        """Where what leaves is remembered, since `remember`."""
        return self._table.departures

    def remember(self, departures: Departures) -> None:
        """Tell `departures`, made for as many places as there are slots and one, what comes and leaves from now on."""
        with self._lock:
            self._table.remember(departures)

    def not_stored(self, hashes: Sequence[ChainHash], reason: str) -> None:
        """Remember why these blocks did not come here."""
        if (departures := self._table.departures) is not None and hashes:
            departures.left(hashes, reason)

    @property
    def num_dirty_dropped(self) -> int:
        """Blocks evicted while dirty: no tier holds them any more."""
        return self._table.num_dirty_dropped

    # --- queries: no side effect --------------------------------------------------------------------------------

    def lookup(self, hashes: Sequence[ChainHash]) -> int:
        """How many leading blocks are ready."""
        with self._lock:
            return len(self._table.of(len(hashes)).find_run(hashes))

    def places(self, hashes: Sequence[ChainHash]) -> Places:
        """Where the leading ready blocks are, for a `lease` that need not look their names up again."""
        with self._lock:
            return self._places.of(hashes)

    def return_gaps(self) -> NDArray[np.float64] | None:
        """`[ages]`: requests that returned after so long, by the ages of `tiers.returns`; None: not learned."""
        policy = self._table.policy
        return policy.gaps() if isinstance(policy, TailIndex) else None

    def ready_slots(self) -> Slots:
        """Every slot that holds a block now. O(slots)."""
        with self._lock:
            return np.flatnonzero(self._table.state[:-1] == READY)

    def holds(self, hashes: Sequence[ChainHash]) -> list[bool]:
        """Which of the blocks are ready, each by itself."""
        with self._lock:
            return [slot >= 0 for slot in listed(self._table.of(len(hashes)).find(hashes))]

    def generation(self, slot: int) -> int:
        """How often the slot was taken: a copy planned for an older generation must not be made."""
        return int(self._table.generation[slot])

    @property
    def naming(self) -> tuple[memoryview, memoryview]:
        """Each slot's name, or the last it had, 32 bytes each, and its generation, int64. They change with the pool."""
        return self._table.index.name_bytes, memoryview(self._table.generation)

    def is_ready(self, slot: int) -> bool:
        """Whether a slot holds a block that can be found, as a hint: no lock is taken."""
        return bool(self._table.state[slot] == READY)

    @property
    def tails(self) -> Collection[int]:
        """The slots that hold a chain's unfinished last block, oldest first, as a hint: they change meanwhile."""
        return self._table.tails

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
        return self._reserve_in_turn([(hashes, parent)])[0]

    def reserve_each(self, chains: Chains) -> list[Reservation | None]:
        """`reserve` for several (hashes, parent), each all or nothing; in one pass where there is room for all."""
        names, lengths = [name for hashes, _ in chains for name in hashes], [len(hashes) for hashes, _ in chains]
        is_many = len(chains) == len(names) > 1 if self._table.is_compiled else len(names) > FEW
        if is_many and 0 not in lengths and len(distinct := set(names)) == len(names):
            starts, parents = list(accumulate(lengths, initial=0)), [parent for _, parent in chains]
            with self._lock:
                self._settle_dropped()
                is_apart = distinct.isdisjoint(parents)
                if is_apart and (taken := self._table.reserve_chains(names, starts[:-1], parents)) is not None:
                    return self._reservations(chains, starts, *taken)
        return self._reserve_in_turn(chains)

    def seal(self, reservation: Reservation, positions: Sequence[int] | None = None) -> Lease:
        """Publish the reservation's blocks, at `positions` in its hashes or all still filling, and lease them.

        Nothing evicts them before the lease is released. ValueError if a position given is not filling any more.
        After a `reset` they get their lease but no name. A tail beyond an eighth of all slots pushes the oldest out.
        """
        with self._lock:
            if self._dropped:
                self._settle_dropped()
            return Lease(*self._seal(reservation, positions), self._on_release)

    def seal_each(self, reservations: Sequence[Reservation]) -> Lease:
        """`seal` of all that still fills of several reservations, under one lease: a step's stores."""
        with self._lock:
            if self._dropped:
                self._settle_dropped()
            if (lease := self._seal_at_once(reservations)) is not None:
                return lease
            names: list[ChainHash] = []
            slots: list[int] = []
            generations: list[int] = []
            for reservation in reservations:
                sealed, at, times = self._seal(reservation, None)
                names += sealed
                slots += listed(at)
                generations += listed(times)
        return Lease(names, slots, generations, self._on_release)

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
            slots = reservation.slots[self._table.in_state(reservation, positions, QUARANTINED)]
            self._table.num_quarantined -= len(slots)
            self._table.free(slots)

    # --- protection ---------------------------------------------------------------------------------------------

    def lease(self, hashes: Sequence[ChainHash], places: Places | None = None) -> Lease:
        """Protect the leading ready blocks; the lease is as long as there are such, maybe empty. Counts as a use.

        `places`: where exactly these blocks were a moment ago. The lease then keeps the list of their names itself.
        """
        with self._lock:
            if self._dropped:
                self._settle_dropped()
            if places is None or isinstance(places.slots, list) or isinstance(places.generations, list):
                slots, generations = self._table.of(len(hashes)).lease(hashes)  # a few names cost little
                return Lease(list(hashes[: len(slots)]), slots, generations, self._on_release)
            at, times = self._table.of(len(places)).lease_at(places.slots, places.generations)
            names = hashes if isinstance(hashes, list) and len(at) == len(hashes) else list(hashes[: len(at)])
            return Lease(names, at, times, self._on_release)

    def touch(self, hashes: Sequence[ChainHash]) -> None:
        """Count a use of each ready block; the last of the chain stays the first to go."""
        with self._lock:
            self._settle_dropped()
            self._table.use(self._ready(hashes))

    def ended(self, end: RequestEnd) -> ToldEnd | None:
        """A request has ended: a policy that learns how requests return hears of it. Returns what tiers below hear."""
        policy = self._table.policy
        if not isinstance(policy, TailIndex):
            return None
        with self._lock:
            if self._dropped:
                self._settle_dropped()
            now = policy.clock()
            blocks = self._table.blocks_of(end.names, end.num_prompt, now - end.seconds)
            return policy.heard(end, blocks, now)

    def evict(self, hashes: Sequence[ChainHash], cause: str = REMOVED) -> int:
        """Drop these blocks, with children or without; returns how many went. Leased slots go when their leases end.

        `cause` is what is remembered: one of `departures.py`, or an `Outcome`.
        """
        with self._lock:
            self._settle_dropped()
            slots = self._ready(hashes)
            if self._table.departures is not None:
                self._table.departures.left(self._table.index.words(slots), cause)
            return self._table.drop(slots)

    def evict_idle(self, hashes: Sequence[ChainHash]) -> list[bool]:
        """Drop those of these blocks that nobody uses: no lease, no resident child but such as go with this call.

        A chain's blocks come tail first. True for each block that is gone now or was not here, False for one in use.
        """
        with self._lock:
            self._settle_dropped()
            gone = self._table.drop_idle(hashes)
            if self._table.departures is not None:
                names = [name for name, is_gone in zip(hashes, gone, strict=True) if is_gone]
                self._table.departures.left(names, Outcome.QUOTA)
            return gone

    # --- what lower tiers lack ----------------------------------------------------------------------------------

    def backlog(self) -> Backlog:
        """A line, empty yet, for blocks of this pool that are still to be given to a lower tier; a reset clears it."""
        with self._lock:
            self._backlogs.append(Backlog(self._table, self._lock))
            return self._backlogs[-1]

    def mark_dirty(self, blocks: Sequence[ChainHash] | Lease) -> None:
        """Note that no lower tier holds these blocks, by name or those leased: clean ones are evicted first.

        As far as clean ones are among the next 4,096 in line: an eviction looks no further.
        """
        with self._lock:
            if isinstance(blocks, Lease):  # one that was dropped meanwhile is not ready, and its slot nobody else's
                slots = blocks.slots
                self._table.idle.mark_dirty(slots[self._table.state[slots] == READY])
            else:
                self._table.idle.mark_dirty(self._ready(blocks))

    @property
    def has_dirty(self) -> bool:
        """Whether any block is dirty, as a hint: no lock is taken."""
        return self._table.idle.num_dirty > 0

    def mark_clean(self, hashes: Sequence[ChainHash]) -> None:
        """Note that a lower tier holds these blocks now."""
        with self._lock:
            self._table.idle.mark_clean(self._ready(hashes))

    def mark_all_clean(self) -> None:
        """Nothing is dirty any more: what was goes in its turn. The lock is held for a piece at a time."""
        for first in range(0, self.num_slots, _PIECE):
            with self._lock:
                dirty = np.flatnonzero(self._table.idle.dirty[first : first + _PIECE]) + first
                self._table.idle.mark_clean(dirty[dirty < self.num_slots])

    def oldest_dirty(self, n: int) -> list[ChainHash]:
        """Up to `n` dirty blocks, those the policy would evict next first, but each after its dirty parents."""
        with self._lock:
            self._settle_dropped()
            return self._table.oldest_dirty(n)

    # --- telling ------------------------------------------------------------------------------------------------

    def listen(self) -> None:
        """Keep a log of the blocks that come and go, for one reader that knows none. Called again it starts over."""
        with self._lock:
            self._settle_dropped()
            self._table.listen()

    def changes(self, records: "SupportsGetItem[int, BlockRecord | None]", limit: int) -> Changes:
        """What the reader has to forget and, up to `limit` blocks, to learn; `records` says what is in each slot.

        Before `listen` nothing. ValueError where a ready slot has no record.
        """
        with self._lock:
            if self._table.changes is None:
                return Changes([], [])
            gone, slots, cleared = self._table.changes.take(limit)
            stored = [record for slot in slots.tolist() if (record := records[slot]) is not None]
        if len(stored) < len(slots):
            raise ValueError(f"changes: {len(slots) - len(stored)} ready slots have no record")
        return Changes(gone, stored, cleared)

    @property
    def has_changes(self) -> bool:
        """Whether the reader may have something to learn."""
        log = self._table.changes
        return log is not None and log.waiting

    # --- the whole ----------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget every block. Leased ones lose their name and are freed at release; filling ones are never named."""
        with self._lock:
            self._settle_dropped()
            self._epoch += 1
            if self._table.departures is not None:
                ready = np.flatnonzero(self._table.state == READY)
                self._table.departures.left(self._table.index.words(ready), RESET)
            self._table.reset()
            for backlog in self._backlogs:
                backlog.clear()

    def check(self) -> PoolCounts:
        """Raise AssertionError where a law of the pool is broken; return the counts. A full scan: at idle, in tests."""
        with self._lock:
            self._settle_dropped()
            table, counts = self._table, self._counts()
            table.check()
            assert counts.free + counts.filling + counts.ready + counts.quarantined == self.num_slots, counts
            assert counts.filling == np.count_nonzero(table.state == FILLING), "filling count"
            assert 0 <= counts.leased <= counts.ready, counts
            return counts

    # --- under the lock -----------------------------------------------------------------------------------------

    def _counts(self) -> PoolCounts:
        table = self._table
        filling = self.num_slots - table.num_free - table.num_ready - table.num_quarantined
        return PoolCounts(
            table.num_free, filling, table.num_ready, table.num_leased,
            table.num_quarantined, table.idle.num_dirty, len(table.tails),
        )  # fmt: skip

    def _ready(self, hashes: Sequence[ChainHash]) -> Slots:
        slots = self._table.find(hashes)
        return slots[slots >= 0]

    def _reserve_in_turn(self, chains: Chains) -> list[Reservation | None]:
        """Chain by chain: each sees what the one before it took."""
        made: list[Reservation | None] = []
        with self._lock:
            self._settle_dropped()
            for hashes, parent in chains:
                taken = self._table.of(len(hashes)).reserve(hashes, parent)
                made.append(None if taken is None else self._reservation(hashes, parent, *taken))
        return made

    def _reservation(
        self, hashes: Sequence[ChainHash], parent: ChainHash | None, at: list[int], slots: AnySlots, times: AnySlots
    ) -> Reservation:
        if len(hashes) == len(at) == 1:
            return Reservation([hashes[0]], at, slots, times, [parent], self._epoch, 1, self._on_end)
        names, parents = picked(hashes, at), picked([parent, *hashes[:-1]], at)
        return Reservation(names, at, slots, times, parents, self._epoch, len(names), self._on_end)

    def _reservations(
        self, chains: Chains, starts: list[int], held: Slots, is_new: NDArray[np.bool_]
    ) -> list[Reservation | None]:
        """Each chain's, of what all of them were given."""
        slots, times, new = held.tolist(), self._table.generation[held].tolist(), is_new.tolist()
        if len(slots) == len(chains) and False not in new:  # a decoding step: a new block of each
            return [
                Reservation([hashes[0]], [0], [slot], [time], [parent], self._epoch, 1, self._on_end)
                for (hashes, parent), slot, time in zip(chains, slots, times, strict=True)
            ]
        reservations: list[Reservation | None] = []
        for (hashes, parent), (first, end) in zip(chains, pairwise(starts), strict=True):
            own = [i for i in range(first, end) if new[i]]
            at, own_slots, own_times = [i - first for i in own], [slots[i] for i in own], [times[i] for i in own]
            reservations.append(self._reservation(hashes, parent, at, own_slots, own_times))
        return reservations

    def _seal_at_once(self, reservations: Sequence[Reservation]) -> Lease | None:
        """All of many reservations in one pass; None: one by one, as there are few, tails, or some that are in part."""
        slots, names, epoch = list[int](), list[ChainHash](), self._epoch
        for each in reservations:
            if each.num_open != len(each.hashes) or each.is_tail or each.epoch != epoch:
                return None
            slots += listed(each.places)
            names += each.hashes
        if len(slots) <= max(FEW, 0) or len(set(slots)) < len(slots):
            return None
        at = np.array(slots, np.int64)
        self._table.refs[at] = 1
        self._table.publish(at)
        for each in reservations:
            each.num_open = 0
        return Lease(names, at, self._table.generation[at], self._on_release)

    def _seal(
        self, reservation: Reservation, positions: Sequence[int] | None
    ) -> tuple[list[ChainHash], AnySlots, AnySlots]:
        """Names, slots and generations of what was published, with one reference each."""
        verbs, named = self._table.of(len(reservation)), reservation.epoch == self._epoch
        at, slots, generations = verbs.seal(reservation, positions, named=named)
        reservation.num_open -= len(at)
        return picked(reservation.hashes, at), slots, generations

    def _close(self, reservation: Reservation, positions: Sequence[int] | None) -> Slots:
        """Take filling slots out of the chain and the filling index; the caller decides what becomes of them."""
        at = self._table.in_state(reservation, positions, FILLING)
        slots = reservation.slots[at]
        if reservation.epoch == self._epoch:
            self._table.index.remove(slots)
        self._table.idle.unlink(slots)
        self._table.links.clear(slots)
        reservation.num_open -= len(at)
        return slots

    # --- the ends of leases and reservations --------------------------------------------------------------------

    def _on_release(self, lease: Lease, leaked: bool) -> None:
        if leaked:
            self._note_dropped(lease)
            return
        with self._lock:
            if self._dropped:
                self._settle_dropped()
            if lease.on_release is not None:
                lease.on_release = None
                self._table.of(len(lease)).unref(lease.places)

    def _on_end(self, reservation: Reservation, dropped: bool) -> None:
        if dropped:
            self._note_dropped(reservation)
        else:
            self.abandon(reservation)

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
            elif dropped.on_release is not None:
                dropped.on_release = None
                self.num_leaked += 1
                self._table.unref(dropped.places)
