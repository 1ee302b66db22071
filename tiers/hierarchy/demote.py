"""Demotion: sealed L2 blocks on their way to a lower tier, behind a bounded queue; never blocks an engine."""

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from threading import Lock
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvtier.tiers import BATCH_BYTES, L2, ChainHash, Metrics, Outcome
from kvtier.tiers.hierarchy.io_queue import Job
from kvtier.tiers.hierarchy.lower_tier import HierarchySettings, TierPort
from kvtier.tiers.host import HostTier
from kvtier.tiers.pool import NUM_AGES, EvictionLog, Lease, eviction_reason
from kvtier.tiers.reuse import EDGES

_log = logging.getLogger(__name__)

_BEHIND: Final = 0.75  # of the store queue is full: the tier falls behind
_CALM: Final = 0.25  # below this it has caught up
_SHORTEST: Final = 10.0  # seconds since it last was behind, before every block is accepted again
_LONGEST: Final = 160.0  # each relapse soon after the previous one doubles that time, up to this
_LOOK: Final = 30.0  # seconds between two measurements of how long blocks live
_FEWEST: Final = 16  # evictions, and returns, needed for an estimate
_MAX_FAILED: Final = 65_536  # remembered blocks that failed or were not admitted; their descendants are refused
# Outcomes of a write that may succeed later, as long as L2 has the block.
_PASSING: Final = frozenset(
    {Outcome.IO_ERROR, Outcome.TIMEOUT, Outcome.FULL, Outcome.BREAKER_OPEN, Outcome.PARENT_FAILED}
)
_FORGOTTEN: Final = frozenset({Outcome.OK, Outcome.EPOCH})  # outcomes that need not be remembered
_MAX_SWEPT: Final = 1024  # blocks queued from a backlog at once: some milliseconds
SOONEST: Final = 0.1  # seconds before what failed is tried again: another node may need it
_LONGEST_PAUSE: Final = 60.0  # seconds between two retries after repeated failures
_LOG_EVERY: Final = 60.0  # seconds between two warnings about blocks that L2 evicted before they were written
_LOST: Final = (
    "%s: %d blocks left host memory before they were written: they come faster than it stores. A larger [host] size "
    'keeps more until it has caught up; [cache] admit_after = "auto" writes less meanwhile'
)
_NOT_WRITTEN: Final = "%s: %d blocks of host memory were not written before the end: %s"
_TOO_LATE: Final = "a longer time to close writes more"
_AWAY: Final = "it does not answer; a longer time to close waits longer for it"
_REFUSED: Final = "it fails to store them; kvtier_store_dropped_total has the reasons"
_LOST_WHILE_OFF: Final = "%s is off for now: %d blocks left host memory unwritten. A larger [host] size keeps more"
BlocksEnded = Callable[[Sequence[ChainHash], Sequence[Outcome]], None]


