"""The slab's extension modules beside Python: the same rows, names, bytes and errors, whatever they are given."""

import os
import random
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from slab_rig import hash_of, record_of

from kvtier.tiers import BlockRecord, checksum
from kvtier.tiers.file import file_io, slab
from kvtier.tiers.file.extents import ExtentMap
from kvtier.tiers.file.file_io import ReadQueue, SlabLayout
from kvtier.tiers.file.slab import Codec, verified

BLOCK_SIZE, SLOT = 4, 4096
PLAN = slab.plan(b"twins".ljust(32, b"."), SLOT, BLOCK_SIZE, 4 << 20)
FIELDS = ("state", "seq", "slot", "payload_bytes", "num_tokens")


@pytest.fixture
def compiled() -> ModuleType:
    found = file_io.compiled_reads()
    if found is None:
        pytest.skip("not built: `make compiled`")
    return found


@pytest.fixture
def queue(compiled: ModuleType) -> Iterator[ReadQueue]:
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


class Blocks:
    """A file laid out as a slab: the rows of all slots, then payloads, each known by its slot."""

    NUM_SLOTS = 12

    def __init__(self, path: Path) -> None:
        rng = random.Random(2)
        self.payloads = [rng.randbytes(SLOT) for _ in range(self.NUM_SLOTS)]
        self.slots = list(range(self.NUM_SLOTS))
        codec, records = Codec(PLAN), [record_of(slot) for slot in self.slots]
        records = [
            BlockRecord(record.chain_hash, record.parent, record.tokens, checksum(memoryview(payload)))
            for record, payload in zip(records, self.payloads, strict=True)
        ]
        self.names = [record.chain_hash for record in records]
        self.rows = codec.make_rows(self.slots, records, [b""] * self.NUM_SLOTS)
        self.rows["seq"] = np.arange(self.NUM_SLOTS) + 1
        codec.seal_rows(self.rows)
        self.payload_offset = file_io.round_up(self.rows.nbytes, 4096)
        self.layout = SlabLayout(
            ([0], [self.payload_offset], self.NUM_SLOTS, PLAN.entry_bytes, SLOT, 3), PLAN.layout.rule
        )
        self.path = path
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT)
        self.write()

    def write(self) -> None:
        os.pwrite(self.fd, self.rows.tobytes(), 0)
        os.pwrite(self.fd, b"".join(self.payloads), self.payload_offset)

    def read(
        self, queue: ReadQueue, slots: list[int], names: list[bytes] | None = None
    ) -> tuple[list[BlockRecord | None], list[bytes]]:
        """What the twin says of the blocks, and what lies in their buffers then."""
        into = [memoryview(bytearray(SLOT)) for _ in slots]
        found = queue.read_blocks((self.fd, self.fd), self.layout, slots, names or [self.names[i] for i in slots], into)
        return found, [bytes(buffer) for buffer in into]

    def expected(self, slots: list[int], names: list[bytes]) -> list[BlockRecord | None]:
        """By the Python way, from the same bytes."""
        rows = np.frombuffer(os.pread(self.fd, self.rows.nbytes, 0), self.rows.dtype)[slots]
        entries = Codec(PLAN).entries(rows.copy(), slots)
        answers = []
        for slot, name, entry in zip(slots, names, entries, strict=True):
            payload = memoryview(os.pread(self.fd, SLOT, self.payload_offset + slot * SLOT))
            found = verified(Codec(PLAN), entry, name, payload) if entry is not None else None
            answers.append(found if isinstance(found, BlockRecord) else None)
        return answers


@pytest.fixture
def blocks(disk_dir: Path) -> Iterator[Blocks]:
    made = Blocks(disk_dir / "blocks")
    yield made
    os.close(made.fd)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    changes=st.lists(
        st.tuples(st.integers(0, 11), st.sampled_from(FIELDS), st.integers(0, 40) | st.integers(0, 2**32 - 1))
    ),
    is_sealed_again=st.booleans(),
    flips=st.lists(st.tuples(st.integers(0, 12 * (PLAN.entry_bytes + SLOT) - 1), st.integers(1, 255)), max_size=3),
    slots=st.lists(st.integers(0, 11), min_size=1).map(sorted),
    wrong_name=st.none() | st.integers(0, 11),
)
def test_a_block_is_whole_by_one_rule(
    queue: ReadQueue,
    blocks: Blocks,
    changes: list[tuple[int, str, int]],
    is_sealed_again: bool,
    flips: list[tuple[int, int]],
    slots: list[int],
    wrong_name: int | None,
) -> None:
    """Torn, of another slot, with fields beyond their bounds and a good checksum, of another name, other bytes."""
    rows, payloads = blocks.rows.copy(), list(blocks.payloads)
    try:
        for at, field, value in changes:
            blocks.rows[field][at] = value
        if is_sealed_again:
            slab.seal_rows(blocks.rows, PLAN)
        raw = blocks.rows.view(np.uint8).reshape(-1)
        for at, bits in flips:
            if at < len(raw):
                raw[at] ^= bits
            else:
                which, byte = divmod(at - len(raw), SLOT)
                changed = bytearray(blocks.payloads[which])
                changed[byte] ^= bits
                blocks.payloads[which] = bytes(changed)
        blocks.write()
        names = [hash_of(99) if slot == wrong_name else blocks.names[slot] for slot in slots]
        found, came = blocks.read(queue, slots, names)
        assert found == blocks.expected(slots, names)
        assert came == [blocks.payloads[slot] for slot in slots]
    finally:
        blocks.rows[:], blocks.payloads = rows, payloads


