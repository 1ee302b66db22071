"""The daemon's status and what fills its tiers: `/status`, `/memory`, and Prometheus' metrics."""

import hashlib
import os
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import PurePath
from threading import Lock
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from prometheus_client.metrics_core import Metric

from kvtier import __version__
from kvtier.service.node.daemon import Daemon
from kvtier.service.node.health import Wanting
from kvtier.service.node.lookups import OptimumWatch
from kvtier.service.node.loop import now
from kvtier.service.node.namespaces import Namespace
from kvtier.service.node.operators import Pins
from kvtier.service.node.served_tiers import MOST_HEADS, Tenants
from kvtier.service.observe import (
    MetricValues,
    counter,
    figures,
    gauge,
    labelled,
    reloads,
    spans,
    statuses,
    text_of,
    wanting,
)
from kvtier.tiers import ChainHash, Lineage, tier_captions, tracing
from kvtier.tiers.config import Config
from kvtier.tiers.hierarchy import Hierarchy, TierPort, lineages
from kvtier.tiers.naming import root_hash
from kvtier.tiers.pool import Slots, Words
from kvtier.tiers.reuse import EDGES

UNSALTED: Final = "no salt"
OTHERS: Final = "others"
UNKNOWN: Final = "not known"

_MOST_TENANTS: Final = 10  # listed one by one; the rest as one
_MOST_PREFIXES: Final = 10
_LONGEST: Final = 4096  # blocks of a prefix that are counted
_MIX: Final = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x27D4EB2F165667C5], np.uint64)


class TenantUse(NamedTuple):
    root: ChainHash | None  # None: not known; b"": of others, together
    num_blocks: int


class PrefixUse(NamedTuple):
    head: ChainHash  # the first of these
    root: ChainHash | None  # the tenant's
    num_shared: int  # leading blocks that all chains share
    num_branches: int  # branches after these
    num_blocks: int  # all blocks below `head`, with it


class TierUse(NamedTuple):
    num_blocks: int
    num_tenants: int
    tenants: Sequence[TenantUse]  # the largest first; then others and not known, if any
    prefixes: Sequence[PrefixUse]  # the largest first


def use_of(lineage: Lineage, tenants: Tenants) -> TierUse:
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
    listed = [TenantUse(root, size) for root, size in ordered[:_MOST_TENANTS]]
    if rest := sum(size for _, size in ordered[_MOST_TENANTS:]):
        listed.append(TenantUse(b"", rest))
    if unknown:
        listed.append(TenantUse(None, unknown))
    top = begun[:_MOST_PREFIXES].tolist()
    shared = _shared(parents, top)
    prefixes = [
        PrefixUse(names[head].tobytes(), owner, *common, int(sizes[head]))
        for head, owner, common in zip(top, owners, shared, strict=False)
    ]
    return TierUse(len(names), len(by_root), listed, prefixes)


def _parents(names: Words, parents: Words) -> Slots:
    order = np.argsort(names)
    at = np.searchsorted(names[order], parents).clip(max=len(names) - 1)
    place = order[at]
    return np.where(names[place] == parents, place, np.arange(len(names)))


def _heads(parents: Slots) -> Slots:
    heads = parents
    for _ in range(64):  # each turn doubles the distance; names that are no hashes might form a cycle
        further = heads[heads]
        if (further == heads).all():
            break
        heads = further
    return heads


def _shared(parents: Slots, heads: Sequence[int]) -> list[tuple[int, int]]:
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
    """What fills each model's tiers, computed on demand, then cached for 50 times as long as it took. Thread-safe."""

    def __init__(self, pause: float = 10.0) -> None:
        self._pause = pause
        self._key = secrets.token_bytes(16)
        self._lock = Lock()  # held while computing
        self._found: dict[bytes, tuple[float, dict[str, TierUse]]] = {}  # fingerprint → good until, by tier

    def of(self, models: Mapping[bytes, tuple[Hierarchy, Tenants]]) -> dict[bytes, dict[str, TierUse]]:
        if self._lock.acquire(blocking=not self._found):
            try:
                for fingerprint, (hierarchy, tenants) in models.items():
                    if time.monotonic() >= self._found.get(fingerprint, (0.0, {}))[0]:
                        began = time.monotonic()
                        use = {tier: use_of(each, tenants) for tier, each in lineages(hierarchy).items()}
                        now = time.monotonic()
                        self._found[fingerprint] = (now + max(self._pause, 50 * (now - began)), use)
                for closed in self._found.keys() - models.keys():
                    del self._found[closed]
            finally:
                self._lock.release()
        return {fingerprint: use for fingerprint, (_, use) in list(self._found.items())}

    def label(self, name: ChainHash) -> str:
        """A label that hides the name: the same for one name while this process lives, and not reversible."""
        return hashlib.blake2b(name, key=self._key, digest_size=4).hexdigest()


