"""How the daemon is doing, as one JSON object: what /status says, and /summary and the commands print."""

import os
from collections.abc import Iterable
from dataclasses import asdict
from importlib import metadata
from typing import TYPE_CHECKING, Any

from kvtier.service.daemon import Client, Daemon
from kvtier.service.loop import now
from kvtier.service.namespaces import Namespace
from kvtier.service.pins import Pins
from kvtier.service.visits import name_of
from kvtier.tiers.metrics import LOOKUP_TIERS, Metrics
from kvtier.tiers.port import TierPort

if TYPE_CHECKING:
    from kvtier.service.events import Publisher

Json = dict[str, Any]


def status(daemon: Daemon, pins: Pins) -> Json:
    """Everything. Waits for the loop: TierUnavailable where it does not answer."""
    namespaces, clients, given = daemon.call(lambda: (daemon.namespaces(), daemon.clients(), daemon.host_bytes_given))
    degraded = degraded_tiers(namespaces)
    pinned = pins.blocks_by_model()
    return {
        "version": version(),
        "pid": os.getpid(),
        "uptime_s": round(now() - daemon.started, 3),
        "status": "degraded" if degraded else "ok",
        "degraded": degraded,
        "socket": str(daemon.config.service.socket),
        "budget": {"bytes": daemon.config.host.size, "given": given},
        "events": dict(daemon.counts),
        "kv_events": None if daemon.publisher is None else _published(daemon.publisher),
        "models": [_model(each, clients, pinned.get(name_of(each.fingerprint), 0)) for each in namespaces],
        "clients": [_client(client) for client in clients],
    }


def version() -> str:
    """Of the kvtier that is installed; "0" in a tree that is not."""
    try:
        return metadata.version("kvtier")
    except metadata.PackageNotFoundError:
        return "0"


def degraded_tiers(namespaces: Iterable[Namespace]) -> list[Json]:
    """The directions of lower tiers that are left alone for now."""
    return [
        {"model": name_of(namespace.fingerprint), "tier": port.name, "direction": direction, "breaker": str(state)}
        for namespace in namespaces
        for port in namespace.hierarchy.ports
        for direction, state in _breakers(port).items()
        if state != "closed"
    ]


def figures(metrics: Metrics) -> Json:
    """What became of blocks since the start: found, missed, stored, dropped, moved, and why."""
    numbers = _Numbers(metrics)
    lookups = numbers.by_first("kvtier_lookup_blocks")
    return {
        "lookups": {tier: lookups.get(tier, 0) for tier in LOOKUP_TIERS},
        "missed": numbers.by_first("kvtier_miss"),
        "stored": numbers.by_first("kvtier_store_blocks"),
        "dropped": numbers.by_both("kvtier_store_dropped"),
        "evicted": numbers.by_first("kvtier_evicted"),
        "corrupted": numbers.by_first("kvtier_corruption"),
        "moved": numbers.by_both("kvtier_bytes"),
    }


def _model(namespace: Namespace, clients: Iterable[Client], num_pinned: int) -> Json:
    hierarchy = namespace.hierarchy
    counts, stride = hierarchy.host.pool.counts(), hierarchy.host.region.slot_stride
    numbers = _Numbers(hierarchy.metrics)
    return {
        "model": name_of(namespace.fingerprint),
        "fingerprint": namespace.fingerprint.hex(),
        "block_size": namespace.blocks.block_size,
        "block_bytes": namespace.blocks.block_bytes,
        "clients": sum(client.fingerprint == namespace.fingerprint for client in clients),
        "l2": {
            "slots": hierarchy.host.pool.num_slots,
            "bytes": namespace.size,
            "ready_bytes": counts.ready * stride,
            "pinned": num_pinned,
            "quotas": len(namespace.tiers.quotas),
            **asdict(counts),
        },
        "tiers": {
            port.name: {"slots": numbers.of("kvtier_pool_slots", port.name), "breakers": _breakers(port)}
            for port in hierarchy.ports
        },
        **figures(hierarchy.metrics),
    }


def _published(publisher: "Publisher") -> Json:
    return {
        "publish": publisher.endpoint,
        "replay": publisher.replay_endpoint,
        "seq": publisher.seq,
        **dict(publisher.counts),
    }


def _client(client: Client) -> Json:
    model = None if client.fingerprint is None else name_of(client.fingerprint)
    fields = client._asdict() | {"model": model, "seconds": round(client.seconds, 3)}
    del fields["fingerprint"]
    return fields


def _breakers(port: TierPort) -> dict[str, str]:
    return {direction: str(breaker.state) for direction, breaker in port.breakers.items()}


class _Numbers:
    """A model's counters by their labels."""

    def __init__(self, metrics: Metrics) -> None:
        self._samples = list(metrics.samples())

    def by_first(self, name: str) -> dict[str, int]:
        """By the one label; those that are nought are left out."""
        return {each.labels[0]: int(each.value) for each in self._samples if each.name == name and each.value}

    def by_both(self, name: str) -> dict[str, dict[str, int]]:
        """By the first label, then by the second."""
        found = dict.fromkeys(each.labels[0] for each in self._samples if each.name == name and each.value)
        return {first: self.of(name, first) for first in found}

    def of(self, name: str, first: str) -> dict[str, int]:
        """By the second label, of those that have this first one."""
        mine = (each for each in self._samples if each.name == name and each.labels[0] == first)
        return {each.labels[1]: int(each.value) for each in mine if each.value}
