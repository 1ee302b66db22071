"""SlotPool: a fixed set of slots, the index of the blocks they hold, and who may take which slot when.

Besides leases (core.py) it hands out a `Reservation` to fill.
"""

import sys
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvtier.tiers import BlockRecord, ChainHash, Changes, Outcome
from kvtier.tiers.pool.changes import ChangeLog, Slots
from kvtier.tiers.pool.core import Lease, Leases, Line, SlotCore
from kvtier.tiers.pool.eviction_log import EVICTED_CODE, REMOVED, RESET, EvictionLog
from kvtier.tiers.pool.policy import form, learned, lease_type, make_core
from kvtier.tiers.reuse import ClassifiedEnd, RequestEnd

if TYPE_CHECKING:
    from _typeshed import SupportsGetItem

_PIECE: Final = 4096  # slots looked at while the lock is held
FREE: Final = 0  # states of a slot, as `core.py` has them
FILLING: Final = 1  # taken, and invisible to every lookup
READY: Final = 2
QUARANTINED: Final = 3  # an operation that hangs may still write here

T = TypeVar("T")

Chains = Sequence[tuple[Sequence[ChainHash], ChainHash | None]]  # (names, the name before them) of each


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """How many slots are in each state: free + filling + ready + quarantined is the pool's size."""

    free: int
    filling: int
    ready: int
    leased: int  # of the ready ones: those with a lease
    quarantined: int
    dirty: int  # of the ready ones: those no lower tier holds
    tails: int  # of the ready ones: partial blocks


@dataclass(eq=False, slots=True)
class Reservation:
    """Slots taken for blocks that are not held yet, invisible until `SlotPool.seal`.

    All lists run parallel, in chain order. As a context manager, and when it is dropped, it abandons what was neither
    sealed nor quarantined. It is empty if every block was there already.
    """

    hashes: list[ChainHash]
    indices: list[int]  # positions in the hashes given to `reserve`
    slots: list[int]
    generations: list[int]  # how often each slot had been taken by then
    parents: list[ChainHash | None]
    epoch: int = field(repr=False)  # the pool's count of resets when the slots were taken
    num_open: int = field(repr=False)  # slots still filling
    on_end: "Callable[[Reservation, bool], None]" = field(repr=False)  # (itself, whether it was dropped)
    num_refused: int = field(default=0, init=False)  # last blocks of those hashes that are not worth a slot
    is_partial: bool = field(default=False, init=False)  # of one block that is a chain's unfinished last one
    is_given: bool = field(default=False, init=False, repr=False)  # to be sealed: it cannot be abandoned any more

    @property
    def is_whole(self) -> bool:
        """Whether every one of its slots is still filling: none was sealed or given up."""
        return self.num_open == len(self.hashes)

    def __len__(self) -> int:
        return len(self.hashes)

    def __enter__(self) -> "Reservation":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.on_end(self, False)

    def __del__(self) -> None:
        if self.num_open and not sys.is_finalizing():
            self.on_end(self, True)


def picked(items: Sequence[T], at: Sequence[int]) -> list[T]:
    """The items at these positions, which are distinct and in order."""
    return list(items) if len(at) == len(items) else [items[i] for i in at]


