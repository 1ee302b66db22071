"""What an engine's server reports: its entry in /v1/models, /status, and its Prometheus metrics."""

import os
import time
from collections.abc import Iterator, Mapping
from typing import Final

from prometheus_client.metrics_core import Metric

from kvtier.connector import LocalConnector
from kvtier.connector.segments import SEGMENT_OUTCOMES
from kvtier.service import Json
from kvtier.service.engine.loop import EngineLoop
from kvtier.service.events import namespace_of
from kvtier.service.observe import (
    EngineStatus,
    counter,
    figures,
    gauge,
    histogram,
    labelled,
    statuses,
    text_of,
    version,
    wanting,
)
from kvtier.tiers.naming import root_hash

_STARTED: Final = int(time.time())
_STATES: Final = ("waiting", "loading", "running")
_TOKENS: Final = ("prompt_tokens", "computed_tokens", "generated_tokens")


def model_entry(
    loop: EngineLoop, name: str, events: Mapping[str, str | None] | None, node: Mapping[str, str | None] | None = None
) -> Json:
    """The model's entry in `/v1/models`. A router reads `kvtier`; endpoints of KV events: its own, its daemon's."""
    engine = loop.engine
    salt, fingerprint = engine.config.cache_salt, bytes.fromhex(loop.fingerprint)
    return {
        "id": name,
        "object": "model",
        "created": _STARTED,
        "owned_by": "kvtier",
        "max_model_len": loop.room,
        "kvtier": {
            "block_size": engine.config.block_size,
            "fingerprint": loop.fingerprint,
            "max_model_len": loop.room,
            "events": events,
            "node": node,
            # as in events, for requests without a salt; the engine's own salt cannot be computed from it
            "namespace": None if salt is None else namespace_of(root_hash(fingerprint, cache_salt=salt)),
        },
    }


def status(loop: EngineLoop, name: str) -> EngineStatus:
    """What /status says, as of the last step."""
    engine, stats, tally = loop.engine, loop.stats, loop.tally
    connector = engine.connector
    own_tiers: Json = {"tiers": figures(connector.tiers.metrics)} if isinstance(connector, LocalConnector) else {}
    segments = _segments(loop)
    missed = loop.wanting
    reused: Json = {} if segments is None else {"segments": segments}
    return EngineStatus(
        version=version(),
        pid=os.getpid(),
        status=loop.ailment or ("stopping" if loop.is_stopping else "degraded" if missed else "ok"),
        wanting=[statuses.WantingPart(part=part, why=why) for part, why in missed.items()],
        model=name,
        fingerprint=loop.fingerprint,
        block_size=engine.config.block_size,
        max_model_len=loop.room,
        requests=statuses.SequenceCounts(
            live=loop.num_live, capacity=loop.capacity, **{state: stats[state] for state in _STATES}
        ),
        outcomes=dict(tally.outcomes),
        refused=dict(tally.refused),
        l1=statuses.DeviceTierStatus(blocks=engine.pool.num_blocks, free=stats["free_blocks"]),
        tokens=statuses.TokenCounts(**{kind: stats[kind] for kind in _TOKENS}),
        cached_tokens=dict(tally.cached),
        steps=statuses.StepCounts(done=stats["steps"], failed=tally.failed_steps),
        preempted=stats["preempted"],
        **reused,
        **own_tiers,
    )


def _segments(loop: EngineLoop) -> statuses.SegmentCounts | None:
    """What came of segments; None where they are off."""
    stats, reuse = loop.stats, loop.engine.segments
    if reuse is None:
        return None
    return statuses.SegmentCounts(
        tokens={"reused": stats["segment_tokens"], "repaired": stats["repaired_tokens"]},
        blends={"in_part": stats["blends"] - stats["blends_in_full"], "in_full": stats["blends_in_full"]},
        outcomes={way: stats[f"segments_{way}"] for way in SEGMENT_OUTCOMES},
        deviations={f"{bound:g}": number for bound, number in reuse.deviations.items()},
        deviation_sum=reuse.deviation_sum,
    )


def exposition(loop: EngineLoop) -> str:
    """Prometheus' text format: the engine's metrics, and those of the tiers below L1 as the engine sees them."""
    connector = loop.engine.connector
    tiers = labelled({loop.fingerprint[:16]: connector.tiers.metrics}) if isinstance(connector, LocalConnector) else []
    return text_of([*_own(loop), *loop.tally.ttft.collect(), *loop.tally.itl.collect(), *tiers])


def _own(loop: EngineLoop) -> Iterator[Metric]:
    stats, tally, pool = loop.stats, loop.tally, loop.engine.pool
    yield gauge("kvtier_build_info", "The version in use", {version(): 1}, "version")
    yield wanting(loop.wanting)
    yield gauge("kvtier_engine_requests", "Sequences by state", {state: stats[state] for state in _STATES}, "state")
    yield gauge("kvtier_engine_live", "Sequences that wait or are computed", loop.num_live)
    yield gauge("kvtier_engine_capacity", "Sequences there is room for; more get status 429", loop.capacity)
    yield counter("kvtier_engine_ended", "Sequences by how they ended", dict(tally.outcomes), "outcome")
    yield counter("kvtier_engine_refused", "Requests refused, by status", dict(tally.refused), "status")
    about = "Requests with a field that is unknown here and so ignored"
    yield counter("kvtier_engine_ignored_fields", about, tally.ignored.counts, "field")
    yield counter("kvtier_engine_tokens", "Tokens by what became of them", {k: stats[k] for k in _TOKENS}, "kind")
    yield counter("kvtier_engine_cached_tokens", "Prompt tokens found cached, by tier", dict(tally.cached), "tier")
    blocks = {"all": pool.num_blocks, "free": stats["free_blocks"]}
    yield gauge("kvtier_engine_l1_blocks", "Blocks of L1", blocks, "state")
    yield counter("kvtier_engine_steps", "Steps computed", stats["steps"])
    yield counter("kvtier_engine_failed_steps", "Steps that raised", tally.failed_steps)
    yield counter("kvtier_engine_preempted", "Sequences preempted", stats["preempted"])
    log = {} if loop.ended.log is None else dict(loop.ended.log.counts)
    yield counter("kvtier_request_log_lines", "Lines of the request log", log, "outcome")
    if (counts := _segments(loop)) is not None:
        yield counter("kvtier_engine_segment_tokens", "Prompt tokens of reused segments", counts.tokens, "kind")
        yield counter("kvtier_engine_blends", "Requests with segments, by what was computed", counts.blends, "kind")
        yield counter("kvtier_engine_segments", "Segments by what became of them", counts.outcomes, "outcome")
        about = "Requests by the relative deviation of KV left unrepaired; the rule deviation measures it"
        yield histogram("kvtier_engine_segment_deviation", about, counts.deviations, counts.deviation_sum)
