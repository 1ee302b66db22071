"""FileStore against a dict: any order of stores, reads, evictions, crashes and reopenings (I1)."""

import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
from extent import brief
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from slab_rig import verify

from kvtier.tiers.checksum import checksum
from kvtier.tiers.file.store import FileStore
from kvtier.tiers.tier import BlockRecord, Outcome

FINGERPRINT = b"state machine".ljust(32, b".")
SLOT, BLOCK_SIZE = 4200, 2
SIZES = (100_000, 160_000, 260_000)
KEYS = st.integers(0, 60)


def hash_of(key: int) -> bytes:
    return key.to_bytes(2, "big") * 16


def payload_of(key: int) -> memoryview:
    return memoryview(np.random.default_rng(key).bytes(SLOT))


def parent_of(key: int) -> int:
    """Several blocks follow one, so that each is among the others' children."""
    return 1000 + key % 20


PAYLOADS = [payload_of(key) for key in range(100)]
RECORDS = [
    BlockRecord(hash_of(key), hash_of(parent_of(key)), bytes([key, 0, 0, 0]) * 2, checksum(PAYLOADS[key]))
    for key in range(100)
]


class FileMachine(RuleBasedStateMachine):
    """`held` is what the store may hold: it may forget (evict) but never invent, and never return other bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="kvtier-machine-"))
        self.stored: set[int] = set()
        self.store: FileStore | None = None
        self.size = SIZES[1]
        self.key: bytes | None = None

    def _open(self) -> FileStore:
        return FileStore.open(
            self.directory,
            FINGERPRINT,
            slot_bytes=SLOT,
            block_size=BLOCK_SIZE,
            size=self.size,
            mode="buffered",
            key=self.key,
        )

    @initialize(size=st.sampled_from(SIZES), key=st.sampled_from([None, bytes(range(32))]))
    def begin(self, size: int, key: bytes | None) -> None:
        self.size, self.key = size, key
        self.store = self._open()

    @property
    def now(self) -> FileStore:
        assert self.store
        return self.store

    @rule(first=KEYS, count=st.integers(1, 12))
    def write(self, first: int, count: int) -> None:
        keys = range(first, first + count)
        outcomes = self.now.write([RECORDS[key] for key in keys], [PAYLOADS[key] for key in keys])
        # Blocks held in extents that also hold others may leave a little less room than the slab has slots.
        fits = min(count, self.now.superblock.num_slots - 2 * self.now.superblock.slots_per_extent)
        assert set(outcomes) <= {Outcome.OK, Outcome.FULL}
        assert outcomes.count(Outcome.OK) >= fits
        self.stored.update(keys)
        # What was answered OK is there: no block of the batch was evicted for another one.
        assert self.now.holds([hash_of(key) for key in keys]) == [outcome is Outcome.OK for outcome in outcomes]

    @rule(keys=st.lists(KEYS, min_size=1, max_size=12))
    def read(self, keys: list[int]) -> None:
        held = self.now.holds([hash_of(key) for key in keys])
        buffers = [memoryview(bytearray(SLOT)) for _ in keys]
        results = self.now.read([hash_of(key) for key in keys], buffers)
        for key, buffer, result, is_held in zip(keys, buffers, results, held, strict=True):
            if is_held:
                assert key in self.stored
                assert result == RECORDS[key]
                assert buffer == PAYLOADS[key]
            else:
                assert result is Outcome.ABSENT

    @rule(keys=st.lists(KEYS, max_size=3))
    def discard(self, keys: list[int]) -> None:
        self.now.discard([hash_of(key) for key in keys])
        assert not any(self.now.holds([hash_of(key) for key in keys]))
        self.stored.difference_update(keys)

    @rule(key=KEYS)
    def ask_for_children(self, key: int) -> None:
        """The index may forget a block, but what it tells is held, once, and follows that parent."""
        told = self.now.children(hash_of(parent_of(key)), 8)
        family = {RECORDS[n].chain_hash: RECORDS[n].tokens for n in range(key % 20, 100, 20)}
        assert dict(told).items() <= family.items()
        assert len(dict(told)) == len(told)
        assert all(self.now.holds([child.chain_hash for child in told]))

    @rule()
    def reset(self) -> None:
        self.now.reset()
        self.stored.clear()

    @rule(size=st.sampled_from(SIZES))
    def reopen(self, size: int) -> None:
        grows = size >= self.size
        before = self._held()
        self.now.close()
        self.size = size
        self.store = self._open()
        after = self._held()
        assert after == before if grows else after <= before

    @rule()
    def crash(self) -> None:
        # What a killed process leaves: the file as it is, no farewell, the lock gone.
        before = self._held()
        copy = self.directory.with_suffix(".crashed")
        shutil.copytree(self.directory, copy)
        self.now.close()
        shutil.rmtree(self.directory)
        copy.rename(self.directory)
        self.store = self._open()
        assert self._held() == before

    @precondition(lambda self: self.stored)
    @rule(data=st.data(), bit=st.integers(0, SLOT * 8 - 1))
    def corrupt(self, data: st.DataObject, bit: int) -> None:
        key = data.draw(st.sampled_from(sorted(self.stored)))
        if not self.now.holds([hash_of(key)])[0]:
            return
        slot = self.now._blocks.index.find_one(hash_of(key))
        offset = self.now.superblock.payload_offset(slot) + bit // 8
        fd = os.open(self.now.path, os.O_RDWR)
        os.pwrite(fd, bytes([os.pread(fd, 1, offset)[0] ^ 1 << bit % 8]), offset)
        os.close(fd)
        assert self.now.read([hash_of(key)], [memoryview(bytearray(SLOT))]) == [Outcome.CHECKSUM]
        assert self.now.holds([hash_of(key)]) == [False]

    def _held(self) -> set[int]:
        return {key for key in range(100) if self.now.holds([hash_of(key)])[0]}

    @invariant()
    def laws_hold(self) -> None:
        if self.store:
            self.store.check()
            assert self.store.path.stat().st_size <= self.size
            assert self._held() <= self.stored

    def teardown(self) -> None:
        if self.store:
            assert verify(self.store).is_clean
            self.store.close()
        shutil.rmtree(self.directory)


FileMachine.TestCase.settings = settings(max_examples=brief(20, 60), stateful_step_count=30)
TestFileMachine = FileMachine.TestCase
