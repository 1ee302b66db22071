"""What a Redis that is configured and down costs an engine's scheduler: a lookup with it and without, in turns.

The server's port is closed, so opening the tier fails once and its breaker is open from then on; probes go on in the
background, on the tier's own threads. A lookup is a request's question about 128 blocks, its answer, and its end. The
time is the calling thread's CPU time, and by the wall clock: medians over rounds of 100 lookups, with less without.
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from _report import Target, parser, progress, report
from service_overhead import BLOCK_SIZE, CHAIN, FINGERPRINT, PARENT, UnheldBlocks, fresh, stored

from kvtier.connector import open_tiers
from kvtier.tiers import ChainHash
from kvtier.tiers.config import Config
from kvtier.tiers.hierarchy import CacheTiers

MAX_US = 20.0
PER_ROUND = 100


def opened(stack: ExitStack, **redis: str) -> CacheTiers:
    config = Config.load(host={"size": "64MiB"}, redis=redis)
    tiers = open_tiers(config, FINGERPRINT, UnheldBlocks(BLOCK_SIZE, 65_536))
    stack.callback(tiers.close)
    return tiers


def lookups(tiers: CacheTiers, names: Sequence[ChainHash]) -> None:
    for _ in range(PER_ROUND):
        claim = tiers.ask(names, PARENT, block_size=BLOCK_SIZE)
        assert isinstance(tiers.poll(claim), int), "a dead server answers nothing: there is nothing to wait for"
        tiers.cancel(claim)


def us_per_lookup(clock: Callable[[], float], tiers: CacheTiers, names: Sequence[ChainHash]) -> float:
    start = clock()
    lookups(tiers, names)
    return (clock() - start) / PER_ROUND * 1e6


def main() -> int:
    options = parser(__doc__).parse_args()
    rounds = 20 if options.quick else 400
    rows: list[dict[str, object]] = []
    targets: list[Target] = []
    with ExitStack() as stack:
        without = opened(stack)
        dead = opened(stack, url="redis://127.0.0.1:1")  # nobody listens on port 1
        for kind in ("misses", "hits"):
            progress(f"lookups of {CHAIN} blocks, {kind}")
            asked = [(tiers, stored(tiers, CHAIN) if kind == "hits" else fresh(CHAIN)) for tiers in (without, dead)]
            for clock in (time.thread_time, time.perf_counter):
                times = [[us_per_lookup(clock, *each) for each in asked] for _ in range(rounds)]
                plain, beside = (statistics.median(column) for column in zip(*times, strict=True))
                added = statistics.median(b - a for a, b in times)
                what = "CPU" if clock is time.thread_time else "wall"
                rows.append(
                    {"lookup": kind, "time": what, "without us": plain, "dead Redis us": beside, "added us": added}
                )
                if what == "CPU":
                    targets.append(
                        Target(f"a dead Redis adds to a lookup of {CHAIN} blocks, {kind}, us", MAX_US, added)
                    )
    return report("dead_redis", rows, targets, options.json, options.save)


if __name__ == "__main__":
    sys.exit(main())
