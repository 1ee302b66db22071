"""Faults 5-15 and 39 on a slab: damage is detected or harmless, failures are outcomes, foreign files are safe."""

import errno
import os
import random
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import slab_rig
from extent import brief
from fault_rig import FaultyIO
from slab_rig import BLOCK_SIZE, SLOT, hash_of, payload_of, put, verify

from kvtier.tiers.errors import FingerprintMismatch, FormatError, TierUnavailable
from kvtier.tiers.file.file_io import FileIO, Mode
from kvtier.tiers.file.store import FileStore
from kvtier.tiers.tier import Outcome

FINGERPRINT = b"fault-tests".ljust(32, b".")
SIZE = 160 * 1024
MISSES = {Outcome.ABSENT, Outcome.CHECKSUM, Outcome.EVICTED, Outcome.IO_ERROR, Outcome.KEY_MISMATCH}


NUM_KEYS = 40
PAYLOADS = [payload_of(key) for key in range(NUM_KEYS)]


key: bytes | None = None  # of the slabs of the story that is being told


@pytest.fixture(params=[None, bytes(range(32))], ids=["plain", "encrypted"], autouse=True)
def _key(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every story is told of a slab in the clear and of an encrypted one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[__name__], "key", request.param)
        yield


def open_store(directory: Path, io: FileIO | None = None, mode: Mode = "buffered", size: int = SIZE) -> FileStore:
    return FileStore.open(
        directory, FINGERPRINT, slot_bytes=SLOT, block_size=BLOCK_SIZE, size=size, mode=mode, key=key, io=io
    )


def get(store: FileStore, keys: Sequence[int]) -> list[Outcome]:
    outcomes = slab_rig.get(store, keys)
    assert set(outcomes) <= MISSES | {Outcome.OK}
    return outcomes


KEYS = range(20)


@pytest.fixture
def slab_path(tmp_path: Path) -> Path:
    """A closed slab that holds KEYS."""
    store = open_store(tmp_path)
    assert put(store, KEYS) == [Outcome.OK] * len(KEYS)
    store.close()
    return store.path


# Fault 5: truncation.


def test_cut_short_before_open_is_a_clear_error(slab_path: Path) -> None:
    whole = slab_path.read_bytes()
    for length in [*range(0, 8192, 517), *range(8192, len(whole), 4801), len(whole) - 1]:
        slab_path.write_bytes(whole[:length])
        with pytest.raises(FormatError, match="it was left untouched"):
            open_store(slab_path.parent)
        assert slab_path.read_bytes() == whole[:length]
    # Restored, it is as good as new.
    slab_path.write_bytes(whole)
    store = open_store(slab_path.parent)
    assert get(store, KEYS) == [Outcome.OK] * len(KEYS)
    store.close()


@pytest.mark.parametrize("mode", ["direct", "buffered", "mmap"])
def test_cut_short_while_open_is_a_miss_and_no_sigbus(slab_path: Path, mode: Mode) -> None:
    whole = slab_path.read_bytes()
    for length in [*range(len(whole) - 4096, 8192, -20_011), 4096, 0]:
        slab_path.write_bytes(whole)
        store = open_store(slab_path.parent, mode=mode)
        os.truncate(slab_path, length)
        # What is still there is read; the blocks beyond it are lost, those beside them maybe in the same call.
        # (A mapping shows the rest of the last page as zeros, which the checksum tells.)
        lost = {Outcome.IO_ERROR, Outcome.CHECKSUM}
        is_there = [length >= store.superblock.payload_offset(key + 1) for key in KEYS]
        assert set(get(store, [0])) <= ({Outcome.OK} if is_there[0] else lost)
        for outcome, there in list(zip(get(store, KEYS), is_there, strict=True))[1:]:
            assert outcome in ({Outcome.OK, *(() if mode != "mmap" else lost)} if there else lost)
        assert store.probe("read") is False
        assert store.probe("write") is False
        # Stores may succeed (the file grows again) or not; nothing raises, nothing is served wrong.
        put(store, range(20, 30))
        get(store, range(30))
        verify(store)
        store.check()
        store.close()


