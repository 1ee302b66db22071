"""Our counters on their way into vLLM's own Prometheus registry, once a second and as differences."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvtier.tiers.metrics import Metrics, Sample


@dataclass
class KVTierStats(KVConnectorStats):
    """Samples by series: `data[name][labels joined by NUL]`, counters as differences, gauges as they are."""

    data: dict[str, dict[str, float]] = field(default_factory=dict)
    period: float = 0.0
    before: dict[tuple[str, tuple[str, ...]], float] = field(default_factory=dict)
    due: float = 0.0

    @classmethod
    def every(cls, seconds: float) -> "KVTierStats":
        """What remembers the last reading; `since_last` gives the differences."""
        return cls(period=seconds)

    def since_last(self, metrics: Metrics) -> "KVTierStats | None":
        """The differences since the last reading; None where none is due or nothing changed."""
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
        """Forget the samples."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> "KVTierStats":
        """Two intervals, or two engines', as one."""
        counters = {sample.name for sample in Metrics().samples() if sample.is_counter}
        merged = {name: dict(series) for name, series in self.data.items()}
        for name, series in other.data.items():
            into = merged.setdefault(name, {})
            for labels, value in series.items():
                into[labels] = into.get(labels, 0.0) + value if name in counters else value
        return KVTierStats(data=merged)

    def reduce(self) -> dict[str, int | float]:
        """The few numbers of vLLM's log line: blocks looked up by where they were found."""
        return {
            f"{labels} blocks": value for labels, value in sorted(self.data.get("kvtier_lookup_blocks", {}).items())
        }

    def is_empty(self) -> bool:
        """Whether nothing changed."""
        return not self.data


class KVTierProm(KVConnectorPromMetrics):
    """Every series of ours, named "vllm:…" as all that vLLM unregisters with an engine, vLLM's labels before ours."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: Mapping[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._families: dict[str, tuple[Sample, Any]] = {}
        for family in Metrics().families():
            options: dict[str, Any] = {} if family.is_counter else {"multiprocess_mode": "mostrecent"}
            options |= {"documentation": family.text, "labelnames": [*labelnames, *family.labels]}
            make = metric_types[Counter if family.is_counter else Gauge]
            self._families[family.name] = family, make(name=f"vllm:{family.name}", **options)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Take one engine's samples in."""
        for name, series in transfer_stats_data.items():
            family, metric = self._families[name]
            for labels, value in series.items():
                ours = labels.split("\0") if family.labels else []
                child = metric.labels(*self.per_engine_labelvalues[engine_idx], *ours)
                if family.is_counter:
                    child.inc(value)
                else:
                    child.set(value)
