"""The hierarchy: L2 and the tiers below it as one store. The only module that knows two tiers."""

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from kvtier.tiers.below import Attribution
from kvtier.tiers.checksum import checksum
from kvtier.tiers.demote import Demoter
from kvtier.tiers.host import HostTier
from kvtier.tiers.io_queue import IoQueue
from kvtier.tiers.locate import Locator
from kvtier.tiers.metrics import Metrics
from kvtier.tiers.pool import Lease, Reservation
from kvtier.tiers.port import TierPort
from kvtier.tiers.prefetch import Pending, Prefetch, Prefetcher
from kvtier.tiers.progress import Progress
from kvtier.tiers.rates import Rates
from kvtier.tiers.tier import BlockRecord, ChainHash, Outcome

_TICK: Final = 0.001  # seconds between two looks at deadlines, however often they are asked for
_SIGHTINGS_PER_SLOT: Final = 4  # how many blocks not yet admitted are remembered, per L2 slot

WritePolicy = Literal["write_through", "write_back"]


@dataclass(frozen=True, slots=True)
class HierarchySettings:
    """What the hierarchy decides by; see the configuration table in the README."""

    write_policy: WritePolicy = "write_through"
    admit_after: int = 1  # sightings of a block before it is stored
    store_queue: int = 256 << 20  # bytes that may wait for each lower tier
    prefetch_deadline: float = 2.0  # seconds a request waits for lower tiers
    lease_deadline: float = 60.0  # seconds a promise nobody asks about is kept
    clean_share: float = 0.25  # WRITE_BACK: the share of L2 kept free or clean for instant eviction


