"""The slab's format: what is encoded is decoded, and anything else is refused or detected."""

import random
import struct
from dataclasses import replace

import numpy as np
import pytest

from kvtier.tiers.cipher import Encryption, NameCipher, RecordCipher, key_id
from kvtier.tiers.errors import FormatError
from kvtier.tiers.file import slab
from kvtier.tiers.file.extents import ExtentMap
from kvtier.tiers.file.file_io import PAGE
from kvtier.tiers.file.slab import NO_CHECKSUM, Superblock, codec_of
from kvtier.tiers.tier import BlockRecord

FINGERPRINT = bytes(range(32))
PLAN = slab.plan(FINGERPRINT, slot_bytes=10_000, block_size=16, num_bytes=4 << 20)
KEY = bytes(range(100, 132))
LOCK = Encryption(key_id(KEY), b"salt of a slab..")
SEALED = slab.plan(FINGERPRINT, slot_bytes=10_000, block_size=16, num_bytes=4 << 20, encryption=LOCK)
STAMPS = [bytes([number]) * 28 for number in range(5)]
both = pytest.mark.parametrize("plan", [PLAN, SEALED], ids=["plain", "encrypted"])


def header_of(superblock: Superblock) -> bytes:
    copy = slab.encode(superblock).ljust(PAGE, b"\0")
    return copy + copy


def records(count: int) -> list[BlockRecord]:
    # Trailing NULs in hashes and token ids must survive: they are legal digests and the padding token.
    return [
        BlockRecord(
            bytes([number]) + bytes(31), bytes([number, 1]) + bytes(30), struct.pack("<3I", number, 7, 0), number
        )
        for number in range(count)
    ]


def test_a_slab_uses_its_size_and_never_more() -> None:
    for slot_bytes in (1, 4096, 4097, 131_072, 9 << 20):
        for num_bytes in (1 << 16, 1 << 20, 10_000_000, 1 << 30):
            planned = slab.plan(FINGERPRINT, slot_bytes, 16, num_bytes)
            if not planned.segments:
                assert num_bytes < slab.smallest(slot_bytes, 16)
                continue
            assert planned.file_bytes <= num_bytes
            # At most an extent and the rounding of its table are left over.
            assert num_bytes - planned.file_bytes <= planned.extent_bytes + planned.slots_per_extent * 192 + 2 * PAGE
            assert planned.extent_bytes <= max(slab.EXTENT_BYTES, planned.stride)
            # Payload slots are page-aligned and apart from the table.
            assert planned.payload_offset(planned.num_slots - 1) + planned.stride == planned.file_bytes
            assert all(offset % PAGE == 0 for offset in planned.payload_offsets)
            assert planned.row_offset(planned.num_slots - 1) + planned.entry_bytes <= planned.payload_offsets[0]


def test_the_smallest_slab_holds_one_block() -> None:
    least = slab.smallest(10_000, 16)
    assert slab.plan(FINGERPRINT, 10_000, 16, least).num_slots == 1
    assert not slab.plan(FINGERPRINT, 10_000, 16, least - 1).segments


