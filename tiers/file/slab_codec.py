"""Between a slab's rows and payloads and the blocks they hold: as they are, or sealed under a key. No I/O.

`docs/format.md` has both forms byte by byte. A `Codec` is chosen once, when a slab is opened.
"""

import struct
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import xxhash

from kvtier.tiers import BlockRecord, ChainHash, NameCipher, Outcome, RecordCipher, checksum, key_id
from kvtier.tiers.file import slab
from kvtier.tiers.file.file_io import Scratch
from kvtier.tiers.file.slab import Rows, Superblock
from kvtier.tiers.pool import Slots

SlabEntry = tuple[BlockRecord, bytes]  # what a whole row holds: the record, and what `hide` gave for its payload

NO_CHECKSUM: Final = -1  # of a record whose entry is not authentic: no payload has it
_CHECKSUM: Final = struct.Struct("<Q")
_FEW: Final = 16  # rows that are decoded one by one faster than all at once
_ROW: Final = struct.Struct("<QIIQQ32s32sQII")  # a row in the clear up to its tokens, as `slab.entry_dtype` has it


class Codec:
    """How one slab keeps its blocks: here, in the clear. Thread-safe.

    `rows` are as they lie in memory: their names can be read.
    """

    hides_payloads = False  # whether what lies on the disk is not what was stored

    def __init__(self, superblock: Superblock) -> None:
        self._superblock = superblock

    def make_rows(self, slots: Sequence[int], records: Sequence[BlockRecord], stamps: Sequence[bytes]) -> Rows:
        """Rows for records stored at slots; `seal_rows` makes them valid once seq and generation are set."""
        rows = _named_rows(self._superblock, slots, records)
        rows["payload_checksum"] = [record.checksum for record in records]
        width = 4 * self._superblock.block_size
        rows["tokens"] = np.frombuffer(b"".join([each.tokens.ljust(width, b"\0") for each in records]), f"V{width}")
        return rows

    def seal_rows(self, rows: Rows) -> Rows:
        """Give every row its checksum; returns them as they go to the disk."""
        rows["checksum"] = slab.row_checksums(rows, self._superblock)
        return rows

    def show_names(self, rows: Rows, which: Slots) -> None:
        """Turn some rows, in place, from what was read from the disk into what lies in memory."""

    def to_records(self, rows: Rows) -> list[BlockRecord]:
        """The records that rows hold; without tokens and with NO_CHECKSUM if an entry is not authentic."""
        return [
            BlockRecord(chain_hash, parent, tokens[: 4 * num_tokens], checksum)
            for chain_hash, parent, tokens, num_tokens, checksum in zip(
                rows["chain_hash"].tolist(),
                rows["parent"].tolist(),
                rows["tokens"].tolist(),
                rows["num_tokens"].tolist(),
                rows["payload_checksum"].tolist(),
                strict=True,
            )
        ]

    def entries(self, rows: Rows, slots: Sequence[int]) -> list[SlabEntry | None]:
        """What rows read from the disk hold, by `slab.find_valid`'s rule; None for a row that is not whole.

        A few one by one: an array's fixed costs are those of many rows.
        """
        if len(rows) > _FEW:
            return self._entries_at_once(rows, slots)
        superblock, size, data = self._superblock, self._superblock.entry_bytes, rows.tobytes()
        entries = list[SlabEntry | None]()
        for at, slot in zip(range(0, len(data), size), slots, strict=True):
            digest, state, _, seq, own, name, parent, checksum, num_bytes, num_tokens = _ROW.unpack_from(data, at)
            tokens_at, is_whole = at + _ROW.size, False
            if slab.is_plausible(state, own == slot, num_bytes, num_tokens, seq, superblock):
                is_whole = digest == xxhash.xxh3_64_intdigest(data[at + 8 : at + size], superblock.seed)
            tokens = data[tokens_at : tokens_at + 4 * num_tokens] if is_whole else b""
            entries.append((BlockRecord(name, parent, tokens, checksum), b"") if is_whole else None)
        return entries

    def _entries_at_once(self, rows: Rows, slots: Sequence[int]) -> list[SlabEntry | None]:
        whole = np.flatnonzero(slab.find_valid(rows, np.array(slots, np.int64), self._superblock))
        self.show_names(rows, whole)
        found: list[SlabEntry | None] = [None] * len(rows)
        entries = zip(self.to_records(rows[whole]), self.stamps(rows[whole]), strict=True)
        for at, entry in zip(whole.tolist(), entries, strict=True):
            found[at] = entry
        return found

    def tokens(self, row: bytes) -> bytes:
        """The tokens of one row as it lies in memory; none if the entry is not authentic."""
        fields = self._superblock.row_dtype.fields
        assert fields is not None
        count_at, tokens_at = fields["num_tokens"][1], fields["tokens"][1]
        num_tokens = int.from_bytes(row[count_at : count_at + 4], "little")
        return row[tokens_at : tokens_at + 4 * num_tokens]

    def stamps(self, rows: Rows) -> list[bytes]:
        """What `hide` gave for the rows' payloads."""
        return [b""] * len(rows)

    def hide(
        self, records: Sequence[BlockRecord], payloads: Sequence[memoryview]
    ) -> tuple[Sequence[memoryview], list[bytes]]:
        """Payloads as they go to the disk, good until this thread calls again, and what is needed to show them."""
        return payloads, [b""] * len(payloads)

    def show(self, record: BlockRecord, stamp: bytes, payload: memoryview) -> bool:
        """Turn a payload read from the disk, in place, into the block's bytes; False: it is not authentic."""
        return True


