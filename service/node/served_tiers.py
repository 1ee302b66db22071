"""A model's tiers as the daemon's clients get them: lookups counted and traced, tenants kept within their quotas."""

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, NamedTuple

from kvtier.service.explain import EndedRequest, Recent, RequestLog, tenant_of
from kvtier.service.node.lookups import PastLookups, TraceRecorder
from kvtier.service.node.quota import Quotas, Tenants
from kvtier.tiers import L1, L2, TIERS, ChainHash, Outcome
from kvtier.tiers.hierarchy import Claim, Ends, Hierarchy, Pending, Rates, Wanted
from kvtier.tiers.pool import Causes, Lease, Reservation
from kvtier.tiers.reuse import RequestEnd

if TYPE_CHECKING:
    from kvtier.service.events import TierFeed

MEASURED: Final = "measured"
ASSUMED: Final = "assumed"


class Savings:
    """Counts the blocks that clients took instead of computing them. On the loop's thread; others may read.

    Seconds are what an engine of this model measured last, for so many tokens at that place of a prompt; else what the
    operator assumes. Tokens are counted even if there is neither.
    """

    def __init__(self, rates: Rates, assumed_rate: int | None) -> None:
        """`assumed_rate`: tokens a second of prefill, if no engine has told any."""
        self.rates = rates
        self.assumed_rate = assumed_rate
        self.num_tokens = 0
        self.num_untimed = 0  # of these, no rate was known
        self.seconds = {MEASURED: 0.0, ASSUMED: 0.0}

    @property
    def tokens_per_second(self) -> float | None:
        """Of prefill now, whether measured or assumed."""
        measured = self.rates.tokens_per_second
        return self.assumed_rate if measured is None else measured

    @property
    def is_assumed(self) -> bool:
        return self.rates.tokens_per_second is None and self.assumed_rate is not None

    def took(self, start: int, num_tokens: int) -> None:
        """A request takes the KV of so many tokens, behind its first `start`."""
        self.num_tokens += num_tokens
        if (seconds := self.rates.prefill_seconds(start, num_tokens)) is not None:
            self.seconds[MEASURED] += seconds
        elif self.assumed_rate is not None:
            self.seconds[ASSUMED] += num_tokens / self.assumed_rate
        else:
            self.num_untimed += num_tokens


_MOST_OPEN: Final = 1024  # lookups whose end has not come
_MOST_NAMES: Final = 1 << 16  # of blocks, in all lookups that are kept
_LAST: Final = 3  # names of a prompt by one of which its lookup is known: the last may not have been asked for


@dataclass(frozen=True, slots=True)
class SeenRequest:
    """A request of an engine's that ended."""

    names: Sequence[ChainHash]  # of its prompt's blocks, from the first

    @property
    def num_items(self) -> int:
        return len(self.names)


class _AskedLookup(NamedTuple):
    """The last lookup of a prompt, and how many requests asked for it whose ends have not come."""

    claim: Claim
    causes: Causes
    num_requests: int


class SeenRequests:
    """Joins each lookup to the end of its request. On the loop's thread, but `recent`."""

    def __init__(self, fingerprint: bytes, log: RequestLog | None = None) -> None:
        self.recent: Recent[SeenRequest] = Recent(most_items=_MOST_NAMES)
        self._fingerprint = fingerprint
        self._log = log
        self._open: OrderedDict[ChainHash, _AskedLookup] = OrderedDict()  # by the last block asked for
        self._num_names = 0

    def looked_up(self, claim: Claim, causes: Causes | None) -> None:
        """A request's blocks were asked for, and found or not."""
        last = claim.hashes[-1]
        if (before := self._open.pop(last, None)) is not None:
            self._num_names -= len(before.claim.hashes)
        self._open[last] = _AskedLookup(claim, causes or {}, 1 if before is None else before.num_requests + 1)
        self._num_names += len(claim.hashes)
        while len(self._open) > _MOST_OPEN or self._num_names > _MOST_NAMES:
            self._num_names -= len(self._open.popitem(last=False)[1].claim.hashes)

    def ended(self, end: RequestEnd) -> None:
        """A request ended. One whose lookup is not known any more has no tiers and no causes."""
        claim, causes = self._take(end)
        if end.request:
            names = claim.hashes if claim is not None else end.names[: end.num_prompt]
            self.recent.note(end.client, end.request, SeenRequest(names))
        if self._log is not None:
            self._log.write(self._told(end, claim, causes))

    def _take(self, end: RequestEnd) -> tuple[Claim | None, Causes]:
        for name in reversed(end.names[max(0, end.num_prompt - _LAST) : end.num_prompt]):
            if (found := self._open.get(name)) is not None:
                if found.num_requests > 1:  # others with the same prompt are under way
                    self._open[name] = found._replace(num_requests=found.num_requests - 1)
                else:
                    del self._open[name]
                    self._num_names -= len(found.claim.hashes)
                return found.claim, found.causes
        return None, {}

    def _told(self, end: RequestEnd, claim: Claim | None, causes: Causes) -> EndedRequest:
        blocks, missed, size = dict[str, int](), dict(causes), 0
        if claim is not None and claim.found is not None:
            blocks, size = dict(claim.found.by_tier), claim.block_size
            refused = Outcome.RECOMPUTE if claim.refusal is Outcome.RECOMPUTE else None
            for tier in [tier for tier in blocks if refused is not None and tier != L1]:
                missed[str(refused), tier] = blocks.pop(tier)
        return EndedRequest(
            id=end.request,
            tenant=tenant_of(end.client, self._fingerprint),
            prompt_tokens=end.num_prompt_tokens,
            tokens={tier: size * blocks.get(tier, 0) for tier in TIERS},
            missed=missed,
            output_tokens=end.num_output_tokens,
            ttft=end.ttft or None,
            seconds=end.seconds or None,
        )


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
