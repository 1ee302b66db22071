"""Figures of a model's blocks, read from its metrics; and metrics in Prometheus' text format."""

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import accumulate
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, cast

from prometheus_client import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvtier.service.observe.statuses import BlockFigures
from kvtier.tiers import L2, Metrics, lookup_results, tracing

if TYPE_CHECKING:
    from kvtier.tiers.hierarchy import Hierarchy

# --- figures of a model's blocks -------------------------------------------------------------------------------------


def figures(metrics: Metrics) -> BlockFigures:
    values = MetricValues(metrics)
    lookups = values.by_first("kvtier_lookup_blocks")
    return BlockFigures(
        lookups={tier: lookups.get(tier, 0) for tier in lookup_results()},
        missed=values.by_first("kvtier_miss"),
        stored=values.by_first("kvtier_store_blocks"),
        dropped=values.by_both("kvtier_store_dropped"),
        evicted=values.by_first("kvtier_evicted"),
        corrupted=values.by_first("kvtier_corruption"),
        moved=values.by_both("kvtier_bytes"),
        absent=values.by_both("kvtier_absent_blocks"),
        ages=metrics.age_counts(),
    )


class MetricValues:
    def __init__(self, metrics: Metrics) -> None:
        self._samples = list(metrics.samples())

    def by_first(self, name: str) -> dict[str, int]:
        return {each.labels[0]: int(each.value) for each in self._samples if each.name == name and each.value}

    def by_both(self, name: str) -> dict[str, dict[str, int]]:
        found = dict.fromkeys(each.labels[0] for each in self._samples if each.name == name and each.value)
        return {first: self.of(name, first) for first in found}

    def of(self, name: str, first: str) -> dict[str, int]:
        mine = (each for each in self._samples if each.name == name and each.labels[0] == first)
        return {each.labels[1]: int(each.value) for each in mine if each.value}


class LastStores:
    """What the tiers below L2 write, drop and keep while a server ends, for the last line of its log."""

    def __init__(self, hierarchies: Iterable["Hierarchy"]) -> None:
        self._hierarchies = list(hierarchies)
        ports = [port for each in self._hierarchies for port in each.ports if not port.is_shared]
        self._own = [port.tier for port in ports if port.tier is not None]
        self._before, self._began = self._counts(), time.monotonic()

    def line(self) -> str:
        """Since the beginning; the tiers may be closed."""
        done, kept = self._counts() - self._before, sum(int(each.stats().get("slots_ready", 0)) for each in self._own)
        seconds = time.monotonic() - self._began
        return (
            f"{done['stored']} blocks written below in {seconds:.1f} s, {done['dropped']} dropped, {kept} kept in slabs"
        )

    def _counts(self) -> Counter[str]:
        found = Counter[str]()
        for each in map(figures, (one.metrics for one in self._hierarchies)):
            found["stored"] += sum(count for tier, count in each.stored.items() if tier != L2)
            found["dropped"] += sum(sum(reasons.values()) for tier, reasons in each.dropped.items() if tier != L2)
        return found


# --- Prometheus' text format -----------------------------------------------------------------------------------------

EXPOSITION: Final = "text/plain; version=0.0.4; charset=utf-8"  # the media type of the text format

Values = float | Mapping[Any, float]  # one value; or one for each label, or for each tuple of labels


def text_of(families: Iterable[Metric]) -> str:
    families = list(families)
    return generate_latest(cast(Collector, SimpleNamespace(collect=lambda: families))).decode()


def counter(name: str, help_text: str, values: Values, *labels: str) -> Metric:
    return _filled(CounterMetricFamily(name, help_text, labels=labels), values)


def wanting(parts: Iterable[str]) -> Metric:
    """The parts that /status lists as wanting, of a daemon or an engine."""
    text = "1 for each part that is not there as configured, or too small"
    return gauge("kvtier_wanting", text, dict.fromkeys(parts, 1), "part")


def reloads(counts: Mapping[str, int]) -> Metric:
    return counter("kvtier_reloads", "Configurations read again at SIGHUP: put in force, or refused", counts, "outcome")


def spans() -> Metric:
    """Spans of requests, if they are traced."""
    return counter("kvtier_trace_spans", "Spans of requests, by what became of them", tracing.counts(), "outcome")


def gauge(name: str, help_text: str, values: Values, *labels: str) -> Metric:
    return _filled(GaugeMetricFamily(name, help_text, labels=labels), values)


def histogram(name: str, help_text: str, counts: Mapping[str, int], total: float) -> Metric:
    """A histogram without labels. `counts`: its buckets by upper bound, in order, not cumulative."""
    below = zip(counts, accumulate(counts.values()), strict=True)
    buckets = [("+Inf" if bound == "inf" else bound, float(number)) for bound, number in below]
    return HistogramMetricFamily(name, help_text, buckets=buckets, sum_value=total)


def labelled(metrics: Mapping[str, Metrics]) -> list[Metric]:
    families: dict[str, Metric] = {}
    for name, each in metrics.items():
        for family in each.collect():
            merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                merged.add_sample(sample.name, {**sample.labels, "fingerprint": name}, sample.value)
    return list(families.values())


def _filled(family: CounterMetricFamily | GaugeMetricFamily, values: Values) -> Metric:
    for key, value in sorted(values.items()) if isinstance(values, Mapping) else [((), values)]:
        family.add_metric([key] if isinstance(key, str) else key, value)
    return family