def memory(daemon: Daemon, use: MemoryUse, *, named: bool) -> statuses.MemoryStatus:
    """By tier, tenant and prefix. `named`: show names, for operators. Waits for the loop as `status` does."""
    namespaces, limits = daemon.call(lambda: (daemon.namespaces(), dict(daemon.limits)))
    found = use.of(_models(namespaces))
    models = []
    for namespace in namespaces:
        tiers = found.get(namespace.fingerprint, {})
        quotas = {
            root_hash(namespace.fingerprint, cache_salt=each): (each, limit.host)
            for each, limit in limits.items()
            if limit.host
        }
        shown = _ShownNames(namespace.tiers.tenants, use, quotas if named else {}, named)
        by_tier = {tier: _tier(each, namespace.blocks.block_size, namespace.blocks.block_bytes, shown)
                for tier, each in tiers.items()}  # fmt: skip
        models.append(statuses.ModelMemory(model=namespace.name, tiers=by_tier))
    return statuses.MemoryStatus(named=named, models=models)


def memory_series(namespaces: list[Namespace], use: MemoryUse) -> Iterator[Metric]:
    found = use.of(_models(namespaces))
    blocks: dict[tuple[str, str, str], float] = {}
    tenants: dict[tuple[str, str], float] = {}
    for namespace in namespaces:
        model, shown = namespace.name, _ShownNames(namespace.tiers.tenants, use, {}, False)
        for tier, each in found.get(namespace.fingerprint, {}).items():
            tenants[model, tier] = each.num_tenants
            for tenant in each.tenants:
                blocks[model, tier, shown.tenant(tenant.root)] = tenant.num_blocks
    yield gauge(
        "kvtier_tenant_blocks", "Blocks by tenant; a label does not reveal the cache_salt", blocks,
        "fingerprint", "tier", "tenant",
    )  # fmt: skip
    yield gauge("kvtier_tenants", "Tenants that have blocks, as far as they are known", tenants, "fingerprint", "tier")


def _models(namespaces: list[Namespace]) -> Mapping[bytes, tuple[Hierarchy, Tenants]]:
    return {each.fingerprint: (each.hierarchy, each.tiers.tenants) for each in namespaces}


class _ShownNames:
    def __init__(self, tenants: Tenants, use: MemoryUse, quotas: dict[ChainHash, tuple[str, int]], named: bool) -> None:
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


# --- the status ------------------------------------------------------------------------------------------------------

_FAILED: Final = "failed_"


def borrowed_by(port: TierPort) -> Mapping[str, int] | None:
    """The stats of a tier in other nodes' memory; None for any other tier, or a detached one."""
    tier = port.tier  # a probe may detach it at any time
    stats = tier.stats() if tier is not None else {}
    return stats if "answering" in stats else None


def _failures(stats: Mapping[str, int]) -> dict[str, int]:
    return {name.removeprefix(_FAILED): n for name, n in stats.items() if name.startswith(_FAILED)}


def peers_series(daemon: Daemon, namespaces: Sequence[Namespace]) -> Iterator[Metric]:
    """Metrics of peers. None if this node neither borrows nor lends."""
    peer_stats = {
        namespace.name: borrowed
        for namespace in namespaces
        for port in namespace.hierarchy.ports
        if (borrowed := borrowed_by(port)) is not None
    }
    if peer_stats:
        total = Counter[str]()
        for stats in peer_stats.values():
            total.update(stats)
        yield counter("kvtier_peer_failures", "Failures of other nodes to lend, by reason", _failures(total), "reason")
        text = "Batches requested from a node because its KV events name their blocks; wrong: one was not there"
        yield counter("kvtier_peer_hints", text, {way: total[f"hints_{way}"] for way in ("right", "wrong")}, "result")
        yield counter("kvtier_peer_questions", "Questions to other nodes which blocks they hold", total["questions"])
        text = "Of a ring of nodes: owners queried, blocks they did not know of, reports to them and their blocks"
        ring = {
            name: total[name] for name in ("owners_queried", "owners_unanswered", "reports", "reported", "start_overs")
        }
        yield counter("kvtier_peer_ring", text, ring, "event")
        for name, what, text in (
            ("answering", "answering", "Other nodes that answer"),
            ("sure", "sure", "Of these, nodes whose KV events are complete"),
            ("told_blocks", "told", "Blocks of theirs known by events"),
        ):
            yield gauge(f"kvtier_peers_{name}", text, {m: each[what] for m, each in peer_stats.items()}, "fingerprint")
    if (peer_server := daemon.peer_server) is not None:
        text = "Blocks and bytes lent to other nodes, and why connections were ended"
        yield counter("kvtier_lent", text, dict(peer_server.counts), "event")
        text = "Reports of other nodes to this one as an owner of the ring, and what was forgotten"
        yield counter("kvtier_owned", text, dict(peer_server.index.counts), "event")
        yield gauge("kvtier_owned_blocks", "Blocks of other nodes reported to this one", peer_server.index.num_keys)
        yield gauge("kvtier_lending_connections", "Connections of other nodes", peer_server.num_connections)


