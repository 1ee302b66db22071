"""KV events: what a reader is told of the tiers is true, in order, bounded, and free while nobody listens."""

import os
import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from at_once import at_once, beside
from doubles import MemoryTier, chain_of, fill_slots, hierarchy_of, record_of, reserve, store, wait_until
from event_rig import Shelf, held, tiered

from kvtier.tiers.file.store import FileStore
from kvtier.tiers.hierarchy.hierarchy import EventSource, Hierarchy, Removed, Stored
from kvtier.tiers.naming.chain import TokenChain
from kvtier.tiers.pool.changes import ChangeLog

Tiered = Callable[..., Hierarchy]


@pytest.fixture
def tiers_of(disk_dir: Path) -> Iterator[Tiered]:
    """`tiers_of(slots)`: L2 over a real slab, checked and closed when the test is over; the next one opens it again."""
    opened: list[Hierarchy] = []

    def make(slots: int = 32, size: int = 160_000) -> Hierarchy:
        for earlier in opened:
            earlier.close()
        opened.append(tiered(slots, disk_dir, size))
        return opened[-1]

    yield make
    assert opened[-1].drain(60)
    opened[-1].check()
    opened[-1].close()


def test_a_run_is_published_with_its_tokens_and_parents(tiers_of: Tiered) -> None:
    hierarchy, chain = tiers_of(), chain_of(4)
    source = EventSource(hierarchy)
    assert source.take() == []
    store(hierarchy, chain)
    assert hierarchy.drain(60)
    assert source.waiting
    # One event for each tier: four blocks, the first one's parent the chain's root, with the tokens they stand for.
    records = tuple(record_of(chain, i) for i in range(4))
    assert source.take() == [Stored("l2", records), Stored("file", records)]
    assert records[0].parent == chain.root
    assert records[1].tokens == np.arange(4, 8, dtype="<u4").tobytes()
    assert source.take() == []


def test_a_tier_that_fails_is_reported_as_emptied_and_reported_again_when_it_is_back(tiers_of: Tiered) -> None:
    hierarchy, chain, shelf = tiers_of(), chain_of(4), Shelf()
    source, port = EventSource(hierarchy), hierarchy.ports[0]
    store(hierarchy, chain)
    assert hierarchy.drain(60)
    shelf.read(source)
    assert isinstance(port.tier, FileStore)
    path = port.tier.path
    away = path.with_suffix(".away")
    path.rename(away)
    path.parent.chmod(0o500)
    is_root = os.access(path.parent, os.W_OK)  # whom no permission stops: then a new slab is opened, and it is empty
    port.probe("read")
    path.parent.chmod(0o700)
    events = source.take()
    assert events == [Removed("file", events[0].hashes, all=True)] if isinstance(events[0], Removed) else False
    shelf.apply(events)
    assert shelf.names("file") == set()
    if is_root:
        store(hierarchy, chain_of(2, first_token=700))
    else:
        away.rename(path)
        assert port.probe("read")
    assert hierarchy.drain(60)
    shelf.read(source)
    names = [*chain.hashes, *chain_of(2, first_token=700).hashes]
    assert shelf.names("file") == held(hierarchy, names)["file"]
    assert shelf.names("file")


def test_without_a_listener_nothing_is_logged(tiers_of: Tiered) -> None:
    hierarchy, chain = tiers_of(), chain_of(4)
    store(hierarchy, chain)
    assert hierarchy.drain(60)
    pool, slab = hierarchy.host.pool, hierarchy.ports[0].tier
    assert isinstance(slab, FileStore)
    assert pool._core.changes is None
    assert not pool.has_changes
    assert not slab.change_feed.waiting
    assert pool.changes(hierarchy.host.records, 9) == slab.change_feed.take(9)
    assert slab.change_feed.stop_listening() == []
    # Whoever comes later hears parents before children, whatever slots they lie in.
    pool.evict(chain.hashes[::-1])
    store(hierarchy, chain)
    with pool.lease(chain.hashes) as lease:
        assert lease.slots == [3, 2, 1, 0]
    [stored, _] = EventSource(hierarchy).take()
    assert isinstance(stored, Stored)
    assert [record.chain_hash for record in stored.blocks] == chain.hashes


def test_a_tier_that_cannot_tell_is_passed_over() -> None:
    hierarchy, chain = hierarchy_of(8, MemoryTier()), chain_of(3)
    source = EventSource(hierarchy)
    store(hierarchy, chain)
    assert hierarchy.drain(60)
    assert [event.tier for event in source.take()] == ["l2"]
    assert not source.waiting
    hierarchy.close()


def test_the_log_stays_small_with_a_late_reader() -> None:
    log, everyone = ChangeLog(64), np.arange(64)
    names = np.arange(256, dtype=np.uint64).reshape(64, 4)
    log.stored(everyone)
    assert len(log.take(64)[1]) == 64
    for turn in range(1000):
        slots = np.random.default_rng(turn).permutation(64)[:20]
        log.removed(slots, names[slots])
        log.stored(slots)
        log.check(everyone)
        assert log._num_in_line <= 128
    gone, fresh, _ = log.take(1000)
    assert len(gone) == len(set(gone)) == len(fresh) == 64
    assert not log.waiting


def test_threads_store_evict_and_reset_while_one_reads(tiers_of: Tiered) -> None:
    """The strict shelf minds a block told twice or removed unknown, in any order of theirs; in the end it is true."""
    hierarchy, shelf = tiers_of(slots=24, size=400_000), Shelf()
    chains = [chain_of(7, first_token=1000 * i) for i in range(12)]
    source, ended = EventSource(hierarchy), threading.Event()

    def work(seed: int) -> None:
        dice = random.Random(seed)
        for turn in range(60):
            chain = dice.choice(chains)
            deed = dice.random()
            if deed < 0.6:
                store_unwatched(hierarchy, chain, dice.randrange(7))
            elif deed < 0.8:
                hierarchy.cancel(hierarchy.submit(chain.hashes, chain.root))
            elif deed < 0.95:
                hierarchy.host.pool.evict(chain.hashes[dice.randrange(7) :])
            elif turn > 50:
                hierarchy.reset()

    def read() -> None:
        while not ended.is_set():
            shelf.apply(source.take(5))

    with beside(read):
        try:
            at_once(*(partial(work, seed) for seed in range(3)))
            assert hierarchy.drain(60)
        finally:
            ended.set()
    shelf.read(source)
    names = [name for chain in chains for name in chain.hashes]
    wait_until(lambda: hierarchy.promoter.idle)
    shelf.read(source)
    assert {tier: shelf.names(tier) for tier in ("l2", "file")} == held(hierarchy, names)


def store_unwatched(hierarchy: Hierarchy, chain: TokenChain, first: int) -> None:
    """`doubles.store`, which another thread may undo at once."""
    epoch = hierarchy.epoch
    reservation = reserve(hierarchy, chain.hashes[first:], chain.parent(first))
    if reservation is None:
        return
    fill_slots(hierarchy, reservation.slots, reservation.hashes)
    records = [record_of(chain, first + index) for index in reservation.indices]
    hierarchy.seal(reservation, records, epoch)
