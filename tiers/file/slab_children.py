"""SlabChildren: which blocks of a slab follow a given block, from its mirror of the entry table."""

import threading
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvtier.tiers import ChainHash, ChildBlock
from kvtier.tiers.file import slab
from kvtier.tiers.file.extents import ExtentMap
from kvtier.tiers.file.slab_codec import Codec
from kvtier.tiers.pool import ChildIndex, Slots

_PIECE: Final = 1 << 14  # slots entered at once: bounds the copy of their parents' names


@dataclass(eq=False, slots=True)
class SlabChildren:
    """What an open slab answers about children. `lock` guards `blocks` and `rows`, and who changes `index`.

    The index is told of blocks that come, never of those that leave: `find` looks at each slot it names.
    """

    blocks: ExtentMap
    rows: slab.Rows
    lock: threading.Lock
    codec: Codec
    index: ChildIndex | None  # None: nobody asks
    _name_at: int = field(init=False)  # in a row
    _parent_at: int = field(init=False)
    _first_words: NDArray[np.uint64] = field(init=False)  # of the parents' names, in the mirror itself
    _first_tokens: NDArray[np.uint32] | None = field(init=False, default=None)  # there, too; None in a sealed slab

    def __post_init__(self) -> None:
        fields = self.rows.dtype.fields
        assert fields is not None
        self._name_at, self._parent_at = fields["chain_hash"][1], fields["parent"][1]
        self._first_words = np.ndarray(self.rows.shape, "<u8", self.rows, self._parent_at, self.rows.strides)
        if "tokens" in fields:
            self._first_tokens = np.ndarray(self.rows.shape, "<u4", self.rows, fields["tokens"][1], self.rows.strides)

    def stored(self, slots: Slots) -> None:
        """These rows hold blocks now. The caller holds the lock, or nobody else knows the slab yet."""
        if self.index is None:
            return
        for first in range(0, len(slots), _PIECE):
            piece = slots[first : first + _PIECE]
            parents = np.ascontiguousarray(self.rows["parent"][piece]).view(np.uint64).reshape(-1, 4)
            self.index.add(parents, piece)

    def find(self, parent: ChainHash, limit: int, start: bytes = b"") -> list[ChildBlock]:
        """Up to `limit` blocks held now whose parent has this name and whose tokens begin with `start`.

        Of a sealed slab only blocks with this parent are decrypted.
        """
        if self.index is None:
            return []
        likely = self.index.find(parent)  # a hint, and so is what follows: no lock yet
        if likely:
            first_word, word_of = int.from_bytes(parent[:8], "little"), self._first_words.item
            likely = [slot for slot in likely if word_of(slot) == first_word]
        if likely and start and self._first_tokens is not None:
            first_token, token_of = int.from_bytes(start[:4], "little"), self._first_tokens.item
            likely = [slot for slot in likely if token_of(slot) == first_token]
        if not likely:
            return []
        with self.lock:
            rows = [self.rows[slot].tobytes() for slot in likely if self.blocks.holds_block(slot)]
        name_at, parent_at = self._name_at, self._parent_at
        children = [
            ChildBlock(row[name_at : name_at + 32], self.codec.tokens(row))
            for row in rows
            if row[parent_at : parent_at + 32] == parent
        ]
        return [child for child in children if child.tokens and child.tokens.startswith(start)][:limit]

    def check(self) -> None:
        """Raise AssertionError unless the index is whole and names only rows there are. The caller holds the lock."""
        if self.index is not None:
            self.index.check()
            assert self.index.num_slots == len(self.rows), "the index of children is of another slab"
