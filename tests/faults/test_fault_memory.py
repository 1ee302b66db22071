"""Faults 20-23 and 40: one key twice at once, leases that come back late or never, no room, no pinning, a burst."""

import logging
import random
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from connector_rig import Request
from doubles import (
    BLOCK_SIZE,
    SLOT_BYTES,
    FakeClock,
    MemoryTier,
    bytes_in_l2,
    chain_of,
    fill_slots,
    hierarchy_of,
    payload_of,
    record_of,
    reserve,
    store,
    wait_until,
)
from fault_rig import FINGERPRINT, Settled, ask, drops, fetch, forget_l2, misses, over_slab, settle
from manual_copies import ManualCopyStream
from slab_rig import verify

from kvtier.connector.scheduler import SchedulerSide
from kvtier.connector.worker import WorkerSide
from kvtier.tiers.checksum import checksum
from kvtier.tiers.config.config import Config
from kvtier.tiers.file.file_io import Mode
from kvtier.tiers.file.store import FileStore
from kvtier.tiers.hierarchy.cache_tiers import PENDING
from kvtier.tiers.hierarchy.hierarchy import Hierarchy
from kvtier.tiers.hierarchy.lower_tier import HierarchySettings
from kvtier.tiers.hierarchy.opening import open_hierarchy
from kvtier.tiers.naming.identity import KVShape
from kvtier.tiers.tier import BlockRecord, Outcome

Open = Callable[..., Hierarchy]


@pytest.fixture
def opened(settled: Settled) -> Open:
    """`opened(…)`: doubles.hierarchy_of."""
    return lambda *arguments, **more: settled(hierarchy_of(*arguments, **more))


# 20: one key, twice at once.


def test_of_a_load_and_a_store_of_one_key_at_once_each_ends_and_the_value_is_whole(opened: Open) -> None:
    tier, chain = MemoryTier(), chain_of(3)
    tier.fill(chain)
    tier.gate.clear()
    hierarchy = opened(slots=16, tier=tier)
    prefetch = ask(hierarchy, chain)  # a read is filling the slots …
    computed = reserve(hierarchy, chain.hashes, chain.root)  # … when another request has computed the same blocks
    assert computed is not None
    assert len(computed) == 0
    tier.gate.set()
    wait_until(lambda: hierarchy.poll(prefetch) == 3)
    hierarchy.cancel(prefetch)
    assert [bytes_in_l2(hierarchy, h) for h in chain.hashes] == [payload_of(h) for h in chain.hashes]
    # The other way round: a store is filling the slots when a request wants to load.
    forget_l2(hierarchy)
    storing = reserve(hierarchy, chain.hashes, chain.root)
    assert storing is not None
    prefetch = ask(hierarchy, chain)
    assert hierarchy.poll(prefetch) is PENDING  # it sees nothing half filled
    fill_slots(hierarchy, storing.slots, storing.hashes)
    hierarchy.seal(storing, [record_of(chain, i) for i in range(3)], hierarchy.epoch)
    wait_until(lambda: hierarchy.poll(prefetch) == 3)
    hierarchy.cancel(prefetch)


