"""What a Redis that is configured and down costs an engine's scheduler: a lookup with it and without, in turns.

The server's port is closed, so opening the tier fails once and its breaker is open from then on; probes go on in the
background, on the tier's own threads. A lookup is a request's question about 128 blocks, its answer, and its end. The
time is the calling thread's CPU time, and by the wall clock: medians over rounds of 100 lookups, with less without.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from statistics import median

from _report import Given, Result, Row, in_turns, of_pairs, program, progress, took
from _rig import Shape
from service_overhead import CHAIN, ask, fresh, opened, stored

from kvtier.tiers import ChainHash
from kvtier.tiers.hierarchy import CacheTiers

PER_ROUND = 100
SIZE, BLOCKS = "64MiB", Shape(16, 65_536)


def us_per_lookup(tiers: CacheTiers, names: Sequence[ChainHash], clock: Callable[[], float]) -> float:
    def look_up() -> None:
        for _ in range(PER_ROUND):
            claim = ask(tiers, names)
            assert isinstance(tiers.poll(claim), int), "a dead server answers nothing: there is nothing to wait for"
            tiers.cancel(claim)

    return took(look_up, clock) / PER_ROUND * 1e6


@program()
def main(options: Given) -> Result:
    rows: list[Row] = []
    dead_url = {"url": "redis://127.0.0.1:1"}  # nobody listens on port 1
    clocks = {"CPU": time.thread_time, "wall": time.perf_counter}
    with opened(SIZE, BLOCKS) as without, opened(SIZE, BLOCKS, redis=dead_url) as dead:
        for kind, what in product(("misses", "hits"), clocks):
            progress(f"lookups of {CHAIN} blocks, {kind}")
            asked = [(tiers, stored(tiers, CHAIN) if kind == "hits" else fresh(CHAIN)) for tiers in (without, dead)]
            turns = {number: partial(us_per_lookup, *each, clocks[what]) for number, each in enumerate(asked)}
            plain, beside = in_turns(turns, 20 if options.quick else 400).values()
            row = {"lookup": kind, "time": what, "without us": median(plain), "dead Redis us": median(beside)}
            rows.append(row | {"added us": of_pairs(plain, beside, lambda a, b: b - a)})
    return rows
