"""How fast the pools of L1 and L2 keep their books: 1,000,000 slots, batches of 2,048 blocks, as an engine calls them.

Each figure stands beside a bare reference measured in the same run, turn by turn: the loop over a dict or a list that
nobody could do without in plain Python. Every lookup uses new bytes objects, as hashes of a new request are.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from _report import Target, parser, progress, report

from kvtier.tiers import ChainHash
from kvtier.tiers.copies import BlockPool
from kvtier.tiers.naming import KVShape
from kvtier.tiers.pool import SlotPool

BATCH = 2048
HashChain = list[ChainHash]


@dataclass
class Timer:
    """Microseconds per block of everything measured, by name."""

    samples: dict[str, list[float]] = field(default_factory=dict)

    def measure(self, name: str, run: Callable[..., object], *args: object) -> None:
        """Time one batch."""
        start = time.perf_counter()
        run(*args)
        self.samples.setdefault(name, []).append((time.perf_counter() - start) / BATCH * 1e6)

    def median(self, name: str) -> float:
        """The median batch."""
        return statistics.median(self.samples[name])


class PlainIndex:
    """The reference: a dict from hash to slot and a list of free slots, with no states, leases, order or links."""

    def __init__(self, num_slots: int) -> None:
        self.slots: dict[ChainHash, int] = {}
        self.free = list(range(num_slots))

    def look_up(self, hashes: HashChain) -> None:
        """Find a batch."""
        list(map(self.slots.get, hashes))

    def replace(self, old: HashChain, new: HashChain) -> None:
        """Give a batch's slots to another."""
        for name, new_name in zip(old, new, strict=True):
            self.slots[new_name] = self.slots.pop(name)

    def slice(self) -> None:
        """Take a batch of free slots and put it back."""
        taken = self.free[-BATCH:]
        del self.free[-BATCH:]
        self.free += taken


def chains(num_chains: int) -> Iterator[HashChain]:
    """Chains of random hashes, always the same ones."""
    rng = np.random.default_rng(7)
    for _ in range(num_chains):
        joined = rng.bytes(32 * BATCH)
        yield [joined[i : i + 32] for i in range(0, len(joined), 32)]


def again(chain: HashChain) -> HashChain:
    """The same hashes as other objects, whose `hash()` nobody has cached."""
    return [bytes(bytearray(name)) for name in chain]


def measure(num_slots: int, rounds: int, policy: str, timer: Timer) -> None:
    """Fill a pool, then time its verbs and the references in turn."""
    pool, plain = SlotPool(num_slots, policy=policy), PlainIndex(num_slots)
    blocks = BlockPool(KVShape(1, 1, 1, 1, "float16"), num_slots)
    num_held = num_slots // BATCH
    stream = list(chains(num_held + 1 + rounds))

    def store(chain: HashChain) -> None:
        reservation = pool.reserve(chain)
        if reservation is None:
            raise RuntimeError("the pool has no room, although nothing is leased")
        pool.seal(reservation).release()

    def lease_and_release(chain: HashChain) -> None:
        pool.lease(chain).release()

    def allocate_and_free() -> None:
        block_ids = blocks.allocate(BATCH)
        if block_ids is not None:
            blocks.free(block_ids)

    progress(f"{policy}: filling {num_slots} slots")
    for chain in stream[: num_held + 1]:
        store(chain)
        plain.slots.update(zip(chain, range(BATCH), strict=True))
    progress(f"{policy}: {rounds} rounds")
    for turn in range(rounds):
        new, old = stream[num_held + 1 + turn], stream[turn]
        held = stream[num_held - 2 * turn % (num_held // 2)]  # of the newer half: not evicted yet
        copies = [again(held) for _ in range(3)]
        if pool.lookup(held) != BATCH:
            raise RuntimeError("a chain that must be held is not: the figures would be of misses")
        timer.measure(f"{policy} lookup", pool.lookup, copies[0])
        timer.measure("dict.get", plain.look_up, copies[1])
        timer.measure(f"{policy} lease + release", lease_and_release, copies[2])
        timer.measure(f"{policy} store", store, again(new))
        timer.measure("dict pop + set", plain.replace, again(old), again(new))
    for _ in range(2 * rounds):  # apart from the others: an L1 pool's books are not flushed by a million-entry dict
        timer.measure("allocate + free", allocate_and_free)
        timer.measure("list slices", plain.slice)
    pool.check()
    blocks.check()


def main() -> int:
    options = parser(__doc__).parse_args()
    num_slots, rounds = (65_536, 12) if options.quick else (1_000_000, 150)
    timer = Timer()
    for policy in ("lru", "s3fifo"):
        measure(num_slots, rounds, policy, timer)
    wanted = (
        ("lookup", "lookup", "dict.get", 0.10),
        ("lease + release", "lease + release", "dict.get", 0.20),
        ("store with eviction", "store", "dict pop + set", 0.45),
    )
    rows: list[dict[str, object]] = []
    targets: list[Target] = []

    def add(what: str, name: str, reference: str, limit: float, is_target: bool) -> None:
        ours, bare = timer.median(name), timer.median(reference)
        rows.append(
            {"verb": what, "us/block": ours, "target": limit, "reference": reference, "its us": bare}
            | {"ratio": ours / bare}
        )
        if is_target:
            targets.append(Target(f"{what}, us per block", limit, ours))

    for policy in ("lru", "s3fifo"):
        for what, name, reference, limit in wanted:
            add(f"{what}, {policy}", f"{policy} {name}", reference, limit, policy == "lru")
    add("allocate + free, unkeyed", "allocate + free", "list slices", 0.03, True)
    return report("pool_throughput", rows, targets, options.json, options.save)


if __name__ == "__main__":
    sys.exit(main())
