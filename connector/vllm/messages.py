"""The messages between the connector's halves: a step's copies one way, reports of their results the other."""

import os
from dataclasses import dataclass, field
from pathlib import Path

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvtier.connector import WorkerReport
from kvtier.connector.daemon import join
from kvtier.tiers.host import HostRegion


@dataclass(frozen=True, slots=True)
class RegionHandle:
    """How another process of this user on this machine finds and maps the L2 of the scheduler's process."""

    pid: int
    fd: int
    num_slots: int
    slot_bytes: int
    region_id: int
    client: tuple[str, bytes] | None = None  # for a daemon's L2: the socket, and the daemon's name for the scheduler

    @classmethod
    def of(cls, region: HostRegion, client: tuple[str, bytes] | None = None) -> "RegionHandle":
        """The handle of a shared region that this process has mapped."""
        assert region.fd is not None
        return cls(os.getpid(), region.fd, region.num_slots, region.slot_bytes, region.region_id, client)

    def join(self) -> None:
        """For a daemon's L2, keep what is leased to us leased until this process has ended as well."""
        if self.client is not None and self.pid != os.getpid():
            join(Path(self.client[0]), self.client[1])

    def attach(self) -> HostRegion:
        """Map it here. Raises OSError if the process is gone or another user's, TierUnavailable if the daemon is."""
        self.join()
        fd = os.open(f"/proc/{self.pid}/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            return HostRegion.attach(fd, self.num_slots, self.slot_bytes)
        finally:
            os.close(fd)


@dataclass
class StepMessage(KVConnectorMetadata):
    region: RegionHandle | None  # None: the daemon was not reached yet, so nothing is planned
    plan: bytes  # `StepPlan`: loads, and stores of blocks this step fills
    tails: bytes  # `StepPlan`: stores of finished requests; made before the step's compute
    is_idle: bool  # nothing is computed in this step
    fences: tuple[int, ...] = ()  # stores that must end first, since this step writes to their blocks
    lost: dict[str, tuple[int, ...]] = field(default_factory=dict)  # request → blocks that were promised and are gone
    late: frozenset[str] = frozenset()  # of those requests, the ones that wait for an asynchronous load


@dataclass
class CopyReports(KVConnectorWorkerMetadata):
    """The workers' reports to the scheduler: op → (ranks that succeeded, ranks that failed)."""

    ops: dict[int, tuple[int, int]]

    @classmethod
    def of(cls, report: WorkerReport) -> "CopyReports":
        return cls({**dict.fromkeys(report.finished, (1, 0)), **dict.fromkeys(report.failed, (0, 1))})

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "CopyReports":
        assert isinstance(other, CopyReports)
        ops = dict(self.ops)
        for op_id, (well, badly) in other.ops.items():
            before = ops.get(op_id, (0, 0))
            ops[op_id] = (before[0] + well, before[1] + badly)
        return CopyReports(ops)


# The last report of a worker that shut down in this process, which vLLM no longer asks. By the memory it copied for,
# since two connectors under one MultiConnector share their engine's id and number their ops alike.
LAST_REPORTS: dict[RegionHandle, CopyReports] = {}
