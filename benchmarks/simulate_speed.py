"""How fast `kvtier simulate` is: CPU time of its steps on one trace, by policy, without a slab and with one.

The trace is read from a file, the optimum is told, and all requests are replayed at one size and valued. Cases take
turns. The requests of a round are taken piece by piece, and of each piece the fastest round counts: every round does
exactly the same, so what a piece takes more is another program's. Steps are in microseconds a request. `a second` and
`seconds_100k` are of all steps together, in one process.
"""

import json
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from _eviction_traces import PRODUCTION, made_up, production_trace
from _report import Given, Result, Row, program, progress, took

from kvtier.service import simulation
from kvtier.service.simulation import Capacity, SimulatedRun, SimulatedTiers, TraceReplay, optimum_of
from kvtier.service.traces import RequestTrace, load_trace

MIB: Final = 1 << 20
MADE_UP: Final = "chats"
REQUESTS: Final = 2000
PIECE: Final = 20  # requests
ROUNDS: Final = 2
SLAB: Final = 4  # times L2


class Case(NamedTuple):
    policy: str
    through: str
    block_mib: int  # 64 as by default; at 2, several blocks share an extent


CASES: Final = (
    Case("lru", "L2", 64),
    Case("predicted", "L2", 64),
    Case("lru", "L2 and slab", 64),
    Case("predicted", "L2 and slab", 64),
    Case("predicted", "L2 and slab", 2),
)


def write_lines(trace: RequestTrace, path: Path) -> None:
    """The trace's prompts in Mooncake's form, lengths of answers beside them."""
    with path.open("w") as file:
        for request in range(len(trace)):
            ids = trace.chain(request)[: trace.num_prompt[request]].tolist()
            line = {"timestamp": int(1000 * trace.begun[request]), "input_length": int(trace.num_tokens[request])}
            line |= {"output_length": int(trace.num_output[request]), "hash_ids": ids, "block_size": trace.block_size}
            file.write(json.dumps(line) + "\n")


def replay(trace: RequestTrace, case: Case, size: int) -> tuple[SimulatedRun, list[float]]:
    """As `TraceReplay.run`, and the CPU seconds of each piece, the first with what is made before."""
    block_bytes, began = case.block_mib * MIB, time.process_time()
    slab = SLAB * size * block_bytes if "slab" in case.through else 0
    capacity = Capacity(size * block_bytes, slab, policy=case.policy)
    run, tiers = TraceReplay(trace, block_bytes), SimulatedTiers(capacity, block_bytes, trace.block_size)
    found, pieces = np.zeros((len(trace), 3), np.int32), list[float]()
    for request, begun in enumerate(trace.begun.tolist()):
        found[request] = tiers.request(run.end(request), begun)
        if request % PIECE == PIECE - 1 or request == len(trace) - 1:
            now = time.process_time()
            pieces.append(now - began)
            began = now
    tiers.check()
    written = tiers.slab.num_written if tiers.slab is not None else 0
    return SimulatedRun(capacity, found, tiers.pool.num_evicted, written), pieces


def measure(path: Path, size: int, rounds: int) -> list[Row]:
    load_trace(path, limit=100)  # what is imported once
    trace = load_trace(path)
    optimum, reading, bound = optimum_of(trace), list[float](), list[float]()
    pieces: dict[Case, list[list[float]]] = {case: [] for case in CASES}
    valued = dict.fromkeys(CASES, float("inf"))
    for turn in range(rounds):
        reading.append(took(lambda: load_trace(path), time.process_time))
        bound.append(took(lambda: optimum_of(trace), time.process_time))
        for case in CASES:
            run, seconds = replay(trace, case, size)
            pieces[case].append(seconds)
            value = partial(
                simulation.value_of, run, trace, optimum, case.block_mib * MIB, simulation.LoadRates(), None
            )
            valued[case] = min(valued[case], took(value, time.process_time))
            progress(f"round {turn + 1} of {rounds}: {case.policy}, {case.through}: {sum(seconds):.1f} CPU s")
    rows: list[Row] = []
    each = 1e6 / len(trace)
    for case, of_rounds in pieces.items():
        replayed = sum(map(min, zip(*of_rounds, strict=True))) + valued[case]
        whole = min(reading) + min(bound) + replayed
        row = {"policy": case.policy, "through": case.through, "block MiB": case.block_mib}
        row |= {"read": round(each * min(reading)), "optimum": round(each * min(bound))}
        row |= {"replay": round(each * replayed), "a second": round(len(trace) / whole)}
        rows.append(row | {"seconds_100k": round(1e5 * whole / len(trace), 1)})
    return rows


@program()
def main(chosen: Given) -> Result:
    limit, size, rounds = (300, 64, 1) if chosen.quick else (REQUESTS, 1024, ROUNDS)
    trace = production_trace(limit)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "trace.jsonl")
        write_lines(made_up(MADE_UP, limit=limit) if trace is None else trace, path)
        rows = measure(path, size, rounds)
    name = MADE_UP if trace is None else PRODUCTION
    setup = {"trace": name, "requests": limit, "L2, blocks": size, "slab, times L2": SLAB, "rounds": rounds}
    return rows, [], setup
