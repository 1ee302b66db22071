"""The slab's index against a dict: any order of naming, finding and taking away, twins, a whole load."""

import errno
import random
import threading
import tracemalloc

import numpy as np
import pytest
from extent import brief

from kvtier.tiers.file.extents import SlabIndex
from kvtier.tiers.file.file_io import GroupSync
from kvtier.tiers.pool import to_words

pytestmark = pytest.mark.usefixtures("way")


def name_of(key: int) -> bytes:
    """No good hash, on purpose: a counter and padding."""
    return key.to_bytes(8, "little").ljust(32, b"\1")


def crowded(key: int) -> bytes:
    """Names of one bucket: they differ where the index does not look."""
    return b"same end" + key.to_bytes(16, "little") + b"same end"


def found(index: SlabIndex, names: list[bytes], at_once: int) -> list[int]:
    pieces = [names[i : i + at_once] for i in range(0, len(names), at_once)]
    slots = [slot for piece in pieces for slot in index.find_each(piece)]
    assert slots == [slot for piece in pieces for slot in index.find_each(piece)]
    return slots


@pytest.mark.parametrize("name", [name_of, crowded], ids=["spread", "crowded"])
def test_it_finds_what_a_dict_finds(name) -> None:  # type: ignore[no-untyped-def]
    rng = random.Random(1)
    num_slots = 300
    index, told = SlabIndex(num_slots), dict[bytes, int]()
    free = list(range(num_slots))
    for step in range(brief(200, 400)):
        if rng.random() < 0.55 and free:
            rng.shuffle(free)
            slots = sorted(free[: rng.choice((1, 2, 5, 6, 7, 39))])
            free = [slot for slot in free if slot not in slots]
            names = rng.sample([n for key in range(900) if (n := name(key)) not in told], len(slots))
            index.add(names, slots)
            told.update(zip(names, slots, strict=True))
        elif told:
            gone = rng.sample(sorted(told), min(rng.choice((1, 2, 5, 6, 7, 39)), len(told)))
            index.remove(sorted(told[n] for n in gone))
            free += [told.pop(n) for n in gone]
        if step % 100 == 99:
            index.reset()
            free += told.values()
            told.clear()
        index.check()
        asked = [name(rng.randrange(900)) for _ in range(60)]
        for at_once in (1, 5, 60):
            assert found(index, asked, at_once) == [told.get(n, -1) for n in asked]
        assert dict(zip(index.names(index.named()), index.named().tolist(), strict=True)) == told
    assert index.num_names == len(told)