class Backlog:
    """Ready blocks of a pool in line, each once, in the order they were added. Thread-safe: under the pool's lock.

    Evicting a block costs nothing here: a slot is remembered with its generation, and compared when its turn comes.
    What has left by then is counted. The bound is the pool's own: a slot is in line once. Its arrays, 25 bytes a slot,
    are made for the first block.
    """

    def __init__(self, core: SlotCore, lock: threading.Lock) -> None:
        self._core = core
        self._lock = lock
        self._line: Line | None = None
        self.is_used = False  # whether any block was ever in line: before that no look is needed
        self._num_lost = 0

    def __len__(self) -> int:
        """Blocks in line, with those that left unnoticed. No lock is taken."""
        return 0 if self._line is None else len(self._line)

    def add(self, names: Sequence[ChainHash]) -> None:
        """Put blocks in line, at its end; those that are in line stay where they are. What the pool lacks has left."""
        with self._lock:
            slots = [slot for slot in self._core.find(list(names)) if slot >= 0]
            self._num_lost += len(names) - len(slots)
            if slots:
                if self._line is None:
                    self._line, self.is_used = self._core.line(), True
                self._num_lost += self._line.add(slots)

    def take(self, count: int) -> tuple[list[ChainHash], list[int]]:
        """Take the first `count` blocks that are still held out of line, or all there are: their names and slots."""
        names: list[ChainHash] = []
        slots: list[int] = []
        while len(names) < count and len(self) and self._line is not None:
            with self._lock:
                held, num_lost = self._line.take(min(count - len(names), _PIECE))
                self._num_lost += num_lost
                names += self._core.names_of(held)
                slots += held
        return names, slots

    def remove(self, names: Sequence[ChainHash]) -> None:
        """They need not be given any more. Fine if they are not in line."""
        if len(self) and self._line is not None:
            with self._lock:
                self._line.remove([slot for slot in self._core.find(list(names)) if slot >= 0])

    def take_lost(self, *, look: bool = False) -> int:
        """Blocks that left the pool while in line, since the last call; with `look` all, in O(slots), by pieces."""
        if look and len(self) and self._line is not None:
            for first in range(0, self._core.num_slots, _PIECE):
                with self._lock:
                    self._num_lost += self._line.drop_lost(first, first + _PIECE)
        with self._lock:
            lost, self._num_lost = self._num_lost, 0
        return lost

    def clear(self) -> None:
        """Forget all, lost ones too. Called under the pool's lock."""
        if self._line is not None:
            self._line.reset()
        self._num_lost = 0


