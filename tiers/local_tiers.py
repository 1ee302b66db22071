"""The tiers below L1 in this very process: a request's question, what it is worth, and the promise that follows."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from kvtier.tiers.below import Attribution, Claim, Wanted
from kvtier.tiers.hierarchy import Hierarchy
from kvtier.tiers.host import HostRegion
from kvtier.tiers.lease import Lease, Reservation
from kvtier.tiers.locate import Question
from kvtier.tiers.metrics import LOOKUP_TIERS
from kvtier.tiers.prefetch import PENDING, Pending, Prefetch
from kvtier.tiers.tier import BlockRecord, ChainHash, Outcome

_ASK_AGAIN: Final = 0.05  # seconds an answer of a shared tier is good for: asking costs it a round trip


@dataclass(eq=False)
class _Claim(Claim):
    """A claim while it is being served here."""

    questions: list[Question] = field(default_factory=list)  # asked of shared tiers, not read yet
    prefetch: Prefetch | None = None
    asked_until: int = 0  # blocks, from the chain's start, that shared tiers were asked about


class LocalTiers:
    """`TiersBelow` over a hierarchy of this process. Thread-safe as the hierarchy; a claim is for one thread."""

    def __init__(self, hierarchy: Hierarchy) -> None:
        self.hierarchy = hierarchy
        self.metrics = hierarchy.metrics

    @property
    def region(self) -> HostRegion | None:
        """L2's memory."""
        return self.hierarchy.host.region

    @property
    def epoch(self) -> int:
        """How many resets there were."""
        return self.hierarchy.epoch

    @property
    def num_slots(self) -> int:
        """Slots in L2."""
        return self.hierarchy.host.pool.num_slots

    @property
    def has_lower(self) -> bool:
        """Whether there is a tier below L2."""
        return bool(self.hierarchy.ports)

    # a request's question and promise

    def ask(self, hashes: Sequence[ChainHash], parent: ChainHash, num_l1: int = 0, *, block_size: int) -> Claim:
        """Where the blocks are, by the indexes of this process; shared tiers are asked in the background."""
        claim = _Claim(list(hashes), parent, num_l1, block_size)
        self._look(claim)
        return claim

    def poll(self, claim: Claim) -> int | Pending:
        """How far the promise goes; see `Prefetcher.poll`."""
        assert isinstance(claim, _Claim)
        if claim.found is None:
            if not all(question.done for question in claim.questions):
                self.hierarchy.tick()
                return PENDING
            self.hierarchy.locator.read(claim.questions)
            claim.questions = []
            self._look(claim)
            if claim.found is None:
                return PENDING
        return self.hierarchy.poll(claim.prefetch) if claim.prefetch is not None else 0

    def take(self, claim: Claim) -> Lease:
        """The promised blocks' lease; see `Prefetcher.claim`."""
        assert isinstance(claim, _Claim)
        if claim.prefetch is None:
            return self.hierarchy.host.pool.lease([])
        return self.hierarchy.claim(claim.prefetch)

    def promised(self, claim: Claim) -> Lease | None:
        """The lease behind a promise, which stays the claim's: for telling somebody else which slots it is of."""
        assert isinstance(claim, _Claim)
        leases = claim.prefetch.leases if claim.prefetch is not None and claim.prefetch.done else []
        return leases[0] if leases else None

    def cancel(self, claim: Claim) -> None:
        """Let go of questions and of what was promised."""
        assert isinstance(claim, _Claim)
        if claim.questions:
            self.hierarchy.locator.read(claim.questions)
            claim.questions = []
        if claim.prefetch is not None:
            self.hierarchy.cancel(claim.prefetch)

    def count(self, found: Attribution, missing: Outcome | None = Outcome.ABSENT) -> None:
        """Into the hierarchy's metrics."""
        for tier in LOOKUP_TIERS:
            if num_blocks := getattr(found, tier):  # a counter costs microseconds, nought or not
                self.metrics.looked_up(tier, num_blocks)
        if found.miss and missing is not None:
            self.metrics.missed(missing, found.miss)

    def _look(self, claim: _Claim) -> None:
        """Ask the indexes; where they end, the shared tiers, once; then claim what is worth loading."""
        where = self.hierarchy.lookup(claim.hashes, claim.num_l1)
        known = where.blocks - where.miss
        if where.miss and known >= claim.asked_until:
            claim.questions = self.hierarchy.locator.ask(claim.hashes[known:])
            if claim.questions:
                claim.asked_until = known + max(len(question.hashes) for question in claim.questions)
                return
        claim.found = where
        if claim.asked_until:
            claim.good_until = time.monotonic() + _ASK_AGAIN
        if where.below:
            self._claim(claim, where)

    def _claim(self, claim: _Claim, where: Attribution) -> None:
        block_bytes = self.hierarchy.host.region.slot_bytes
        below = {"file": where.file * block_bytes, "redis": where.redis * block_bytes}
        if not self.hierarchy.rates.worth_loading(where.below * claim.block_size, below):
            claim.refusal = Outcome.RECOMPUTE
            self.metrics.missed(Outcome.RECOMPUTE, where.below)
            return
        first, end = claim.num_l1, claim.num_l1 + where.below
        parent = claim.hashes[first - 1] if first else claim.parent
        prefetch = self.hierarchy.prefetch(claim.hashes[first:end], parent)
        if prefetch.refused:
            claim.refusal = Outcome.NO_SLOT
            self.hierarchy.cancel(prefetch)
        else:
            claim.prefetch = prefetch

    # storing

    def reserve(self, wanted: Sequence[Wanted]) -> list[Reservation | None]:
        """See `Hierarchy.reserve_each`."""
        return self.hierarchy.reserve_each([(each.hashes, each.parent) for each in wanted])

    def seal(self, reservation: Reservation, records: Sequence[BlockRecord], epoch: int) -> None:
        """See `Hierarchy.seal`."""
        self.hierarchy.seal(reservation, records, epoch)

    def abandon(self, reservation: Reservation, reason: Outcome) -> None:
        """See `Hierarchy.abandon`."""
        self.hierarchy.abandon(reservation, reason)

    # the rest is the hierarchy's

    def computed(self, num_tokens: int, seconds: float) -> None:
        """Into the hierarchy's rates."""
        self.hierarchy.rates.computed(num_tokens, seconds)

    def lookup(self, hashes: Sequence[ChainHash], timeout: float) -> Attribution:
        """By the indexes of this process, once the shared tiers have been asked about what they do not name."""
        deadline, asked_until = time.monotonic() + timeout, 0
        while True:
            where = self.hierarchy.lookup(hashes)
            known = where.blocks - where.miss
            if not where.miss or known < asked_until:
                return where
            questions = self.hierarchy.locator.ask(hashes[known:])
            while not all(question.done for question in questions) and (left := deadline - time.monotonic()) > 0:
                self.hierarchy.wait_progress(left)
                self.hierarchy.tick()
            self.hierarchy.locator.read(questions)
            if not questions or not all(question.done for question in questions):
                return self.hierarchy.lookup(hashes)
            asked_until = known + max(len(question.hashes) for question in questions)

    def holds(self, hashes: Sequence[ChainHash]) -> list[bool]:
        """From the pool's index."""
        return self.hierarchy.host.pool.holds(hashes)

    def wait_progress(self, timeout: float) -> None:
        """See `Hierarchy.wait_progress`."""
        self.hierarchy.wait_progress(timeout)

    def tick(self) -> None:
        """See `Hierarchy.tick`."""
        self.hierarchy.tick()

    def reset(self) -> None:
        """See `Hierarchy.reset`."""
        self.hierarchy.reset()

    def drain(self, timeout: float, *, below: bool = True) -> bool:
        """See `Hierarchy.drain`."""
        return self.hierarchy.drain(timeout, below=below)

    def stats(self) -> dict[str, float]:
        """See `Hierarchy.stats`."""
        return self.hierarchy.stats()

    def check(self) -> None:
        """See `Hierarchy.check`."""
        self.hierarchy.check()

    def close(self, timeout: float = 5.0) -> None:
        """See `Hierarchy.close`."""
        self.hierarchy.close(timeout)
