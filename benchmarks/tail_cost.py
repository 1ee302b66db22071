"""What the learned order of eviction costs beside LRU: CPU time a block of whole requests, two full pools by turns.

A request finds half of its blocks, stores as many new ones, releases all, and tells its end. Both pools get the same
requests, one after the other, and take turns in being first. LRU's pool is told the end as well, and drops it. Before
anything is measured, four times as many blocks as there are slots are asked for: at first the order is LRU's.
"""

import random
import statistics
import sys
import time
from typing import Final

import numpy as np
from _report import Target, parser, progress, report

from kvtier.tiers import ChainHash
from kvtier.tiers.pool import SlotPool
from kvtier.tiers.reuse import RequestEnd

SIZES: Final = (8, 32, 128, 512)  # blocks of a request
LIMIT: Final = 0.3  # µs a block more than LRU
FULL: Final = 4  # times as many blocks as there are slots, before anything is measured
GROUP: Final = 10  # requests
OUTPUT_TOKENS: Final = (10, 100, 300, 600)


class ChainNames:
    """Random names, as new objects for each request."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(7)

    def chain(self, count: int) -> list[ChainHash]:
        """So many names that nobody has seen."""
        joined = self._rng.bytes(32 * count)
        return [joined[i : i + 32] for i in range(0, len(joined), 32)]


def serve(pool: SlotPool, known: list[ChainHash], new: list[ChainHash], tokens: int) -> None:
    """One request, from its lookup to its end."""
    names = [*known, *new]
    lease = pool.lease(names)
    reservation = pool.reserve(names[len(lease) :], names[len(lease) - 1] if len(lease) else None)
    if reservation is None:
        raise RuntimeError("the pool has no room, although nothing is leased")
    stored = pool.seal(reservation)
    lease.release()
    stored.release()
    pool.ended(RequestEnd(names, len(names), tokens))


def measure(size: int, num_slots: int, num_requests: int) -> dict[str, float]:
    """Median CPU time a block of each policy, µs, and what tail takes more in the median group of requests."""
    pools = {policy: SlotPool(num_slots, policy=policy) for policy in ("lru", "tail")}
    names, dice = ChainNames(), random.Random(1)
    lately: list[list[ChainHash]] = []
    took: dict[str, list[float]] = {policy: [] for policy in pools}
    progress(f"{num_requests} requests of {size} blocks")
    for number in range(FULL * num_slots // size + num_requests):
        half = size // 2
        known = dice.choice(lately[-16:]) if lately else names.chain(half)
        new, tokens = names.chain(half), dice.choice(OUTPUT_TOKENS)
        for policy in sorted(pools, reverse=bool(number % 2)):
            fresh = [bytes(bytearray(name)) for name in known]
            start = time.thread_time()
            serve(pools[policy], fresh, new, tokens)
            took[policy].append(time.thread_time() - start)
        lately.append([*known[: half // 2], *new[: half - half // 2]] if half > 1 else new)
        lately = lately[-16:]
    for pool in pools.values():
        pool.check()
    lru, tail = (_by_group(took[policy][-num_requests:], size) for policy in ("lru", "tail"))
    return {
        "blocks": size,
        "lru us": statistics.median(lru),
        "tail us": statistics.median(tail),
        "more us": statistics.median(more - less for less, more in zip(lru, tail, strict=True)),
        "ratio": statistics.median(more / less for less, more in zip(lru, tail, strict=True)),
    }


def _by_group(seconds: list[float], size: int) -> list[float]:
    """Microseconds a block of so many requests in a row: a plan of victims is for many of them."""
    of_group = [sum(seconds[first : first + GROUP]) for first in range(0, len(seconds) - GROUP + 1, GROUP)]
    return [took / (GROUP * size) * 1e6 for took in of_group]


def main() -> int:
    chosen = parser(__doc__).parse_args()
    num_slots, num_blocks = (4_096, 1 << 15) if chosen.quick else (16_384, 1 << 17)
    rows = [measure(size, num_slots, max(100, num_blocks // size)) for size in SIZES]
    targets = [
        Target(f"tail over LRU, requests of {row['blocks']} blocks, us per block", LIMIT, row["more us"])
        for row in rows
    ]
    return report("tail_cost", rows, targets, chosen.json, chosen.save)


if __name__ == "__main__":
    sys.exit(main())
