"""What a fleet of 1, 10, 100 and 1,000 nodes takes, on paper: events, index, decisions, Redis, objects, prices.

The pieces are measured here: a publisher and a consumer of KV events in two processes, the router's index and its
decisions at so many replicas, a publisher that is followed. What a request moves comes from the simulator: the
production trace goes through the pools and extents of one node that has four nodes' memory, as four nodes serve it.
Other figures are those saved by `router_overhead.py` (forwarding) and `redis_bandwidth.py` (one server). The rest is
arithmetic (`_scale_model.py`) over assumptions, each of which is an option.

Prices are list prices as they were given, of no offer in particular: give your own.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Final

import numpy as np
from _eviction_traces import PRODUCTION, made_up, production_trace
from _loads import Row, picture
from _report import RESULTS, parser, progress, report
from _scale_model import GIB, Assumptions, Limit, PaperFleet, PieceCosts, RequestMoves
from _scale_parts import BLOCK_SIZE, alone, measure_events, measure_follow, measure_index

from kvtier.service.simulation import Capacity, SimulatedTiers, TraceReplay
from kvtier.service.traces import RequestTrace

SHARE: Final = 4  # nodes that serve the trace together
REPLICAS: Final = (1, 10, 100, 1000)
INDEXED: Final = 400_000  # blocks in the index that is measured
CHAINS: Final = 200  # of 512 blocks, whose events are measured
FOLLOWED: Final = 50
QUICK: Final = 200  # requests
FOREVER: Final = 1e12  # seconds
LARGE: Final = 64 << 20  # bytes of a large object
FOR_PEOPLE: Final = {"events": "KV events", "index": "index", "decisions": "decisions", "redis": "Redis"}


def moved(trace: RequestTrace, assumed: Assumptions, admit_after: int) -> RequestMoves:
    """What a request moves: tokens, the mean of all requests. Tiers begin empty."""
    replay = TraceReplay(trace, trace.block_size * assumed.token_bytes)
    everything = trace.num_names * replay.block_bytes
    l1, l2, slab, redis = (
        int(SHARE * gib * GIB) for gib in (assumed.l1_gib, assumed.l2_gib, assumed.slab_gib, assumed.redis_gib)
    )
    asked, answers = float(trace.num_prompt.mean()), float(np.diff(trace.starts).mean() - trace.num_prompt.mean())

    def run(told: str, *sizes: Any, **options: Any) -> dict[str, float]:
        progress(f"stored from sighting {admit_after}: {told}")
        return _run(replay, Capacity(*sizes, **options))

    in_l1 = run("L1", l1, policy="lru")
    below = run("L2, slab, and all that ever was", l2, slab, everything, FOREVER, admit_after=admit_after)
    shared = run("L2 and Redis", l2, 0, redis, FOREVER, admit_after=admit_after)
    blocks = (asked + answers - in_l1["l2"], below["stored"], below["new"], below["slab"], below["cold"])
    return RequestMoves(
        admit_after,
        float(trace.num_tokens.mean()),
        float(trace.num_output.mean()),
        *(float(trace.block_size) * number for number in (*blocks, shared["new"], shared["cold"])),
    )


def _run(replay: TraceReplay, capacity: Capacity) -> dict[str, float]:
    """Blocks a request: found in each tier, stored in L2, and of those the new ones, which go on to the tiers below."""
    trace = replay.trace
    tiers = SimulatedTiers(capacity, replay.block_bytes, trace.block_size)
    found = np.zeros(3)
    for request, begun in enumerate(trace.begun.tolist()):
        found += tiers.request(replay.end(request), begun)
    tiers.check()
    counts = tiers.pool.counts()
    stored = (tiers.pool.num_evicted + tiers.pool.num_slots - counts.free) / len(trace)
    l2, slab, cold = (found / len(trace)).tolist()
    return {"l2": l2, "slab": slab, "cold": cold, "stored": stored, "new": stored - slab - cold}


def measured(chosen: argparse.Namespace, prompt_tokens: float) -> PieceCosts:
    quick = chosen.quick
    progress("KV events: a publisher and a consumer")
    events = measure_events(4 if quick else CHAINS)
    indexes = []
    rounds, blocks = (5, 10_000) if quick else (100, INDEXED)
    for replicas in REPLICAS[:2] if quick else REPLICAS:
        progress(f"the index and decisions of {replicas:,} replicas")
        indexes.append(alone(measure_index, replicas, blocks, int(prompt_tokens), rounds))
    progress("publishers that are followed")
    follow = measure_follow(3 if quick else FOLLOWED, 1.0 if quick else 10.0)
    forward = _saved("router_overhead", "ms", what="request of 1024 token ids, answered as a stream")
    piece = _saved("router_overhead", "us", what="piece of a stream that comes alone")
    server: Row = {"nodes": 1, "block KiB": 2048, "way": "ours", "records": "clear"}
    set_gb, get_gb = (_saved("redis_bandwidth", "redis-benchmark GB/s", verb=v, **server) for v in ("SET", "GET"))
    bytes_a_block = max(each.bytes_a_block for each in indexes)
    decisions = {each.replicas: each.decision_us for each in indexes}
    return PieceCosts(*events, bytes_a_block, decisions, *follow, 1e3 * forward, piece, set_gb, get_gb)


def _saved(name: str, column: str, **where: object) -> float:
    rows: list[dict[str, Any]] = json.loads((RESULTS / f"{name}.json").read_text())["results"]
    return next(
        float(row[column])
        for row in rows
        if column in row and all(row.get(key) == value for key, value in where.items())
    )


def rows_of(fleet: PaperFleet, limits: Sequence[Limit], sizes: dict[str, float]) -> list[Row]:
    """A table for each part, then what they are made of."""
    pieces = asdict(fleet.measured)
    decisions = pieces.pop("decision_us")
    pieces |= {f"decision_us of {replicas:,} replicas": value for replicas, value in decisions.items()}
    rows: list[Row] = [*fleet.events(), *fleet.index(), *fleet.decisions(), *fleet.redis(), *fleet.objects(sizes)]
    rows += [{"part": "limits", "of": each.part, "limit": each.what, "holds up to": each.nodes} for each in limits]
    rows += [{"part": "a request moves", **asdict(each)} for each in fleet.moved.values()]
    return rows + [{"part": "a piece costs", "piece": name, "measured": value} for name, value in pieces.items()]


def plot(limits: Sequence[Limit], path: Path) -> None:
    shown = [each for each in limits if each.nodes is not None]
    colors = {part: f"C{i}" for i, part in enumerate(dict.fromkeys(each.part for each in shown))}
    labels = [f"{FOR_PEOPLE.get(each.part, each.part)}: {each.what}".replace("`", "") for each in shown]
    wholes = [max(0.5, float(each.nodes or 0)) for each in shown]
    with picture(path, figsize=(9.5, 0.5 + 0.32 * len(shown))) as (_, axes):
        bars = axes.barh(range(len(shown)), wholes, color=[colors[each.part] for each in shown], left=0.1)
        axes.bar_label(bars, [f"{each.nodes:,}" for each in shown], fontsize=8, padding=3)
        axes.set_yticks(range(len(shown)), labels, fontsize=8)
        axes.set(xscale="log", xlabel="nodes", xlim=(0.1, 10 * max(wholes)))
        axes.invert_yaxis()
        for nodes in REPLICAS:
            axes.axvline(nodes, color="grey", linewidth=0.6, linestyle=":")


def options() -> argparse.ArgumentParser:
    given = parser(__doc__)
    given.add_argument("--requests", type=int, help="only the first so many of the trace")
    for field in fields(Assumptions):
        kind = int if field.type is int else float
        default = None if field.name == "rate" else field.default
        told = "a quarter of the trace's, as four nodes serve it" if default is None else f"{default:,}"
        name = f"--{field.name.replace('_', '-')}"
        given.add_argument(name, type=kind, default=default, help=f"({told})")
    return given


def assumptions(chosen: argparse.Namespace, trace: RequestTrace) -> Assumptions:
    """Of the command line. Exits with status 2 if a figure cannot be."""
    named = {field.name: getattr(chosen, field.name) for field in fields(Assumptions)}
    wrong = [f"--{name.replace('_', '-')} {value:g}: give a number above 0" for name, value in named.items()
             if value is not None and not value > 0]  # fmt: skip
    if named["block_tokens"] != BLOCK_SIZE:
        wrong.append(f"--block-tokens {named['block_tokens']}: give {BLOCK_SIZE}: the pieces are measured at that")
    if wrong:
        print(f"scale: {wrong[0]}", file=sys.stderr)
        sys.exit(2)
    if named["rate"] is None:
        named["rate"] = len(trace) / float(trace.begun[-1] - trace.begun[0]) / SHARE
    return Assumptions(**named)


def main() -> int:
    chosen = options().parse_args()
    limit = chosen.requests or (QUICK if chosen.quick else None)
    trace = production_trace(limit)
    name = PRODUCTION if trace is not None else "made up: chats"
    if trace is None:
        trace = made_up("chats", limit=limit)
    assumed = assumptions(chosen, trace)
    each = [moved(trace, assumed, admit_after) for admit_after in (1, 2)]
    fleet = PaperFleet(assumed, measured(chosen, each[0].prompt), each)
    sizes = {f"a block, {assumed.block_bytes >> 20} MiB": float(assumed.block_bytes), "64 MiB": float(LARGE)}
    limits = fleet.limits(sizes)
    if chosen.save:
        plot(limits, RESULTS / "scale.png")
    setup = {"trace": name, "requests": len(trace), **asdict(assumed)}
    return report("scale", rows_of(fleet, limits, sizes), [], chosen.json, chosen.save, setup)


if __name__ == "__main__":
    sys.exit(main())
