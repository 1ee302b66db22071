"""What stories of the slab share: blocks whose bytes derive from their keys, and reads of an open slab."""

import random
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from kvtier.tiers.checksum import checksum
from kvtier.tiers.file import slab
from kvtier.tiers.file.file_io import FileIO
from kvtier.tiers.file.slab_check import SlabCheck, check_payloads
from kvtier.tiers.file.slab_file import read_header, read_rows
from kvtier.tiers.file.store import FileStore
from kvtier.tiers.tier import BlockRecord, Outcome

SLOT, BLOCK_SIZE = 4096, 4  # unless a story says otherwise


def hash_of(key: int) -> bytes:
    return key.to_bytes(4, "big") * 8


def payload_of(key: int, num_bytes: int = SLOT) -> memoryview:
    return memoryview(random.Random(key).randbytes(num_bytes))


def record_of(key: int, num_bytes: int = SLOT) -> BlockRecord:
    """Of the block behind the one of the key before."""
    parent = hash_of(key - 1) if key else bytes(32)
    return BlockRecord(hash_of(key), parent, key.to_bytes(4, "little") * 4, checksum(payload_of(key, num_bytes)))


def put(store: FileStore, keys: Sequence[int]) -> list[Outcome]:
    size = store.superblock.slot_bytes
    return store.write([record_of(key, size) for key in keys], [payload_of(key, size) for key in keys])


def get(store: FileStore, keys: Sequence[int], into: Sequence[memoryview] | None = None) -> list[Outcome]:
    """Read blocks; whatever comes back as a record is exactly what was stored under that key (I1)."""
    size = store.superblock.slot_bytes
    buffers = into or [memoryview(bytearray(size)) for _ in keys]
    results = store.read([hash_of(key) for key in keys], buffers)
    for key, buffer, result in zip(keys, buffers, results, strict=True):
        if isinstance(result, BlockRecord):
            assert result == record_of(key, size)
            assert buffer == payload_of(key, size)
    return [Outcome.OK if isinstance(result, BlockRecord) else result for result in results]


def ended(store: FileStore, at_end: ExitStack) -> FileStore:
    """When the story is over, its laws hold and it is closed."""
    at_end.callback(store.close)
    at_end.callback(store.check)
    return store


def verify(store: FileStore) -> SlabCheck:
    """Read the whole slab of an idle store and compare it with what the store believes of it; repairs nothing."""
    with store._inside() as is_open:
        assert is_open, "a closed store"
        with store._lock:
            slots = store._blocks.index.named()
            held = dict(zip(slots.tolist(), store._blocks.index.names(slots), strict=True))
            believed = dict(zip(held, zip(held.values(), store._rows.parents_of(slots), strict=True), strict=True))
        rows, is_read = store._rows._filled(list(held), store._rows._read_each)
        whole = is_read & slab.find_valid(rows, slots, store.superblock)
        if whole.any():
            store._codec.show_names(rows, np.flatnonzero(whole))
        told = zip(rows["chain_hash"].tolist(), rows["parent"].tolist(), strict=True)
        says = dict(zip(held, told, strict=True))
        good = [slot for slot, is_whole in zip(held, whole.tolist(), strict=True) if is_whole]
        bad, unreadable = check_payloads(store._payload, store.superblock, good, store._codec, rows[whole])
        bad_rows = [slot for slot in held if slot not in good or says[slot] != believed[slot]]
    names = ([held[slot] for slot in found] for found in (bad, bad_rows, unreadable))
    return SlabCheck(store.superblock, len(held), *names, num_bad_headers=0, is_repaired=False)


def num_on_disk(directory: Path) -> int:
    """Blocks in the slabs of another process, by their entries; nothing is locked."""
    io, num_blocks = FileIO(), 0
    for path in directory.glob("*.slab"):
        with path.open("rb") as file:
            superblock = slab.decode(read_header(io, file.fileno()), str(path))
            num_blocks += int(np.count_nonzero(read_rows(io, file.fileno(), superblock)["state"] == slab.READY))
    return num_blocks