def status(daemon: Daemon, pins: Pins, optimum: OptimumWatch | None = None) -> statuses.DaemonStatus:
    """The whole status. Waits for the loop: TierUnavailable. `optimum`: for models whose lookups are kept."""
    namespaces, clients, given, refused = daemon.call(
        lambda: (daemon.namespaces(), daemon.clients(), daemon.models.used, daemon.refusals.all())
    )
    degraded, wanting = degraded_tiers(namespaces), wanting_parts(daemon, namespaces)
    pinned, published = pins.blocks_by_model(), None
    if (publisher := daemon.publisher) is not None:
        counts: dict[str, Any] = dict(publisher.counts)
        where = {"publish": publisher.endpoint, "replay": publisher.replay_endpoint}
        published = statuses.PublishedEvents(**where, seq=publisher.seq, **counts)
    return statuses.DaemonStatus(
        version=__version__,
        pid=os.getpid(),
        uptime_s=round(now() - daemon.started, 3),
        status="degraded" if degraded or wanting else "ok",
        degraded=degraded,
        wanting=[statuses.WantingPart(part=each.part, why=each.why) for each in wanting],
        socket=str(daemon.config.service.socket),
        budget=statuses.MemoryBudget(bytes=daemon.config.host.size, given=given),
        events=dict(daemon.counts),
        tier_captions=[statuses.TierCaption.model_validate(each) for each in tier_captions()],
        lent=None if daemon.peer_server is None else dict(daemon.peer_server.counts),
        kv_events=published,
        gpu_hour=daemon.config.service.gpu_hour,
        models=[_model(each, clients, pinned.get(each.name, 0), optimum, daemon.config) for each in namespaces],
        clients=clients,
        refused=refused,
    )


def wanting_parts(daemon: Daemon, namespaces: Iterable[Namespace]) -> list[Wanting]:
    lost = ((each.name, each.hierarchy.metrics.wanting) for each in namespaces)
    too_small = [Wanting(part, f"model {name}: {why}", False) for name, parts in lost for part, why in parts.items()]
    untraced = [Wanting(part, why, False) for part, why in tracing.wanting().items()]
    refused = [Wanting(part, why, False) for part, why in daemon.reloads.wanting.items()]
    return [*daemon.health.wanting, *refused, *untraced, *too_small]


def degraded_tiers(namespaces: Iterable[Namespace]) -> list[statuses.DegradedTier]:
    return [
        statuses.DegradedTier(
            model=namespace.name,
            tier=port.name,
            direction=direction,
            breaker=str(state),
            **({} if port.why is None else {"why": port.why}),
        )
        for namespace in namespaces
        for port in namespace.hierarchy.ports
        for direction, state in _breakers(port).items()
        if state != "closed"
    ]


def _model(
    namespace: Namespace,
    clients: Iterable[statuses.ClientStatus],
    num_pinned: int,
    watch: OptimumWatch | None,
    config: Config,
) -> statuses.ModelStatus:
    hierarchy = namespace.hierarchy
    counts, stride = hierarchy.host.pool.counts(), hierarchy.host.region.slot_stride
    values, gaps = MetricValues(hierarchy.metrics), hierarchy.host.pool.return_gaps()
    host = statuses.HostTierStatus(
        slots=hierarchy.host.pool.num_slots,
        bytes=namespace.size,
        ready_bytes=counts.ready * stride,
        pinned=num_pinned,
        quotas=len(namespace.tiers.quotas),
        **asdict(counts),
    )
    return statuses.ModelStatus(
        model=namespace.name,
        name=_called(namespace.about),
        fingerprint=namespace.fingerprint.hex(),
        block_size=namespace.blocks.block_size,
        block_bytes=namespace.blocks.block_bytes,
        clients=sum(client.model == namespace.name for client in clients),
        l2=host,
        tiers={port.name: _lower(port, values) for port in hierarchy.ports},
        saved=_saved(namespace, config),
        optimum=None if watch is None else watch.of(namespace.fingerprint),
        return_gaps=None
        if gaps is None
        else statuses.AgeCounts(bounds=EDGES[1:].tolist(), counts=gaps.round(3).tolist()),
        **dict(figures(hierarchy.metrics)),
    )


