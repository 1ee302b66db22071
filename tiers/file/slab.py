"""The slab's format on disk (docs/format.md): superblock, entry table, payload, in the clear or sealed. No I/O.

A `Codec` is chosen once, when a slab is opened: it converts blocks to rows and payloads and back.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import repeat
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvtier.tiers import (
    STAMP_BYTES,
    BlockRecord,
    ChainHash,
    ConfigError,
    Encryption,
    FingerprintMismatch,
    FormatError,
    NameCipher,
    Outcome,
    RecordCipher,
    checksum,
    key_id,
)
from kvtier.tiers.file.file_io import CALL_BYTES, PAGE, Scratch, SlabLayout, round_up
from kvtier.tiers.naming import FORMAT_VERSION
from kvtier.tiers.pool import Slots

MAGIC: Final = b"KVTIER01"
VERSION: Final = 1
ENCRYPTED_VERSION: Final = 2  # of a slab whose rows and payloads are sealed
HEADER_BYTES: Final = 2 * PAGE  # the superblock and its copy
OWNER_OFFSET: Final = 2048  # u64 pid of the process that holds the lock, outside the superblock's checksum
SHRINK_OFFSET: Final = 2056  # two u64: bytes another opener requests the owner to shrink the slab to, and their xxh3
KV_PROBE_OFFSET: Final = PAGE + 2048  # the KV probe of the slab's creator, or zeros; it has its own checksum
READY: Final = 1  # the only state other than free (0) that reaches the disk
EXTENT_BYTES: Final = 8 << 20
MAX_SEGMENTS: Final = 32
_MAX_BLOCK_TOKENS: Final = 1 << 20  # a superblock with more is not one that kvtier wrote
_MAX_FILE_BYTES: Final = 1 << 62
MAX_SEQ: Final = 1 << 63  # so that counting on never overflows

_SUPERBLOCK_BYTES: Final = 2048
_FIXED = struct.Struct("<8sII32sQQIIIIQQ")
_SEGMENT = struct.Struct("<QQQQ")
_CHECKSUM = struct.Struct("<Q")
_CHECKSUM_OFFSET: Final = _SUPERBLOCK_BYTES - _CHECKSUM.size
_ENCRYPTION = struct.Struct("<16s16s")
_ENCRYPTION_OFFSET: Final = _FIXED.size + MAX_SEGMENTS * _SEGMENT.size
_NAMING = struct.Struct("<I")
_NAMING_OFFSET: Final = _ENCRYPTION_OFFSET + _ENCRYPTION.size
_ENTRY_FIXED_BYTES: Final = 112
_ENCRYPTED_FIXED_BYTES: Final = 168
_CHUNK_ROWS: Final = 16_384  # rows converted to Python bytes at once
_MIN_EXTENTS: Final = 8  # a small slab gets smaller extents, so that eviction does not empty it

Rows = NDArray[np.void]


@lru_cache(maxsize=16)
def entry_dtype(block_size: int, is_encrypted: bool = False) -> np.dtype[Any]:
    """One row of the entry table; byte strings are void, not `S`, because `S` loses trailing NULs."""
    sizes = [("payload_bytes", "<u4"), ("num_tokens", "<u4")]
    hidden = [("stamp", f"V{STAMP_BYTES}"), *sizes, ("sealed", f"V{STAMP_BYTES + 8 + 4 * block_size}")]
    plain = [("payload_checksum", "<u8"), *sizes, ("tokens", f"V{4 * block_size}")]
    fields = [
        ("checksum", "<u8"),  # xxh3-64 of the rest of the row, seeded by the fingerprint
        ("state", "<u4"),
        ("generation", "<u4"),
        ("seq", "<u8"),
        ("slot", "<u8"),
        ("chain_hash", "V32"),
        ("parent", "V32"),
        *(hidden if is_encrypted else plain),
    ]
    used = (_ENCRYPTED_FIXED_BYTES if is_encrypted else _ENTRY_FIXED_BYTES) + 4 * block_size
    padding = round_up(used, 64) - used
    return np.dtype([*fields, ("padding", f"V{padding}")] if padding else fields)


@dataclass(frozen=True, slots=True)
class SlabSegment:
    """A run of the file: an entry table of `capacity` rows, then `num_slots` payload slots (whole extents)."""

    table_offset: int
    payload_offset: int
    num_slots: int
    capacity: int


@dataclass(frozen=True)
class Superblock:
    """A slab's identity, and where its extents lie. Offsets and sizes in bytes."""

    fingerprint: bytes
    slot_bytes: int
    block_size: int
    slots_per_extent: int
    segments: tuple[SlabSegment, ...]
    min_seq: int = 1  # rows of lower seq were forgotten by a reset
    update: int = 1  # grows with every rewrite; of two good copies the higher is the newer
    encryption: Encryption | None = None  # None: blocks lie in the clear
    naming: int = 0  # `FORMAT_VERSION` of identities in the kvtier that made it; 0: a version that did not record it

    @cached_property
    def stride(self) -> int:
        """Bytes from one payload slot to the next: slot_bytes padded to 4 KiB."""
        return round_up(self.slot_bytes, PAGE)

    @cached_property
    def row_dtype(self) -> np.dtype[Any]:
        return entry_dtype(self.block_size, self.encryption is not None)

    @cached_property
    def entry_bytes(self) -> int:
        return self.row_dtype.itemsize

    @cached_property
    def extent_bytes(self) -> int:
        return self.slots_per_extent * self.stride

    @cached_property
    def num_slots(self) -> int:
        return sum(segment.num_slots for segment in self.segments)

    @cached_property
    def num_extents(self) -> int:
        return self.num_slots // self.slots_per_extent

    @cached_property
    def layout(self) -> SlabLayout:
        """For the compiled reads."""
        longest = max(1, CALL_BYTES // self.stride)
        places = self.table_offsets, self.payload_offsets, self.slots_per_extent, self.entry_bytes, self.slot_bytes
        return SlabLayout((*places, longest), (READY, self.block_size, self.min_seq, MAX_SEQ, self.seed))

    @property
    def file_bytes(self) -> int:
        last = self.segments[-1]
        return last.payload_offset + last.num_slots * self.stride

    @cached_property
    def seed(self) -> int:
        """Seeds the rows' checksums, so that a row of another slab is no row of this one."""
        return int.from_bytes(self.fingerprint[:8], "little")

    @cached_property
    def table_offsets(self) -> list[int]:
        step = self.slots_per_extent * self.entry_bytes
        return [
            segment.table_offset + index * step
            for segment in self.segments
            for index in range(segment.num_slots // self.slots_per_extent)
        ]

    @cached_property
    def payload_offsets(self) -> list[int]:
        return [
            segment.payload_offset + index * self.extent_bytes
            for segment in self.segments
            for index in range(segment.num_slots // self.slots_per_extent)
        ]

    def row_offset(self, slot: int) -> int:
        extent, position = divmod(slot, self.slots_per_extent)
        return self.table_offsets[extent] + position * self.entry_bytes

    def row_offsets(self, slots: Sequence[int]) -> list[int]:
        tables, size, per_extent = self.table_offsets, self.entry_bytes, self.slots_per_extent
        return [tables[slot // per_extent] + slot % per_extent * size for slot in slots]

    def payload_offset(self, slot: int) -> int:
        extent, position = divmod(slot, self.slots_per_extent)
        return self.payload_offsets[extent] + position * self.stride

    def resized(self, num_bytes: int) -> "Superblock":
        """The largest slab of at most `num_bytes` that keeps this one's first extents where they are.

        It grows by its last segment's spare rows, then by a new one. `segments` is empty if not even one extent fits.
        """
        kept: list[SlabSegment] = []
        for index, segment in enumerate(self.segments):
            is_last = index == len(self.segments) - 1
            most = segment.capacity if is_last else segment.num_slots
            fits = max(0, num_bytes - segment.payload_offset) // self.extent_bytes * self.slots_per_extent
            num_slots = min(most, fits)
            if num_slots:
                kept.append(replace(segment, num_slots=num_slots))
            if num_slots < most:
                break
        resized = replace(self, segments=tuple(kept), update=self.update + 1)
        end = resized.file_bytes if kept else HEADER_BYTES
        whole = len(kept) == len(self.segments) and (not kept or kept[-1].num_slots == kept[-1].capacity)
        if whole and len(kept) < MAX_SEGMENTS and (added := self._segment(end, num_bytes - end)):
            resized = replace(resized, segments=(*kept, added))
        return resized

    def _segment(self, offset: int, num_bytes: int) -> SlabSegment | None:
        """The largest new segment that starts at `offset`; None if not one extent fits."""
        rows_bytes = self.slots_per_extent * self.entry_bytes
        extents = max(0, num_bytes) // (rows_bytes + self.extent_bytes)
        while extents and round_up(extents * rows_bytes, PAGE) + extents * self.extent_bytes > num_bytes:
            extents -= 1
        num_slots = extents * self.slots_per_extent
        payload = offset + round_up(extents * rows_bytes, PAGE)
        return SlabSegment(offset, payload, num_slots, num_slots) if extents else None


def plan(
    fingerprint: bytes, slot_bytes: int, block_size: int, num_bytes: int, encryption: Encryption | None = None
) -> Superblock:
    """The superblock of a fresh slab of at most `num_bytes`; without segments if not one slot fits."""
    per_slot = round_up(slot_bytes, PAGE) + entry_dtype(block_size, encryption is not None).itemsize
    slots = max(1, (num_bytes - HEADER_BYTES) // per_slot)
    per_extent = max(1, min(EXTENT_BYTES // round_up(slot_bytes, PAGE), slots // _MIN_EXTENTS))
    empty = Superblock(fingerprint, slot_bytes, block_size, per_extent, (), 1, 0, encryption, FORMAT_VERSION)
    return empty.resized(num_bytes)


def smallest(slot_bytes: int, block_size: int, encryption: Encryption | None = None) -> int:
    row_bytes = entry_dtype(block_size, encryption is not None).itemsize
    return HEADER_BYTES + round_up(row_bytes, PAGE) + round_up(slot_bytes, PAGE)


def encode(superblock: Superblock) -> bytes:
    fixed = _FIXED.pack(
        MAGIC,
        ENCRYPTED_VERSION if superblock.encryption else VERSION,
        HEADER_BYTES,
        superblock.fingerprint,
        superblock.slot_bytes,
        superblock.stride,
        superblock.block_size,
        superblock.entry_bytes,
        superblock.slots_per_extent,
        len(superblock.segments),
        superblock.min_seq,
        superblock.update,
    )
    segments = b"".join(
        _SEGMENT.pack(segment.table_offset, segment.payload_offset, segment.num_slots, segment.capacity)
        for segment in superblock.segments
    )
    lock = superblock.encryption
    sealed = _ENCRYPTION.pack(lock.key_id, lock.salt) if lock else bytes(_ENCRYPTION.size)
    body = (fixed + segments).ljust(_ENCRYPTION_OFFSET, b"\0") + sealed + _NAMING.pack(superblock.naming)
    body = body.ljust(_CHECKSUM_OFFSET, b"\0")
    return body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))


def decode(header: bytes, name: str) -> Superblock:
    """The newer intact copy of the superblock in a file's first 8 KiB. FormatError with the reason if there is none."""
    copies = [header[start : start + _SUPERBLOCK_BYTES] for start in (0, PAGE)]
    magic, version = struct.unpack_from("<8sI", header.ljust(12, b"\0"))
    is_kvtier = magic[:6] == MAGIC[:6]
    is_ours = version in (VERSION, ENCRYPTED_VERSION)
    if is_kvtier and not (magic == MAGIC and is_ours) and _is_intact(copies[0]):
        raise FormatError(_other_version(name, version))
    found = [copy for copy in map(_decode_copy, copies) if copy]
    if found:
        return max(found, key=lambda copy: copy.update)
    if is_kvtier and not is_ours:
        raise FormatError(_other_version(name, version))
    if is_kvtier:
        raise FormatError(f"{name}: its superblock is damaged; it was left untouched: delete it to start anew")
    raise FormatError(f"{name}: not a kvtier slab; it was left untouched: move it away or choose another [file] path")


def num_damaged(header: bytes) -> int:
    """How many of the two copies of the superblock in a file's first 8 KiB are not whole."""
    return sum(_decode_copy(header[start : start + _SUPERBLOCK_BYTES]) is None for start in (0, PAGE))


def _other_version(name: str, version: int) -> str:
    return (
        f"{name}: format version {version}, this kvtier reads versions {VERSION} and {ENCRYPTED_VERSION}; "
        "it was left untouched: use the kvtier that wrote it, move it away, or choose another [file] path"
    )


def _is_intact(copy: bytes) -> bool:
    if len(copy) < _SUPERBLOCK_BYTES:
        return False
    (stored,) = _CHECKSUM.unpack_from(copy, _CHECKSUM_OFFSET)
    return bool(stored == xxhash.xxh3_64_intdigest(copy[:_CHECKSUM_OFFSET]))


def _decode_copy(copy: bytes) -> Superblock | None:
    if not _is_intact(copy):
        return None
    magic, version, _, fingerprint, slot_bytes, stride, block_size, entry_bytes, per_extent, count, min_seq, update = (
        _FIXED.unpack_from(copy)
    )
    if (
        magic != MAGIC
        or version not in (VERSION, ENCRYPTED_VERSION)
        or not 1 <= count <= MAX_SEGMENTS
        or not per_extent
    ):
        return None
    if not 0 < block_size <= _MAX_BLOCK_TOKENS or not slot_bytes or not 0 < min_seq < MAX_SEQ:
        return None
    segments = tuple(SlabSegment(*_SEGMENT.unpack_from(copy, _FIXED.size + i * _SEGMENT.size)) for i in range(count))
    lock = Encryption(*_ENCRYPTION.unpack_from(copy, _ENCRYPTION_OFFSET)) if version == ENCRYPTED_VERSION else None
    (naming,) = _NAMING.unpack_from(copy, _NAMING_OFFSET)
    found = Superblock(fingerprint, slot_bytes, block_size, per_extent, segments, min_seq, update, lock, naming)
    return found if (found.stride, found.entry_bytes) == (stride, entry_bytes) and _fits(found) else None


def _fits(superblock: Superblock) -> bool:
    """Whether tables and payloads follow one another, in whole extents."""
    end = HEADER_BYTES
    for segment in superblock.segments:
        rows_end = segment.table_offset + segment.capacity * superblock.entry_bytes
        if not (end <= segment.table_offset and rows_end <= segment.payload_offset):
            return False
        if not 0 < segment.num_slots <= segment.capacity or segment.num_slots % superblock.slots_per_extent:
            return False
        if segment.table_offset % PAGE or segment.payload_offset % PAGE:
            return False
        end = segment.payload_offset + segment.num_slots * superblock.stride
    return end <= _MAX_FILE_BYTES


def require_identity(superblock: Superblock, wanted: Superblock, name: str) -> None:
    """FingerprintMismatch if the slab's model or shape is not the wanted one, ConfigError if its key is another."""
    for field in ("fingerprint", "slot_bytes", "block_size"):
        there, here = getattr(superblock, field), getattr(wanted, field)
        if there != here:
            there, here = (value.hex() if isinstance(value, bytes) else value for value in (there, here))
            raise FingerprintMismatch(
                f"{name}: holds {field} {there}, this model has {here}; it was left untouched: "
                "move it away or choose another [file] path"
            )
    require_key(superblock, wanted.encryption.key_id if wanted.encryption else None, name)


def require_key(superblock: Superblock, key_id: bytes | None, name: str) -> None:
    """Raise ConfigError unless the slab is sealed under the key of that id; None: not encrypted."""
    there = superblock.encryption.key_id if superblock.encryption else None
    if there == key_id:
        return
    if there is None:
        why, fix = "holds blocks in the clear, and [file] key_file is set", "delete it"
    elif key_id is None:
        why, fix = "encrypted, and no [file] key_file is set", "set the one it was written with"
    else:
        why = f"encrypted with key {there.hex()}, [file] key_file holds {key_id.hex()}"
        fix = "set the one it was written with"
    raise ConfigError(f"{name}: {why}; it was left untouched: {fix}, or choose another [file] path")


def seal_rows(rows: Rows, superblock: Superblock) -> None:
    """Give every row its checksum: of the rest of it, seeded by the fingerprint."""
    rows["checksum"] = row_checksums(rows, superblock)


def find_plausible(rows: Rows, slots: NDArray[np.int64], superblock: Superblock) -> NDArray[np.bool_]:
    """Which rows are of this slab and meant for their slot, by all but their checksum."""
    plausible: NDArray[np.bool_] = (
        (rows["state"] == READY)
        & (rows["slot"] == slots)
        & (rows["payload_bytes"] == superblock.slot_bytes)
        & (rows["num_tokens"] <= superblock.block_size)
        & (rows["seq"] >= superblock.min_seq)
        & (rows["seq"] < MAX_SEQ)
    )
    return plausible


def find_valid(rows: Rows, slots: NDArray[np.int64], superblock: Superblock) -> NDArray[np.bool_]:
    """Which rows are whole, meant for their slot, and of this slab: one vectorised pass, one xxh3 per used row."""
    valid = find_plausible(rows, slots, superblock)
    for start in range(0, len(rows), _CHUNK_ROWS):
        chunk = slice(start, start + _CHUNK_ROWS)
        used = start + np.flatnonzero(valid[chunk])
        if len(used):
            # If all are used, a slice costs no copy.
            found = rows[chunk] if len(used) == len(rows[chunk]) else rows[used]
            valid[used] = found["checksum"] == np.array(row_checksums(found, superblock), np.uint64)
    return valid


def row_checksums(rows: Rows, superblock: Superblock) -> list[int]:
    """The checksum that each row has to have."""
    size, digest = superblock.entry_bytes, xxhash.xxh3_64_intdigest
    bodies = np.ndarray(rows.shape, f"V{size - 8}", rows.view(np.uint8), 8, (size,))
    return list(map(digest, bodies.tolist(), repeat(superblock.seed)))


def byte_view(rows: Rows) -> memoryview:
    return rows.view(np.uint8).reshape(-1).data


def words_of(rows: Rows, field: str) -> NDArray[np.uint64]:
    """A view of a field of 32 bytes as `[n, 4]` uint64."""
    assert rows.dtype.fields is not None
    return np.ndarray((len(rows), 4), "<u8", rows, rows.dtype.fields[field][1], (rows.strides[0], 8))


SlabEntry = tuple[BlockRecord, bytes]  # a whole row's content: the record, and the stamp from `hide` for its payload

NO_CHECKSUM: Final = -1  # of a record whose entry is not authentic: no payload has it
_FEW: Final = 16  # rows that are decoded one by one faster than all at once
_ROW: Final = struct.Struct("<QIIQQ32s32sQII")  # a row in the clear up to its tokens, as `entry_dtype` has it


class Codec:
    """How one slab stores its blocks: here, in the clear. Thread-safe. `rows` have readable names, as in memory."""

    hides_payloads = False  # whether bytes on the disk differ from the payload

    def __init__(self, superblock: Superblock) -> None:
        self._superblock = superblock

    def make_rows(self, slots: Sequence[int], records: Sequence[BlockRecord], stamps: Sequence[bytes]) -> Rows:
        """Rows for records stored at slots; `seal_rows` makes them valid once seq and generation are set."""
        rows = np.zeros(len(slots), self._superblock.row_dtype)
        rows["state"] = READY
        rows["slot"] = slots
        rows["chain_hash"] = np.frombuffer(b"".join([record.chain_hash for record in records]), "V32")
        rows["parent"] = np.frombuffer(b"".join([record.parent for record in records]), "V32")
        rows["payload_bytes"] = self._superblock.slot_bytes
        rows["num_tokens"] = [len(record.tokens) // 4 for record in records]
        if not self.hides_payloads:
            rows["payload_checksum"] = [record.checksum for record in records]
            width = 4 * self._superblock.block_size
            rows["tokens"] = np.frombuffer(b"".join([each.tokens.ljust(width, b"\0") for each in records]), f"V{width}")
        return rows

    def seal_rows(self, rows: Rows) -> Rows:
        """Give every row its checksum; returns the rows as they go to the disk."""
        rows["checksum"] = row_checksums(rows, self._superblock)
        return rows

    def show_names(self, rows: Rows, which: Slots) -> None:
        """Decrypt the names of some rows read from the disk, in place."""

    def to_records(self, rows: Rows) -> list[BlockRecord]:
        """The records in these rows; without tokens and with NO_CHECKSUM if an entry is not authentic."""
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
        """The entries in rows from the disk, None if not whole. A few are decoded singly: arrays have fixed costs."""
        if len(rows) > _FEW:
            return self._entries_at_once(rows, slots)
        superblock, size, data = self._superblock, self._superblock.entry_bytes, rows.tobytes()
        entries = list[SlabEntry | None]()
        for at, slot in zip(range(0, len(data), size), slots, strict=True):
            digest, state, _, seq, own, name, parent, checksum, num_bytes, num_tokens = _ROW.unpack_from(data, at)
            is_whole = (
                (state, own, num_bytes) == (READY, slot, superblock.slot_bytes)
                and num_tokens <= superblock.block_size
                and superblock.min_seq <= seq < MAX_SEQ
                and digest == xxhash.xxh3_64_intdigest(data[at + 8 : at + size], superblock.seed)
            )
            tokens_at = at + _ROW.size
            record = BlockRecord(name, parent, data[tokens_at : tokens_at + 4 * num_tokens], checksum)
            entries.append((record, b"") if is_whole else None)
        return entries

    def _entries_at_once(self, rows: Rows, slots: Sequence[int]) -> list[SlabEntry | None]:
        whole = np.flatnonzero(find_valid(rows, np.array(slots, np.int64), self._superblock))
        self.show_names(rows, whole)
        found: list[SlabEntry | None] = [None] * len(rows)
        entries = zip(self.to_records(rows[whole]), self.stamps(rows[whole]), strict=True)
        for at, entry in zip(whole.tolist(), entries, strict=True):
            found[at] = entry
        return found

    def stamps(self, rows: Rows) -> list[bytes]:
        """The stamps that `hide` returned for the rows' payloads."""
        return [b""] * len(rows)

    def hide(
        self, records: Sequence[BlockRecord], payloads: Sequence[memoryview]
    ) -> tuple[Sequence[memoryview], list[bytes]]:
        """Payloads as they go to the disk, valid until this thread's next call, and the stamps that `show` needs."""
        return payloads, [b""] * len(payloads)

    def show(self, record: BlockRecord, stamp: bytes, payload: memoryview) -> bool:
        """Turn a payload read from the disk, in place, into the block's bytes; False: it is not authentic."""
        return True


class SealedCodec(Codec):
    """Payloads, tokens and names are encrypted; entries and payloads that are not authentic are detected."""

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
        rows = super().make_rows(slots, records, stamps)
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
        seal_rows(on_disk, self._superblock)
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
    """How the slab stores its blocks. ConfigError if it needs another `key`; one in the clear is read with any."""
    if superblock.encryption is None:
        return Codec(superblock)
    require_key(superblock, key_id(key) if key is not None else None, name)
    assert key is not None
    return SealedCodec(superblock, key)


def verified(codec: Codec, entry: SlabEntry, chain_hash: ChainHash, payload: memoryview) -> BlockRecord | Outcome:
    """The entry's record if the payload, decrypted in place, is that block's; else the outcome of the mismatch."""
    record, stamp = entry
    if record.chain_hash != chain_hash:
        return Outcome.KEY_MISMATCH
    is_whole = codec.show(record, stamp, payload) and checksum(payload) == record.checksum
    return record if is_whole else Outcome.CHECKSUM


def _names(rows: Rows) -> Rows:
    """A view of the rows' chain hashes and parents, 64 bytes each."""
    assert rows.dtype.fields is not None
    offset = rows.dtype.fields["chain_hash"][1]
    return np.ndarray(rows.shape, "V64", rows, offset, rows.strides)


def _entry_name(chain_hash: ChainHash, parent: ChainHash, num_tokens: int) -> bytes:
    """The associated data of an entry: the fields of its row outside the sealed part."""
    return chain_hash + parent + num_tokens.to_bytes(4, "little")