def test_reads_of_nowhere_and_queues_of_no_depth_are_refused(compiled: ModuleType) -> None:
    for depth, slots, per_extent, why in (
        (0, [0], 8, "0 reads in flight"),
        (4, [2**64 - 1], 1, "behind the slab's end"),
        (4, [8], 8, "behind the slab's end"),
        (4, [0, 1], 8, "1 buffers for 2 slots"),
    ):
        with pytest.raises(ValueError, match=why):
            compiled.BlockReads(0, depth, 0, 0, slots, [bytearray(64)], [0], [4096], per_extent, 4096, 64, 8)


def test_rows_that_do_not_fit_are_refused(compiled: ModuleType) -> None:
    with pytest.raises(ValueError, match="bytes for 2 rows"):
        compiled.read_rows(0, [0, 1], 64, bytearray(127))
    assert compiled.read_rows(1 << 20, [0, 64], 64, bytearray(128)) == b"\0\0"  # no such file


def test_rows_come_as_by_pread(compiled: ModuleType, file: int) -> None:
    rng = random.Random(5)
    for _ in range(30):
        offsets = [rng.randrange(64 * 4096 + 100) for _ in range(rng.randrange(1, 9))]
        offsets += [offsets[-1] + 96, offsets[-1] + 192]  # neighbours, in one call
        into = bytearray(96 * len(offsets))
        came = compiled.read_rows(file, offsets, 96, into)
        for i, offset in enumerate(offsets):
            there = os.pread(file, 96, offset)
            if came[i]:
                assert into[96 * i : 96 * i + 96] == there
            else:  # the end of the file costs its neighbours in the same call: they are read anew
                assert any(len(os.pread(file, 96, each)) < 96 for each in offsets[i - 2 : i + 3])


def test_what_does_not_fit_a_slab_is_refused_before_anything_is_read(queue: ReadQueue, blocks: Blocks) -> None:
    buffers, names = [memoryview(bytearray(SLOT)) for _ in range(2)], blocks.names
    fds = blocks.fd, blocks.fd
    with pytest.raises(ValueError, match="not 4096"):
        queue.read_blocks(fds, blocks.layout, [0, 1], names[:2], [buffers[0], buffers[1][1:]])
    with pytest.raises(ValueError, match="2 buffers for 1 slots"):
        queue.read_blocks(fds, blocks.layout, [0], names[:1], buffers)
    with pytest.raises(ValueError, match="1 names for 2 slots"):
        queue.read_blocks(fds, blocks.layout, [0, 1], names[:1], buffers)
    with pytest.raises(ValueError, match="slot 12 lies behind the slab's end"):
        queue.read_blocks(fds, blocks.layout, [1, 12], names[:2], buffers)
    longer = blocks.layout._replace(rule=(blocks.layout.rule[0], 4000, *blocks.layout.rule[2:]))
    with pytest.raises(ValueError, match="bytes with 4000 tokens"):
        queue.read_blocks(fds, longer, [0, 1], names[:2], buffers)
    with pytest.raises((TypeError, ValueError)):
        queue.read_blocks(fds, blocks.layout, [0, 1], [names[0], "a name"], buffers)  # type: ignore[list-item]
    with pytest.raises(BufferError):
        queue.read_blocks(fds, blocks.layout, [0], names[:1], [memoryview(bytes(SLOT))])
    assert queue.is_open
    assert queue.read_blocks(fds, blocks.layout, [], [], []) == []


def test_what_the_kernel_refuses_or_the_file_lacks_is_not_brought(queue: ReadQueue, blocks: Blocks) -> None:
    slots, buffers = [0, 2, 4, 6, 8, 10], [memoryview(bytearray(SLOT)) for _ in range(6)]
    names = [blocks.names[slot] for slot in slots]
    for fds in ((1 << 20, blocks.fd), (blocks.fd, 1 << 20)):  # no such payloads; no such table
        assert queue.read_blocks(fds, blocks.layout, slots, names, buffers) == [None] * 6
    os.ftruncate(blocks.fd, blocks.payload_offset + 10 * SLOT + 100)
    found, _ = blocks.read(queue, [8, 9, 10, 11])
    assert [record is not None for record in found] == [False] * 3 + [False]  # three are one read, and it came short
    found, _ = blocks.read(queue, slots)
    assert [record is not None for record in found] == [True] * 5 + [False]
    assert queue.read_payloads((blocks.fd, blocks.fd), blocks.layout, slots, buffers) == [True] * 5 + [False]
    assert queue.is_open


def test_a_queue_that_the_kernel_lost_brings_nothing_and_is_closed(queue: ReadQueue, blocks: Blocks) -> None:
    queue._compiled.close_queue(queue._queue)
    found, _ = blocks.read(queue, [0, 2, 4, 6, 8, 10])
    assert found == [None] * 6  # nobody can tell what came


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
            blocks.publish(run, new[: run.size])
            blocks.leave(run.extent)
        now = zip(slots, generations, *blocks.find_each(asked), strict=True)
        same = [then == slot and time == new_time and slot >= 0 for then, time, slot, new_time in now]
        assert blocks.still_hold(slots, generations) == same
    blocks.check()
    slots, generations = blocks.find_each(names)
    assert any(blocks.still_hold(slots, generations))
    blocks.clear()
    assert not any(blocks.still_hold(slots, generations))
