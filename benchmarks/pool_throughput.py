"""How fast the pools of L1 and L2 keep their books: 1,000,000 slots, batches of 1 to 2,048 blocks, as engines do.

Each figure stands beside bare references measured in the same run, turn by turn: the loop over a dict or a list that
nobody could do without in plain Python, and vLLM's BlockPool under the same work. Every lookup uses new bytes objects,
as hashes of a new request are. A decoding step makes batches of one block a few times over; a long prompt makes large
ones. Both forms of the core are measured: compiled, where it was built, and interpreted.
`--vllm PYTHON` runs all of it under an interpreter that has both vLLM and kvtier (`.ci/beside-engine vllm`).
"""

import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Final
from unittest.mock import patch

import numpy as np
from _report import Target, parser, progress, report
from _vllm_pool import VllmPool

from kvtier.tiers import ChainHash
from kvtier.tiers.compiled import extension
from kvtier.tiers.copies import BlockPool
from kvtier.tiers.naming import KVShape
from kvtier.tiers.pool import SlotPool

CHAIN: Final = 2048  # blocks
BATCHES: Final = (1, 4, 16, 64, 128, CHAIN)
COMPILED: Final = "compiled"
INTERPRETED: Final = "interpreted"
MAX_OF_VLLM: Final = 0.5  # of its BlockPool's time, compiled
# What the Python way of commit 38143aa3 took of it, by batch, on an idle Xeon: the interpreted core is held to it.
FORMER: Final = {
    ("lookup", "lru"): {1: 1.257, 4: 1.13, 16: 1.055, 64: 0.744, CHAIN: 0.247},
    ("lease + release", "lru"): {1: 2.26, 4: 1.634, 16: 1.307, 64: 0.788, CHAIN: 0.214},
    ("store with eviction", "lru"): {1: 3.427, 4: 2.409, 16: 1.909, 64: 1.254, CHAIN: 0.441},
    ("allocate + free, unkeyed", "lru"): {1: 1.891, 4: 1.633, 16: 1.274, 64: 0.826, CHAIN: 0.177},
    ("lookup", "s3fifo"): {1: 0.887, 4: 1.146, 16: 1.241, 64: 0.805, CHAIN: 0.183},
    ("lease + release", "s3fifo"): {1: 1.609, 4: 1.708, 16: 1.581, 64: 1.019, CHAIN: 0.158},
    ("store with eviction", "s3fifo"): {1: 4.375, 4: 3.993, 16: 3.638, 64: 1.666, CHAIN: 0.394},
}
MAX_OF_FORMER: Final = {CHAIN: 3.0}  # its batches were numpy's; smaller ones may not be slower
HashChain = list[ChainHash]


@dataclass
class Timer:
    """Microseconds per block of everything measured, by name and batch."""

    samples: dict[tuple[str, int], list[float]] = field(default_factory=dict)

    def measure(self, name: str, batch: int, run: Callable[..., object], *args: object) -> None:
        """Time one batch."""
        start = time.perf_counter()
        run(*args)
        self.samples.setdefault((name, batch), []).append((time.perf_counter() - start) / batch * 1e6)

    def median(self, name: str, batch: int) -> float | None:
        """The median batch; None if that was not measured."""
        return statistics.median(self.samples[name, batch]) if (name, batch) in self.samples else None


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

    def slice(self, count: int) -> None:
        """Take a batch of free slots and put it back."""
        taken = self.free[-count:]
        del self.free[-count:]
        self.free += taken


def chains(num_chains: int) -> Iterator[HashChain]:
    """Chains of random hashes, always the same ones."""
    rng = np.random.default_rng(7)
    for _ in range(num_chains):
        joined = rng.bytes(32 * CHAIN)
        yield [joined[i : i + 32] for i in range(0, len(joined), 32)]


def again(chain: HashChain) -> HashChain:
    """The same hashes as other objects, whose `hash()` nobody has cached."""
    return [bytes(bytearray(name)) for name in chain]


def ways() -> tuple[str, ...]:
    """Those there are: the compiled one where it was built."""
    return (COMPILED, INTERPRETED) if extension("kvtier.tiers.pool.core_compiled") is not None else (INTERPRETED,)


class Ours:
    """L2's pool and L1's, in one form."""

    def __init__(self, num_slots: int, policy: str, way: str) -> None:
        with patch.dict(os.environ, {"KVTIER_COMPILED": "off"} if way == INTERPRETED else {}):
            self.pool = SlotPool(num_slots, policy=policy)
            self.blocks = BlockPool(KVShape(1, 1, 1, 1, "float16"), num_slots)

    def store(self, hashes: HashChain) -> None:
        """Reserve, seal, release."""
        reservation = self.pool.reserve(hashes)
        if reservation is None:
            raise RuntimeError("the pool has no room, although nothing is leased")
        self.pool.seal(reservation).release()

    def lease_and_release(self, hashes: HashChain) -> None:
        """Lease, release."""
        self.pool.lease(hashes).release()

    def allocate_and_free(self, count: int) -> None:
        """L1's blocks."""
        block_ids = self.blocks.allocate(count)
        if block_ids is not None:
            self.blocks.free(block_ids)


