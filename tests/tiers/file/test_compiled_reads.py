"""The slab's compiled twins beside the Python way: the same rows, names, bytes and errors, whatever they are given."""

import ctypes
import errno
import os
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from slab_rig import hash_of, record_of

from kvtier.tiers.compiled.digests import digests
from kvtier.tiers.file import read_queue, slab
from kvtier.tiers.file.extents import ExtentMap
from kvtier.tiers.file.read_queue import CompiledReads, ReadQueue
from kvtier.tiers.file.slab_codec import Codec

BLOCK_SIZE, SLOT, ROWS = 4, 4096, 6
PLAN = slab.plan(b"twins".ljust(32, b"."), SLOT, BLOCK_SIZE, 4 << 20)
FIELDS = ("state", "seq", "slot", "payload_bytes", "num_tokens")


@pytest.fixture
def compiled() -> CompiledReads:
    found = read_queue.compiled_reads()
    if found is None:
        pytest.skip("no compiled twin here: `make compiled` builds it")
    return found


@pytest.fixture
def queue(compiled: CompiledReads) -> Iterator[ReadQueue]:
    try:
        made = ReadQueue(4, compiled)
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


def rows_of(slots: list[int]) -> slab.Rows:
    """Whole rows, as they lie on the disk."""
    codec = Codec(PLAN)
    rows = codec.make_rows(slots, [record_of(slot) for slot in slots], [b""] * len(slots))
    rows["seq"] = np.arange(len(slots)) + 1
    return codec.seal_rows(rows)


@given(
    changes=st.lists(
        st.tuples(st.integers(0, ROWS - 1), st.sampled_from(FIELDS), st.integers(0, 40) | st.integers(0, 2**32 - 1))
    ),
    is_sealed_again=st.booleans(),
    flips=st.lists(st.tuples(st.integers(0, ROWS * PLAN.entry_bytes - 1), st.integers(1, 255)), max_size=2),
)
def test_a_row_is_whole_by_one_rule(
    compiled: CompiledReads, changes: list[tuple[int, str, int]], is_sealed_again: bool, flips: list[tuple[int, int]]
) -> None:
    """Torn, of another slot, of another slab's shape, or with fields beyond their bounds and a good checksum."""
    slots = [7, 1, 2, 9, 30, 4]
    rows = rows_of(slots)
    for at, field, value in changes:
        rows[field][at] = value
    if is_sealed_again:
        slab.seal_rows(rows, PLAN)
    raw = rows.view(np.uint8).reshape(-1)
    for at, bits in flips:
        raw[at] ^= bits
    codec = Codec(PLAN)
    whole = slab.find_valid(rows, np.array(slots), PLAN)
    records = codec.to_records(rows)
    expected = [(record, b"") if is_whole else None for record, is_whole in zip(records, whole.tolist(), strict=True)]
    assert codec.entries(rows, slots) == expected
    assert codec.entries(np.tile(rows, 5), slots * 5) == expected * 5  # at once
    assert codec.entries(rows, slots, compiled) == expected


def test_rows_that_do_not_fit_are_refused(compiled: CompiledReads) -> None:
    codec, rows = Codec(PLAN), rows_of([1, 2])
    with pytest.raises(ValueError, match="rows of 4 tokens"):
        codec.entries(rows[:1], [1, 2], compiled)
    with pytest.raises(ValueError, match="bytes for 2 rows"):
        compiled.module.read_rows(0, [0, 1], 64, bytearray(127))
    assert compiled.module.read_rows(1 << 20, [0, 64], 64, bytearray(128)) == b"\0\0"  # no such file


def test_rows_come_as_by_pread(compiled: CompiledReads, file: int) -> None:
    rng = random.Random(5)
    for _ in range(30):
        offsets = [rng.randrange(64 * 4096 + 100) for _ in range(rng.randrange(1, 9))]
        offsets += [offsets[-1] + 96, offsets[-1] + 192]  # neighbours, in one call
        into = bytearray(96 * len(offsets))
        came = compiled.module.read_rows(file, offsets, 96, into)
        for i, offset in enumerate(offsets):
            there = os.pread(file, 96, offset)
            if came[i]:
                assert into[96 * i : 96 * i + 96] == there
            else:  # the end of the file costs its neighbours in the same call: they are read anew
                assert any(len(os.pread(file, 96, each)) < 96 for each in offsets[i - 2 : i + 3])


