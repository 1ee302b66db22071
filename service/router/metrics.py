"""The router's Prometheus metrics, `kvtier_route_*`."""

import time
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvtier.service.router.replicas import ReplicaState
from kvtier.service.router.router import Router


def exposition(router: Router) -> str:
    """The metrics in Prometheus' text format. Called on the router's event loop."""
    registry = CollectorRegistry()
    registry.register(_RouterMetrics(router))
    return generate_latest(registry).decode()


class _RouterMetrics(Collector):
    def __init__(self, router: Router) -> None:
        self._router = router

    def collect(self) -> Iterator[Metric]:
        ledger = self._router.ledger
        pairs = (
            (
                "requests",
                "Requests given to a replica, by reason of the choice",
                ("replica", "reason"),
                ledger.requests,
            ),
            ("answers", "Answers passed on, by status class", ("replica", "status"), ledger.answers),
        )
        for name, help_text, labels, counts in pairs:
            yield _counter(name, help_text, labels, counts.items())
        singles = (
            ("retries", "Requests given to another replica before a byte was streamed, by reason", ledger.retries),
            ("errors", "Requests the router answered with an error of its own, by reason", ledger.errors),
            (
                "list_errors",
                "Changes of the list of replicas that could not be read, by reason",
                self._router.list.errors,
            ),
            ("unknown_prompts", "Requests routed without knowing their prompt, by reason", ledger.untokenised),
        )
        for name, help_text, counted in singles:
            yield _counter(name, help_text, ("reason",), (((reason,), n) for reason, n in counted.items()))
        yield from self._totals()
        yield from self._replicas()

    def _totals(self) -> Iterator[Metric]:
        ledger = self._router.ledger
        totals = (
            ("prompt_tokens", "Tokens of prompts that were known", ledger.prompt_tokens),
            (
                "promised_tokens",
                "Of these, held by the chosen replica according to the index",
                ledger.promised_tokens,
            ),
            ("told_prompt_tokens", "Tokens of prompts, as reported in the replicas' usage", ledger.told_prompt_tokens),
            (
                "told_cached_tokens",
                "Cached tokens of these, as reported in the replicas' usage",
                ledger.told_cached_tokens,
            ),
            ("cpu_seconds", "CPU time of the router's process", time.process_time()),
        )
        for name, help_text, value in totals:
            yield CounterMetricFamily(f"kvtier_route_{name}", help_text, value)
        yield _counter(
            "seconds", "Time spent on requests, by stage", ("stage",), (((s,), n) for s, n in ledger.seconds.items())
        )
        holdings = self._router.holdings
        yield GaugeMetricFamily("kvtier_route_indexed_blocks", "Blocks that replicas hold", holdings.num_blocks)
        yield CounterMetricFamily(
            "kvtier_route_forgotten_blocks", "Blocks forgotten because too many are held", holdings.num_forgotten
        )
        skipped = (((why,), n) for why, n in holdings.skipped.items())
        yield _counter("skipped_events", "Events that could not be true, by reason", ("reason",), skipped)

    def _replicas(self) -> Iterator[Metric]:
        replicas = self._router.fleet.replicas
        states = GaugeMetricFamily(
            "kvtier_route_replica_state", "1 for the state that it is in", labels=["replica", "state"]
        )
        loads = GaugeMetricFamily(
            "kvtier_route_replica_load", "Blocks of work given to it and not finished", labels=["replica"]
        )
        running = GaugeMetricFamily(
            "kvtier_route_in_flight", "Requests from the router under way there", labels=["replica"]
        )
        errors = CounterMetricFamily(
            "kvtier_route_replica_failures", "Requests it failed, by reason", labels=["replica", "reason"]
        )
        for replica in replicas:
            for state in ReplicaState:
                states.add_metric([replica.name, state], replica.state is state)
            loads.add_metric([replica.name], replica.load)
            running.add_metric([replica.name], replica.in_flight)
            for reason, count in sorted(replica.errors.items()):
                errors.add_metric([replica.name, reason], count)
        yield from (states, loads, running, errors)
        yield from self._holdings()

    def _holdings(self) -> Iterator[Metric]:
        """Which blocks each replica reports, and whether its events are up to date."""
        feeds = GaugeMetricFamily(
            "kvtier_route_events_live", "1 if the blocks a replica holds are known", labels=["replica", "publisher"]
        )
        gaps = CounterMetricFamily(
            "kvtier_route_event_gaps", "Batches of events missed", labels=["replica", "publisher"]
        )
        held = GaugeMetricFamily("kvtier_route_held_blocks", "Blocks it reports", labels=["replica", "medium"])
        for replica in self._router.fleet.replicas:
            state = self._router.holdings.state(replica.name)
            for publisher, feed in (("engine", state.events), ("node", state.node_events)):
                if feed is not None:
                    feeds.add_metric([replica.name, publisher], feed.state == "live")
                    gaps.add_metric([replica.name, publisher], feed.gaps)
            for medium, count in sorted(state.blocks.items()):
                held.add_metric([replica.name, medium], count)
        yield from (feeds, gaps, held)


def _counter(
    name: str, help_text: str, labels: tuple[str, ...], values: Iterable[tuple[tuple[str, ...], float]]
) -> Metric:
    family = CounterMetricFamily(f"kvtier_route_{name}", help_text, labels=labels)
    for label_values, value in sorted(values):
        family.add_metric(label_values, value)
    return family
