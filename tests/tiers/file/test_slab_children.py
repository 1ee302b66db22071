"""Which blocks of a slab follow a given one: told while they are held, with their tokens, and never another's."""

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from slab_rig import SLOT, ended, hash_of, payload_of

from kvtier.tiers.checksum import checksum
from kvtier.tiers.file import slab
from kvtier.tiers.file.store import FileStore
from kvtier.tiers.tier import BlockRecord, ChildBlock, Outcome

MODEL = b"children of slabs".ljust(32, b".")
PARENT = hash_of(9_000_000)
SIZE = 1 << 20
OpenStore = Callable[..., FileStore]


@pytest.fixture
def open_store(tmp_path: Path, key: bytes | None, at_end: ExitStack) -> OpenStore:
    def factory(model: bytes = MODEL, size: int = SIZE, *, partial_blocks: bool = True) -> FileStore:
        store = FileStore.open(tmp_path, model, slot_bytes=SLOT, block_size=4, size=size, mode="buffered", key=key,
                               partial_blocks=partial_blocks)  # fmt: skip
        return ended(store, at_end)

    return factory


def child(key: int, parent: bytes = PARENT, num_tokens: int = 4) -> BlockRecord:
    tokens = np.arange(key, key + num_tokens, dtype="<u4").tobytes()
    return BlockRecord(hash_of(key), parent, tokens, checksum(payload_of(key)))


def keep(store: FileStore, *records: BlockRecord) -> None:
    for record in records:
        assert store.write([record], [payload_of(int.from_bytes(record.chain_hash[:4], "big"))]) == [Outcome.OK]


def told(store: FileStore, parent: bytes = PARENT, limit: int = 8) -> dict[bytes, bytes]:
    """Name → tokens of what the slab says follows the block; each once."""
    children = store.children(parent, limit)
    assert all(isinstance(each, ChildBlock) for each in children)
    assert len(dict(children)) == len(children)
    return dict(children)


def as_told(*records: BlockRecord) -> dict[bytes, bytes]:
    return {record.chain_hash: record.tokens for record in records}


def test_children_are_told_with_their_tokens_now_and_after_a_restart(open_store: OpenStore) -> None:
    store = open_store()
    assert told(store) == {}
    # Three that branch off one block, the last of them a tail; and one behind another block.
    family = [child(1), child(2), child(3, num_tokens=1)]
    keep(store, *family, child(4, hash_of(1)))
    assert told(store) == as_told(*family)
    assert len(told(store, limit=2)) == 2
    assert told(store, hash_of(1)) == as_told(child(4, hash_of(1)))
    assert told(store, hash_of(4)) == told(store, b"no name") == {}
    # One that is stored again, with the same bytes or others, is there once.
    keep(store, family[0])
    other = BlockRecord(hash_of(2), PARENT, family[1].tokens, checksum(payload_of(7)))
    assert store.write([other], [payload_of(7)]) == [Outcome.OK]
    assert told(store) == as_told(*family)
    # The index is made anew from the table.
    store.close()
    again = open_store()
    assert told(again) == as_told(*family)
    assert told(again, hash_of(1)) == as_told(child(4, hash_of(1)))
    # What is forgotten is told no more.
    again.discard([hash_of(1)])
    assert told(again) == as_told(*family[1:])
    again.reset()
    assert told(again) == told(again, hash_of(1)) == {}
    keep(again, child(5))
    assert told(again) == as_told(child(5))


def test_what_lay_in_an_end_that_was_given_up_is_told_no_more(open_store: OpenStore) -> None:
    store = open_store()
    num_slots = store.superblock.num_slots
    family = {child(key, hash_of(5_000_000 + key)).chain_hash: key for key in range(1, num_slots)}
    keep(store, *(child(key, hash_of(5_000_000 + key)) for key in family.values()))
    assert store._shrinker.shrink(SIZE // 2)
    assert store.superblock.num_slots < num_slots
    for name, number in family.items():
        if not store.holds([name])[0]:
            assert told(store, hash_of(5_000_000 + number)) == {}
    num_told = sum(bool(told(store, hash_of(5_000_000 + number))) for number in family.values())
    assert num_told > 0.9 * store.stats()["slots_ready"]
    # The slab goes on: blocks come and are told, in the slots that are left.
    keep(store, child(num_slots + 1))
    assert told(store) == as_told(child(num_slots + 1))
    store.close()
    again = open_store()  # it grows again
    assert told(again) == as_told(child(num_slots + 1))


@pytest.mark.parametrize("key", [bytes(32)], indirect=True)
def test_an_entry_that_is_not_authentic_is_not_told(open_store: OpenStore) -> None:
    store = open_store()
    keep(store, child(1), child(2))
    place = store.superblock.row_offset(store._blocks.index.find_one(hash_of(1)))
    row = np.frombuffer(
        os.pread(store._file.fd, store.superblock.entry_bytes, place), store.superblock.row_dtype
    ).copy()
    sealed = bytearray(row["sealed"].tobytes())
    sealed[-1] ^= 1
    row["sealed"] = np.frombuffer(bytes(sealed), row["sealed"].dtype)
    slab.seal_rows(row, store.superblock)
    os.pwrite(store._file.fd, slab.byte_view(row), place)
    assert told(store) == as_told(child(2))
    store.discard([hash_of(1)])


def test_switched_off_it_knows_none_and_takes_no_memory(open_store: OpenStore) -> None:
    store = open_store(partial_blocks=False)
    keep(store, child(1))
    assert told(store) == {}
    assert store._rows.child_index is None
    # The slab is the same: opened with it, the block is there.
    store.close()
    assert told(open_store()) == as_told(child(1))
