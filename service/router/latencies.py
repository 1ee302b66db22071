"""How long a replica's requests wait for the first token and between two tokens: read from the engine's own metrics."""

import re
from collections import deque
from collections.abc import Mapping
from typing import Final

from kvtier.service.observe import statuses

PERIOD: Final = 5.0  # seconds between two reads of a replica's metrics
_KEPT: Final = 13  # reads: figures are of the last minute
_MOST_BOUNDS: Final = 200  # of a histogram's buckets
# Histograms of seconds, by what they measure: kvtier's, vLLM's, SGLang's.
_FAMILIES: Final[Mapping[bytes, str]] = {
    b"kvtier_engine_ttft_seconds": "ttft",
    b"vllm:time_to_first_token_seconds": "ttft",
    b"sglang:time_to_first_token_seconds": "ttft",
    b"kvtier_engine_itl_seconds": "itl",
    b"vllm:inter_token_latency_seconds": "itl",
    b"sglang:inter_token_latency_seconds": "itl",
}
_BUCKET: Final = re.compile(
    rb"^("
    + b"|".join(_FAMILIES)
    + rb')_bucket\{[^}\n]{0,1000}?\ble="([^"\n]{1,32})"[^}\n]{0,1000}\} ([0-9.eE+]{1,32})',
    re.MULTILINE,
)

_Observed = dict[str, dict[float, float]]  # what → upper bound in seconds → observations up to it


class Latencies:
    """Of one replica. Figures are of the observations between the oldest and the newest read that are kept."""

    def __init__(self) -> None:
        self._reads: deque[_Observed] = deque(maxlen=_KEPT)

    def read(self, page: bytes) -> None:
        """Take in a page of metrics in Prometheus' text format. What is no histogram of these is passed over."""
        found: _Observed = {}
        for family, bound, value in _BUCKET.findall(page):
            buckets = found.setdefault(_FAMILIES[family], {})
            try:
                at, count = float(bound), float(value)
            except ValueError:
                continue
            if at in buckets or len(buckets) < _MOST_BOUNDS:
                buckets[at] = buckets.get(at, 0.0) + count  # engines in one process: their sum
        if self._reads and any(_all_of(found, what) < _all_of(self._reads[-1], what) for what in ("ttft", "itl")):
            self._reads.clear()  # it has started anew
        self._reads.append(found)

    def figures(self) -> dict[str, statuses.LatencyFigures]:
        """By "ttft" and "itl"; without what nobody waited for in the last minute."""
        told = {}
        if self._reads:
            first, last = self._reads[0], self._reads[-1]
            for what, buckets in last.items():
                before = first.get(what, {})
                grown = sorted((bound, max(0.0, count - before.get(bound, 0.0))) for bound, count in buckets.items())
                if grown and (total := grown[-1][1]) > 0:
                    p50, p95 = (round(_quantile(grown, share * total), 6) for share in (0.5, 0.95))
                    told[what] = statuses.LatencyFigures(num=int(total), p50_s=p50, p95_s=p95)
        return told


def _all_of(counts: _Observed, what: str) -> float:
    return max(counts.get(what, {}).values(), default=0.0)


def _quantile(buckets: list[tuple[float, float]], wanted: float) -> float:
    """Below which so many observations lie, as if those in a bucket lay evenly; of the last one, its lower end."""
    lower, below = 0.0, 0.0
    for bound, count in buckets:
        if count >= wanted and count > below:
            return lower if bound == float("inf") else lower + (bound - lower) * (wanted - below) / (count - below)
        lower, below = bound, count
    return lower