def test_resizing_keeps_the_first_extents_in_place() -> None:
    small = PLAN.resized(PLAN.file_bytes // 2)
    assert small.payload_offsets == PLAN.payload_offsets[: small.num_extents]
    assert small.table_offsets == PLAN.table_offsets[: small.num_extents]
    # Back within the table's capacity: the slab is as before.
    assert small.resized(PLAN.file_bytes).segments == PLAN.segments
    # Beyond it a segment is appended, and old offsets hold.
    large = PLAN.resized(16 << 20)
    assert len(large.segments) == 2
    assert large.file_bytes <= 16 << 20
    assert large.payload_offsets[: PLAN.num_extents] == PLAN.payload_offsets
    # Shrinking cuts the new segment off again.
    assert large.resized(PLAN.file_bytes).segments == PLAN.segments
    assert not PLAN.resized(slab.HEADER_BYTES).segments


def test_superblock_round_trip() -> None:
    for superblock in (PLAN, PLAN.resized(16 << 20), SEALED, SEALED.resized(16 << 20)):
        assert slab.decode(header_of(superblock), "x.slab") == superblock


def test_the_documented_bytes() -> None:
    # docs/format.md, byte by byte: whoever changes these writes another format version.
    encoded = slab.encode(PLAN)
    assert len(encoded) == 2048
    assert encoded[:8] == b"KVTIER01"
    assert struct.unpack_from("<II", encoded, 8) == (1, 8192)
    assert encoded[16:48] == FINGERPRINT
    assert struct.unpack_from("<QQ", encoded, 48) == (10_000, 12_288)
    assert struct.unpack_from("<IIII", encoded, 64) == (16, 192, PLAN.slots_per_extent, 1)
    assert struct.unpack_from("<QQ", encoded, 80) == (1, PLAN.update)
    assert struct.unpack_from("<QQQQ", encoded, 96) == (8192, PLAN.payload_offsets[0], PLAN.num_slots, PLAN.num_slots)
    assert struct.unpack_from("<I", encoded, 1152) == (2,)
    assert not any(encoded[1156:2040])
    offsets = {name: field[1] for name, field in (slab.entry_dtype(16).fields or {}).items()}
    assert offsets == {
        "checksum": 0, "state": 8, "generation": 12, "seq": 16, "slot": 24, "chain_hash": 32, "parent": 64,
        "payload_checksum": 96, "payload_bytes": 104, "num_tokens": 108, "tokens": 112, "padding": 176,
    }  # fmt: skip


def test_the_documented_bytes_of_an_encrypted_slab() -> None:
    encoded = slab.encode(SEALED)
    assert struct.unpack_from("<I", encoded, 8) == (2,)
    assert struct.unpack_from("<I", encoded, 68) == (256,)
    assert encoded[1120:1152] == key_id(KEY) + b"salt of a slab.."
    assert struct.unpack_from("<I", encoded, 1152) == (2,)
    assert not any(encoded[1156:2040])
    offsets = {name: field[1] for name, field in (SEALED.row_dtype.fields or {}).items()}
    assert offsets == {
        "checksum": 0, "state": 8, "generation": 12, "seq": 16, "slot": 24, "chain_hash": 32, "parent": 64,
        "stamp": 96, "payload_bytes": 124, "num_tokens": 128, "sealed": 132, "padding": 232,
    }  # fmt: skip


def test_what_is_sealed_is_as_documented() -> None:
    # By another hand: contexts, associated data and what is in them, as docs/format.md says.
    codec = codec_of(SEALED, KEY, "x")
    record = BlockRecord(bytes(range(32)), bytes(range(32, 64)), struct.pack("<3I", 5, 6, 7), 0x1234)
    belongs_to = FINGERPRINT + b"salt of a slab.."
    payload = random.Random(1).randbytes(10_000)
    (hidden,), (stamp,) = codec.hide([record], [memoryview(payload)])
    shown = bytearray(10_000)
    payloads = RecordCipher(KEY, b"slab-payload" + belongs_to)
    assert payloads.decrypt_into(bytes(hidden), stamp, record.chain_hash, memoryview(shown))
    assert shown == payload
    (row,) = codec.seal_rows(codec.make_rows([3], [record], [stamp]))
    assert row["stamp"].tobytes() == stamp
    names = NameCipher(KEY, b"slab-names" + belongs_to).show(row["chain_hash"].tobytes() + row["parent"].tobytes())
    assert names == record.chain_hash + record.parent
    entry = RecordCipher(KEY, b"slab-entry" + belongs_to).open(
        row["sealed"].tobytes(), names + (3).to_bytes(4, "little")
    )
    assert entry == struct.pack("<Q3I", 0x1234, 5, 6, 7) + bytes(4 * 13)
    # None of it lies there in the clear.
    for secret in (record.chain_hash[:16], record.parent[:16], record.tokens, payload[:16], struct.pack("<Q", 0x1234)):
        assert secret not in row.tobytes() + bytes(hidden)


def test_of_two_copies_the_newer_intact_one_counts() -> None:
    older, newer = slab.encode(PLAN), slab.encode(PLAN.resized(2 << 20))
    pad = bytes(PAGE - len(older))
    # The copy is written first: a crash between the two leaves it newer.
    assert slab.decode(older + pad + newer + pad, "x").update == PLAN.update + 1
    # A torn one is passed over.
    assert slab.decode(older + pad + newer[:700] + bytes(1348) + pad, "x") == PLAN
    assert slab.decode(older[:700] + bytes(1348) + pad + newer + pad, "x").update == PLAN.update + 1


@both
def test_every_bit_flip_in_a_copy_is_detected(plan: Superblock) -> None:
    encoded = slab.encode(plan)
    for bit in range(len(encoded) * 8):
        flipped = bytearray(encoded)
        flipped[bit // 8] ^= 1 << bit % 8
        # The other copy serves; without it the file is refused.
        pad = bytes(PAGE - len(encoded))
        assert slab.decode(bytes(flipped) + pad + encoded + pad, "x") == plan
        if bit % 61 == 0:
            with pytest.raises(FormatError):
                slab.decode(bytes(flipped) + pad + bytes(flipped) + pad, "x")


@both
def test_rows_round_trip(plan: Superblock) -> None:
    codec = codec_of(plan, KEY, "x")
    rows = codec.make_rows(range(5), records(5), STAMPS)
    rows["seq"] = 1
    on_disk = codec.seal_rows(rows).copy()
    assert slab.find_valid(on_disk, np.arange(5), plan).all()
    codec.show_names(on_disk, np.arange(5))
    assert on_disk.tobytes() == rows.tobytes()
    assert codec.to_records(on_disk) == records(5)
    assert codec.stamps(on_disk) == (STAMPS if plan is SEALED else [b""] * 5)


def test_an_entry_of_another_block_is_not_authentic() -> None:
    # Whole rows, their checksums right, as only somebody who writes to the disk on purpose makes them.
    codec = codec_of(SEALED, KEY, "x")
    good = codec.make_rows(range(5), records(5), STAMPS)
    for field in ("sealed", "chain_hash", "parent"):
        rows = good.copy()
        rows[field][[1, 2]] = rows[field][[2, 1]]
        found = codec.to_records(rows)
        assert [record.checksum == NO_CHECKSUM for record in found] == [False, True, True, False, False]
        assert found[1].tokens == b""
        assert not codec.show(found[1], STAMPS[1], memoryview(bytearray(10_000)))
    rows = good.copy()
    rows["num_tokens"] = 2
    assert {record.checksum for record in codec.to_records(rows)} == {NO_CHECKSUM}
    # The same block in a slab with another salt, or under another key: the rows are not its.
    other = replace(SEALED, encryption=Encryption(key_id(KEY), bytes(16)))
    assert {record.checksum for record in codec_of(other, KEY, "x").to_records(good)} == {NO_CHECKSUM}


@both
def test_a_row_is_valid_in_its_slot_of_its_slab_only(plan: Superblock) -> None:
    rows = codec_of(plan, KEY, "x").make_rows(range(5), records(5), STAMPS)
    rows["seq"] = 1
    assert not slab.find_valid(rows, np.arange(5), plan).any()  # not sealed
    slab.seal_rows(rows, plan)
    # Moved to the neighbouring slot.
    assert not slab.find_valid(rows, np.arange(1, 6), plan).any()
    # Copied into the slab of another model.
    other = replace(plan, fingerprint=bytes(32))
    assert not slab.find_valid(rows, np.arange(5), other).any()
    # Of before a reset, or of a writer that one overtook.
    rows["seq"] = range(5)
    slab.seal_rows(rows, plan)
    after = replace(plan, min_seq=3)
    assert slab.find_valid(rows, np.arange(5), plan).tolist() == [False, True, True, True, True]
    assert slab.find_valid(rows, np.arange(5), after).tolist() == [False, False, False, True, True]
    # Blank rows are free slots.
    assert not slab.find_valid(np.zeros(5, rows.dtype), np.arange(5), plan).any()


@both
def test_every_bit_flip_in_a_row_is_detected(plan: Superblock) -> None:
    rows = codec_of(plan, KEY, "x").make_rows([3], records(1), STAMPS[:1])
    rows["seq"] = 1
    slab.seal_rows(rows, plan)
    view = slab.byte_view(rows)
    for bit in range(len(view) * 8):
        view[bit // 8] ^= 1 << bit % 8
        assert not slab.find_valid(rows, np.array([3]), plan).any()
        view[bit // 8] ^= 1 << bit % 8
    assert slab.find_valid(rows, np.array([3]), plan).all()


# The bookkeeping of extents, traced with blocks of one letter.


def named(letter: str) -> bytes:
    return letter.encode() * 32


def held(extents: ExtentMap) -> str:
    """The letters of the blocks held, in their order."""
    names = extents.index.names(extents.index.named())
    return "".join(sorted(name.decode()[0] for name in names))


def fill(extents: ExtentMap, *names: str, after: str = "-") -> list[int]:
    """Store blocks the way the writer does; returns their slots."""
    hashes = [named(name) for name in names]
    slots: list[int] = []
    while hashes:
        run = extents.take(hashes, named(after))
        if run is None:
            claim = extents.claim()
            assert claim
            assert extents.opened(claim)
            kept = extents.take_in(claim.extent, claim.keep_hashes) if claim.keep else None
            run = extents.take_in(claim.extent, hashes)
            if kept:
                extents.publish(kept, claim.keep_hashes)
                extents.leave(kept.extent)
        assert extents.publish(run, hashes[: run.size]) == []
        extents.leave(run.extent)
        slots += run.slots
        hashes, after = hashes[run.size :], hashes[run.size - 1].decode()[0]
        extents.check()
    return slots


def test_a_chain_goes_on_behind_its_parent() -> None:
    extents = ExtentMap(num_extents=4, slots_per_extent=8)
    assert fill(extents, "a", "b", "c") == [0, 1, 2]
    assert fill(extents, "x", "y") == [8, 9]  # another chain opens another extent
    assert fill(extents, "d", "e", after="c") == [3, 4]  # and the first goes on where it was
    assert fill(extents, *"fghijk", after="e") == [5, 6, 7, 16, 17, 18]


def test_the_oldest_extent_goes_whole_but_for_what_was_hit() -> None:
    extents = ExtentMap(num_extents=2, slots_per_extent=8)
    fill(extents, *"abcdefghijklmnop")
    for name in "be":
        extents.hits[extents.index.find_one(named(name))] = 1
    fill(extents, "q", after="p")  # needs an extent: a…h go, b and e are stored again
    assert held(extents) == "beijklmnopq"
    assert extents.num_evicted == 6
    fill(extents, *"rstuvw", after="q")  # i…p go: nobody asked for them
    assert held(extents) == "beqrstuvw"


def test_an_extent_mostly_hit_is_passed_over_once() -> None:
    extents = ExtentMap(num_extents=2, slots_per_extent=4)
    fill(extents, *"abcdefgh")
    for name in "abc":
        extents.hits[extents.index.find_one(named(name))] = 1
    fill(extents, "i")  # e…h go instead
    assert held(extents) == "abcdi"
    fill(extents, *"jklm", after="i")  # not hit since: a…d go now
    assert held(extents) == "ijklm"


def test_an_extent_being_written_is_no_victim() -> None:
    extents = ExtentMap(num_extents=1, slots_per_extent=2)
    claim = extents.claim()
    assert claim
    assert extents.claim() is None  # being emptied
    assert extents.opened(claim)
    run = extents.take([named("a"), named("b")], named("-"))
    assert run
    assert extents.claim() is None  # being written
    extents.publish(run, [named("a"), named("b")])
    extents.leave(run.extent)
    assert extents.claim()
