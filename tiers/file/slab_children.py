"""SlabChildren: which blocks of a slab follow a given block, from its mirror of the entry table."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvtier.tiers import ChainHash, ChildBlock
from kvtier.tiers.file.extents import ExtentMap
from kvtier.tiers.file.slab_codec import Codec
from kvtier.tiers.file.slab_rows import SlabRows
from kvtier.tiers.pool import ChildIndex, Slots

_PIECE: Final = 1 << 12  # slots entered at once: bounds the copy of their parents' names


@dataclass(eq=False, slots=True)
class SlabChildren:
    """What an open slab answers about children. `lock` guards `blocks`, `rows`' arrays, and who changes `index`.

    The index is told of blocks that come, never of those that leave: `find` looks at each slot it names.
    """

    blocks: ExtentMap
    rows: SlabRows
    lock: threading.Lock
    codec: Codec
    inside: Callable[[], AbstractContextManager[bool]]  # `Calls.enter`
    index: ChildIndex | None  # None: nobody asks

    def stored(self, slots: Slots) -> None:
        """These rows hold blocks now. The caller holds the lock, or nobody else knows the slab yet."""
        if self.index is None:
            return
        for first in range(0, len(slots), _PIECE):
            piece = slots[first : first + _PIECE]
            names = self.rows.parents.take(piece, 0).tobytes()
            self.index.enter([names[at : at + 32] for at in range(0, len(names), 32)], piece.tolist())

    def find(self, parent: ChainHash, limit: int, start: bytes = b"") -> list[ChildBlock]:
        """Up to `limit` blocks held now whose parent has this name and whose tokens begin with `start`.

        Never waits for the disk: a child whose entry left the page cache is not told this time, but sent for. Of a
        sealed slab only blocks with this parent are decrypted.
        """
        if self.index is None:
            return []
        first_word, word_of = int.from_bytes(parent[:8], "little"), self.rows.parents.item
        likely = [slot for slot in self.index.find(parent) if word_of(slot, 0) == first_word]  # a hint: no lock yet
        if not likely:
            return []
        with self.inside() as is_open:
            with self.lock:
                held = self.blocks.index.holds(np.array(likely, np.int64))
                likely = [slot for slot, is_held in zip(likely, held.tolist(), strict=True) if is_held]
            if not is_open or not likely:
                return []
            rows, whole = self.rows.peek(likely)
            names, parents = (rows[field].tolist() for field in ("chain_hash", "parent"))
            children = [
                ChildBlock(names[at], self.codec.tokens(rows[at].tobytes()))
                for at in range(len(likely))
                if whole[at] and parents[at] == parent
            ]
        return [child for child in children if child.tokens and child.tokens.startswith(start)][:limit]

    def check(self) -> None:
        """Raise AssertionError unless the index is whole and names only rows there are. The caller holds the lock."""
        if self.index is not None:
            self.index.check()
            assert self.index.num_slots == len(self.rows.seqs), "the index of children is of another slab"
