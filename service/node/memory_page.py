"""What fills memory, for people: `/memory`, and the series of it that Prometheus scrapes."""

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.metrics_core import Metric

from kvtier.service.node.daemon import Daemon
from kvtier.service.node.memory_use import OTHERS, UNKNOWN, UNSALTED, MemoryUse, Tenants, TierUse
from kvtier.service.node.namespaces import Namespace
from kvtier.service.node.operator_access import name_of
from kvtier.service.observe import gauge, statuses
from kvtier.tiers import ChainHash
from kvtier.tiers.hierarchy import Hierarchy
from kvtier.tiers.naming import root_hash


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
