"""Scattered reads in flight together: the same bytes as one by one; what fails there is read once more without."""

import errno
import random
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from doubles import FakeClock
from slab_rig import ended, get, hash_of, put, record_of

from kvtier.tiers.file import file_io
from kvtier.tiers.file.file_io import FileIO, ReadQueue, address
from kvtier.tiers.file.store import FileStore
from kvtier.tiers.tier import BlockRecord, Outcome

SLOT = 8192
OpenStore = Callable[..., FileStore]


@pytest.fixture(params=[None, bytes(32)], ids=["clear", "sealed"])
def open_store(request: pytest.FixtureRequest, disk_dir: Path, at_end: ExitStack) -> OpenStore:
    """Opened for direct I/O, on a disk."""

    def factory(io: FileIO | None = None) -> FileStore:
        store = FileStore.open(disk_dir, b"queue".ljust(32, b"."), slot_bytes=SLOT, block_size=4, size=4 << 20,
                               mode="direct", key=request.param, io=io)  # fmt: skip
        return ended(store, at_end)

    return factory


@pytest.fixture
def _queues() -> None:
    if (compiled := file_io.compiled_reads()) is None:
        pytest.skip("not built: `make compiled`")
    try:
        ReadQueue(4, compiled).close()
    except OSError as error:
        pytest.skip(f"this kernel has no asynchronous I/O for us: {error}")


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


@pytest.mark.usefixtures("_queues")
def test_scattered_blocks_are_in_flight_together_and_verified(open_store: OpenStore) -> None:
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


@pytest.mark.usefixtures("_queues")
def test_what_the_queue_does_not_bring_whole_is_read_without_it(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    keys = every_other(store)
    for verb in ("read_blocks", "read_payloads"):
        whole = getattr(ReadQueue, verb)

        def torn(queue: ReadQueue, *given: Any, whole: Callable[..., list[Any]] = whole) -> list[Any]:
            return [None if number % 3 == 0 else each for number, each in enumerate(whole(queue, *given))]

        monkeypatch.setattr(ReadQueue, verb, torn)
    assert get(store, keys, aligned(len(keys))) == [Outcome.OK] * len(keys)


@pytest.mark.usefixtures("_queues")
def test_a_kernel_that_loses_the_queue_costs_no_block(open_store: OpenStore) -> None:
    store = open_store()
    keys = every_other(store)
    assert get(store, keys, aligned(len(keys))) == [Outcome.OK] * len(keys)
    store._payload._queues[0]._queue += 4096  # as in a forked child: the kernel knows no such queue
    assert get(store, keys, aligned(len(keys))) == [Outcome.OK] * len(keys)


@pytest.mark.usefixtures("_queues")
def test_a_kernel_that_refuses_a_queue_is_asked_again_later(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
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


def test_without_the_extension_module_blocks_are_read_one_by_one(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVTIER_COMPILED", "off")
    store = open_store()
    keys = every_other(store)
    assert get(store, keys, aligned(len(keys))) == [Outcome.OK] * len(keys)
    assert not store._payload._queues


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
