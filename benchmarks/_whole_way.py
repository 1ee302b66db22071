"""A long prompt's whole way through the scheduler's half: from ids to the request's end, compiled and not."""

import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self
from unittest import mock

import numpy as np
import torch

from kvtier.connector import LocalConnector, WorkerReport
from kvtier.tiers.compiled import status
from kvtier.tiers.config import COMPILED, Config
from kvtier.tiers.copies import BlockPool
from kvtier.tiers.hierarchy import Wanted
from kvtier.tiers.naming import HashCache, KVShape, TokenChain, root_hash

STEPS: Final = ("names", "lookup", "given", "end")
NEW: Final = 2048  # tokens that the next turn has more
PIECE: Final = 1024  # blocks stored at once
FINGERPRINT: Final = b"f" * 32
ROOT: Final = root_hash(FINGERPRINT)

PYTHON: Final = "Python alone"
WAYS: Final = ("compiled", PYTHON) if all(each.state == "loaded" for each in status()) else (PYTHON,)

Took = tuple[float, float, float, float]
"""CPU seconds of each of `STEPS`, of the thread that makes them."""


@contextmanager
def going(way: str) -> Iterator[None]:
    """Names are made by the extension modules, or without; and so does its work what is opened meanwhile."""
    if way != PYTHON:
        yield
        return
    with (
        mock.patch.dict(os.environ, {COMPILED: "off"}),
        mock.patch("kvtier.tiers.naming.chain.compiled", return_value=None),
    ):
        yield


@dataclass
class LongRequest:
    """A request with a long prompt. Implements `Request`."""

    request_id: str
    chain: TokenChain
    num_tokens: int


class LongPrompts:
    """Tiers that hold every block of one prompt, in L2 and in L1, and the requests that ask for it.

    The blocks are small, 16 bytes a token: what is measured is the books.
    """

    def __init__(self, folder: Path, tokens: list[int], block_size: int, scheme: str) -> None:
        shape = KVShape(1, 1, 4, block_size, "float16")
        num_blocks = len(tokens) // block_size
        settings = folder / f"{block_size}-{scheme}.toml"
        size = 4 * num_blocks * max(4096, shape.block_bytes)
        settings.write_text(f'[cache]\nblock_size = {block_size}\nhash = "{scheme}"\n[host]\nsize = "{size}"\n')
        self._pool = BlockPool(shape, num_blocks)
        tensor = torch.zeros((1, *shape.block_shape), dtype=torch.float16)
        self._connector = LocalConnector(Config.load(settings), FINGERPRINT, shape, tensor, partial_blocks=True)
        self._tokens, self._size, self._scheme = tokens, block_size, scheme
        self._table = list(range(num_blocks + NEW // block_size + 1))
        self._kept = HashCache()
        self._draw = random.Random(1)
        self._store(self._chain(tokens, self._kept))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connector.close()

    @property
    def turns(self) -> dict[str, Callable[[], Took]]:
        """What is measured, by name."""
        return {
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
        found = scheduler.lookup(LongRequest("a", chain, len(tokens)), num_l1 * self._size)
        looked = clock()
        assert isinstance(found, int)
        assert found + num_l1 * self._size == len(self._tokens)
        blocks = pool.match(chain.hashes[:num_l1]) if in_l1 else np.empty(0, np.int64)
        loading = scheduler.allocated("a", self._table, found)
        plan = scheduler.build_plan()
        given = clock()
        assert loading == found
        scheduler.update(WorkerReport(tuple(op.op_id for op in plan.loads)))
        scheduler.finished("a")
        pool.free(blocks)
        ended = clock()
        return named - began, looked - named, given - looked, ended - given
