"""Scattered reads in flight together: the same bytes as one by one; what fails there is read once more without."""

import ctypes
import errno
import os
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from doubles import FakeClock
from slab_rig import ended, get, hash_of, put, record_of

from kvtier.tiers.file import file_io
from kvtier.tiers.file.file_io import FileIO, ReadQueue, address, writable_address
from kvtier.tiers.file.store import FileStore
from kvtier.tiers.tier import BlockRecord, Outcome

SLOT = 8192
OpenStore = Callable[..., FileStore]


@pytest.fixture
def open_store(disk_dir: Path, way: str, at_end: ExitStack) -> OpenStore:
    """Opened for direct I/O, on a disk; every story is told of the Python way and of its twin."""

    def factory(io: FileIO | None = None) -> FileStore:
        store = FileStore.open(disk_dir, b"queue".ljust(32, b"."), slot_bytes=SLOT, block_size=4, size=4 << 20,
                               mode="direct", io=io)  # fmt: skip
        return ended(store, at_end)

    return factory


@pytest.fixture
def queue() -> Iterator[ReadQueue]:
    try:
        made = ReadQueue(4)
    except OSError as error:
        pytest.skip(f"this kernel has no asynchronous I/O for us: {error}")
    yield made
    made.close()


@pytest.fixture
def file(disk_dir: Path) -> Iterator[int]:
    path = disk_dir / "file"
    path.write_bytes(random.Random(1).randbytes(64 * 4096))
    fd = os.open(path, os.O_RDONLY)
    yield fd
    os.close(fd)


def aligned(num_slots: int, slot_bytes: int = SLOT) -> list[memoryview]:
    memory = np.zeros(num_slots * slot_bytes + 4096, np.uint8)
    start = -address(memoryview(memory)) % 4096
    return [memoryview(memory)[start + i * slot_bytes : start + (i + 1) * slot_bytes] for i in range(num_slots)]


def every_other(store: FileStore, count: int = 60) -> list[int]:
    """Keys of blocks that are held, none the next one's neighbour, in any order."""
    put(store, range(2 * count))
    keys = list(range(0, 2 * count, 2))
    random.Random(2).shuffle(keys)
    return keys


def change_what_came(monkeypatch: pytest.MonkeyPatch, change: Callable[[int, int], int]) -> None:
    """Each read's number and what it brought go through `change`, either way."""
    told, read_blocks = ReadQueue._wait, ReadQueue.read_blocks

    def changed(self: ReadQueue, least: int) -> list[tuple[int, int]]:
        return [(number, change(number, moved)) for number, moved in told(self, least)]

    def changed_blocks(self: ReadQueue, *given: Any) -> list[BlockRecord | None] | None:
        if (came := read_blocks(self, *given)) is None:
            return None
        return [record if change(number, SLOT) == SLOT else None for number, record in enumerate(came)]

    monkeypatch.setattr(ReadQueue, "_wait", changed)
    monkeypatch.setattr(ReadQueue, "read_blocks", changed_blocks)


def iovecs_of(buffers: list[memoryview]) -> np.ndarray:
    return np.array([(writable_address(buffer), buffer.nbytes) for buffer in buffers], np.uint64)


def test_every_stretch_comes_with_the_bytes_that_preadv_brings(queue: ReadQueue, file: int) -> None:
    rng = random.Random(3)
    for _ in range(20):
        counts = [rng.randrange(1, 4) for _ in range(rng.randrange(1, 30))]
        offsets = [rng.randrange(60) * 4096 for _ in counts]
        buffers = [memoryview(bytearray(1024)) for _ in range(sum(counts))]
        moved = dict(queue.read(file, offsets, iovecs_of(buffers), counts))
        assert moved == {number: 1024 * count for number, count in enumerate(counts)}
        first = 0
        for offset, count in zip(offsets, counts, strict=True):
            assert b"".join(buffers[first : first + count]) == os.pread(file, 1024 * count, offset)
            first += count


def test_the_end_of_the_file_and_a_bad_descriptor_are_told(queue: ReadQueue, file: int) -> None:
    buffers = [memoryview(bytearray(4096)) for _ in range(3)]
    moved = dict(queue.read(file, [0, 63 * 4096 + 4000, 1 << 30], iovecs_of(buffers), [1, 1, 1]))
    assert moved == {0: 4096, 1: 96, 2: 0}
    assert dict(queue.read(1 << 20, [0, 1], iovecs_of(buffers), [1, 1])) == {0: -errno.EBADF, 1: -errno.EBADF}


def test_who_stops_early_waits_for_what_is_in_flight(queue: ReadQueue, file: int) -> None:
    for _ in range(50):
        buffers = [memoryview(bytearray(4096)) for _ in range(8)]
        reads = queue.read(file, [0] * 8, iovecs_of(buffers), [1] * 8)
        next(reads)
        reads.close()
        left = [memoryview(bytearray(4096)) for _ in range(2)]
        assert len(list(queue.read(file, [4096, 8192], iovecs_of(left), [1, 1]))) == 2  # nothing of the first is left


def test_scattered_blocks_are_in_flight_together_and_verified(open_store: OpenStore, queue: ReadQueue) -> None:
    store = open_store()
    keys = every_other(store)
    assert get(store, keys, aligned(len(keys))) == [Outcome.OK] * len(keys)
    assert len(store._payload._queues) == 1  # it went through one, which waits for the next call
    damaged = store._blocks.index.find_one(hash_of(keys[7]))
    with store.path.open("r+b") as slab_file:
        slab_file.seek(store.superblock.payload_offset(damaged) + 5000)
        slab_file.write(b"rot")
    outcomes = get(store, keys, aligned(len(keys)))
    assert outcomes == [Outcome.CHECKSUM if i == 7 else Outcome.OK for i in range(len(keys))]
    # Host memory that is not aligned goes through a bounce buffer.
    unaligned = [memoryview(bytearray(SLOT + 1))[1:] for _ in keys]
    assert get(store, keys, unaligned) == [Outcome.ABSENT if i == 7 else Outcome.OK for i in range(len(keys))]


