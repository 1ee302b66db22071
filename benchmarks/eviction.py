"""What each order of eviction keeps, and what it costs: traces through the real pool and slab, beside the optimum.

Made-up traces (scans, drift, loops, agents, …) and, where they are there, the recorded ones, and cuts of the agents';
each in caches of several sizes, without hints and with hints of which one in ten is wrong. `through` is what a row went
through: L2's pool, the pool with a slab of four times its size, or a whole hierarchy with bytes in it, beside what a
simulation of it says. Orders that kvtier does not have (`_eviction_policies.py`) stand beside the pool. CPU time is
that of the whole replay, in turns with LRU's.
"""

import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from statistics import median
from typing import Final

import _eviction_traces as traces
from _eviction_policies import OTHERS, share_of
from _live_replay import FINGERPRINT, ReplayClock, replay_live, simulated_beside
from _report import RESULTS, Given, Result, Row, Target, in_turns, of_pairs, program, progress, took

from kvtier.service import Chart, Line, save_png
from kvtier.service.simulation import Capacity, TraceReplay, optimum_of, sweep
from kvtier.service.traces import RequestTrace
from kvtier.tiers.config import Config
from kvtier.tiers.hierarchy import open_hierarchy
from kvtier.tiers.naming import KVShape

BLOCK_BYTES: Final = 64 << 20  # 512 tokens of a Llama 8B
SIZES: Final = (360, 800, 1600)  # blocks of L2, of made-up traces
AGENT_SIZES: Final = (680, 1600, 2720)  # of agents
CUTS: Final = (11,)  # seeds of cuts of the recorded agents: sessions drawn, at other times
PRODUCTION_SIZES: Final = (883, 4096, 17669)
GOAL_SIZE: Final = 4096
SLAB: Final = 4  # times L2
WRONG: Final = 0.1  # of the hints
POLICIES: Final = ("lru", "s3fifo", "predicted")
_LIVE_BYTES: Final = 4096  # of a block with bytes
_TIMED: Final = 800  # requests whose CPU time is taken
_DEADLINE: Final = 60.0  # seconds for a request of the live replay


def kept(
    name: str,
    trace: RequestTrace,
    sizes: Sequence[int],
    slabs: Sequence[int],
    others: Sequence[str] = tuple(OTHERS),
    processes: int = 1,
) -> Iterator[Row]:
    """Shares of blocks found, in %, by each policy, through the pool, and through the pool and a slab.

    `slabs`: times L2; 0 is none. `others`: beside the pool. `processes`: side by side; 0 for one a core.
    """
    bare, told = traces.without_hints(trace), traces.spoiled(trace, WRONG)
    rooms = [(size, disk) for size in sizes for disk in (slab * size for slab in slabs)]
    capacities = {
        (room, policy): Capacity(room[0] * BLOCK_BYTES, room[1] * BLOCK_BYTES, policy=policy)
        for room in rooms
        for policy in POLICIES
    }
    runs = sweep(TraceReplay(bare, BLOCK_BYTES), [*capacities.values()], lambda *_: None, processes)
    shares = {key: _share(run.found, trace) for key, run in zip(capacities, runs, strict=True)}
    hinted = [capacities[room, "predicted"] for room in rooms]
    runs = sweep(TraceReplay(told, BLOCK_BYTES), hinted, lambda *_: None, processes)
    with_hints = {room: _share(run.found, trace) for room, run in zip(rooms, runs, strict=True)}
    optimum = optimum_of(trace)
    for room in rooms:
        through = "pool and slab" if room[1] else "pool"
        row: Row = {"trace": name, "blocks": room[0], "through": through}
        row |= {f"{policy} %": shares[room, policy] for policy in POLICIES}
        row["predicted, hints %"] = with_hints[room]
        row["optimum %"] = 100 * optimum.share(sum(room))
        row["predicted less lru"] = shares[room, "predicted"] - shares[room, "lru"]
        if others and not room[1]:
            row |= {f"{each} %": 100 * share_of(OTHERS[each], trace, room[0]) for each in others}
            best = max(row[f"{each} %"] for each in ("lru", "s3fifo", *others))
            row["predicted less the best"] = row["predicted %"] - best
        progress(f"{name}, {room[0]} blocks, {through}: lru {row['lru %']:.1f}, predicted {row['predicted %']:.1f} %")
        yield row


def _share(found: object, trace: RequestTrace) -> float:
    return 100 * float(found.sum()) / float(trace.num_prompt.sum())  # type: ignore[attr-defined]


