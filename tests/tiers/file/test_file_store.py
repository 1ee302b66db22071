"""FileStore: what is stored is found again, by this process and the next; sizes, locks and modes."""

import errno
import logging
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import pytest
import slab_rig
from at_once import at_once
from extent import brief
from slab_rig import ended, hash_of, payload_of, record_of, verify

from kvtier.tiers.checksum import checksum
from kvtier.tiers.errors import ConfigError, FingerprintMismatch, StoreLocked, TierUnavailable
from kvtier.tiers.file import file_io, slab
from kvtier.tiers.file.file_io import FileIO, Mode
from kvtier.tiers.file.store import FileStore
from kvtier.tiers.tier import BlockRecord, Outcome

MODEL, OTHER = b"model".ljust(32, b"."), b"other".ljust(32, b".")
SLOT = 8192


def slots(count: int, num_bytes: int, shift: int = 0) -> list[memoryview]:
    """Host slots as L2 has them: padded to pages and aligned, or `shift` bytes off."""
    stride = file_io.round_up(num_bytes, 4096)
    region = memoryview(mmap.mmap(-1, (count + 1) * stride))
    return [region[i * stride + shift : i * stride + shift + num_bytes] for i in range(count)]


def put(store: FileStore, keys: Sequence[int]) -> list[Outcome]:
    num_bytes = store.superblock.slot_bytes
    payloads = slots(len(keys), num_bytes)
    for key, payload in zip(keys, payloads, strict=True):
        payload[:] = payload_of(key, num_bytes)
    return store.write([record_of(key, num_bytes) for key in keys], payloads)


def get(store: FileStore, keys: Sequence[int], shift: int = 0) -> list[Outcome]:
    return slab_rig.get(store, keys, slots(len(keys), store.superblock.slot_bytes, shift))


class Trace(FileIO):
    """Notes writes and syncs."""

    def __init__(self) -> None:
        self.steps: list[str] = []

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.steps.append("write")
        return super().pwritev(fd, buffers, offset)

    def sync(self, fd: int) -> None:
        self.steps.append("sync")
        super().sync(fd)


class Interrupted(FileIO):
    """Before the next transfer of `least` bytes something else happens, once."""

    action: Callable[[], None] | None = None
    least = 0

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._interrupt(buffers)
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._interrupt(buffers)
        return super().pwritev(fd, buffers, offset)

    def _interrupt(self, buffers: Sequence[memoryview]) -> None:
        if self.action and buffers[0].nbytes >= self.least:
            action, self.action = self.action, None
            action()


class OpenStore(Protocol):
    def __call__(self, size: int = ..., fingerprint: bytes = ..., slot_bytes: int = ..., mode: Mode = ...,
                 durable: bool = ..., io: FileIO | None = ...) -> FileStore: ...  # fmt: skip


@pytest.fixture
def open_store(disk_dir: Path, key: bytes | None, at_end: ExitStack) -> OpenStore:
    def factory(
        size: int = 1 << 20,
        fingerprint: bytes = MODEL,
        slot_bytes: int = SLOT,
        mode: Mode = "direct",
        durable: bool = False,
        io: FileIO | None = None,
    ) -> FileStore:
        store = FileStore.open(disk_dir, fingerprint, slot_bytes=slot_bytes, block_size=4, size=size, mode=mode,
                               durable=durable, key=key, io=io)  # fmt: skip
        return ended(store, at_end)

    return factory


@pytest.mark.parametrize("slot_bytes", brief([1, 5000, 8192], [1, 4096, 5000, 8192, 131_072]))
@pytest.mark.parametrize("mode", ["direct", "buffered", "mmap", "auto"])
def test_stored_blocks_come_back_now_and_after_a_restart(open_store: OpenStore, mode: Mode, slot_bytes: int) -> None:
    store = open_store(4 << 20, slot_bytes=slot_bytes, mode=mode)
    assert get(store, range(20)) == [Outcome.ABSENT] * 20
    assert put(store, range(20)) == [Outcome.OK] * 20
    assert store.lookup([hash_of(key) for key in range(25)]) == 20
    assert store.holds([hash_of(19), hash_of(20)]) == [True, False]
    assert get(store, range(20)) == [Outcome.OK] * 20
    store.write([record_of(20, slot_bytes)], [payload_of(20, slot_bytes)])
    # Host memory that is not aligned goes through a bounce buffer; order and gaps don't matter.
    assert get(store, [7, 3, 99, 4, 3], shift=16) == [Outcome.OK, Outcome.OK, Outcome.ABSENT, Outcome.OK, Outcome.OK]
    assert verify(store).is_clean
    store.close()
    again = open_store(4 << 20, slot_bytes=slot_bytes, mode=mode)
    assert again.num_recovered == 21
    assert get(again, range(21)) == [Outcome.OK] * 21


