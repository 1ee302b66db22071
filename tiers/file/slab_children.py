"""SlabChildren: which blocks of a slab follow a given block, from its mirror of the entry table."""

import threading
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvtier.tiers import ChainHash, ChildBlock
from kvtier.tiers.file import slab
from kvtier.tiers.file.extents import ExtentMap
from kvtier.tiers.file.slab_codec import Codec
from kvtier.tiers.pool import ChildIndex, Slots

_PIECE: Final = 1 << 14  # slots entered at once: bounds the copy of their parents' names


@dataclass(eq=False, slots=True)
class SlabChildren:
    """What an open slab answers about children. `lock` guards `blocks`, `rows` and `index`.

    The index is told of blocks that come, never of those that leave: `find` looks at each slot it names.
    """

    blocks: ExtentMap
    rows: slab.Rows
    lock: threading.Lock
    codec: Codec
    index: ChildIndex | None  # None: nobody asks

    def stored(self, slots: Slots) -> None:
        """These rows hold blocks now. The caller holds the lock, or nobody else knows the slab yet."""
        if self.index is None:
            return
        for first in range(0, len(slots), _PIECE):
            piece = slots[first : first + _PIECE]
            parents = np.ascontiguousarray(self.rows["parent"][piece]).view(np.uint64).reshape(-1, 4)
            self.index.add(parents, piece)

    def find(self, parent: ChainHash, limit: int) -> list[ChildBlock]:
        """Up to `limit` blocks held now whose parent has this name. Of a sealed slab only those are decrypted."""
        if self.index is None:
            return []
        with self.lock:
            parents, holds = self.rows["parent"], self.blocks.holds_block
            slots = [slot for slot in self.index.find(parent) if holds(slot) and parents[slot].tobytes() == parent]
            if not slots:
                return []
            rows = self.rows[slots[:limit]]
        return [
            ChildBlock(record.chain_hash, record.tokens)
            for record in self.codec.to_records(rows)
            if record.tokens  # else the entry is not authentic, or of an engine that tells none
        ]

    def check(self) -> None:
        """Raise AssertionError unless the index is whole and names only rows there are. The caller holds the lock."""
        if self.index is not None:
            self.index.check()
            assert self.index.num_slots == len(self.rows), "the index of children is of another slab"