def test_reads_are_hashed_as_they_come(queue: ReadQueue, file: int) -> None:
    rng = random.Random(6)
    for _ in range(30):
        counts = [rng.randrange(1, 4) for _ in range(rng.randrange(1, 30))]
        offsets = [rng.randrange(66) * 4096 for _ in counts]
        buffers = [memoryview(bytearray(1024)) for _ in range(sum(counts))]
        calls: list[int] = []
        answer = queue.read_hashed(file, offsets, buffers, counts, lambda calls=calls: calls.append(1))  # type: ignore[misc]
        assert answer is not None
        assert calls == [1]
        moved, digests = answer
        expected = [len(os.pread(file, 1024 * n, at)) for n, at in zip(counts, offsets, strict=True)]
        assert moved == expected
        first = 0
        for num_bytes, count in zip(moved, counts, strict=True):
            if num_bytes == 1024 * count:
                part = slice(first, first + count)
                assert digests[part] == [xxhash.xxh3_64_intdigest(buffer) for buffer in buffers[part]]
            first += count


def test_what_the_kernel_refuses_is_told_and_the_rest_is_waited_for(queue: ReadQueue, file: int) -> None:
    buffers = [memoryview(bytearray(4096)) for _ in range(6)]
    answer = queue.read_hashed(1 << 20, [0] * 6, buffers, [1] * 6, lambda: None)
    assert answer is not None
    assert answer[0] == [-errno.EBADF] * 6

    def stumbles() -> None:
        raise RuntimeError("while reads are in flight")

    with pytest.raises(RuntimeError, match="in flight"):
        queue.read_hashed(file, [0] * 6, buffers, [1] * 6, stumbles)
    assert queue.is_open
    assert all(bytes(buffer) == os.pread(file, 4096, 0) for buffer in buffers)  # nothing comes later
    with pytest.raises(ValueError, match="not 4096"):
        queue.read_hashed(file, [0], [buffers[0], buffers[1][1:]], [2], lambda: None)
    with pytest.raises(ValueError, match="2 buffers for 3 slots"):
        queue.read_hashed(file, [0], buffers[:2], [3], lambda: None)
    with pytest.raises(ValueError, match="1 counts for 2 reads"):
        queue.read_hashed(file, [0, 0], buffers[:1], [1], lambda: None)


def test_a_hash_library_that_does_not_load_is_the_python_way(
    compiled: CompiledReads, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacks(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(read_queue, "digests", digests.__wrapped__)  # not what was found before
    monkeypatch.setattr("importlib.import_module", lacks)
    assert read_queue.compiled_reads() is None


def test_a_queue_that_the_kernel_lost_brings_nothing_and_is_closed(queue: ReadQueue, file: int) -> None:
    buffers = [memoryview(bytearray(4096)) for _ in range(6)]

    def lose() -> None:
        syscall = ctypes.CDLL(None).syscall
        syscall(queue._destroy, queue._queue)

    answer = queue.read_hashed(file, [0] * 6, buffers, [1] * 6, lose)
    assert answer is not None
    assert not any(num_bytes == 4096 for num_bytes in answer[0])  # nobody can tell what came
    assert not queue.is_open


def test_a_slot_holds_its_block_until_it_is_dropped_or_filled_anew() -> None:
    """Differential: `still_hold` against looking for the names again."""
    rng = random.Random(7)
    blocks = ExtentMap(4, 5)
    names = [hash_of(key) for key in range(60)]
    for _ in range(200):
        asked = rng.sample(names, 12)
        slots, generations = blocks.find_each(asked)
        for _ in range(rng.randrange(3)):
            if rng.random() < 0.3 and blocks.index.num_names:
                slot = blocks.drop(rng.choice(blocks.index.names(blocks.index.named())))
                assert slot is not None
                blocks.leave(slot // 5)
                continue
            new = [name for name in rng.sample(names, 3) if blocks.index.find_one(name) < 0]
            run = blocks.take(new, None) if new else None
            if run is None:
                if (claim := blocks.claim()) is not None:
                    blocks.opened(claim)
                continue
            blocks.publish(run, new[: run.count])
            blocks.leave(run.extent)
        now, now_generations = blocks.find_each(asked)
        same = (slots == now) & (generations == now_generations) & (slots >= 0)
        assert blocks.still_hold(slots, generations) == same.tolist()
    blocks.check()
    slots, generations = blocks.find_each(names)
    assert any(blocks.still_hold(slots, generations))
    blocks.clear()
    assert not any(blocks.still_hold(slots, generations))