def test_the_padding_of_a_neighbouring_slot_is_never_written(open_store: OpenStore) -> None:
    store = open_store(slot_bytes=5000, mode="direct")
    put(store, range(3))
    region = np.full(4 * 8192, 0xEE, np.uint8)
    offset = -region.ctypes.data % 4096
    view = memoryview(region)
    buffers = [view[offset + i * 8192 : offset + i * 8192 + 5000] for i in range(3)]
    store.read([hash_of(key) for key in range(3)], buffers)
    for i in range(3):
        assert (region[offset + i * 8192 + 5000 : offset + (i + 1) * 8192] == 0xEE).all()


def test_adjacent_blocks_travel_in_one_call(open_store: OpenStore) -> None:
    class Counting(FileIO):
        def __init__(self) -> None:
            self.calls: list[tuple[int, int]] = []

        def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            self.calls.append((len(buffers), offset))
            return super().preadv(fd, buffers, offset)

        def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            self.calls.append((len(buffers), offset))
            return super().pwritev(fd, buffers, offset)

    io = Counting()
    store = open_store(64 << 20, io=io, slot_bytes=65_536)
    io.calls.clear()
    put(store, range(64))
    assert [count for count, _ in io.calls] == [64, 1]  # the payloads, then all their entries
    put(store, range(64, 128))  # the next blocks of the chain lie behind them
    assert io.calls[2][1] == io.calls[0][1] + 64 * 65_536
    io.calls.clear()
    get(store, range(128))
    assert [count for count, _ in io.calls] == [1, 128]  # their entries, then 8 MiB


def test_a_skipped_write_needs_an_entry_that_says_the_same(open_store: OpenStore) -> None:
    store = open_store()
    put(store, range(4))
    before = store.stats()
    assert put(store, range(4)) == [Outcome.OK] * 4
    assert store.stats()["slots_ready"] == before["slots_ready"] == 4
    # The same key with other bytes (another kernel, another batch): the new bytes replace the old.
    other = payload_of(77, SLOT)
    record = BlockRecord(hash_of(2), hash_of(1), b"\2\0\0\0" * 4, checksum(other))
    assert store.write([record], [other]) == [Outcome.OK]
    buffer = slots(1, SLOT)
    assert store.read([hash_of(2)], buffer) == [record]
    assert buffer[0] == other
    store.check()
    # After a restart as well, though the old entry had lain on the disk.
    store.close()
    assert open_store().read([hash_of(2)], buffer) == [record]


def test_a_block_named_twice_in_a_batch_is_stored_once(open_store: OpenStore) -> None:
    store = open_store()
    assert put(store, [1, 2, 1, 3]) == [Outcome.OK] * 4
    assert store.stats()["slots_ready"] == 3
    assert get(store, [1, 2, 3]) == [Outcome.OK] * 3


def test_a_reset_under_a_write_wins(open_store: OpenStore) -> None:
    io = Interrupted()
    store = open_store(io=io)
    put(store, range(4))
    io.action = store.reset
    assert put(store, range(4, 8)) == [Outcome.EPOCH] * 4
    assert store.holds([hash_of(key) for key in range(8)]) == [False] * 8
    store.check()
    store.close()
    assert open_store().num_recovered == 0


def test_a_read_overtaken_by_eviction_says_so(open_store: OpenStore) -> None:
    io = Interrupted()
    store = open_store(200_000, io=io)
    num_slots = store.superblock.num_slots
    put(store, range(num_slots))
    io.action = lambda: assert_all_ok(put(store, range(1000, 1000 + num_slots)))  # the whole slab turns over
    assert get(store, [0, 1]) == [Outcome.EVICTED] * 2
    assert store.stats().get("read_checksum", 0) == 0
    assert get(store, [1000]) == [Outcome.OK]


