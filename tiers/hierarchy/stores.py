"""Stores: slots in L2 for computed blocks, sealing in the background, and writes to lower tiers."""

import logging
import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from threading import Timer
from typing import Final

from kvtier.tiers import L2, BlockRecord, ChainHash, Metrics, Outcome, tracing
from kvtier.tiers.hierarchy.cache_tiers import Filled, ProgressCondition, Wanted
from kvtier.tiers.hierarchy.demote import SOONEST, Demoter
from kvtier.tiers.hierarchy.io_queue import IoQueue, Job
from kvtier.tiers.hierarchy.lower_tier import HierarchySettings, TierPort
from kvtier.tiers.host import HostTier
from kvtier.tiers.pool import Lease, Reservation

_log = logging.getLogger(__name__)

AT_ONCE: Final = 256  # blocks sealed together, about: the first are published only after all are hashed
_SIGHTINGS_PER_SLOT: Final = 4  # blocks not yet admitted that are remembered, per L2 slot
_MAX_SEALING: Final = 1 << 16  # stores waiting to be sealed
_DIRTY_SHARE: Final = 2  # write-through: at most 1/2 of L2 is retained, unleased, until it is written
_FILLING_SHARE: Final = 4  # no slots are preallocated where more than 1/4 of L2 fills
_IDLE_ROUNDS: Final = 8  # retries of a drain without progress: more failures than open a breaker
_SEALED_NOW: Final = 256 << 10  # bytes up to which hashing is cheaper than waking a thread


@dataclass(eq=False, slots=True)
class Sealing:
    """Stores of a step, or part of them, that are hashed and published together."""

    stores: Sequence[Filled]
    names: list[ChainHash]  # of all their blocks
    awaited: bool = False  # a claim waits for it
    done: bool = False  # its blocks are published, or were dropped


def parts_of(stores: Sequence[Filled]) -> list[Sealing]:
    """Split a step's stores into parts of at most `AT_ONCE` blocks; a larger single store is a part by itself."""
    names = [name for reservation, _, _ in stores for name in reservation.hashes]
    if len(names) <= AT_ONCE or len(stores) < 2:
        return [Sealing(stores, names)] if stores else []
    half = len(stores) // 2
    return [*parts_of(stores[:half]), *parts_of(stores[half:])]


def next_part(waiting: deque[Sealing]) -> list[Sealing]:
    """Remove and return the oldest waiting stores, about `AT_ONCE` blocks."""
    taken: list[Sealing] = []
    num_blocks = 0
    while waiting and num_blocks < AT_ONCE:
        taken.append(waiting.popleft())
        num_blocks += len(taken[-1].names)
    return taken


@dataclass(eq=False, slots=True)
class SealJob(Job):
    """Hashes and publishes the stores that wait when it runs."""

    stores: "StoreQueue"
    sealings: list[Sealing] | None = None  # set by `run`
    deadline: float = math.inf

    def run(self) -> list[Outcome]:
        """Runs on the sealing thread."""
        self.sealings = self.stores.next_sealings()
        return self.stores.publish([store for each in self.sealings for store in each.stores])

    def end(self, result: list[Outcome] | Outcome, *, late: bool) -> None:
        """Frees the slots of stores that were not published."""
        if self.sealings is None:
            self.stores.drop_waiting(result if isinstance(result, Outcome) else Outcome.IO_ERROR)
        elif isinstance(result, Outcome):
            self.stores.sealed(self.sealings, [result] * sum(len(each.stores) for each in self.sealings))
        else:
            self.stores.sealed(self.sealings, result)