@pytest.mark.parametrize("name", [name_of, crowded], ids=["spread", "crowded"])
@pytest.mark.parametrize("num_slots", [1, 7, 40, 2000])
def test_loading_at_once_is_adding_one_by_one(name, num_slots: int) -> None:  # type: ignore[no-untyped-def]
    slots = np.array(sorted(random.Random(2).sample(range(num_slots), num_slots - num_slots // 4)))
    names = [name(5 * slot) for slot in slots.tolist()]
    loaded, added = SlabIndex(num_slots), SlabIndex(num_slots)
    loaded.write(slots, to_words(names))
    assert loaded.load(slots) == []
    added.add(names, slots.tolist())
    for index in (loaded, added):
        assert index.check().tolist() == slots.tolist()
        assert found(index, names, 50) == found(index, names, 1) == slots.tolist()
    loaded.remove(slots.tolist())
    assert loaded.num_names == 0
    loaded.add(names[::-1], slots.tolist())
    assert found(loaded, names, 50) == slots[::-1].tolist()
    loaded.check()


@pytest.mark.parametrize("name", [name_of, crowded], ids=["spread", "crowded"])
def test_of_twins_the_first_gets_the_name(name) -> None:  # type: ignore[no-untyped-def]
    index = SlabIndex(1000)
    slots = np.arange(900)
    keys = [slot if slot not in (17, 400, 899) else 3 for slot in slots.tolist()]
    index.write(slots, to_words([name(key) for key in keys]))
    assert index.load(slots) == [17, 400, 899]
    assert index.find_one(name(3)) == 3
    assert index.check().tolist() == [slot for slot in range(900) if slot not in (17, 400, 899)]
    with pytest.raises(ValueError, match="in the index already"):
        index.add([name(3)], [950])
    with pytest.raises(IndexError, match="there are 1000"):
        index.add([name(2000)], [1000])
    index.check()


def test_it_takes_65_bytes_a_slot_compiled_and_a_dict_interpreted() -> None:
    is_compiled = type(SlabIndex(1)._index).__module__.endswith("_compiled")
    tracemalloc.start()
    index = SlabIndex(200_000)
    slots = np.arange(200_000)
    index.write(slots, np.frombuffer(np.random.default_rng(3).bytes(32 * len(slots)), np.uint64).reshape(-1, 4))
    assert index.load(slots) == []
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken / len(slots) <= (75 if is_compiled else 260)  # with the test's own eight
    index.check()


@pytest.mark.parametrize("count", [1, 9])
def test_a_name_of_wrong_length_is_told(count: int) -> None:
    index = SlabIndex(40)
    with pytest.raises(ValueError, match="must be 32"):
        index.find_each([name_of(key) for key in range(count - 1)] + [b"short"])
    assert index.find_each([]) == []
    assert index.find_each([name_of(1)]) == [-1]


# GroupSync: every caller is covered by a sync that began after its call; they share as few as possible.


class SlowDisk:
    """A sync that runs until the test lets it end, and covers what was written before it began."""

    def __init__(self) -> None:
        self.written = 0
        self.covered: list[int] = []
        self.begun = threading.Semaphore(0)
        self.end = threading.Semaphore(0)
        self.fails = False

    def sync(self) -> None:
        covers = self.written
        self.begun.release()
        assert self.end.acquire(timeout=60)
        if self.fails:
            raise OSError(errno.EIO, "disk gone")
        self.covered.append(covers)


def write_and_sync(disk: SlowDisk, sync: GroupSync, found: list[object]) -> threading.Thread:
    disk.written += 1
    mine = disk.written

    def run() -> None:
        try:
            sync()
        except OSError as error:
            found.append(error.errno)
        else:
            found.append(max(disk.covered) >= mine)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_callers_share_the_sync_that_began_after_them() -> None:
    disk, found = SlowDisk(), []  # type: ignore[var-annotated]
    sync = GroupSync(disk.sync)
    first = write_and_sync(disk, sync, found)
    assert disk.begun.acquire(timeout=60)
    # Seven more come while it runs: it says nothing about their writes, the next one does, for all of them.
    others = [write_and_sync(disk, sync, found) for _ in range(7)]
    disk.end.release()
    first.join(60)
    assert disk.begun.acquire(timeout=60)
    for thread in others:
        thread.join(0.02)
    disk.end.release(8)  # should stragglers need one more
    for thread in others:
        thread.join(60)
    assert found == [True] * 8
    assert len(disk.covered) <= 3


def test_a_failed_sync_fails_everybody_it_covers_and_nobody_else() -> None:
    disk, found = SlowDisk(), []  # type: ignore[var-annotated]
    sync = GroupSync(disk.sync)
    disk.fails = True
    thread = write_and_sync(disk, sync, found)
    disk.end.release()
    thread.join(60)
    assert found == [errno.EIO]
    # The next write is covered by a sync of its own.
    disk.fails = False
    disk.end.release()
    sync()
    assert disk.covered == [1]
    disk.fails = True
    disk.end.release()
    with pytest.raises(OSError, match="disk gone"):
        sync()


def test_an_interrupted_sync_leaves_nobody_waiting() -> None:
    calls = iter([KeyboardInterrupt()])

    def sync() -> None:
        for interrupt in calls:
            raise interrupt

    group = GroupSync(sync)
    with pytest.raises(KeyboardInterrupt):
        group()
    others = [threading.Thread(target=group) for _ in range(2)]
    for thread in others:
        thread.start()
    for thread in others:
        thread.join(60)
        assert not thread.is_alive()
