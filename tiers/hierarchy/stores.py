"""Stores: slots in L2 for computed blocks, their sealing in the background, and the way down to lower tiers."""

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from kvtier.tiers import L2, BlockRecord, ChainHash, Metrics, Outcome, checksum
from kvtier.tiers.hierarchy.cache_tiers import NewsCondition, Wanted
from kvtier.tiers.hierarchy.demote import Demoter
from kvtier.tiers.hierarchy.io_queue import IoQueue
from kvtier.tiers.hierarchy.lower_tier import TierPort
from kvtier.tiers.hierarchy.settings import HierarchySettings
from kvtier.tiers.host import HostTier
from kvtier.tiers.pool import Reservation

_SIGHTINGS_PER_SLOT: Final = 4  # how many blocks not yet admitted are remembered, per L2 slot
_MAX_SEALING: Final = 1 << 16  # reservations waiting to be sealed


class StoreQueue:
    """The stores of one hierarchy: admitted, reserved, sealed, passed down. Thread-safe.

    Lock: `lock` (the hierarchy's) guards the bookkeeping; the pool's may be taken inside it; never held across I/O.
    """

    def __init__(
        self,
        host: HostTier,
        ports: Sequence[TierPort],
        lock: NewsCondition,
        settings: HierarchySettings,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self.epoch = 0  # counts resets: a store admitted before one never seals after it
        self.closed = False
        self.sealing_queue = IoQueue("seal", 1, _MAX_SEALING, clock)
        self._host = host
        self._ports = ports
        self._lock = lock
        self._settings = settings
        self._metrics = metrics
        self._demoters = [Demoter(port, host, settings.store_queue, metrics, clock) for port in ports]
        self.unsealed: dict[ChainHash, SealJob] = {}  # filled blocks that are not published yet
        self._sightings: OrderedDict[ChainHash, int] = OrderedDict()
        self._cleaning: set[ChainHash] = set()  # write-back: dirty blocks being written

    def reserve(self, wanted: Sequence[Wanted]) -> list[Reservation | None]:
        """All that a step stores, in one pass if there is room for all; else chain by chain, what fits of its head."""
        taken: list[Reservation | None] = [None] * len(wanted)
        if not self._host.keeps_tails:
            wanted = [replace(each, hashes=()) if each.is_tail else each for each in wanted]
        if len(wanted) > 1 and self._settings.admit_after <= 1 and not self.closed:
            taken = self._host.pool.reserve_each([(each.hashes, each.parent) for each in wanted])
        made = [
            self._reserve_head(each) if reservation is None else reservation
            for each, reservation in zip(wanted, taken, strict=True)
        ]
        for each, reservation in zip(wanted, made, strict=True):
            if each.is_tail and reservation is not None:
                reservation.is_tail = True
        return made

    def seal(self, reservation: Reservation, records: Sequence[BlockRecord], epoch: int) -> None:
        """Publish and pass down, in the background."""
        job = SealJob(self, reservation, records, epoch)
        with self._lock:
            self.unsealed.update(dict.fromkeys(reservation.hashes, job))
        if not self.sealing_queue.submit(job):
            job.end(Outcome.CLOSED, late=False)

    def abandon(self, reservation: Reservation, reason: Outcome) -> None:
        self._metrics.dropped(L2, reason, len(reservation.hashes))
        self._host.pool.abandon(reservation)

    def quarantine(self, reservation: Reservation, reason: Outcome) -> None:
        self._metrics.dropped(L2, reason, len(reservation.hashes))
        self._host.pool.quarantine(reservation)

    def sealing(self, chain_hash: ChainHash) -> "SealJob | None":
        """What is about to publish this block: once it is `done`, a lookup finds the block, or it will not come."""
        with self._lock:
            if (job := self.unsealed.get(chain_hash)) is not None:
                job.awaited = True
            return job

    def drain(self, timeout: float, *, below: bool = True) -> bool:
        """Wait until every store offered so far is found in L2 and, with `below`, written; False when time ran out."""
        if not below:
            return self.sealing_queue.drain(timeout)
        deadline = time.monotonic() + timeout
        drained = self._drain_queues(deadline)
        before = self._host.pool.num_slots + 1
        while drained and (dirty := self._host.pool.counts().dirty) and dirty < before:  # write-back, while it helps
            before = dirty
            self._demote_dirty(dirty)
            drained = self._drain_queues(deadline)
        return drained

    # on the sealing thread

    def publish(self, job: "SealJob") -> Outcome:
        """Hash the filled slots, make them findable and offer them to the lower tiers. Not OK: nothing was published.

        The order matters for FAULTS 37: the epoch is compared and the blocks are named under one lock.
        """
        reservation, region = job.reservation, self._host.region
        slots = reservation.slots.tolist()
        hashed = [
            BlockRecord(record.chain_hash, record.parent, record.tokens, checksum(region.slot(slot)))
            for slot, record in zip(slots, job.records, strict=True)
        ]
        with self._lock:
            if job.epoch != self.epoch or self.closed:
                return Outcome.EPOCH if job.epoch != self.epoch else Outcome.CLOSED
            if reservation.is_tail and self._host.is_covered(hashed[0]):
                self._host.pool.abandon(reservation)  # as if it had been held already
                return Outcome.OK
            self._host.describe(reservation.slots, hashed)
            lease = self._host.pool.seal(reservation)
        try:
            self._metrics.stored(L2, len(hashed))
            self._host.drop_covered(hashed)
            if not reservation.is_tail:  # it is of use for a while, in this tier's memory
                self._pass_down(reservation.hashes)
        finally:
            lease.release()
        return Outcome.OK

    def sealed(self, job: "SealJob") -> None:
        """It has ended, well or not: whoever waits for its blocks may look."""
        with self._lock:
            job.done = True
            for chain_hash in job.reservation.hashes:
                if self.unsealed.get(chain_hash) is job:
                    del self.unsealed[chain_hash]
            if job.awaited:
                self._lock.notify_all()

    # inside

    def _reserve_head(self, wanted: Wanted) -> Reservation | None:
        """As many leading blocks as fit; what is left out is counted."""
        hashes = wanted.hashes
        if not hashes:
            return self._host.pool.reserve(hashes)
        admitted = len(hashes) if self._settings.admit_after <= 1 else self._admit(wanted)
        if admitted < len(hashes):
            self._metrics.dropped(L2, Outcome.NOT_ADMITTED, len(hashes) - admitted)
        want = admitted
        while want and not self.closed:
            if (reservation := self._host.pool.reserve(hashes[:want], wanted.parent)) is not None:
                if want < admitted:
                    self._metrics.dropped(L2, Outcome.NO_SLOT, admitted - want)
                return reservation
            want //= 2
        if admitted:
            self._metrics.dropped(L2, Outcome.CLOSED if self.closed else Outcome.NO_SLOT, admitted)
        return None

    def _admit(self, wanted: Wanted) -> int:
        """How many leading blocks have been seen often enough to be stored. A tail comes once, behind its parent."""
        hashes = wanted.hashes
        if wanted.is_tail:
            with self._lock:
                is_seen = self._sightings.get(wanted.parent, 0) >= self._settings.admit_after
            return len(hashes) if is_seen or self._host.pool.holds([wanted.parent])[0] else 0
        with self._lock:
            for chain_hash in hashes:
                self._sightings[chain_hash] = self._sightings.pop(chain_hash, 0) + 1
            while len(self._sightings) > _SIGHTINGS_PER_SLOT * self._host.pool.num_slots:
                self._sightings.popitem(last=False)
            seen = (self._sightings.get(h, 0) >= self._settings.admit_after for h in hashes)
            return next((i for i, enough in enumerate(seen) if not enough), len(hashes))

    def _drain_queues(self, deadline: float) -> bool:
        queues = (self.sealing_queue, *(port.queue for port in self._ports))
        return all([queue.drain(max(0.0, deadline - time.monotonic())) for queue in queues])

    def _pass_down(self, hashes: list[ChainHash]) -> None:
        if not self._demoters:
            return
        if self._settings.write_policy == "write_through":
            for demoter in self._demoters:
                demoter.offer(hashes)
            return
        self._host.pool.mark_dirty(hashes)
        limit = int((1 - self._settings.clean_share) * self._host.pool.num_slots)
        if (excess := self._host.pool.counts().dirty - len(self._cleaning) - limit) > 0:
            self._demote_dirty(excess)

    def _demote_dirty(self, num_blocks: int) -> None:
        """Write-back: write the blocks next in line for eviction, so that they are clean when their turn comes."""
        with self._lock:
            dirty = self._host.pool.oldest_dirty(num_blocks + len(self._cleaning))
            chosen = [chain_hash for chain_hash in dirty if chain_hash not in self._cleaning]
            self._cleaning.update(chosen)
        for chain in _chains(chosen, self._host.parent_of):
            for demoter in self._demoters:
                taken = demoter.offer(chain, self._cleaned)
                with self._lock:
                    self._cleaning.difference_update(chain[taken:])

    def _cleaned(self, hashes: Sequence[ChainHash], outcomes: Sequence[Outcome]) -> None:
        self._host.pool.mark_clean([h for h, o in zip(hashes, outcomes, strict=True) if o is Outcome.OK])
        with self._lock:
            self._cleaning.difference_update(hashes)


def _chains(hashes: Sequence[ChainHash], parent_of: Callable[[ChainHash], ChainHash | None]) -> list[list[ChainHash]]:
    """Cut a list of blocks into runs of consecutive blocks."""
    chains: list[list[ChainHash]] = []
    for chain_hash in hashes:
        if chains and parent_of(chain_hash) == chains[-1][-1]:
            chains[-1].append(chain_hash)
        else:
            chains.append([chain_hash])
    return chains


@dataclass(eq=False, slots=True)
class SealJob:
    """Hashing and publishing one reservation. Implements `Job`."""

    stores: StoreQueue
    reservation: Reservation
    records: Sequence[BlockRecord]
    epoch: int
    awaited: bool = False  # somebody wants to know when it is done
    done: bool = False  # its blocks are there, or will not come
    deadline: float = math.inf  # memory only: it cannot hang

    def run(self) -> Outcome:
        """On the sealing thread."""
        return self.stores.publish(self)

    def end(self, result: Outcome, *, late: bool) -> None:
        """Not OK: its slots are given back."""
        if result is not Outcome.OK:
            self.stores.abandon(self.reservation, result)
        self.stores.sealed(self)

    def overdue(self) -> None:
        """Never told: there is no deadline."""
