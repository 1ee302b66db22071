"""Entries that went bad in a large slab, where opening compares the newest's checksums only: a miss when used."""

import errno
import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from doubles import wait_until
from extent import brief
from slab_rig import BLOCK_SIZE, SLOT, get, hash_of, put, record_of, verify

from kvtier.tiers.file import slab, slab_rows
from kvtier.tiers.file.file_io import FileIO, _is_in_memory, peeking
from kvtier.tiers.file.store import FileStore
from kvtier.tiers.tier import Outcome

FINGERPRINT = b"late checks".ljust(32, b".")
KEYS = range(40)


@pytest.fixture(autouse=True)
def _opening_compares_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the slab were two thousand times as large."""
    monkeypatch.setattr(slab_rows, "NUM_VERIFIED", 2)


@pytest.fixture
def slab_path(tmp_path: Path, key: bytes | None) -> Path:
    store = open_store(tmp_path, key)
    assert put(store, KEYS) == [Outcome.OK] * len(KEYS)
    store.close()
    return store.path


def open_store(directory: Path, key: bytes | None, io: FileIO | None = None) -> FileStore:
    return FileStore.open(directory, FINGERPRINT, slot_bytes=SLOT, block_size=BLOCK_SIZE, size=1 << 20,
                          mode="buffered", key=key, io=io)  # fmt: skip


@pytest.fixture
def table(slab_path: Path) -> Iterator[int]:
    fd = os.open(slab_path, os.O_RDWR)
    yield fd
    os.close(fd)


def superblock_of(fd: int) -> slab.Superblock:
    return slab.decode(os.pread(fd, slab.HEADER_BYTES, 0), "the slab")


def row_of(fd: int, slot: int) -> np.ndarray:
    superblock = superblock_of(fd)
    row = os.pread(fd, superblock.entry_bytes, superblock.row_offset(slot))
    return np.frombuffer(row, superblock.row_dtype).copy()


def write_row(fd: int, slot: int, row: np.ndarray) -> None:
    os.pwrite(fd, slab.byte_view(row), superblock_of(fd).row_offset(slot))


def test_any_bit_of_an_old_entry_costs_its_block_alone(slab_path: Path, key: bytes | None, table: int) -> None:
    rng = random.Random(1)
    size = superblock_of(table).entry_bytes
    for bit in rng.sample(range(8 * size), brief(30, 150)):
        slot = rng.randrange(2, 30)
        good = row_of(table, slot)
        bad = good.copy()
        slab.byte_view(bad)[bit // 8] ^= 1 << bit % 8
        write_row(table, slot, bad)
        store = open_store(slab_path.parent, key)
        outcomes = get(store, KEYS)
        assert outcomes[slot] in (Outcome.CHECKSUM, Outcome.ABSENT)
        assert [outcomes[other] for other in KEYS if other != slot] == [Outcome.OK] * (len(KEYS) - 1)
        assert get(store, [slot]) == [Outcome.ABSENT]  # not promised again
        assert store.children(hash_of(slot - 1), 8) == []
        store.check()
        store.close()
        write_row(table, slot, good)
    store = open_store(slab_path.parent, key)
    assert get(store, KEYS) == [Outcome.OK] * len(KEYS)
    store.close()


def test_a_block_is_stored_anew_over_an_entry_that_is_not_whole(slab_path: Path, key: bytes | None, table: int) -> None:
    row = row_of(table, 3)
    row["num_tokens"] -= 1
    write_row(table, 3, row)
    store = open_store(slab_path.parent, key)
    assert put(store, [3]) == [Outcome.OK]
    assert get(store, KEYS) == [Outcome.OK] * len(KEYS)
    assert verify(store).is_clean
    store.check()
    store.close()


def test_events_tell_its_block_without_tokens(slab_path: Path, key: bytes | None, table: int) -> None:
    row = row_of(table, 3)
    row["num_tokens"] -= 1
    write_row(table, 3, row)
    store = open_store(slab_path.parent, key)
    store.change_feed.listen()
    told = store.change_feed.take(100).stored
    assert [record if record.tokens else None for record in told] == [
        record_of(number) if number != 3 else None for number in KEYS
    ]
    assert [(record.chain_hash, record.parent) for record in told] == [(hash_of(n), record_of(n).parent) for n in KEYS]
    assert get(store, [3]) == [Outcome.CHECKSUM]
    assert store.change_feed.take(100).gone == [hash_of(3)]
    store.check()
    store.close()


def test_of_twins_the_newest_whole_one_counts(slab_path: Path, key: bytes | None, table: int) -> None:
    """Three entries of one name, as crashes may leave them; the newest of the three is torn."""
    superblock = superblock_of(table)
    for slot, seq in ((50, 12), (51, 14)):
        row = row_of(table, 4)
        row["slot"], row["seq"] = slot, seq
        slab.seal_rows(row, superblock)
        if slot == 51:
            row["checksum"] ^= 1
        write_row(table, slot, row)
        os.pwrite(table, os.pread(table, SLOT, superblock.payload_offset(4)), superblock.payload_offset(slot))
    store = open_store(slab_path.parent, key)
    assert store._blocks.index.find_one(hash_of(4)) == 50
    assert not row_of(table, 4)["state"].any()  # blanked
    assert get(store, KEYS) == [Outcome.OK] * len(KEYS)
    assert store.num_recovered == len(KEYS)
    store.check()
    store.close()


def test_sequence_numbers_go_on_behind_the_newest_whole_entry(slab_path: Path, key: bytes | None, table: int) -> None:
    for slot in (5, 9, 20, 21):
        row = row_of(table, slot)
        row["seq"] = (1 << 63) - 1 - slot
        write_row(table, slot, row)
    store = open_store(slab_path.parent, key)
    assert store._writer.next_seq == len(KEYS) + 1
    assert store.holds([hash_of(n) for n in (5, 9, 20, 21)]) == [False] * 4
    store.close()


def test_an_uncached_entry_is_not_awaited(slab_path: Path, key: bytes | None, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = hash_of(10)

    def is_elsewhere(self: FileIO, fd: int, buffers: list[memoryview], offsets: list[int]) -> list[bool]:
        return [False] * len(buffers)

    with monkeypatch.context() as patch:
        patch.setattr(FileIO, "peek", is_elsewhere)
        store = open_store(slab_path.parent, key)
        assert store.children(parent, 8) == []
        store.change_feed.listen()
        told = store.change_feed.take(100).stored
        assert [(record.chain_hash, record.tokens) for record in told] == [(hash_of(n), b"") for n in KEYS]
        assert get(store, KEYS) == [Outcome.OK] * len(KEYS)
        store.close()
    store = open_store(slab_path.parent, key)
    assert [child.chain_hash for child in store.children(parent, 8)] == [hash_of(11)]
    store.check()
    store.close()
    assert store.children(parent, 8) == []


def test_peeking_brings_what_is_cached_and_else_sends_for_it(slab_path: Path, table: int) -> None:
    buffer = memoryview(bytearray(4096))
    io, offset = FileIO(), superblock_of(table).table_offsets[0]
    expected = os.pread(table, 4096, offset)
    assert io.peek(table, [buffer], [offset]) == [True]
    assert buffer == expected
    os.fsync(table)
    os.posix_fadvise(table, 0, 0, os.POSIX_FADV_DONTNEED)
    for _ in range(1000):  # sent for: sooner or later it is there
        if io.peek(table, [buffer], [offset]) == [True]:
            break
    assert buffer == expected


def test_a_file_system_that_may_hang_is_never_peeked_into(table: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # FUSE, overlayfs and NFS know no read that does not wait; one in memory never waits.
    def refuses(*_: object) -> int:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", refuses)
        patch.setattr("kvtier.tiers.file.file_io._is_in_memory", lambda fd: False)
        read = peeking(FileIO(), table)
        assert read(table, [memoryview(bytearray(4096))], [0]) == [False]
        patch.setattr("kvtier.tiers.file.file_io._is_in_memory", lambda fd: True)
        memory = peeking(FileIO(), table)
    buffer, offset = memoryview(bytearray(4096)), superblock_of(table).table_offsets[0]
    assert memory(table, [buffer], [offset]) == [True]
    assert buffer == os.pread(table, 4096, offset)
    with tempfile.TemporaryFile(dir="/dev/shm") as in_memory:
        assert _is_in_memory(in_memory.fileno())
    with open("/proc/self/stat") as elsewhere:
        assert not _is_in_memory(elsewhere.fileno())


def test_what_a_peek_brings_in_part_is_sent_for(slab_path: Path, table: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a row behind a cached page would be in no answer until somebody happens to read it."""
    buffer, sent_for = memoryview(bytearray(8192)), list[tuple[int, int]]()
    preadv, offset = os.preadv, superblock_of(table).table_offsets[0]
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", lambda fd, buffers, at, flags: preadv(fd, [buffers[0][:4096]], at))
        patch.setattr(os, "posix_fadvise", lambda fd, at, length, advice: sent_for.append((at, length)))
        assert FileIO().peek(table, [buffer], [offset]) == [False]
        wait_until(lambda: sent_for == [(offset + 4096, 4096)])
