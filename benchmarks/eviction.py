"""What each order of eviction keeps, and what it costs: traces through the real pool and slab, beside the optimum.

Made-up traces (scans, drift, loops, agents, …) and, where it is there, the production trace; each in caches of several
sizes, without hints and with hints of which one in ten is wrong. `through` is what a row went through: L2's pool, the
pool with a slab of four times its size, or a whole hierarchy with bytes in it, beside what a simulation of it says.
CPU time is that of the whole replay, in turns with LRU's.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from _eviction_traces import BLOCK_SIZE, PRODUCTION, made_up, production_trace, spoiled, without_hints
from _live_replay import FINGERPRINT, ReplayClock, replay_live, simulated_beside
from _report import RESULTS, Target, parser, progress, report
from _synthetic_traces import TRACES

from kvtier.service import Chart, Line, save_png
from kvtier.service.simulation import Capacity, TraceReplay, optimum_of, sweep
from kvtier.service.traces import RequestTrace
from kvtier.tiers.config import Config
from kvtier.tiers.hierarchy import open_hierarchy
from kvtier.tiers.naming import KVShape

BLOCK_BYTES: Final = 64 << 20  # 512 tokens of a Llama 8B
SIZES: Final = (360, 1600)  # blocks of L2, of made-up traces
PRODUCTION_SIZES: Final = (883, 4096, 17669)
GOAL_SIZE: Final = 4096
SLAB: Final = 4  # times L2
WRONG: Final = 0.1  # of the hints
POLICIES: Final = ("lru", "s3fifo", "tail")
_LIVE_BYTES: Final = 4096  # of a block with bytes
_TIMED: Final = 800  # requests whose CPU time is taken
_DEADLINE: Final = 60.0  # seconds for a request of the live replay

EvictionRow = dict[str, object]


def kept(
    name: str, trace: RequestTrace, sizes: Sequence[int], processes: int, slabs: Sequence[int] = (0, SLAB)
) -> Iterator[EvictionRow]:
    """Shares of blocks found, in %, by each policy, through the pool, and through the pool and a slab.

    `slabs`: times L2; 0 is none.
    """
    bare, told = without_hints(trace), spoiled(trace, WRONG)
    rooms = [(size, disk) for size in sizes for disk in (slab * size for slab in slabs)]
    capacities = {
        (room, policy): Capacity(room[0] * BLOCK_BYTES, room[1] * BLOCK_BYTES, policy=policy)
        for room in rooms
        for policy in POLICIES
    }
    runs = sweep(TraceReplay(bare, BLOCK_BYTES), [*capacities.values()], lambda *_: None, processes)
    shares = {key: _share(run.found, trace) for key, run in zip(capacities, runs, strict=True)}
    hinted = [capacities[room, "tail"] for room in rooms]
    runs = sweep(TraceReplay(told, BLOCK_BYTES), hinted, lambda *_: None, processes)
    with_hints = {room: _share(run.found, trace) for room, run in zip(rooms, runs, strict=True)}
    optimum = optimum_of(trace)
    for room in rooms:
        through = "pool and slab" if room[1] else "pool"
        row: EvictionRow = {"trace": name, "blocks": room[0], "through": through}
        row |= {f"{policy} %": shares[room, policy] for policy in POLICIES}
        row["tail, hints %"] = with_hints[room]
        row["optimum %"] = 100 * optimum.share(sum(room))
        row["tail less lru"] = shares[room, "tail"] - shares[room, "lru"]
        progress(f"{name}, {room[0]} blocks, {through}: lru {row['lru %']:.1f}, tail {row['tail %']:.1f} %")
        yield row


def _share(found: object, trace: RequestTrace) -> float:
    return 100 * float(found.sum()) / float(trace.num_prompt.sum())  # type: ignore[attr-defined]


def through_a_hierarchy(num_requests: int) -> Iterator[EvictionRow]:
    """Chats through a whole hierarchy, L2 and slab, with bytes; and what a simulation says of the same."""
    trace = without_hints(made_up("chats", limit=num_requests))
    slots, disk = 88, 1 << 20
    for policy in ("lru", "tail"):
        with tempfile.TemporaryDirectory() as directory:
            config = Config.model_validate(
                {
                    "host": {"size": slots * _LIVE_BYTES, "huge_pages": False},
                    "file": {"path": directory, "size": disk, "mode": "buffered", "deadline": _DEADLINE},
                    "cache": {"policy": policy, "load_or_recompute": "load", "prefetch_deadline": _DEADLINE},
                }
            )
            hierarchy, clock = open_hierarchy(config, FINGERPRINT, KVShape(1, 1, 4, BLOCK_SIZE, "float16", 1)), None
            if (order := hierarchy.host.pool._learned) is not None:
                order.clock = clock = ReplayClock()
            try:
                live = replay_live(hierarchy, trace, _DEADLINE, clock)
            finally:
                hierarchy.close()
        simulated = simulated_beside(live, trace, Capacity(slots * _LIVE_BYTES, disk, policy=policy), _LIVE_BYTES)
        asked = float(trace.num_prompt.sum())
        row: EvictionRow = {"trace": "chats", "blocks": slots, "through": "hierarchy", "policy": policy}
        row["found %"] = 100 * sum(map(sum, live.found)) / asked
        row["simulated %"] = 100 * sum(map(sum, simulated)) / asked
        row["apart"] = abs(float(str(row["found %"])) - float(str(row["simulated %"])))
        yield row


def costs(name: str, trace: RequestTrace, size: int, rounds: int) -> EvictionRow:
    """CPU time of a replay by block of prompt and answer, `tail` and LRU in turns; the median of the pairs."""
    replay, per_block = TraceReplay(without_hints(trace), BLOCK_BYTES), 1e6 / len(trace.blocks)
    taken: dict[str, list[float]] = {"lru": [], "tail": []}
    for turn in range(rounds + 1):
        for policy, times in taken.items():
            began = time.process_time()
            replay.run(Capacity(size * BLOCK_BYTES, policy=policy))
            if turn:  # the first pair warms up
                times.append((time.process_time() - began) * per_block)
        progress(f"CPU time, pair {turn} of {rounds}")
    more = [tail - lru for lru, tail in zip(taken["lru"], taken["tail"], strict=True)]
    row: EvictionRow = {"trace": name, "blocks": size, "pairs": rounds}
    row |= {f"{policy}, us/block": statistics.median(times) for policy, times in taken.items()}
    return {**row, "tail over lru, us/block": statistics.median(more)}


def targets_of(rows: Sequence[Mapping[str, object]]) -> list[Target]:
    found = []
    for row in rows:
        where = f"{row['trace']}, {row['blocks']} blocks"
        if "tail less lru" in row:
            where += f", {row['through']}"
            found.append(Target(f"{where}: tail less LRU, points", -1.0, _number(row, "tail less lru"), at_most=False))
            if (row["trace"], row["blocks"], row["through"]) == (PRODUCTION, GOAL_SIZE, "pool"):
                found.append(Target(f"{where}: found without hints, %", 15.0, _number(row, "tail %"), at_most=False))
                hinted = _number(row, "tail, hints %")
                found.append(Target(f"{where}: found with hints, 9 of 10 right, %", 21.0, hinted, at_most=False))
        elif "apart" in row:
            name = f"hierarchy, {row['policy']}: points between live and simulated"
            found.append(Target(name, 1.0, _number(row, "apart")))
        else:
            name = f"{where}: CPU of tail over LRU, us a block"
            found.append(Target(name, 0.3, _number(row, "tail over lru, us/block")))
    return found


def _number(row: Mapping[str, object], column: str) -> float:
    return float(str(row[column]))


def charts(rows: Sequence[Mapping[str, object]]) -> list[Chart]:
    """Shares by size through the pool, of the traces that are most unlike each other."""
    made = []
    for name in (PRODUCTION, "agents", "scans", "flips"):
        own = [row for row in rows if row["trace"] == name and row.get("through") == "pool"]
        sizes = [_number(row, "blocks") for row in own]
        columns = (*(f"{policy} %" for policy in POLICIES), "tail, hints %", "optimum %")
        lines = [
            Line(each.removesuffix(" %"), sizes, [_number(row, each) for row in own], each.startswith("optimum"))
            for each in columns
        ]
        if own:
            made.append(Chart(name, "blocks of L2", "% of blocks found", lines, log_x=True))
    return made


def _options() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--processes", type=int, default=0, help="side by side; 0 for one a core")
    options.add_argument("--production", default=",".join(map(str, PRODUCTION_SIZES)), help="blocks of L2, for it")
    options.add_argument("--no-slab", action="store_true", help="through the pool alone")
    options.add_argument("--traces", default=",".join(TRACES), help="made-up ones, separated by commas")
    return options.parse_args()


def main() -> int:
    options = _options()
    names = [name for name in options.traces.split(",") if name][: 2 if options.quick else None]
    limit = 120 if options.quick else None
    rows: list[EvictionRow] = []
    slabs = (0,) if options.no_slab else (0, SLAB)
    for name in names:
        sizes = SIZES[:1] if options.quick else SIZES
        rows += kept(name, made_up(name, limit=limit), sizes, options.processes or 1, slabs)
    production = production_trace(limit)
    timed = production_trace(limit or _TIMED)
    if production is None or timed is None:
        progress(f"{PRODUCTION}: the trace is not here")
        timed_name, timed, size = "agents", made_up("agents", limit=limit or _TIMED), SIZES[0]
    else:
        timed_name, size = PRODUCTION, GOAL_SIZE
        production_sizes = (GOAL_SIZE,) if options.quick else tuple(map(int, options.production.split(",")))
        rows += kept(PRODUCTION, production, production_sizes, 1 if options.quick else options.processes, slabs)
    rows += through_a_hierarchy(40 if options.quick else 120)
    rows.append(costs(timed_name, timed, size, 1 if options.quick else 5))
    if options.save:
        save_png(RESULTS / "eviction.png", charts(rows))
    setup = {"block tokens": BLOCK_SIZE, "slab, times L2": SLAB, "hints that are wrong, %": 100 * WRONG}
    return report("eviction", rows, targets_of(rows), options.json, options.save, setup)


if __name__ == "__main__":
    sys.exit(main())
