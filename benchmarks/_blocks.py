"""Blocks that programs move: names, records, payloads, host slots; and a race of stores of them with bare clients."""

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from _races import Race
from _report import Row

from kvtier.tiers import BATCH_BYTES, BlockRecord, ChainHash, Outcome, checksum
from kvtier.tiers.host import HostRegion
from kvtier.tiers.naming import TokenChain
from kvtier.tiers.pool import Reservation, SlotPool

ROOT = bytes(32)  # the parent of a chain's first block
TOKENS = b"\1\0\0\0" * 16
SEALED: Final = ("secret", "key_file")  # options of [redis] and [objects]
OURS: Final = "ours"  # records in the clear


class Shape(NamedTuple):
    """Of blocks that nobody has. Implements `BlockShape`."""

    block_size: int
    block_bytes: int


@dataclass
class AskedRequest:
    """Implements the connector's `Request`."""

    request_id: str
    chain: TokenChain
    num_tokens: int


def random_names(rng: np.random.Generator, count: int) -> list[ChainHash]:
    """They are hashes, as indexes expect of names; each time other objects."""
    joined = rng.bytes(32 * count)
    return [joined[i : i + 32] for i in range(0, len(joined), 32)]


def records_of(
    names: Sequence[ChainHash], checksums: Iterable[int], root: ChainHash = ROOT, tokens: bytes = TOKENS
) -> list[BlockRecord]:
    parents = [root, *names]
    return [BlockRecord(name, parents[i], tokens, each) for i, (name, each) in enumerate(zip(names, checksums))]  # noqa: B905


def reserved(pool: SlotPool, names: Sequence[ChainHash], parent: ChainHash | None = None) -> Reservation:
    reservation = pool.reserve(names, parent)
    if reservation is None:
        raise RuntimeError("the pool has no room, although nothing else is leased")
    return reservation


def key_file(directory: str | Path) -> Path:
    """A file with a key, for [redis], [objects] and [peers]."""
    path = Path(directory) / "key"
    path.touch(0o600)
    path.write_bytes(os.urandom(32))
    return path


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
        region = HostRegion.allocate(count, self.block_bytes)
        assert region.wait_prefaulted(None)
        return [region.slot(i) for i in range(count)]


class StoreRace(Race):
    """Stores of blocks of one size, by the names of their sides. A speed is of a verb and a side."""

    def __init__(self, slots: Slots, num_bytes: int, key: Path, opened: Any, others: Mapping[str, Any]) -> None:
        """`opened`: a store with such options; there is one with clear records, and one with each kind of sealed."""
        super().__init__()
        options = {OURS: {}, "secret": {"secret": "a secret of the benchmark"}, "key_file": {"key_file": str(key)}}
        self.slots, self.stores = slots, {side: opened(**each) for side, each in options.items()} | {**others}
        self.num_batches = max(1, num_bytes // slots.batch_bytes)

    def chain(self, name: object) -> list[list[BlockRecord]]:
        """Batches of records; block i of each is source i."""
        count, sums = self.slots.per_batch, self.slots.checksums
        names = [[f"{name}/{batch}/{i}".encode() for i in range(count)] for batch in range(self.num_batches)]
        return [records_of([hashlib.sha256(one).digest() for one in batch], sums) for batch in names]

    def write(self, side: str, batch: list[BlockRecord]) -> None:
        outcomes = self.stores[side].write(batch, self.slots.sources)
        assert set(outcomes) == {Outcome.OK}, f"a write failed: {set(outcomes)}"

    def read(self, side: str, batch: list[BlockRecord]) -> None:
        results = self.stores[side].read([record.chain_hash for record in batch], self.slots.targets)
        assert not [r for r in results if isinstance(r, Outcome)], f"a read failed: {results}"

    def discard(self, side: str, batch: list[BlockRecord]) -> None:
        self.stores[side].discard([record.chain_hash for record in batch])

    def forget(self) -> None:
        for target in self.slots.targets:
            target[:8] = bytes(8)

    def check(self) -> None:
        """The last batch read holds the bytes written."""
        same = [np.array_equal(a, b) for a, b in zip(self.slots.sources, self.slots.targets, strict=True)]
        assert all(same), "read other bytes than written"

    def sealed_rows(self, what: Row) -> Iterator[Row]:
        """Of the sides whose records are sealed or encrypted."""
        for side in SEALED:
            ours = what["verb"], side
            rates = {"GB/s": self.rate(ours), "× clear": self.ratio(ours, (what["verb"], OURS))}
            yield {**what, "records": side, **rates, "CPU s/GB": self.cpu(ours)}
