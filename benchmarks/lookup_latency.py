"""Naming the blocks of a long prompt and looking them all up, beside the least that any Python program must do.

The prompt is a Python list of 131,072 token ids in blocks of 16, every block held by a full `SlotPool` of 65,536.
The limit, timed in the same round: the list into an array of u32 and a bare `hashlib.sha256` loop over parent ‖ tokens.
Medians over interleaved rounds, per-round ratios. "whole way" is what the scheduler's thread does for such a request,
from the list to `finished`: names, lookup, blocks given and their load planned, end (CPU ms). L2 holds every block, and
each list has integers of its own. "named before": the process has named this prompt before. "next turn": it has 2,048
tokens more. All is measured with extension modules, where all were built, and "Python alone". "request of" so many
blocks, all hits, is what follows its names. "keys kvtier" is what naming blocks by our own chain adds to vLLM's
scheduler for such a prompt, in blocks of 32; under vLLM's own hashes nothing is added.
"""

import gc
import hashlib
import random
import struct
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import product
from statistics import median
from types import SimpleNamespace
from typing import Final
from unittest import mock

import numpy as np
import torch
from _report import PYTHON, Given, Result, Row, Target, form, of_pairs, program, progress, took
from _rig import AskedRequest, random_names, reserved

from kvtier.connector import LocalConnector, WorkerReport
from kvtier.connector.vllm import OwnChain
from kvtier.tiers import ChainHash
from kvtier.tiers.compiled import status
from kvtier.tiers.config import Config
from kvtier.tiers.copies import BlockPool
from kvtier.tiers.hierarchy import Wanted
from kvtier.tiers.naming import HashCache, KVShape, TokenChain, chain_hashes, root_hash
from kvtier.tiers.pool import SlotPool

BLOCK_SIZE: Final = 16
FINGERPRINT: Final = b"f" * 32
ROOT: Final = root_hash(FINGERPRINT)
SHORT: Final = (1, 8, 64, 512)  # blocks of a request
STEPS: Final = ("names", "lookup", "given", "end")
NEW: Final = 2048  # tokens that the next turn has more
PIECE: Final = 1024  # blocks stored at once
LIMIT: Final = "limit: list conversion + bare sha256 loop"
WAYS: Final = ("compiled", PYTHON) if all(each.state == "loaded" for each in status()) else (PYTHON,)

Took = tuple[float, float, float, float]
"""CPU seconds of each of `STEPS`, of the thread that makes them."""


@contextmanager
def going(way: str) -> Iterator[None]:
    """Names are made by the extension modules, or without; and so does its work what is opened meanwhile."""
    with form(way), ExitStack() as stack:
        if way == PYTHON:
            stack.enter_context(mock.patch("kvtier.tiers.naming.chain.compiled", return_value=None))
        yield


