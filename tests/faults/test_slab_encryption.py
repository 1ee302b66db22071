"""An encrypted slab: nothing of its blocks can be read from it, nothing forged is served, other keys are refused."""

import hashlib
import logging
import os
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from kvtier.tiers.checksum import checksum
from kvtier.tiers.cipher import key_id
from kvtier.tiers.errors import ConfigError
from kvtier.tiers.file import slab
from kvtier.tiers.file.slab_check import check_slab
from kvtier.tiers.file.slab_file import read_rows
from kvtier.tiers.file.store import FileStore
from kvtier.tiers.tier import BlockRecord, Outcome

FINGERPRINT = b"encryption".ljust(32, b".")
SLOT, BLOCK_SIZE, SIZE = 4096, 4, 200 * 1024
KEY, OTHER = bytes(range(32)), bytes(range(1, 33))


def hash_of(key: int) -> bytes:
    return hashlib.sha256(str(key).encode()).digest()


def payload_of(key: int) -> memoryview:
    return memoryview(random.Random(key).randbytes(SLOT))


def record_of(key: int) -> BlockRecord:
    tokens = np.arange(1000 * key, 1000 * key + BLOCK_SIZE, dtype="<u4").tobytes()
    return BlockRecord(hash_of(key), hash_of(key - 1), tokens, checksum(payload_of(key)))


def open_store(
    directory: Path, key: bytes | None = KEY, size: int = SIZE, fingerprint: bytes = FINGERPRINT
) -> FileStore:
    return FileStore.open(
        directory, fingerprint, slot_bytes=SLOT, block_size=BLOCK_SIZE, size=size, mode="buffered", key=key
    )


def put(store: FileStore, keys: Sequence[int]) -> None:
    for first in range(0, len(keys), 4):
        batch = keys[first : first + 4]
        assert set(store.write([record_of(key) for key in batch], [payload_of(key) for key in batch])) == {Outcome.OK}


def get(store: FileStore, keys: Sequence[int]) -> list[Outcome]:
    """Read blocks; whatever comes back as a record is exactly what was stored under that key (I1)."""
    buffers = [memoryview(bytearray(SLOT)) for _ in keys]
    results = store.read([hash_of(key) for key in keys], buffers)
    for key, buffer, result in zip(keys, buffers, results, strict=True):
        if isinstance(result, BlockRecord):
            assert result == record_of(key)
            assert buffer == payload_of(key)
    return [Outcome.OK if isinstance(result, BlockRecord) else result for result in results]


KEYS = range(20)


@pytest.fixture
def slab_path(tmp_path: Path) -> Path:
    """A closed slab that holds KEYS."""
    store = open_store(tmp_path)
    put(store, KEYS)
    store.close()
    return store.path


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
def test_nothing_of_a_block_can_be_read_from_the_disk(tmp_path: Path, key: bytes | None) -> None:
    # Three times round the slab, with hits, so that blocks lie there that were stored, evicted, and stored again.
    store = open_store(tmp_path, key)
    put(store, KEYS)
    for first in range(20, 140, 4):
        assert get(store, range(first - 4, first)) == [Outcome.OK] * 4
        put(store, range(first, first + 4))
    store.discard([hash_of(139)])
    held = [number for number in range(140) if store.holds([hash_of(number)])[0]]
    assert store.stats()["evicted"]
    store.close()
    content = store.path.read_bytes()
    found = {
        what
        for number in range(140)
        for what, secret in (
            ("payload", payload_of(number)[:16]),
            ("payload's end", payload_of(number)[-16:]),
            ("tokens", record_of(number).tokens),
            ("a half of the name", hash_of(number)[:16]),
            ("the other half", hash_of(number)[16:]),
            ("checksum", record_of(number).checksum.to_bytes(8, "little")),
        )
        if bytes(secret) in content
    }
    # The plain slab shows that the search would find it.
    assert found == (
        set() if key else {"payload", "payload's end", "tokens", "a half of the name", "the other half", "checksum"}
    )
    # The key is nowhere near it, and all is there again.
    assert KEY not in content
    store = open_store(tmp_path, key)
    assert get(store, held) == [Outcome.OK] * len(held)
    assert sorted(store.lineage().pairs()) == sorted((hash_of(number), hash_of(number - 1)) for number in held)
    store.check()
    store.close()


