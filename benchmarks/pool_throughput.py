"""How fast the pools of L1 and L2 keep their books: 1,000,000 slots, batches of 1 to 2,048 blocks, as engines do.

Each figure stands beside bare references measured in the same run, turn by turn: the loop over a dict or a list that
nobody could do without in plain Python, and vLLM's BlockPool under the same work. Every lookup uses new bytes objects,
as hashes of a new request are. A decoding step makes batches of one block a few times over; a long prompt makes large
ones. Both forms of the core are measured: compiled, where it was built, and interpreted.
`--vllm PYTHON` runs all of it under an interpreter that has both vLLM and kvtier (`.ci/beside-engine vllm`).
"""

import os
import random
import sys
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from importlib import util
from itertools import product
from statistics import median
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
from _blocks import random_names
from _races import PYTHON, Row, form, is_built, took
from _report import Target, parser, progress, report

from kvtier.tiers import ChainHash
from kvtier.tiers.copies import BlockPool
from kvtier.tiers.naming import KVShape
from kvtier.tiers.pool import SlotPool

CHAIN: Final = 2048  # blocks
BATCHES: Final = (1, 4, 16, 64, 128, CHAIN)
COMPILED: Final = "compiled"
INTERPRETED: Final = "interpreted"
WAYS: Final = (COMPILED, INTERPRETED) if is_built() else (INTERPRETED,)
POLICIES: Final = ("lru", "s3fifo")
VERBS: Final = (  # called, by its short name, our limit in microseconds, the plain reference
    ("lookup", "lookup", 0.10, "dict.get"),
    ("lease + release", "lease + release", 0.20, "dict.get"),
    ("store with eviction", "store", 0.45, "dict pop + set"),
    ("allocate + free, unkeyed", "allocate + free", 0.03, "list slices"),
)
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
Verbs = dict[str, Callable[[], object]]


def verbs_of(pools: "Ours | Vllm", held: Callable[[], HashChain], new: HashChain) -> Verbs:
    """Of blocks that are held, and of new ones."""
    return {
        "lookup": partial(pools.look_up, held()),
        "lease + release": partial(pools.lease_and_release, held()),
        "store": partial(pools.store, again(new)),
        "allocate + free": partial(pools.allocate_and_free, len(new)),
    }


class Ours:
    """L2's pool and L1's, in one form."""

    def __init__(self, num_slots: int, policy: str, way: str) -> None:
        with form(PYTHON if way == INTERPRETED else way):
            self.pool = SlotPool(num_slots, policy=policy)
            self.blocks = BlockPool(KVShape(1, 1, 1, 1, "float16"), num_slots)
        self.look_up = self.pool.lookup

    def lease_and_release(self, hashes: HashChain) -> None:
        self.pool.lease(hashes).release()

    def store(self, hashes: HashChain) -> None:
        reservation = self.pool.reserve(hashes)
        if reservation is None:
            raise RuntimeError("the pool has no room, although nothing is leased")
        self.pool.seal(reservation).release()

    def allocate_and_free(self, count: int) -> None:
        block_ids = self.blocks.allocate(count)
        if block_ids is not None:
            self.blocks.free(block_ids)


class Vllm:
    """vLLM's own BlockPool, where its package is installed: one for names, one without."""

    def __init__(self, num_slots: int) -> None:
        from vllm.v1.core.block_pool import BlockPool as VllmBlockPool

        # one is null
        self.pool, self.blocks = (
            VllmBlockPool(num_slots + 1, enable_caching=True, hash_block_size=16) for _ in range(2)
        )

    def look_up(self, hashes: HashChain) -> list[Any]:
        """The blocks of the leading hashes that are held, as vLLM's KVCacheManager asks for them."""
        found = []
        for name in hashes:
            blocks = self.pool.get_cached_block(name, [0])
            if blocks is None:
                break
            found += blocks
        return found

    def lease_and_release(self, hashes: HashChain) -> None:
        blocks = self.look_up(hashes)
        self.pool.touch(blocks)
        self.pool.free_blocks(reversed(blocks))

    def store(self, hashes: HashChain) -> None:
        """New blocks, evicting, cached under these names, and freed."""
        blocks = self.pool.get_new_blocks(len(hashes))
        self.pool.cache_full_blocks(SimpleNamespace(block_hashes=hashes), blocks, 0, len(hashes), 16, 0)
        self.pool.free_blocks(reversed(blocks))

    def allocate_and_free(self, count: int) -> None:
        self.blocks.free_blocks(self.blocks.get_new_blocks(count))


