"""A slab takes disk space a step at a time as it is filled, finds it again, and lives with that on a full disk."""

import errno
import logging
import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from slab_rig import get, hash_of, put, verify

from kvtier.tiers.file import slab_file, slab_writer
from kvtier.tiers.file.file_io import FileIO
from kvtier.tiers.file.store import FileStore
from kvtier.tiers.tier import Outcome

SLOT, SIZE, STEP = 8192, 4 << 20, 512 << 10
MODEL = b"model".ljust(32, b".")


class FullDisk(FileIO):
    """While `is_full`, the disk has no space for what has none yet."""

    def __init__(self) -> None:
        self.is_full = False
        self.asked = 0

    def allocate(self, fd: int, offset: int, length: int) -> None:
        self.asked += 1
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().allocate(fd, offset, length)


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slab_file, "STEP_BYTES", STEP)
    monkeypatch.setattr(slab_writer, "STEP_BYTES", STEP)


def opened(directory: Path, io: FileIO | None = None, size: int = SIZE) -> FileStore:
    return FileStore.open(directory, MODEL, slot_bytes=SLOT, block_size=4, size=size, mode="buffered", io=io)


def on_disk(store: FileStore) -> int:
    """Bytes of the disk that the slab takes."""
    return store.path.stat().st_blocks * 512


def held(store: FileStore, keys: Sequence[int]) -> list[int]:
    return [key for key, is_held in zip(keys, store.holds([hash_of(key) for key in keys]), strict=True) if is_held]


def test_a_slab_grows_as_it_is_filled_and_goes_on_where_it_was(disk_dir: Path) -> None:
    store = opened(disk_dir)
    num_slots, least = store.superblock.num_slots, on_disk(store)
    assert store.path.stat().st_size > SIZE * 9 // 10  # the budget counts what it may become
    assert STEP <= least < 2 * STEP
    grown = [least]
    for first in range(0, num_slots // 2, 32):
        assert put(store, range(first, first + 32)) == [Outcome.OK] * 32
        grown.append(on_disk(store))
    steps = [after - before for before, after in pairwise(grown) if after != before]
    assert len(steps) >= 2
    assert all(STEP // 2 <= step <= STEP + 4096 for step in steps), steps
    assert grown[-1] < SIZE * 3 // 4
    filled = range(first + 32)
    store.close()

    # The next process finds all of it, stores on in what there is and takes more.
    store = opened(disk_dir)
    assert on_disk(store) == grown[-1]
    assert get(store, filled) == [Outcome.OK] * len(filled)
    rest = range(len(filled), num_slots)
    assert put(store, rest) == [Outcome.OK] * len(rest)
    assert get(store, range(num_slots)) == [Outcome.OK] * num_slots
    assert verify(store).is_clean
    store.close()

    # Made smaller, its blocks move into places that never had space; made larger, it takes none before it is filled.
    store = opened(disk_dir, size=SIZE // 2)
    kept = held(store, range(num_slots))
    assert get(store, kept) == [Outcome.OK] * len(kept)
    store.close()
    store = opened(disk_dir, size=4 * SIZE)
    assert on_disk(store) < SIZE
    assert get(store, kept) == [Outcome.OK] * len(kept)
    store.check()
    store.close()


def test_a_full_disk_costs_old_blocks_and_the_slab_grows_again_once_there_is_room(
    disk_dir: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slab_writer, "_RETRY", 0.0)
    io = FullDisk()
    store = opened(disk_dir, io)
    assert put(store, range(80)) == [Outcome.OK] * 80
    io.is_full = True
    before = on_disk(store)
    with caplog.at_level(logging.WARNING):
        for first in range(1000, 1640, 32):  # far more than there is space for
            keys = range(first, first + 32)
            assert put(store, keys) == [Outcome.OK] * 32
            assert get(store, keys) == [Outcome.OK] * 32
            store.check()
    assert on_disk(store) == before
    assert [line.partition(": ")[2].partition(",")[0] for line in caplog.messages] == ["the disk is full"]
    assert store.stats()["evicted"] > 500
    assert store.stats().get("write_full", 0) == 0
    # Also after a restart, and after a reset.
    store.close()
    store = opened(disk_dir, io)
    last = held(store, range(1000, 1640))
    assert len(last) > 32
    assert get(store, last) == [Outcome.OK] * len(last)
    store.reset()
    assert put(store, range(8)) == [Outcome.OK] * 8
    # Room again: it takes what it lacks, up to its size.
    io.is_full = False
    num_slots = store.superblock.num_slots
    assert put(store, range(num_slots)) == [Outcome.OK] * num_slots
    assert get(store, range(num_slots)) == [Outcome.OK] * num_slots
    assert on_disk(store) > SIZE * 9 // 10
    store.check()
    assert verify(store).is_clean
    store.close()


def test_a_disk_that_refuses_is_an_error_not_a_full_one(disk_dir: Path) -> None:
    class Broken(FullDisk):
        def allocate(self, fd: int, offset: int, length: int) -> None:
            if self.is_full:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            super().allocate(fd, offset, length)

    io = Broken()
    store = opened(disk_dir, io)
    io.is_full = True
    assert put(store, range(8))[0] is Outcome.IO_ERROR
    io.is_full = False
    assert put(store, range(8)) == [Outcome.OK] * 8
    store.check()
    store.close()