def _lower(port: TierPort, values: MetricValues) -> statuses.LowerTierStatus:
    slots, breakers = values.of("kvtier_pool_slots", port.name), _breakers(port)
    room = [statuses.StorageRoom(**each._asdict()) for each in port.room()]
    optional: dict[str, Any] = {"room": room} if room else {}  # a tier that does not report it has no such field
    if (borrowed := borrowed_by(port)) is not None:
        optional |= {"answering": borrowed["answering"], "failures": _failures(borrowed), "sure": borrowed["sure"]}
    if saved := values.of("kvtier_compression_saved_bytes", port.name):
        optional["saved"] = saved
    return statuses.LowerTierStatus(slots=slots, breakers=breakers, **optional)


def _called(about: Mapping[str, str]) -> str | None:
    name = about.get("model")  # only the name of a local folder: the status is public
    return PurePath(name).name if name and name.startswith(("/", ".", "~")) else name


_HOUR: Final = 3600.0
_MILLION: Final = 1e6


def _millions(namespace: Namespace, config: Config) -> dict[str, float]:
    """Prices of a million of the saved tokens, computed and loaded, as far as they are known.

    Computed: the GPUs' price for the seconds of prefill, over tokens whose seconds are known. Loaded: the GPUs' price
    for the seconds of loading from below, and the model's part of the cache's price since it was opened: of [host]
    size.
    """
    savings, service = namespace.tiers.savings, config.service
    if service.gpu_hour is None or not savings.num_tokens:
        return {}
    held = (now() - namespace.opened) * namespace.size / config.host.size
    cost = service.gpu_hour * namespace.hierarchy.metrics.load_seconds + (service.cache_hour or 0.0) * held
    found = {"million_loaded": cost / _HOUR / savings.num_tokens * _MILLION}
    if num_timed := savings.num_tokens - savings.num_untimed:
        computed = service.gpu_hour * sum(savings.seconds.values())
        found["million_computed"] = computed / _HOUR / num_timed * _MILLION
    return {name: round(value, 6) for name, value in found.items()}


def _saved(namespace: Namespace, config: Config) -> statuses.SavedFigures:
    savings, rate = namespace.tiers.savings, namespace.tiers.savings.tokens_per_second
    return statuses.SavedFigures(
        **_millions(namespace, config),
        tokens=savings.num_tokens,
        untimed_tokens=savings.num_untimed,
        prefill_s=round(sum(savings.seconds.values()), 6),
        load_s=round(namespace.hierarchy.metrics.load_seconds, 6),
        tokens_per_s=None if rate is None else round(rate, 1),
        assumed=savings.is_assumed,
    )


def _breakers(port: TierPort) -> dict[str, str]:
    return {direction: str(breaker.state) for direction, breaker in port.breakers.items()}


_QUANTILES: Final = (0.5, 0.9)


def exposition(daemon: Daemon, pins: Pins, use: MemoryUse, optimum: OptimumWatch | None = None) -> str:
    """The text format. Waits for the loop: TierUnavailable if it does not answer."""
    namespaces, clients = daemon.call(lambda: (daemon.namespaces(), daemon.clients()))
    metrics = {namespace.name: namespace.hierarchy.metrics for namespace in namespaces}
    return text_of(
        [
            *labelled(metrics),
            *_own(daemon, namespaces, clients, pins),
            *memory_series(namespaces, use),
            *_possible(namespaces, optimum),
            *_returns(namespaces),
        ]
    )


