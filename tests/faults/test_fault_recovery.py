"""Fault 3: killed while recovering or evicting, at every single write; the second recovery finds all the rest."""

import os
import shutil
from pathlib import Path

import pytest
from doubles import BLOCK_SIZE, SLOT_BYTES, chain_of, payload_of, record_of
from extent import brief
from fault_rig import FINGERPRINT, DyingIO, killed
from slab_rig import verify

from kvtier.tiers.checksum import checksum
from kvtier.tiers.file.file_io import FileIO
from kvtier.tiers.file.store import FileStore
from kvtier.tiers.tier import BlockRecord, Outcome

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")

CHAIN = chain_of(64)
SIZE = 170_000


def open_store(directory: Path, io: FileIO | None = None) -> FileStore:
    return FileStore.open(
        directory, FINGERPRINT, slot_bytes=SLOT_BYTES, block_size=BLOCK_SIZE, size=SIZE, mode="buffered", io=io
    )


def put(store: FileStore, first: int, last: int) -> list[Outcome]:
    payloads = [memoryview(payload_of(chain_hash)) for chain_hash in CHAIN.hashes[first:last]]
    return store.write([record_of(CHAIN, i) for i in range(first, last)], payloads)


def whole_blocks(store: FileStore) -> set[int]:
    """Which blocks are served; each must be exactly what was stored (I1)."""
    served = set()
    for i, chain_hash in enumerate(CHAIN.hashes):
        buffer = memoryview(bytearray(SLOT_BYTES))
        (result,) = store.read([chain_hash], [buffer])
        if isinstance(result, BlockRecord):
            assert result == record_of(CHAIN, i)
            assert buffer == payload_of(chain_hash)
            served.add(i)
    return served


def slab_with_duplicates(directory: Path) -> None:
    """What a crash between writing blocks anew and blanking their old entries leaves: two entries for five blocks."""
    store = open_store(directory)
    put(store, 0, 20)
    content = store.path.read_bytes()
    row = store.superblock.row_offset
    old = {slot: content[row(slot) : row(slot) + store.superblock.entry_bytes] for slot in range(0, 10, 2)}
    for slot in old:  # the same blocks with other bytes, then with the right ones: the first entries are history
        other = memoryview(bytes(SLOT_BYTES))
        right = record_of(CHAIN, slot)
        store.write([BlockRecord(right.chain_hash, right.parent, right.tokens, checksum(other))], [other])
        put(store, slot, slot + 1)
    places = {slot: row(slot) for slot in old}
    store.close()
    fd = os.open(store.path, os.O_RDWR)
    for slot, entry in old.items():
        os.pwrite(fd, entry, places[slot])
    os.close(fd)


@pytest.mark.parametrize("when", ["half", *brief([], ["before", "after"])])
def test_killed_at_every_write_of_a_recovery(tmp_path: Path, when: str) -> None:
    template = tmp_path / "template"
    slab_with_duplicates(template)
    n = 0
    while True:
        n += 1
        directory = tmp_path / str(n)
        shutil.copytree(template, directory)
        if not killed(lambda io, directory=directory: open_store(directory, io), DyingIO(n, when)):
            break
        store = open_store(directory)  # the second recovery
        assert store.num_recovered == 20
        assert whole_blocks(store) == set(range(20))
        store.check()
        store.close()
        third = open_store(directory)  # and it left nothing to be done
        assert third.num_recovered == 20
        assert verify(third).is_clean
        third.close()
        shutil.rmtree(directory)
    assert n >= 5  # the owner's pid, and each of the five losers


@pytest.mark.parametrize("when", ["half", *brief([], ["before", "after"])])
def test_killed_at_every_write_of_an_eviction(tmp_path: Path, when: str) -> None:
    """An extent goes, with a second chance for what was hit: its rows are blanked, kept blocks and new ones written."""
    template = tmp_path / "template"
    store = open_store(template)
    num_slots, per_extent = store.superblock.num_slots, store.superblock.slots_per_extent
    put(store, 0, num_slots)
    store.close()
    n = 0
    while True:
        n += 1
        directory = tmp_path / str(n)
        shutil.copytree(template, directory)

        def evict(io: FileIO, directory: Path = directory) -> None:
            store = open_store(directory, io)
            store.read([CHAIN.hashes[1]], [memoryview(bytearray(SLOT_BYTES))])  # a hit: kept
            put(store, num_slots, num_slots + 2 * per_extent)

        if not killed(evict, DyingIO(n, when)):
            break
        store = open_store(directory)
        served = whole_blocks(store)
        assert len(served & set(range(num_slots))) >= num_slots - 3 * per_extent  # only the extents under way are lost
        store.check()
        store.close()
        again = open_store(directory)
        assert whole_blocks(again) == served
        assert set(put(again, 50, 54)) == {Outcome.OK}
        again.check()
        again.close()
        shutil.rmtree(directory)
    assert n >= 5  # owner, invalidations, payloads, entries
