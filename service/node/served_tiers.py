"""A model's tiers as clients get them: lookups counted and traced, tenants kept within quotas of host memory."""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from threading import Lock
from typing import TYPE_CHECKING, Final, NamedTuple

from kvtier.service.explain import LoggedRequest, Recent, RequestLog, tenant_of
from kvtier.service.node.lookups import PastLookups, TraceRecorder
from kvtier.tiers import L1, L2, TIERS, ChainHash, ConfigError, Outcome, TenantBound
from kvtier.tiers.config import Config, format_size
from kvtier.tiers.hierarchy import Claim, HeldRun, Hierarchy, Overlap, Pending, Rates, Wanted, in_runs
from kvtier.tiers.host import HostTier
from kvtier.tiers.naming import root_hash
from kvtier.tiers.pool import Causes, Lease, Reservation, SlotPool
from kvtier.tiers.reuse import RequestEnd

if TYPE_CHECKING:
    from kvtier.service.events import TierFeed

MAX_QUOTAS: Final = 1024  # tenants that have one
_MOST_ROOTS: Final = 4096  # tenants known
MOST_HEADS: Final = 1 << 16  # first blocks whose tenant is known


class TenantLimits(NamedTuple):
    """Bytes of each model's host memory and slab that a tenant may have; None: no bound."""

    host: int | None = None
    slab: int | None = None


UNBOUND: Final = TenantLimits()


class Quota(NamedTuple):
    cache_salt: str
    limits: TenantLimits
    used: int  # bytes it has in host memory
    slab_used: int  # … and in the slab, of those stored under a bound since that was opened


