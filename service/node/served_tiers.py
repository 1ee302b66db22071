"""A model's tiers as the daemon's clients get them: lookups counted and traced, tenants kept within their quotas."""

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from kvtier.service.explain import RequestLog
from kvtier.service.node.lookup_trace import TraceRecorder
from kvtier.service.node.memory_use import Tenants
from kvtier.service.node.past_lookups import PastLookups
from kvtier.service.node.quota import Quotas
from kvtier.service.node.savings import Savings
from kvtier.service.node.seen_requests import SeenRequests
from kvtier.tiers import L2, ChainHash, Outcome
from kvtier.tiers.hierarchy import Claim, Ends, Hierarchy, Pending, Wanted
from kvtier.tiers.pool import Lease, Reservation
from kvtier.tiers.reuse import RequestEnd

if TYPE_CHECKING:
    from kvtier.service.events import TierFeed

_SAME: Final = 1.0  # seconds within which a question in vain, asked again, is one request's that waits its turn
_MAX_VAIN: Final = 4096  # such questions remembered


class ServedTiers:
    """A hierarchy's verbs for the clients of a daemon, on the loop's thread: those it counts, traces or limits.

    All others are the hierarchy's own. `poll` answers each claim once.
    """

    def __init__(
        self,
        hierarchy: Hierarchy,
        fingerprint: bytes,
        default_quota: int | None = None,
        *,
        assumed_rate: int | None = None,
        kept_lookups: int = 0,
        log: RequestLog | None = None,
    ) -> None:
        """`default_quota`: bytes of L2 for each tenant that has no quota. `assumed_rate`: as `Savings` has it.

        `kept_lookups`: blocks of lookups that `past` keeps; 0: there is none. `log`: where requests are told.
        """
        self.hierarchy = hierarchy
        self.quotas = Quotas(hierarchy.host, fingerprint, default_quota)
        self.past = PastLookups(kept_lookups) if kept_lookups else None
        self.savings = Savings(hierarchy.rates, assumed_rate)
        self.tenants = Tenants(fingerprint)
        self.seen = SeenRequests(fingerprint, log)
        self.recorder: TraceRecorder | None = None  # while somebody records
        self.feed: TierFeed | None = None  # where KV events are published
        self._vain: OrderedDict[ChainHash, float] = OrderedDict()  # last block asked for → when it was last in vain

    def poll(self, claim: Claim) -> int | Pending:
        """As `Hierarchy.poll`; the answer is counted as a request's lookup, that of a part of one is not."""
        promised = self.hierarchy.poll(claim)
        if isinstance(promised, Pending) or claim.ends is Ends.BACK or not claim.hashes:
            return promised
        if not self._is_repeated(claim.hashes[-1], promised):
            assert claim.found is not None
            causes = claim.causes
            self.hierarchy.count(claim.found, causes=causes)
            self.seen.looked_up(claim, causes)
            if self.past is not None:
                self.past.looked_up(claim.hashes, claim.found.blocks - claim.found.miss, claim.num_l1)
            if self.recorder is not None:
                size = claim.block_size
                self.recorder.record(claim.hashes, len(claim.hashes) * size, block_size=size)
        return promised

    def ended(self, end: RequestEnd, client: int | None = None) -> None:
        """As `Hierarchy.ended`; the request log and a trace that is recorded tell it, too. `client`: at its engine."""
        self.hierarchy.ended(end)
        self.seen.ended(end if client is None else end._replace(client=client))
        if self.recorder is not None:
            self.recorder.ended(end)

    def take(self, claim: Claim) -> Lease:
        """As `Hierarchy.take`; what came up from below counts into its tenant's quota."""
        lease = self.hierarchy.take(claim)
        if lease.hashes and claim.block_size:
            self.savings.took(claim.num_l1 * claim.block_size, len(lease) * claim.block_size)
        self.quotas.promoted(lease.hashes, claim.hashes[claim.num_l1 - 1] if claim.num_l1 else claim.parent)
        return lease

    def reserve(self, wanted: Sequence[Wanted], *, may_retry: bool = False) -> list[Reservation | None]:
        """As `Hierarchy.reserve`, within the tenants' quotas."""
        tenants = {each.tenant for each in wanted}  # mostly one
        if self.feed is not None:
            for tenant in tenants:
                self.feed.begin_at(tenant)
        self.tenants.note(wanted)
        if self.past is not None:
            for each in wanted:
                self.past.stored(each.hashes)
        if not any(map(self.quotas.bound, tenants)):
            return self.hierarchy.reserve(wanted)
        return [self._reserve(each) for each in wanted]

    def _reserve(self, wanted: Wanted) -> Reservation | None:
        room = self.quotas.room(wanted)
        if room < len(wanted.hashes):
            self.hierarchy.metrics.dropped(L2, Outcome.QUOTA, len(wanted.hashes) - room)
            self.hierarchy.host.pool.not_stored(wanted.hashes[room:], Outcome.QUOTA)
        if not room and wanted.hashes:
            return None
        (reservation,) = self.hierarchy.reserve([replace(wanted, hashes=wanted.hashes[:room])])
        if reservation is not None:
            self.quotas.took(wanted.tenant, reservation.hashes, reservation.parents)
        return reservation

    def _is_repeated(self, last: ChainHash, promised: int) -> bool:
        """Whether this is a question that was in vain a moment ago: an engine asks again while the request waits."""
        now = time.monotonic()
        before = self._vain.pop(last, None)
        while self._vain and now - next(iter(self._vain.values())) >= _SAME:  # they would add up
            self._vain.popitem(last=False)
        if not promised:
            self._vain[last] = now
            if len(self._vain) > _MAX_VAIN:
                self._vain.popitem(last=False)
        return before is not None and now - before < _SAME
