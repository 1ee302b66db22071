"""Fault 39: bad bytes, even with a right checksum, are a typed error; parsing takes no more memory than they do."""

import random
import struct
import tracemalloc
from pathlib import Path
from typing import Final

import msgpack
import pytest
import xxhash
from doubles import BLOCK_SIZE, SLOT_BYTES, chain_of, payload_of, record_of
from extent import brief
from fault_rig import FINGERPRINT, num_descriptors
from hypothesis import given
from hypothesis import strategies as st

from kvtier.connector.plan import CopyOp, StepPlan
from kvtier.tiers.errors import FingerprintMismatch, FormatError, KVTierError
from kvtier.tiers.file import slab
from kvtier.tiers.file.store import FileStore
from kvtier.tiers.tier import BlockRecord

SIZE = 160 * 1024
CHAIN = chain_of(12)
U32, U64 = 2**32 - 1, 2**64 - 1
MEMORY: Final = 16 << 20  # bytes parsing may take, a hundred times the file


def open_store(directory: Path) -> FileStore:
    return FileStore.open(
        directory, FINGERPRINT, slot_bytes=SLOT_BYTES, block_size=BLOCK_SIZE, size=SIZE, mode="buffered"
    )


@pytest.fixture
def slab_path(tmp_path: Path) -> Path:
    store = open_store(tmp_path)
    store.write([record_of(CHAIN, i) for i in range(12)], [memoryview(payload_of(h)) for h in CHAIN.hashes])
    store.close()
    return store.path


def forged(whole: bytes, changes: dict[int, tuple[str, int]]) -> bytes:
    """The slab with fields of both superblocks changed, offset → (format, value), and right checksums."""
    content = bytearray(whole)
    for start in (0, 4096):
        for offset, (kind, value) in changes.items():
            struct.pack_into(kind, content, start + offset, value)
        digest = xxhash.xxh3_64_intdigest(bytes(content[start : start + 2040]))
        struct.pack_into("<Q", content, start + 2040, digest)
    return bytes(content)


def refused(path: Path) -> None:
    """A typed error, an untouched file, no memory to speak of, no descriptor and no lock left behind."""
    content, num_open = path.read_bytes(), num_descriptors()
    tracemalloc.start()
    try:
        with pytest.raises((FormatError, FingerprintMismatch), match="left untouched"):
            open_store(path.parent)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < MEMORY
    assert path.read_bytes() == content
    assert num_descriptors() <= num_open


# Offsets are those of docs/format.md. The first segment's row starts at 96, a second one's at 128.
FORGERIES: dict[str, dict[int, tuple[str, int]]] = {
    "blocks of 4 G tokens": {64: ("<I", U32), 68: ("<I", 0)},
    "blocks of 512 M tokens": {64: ("<I", 2**29)},
    "slots of 16 EiB": {48: ("<Q", U64), 56: ("<Q", 0)},
    "extents of 2 G slots": {72: ("<I", 2**31)},
    "extents of 7 slots": {72: ("<I", 7)},
    "a reset at the end of time": {80: ("<Q", U64)},
    "no segment": {76: ("<I", 0)},
    "4 G segments": {76: ("<I", U32)},
    "32 segments, 31 of them zeros": {76: ("<I", 32)},
    "a table at byte 0": {96: ("<Q", 0)},
    "a table beyond the file": {96: ("<Q", 2**40)},
    "a table at 2 ^ 63": {96: ("<Q", 2**63)},
    "a payload at byte 0": {104: ("<Q", 0)},
    "a payload over the table": {104: ("<Q", 8192)},
    "a payload at 2 ^ 64 - 1": {104: ("<Q", U64)},
    "no slot": {112: ("<Q", 0)},
    "a broken extent": {112: ("<Q", 1)},
    "a segment of 2 ^ 40 slots before a small one": {
        76: ("<I", 2), 112: ("<Q", 2**40), 128: ("<Q", 8192), 136: ("<Q", 16384), 144: ("<Q", 4), 152: ("<Q", 4),
    },
    "a segment of 2 ^ 62 slots before a small one": {
        76: ("<I", 2), 112: ("<Q", 2**62), 128: ("<Q", 8192), 136: ("<Q", 16384), 144: ("<Q", 4), 152: ("<Q", 4),
    },
    "a table with room for fewer rows than there are": {120: ("<Q", 0)},
    "a table with room for 2 ^ 60 rows": {120: ("<Q", 2**60)},
}  # fmt: skip


@pytest.mark.parametrize("what", FORGERIES)
def test_a_forged_superblock_with_a_right_checksum_is_refused(slab_path: Path, what: str) -> None:
    slab_path.write_bytes(forged(slab_path.read_bytes(), FORGERIES[what]))
    refused(slab_path)


