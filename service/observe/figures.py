"""What became of blocks, read from a model's metrics."""

from importlib import metadata

from kvtier.service.observe.statuses import BlockFigures
from kvtier.tiers import Metrics, lookup_results


def version() -> str:
    """The version of kvtier that is installed; "0" in a tree that is not."""
    try:
        return metadata.version("kvtier")
    except metadata.PackageNotFoundError:
        return "0"


def figures(metrics: Metrics) -> BlockFigures:
    """What became of blocks since the start: found, missed, stored, dropped, moved, and why."""
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
        """By the one label; zeros are left out."""
        return {each.labels[0]: int(each.value) for each in self._samples if each.name == name and each.value}

    def by_both(self, name: str) -> dict[str, dict[str, int]]:
        found = dict.fromkeys(each.labels[0] for each in self._samples if each.name == name and each.value)
        return {first: self.of(name, first) for first in found}

    def of(self, name: str, first: str) -> dict[str, int]:
        """By the second label, for those with this first one."""
        mine = (each for each in self._samples if each.name == name and each.labels[0] == first)
        return {each.labels[1]: int(each.value) for each in mine if each.value}
