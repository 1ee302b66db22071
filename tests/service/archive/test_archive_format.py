"""An archive's bytes: as docs/format.md has them, and nothing a file says is believed before it was checked."""

import asyncio
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash
from doubles import BLOCK_SIZE, SLOT_BYTES, chain_of, hierarchy_of, payload_of, record_of
from fault_rig import FINGERPRINT
from hypothesis import given, strategies

from kvtier.service.archive import archive as archive_format
from kvtier.service.archive.archive import ArchiveCipher, Header, Parser, import_blocks
from kvtier.tiers.cipher import Encryption, RecordCipher, key_id
from kvtier.tiers.errors import FingerprintMismatch, FormatError
from kvtier.tiers.tier import BlockRecord

HEADER = Header(FINGERPRINT, SLOT_BYTES, BLOCK_SIZE, 2)
RECORD = record_of(chain_of(2), 1)


def xxh3(data: bytes) -> bytes:
    return struct.pack("<Q", xxhash.xxh3_64_intdigest(data))


def test_every_field_lies_where_the_page_says() -> None:
    header = archive_format.encode_header(HEADER)
    assert len(header) == 128
    assert header[:8] == b"KVTARCHV"
    assert struct.unpack_from("<II", header, 8) == (1, 128)
    assert header[16:48] == FINGERPRINT
    assert struct.unpack_from("<QIIQ", header, 48) == (SLOT_BYTES, BLOCK_SIZE, 0, 2)
    assert header[72:120] == bytes(48)
    assert header[120:] == xxh3(header[:120])

    entry = archive_format.encode_entry(HEADER, 7, RECORD)
    assert len(entry) == HEADER.entry_bytes == 96 + 4 * BLOCK_SIZE + 8
    assert entry[:4] == b"BLCK"
    assert struct.unpack_from("<IQQ", entry, 4) == (BLOCK_SIZE, 7, SLOT_BYTES)
    assert entry[24:56] == RECORD.chain_hash
    assert entry[56:88] == RECORD.parent
    assert struct.unpack_from("<Q", entry, 88) == (RECORD.checksum,)
    assert entry[96:-8] == RECORD.tokens
    assert entry[-8:] == xxh3(entry[:-8])

    trailer = archive_format.encode_trailer(2, b"d" * 16)
    assert len(trailer) == 40
    assert trailer[:8] == b"DONE" + bytes(4)
    assert trailer[8:16] == struct.pack("<Q", 2)
    assert trailer[16:32] == b"d" * 16
    assert trailer[32:] == xxh3(trailer[:32])


def test_every_field_of_an_encrypted_archive_lies_where_the_page_says() -> None:
    key = bytes(range(32))
    sealed = replace(HEADER, encryption=Encryption(key_id(key), b"salt of archives"))
    header = archive_format.encode_header(sealed)
    assert struct.unpack_from("<II", header, 8) == (2, 128)
    assert header[72:104] == key_id(key) + b"salt of archives"
    assert header[104:120] == bytes(16)
    assert archive_format.decode_header(header) == sealed
    # By another hand: contexts and associated data as the page says, and the entry as in the clear.
    entry = archive_format.encode_entry(sealed, 7, RECORD)
    payload = memoryview(bytearray(payload_of(RECORD.chain_hash)))
    head, hidden = ArchiveCipher(sealed, key).seal(7, entry, RECORD.chain_hash, payload)
    assert len(head) == sealed.entry_bytes == HEADER.entry_bytes + 60
    assert head[:4] == b"SEAL"
    belongs_to = FINGERPRINT + b"salt of archives"
    number = (7).to_bytes(8, "little")
    assert RecordCipher(key, b"archive-entry" + belongs_to).open(head[4:-28], number) == entry
    payloads = RecordCipher(key, b"archive-payload" + belongs_to)
    assert payloads.decrypt_into(hidden, head[-28:], RECORD.chain_hash, hidden)
    assert hidden == payload
    # A whole record is read back; without the key it is none.
    head, hidden = ArchiveCipher(sealed, key).seal(0, archive_format.encode_entry(sealed, 0, RECORD),
                                                   RECORD.chain_hash, payload)  # fmt: skip
    data = memoryview(bytearray(head + bytes(hidden)))
    [(found, shown)] = Parser(sealed, header, key).blocks(data)
    assert found == RECORD
    assert shown == payload
    with pytest.raises(FormatError, match="block 0 is damaged"):
        list(Parser(sealed, header).blocks(data))


