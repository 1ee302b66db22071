"""Whole jobs between an engine's own host memory and the tiers below it: bounded, with deadlines, never blocking."""

import logging
import mmap
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from threading import Condition
from typing import ClassVar, Final

import numpy as np

from kvtier.tiers import BATCH_BYTES, BlockRecord, ChainHash, Direction, Metrics, Outcome, checksum
from kvtier.tiers.hierarchy import TierPort
from kvtier.tiers.host import memory

_STORE_PATIENCE: Final = 10  # how many tier deadlines a part of a store may wait in the tier's queue
_NO_PARENT: Final = bytes(32)  # not known from the engine's keys
_LOOK_AGAIN: Final = 0.02  # seconds between checks of deadlines while draining
_LOG_EVERY: Final = 60.0  # seconds between two warnings about refused stores

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EndedJob:
    """The result of a job: an outcome for each block, in the order given, and its duration."""

    job_id: int
    outcomes: list[Outcome]
    seconds: float


@dataclass(eq=False, slots=True)
class _StoreLine:
    """One request's stores in one tier: a part at a time, in the order of its tokens."""

    waiting: "deque[_StoreBatch]" = field(default_factory=deque)
    current: "_StoreBatch | None" = None  # in the tier's queue, or written
    failed: set[int] = field(default_factory=set)  # groups with a missing block: later blocks are useless


@dataclass(eq=False, slots=True)
class StoreOrder:
    """One request's stores, over all its jobs: a prefix in each tier, without a gap. Lives as long as the request."""

    lines: dict[str, _StoreLine] = field(default_factory=dict)  # by tier
    is_refused: bool = False  # one of its jobs was: later ones would leave a gap


