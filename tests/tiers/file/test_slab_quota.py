"""Bounds of tenants in the slab: a tenant evicts its own oldest blocks at its bound, and no other tenant's."""

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from extent import brief
from slab_rig import BLOCK_SIZE, SLOT, get, hash_of, put, verify

from kvtier.tiers.file.store import FileStore
from kvtier.tiers.tier import ChainHash, Outcome, TenantBound

Opened = Callable[[], FileStore]
SIZE = 2 << 20  # some 500 blocks in eight extents
TENANT = 10_000  # keys of a tenant: those of tenant 0, which has no bound, lie below


def tenant(number: int) -> bytes:
    return bytes([number]) * 32


class Bounds:
    """Of each tenant but the first, in bytes; whose a block is tells its key."""

    def __init__(self, **num_extents: int) -> None:
        self.limits = {int(name.removeprefix("t")): count for name, count in num_extents.items()}
        self.extent_bytes = 0

    def __call__(self, name: ChainHash) -> TenantBound | None:
        number = int.from_bytes(name[:4], "big") // TENANT
        limit = self.limits.get(number)
        return None if limit is None else TenantBound(tenant(number), limit * self.extent_bytes)


@pytest.fixture
def opened(disk_dir: Path) -> Iterator[Opened]:
    """Opens the slab of one directory; at the end the laws hold, and the file has what the index believes."""
    stores: list[FileStore] = []

    def make() -> FileStore:
        stores.append(FileStore.open(disk_dir, b"f" * 32, slot_bytes=SLOT, block_size=BLOCK_SIZE, size=SIZE))
        return stores[-1]

    yield make
    stores[-1].check()
    assert verify(stores[-1]).is_clean
    stores[-1].close()


def bounded(store: FileStore, bounds: Bounds) -> int:
    """Slots of an extent."""
    store.bounds, bounds.extent_bytes = bounds, store.superblock.extent_bytes
    return store.superblock.slots_per_extent


