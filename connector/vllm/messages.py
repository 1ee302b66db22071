"""The messages between the connector's halves: a step's copies one way, reports of their results the other."""

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvtier.connector import WorkerReport
from kvtier.connector.vllm.steps import RegionHandle, WorkerStep


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

    @classmethod
    def of(cls, report: WorkerReport) -> "CopyReports | None":
        """One rank's report; None if it says nothing."""
        if not (report.finished or report.failed):
            return None
        ops = {**dict.fromkeys(report.finished, (1, 0)), **dict.fromkeys(report.failed, (0, 1))}
        return cls(ops, frozenset(report.lost))

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "CopyReports":
        assert isinstance(other, CopyReports)
        ops = dict(self.ops)
        for op_id, (well, badly) in other.ops.items():
            before = ops.get(op_id, (0, 0))
            ops[op_id] = (before[0] + well, before[1] + badly)
        return CopyReports(ops, self.lost | other.lost)


# The last report of a worker that shut down in this process, which vLLM no longer asks. By the memory it copied for,
# since two connectors under one MultiConnector share their engine's id and number their ops alike.
LAST_REPORTS: dict[RegionHandle, CopyReports] = {}
