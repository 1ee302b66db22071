"""A model's tiers as the daemon's clients get them: lookups counted and traced, tenants kept within their quotas."""

import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from kvtier.service.lookup_trace import TraceRecorder
from kvtier.service.quota import Quotas
from kvtier.tiers.below import Claim, Wanted
from kvtier.tiers.hierarchy import Hierarchy
from kvtier.tiers.lease import Lease, Reservation
from kvtier.tiers.local_tiers import LocalTiers
from kvtier.tiers.prefetch import Pending
from kvtier.tiers.tier import ChainHash, Outcome

if TYPE_CHECKING:
    from kvtier.service.events import TierFeed

_SAME: Final = 1.0  # seconds within which a question in vain, asked again, is one request's that waits its turn
_MAX_VAIN: Final = 4096  # such questions remembered


class ServedTiers(LocalTiers):
    """`LocalTiers` for many clients, on the loop's thread. `poll` answers each claim once."""

    def __init__(self, hierarchy: Hierarchy, fingerprint: bytes) -> None:
        super().__init__(hierarchy)
        self.quotas = Quotas(hierarchy.host, fingerprint)
        self.recorder: TraceRecorder | None = None  # while somebody records
        self.feed: TierFeed | None = None  # where KV events are published
        self._vain: OrderedDict[ChainHash, float] = OrderedDict()  # last block asked for → when it was last in vain

    def poll(self, claim: Claim) -> int | Pending:
        """As `LocalTiers.poll`; the answer is counted as a request's lookup."""
        promised = super().poll(claim)
        if not isinstance(promised, Pending) and claim.hashes and not self._is_repeated(claim.hashes[-1], promised):
            assert claim.found is not None
            self.count(claim.found)
            if self.recorder is not None:
                self.recorder.record(claim.hashes, len(claim.hashes) * claim.block_size)
        return promised

    def take(self, claim: Claim) -> Lease:
        """As `LocalTiers.take`; what came up from below counts into its tenant's quota."""
        lease = super().take(claim)
        self.quotas.promoted(lease.hashes, claim.hashes[claim.num_l1 - 1] if claim.num_l1 else claim.parent)
        return lease

    def reserve(self, wanted: Sequence[Wanted]) -> list[Reservation | None]:
        """As `LocalTiers.reserve`, within the tenants' quotas."""
        if self.feed is not None:
            for each in wanted:
                self.feed.begin_at(each.tenant)
        if not any(self.quotas.bound(each.tenant) for each in wanted):
            return super().reserve(wanted)
        return [self._reserve(each) for each in wanted]

    def _reserve(self, wanted: Wanted) -> Reservation | None:
        room = self.quotas.room(wanted)
        if room < len(wanted.hashes):
            self.metrics.dropped("l2", Outcome.QUOTA, len(wanted.hashes) - room)
        if not room and wanted.hashes:
            return None
        reservation = self.hierarchy.reserve(wanted.hashes[:room], wanted.parent)
        if reservation is not None:
            self.quotas.took(wanted.tenant, reservation.hashes, reservation.parents)
        return reservation

    def _is_repeated(self, last: ChainHash, promised: int) -> bool:
        """Whether this is a question that was in vain a moment ago: an engine asks again while the request waits."""
        now = time.monotonic()
        before = self._vain.pop(last, None)
        if not promised:
            self._vain[last] = now
            if len(self._vain) > _MAX_VAIN:
                self._vain.popitem(last=False)
        return before is not None and now - before < _SAME