def blocks_of(store: FileStore, number: int) -> list[int]:
    keys = sorted(int.from_bytes(name[:4], "big") for name, _ in store.lineage().pairs())
    return [key for key in keys if key // TENANT == number]


def test_one_tenant_never_takes_what_others_have(opened: Opened) -> None:
    store = opened()
    per_extent = bounded(store, Bounds(t1=4))
    others = range(2 * per_extent)
    assert put(store, others) == [Outcome.OK] * len(others)
    newest = TENANT
    while newest < TENANT + 10 * store.superblock.num_slots:
        keys = range(newest + 1, newest + 1 + per_extent // 2)
        newest = keys[-1]
        assert put(store, keys) == [Outcome.OK] * len(keys)  # it is never refused …
        assert len(blocks_of(store, 1)) <= 4 * per_extent
        assert store.used_by(tenant(1)) == len(blocks_of(store, 1)) * store.superblock.stride
    # … the newest are there, and of the others each one
    assert blocks_of(store, 1)[-1] == newest
    assert len(blocks_of(store, 1)) > 2 * per_extent
    assert blocks_of(store, 0) == list(others)
    assert get(store, others) == [Outcome.OK] * len(others)
    assert get(store, blocks_of(store, 1)) == [Outcome.OK] * len(blocks_of(store, 1))


def test_what_a_tenant_uses_itself_is_kept_longer(opened: Opened) -> None:
    store = opened()
    per_extent = bounded(store, Bounds(t1=4))
    put(store, range(TENANT, TENANT + 4 * per_extent))
    used = list(range(TENANT, TENANT + per_extent // 8))
    assert get(store, used) == [Outcome.OK] * len(used)
    put(store, range(TENANT + 4 * per_extent, TENANT + 5 * per_extent - len(used)))
    assert get(store, used) == [Outcome.OK] * len(used)
    assert get(store, [TENANT + per_extent - 1]) == [Outcome.ABSENT]


def test_a_lower_bound_holds_from_the_next_extent_on(opened: Opened) -> None:
    store = opened()
    bounds = Bounds(t1=6)
    per_extent = bounded(store, bounds)
    put(store, range(TENANT, TENANT + 6 * per_extent))
    assert len(blocks_of(store, 1)) == 6 * per_extent
    bounds.limits[1] = 4
    put(store, range(TENANT + 6 * per_extent, TENANT + 6 * per_extent + 1))
    assert len(blocks_of(store, 1)) == 3 * per_extent + 1  # the newest before it, and what was stored
    assert blocks_of(store, 1)[0] == TENANT + 3 * per_extent
    before = blocks_of(store, 1)
    store.close()
    store = opened()  # what was evicted does not come back
    assert blocks_of(store, 1) == before
    bounded(store, bounds)
    del bounds.limits[1]  # without a bound it is one of all again
    put(store, range(TENANT + 7 * per_extent, TENANT + 10 * per_extent))
    assert len(blocks_of(store, 1)) > 4 * per_extent


def test_more_tenants_than_extents_may_all_store(opened: Opened) -> None:
    store = opened()
    many = 3 * store.superblock.num_extents
    bounded(store, Bounds(**{f"t{number}": 4 for number in range(1, many + 1)}))
    for _ in range(3):
        for number in range(1, many + 1):
            keys = [number * TENANT + len(blocks_of(store, number)) + at for at in range(3)]
            assert put(store, keys) == [Outcome.OK] * 3
    assert put(store, range(3)) == [Outcome.OK] * 3


def test_whose_blocks_are_is_forgotten_with_a_restart_and_no_block_is(opened: Opened) -> None:
    store = opened()
    per_extent = bounded(store, Bounds(t1=4))
    put(store, range(per_extent))
    put(store, range(TENANT, TENANT + 6 * per_extent))
    before = blocks_of(store, 1)
    store.close()
    store = opened()
    bounded(store, Bounds(t1=4))
    assert (blocks_of(store, 0), blocks_of(store, 1)) == (list(range(per_extent)), before)
    assert store.used_by(tenant(1)) == 0
    put(store, range(2 * TENANT - 6 * per_extent, 2 * TENANT))
    assert 0 < store.used_by(tenant(1)) <= 4 * store.superblock.extent_bytes
    store.reset()
    assert store.used_by(tenant(1)) == 0


def test_two_writers_of_one_tenant_keep_its_bound(opened: Opened) -> None:
    store = opened()
    per_extent = bounded(store, Bounds(t1=4))
    put(store, range(per_extent))

    def store_all(first: int) -> list[Outcome]:
        size = per_extent - 10
        return [each for start in range(first, first + 2000, size) for each in put(store, range(start, start + size))]

    with ThreadPoolExecutor(2) as pool:
        outcomes = [each for found in pool.map(store_all, (TENANT, TENANT + 5000)) for each in found]
    assert outcomes.count(Outcome.OK) > 0.9 * len(outcomes)  # the rest found all four being written: it comes again
    assert set(outcomes) <= {Outcome.OK, Outcome.FULL}
    assert len(blocks_of(store, 1)) <= 4 * per_extent
    assert blocks_of(store, 0) == list(range(per_extent))


@pytest.mark.parametrize("seed", range(brief(4, 40)))
def test_whatever_happens_bounds_and_bytes_hold(opened: Opened, seed: int) -> None:
    store, dice = opened(), random.Random(seed)
    bounds = Bounds(t1=4, t2=5, t3=4)
    per_extent = bounded(store, bounds)
    last = {number: number * TENANT for number in range(5)}
    for _ in range(120):
        number, what = dice.randrange(5), dice.random()
        known = blocks_of(store, number)
        if what < 0.7:
            start = last[number] + dice.choice((0, 0, 5))
            keys = range(start, start + dice.randrange(1, per_extent + 10))
            outcomes = put(store, keys)
            assert set(outcomes) <= {Outcome.OK, Outcome.FULL, Outcome.PARENT_FAILED}
            last[number] = number * TENANT + (keys[-1] + 1) % TENANT
        elif what < 0.8 and known:
            store.discard([hash_of(key) for key in dice.sample(known, min(len(known), 20))])
        elif what < 0.95:
            some = dice.sample(known, min(len(known), 20))
            assert get(store, some) == [Outcome.OK] * len(some)
        elif what < 0.97:
            store.reset()
        else:
            bounds.limits[dice.randrange(1, 4)] = dice.randrange(4, 7)
        store.check()
        for each in bounds.limits:
            used = store.used_by(tenant(each)) // store.superblock.stride
            assert len(blocks_of(store, each)) <= used <= 6 * per_extent  # the most of any bound