def through_a_hierarchy(num_requests: int) -> Iterator[Row]:
    """Chats through a whole hierarchy, L2 and slab, with bytes; and what a simulation says of the same."""
    trace = traces.without_hints(traces.made_up("chats", limit=num_requests))
    slots, disk = 88, 1 << 20
    for policy in ("lru", "predicted"):
        with tempfile.TemporaryDirectory() as directory:
            config = Config.load(
                host={"size": slots * _LIVE_BYTES, "huge_pages": False},
                file={"path": directory, "size": disk, "mode": "buffered", "deadline": _DEADLINE},
                cache={"policy": policy, "load_or_recompute": "load", "prefetch_deadline": _DEADLINE},
            )
            shape, clock = KVShape(1, 1, 4, traces.BLOCK_SIZE, "float16", 1), None
            hierarchy = open_hierarchy(config, FINGERPRINT, shape)
            if (order := hierarchy.host.pool._learned) is not None:
                order.clock = clock = ReplayClock()
            try:
                live = replay_live(hierarchy, trace, _DEADLINE, clock)
            finally:
                hierarchy.close()
        simulated = simulated_beside(live, trace, Capacity(slots * _LIVE_BYTES, disk, policy=policy), _LIVE_BYTES)
        asked = float(trace.num_prompt.sum())
        row: Row = {"trace": "chats", "blocks": slots, "through": "hierarchy", "policy": policy}
        row["found %"] = 100 * sum(map(sum, live.found)) / asked
        row["simulated %"] = 100 * sum(map(sum, simulated)) / asked
        yield row | {"apart": abs(row["found %"] - row["simulated %"])}


def costs(name: str, trace: RequestTrace, size: int, rounds: int) -> Row:
    """CPU time of a replay by block of prompt and answer, `predicted` and LRU in turns; the median of the pairs."""
    replay, per_block = TraceReplay(traces.without_hints(trace), BLOCK_BYTES), 1e6 / len(trace.blocks)

    def turn(policy: str) -> float:
        progress(f"CPU time, {policy}")
        return took(lambda: replay.run(Capacity(size * BLOCK_BYTES, policy=policy)), time.process_time) * per_block

    taken = in_turns({policy: partial(turn, policy) for policy in ("lru", "predicted")}, rounds, warm_up=1)
    row: Row = {"trace": name, "blocks": size, "pairs": rounds}
    row |= {f"{policy}, us/block": median(times) for policy, times in taken.items()}
    return row | {
        "predicted over lru, us/block": of_pairs(
            taken["lru"], taken["predicted"], lambda lru, predicted: predicted - lru
        )
    }


def targets_of(rows: Sequence[Row]) -> list[Target]:
    """How far `predicted` is on the way from LRU to the optimum, of recorded agents in a large L2."""
    found = []
    for row in rows:
        if row["trace"].startswith(traces.AGENTS) and row["blocks"] >= AGENT_SIZES[-1] and row["through"] == "pool":
            share = 100 * row["predicted less lru"] / (row["optimum %"] - row["lru %"])
            name = f"{row['trace']}, {row['blocks']} blocks, pool: of the way from LRU to the optimum, %"
            found.append(Target(name, 45.0, share, at_most=False))
    return found


def charts(rows: Sequence[Row]) -> list[Chart]:
    """Shares by size through the pool, of the traces that are most unlike each other."""
    columns, made = (*(f"{policy} %" for policy in (*POLICIES, *OTHERS)), "predicted, hints %", "optimum %"), []
    for name in (traces.PRODUCTION, f"{traces.AGENTS}, cut {CUTS[0]}", "sub-agents", "documents"):
        own = [row for row in rows if row["trace"] == name and row.get("through") == "pool"]
        sizes = [row["blocks"] for row in own]
        lines = [
            Line(each.removesuffix(" %"), sizes, [row[each] for row in own], each.startswith("optimum"))
            for each in columns
            if own and each in own[0]
        ]
        if own:
            made.append(Chart(name, "blocks of L2", "% of blocks found", lines, log_x=True))
    return made


@program()
def main(given: Given) -> Result:
    limit, num_sizes = (120, 1) if given.quick else (None, None)
    rows: list[Row] = []
    slabs = 0, SLAB
    for name in [*traces.TRACES][: 2 if given.quick else None]:
        sizes = AGENT_SIZES if name in traces.AGENT_TRACES else SIZES
        rows += kept(name, traces.made_up(name, limit=limit), sizes[:num_sizes], slabs)
    if (agents := traces.agent_sessions(limit)) is not None:
        rows += kept(traces.AGENTS, agents, AGENT_SIZES[:num_sizes], slabs, ())
        for seed in () if given.quick else CUTS:
            rows += kept(f"{traces.AGENTS}, cut {seed}", traces.cut(agents, seed), AGENT_SIZES, slabs)
    production, timed = traces.production_trace(limit), traces.production_trace(limit or _TIMED)
    timed_name, size = traces.PRODUCTION, GOAL_SIZE
    if production is None or timed is None:
        progress(f"{traces.PRODUCTION}: the trace is not here")
        timed_name, timed, size = "agents", traces.made_up("agents", limit=limit or _TIMED), SIZES[0]
    else:
        production_sizes = (GOAL_SIZE,) if given.quick else PRODUCTION_SIZES
        rows += kept(traces.PRODUCTION, production, production_sizes, slabs, processes=1 if given.quick else 0)
    rows += through_a_hierarchy(40 if given.quick else 1500)
    rows.append(costs(timed_name, timed, size, 1 if given.quick else 5))
    if given.save:
        save_png(RESULTS / "eviction.png", charts(rows))
    setup = {"block tokens": traces.BLOCK_SIZE, "slab, times L2": SLAB, "hints that are wrong, %": 100 * WRONG}
    return rows, targets_of(rows), setup