class SealedCodec(Codec):
    """Payloads, tokens and names are hidden, and an entry or payload that is not authentic is told."""

    hides_payloads = True

    def __init__(self, superblock: Superblock, key: bytes) -> None:
        super().__init__(superblock)
        assert superblock.encryption is not None
        belongs_to = superblock.fingerprint + superblock.encryption.salt
        self._names = NameCipher(key, b"slab-names" + belongs_to)
        self._entries = RecordCipher(key, b"slab-entry" + belongs_to)
        self._payloads = RecordCipher(key, b"slab-payload" + belongs_to)
        self._scratch = Scratch()

    def make_rows(self, slots: Sequence[int], records: Sequence[BlockRecord], stamps: Sequence[bytes]) -> Rows:
        """Each entry gets a nonce of its own."""
        rows = _named_rows(self._superblock, slots, records)
        rows["stamp"] = stamps
        num_bytes = 4 * self._superblock.block_size
        rows["sealed"] = [
            self._entries.seal(
                _CHECKSUM.pack(record.checksum) + record.tokens.ljust(num_bytes, b"\0"),
                _entry_name(record.chain_hash, record.parent, len(record.tokens) // 4),
            )
            for record in records
        ]
        return rows

    def seal_rows(self, rows: Rows) -> Rows:
        on_disk = rows.copy()
        names = _names(on_disk)
        names[:] = np.frombuffer(self._names.hide(names.tobytes()), names.dtype)
        slab.seal_rows(on_disk, self._superblock)
        rows["checksum"] = on_disk["checksum"]
        return on_disk

    def show_names(self, rows: Rows, which: Slots) -> None:
        names = _names(rows)
        names[which] = np.frombuffer(self._names.show(names[which].tobytes()), names.dtype)

    def to_records(self, rows: Rows) -> list[BlockRecord]:
        return list(self._opened(rows))

    def _opened(self, rows: Rows) -> Iterator[BlockRecord]:
        names = rows["chain_hash"].tolist(), rows["parent"].tolist()
        for chain_hash, parent, num_tokens, sealed in zip(
            *names, rows["num_tokens"].tolist(), rows["sealed"].tolist(), strict=True
        ):
            entry = self._entries.open(sealed, _entry_name(chain_hash, parent, num_tokens))
            if entry is None:
                yield BlockRecord(chain_hash, parent, b"", NO_CHECKSUM)
            else:
                tokens = entry[_CHECKSUM.size : _CHECKSUM.size + 4 * num_tokens]
                yield BlockRecord(chain_hash, parent, tokens, *_CHECKSUM.unpack_from(entry))

    def entries(self, rows: Rows, slots: Sequence[int]) -> list[SlabEntry | None]:
        return self._entries_at_once(rows, slots)

    def tokens(self, row: bytes) -> bytes:
        (record,) = self._opened(np.frombuffer(row, self._superblock.row_dtype))
        return record.tokens

    def stamps(self, rows: Rows) -> list[bytes]:
        """Nonce and tag of each payload."""
        stamps: list[bytes] = rows["stamp"].tolist()
        return stamps

    def hide(
        self, records: Sequence[BlockRecord], payloads: Sequence[memoryview]
    ) -> tuple[Sequence[memoryview], list[bytes]]:
        """Into this thread's page-aligned scratch memory, for direct I/O."""
        stride, slot_bytes = self._superblock.stride, self._superblock.slot_bytes
        scratch = self._scratch.of(len(payloads) * stride)
        hidden = [scratch[start : start + slot_bytes] for start in range(0, len(payloads) * stride, stride)]
        stamps = [
            self._payloads.encrypt_into(payload, record.chain_hash, place)
            for record, payload, place in zip(records, payloads, hidden, strict=True)
        ]
        return hidden, stamps

    def show(self, record: BlockRecord, stamp: bytes, payload: memoryview) -> bool:
        return record.checksum != NO_CHECKSUM and self._payloads.decrypt_into(
            payload, stamp, record.chain_hash, payload
        )


def codec_of(superblock: Superblock, key: bytes | None, name: str) -> Codec:
    """How the slab of that superblock keeps its blocks; ConfigError if `key` is not the one it takes.

    A slab in the clear takes any: this is for who reads it as it is. Opened to be written, it is refused earlier.
    """
    if superblock.encryption is None:
        return Codec(superblock)
    slab.require_key(superblock, key_id(key) if key is not None else None, name)
    assert key is not None
    return SealedCodec(superblock, key)


def verified(codec: Codec, entry: SlabEntry, chain_hash: ChainHash, payload: memoryview) -> BlockRecord | Outcome:
    """The entry's record, if the payload read for it is that block's, shown in place; else what is wrong with it."""
    record, stamp = entry
    if record.chain_hash != chain_hash:
        return Outcome.KEY_MISMATCH
    is_whole = codec.show(record, stamp, payload) and checksum(payload) == record.checksum
    return record if is_whole else Outcome.CHECKSUM


def _named_rows(superblock: Superblock, slots: Sequence[int], records: Sequence[BlockRecord]) -> Rows:
    """What both forms have in common."""
    rows = np.zeros(len(slots), superblock.row_dtype)
    rows["state"] = slab.READY
    rows["slot"] = slots
    rows["chain_hash"] = np.frombuffer(b"".join([record.chain_hash for record in records]), "V32")
    rows["parent"] = np.frombuffer(b"".join([record.parent for record in records]), "V32")
    rows["payload_bytes"] = superblock.slot_bytes
    rows["num_tokens"] = [len(record.tokens) // 4 for record in records]
    return rows


def _names(rows: Rows) -> Rows:
    """A view of the rows' chain hashes and parents, 64 bytes each."""
    assert rows.dtype.fields is not None
    offset = rows.dtype.fields["chain_hash"][1]
    return np.ndarray(rows.shape, "V64", rows, offset, rows.strides)


def _entry_name(chain_hash: ChainHash, parent: ChainHash, num_tokens: int) -> bytes:
    """The associated data of an entry: what stands in its row in the clear, or hidden by itself."""
    return chain_hash + parent + num_tokens.to_bytes(4, "little")
