"""What fills each tier of a model, by tenant and prefix: `/memory`, and its series for Prometheus."""

import hashlib
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from threading import Lock
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from prometheus_client.metrics_core import Metric

from kvtier.service.node.daemon import Daemon
from kvtier.service.node.namespaces import Namespace
from kvtier.service.node.operators import name_of
from kvtier.service.node.quota import MOST_HEADS, Tenants
from kvtier.service.observe import gauge, statuses
from kvtier.tiers import ChainHash, Lineage
from kvtier.tiers.hierarchy import Hierarchy, lineages
from kvtier.tiers.naming import root_hash
from kvtier.tiers.pool import Slots, Words

UNSALTED: Final = "no salt"
OTHERS: Final = "others"
UNKNOWN: Final = "not known"

_MOST_TENANTS: Final = 10  # told by themselves
_MOST_PREFIXES: Final = 10
_LONGEST: Final = 4096  # blocks of a prefix that are counted
_MIX: Final = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x27D4EB2F165667C5], np.uint64)


class TenantUse(NamedTuple):
    root: ChainHash | None  # None: not known; b"": of others, together
    num_blocks: int


class PrefixUse(NamedTuple):
    """Blocks that begin with the same blocks."""

    head: ChainHash  # the first of these
    root: ChainHash | None  # whose they are
    num_shared: int  # leading blocks that all of them have in common
    num_branches: int  # ways they go on after these
    num_blocks: int  # with them


class TierUse(NamedTuple):
    """What fills one tier."""

    num_blocks: int
    num_tenants: int
    tenants: Sequence[TenantUse]  # the largest first; then others and not known, if there are
    prefixes: Sequence[PrefixUse]  # the largest first


def use_of(lineage: Lineage, tenants: Tenants) -> TierUse:
    """What fills a tier that holds these blocks. Time and memory for each block, mostly outside the GIL."""
    names = lineage.names
    if not len(names):
        return TierUse(0, 0, (), ())
    parents = _parents(names @ _MIX, lineage.parents @ _MIX)
    heads = _heads(parents)
    sizes = np.bincount(heads, minlength=len(names))
    begun = np.flatnonzero(sizes)
    begun = begun[np.argsort(sizes[begun], kind="stable")[::-1]]
    owners = [tenants.of(names[i].tobytes(), lineage.parents[i].tobytes()) for i in begun[:MOST_HEADS].tolist()]
    by_root: dict[ChainHash | None, int] = {}
    for root, size in zip(owners, sizes[begun].tolist(), strict=False):
        by_root[root] = by_root.get(root, 0) + size
    unknown = by_root.pop(None, 0) + int(sizes[begun[MOST_HEADS:]].sum())
    ordered = sorted(by_root.items(), key=lambda each: each[1], reverse=True)
    told = [TenantUse(root, size) for root, size in ordered[:_MOST_TENANTS]]
    if rest := sum(size for _, size in ordered[_MOST_TENANTS:]):
        told.append(TenantUse(b"", rest))
    if unknown:
        told.append(TenantUse(None, unknown))
    top = begun[:_MOST_PREFIXES].tolist()
    shared = _shared(parents, top)
    prefixes = [
        PrefixUse(names[head].tobytes(), owner, *common, int(sizes[head]))
        for head, owner, common in zip(top, owners, shared, strict=False)
    ]
    return TierUse(len(names), len(by_root), told, prefixes)


def _parents(names: Words, parents: Words) -> Slots:
    """The place of each block's parent; its own if the parent is not there."""
    order = np.argsort(names)
    at = np.searchsorted(names[order], parents).clip(max=len(names) - 1)
    place = order[at]
    return np.where(names[place] == parents, place, np.arange(len(names)))


def _heads(parents: Slots) -> Slots:
    """The first block of each block's chain."""
    heads = parents
    for _ in range(64):  # twice as far with each turn; names that are no hashes might make a circle
        further = heads[heads]
        if (further == heads).all():
            break
        heads = further
    return heads


def _shared(parents: Slots, heads: Sequence[int]) -> list[tuple[int, int]]:
    """For each head: how many blocks it and its only children make, and how many children the last of them has."""
    everyone = np.arange(len(parents))
    is_child = parents != everyone
    num_children = np.bincount(parents[is_child], minlength=len(parents))
    child: NDArray[np.int64] = np.zeros(len(parents), np.int64)
    child[parents[is_child]] = everyone[is_child]
    found = []
    for head in heads:
        at, length = head, 1
        while num_children[at] == 1 and length < _LONGEST:
            at, length = int(child[at]), length + 1
        found.append((length, int(num_children[at])))
    return found


