"""BlockRecords: the record of the block in each slot besides its bytes, in one array: no Python object a block."""

import sys
from collections.abc import Callable, Iterator, Sequence
from struct import Struct
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvtier.tiers import BlockRecord, ChainHash, ChildBlock, Lineage
from kvtier.tiers.compiled import extension

_HASH_BYTES: Final = 32
_HEAD: Final = Struct("<32sQII")  # parent, checksum, the slot's generation, lengths: 48 bytes
_HEAD_ROW: Final = np.dtype([("parent", "V32"), ("checksum", "<u8"), ("generation", "<u4"), ("lengths", "<u4")])
_GENERATION: Final = (1 << 32) - 1  # the low half of a generation: it does not repeat during one read
_NAME: Final = Struct(f"{_HASH_BYTES}s")
_SIZE_BITS: Final = 26  # of the lengths: bytes of tokens; above them the parent's, as that of none is b""


class BlockRecords:
    """A row for each slot, 48 bytes and 4 for each token a block may have. It takes no lock.

    Names are in the pool's index alone. A row has the generation of its slot: once the slot is taken again, the row is
    invalid. A row is packed and unpacked by one call that keeps the GIL. So a reader beside a writer sees a whole row,
    of the block before or of the new one. The memory is the kernel's zeros until it is written.
    """

    def __init__(self, names: memoryview, generations: memoryview, block_size: int) -> None:
        """A pool's `names` (32 bytes a slot), `generations` (int64, raised before naming); tokens of a block."""
        self.block_size = block_size
        self._num_slots = len(names) // _HASH_BYTES
        self._names, self._generations = names, generations
        self._row = Struct(f"{_HEAD.format}{4 * block_size}s")
        self._array = np.zeros(self._num_slots * self._row.size, np.uint8)
        self._rows = memoryview(self._array)
        module = extension("kvtier.tiers.host.records_compiled") if sys.byteorder == "little" else None
        self._packs: Callable[..., int] | None = None if module is None else module.put_columns

    def __len__(self) -> int:
        return self._num_slots

    @property
    def num_bytes(self) -> int:
        """Memory it takes once every slot was described."""
        return self._array.nbytes

    def __getitem__(self, slot: int) -> BlockRecord | None:
        """The record of the block that the slot holds or held last; None if it was not described. IndexError."""
        if not 0 <= slot < self._num_slots:
            raise IndexError(f"slot {slot}: there are {self._num_slots}")
        parent, checksum, generation, lengths, tokens = self._row.unpack_from(self._rows, slot * self._row.size)
        [name] = _NAME.unpack_from(self._names, slot * _HASH_BYTES)
        if not generation or generation != self._generations[slot] & _GENERATION:  # read last: the name is of this one
            return None
        size = lengths & ((1 << _SIZE_BITS) - 1)
        return BlockRecord(name, parent[: lengths >> _SIZE_BITS], tokens[:size], checksum)

    def __setitem__(self, slot: int, record: BlockRecord) -> None:
        self.put([slot], [record])

    def __iter__(self) -> Iterator[BlockRecord | None]:
        return map(self.__getitem__, range(self._num_slots))

    def put(self, slots: Sequence[int], records: Sequence[BlockRecord]) -> None:
        """Describe taken and named slots. ValueError for a record that is another block's, or that fits no row."""
        self.put_columns(
            slots,
            [record.chain_hash for record in records],
            [record.parent for record in records],
            [record.tokens for record in records],
            [record.checksum for record in records],
        )

    def put_columns(
        self,
        slots: Sequence[int],
        chain_hashes: Sequence[ChainHash],
        parents: Sequence[ChainHash],
        tokens: Sequence[bytes],
        checksums: Sequence[int],
    ) -> None:
        """As `put`, from columns instead of records."""
        if self._packs is not None:
            lists = [each if isinstance(each, list) else [*each] for each in (chain_hashes, parents, tokens, checksums)]
            if self._packs(self._rows, self._names, self._generations, [*slots], *lists) == len(slots):
                return  # else the loop below finds the error
        pack, rows, stride, width = self._row.pack_into, self._rows, self._row.size, 4 * self.block_size
        names, generations, name_at = self._names, self._generations, _NAME.unpack_from
        columns = zip(slots, chain_hashes, parents, tokens, checksums, strict=True)
        for slot, chain_hash, parent, block_tokens, checksum in columns:
            if len(block_tokens) > width or len(parent) > _HASH_BYTES:
                raise ValueError(
                    f"a parent of {len(parent)} bytes and {len(block_tokens) // 4} tokens: a name has {_HASH_BYTES}, "
                    f"a block here at most {self.block_size}"
                )
            if name_at(names, slot * _HASH_BYTES)[0] != chain_hash:
                raise ValueError(f"chain_hash: slot {slot} is named for another block")
            lengths = len(parent) << _SIZE_BITS | len(block_tokens)
            pack(rows, slot * stride, parent, checksum, generations[slot] & _GENERATION, lengths, block_tokens)

    def lineage(self, slots: NDArray[np.int64]) -> Lineage:
        """Names and parents of the blocks in these slots, if they were described and have a parent."""
        rows = self._array.reshape(self._num_slots, self._row.size)[slots, : _HEAD.size]
        heads = np.ascontiguousarray(rows).view(_HEAD_ROW).reshape(-1)
        now = np.frombuffer(self._generations, np.int64)[slots] & _GENERATION
        names = np.frombuffer(self._names, np.uint64).reshape(-1, 4)[slots]
        known = (heads["generation"] == now) & (now != 0) & (heads["lengths"] >> _SIZE_BITS == _HASH_BYTES)
        parents = np.ascontiguousarray(heads["parent"][known])
        return Lineage(names[known], parents.view(np.uint64).reshape(-1, 4))

    def children(
        self, slots: Sequence[int], parent: ChainHash, start: bytes, is_ready: Callable[[int], bool]
    ) -> list[ChildBlock]:
        """The blocks in these slots that are ready, have this parent and begin with these tokens."""
        found: list[ChildBlock] = []
        rows, stride, most = self._rows, self._row.size, len(parent)
        tokens, end = _HEAD.size, _HEAD.size + len(start)
        for slot in slots:
            at = slot * stride
            if rows[at : at + most] != parent or rows[at + tokens : at + end] != start:  # quick, and no proof
                continue
            record = self[slot]  # may be of a block that was evicted, or is not sealed yet
            if record is not None and record.parent == parent and record.tokens.startswith(start) and is_ready(slot):
                found.append(ChildBlock(record.chain_hash, record.tokens))
        return found