class StoreQueue:
    """The stores of one hierarchy: admitted, reserved, sealed, demoted. Thread-safe.

    Lock: `lock` (the hierarchy's) guards the bookkeeping; the pool's may be taken inside it; never held across I/O.
    """

    def __init__(
        self,
        host: HostTier,
        ports: Sequence[TierPort],
        lock: ProgressCondition,
        settings: HierarchySettings,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self.epoch = 0  # counts resets: a store admitted before one never seals after it
        self.closed = False
        self.is_short = self._may_retry = False
        self.sealing_queue = IoQueue("seal", 1, _MAX_SEALING, clock)
        self._host = host
        self._ports = ports
        self._lock = lock
        self._settings = settings
        self._metrics = metrics
        self._admit_after = settings.admit_after if isinstance(settings.admit_after, int) else 1
        takers = [port for port in ports if port.settings.takes_stores]
        self._demoters = [Demoter(port, host, settings, metrics, clock, self._look_again) for port in takers]
        self._timer: Timer | None = None
        self.unsealed: dict[ChainHash, Sealing] = {}  # filled blocks that are not published yet
        self._waiting: deque[Sealing] = deque()  # the part of them that no job has taken; a job is queued
        self._num_waiting = 0  # stores in these
        self._sightings: OrderedDict[ChainHash, int] = OrderedDict()
        self._cleaning: set[ChainHash] = set()  # write-back: dirty blocks being written

    def reserve(self, wanted: Sequence[Wanted], *, may_retry: bool = False) -> list[Reservation | None]:
        """Reserve all that a step stores, in one pass if everything fits; else the head of each chain that fits."""
        self.is_short, self._may_retry = False, may_retry and self._admit_after == 1  # a retry counts as a sighting
        partial = [i for i, each in enumerate(wanted) if each.is_partial]
        if partial and not self._host.keeps_partial:
            wanted, partial = [replace(each, hashes=()) if each.is_partial else each for each in wanted], []
        early = [i for i, each in enumerate(wanted) if each.is_rest and not self._is_below(each.parent)]
        if early:  # else it would evict its own ancestors from L2
            self.is_short, wanted = (
                True,
                [replace(each, hashes=()) if i in early else each for i, each in enumerate(wanted)],
            )
        at: Sequence[int] = range(len(wanted))
        chains = [(each.hashes, each.parent) for each in wanted]
        if self._admit_after > 1:
            heads = self._admitted(wanted)
            at = [i for i, head in enumerate(heads) if head or not wanted[i].hashes]
            chains = [(wanted[i].hashes[: heads[i]], wanted[i].parent) for i in at]
        none: list[Reservation | None] = [None] * len(chains)
        # What goes on to lower tiers has to be here first.
        made = none if self.closed else self._host.pool.reserve_each(chains, if_worth=not self._demoters)
        for reservation, (hashes, _) in zip(made, chains, strict=True):
            if reservation is not None and reservation.num_refused:
                self._dropped(hashes[-reservation.num_refused :], Outcome.OUTRANKED)
        if None in made:  # reserve the heads that fit
            made = [
                self._reserve_less(*chain) if each is None else each for each, chain in zip(made, chains, strict=True)
            ]
        if len(at) < len(wanted):
            found = dict(zip(at, made, strict=True))
            made = [found.get(i) for i in range(len(wanted))]
        for i in early:
            made[i] = None
        for i in partial:
            if (reservation := made[i]) is not None:
                reservation.is_partial = True
        if tracing.ON:
            self._trace(wanted, made)
        return made

    def preallocate(self, count: int) -> tuple[list[int], list[int]]:
        """Slots for blocks that have no name yet, and their generations; none without room.

        Nor if a name decides whether its block is stored.
        """
        pool = self._host.pool
        room = pool.num_slots // _FILLING_SHARE - pool.counts().filling
        if self.closed or self._admit_after > 1 or room <= 0:
            return [], []
        return pool.preallocate(min(count, room), if_worth=not self._demoters)

    def reserve_at(
        self, wanted: Sequence[Wanted], slots: Sequence[int], generations: Sequence[int]
    ) -> list[Reservation | None]:
        """`reserve` in preallocated slots, one block each. None: not to be stored; `deallocate` the slot."""
        keeps_partial = self._host.keeps_partial
        chains = [(() if each.is_partial and not keeps_partial else each.hashes, each.parent) for each in wanted]
        made = self._host.pool.reserve_at(slots, generations, chains)
        for each, reservation in zip(wanted, made, strict=True):
            if reservation is not None:
                reservation.is_partial = each.is_partial
        if tracing.ON:
            self._trace(wanted, made)
        return made

    def _trace(self, wanted: Sequence[Wanted], made: Sequence[Reservation | None]) -> None:
        for each, reservation in zip(wanted, made, strict=True):
            if each.trace is not None and reservation is not None:
                tracing.stored(reservation.hashes, each.trace)

    def seal(self, reservation: Reservation, records: Sequence[BlockRecord], epoch: int) -> None:
        """Publish and demote, in the background."""
        names, reservation.parents = [each.chain_hash for each in records], [each.parent for each in records]
        self.seal_each([(reservation, [each.tokens for each in records] if names == reservation.hashes else (), epoch)])

    def seal_each(self, stores: Sequence[Filled]) -> None:
        """`seal` for everything a step has filled; small stores are published at once."""
        if not stores:
            return
        for reservation, _, _ in stores:
            reservation.is_given = True
        names = [name for reservation, _, _ in stores for name in reservation.hashes]
        unsealed, waiting = self.unsealed, self._waiting
        # At once only if no older stores wait or are under way. Not with write-back: choosing the blocks to write next
        # scans all dirty blocks.
        is_small = len(names) * self._host.region.slot_bytes <= _SEALED_NOW
        if is_small and not unsealed and not (self._demoters and self._settings.write_policy == "write_back"):
            try:
                outcomes = self.publish(stores)
            except Exception:
                _log.exception("a step's stores could not be sealed; counted as %s", Outcome.IO_ERROR)
                outcomes = [Outcome.IO_ERROR] * len(stores)
            if outcomes.count(Outcome.OK) < len(outcomes):
                self._drop_failed(stores, outcomes)
            return
        with self._lock:
            is_queued, room = bool(waiting), max(0, _MAX_SEALING - self._num_waiting)
            refused, stores = stores[room:], stores[:room]
            for sealing in parts_of(stores):
                unsealed.update(dict.fromkeys(sealing.names, sealing))
                waiting.append(sealing)
            self._num_waiting += len(stores)
            # Under the lock: a thread that finds stores waiting may `drain`, which waits for jobs.
            is_taken = is_queued or not waiting or self.sealing_queue.submit(SealJob(self))
        for reservation, _, _ in refused:
            self._drop(reservation, Outcome.QUEUE_FULL)
        if not is_taken:
            self.drop_waiting(Outcome.CLOSED)

    def abandon(self, reservation: Reservation, reason: Outcome) -> None:
        if reservation.is_given:  # its slots are being hashed, and may be in use
            raise ValueError("abandon: this reservation was sealed")
        self._drop(reservation, reason)

    def _drop(self, reservation: Reservation, reason: Outcome) -> None:
        self._dropped(reservation.hashes, reason)
        self._host.pool.abandon(reservation)

    def quarantine(self, reservation: Reservation, reason: Outcome) -> None:
        self._dropped(reservation.hashes, reason)
        self._host.pool.quarantine(reservation)

    def sealing(self, chain_hash: ChainHash) -> Sealing | None:
        """The part that will publish this block. Once it is `done`, a lookup finds the block, or it was dropped."""
        with self._lock:
            if (sealing := self.unsealed.get(chain_hash)) is not None:
                sealing.awaited = True
            return sealing

    def drain(self, timeout: float, *, below: bool = True) -> bool:
        """Wait until every store is published in L2 and, with `below`, written to lower tiers; False at timeout."""
        if not below:
            return self.sealing_queue.drain(timeout)
        deadline = time.monotonic() + timeout
        drained = self._drain_queues(deadline)
        num_idle = 0
        while drained and not self.closed and (left := self._num_unwritten) and num_idle < _IDLE_ROUNDS:
            before = left, sum(each.num_written for each in self._demoters)
            away = [each for each in self._demoters if not each.port.writable]
            for demoter in away:
                demoter.port.tick(at_once=True)
            if len(away) < len(self._demoters) and (num_dirty := self._num_dirty):
                self._demote_dirty(num_dirty)
            for demoter in self._demoters:
                demoter.sweep_soon(at_once=True)
            drained = self._drain_queues(deadline)
            if drained and before == (self._num_unwritten, sum(each.num_written for each in self._demoters)):
                num_idle += not away
                time.sleep(max(0.0, min(SOONEST, deadline - time.monotonic())))
                drained = time.monotonic() < deadline
            else:
                num_idle = 0
        return drained and (self.closed or not self._num_unwritten)

    def tick(self) -> None:
        """Queue what waits for a lower tier or failed there, if it is due. Cheap."""
        for demoter in self._demoters:
            demoter.sweep_soon()

    def _look_again(self, seconds: float) -> None:
        """Schedule a tick in so many seconds, since an idle engine makes no calls that would."""
        with self._lock:
            if self._timer is None and not self.closed:
                self._timer = Timer(seconds, self._look)
                self._timer.daemon = True
                self._timer.start()

    def _look(self) -> None:
        self.tick()
        self._timer = None
        due = min(demoter.due_in for demoter in self._demoters)
        if due < math.inf:
            self._look_again(max(due, SOONEST))

    def close(self) -> None:
        """The lower tiers were closed: count what was not written to them."""
        if self._timer is not None:
            self._timer.cancel()
        num_dirty = self._num_dirty
        for demoter in self._demoters:
            demoter.close(num_dirty)

    # on the sealing thread

    def next_sealings(self) -> list[Sealing]:
        """Take the oldest waiting stores; queue another job for the rest."""
        with self._lock:
            taken = next_part(self._waiting)
            self._num_waiting -= sum(len(each.stores) for each in taken)
            is_taken = not self._waiting or self.sealing_queue.submit(SealJob(self))
        if not is_taken:
            self.drop_waiting(Outcome.CLOSED)
        return taken

    def drop_waiting(self, reason: Outcome) -> None:
        """Drop all waiting stores: no job will seal them."""
        with self._lock:
            left = list(self._waiting)
            self._waiting.clear()
            self._num_waiting = 0
        self.sealed(left, [reason] * sum(len(each.stores) for each in left))

    def publish(self, stores: Sequence[Filled]) -> list[Outcome]:
        """Hash the filled slots, make them findable and offer them to the lower tiers.

        Returns each store's outcome; if not OK, nothing of it was published. All full blocks are published together;
        then each partial block by itself, as blocks published before may cover it. For FAULTS 37 the epoch is compared
        and the blocks are named under one lock.
        """
        partial = [i for i, (reservation, _, _) in enumerate(stores) if reservation.is_partial]
        if partial and len(stores) > 1:
            whole = [i for i, (reservation, _, _) in enumerate(stores) if not reservation.is_partial]
            found = dict(zip(whole, self.publish([stores[i] for i in whole]), strict=True))
            found |= {i: self.publish([stores[i]])[0] for i in partial}
            return [found[i] for i in range(len(stores))]
        host, places = self._host, [at for reservation, _, _ in stores for at in reservation.slots]
        try:
            sums = host.region.checksums(places)
        except (ValueError, IndexError):  # the region is closed
            _log.exception("a step's stores could not be hashed; counted as %s", Outcome.IO_ERROR)
            sums = []
        with self._lock:
            outcomes = self._described(stores, places, sums)
            stores = [store for store, outcome in zip(stores, outcomes, strict=True) if outcome is Outcome.OK]
            if partial:
                stores = [store for store in stores if not self._is_covered(store)]
            lease = host.pool.seal_each([reservation for reservation, _, _ in stores])
        try:
            self._metrics.stored(L2, len(lease))
            if host.pool.partial:
                for store in stores:
                    if store[0].hashes:
                        host.drop_covered(_first_record(store))
            if self._demoters and stores and not partial:  # partial blocks stay in L2
                if self._settings.write_policy == "write_through":
                    for reservation, _, _ in stores:
                        refused = [demoter.pass_down(reservation.hashes) for demoter in self._demoters]
                        if all(refused):
                            self._retain(min(refused, key=len))
                else:
                    self._mark_dirty(lease)
        finally:
            lease.release()
        return outcomes

    def sealed(self, sealings: Sequence[Sealing], outcomes: list[Outcome]) -> None:
        """These have ended: free the slots of failed ones, and notify claims that wait for their blocks."""
        self._drop_failed([store for each in sealings for store in each.stores], outcomes)
        unsealed = self.unsealed
        with self._lock:
            for sealing in sealings:
                sealing.done = True
                for name in sealing.names:
                    if unsealed.get(name) is sealing:
                        del unsealed[name]
            if any(sealing.awaited for sealing in sealings):
                self._lock.notify_all()

    # inside

    def _drop_failed(self, stores: Sequence[Filled], outcomes: Sequence[Outcome]) -> None:
        for (reservation, _, _), outcome in zip(stores, outcomes, strict=True):
            if outcome is not Outcome.OK:
                self._drop(reservation, outcome)

    def _is_below(self, name: ChainHash) -> bool:
        return any(port.holds([name])[0] for port in self._ports)

    def _described(self, stores: Sequence[Filled], places: list[int], sums: list[int]) -> list[Outcome]:
        """Under the lock: write the records of these stores' slots. Not OK: that store must not be published.

        `sums`: empty if they were not hashed. An error in one store does not affect the others.
        """
        ok, epoch = Outcome.OK, self.epoch
        why = Outcome.CLOSED if self.closed else ok if sums else Outcome.IO_ERROR
        outcomes = [
            Outcome.EPOCH if since != epoch else why if len(tokens) == len(each.hashes) else Outcome.IO_ERROR
            for each, tokens, since in stores
        ]
        if outcomes.count(ok) == len(outcomes):
            names = [name for each, _, _ in stores for name in each.hashes]
            parents = [parent or b"" for each, _, _ in stores for parent in each.parents]
            try:
                self._host.describe_each(places, names, parents, [each for _, all, _ in stores for each in all], sums)
                return outcomes
            except ValueError:  # tokens of another block size, or a slot of another block
                if len(stores) == 1:
                    _log.error("a store's tokens are not those of its blocks; counted as %s", Outcome.IO_ERROR)
                    return [Outcome.IO_ERROR]
        if len(stores) < 2:
            return outcomes
        found, end = list[Outcome](), 0
        for store in stores:
            start, end = end, end + len(store[0].hashes)
            found += self._described([store], store[0].slots, sums[start:end])
        return found

    def _is_covered(self, store: Filled) -> bool:
        """Whether a longer block in L2 begins with this partial one. If so, its slot is free; nothing is counted."""
        if not (store[0].hashes and self._host.is_covered(_first_record(store))):
            return False
        self._host.pool.abandon(store[0])
        return True

    def _admitted(self, wanted: Sequence[Wanted]) -> list[int]:
        """How many leading blocks of each chain to store; the others are counted as dropped."""
        heads = self._seen_enough(wanted)
        refused = [name for each, head in zip(wanted, heads, strict=True) for name in each.hashes[head:]]
        self._dropped(refused, Outcome.NOT_ADMITTED)
        return heads

    def _reserve_less(self, hashes: Sequence[ChainHash], parent: ChainHash) -> Reservation | None:
        """Reserve as many leading blocks as fit, since not all do; the others are counted.

        If a lower tier has their parent, the parent may be evicted from L2 for them.
        """
        pool, want = self._host.pool, len(hashes)
        is_below = self._is_below(parent)
        reservation = None
        while want and reservation is None and not self.closed:
            reservation = pool.reserve(hashes[:want], parent) if want < len(hashes) else None
            if reservation is None and is_below and (reservation := pool.reserve(hashes[:want])) is not None:
                reservation.parents = [parent if index == 0 else hashes[index - 1] for index in reservation.indices]
            want = want if reservation is not None else want // 2
        reason = Outcome.CLOSED if self.closed else Outcome.NO_SLOT
        is_callers = self._may_retry and reason is Outcome.NO_SLOT and want < len(hashes)
        self.is_short |= is_callers
        self._dropped(hashes[want:], reason, is_counted=not is_callers)
        return reservation

    def _dropped(self, hashes: Sequence[ChainHash], reason: Outcome, *, is_counted: bool = True) -> None:
        """Count blocks as not stored, unless the caller does, and log the reason."""
        if hashes:
            if is_counted:
                self._metrics.dropped(L2, reason, len(hashes))
            self._host.pool.not_stored(hashes, reason)

    def _seen_enough(self, wanted: Sequence[Wanted]) -> list[int]:
        """How many leading blocks of each have been seen often enough to be stored, this time included.

        A partial block is stored if its parent was seen often enough or is in L2.
        """
        sightings, enough, heads = self._sightings, self._admit_after, list[int]()
        most = _SIGHTINGS_PER_SLOT * self._host.pool.num_slots
        with self._lock:
            for each in wanted:
                num_seen = 0
                if each.is_partial:
                    is_seen = sightings.get(each.parent, 0) >= enough or self._host.pool.holds([each.parent])[0]
                    heads.append(len(each.hashes) if is_seen else 0)
                    continue
                for i, chain_hash in enumerate(each.hashes):
                    sightings[chain_hash] = times = sightings.pop(chain_hash, 0) + 1
                    num_seen += num_seen == i and times >= enough
                heads.append(num_seen)
                while len(sightings) > most:
                    sightings.popitem(last=False)
        return heads

    @property
    def _num_unwritten(self) -> int:
        """Blocks without a lower tier's copy that are neither queued nor being written."""
        return self._num_dirty + sum(demoter.num_in_line for demoter in self._demoters)

    @property
    def _num_dirty(self) -> int:
        """Write-back's unwritten blocks; with write-through those are in the backlogs."""
        return self._host.pool.counts().dirty if self._settings.write_policy == "write_back" else 0

    def _drain_queues(self, deadline: float) -> bool:
        queues = (self.sealing_queue, *(port.queue for port in self._ports))
        return all([queue.drain(max(0.0, deadline - time.monotonic())) for queue in queues])

    def _mark_dirty(self, lease: Lease) -> None:
        """Write-back: blocks just sealed, and leased, are written before they are due for eviction."""
        pool = self._host.pool
        pool.mark_dirty(lease)
        limit = int((1 - self._settings.clean_share) * pool.num_slots)
        if (excess := pool.counts().dirty - len(self._cleaning) - limit) > 0:
            self._demote_dirty(excess)

    def _retain(self, hashes: Sequence[ChainHash]) -> None:
        """Write-through: blocks that no tier could queue are evicted after others, up to a share of L2."""
        pool = self._host.pool
        hashes = hashes[: max(0, pool.num_slots // _DIRTY_SHARE - pool.counts().dirty)]
        pool.mark_dirty(hashes)
        present = zip(*(demoter.port.holds(hashes) for demoter in self._demoters), strict=True)
        if written := [h for h, where in zip(hashes, present, strict=True) if any(where)]:  # written meanwhile
            pool.mark_clean(written)

    def _demote_dirty(self, num_blocks: int) -> None:
        """Write-back: write the blocks that are evicted next, so that they are clean by then."""
        with self._lock:
            dirty = self._host.pool.oldest_dirty(num_blocks + len(self._cleaning))
            chosen = [chain_hash for chain_hash in dirty if chain_hash not in self._cleaning]
            self._cleaning.update(chosen)
        for chain in _chains(chosen, self._host.parent_of):
            for demoter in self._demoters:
                taken = demoter.offer(chain, partial(self._cleaned, demoter))
                with self._lock:
                    self._cleaning.difference_update(chain[taken:])

    def _cleaned(self, demoter: Demoter, hashes: Sequence[ChainHash], outcomes: Sequence[Outcome]) -> None:
        """Blocks that one tier has written are clean; queue them for the other tiers that lack them."""
        good = [h for h, o in zip(hashes, outcomes, strict=True) if o is Outcome.OK]
        self._host.pool.mark_clean(good)
        for other in self._demoters:
            if other is not demoter and good:
                other.owe([h for h, is_held in zip(good, other.port.holds(good), strict=True) if not is_held])
        with self._lock:
            self._cleaning.difference_update(hashes)


def _chains(hashes: Sequence[ChainHash], parent_of: Callable[[ChainHash], ChainHash | None]) -> list[list[ChainHash]]:
    """Cut a list of blocks into runs of consecutive ones."""
    chains: list[list[ChainHash]] = []
    for chain_hash in hashes:
        if chains and parent_of(chain_hash) == chains[-1][-1]:
            chains[-1].append(chain_hash)
        else:
            chains.append([chain_hash])
    return chains


def _first_record(store: Filled) -> BlockRecord:
    """The record of a store's first block, without its checksum."""
    reservation, tokens, _ = store
    return BlockRecord(reservation.hashes[0], reservation.parents[0] or b"", tokens[0], 0)
