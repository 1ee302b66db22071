"""Encodes, decodes and validates an archive's bytes. No I/O (docs/format.md, "An archive")."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import xxhash

from kvtier.tiers import STAMP_BYTES, BlockRecord, ChainHash, Encryption, FormatError, RecordCipher, checksum

MAGIC: Final = b"KVTARCHV"
VERSION: Final = 1
ENCRYPTED_VERSION: Final = 2  # version of an archive with encrypted records
HEADER_BYTES: Final = 128
TRAILER_BYTES: Final = 40

_HEADER: Final = struct.Struct("<8sII32sQI4xQ16s16s16x")
_ENTRY: Final = struct.Struct("<4sIQQ32s32sQ")
_TRAILER: Final = struct.Struct("<4s4xQ16s")
_CHECKSUM: Final = struct.Struct("<Q")
_BLOCK: Final = b"BLCK"
_SEALED: Final = b"SEAL"
_END: Final = b"DONE"


@dataclass(frozen=True, slots=True)
class Header:
    fingerprint: bytes  # 32 bytes
    slot_bytes: int  # bytes of a block's payload
    block_size: int  # most tokens of a block
    num_blocks: int  # planned blocks; the archive has fewer if some were lost meanwhile
    encryption: Encryption | None = None  # None: blocks are not encrypted

    @property
    def entry_bytes(self) -> int:
        plain = _ENTRY.size + 4 * self.block_size + _CHECKSUM.size
        return plain + (len(_SEALED) + 2 * STAMP_BYTES if self.encryption else 0)

    @property
    def record_bytes(self) -> int:
        return self.entry_bytes + self.slot_bytes


def encode_header(header: Header) -> bytes:
    lock = header.encryption or Encryption(b"", b"")
    version = ENCRYPTED_VERSION if header.encryption else VERSION
    sizes = header.slot_bytes, header.block_size, header.num_blocks
    return _summed(_HEADER.pack(MAGIC, version, HEADER_BYTES, header.fingerprint, *sizes, lock.key_id, lock.salt))


def decode_header(data: bytes) -> Header:
    """Decode a header that `encode_header` wrote. Raises FormatError for anything else."""
    if data[: len(MAGIC)] != MAGIC:
        raise FormatError("not a kvtier archive")
    if len(data) < HEADER_BYTES:
        raise FormatError(f"breaks off in its header, after {len(data)} bytes")
    _, version, header_bytes, fingerprint, slot_bytes, block_size, num_blocks, *lock = _HEADER.unpack_from(data)
    if version not in (VERSION, ENCRYPTED_VERSION):
        known = f"{VERSION} and {ENCRYPTED_VERSION}"
        raise FormatError(f"an archive of version {version}, but this kvtier reads {known}; export it again")
    if not _is_whole(data) or header_bytes != HEADER_BYTES:
        raise FormatError("its header is damaged")
    encryption = Encryption(*lock) if version == ENCRYPTED_VERSION else None
    return Header(fingerprint, slot_bytes, block_size, num_blocks, encryption)


def encode_entry(header: Header, number: int, record: BlockRecord) -> bytes:
    """The bytes before the payload of block `number`, counted from 0."""
    num_tokens = len(record.tokens) // 4
    block = record.chain_hash, record.parent, record.checksum
    fixed = _ENTRY.pack(_BLOCK, num_tokens, number, header.slot_bytes, *block)
    return _summed(fixed + record.tokens.ljust(4 * header.block_size, b"\0"))


def encode_trailer(num_blocks: int, digest: bytes) -> bytes:
    """The archive's last TRAILER_BYTES; `digest` is the xxh3-128 of all bytes before them."""
    return _summed(_TRAILER.pack(_END, num_blocks, digest))


class ArchiveCipher:
    def __init__(self, header: Header, key: bytes) -> None:
        assert header.encryption is not None
        belongs_to = header.fingerprint + header.encryption.salt
        self._entries = RecordCipher(key, b"archive-entry" + belongs_to)
        self._payloads = RecordCipher(key, b"archive-payload" + belongs_to)

    def seal(self, number: int, entry: bytes, chain_hash: ChainHash, payload: memoryview) -> tuple[bytes, memoryview]:
        """The encrypted entry of block `number`, and its encrypted payload. `entry` is what `encode_entry` made."""
        hidden = memoryview(bytearray(len(payload)))
        stamp = self._payloads.encrypt_into(payload, chain_hash, hidden)
        return _SEALED + self._entries.seal(entry, _CHECKSUM.pack(number)) + stamp, hidden

    def open(self, number: int, sealed: memoryview) -> bytes | None:
        """The decrypted entry of block `number`; None if it is not authentic."""
        if bytes(sealed[: len(_SEALED)]) != _SEALED:
            return None
        return self._entries.open(sealed[len(_SEALED) : -STAMP_BYTES], _CHECKSUM.pack(number))

    def show(self, sealed: memoryview, chain_hash: ChainHash, payload: memoryview) -> bool:
        """Decrypt a payload in place; False if it is not authentic."""
        return self._payloads.decrypt_into(payload, bytes(sealed[-STAMP_BYTES:]), chain_hash, payload)