def test_a_block_stored_again_gets_another_nonce(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    stamps: dict[bytes, set[bytes]] = {}

    def look() -> None:
        rows, _ = store._rows._filled(store._blocks.index.named().tolist(), store._rows._read_each)
        store._codec.show_names(rows, np.arange(len(rows)))
        for row in rows:
            stamps.setdefault(row["chain_hash"].tobytes(), set()).add(row["stamp"].tobytes())
            stamps[row["chain_hash"].tobytes()].add(row["sealed"].tobytes()[:28])

    # Block 0 is hit again and again while others push it out: it is moved by second chances.
    put(store, range(8))
    for first in range(8, 200, 4):
        look()
        get(store, [0])
        put(store, range(first, first + 4))
    look()
    assert store.holds([hash_of(0)]) == [True]
    assert len(stamps[hash_of(0)]) >= 6  # a payload's and an entry's for each time it was stored
    # No nonce came twice, whatever was sealed.
    nonces = [stamp[:12] for found in stamps.values() for stamp in found]
    assert len(set(nonces)) == len(nonces)
    # Stored with other bytes, it is another ciphertext, too.
    before = set(stamps[hash_of(0)])
    store.discard([hash_of(0)])
    put(store, [0])
    look()
    assert len(stamps[hash_of(0)] - before) == 2
    store.check()
    store.close()


def test_a_second_chance_launders_nothing(tmp_path: Path) -> None:
    # One bit of a block that is about to be stored again: sealed anew as it is, its tag would be right.
    store = open_store(tmp_path)
    put(store, range(store.superblock.num_slots // 4 * 4))
    first = range(store.superblock.slots_per_extent)
    assert get(store, [0]) == [Outcome.OK]
    with store.path.open("r+b") as file:
        file.seek(store.superblock.payload_offset(0) + 100)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
    put(store, range(1000, 1000 + 2 * len(first)))
    assert get(store, [0]) == [Outcome.ABSENT]
    store.check()
    store.close()


def test_other_keys_are_refused_and_nothing_is_touched(slab_path: Path) -> None:
    before = slab_path.read_bytes(), slab_path.stat().st_mtime_ns
    for key, message in (
        (None, r"encrypted, and no \[file\] key_file is set; it was left untouched: set the one it was written with"),
        (OTHER, rf"encrypted with key {key_id(KEY).hex()}, \[file\] key_file holds {key_id(OTHER).hex()}; .*untouched"),
    ):
        with pytest.raises(ConfigError, match=message):
            open_store(slab_path.parent, key)
        # At a smaller size it would have been shrunk, and at a larger one grown.
        for size in (SIZE // 2, SIZE * 2):
            with pytest.raises(ConfigError, match=message):
                open_store(slab_path.parent, key, size)
        with pytest.raises(ConfigError, match=message):
            check_slab(slab_path, repair=True, key=key)
        assert (slab_path.read_bytes(), slab_path.stat().st_mtime_ns) == before
    store = open_store(slab_path.parent)
    assert get(store, KEYS) == [Outcome.OK] * len(KEYS)
    store.close()


def test_a_slab_in_the_clear_is_refused_where_a_key_is_set(tmp_path: Path) -> None:
    store = open_store(tmp_path, key=None)
    put(store, KEYS)
    store.close()
    before = store.path.read_bytes()
    with pytest.raises(ConfigError, match=r"holds blocks in the clear, .*untouched: delete it, or choose another"):
        open_store(tmp_path)
    assert store.path.read_bytes() == before
    # `kvtier verify` reads it as it is.
    assert check_slab(store.path, key=KEY).is_clean
    store = open_store(tmp_path, key=None)
    assert get(store, KEYS) == [Outcome.OK] * len(KEYS)
    store.close()


def test_forged_rows_and_payloads_are_misses(slab_path: Path) -> None:
    """Somebody writes to the disk who knows the format, but not the key: every checksum of ours is right."""
    whole = slab_path.read_bytes()
    rng = random.Random(7)

    def rows_of(store: FileStore) -> slab.Rows:
        return read_rows(store._io, store._file.fd, store.superblock)

    store = open_store(slab_path.parent)
    superblock, good = store.superblock, rows_of(store)
    store.close()

    def forge(field: str, source: int, target: int) -> None:
        rows = good.copy()
        rows[field][target] = rows[field][source]
        sealed = rows[: len(KEYS)].copy()
        slab.seal_rows(sealed, superblock)
        with slab_path.open("r+b") as file:
            file.seek(superblock.table_offsets[0])
            file.write(slab.byte_view(sealed))

    assert superblock.slots_per_extent * superblock.num_extents >= len(KEYS)
    per_table = superblock.table_offsets[1] - superblock.table_offsets[0]
    assert per_table == superblock.slots_per_extent * superblock.entry_bytes  # rows follow one another
    for field in ("stamp", "sealed", "chain_hash", "parent"):
        source, target = rng.sample(KEYS, 2)
        forge(field, source, target)
        store = open_store(slab_path.parent)
        # It is found by its row, and by nothing that it holds.
        outcomes = get(store, KEYS)
        assert outcomes[target] in (Outcome.CHECKSUM, Outcome.ABSENT)
        assert [outcomes[key] for key in KEYS if key not in (source, target)] == [Outcome.OK] * (len(KEYS) - 2)
        store.check()
        store.close()
        slab_path.write_bytes(whole)
    # Payloads swapped with their stamps: each is whole, and another block's.
    rows = good[: len(KEYS)].copy()
    rows["stamp"][[3, 4]] = rows["stamp"][[4, 3]]
    slab.seal_rows(rows, superblock)
    places = [superblock.payload_offset(slot) for slot in (3, 4)]
    with slab_path.open("r+b") as file:
        file.seek(superblock.table_offsets[0])
        file.write(slab.byte_view(rows))
        for place, other in zip(places, reversed(places), strict=True):
            file.seek(place)
            file.write(whole[other : other + SLOT])
    assert len(check_slab(slab_path, key=KEY).bad_payloads) == 2
    store = open_store(slab_path.parent)
    assert get(store, KEYS) == [Outcome.CHECKSUM if key in (3, 4) else Outcome.OK for key in KEYS]
    store.check()
    store.close()


def test_an_old_copy_under_a_new_row_is_a_miss(tmp_path: Path) -> None:
    # Both were sealed under the same key and name: the nonce and tag in the row say which of them it is.
    store = open_store(tmp_path)
    put(store, KEYS)
    place = store.superblock.payload_offset(5)
    old = store.path.read_bytes()[place : place + SLOT]
    store.discard([hash_of(5)])
    put(store, [5])
    slot = store._blocks.index.find_one(hash_of(5))
    with store.path.open("r+b") as file:
        file.seek(store.superblock.payload_offset(slot))
        file.write(old)
    assert get(store, [5]) == [Outcome.CHECKSUM]
    assert get(store, [5]) == [Outcome.ABSENT]
    store.check()
    store.close()


def blank_sealed(store: FileStore, slot: int) -> None:
    """Somebody who knows the format, but not the key, writes an entry: its checksum is right."""
    place, size = store.superblock.row_offset(slot), store.superblock.entry_bytes
    row = np.frombuffer(os.pread(store._file.fd, size, place), store.superblock.row_dtype).copy()
    row["sealed"] = bytes(row.dtype["sealed"].itemsize)
    slab.seal_rows(row, store.superblock)
    os.pwrite(store._file.fd, slab.byte_view(row), place)


def test_events_tell_an_entry_that_is_not_authentic_without_tokens(slab_path: Path) -> None:
    store = open_store(slab_path.parent)
    blank_sealed(store, 3)
    store.change_feed.listen()
    told = {record.chain_hash: record.tokens for record in store.change_feed.take(100).stored}
    assert len(told) == len(KEYS)
    assert [key for key in KEYS if not told[hash_of(key)]] == [3]
    assert get(store, [3, 4]) == [Outcome.CHECKSUM, Outcome.OK]
    assert store.change_feed.take(100).gone == [hash_of(3)]
    # Stored again over such an entry, it is whole.
    blank_sealed(store, 7)
    put(store, [3, 7])
    assert get(store, [3, 7]) == [Outcome.OK] * 2
    store.check()
    store.close()


def test_slabs_of_other_keys_are_trimmed_beside_ours(slab_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # Whoever lacks the key can tell which rows are used, and cut the unused end off.
    caplog.set_level(logging.WARNING)
    size_before = slab_path.stat().st_size
    neighbour = open_store(slab_path.parent, OTHER, SIZE, fingerprint=b"neighbour".ljust(32, b"."))
    assert slab_path.stat().st_size < size_before
    neighbour.close()
    assert check_slab(slab_path, key=KEY).num_blocks == len(KEYS)
    with pytest.raises(ConfigError, match="encrypted with key"):
        open_store(slab_path.parent, OTHER)