class MemoryUse:
    """What fills the tiers of each model: looked at when somebody asks, and not again for a while. Thread-safe.

    A look takes some time for each block, so that the next comes after fifty times as long, and ten seconds at least.
    """

    def __init__(self, pause: float = 10.0) -> None:
        self._pause = pause
        self._key = secrets.token_bytes(16)
        self._lock = Lock()  # held by whoever looks
        self._found: dict[bytes, tuple[float, dict[str, TierUse]]] = {}  # fingerprint → good until, by tier

    def of(self, models: Mapping[bytes, tuple[Hierarchy, Tenants]]) -> dict[bytes, dict[str, TierUse]]:
        """By fingerprint and tier. Who asks while another looks gets what was found before."""
        if self._lock.acquire(blocking=not self._found):
            try:
                for fingerprint, (hierarchy, tenants) in models.items():
                    if time.monotonic() >= self._found.get(fingerprint, (0.0, {}))[0]:
                        began = time.monotonic()
                        use = {tier: use_of(each, tenants) for tier, each in lineages(hierarchy).items()}
                        now = time.monotonic()
                        self._found[fingerprint] = (now + max(self._pause, 50 * (now - began)), use)
                for gone in self._found.keys() - models.keys():
                    del self._found[gone]
            finally:
                self._lock.release()
        return {fingerprint: use for fingerprint, (_, use) in list(self._found.items())}

    def label(self, name: ChainHash) -> str:
        """For people who may not know names: the same for one name while this process lives, and no way back."""
        return hashlib.blake2b(name, key=self._key, digest_size=4).hexdigest()


def memory(daemon: Daemon, use: MemoryUse, *, named: bool) -> statuses.MemoryStatus:
    """By tier, tenant and prefix. `named`: for operators, who may know names. Waits for the loop as `status` does."""
    namespaces, limits = daemon.call(lambda: (daemon.namespaces(), dict(daemon.limits)))
    found = use.of(_models(namespaces))
    models = []
    for namespace in namespaces:
        tiers = found.get(namespace.fingerprint, {})
        quotas = {root_hash(namespace.fingerprint, cache_salt=each): (each, limits[each]) for each in limits}
        shown = _ShownNames(namespace.tiers.tenants, use, quotas if named else {}, named=named)
        told = {tier: _tier(each, namespace.blocks.block_size, namespace.blocks.block_bytes, shown)
                for tier, each in tiers.items()}  # fmt: skip
        models.append(statuses.ModelMemory(model=name_of(namespace.fingerprint), tiers=told))
    return statuses.MemoryStatus(named=named, models=models)


def memory_series(namespaces: list[Namespace], use: MemoryUse) -> Iterator[Metric]:
    """Blocks by tenant, a label each, and how many tenants there are."""
    found = use.of(_models(namespaces))
    blocks: dict[tuple[str, str, str], float] = {}
    tenants: dict[tuple[str, str], float] = {}
    for namespace in namespaces:
        model, shown = name_of(namespace.fingerprint), _ShownNames(namespace.tiers.tenants, use, {}, named=False)
        for tier, each in found.get(namespace.fingerprint, {}).items():
            tenants[model, tier] = each.num_tenants
            for tenant in each.tenants:
                blocks[model, tier, shown.tenant(tenant.root)] = tenant.num_blocks
    yield gauge(
        "kvtier_tenant_blocks", "Blocks by whose they are; a label says nothing of the cache_salt", blocks,
        "fingerprint", "tier", "tenant",
    )  # fmt: skip
    yield gauge("kvtier_tenants", "Tenants that have blocks, as far as they are known", tenants, "fingerprint", "tier")


def _models(namespaces: list[Namespace]) -> Mapping[bytes, tuple[Hierarchy, Tenants]]:
    return {each.fingerprint: (each.hierarchy, each.tiers.tenants) for each in namespaces}


class _ShownNames:
    """What tenants and blocks are called, for operators or for everybody."""

    def __init__(
        self, tenants: Tenants, use: MemoryUse, quotas: Mapping[ChainHash, tuple[str, int]], *, named: bool
    ) -> None:
        """`quotas`: by the tenant's root its cache_salt and its bytes of host memory."""
        self._tenants, self._use, self.quotas, self._named = tenants, use, quotas, named

    def tenant(self, root: ChainHash | None) -> str:
        if root is None:
            return UNKNOWN
        if not root:
            return OTHERS
        return UNSALTED if root == self._tenants.unsalted else self._use.label(root)

    def block(self, name: ChainHash) -> str:
        return name.hex() if self._named else self._use.label(name)


def _tier(use: TierUse, block_size: int, block_bytes: int, shown: _ShownNames) -> statuses.TierMemory:
    tenants = []
    for each in use.tenants:
        quota = None if each.root is None else shown.quotas.get(each.root)
        named: dict[str, Any] = {} if quota is None else {"cache_salt": quota[0], "quota_bytes": quota[1]}
        tenants.append(
            statuses.TenantMemory(
                tenant=shown.tenant(each.root), blocks=each.num_blocks, bytes=each.num_blocks * block_bytes, **named
            )
        )
    prefixes = [
        statuses.PrefixMemory(
            prefix=shown.block(each.head),
            tenant=shown.tenant(each.root),
            tokens=each.num_shared * block_size,
            branches=each.num_branches,
            blocks=each.num_blocks,
            bytes=each.num_blocks * block_bytes,
        )
        for each in use.prefixes
    ]
    return statuses.TierMemory(
        blocks=use.num_blocks,
        bytes=use.num_blocks * block_bytes,
        num_tenants=use.num_tenants,
        tenants=tenants,
        prefixes=prefixes,
    )