class TierJobs:
    """Loads into and stores from memory that an engine owns, for engines that keep a host tier of their own.

    Every job ends: each part of it waits and runs up to a deadline, then counts as TIMEOUT, and the engine may reuse
    its memory. So a load is read into staging memory, verified there, and copied only while its job still runs: a read
    that hangs never writes to memory that the engine reuses. A store is written directly from the engine's memory; one
    that timed out may have written another block's bytes, so it is discarded when it ends. A long store is written in
    parts, one after the other, and ends with the last. After a block that failed nothing more of its chain is written.

    Lock: `_changed` guards the bookkeeping; inside it only the metrics' is taken; never held across I/O or a copy.
    """

    def __init__(
        self,
        ports: Sequence[TierPort],
        slot_bytes: int,
        max_storing: int,
        load_deadline: float,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """No store starts while `max_storing` blocks wait or are being written. Loads wait up to `load_deadline` s."""
        self.ports = ports
        self.slot_bytes = slot_bytes
        self.metrics = metrics
        self.clock = clock
        self._max_storing = max_storing
        self._load_deadline = load_deadline
        self._per_batch = max(1, BATCH_BYTES // slot_bytes)
        self._changed = Condition()
        self._live: set[_JobBatch] = set()
        self._ended: list[EndedJob] = []
        self._num_storing = 0
        self._num_refused = 0  # blocks to report in the next warning
        self._warned_at = -_LOG_EVERY
        self._staging: list[mmap.mmap] = []  # unused buffers; never more than I/O threads

    def holds(self, name: ChainHash) -> bool:
        """Whether a tier has the block and can be read now; index-only."""
        return any(port.holds([name])[0] for port in self.ports)

    def held(self, names: Sequence[ChainHash]) -> list[bool] | None:
        """Which blocks are in some tier; None while a tier is unavailable."""
        if not all(port.tier is not None and port.breakers["read"].closed for port in self.ports):
            return None
        by_port = [port.holds(names) for port in self.ports]
        return [any(where) for where in zip(*by_port, strict=True)] if by_port else [False] * len(names)

    def load(self, job_id: int, names: Sequence[ChainHash], into: Sequence[memoryview]) -> None:
        """Fill each buffer (`slot_bytes`, writable) with its block, from the first tier that has it."""
        homes = [next((p for p in self.ports if p.holds([name])[0]), None) for name in names]
        job = _TierJob(job_id, self.clock(), [Outcome.EVICTED] * len(names), 1)
        batches = [
            _LoadBatch(self, job, port, part, [names[i] for i in part], [into[i] for i in part])
            for port, run in groupby(range(len(names)), key=homes.__getitem__)
            if port is not None
            for part in self._parts(list(run))
        ]
        self._submit(job, batches, self.clock() + self._load_deadline)

    def store(
        self,
        job_id: int,
        names: Sequence[ChainHash],
        payloads: Sequence[memoryview],
        groups: Sequence[int] = (),
        order: StoreOrder | None = None,
    ) -> None:
        """Store blocks in every tier, parents first. The memory must not change until the job has ended.

        `groups`: the chain of each block; empty: all are one chain. `order`: shared by all jobs of the request. A job
        is accepted or refused as a whole. If too many blocks wait already it is refused as QUEUE_FULL, and the
        request's later jobs as PARENT_FAILED.
        """
        order = order or StoreOrder()
        with self._changed:
            reason = Outcome.PARENT_FAILED if order.is_refused else Outcome.QUEUE_FULL
            if order.is_refused or (names and self._num_storing >= self._max_storing):
                order.is_refused = True
                self._ended.append(EndedJob(job_id, [reason] * len(names), 0.0))
                self._refused(len(names), reason)
                return
            self._num_storing += len(names)
            job = _TierJob(job_id, self.clock(), [Outcome.QUEUE_FULL] * len(names), 1, num_storing=len(names))
            chains, lines = groups or [0] * len(names), []
            for port in self.ports:
                lines.append(line := order.lines.setdefault(port.name, _StoreLine()))
                for part in self._parts(list(range(len(names)))):
                    own = _StoreBatch(self, job, port, part, [names[i] for i in part], [payloads[i] for i in part])
                    own.chains, own.line = [chains[i] for i in part], line
                    line.waiting.append(own)
                    self._live.add(own)
                    job.num_parts += 1
        for line in lines:
            self.advance(line)
        with self._changed:
            self._end_part(job)  # the submission itself

    def finished(self) -> list[EndedJob]:
        """The jobs that ended since the last call. Also expires overdue jobs and sends due probes. Cheap."""
        for port in self.ports:
            port.tick()
        if not self._ended:
            return []
        with self._changed:
            ended, self._ended = self._ended, []
        return ended

    def drain(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for all jobs, then cancel the rest. Afterwards none uses the engine's memory."""
        until = time.monotonic() + timeout
        while self._live and time.monotonic() < until:
            for port in self.ports:
                port.tick()
            with self._changed:
                self._changed.wait_for(lambda: not self._live, _LOOK_AGAIN)
        for batch in sorted(self._live, key=lambda batch: batch.is_begun):  # queued ones first, or they would start now
            self.expire(batch)
        with self._changed:  # what is left is being copied in memory, which cannot hang
            self._changed.wait_for(lambda: not self._live, timeout)

    def close(self, timeout: float) -> None:
        """Drain and close the tiers, up to `timeout` seconds each. Idempotent."""
        self.drain(timeout)
        for port in self.ports:
            port.close(timeout)

    def check(self) -> None:
        """Raise AssertionError if the counts are inconsistent at idle, or a tier's check fails."""
        with self._changed:
            assert self._live or not self._num_storing, f"{self._num_storing} blocks being stored by no job"
        for port in self.ports:
            port.check()

    # reports of the batches, mostly from I/O threads

    def resolve(self, batch: "_JobBatch", outcomes: Sequence[Outcome]) -> bool:
        """Record a batch's outcomes; False if it was expired before."""
        with self._changed:
            if batch not in self._live:
                return False
            self._live.remove(batch)
            job = batch.job
            batch.resolved(outcomes)
            for position, outcome in zip(batch.positions, outcomes, strict=True):
                if job.outcomes[position] is not Outcome.OK:  # one tier that stored the block is enough
                    job.outcomes[position] = outcome
            self._end_part(job)
            self._changed.notify_all()
        self._count(batch, outcomes)
        return True

    def expire(self, batch: "_JobBatch") -> None:
        """Expire a batch, unless it is already being copied in memory: that ends soon."""
        with self._changed:
            if batch.copying:
                return
            self.resolve(batch, [Outcome.TIMEOUT] * len(batch.positions))
        self.advance(batch.line)

    def advance(self, line: _StoreLine | None) -> None:
        """Submit the next waiting part to its tier, unless one is there."""
        while line is not None:
            with self._changed:
                if line.current is not None or not line.waiting:
                    return
                batch = line.waiting.popleft()
                if batch not in self._live:
                    continue
                line.current = batch
            is_cut = line.failed.issuperset(batch.chains)
            if not is_cut and self._given(batch, self.clock() + _STORE_PATIENCE * batch.port.settings.deadline):
                return
            self.resolve(batch, [Outcome.PARENT_FAILED if is_cut else Outcome.QUEUE_FULL] * len(batch.positions))

    def is_live(self, batch: "_JobBatch") -> bool:
        return batch in self._live

    def begin_copy(self, batch: "_JobBatch") -> bool:
        """Whether the engine's memory may be written to. If so, the batch does not expire before `resolve`."""
        with self._changed:
            batch.copying = batch in self._live
            return batch.copying

    @contextmanager
    def staging(self, count: int) -> Iterator[list[memoryview]]:
        """Page-aligned buffers for `count` blocks. A read that hangs keeps its buffers."""
        with self._changed:
            room = self._staging.pop() if self._staging else None
        room = room or mmap.mmap(-1, self._per_batch * self.slot_bytes)
        view = memoryview(room)
        try:
            yield [view[i * self.slot_bytes : (i + 1) * self.slot_bytes] for i in range(count)]
        finally:
            with self._changed:
                self._staging.append(room)

    def _parts(self, positions: list[int]) -> list[list[int]]:
        return [positions[i : i + self._per_batch] for i in range(0, len(positions), self._per_batch)]

    def _submit(self, job: "_TierJob", batches: Sequence["_JobBatch"], deadline: float) -> None:
        with self._changed:
            job.num_parts += len(batches)
            self._live.update(batches)
        for batch in batches:
            if not self._given(batch, deadline):
                batch.end(Outcome.QUEUE_FULL, late=False)
        with self._changed:
            self._end_part(job)  # the submission itself

    def _given(self, batch: "_JobBatch", deadline: float) -> bool:
        """Whether the tier's queue accepted a batch, which may wait there until `deadline`."""
        batch.is_begun = True
        batch.deadline = deadline
        batch.epoch = batch.port.epoch
        return batch.port.queue.submit(batch, urgent=batch.direction == "read")

    def _refused(self, num_blocks: int, reason: Outcome) -> None:
        """Count blocks that were refused, and warn once a minute."""
        for port in self.ports:
            self.metrics.dropped(port.name, reason, num_blocks)
        self._num_refused += num_blocks
        if self.clock() - self._warned_at >= _LOG_EVERY:
            _log.warning(
                "%d chunks were not stored: %d wait to be written, as many as cache.store_queue allows. Raise it or "
                "leave it out, or have vLLM store less (its option `backpressure` of this tier)",
                self._num_refused,
                self._num_storing,
            )
            self._num_refused, self._warned_at = 0, self.clock()

    def _end_part(self, job: "_TierJob") -> None:
        job.num_parts -= 1
        if not job.num_parts:
            self._num_storing -= job.num_storing
            self._ended.append(EndedJob(job.job_id, job.outcomes, self.clock() - job.began))

    def _count(self, batch: "_JobBatch", outcomes: Sequence[Outcome]) -> None:
        for outcome in set(outcomes):
            number = list(outcomes).count(outcome)
            if batch.direction == "read" and outcome is not Outcome.OK:
                self.metrics.missed(outcome, number)
            elif batch.direction == "write" and outcome is Outcome.OK:
                self.metrics.stored(batch.port.name, number)
            elif batch.direction == "write":
                self.metrics.dropped(batch.port.name, outcome, number)


@dataclass(eq=False, slots=True)
class _TierJob:
    job_id: int
    began: float
    outcomes: list[Outcome]  # the initial value remains if no batch takes the block
    num_parts: int  # unfinished batches, plus one during submission
    num_storing: int = 0  # blocks counted towards the bound on stores


@dataclass(eq=False, slots=True)
class _JobBatch:
    """The blocks of one job that are transferred in one call. Implements the queue's `Job`."""

    direction: ClassVar[Direction]

    owner: TierJobs
    job: _TierJob
    port: TierPort
    positions: list[int]  # in the job
    names: list[ChainHash]
    buffers: list[memoryview]  # the engine's
    epoch: int = 0  # the port's at submission
    deadline: float = 0.0
    copying: bool = False
    is_begun: bool = False  # submitted to its tier
    line: _StoreLine | None = None  # of a store
    chains: list[int] = field(default_factory=list)  # of a store: the chain of each block

    def run(self) -> list[Outcome] | None:
        self.deadline = self.owner.clock() + self.port.settings.deadline  # the wait in the queue had its own
        return self.transfer() if self.owner.is_live(self) else None

    def end(self, result: list[Outcome] | Outcome | None, *, late: bool) -> None:
        outcomes = result if isinstance(result, list) else [result or Outcome.TIMEOUT] * len(self.positions)
        if not self.owner.resolve(self, outcomes) and isinstance(result, list):
            self.expired()
        self.owner.advance(self.line)

    def overdue(self) -> None:
        self.port.failed(self.direction)
        self.owner.expire(self)

    def transfer(self) -> list[Outcome]:
        """Each block's outcome."""
        raise NotImplementedError

    def expired(self) -> None:
        """It was transferred after it expired: the engine may have reused its memory meanwhile."""

    def resolved(self, outcomes: Sequence[Outcome]) -> None:
        """Its outcomes were recorded. Called under the owner's lock."""


class _LoadBatch(_JobBatch):
    __slots__ = ()
    direction = "read"

    def transfer(self) -> list[Outcome]:
        with self.owner.staging(len(self.names)) as staged:
            results = self.port.read(self.names, staged)
            if self.owner.begin_copy(self):
                whole = [i for i, result in enumerate(results) if isinstance(result, BlockRecord)]
                _copy([self.buffers[i] for i in whole], [staged[i] for i in whole])
        return [Outcome.OK if isinstance(r, BlockRecord) else r for r in results]


class _StoreBatch(_JobBatch):
    __slots__ = ()
    direction = "write"

    def transfer(self) -> list[Outcome]:
        if not self.port.writable:
            return [Outcome.BREAKER_OPEN] * len(self.positions)
        failed = self.line.failed if self.line is not None else set()  # it changes only after this batch
        outcomes = [Outcome.PARENT_FAILED] * len(self.positions)
        open_chains = set(self.chains) - failed
        for chain in sorted(open_chains):
            at = [i for i, own in enumerate(self.chains) if own == chain]
            records = [BlockRecord(self.names[i], _NO_PARENT, b"", checksum(self.buffers[i])) for i in at]
            written = self.port.write(records, [self.buffers[i] for i in at], self.epoch)
            for i, outcome in zip(at, written, strict=True):
                outcomes[i] = outcome
        return outcomes

    def resolved(self, outcomes: Sequence[Outcome]) -> None:
        line = self.line
        assert line is not None
        line.failed.update(c for c, outcome in zip(self.chains, outcomes, strict=True) if outcome is not Outcome.OK)
        if line.current is self:
            line.current = None

    def expired(self) -> None:
        """The bytes written may be another block's."""
        tier = self.port.tier
        if tier is not None:
            tier.discard(self.names)


def _copy(targets: Sequence[memoryview], sources: Sequence[memoryview]) -> None:
    """Copy between buffers of equal size, which their owners keep mapped; compiled, without the GIL."""
    if not targets:
        return
    if (copy_pieces := memory.compiled("copy_pieces")) is None:
        for target, source in zip(targets, sources, strict=True):
            target[:] = source
        return
    addresses = np.array([[_address(t), _address(s), t.nbytes] for t, s in zip(targets, sources, strict=True)])
    copy_pieces(*np.ascontiguousarray(addresses.T))


def _address(buffer: memoryview) -> int:
    return int(np.frombuffer(buffer, np.uint8).ctypes.data)