class Race:
    """Full pools of the same blocks: ours of one policy, each way, the plain index, and vLLM's where there is one."""

    def __init__(self, num_slots: int, policy: str, timer: Timer) -> None:
        self.policy, self.timer = policy, timer
        self.plain = PlainIndex(num_slots)
        self.ours = {way: Ours(num_slots, policy, way) for way in ways()}
        self.vllm = VllmPool(num_slots) if VllmPool.is_installed() else None
        self.vllm_blocks = VllmPool(num_slots) if self.vllm is not None else None
        self.names: HashChain = []  # ever stored, oldest first
        self.num_gone = 0  # of them: the plain index has the others
        self.newer_half = num_slots // 2

    def fill(self, chain: HashChain) -> None:
        """One chain more in all of them."""
        for pools in self.ours.values():
            pools.store(chain)
        self.plain.slots.update(zip(chain, range(CHAIN), strict=True))
        if self.vllm is not None:
            self.vllm.store(chain)
        self.names += chain

    def some(self, batch: int, draw: random.Random) -> HashChain:
        """Blocks somewhere in the newer half: not evicted yet."""
        first = draw.randrange(len(self.names) - self.newer_half, len(self.names) - batch + 1)
        return again(self.names[first : first + batch])

    def round(self, batch: int, new: HashChain, draw: random.Random) -> None:
        """Every verb and every reference once."""
        for pools in self.ours.values():
            if pools.pool.lookup(self.some(batch, draw)) != batch:
                raise RuntimeError("blocks that must be held are not: the figures would be of misses")
        old = self.names[self.num_gone : self.num_gone + batch]
        copies = [self.some(batch, draw) for _ in range(4 + 2 * len(self.ours))]
        measure, policy = self.timer.measure, self.policy
        for way, pools in self.ours.items():
            measure(f"{way}, {policy} lookup", batch, pools.pool.lookup, copies.pop())
            measure(f"{way}, {policy} lease + release", batch, pools.lease_and_release, copies.pop())
            measure(f"{way}, {policy} store", batch, pools.store, again(new))
            measure(f"{way}, allocate + free", batch, pools.allocate_and_free, batch)
        measure("dict.get", batch, self.plain.look_up, copies[1])
        measure("dict pop + set", batch, self.plain.replace, again(old), again(new))
        measure("list slices", batch, self.plain.slice, batch)
        if self.vllm is not None and self.vllm_blocks is not None:
            measure("vLLM lookup", batch, self.vllm.look_up, copies[2])
            measure("vLLM lease + release", batch, self.vllm.lease_and_release, copies[3])
            measure("vLLM store", batch, self.vllm.store, again(new))
            measure("vLLM allocate + free", batch, self.vllm_blocks.allocate_and_free, batch)
        self.names += new
        self.num_gone += batch


def measure(num_slots: int, num_blocks: int, policy: str, timer: Timer) -> None:
    """Fill the pools, then time their verbs, about `num_blocks` blocks of each batch size."""
    race, num_held = Race(num_slots, policy, timer), num_slots // CHAIN + 1
    progress(f"{policy}: filling {num_slots} slots")
    stream = chains(1 << 30)
    for _ in range(num_held):
        race.fill(next(stream))
    draw = random.Random(1)
    for batch in BATCHES:
        rounds = max(15, min(2000, num_blocks // batch))
        progress(f"{policy}: {rounds} rounds of {batch} blocks")
        new = iter([name for _ in range(-(-rounds * batch // CHAIN)) for name in next(stream)])
        for _ in range(rounds):
            race.round(batch, [next(new) for _ in range(batch)], draw)
    for pools in race.ours.values():
        pools.pool.check()
        pools.blocks.check()


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--vllm", metavar="PYTHON", help="an interpreter that has vLLM and kvtier: race against it")
    chosen = options.parse_args()
    if chosen.vllm and not VllmPool.is_installed():
        os.execv(chosen.vllm, [chosen.vllm, *sys.argv])  # there the option is of no effect
    num_slots, num_blocks = (65_536, 2_000) if chosen.quick else (1_000_000, 150 * CHAIN)
    timer = Timer()
    for policy in ("lru", "s3fifo"):
        measure(num_slots, num_blocks, policy, timer)
    verbs = (
        ("lookup", "{} lookup", "dict.get", "vLLM lookup", 0.10),
        ("lease + release", "{} lease + release", "dict.get", "vLLM lease + release", 0.20),
        ("store with eviction", "{} store", "dict pop + set", "vLLM store", 0.45),
        ("allocate + free, unkeyed", "allocate + free", "list slices", "vLLM allocate + free", 0.03),
    )
    rows: list[dict[str, object]] = []
    targets: list[Target] = []
    for batch, policy, way in product(BATCHES, ("lru", "s3fifo"), ways()):
        for verb, name, reference, theirs, limit in verbs:
            if policy == "s3fifo" and "{}" not in name:
                continue
            ours, bare = timer.median(f"{way}, {name.format(policy)}", batch), timer.median(reference, batch)
            vllm = timer.median(theirs, batch)
            assert ours is not None
            assert bare is not None
            row: dict[str, object] = {"verb": verb, "way": way, "policy": policy, "batch": batch, "us/block": ours}
            row |= {"reference": reference, "its us": bare, "ratio": ours / bare}
            row |= {"vLLM us": "no vLLM" if vllm is None else vllm, "of vLLM": vllm and ours / vllm}
            rows.append(row)
            called = f"{verb}, {way}" + (", S3-FIFO" if policy == "s3fifo" else "")
            if batch == CHAIN and way == COMPILED:
                targets.append(Target(f"{called}, us per block", limit, ours))
            if vllm is None:
                continue
            if way == COMPILED:
                targets.append(Target(f"{called}, batches of {batch}: of vLLM's BlockPool", MAX_OF_VLLM, ours / vllm))
            elif (former := FORMER[verb, policy].get(batch)) is not None:
                most = MAX_OF_FORMER.get(batch, 1.0)
                targets.append(Target(f"{called}, batches of {batch}: of the former way", most, ours / vllm / former))
    return report("pool_throughput", rows, targets, chosen.json, chosen.save)


if __name__ == "__main__":
    sys.exit(main())