class Parser:
    """Reads the records after the header, piece by piece: yields verified blocks, or raises FormatError."""

    def __init__(self, header: Header, encoded: bytes, key: bytes | None = None) -> None:
        """`encoded` is the header as it is in the file. An encrypted archive needs `key`."""
        self.header = header
        self._cipher = ArchiveCipher(header, key) if header.encryption and key is not None else None
        self.names: dict[ChainHash, None] = {}  # names of the blocks so far, in order
        self.ended = False  # the trailer was read and is valid
        self._starts: set[ChainHash] = set()  # parents that were not in this archive when they were named
        self._digest = xxhash.xxh3_128(encoded)

    @property
    def num_blocks(self) -> int:
        return len(self.names)

    def blocks(self, data: memoryview) -> Iterator[tuple[BlockRecord, memoryview]]:
        """The blocks in the archive's next bytes. `data` holds whole records; only a file's last piece may be shorter.

        Each payload is a view into `data`, decrypted there. Raises FormatError if the bytes are not an archive's;
        blocks yielded before are valid.
        """
        entry_bytes, record_bytes = self.header.entry_bytes, self.header.record_bytes
        at = 0
        while at < len(data):
            if self.ended:
                raise FormatError("bytes follow behind its end")
            if bytes(data[at : at + len(_END)]) == _END:
                self._end(data[at : at + TRAILER_BYTES])
                at += TRAILER_BYTES
                continue
            bytes_of_record = data[at : at + record_bytes]
            if len(bytes_of_record) < record_bytes:
                raise self.broken_off()
            self._digest.update(bytes_of_record)
            payload = bytes_of_record[entry_bytes:]
            record = self._opened(bytes_of_record[:entry_bytes], payload)
            if record is None or checksum(payload) != record.checksum:
                raise FormatError(f"block {self.num_blocks} is damaged")
            self._place(record)
            yield record, payload
            at += record_bytes

    def broken_off(self) -> FormatError:
        return FormatError(f"breaks off after {self.num_blocks} whole blocks of {self.header.num_blocks}")

    def _opened(self, head: memoryview, payload: memoryview) -> BlockRecord | None:
        """The record before a payload, which is decrypted in place; None if either is not authentic."""
        if self._cipher is None:
            return self._entry(head)
        entry = self._cipher.open(self.num_blocks, head)
        if entry is None:
            return None
        record = self._entry(memoryview(entry))
        return record if self._cipher.show(head, record.chain_hash, payload) else None

    def _entry(self, entry: memoryview) -> BlockRecord:
        tag, num_tokens, number, payload_bytes, chain_hash, parent, payload_checksum = _ENTRY.unpack_from(entry)
        if not (
            _is_whole(entry)
            and tag == _BLOCK
            and number == self.num_blocks
            and payload_bytes == self.header.slot_bytes
            and num_tokens <= self.header.block_size
        ):
            raise FormatError(f"block {self.num_blocks} is damaged")
        tokens = bytes(entry[_ENTRY.size : _ENTRY.size + 4 * num_tokens])
        return BlockRecord(chain_hash, parent, tokens, payload_checksum)

    def _place(self, record: BlockRecord) -> None:
        """Note a block. Each must come once, and after its parent if the archive has that."""
        if record.chain_hash in self.names or record.chain_hash in self._starts:
            raise FormatError(f"block {self.num_blocks} comes twice, or after its child")
        if record.parent not in self.names:
            self._starts.add(record.parent)
        self.names[record.chain_hash] = None

    def _end(self, trailer: memoryview) -> None:
        if len(trailer) < TRAILER_BYTES:
            raise self.broken_off()
        _, num_blocks, digest = _TRAILER.unpack_from(trailer)
        if not _is_whole(trailer) or num_blocks != self.num_blocks or digest != self._digest.digest():
            raise FormatError(f"its end does not match the {self.num_blocks} blocks before it")
        self.ended = True


def _summed(data: bytes) -> bytes:
    return data + _CHECKSUM.pack(checksum(memoryview(data)))


def _is_whole(data: bytes | memoryview) -> bool:
    """Whether the last eight bytes are the checksum of the others."""
    view = memoryview(data)
    return bool(_CHECKSUM.unpack(view[-8:])[0] == checksum(view[:-8]))