class Hierarchy:
    """Look up, prefetch, lease and store blocks in L2 and every tier below. Thread-safe.

    No method raises for a storage failure and none waits for storage (but `drain`, `reset` and `close`): a failure is a
    miss or a dropped store, counted by reason. Lock order: `_lock` → the pool's, a port's, a queue's or a tier's index
    lock; never held across I/O.
    """

    def __init__(
        self,
        host: HostTier,
        ports: Sequence[TierPort],
        settings: HierarchySettings,
        metrics: Metrics,
        rates: Rates,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.host = host
        self.ports = list(ports)
        self.settings = settings
        self.metrics = metrics
        self.rates = rates
        self.epoch = 0  # counts resets: a store admitted before one never seals after it
        self.progress = self._lock = Progress()
        self.locator = Locator(ports, self.progress, clock)
        self.prefetcher = Prefetcher(host, ports, self._lock, metrics, clock, settings.lease_deadline)
        self._demoters = [Demoter(port, host, settings.store_queue, metrics, clock) for port in ports]
        self._clock = clock
        self._ticked_at = -math.inf
        self._sealing = IoQueue("seal", 1, 1 << 16, clock)
        self._sightings: OrderedDict[ChainHash, int] = OrderedDict()
        self._cleaning: set[ChainHash] = set()  # WRITE_BACK: dirty blocks being written
        self._num_dirty_dropped = 0  # of those the pool counts: shown as dropped already
        self._closed = False
        metrics.before_read(self._show_pools)

    # looking up and loading

    def lookup(self, hashes: Sequence[ChainHash], num_l1: int = 0) -> Attribution:
        """Where each block of the chain is now, leading run only; the first `num_l1` were found in L1. No side effect.

        A run may change tiers on its way, e.g. L2, then file, then L2 again.
        """
        self.tick()  # an open breaker hides its tier from every lookup: this is what sends its probe
        found = {"l2": 0, **{port.name: 0 for port in self.ports}}
        num_l2 = self.host.pool.lookup(hashes[num_l1:] if num_l1 else hashes)
        found["l2"] = num_l2
        at = num_l1 + num_l2
        rest = hashes[at:]
        if any(port.lookup(rest[:1]) for port in self.ports):  # a run through several tiers: one pass over all
            held = {"l2": self.host.pool.holds(rest), **{port.name: port.holds(rest) for port in self.ports}}
            owners = np.array(list(held.values())).argmax(axis=0)  # the first tier that holds each block
            anywhere = [any(where) for where in zip(*held.values(), strict=True)]
            end = anywhere.index(False) if False in anywhere else len(rest)
            for name, count in zip(held, np.bincount(owners[:end], minlength=len(held)).tolist(), strict=True):
                found[name] += count
        return Attribution(blocks=len(hashes), l1=num_l1, miss=len(hashes) - num_l1 - sum(found.values()), **found)

    def prefetch(self, hashes: Sequence[ChainHash], parent: ChainHash) -> Prefetch:
        """Claim consecutive blocks for a request: lease those in L2, fetch the rest. See `Prefetcher`.

        `refused` while other waiting requests hold all that may be held: cancel it and ask again.
        """
        self.tick()
        return self.prefetcher.start(hashes, parent, self.settings.prefetch_deadline)

    def poll(self, prefetch: Prefetch) -> int | Pending:
        """How many leading blocks are safe to promise, or PENDING."""
        self.tick()
        return self.prefetcher.poll(prefetch)

    def claim(self, prefetch: Prefetch) -> Lease:
        """The lease of the promised blocks; released by the caller when its copies have ended."""
        return self.prefetcher.claim(prefetch)

    def cancel(self, prefetch: Prefetch) -> None:
        """The request went away. Idempotent."""
        self.prefetcher.cancel(prefetch)

    # storing

    def reserve(self, hashes: Sequence[ChainHash], parent: ChainHash) -> Reservation | None:
        """L2 slots for consecutive new blocks of one chain: as many of the head as fit, None where not one does.

        Blocks already held need no slot and are left out of the reservation.
        """
        admitted = self._admit(hashes)
        if admitted < len(hashes):
            self.metrics.dropped("l2", Outcome.NOT_ADMITTED, len(hashes) - admitted)
        want = admitted
        while want and not self._closed:
            if (reservation := self.host.pool.reserve(hashes[:want], parent)) is not None:
                if want < admitted:
                    self.metrics.dropped("l2", Outcome.NO_SLOT, admitted - want)
                return reservation
            want //= 2
        if admitted:
            self.metrics.dropped("l2", Outcome.CLOSED if self._closed else Outcome.NO_SLOT, admitted)
        return None

    def reserve_each(self, chains: Sequence[tuple[Sequence[ChainHash], ChainHash]]) -> list[Reservation | None]:
        """`reserve` for several (hashes, parent): all that a step stores, in one pass where there is room for all."""
        if len(chains) < 2 or self.settings.admit_after > 1 or self._closed:
            return [self.reserve(hashes, parent) for hashes, parent in chains]
        taken = self.host.pool.reserve_each(chains)
        return [
            self.reserve(*chain) if reservation is None else reservation
            for chain, reservation in zip(chains, taken, strict=True)
        ]

    def seal(self, reservation: Reservation, records: Sequence[BlockRecord], epoch: int) -> None:
        """The reservation's slots are filled: hash, publish and offer them to the tiers below; in the background.

        `records` are the reservation's blocks in order; their `checksum` is ignored and computed here, once. `epoch` is
        the hierarchy's when the blocks were computed: older than now, and nothing is published.
        """
        job = _SealJob(self, reservation, list(records), epoch)
        if not self._sealing.submit(job):
            job.drop(Outcome.CLOSED)

    def abandon(self, reservation: Reservation, reason: Outcome) -> None:
        """The store failed or was called off: its slots are free again, nothing became visible."""
        self.metrics.dropped("l2", reason, len(reservation.hashes))
        self.host.pool.abandon(reservation)

    # whole-store verbs

    def tick(self) -> None:
        """Let deadlines pass: reclaim stale promises, expire hung I/O, probe open breakers. Lookups and polls do it."""
        if (now := self._clock()) - self._ticked_at < _TICK:
            return
        self._ticked_at = now
        for port in self.ports:
            port.tick()
        self.prefetcher.tick()

    def wait_progress(self, timeout: float) -> None:
        """Wait until a prefetch moved on or a question was answered, at most `timeout` seconds, for an idle engine.

        Returns at once where a prefetch has ended that no `poll` has reported yet, or an answer was not read.
        """
        with self._lock:
            if not (self.prefetcher.has_news() or self.locator.has_news()):
                self._lock.wait(timeout)

    def reset(self) -> None:
        """Forget everything in every tier; stores and reads under way will not become visible.

        A request that was promised blocks before keeps its lease on them: it was admitted before.
        """
        with self._lock:
            self.epoch += 1
            self.host.pool.reset()  # first, so that nothing old is passed down from here on
        for port in self.ports:
            port.reset()
        with self._lock:
            self.host.pool.reset()  # again, for what was read meanwhile from tiers that had not forgotten yet

    def drain(self, timeout: float, *, below: bool = True) -> bool:
        """Wait until every store offered so far is found in L2 and, `below`, written, at most `timeout` seconds."""
        if not below:
            return self._sealing.drain(timeout)
        deadline = time.monotonic() + timeout
        drained = self._drain_queues(deadline)
        before = self.host.pool.num_slots + 1
        while drained and (dirty := self.host.pool.counts().dirty) and dirty < before:  # WRITE_BACK, while it helps
            before = dirty
            self._demote_dirty(dirty)
            drained = self._drain_queues(deadline)
        return drained

    def stats(self) -> dict[str, float]:
        """Every counter and gauge by its exposition name."""
        return self.metrics.snapshot()

    def check(self, *, in_use: bool = False) -> None:
        """Raise AssertionError where a conservation law is broken; at idle also where a lease or a slot leaked.

        `in_use`: somebody holds leases or fills slots that this hierarchy does not know the end of.
        """
        self.prefetcher.check()
        self.locator.check()
        queues_idle = self._sealing.idle and all(port.queue.idle for port in self.ports)
        idle = queues_idle and self.prefetcher.idle  # asked before counting: what ends in between is no leak
        counts = self.host.pool.check()
        for port in self.ports:
            port.check()
        if idle and not in_use and (counts.leased or counts.filling or counts.quarantined):
            raise AssertionError(f"at idle nothing may be leased, filling or quarantined: {counts}")

    def close(self, timeout: float = 5.0) -> None:
        """Drain, drop what is left (counted), close every tier: in `timeout` seconds altogether. Idempotent."""
        if self._closed:
            return
        deadline = time.monotonic() + timeout
        self.drain(timeout)
        self._closed = True
        self._sealing.close(max(0.0, deadline - time.monotonic()))
        for port in self.ports:
            port.close(max(0.0, deadline - time.monotonic()))
        self.host.close()

    # inside

    def _publish(self, reservation: Reservation, records: list[BlockRecord], epoch: int) -> None:
        """Hash the filled slots and make them findable (on the sealing thread)."""
        slots = [int(slot) for slot in reservation.slots]
        hashed = [
            BlockRecord(r.chain_hash, r.parent, r.tokens, checksum(self.host.region.slot(slot)))
            for slot, r in zip(slots, records, strict=True)
        ]
        with self._lock:
            if epoch != self.epoch or self._closed:
                self.abandon(reservation, Outcome.EPOCH if epoch != self.epoch else Outcome.CLOSED)
                return
            for slot, record in zip(slots, hashed, strict=True):
                self.host.records[slot] = record
            lease = self.host.pool.seal(reservation)
        with lease:
            self.metrics.stored("l2", len(hashed))
            self._pass_down(list(reservation.hashes))

    def _drain_queues(self, deadline: float) -> bool:
        queues = (self._sealing, *(port.queue for port in self.ports))
        return all([queue.drain(max(0.0, deadline - time.monotonic())) for queue in queues])

    def _pass_down(self, hashes: list[ChainHash]) -> None:
        if not self._demoters:
            return
        if self.settings.write_policy == "write_through":
            for demoter in self._demoters:
                demoter.offer(hashes)
            return
        self.host.pool.mark_dirty(hashes)
        limit = int((1 - self.settings.clean_share) * self.host.pool.num_slots)
        if (excess := self.host.pool.counts().dirty - len(self._cleaning) - limit) > 0:
            self._demote_dirty(excess)

    def _demote_dirty(self, num_blocks: int) -> None:
        """WRITE_BACK: write the blocks next in line for eviction, so that they are clean when their turn comes."""
        with self._lock:
            dirty = self.host.pool.oldest_dirty(num_blocks + len(self._cleaning))
            chosen = [chain_hash for chain_hash in dirty if chain_hash not in self._cleaning]
            self._cleaning.update(chosen)
        for chain in _chains(chosen, self.host.parent_of):
            for demoter in self._demoters:
                taken = demoter.offer(chain, self._cleaned)
                with self._lock:
                    self._cleaning.difference_update(chain[taken:])

    def _cleaned(self, hashes: Sequence[ChainHash], outcomes: Sequence[Outcome]) -> None:
        self.host.pool.mark_clean([h for h, o in zip(hashes, outcomes, strict=True) if o is Outcome.OK])
        with self._lock:
            self._cleaning.difference_update(hashes)

    def _admit(self, hashes: Sequence[ChainHash]) -> int:
        """How many leading blocks have been seen often enough to be stored."""
        if self.settings.admit_after <= 1:
            return len(hashes)
        with self._lock:
            for chain_hash in hashes:
                self._sightings[chain_hash] = self._sightings.pop(chain_hash, 0) + 1
            while len(self._sightings) > _SIGHTINGS_PER_SLOT * self.host.pool.num_slots:
                self._sightings.popitem(last=False)
            seen = (self._sightings.get(h, 0) >= self.settings.admit_after for h in hashes)
            return next((i for i, enough in enumerate(seen) if not enough), len(hashes))

    def _show_pools(self) -> None:
        pool = self.host.pool
        counts = pool.counts()
        for state in ("free", "filling", "ready", "leased", "quarantined", "dirty"):
            self.metrics.pool("l2", state, getattr(counts, state))
        with self._lock:
            self.metrics.evicted("l2", pool.num_evicted)
            dropped, self._num_dirty_dropped = pool.num_dirty_dropped - self._num_dirty_dropped, pool.num_dirty_dropped
            for port in self.ports:
                if dropped:
                    self.metrics.dropped(port.name, Outcome.EVICTED, dropped)
                tier = port.tier  # a probe may detach it meanwhile
                stats = tier.stats() if tier is not None else {}
                self.metrics.evicted(port.name, stats.get("evicted", 0))
                for key, count in stats.items():
                    if key.startswith("slots_"):
                        self.metrics.pool(port.name, key.removeprefix("slots_"), count)


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
class _SealJob:
    """Hashing and publishing one reservation. Implements `Job`."""

    hierarchy: Hierarchy
    reservation: Reservation
    records: list[BlockRecord]
    epoch: int
    deadline: float = math.inf  # memory only: it cannot hang

    def run(self) -> None:
        self.hierarchy._publish(self.reservation, self.records, self.epoch)

    def drop(self, outcome: Outcome) -> None:
        self.hierarchy.abandon(self.reservation, outcome)

    def overdue(self) -> None:
        """Never told: there is no deadline."""