def test_fewer_tokens_than_a_block_has_come_back_as_they_were() -> None:
    header = archive_format.encode_header(HEADER)
    for tokens in (b"", RECORD.tokens[:4], RECORD.tokens):
        record = BlockRecord(RECORD.chain_hash, RECORD.parent, tokens, RECORD.checksum)
        data = archive_format.encode_entry(HEADER, 0, record) + payload_of(RECORD.chain_hash)
        assert [found for found, _ in Parser(HEADER, header).blocks(memoryview(data))] == [record]


def test_sizes_are_compared_before_anything_is_allocated(tmp_path: Path) -> None:
    # The header is intact and claims blocks of an exabyte, or a table of tokens as large.
    hierarchy = hierarchy_of()
    for claimed in (Header(FINGERPRINT, 1 << 60, BLOCK_SIZE, 1), Header(FINGERPRINT, SLOT_BYTES, (1 << 32) - 1, 1)):
        (tmp_path / "file").write_bytes(archive_format.encode_header(claimed) + bytes(1000))

        async def story() -> None:
            async for _ in import_blocks(hierarchy, FINGERPRINT, BLOCK_SIZE, tmp_path / "file"):
                pass

        with pytest.raises(FingerprintMismatch, match="export it again"):
            asyncio.run(story())
    hierarchy.close()


@given(
    tag=strategies.sampled_from([b"BLCK", b"DONE", b"\0\0\0\0"]),
    num_tokens=strategies.sampled_from([0, BLOCK_SIZE, BLOCK_SIZE + 1, (1 << 32) - 1]),
    number=strategies.sampled_from([0, 1, (1 << 64) - 1]),
    num_bytes=strategies.sampled_from([SLOT_BYTES, 0, SLOT_BYTES + 1, 1 << 60]),
)
def test_a_right_checksum_alone_is_not_believed(tag: bytes, num_tokens: int, number: int, num_bytes: int) -> None:
    fixed = struct.pack("<4sIQQ", tag, num_tokens, number, num_bytes) + RECORD.chain_hash + RECORD.parent
    entry = fixed + struct.pack("<Q", RECORD.checksum) + RECORD.tokens
    data = memoryview(entry + xxh3(entry) + payload_of(RECORD.chain_hash))
    parser = Parser(HEADER, archive_format.encode_header(HEADER))
    if (tag, number, num_bytes) == (b"BLCK", 0, SLOT_BYTES) and num_tokens <= BLOCK_SIZE:
        [(record, _)] = parser.blocks(data)
        assert record.tokens == RECORD.tokens[: 4 * num_tokens]
    else:
        with pytest.raises(FormatError):
            list(parser.blocks(data))
        assert parser.num_blocks == 0


@given(strategies.binary(max_size=2 * HEADER.record_bytes + 50))
def test_any_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(FormatError):
        archive_format.decode_header(data)
    parser = Parser(HEADER, archive_format.encode_header(HEADER))
    if data:
        with pytest.raises(FormatError):
            list(parser.blocks(memoryview(data)))
    assert not parser.ended


def test_a_child_before_its_parent_is_refused() -> None:
    chain = chain_of(2)
    data = b"".join(
        archive_format.encode_entry(HEADER, number, record_of(chain, i)) + payload_of(chain.hashes[i])
        for number, i in enumerate((1, 0))
    )
    blocks = Parser(HEADER, archive_format.encode_header(HEADER)).blocks(memoryview(data))
    assert next(blocks)[0].chain_hash == chain.hashes[1]
    with pytest.raises(FormatError, match="block 1 comes twice, or after its child"):
        next(blocks)
