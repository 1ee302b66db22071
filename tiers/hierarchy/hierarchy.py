"""The hierarchy: L2 and the tiers below it as one store. The only module that uses more than one tier."""

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Final

import numpy as np

from kvtier.tiers import (
    L2,
    BlockRecord,
    ChainHash,
    ChangeFeed,
    Changes,
    ChildBlock,
    Lineage,
    Metrics,
    Outcome,
    tracing,
)
from kvtier.tiers.hierarchy.cache_tiers import PENDING, Attribution, Claim, Overlap, Pending, ProgressCondition
from kvtier.tiers.hierarchy.lower_tier import MIN_FRONT, HierarchySettings, Rates, Span, TierPort
from kvtier.tiers.hierarchy.promotion import LocalClaim, Locator, Promoter
from kvtier.tiers.hierarchy.stores import StoreQueue
from kvtier.tiers.host import HostRegion, HostTier
from kvtier.tiers.pool import (
    MAX_CHILDREN,
    REMOVED,
    Causes,
    EvictionLog,
    EvictionReason,
    Lease,
    causes_of,
    eviction_reason,
)
from kvtier.tiers.reuse import RequestEnd

_TICK: Final = 0.005  # seconds between two checks of deadlines
_SWEEP: Final = 0.05  # seconds between two checks of the backlogs: usually the end of a write starts the next
_ASK_AGAIN: Final = 0.05  # seconds a shared tier's answer stays valid: a query costs a round trip
_LOOKS: Final = 3  # of `check`, before it calls something a leak …
_PAUSE: Final = 0.02  # … and seconds between two
_SEALING: Final = 0.05  # seconds a claim waits for a block that is being hashed: some 10 ms for a long prompt
MOST: Final = 4096  # blocks of one tier taken at a time: bounds the time under the tier's lock


