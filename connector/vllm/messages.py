"""What crosses between kvtier's halves in vLLM's processes: a step's copies one way, what became of them the other."""

import os
from dataclasses import dataclass, field
from pathlib import Path

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvtier.connector.attachment import join
from kvtier.connector.plan import WorkerReport
from kvtier.tiers.host import HostRegion


@dataclass(frozen=True, slots=True)
class RegionHandle:
    """L2 of the scheduler's process: where another process of this user on this machine finds and maps it."""

    pid: int
    fd: int
    num_slots: int
    slot_bytes: int
    region_id: int
    client: tuple[str, bytes] | None = None  # where it is a daemon's: the socket, and what that calls the scheduler

    @classmethod
    def of(cls, region: HostRegion, client: tuple[str, bytes] | None = None) -> "RegionHandle":
        """The handle of a shared region that this process has mapped."""
        assert region.fd is not None
        return cls(os.getpid(), region.fd, region.num_slots, region.slot_bytes, region.region_id, client)

    def join(self) -> None:
        """Where it is a daemon's, have what is leased to us stay leased until this process has ended as well."""
        if self.client is not None and self.pid != os.getpid():
            join(Path(self.client[0]), self.client[1])

    def attach(self) -> HostRegion:
        """Map it here. OSError where the process is gone or is another user's, TierUnavailable where the daemon is."""
        self.join()
        fd = os.open(f"/proc/{self.pid}/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            return HostRegion.attach(fd, self.num_slots, self.slot_bytes)
        finally:
            os.close(fd)


@dataclass
class StepMessage(KVConnectorMetadata):
    """One step, from the scheduler to every worker."""

    region: RegionHandle | None  # None: the daemon was not reached yet, and nothing is planned
    plan: bytes  # `StepPlan`: loads, and stores of blocks this step fills
    tails: bytes  # `StepPlan`: stores of requests that have ended; before the step's compute
    is_idle: bool  # nothing is computed in this step
    fences: tuple[int, ...] = ()  # stores whose blocks this step writes to
    lost: dict[str, tuple[int, ...]] = field(default_factory=dict)  # request → blocks promised and not there any more
    late: frozenset[str] = frozenset()  # of those, the requests that wait for an asynchronous load


@dataclass
class CopyReports(KVConnectorWorkerMetadata):
    """From the workers to the scheduler: op → (ranks that ended it well, ranks that did not)."""

    ops: dict[int, tuple[int, int]]

    @classmethod
    def of(cls, report: WorkerReport) -> "CopyReports":
        """One rank's report."""
        return cls({**dict.fromkeys(report.finished, (1, 0)), **dict.fromkeys(report.failed, (0, 1))})

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "CopyReports":
        """Both ranks' together."""
        assert isinstance(other, CopyReports)
        ops = dict(self.ops)
        for op_id, (well, badly) in other.ops.items():
            before = ops.get(op_id, (0, 0))
            ops[op_id] = (before[0] + well, before[1] + badly)
        return CopyReports(ops)


# What a worker that shut down in this very process reported last: nobody asks it again. By the engine's id.
LAST_REPORTS: dict[str, CopyReports] = {}
