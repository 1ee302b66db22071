"""Stores: slots in L2 for computed blocks, their sealing in the background, and the way down to lower tiers."""

import logging
import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from kvtier.tiers import L2, BlockRecord, ChainHash, Metrics, Outcome, checksum
from kvtier.tiers.hierarchy.cache_tiers import Filled, NewsCondition, Wanted
from kvtier.tiers.hierarchy.demote import Demoter
from kvtier.tiers.hierarchy.io_queue import IoQueue
from kvtier.tiers.hierarchy.lower_tier import TierPort
from kvtier.tiers.hierarchy.settings import HierarchySettings
from kvtier.tiers.host import HostTier
from kvtier.tiers.pool import Lease, Reservation, listed

_log = logging.getLogger(__name__)

_SIGHTINGS_PER_SLOT: Final = 4  # how many blocks not yet admitted are remembered, per L2 slot
_MAX_SEALING: Final = 1 << 16  # reservations waiting to be sealed
_SEALED_AT_ONCE: Final = 256  # blocks, about: those in front wait for the hashes of all


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
        self.unsealed: dict[ChainHash, Sealing] = {}  # filled blocks that are not published yet
        self._waiting: deque[Sealing] = deque()  # of them, those that no job has taken: a job is queued for them
        self._sightings: OrderedDict[ChainHash, int] = OrderedDict()
        self._cleaning: set[ChainHash] = set()  # write-back: dirty blocks being written

    def reserve(self, wanted: Sequence[Wanted]) -> list[Reservation | None]:
        """All that a step stores, in one pass if there is room for all; else chain by chain, what fits of its head."""
        if not self._host.keeps_tails:
            wanted = [replace(each, hashes=()) if each.is_tail else each for each in wanted]
        heads = self._admitted(wanted)
        made: list[Reservation | None] = [None] * len(wanted)
        at = [i for i, each in enumerate(wanted) if not each.hashes or (heads[i] and not self.closed)]
        chains = [(wanted[i].hashes, wanted[i].parent) for i in at]
        if self._settings.admit_after > 1:
            chains = [(hashes[: heads[i]], parent) for i, (hashes, parent) in zip(at, chains, strict=True)]
        taken = self._host.pool.reserve_each(chains)
        for i, reservation in zip(at, taken, strict=True):
            made[i] = reservation
        for i, num_blocks in enumerate(heads):
            if num_blocks and made[i] is None:
                made[i] = self._reserve_less(wanted[i], num_blocks)
            if wanted[i].is_tail and (reservation := made[i]) is not None:
                reservation.is_tail = True
        return made

    def seal(self, reservation: Reservation, records: Sequence[BlockRecord], epoch: int) -> None:
        """Publish and pass down, in the background."""
        self.seal_each([(reservation, records, epoch)])

    def seal_each(self, stores: Sequence[Filled]) -> None:
        """As `seal`, of all that a step filled."""
        sealings = [Sealing(*each) for each in stores]
        unsealed, waiting = self.unsealed, self._waiting
        with self._lock:
            for sealing in sealings:
                for chain_hash in sealing.reservation.hashes:
                    unsealed[chain_hash] = sealing
            is_queued, room = bool(waiting), max(0, _MAX_SEALING - len(waiting))
            refused = sealings[room:]
            waiting.extend(sealings[:room])
            # Under the lock: whoever finds something waiting may `drain`, and that waits for jobs.
            is_taken = is_queued or not waiting or self.sealing_queue.submit(SealJob(self))
        if refused:
            self.sealed(refused, [Outcome.QUEUE_FULL] * len(refused))
        if not is_taken:
            self.drop_waiting(Outcome.CLOSED)

    def abandon(self, reservation: Reservation, reason: Outcome) -> None:
        self._metrics.dropped(L2, reason, len(reservation.hashes))
        self._host.pool.abandon(reservation)

    def quarantine(self, reservation: Reservation, reason: Outcome) -> None:
        self._metrics.dropped(L2, reason, len(reservation.hashes))
        self._host.pool.quarantine(reservation)

    def sealing(self, chain_hash: ChainHash) -> "Sealing | None":
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

    def next_sealings(self) -> "list[Sealing]":
        """The oldest of what waits, taken; another job is queued for what is left."""
        taken, num_blocks = [], 0
        with self._lock:
            while self._waiting and num_blocks < _SEALED_AT_ONCE:
                taken.append(self._waiting.popleft())
                num_blocks += len(taken[-1].reservation.hashes)
            is_taken = not self._waiting or self.sealing_queue.submit(SealJob(self))
        if not is_taken:
            self.drop_waiting(Outcome.CLOSED)
        return taken

    def drop_waiting(self, reason: Outcome) -> None:
        """All that waits will not be sealed: no job comes for it."""
        with self._lock:
            left = list(self._waiting)
            self._waiting.clear()
        self.sealed(left, [reason] * len(left))

    def publish(self, sealings: "Sequence[Sealing]") -> list[Outcome]:
        """Hash the filled slots, make them findable and offer them to the lower tiers. Not OK: nothing was published.

        All whole blocks at once; each tail by itself, as what came before it may make it worthless.
        """
        whole = [each for each in sealings if not each.reservation.is_tail]
        if len(whole) == len(sealings):
            return self._publish(sealings)
        outcomes = dict(zip(map(id, whole), self._publish(whole), strict=True))
        outcomes |= {id(each): self._publish([each])[0] for each in sealings if each.reservation.is_tail}
        return [outcomes[id(each)] for each in sealings]

    def _publish(self, sealings: "Sequence[Sealing]") -> list[Outcome]:
        """The order matters for FAULTS 37: the epoch is compared and the blocks are named under one lock."""
        host, hashed = self._host, [self._hashed(each) for each in sealings]
        with self._lock:
            outcomes = [self._verdict(each, records) for each, records in zip(sealings, hashed, strict=True)]
            good = [i for i, outcome in enumerate(outcomes) if outcome is Outcome.OK]
            if any(each.reservation.is_tail for each in sealings):
                good = [i for i in good if not self._is_covered(sealings[i], hashed[i])]
            reservations = [sealings[i].reservation for i in good]
            records = [record for i in good for record in hashed[i] or ()]
            host.describe([slot for each in reservations for slot in listed(each.places)], records)
            lease = host.pool.seal_each(reservations)
        try:
            self._metrics.stored(L2, len(records))
            if host.pool.tails:
                for i in good:
                    host.drop_covered(hashed[i] or ())
            whole = [each.hashes for each in reservations if not each.is_tail]
            if self._demoters and whole:  # a tail is of use for a while, in this tier's memory
                self._pass_down(whole, lease)
        finally:
            lease.release()
        return outcomes

    def sealed(self, sealings: "Sequence[Sealing]", outcomes: Sequence[Outcome]) -> None:
        """They have ended. Where not well, their slots are given back. Whoever waits for their blocks may look."""
        for sealing, outcome in zip(sealings, outcomes, strict=True):
            if outcome is not Outcome.OK:
                self.abandon(sealing.reservation, outcome)
        with self._lock:
            for sealing in sealings:
                sealing.done = True
                for chain_hash in sealing.reservation.hashes:
                    if self.unsealed.get(chain_hash) is sealing:
                        del self.unsealed[chain_hash]
            if any(sealing.awaited for sealing in sealings):
                self._lock.notify_all()

    # inside

    def _hashed(self, sealing: "Sealing") -> list[BlockRecord] | None:
        """What lies in the slots; None where it cannot be told."""
        slot_bytes, places = self._host.region.slot, listed(sealing.reservation.places)
        try:
            return [
                BlockRecord(record.chain_hash, record.parent, record.tokens, checksum(slot_bytes(slot)))
                for slot, record in zip(places, sealing.records, strict=True)
            ]
        except (ValueError, IndexError):  # its records are not those of its slots
            _log.exception("a store could not be hashed; counted as %s", Outcome.IO_ERROR)
            return None

    def _verdict(self, sealing: "Sealing", records: list[BlockRecord] | None) -> Outcome:
        """Under the lock: OK if the blocks may be published."""
        if sealing.epoch != self.epoch or self.closed:
            return Outcome.EPOCH if sealing.epoch != self.epoch else Outcome.CLOSED
        return Outcome.OK if records is not None else Outcome.IO_ERROR

    def _is_covered(self, sealing: "Sealing", records: list[BlockRecord] | None) -> bool:
        """Whether it is a tail that a held block begins with. It is given up then, as if it had been held already."""
        if not (sealing.reservation.is_tail and records and self._host.is_covered(records[0])):
            return False
        self._host.pool.abandon(sealing.reservation)
        return True

    def _admitted(self, wanted: Sequence[Wanted]) -> list[int]:
        """Of each chain how many leading blocks are to be stored; the others are counted."""
        if self._settings.admit_after <= 1:
            return [len(each.hashes) for each in wanted]
        heads = self._seen_enough(wanted)
        if num_refused := sum(len(each.hashes) for each in wanted) - sum(heads):
            self._metrics.dropped(L2, Outcome.NOT_ADMITTED, num_refused)
        return heads

    def _reserve_less(self, wanted: Wanted, admitted: int) -> Reservation | None:
        """There is no room for so many blocks: as many leading ones as fit; what is left out is counted."""
        want = admitted // 2
        while want and not self.closed:
            if (reservation := self._host.pool.reserve(wanted.hashes[:want], wanted.parent)) is not None:
                self._metrics.dropped(L2, Outcome.NO_SLOT, admitted - want)
                return reservation
            want //= 2
        self._metrics.dropped(L2, Outcome.CLOSED if self.closed else Outcome.NO_SLOT, admitted)
        return None

    def _seen_enough(self, wanted: Sequence[Wanted]) -> list[int]:
        """How many leading blocks of each have been seen often enough to be stored, this time included.

        A tail comes once, behind its parent.
        """
        sightings, enough, heads = self._sightings, self._settings.admit_after, list[int]()
        most = _SIGHTINGS_PER_SLOT * self._host.pool.num_slots
        with self._lock:
            for each in wanted:
                num_seen = 0
                if each.is_tail:
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

    def _drain_queues(self, deadline: float) -> bool:
        queues = (self.sealing_queue, *(port.queue for port in self._ports))
        return all([queue.drain(max(0.0, deadline - time.monotonic())) for queue in queues])

    def _pass_down(self, chains: Sequence[list[ChainHash]], lease: Lease) -> None:
        """Give chains that were just sealed, and are leased, to the tiers below: now, or when they are to make room."""
        if self._settings.write_policy == "write_through":
            for hashes in chains:
                for demoter in self._demoters:
                    demoter.offer(hashes)
            return
        pool = self._host.pool
        pool.mark_dirty(lease)
        limit = int((1 - self._settings.clean_share) * pool.num_slots)
        if (excess := pool.counts().dirty - len(self._cleaning) - limit) > 0:
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
class Sealing:
    """One reservation that is to be hashed and published."""

    reservation: Reservation
    records: Sequence[BlockRecord]
    epoch: int
    awaited: bool = False  # somebody wants to know when it is done
    done: bool = False  # its blocks are there, or will not come


@dataclass(eq=False, slots=True)
class SealJob:
    """Hashing and publishing all that waits when its turn comes: a step's stores are one job. Implements `Job`."""

    stores: StoreQueue
    sealings: list[Sealing] | None = None  # once its turn has come
    deadline: float = math.inf  # memory only: it cannot hang

    def run(self) -> list[Outcome]:
        """On the sealing thread."""
        self.sealings = self.stores.next_sealings()
        return self.stores.publish(self.sealings)

    def end(self, result: list[Outcome] | Outcome, *, late: bool) -> None:
        """Not OK: its slots are given back."""
        if not isinstance(result, Outcome):
            self.stores.sealed(self.sealings or [], result)
        elif self.sealings is None:
            self.stores.drop_waiting(result)
        else:
            self.stores.sealed(self.sealings, [result] * len(self.sealings))

    def overdue(self) -> None:
        """Never told: there is no deadline."""