def assert_all_ok(outcomes: list[Outcome]) -> None:
    assert set(outcomes) == {Outcome.OK}


@pytest.mark.parametrize("mode", ["direct", *brief([], ["buffered"]), "mmap"])
def test_threads_reading_and_writing_under_eviction(open_store: OpenStore, mode: Mode) -> None:
    store = open_store(1 << 20, mode=mode)
    allowed = {Outcome.OK, Outcome.ABSENT, Outcome.EVICTED, Outcome.FULL}

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(brief(50, 120)):
            begin = int(rng.integers(0, 300))
            if rng.random() < 0.5:
                assert set(put(store, range(begin, begin + 8))) <= allowed
            elif rng.random() < 0.9:
                assert set(get(store, range(begin, begin + 8))) <= allowed
            else:
                store.discard([hash_of(begin)])

    at_once(*(partial(work, seed) for seed in range(4)))
    store.check()
    assert verify(store).is_clean
    held = store.stats()["slots_ready"]
    store.close()
    assert open_store(1 << 20, mode=mode).num_recovered == held


def test_growing_keeps_every_block(open_store: OpenStore, caplog: pytest.LogCaptureFixture) -> None:
    store = open_store(1 << 20)
    num_slots = store.superblock.num_slots
    put(store, range(num_slots))
    store.close()
    with caplog.at_level(logging.WARNING):
        store = open_store(3 << 20)
    assert "grows from" in caplog.text
    assert "every block is kept" in caplog.text
    assert get(store, range(num_slots)) == [Outcome.OK] * num_slots
    assert store.superblock.num_slots > 2 * num_slots
    put(store, range(num_slots, 2 * num_slots))  # the new room is used before anything goes
    assert get(store, range(2 * num_slots)) == [Outcome.OK] * 2 * num_slots
    store.close()
    # As often as one likes.
    for size in (4 << 20, 6 << 20):
        store = open_store(size)
        assert get(store, range(2 * num_slots)) == [Outcome.OK] * 2 * num_slots
        store.close()


