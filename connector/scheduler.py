"""The scheduler side: what an engine's scheduler asks and tells, request by request. Sans-IO, no torch, never waits."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from kvtier.connector.plan import CopyOp, StepPlan, WorkerReport
from kvtier.tiers.hierarchy import Attribution, Hierarchy
from kvtier.tiers.metrics import LOOKUP_TIERS
from kvtier.tiers.pool import Lease, Reservation
from kvtier.tiers.prefetch import PENDING, Pending, Prefetch
from kvtier.tiers.tier import BlockRecord, ChainHash, Outcome


class BlockChain(Protocol):
    """The named blocks of one growing sequence: a `TokenChain`, or an engine's own hashes."""

    block_size: int  # tokens

    @property
    def hashes(self) -> Sequence[ChainHash]:
        """The names of its full blocks."""

    def parent(self, block: int) -> ChainHash:
        """The name before block `block`: the root for block 0."""

    def block_tokens(self, block: int) -> bytes:
        """The tokens of a full block, u32 little-endian."""


class Request(Protocol):
    """What the scheduler side reads of an engine's request."""

    @property
    def request_id(self) -> str:
        """Unique among the live requests."""

    @property
    def chain(self) -> BlockChain:
        """The hashes of its tokens so far, prompt and answer."""

    @property
    def num_tokens(self) -> int:
        """How many tokens it has now: at least the last of them is always computed, never loaded."""


@dataclass(slots=True)
class _Known:
    """What is remembered of a live request."""

    request: Request
    epoch: int  # the hierarchy's at admission
    base: int = 0  # blocks found in L1 when the prefetch started
    asked: int = 0  # blocks found in L1 at the last lookup
    prefetch: Prefetch | None = None
    found: Attribution | None = None  # where its blocks were when first asked
    recompute: bool = False  # decided once: loading is slower, or has failed


@dataclass(frozen=True, slots=True)
class ConnectorUpdate:
    """What a worker's report means for the engine."""

    loaded: tuple[str, ...] = ()  # requests whose load has ended well
    failed: tuple[tuple[str, int], ...] = ()  # requests whose load failed, and from which block of theirs
    released: tuple[int, ...] = ()  # L1 blocks no copy reads any more; one mention per `store` of it


@dataclass(slots=True)
class _Load:
    request_id: str
    first_block: int
    num_blocks: int
    lease: Lease
    planned_at: float


@dataclass(slots=True)
class _Store:
    reservation: Reservation
    records: list[BlockRecord]
    epoch: int
    blocks: list[int] = field(default_factory=list)