# Faults 6, 7, 8 and 39: damage on the disk.


def test_ten_thousand_bit_flips_are_detected_or_harmless(slab_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Five thousand of a slab in the clear, five thousand others of an encrypted one; a tenth of them in brief."""
    rng = random.Random(6 if key is None else 7)
    store = open_store(slab_path.parent)
    payload_start, size = store.superblock.payload_offset(0), store.superblock.file_bytes
    used = payload_start + len(KEYS) * SLOT
    table = store.superblock.table_offsets[0]
    used_rows = table + len(KEYS) * store.superblock.entry_bytes
    fd = os.open(slab_path, os.O_RDWR)
    rows = [os.pread(fd, store.superblock.entry_bytes, store.superblock.row_offset(number)) for number in KEYS]

    def flip(position: int, bit: int) -> None:
        (byte,) = os.pread(fd, 1, position)
        os.pwrite(fd, bytes([byte ^ 1 << bit]), position)

    began = time.monotonic()
    # Four fifths in payloads, of an open store: only the flipped block is a miss, and forgotten; put back, it is whole.
    for _ in range(brief(400, 4000)):
        position, bit = rng.randrange(payload_start, used), rng.randrange(8)
        number = (position - payload_start) // SLOT
        flip(position, bit)
        assert get(store, [number]) == [Outcome.CHECKSUM]
        assert get(store, [number]) == [Outcome.ABSENT]
        flip(position, bit)
        # The block is stored anew elsewhere; start over once the slab is used up.
        os.pwrite(fd, rows[number], store.superblock.row_offset(number))
        store._blocks.index.add([hash_of(number)], [number])
        store._blocks.live[number // store.superblock.slots_per_extent] += 1
    assert get(store, KEYS) == [Outcome.OK] * len(KEYS)  # or later flips would have shown nothing
    num_told = sum("corrupt" in record.message for record in caplog.records)
    assert 1 <= num_told <= time.monotonic() - began + 1  # the log grows with time, not with damage
    store.close()
    os.close(fd)
    # One fifth in superblock, table and unused space, each before an opening.
    store = open_store(slab_path.parent)
    store.reset()
    put(store, KEYS)
    store.close()
    whole = slab_path.read_bytes()
    for index in range(brief(100, 1000)):
        position = rng.randrange(used_rows) if index % 8 else rng.randrange(size)
        with slab_path.open("r+b") as file:
            file.seek(position)
            file.write(bytes([whole[position] ^ 1 << rng.randrange(8)]))
        store = open_store(slab_path.parent)  # either copy of the superblock serves
        outcomes = get(store, KEYS)
        assert outcomes.count(Outcome.OK) >= len(KEYS) - 1
        store.close()
        with slab_path.open("r+b") as file:
            file.write(whole)


@pytest.mark.parametrize("seed", range(brief(4, 40)))
def test_pages_zeroed_garbled_duplicated_or_swapped(slab_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    content = bytearray(slab_path.read_bytes())
    num_pages = len(content) // 4096

    def page(number: int) -> slice:
        return slice(number * 4096, (number + 1) * 4096)

    for _ in range(rng.randrange(1, 6)):
        one, two = rng.randrange(num_pages), rng.randrange(num_pages)
        kind = rng.choice(("zero", "noise", "duplicate", "swap"))
        if kind == "zero":
            content[page(one)] = bytes(4096)
        elif kind == "noise":
            begin = one * 4096 + rng.randrange(3000)
            content[begin : begin + 600] = rng.randbytes(600)
        elif kind == "duplicate":
            content[page(one)] = content[page(two)]
        else:
            content[page(one)], content[page(two)] = content[page(two)], content[page(one)]
    slab_path.write_bytes(content)
    try:
        store = open_store(slab_path.parent)
    except (FormatError, FingerprintMismatch):
        assert slab_path.read_bytes() == content  # refused, untouched
        return
    get(store, KEYS)
    put(store, KEYS)
    get(store, KEYS)
    store.check()
    store.close()


def test_the_record_of_one_block_under_anothers_key(slab_path: Path) -> None:
    content = bytearray(slab_path.read_bytes())
    store = open_store(slab_path.parent)
    row, payload, size = store.superblock.row_offset, store.superblock.payload_offset, store.superblock.entry_bytes
    # While open: the payload of 1 lies where 0 should.
    fd = os.open(slab_path, os.O_RDWR)
    os.pwrite(fd, PAYLOADS[1], payload(0))
    os.close(fd)
    assert get(store, [0, 1]) == [Outcome.CHECKSUM, Outcome.OK]
    store.close()
    # Before opening: rows of 2 and 3 swapped, payloads not; a row says its slot, so both are misses.
    content[row(2) : row(2) + size], content[row(3) : row(3) + size] = (
        content[row(3) : row(3) + size],
        content[row(2) : row(2) + size],
    )
    # Payloads of 4 and 5 swapped, rows not.
    content[payload(4) : payload(4) + SLOT], content[payload(5) : payload(5) + SLOT] = (
        content[payload(5) : payload(5) + SLOT],
        content[payload(4) : payload(4) + SLOT],
    )
    slab_path.write_bytes(content)
    store = open_store(slab_path.parent)
    assert get(store, range(2, 7)) == [Outcome.ABSENT, Outcome.ABSENT, Outcome.CHECKSUM, Outcome.CHECKSUM, Outcome.OK]
    # What was bad was forgotten, so it can be stored again.
    assert put(store, range(2, 6)) == [Outcome.OK] * 4
    assert get(store, range(2, 6)) == [Outcome.OK] * 4
    store.check()
    store.close()


# Faults 9 and 15: no room.


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_drops_the_store_and_the_tier_stays_up(tmp_path: Path, code: int) -> None:
    io = FaultyIO(code)
    store = open_store(tmp_path, io)
    put(store, range(10))
    io.fails = lambda name, count: name == "pwritev"
    assert put(store, range(10, 15)) == [Outcome.FULL] * 5
    assert get(store, range(10)) == [Outcome.OK] * 10
    io.fails = lambda name, count: False
    assert put(store, range(10, 15)) == [Outcome.OK] * 5
    assert store.stats()["write_full"] == 5
    store.check()
    store.close()


CHILD = """
import resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
if sys.argv[3] != "-":
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), int(sys.argv[3])))
from kvtier.tiers.errors import ConfigError
from kvtier.tiers.file.store import FileStore
try:
    FileStore.open(Path(sys.argv[2]), bytes(32), slot_bytes=4096, block_size=4, size=int(sys.argv[4]), mode="buffered")
