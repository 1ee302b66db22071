"""What the learned order of eviction costs beside LRU: CPU time a block of whole requests, two full pools by turns.

A request finds half of its blocks, stores as many new ones, releases all, and tells its end. Both pools get the same
requests, one after the other, and take turns in being first. LRU's pool is told the end as well, and drops it. Before
anything is measured, four times as many blocks as there are slots are asked for: at first the order is LRU's.
"""

import random
import time
from collections import deque
from functools import partial
from statistics import median
from typing import Final

import numpy as np
from _report import Given, Result, Row, program, progress, took
from _rig import random_names, reserved

from kvtier.tiers import ChainHash
from kvtier.tiers.pool import SlotPool
from kvtier.tiers.reuse import RequestEnd

SIZES: Final = (8, 32, 128, 512)  # blocks of a request
FULL: Final = 4  # times as many blocks as there are slots, before anything is measured
GROUP: Final = 10  # requests: a plan of victims is for many of them


def serve(pool: SlotPool, known: list[ChainHash], new: list[ChainHash], tokens: int) -> None:
    """One request, from its lookup to its end."""
    names = [*known, *new]
    lease = pool.lease(names)
    stored = pool.seal(reserved(pool, names[len(lease) :], names[len(lease) - 1] if len(lease) else None))
    lease.release()
    stored.release()
    pool.ended(RequestEnd(names, len(names), tokens))


def measure(size: int, num_slots: int, num_requests: int) -> Row:
    """Median CPU time a block of each policy, µs, and what predicted takes more in the median group of requests."""
    pools = {policy: SlotPool(num_slots, policy=policy) for policy in ("lru", "predicted")}
    rng, dice, half = np.random.default_rng(7), random.Random(1), size // 2
    lately: deque[list[ChainHash]] = deque(maxlen=16)
    took_of: dict[str, list[float]] = {policy: [] for policy in pools}
    progress(f"{num_requests} requests of {size} blocks")
    for number in range(FULL * num_slots // size + num_requests):
        known = dice.choice(lately) if lately else random_names(rng, half)
        new, tokens = random_names(rng, half), dice.choice((10, 100, 300, 600))
        for policy in sorted(pools, reverse=bool(number % 2)):
            fresh = [bytes(bytearray(name)) for name in known]
            took_of[policy].append(took(partial(serve, pools[policy], fresh, new, tokens), time.thread_time))
        lately.append([*known[: half // 2], *new[: half - half // 2]])
    for pool in pools.values():
        pool.check()
    groups = [np.array(took_of[policy][-num_requests:]) for policy in ("lru", "predicted")]
    lru, predicted = (each[: len(each) // GROUP * GROUP].reshape(-1, GROUP).mean(1) / size * 1e6 for each in groups)
    columns = {"lru us": lru, "predicted us": predicted, "more us": predicted - lru, "ratio": predicted / lru}
    return {"blocks": size, **{name: float(median(each)) for name, each in columns.items()}}


@program()
def main(chosen: Given) -> Result:
    num_slots, num_blocks = (4_096, 1 << 15) if chosen.quick else (16_384, 1 << 17)
    rows = [measure(size, num_slots, max(100, num_blocks // size)) for size in SIZES]
    return rows