@pytest.mark.parametrize("mode", ["buffered", "mmap"])
def test_threads_that_write_one_key_with_different_bytes_leave_one_whole_value(tmp_path: Path, mode: Mode) -> None:
    """Two engines' kernels may differ in the last bit: any of the values is right, a mixture never is."""
    store_ = FileStore.open(
        tmp_path, FINGERPRINT, slot_bytes=SLOT_BYTES, block_size=BLOCK_SIZE, size=300_000, mode=mode
    )
    chain = chain_of(4)
    values = [[bytes([16 * i + v]) * SLOT_BYTES for v in range(4)] for i in range(4)]
    wrong: list[str] = []
    done = threading.Event()

    def record(i: int, value: bytes) -> BlockRecord:
        return BlockRecord(chain.hashes[i], chain.parent(i), chain.block_tokens(i), checksum(memoryview(value)))

    def write(number: int) -> None:
        dice = random.Random(number)
        for _ in range(60):
            i = dice.randrange(4)
            value = values[i][number]
            if store_.write([record(i, value)], [memoryview(value)]) != [Outcome.OK]:
                wrong.append("a write failed")

    def read() -> None:
        while not done.is_set():
            for i in range(4):
                buffer = memoryview(bytearray(SLOT_BYTES))
                (result,) = store_.read([chain.hashes[i]], [buffer])
                if isinstance(result, BlockRecord):
                    if bytes(buffer) not in values[i] or result != record(i, bytes(buffer)):
                        wrong.append(f"block {i}: a mixture")
                elif result not in (Outcome.ABSENT, Outcome.EVICTED):
                    wrong.append(f"block {i}: {result}")

    writers = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    readers = [threading.Thread(target=read) for _ in range(2)]
    for thread in (*writers, *readers):
        thread.start()
    for thread in writers:
        thread.join(60)
    done.set()
    for thread in readers:
        thread.join(60)
    assert not wrong, wrong[:3]
    assert store_.stats()["slots_ready"] == 4  # one winner each
    store_.check()
    assert verify(store_).is_clean
    store_.close()


# 21: a lease released twice, too late, or never.


