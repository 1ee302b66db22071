"""Slabs of one directory share its budget while open: who comes gets its share, who has more gives up its tail."""

import errno
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from at_once import beside
from doubles import wait_until
from extent import brief
from fault_rig import DyingIO, FaultyIO, killed
from slab_rig import BLOCK_SIZE, SLOT, ended, get, hash_of, put, verify

from kvtier.tiers.errors import StoreLocked, TierUnavailable
from kvtier.tiers.file import slab
from kvtier.tiers.file import store as file_store
from kvtier.tiers.file.file_io import FileIO
from kvtier.tiers.file.slab_check import check_slab
from kvtier.tiers.file.store import FileStore
from kvtier.tiers.tier import Outcome

SIZE = 1 << 20
MODELS = [f"model {n}".encode().ljust(32, b".") for n in range(5)]
OpenStore = Callable[..., FileStore]
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


def fill(store: FileStore) -> int:
    """Every slot holds a block; returns how many those are."""
    num_slots = store.superblock.num_slots
    for begin in range(0, num_slots, 16):
        assert set(put(store, range(begin, min(begin + 16, num_slots)))) == {Outcome.OK}
    return num_slots


def open_in(directory: Path, model: int = 0, size: int = SIZE, io: FileIO | None = None) -> FileStore:
    return FileStore.open(
        directory, MODELS[model], slot_bytes=SLOT, block_size=BLOCK_SIZE, size=size, mode="buffered", io=io
    )


def taken(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("*.slab"))


@pytest.fixture
def open_store(tmp_path: Path, at_end: ExitStack) -> OpenStore:
    """`open_store(model, …)`; at the end each store's laws hold, and it is closed."""
    return lambda model=0, size=SIZE, io=None: ended(open_in(tmp_path, model, size, io), at_end)


