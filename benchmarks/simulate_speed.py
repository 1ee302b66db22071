"""How fast `kvtier simulate` is: CPU time of its steps on one trace, by policy, without a slab and with one.

The trace is read from a file, the optimum is told, and all requests are replayed at one size and valued. Cases take
turns, and of each step the fastest round counts: every round does exactly the same. Steps are in microseconds a
request. `a second` and `seconds_100k` are of all steps together, in one process.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec
from _eviction_traces import PRODUCTION, lines_of, made_up, production_trace
from _report import Given, Result, Row, in_turns, program, progress, took

from kvtier.service.simulation import Capacity, LoadRates, TraceReplay, optimum_of, value_of
from kvtier.service.traces import load_trace

MADE_UP: Final = "chats"
REQUESTS: Final = 2000
ROUNDS: Final = 2
SLAB: Final = 4  # times L2


CASES: Final = (  # policy, tiers, MiB of a block: 64 as by default; at 2, several share an extent
    ("lru", "L2", 64),
    ("predicted", "L2", 64),
    ("lru", "L2 and slab", 64),
    ("predicted", "L2 and slab", 64),
    ("predicted", "L2 and slab", 2),
)


def measure(path: Path, size: int, rounds: int) -> list[Row]:
    load_trace(path, limit=100)  # what is imported once
    trace = load_trace(path)
    optimum = optimum_of(trace)

    def replay(policy: str, through: str, block_mib: int) -> None:
        progress(f"{policy}, {through}")
        block_bytes = block_mib << 20
        slab = SLAB * size * block_bytes if "slab" in through else 0
        run = TraceReplay(trace, block_bytes).run(Capacity(size * block_bytes, slab, policy=policy))
        value_of(run, trace, optimum, block_bytes, LoadRates(), None)

    steps: dict[Any, Callable[[], float]] = {
        "read": lambda: took(lambda: load_trace(path), time.process_time),
        "optimum": lambda: took(lambda: optimum_of(trace), time.process_time),
    }
    for case in CASES:
        steps[case] = lambda case=case: took(lambda: replay(*case), time.process_time)
    least = {step: min(seconds) / len(trace) for step, seconds in in_turns(steps, rounds).items()}
    rows: list[Row] = []
    for case in CASES:
        parts = {"read": least["read"], "optimum": least["optimum"], "replay": least[case]}
        row: Row = dict(zip(("policy", "through", "block MiB"), case, strict=True))
        row |= {name: round(1e6 * seconds) for name, seconds in parts.items()}
        row["a second"] = round(1 / sum(parts.values()))
        rows.append(row | {"seconds_100k": round(1e5 * sum(parts.values()), 1)})
    return rows


@program()
def main(chosen: Given) -> Result:
    limit, size, rounds = (300, 64, 1) if chosen.quick else (REQUESTS, 1024, ROUNDS)
    trace = production_trace(limit)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "trace.jsonl")
        lines = lines_of(made_up(MADE_UP, limit=limit) if trace is None else trace)
        path.write_bytes(msgspec.json.Encoder().encode_lines(lines))
        rows = measure(path, size, rounds)
    name = MADE_UP if trace is None else PRODUCTION
    setup = {"trace": name, "requests": limit, "L2, blocks": size, "slab, times L2": SLAB, "rounds": rounds}
    return rows, [], setup
