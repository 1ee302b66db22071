"""How the daemon is doing: what /status says, and /summary and the commands print."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from kvtier.service.node.borrowing import borrowed_by
from kvtier.service.node.daemon import ClientView, Daemon
from kvtier.service.node.health import Wanting
from kvtier.service.node.loop import now
from kvtier.service.node.namespaces import Namespace
from kvtier.service.node.operator_access import name_of
from kvtier.service.node.past_lookups import OptimumSoFar, OptimumWatch
from kvtier.service.node.pins import Pins
from kvtier.service.observe import DaemonStatus, MetricValues, figures, statuses, version
from kvtier.tiers import tier_captions
from kvtier.tiers.hierarchy import Hierarchy, TierPort
from kvtier.tiers.reuse import EDGES

if TYPE_CHECKING:
    from kvtier.service.events import Publisher


def status(daemon: Daemon, pins: Pins, optimum: OptimumWatch | None = None) -> DaemonStatus:
    """Everything. Waits for the loop: TierUnavailable if it does not answer.

    `optimum` tells what could have been found of models whose lookups are kept.
    """
    namespaces, clients, given, refused = daemon.call(
        lambda: (daemon.namespaces(), daemon.clients(), daemon.host_bytes_given, refused_clients(daemon))
    )
    degraded, wanting = degraded_tiers(namespaces), wanting_parts(daemon, namespaces)
    pinned = pins.blocks_by_model()
    return DaemonStatus(
        version=version(),
        pid=os.getpid(),
        uptime_s=round(now() - daemon.started, 3),
        status="degraded" if degraded or wanting else "ok",
        degraded=degraded,
        wanting=[statuses.WantingPart(part=each.part, why=each.why) for each in wanting],
        socket=str(daemon.config.service.socket),
        budget=statuses.MemoryBudget(bytes=daemon.config.host.size, given=given),
        events=dict(daemon.counts),
        tier_captions=[statuses.TierCaption.model_validate(each) for each in tier_captions()],
        lent=None if daemon.lender is None else dict(daemon.lender.counts),
        kv_events=None if daemon.publisher is None else _published(daemon.publisher),
        gpu_hour=daemon.config.service.gpu_hour,
        models=[_model(each, clients, pinned.get(name_of(each.fingerprint), 0), optimum) for each in namespaces],
        clients=[_client(client) for client in clients],
        refused=refused,
    )


def refused_clients(daemon: Daemon) -> list[statuses.RefusedClient]:
    """Whom it refused, and why. On the loop's thread: `submit` it."""
    return [
        statuses.RefusedClient(
            why=each.why,
            count=each.count,
            seconds_ago=round(each.seconds_ago, 1),
            pid=each.pid,
            uid=each.uid,
            model=None if each.model is None else name_of(each.model),
        )
        for each in daemon.refusals.all()
    ]


def wanting_parts(daemon: Daemon, namespaces: Iterable[Namespace]) -> list[Wanting]:
    """What is not there as configured, and what models have too little of."""
    lost = ((name_of(each.fingerprint), each.hierarchy.metrics.losses.wanting) for each in namespaces)
    too_small = [Wanting(part, f"model {name}: {why}", False) for name, parts in lost for part, why in parts.items()]
    return [*daemon.health.wanting, *too_small]


