"""What a connector asks of the tiers below L1, whether they are in its process or behind the node's daemon."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtier.tiers.host import HostRegion
from kvtier.tiers.lease import Lease, Reservation
from kvtier.tiers.metrics import Metrics
from kvtier.tiers.prefetch import Pending
from kvtier.tiers.tier import BlockRecord, ChainHash, Outcome


@dataclass(frozen=True, slots=True)
class Attribution:
    """Where the blocks of one lookup were when first asked. The parts sum to `blocks`, or it cannot be built."""

    blocks: int
    l1: int = 0
    l2: int = 0
    file: int = 0
    redis: int = 0
    miss: int = 0

    def __post_init__(self) -> None:
        if self.l1 + self.l2 + self.file + self.redis + self.miss != self.blocks:
            raise AssertionError(f"attribution does not sum: {self}")

    @property
    def below(self) -> int:
        """Blocks found below L1."""
        return self.l2 + self.file + self.redis


@dataclass(eq=False)
class Claim:
    """One request's question, and then the promise made to it. Made by `TiersBelow.ask`; whoever made it adds more."""

    hashes: list[ChainHash]
    parent: ChainHash  # of hashes[0]
    num_l1: int  # leading blocks that L1 holds: counted, not claimed
    block_size: int  # tokens
    found: Attribution | None = None  # where the blocks were; None while a tier is still being asked
    refusal: Outcome | None = (
        None  # RECOMPUTE: for good, computing is faster; NO_SLOT: for now, others hold what may be
    )
    good_until: float = 0.0  # on the monotonic clock: an answer that nothing is held may be asked for anew from then on
    missing: Outcome | None = Outcome.ABSENT  # why the misses of `found` are misses; None: that is counted already


@dataclass(frozen=True, slots=True)
class Wanted:
    """Consecutive new blocks of one chain that a step wants to store."""

    hashes: Sequence[ChainHash]
    parent: ChainHash  # of hashes[0]
    tenant: ChainHash  # whose blocks they are: the root of chains with their cache_salt


class TiersBelow(Protocol):
    """Implemented by `LocalTiers` and by the daemon's client. No method raises for a storage failure.

    Of what a scheduler calls only `reserve` waits for an answer, once for a whole step and up to a deadline of its own,
    besides, of course, `wait_progress`, `drain`, `reset` and `close`. `lookup` and `holds` are for other threads.
    """

    metrics: Metrics

    @property
    def region(self) -> HostRegion | None:
        """L2's memory. Another one after the daemon was restarted; None before it was ever reached."""

    @property
    def epoch(self) -> int:
        """Counts resets: what was admitted before one is not stored after it."""

    @property
    def num_slots(self) -> int:
        """Slots in L2; 0 before the daemon was ever reached."""

    @property
    def has_lower(self) -> bool:
        """Whether there is a tier below L2."""

    def ask(self, hashes: Sequence[ChainHash], parent: ChainHash, num_l1: int = 0, *, block_size: int) -> Claim:
        """Where the blocks of a chain are, and a claim on those beyond the first `num_l1` that are worth loading."""

    def poll(self, claim: Claim) -> int | Pending:
        """How many blocks beyond `num_l1` are in L2, verified and leased; PENDING: more may come, ask again.

        Asking renews the promise: one that nobody asks about lapses after the lease deadline.
        """

    def take(self, claim: Claim) -> Lease:
        """The lease of the promised blocks; empty where the promise lapsed. Released when its copies have ended."""

    def cancel(self, claim: Claim) -> None:
        """The request went away. Idempotent."""

    def count(self, found: Attribution, missing: Outcome | None = Outcome.ABSENT) -> None:
        """Count a request's blocks by where they were, its misses for that reason: once a request."""

    def reserve(self, wanted: Sequence[Wanted]) -> list[Reservation | None]:
        """L2 slots for all that a step stores: of each as many of the head as fit, None where not one does.

        Blocks already held need no slot and are left out of the reservation.
        """

    def seal(self, reservation: Reservation, records: Sequence[BlockRecord], epoch: int) -> None:
        """The reservation's slots are filled: hash, publish and offer them to the tiers below; in the background.

        `records` are its blocks in order, their checksums ignored; `epoch` that in which they were computed.
        """

    def abandon(self, reservation: Reservation, reason: Outcome) -> None:
        """The store failed or was called off: its slots are free again, nothing became visible."""

    def computed(self, num_tokens: int, seconds: float) -> None:
        """A step prefilled `num_tokens` in `seconds`: what loading competes with."""

    def lookup(self, hashes: Sequence[ChainHash], timeout: float) -> Attribution:
        """Where the blocks are, no claim; waits up to `timeout` seconds for shared tiers: not for a scheduler."""

    def holds(self, hashes: Sequence[ChainHash]) -> list[bool]:
        """Which of the blocks L2 holds, each by itself. May wait for the daemon: not for a scheduler."""

    def wait_progress(self, timeout: float) -> None:
        """Wait until a claim moved on, at most `timeout` seconds: for an engine with nothing else to do."""

    def tick(self) -> None:
        """Let deadlines pass; `ask` and `poll` do it."""

    def reset(self) -> None:
        """Forget everything in every tier; stores and reads under way will not become visible."""

    def drain(self, timeout: float, *, below: bool = True) -> bool:
        """Wait until every store offered so far is found in L2 and, `below`, written; False where time ran out."""

    def stats(self) -> dict[str, float]:
        """Every counter and gauge by its exposition name."""

    def check(self) -> None:
        """Raise AssertionError where a conservation law is broken."""

    def close(self, timeout: float = 5.0) -> None:
        """Let go of everything. Idempotent."""