class SlotPool:
    """A fixed set of slots and the index of the blocks they hold. Thread-safe.

    States: free → filling → ready (⇄ leased) → free, and filling → quarantined → free. One lock, never held across I/O
    or a copy. A slot keeps its block until it is taken again. No policy evicts a leased block, nor one that has a
    resident child. Hashes in one call are distinct.
    Law (`check()`): free + filling + ready + quarantined == num_slots; leased ⊆ ready; the index names exactly the
    ready slots. A leased block that `reset` or `evict` forgot counts as filling until its lease is released.
    What is done to slots is in `core.py`; here are the lock, and what is handed out.
    """

    def __init__(self, num_slots: int, *, policy: str = "lru", clock: Callable[[], float] = time.monotonic) -> None:
        self.num_slots = num_slots
        self._core = make_core(num_slots, policy, max(1, num_slots // 8), clock)
        # The slots that hold a chain's unfinished last block, oldest first, as a hint: they change meanwhile.
        self.partial: Collection[int] = self._core.partial
        self._learned = learned(self._core)
        self._lock = threading.Lock()
        self._epoch = 0  # resets so far
        self._backlogs: list[Backlog] = []
        # `__del__` may run anywhere, even inside this pool's own methods: it only leaves a note here.
        self._dropped: deque[Lease | Reservation] = deque()
        self.num_leaked = 0  # leases that were dropped, not released; counted by the verb after
        self._lease = lease_type()
        self._on_release: Leases = form().Leases(self._lock, self._core, self._dropped)
        self.lease_whole = self._on_release.whole  # it settles no dropped lease: the next verb does

    @property
    def num_evicted(self) -> int:
        """Blocks the policy evicted to make room, since the start."""
        return self._core.num_evicted

    @property
    def eviction_log(self) -> EvictionLog | None:
        """Where what leaves is remembered, since `remember`."""
        return self._core.eviction_log

    def remember(self, eviction_log: EvictionLog) -> None:
        """Note in `eviction_log` what comes and leaves from now on. It has one place more than there are slots."""
        with self._lock:
            self._core.remember(eviction_log, EVICTED_CODE)

    def not_stored(self, hashes: Sequence[ChainHash], reason: str) -> None:
        """Remember why these blocks did not come here."""
        if (eviction_log := self._core.eviction_log) is not None and hashes:
            eviction_log.left(hashes, reason)

    @property
    def num_dirty_dropped(self) -> int:
        """Blocks evicted while dirty: no tier holds them any more."""
        return self._core.num_dirty_dropped

    # --- queries: no side effect --------------------------------------------------------------------------------

    def lookup(self, hashes: Sequence[ChainHash]) -> int:
        """How many leading blocks are ready."""
        with self._lock:
            return self._core.lookup(hashes if type(hashes) is list else list(hashes))

    def places(self, hashes: Sequence[ChainHash]) -> list[int]:
        """The slots of the leading ready blocks."""
        with self._lock:
            return self._core.find_run(hashes if type(hashes) is list else list(hashes))

    def return_gaps(self) -> NDArray[np.float64] | None:
        """`[ages]`: requests that returned after so long, by the ages of `tiers.reuse`; None: not learned."""
        gaps: NDArray[np.float64] | None = None if self._learned is None else self._learned.returns.gaps()
        return gaps

    def ready_slots(self) -> Slots:
        """Every slot that holds a block now. O(slots)."""
        with self._lock:
            return self._core.ready_slots()

    def holds(self, hashes: Sequence[ChainHash]) -> list[bool]:
        """Which of the blocks are ready, each by itself."""
        with self._lock:
            return [slot >= 0 for slot in self._core.find(hashes if type(hashes) is list else list(hashes))]

    def generation(self, slot: int) -> int:
        """How often the slot was taken: a copy planned for an older generation must not be made."""
        return self._core.generation_of(slot)

    @property
    def naming(self) -> tuple[memoryview, memoryview]:
        """Each slot's name, or the last it had, 32 bytes each, and its generation, int64. They change with the pool."""
        return memoryview(self._core.index.names), memoryview(np.asarray(self._core.generation))

    def is_ready(self, slot: int) -> bool:
        """Whether a slot holds a block that can be found, as a hint: no lock is taken."""
        return self._core.is_ready(slot)

    def counts(self) -> PoolCounts:
        """How many slots are in each state. O(1)."""
        with self._lock:
            self._settle_dropped()
            return self._counts()

    # --- two-phase store ----------------------------------------------------------------------------------------

    def reserve(
        self, hashes: Sequence[ChainHash], parent: ChainHash | None = None, *, if_worth: bool = False
    ) -> Reservation | None:
        """Take a slot for every block that is neither ready nor filling, evicting by policy; all or nothing.

        `hashes` are consecutive blocks of one chain and `parent` names the block before them. None means that leased,
        filling and quarantined slots leave too little room: the caller drops the store and never waits. Reserved slots
        stay invisible until `seal`. ValueError if a hash is given twice.

        `if_worth`: the learned order may refuse a chain's last blocks, if others' are likelier to be looked up again.
        """
        return self.reserve_each([(hashes, parent)], if_worth=if_worth)[0]

    def reserve_each(self, chains: Chains, *, if_worth: bool = False) -> list[Reservation | None]:
        """`reserve` for each (hashes, parent). None takes another's parent, but as a last resort."""
        with self._lock:
            if self._dropped:
                self._settle_dropped()
            guarded = self._core.guard([parent for _, parent in chains]) if len(chains) > 1 else []
            made: list[Reservation | None] = [None] * len(chains)
            for _ in range(2 if guarded else 1):
                try:
                    for number, (hashes, parent) in enumerate(chains):
                        names = hashes if type(hashes) is list else list(hashes)
                        if made[number] is None and (taken := self._core.reserve(names, parent, if_worth)) is not None:
                            at, slots, times, num_seen = taken
                            parents: list[ChainHash | None] = [parent, *names[:-1]]
                            num_refused = len(names) - num_seen
                            if len(at) < len(names):
                                names, parents = picked(names, at), picked(parents, at)
                            made[number] = new = Reservation(
                                names, at, slots, times, parents, self._epoch, len(at), self._on_end
                            )
                            new.num_refused = num_refused
                finally:
                    self._core.unguard(guarded)
                    guarded = []
                if None not in made:
                    break
        return made

    def preallocate(self, count: int, *, if_worth: bool = False) -> tuple[list[int], list[int]]:
        """Take up to `count` slots for blocks that have no name yet; returns them and their generations."""
        with self._lock:
            if self._dropped:
                self._settle_dropped()
            slots = self._core.preallocate(count, if_worth)
            return slots, self._core.generations(slots)

    def reserve_at(self, slots: Sequence[int], generations: Sequence[int], chains: Chains) -> list[Reservation | None]:
        """Name preallocated slots by one block of each chain. None: it is ready or filling; the slot has no name."""
        with self._lock:
            made: list[Reservation | None] = []
            for slot, time, (hashes, parent) in zip(slots, generations, chains, strict=True):
                names, is_named = list(hashes), False
                if names and self._core.own([slot], [time], None, FILLING):
                    positions, parents = self._core.name([slot], names, parent)
                    self._core.link([slot] if positions else [], parents)
                    is_named = bool(positions)
                at = names, [0], [slot], [time], [parent], self._epoch, 1, self._on_end
                made.append(Reservation(*at) if is_named else None)
        return made

    def deallocate(self, slots: Sequence[int], generations: Sequence[int]) -> None:
        """Free preallocated slots that have no name."""
        with self._lock:
            self._core.free(picked(slots, self._core.own(list(slots), list(generations), None, FILLING)))

    def seal(self, reservation: Reservation, positions: Sequence[int] | None = None) -> Lease:
        """Publish the reservation's blocks, at `positions` in its hashes or all still filling, and lease them.

        Nothing evicts them before the lease is released. ValueError if a position given is not filling any more.
        After a `reset` they get their lease but no name. Partial blocks take an eighth of all slots: the oldest goes.
        """
        return self.seal_each([reservation], positions)

    def seal_each(self, reservations: Sequence[Reservation], positions: Sequence[int] | None = None) -> Lease:
        """`seal` of what still fills of several reservations, under one lease. `positions` are of one reservation."""
        with self._lock:
            if self._dropped:
                self._settle_dropped()
            sealed: list[ChainHash] = []
            places: list[int] = []
            generations: list[int] = []
            for reservation in reservations:
                names, slots, times = reservation.hashes, reservation.slots, reservation.generations
                is_whole = reservation.num_open == len(names)
                if not is_whole or (positions is not None and [*positions] != [*range(len(names))]):
                    at = self._filling(reservation, positions)
                    if positions is not None and len(at) != len(positions):
                        gone = sorted(set(positions) - set(at))
                        raise ValueError(f"seal: positions {gone} are not filling any more, or one is given twice")
                    names, slots, times = picked(names, at), picked(slots, at), picked(times, at)
                reservation.num_open -= len(slots)
                if reservation.epoch == self._epoch:
                    self._core.publish(slots, reservation.is_partial)
                else:
                    self._core.lend(slots)
                sealed += names
                places += slots
                generations += times
        return self._lease(sealed, places, generations, self._on_release)

    def abandon(self, reservation: Reservation, positions: Sequence[int] | None = None) -> None:
        """Filling → free. Positions that are not filling (any more) are passed over."""
        with self._lock:
            self._settle_dropped()
            self._core.free(self._close(reservation, positions))

    def quarantine(self, reservation: Reservation, positions: Sequence[int] | None = None) -> None:
        """Filling → quarantined: an operation hangs and may still write there. The blocks can be reserved again."""
        with self._lock:
            self._settle_dropped()
            self._core.quarantine(self._close(reservation, positions))

    def settle(self, reservation: Reservation, positions: Sequence[int] | None = None) -> None:
        """Quarantined → free: the operation completed. Positions that are not quarantined are passed over."""
        with self._lock:
            self._settle_dropped()
            slots, times = reservation.slots, reservation.generations
            self._core.free(picked(slots, self._core.own(slots, times, positions, QUARANTINED)))

    # --- protection ---------------------------------------------------------------------------------------------

    def lease(self, hashes: Sequence[ChainHash]) -> Lease:
        """Protect the leading ready blocks, and count a use."""
        with self._lock:
            if self._dropped:
                self._settle_dropped()
            slots, times = self._core.lease(hashes if type(hashes) is list else list(hashes))
            return self._lease(list(hashes[: len(slots)]), slots, times, self._on_release)

    def ended(self, end: RequestEnd) -> ClassifiedEnd | None:
        """A request has ended: its blocks get a new place in the learned order. Returns what tiers below apply."""
        if (order := self._learned) is None:
            return None
        with self._lock:
            if self._dropped:
                self._settle_dropped()
            slots, tags = self._core.find_tagged(list(end.names))
            found = order.returns.record(
                end, tags, lambda turn: order.num_ended(slots[: end.num_prompt], turn + 1), order.clock
            )
            sampled, their_tags = order.rival.sampled(tags)
            num_looked_up = bisect_left(sampled, end.num_prompt)
            own = order.num_ended([slots[at] for at in sampled[:num_looked_up]])
            order.rival.ended(their_tags, num_looked_up, own)
            order.ended(slots[found.num_head :], found.kind)
            if found.num_head:
                order.ended(slots[: found.num_head], found.head_kind)
            return found

    def evict(self, hashes: Sequence[ChainHash], cause: str = REMOVED) -> int:
        """Drop blocks, leased ones later; returns how many. `cause`: of `eviction_log.py`, or an `Outcome`."""
        with self._lock:
            self._settle_dropped()
            slots = self._ready(hashes)
            if self._core.eviction_log is not None:
                self._core.eviction_log.left(self._core.names_of(slots), cause)
            return self._core.drop(slots)

    def evict_idle(self, hashes: Sequence[ChainHash]) -> list[bool]:
        """Drop unused blocks, a chain's end first: no lease, no child that stays. True for each that is gone now."""
        with self._lock:
            self._settle_dropped()
            gone = self._core.drop_idle(hashes if type(hashes) is list else list(hashes))
            if self._core.eviction_log is not None:
                names = [name for name, is_gone in zip(hashes, gone, strict=True) if is_gone]
                self._core.eviction_log.left(names, Outcome.QUOTA)
            return gone

    # --- what lower tiers lack ----------------------------------------------------------------------------------

    def backlog(self) -> Backlog:
        """A line, empty yet, for blocks of this pool that are still to be given to a lower tier; a reset clears it."""
        with self._lock:
            self._backlogs.append(Backlog(self._core, self._lock))
            return self._backlogs[-1]

    def mark_dirty(self, blocks: Sequence[ChainHash] | Lease) -> None:
        """No lower tier has these blocks: among the next 4,096 in line clean ones are evicted first."""
        with self._lock:
            # A leased block that was dropped meanwhile is not ready, and its slot no other block's.
            self._core.mark_dirty(self._ready(blocks) if isinstance(blocks, Sequence) else blocks.slots)

    @property
    def has_dirty(self) -> bool:
        """Whether any block is dirty, as a hint: no lock is taken."""
        return self._core.num_dirty > 0

    def mark_clean(self, hashes: Sequence[ChainHash]) -> None:
        """Note that a lower tier holds these blocks now."""
        with self._lock:
            self._core.mark_clean(self._ready(hashes))

    def mark_all_clean(self) -> None:
        """Nothing is dirty any more: what was goes in its turn. The lock is held for a piece at a time."""
        for first in range(0, self.num_slots, _PIECE):
            with self._lock:
                dirty = np.flatnonzero(np.asarray(self._core.dirty)[first : first + _PIECE]) + first
                self._core.mark_clean(dirty.tolist())

    def oldest_dirty(self, n: int) -> list[ChainHash]:
        """Up to `n` dirty blocks, those the policy would evict next first, but each after its dirty parents."""
        with self._lock:
            self._settle_dropped()
            return self._core.oldest_dirty(n)

    # --- telling ------------------------------------------------------------------------------------------------

    def listen(self) -> None:
        """Keep a log of the blocks that come and go, for one reader that knows none. Called again it starts over."""
        with self._lock:
            self._settle_dropped()
            self._core.changes = ChangeLog(self.num_slots)
            self._core.changes.stored(self._core.whole_slots())

    def changes(self, records: "SupportsGetItem[int, BlockRecord | None]", limit: int) -> Changes:
        """What the reader has to forget and, up to `limit`, to learn. ValueError: a ready slot has no record."""
        with self._lock:
            if self._core.changes is None:
                return Changes([], [])
            gone, slots, cleared = self._core.changes.take(limit)
            stored = [record for slot in slots.tolist() if (record := records[slot]) is not None]
        if len(stored) < len(slots):
            raise ValueError(f"changes: {len(slots) - len(stored)} ready slots have no record")
        return Changes(gone, stored, cleared)

    @property
    def has_changes(self) -> bool:
        """Whether the reader may have something to learn."""
        log = self._core.changes
        return log is not None and log.waiting

    # --- the whole ----------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget every block. Leased ones lose their name and are freed at release; filling ones are never named."""
        with self._lock:
            self._settle_dropped()
            self._epoch += 1
            if self._core.eviction_log is not None:
                self._core.eviction_log.left(self._core.words(self._core.ready_slots()), RESET)
            self._core.reset()
            for backlog in self._backlogs:
                backlog.clear()

    def check(self) -> PoolCounts:
        """Raise AssertionError where a law of the pool is broken; return the counts. A full scan: at idle, in tests."""
        with self._lock:
            self._settle_dropped()
            counts = self._counts()
            self._core.check()
            assert counts.free + counts.filling + counts.ready + counts.quarantined == self.num_slots, counts
            assert counts.filling == np.count_nonzero(np.asarray(self._core.state) == FILLING), "filling count"
            assert 0 <= counts.leased <= counts.ready, counts
            return counts

    # --- under the lock -----------------------------------------------------------------------------------------

    def _counts(self) -> PoolCounts:
        core = self._core
        filling = self.num_slots - core.num_free - core.num_ready - core.num_quarantined
        return PoolCounts(
            core.num_free, filling, core.num_ready, core.num_leased,
            core.num_quarantined, core.num_dirty, len(core.partial),
        )  # fmt: skip

    def _ready(self, hashes: Sequence[ChainHash]) -> list[int]:
        return [slot for slot in self._core.find(hashes if type(hashes) is list else list(hashes)) if slot >= 0]

    def _close(self, reservation: Reservation, positions: Sequence[int] | None) -> list[int]:
        """Take filling slots out of the chain and the index; the caller decides what becomes of them."""
        at = self._filling(reservation, positions)
        slots = picked(reservation.slots, at)
        self._core.close(slots, reservation.epoch == self._epoch)
        reservation.num_open -= len(at)
        return slots

    def _filling(self, reservation: Reservation, positions: Sequence[int] | None) -> list[int]:
        """Those of the positions whose slot is still this reservation's to fill."""
        return self._core.own(reservation.slots, reservation.generations, positions, FILLING)

    # --- the ends of leases and reservations --------------------------------------------------------------------

    def _on_end(self, reservation: Reservation, dropped: bool) -> None:
        if dropped:
            self._dropped.append(reservation)
        else:
            self.abandon(reservation)

    def _settle_dropped(self) -> None:
        while self._dropped:
            dropped = self._dropped.popleft()
            if isinstance(dropped, Reservation):
                self._core.free(self._close(dropped, None))
            elif dropped.on_release is not None:
                dropped.on_release = None
                self.num_leaked += 1
                self._core.unref(dropped.slots)
