"""What Prometheus scrapes: the metrics of every model with its fingerprint as a label, and the daemon's own."""

import time
from collections.abc import Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvtier.service.node.daemon import ClientView, Daemon
from kvtier.service.node.namespaces import Namespace
from kvtier.service.node.operator_access import name_of
from kvtier.service.node.pins import Pins
from kvtier.service.observe import labelled, text_of, version


def exposition(daemon: Daemon, pins: Pins) -> str:
    """The text format. Waits for the loop: TierUnavailable if it does not answer."""
    namespaces, clients = daemon.call(lambda: (daemon.namespaces(), daemon.clients()))
    metrics = {name_of(namespace.fingerprint): namespace.hierarchy.metrics for namespace in namespaces}
    return text_of([*labelled(metrics), *_own(daemon, namespaces, clients, pins)])


def _own(daemon: Daemon, namespaces: list[Namespace], clients: list[ClientView], pins: Pins) -> Iterator[Metric]:
    build = GaugeMetricFamily("kvtier_build_info", "The version in use", labels=["version"])
    build.add_metric([version()], 1)
    yield build
    yield GaugeMetricFamily("kvtier_uptime_seconds", "Since the daemon started", time.monotonic() - daemon.started)
    yield GaugeMetricFamily("kvtier_clients", "Clients connected", sum(client.connected for client in clients))
    dead = sum(not client.connected for client in clients)
    yield GaugeMetricFamily("kvtier_dead_clients", "Clients gone whose processes may still copy", dead)
    yield GaugeMetricFamily("kvtier_budget_bytes", "Host memory there is for all models", daemon.config.host.size)
    sizes = GaugeMetricFamily("kvtier_host_bytes", "Host memory a model has", labels=["fingerprint"])
    for namespace in namespaces:
        sizes.add_metric([name_of(namespace.fingerprint)], namespace.size)
    yield sizes
    events = CounterMetricFamily("kvtier_client_events", "What became of clients and their leases", labels=["event"])
    for event, count in sorted(dict(daemon.counts).items()):
        events.add_metric([event], count)
    yield events
    told = CounterMetricFamily("kvtier_kv_events", "KV events published, in batches, and told again", labels=["event"])
    for event, count in sorted(dict(daemon.publisher.counts if daemon.publisher is not None else {}).items()):
        told.add_metric([event], count)
    yield told
    pinned = GaugeMetricFamily("kvtier_pinned_blocks", "Blocks kept by pins", labels=["fingerprint"])
    for name, num_blocks in pins.blocks_by_model().items():
        pinned.add_metric([name], num_blocks)
    yield pinned