class Quotas:
    """The quotas of one model. Thread-safe. A tenant without a quota costs nothing, unless there is a default one.

    The default binds each cache_salt by itself, from its first store on; it does not bind requests without a salt.

    A tenant is identified by the root of chains with its salt (`Wanted.tenant`). Blocks in L2 before its quota, and
    promoted ones, count for it if its chains begin at that root; under vLLM's names they do not. A tenant that would
    pass its quota loses its own least recently stored blocks, last blocks first; leased blocks stay, and if that is
    not enough, stores are refused. Blocks that the pool evicts are noticed late: a tenant never has more than its
    quota, and may for a while be counted as having more than it has. The slab looks up whose a block is while L2 has it
    (`of_block`), and keeps the bound itself.
    Lock: `_lock` guards everything; the pool's is taken inside it.
    """

    def __init__(self, host: HostTier, fingerprint: bytes, default: TenantLimits = UNBOUND) -> None:
        """`default`: for each tenant that has no quota; of host memory a block at least."""
        self._unsalted = root_hash(fingerprint)
        self._others: dict[ChainHash, _Tenant] = {}  # that have the default
        self._num_noted = 0  # blocks stored since `keep` was last called
        self._host, self._fingerprint = host, fingerprint
        self._lock = Lock()
        self._tenants: dict[ChainHash, _Tenant] = {}  # by the root
        self._default = UNBOUND
        self.binds = False  # some tenant
        self.set_default(default)

    def __len__(self) -> int:
        return len(self._tenants)

    def set(self, cache_salt: str, limits: TenantLimits) -> None:
        """Give the tenant a quota, and evict what exceeds it. Reads all of L2. ConfigError: too many, too small."""
        self.require(limits)
        root, tenant = root_hash(self._fingerprint, cache_salt=cache_salt), self._tenant(cache_salt, limits)
        with self._lock:
            if len(self._tenants) >= MAX_QUOTAS and root not in self._tenants:
                raise ConfigError(f"cache_salt: {MAX_QUOTAS} tenants have a quota already; remove one first")
            self._others.pop(root, None)
            self.binds = True
            self._tenants[root] = tenant  # from here on stores are counted; then the blocks stored before
        for run in in_runs(dict(self._host.lineage().pairs())):
            with self._lock:
                if run.parent == root or run.parent in tenant:
                    tenant.adopt(run)
        with self._lock:
            tenant.make_room(self._host.pool, len(tenant) - tenant.limit, ())

    def set_default(self, limits: TenantLimits) -> None:
        """Change the default quota, and evict what exceeds it. Blocks stored while there was none do not count."""
        with self._lock:
            host = None if limits.host is None else max(limits.host, self._host.region.slot_stride)
            self._default = TenantLimits(host, limits.slab)
            self.binds = any(self._default) or bool(self._tenants)
            if not any(self._default):
                self._others.clear()
            limit = self._tenant("", self._default).limit
            for tenant in self._others.values():
                tenant.limits, tenant.limit = self._default, limit
                tenant.make_room(self._host.pool, len(tenant) - limit, ())

    def require(self, limits: TenantLimits) -> None:
        stride = self._host.region.slot_stride
        for name, size in zip(("size", "slab"), limits, strict=True):
            if size is not None and size < stride:
                least = format_size(stride)
                raise ConfigError(f'{name} "{format_size(size)}": a block of this model takes {least}; give more')

    def remove(self, cache_salt: str) -> bool:
        with self._lock:
            return self._tenants.pop(root_hash(self._fingerprint, cache_salt=cache_salt), None) is not None

    def listing(self, slab_used: Callable[[ChainHash], int] = lambda root: 0) -> list[Quota]:
        """`slab_used`: bytes of the tenant whose chains begin there."""
        with self._lock:
            tenants = [(root, tenant, tenant.names()) for root, tenant in self._tenants.items()]
        stride, pool = self._host.region.slot_stride, self._host.pool
        return [
            Quota(each.cache_salt, each.limits, sum(pool.holds(names)) * stride, slab_used(root))
            for root, each, names in tenants
        ]

    def of_block(self, name: ChainHash) -> TenantBound | None:
        """As `TenantBounds`."""
        with self._lock:
            for known in (self._tenants, self._others):
                for root, tenant in known.items():
                    if name in tenant:
                        return None if tenant.limits.slab is None else TenantBound(root, tenant.limits.slab)
        return None

    def recount(self) -> None:
        """Blocks came to L2 without their tenants: count all of L2 again."""
        for quota in self.listing():
            self.set(quota.cache_salt, quota.limits)

    def bound(self, name: ChainHash) -> bool:
        return name in self._tenants or (any(self._default) and name != self._unsalted)

    def room(self, wanted: Wanted) -> int:
        """How many leading blocks the tenant may store now; evicts its own blocks for as many as possible."""
        if not self.bound(wanted.tenant):
            return len(wanted.hashes)
        with self._lock:
            tenant = self._of(wanted.tenant)
            if tenant is None:
                return len(wanted.hashes)
            new = [chain_hash not in tenant for chain_hash in wanted.hashes]
            free = tenant.limit - len(tenant)
            if (short := sum(new) - free) > 0:
                free += tenant.make_room(self._host.pool, short, {wanted.parent, *wanted.hashes})
            for number, is_new in enumerate(new):
                if is_new and (free := free - 1) < 0:
                    return number
            return len(wanted.hashes)

    def took(self, name: ChainHash, hashes: Sequence[ChainHash], parents: Sequence[ChainHash | None]) -> None:
        if not hashes or not self.bound(name):
            return
        with self._lock:
            self._note(len(hashes))  # first: it removes tenants without blocks
            if (tenant := self._of(name)) is not None:
                if name not in self._tenants:
                    self._others[name] = tenant
                for chain_hash, parent in zip(hashes, parents, strict=True):
                    tenant.add(chain_hash, parent or name)

    def promoted(self, hashes: Sequence[ChainHash], parent: ChainHash) -> None:
        """Count consecutive leased blocks, maybe promoted, and evict others of the tenant for them."""
        if not (self._tenants or self._others) or not hashes:
            return
        with self._lock:
            known = {**self._others, **self._tenants}
            tenant = known.get(parent)
            tenant = tenant if tenant is not None else next((each for each in known.values() if parent in each), None)
            if tenant is None or hashes[-1] in tenant:
                return
            for chain_hash, before in zip(hashes, [parent, *hashes[:-1]], strict=True):
                tenant.add(chain_hash, before)
            tenant.make_room(self._host.pool, len(tenant) - tenant.limit, set(hashes))

    def _tenant(self, cache_salt: str, limits: TenantLimits) -> "_Tenant":
        num_slots = self._host.pool.num_slots
        limit = num_slots if limits.host is None else min(limits.host // self._host.region.slot_stride, num_slots)
        return _Tenant(cache_salt, limits, limit)

    def _of(self, name: ChainHash) -> "_Tenant | None":
        """The tenant whose chains begin there, if a quota binds it; kept once it has a block. Under the lock."""
        tenant = self._tenants.get(name, self._others.get(name))
        if tenant is None and self.bound(name):
            tenant = self._tenant("", self._default)
        return tenant

    def _note(self, num_blocks: int) -> None:
        """Each time L2 could be full of new blocks, remove evicted ones, and tenants without any. Under the lock."""
        self._num_noted += num_blocks
        if self._num_noted > self._host.pool.num_slots and self._others:
            self._num_noted = num_blocks
            for name, tenant in list(self._others.items()):
                tenant.keep(self._host.pool)
                if not len(tenant):
                    del self._others[name]


class _Tenant:
    """The blocks counted for one tenant. No lock. The least recently stored leaf goes first, then its parent."""

    def __init__(self, cache_salt: str, limits: TenantLimits, limit: int) -> None:
        self.cache_salt, self.limits = cache_salt, limits
        self.limit = limit  # blocks
        self._parents: dict[ChainHash, ChainHash] = {}
        self._absent: set[ChainHash] = set()  # at the last `keep`
        self._children: Counter[ChainHash] = Counter()
        self._leaves: OrderedDict[ChainHash, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._parents)

    def __contains__(self, chain_hash: ChainHash) -> bool:
        return chain_hash in self._parents

    def names(self) -> list[ChainHash]:
        return list(self._parents)

    def keep(self, pool: SlotPool) -> None:
        """Remove blocks absent at this call and the last one: a block absent once may be being filled."""
        before, names = self._parents, self.names()
        absent = {name for name, is_held in zip(names, pool.holds(names), strict=True) if not is_held}
        evicted, self._absent = absent & self._absent, absent - self._absent
        self._parents, self._children, self._leaves = {}, Counter(), OrderedDict()
        for chain_hash in names:
            if chain_hash not in evicted:
                self.add(chain_hash, before[chain_hash])

    def add(self, chain_hash: ChainHash, parent: ChainHash) -> None:
        if chain_hash not in self._parents:
            self._parents[chain_hash] = parent
            self._children[parent] += 1
            self._leaves.pop(parent, None)
            if not self._children[chain_hash]:
                self._leaves[chain_hash] = None

    def adopt(self, run: HeldRun) -> None:
        """Add blocks older than all others; the parent of their first is known."""
        for chain_hash, parent in zip(run.hashes, [run.parent, *run.hashes[:-1]], strict=True):
            self.add(chain_hash, parent)
        if run.hashes[-1] in self._leaves:
            self._leaves.move_to_end(run.hashes[-1], last=False)

    def make_room(self, pool: SlotPool, count: int, spare: Collection[ChainHash]) -> int:
        """Evict up to `count` blocks, none of `spare` nor in use. Returns how many were evicted, now or before."""
        evicted = 0
        if count <= 0:
            return evicted
        for leaf in list(self._leaves):
            branch = self._branch(leaf, count - evicted, spare)
            for chain_hash, is_evicted in zip(branch, pool.evict_idle(branch), strict=True):
                if not is_evicted:
                    break
                self._remove(chain_hash)
                evicted += 1
            if evicted == count:
                break
        return evicted

    def _branch(self, leaf: ChainHash, count: int, spare: Collection[ChainHash]) -> list[ChainHash]:
        """The leaf and its ancestors, up to where another branch begins."""
        branch: list[ChainHash] = []
        at = leaf
        while len(branch) < count and at in self._parents and at not in spare and self._children[at] == bool(branch):
            branch.append(at)
            at = self._parents[at]
        return branch

    def _remove(self, leaf: ChainHash) -> None:
        parent = self._parents.pop(leaf)
        del self._leaves[leaf]
        self._children[parent] -= 1
        if not self._children[parent]:
            del self._children[parent]
            if parent in self._parents:
                self._leaves[parent] = None
                self._leaves.move_to_end(parent, last=False)


class Tenants:
    """The tenants of a model that have stored since the start. Bounded. On the loop's thread, except `of`.

    A tenant is identified by the root of chains with its salt. Under vLLM's names all chains begin at one root, so
    each first block is recorded with the tenant that stored it.
    """

    def __init__(self, fingerprint: bytes) -> None:
        self.unsalted = root_hash(fingerprint)
        self._roots: OrderedDict[ChainHash, None] = OrderedDict()
        self._heads: OrderedDict[ChainHash, ChainHash] = OrderedDict()

    def record(self, wanted: Iterable[Wanted]) -> None:
        for each in wanted:
            if each.tenant != self.unsalted:
                self._roots[each.tenant] = None
                if len(self._roots) > _MOST_ROOTS:
                    self._roots.popitem(last=False)
                if each.parent == self.unsalted and each.hashes:
                    self._heads[each.hashes[0]] = each.tenant
                    if len(self._heads) > MOST_HEADS:
                        self._heads.popitem(last=False)

    def known(self) -> list[ChainHash]:
        """The roots of all tenants, those without a salt first. On any thread."""
        return [self.unsalted, *self._roots.copy()]

    def of(self, head: ChainHash, parent: ChainHash) -> ChainHash | None:
        if parent == self.unsalted:
            return self._heads.get(head, parent)
        return parent if parent in self._roots else None


# --- the tiers -------------------------------------------------------------------------------------------------------

MEASURED: Final = "measured"
ASSUMED: Final = "assumed"


class Savings:
    """Counts loaded tokens: in seconds at an engine's measured rate or the operator's assumed one, else as tokens."""

    def __init__(self, rates: Rates, assumed_rate: int | None) -> None:
        self.rates, self.assumed_rate = rates, assumed_rate
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
        self.num_tokens += num_tokens
        if (seconds := self.rates.prefill_seconds(start, num_tokens)) is not None:
            self.seconds[MEASURED] += seconds
        elif self.assumed_rate is not None:
            self.seconds[ASSUMED] += num_tokens / self.assumed_rate
        else:
            self.num_untimed += num_tokens


_MOST_OPEN: Final = 1024  # lookups whose request has not ended
_MOST_NAMES: Final = 1 << 16  # of blocks, in all lookups that are kept
_LAST: Final = 3  # last names of a prompt that may end its lookup: a lookup may omit the last


class _OpenLookup(NamedTuple):
    claim: Claim
    causes: Causes
    num_requests: int


class SeenRequests:
    """Joins each lookup to the end of its request. On the loop's thread, except `recent`."""

    def __init__(self, fingerprint: bytes, log: RequestLog | None = None) -> None:
        self.recent: Recent[Sequence[ChainHash]] = Recent(most_items=_MOST_NAMES)  # names of prompts
        self._fingerprint, self._log = fingerprint, log
        self._open: OrderedDict[ChainHash, _OpenLookup] = OrderedDict()  # by the last block looked up
        self._num_names = 0

    def looked_up(self, claim: Claim, causes: Causes | None) -> None:
        last = claim.hashes[-1]
        if (before := self._open.pop(last, None)) is not None:
            self._num_names -= len(before.claim.hashes)
        self._open[last] = _OpenLookup(claim, causes or {}, 1 if before is None else before.num_requests + 1)
        self._num_names += len(claim.hashes)
        while len(self._open) > _MOST_OPEN or self._num_names > _MOST_NAMES:
            self._num_names -= len(self._open.popitem(last=False)[1].claim.hashes)

    def ended(self, end: RequestEnd) -> None:
        claim, causes = self._take(end)
        if end.request:
            names = claim.hashes if claim is not None else end.names[: end.num_prompt]
            self.recent.record(end.client, end.request, names)
        if self._log is not None:
            self._log.write(self._logged(end, claim, causes))

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

    def _logged(self, end: RequestEnd, claim: Claim | None, causes: Causes) -> LoggedRequest:
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


def default_limits(config: Config) -> TenantLimits:
    return TenantLimits(config.service.default_quota, config.service.default_slab_quota)


_SAME: Final = 1.0  # seconds: a lookup that missed, repeated within them, is of a request that still waits
_MAX_MISSED: Final = 4096  # such lookups remembered


class ServedTiers:
    """A hierarchy's verbs for clients, counted, traced and limited. On the loop's thread."""

    def __init__(
        self,
        hierarchy: Hierarchy,
        fingerprint: bytes,
        default_quota: TenantLimits = UNBOUND,
        *,
        assumed_rate: int | None = None,
        kept_lookups: int = 0,
        log: RequestLog | None = None,
    ) -> None:
        """`default_quota`: of a tenant without one. `kept_lookups`: blocks that `past` keeps."""
        self.hierarchy = hierarchy
        self.quotas = Quotas(hierarchy.host, fingerprint, default_quota)
        for port in hierarchy.ports:
            port.bound(self.quotas.of_block)
        self.past = PastLookups(kept_lookups) if kept_lookups else None
        self.savings = Savings(hierarchy.rates, assumed_rate)
        self.tenants = Tenants(fingerprint)
        self.seen = SeenRequests(fingerprint, log)
        self.recorder: TraceRecorder | None = None  # while a trace is recorded
        self.feed: TierFeed | None = None  # if KV events are published
        self.is_short = False  # as `Hierarchy`'s
        self._missed: OrderedDict[ChainHash, float] = OrderedDict()  # last block looked up → when it last missed

    def reload(self, config: Config) -> None:
        """Put in force what a running daemon takes of its configuration."""
        self.quotas.set_default(default_limits(config))
        self.savings.assumed_rate = config.service.prefill_rate
        for port in self.hierarchy.ports:
            port.set_breakers(config.breaker.failures, config.breaker.retry_after)

    def poll(self, claim: Claim) -> int | Pending:
        """As `Hierarchy.poll`. Counts a whole request's answer, unless the same lookup missed a moment ago."""
        promised = self.hierarchy.poll(claim)
        if isinstance(promised, Pending) or claim.overlap is Overlap.BACK or not claim.hashes:
            return promised
        now, last = time.monotonic(), claim.hashes[-1]
        before = self._missed.pop(last, None)
        while self._missed and now - next(iter(self._missed.values())) >= _SAME:  # else they would accumulate
            self._missed.popitem(last=False)
        if not promised:
            self._missed[last] = now
            if len(self._missed) > _MAX_MISSED:
                self._missed.popitem(last=False)
        if before is None or now - before >= _SAME:  # else an engine repeats the lookup while its request waits
            assert claim.found is not None
            causes = claim.causes
            self.hierarchy.count(claim.found, causes=causes)
            self.seen.looked_up(claim, causes)
            if self.past is not None:
                self.past.record(claim.hashes, len(claim.hashes), claim.found.blocks - claim.found.miss, claim.num_l1)
            if self.recorder is not None:
                size = claim.block_size
                self.recorder.record(claim.hashes, len(claim.hashes) * size, block_size=size)
        return promised

    def ended(self, end: RequestEnd, client: int | None = None) -> None:
        """As `Hierarchy.ended`; the request log and a recorded trace get it, too. `client`: the request's tenant."""
        self.hierarchy.ended(end)
        self.seen.ended(end if client is None else end._replace(client=client))
        if self.recorder is not None:
            self.recorder.ended(end)

    def lease(self, claim: Claim) -> Lease:
        """As `Hierarchy.lease`; promoted blocks count into their tenant's quota."""
        lease = self.hierarchy.lease(claim)
        if lease.hashes and claim.block_size:
            self.savings.took(claim.num_l1 * claim.block_size, len(lease) * claim.block_size)
        self.quotas.promoted(lease.hashes, claim.hashes[claim.num_l1 - 1] if claim.num_l1 else claim.parent)
        return lease

    def reserve(self, wanted: Sequence[Wanted], *, may_retry: bool = False) -> list[Reservation | None]:
        tenants = self._note_stores(wanted)
        if not (self.quotas.binds and any(map(self.quotas.bound, tenants))):
            reservations = self.hierarchy.reserve(wanted, may_retry=may_retry)
            self.is_short = self.hierarchy.is_short
            return reservations
        self.is_short = False
        return [self._reserve(each, may_retry=may_retry) for each in wanted]

    def preallocate(self, count: int) -> tuple[list[int], list[int]]:
        """As `Hierarchy.preallocate`; none if a quota binds, since a slot without a name has no tenant."""
        return ([], []) if self.quotas.binds else self.hierarchy.preallocate(count)

    def reserve_at(
        self, wanted: Sequence[Wanted], slots: Sequence[int], generations: Sequence[int]
    ) -> list[Reservation | None]:
        self._note_stores(wanted)
        made = self.hierarchy.reserve_at(wanted, slots, generations)
        if self.quotas.binds:  # since they were preallocated
            for each, reservation in zip(wanted, made, strict=True):
                if reservation is not None:
                    self.quotas.took(each.tenant, reservation.hashes, reservation.parents)
        return made

    def _note_stores(self, wanted: Sequence[Wanted]) -> set[ChainHash]:
        """Record what a step stores; returns the tenants that do."""
        tenants = {each.tenant for each in wanted}  # usually one
        if self.feed is not None:
            for tenant in tenants:
                self.feed.begin_at(tenant)
        if tenants != {self.tenants.unsalted}:
            self.tenants.record(wanted)
        if self.past is not None:
            for each in wanted:
                self.past.record(each.hashes)
        return tenants

    def _reserve(self, wanted: Wanted, *, may_retry: bool) -> Reservation | None:
        room = self.quotas.room(wanted)
        if room < len(wanted.hashes):
            self.hierarchy.metrics.dropped(L2, Outcome.QUOTA, len(wanted.hashes) - room)
            self.hierarchy.host.pool.not_stored(wanted.hashes[room:], Outcome.QUOTA)
        if not room and wanted.hashes:
            return None
        wanted = replace(wanted, hashes=wanted.hashes[:room])
        (reservation,) = self.hierarchy.reserve([wanted], may_retry=may_retry)
        self.is_short |= self.hierarchy.is_short
        if reservation is not None:
            self.quotas.took(wanted.tenant, reservation.hashes, reservation.parents)
        return reservation
