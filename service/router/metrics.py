"""The router's Prometheus metrics, `kvtier_route_*`."""

import time
from collections.abc import Iterator, Mapping

from prometheus_client.metrics_core import Metric

from kvtier.service.observe import counter, gauge, statuses, text_of
from kvtier.service.router.replicas import ReplicaState
from kvtier.service.router.router import Router


def exposition(router: Router) -> str:
    """The metrics in Prometheus' text format. Called on the router's event loop."""
    families = [*_requests(router), *_tokens(router), *_replicas(router), *_held(router)]
    return text_of(families)


def _requests(router: Router) -> Iterator[Metric]:
    ledger = router.ledger
    by_reason = "Requests given to a replica, by reason of the choice"
    yield counter("kvtier_route_requests", by_reason, ledger.requests, "replica", "reason")
    yield counter("kvtier_route_answers", "Answers passed on, by status class", ledger.answers, "replica", "status")
    retries = "Requests given to another replica before a byte was streamed, by reason"
    yield counter("kvtier_route_retries", retries, ledger.retries, "reason")
    errors = "Requests the router answered with an error of its own, by reason"
    yield counter("kvtier_route_errors", errors, ledger.errors, "reason")
    list_errors = "Changes of the list of replicas that could not be read, by reason"
    yield counter("kvtier_route_list_errors", list_errors, router.list.errors, "reason")
    unknown = "Requests routed without knowing their prompt, by reason"
    yield counter("kvtier_route_unknown_prompts", unknown, ledger.untokenised, "reason")
    yield counter("kvtier_route_seconds", "Time spent on requests, by stage", ledger.seconds, "stage")
    yield counter("kvtier_route_cpu_seconds", "CPU time of the router's process", time.process_time())


def _tokens(router: Router) -> Iterator[Metric]:
    ledger = router.ledger
    yield counter("kvtier_route_prompt_tokens", "Tokens of prompts that were known", ledger.prompt_tokens)
    promised = "Of these, held by the chosen replica according to the index"
    yield counter("kvtier_route_promised_tokens", promised, ledger.promised_tokens)
    told = "Tokens of prompts, as reported in the replicas' usage"
    yield counter("kvtier_route_told_prompt_tokens", told, ledger.told_prompt_tokens)
    cached = "Cached tokens of these, as reported in the replicas' usage"
    yield counter("kvtier_route_told_cached_tokens", cached, ledger.told_cached_tokens)


def _replicas(router: Router) -> Iterator[Metric]:
    replicas = router.fleet.replicas
    states = {(replica.name, state): replica.state is state for replica in replicas for state in ReplicaState}
    yield gauge("kvtier_route_replica_state", "1 for the state that it is in", states, "replica", "state")
    loads = {replica.name: replica.load for replica in replicas}
    yield gauge("kvtier_route_replica_load", "Blocks of work given to it and not finished", loads, "replica")
    running = {replica.name: replica.in_flight for replica in replicas}
    yield gauge("kvtier_route_in_flight", "Requests from the router under way there", running, "replica")
    failures = {(replica.name, reason): count for replica in replicas for reason, count in replica.errors.items()}
    yield counter("kvtier_route_replica_failures", "Requests it failed, by reason", failures, "replica", "reason")
    yield from _waits({replica.name: replica.latencies.figures() for replica in replicas})


def _waits(figures: Mapping[str, Mapping[str, statuses.LatencyFigures]]) -> Iterator[Metric]:
    """How long the last minute's requests waited there, by replica, as its own metrics say."""
    kinds = (("ttft", "Time to the first token"), ("itl", "Time between two tokens"))
    for what, text in kinds:
        waits: dict[tuple[str, str], float] = {}
        for name, each in figures.items():
            if what in each:
                waits |= {(name, "0.5"): each[what].p50_s, (name, "0.95"): each[what].p95_s}
        help_text = f"{text} in the last minute, by the share of waits that were no longer"
        yield gauge(f"kvtier_route_{what}_seconds", help_text, waits, "replica", "quantile")


def _held(router: Router) -> Iterator[Metric]:
    """Which blocks each replica reports, and whether its events are up to date."""
    holdings = router.holdings
    states = {each.name: holdings.of(each.name).state(each.name) for each in router.fleet.replicas}
    publishers = {(name, "engine"): state.events for name, state in states.items()}
    publishers |= {(name, "node"): state.node_events for name, state in states.items()}
    feeds = {key: feed for key, feed in publishers.items() if feed is not None}
    live = {key: feed.state == "live" for key, feed in feeds.items()}
    yield gauge("kvtier_route_events_live", "1 if the blocks a replica holds are known", live, "replica", "publisher")
    gaps = {key: feed.gaps for key, feed in feeds.items()}
    yield counter("kvtier_route_event_gaps", "Batches of events missed", gaps, "replica", "publisher")
    held = {(name, medium): count for name, state in states.items() for medium, count in state.blocks.items()}
    yield gauge("kvtier_route_held_blocks", "Blocks it reports", held, "replica", "medium")
    yield gauge("kvtier_route_indexed_blocks", "Blocks that replicas hold", holdings.num_blocks)
    forgotten = "Blocks forgotten because too many are held"
    yield counter("kvtier_route_forgotten_blocks", forgotten, holdings.num_forgotten)
    yield counter("kvtier_route_skipped_events", "Events that could not be true, by reason", holdings.skipped, "reason")
