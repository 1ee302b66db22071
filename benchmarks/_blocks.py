"""Blocks that programs move: names, records, payloads, and host slots."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvtier.tiers import BATCH_BYTES, BlockRecord, ChainHash, checksum
from kvtier.tiers.host import HostRegion

ROOT = bytes(32)  # the parent of a chain's first block
TOKENS = b"\1\0\0\0" * 16


class Shape(NamedTuple):
    """Of blocks that nobody has. Implements `BlockShape`."""

    block_size: int
    block_bytes: int


def random_names(rng: np.random.Generator, count: int) -> list[ChainHash]:
    """They are hashes, as indexes expect of names; each time other objects."""
    joined = rng.bytes(32 * count)
    return [joined[i : i + 32] for i in range(0, len(joined), 32)]


def records_of(
    names: Sequence[ChainHash], checksums: Iterable[int], root: ChainHash = ROOT, tokens: bytes = TOKENS
) -> list[BlockRecord]:
    """Of a chain."""
    parents = [root, *names]
    return [BlockRecord(name, parents[i], tokens, each) for i, (name, each) in enumerate(zip(names, checksums))]  # noqa: B905


class Slots:
    """Host slots: sources with bytes of their own, and as many targets as a batch of the hierarchy has blocks."""

    def __init__(self, block_bytes: int, num_batches: int = 1) -> None:
        self.block_bytes = block_bytes
        self.per_batch = max(1, BATCH_BYTES // block_bytes)
        self.batch_bytes = self.per_batch * block_bytes
        rng = np.random.default_rng(1)
        self.sources = self.more(num_batches * self.per_batch)
        for source in self.sources:
            source[:] = rng.bytes(block_bytes)
        self.checksums = [checksum(source) for source in self.sources]
        self.targets = self.more(self.per_batch)

    def more(self, count: int) -> list[memoryview]:
        """New ones."""
        region = HostRegion.allocate(count, self.block_bytes)
        assert region.wait_prefaulted(None)
        return [region.slot(i) for i in range(count)]


def key_file(directory: str | Path) -> Path:
    """A file with a key, for [redis], [objects] and [peers]."""
    path = Path(directory) / "key"
    path.touch(0o600)
    path.write_bytes(os.urandom(32))
    return path