except ConfigError as error:
    print(error)
print(*(path.name for path in Path(sys.argv[2]).iterdir()))
"""


def test_a_file_size_limit_is_named_at_open(tmp_path: Path) -> None:
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", CHILD, root, str(tmp_path), "100000", str(1 << 20)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert '[file] size "' in done.stdout
    assert "ulimit -f" in done.stdout
    assert list(tmp_path.iterdir()) == []
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY  # only the child's


@pytest.mark.skipif(not shutil.which("unshare"), reason="unshare is not installed")
def test_a_full_file_system_is_named_at_open(tmp_path: Path) -> None:
    root = str(Path(__file__).parents[2])
    mount = f'mount -t tmpfs -o size=1m tmpfs "{tmp_path}" && exec "$@"'
    command = ["unshare", "-Urm", "sh", "-c", mount, "sh", sys.executable, "-c", CHILD, root, str(tmp_path), "-"]
    done = subprocess.run([*command, str(4 << 20)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no user namespaces here: {done.stderr.strip()[-100:]}")
    assert '[file] size "4MiB": the directory has 1 MiB free; lower size or choose another path' in done.stdout
    assert ".slab" not in done.stdout
    # What fits, fits.
    done = subprocess.run([*command, str(900_000)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [f"{bytes(32).hex()}.slab"]


# Faults 10 and 12: the disk says no.


@pytest.mark.parametrize("mode", ["direct", "buffered"])
def test_short_and_interrupted_calls_are_continued(disk_dir: Path, mode: Mode) -> None:
    io = FaultyIO()
    io.interrupt = True
    store = open_store(disk_dir, io, mode)
    io.short = mode == "buffered"  # half a page is no place O_DIRECT can go on from
    assert put(store, KEYS) == [Outcome.OK] * len(KEYS)
    assert get(store, KEYS) == [Outcome.OK] * len(KEYS)
    store.check()
    store.close()
    io.short = False
    store = open_store(disk_dir, io, mode)
    assert store.num_recovered == len(KEYS)
    store.close()


def test_direct_calls_that_stop_between_pages_go_on_from_the_page(disk_dir: Path) -> None:
    class Ragged(FileIO):
        def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            moved = super().preadv(fd, buffers, offset)
            return moved - 1000 if moved > 8192 else moved

    store = open_store(disk_dir, Ragged(), "direct")
    assert put(store, KEYS) == [Outcome.OK] * len(KEYS)
    assert get(store, KEYS) == [Outcome.OK] * len(KEYS)
    store.close()


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOENT, errno.EIO])
def test_a_directory_that_cannot_be_used(tmp_path: Path, code: int) -> None:
    io = FaultyIO(code)
    io.fails = lambda name, count: name == "open"
    with pytest.raises(TierUnavailable, match=rf"\[file\] path .*: {os.strerror(code)}; the file tier is off"):
        open_store(tmp_path, io)
    assert list(tmp_path.iterdir()) == []


# Fault 14: not ours.


@pytest.mark.parametrize(
    "content", [b"", b"hello", b"\0" * 200_000, b"SQLite format 3\0" + bytes(200_000), b"KVTIER01", b"KVTIER01" * 1024]
)
def test_a_foreign_file_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / f"{FINGERPRINT.hex()}.slab"
    path.write_bytes(content)
    with pytest.raises(FormatError, match="it was left untouched"):
        open_store(tmp_path)
    assert path.read_bytes() == content
    # Beside it, under another model's name, nothing hinders us, and it is never removed to make room.
    FileStore.open(tmp_path, bytes(32), slot_bytes=SLOT, block_size=4, size=SIZE * 2).close()
    assert path.read_bytes() == content


def test_links_devices_and_directories_are_refused(tmp_path: Path) -> None:
    path = tmp_path / f"{FINGERPRINT.hex()}.slab"
    path.mkdir()
    with pytest.raises(FormatError, match="not a regular file"):
        open_store(tmp_path)
    path.rmdir()
    os.mkfifo(path)
    with pytest.raises(FormatError, match="not a regular file"):
        open_store(tmp_path)
    path.unlink()
    path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(TierUnavailable, match="No such file"):
        open_store(tmp_path)


def test_a_budget_never_removes_files_that_only_look_like_slabs(tmp_path: Path) -> None:
    foreign = tmp_path / f"{'ab' * 32}.slab"
    foreign.write_bytes(bytes(SIZE // 2))
    notes = tmp_path / "notes.slab"
    notes.write_bytes(bytes(SIZE * 3))
    store = open_store(tmp_path)  # the first counts against the budget, the second is not ours at all
    assert store.superblock.file_bytes <= SIZE // 2
    store.close()
    assert foreign.read_bytes() == bytes(SIZE // 2)
    assert notes.read_bytes() == bytes(SIZE * 3)