class Hierarchy:
    """Claim, store and look up blocks in L2 and every tier below: `CacheTiers` in this process.

    Thread-safe; a claim belongs to one thread. No method raises for a storage failure and none waits for storage
    (except `locate`, `drain`, `reset` and `close`): a failure is a miss or a dropped store, counted by reason. Lock
    order: `_lock` → the pool's, a port's, a queue's or a tier's index lock; never held across I/O.
    """

    is_late = sends_later = offers_again = False

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
        self.epoch = 0  # counts resets
        self.region: HostRegion | None = host.region
        self.num_slots = host.pool.num_slots
        self.has_lower = bool(self.ports)
        self.news = self._lock = ProgressCondition()
        self.locator = Locator(ports, self.news, clock)
        self.promoter = Promoter(host, ports, self._lock, metrics, clock, settings.lease_deadline)
        self.stores = stores = StoreQueue(host, self.ports, self._lock, settings, metrics, clock)
        # These methods are documented in `BlockStores` and `TierUpkeep`.
        self.reserve, self.seal, self.abandon, self.drain = stores.reserve, stores.seal, stores.abandon, stores.drain
        self.seal_each, self.quarantine = stores.seal_each, stores.quarantine
        self.preallocate, self.reserve_at, self.deallocate = stores.preallocate, stores.reserve_at, host.pool.deallocate
        self.holds = host.pool.holds
        self.lease = self.promoter.lease
        self.count = metrics.looked_up
        self._clock = clock
        self._ticked_at = self._swept_at = -math.inf
        self._num_dirty_dropped = 0  # the part of the pool's count that the metrics have
        self._closed = False
        self._pid = os.getpid()
        if host.pool.eviction_log is None:
            host.pool.remember(EvictionLog(L2, self.num_slots, self.num_slots + 1, clock))
        self._host_eviction_log = host.pool.eviction_log
        for port in self.ports:
            port.probe_alone()
        metrics.before_read(self._show_pools)

    # claims

    def submit(
        self,
        hashes: Sequence[ChainHash],
        parent: ChainHash,
        num_l1: int = 0,
        *,
        block_size: int = 0,
        overlap: Overlap = Overlap.NONE,
        trace: tracing.Trace | None = None,
    ) -> Claim:
        """Look up the indexes of this process; query shared tiers in the background.

        A claim waits up to `_SEALING` seconds for a block that was stored and is not hashed yet.
        """
        claim = LocalClaim(list(hashes), parent, num_l1, block_size, overlap)
        if trace is not None:
            claim.trace = trace
        wanted = claim.hashes[num_l1:] if num_l1 else claim.hashes
        is_sealing = bool(self.stores.unsealed)  # read first: else a block published in between is found nowhere
        places: list[int] | None = None
        if wanted and (self.rates.policy != "recompute" or not block_size or overlap is Overlap.BACK):
            places = self.promoter.lease_whole(claim, wanted)
            if claim.promised is not None:
                claim.found = _all_in_l2(len(claim.hashes), num_l1)
                claim.behind = self._children
                return claim
        self.tick()
        claim.patient_until = time.monotonic() + _SEALING
        self._look(claim, None if is_sealing else places)
        if claim.found is not None and (claim.done or not claim.run):
            claim.promised = len(claim.leases[0].hashes) if claim.leases else 0
        return claim

    def poll(self, claim: Claim) -> int | Pending:
        """The number of promised blocks, or PENDING."""
        assert isinstance(claim, LocalClaim)
        if claim.done and (claim.failed is None or not self._looks_elsewhere(claim)):
            claim.is_reported, claim.polled_at, leases = True, self._clock(), claim.leases
            return len(leases[0].hashes) if leases else 0
        self.tick()
        if claim.found is None:
            if claim.sealing is not None and not claim.sealing.done and time.monotonic() < claim.patient_until:
                return PENDING
            if not all(question.done for question in claim.questions):
                return PENDING
            self.locator.read(claim.questions)
            if claim.trace is not None:
                self._trace_questions(claim, claim.trace)
            claim.questions = ()
            self._look(claim)
            if claim.found is None:
                return PENDING
        return self.promoter.poll(claim) if claim.run else 0

    def promised(self, claim: Claim) -> Lease | None:
        """The lease behind a promise, which the claim keeps; for passing the slots to another process."""
        assert isinstance(claim, LocalClaim)
        return claim.leases[0] if claim.done and claim.leases else None

    def cancel(self, claim: Claim) -> None:
        """Release its queries and promised blocks. Idempotent."""
        assert isinstance(claim, LocalClaim)
        if claim.questions:
            self.locator.read(claim.questions)
            claim.questions = ()
        if claim.run:
            self.promoter.cancel(claim)

    def wait_progress(self, timeout: float) -> None:
        """Wait until a claim moves on or a shared tier answers, at most `timeout` seconds.

        Returns at once if a claim has an answer that no `poll` has returned, or a shared tier's answer is unread.
        """
        with self._lock:
            if not (self.promoter.has_progress() or self.locator.unread):
                self._lock.wait(timeout)

    # lookups without a claim

    def lookup(self, hashes: Sequence[ChainHash], num_l1: int = 0) -> Attribution:
        """The tier of each block in the chain's leading run; the first `num_l1` were found in L1. No side effect.

        Uses the indexes of this process only. A run may change tiers, e.g. L2, then file, then L2 again.
        """
        self.tick()  # an open breaker hides its tier from every lookup: the tick sends its probe
        return self._lookup(hashes, num_l1)[0]

    def locate(self, hashes: Sequence[ChainHash], timeout: float) -> Attribution:
        """As `lookup`, after querying the shared tiers about blocks that the indexes lack."""
        deadline, asked_until = time.monotonic() + timeout, 0
        while True:
            where = self.lookup(hashes)
            known = where.blocks - where.miss
            if not where.miss or known < asked_until:
                return where
            questions = self.locator.ask(hashes[known:])
            while not all(question.done for question in questions) and (left := deadline - time.monotonic()) > 0:
                self.wait_progress(left)
                self.tick()
            self.locator.read(questions)
            if not questions or not all(question.done for question in questions):
                return self.lookup(hashes)
            asked_until = known + max(len(question.hashes) for question in questions)

    def causes(self, hashes: Sequence[ChainHash]) -> Causes:
        """Why consecutive blocks that no tier has are gone: (cause, tier) → blocks."""
        return causes_of(self._eviction_logs, hashes)

    def eviction_reason(self, chain_hash: ChainHash) -> EvictionReason:
        """Why one block that no tier has is gone."""
        return eviction_reason(self._eviction_logs, chain_hash)

    @property
    def _eviction_logs(self) -> list[EvictionLog]:
        """The eviction logs of all tiers that have one; of a shared tier only while it answers."""
        known = [port.eviction_log for port in self.ports if not port.is_shared or port.readable() is not None]
        return [each for each in (self._host_eviction_log, *known) if each is not None]

    # upkeep

    @property
    def is_short(self) -> bool:
        """Whether the last `reserve` had no room for some blocks now."""
        return self.stores.is_short

    def computed(self, num_tokens: int, seconds: float, position: float = 0.0) -> None:
        """Record a prefill in the rates that decide whether loading is worth it."""
        self.rates.computed(num_tokens, seconds, position)

    def ended(self, end: RequestEnd) -> None:
        """Apply a finished request to the eviction order of L2, and then to that of the tiers below."""
        if (classified := self.host.pool.ended(end)) is not None:
            for port in self.ports:
                if (tier := port.tier) is not None:  # a probe may detach it meanwhile
                    tier.ended(classified)

    def tick(self) -> None:
        """Expire stale promises and hung I/O, probe open breakers, retry stores."""
        if (now := self._clock()) - self._ticked_at < _TICK:
            return
        self._ticked_at = now
        for port in self.ports:
            port.tick()
        if now - self._swept_at >= _SWEEP:
            self._swept_at = now
            self.stores.tick()
        if self.promoter.active:
            self.promoter.tick()

    def reset(self) -> None:
        """Forget everything in every tier; stores and reads under way will not become visible.

        A request that was promised blocks before the reset keeps its lease.
        """
        with self._lock:
            self.epoch = self.stores.epoch = self.epoch + 1
            self.host.pool.reset()  # first, so that nothing old is passed down from here on
        for port in self.ports:
            port.reset()
        with self._lock:
            self.host.pool.reset()  # again, for what was read meanwhile from tiers that had not forgotten yet

    @property
    def wanting(self) -> dict[str, str]:
        """Tiers with an open breaker → why."""
        return {port.name: why for port in self.ports if (why := port.wanting) is not None}

    def stats(self) -> dict[str, float]:
        """Every counter and gauge by its exposition name."""
        return self.metrics.snapshot()

    def check(self, *, in_use: bool = False) -> None:
        """Raise AssertionError if a conservation law is broken; at idle also if a lease or a slot leaked.

        `in_use`: a caller has leases, or reservations it has not sealed yet.
        """
        self.promoter.check()
        self.locator.check()
        self.host.check()
        for port in self.ports:
            port.check()
        for left in reversed(range(_LOOKS)):  # work that begins by itself, as behind a probe, is no leak: it ends
            is_idle = self._is_idle  # read before counting: what ends in between is no leak
            counts = self.host.pool.check()
            if in_use or not (is_idle and (counts.leased or counts.filling or counts.quarantined)):
                return
            if not left:
                raise AssertionError(f"at idle nothing may be leased, filling or quarantined: {counts}")
            time.sleep(_PAUSE)

    @property
    def _is_idle(self) -> bool:
        queues_idle = self.stores.sealing_queue.idle and all(port.queue.idle for port in self.ports)
        return queues_idle and self.promoter.idle

    def close(self, timeout: float = 5.0, *, for_all: bool = False) -> None:
        """Drain, drop what is left (counted), close every tier: within `timeout` seconds altogether. Idempotent.

        Does nothing in a forked child. `for_all`: as `HostRegion.close`.
        """
        if self._closed or self._pid != os.getpid():
            return
        deadline = time.monotonic() + timeout
        self.drain(timeout)
        self._closed = self.stores.closed = True
        self.stores.sealing_queue.close(max(0.0, deadline - time.monotonic()))
        self.promoter.close(max(0.0, deadline - time.monotonic()))
        for port in self.ports:
            port.close(max(0.0, deadline - time.monotonic()))
        self.stores.close()
        self.host.region.close(for_all=for_all)

    # inside

    def _lookup(
        self,
        hashes: Sequence[ChainHash],
        num_l1: int,
        places: list[int] | None = None,
        avoid: TierPort | None = None,
    ) -> tuple[Attribution, list[int]]:
        """Where the blocks are, and L2's slots of the leading ones after those in L1 (`places`, if known)."""
        ports = self.ports if avoid is None else [port for port in self.ports if port is not avoid]
        pool = self.host.pool
        if places is None:
            places = pool.places(hashes[num_l1:] if num_l1 else hashes)
        at = num_l1 + len(places)
        found = {L2: at - num_l1}
        if at < len(hashes) and ports:  # L2 lacks the next block
            rest, upper = hashes[at:], ports[0]
            count = upper.lookup(rest)
            if count == len(rest) and (count == 1 or not any(pool.holds(rest))):
                found[upper.name] = count
                at += count
            elif count or any(port.lookup(rest[:1]) for port in ports[1:]):
                at += self._lookup_each(rest, found, ports)
        return Attribution(blocks=len(hashes), l1=num_l1, miss=len(hashes) - at, **found), places

    def _lookup_each(self, rest: Sequence[ChainHash], found: dict[str, int], ports: Sequence[TierPort]) -> int:
        """Add each leading block of `rest` to `found`, under the first tier that has it; returns how many.

        One pass over all tiers, even if the run changes tiers.
        """
        present = {L2: self.host.pool.holds(rest), **{port.name: port.holds(rest) for port in ports}}
        owners = np.array(list(present.values())).argmax(axis=0)
        anywhere = [any(where) for where in zip(*present.values(), strict=True)]
        end = anywhere.index(False) if False in anywhere else len(rest)
        for name, num_blocks in zip(present, np.bincount(owners[:end], minlength=len(present)).tolist(), strict=True):
            found[name] = found.get(name, 0) + num_blocks
        return end

    def _look(self, claim: LocalClaim, places: list[int] | None = None) -> None:
        """Look up the indexes. At the run's end wait for a store, query shared tiers once; load what is worth it."""
        is_sealing = bool(self.stores.unsealed)  # read first: see `submit`
        where, places = self._lookup(claim.hashes, claim.num_l1, places, claim.avoid)
        claim.sealing = None
        while where.miss and is_sealing and time.monotonic() < claim.patient_until:
            first = claim.hashes[where.blocks - where.miss]
            claim.sealing = self.stores.sealing(first)
            if claim.sealing is not None:
                return
            if not self.host.pool.holds([first])[0]:
                break
            where, places = self._lookup(claim.hashes, claim.num_l1, avoid=claim.avoid)  # published in between
        known = where.blocks - where.miss
        if where.miss and known >= claim.asked_until and any(port.is_shared for port in self.ports):
            claim.questions = self.locator.ask(claim.hashes[known:], claim.avoid)
            if claim.questions:
                claim.asked_until = known + max(len(question.hashes) for question in claim.questions)
                return
        claim.found = where
        claim.why = partial(causes_of, self._eviction_logs, claim.hashes[known:]) if where.miss else None
        claim.behind = self._children
        if claim.asked_until:
            claim.good_until = time.monotonic() + _ASK_AGAIN
        if num_loadable := where.loadable:
            self._promote(claim, where, places, num_loadable)

    def _trace_questions(self, claim: LocalClaim, trace: tracing.Trace) -> None:
        for question in claim.questions:
            name, began = question.port.name, question.deadline - question.port.settings.deadline
            trace.record(f"query {name}", began, {"blocks": len(question.hashes), "blocks.held": question.num_held})

    def _looks_elsewhere(self, claim: LocalClaim) -> bool:
        """Look a settled claim up once more, without the tier that failed, if another one may have its next block."""
        failed, claim.failed = claim.failed, None
        is_plain = claim.avoid is None and claim.split is None and claim.overlap is not Overlap.BACK
        if not is_plain or claim.end == len(claim.run) or self._clock() >= claim.deadline:
            return False
        first = claim.run[claim.end : claim.end + 1]
        if not any(port is not failed and (port.locates or port.lookup(first)) for port in self.ports):
            return False
        self.promoter.cancel(claim)
        claim.avoid, claim.run, claim.leases, claim.found, claim.asked_until = failed, (), (), None, 0
        claim.done = claim.is_reported = False
        self._look(claim)
        return True

    def _children(self, claim: Claim, start: bytes) -> Sequence[ChildBlock]:
        """Up to eight distinct blocks that follow the last one found and begin with these tokens, but not the next."""
        assert claim.found is not None
        known = claim.found.blocks - claim.found.miss
        parent = claim.hashes[known - 1] if known else claim.parent
        found = self.host.children(parent, MAX_CHILDREN, start)
        for port in self.ports:
            if len(found) < MAX_CHILDREN and (tier := port.readable()) is not None:
                found += tier.children(parent, MAX_CHILDREN, start)
        if not found:
            return ()
        by_name = dict(found)
        for chain_hash in claim.hashes[known : known + 1]:
            by_name.pop(chain_hash, None)  # stored by now
        return [ChildBlock(*child) for child in by_name.items()][:MAX_CHILDREN]

    def _promote(self, claim: LocalClaim, where: Attribution, places: list[int], num_blocks: int) -> None:
        """Load the blocks beyond `num_l1`.

        If computing those below L2, or computing some while the rest is loaded, is faster, claim only those in L2. A
        claim waits for slots that other requests use no longer than computing would take.
        """
        block_bytes = self.host.region.slot_bytes
        below_l2 = {port.name: where.by_tier.get(port.name, 0) * block_bytes for port in self.ports}
        num_in_l2, first, size = len(places), claim.num_l1, claim.block_size
        num_sure = 0 if claim.overlap is Overlap.WHOLE else num_in_l2  # loaded in any case
        span = Span((first + num_sure) * size, (num_blocks - num_sure) * size, below_l2)
        if claim.overlap is Overlap.ALLOWED and span.num_tokens >= MIN_FRONT:
            claim.split = self.rates.split_point(span, size)
        if claim.split is not None:
            claim.behind = None
            if not num_in_l2:
                return
            num_blocks = num_in_l2
        elif size and claim.overlap is not Overlap.BACK and not self.rates.worth_loading(span):
            if self.rates.policy == "recompute":
                num_sure = 0
            self.metrics.missed(Outcome.RECOMPUTE, num_blocks - num_sure)
            if not num_sure:
                claim.refusal = Outcome.RECOMPUTE
                return
            num_blocks, below_l2 = num_sure, {}
        parent = claim.hashes[first - 1] if first else claim.parent
        run = claim.hashes if num_blocks == len(claim.hashes) else claim.hashes[first : first + num_blocks]
        deadline, patience = self.settings.prefetch_deadline, 0.0
        if claim.split is None and claim.overlap is not Overlap.BACK:  # nothing is computed meanwhile
            whole = Span(first * size, num_blocks * size, below_l2)
            patience = min(deadline, self.rates.spared(whole)) if size else deadline
        below = [(port, num_below) for port in self.ports if (num_below := where.by_tier.get(port.name, 0))]
        source = below[0] if len(below) == 1 and below[0][1] == num_blocks - num_in_l2 else None
        self.promoter.start(claim, run, parent, places, source, (deadline, patience))
        if claim.refusal is not None:
            claim.split = None

    def _show_pools(self) -> None:
        pool = self.host.pool
        for eviction_log in self._eviction_logs:
            if len(eviction_log.came_at):  # else it has no ages
                self.metrics.ages(eviction_log.tier, eviction_log.ages.tolist())
        counts = pool.counts()
        for state in ("free", "filling", "ready", "leased", "quarantined", "dirty", "tails"):
            self.metrics.pool(L2, state, getattr(counts, state))
        rooms = [port.room() for port in self.ports]
        with self._lock:
            self.metrics.evicted(L2, pool.num_evicted)
            dropped, self._num_dirty_dropped = pool.num_dirty_dropped - self._num_dirty_dropped, pool.num_dirty_dropped
            is_ours = dropped and self.settings.write_policy == "write_back"  # else the demoters' backlogs count them
            for port, room in zip(self.ports, rooms, strict=True):
                if is_ours and port.settings.takes_stores:
                    self.metrics.dropped(port.name, Outcome.EVICTED, dropped)
                tier = port.tier  # a probe may detach it meanwhile
                stats = tier.stats() if tier is not None else {}
                self.metrics.evicted(port.name, stats.get("evicted", 0))
                for key, count in stats.items():
                    if key.startswith("slots_"):
                        self.metrics.pool(port.name, key.removeprefix("slots_"), count)
                    elif key.startswith(("requests_", "bytes_", "saved_")):
                        self.metrics.paid(port.name, key, count)
                self.metrics.room(port.name, room)