def test_shrinking_keeps_what_was_stored_last(
    open_store: OpenStore, disk_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(2 << 20)
    num_slots = store.superblock.num_slots
    put(store, range(num_slots))
    store.close()
    with caplog.at_level(logging.WARNING):
        store = open_store(1 << 20)
    assert "shrinks from" in caplog.text
    assert "the blocks stored last are kept" in caplog.text
    left = store.superblock.num_slots
    assert get(store, range(num_slots - left, num_slots)) == [Outcome.OK] * left
    assert store.path.stat().st_size <= 1 << 20
    put(store, range(5000, 5010))
    store.check()
    store.close()
    # To less than one extent: refused, and told what to do; nothing is lost.
    with pytest.raises(ConfigError, match=r"\[file\] size .*cannot shrink below .*; raise size or delete it"):
        open_store(slab.smallest(SLOT, 4))
    assert open_store(1 << 20).num_recovered >= left - store.superblock.slots_per_extent


def test_shrinking_is_not_misled_by_an_entry_that_went_bad(open_store: OpenStore) -> None:
    """It still names its block, which was stored again at the end, in an extent that moves."""
    store = open_store()
    put(store, range(store.superblock.num_slots - 5))
    store.close()
    with store.path.open("r+b") as file:
        file.seek(at := store.superblock.row_offset(0))
        (byte,) = file.read(1)  # of the checksum of the first entry
        file.seek(at)
        file.write(bytes([byte ^ 0xFF]))
    store = open_store()
    assert get(store, [0]) == [Outcome.ABSENT]
    assert put(store, [0]) == [Outcome.OK]
    store.close()
    smaller = open_store(size=store.superblock.file_bytes * 3 // 4)
    assert smaller.superblock.num_slots < store.superblock.num_slots
    assert get(smaller, [0]) == [Outcome.OK]


def test_another_model_gets_its_own_slab_beside_it(open_store: OpenStore, disk_dir: Path) -> None:
    store = open_store(1 << 20)
    put(store, range(20))
    store.close()
    other = open_store(1 << 20, OTHER)
    assert other.lookup([hash_of(0)]) == 0  # no hit across
    put(other, range(20, 30))
    other.close()
    assert len(list(disk_dir.glob("*.slab"))) == 2
    assert sum(path.stat().st_size for path in disk_dir.iterdir()) <= 1 << 20
    # Both are whole: only room nobody used changed hands.
    assert get(open_store(1 << 20), range(20)) == [Outcome.OK] * 20
    assert get(open_store(1 << 20, OTHER), range(20, 30)) == [Outcome.OK] * 10


def test_a_full_directory_gives_up_its_least_recently_used_unlocked_slab(
    open_store: OpenStore, disk_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    third = b"third".ljust(32, b".")
    for fingerprint in (MODEL, OTHER):
        store = open_store(1 << 20, fingerprint)
        put(store, range(40))  # a good third of the budget each
        store.close()
    os.utime(disk_dir / f"{MODEL.hex()}.slab", ns=(1, 1))
    with caplog.at_level(logging.WARNING):
        store = open_store(1 << 20, third)  # at least half of the budget is for the one being opened
    assert store.path.stat().st_size >= 1 << 19
    assert f"removed the least recently used slab {MODEL.hex()}" in caplog.text
    assert sum(path.stat().st_size for path in disk_dir.iterdir()) <= 1 << 20
    store.close()
    assert get(open_store(1 << 20, OTHER), range(40)) == [Outcome.OK] * 40  # the other one stayed whole


def test_a_slab_in_use_is_never_taken_away(open_store: OpenStore, disk_dir: Path) -> None:
    store = open_store(1 << 20)
    put(store, range(100))
    # A model whose share would not hold one block goes without, and nothing is taken for it.
    with pytest.raises(TierUnavailable, match=r"leave \d+ KiB, this .* takes .* raise \[file\] size or choose"):
        open_store(1 << 20, OTHER, slot_bytes=1 << 19)
    assert get(store, range(100)) == [Outcome.OK] * 100
    assert get(open_store(2 << 20, OTHER), [0]) == [Outcome.ABSENT]


def test_two_openers_the_second_is_told_whose_it_is(open_store: OpenStore, disk_dir: Path, key: bytes | None) -> None:
    store = open_store()
    with pytest.raises(StoreLocked, match=f"in use by process {os.getpid()};"):
        open_store()
    # From another process, and again after it is free.
    code = (
        "import sys; from pathlib import Path; from kvtier.tiers.file.store import FileStore\n"
        f"FileStore.open(Path(sys.argv[1]), {MODEL!r}, slot_bytes={SLOT}, block_size=4, size={1 << 20}, key={key!r})"
    )
    root = Path(__file__).parents[3]
    run = [sys.executable, "-c", code, str(disk_dir)]
    refused = subprocess.run(run, cwd=root, capture_output=True, text=True, check=False)
    assert f"in use by process {os.getpid()}" in refused.stderr
    store.close()
    assert subprocess.run(run, cwd=root, check=False).returncode == 0


def test_closed_is_closed(open_store: OpenStore) -> None:
    store = open_store()
    put(store, range(3))
    store.close()
    store.close()
    assert get(store, [0]) == [Outcome.CLOSED]
    assert put(store, [0]) == [Outcome.CLOSED]
    store.discard([hash_of(0)])
    store.reset()
    assert open_store().num_recovered == 3


def test_close_returns_at_once_and_the_last_call_releases_the_file(open_store: OpenStore) -> None:
    inside, go_on = threading.Event(), threading.Event()

    class Slow(FileIO):
        def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            if threading.current_thread() is not threading.main_thread():
                inside.set()
                assert go_on.wait(60)
            return super().preadv(fd, buffers, offset)

    store = open_store(io=Slow(), mode="buffered")
    put(store, [1])
    outcomes: list[Outcome] = []
    reader = threading.Thread(target=lambda: outcomes.extend(get(store, [1])))
    reader.start()
    assert inside.wait(60)  # a read hangs
    store.close()
    assert get(store, [1]) == [Outcome.CLOSED]
    with pytest.raises(StoreLocked):  # its file cannot be released yet
        open_store()
    go_on.set()
    reader.join(60)
    assert outcomes == [Outcome.OK]
    assert get(open_store(), [1]) == [Outcome.OK]


def test_a_probe_tells_whether_the_slab_is_still_there(open_store: OpenStore) -> None:
    store = open_store()
    assert store.probe("read")
    assert store.probe("write")
    moved = store.path.with_suffix(".moved")
    store.path.rename(moved)
    assert not store.probe("read")
    moved.rename(store.path)
    assert store.probe("write")
    store.close()
    assert not store.probe("read")


def test_durable_syncs_before_and_after_the_entry(open_store: OpenStore) -> None:
    for durable, steps in ((True, ["write", "sync", "write", "sync"]), (False, ["write", "write"])):
        io = Trace()
        store = open_store(io=io, durable=durable)
        io.steps.clear()
        put(store, range(20 * (2 - durable), 20 * (3 - durable)))
        assert io.steps == steps  # grouped: once per batch
        store.close()


@pytest.mark.parametrize("size", [1, 8192, slab.smallest(SLOT, 4) - 1])
def test_a_size_too_small_for_a_block_is_named(open_store: OpenStore, size: int) -> None:
    with pytest.raises(ConfigError, match=r"\[file\] size .*too small for one block; use at least \d+ bytes"):
        open_store(size)


def test_more_than_the_disk_has_is_refused_at_open(open_store: OpenStore, disk_dir: Path) -> None:
    class SmallDisk(FileIO):
        def free_bytes(self, directory: Path) -> int:
            return 412 << 30

    message = r'\[file\] size "16TB": the directory has 412 GiB free; lower size or choose another path'
    with pytest.raises(ConfigError, match=message):
        open_store(16 * 10**12, io=SmallDisk())
    assert list(disk_dir.iterdir()) == []


def test_wrong_arguments_are_the_callers_fault(open_store: OpenStore, disk_dir: Path) -> None:
    store = open_store()
    with pytest.raises(ValueError, match="one buffer of 8192 bytes per block"):
        store.read([hash_of(0)], [memoryview(bytearray(100))])
    with pytest.raises(ValueError, match="one buffer"):
        store.write([record_of(0, SLOT)], [])
    with pytest.raises(ValueError, match="32 bytes"):
        store.write([BlockRecord(b"short", bytes(32), b"", 0)], [payload_of(0, SLOT)])
    with pytest.raises(ValueError, match="at most 4 u32"):
        store.write([BlockRecord(hash_of(0), bytes(32), bytes(20), 0)], [payload_of(0, SLOT)])
    with pytest.raises(ValueError, match="fingerprint must be 32 bytes"):
        FileStore.open(disk_dir, b"", slot_bytes=1, block_size=1, size=1 << 20)


def test_a_slab_of_other_blocks_under_this_name_is_refused(open_store: OpenStore, disk_dir: Path) -> None:
    store = open_store()
    put(store, range(3))
    store.close()
    with pytest.raises(FingerprintMismatch, match=r"slot_bytes 8192, this model has 4096"):
        open_store(slot_bytes=4096)
    # A slab renamed to another model's name.
    store.path.rename(disk_dir / f"{OTHER.hex()}.slab")
    with pytest.raises(FingerprintMismatch, match=f"holds fingerprint {MODEL.hex()}.*left untouched"):
        open_store(fingerprint=OTHER)


def test_a_path_that_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not ours")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(TierUnavailable, match=r"\[file\] path .*the file tier is off"):
            FileStore.open(path, MODEL, slot_bytes=SLOT, block_size=4, size=1 << 20)
    # A missing one is made, with its parents.
    FileStore.open(tmp_path / "a" / "b", MODEL, slot_bytes=SLOT, block_size=4, size=1 << 20).close()


def test_a_reset_beside_a_late_writer_forgets_what_was_there_before(open_store: OpenStore) -> None:
    """FAULTS 37: the extent the writer is in holds blocks of before; a restart must not bring them back."""

    io = Interrupted()
    io.least = SLOT  # a payload, not an entry
    store = open_store(io=io)
    per_extent = store.superblock.slots_per_extent
    put(store, range(per_extent))

    def reset_and_fail() -> None:
        store.reset()
        raise OSError(errno.EIO, "bad sector")

    io.action = reset_and_fail
    put(store, [0, 1000])  # enters the extent of block 0, then fails
    assert store.lookup([hash_of(0)]) == 0
    store.close()
    assert open_store().num_recovered == 0


def test_a_durable_reset_is_synced(open_store: OpenStore) -> None:
    io = Trace()
    store = open_store(io=io, durable=True)
    put(store, range(4))
    io.steps.clear()
    store.reset()
    assert io.steps[-1] == "sync"
    assert "write" in io.steps


def test_a_reset_the_disk_refuses_takes_the_slab_s_name(open_store: OpenStore) -> None:
    """The next start must not find in it what was to be forgotten."""

    class RefusesWrites(FileIO):
        refuses = False

        def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            if self.refuses:
                raise OSError(errno.EIO, "disk gone")
            return super().pwritev(fd, buffers, offset)

    io = RefusesWrites()
    store = open_store(io=io)
    put(store, range(4))
    io.refuses = True
    store.reset()
    assert store.lookup([hash_of(0)]) == 0
    assert not store.path.exists()
    io.refuses = False
    store.close()
    assert open_store().num_recovered == 0


def test_a_store_answered_as_failed_does_not_come_back(open_store: OpenStore) -> None:
    class FailsOneSync(FileIO):
        left = -1

        def sync(self, fd: int) -> None:
            self.left -= 1
            if self.left == 0:
                raise OSError(errno.EIO, "disk gone for a moment")
            super().sync(fd)

    io = FailsOneSync()
    store = open_store(io=io, durable=True)
    io.left = 2  # the one behind the entry
    assert put(store, [1]) == [Outcome.IO_ERROR]
    assert put(store, [1]) == [Outcome.OK]
    store.discard([hash_of(1)])
    store.close()
    assert open_store().num_recovered == 0


def test_one_bad_sector_costs_one_block_and_is_not_promised_again(open_store: OpenStore) -> None:
    class BadSector(FileIO):
        at = -1

        def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            if offset <= self.at < offset + sum(buffer.nbytes for buffer in buffers):
                raise OSError(errno.EIO, "bad sector")
            return super().preadv(fd, buffers, offset)

    io = BadSector()
    store = open_store(io=io)
    put(store, range(8))
    io.at = store.superblock.payload_offset(5)
    outcomes = get(store, range(8))
    assert outcomes.count(Outcome.IO_ERROR) == 1
    bad = outcomes.index(Outcome.IO_ERROR)
    assert store.lookup([hash_of(key) for key in range(8)]) == bad
    assert get(store, range(bad)) == [Outcome.OK] * bad


def test_a_close_the_disk_complains_about_lets_go_all_the_same(open_store: OpenStore) -> None:
    class ComplainsAtClose(FileIO):
        complains = False

        def close(self, fd: int) -> None:
            super().close(fd)
            if self.complains:
                raise OSError(errno.EIO, "disk gone")

    io = ComplainsAtClose()
    store = open_store(io=io)
    io.complains = True
    store.close()
    io.complains = False
    open_store()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_does_not_keep_the_lock(open_store: OpenStore) -> None:
    store = open_store()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:  # holds every descriptor of ours until it is told
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    try:
        store.close()
        open_store()
    finally:
        os.close(writing)
        os.close(reading)
        os.waitpid(child, 0)


@pytest.mark.parametrize("failure", [errno.EACCES, errno.EIO])
def test_a_neighbour_that_cannot_be_read_costs_only_its_space(
    open_store: OpenStore, disk_dir: Path, failure: int
) -> None:
    put(open_store(), range(4))
    neighbour = next(disk_dir.glob("*.slab"))

    class Refuses(FileIO):
        def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
            if Path(path) == neighbour:
                raise OSError(failure, os.strerror(failure))
            return super().open(path, flags)

    store = open_store(size=2 << 20, fingerprint=OTHER, io=Refuses())
    assert put(store, range(4)) == [Outcome.OK] * 4
    assert sum(path.stat().st_size for path in disk_dir.glob("*.slab")) <= 2 << 20