def _own(
    daemon: Daemon, namespaces: list[Namespace], clients: list[statuses.ClientStatus], pins: Pins
) -> Iterator[Metric]:
    yield gauge("kvtier_build_info", "The version in use", {__version__: 1}, "version")
    yield gauge("kvtier_uptime_seconds", "Since the daemon started", time.monotonic() - daemon.started)
    yield gauge("kvtier_clients", "Clients connected", sum(client.connected for client in clients))
    dead = sum(not client.connected for client in clients)
    yield gauge("kvtier_dead_clients", "Dead clients whose processes may still copy", dead)
    yield gauge("kvtier_budget_bytes", "Host memory there is for all models", daemon.config.host.size)
    yield wanting(each.part for each in wanting_parts(daemon, namespaces))
    yield reloads(daemon.reloads.counts)
    yield spans()
    sizes = {namespace.name: namespace.size for namespace in namespaces}
    yield gauge("kvtier_host_bytes", "Host memory a model has", sizes, "fingerprint")
    yield counter("kvtier_client_events", "Events of clients and their leases", dict(daemon.counts), "event")
    published = dict(daemon.publisher.counts) if daemon.publisher is not None else {}
    yield counter("kvtier_kv_events", "KV events published, in batches, and replayed", published, "event")
    log = {} if daemon.request_log is None else dict(daemon.request_log.counts)
    yield counter("kvtier_request_log_lines", "Lines of the request log", log, "outcome")
    yield gauge("kvtier_pinned_blocks", "Blocks kept by pins", pins.blocks_by_model(), "fingerprint")
    yield from peers_series(daemon, namespaces)
    yield from _savings(daemon, namespaces)


def _possible(namespaces: list[Namespace], watch: OptimumWatch | None) -> Iterator[Metric]:
    """Shares of blocks found in the last hour, and found by the best policy. For models whose lookups are kept."""
    looks = {each.name: watch.of(each.fingerprint) for each in namespaces if watch is not None}
    seen = {model: look for model, look in looks.items() if look is not None and look.asked}
    text = "Of the blocks looked up in the last hour, the share that the best possible policy would have found"
    yield gauge("kvtier_optimum_share", text, {m: each.optimum / each.asked for m, each in seen.items()}, "fingerprint")
    text = "Of the same blocks, the share that was found"
    yield gauge("kvtier_found_share", text, {m: each.found / each.asked for m, each in seen.items()}, "fingerprint")
    dropped = {each.name: each.tiers.past.num_dropped for each in namespaces if each.tiers.past is not None}
    yield counter("kvtier_lookups_not_kept", "Lookups and stores that this leaves out", dropped, "fingerprint")


def _returns(namespaces: list[Namespace]) -> Iterator[Metric]:
    """How long after a request's end the next one of its conversation came, if a policy learns it."""
    seconds: dict[tuple[str, str], float] = {}
    for namespace in namespaces:
        gaps = namespace.hierarchy.host.pool.return_gaps()
        if gaps is not None and (total := float(gaps.sum())) > 0:
            within = np.interp(_QUANTILES, np.append(0.0, np.cumsum(gaps)) / total, [*EDGES, 2 * EDGES[-1]])
            model = namespace.name
            seconds |= {(model, f"{q:g}"): float(age) for q, age in zip(_QUANTILES, within, strict=True)}
    text = "Within which of its requests' ends this part of the next ones came"
    yield gauge("kvtier_return_gap_seconds", text, seconds, "fingerprint", "quantile")


def _savings(daemon: Daemon, namespaces: list[Namespace]) -> Iterator[Metric]:
    savings = {each.name: each.tiers.savings for each in namespaces}
    tokens = {model: each.num_tokens for model, each in savings.items()}
    yield counter("kvtier_saved_tokens", "Tokens that were loaded instead of computed", tokens, "fingerprint")
    seconds = {(model, rate): value for model, each in savings.items() for rate, value in each.seconds.items()}
    yield counter(
        "kvtier_saved_prefill_seconds",
        "Seconds of prefill that these would have taken, by whether an engine measured its rate or it is assumed",
        seconds,
        "fingerprint",
        "rate",
    )
    rates = {model: rate for model, each in savings.items() if (rate := each.tokens_per_second) is not None}
    yield gauge("kvtier_prefill_tokens_per_second", "What an engine prefills", rates, "fingerprint")
    if (price := daemon.config.service.gpu_hour) is not None:
        yield gauge("kvtier_gpu_hour_price", "Of an hour of an engine's GPUs, as the operator says", price)
        prices = {
            (each.name, name.removeprefix("million_")): value
            for each in namespaces
            for name, value in _millions(each, daemon.config).items()
        }
        text = "Of a million tokens loaded instead of computed: to compute them, and to have them in the cache"
        yield gauge("kvtier_million_tokens_price", text, prices, "fingerprint", "way")
