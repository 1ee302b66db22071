"""The requests that a model's engines had lately: each one's lookup, and its end, which names it. Bounded."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvtier.service.explain import LoggedRequest, Recent, RequestLog, tenant_of
from kvtier.tiers import L1, TIERS, ChainHash, Outcome
from kvtier.tiers.hierarchy import Claim
from kvtier.tiers.pool import Causes
from kvtier.tiers.reuse import RequestEnd

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

    def _told(self, end: RequestEnd, claim: Claim | None, causes: Causes) -> LoggedRequest:
        blocks, missed, size = dict[str, int](), dict(causes), 0
        if claim is not None and claim.found is not None:
            blocks, size = dict(claim.found.by_tier), claim.block_size
            refused = Outcome.RECOMPUTE if claim.refusal is Outcome.RECOMPUTE else None
            for tier in [tier for tier in blocks if refused is not None and tier != L1]:
                missed[str(refused), tier] = blocks.pop(tier)
        return LoggedRequest(
            id=end.request,
            tenant=tenant_of(end.client, self._fingerprint),
            prompt_tokens=end.num_prompt_tokens,
            tokens={tier: size * blocks.get(tier, 0) for tier in TIERS},
            missed=missed,
            output_tokens=end.num_output_tokens,
            ttft=end.ttft or None,
            seconds=end.seconds or None,
        )