@pytest.mark.parametrize("bad", [-errno.EIO, -errno.EAGAIN, 0, 4096])
def test_what_the_queue_does_not_bring_whole_is_read_without_it(
    open_store: OpenStore, queue: ReadQueue, monkeypatch: pytest.MonkeyPatch, bad: int
) -> None:
    store = open_store()
    keys = every_other(store)
    change_what_came(monkeypatch, lambda number, moved: moved if number % 3 else bad)
    assert get(store, keys, aligned(len(keys))) == [Outcome.OK] * len(keys)


def test_a_kernel_that_loses_the_queue_costs_no_block(
    open_store: OpenStore, queue: ReadQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    keys = every_other(store)
    assert get(store, keys, aligned(len(keys))) == [Outcome.OK] * len(keys)
    store._payload._queues[0]._queue.value += 4096  # as in a forked child: the kernel knows no such queue
    assert get(store, keys, aligned(len(keys))) == [Outcome.OK] * len(keys)
    store._payload._queues.clear()


def test_a_kernel_that_refuses_a_queue_is_asked_again_later(
    open_store: OpenStore, queue: ReadQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_io, "time", SimpleNamespace(monotonic=(clock := FakeClock())))
    store = open_store()
    keys = every_other(store)
    with monkeypatch.context() as patch:
        patch.setattr(FileIO, "queue", refuses_a_queue)
        for _ in range(3):
            assert get(store, keys, aligned(len(keys))) == [Outcome.OK] * len(keys)
        assert store.stats()["queue_refused"] == 1  # not asked for every batch
        clock.advance(11)
        get(store, keys, aligned(len(keys)))
        assert store.stats()["queue_refused"] == 2
    get(store, keys, aligned(len(keys)))
    assert not store._payload._queues
    clock.advance(11)
    assert get(store, keys, aligned(len(keys))) == [Outcome.OK] * len(keys)
    assert len(store._payload._queues) == 1
    assert store.stats()["queue_refused"] == 2


def refuses_a_queue(self: FileIO, depth: int) -> ReadQueue:
    raise OSError(errno.EAGAIN, "too many of them")


def test_without_a_queue_blocks_are_read_one_by_one(open_store: OpenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_io, "_CALLS", {})
    with pytest.raises(OSError, match="not implemented"):
        ReadQueue(4)
    store = open_store()
    keys = every_other(store)
    assert get(store, keys, aligned(len(keys))) == [Outcome.OK] * len(keys)
    assert not store._payload._queues


def test_a_process_of_32_bits_has_no_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel may be of 64 bits and says so; call 206 is another one there."""
    monkeypatch.setattr(ctypes, "sizeof", lambda kind: 4)
    with pytest.raises(OSError, match="not implemented"):
        ReadQueue(4)


def test_who_replaces_preadv_sees_every_read(open_store: OpenStore) -> None:
    class Counting(FileIO):
        num_read = 0

        def preadv(self, fd: int, buffers, offset: int) -> int:  # type: ignore[no-untyped-def]
            self.num_read += 1
            return super().preadv(fd, buffers, offset)

    io = Counting()
    assert io.queue(4) is None
    store = open_store(io)
    keys = every_other(store)
    before = io.num_read
    assert get(store, keys, aligned(len(keys))) == [Outcome.OK] * len(keys)
    assert io.num_read == before + 2 * len(keys)  # entry and payload of each


def test_queued_and_plain_reads_say_the_same(open_store: OpenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Differential: any batch, with runs, gaps, repeats and blocks that are not there."""
    rng = random.Random(4)
    store = open_store()
    put(store, range(150))
    for _ in range(30):
        keys = [rng.randrange(200) for _ in range(rng.randrange(1, 40))]
        keys += range(rng.randrange(100), 110)
        names = [hash_of(key) for key in keys]
        answers = []
        for may_queue in (True, False):
            monkeypatch.setattr(store._payload, "_may_queue", may_queue)
            buffers = aligned(len(keys))
            results = store.read(names, buffers)
            there = [isinstance(result, BlockRecord) for result in results]
            answers.append((results, [bytes(b) for b, is_there in zip(buffers, there, strict=True) if is_there]))
        assert answers[0] == answers[1]
        assert answers[0][0] == [record_of(key, SLOT) if key < 150 else Outcome.ABSENT for key in keys]


def test_no_other_call_gets_a_queue_with_reads_in_flight(
    open_store: OpenStore, queue: ReadQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who stops early waits for them first: another call would take their ends for its own."""
    store = open_store()
    keys = every_other(store)
    story: list[str] = []
    read = ReadQueue.read

    def noted(self: ReadQueue, *given: Any) -> Iterator[tuple[int, int]]:
        try:
            yield from read(self, *given)
        finally:
            story.append("nothing in flight")

    class Queues(list[ReadQueue]):
        def append(self, made: ReadQueue) -> None:
            story.append("given back")
            super().append(made)

    monkeypatch.setattr(ReadQueue, "read", noted)
    payload = store._payload
    payload._queues = Queues()
    offsets = [store.superblock.payload_offset(slot) for slot in range(0, 2 * len(keys), 2)]
    runs = payload.read_runs(offsets, aligned(len(keys)), lambda: None)
    next(runs)
    runs.close()
    assert story == ["nothing in flight", "given back"]
    payload._queues = [*payload._queues]
    assert get(store, keys, aligned(len(keys))) == [Outcome.OK] * len(keys)