def test_a_forged_slab_beside_ours_does_not_keep_us_from_opening(slab_path: Path) -> None:
    neighbour = slab_path.with_name("ab" * 32 + ".slab")
    whole = forged(slab_path.read_bytes(), {16: ("<Q", 0)})
    for what, changes in FORGERIES.items():
        neighbour.write_bytes(forged(whole, changes))
        try:  # it may be too large to leave room: that too is said in one line
            FileStore.open(
                slab_path.parent, bytes(32), slot_bytes=SLOT_BYTES, block_size=BLOCK_SIZE, size=SIZE * 5 // 2
            ).close()
        except KVTierError:
            pass
        except Exception as error:  # named, with the forgery that brought it about
            pytest.fail(f"{what}: {error!r}")
        slab_path.with_name(bytes(32).hex() + ".slab").unlink(missing_ok=True)


@pytest.mark.parametrize("seed", range(brief(1, 4)))
def test_random_rows_with_right_checksums_are_misses(slab_path: Path, seed: int) -> None:
    """Rows that pass every checksum and lie: a wrong slot, length, state, number of tokens, or somebody's payload."""
    dice = random.Random(seed)
    store = open_store(slab_path.parent)
    superblock = store.superblock
    store.close()
    whole = slab_path.read_bytes()
    size = superblock.entry_bytes
    for _ in range(40):
        content = bytearray(whole)
        for slot in dice.sample(range(12), 3):
            start = superblock.row_offset(slot)
            row = bytearray(content[start : start + size])
            kind, at = dice.choice(
                [("<I", 8), ("<I", 12), ("<Q", 16), ("<Q", 24), ("<Q", 96), ("<I", 104), ("<I", 108)]
            )
            struct.pack_into(kind, row, at, dice.choice([0, 1, U32, dice.getrandbits(32)]))
            digest = xxhash.xxh3_64_intdigest(bytes(row[8:]), superblock.seed)
            struct.pack_into("<Q", row, 0, digest)
            content[start : start + size] = row
        slab_path.write_bytes(content)
        try:
            store = open_store(slab_path.parent)
        except (FormatError, FingerprintMismatch):
            continue
        for chain_hash in CHAIN.hashes:
            buffer = memoryview(bytearray(SLOT_BYTES))
            (result,) = store.read([chain_hash], [buffer])
            assert not isinstance(result, BlockRecord) or buffer == payload_of(chain_hash)
        store.check()
        store.close()


@given(st.binary(max_size=2 * 4096))
def test_any_header_is_a_superblock_or_a_format_error(header: bytes) -> None:
    for data in (header, slab.MAGIC + header, slab.MAGIC + struct.pack("<II", 1, 8192) + header):
        with pytest.raises(FormatError):
            slab.decode(data, "the file")


# Step plans.

BOMBS = {
    "an array of 4 G items": b"\xdd\xff\xff\xff\xff",
    "a plan whose loads are 4 G": b"\x95\x01\x01\x00\xdd\xff\xff\xff\xff",
    "a text of 4 GB": b"\xdb\xff\xff\xff\xff",
    "a map of 4 G entries": b"\xdf\xff\xff\xff\xff",
    "ten thousand arrays in one another": b"\x91" * 10_000 + b"\x01",
    "an extension": msgpack.packb(msgpack.ExtType(5, b"x" * 100)),
    "a time": msgpack.packb(msgpack.Timestamp(1, 2)),
    "a text that is no UTF-8": b"\x95\x01\x01\x00\x91\x96\x01\xa2\xff\xfe\x91\x01\x91\x01\x91\x01\xc2\x90",
    "a number beyond 64 bits as a float": msgpack.packb([1, 1e300, 0, [], []]),
    "a plan and something behind it": StepPlan(1, 0).encode() + b"\x01",
    "half a plan": StepPlan(1, 0, (CopyOp(1, "a", (1,), (2,), (3,)),)).encode()[:-3],
    "nothing": b"",
}


@pytest.mark.parametrize("what", BOMBS)
def test_a_bomb_is_no_plan_and_takes_no_memory(what: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(FormatError):
            StepPlan.decode(BOMBS[what])
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < MEMORY


json_like = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=4)
    | st.binary(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=3) | st.integers(0, 9), inner, max_size=3)
    ),
    max_leaves=20,
)


@given(json_like, st.lists(json_like, max_size=4))
def test_any_msgpack_value_is_a_format_error_or_a_plan(value: object, ops: list[object]) -> None:
    for candidate in (value, [1, 1, 0, value, []], [1, 1, 0, ops, ops], [1, 1, 0, [[1, "a", *ops[:3], False]], []]):
        try:
            plan = StepPlan.decode(msgpack.packb(candidate))
        except FormatError:
            continue
        assert StepPlan.decode(plan.encode()) == plan
