"""Messages between the connector's halves, and the copies that some ranks have not reported yet."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvtier.connector import StepPlan, WorkerReport
from kvtier.connector.segments import BlendResult
from kvtier.connector.vllm.worker import RegionHandle, WorkerStep


@dataclass
class StepMessage(WorkerStep, KVConnectorMetadata):
    """A step, as vLLM passes it on."""


@dataclass
class CopyReports(KVConnectorWorkerMetadata):
    """The workers' reports to the scheduler: op → (ranks that succeeded, ranks that failed).

    `lost` are ops whose copies may still run on some rank.
    """

    ops: dict[int, tuple[int, int]]
    lost: frozenset[int] = frozenset()
    blended: Mapping[str, BlendResult | str] = field(default_factory=dict)  # request → its result, or why it has none
    readiness: str | None = None  # "", or why nothing is blended; None: as before. Only one rank blends

    @classmethod
    def of(
        cls, report: WorkerReport, blended: Mapping[str, BlendResult | str] | None = None, readiness: str | None = None
    ) -> "CopyReports | None":
        """One rank's report; None if it is empty."""
        if not (report.finished or report.failed or blended or readiness is not None):
            return None
        ops = {**dict.fromkeys(report.finished, (1, 0)), **dict.fromkeys(report.failed, (0, 1))}
        return cls(ops, frozenset(report.lost), blended or {}, readiness)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "CopyReports":
        assert isinstance(other, CopyReports)
        ops = dict(self.ops)
        for op_id, (well, badly) in other.ops.items():
            before = ops.get(op_id, (0, 0))
            ops[op_id] = (before[0] + well, before[1] + badly)
        readiness = other.readiness if self.readiness is None else self.readiness
        return CopyReports(ops, self.lost | other.lost, {**self.blended, **other.blended}, readiness)


# The last report of a worker that shut down in this process, which vLLM no longer collects. By the memory it copied
# for, since two connectors under one MultiConnector share their engine's id and number their ops alike.
LAST_REPORTS: dict[RegionHandle, CopyReports] = {}


@dataclass(slots=True)
class WatchedOp:
    """A copy that not every rank has reported yet."""

    request_id: str
    layerwise: bool
    blocks: tuple[int, ...]  # blocks it reads, by the workers' ids; empty for a load
    left: int  # ranks
    failed: bool = False
    lost: bool = False  # some rank's copy may still run


class WatchedOps:
    """Every rank's reports of every copy. Called from the scheduler's thread.

    The workers' id of vLLM's block `b` in lane `l` is `l * num_blocks + b`. All groups share one pool and memory, so
    before a write `b` alone identifies a block.
    """

    def __init__(self, num_blocks: int, num_ranks: int) -> None:
        self._num_blocks = num_blocks
        self._num_ranks = num_ranks
        self._ops: dict[int, WatchedOp] = {}
        self._readers: dict[int, set[int]] = {}  # block, by vLLM's id → the stores that have yet to read it

    def __bool__(self) -> bool:
        return bool(self._ops)

    def expect(self, plan: StepPlan) -> None:
        """Expect every rank's report of the plan's copies."""
        for op in plan.loads:
            self._ops[op.op_id] = WatchedOp(op.request_id, op.layerwise, (), self._num_ranks)
        for op in plan.stores:
            self._ops[op.op_id] = WatchedOp(op.request_id, False, op.device_blocks, self._num_ranks)
            for block in self.physical(op.device_blocks):
                self._readers.setdefault(block, set()).add(op.op_id)

    def physical(self, blocks: Iterable[int]) -> set[int]:
        """vLLM's own ids of the workers' blocks."""
        return {block % self._num_blocks for block in blocks}

    @property
    def reads(self) -> bool:
        """Whether any store has blocks to read."""
        return bool(self._readers)

    def readers(self, written: set[int]) -> tuple[int, ...]:
        """The stores that must have read before these blocks, by vLLM's ids, are written."""
        return tuple(sorted({op_id for block in written & self._readers.keys() for op_id in self._readers[block]}))

    def spoil(self, sound: Collection[str]) -> None:
        """Fail the stores of all requests but these: they were computed on invalid KV."""
        for op in self._ops.values():
            op.failed |= bool(op.blocks) and op.request_id not in sound

    def apply(self, reports: CopyReports) -> tuple[WorkerReport, list[str]]:
        """Count the ranks' reports. Returns the ops that every rank has reported, and the requests of their loads."""
        finished, failed, lost, loaded = list[int](), list[int](), list[int](), list[str]()
        for op_id, (well, badly) in reports.ops.items():
            op = self._ops.get(op_id)
            if op is None:
                continue
            op.left -= well + badly
            op.failed |= badly > 0
            op.lost |= op_id in reports.lost
            if op.layerwise and badly:  # everything computed on it, perhaps in later steps, is invalid
                self.spoil(())
            if op.left <= 0:
                del self._ops[op_id]
                (failed if op.failed else finished).append(op_id)
                if op.lost:
                    lost.append(op_id)
                if not op.blocks:
                    loaded.append(op.request_id)
                for block in self.physical(op.blocks):
                    if readers := self._readers.get(block):
                        readers.discard(op_id)
                        if not readers:
                            del self._readers[block]
        return WorkerReport(tuple(finished), tuple(failed), tuple(lost)), loaded
