"""Reports kvtier's metrics to vLLM's own Prometheus registry, once a second and as differences."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvtier.tiers import Metrics, Series


@dataclass
class KVTierStats(KVConnectorStats):
    """Samples by series: `data[name][labels joined by NUL]`, counters as differences, gauges as they are."""

    data: dict[str, dict[str, float]] = field(default_factory=dict)
    period: float = 0.0  # seconds between two reports of `since_last`
    before: dict[tuple[str, tuple[str, ...]], float] = field(default_factory=dict)
    due: float = 0.0

    def since_last(self, metrics: Metrics) -> "KVTierStats | None":
        """The differences since the last reading; None if none is due, or nothing changed."""
        if (now := time.monotonic()) < self.due:
            return None
        self.due = now + self.period
        data: dict[str, dict[str, float]] = {}
        for sample in metrics.samples():
            series = sample.name, sample.labels
            old, self.before[series] = self.before.get(series, 0.0), sample.value
            value = sample.value - old if sample.is_counter else sample.value
            if sample.value != old:
                data.setdefault(sample.name, {})["\0".join(sample.labels)] = value
        return KVTierStats(data=data) if data else None

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> "KVTierStats":
        """The sum of two intervals, or of two engines."""
        counters = {sample.name for sample in Metrics().samples() if sample.is_counter}
        merged = {name: dict(series) for name, series in self.data.items()}
        for name, series in other.data.items():
            into = merged.setdefault(name, {})
            for labels, value in series.items():
                into[labels] = into.get(labels, 0.0) + value if name in counters else value
        return KVTierStats(data=merged)

    def reduce(self) -> dict[str, int | float]:
        """The numbers in vLLM's log line: blocks looked up, by the tier that had them."""
        return {
            f"{labels} blocks": value for labels, value in sorted(self.data.get("kvtier_lookup_blocks", {}).items())
        }

    def is_empty(self) -> bool:
        return not self.data


class KVTierProm(KVConnectorPromMetrics):
    """Every series of kvtier's, with vLLM's labels before ours.

    Names begin with "vllm:", since vLLM unregisters such series when an engine ends.
    """

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: Mapping[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._families: dict[str, tuple[Series, Any]] = {}
        for family in Metrics().families():
            options: dict[str, Any] = {} if family.is_counter else {"multiprocess_mode": "mostrecent"}
            options |= {"documentation": family.text, "labelnames": [*labelnames, *family.labels]}
            make = metric_types[Counter if family.is_counter else Gauge]
            self._families[family.name] = family, make(name=f"vllm:{family.name}", **options)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, series in transfer_stats_data.items():
            family, metric = self._families[name]
            for labels, value in series.items():
                ours = labels.split("\0") if family.labels else []
                child = metric.labels(*self.per_engine_labelvalues[engine_idx], *ours)
                if family.is_counter:
                    child.inc(value)
                else:
                    child.set(value)