@lru_cache(maxsize=4096)
def _all_in_l2(num_blocks: int, num_l1: int) -> Attribution:
    return Attribution(num_blocks, l1=num_l1, l2=num_blocks - num_l1)


def evict_everywhere(hierarchy: Hierarchy, hashes: Sequence[ChainHash], timeout: float) -> dict[str, int]:
    """Drop these blocks, and partial blocks after them, from every tier below L1; returns how many blocks, by tier.

    Waits up to `timeout` seconds for writes under way, which could restore them. Does I/O: not for a serving thread. A
    leased block keeps its slot until its leases end, but lookups no longer find it.
    """
    pool, deadline = hierarchy.host.pool, time.monotonic() + timeout
    hierarchy.drain(timeout, below=False)
    partial_blocks = [each.chain_hash for each in hierarchy.host.partial_behind(hashes)]
    gone = {L2: pool.evict(hashes)}
    pool.evict(partial_blocks)
    for port in hierarchy.ports:
        port.queue.drain(max(0.0, deadline - time.monotonic()))  # writes under way still have leases on their blocks
        tier = port.tier  # a probe may detach it meanwhile
        if tier is not None:
            removed = [name for name, is_held in zip(hashes, tier.holds(hashes), strict=True) if is_held]
            gone[port.name] = len(removed)
            tier.discard(hashes)
            if port.is_shared:  # other tiers log it themselves
                port.not_stored(removed, REMOVED)
    pool.evict(hashes)  # blocks that were loaded meanwhile from a tier
    return gone


