"""How fast the pools of L1 and L2 keep their books: 1,000,000 slots, batches of 1 to 2,048 blocks, as engines do.

Each figure stands beside vLLM's BlockPool under the same work, turn by turn, and lookups beside the loop over a dict
that nobody could do without in plain Python. Every lookup uses new bytes objects, as hashes of a new request are. A
decoding step makes batches of one block a few times over; a long prompt makes large ones. Both forms of the core are
measured: compiled, where it was built, and interpreted. `--vllm PYTHON` runs all of it under an interpreter that has
both vLLM and kvtier (`.ci/beside-engine vllm`)."""

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
from _report import PYTHON, Given, Result, Row, form, is_built, option, program, progress, took
from _rig import random_names, reserved

from kvtier.tiers import ChainHash
from kvtier.tiers.copies import BlockPool
from kvtier.tiers.naming import KVShape
from kvtier.tiers.pool import SlotPool

CHAIN: Final = 2048  # blocks
BATCHES: Final = (1, 4, 16, 64, 128, CHAIN)
INTERPRETED: Final = "interpreted"
WAYS: Final = ("compiled", INTERPRETED) if is_built() else (INTERPRETED,)
POLICIES: Final = ("lru", "s3fifo")
VERBS: Final = ("lookup", "lease + release", "store with eviction", "allocate + free, unkeyed")
# What the Python way of commit 38143aa3 took of vLLM's time, by batch, on an idle Xeon: the interpreted core is held
# to it.
FORMER: Final = {
    ("lookup", "lru"): {1: 1.257, 4: 1.13, 16: 1.055, 64: 0.744, CHAIN: 0.247},
    ("lease + release", "lru"): {1: 2.26, 4: 1.634, 16: 1.307, 64: 0.788, CHAIN: 0.214},
    ("store with eviction", "lru"): {1: 3.427, 4: 2.409, 16: 1.909, 64: 1.254, CHAIN: 0.441},
    ("allocate + free, unkeyed", "lru"): {1: 1.891, 4: 1.633, 16: 1.274, 64: 0.826, CHAIN: 0.177},
    ("lookup", "s3fifo"): {1: 0.887, 4: 1.146, 16: 1.241, 64: 0.805, CHAIN: 0.183},
    ("lease + release", "s3fifo"): {1: 1.609, 4: 1.708, 16: 1.581, 64: 1.019, CHAIN: 0.158},
    ("store with eviction", "s3fifo"): {1: 4.375, 4: 3.993, 16: 3.638, 64: 1.666, CHAIN: 0.394},
}
HashChain = list[ChainHash]
Verbs = dict[str, Callable[[], object]]


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
        self.pool.seal(reserved(self.pool, hashes)).release()

    def allocate_and_free(self, count: int) -> None:
        block_ids = self.blocks.allocate(count)
        if block_ids is not None:
            self.blocks.free(block_ids)


class Vllm:
    """vLLM's own BlockPool, where its package is installed: one for names, one without."""

    def __init__(self, num_slots: int) -> None:
        from vllm.v1.core.block_pool import BlockPool as VllmBlockPool

        options = {"enable_caching": True, "hash_block_size": 16}
        self.pool, self.blocks = (VllmBlockPool(num_slots + 1, **options) for _ in range(2))  # one block is null

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
        blocks = self.pool.get_new_blocks(len(hashes))
        self.pool.cache_full_blocks(SimpleNamespace(block_hashes=hashes), blocks, 0, len(hashes), 16, 0)
        self.pool.free_blocks(reversed(blocks))

    def allocate_and_free(self, count: int) -> None:
        self.blocks.free_blocks(self.blocks.get_new_blocks(count))


def verbs_of(pools: Ours | Vllm, held: Callable[[], HashChain], new: HashChain) -> Verbs:
    return {
        "lookup": partial(pools.look_up, held()),
        "lease + release": partial(pools.lease_and_release, held()),
        "store with eviction": partial(pools.store, again(new)),
        "allocate + free, unkeyed": partial(pools.allocate_and_free, len(new)),
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
        self.plain = dict[ChainHash, int]()
        self.ours = {way: Ours(num_slots, policy, way) for way in WAYS}
        self.vllm = {"vLLM": Vllm(num_slots)} if util.find_spec("vllm") else {}
        self.names: HashChain = []  # ever stored, oldest first
        self.newer_half = num_slots // 2
        self.rng, self.draw = np.random.default_rng(7), random.Random(1)
        for _ in range(num_slots // CHAIN + 1):
            chain = random_names(self.rng, CHAIN)
            for pools in (*self.ours.values(), *self.vllm.values()):
                pools.store(chain)
            self.know(chain)

    def know(self, chain: HashChain) -> None:
        self.plain.update(zip(chain, range(len(chain)), strict=True))
        self.names += chain

    def some(self, batch: int) -> HashChain:
        """Blocks somewhere in the newer half: not evicted yet."""
        first = self.draw.randrange(len(self.names) - self.newer_half, len(self.names) - batch + 1)
        return again(self.names[first : first + batch])

    def round(self, batch: int) -> None:
        new = random_names(self.rng, batch)
        for pools in self.ours.values():
            if pools.pool.lookup(self.some(batch)) != batch:
                raise RuntimeError("blocks that must be held are not: the figures would be of misses")
        sides = {way: verbs_of(pools, lambda: self.some(batch), new) for way, pools in self.ours.items()}
        known = self.some(batch)
        sides["plain"] = {"dict.get": lambda: list(map(self.plain.get, known))}
        sides |= {name: verbs_of(pools, lambda: self.some(batch), new) for name, pools in self.vllm.items()}
        for side, verbs in sides.items():
            for verb, run in verbs.items():
                self.took[side, verb, batch].append(took(run) / batch * 1e6)
        self.know(new)

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


@program(option("--vllm", metavar="PYTHON", help="an interpreter that has vLLM and kvtier: race against it"))
def main(chosen: Given) -> Result:
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
    for batch, policy, way, verb in product(BATCHES, POLICIES, WAYS, VERBS):
        if (former := FORMER.get((verb, policy))) is None:  # L1's pool has one policy
            continue
        ours = us[policy, way, verb, batch]
        row: Row = {"verb": verb, "way": way, "policy": policy, "batch": batch, "us/block": ours}
        row |= {"dict.get us": us[policy, "plain", "dict.get", batch], "vLLM us": "no vLLM", "of vLLM": None}
        if (vllm := us.get((policy, "vLLM", verb, batch))) is not None:
            row |= {"vLLM us": vllm, "of vLLM": ours / vllm}
            if way == INTERPRETED and batch in former:
                row["of the former"] = ours / vllm / former[batch]
        rows.append(row)
    return rows