def test_models_that_come_later_get_their_share_of_one_that_is_open_and_full(
    open_store: OpenStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # The first has everything, and uses it.
    first = open_store(0)
    had = fill(first)
    assert first.superblock.file_bytes > SIZE * 9 // 10
    # Each that comes has an equal part at once; the bound holds; those who were there have at least theirs.
    stores = [first]
    for model in (1, 2, 3):
        stores.append(open_store(model))
        share = SIZE // len(stores)
        per_extent = max(store.superblock.extent_bytes for store in stores)
        assert [store.path.name for store in stores if store.superblock.file_bytes < share - 2 * per_extent] == []
        assert taken(tmp_path) <= SIZE
        fill(stores[-1])
    # What is left of the first is served; what lay in its tail is a miss, not a failure; it stores anew.
    left = first.superblock.num_slots
    assert left < had
    assert get(first, range(had)) == [Outcome.OK] * left + [Outcome.ABSENT] * (had - left)
    assert put(first, range(5000, 5016)) == [Outcome.OK] * 16
    assert get(first, range(5000, 5016)) == [Outcome.OK] * 16
    assert first.stats()["slots"] == left
    assert "for another model's slab" in caplog.text
    for store in stores:
        assert verify(store).is_clean
        assert store.probe("read")
        store.check()
        store.close()
    # Started anew, in any order, nobody takes anything from anybody.
    held = {store.path.name: store.stats()["slots_ready"] for store in stores}
    for model in (2, 0, 3, 1):
        store = open_store(model)
        assert store.num_recovered == held[store.path.name]
    assert taken(tmp_path) <= SIZE


def test_readers_and_writers_of_a_slab_that_gives_up_its_tail_notice_only_misses(
    open_store: OpenStore, tmp_path: Path
) -> None:
    first = open_store(0)
    had = fill(first)
    over = threading.Event()
    # A miss, an eviction, a dropped store: what any eviction causes. No I/O error, no wrong checksum.
    allowed = {Outcome.OK, Outcome.ABSENT, Outcome.EVICTED, Outcome.FULL, Outcome.PARENT_FAILED, Outcome.EPOCH}

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        while not over.is_set():
            begin = int(rng.integers(0, had + 40))
            keys = range(begin, begin + 8)
            assert set(put(first, keys) if rng.random() < 0.4 else get(first, keys)) <= allowed
            if rng.random() < 0.1:
                first.discard([hash_of(begin)])

    with beside(*(partial(work, seed) for seed in range(4))):
        for model in (1, 2, 3, 4):
            assert open_store(model).superblock.file_bytes >= SIZE // (model + 1) - (64 << 10)
            verify(first)
            time.sleep(0.05)
        first.reset()
        time.sleep(0.05)
        over.set()
    assert taken(tmp_path) <= SIZE
    first.check()
    assert verify(first).is_clean
    held = first.stats()["slots_ready"]
    first.close()
    assert open_store(0).num_recovered == held


def test_a_read_under_way_in_the_tail_ends_well_before_the_tail_goes(open_store: OpenStore) -> None:
    io = FaultyIO()
    first = open_store(0, io=io)
    had = fill(first)
    size = first.path.stat().st_size
    # A read of the last blocks hangs.
    io.gate.clear()
    outcomes: list[Outcome] = []
    reader = threading.Thread(target=lambda: outcomes.extend(get(first, range(had - 4, had))))
    reader.start()
    gives = threading.Thread(target=lambda: first._shrinker.shrink(SIZE // 2))
    gives.start()
    # The blocks are promised to nobody any more, and their bytes are still there.
    wait_until(lambda: first.lookup([hash_of(had - 1)]) == 0)
    assert first.path.stat().st_size == size
    io.gate.set()
    reader.join(60)
    gives.join(60)
    assert outcomes == [Outcome.OK] * 4
    assert first.path.stat().st_size <= SIZE // 2


def test_a_write_into_the_tail_that_is_overtaken_says_so_and_is_not_found_later(open_store: OpenStore) -> None:
    io = FaultyIO()
    first = open_store(0, io=io)
    had = first.superblock.num_slots
    last = range(had - 4, had)
    for begin in range(0, had - 4, 4):
        put(first, range(begin, begin + 4))
    io.gate.clear()
    outcomes: list[Outcome] = []
    writer = threading.Thread(target=lambda: outcomes.extend(put(first, last)))
    writer.start()
    wait_until(lambda: first.stats()["slots_unused"] == 0)  # it has its slots, the last there are
    gives = threading.Thread(target=lambda: first._shrinker.shrink(SIZE // 2))
    gives.start()
    wait_until(lambda: first.lookup([hash_of(had - 5)]) == 0)
    io.gate.set()
    writer.join(60)
    gives.join(60)
    assert outcomes == [Outcome.EVICTED] * 4
    assert put(first, last) == [Outcome.OK] * 4  # it has a place in what is left
    first.close()
    again = open_store(0, size=SIZE // 2)
    assert get(again, last) == [Outcome.OK] * 4
    assert get(again, [had - 5]) == [Outcome.ABSENT]


def test_a_store_closed_while_it_waits_for_a_hung_read_closes_at_once_and_loses_nothing_of_its_head(
    open_store: OpenStore,
) -> None:
    io = FaultyIO()
    first = open_store(0, io=io)
    had = fill(first)
    io.gate.clear()
    reader = threading.Thread(target=get, args=(first, range(had - 4, had)))
    reader.start()
    answers: list[bool] = []
    gives = threading.Thread(target=lambda: answers.append(first._shrinker.shrink(SIZE // 2)))
    gives.start()
    wait_until(lambda: first.lookup([hash_of(had - 1)]) == 0)
    first.close()
    gives.join(60)
    assert answers == [False]
    io.gate.set()
    reader.join(60)
    again = open_store(0)  # the file was released by the last reader; nothing was cut
    assert get(again, range(had)) == [Outcome.OK] * had


def test_a_disk_that_refuses_the_cut_costs_the_tail_and_nothing_else(
    open_store: OpenStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_store, "_RETRY_SECONDS", 0.05)
    for name in ("pwritev", "sync", "truncate"):
        io = FaultyIO(errno.EIO)
        first = open_store(0, io=io)
        first.reset()
        fill(first)
        io.fails = lambda called, count, name=name: called == name
        with pytest.raises(OSError, match="Input/output"):
            first._shrinker.shrink(SIZE // 2)
        io.fails = lambda called, count: False
        left = first.superblock.num_slots
        first.check()
        assert get(first, range(left)) == [Outcome.OK] * left
        assert put(first, range(5000, 5008)) == [Outcome.OK] * 8
        assert get(first, range(5000, 5008)) == [Outcome.OK] * 8
        # As soon as the disk writes again, the cut is finished: the breaker's probe finds its slab, the space is free.
        wait_until(lambda path=first.path: path.stat().st_size <= SIZE // 2)
        assert first.probe("read")
        assert first.probe("write")
        first.close()
        again = open_store(0)
        assert get(again, range(5000, 5008)) == [Outcome.OK] * 8
        get(again, range(left * 2))
        again.check()
        again.close()


def test_a_file_that_a_kill_left_longer_than_its_slab_counts_until_it_is_really_cut(
    open_store: OpenStore, tmp_path: Path
) -> None:
    # As a kill between allocation and superblock of a slab that grows leaves it, or between superblock and cut.
    first = open_store(0, size=SIZE // 2)
    fill(first)
    first.close()
    whole = first.path.stat().st_size
    os.truncate(first.path, SIZE * 3 // 4)
    second = open_store(1)
    fill(second)
    assert taken(tmp_path) <= SIZE
    assert first.path.stat().st_size <= whole


@pytest.mark.parametrize("when", ["half", *brief([], ["before", "after"])])
def test_killed_at_every_write_of_a_cut(tmp_path: Path, when: str) -> None:
    template = tmp_path / "template"
    store = open_in(template)
    had = fill(store)
    store.close()
    n = 0
    while True:
        n += 1
        directory = tmp_path / str(n)
        shutil.copytree(template, directory)

        def cut(io: FileIO, directory: Path = directory) -> None:
            store = open_in(directory, io=io)
            io.armed = True  # type: ignore[attr-defined]
            assert store._shrinker.shrink(SIZE // 3)

        is_killed = killed(cut, DyingIO(n, when, armed=False))
        # The next start finds a slab of the old size or the new one; the head is whole, the rest whole or a miss.
        store = open_in(directory, size=directory.joinpath(store.path.name).stat().st_size)
        kept = store.superblock.resized(SIZE // 3).num_slots
        assert get(store, range(kept)) == [Outcome.OK] * kept
        assert set(get(store, range(kept, had))) <= {Outcome.OK, Outcome.ABSENT}
        assert put(store, range(5000, 5008)) == [Outcome.OK] * 8
        assert verify(store).is_clean
        store.check()
        store.close()
        shutil.rmtree(directory)
        if not is_killed:
            break
    assert n >= 5  # the rows, both copies of the superblock, the file's length, the request taken back


CHILD = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from test_slab_sharing import fill, get, open_in
store = open_in(Path(sys.argv[1]))
print(fill(store), flush=True)
sys.stdin.readline()
left = store.superblock.num_slots
print(left, *set(get(store, range(left))), flush=True)
store.check()
store.close()
"""


def test_a_slab_open_in_another_process_gives_up_its_tail_too(open_store: OpenStore, tmp_path: Path) -> None:
    paths = [str(Path(__file__).parents[3]), str(Path(__file__).parents[2] / "rigs"), str(Path(__file__).parent)]
    command = [sys.executable, "-c", CHILD, str(tmp_path), *paths]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdin is not None
        assert owner.stdout is not None
        had = int(owner.stdout.readline())
        second = open_store(1)
        assert second.superblock.file_bytes >= SIZE // 2 - (64 << 10)
        assert taken(tmp_path) <= SIZE
        with pytest.raises(StoreLocked):
            open_store(0)
        owner.stdin.write("\n")
        owner.stdin.flush()
        left, *outcomes = owner.stdout.readline().split()
        assert int(left) < had
        assert outcomes == ["ok"]
        assert owner.wait(60) == 0


def test_an_owner_that_does_not_answer_keeps_what_it_has(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvtier.tiers.file.slab_file._ANSWER_SECONDS", 0.5)
    first = open_store(0)
    had = fill(first)
    first._shrinker.stop()  # as an owner that is stopped, or a kvtier that knew no such question
    with pytest.raises(TierUnavailable, match="were requested to shrink for this model's, and have not yet"):
        open_store(1)  # its port tries again; a slab of a few blocks would stay so small until it is opened anew
    assert get(first, range(had)) == [Outcome.OK] * had
    # With more than half of its share left, a slab is made of that, and it is said.
    first._shrinker.shrink(SIZE * 3 // 5)
    caplog.clear()
    second = open_store(1)
    assert SIZE // 4 < second.superblock.file_bytes < SIZE // 2
    assert "other slabs and files keep the rest" in caplog.text


def test_no_tail_goes_for_a_model_whose_share_holds_not_one_block(open_store: OpenStore, tmp_path: Path) -> None:
    first = open_store(0)
    had = fill(first)
    with pytest.raises(TierUnavailable, match="this model's slab takes at least 524KiB"):
        FileStore.open(tmp_path, MODELS[1], slot_bytes=SIZE // 2, block_size=BLOCK_SIZE, size=SIZE, mode="buffered")
    time.sleep(0.5)  # longer than between two looks at whether somebody asks
    assert get(first, range(had)) == [Outcome.OK] * had


def test_rubbish_where_room_is_asked_for_is_no_request(open_store: OpenStore) -> None:
    first = open_store(0)
    had = fill(first)
    fd = os.open(first.path, os.O_RDWR)
    for rubbish in (b"\xff" * 16, (SIZE // 2).to_bytes(8, "little") + bytes(8), os.urandom(16)):
        os.pwrite(fd, rubbish, slab.SHRINK_OFFSET)
        time.sleep(0.3)
    os.close(fd)
    assert get(first, range(had)) == [Outcome.OK] * had


def test_a_closed_slab_above_its_share_is_cut_and_one_long_unused_goes(
    open_store: OpenStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # One model had the whole budget and is closed: a new one leaves it half, the head of its slab.
    first = open_store(0)
    fill(first)
    first.close()
    second = open_store(1)
    assert second.superblock.file_bytes >= SIZE // 2 - (64 << 10)
    fill(second)
    second.close()
    again = open_store(0)
    left = again.superblock.num_slots
    assert again.num_recovered >= left // 2
    assert get(again, range(again.num_recovered)) == [Outcome.OK] * again.num_recovered
    again.close()
    # A third takes the one used longest ago.
    os.utime(first.path, ns=(1, 1))
    open_store(2).close()
    assert not first.path.exists()
    held = check_slab(second.path).num_blocks
    assert held > second.superblock.num_slots // 2
    # One that is there already takes nobody's blocks who was there lately, and those of one unused for a week.
    assert open_store(1).num_recovered == held
    assert taken(tmp_path) <= SIZE


def test_a_budget_that_was_lowered_is_shared_too(open_store: OpenStore, tmp_path: Path) -> None:
    stores = [open_store(model) for model in (0, 1, 2)]
    for store in stores:
        fill(store)
        store.close()
    # Half of it now. Each opens again, with blocks of its own, and in the end the bound holds.
    for model in (0, 1, 2):
        store = open_store(model, size=SIZE // 2)
        assert store.num_recovered > 0
        assert set(get(store, range(200))) == {Outcome.OK, Outcome.ABSENT}
    assert taken(tmp_path) <= SIZE // 2


# A disk that others filled.


class OtherDisk(FileIO):
    """A disk with so many bytes free, whatever ours has."""

    def __init__(self, free: int) -> None:
        self.free = free

    def free_bytes(self, directory: Path) -> int:
        return self.free


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_slab_on_a_full_disk_opens_at_its_present_size_with_one_warning(
    open_store: OpenStore, caplog: pytest.LogCaptureFixture
) -> None:
    first = open_store(0)
    had = fill(first)
    first.close()
    # The same size, no byte free: nothing to say.
    again = open_store(0, io=OtherDisk(0))
    assert get(again, range(had)) == [Outcome.OK] * had
    again.close()
    assert warnings_in(caplog) == []
    # More than fits is asked for: as it is, and one warning with the figures.
    again = open_store(0, size=4 * SIZE, io=OtherDisk(100_000))
    assert again.superblock.num_slots == had
    assert get(again, range(had)) == [Outcome.OK] * had
    again.close()
    (line,) = warnings_in(caplog)
    assert 'of [file] size "4MiB"' in line
    assert "the directory has 97.7 KiB free" in line

    # A quota shows only when the space is asked for.
    class Quota(OtherDisk):
        def allocate(self, fd: int, offset: int, length: int) -> None:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")

    again = open_store(0, size=4 * SIZE, io=Quota(1 << 40))
    assert get(again, range(had)) == [Outcome.OK] * had
    again.close()
    # With room it grows, and every block is kept.
    again = open_store(0, size=4 * SIZE)
    assert again.superblock.num_slots > 3 * had
    assert get(again, range(had)) == [Outcome.OK] * had


def test_a_new_model_on_a_full_disk_runs_without_or_takes_what_is_left(
    open_store: OpenStore, caplog: pytest.LogCaptureFixture
) -> None:
    open_store(0, size=SIZE // 4)  # a budget of 1 MiB was raised to 8 since, and others filled the disk
    with pytest.raises(TierUnavailable, match=r"other slabs and files leave 3\.91 KiB"):
        open_store(1, size=8 * SIZE, io=OtherDisk(4001))
    small = open_store(1, size=8 * SIZE, io=OtherDisk(200_000))
    assert small.superblock.file_bytes <= 200_000
    assert "other slabs and files keep the rest" in caplog.text
    assert put(small, range(4)) == [Outcome.OK] * 4