@dataclass(frozen=True, slots=True)
class HeldRun:
    """Consecutive blocks of one chain; `parent` names the block before the first, stored or not."""

    parent: ChainHash
    hashes: list[ChainHash]


def held_runs(hierarchy: Hierarchy) -> list[HeldRun]:
    """Every block of L2 and of the tiers that list theirs, once, as maximal runs, each after the run it branches off.

    No I/O, but it visits every block: not for a serving thread. Blocks may be added or evicted meanwhile.
    """
    return in_runs(dict(pair for each in lineages(hierarchy, partial=False).values() for pair in each.pairs()))


def lineages(hierarchy: Hierarchy, *, partial: bool = True) -> dict[str, Lineage]:
    """The blocks of L2 and of each tier that lists its own, by tier name, as arrays. No I/O."""
    found = {L2: hierarchy.host.lineage(partial=partial)}
    for port in hierarchy.ports:
        tier = port.tier  # a probe may detach it meanwhile
        if tier is not None and (lineage := tier.lineage()) is not None:
            found[port.name] = lineage
    return found


def in_runs(parents: Mapping[ChainHash, ChainHash]) -> list[HeldRun]:
    """Blocks, given as name → parent, as runs, parents first."""
    children: dict[ChainHash, list[ChainHash]] = {}
    for name, parent in parents.items():
        children.setdefault(parent, []).append(name)
    runs: list[HeldRun] = []
    starts = [name for name, parent in parents.items() if parent not in parents][::-1]
    while starts:
        run = [starts.pop()]
        while branches := children.get(run[-1]):
            starts += branches[:0:-1]
            run.append(branches[0])
        runs.append(HeldRun(parents[run[0]], run))
    return runs


