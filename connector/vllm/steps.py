"""What a worker is told of a step: its copies, and where the memory is that they copy from and to. Needs no vLLM."""

import os
from dataclasses import dataclass, field
from pathlib import Path

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
class WorkerStep:
    """One step of a worker. vLLM gets it as a `StepMessage`."""

    region: RegionHandle | None  # None: the daemon was not reached yet, so nothing is planned
    plan: bytes  # `StepPlan`: loads, and stores of blocks this step fills
    tails: bytes  # `StepPlan`: stores of finished requests; made before the step's compute
    is_idle: bool  # nothing is computed in this step
    fences: tuple[int, ...] = ()  # stores that must end first, since this step writes to their blocks
    lost: dict[str, tuple[int, ...]] = field(default_factory=dict)  # request → blocks that were promised and are gone
    late: frozenset[str] = frozenset()  # of those requests, the ones that wait for an asynchronous load
    touches: bool = False  # before its compute vLLM zeroes or copies blocks that this step's loads write to
