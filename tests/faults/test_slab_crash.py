"""Faults 1-4: a process killed at any point, or a power loss, leaves a slab that serves whole blocks or misses."""

import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from extent import brief
from fork_rig import SERVICES, Forked

from kvtier.tiers.file.file_io import FileIO
from kvtier.tiers.file.store import FileStore
from kvtier.tiers.tier import BlockRecord, Outcome

CHILD = Path(__file__).with_name("_slab_child.py")
_spec = spec_from_file_location("_slab_child", CHILD)
assert _spec
assert _spec.loader
child = module_from_spec(_spec)
_spec.loader.exec_module(child)

BATCH = child.BATCH
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


@pytest.fixture(params=[None, bytes(range(32))], ids=["plain", "encrypted"], autouse=True)
def _key(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every story is told of a slab in the clear and of an encrypted one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(child, "KEY", request.param)
        yield


def start(directory: Path, kill_at: str = "", first: int = 0) -> Forked:
    key = [child.KEY.hex()] if child.KEY else []
    command = [str(CHILD), str(directory), kill_at, str(first), *key]
    return Forked(command, SERVICES, env=os.environ, stdout=subprocess.PIPE)


def blocks_in(store: FileStore, upto: int) -> int:
    """Read every block ever written; each is a miss or exactly right. Returns how many are right."""
    right = 0
    held = dict(store.held())
    written = [number for number in range(upto) if child.hash_of(number) in held]  # the others are misses
    assert len(written) == len(held)  # and nothing else is there
    for begin in range(0, len(written), 64):
        numbers = written[begin : begin + 64]
        buffers = [memoryview(bytearray(child.SLOT_BYTES)) for _ in numbers]
        results = store.read([child.hash_of(number) for number in numbers], buffers)
        for number, buffer, result in zip(numbers, buffers, results, strict=True):
            if isinstance(result, BlockRecord):
                assert bytes(buffer) == child.payload_of(number)
                assert result == child.record_of(number)
                right += 1
            else:
                assert result in (Outcome.ABSENT, Outcome.CHECKSUM)
    return right


def run_to_death(directory: Path, kill_at: str, first: int) -> int:
    """Let a child write from block `first` on until it kills itself; returns one past the last block it reported."""
    with start(directory, kill_at, first) as process:
        assert process.stdout is not None
        lines = process.stdout.read().split()
        assert process.wait(60) == -signal.SIGKILL
    return int(lines[-1]) if lines and lines[-1] != "ready" else first


def test_fifty_kills_at_random_times(tmp_path: Path) -> None:
    """Five in brief; those at named points fall everywhere."""
    rng = random.Random(1)
    number = 0
    for _ in range(brief(5, 50)):
        with start(tmp_path, first=number) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
            stored = [writer.stdout.readline()]  # the first batch is in
            time.sleep(rng.random() * 0.01)  # some twenty batches, more than the slab holds
            writer.kill()
            stored += writer.stdout.readlines()
        number = max(int(line) for line in stored if line.endswith("\n"))
        # What had been reported as stored and fits is there; the torn batch is a miss or whole.
        store = child.open_store(tmp_path)
        newest = range(max(0, number - 4 * BATCH), number)
        assert all(store.holds([child.hash_of(n) for n in newest]))
        assert blocks_in(store, number + BATCH) >= len(newest)
        store.check()
        store.close()


@pytest.mark.parametrize("kill_at", [f"{sign}{what}:{count}" for sign in ("", "+")
                                     for what, count in (*brief((), (("payload", 1), ("entry", 7), ("invalidate", 1))),
                                                         ("payload", 7), ("entry", 1), ("invalidate", 5))])  # fmt: skip
def test_killed_at_a_named_point(tmp_path: Path, kill_at: str) -> None:
    # Fill the slab first, so that the child evicts: reserve → invalidate → payload → entry.
    store = child.open_store(tmp_path)
    num_slots = store.superblock.num_slots
    for begin in range(0, num_slots, BATCH):
        numbers = range(begin, begin + BATCH)
        payloads = [memoryview(child.payload_of(n)) for n in numbers]
        assert set(store.write([child.record_of(n) for n in numbers], payloads)) == {Outcome.OK}
    first = num_slots // BATCH * BATCH + BATCH
    store.read([child.hash_of(n) for n in range(first - BATCH, first)],
               [memoryview(bytearray(child.SLOT_BYTES))] * BATCH)  # fmt: skip
    store.close()
    last = run_to_death(tmp_path, kill_at, first)
    # Everything but at most a few extents survived, and no byte is wrong.
    store = child.open_store(tmp_path)
    assert store.num_recovered >= num_slots - 4 * store.superblock.slots_per_extent
    right = blocks_in(store, last + BATCH)
    assert right >= num_slots - 4 * store.superblock.slots_per_extent
    store.check()
    store.close()
    # A second recovery finds the same, and the slab works on.
    store = child.open_store(tmp_path)
    assert store.num_recovered == right
    assert store.write([child.record_of(10**6)], [memoryview(child.payload_of(10**6))]) == [Outcome.OK]
    store.check()
    store.close()


@pytest.mark.parametrize("kill_at", [*brief([], ["superblock:1", "+superblock:2", "superblock:3", "invalidate:1",
                                                 "+entry:1"]),
                                     "+superblock:1", "superblock:2", "+superblock:3", "+invalidate:2", "+payload:1",
                                     "entry:2"])  # fmt: skip
def test_killed_while_opening_at_another_size(tmp_path: Path, kill_at: str) -> None:
    # A full slab is opened by a process whose budget is smaller: it moves blocks, rewrites table and superblock, cuts.
    store = child.open_store(tmp_path)
    num_slots = store.superblock.num_slots
    for begin in range(0, num_slots, BATCH):
        numbers = range(begin, begin + BATCH)
        store.write([child.record_of(n) for n in numbers], [memoryview(child.payload_of(n)) for n in numbers])
    payload_start = store.superblock.payload_offset(0)
    store.close()
    pid = os.fork()
    if pid == 0:
        try:
            io = child.DyingIO(kill_at)
            io.payload_start = payload_start
            FileStore.open(tmp_path, child.FINGERPRINT, slot_bytes=child.SLOT_BYTES, block_size=child.BLOCK_SIZE,
                           size=child.SIZE // 2, mode="buffered", key=child.KEY, io=io)  # fmt: skip
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    # Whatever stood: opened at the old size, the newest third of the blocks is still there, none is wrong.
    store = child.open_store(tmp_path)
    newest = range(num_slots - num_slots // 3, num_slots)
    assert all(store.holds([child.hash_of(n) for n in newest]))
    assert blocks_in(store, num_slots + BATCH) >= len(newest)
    store.check()
    store.close()


def test_killed_during_creation_leaves_no_half_slab(tmp_path: Path) -> None:
    class DiesBeforeSuperblock(FileIO):
        def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            os.kill(os.getpid(), signal.SIGKILL)
            return 0

    pid = os.fork()
    if pid == 0:
        try:
            child.open_store(tmp_path, DiesBeforeSuperblock())
        finally:
            os._exit(0)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    assert [path.suffix for path in tmp_path.iterdir()] == [".new"]
    # The next start clears it away.
    store = child.open_store(tmp_path)
    assert [path.suffix for path in tmp_path.iterdir()] == [".slab"]
    store.close()


class PowerLossIO(FileIO):
    """Remembers what every page held when it was last synced, so that a power loss can be played out later."""

    def __init__(self) -> None:
        self.pending: list[tuple[int, bytes, bytes]] = []  # (offset, before, after) of unsynced sectors

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """A write that the disk may forget, sector by sector, until the next sync."""
        data = b"".join(buffers)
        begin, end = offset // 512 * 512, -(-(offset + len(data)) // 512) * 512
        before = os.pread(fd, end - begin, begin).ljust(end - begin, b"\0")
        moved = super().pwritev(fd, buffers, offset)
        after = os.pread(fd, end - begin, begin).ljust(end - begin, b"\0")
        for start in range(0, end - begin, 512):
            self.pending.append((begin + start, before[start : start + 512], after[start : start + 512]))
        return moved

    def sync(self, fd: int) -> None:
        """What was written before stays."""
        super().sync(fd)
        self.pending.clear()

    def lose_power(self, path: Path, rng: random.Random) -> None:
        """Any subset of the unsynced sectors reached the disk, in any order."""
        current: dict[int, list[bytes]] = {}
        for offset, before, after in self.pending:
            current.setdefault(offset, [before]).append(after)
        with path.open("r+b") as file:
            for offset, versions in current.items():
                file.seek(offset)
                file.write(rng.choice(versions))


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("seed", range(brief(2, 12)))
def test_power_loss_forgets_or_reorders_unsynced_sectors(tmp_path: Path, *, durable: bool, seed: int) -> None:
    rng = random.Random(seed)
    io = PowerLossIO()
    store = child.open_store(tmp_path, io, durable=durable)
    acknowledged = 0
    for _ in range(rng.randrange(5, 40)):  # up to several times round the slab
        numbers = range(acknowledged, acknowledged + BATCH)
        payloads = [memoryview(child.payload_of(n)) for n in numbers]
        assert set(store.write([child.record_of(n) for n in numbers], payloads)) == {Outcome.OK}
        acknowledged += BATCH
    held = [n for n in range(acknowledged) if store.holds([child.hash_of(n)])[0]]

    class Tripped(Exception):
        pass

    # The last batch is cut off after any of its writes.
    left = rng.randrange(1, 5)
    plain = io.pwritev

    def cut_off(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        nonlocal left
        left -= 1
        if left == 0:
            raise Tripped
        return plain(fd, buffers, offset)

    io.pwritev = cut_off  # type: ignore[method-assign]
    numbers = range(acknowledged, acknowledged + BATCH)
    with suppress(Tripped):
        store.write([child.record_of(n) for n in numbers], [memoryview(child.payload_of(n)) for n in numbers])
    io.pwritev = plain  # type: ignore[method-assign]
    pending = list(io.pending)
    store.close()
    io.pending = pending
    io.lose_power(store.path, rng)
    # Nothing served is torn; durable: whatever was acknowledged and not evicted since is there whole.
    after = child.open_store(tmp_path)
    right = blocks_in(after, acknowledged + BATCH)
    if durable:
        per_extent = after.superblock.slots_per_extent
        assert right >= len(held) - 2 * per_extent
    after.check()
    after.close()