def test_a_lease_is_reclaimed_at_its_deadline_unless_a_copy_reads_its_slots(opened: Open) -> None:
    clock, chain = FakeClock(), chain_of(3)
    hierarchy = opened(slots=32, clock=clock, settings=HierarchySettings(lease_deadline=30.0))
    store(hierarchy, chain)
    side = SchedulerSide(hierarchy)
    l1 = np.zeros((8, 4, SLOT_BYTES // 4), np.uint8)
    stream = ManualCopyStream(l1, hierarchy.host.region)
    worker = WorkerSide(stream, 4, SLOT_BYTES // 4, deadline=0.01)
    for name in ("never", "late", "copying"):
        request = Request(name, chain, 3 * BLOCK_SIZE + 1)
        assert side.lookup(request, 0) == 3 * BLOCK_SIZE
        if name == "copying":
            assert side.allocated(name, [0, 1, 2, 3], 3 * BLOCK_SIZE) == 3 * BLOCK_SIZE
            worker.start_load(side.build_plan())
            break
    clock.advance(1000)
    hierarchy.tick()
    # The promises nobody came for are gone, and counted; the copy's lease stays however long it takes.
    assert misses(hierarchy, Outcome.TIMEOUT) == 6
    assert hierarchy.host.pool.counts().leased == 3
    assert side.allocated("late", [4, 5, 6, 7], 3 * BLOCK_SIZE) == 0  # too late: to be computed, no copy is planned
    assert not side.build_plan()
    for n in range(5):
        store(hierarchy, chain_of(24, first_token=500 * (n + 1)))
    stream.complete_all()
    for i in range(3):
        assert l1[i].tobytes() == payload_of(chain.hashes[i])
    assert side.update(worker.poll()).loaded == ("copying",)
    assert side.update(worker.poll()).loaded == ()
    assert hierarchy.host.pool.counts().leased == 0
    for name in ("never", "late", "copying"):
        side.finished(name)
        side.finished(name)


# 22: everything is leased.


def test_a_pool_without_a_free_slot_drops_stores_at_once_and_misses_loads_in_time(opened: Open) -> None:
    tier, below = MemoryTier(), chain_of(3, first_token=700)
    tier.fill(below)
    settings = HierarchySettings(prefetch_deadline=0.2)
    hierarchy, held = opened(slots=8, tier=tier, settings=settings), chain_of(8)
    store(hierarchy, held)
    assert hierarchy.drain(60)
    with hierarchy.host.pool.lease(held.hashes) as lease:
        assert len(lease) == 8
        new = chain_of(3, first_token=300)
        assert reserve(hierarchy, new.hashes, new.root) is None
        assert drops(hierarchy, "l2", Outcome.NO_SLOT) == 3
        prefetch = ask(hierarchy, below)
        wait_until(lambda: hierarchy.poll(prefetch) == 0)  # copies that end in time would give it slots
        assert misses(hierarchy, Outcome.NO_SLOT) == 3
        hierarchy.cancel(prefetch)
        assert not tier.reads
    assert store(hierarchy, new) == 3
    assert fetch(hierarchy, below) == 3


def test_names_that_a_client_chose_alike_hurt_no_load_and_no_store(opened: Open) -> None:
    """I2: names that differ in their middle alone, as no hash does."""
    tier, below = MemoryTier(), chain_of(3, first_token=700)
    tier.fill(below)
    hierarchy = opened(slots=32, tier=tier)
    pool = hierarchy.host.pool
    crowd = pool.reserve([bytes(12) + bytes([n]) + bytes(19) for n in range(5)])
    assert crowd is not None
    with pool.seal(crowd):
        assert fetch(hierarchy, below) == 3
        assert store(hierarchy, chain_of(3)) == 3
        again = pool.reserve(chain_of(3, first_token=300).hashes)
        assert again is not None
        pool.abandon(again, [])  # nothing, of a reservation that goes on
        pool.abandon(again)
    forget_l2(hierarchy)


# 23: memory cannot be pinned.


def test_memory_that_cannot_be_pinned_is_used_pageable_after_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    class Refusing:
        def use(self, device: int) -> None:
            """There is one."""

        def register(self, address: int, num_bytes: int) -> None:
            raise RuntimeError("cuMemHostRegister_v2: CUDA_ERROR_OUT_OF_MEMORY (2)")

        def unregister(self, address: int) -> None:
            raise AssertionError("nothing was registered")

    shape = KVShape(num_layers=2, num_kv_heads=2, head_dim=16, block_size=BLOCK_SIZE, dtype="float32")
    with caplog.at_level(logging.WARNING):
        hierarchy = open_hierarchy(Config.load(host={"size": "1MiB"}), FINGERPRINT, shape)
        region = hierarchy.host.region
        region.pin(0, Refusing())
        region.pin(0, Refusing())  # by the next stream
        assert region.pinning is not None
        assert region.pinning.wait(60)
        assert not region.is_pinned(np.arange(region.num_slots))
        chain = chain_of(4)
        reservation = reserve(hierarchy, chain.hashes, chain.root)
        assert reservation is not None
        hierarchy.seal(reservation, [record_of(chain, i) for i in range(4)], hierarchy.epoch)
        assert hierarchy.drain(60)
        assert hierarchy.lookup(chain.hashes)["l2"] == 4
        settle(hierarchy)
    assert [
        record.getMessage()
        for record in caplog.records
        if "are pinned, copies of the rest are slow" in record.getMessage()
    ]
    assert len(caplog.records) == 1


# 40: a burst.


def test_a_burst_reads_each_block_of_a_long_cold_prefix_once_and_serves_everybody(tmp_path: Path) -> None:
    """64 requests, one prefix of 2,000 blocks in the slab, an L2 that holds it twice over."""
    hierarchy = over_slab(tmp_path, slots=5000, size=16 << 20)
    prefix = chain_of(2000)
    for first in range(0, 2000, 500):
        assert store(hierarchy, prefix, first, first + 500) == 500
        assert hierarchy.drain(60)
    forget_l2(hierarchy)
    prefetches = [ask(hierarchy, prefix) for _ in range(64)]
    wait_until(lambda: all(hierarchy.poll(prefetch) is not PENDING for prefetch in prefetches), 30)
    tier = hierarchy.ports[0].tier
    assert isinstance(tier, FileStore)
    answers = [hierarchy.poll(prefetch) for prefetch in prefetches]
    for prefetch in prefetches:
        hierarchy.cancel(prefetch)
    num_read = tier.stats()["read_ok"]
    settle(hierarchy)
    assert num_read == 2000  # single flight
    assert answers == [2000] * 64  # and nobody was told to compute what is on its way