class Plain:
    """The reference: a dict from hash to slot and a list of free slots, with no states, leases, order or links."""

    def __init__(self, num_slots: int) -> None:
        self.slots: dict[ChainHash, int] = {}
        self.free = list(range(num_slots))

    def replace(self, old: HashChain, new: HashChain) -> None:
        """Give a batch's slots to another."""
        for name, new_name in zip(old, new, strict=True):
            self.slots[new_name] = self.slots.pop(name)

    def slice(self, count: int) -> None:
        """Take a batch of free slots and put it back."""
        taken = self.free[-count:]
        del self.free[-count:]
        self.free += taken

    def verbs(self, known: HashChain, old: HashChain, new: HashChain) -> Verbs:
        gone, stored = again(old), again(new)
        return {
            "dict.get": lambda: list(map(self.slots.get, known)),
            "dict pop + set": partial(self.replace, gone, stored),
            "list slices": partial(self.slice, len(new)),
        }


def again(chain: HashChain) -> HashChain:
    """The same hashes as other objects, whose `hash()` nobody has cached."""
    return [bytes(bytearray(name)) for name in chain]


class PoolRace:
    """Full pools of the same blocks: ours of one policy, each way, the plain index, and vLLM's where there is one."""

    def __init__(self, num_slots: int, policy: str) -> None:
        progress(f"{policy}: filling {num_slots} slots")
        self.policy = policy
        self.took: defaultdict[tuple[str, str, int], list[float]] = defaultdict(list)  # us a block
        self.plain = Plain(num_slots)
        self.ours = {way: Ours(num_slots, policy, way) for way in WAYS}
        self.vllm = Vllm(num_slots) if util.find_spec("vllm") else None
        self.names: HashChain = []  # ever stored, oldest first
        self.num_gone = 0  # of them: the plain index has the others
        self.newer_half = num_slots // 2
        self.rng, self.draw = np.random.default_rng(7), random.Random(1)
        for _ in range(num_slots // CHAIN + 1):
            chain = random_names(self.rng, CHAIN)
            for pools in (*self.ours.values(), *([self.vllm] if self.vllm else [])):
                pools.store(chain)
            self.plain.slots.update(zip(chain, range(CHAIN), strict=True))
            self.names += chain

    def some(self, batch: int) -> HashChain:
        """Blocks somewhere in the newer half: not evicted yet."""
        first = self.draw.randrange(len(self.names) - self.newer_half, len(self.names) - batch + 1)
        return again(self.names[first : first + batch])

    def round(self, batch: int) -> None:
        """Every verb and every reference once."""
        new = random_names(self.rng, batch)
        for pools in self.ours.values():
            if pools.pool.lookup(self.some(batch)) != batch:
                raise RuntimeError("blocks that must be held are not: the figures would be of misses")
        old = self.names[self.num_gone : self.num_gone + batch]
        sides: dict[str, Verbs] = {
            way: verbs_of(pools, lambda: self.some(batch), new) for way, pools in self.ours.items()
        }
        sides["plain"] = self.plain.verbs(self.some(batch), old, new)
        if self.vllm is not None:
            sides["vLLM"] = verbs_of(self.vllm, lambda: self.some(batch), new)
        for side, verbs in sides.items():
            for verb, run in verbs.items():
                self.took[side, verb, batch].append(took(run) / batch * 1e6)
        self.names += new
        self.num_gone += batch

    def run(self, num_blocks: int) -> None:
        """About so many blocks of each batch size."""
        for batch in BATCHES:
            rounds = max(15, min(2000, num_blocks // batch))
            progress(f"{self.policy}: {rounds} rounds of {batch} blocks")
            for _ in range(rounds):
                self.round(batch)
        for pools in self.ours.values():
            pools.pool.check()
            pools.blocks.check()


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--vllm", metavar="PYTHON", help="an interpreter that has vLLM and kvtier: race against it")
    chosen = options.parse_args()
    if chosen.vllm and not util.find_spec("vllm"):
        os.execv(chosen.vllm, [chosen.vllm, *sys.argv])  # there the option is of no effect
    num_slots, num_blocks = (65_536, 2_000) if chosen.quick else (1_000_000, 150 * CHAIN)
    us: dict[tuple[str, str, str, int], float] = {}
    for policy in POLICIES:
        race = PoolRace(num_slots, policy)
        race.run(num_blocks)
        us |= {(policy, *key): median(samples) for key, samples in race.took.items()}
        del race
    rows: list[Row] = []
    targets: list[Target] = []
    for batch, policy, way, (verb, name, limit, reference) in product(BATCHES, POLICIES, WAYS, VERBS):
        if policy != "lru" and name == "allocate + free":
            continue
        ours, bare = us[policy, way, name, batch], us[policy, "plain", reference, batch]
        vllm = us.get((policy, "vLLM", name, batch))
        row = {"verb": verb, "way": way, "policy": policy, "batch": batch, "us/block": ours, "reference": reference}
        row |= {"its us": bare, "ratio": ours / bare}
        rows.append(row | {"vLLM us": "no vLLM" if vllm is None else vllm, "of vLLM": vllm and ours / vllm})
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
