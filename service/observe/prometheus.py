"""Metrics in the text format that Prometheus scrapes."""

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvtier.tiers import Metrics


def text_of(families: Iterable[Metric]) -> str:
    """The text format of these families."""
    registry = CollectorRegistry()
    registry.register(_Collected(list(families)))
    return generate_latest(registry).decode()


def labelled(metrics: Mapping[str, Metrics]) -> list[Metric]:
    """The families of several models. Each sample gets its model's key here as the label `fingerprint`."""
    families: dict[str, Metric] = {}
    for name, each in metrics.items():
        for family in each.collect():
            merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                merged.add_sample(sample.name, {**sample.labels, "fingerprint": name}, sample.value)
    return list(families.values())


class _Collected(Collector):
    """Hands out metrics that are there already."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families
