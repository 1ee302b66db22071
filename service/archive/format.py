"""An archive's bytes: encode, decode, validate. No I/O (docs/format.md, "An archive")."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import xxhash

from kvtier.tiers.checksum import checksum
from kvtier.tiers.errors import FormatError
from kvtier.tiers.tier import BlockRecord, ChainHash

MAGIC: Final = b"KVTARCHV"
VERSION: Final = 1
HEADER_BYTES: Final = 128
TRAILER_BYTES: Final = 40

_HEADER: Final = struct.Struct("<8sII32sQI4xQ48x")
_ENTRY: Final = struct.Struct("<4sIQQ32s32sQ")
_TRAILER: Final = struct.Struct("<4s4xQ16s")
_CHECKSUM: Final = struct.Struct("<Q")
_BLOCK: Final = b"BLCK"
_END: Final = b"DONE"


@dataclass(frozen=True, slots=True)
class Header:
    """Whose blocks an archive holds, and how large they are."""

    fingerprint: bytes  # 32 bytes
    slot_bytes: int  # payload of a block
    block_size: int  # tokens of a block, at most
    num_blocks: int  # how many there were to write; blocks lost meanwhile are not in it

    @property
    def entry_bytes(self) -> int:
        """Bytes of a record before its payload."""
        return _ENTRY.size + 4 * self.block_size + _CHECKSUM.size

    @property
    def record_bytes(self) -> int:
        """Bytes of a whole record."""
        return self.entry_bytes + self.slot_bytes


def encode_header(header: Header) -> bytes:
    """The archive's first HEADER_BYTES."""
    return _summed(
        _HEADER.pack(
            MAGIC, VERSION, HEADER_BYTES, header.fingerprint, header.slot_bytes, header.block_size, header.num_blocks
        )
    )


def decode_header(data: bytes) -> Header:
    """What `encode_header` wrote; FormatError for anything else."""
    if data[: len(MAGIC)] != MAGIC:
        raise FormatError("not an archive of kvtier's")
    if len(data) < HEADER_BYTES:
        raise FormatError(f"breaks off in its header, after {len(data)} bytes")
    _, version, header_bytes, fingerprint, slot_bytes, block_size, num_blocks = _HEADER.unpack_from(data)
    if version != VERSION:
        raise FormatError(f"an archive of version {version}, this kvtier reads {VERSION}; export it anew")
    if not _is_whole(data) or header_bytes != HEADER_BYTES:
        raise FormatError("its header is damaged")
    return Header(fingerprint, slot_bytes, block_size, num_blocks)


def encode_entry(header: Header, number: int, record: BlockRecord) -> bytes:
    """What stands before the payload of block `number`, counted from 0."""
    num_tokens = len(record.tokens) // 4
    fixed = _ENTRY.pack(
        _BLOCK, num_tokens, number, header.slot_bytes, record.chain_hash, record.parent, record.checksum
    )
    return _summed(fixed + record.tokens.ljust(4 * header.block_size, b"\0"))


def encode_trailer(num_blocks: int, digest: bytes) -> bytes:
    """The archive's last TRAILER_BYTES; `digest` is the xxh3-128 of all bytes before them."""
    return _summed(_TRAILER.pack(_END, num_blocks, digest))


class Parser:
    """Reads what follows the header, piece by piece: whole, verified blocks come out, or a FormatError."""

    def __init__(self, header: Header, encoded: bytes) -> None:
        """`encoded` is the header as it stood in the file."""
        self.header = header
        self.names: dict[ChainHash, None] = {}  # of the blocks so far, in their order
        self.ended = False  # the trailer was there, and right
        self._starts: set[ChainHash] = set()  # parents that were no block of this archive when named
        self._digest = xxhash.xxh3_128(encoded)

    @property
    def num_blocks(self) -> int:
        """Whole blocks so far."""
        return len(self.names)

    def blocks(self, data: memoryview) -> Iterator[tuple[BlockRecord, memoryview]]:
        """The blocks in the archive's next bytes: a whole number of records, fewer bytes only at the file's end.

        Each payload is a view into `data`. FormatError where the bytes are no archive's; those before it are good.
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
            record = self._entry(bytes_of_record[:entry_bytes])
            payload = bytes_of_record[entry_bytes:]
            if checksum(payload) != record.checksum:
                raise FormatError(f"block {self.num_blocks} is damaged")
            self._digest.update(bytes_of_record)
            self._place(record)
            yield record, payload
            at += record_bytes

    def broken_off(self) -> FormatError:
        """The error of a file that ends here."""
        return FormatError(f"breaks off after {self.num_blocks} whole blocks of {self.header.num_blocks}")

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
        """Every block comes once, and after its parent, if that is in the archive at all."""
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
