"""Metrics in the text format that Prometheus scrapes."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any, Final

from prometheus_client import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvtier.tiers import Metrics

EXPOSITION: Final = "text/plain; version=0.0.4; charset=utf-8"
"""The media type of the text format."""

Values = float | Mapping[Any, float]
"""One value; or one for each label, or for each tuple of labels."""


def text_of(families: Iterable[Metric]) -> str:
    return generate_latest(_Collected(list(families))).decode()


def counter(name: str, help_text: str, values: Values, *labels: str) -> Metric:
    """A family of counters. `labels` are the labels' names."""
    return _filled(CounterMetricFamily(name, help_text, labels=labels), values)


def wanting(parts: Iterable[str]) -> Metric:
    """Of a daemon and of an engine alike: what /status names under the same word."""
    text = "1 for each part that is not there as configured, or too small"
    return gauge("kvtier_wanting", text, dict.fromkeys(parts, 1), "part")


def gauge(name: str, help_text: str, values: Values, *labels: str) -> Metric:
    """A family of gauges. `labels` are the labels' names."""
    return _filled(GaugeMetricFamily(name, help_text, labels=labels), values)


def histogram(name: str, help_text: str, counts: Mapping[str, int], total: float) -> Metric:
    """A histogram without labels. `counts` are its buckets by upper bound in order, none of them counted twice."""
    below = zip(counts, accumulate(counts.values()), strict=True)
    buckets = [("+Inf" if bound == "inf" else bound, float(number)) for bound, number in below]
    return HistogramMetricFamily(name, help_text, buckets=buckets, sum_value=total)


def labelled(metrics: Mapping[str, Metrics]) -> list[Metric]:
    """The families of several models. Each sample gets its model's key here as the label `fingerprint`."""
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


class _Collected(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families