class LongPrompts:
    """Tiers that hold every block of one prompt, in L2 and in L1, and the requests that ask for it.

    The blocks are small, 16 bytes a token: what is measured is the books.
    """

    def __init__(self, stack: ExitStack, tokens: list[int], block_size: int, scheme: str) -> None:
        shape = KVShape(1, 1, 4, block_size, "float16")
        num_blocks = len(tokens) // block_size
        size = 4 * num_blocks * max(4096, shape.block_bytes)
        config = Config.model_validate({"cache": {"block_size": block_size, "hash": scheme}, "host": {"size": size}})
        self._pool = BlockPool(shape, num_blocks)
        tensor = torch.zeros((1, *shape.block_shape), dtype=torch.float16)
        self._connector = LocalConnector(config, FINGERPRINT, shape, tensor, partial_blocks=True)
        stack.callback(self._connector.close)
        self._tokens, self._size, self._scheme = tokens, block_size, scheme
        self._table = list(range(num_blocks + NEW // block_size + 1))
        self._kept, self._draw = HashCache(), random.Random(1)
        self._store(self._chain(tokens, self._kept))
        self.turns: dict[str, Callable[[], Took]] = {
            "named before": lambda: self._ask(1, self._kept),
            "next turn": lambda: self._ask(NEW, self._kept),
            "named before, in L1": lambda: self._ask(1, self._kept, in_l1=True),
            "from nothing": lambda: self._ask(1, HashCache()),
        }

    def _chain(self, tokens: list[int], kept: HashCache) -> TokenChain:
        chain = TokenChain(ROOT, self._size, self._scheme, kept=kept)
        chain.extend(tokens)
        return chain

    def _store(self, chain: TokenChain) -> None:
        tiers, hashes = self._connector.tiers, chain.hashes
        for first in range(0, len(hashes), PIECE):
            names = hashes[first : first + PIECE]
            [reservation] = tiers.reserve([Wanted(names, chain.parent(first), ROOT)])
            assert reservation is not None
            tiers.seal(reservation, chain.records(first, first + len(names)), tiers.epoch)
        assert tiers.drain(60.0)
        block_ids = self._pool.allocate(len(hashes))
        assert block_ids is not None
        self._pool.publish(block_ids, hashes, None)
        self._pool.free(block_ids)

    def _ask(self, num_new: int, kept: HashCache, *, in_l1: bool = False) -> Took:
        """One request: named, looked up, given its blocks, its load planned and reported, finished.

        Behind the prompt that is held it has tokens that nobody has seen.
        """
        scheduler, pool, clock = self._connector.scheduler, self._pool, time.thread_time
        tokens = [token + 0 for token in self._tokens]  # integers of their own, as a tokenizer makes them
        tokens += [self._draw.randrange(150_000) for _ in range(num_new)]
        began = clock()
        chain = self._chain(tokens, kept)
        named = clock()
        usable = (len(tokens) - 1) // self._size
        num_l1 = pool.lookup(chain.hashes[:usable]) if in_l1 else 0
        found = scheduler.lookup(AskedRequest("a", chain, len(tokens)), num_l1 * self._size)
        looked = clock()
        assert isinstance(found, int)
        assert found + num_l1 * self._size == len(self._tokens)
        blocks = pool.match(chain.hashes[:num_l1]) if in_l1 else None
        loading = scheduler.allocated("a", self._table, found)
        plan = scheduler.build_plan()
        given = clock()
        assert loading == found
        scheduler.update(WorkerReport(tuple(op.op_id for op in plan.loads)))
        scheduler.finished("a")
        if blocks is not None:
            pool.free(blocks)
        return named - began, looked - named, given - looked, clock() - given

    def behind_names(self, num_requests: int) -> float:
        requests = []
        for _ in range(num_requests):
            tokens = [*self._tokens, self._draw.randrange(150_000)]
            requests.append(AskedRequest("a", self._chain(tokens, self._kept), len(tokens)))
        return took(lambda: [self._serve(request) for request in requests], time.thread_time) / num_requests

    def _serve(self, request: AskedRequest) -> None:
        scheduler = self._connector.scheduler
        found = scheduler.lookup(request, 0)
        assert isinstance(found, int)
        assert found == len(self._tokens)
        scheduler.allocated("a", self._table, found)
        plan = scheduler.build_plan()
        scheduler.update(WorkerReport(tuple([op.op_id for op in plan.loads])))
        scheduler.finished("a")


def bare_loop(tokens: list[int], block_size: int = BLOCK_SIZE) -> list[ChainHash]:
    """The limit: nothing but the hash calls a SHA-256 chain cannot do without."""
    sha256, parent = hashlib.sha256, ROOT
    pieces = struct.iter_unpack(f"{4 * block_size}s", array("I", tokens))
    return [parent := sha256(parent + piece).digest() for (piece,) in pieces]


def filled_pool(hashes: list[ChainHash], num_slots: int) -> SlotPool:
    """A full pool that holds the given chain among blocks nobody asks for."""
    pool = SlotPool(num_slots)
    for chain in (random_names(np.random.default_rng(0), num_slots - len(hashes)), hashes):
        pool.seal(reserved(pool, chain)).release()
    return pool


def count_hashed(chain: TokenChain, token: int) -> int:
    """Blocks hashed while the chain grows by one block, as decoding grows it: token by token."""
    with going(PYTHON), mock.patch.object(hashlib, "sha256", wraps=hashlib.sha256) as counted:
        for _ in range(BLOCK_SIZE):
            chain.extend((token,))
    return counted.call_count


def parts_of(steps: list[Took]) -> dict[str, float]:
    """Median CPU milliseconds of each step."""
    return {name: median(each) * 1e3 for name, each in zip(STEPS, zip(*steps, strict=True), strict=True)}


def single_steps(tokens: list[int], names: list[ChainHash], rounds: int) -> Iterator[Row]:
    """Naming and looking up, and naming in vLLM's scheduler, beside the limit."""
    request, own = SimpleNamespace(all_token_ids=tokens, num_tokens=len(tokens)), (FINGERPRINT, None, None, None)
    steps: dict[str, tuple[str, Callable[[], object]]] = {
        LIMIT: (WAYS[0], lambda: bare_loop(tokens)),
        "vLLM adapter, keys kvtier": (WAYS[0], lambda: OwnChain(request, own, 32, "sha256").current()),
    }

    def whole(pool: SlotPool) -> None:
        assert pool.lookup(chain_hashes(ROOT, tokens, BLOCK_SIZE)) == len(names)

    for way in WAYS:
        with going(way):
            pool = filled_pool(names, 8 * len(names))
        steps["sha256 hashing + lookup" if way == WAYS[0] else f"sha256 hashing + lookup, {way}"] = (
            way,
            partial(whole, pool),
        )
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, (way, run) in steps.items():
            with going(way):
                times[name].append(took(run))
    for name, taken in times.items():
        row: Row = {"step": name, "tokens": len(tokens), "median_ms": median(taken) * 1e3}
        yield row | {"best_ms": min(taken) * 1e3, "of_limit": of_pairs(taken, times[LIMIT])}


def whole_ways(tokens: list[int], rounds: int) -> Iterator[Row]:
    for block_size, scheme in product((16, 64), ("sha256", "xxh3")):
        took_of: dict[tuple[str, str], list[Took]] = {}
        limits: list[float] = []
        with ExitStack() as stack:
            turns: dict[str, dict[str, Callable[[], Took]]] = {}
            for way in WAYS:
                with going(way):
                    turns[way] = LongPrompts(stack, tokens, block_size, scheme).turns
            for _ in range(rounds):
                limits.append(took(partial(bare_loop, tokens, block_size), time.thread_time))
                for way in WAYS:
                    with going(way):
                        for turn, ask in turns[way].items():
                            took_of.setdefault((turn, way), []).append(ask())
        for (turn, way), steps in took_of.items():
            each = list(map(sum, steps))
            row: Row = {"whole way": turn, "blocks": f"{block_size}, {scheme}", "way": way, **parts_of(steps)}
            row |= {"CPU ms": median(each) * 1e3, "best": min(each) * 1e3, "p90": sorted(each)[rounds * 9 // 10] * 1e3}
            yield row | {"limit": median(limits) * 1e3, "of limit": of_pairs(each, limits)}


def short_requests(tokens: list[int], rounds: int) -> Iterator[Row]:
    """The way of requests of a few blocks, in the form that is in use."""
    for num_blocks in SHORT:
        with ExitStack() as stack:
            prompts = LongPrompts(stack, tokens[: num_blocks * BLOCK_SIZE], BLOCK_SIZE, "sha256")
            steps = [prompts.turns["from nothing"]() for _ in range(20 * rounds)]
            behind = median(prompts.behind_names(64) for _ in range(rounds)) * 1e6
        row: Row = {"whole way": f"request of {num_blocks}", "blocks": f"{BLOCK_SIZE}, sha256", "way": WAYS[0]}
        yield row | parts_of(steps) | {"CPU us behind names": behind}


@program()
def main(options: Given) -> Result:
    num_tokens, rounds = (16_384, 15) if options.quick else (131_072, 101)
    draw = random.Random(0)
    tokens = [draw.randrange(150_000) for _ in range(num_tokens)]
    chain = TokenChain(ROOT, BLOCK_SIZE)
    chain.extend(tokens)
    progress(f"{num_tokens} tokens, {rounds} rounds")
    gc.disable()  # its pauses belong to whoever made the garbage
    rows = [
        *single_steps(tokens, list(chain.hashes), rounds),
        *whole_ways(tokens, rounds // 3),
        *short_requests(tokens, rounds),
    ]
    gc.enable()
    targets = [Target("blocks hashed when a sequence grows by one", 1, count_hashed(chain, 7))]
    return rows, targets
