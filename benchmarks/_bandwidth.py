"""A race of a store below L2 with bare clients: what the programs of Redis and of object stores share."""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
from _blocks import Slots, records_of
from _races import Race, Row

from kvtier.tiers import BlockRecord, Outcome

SEALED: Final = ("secret", "key_file")  # options of [redis] and [objects]
OURS: Final = "ours"  # records in the clear


def sides_of(key: object) -> dict[str, dict[str, str]]:
    """Our sides, each by its options."""
    return {OURS: {}, "secret": {"secret": "a secret of the benchmark"}, "key_file": {"key_file": str(key)}}


class StoreRace(Race):
    """Stores of blocks of one size, by the names of their sides. A speed is of a verb and a side."""

    def __init__(self, slots: Slots, num_bytes: int, stores: Mapping[str, Any]) -> None:
        super().__init__()
        self.slots, self.stores = slots, stores
        self.num_batches = max(1, num_bytes // slots.batch_bytes)

    def chain(self, name: object) -> list[list[BlockRecord]]:
        """Batches of records; block i of each is source i."""
        return [
            records_of(
                [hashlib.sha256(f"{name}/{batch}/{i}".encode()).digest() for i in range(self.slots.per_batch)],
                self.slots.checksums,
            )
            for batch in range(self.num_batches)
        ]

    def write(self, side: str, batch: list[BlockRecord]) -> None:
        outcomes = self.stores[side].write(batch, self.slots.sources)
        assert set(outcomes) == {Outcome.OK}, f"a write failed: {set(outcomes)}"

    def read(self, side: str, batch: list[BlockRecord]) -> None:
        results = self.stores[side].read([record.chain_hash for record in batch], self.slots.targets)
        assert not [r for r in results if isinstance(r, Outcome)], f"a read failed: {results}"

    def forget(self) -> None:
        """What is read next is not there yet."""
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
