"""Demotion: sealed L2 blocks on their way to a lower tier, behind a bounded queue, never in an engine's way."""

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Final

from kvtier.tiers import BATCH_BYTES, L2, ChainHash, Metrics, Outcome, checksum
from kvtier.tiers.hierarchy.admission import TierAdmission
from kvtier.tiers.hierarchy.lower_tier import TierPort
from kvtier.tiers.host import HostTier
from kvtier.tiers.pool import Departures, Lease

_MAX_FAILED: Final = 65_536  # remembered blocks that failed or were not admitted; their descendants are refused

BlocksEnded = Callable[[Sequence[ChainHash], Sequence[Outcome]], None]


class Demoter:
    """Copies blocks one tier down. One per lower tier. Thread-safe.

    At most `max_bytes` wait here (and a quarter of L2, since what waits is leased); past that the newest tail is
    refused (`QUEUE_FULL`), never the head. A block that fails or is refused takes its descendants with it
    (`PARENT_FAILED`): without their parent nobody could reach them. With a `TierAdmission` new blocks may be left out.
    Lock: `_lock` guards the counter and the failed set; never held across I/O or another lock.
    """

    def __init__(
        self,
        port: TierPort,
        host: HostTier,
        max_bytes: int,
        metrics: Metrics,
        clock: Callable[[], float],
        *,
        is_adaptive: bool = False,
    ) -> None:
        """`is_adaptive`: while the tier falls behind, it is offered only what was seen before (`admission.py`)."""
        self.port = port
        self.host = host
        self.clock = clock
        self._metrics = metrics
        self._lock = Lock()
        self._max_blocks = max(1, min(max_bytes // host.region.slot_bytes, host.pool.num_slots // 4))
        self._batch = max(1, BATCH_BYTES // host.region.slot_bytes)
        self._num_waiting = 0
        self._failed: OrderedDict[ChainHash, None] = OrderedDict()
        self._admission: TierAdmission | None = None
        if is_adaptive:
            self._admission = TierAdmission(port.name, self._departures, host.pool.return_gaps, metrics, clock)
            metrics.before_read(self._show)

    @property
    def num_waiting(self) -> int:
        """Blocks queued or being written."""
        return self._num_waiting

    def offer(self, hashes: Sequence[ChainHash], ended: BlocksEnded | None = None) -> int:
        """Queue consecutive blocks for writing; returns how many leading ones were taken.

        `ended` is told, on an I/O thread, what became of every block taken: its owner offers the others again. Without
        it the others are refused for good, and counted.
        """
        epoch = self.port.epoch  # before the leases: what they name was stored in this epoch or a later one
        if ended is None and hashes:  # L2 seals a block once: what failed is offered with its children
            ancestors = self._failed_ancestors(hashes[0]) if self._failed else []
            hashes = [*ancestors, *self._admitted(hashes)]
        with self._lock:
            taken = max(0, min(len(hashes), self._max_blocks - self._num_waiting))
            self._num_waiting += taken
            for chain_hash in hashes[:taken]:  # tried anew
                self._failed.pop(chain_hash, None)
            if taken < len(hashes):
                self._remember_failed(hashes[taken:])
        if taken < len(hashes) and ended is None:
            self._metrics.dropped(self.port.name, Outcome.QUEUE_FULL, len(hashes) - taken)
            self.port.not_stored(hashes[taken:], Outcome.QUEUE_FULL)
            if self._admission is not None:
                self._admission.is_selective(1.0, refused=True)
        for first in range(0, taken, self._batch):
            batch = list(hashes[first : min(taken, first + self._batch)])
            job = _WriteJob(self, batch, self.host.pool.lease(batch), epoch, ended)
            if not self.port.queue.submit(job):
                job.end(Outcome.QUEUE_FULL, late=False)
        return taken

    def write(self, lease: Lease, epoch: int) -> list[Outcome]:
        """Re-hash, compare with the checksum taken at seal, and write: on an I/O thread."""
        if epoch != self.port.epoch:
            return [Outcome.EPOCH] * len(lease)
        if not self.port.writable:
            return [Outcome.BREAKER_OPEN] * len(lease)
        slots = [int(slot) for slot in lease.slots]
        records = [record for slot in slots if (record := self.host.records[slot]) is not None]
        payloads = [self.host.region.slot(slot) for slot in slots]
        if self._failed and self._parent_failed(records[0].parent):
            return [Outcome.PARENT_FAILED] * len(slots)
        same = [checksum(p) == r.checksum for p, r in zip(payloads, records, strict=True)]
        whole = same.index(False) if False in same else len(same)
        outcomes = self.port.write(records[:whole], payloads[:whole], epoch) if whole else []
        if whole < len(same):
            self._metrics.corrupted(L2, 1)
            outcomes += [Outcome.CHECKSUM] + [Outcome.PARENT_FAILED] * (len(same) - whole - 1)
        return outcomes

    def settle(self, hashes: Sequence[ChainHash], outcomes: Sequence[Outcome], ended: BlocksEnded | None) -> None:
        good = [h for h, outcome in zip(hashes, outcomes, strict=True) if outcome is Outcome.OK]
        with self._lock:
            self._num_waiting -= len(hashes)
            for chain_hash in good:
                self._failed.pop(chain_hash, None)
            if len(good) < len(hashes):
                self._remember_failed(
                    [h for h, o in zip(hashes, outcomes, strict=True) if o not in (Outcome.OK, Outcome.EPOCH)]
                )
        self._metrics.stored(self.port.name, len(good))
        for outcome in set(outcomes) - {Outcome.OK}:
            lost = [h for h, each in zip(hashes, outcomes, strict=True) if each is outcome]
            self._metrics.dropped(self.port.name, outcome, len(lost))
            self.port.not_stored(lost, outcome)
        if corrupt := [h for h, outcome in zip(hashes, outcomes, strict=True) if outcome is Outcome.CHECKSUM]:
            self.host.pool.evict(corrupt, Outcome.CHECKSUM)
        if ended is not None:
            ended(hashes, outcomes)

    def _admitted(self, hashes: Sequence[ChainHash]) -> Sequence[ChainHash]:
        """The leading blocks of a chain just sealed that are to be written now; what is left out is counted.

        If somebody continues them, or they come again, they were seen twice, and are offered then.
        """
        if self._admission is None or not self._admission.is_selective(self._filling()):
            return hashes
        num_seen = self._admission.num_seen(hashes)
        if refused := hashes[num_seen:]:
            with self._lock:
                self._remember_failed(refused)
            self._metrics.dropped(self.port.name, Outcome.NOT_ADMITTED, len(refused))
            self.port.not_stored(refused, Outcome.NOT_ADMITTED)
        return hashes[:num_seen]

    def _filling(self) -> float:
        return self._num_waiting / self._max_blocks

    def _departures(self) -> list[Departures]:
        return [each for each in (self.host.pool.departures, self.port.departures) if each is not None]

    def _show(self) -> None:
        if self._admission is not None:
            self._admission.is_selective(self._filling())

    def _remember_failed(self, hashes: Sequence[ChainHash]) -> None:
        self._failed.update(dict.fromkeys(hashes))
        while len(self._failed) > _MAX_FAILED:
            self._failed.popitem(last=False)

    def _failed_ancestors(self, chain_hash: ChainHash) -> list[ChainHash]:
        """The blocks before it that failed and that L2 still holds: without them nobody could reach it."""
        found: list[ChainHash] = []
        parent = self.host.parent_of(chain_hash) if self.port.writable else None
        while parent is not None and self._parent_failed(parent):
            grandparent = self.host.parent_of(parent)
            if grandparent is None:  # L2 has lost it
                break
            found.append(parent)
            parent = grandparent
        return found[::-1]

    def _parent_failed(self, parent: ChainHash) -> bool:
        with self._lock:
            return parent in self._failed


@dataclass(eq=False, slots=True)
class _WriteJob:
    """One batch of consecutive blocks; their lease keeps them in L2 until the write has ended. Implements `Job`."""

    demoter: Demoter
    hashes: list[ChainHash]
    lease: Lease
    epoch: int  # the port's when they were offered
    ended: BlocksEnded | None
    deadline: float = math.inf  # waiting hurts nobody; `run` sets it

    def run(self) -> list[Outcome]:
        self.deadline = self.demoter.clock() + self.demoter.port.settings.deadline
        held = len(self.lease.hashes)  # shorter than asked if an eviction or a reset came before the lease
        outcomes = self.demoter.write(self.lease, self.epoch) if held else []
        return [*outcomes, *[Outcome.EVICTED] * (len(self.hashes) - held)]

    def end(self, result: list[Outcome] | Outcome, *, late: bool) -> None:
        self.lease.release()
        outcomes = [result] * len(self.hashes) if isinstance(result, Outcome) else result
        self.demoter.settle(self.hashes, outcomes, self.ended)

    def overdue(self) -> None:
        self.demoter.port.failed("write")  # the lease stays: the write still reads its slots