@dataclass(frozen=True, slots=True)
class Stored:
    """Consecutive blocks became findable in a tier; each is the parent of the next."""

    tier: str  # its name in the table of tiers
    blocks: tuple[BlockRecord, ...]


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks left a tier. `all`: they are everything reported as stored there; it was reset, or became unavailable."""

    tier: str
    hashes: tuple[ChainHash, ...]
    all: bool = False


Event = Stored | Removed


class EventSource:
    """Changes in a hierarchy's tiers, for one reader. The tiers keep no log before it is made.

    Law: a reader that applied every event up to an empty `take` knows exactly what each tier `holds`, if nothing is
    under way. No block is stored twice, and none is removed that was not stored. A tier that fails is emptied by an
    event once it is closed, not while its breaker is open. Tiers are not synchronised: a block may leave one tier
    before the event that the next has it.
    """

    def __init__(self, hierarchy: Hierarchy) -> None:
        """Visits every block: with a large slab, not on a thread that serves requests."""
        self._hierarchy = hierarchy
        self._host = hierarchy.host
        self._ports = [TierEvents(port.name, partial(_change_feed, port)) for port in hierarchy.ports]
        self._host.pool.listen()

    @property
    def waiting(self) -> bool:
        """Whether `take` may return events."""
        return self._host.pool.has_changes or any(port.waiting for port in self._ports)

    @property
    def coming(self) -> bool:
        """Whether stores or reads are under way, so that events will follow."""
        queues = [port.queue for port in self._hierarchy.ports]
        return not all((self._hierarchy.drain(0, below=False), *(queue.idle for queue in queues)))

    def take(self, limit: int = MOST) -> list[Event]:
        """Events since the last call; at most `limit` new blocks per tier, the others with the next call."""
        events = list(events_of(L2, self._host.pool.changes(self._host.records, limit)))
        for port in self._ports:
            events += port.take(limit)
        return events


class TierEvents:
    """Changes in one tier, which may be closed and reopened. As `EventSource`, for one reader."""

    def __init__(self, tier: str, feed: Callable[[], ChangeFeed | None]) -> None:
        """`feed`: the tier's now; None: it is closed, or tells nothing."""
        self._tier, self._feed, self._followed = tier, feed, feed()
        if self._followed is not None:
            self._followed.listen()

    @property
    def waiting(self) -> bool:
        feed = self._feed()
        return feed is not self._followed or (feed is not None and feed.waiting)

    def take(self, limit: int = MOST) -> list[Event]:
        """Events since the last call; at most `limit` new blocks, the others with the next call."""
        feed, events = self._feed(), list[Event]()
        if feed is not self._followed:
            known = self._followed.stop_listening() if self._followed is not None else []
            if known:
                events.append(Removed(self._tier, tuple(known), all=True))
            self._followed = feed
            if feed is not None:
                feed.listen()
        return events if feed is None else [*events, *events_of(self._tier, feed.take(limit))]


def _change_feed(port: TierPort) -> ChangeFeed | None:
    tier = port.tier  # a probe may detach it meanwhile
    return None if tier is None else tier.change_feed


def events_of(tier: str, changes: Changes) -> Iterator[Event]:
    """A tier's changes as events: removals first, then runs in which each block is the next one's parent."""
    if changes.gone:
        yield Removed(tier, tuple(changes.gone), changes.cleared)
    run: list[BlockRecord] = []
    for record in changes.stored:
        if run and record.parent != run[-1].chain_hash:
            yield Stored(tier, tuple(run))
            run = []
        run.append(record)
    if run:
        yield Stored(tier, tuple(run))
