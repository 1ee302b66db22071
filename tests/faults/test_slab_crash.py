"""Faults 1-3: a process killed at any point leaves a slab that serves whole blocks or misses."""

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
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
    held = dict(store.lineage().pairs())
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