class SchedulerSide:
    """The hierarchy as one engine's scheduler sees it. Called from that scheduler's thread only.

    Per request: `lookup` (again and again, idempotent) → `allocated` → `store` as blocks fill → `finished`.
    Per step: `build_plan` → the worker → `update` with its report.
    """

    def __init__(self, hierarchy: Hierarchy) -> None:
        self.hierarchy = hierarchy
        self._requests: dict[str, _Known] = {}
        self._region_id = hierarchy.host.region.region_id
        self._op_ids = count(1)
        self._steps = count(1)
        self._loads: dict[int, _Load] = {}
        self._stores: dict[int, _Store] = {}
        self._planned_loads: list[CopyOp] = []
        self._planned_stores: list[CopyOp] = []
        self._released: list[int] = []

    def admit(self, request: Request) -> None:
        """Know a request that is only going to store. `lookup` does this too. Idempotent."""
        self._requests.setdefault(request.request_id, _Known(request, self.hierarchy.epoch))

    def lookup(self, request: Request, num_computed_tokens: int) -> int | Pending:
        """How many tokens beyond the `num_computed_tokens` in L1 can be loaded, or PENDING: ask again next step.

        A number is a promise: those blocks are in L2, verified and leased. The first call may start a prefetch, later
        ones renew its lease. The last token of a request is never promised.
        """
        block_size = request.chain.block_size
        in_l1 = num_computed_tokens // block_size
        self.admit(request)
        known = self._requests[request.request_id]
        if known.prefetch is not None and in_l1 < known.base:  # L1 lost blocks meanwhile: ask for those too
            self.hierarchy.cancel(known.prefetch)
            known.prefetch = None
        if known.prefetch is None and not known.recompute:
            self._start(known, in_l1)
        known.asked = in_l1
        if known.prefetch is None:
            return 0
        found = self.hierarchy.poll(known.prefetch)
        if isinstance(found, Pending):
            return PENDING
        return max(0, known.base + found - in_l1) * block_size

    def allocated(
        self, request_id: str, block_ids: Sequence[int], num_external_tokens: int, *, layerwise: bool = False
    ) -> int:
        """The request got its L1 blocks (`block_ids`: its whole table); load the tokens promised, if any are wanted.

        Returns how many tokens are being loaded: fewer than asked for, maybe 0, where the promise lapsed because nobody
        asked for longer than the lease deadline; the rest must be computed. With `layerwise` the request computes in
        the very step that loads it; without, after `update` names it. Called again for the same request, or with 0, it
        only lets go of what was promised.
        """
        known = self._requests[request_id]
        prefetch, known.prefetch = known.prefetch, None
        if prefetch is None:
            return 0
        block_size = known.request.chain.block_size
        num_blocks = num_external_tokens // block_size
        if not num_blocks:
            self.hierarchy.cancel(prefetch)
            return 0
        lease = self.hierarchy.claim(prefetch)
        skip = known.asked - known.base
        slots = lease.slots[skip : skip + num_blocks].tolist()
        generations = lease.generations[skip : skip + num_blocks].tolist()
        if not slots:
            lease.release()
            return 0
        blocks = [int(block) for block in block_ids[known.asked : known.asked + len(slots)]]
        op = CopyOp(next(self._op_ids), request_id, tuple(blocks), tuple(slots), tuple(generations), layerwise)
        self._loads[op.op_id] = _Load(request_id, known.asked, len(op), lease, time.monotonic())
        self._planned_loads.append(op)
        return len(op) * block_size

    def forget_promises(self) -> None:
        """Let go of all that was promised and not allocated: behind a reset it would be old."""
        for known in self._requests.values():
            if known.prefetch is not None:
                self.hierarchy.cancel(known.prefetch)
                known.prefetch = None

    def recompute(self, request_id: str) -> None:
        """Promise this request nothing more: what it was promised was not there."""
        self._requests[request_id].recompute = True

    def found(self, request_id: str) -> Attribution | None:
        """Where the blocks of a live request were when it was first looked up."""
        return self._requests[request_id].found

    def store(self, request_id: str, first_block: int, block_ids: Sequence[int]) -> None:
        """Blocks `first_block…` of the request's table became full in this step; copy those not held yet to L2.

        Every block named here must keep its content until an update names it in `released`: the engine keeps it
        referenced in L1, or has the worker `fence` the op before the block is written again.
        """
        known = self._requests[request_id]
        chain = known.request.chain
        hashes = chain.hashes[first_block : first_block + len(block_ids)]
        blocks = [int(block) for block in block_ids]
        stale = known.epoch != self.hierarchy.epoch
        reservation = None if stale else self.hierarchy.reserve(hashes, chain.parent(first_block))
        if stale:
            self.hierarchy.metrics.dropped("l2", Outcome.EPOCH, len(blocks))
        if reservation is None or not reservation.hashes:
            self._released += blocks
            return
        copied = [blocks[i] for i in reservation.indices]
        kept = set(reservation.indices)
        self._released += [block for i, block in enumerate(blocks) if i not in kept]
        records = [
            BlockRecord(chain.hashes[i], chain.parent(i), chain.block_tokens(i), 0)
            for i in (first_block + index for index in reservation.indices)
        ]
        slots, generations = tuple(reservation.slots.tolist()), tuple(reservation.generations.tolist())
        op = CopyOp(next(self._op_ids), request_id, tuple(copied), slots, generations)
        self._stores[op.op_id] = _Store(reservation, records, known.epoch, copied)
        self._planned_stores.append(op)

    def build_plan(self) -> StepPlan:
        """This step's copies; everything said since the last plan."""
        loads, stores = tuple(self._planned_loads), tuple(self._planned_stores)
        self._planned_loads, self._planned_stores = [], []
        return StepPlan(next(self._steps), self._region_id, loads, stores)

    def update(self, report: WorkerReport) -> ConnectorUpdate:
        """Take in what the worker's copies came to: release leases, seal stores, name what failed."""
        loaded: list[str] = []
        failed: list[tuple[str, int]] = []
        for op_id in (*report.finished, *report.failed):
            well = op_id in report.finished
            if op_id in self._loads:
                load = self._loads.pop(op_id)
                if well:
                    loaded.append(load.request_id)
                    self._moved("load", load.num_blocks, time.monotonic() - load.planned_at)
                else:
                    failed.append((load.request_id, load.first_block))
                    if (known := self._requests.get(load.request_id)) is not None:
                        known.recompute = True  # final for this request: what failed once would be asked for for ever
                    self.hierarchy.metrics.missed(Outcome.COPY_FAILED, load.num_blocks)
                load.lease.release()
            elif op_id in self._stores:
                store = self._stores.pop(op_id)
                self._released += store.blocks
                if well:
                    self._moved("store", len(store.records), 0.0)
                    self.hierarchy.seal(store.reservation, store.records, store.epoch)
                else:
                    self.hierarchy.abandon(store.reservation, Outcome.COPY_FAILED)
        released, self._released = self._released, []
        return ConnectorUpdate(tuple(loaded), tuple(failed), tuple(released))

    def finished(self, request_id: str) -> None:
        """The request ended or was aborted. Copies under way go on and are still reported by `update`. Idempotent."""
        known = self._requests.pop(request_id, None)
        if known is not None and known.prefetch is not None:
            self.hierarchy.cancel(known.prefetch)

    def computed(self, num_tokens: int, seconds: float) -> None:
        """A step prefilled `num_tokens` in `seconds`: what loading competes with."""
        self.hierarchy.rates.computed(num_tokens, seconds)

    def wait(self, timeout: float) -> None:
        """Wait until a pending lookup may have an answer, at most `timeout` seconds: for an engine that is idle."""
        self.hierarchy.wait_progress(timeout)

    @property
    def idle(self) -> bool:
        """Whether no copy is planned or under way."""
        return not (self._loads or self._stores)

    def close(self) -> None:
        """Let go of every promise and every copy that was never reported. Idempotent."""
        for request_id in list(self._requests):
            self.finished(request_id)
        for load in self._loads.values():
            load.lease.release()
        for store in self._stores.values():
            self.hierarchy.abandon(store.reservation, Outcome.CLOSED)
        self._loads.clear()
        self._stores.clear()

    def _moved(self, direction: str, num_blocks: int, seconds: float) -> None:
        num_bytes = num_blocks * self.hierarchy.host.region.slot_bytes
        self.hierarchy.metrics.moved("l2", direction, num_bytes, seconds)

    def _start(self, known: _Known, in_l1: int) -> None:
        """First ask: say where every block is, decide load or recompute, claim what is worth loading."""
        request, known.base = known.request, in_l1
        chain = request.chain
        usable = min(len(chain.hashes), (request.num_tokens - 1) // chain.block_size)
        hashes = chain.hashes[:usable]
        where = self.hierarchy.lookup(hashes, min(in_l1, usable))
        if first := known.found is None:
            known.found = where
            for tier in LOOKUP_TIERS:
                self.hierarchy.metrics.looked_up(tier, getattr(where, tier))
            self.hierarchy.metrics.missed(Outcome.ABSENT, where.miss)
        block_bytes = self.hierarchy.host.region.slot_bytes
        below = {"file": where.file * block_bytes, "redis": where.redis * block_bytes}
        num_found = where.l2 + where.file + where.redis
        if not num_found:
            return
        if not self.hierarchy.rates.worth_loading(num_found * chain.block_size, below):
            self.hierarchy.metrics.missed(Outcome.RECOMPUTE, num_found)
            known.recompute = True
            return
        prefetch = self.hierarchy.prefetch(hashes[in_l1 : in_l1 + num_found], chain.parent(in_l1))
        if not prefetch.refused:
            known.prefetch = prefetch
            return
        self.hierarchy.cancel(prefetch)
        if first:
            self.hierarchy.metrics.missed(Outcome.NO_SLOT, num_found)