def degraded_tiers(namespaces: Iterable[Namespace]) -> list[statuses.DegradedTier]:
    """The directions of lower tiers that are left alone for now."""
    return [
        statuses.DegradedTier(
            model=name_of(namespace.fingerprint),
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
    namespace: Namespace, clients: Iterable[ClientView], num_pinned: int, watch: OptimumWatch | None
) -> statuses.ModelStatus:
    hierarchy = namespace.hierarchy
    counts, stride = hierarchy.host.pool.counts(), hierarchy.host.region.slot_stride
    values = MetricValues(hierarchy.metrics)
    host = statuses.HostTierStatus(
        slots=hierarchy.host.pool.num_slots,
        bytes=namespace.size,
        ready_bytes=counts.ready * stride,
        pinned=num_pinned,
        quotas=len(namespace.tiers.quotas),
        **asdict(counts),
    )
    return statuses.ModelStatus(
        model=name_of(namespace.fingerprint),
        name=_called(namespace.about),
        fingerprint=namespace.fingerprint.hex(),
        block_size=namespace.blocks.block_size,
        block_bytes=namespace.blocks.block_bytes,
        clients=sum(client.fingerprint == namespace.fingerprint for client in clients),
        l2=host,
        tiers={port.name: _lower(port, values) for port in hierarchy.ports},
        saved=_saved(namespace),
        optimum=None if watch is None else _optimum(watch.of(namespace.fingerprint)),
        return_gaps=_return_gaps(hierarchy),
        **dict(figures(hierarchy.metrics)),
    )


def _lower(port: TierPort, values: MetricValues) -> statuses.LowerTierStatus:
    slots, breakers = values.of("kvtier_pool_slots", port.name), _breakers(port)
    room = [statuses.StorageRoom(**each._asdict()) for each in port.room()]
    told: dict[str, Any] = {"room": room} if room else {}  # a tier that does not tell has no such field
    if (borrowed := borrowed_by(port)) is not None:
        told |= {"answering": borrowed.num_answering, "failures": borrowed.failures, "sure": borrowed.num_sure}
    if saved := values.of("kvtier_compression_saved_bytes", port.name):
        told["saved"] = saved
    return statuses.LowerTierStatus(slots=slots, breakers=breakers, **told)


def _called(about: Mapping[str, str]) -> str | None:
    """A model's name; of one in a local folder the folder's: everybody may read the status."""
    name = about.get("model")
    return PurePath(name).name if name and name.startswith(("/", ".", "~")) else name


def _return_gaps(hierarchy: Hierarchy) -> statuses.AgeCounts | None:
    gaps = hierarchy.host.pool.return_gaps()
    if gaps is None:
        return None
    return statuses.AgeCounts(bounds=EDGES[1:].tolist(), counts=[round(each, 3) for each in gaps.tolist()])


def _optimum(found: OptimumSoFar | None) -> statuses.OptimumFigures | None:
    if found is None:
        return None
    return statuses.OptimumFigures(
        capacity=found.capacity,
        seconds=round(found.seconds, 1),
        asked=found.asked,
        found=found.found,
        optimum=found.optimum,
        steps=[(round(step.age_s, 1), step.asked, step.found, step.optimum) for step in found.steps],
    )


def _saved(namespace: Namespace) -> statuses.SavedFigures:
    savings, rate = namespace.tiers.savings, namespace.tiers.savings.tokens_per_second
    loads = (each.value for each in namespace.hierarchy.metrics.sums("kvtier_load_seconds"))
    return statuses.SavedFigures(
        tokens=savings.num_tokens,
        untimed_tokens=savings.num_untimed,
        prefill_s=round(sum(savings.seconds.values()), 6),
        load_s=round(sum(loads), 6),
        tokens_per_s=None if rate is None else round(rate, 1),
        assumed=savings.is_assumed,
    )


def _published(publisher: "Publisher") -> statuses.PublishedEvents:
    counts = dict(publisher.counts)
    return statuses.PublishedEvents(
        publish=publisher.endpoint, replay=publisher.replay_endpoint, seq=publisher.seq, **counts
    )


def _client(client: ClientView) -> statuses.ClientStatus:
    return statuses.ClientStatus(
        pids=client.pids,
        uid=client.uid,
        connected=client.connected,
        seconds=round(client.seconds, 3),
        protocol=client.protocol,
        claims=client.claims,
        leases=client.leases,
        reservations=client.reservations,
        model=None if client.fingerprint is None else name_of(client.fingerprint),
    )


def _breakers(port: TierPort) -> dict[str, str]:
    return {direction: str(breaker.state) for direction, breaker in port.breakers.items()}
