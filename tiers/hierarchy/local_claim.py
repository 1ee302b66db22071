"""One claim while this process serves it, and the jobs it waits for: reads from lower tiers, checks of L2's bytes."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

from kvtier.tiers import BlockRecord, ChainHash, Outcome, checksum
from kvtier.tiers.hierarchy.cache_tiers import Claim
from kvtier.tiers.hierarchy.io_queue import JoinedJob
from kvtier.tiers.hierarchy.lower_tier import TierPort
from kvtier.tiers.hierarchy.sealing import Sealing
from kvtier.tiers.hierarchy.shared_lookup import Question
from kvtier.tiers.host import HostTier
from kvtier.tiers.pool import Lease, Reservation


@dataclass(eq=False, slots=True)
class Holding:
    """What one request holds or waits for: blocks that L2 has, by their slots, and the others by their names."""

    run: Sequence[ChainHash]
    slots: list[int]  # of the first blocks of the run
    names: Sequence[ChainHash] = field(default=(), init=False)  # once it is counted: what is counted by name


@dataclass(eq=False)
class LocalClaim(Claim):
    """A claim on this process's tiers. First `Hierarchy` asks where the blocks are, then `Promoter` brings the run.

    The run is the part of the chain that is worth loading. What L2 holds of it is leased at once; what a lower tier
    holds is read into L2 and leased as it lands.
    """

    # while it is asked where the blocks are
    questions: list[Question] = field(default_factory=list)  # asked of shared tiers, not read yet
    asked_until: int = 0  # blocks, from the chain's start, that shared tiers were asked about
    sealing: Sealing | None = None  # a store has filled the first block that no tier holds
    patient_until: float = 0.0  # for such stores, on the monotonic clock

    # while the run is promoted
    run: list[ChainHash] = field(default_factory=list)
    run_parent: ChainHash = b""  # of run[0]
    end: int = 0  # of the run; shrinks when a block cannot be had
    next: int = 0  # first block of the run that is neither leased nor on its way
    held: Holding | None = None  # what it is counted for while it waits
    patience: float = 0.0  # seconds it waits for reads, from when it has room
    room_until: float = 0.0  # it waits for room
    deadline: float = math.inf  # for reads
    polled_at: float = 0.0
    leases: list[Lease] = field(default_factory=list)
    reads: "set[TierRead]" = field(default_factory=set)
    checks: "set[HostCheck]" = field(default_factory=set)  # until they end, none of the blocks they look at is promised
    done: bool = False  # the promise is settled: one lease, or none
    position: dict[ChainHash, int] = field(default_factory=dict)  # where in the run each block is, once one is read


class JobOwner(Protocol):
    """Who starts the jobs and is told how they ended: the `Promoter`."""

    host: HostTier
    clock: Callable[[], float]

    def landed(self, read: "TierRead", results: Sequence[BlockRecord | Outcome], *, late: bool) -> None:
        """A read ended; `late`: after `gave_up`."""

    def gave_up(self, read: "TierRead") -> None:
        """A read hangs past its deadline."""

    def checked(self, check: "HostCheck", num_whole: int, outcome: Outcome) -> None:
        """So many leading blocks are those stored; `outcome` says why not the next one, OK if all are."""


@dataclass(eq=False, slots=True)
class TierRead(JoinedJob):
    """One read of consecutive blocks from a lower tier, their reserved slots, and all claims that wait for it.

    Implements `Job`. Small ones that wait in a row are one call of the tier: it has all their blocks in flight at once.
    """

    owner: JobOwner
    port: TierPort
    reservation: Reservation
    positions: range  # into the reservation
    hashes: list[ChainHash]  # there: the blocks being read
    deadline: float
    waiters: set[LocalClaim] = field(default_factory=set)
    is_joined: bool = False  # to the call of a read before it

    @property
    def num_blocks(self) -> int:
        return len(self.hashes)

    def run(self) -> Sequence[BlockRecord | Outcome]:
        return self.port.read(self.hashes, self._begin())

    def run_with(self, others: Sequence[JoinedJob]) -> list[Sequence[BlockRecord | Outcome]]:
        reads = [self, *(other for other in others if isinstance(other, TierRead))]
        for read in reads[1:]:
            read.is_joined = True
        slots = [slot for read in reads for slot in read._begin()]
        results = self.port.read([name for read in reads for name in read.hashes], slots)
        ends = [*accumulate(len(read.hashes) for read in reads)]
        return [results[end - len(read.hashes) : end] for read, end in zip(reads, ends, strict=True)]

    def _begin(self) -> list[memoryview]:
        """The slots to read into. The wait in the queue had a deadline of its own."""
        self.deadline = self.owner.clock() + self.port.settings.deadline
        region = self.owner.host.region
        slots = self.reservation.slots[self.positions.start : self.positions.stop]
        return [region.slot(slot) for slot in slots]

    def end(self, result: Sequence[BlockRecord | Outcome] | Outcome, *, late: bool) -> None:
        results = [result] * len(self.positions) if isinstance(result, Outcome) else result
        self.owner.landed(self, results, late=late)

    def overdue(self) -> None:
        if not self.is_joined:  # a call that hangs is one failure, however many reads it brings
            self.port.failed("read")
        self.owner.gave_up(self)


@dataclass(eq=False, slots=True)
class HostCheck:
    """A check of consecutive blocks that L2 holds, under a lease of its own until its end. Implements `Job`."""

    owner: JobOwner
    claim: LocalClaim
    first: int  # of its blocks, in the run
    lease: Lease
    deadline: float = math.inf  # memory only: it cannot hang

    def run(self) -> tuple[int, Outcome]:
        """Compare names and checksums, up to the first block that is not what was stored."""
        host = self.owner.host
        for num_whole, (slot, chain_hash) in enumerate(zip(self.lease.slots, self.lease.hashes, strict=True)):
            if self not in self.claim.checks:  # nobody waits for it any more
                return num_whole, Outcome.ABORTED
            record = host.records[slot]
            if record is None or record.chain_hash != chain_hash or record.checksum != checksum(host.region.slot(slot)):
                return num_whole, Outcome.CHECKSUM
        return len(self.lease), Outcome.OK

    def end(self, result: tuple[int, Outcome] | Outcome, *, late: bool) -> None:
        """What was not checked is not promised."""
        num_whole, outcome = (0, result) if isinstance(result, Outcome) else result
        self.owner.checked(self, num_whole, outcome)

    def overdue(self) -> None:
        """Never told: there is no deadline."""
