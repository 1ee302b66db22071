"""What Prometheus scrapes: the metrics of every model with its fingerprint as a label, and the daemon's own."""

import time
from collections.abc import Iterator
from typing import Final

import numpy as np
from prometheus_client.metrics_core import Metric

from kvtier.service.node.borrowing import peers_series
from kvtier.service.node.daemon import ClientView, Daemon
from kvtier.service.node.memory_page import memory_series
from kvtier.service.node.memory_use import MemoryUse
from kvtier.service.node.namespaces import Namespace
from kvtier.service.node.operator_access import name_of
from kvtier.service.node.past_lookups import OptimumWatch
from kvtier.service.node.pins import Pins
from kvtier.service.node.status import wanting_parts
from kvtier.service.observe import counter, gauge, labelled, text_of, version, wanting
from kvtier.tiers.reuse import EDGES

_QUANTILES: Final = (0.5, 0.9)


def exposition(daemon: Daemon, pins: Pins, use: MemoryUse, optimum: OptimumWatch | None = None) -> str:
    """The text format. Waits for the loop: TierUnavailable if it does not answer."""
    namespaces, clients = daemon.call(lambda: (daemon.namespaces(), daemon.clients()))
    metrics = {name_of(namespace.fingerprint): namespace.hierarchy.metrics for namespace in namespaces}
    return text_of(
        [
            *labelled(metrics),
            *_own(daemon, namespaces, clients, pins),
            *memory_series(namespaces, use),
            *_possible(namespaces, optimum),
            *_returns(namespaces),
        ]
    )


def _own(daemon: Daemon, namespaces: list[Namespace], clients: list[ClientView], pins: Pins) -> Iterator[Metric]:
    yield gauge("kvtier_build_info", "The version in use", {version(): 1}, "version")
    yield gauge("kvtier_uptime_seconds", "Since the daemon started", time.monotonic() - daemon.started)
    yield gauge("kvtier_clients", "Clients connected", sum(client.connected for client in clients))
    dead = sum(not client.connected for client in clients)
    yield gauge("kvtier_dead_clients", "Clients gone whose processes may still copy", dead)
    yield gauge("kvtier_budget_bytes", "Host memory there is for all models", daemon.config.host.size)
    yield wanting(each.part for each in wanting_parts(daemon, namespaces))
    sizes = {name_of(namespace.fingerprint): namespace.size for namespace in namespaces}
    yield gauge("kvtier_host_bytes", "Host memory a model has", sizes, "fingerprint")
    yield counter("kvtier_client_events", "What became of clients and their leases", dict(daemon.counts), "event")
    told = dict(daemon.publisher.counts) if daemon.publisher is not None else {}
    yield counter("kvtier_kv_events", "KV events published, in batches, and told again", told, "event")
    log = {} if daemon.request_log is None else dict(daemon.request_log.counts)
    yield counter("kvtier_request_log_lines", "Lines of the request log", log, "outcome")
    yield gauge("kvtier_pinned_blocks", "Blocks kept by pins", pins.blocks_by_model(), "fingerprint")
    yield from peers_series(daemon, namespaces)
    yield from _savings(daemon, namespaces)


def _possible(namespaces: list[Namespace], watch: OptimumWatch | None) -> Iterator[Metric]:
    """What was found in the last hour, and what the best policy would have found. Of models whose lookups are kept."""
    looks = {name_of(each.fingerprint): watch.of(each.fingerprint) for each in namespaces if watch is not None}
    known = {model: look for model, look in looks.items() if look is not None and look.asked}
    text = "Of the blocks asked for in the last hour, the share that the best possible policy would have found"
    yield gauge(
        "kvtier_optimum_share", text, {m: each.optimum / each.asked for m, each in known.items()}, "fingerprint"
    )
    text = "Of the same blocks, the share that was found"
    yield gauge("kvtier_found_share", text, {m: each.found / each.asked for m, each in known.items()}, "fingerprint")
    dropped = {
        name_of(each.fingerprint): each.tiers.past.num_dropped for each in namespaces if each.tiers.past is not None
    }
    yield counter("kvtier_lookups_not_kept", "Lookups and stores that this leaves out", dropped, "fingerprint")


def _returns(namespaces: list[Namespace]) -> Iterator[Metric]:
    """How long after a request's end the next one of its conversation came, where a policy learns it."""
    seconds: dict[tuple[str, str], float] = {}
    for namespace in namespaces:
        gaps = namespace.hierarchy.host.pool.return_gaps()
        if gaps is not None and (total := float(gaps.sum())) > 0:
            within = np.interp(_QUANTILES, np.append(0.0, np.cumsum(gaps)) / total, [*EDGES, 2 * EDGES[-1]])
            model = name_of(namespace.fingerprint)
            seconds |= {(model, f"{q:g}"): float(age) for q, age in zip(_QUANTILES, within, strict=True)}
    text = "Within which of its requests' ends this part of the next ones came"
    yield gauge("kvtier_return_gap_seconds", text, seconds, "fingerprint", "quantile")


def _savings(daemon: Daemon, namespaces: list[Namespace]) -> Iterator[Metric]:
    """What requests did not have to compute: less `kvtier_load_seconds_sum`, it is what was saved."""
    savings = {name_of(each.fingerprint): each.tiers.savings for each in namespaces}
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