class Demoter:
    """Copies blocks one tier down. One per lower tier. Thread-safe.

    At most `store_queue` bytes wait here (and a quarter of L2, since queued blocks are leased). A block that finds the
    queue full enters the backlog, unleased, as long as L2 has it; the oldest are queued once the queue is half empty.
    The descendants of a failed block fail, too (`PARENT_FAILED`), as they could not be reached. Failed blocks have a
    backlog of their own, which is retried later, at first one batch. With `admit_after = "auto"` a tier that falls
    behind is offered only blocks that were seen before.
    Lock: `_lock` guards the counter, the failed set and the pacing; never held across I/O or another lock.
    """

    def __init__(
        self,
        port: TierPort,
        host: HostTier,
        settings: HierarchySettings,
        metrics: Metrics,
        clock: Callable[[], float],
        look_again: Callable[[float], None],
    ) -> None:
        """`look_again` schedules `sweep_soon` in so many seconds, also while no request uses the tiers."""
        self.port = port
        self.host = host
        self.clock = clock
        self.metrics = metrics
        self._lock = Lock()
        self._max_blocks = max(1, host.pool.num_slots // 4)
        if settings.store_queue is not None:
            self._max_blocks = max(1, min(self._max_blocks, settings.store_queue // host.region.slot_bytes))
        self._batch = max(1, BATCH_BYTES // host.region.slot_bytes)
        self.num_waiting = 0  # blocks queued or being written
        self.num_written = 0
        self.failed: OrderedDict[ChainHash, bool] = OrderedDict()  # whether it may succeed later
        self._line = host.pool.backlog()  # blocks that found the queue full
        self._again = host.pool.backlog()  # blocks that failed; already counted as dropped
        self._is_sweeping = False
        self._look_again = look_again
        self._pause = SOONEST  # seconds before `_again` is retried,
        self._again_at = -math.inf  # when that is,
        self._num_again = self._batch  # and with how many blocks
        self._num_lost = 0  # blocks to report in the next warning
        self._warned_at = -math.inf
        self._is_through = settings.write_policy == "write_through"
        self._admission: TierAdmission | None = None
        if self._is_through and settings.admit_after == "auto":
            self._admission = TierAdmission(port.name, self._eviction_logs, host.pool.return_gaps, metrics, clock)
        port.recovered = self._recovered
        metrics.before_read(self._show)

    @property
    def num_in_line(self) -> int:
        """Blocks in the two backlogs, including some that L2 evicted and that are not counted yet."""
        return len(self._line) + len(self._again)

    @property
    def due_in(self) -> float:
        """Seconds until failed blocks are due again; inf: there are none, or a probe comes first."""
        return self._again_at - self.clock() if len(self._again) and self.port.writable else math.inf

    def pass_down(self, hashes: Sequence[ChainHash]) -> Sequence[ChainHash]:
        """Write consecutive blocks that were just sealed; returns those that L2 is to retain.

        Those found the queue full and entered the backlog. L2 seals a block only once: failed ancestors are written
        with their children.
        """
        if not hashes:
            return ()
        epoch = self.port.epoch  # before the leases: the leased blocks were stored in this epoch or a later one
        ancestors = self._failed_ancestors(hashes[0]) if self.failed else []
        if self._admission is not None:
            hashes = self._admitted(hashes, self._admission)
        if ancestors:
            hashes = [*ancestors, *hashes]
        taken = 0 if self._line.is_used and len(self._line) else self._take_room(len(hashes))
        self._submit(hashes[:taken], epoch)
        refused = hashes[taken:]
        if not refused:
            return ()
        if len(self._again):
            self._again.remove(refused)
        self._line.add(refused)
        self.port.not_stored(refused, Outcome.QUEUE_FULL)
        if self._admission is not None:
            self._admission.is_selective(1.0, refused=True)
        self.sweep_soon()
        return refused if self.port.writable else ()

    def offer(self, hashes: Sequence[ChainHash], ended: BlocksEnded) -> int:
        """Queue consecutive blocks for writing; returns how many leading ones were accepted.

        `ended` is called, on an I/O thread, with the outcome of every accepted block. The caller retries the others.
        """
        epoch = self.port.epoch
        taken = self._take_room(len(hashes))
        if taken < len(hashes):
            with self._lock:
                self._remember_failed(dict.fromkeys(hashes[taken:], True))
        self._submit(hashes[:taken], epoch, ended)
        return taken

    def owe(self, hashes: Sequence[ChainHash]) -> None:
        """Put blocks into the backlog that another tier has and this one lacks."""
        self._line.add(hashes)
        if not self.num_waiting:  # else some of them may be in the queue
            self.sweep_soon()

    def settle(self, job: "_WriteJob", outcomes: Sequence[Outcome]) -> None:
        """A write has ended, or the port's queue refused it."""
        hashes = job.hashes
        good = [h for h, outcome in zip(hashes, outcomes, strict=True) if outcome is Outcome.OK]
        again = [h for h, outcome in zip(hashes, outcomes, strict=True) if outcome in _PASSING]
        with self._lock:
            self.num_waiting -= len(hashes)
            self.num_written += len(good)
            for chain_hash in good:
                self.failed.pop(chain_hash, None)
            if len(good) < len(hashes):
                self._remember_failed(
                    {
                        h: o is not Outcome.UNSUPPORTED
                        for h, o in zip(hashes, outcomes, strict=True)
                        if o not in _FORGOTTEN
                    }
                )
            if again or job.is_repeated:
                self._pace(job, has_failed=bool(again))
        self.metrics.stored(self.port.name, len(good))
        for outcome in set(outcomes) - {Outcome.OK}:
            lost = [h for h, each in zip(hashes, outcomes, strict=True) if each is outcome]
            self._not_written(lost, outcome, is_repeated=job.is_repeated)
        if corrupt := [h for h, outcome in zip(hashes, outcomes, strict=True) if outcome is Outcome.CHECKSUM]:
            self.host.pool.evict(corrupt, Outcome.CHECKSUM)
        if job.ended is not None:
            self._line.remove(good)
            job.ended(hashes, outcomes)
        elif again or self.host.pool.has_dirty:
            self._keep_in_line(good, again)
        if again:
            self._look_again(self._pause)
        if self._line.is_used or self._again.is_used:
            self.sweep_soon()

    # the backlog

    def sweep_soon(self, *, at_once: bool = False) -> None:
        """Queue the backlog on an I/O thread, if the queue is at most half full. Cheap.

        Failed blocks wait before they are retried, unless `at_once`.
        """
        if at_once:
            self._again_at = -math.inf
        if not self.port.writable:  # `recovered` follows
            return
        if not (len(self._line) or (len(self._again) and self.clock() >= self._again_at)):
            return
        with self._lock:
            if self._is_sweeping or self.num_waiting > self._max_blocks // 2:
                return
            self._is_sweeping = True
        if not self.port.queue.submit(_SweepJob(self)):
            self._is_sweeping = False

    def sweep(self) -> None:
        """Queue the backlog, oldest first, as far as there is room; runs on an I/O thread."""
        epoch = self.port.epoch
        with self._lock:
            room = min(self._max_blocks - self.num_waiting, _MAX_SWEPT)
        if len(self._again) and self.clock() >= self._again_at:  # these are older
            room -= self._sweep(*self._again.take(min(room, self._num_again)), epoch, is_repeated=True)
        if room > 0:
            self._sweep(*self._line.take(room), epoch, is_repeated=False)
        self._note_lost()

    def swept(self) -> None:
        """A sweep has ended: start another for what was added meanwhile."""
        self._is_sweeping = False
        self.sweep_soon()

    def close(self, num_dirty: int) -> None:
        """The tier was closed: count the backlog and dirty blocks as dropped, and log one warning."""
        is_away = not self.port.breakers["write"].closed
        self._note_lost(look=True)
        if num_left := len(self._line) + num_dirty:
            self.metrics.dropped(self.port.name, Outcome.CLOSED, num_left)
        if num_left + len(self._again):
            why = _TOO_LATE if not (is_away or len(self._again)) else _AWAY if is_away else _REFUSED
            _log.warning(_NOT_WRITTEN, self.port.name, num_left + len(self._again), why)

    def _sweep(self, names: list[ChainHash], slots: list[int], epoch: int, *, is_repeated: bool) -> int:
        """Queue these blocks, chain by chain; returns how many were queued."""
        parents = [self.host.parent_in(slot, name) for name, slot in zip(names, slots, strict=True)]
        num_queued = 0
        for run, parent in _runs(names, parents):
            chain = run
            if parent is not None and self.failed and self.has_failed(parent):
                with self._lock:
                    self._remember_failed(dict.fromkeys(run, True))
                if not is_repeated:  # it is retried with its parent
                    self._not_written(run, Outcome.PARENT_FAILED)
                    self._again.add(run)
                    continue
                chain = [*self._failed_ancestors(run[0]), *run]
                if self.has_failed(self.host.parent_of(chain[0]) or b""):  # L2 evicted it, or it cannot succeed
                    continue
            with self._lock:
                self.num_waiting += len(chain)
            self._submit(chain, epoch, is_repeated=is_repeated)
            num_queued += len(chain)
        return num_queued

    def _not_written(self, hashes: Sequence[ChainHash], reason: Outcome, *, is_repeated: bool = False) -> None:
        """Count blocks that were not written, except retried ones: those were counted at their first failure."""
        if not (is_repeated and reason in _PASSING):
            self.metrics.dropped(self.port.name, reason, len(hashes))
        self.port.not_stored(hashes, reason)

    def _keep_in_line(self, good: Sequence[ChainHash], again: Sequence[ChainHash]) -> None:
        """L2 retains these: `good` are written now, `again` will be when the tier recovers."""
        if good and self.host.pool.has_dirty:
            self.host.pool.mark_clean(good)
        if again:
            self._again.add(again)
        if again and self._is_through and self.host.pool.has_dirty and not self.port.writable:
            self.host.pool.mark_all_clean()  # the tier accepts no writes: retaining these would evict other blocks

    def _pace(self, job: "_WriteJob", *, has_failed: bool) -> None:
        """Under the lock: set when the failed blocks are retried, and how many."""
        if has_failed:
            self._pause = min(2 * self._pause, _LONGEST_PAUSE) if job.is_repeated else SOONEST
            self._again_at = self.clock() + self._pause
            self._num_again = self._batch
        elif job.is_repeated:
            self._pause, self._again_at = SOONEST, -math.inf
            self._num_again = min(2 * self._num_again, self._max_blocks)

    def _recovered(self, *, is_fresh: bool) -> None:
        """The tier's probe succeeded. A reopened tier may lack blocks it had: queue those that L2 has."""
        if is_fresh and self._is_through and self._admission is None:
            pool, records = self.host.pool, self.host.records
            whole = sorted(set(pool.ready_slots().tolist()) - set(pool.partial))
            names = [record.chain_hash for slot in whole if (record := records[slot]) is not None]
            self._line.add([name for name, is_held in zip(names, self.port.holds(names), strict=True) if not is_held])
        if self._pause <= self.port.settings.retry_after:  # else the blocks themselves are the cause
            self._again_at = -math.inf
        self.sweep_soon()
        if len(self._again):
            self._look_again(max(SOONEST, self._again_at - self.clock()))

    def _note_lost(self, *, look: bool = False) -> None:
        """Count the blocks that L2 evicted while they were in the backlog, and warn once a minute."""
        lost = self._line.take_lost(look=look)
        self._again.take_lost(look=look)  # counted when they failed
        if lost:
            self.metrics.dropped(self.port.name, Outcome.EVICTED, lost)
        with self._lock:
            self._num_lost += lost
            if not self._num_lost or self.clock() - self._warned_at < _LOG_EVERY:
                return
            lost, self._num_lost, self._warned_at = self._num_lost, 0, self.clock()
        _log.warning(_LOST if self.port.writable else _LOST_WHILE_OFF, self.port.name, lost)

    # the queue

    def _take_room(self, num_blocks: int) -> int:
        """Reserve room in the queue; returns how many of so many blocks fit. They count as waiting from now on."""
        with self._lock:
            taken = max(0, min(num_blocks, self._max_blocks - self.num_waiting))
            self.num_waiting += taken
            return taken

    def _submit(
        self, hashes: Sequence[ChainHash], epoch: int, ended: BlocksEnded | None = None, *, is_repeated: bool = False
    ) -> None:
        """Queue blocks that already count as waiting, one job per batch."""
        if self.failed:
            with self._lock:
                for chain_hash in hashes:  # they are retried
                    self.failed.pop(chain_hash, None)
            self._line.remove(hashes)  # ancestors among them
            self._again.remove(hashes)
        for first in range(0, len(hashes), self._batch):
            batch = list(hashes[first : first + self._batch])
            job = _WriteJob(self, batch, self.host.pool.lease(batch), epoch, ended, is_repeated)
            if not self.port.queue.submit(job):
                job.refuse()

    def refuse(self, job: "_WriteJob") -> None:
        """The port's queue is full or closed: treat the job as if there were no room."""
        if job.ended is not None:
            self.settle(job, [Outcome.QUEUE_FULL] * len(job.hashes))
            return
        with self._lock:
            self.num_waiting -= len(job.hashes)
        (self._again if job.is_repeated else self._line).add(job.hashes)

    def _admitted(self, hashes: Sequence[ChainHash], admission: "TierAdmission") -> Sequence[ChainHash]:
        """The leading blocks of a chain just sealed to write now; the others are counted as dropped.

        Those are offered when a later block continues them, or when they are sealed again: they then count as seen.
        """
        if not admission.is_selective(self._filling()):
            return hashes
        num_seen = admission.num_seen(hashes)
        if refused := hashes[num_seen:]:
            with self._lock:
                self._remember_failed(dict.fromkeys(refused, True))
            self._not_written(refused, Outcome.NOT_ADMITTED)
        return hashes[:num_seen]

    def _filling(self) -> float:
        return (self.num_waiting + len(self._line)) / self._max_blocks

    def _eviction_logs(self) -> list[EvictionLog]:
        return [each for each in (self.host.pool.eviction_log, self.port.eviction_log) if each is not None]

    def _show(self) -> None:
        self._note_lost(look=True)
        self.metrics.waiting(self.port.name, self.num_waiting + self.num_in_line)
        if self._admission is not None:
            self._admission.is_selective(self._filling())

    def _remember_failed(self, hashes: Mapping[ChainHash, bool]) -> None:
        self.failed.update(hashes)
        while len(self.failed) > _MAX_FAILED:
            self.failed.popitem(last=False)

    def _failed_ancestors(self, chain_hash: ChainHash) -> list[ChainHash]:
        """Its ancestors that failed and may be retried, if L2 has them: without them it could not be reached."""
        found: list[ChainHash] = []
        parent = self.host.parent_of(chain_hash) if self.port.writable else None
        while parent is not None and self.failed.get(parent):
            grandparent = self.host.parent_of(parent)
            if grandparent is None:  # L2 evicted it
                break
            found.append(parent)
            parent = grandparent
        return found[::-1]

    def has_failed(self, parent: ChainHash) -> bool:
        with self._lock:
            return parent in self.failed


def _runs(
    names: Sequence[ChainHash], parents: Sequence[ChainHash | None]
) -> list[tuple[list[ChainHash], ChainHash | None]]:
    """Blocks as runs of consecutive ones, each with its parent; interleaved chains are separated."""
    runs: dict[ChainHash, tuple[list[ChainHash], ChainHash | None]] = {}  # key: the run's last block
    for name, parent in zip(names, parents, strict=True):
        run = runs.pop(parent, None) if parent is not None else None
        runs[name] = run or ([], parent)
        runs[name][0].append(name)
    return list(runs.values())


@dataclass(eq=False, slots=True)
class _WriteJob:
    """One batch of consecutive blocks, leased in L2 until the write has ended. Implements `Job`."""

    demoter: Demoter
    hashes: list[ChainHash]
    lease: Lease
    epoch: int  # the port's when they were offered
    ended: BlocksEnded | None
    is_repeated: bool  # they failed before
    deadline: float = math.inf  # none while queued; `run` sets it

    def run(self) -> list[Outcome]:
        """Re-hash, compare with the checksums taken at seal, and write. Runs on an I/O thread."""
        demoter, slots = self.demoter, self.lease.slots
        host, port = demoter.host, demoter.port
        self.deadline = demoter.clock() + port.settings.deadline
        # The lease is shorter than requested if an eviction or a reset came first.
        gone = [Outcome.EVICTED] * (len(self.hashes) - len(slots))
        if not slots:
            return gone
        if self.epoch != port.epoch:
            return [Outcome.EPOCH] * len(slots) + gone
        if not port.writable:
            return [Outcome.BREAKER_OPEN] * len(slots) + gone
        records = [record for slot in slots if (record := host.records[slot]) is not None]
        if demoter.failed and demoter.has_failed(records[0].parent):
            return [Outcome.PARENT_FAILED] * len(slots) + gone
        same = [found == r.checksum for found, r in zip(host.region.checksums(slots), records, strict=True)]
        whole = same.index(False) if False in same else len(same)
        payloads = [host.region.slot(slot) for slot in slots[:whole]]
        outcomes = port.write(records[:whole], payloads, self.epoch) if whole else []
        if whole < len(same):
            demoter.metrics.corrupted(L2, 1)
            outcomes += [Outcome.CHECKSUM] + [Outcome.PARENT_FAILED] * (len(same) - whole - 1)
        return outcomes + gone

    def end(self, result: list[Outcome] | Outcome, *, late: bool) -> None:
        self.lease.release()
        self.demoter.settle(self, [result] * len(self.hashes) if isinstance(result, Outcome) else result)

    def refuse(self) -> None:
        """The port's queue refused it."""
        self.lease.release()
        self.demoter.refuse(self)

    def overdue(self) -> None:
        self.demoter.port.failed("write")  # the lease stays: the write still reads its slots


@dataclass(eq=False, slots=True)
class _SweepJob(Job):
    """Queues the backlog."""

    demoter: Demoter
    deadline: float = math.inf

    def run(self) -> None:
        self.demoter.sweep()

    def end(self, result: Outcome | None, *, late: bool) -> None:
        self.demoter.swept()


class Why(StrEnum):
    """Why a tier accepts only blocks that were seen before."""

    QUEUE = "queue"  # it writes more slowly than blocks are sealed
    RESIDENCE = "residence"  # blocks are evicted there before half of all requests would have returned


class TierAdmission:
    """One tier's admission. Thread-safe; no I/O, and no state per block: the eviction logs have that."""

    def __init__(
        self,
        tier: str,
        eviction_log: Callable[[], Sequence[EvictionLog]],
        gaps: Callable[[], NDArray[np.float64] | None],
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        """`eviction_log`: eviction logs of L2 and the tier, the tier's last. `gaps`: returns by age (`return_gaps`)."""
        self._tier = tier
        self._eviction_logs = eviction_log
        self._gaps = gaps
        self.metrics = metrics
        self._clock = clock
        self._lock = Lock()
        self._reasons: set[Why] = set()
        self._behind_at = self._left_at = self._looked_at = -np.inf
        self._stay = _SHORTEST
        self._ages = np.zeros(NUM_AGES, np.int64)  # of evictions, at the last usable measurement,
        self._measured_at = 0.0  # and its time
        self._show()

    def is_selective(self, filling: float, *, refused: bool = False) -> bool:
        """Whether to store only blocks that were seen before.

        `filling`: the used fraction of the store queue. `refused`: it had no room for a block.
        """
        now = self._clock()
        with self._lock:
            reasons = {Why.QUEUE} if self._is_behind(filling, now, refused) else set()
            if self._is_short_lived(now):
                reasons.add(Why.RESIDENCE)
            if reasons != self._reasons:
                self._reasons = reasons
                self._show()
            return bool(reasons)

    def num_seen(self, hashes: Sequence[ChainHash]) -> int:
        """How many leading blocks were seen before: evicted from a tier, or dropped before they were stored in one."""
        eviction_log = self._eviction_logs()
        for count, name in enumerate(hashes):
            if not eviction_reason(eviction_log, name).tier:
                return count
        return len(hashes)

    def _is_behind(self, filling: float, now: float, refused: bool) -> bool:
        was_behind = Why.QUEUE in self._reasons
        if refused or filling >= (_CALM if was_behind else _BEHIND):
            if not was_behind:
                follows = now - self._left_at < self._stay
                self._stay = min(2 * self._stay, _LONGEST) if follows else _SHORTEST
            self._behind_at = now
            return True
        if was_behind and now - self._behind_at >= self._stay:
            self._left_at = now
            return False
        return was_behind

    def _is_short_lived(self, now: float) -> bool:
        """Whether blocks live shorter than the median request takes to return. Ends once they live twice as long."""
        was_short = Why.RESIDENCE in self._reasons
        eviction_log = self._eviction_logs()
        if now - self._looked_at < _LOOK or not eviction_log or eviction_log[-1].tier != self._tier:
            return was_short
        self._looked_at = now
        ages, gaps = eviction_log[-1].ages[:NUM_AGES].copy(), self._gaps()
        evicted = ages - self._ages
        if gaps is None or gaps.sum() < _FEWEST:
            return was_short
        gap = float(EDGES[_median(gaps)]) + 1.0
        if evicted.sum() < _FEWEST:  # the tier evicts little: its blocks have lived at least this long
            return was_short and now - self._measured_at < 2.0 * gap
        self._ages, self._measured_at = ages, now
        residence = 2.0 ** (_median(evicted) - 0.5)  # a bucket's middle: each is up to twice the one before
        return bool(residence < (2.0 if was_short else 1.0) * gap)

    def _show(self) -> None:
        for why in Why:
            self.metrics.selective(self._tier, why, why in self._reasons)


def _median(counts: NDArray[np.int64] | NDArray[np.float64]) -> int:
    """The bin of the median sample."""
    return int(np.searchsorted(np.cumsum(counts), counts.sum() / 2))
