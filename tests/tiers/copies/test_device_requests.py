"""L1 as requests use it, at random: both ways of the pool agree, and no block ever has another owner's bytes."""

import hashlib
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from extent import brief

from kvtier.tiers.compiled import extension
from kvtier.tiers.copies.device import BlockPool
from kvtier.tiers.naming.identity import KVShape
from kvtier.tiers.tier import ChainHash

SHAPE = KVShape(num_layers=1, num_kv_heads=1, head_dim=1, block_size=2, dtype="float32")
NUM_BLOCKS = 60
NUM_CHAINS = 6
LENGTHS = (1, 2, 5, 15, 16, 17, 24)  # of a request, in blocks: on both sides of what the Python way calls few


def name_of(chain: int, block: int) -> ChainHash:
    """The first eight blocks of all chains are the same prompt."""
    return hashlib.sha256(b"%d %d" % (chain if block >= 8 else 0, block)).digest()


def stamp_of(name: ChainHash) -> int:
    """What a block's bytes say of it: a whole number that a float32 holds."""
    return int.from_bytes(name[:3], "big")


class Requests:
    """Requests over a pool: each shares what is there, takes the rest, computes it block by block, and frees it all.

    A block's bytes are its name's stamp, or its owner's number before it has a name. Copies hold blocks beyond the
    request, and then still find the bytes they were begun with.
    """

    def __init__(self, pool: BlockPool, seed: int) -> None:
        self.pool, self.draw = pool, random.Random(seed)
        self.running: list[tuple[int, list[int], int]] = []  # chain, block table, how many of it have a name
        self.copies: list[tuple[list[int], list[int]]] = []  # blocks held, their stamps
        self.number = -1 - seed  # who owns these requests: negative, so no name's stamp
        self.bytes = pool.tensor.view(NUM_BLOCKS, -1)

    def step(self) -> object:
        verb = self.draw.choice(["begin", "begin", "compute", "compute", "grow", "copy", "copied", "end"])
        told: object = getattr(self, verb)()
        return told

    def begin(self) -> object:
        chain, length = self.draw.randrange(NUM_CHAINS), self.draw.choice(LENGTHS)
        names = [name_of(chain, block) for block in range(length)]
        table = self.pool.match(names)
        assert self.stamps(table) == [stamp_of(name) for name in names[: len(table)]]
        shared = list(table)
        fresh = self.pool.allocate(length - len(table), self.draw.choice([0, 0, 3]))
        if fresh is None:
            self.pool.free(table)
            return shared, None
        self.own(fresh)
        self.running.append((chain, table + fresh, len(table)))
        return shared, list(fresh)

    def compute(self) -> object:
        if not self.running:
            return None
        at = self.draw.randrange(len(self.running))
        chain, table, start = self.running[at]
        end = min(len(table), start + self.draw.choice([1, 4, 20]))
        names = [name_of(chain, block) for block in range(end)]
        self.bytes[table[start:end]] = torch.tensor([stamp_of(name) for name in names[start:end]])[:, None].float()
        self.pool.publish(table[start:end], names[start:end], names[start - 1] if start else None)
        self.running[at] = chain, table, end
        return end

    def grow(self) -> object:
        if not self.running:
            return None
        fresh = self.pool.allocate(1)
        if fresh is not None:
            self.own(fresh)
            self.draw.choice(self.running)[1].extend(fresh)
        return fresh

    def copy(self) -> object:
        if not self.running:
            return None
        _, table, end = self.draw.choice(self.running)
        blocks = table[:end]
        self.pool.hold(blocks)
        self.copies.append((blocks, self.stamps(blocks)))
        return list(blocks)

    def copied(self) -> object:
        if not self.copies:
            return None
        blocks, stamps = self.copies.pop(self.draw.randrange(len(self.copies)))
        assert self.stamps(blocks) == stamps
        self.pool.free(blocks)
        return None

    def end(self) -> object:
        if not self.running:
            return None
        _, table, _ = self.running.pop(self.draw.randrange(len(self.running)))
        if self.draw.random() < 0.5:  # in two parts, as what is held by a store goes later
            self.draw.shuffle(table)
        middle = self.draw.randrange(len(table) + 1)
        self.pool.free(table[middle:])
        self.pool.free(np.array(table[:middle], np.int64))
        return self.pool.num_free_blocks

    def own(self, blocks: list[int]) -> None:
        in_use = {block for _, table, _ in self.running for block in table} | {
            b for held, _ in self.copies for b in held
        }
        assert len(set(blocks) - in_use) == len(blocks)
        self.bytes[blocks] = float(self.number)

    def stamps(self, blocks: list[int]) -> list[int]:
        """The bytes of each, all of which say the same."""
        found = self.bytes[blocks]
        assert (found == found[:, :1]).all()
        return [int(stamp) for stamp in found[:, 0].tolist()]

    def finish(self) -> None:
        while self.copies:
            self.copied()
        while self.running:
            self.end()


@pytest.mark.parametrize("seed", range(brief(4, 20)))
def test_both_ways_give_the_same_blocks_to_the_same_requests(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    if extension("kvtier.tiers.pool.core_compiled") is None:
        pytest.skip("not built: `make compiled`")
    compiled = BlockPool(SHAPE, NUM_BLOCKS)
    with monkeypatch.context() as patch:
        patch.setenv("KVTIER_COMPILED", "off")
        python = BlockPool(SHAPE, NUM_BLOCKS)
    assert type(compiled._core) is not type(python._core)
    one, other = Requests(compiled, seed), Requests(python, seed)
    for number in range(300):
        assert one.step() == other.step()
        if number % 50 == 0:
            compiled.check()
            python.check()
    one.finish()
    other.finish()
    for pool in (compiled, python):
        pool.check()
        assert pool.num_free_blocks == NUM_BLOCKS
    assert compiled.allocate(NUM_BLOCKS) == python.allocate(NUM_BLOCKS)


@pytest.mark.usefixtures("way")
def test_threads_never_find_each_others_bytes() -> None:
    """The pool is all they share. Who has written nothing to a block yet finds its own number in it."""
    pool = BlockPool(SHAPE, NUM_BLOCKS)

    def run(seed: int) -> None:
        requests = Requests(pool, seed)
        for _ in range(300):
            requests.step()
            for _, table, num_named in requests.running:
                assert set(requests.stamps(table[num_named:])) <= {requests.number}
        requests.finish()

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(run, seed) for seed in range(4)]:
            done.result(120)
    pool.check()
    assert pool.num_free_blocks == NUM_BLOCKS
