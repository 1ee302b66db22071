"""KV events: what a reader is told of the tiers is true, in order, bounded, and free while nobody listens."""

import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from conftest import Chain
from doubles import MemoryTier, chain_of, fill_slots, hierarchy_of, record_of, reserve, store, wait_until
from event_rig import Shelf, held, tiered
from pools import PoolOf

from kvtier.tiers.file.store import FileStore
from kvtier.tiers.hierarchy.hierarchy import Event, EventSource, Hierarchy, Removed, Stored
from kvtier.tiers.naming.chain import TokenChain
from kvtier.tiers.pool.changes import ChangeLog
from kvtier.tiers.tier import BlockRecord, ChainHash

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


def of_tier(tier: str, events: list[Event]) -> tuple[list[Removed], list[Stored]]:
    """A tier's removals and stores; every removal comes first."""
    mine = [event for event in events if event.tier == tier]
    removed = [event for event in mine if isinstance(event, Removed)]
    stored = [event for event in mine if isinstance(event, Stored)]
    assert mine == [*removed, *stored]
    return removed, stored


def test_a_run_is_told_with_its_tokens_and_parents(tiers_of: Tiered) -> None:
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


def test_what_is_evicted_is_told_and_what_nobody_knew_is_not(tiers_of: Tiered) -> None:
    hierarchy, old, new = tiers_of(slots=8), chain_of(6), chain_of(4, first_token=500)
    source = EventSource(hierarchy)
    store(hierarchy, old)
    assert of_tier("l2", source.take())[0] == []
    assert hierarchy.drain(60)
    store(hierarchy, new)  # two slots were free: the tail of the old chain goes
    removed, stored = of_tier("l2", source.take())
    assert [set(event.hashes) for event in removed] == [set(old.hashes[4:])]
    assert [[record.chain_hash for record in event.blocks] for event in stored] == [new.hashes]
    # Two chains pass through all of L2; the first comes and goes between two readings: nobody hears of it.
    for first in (900, 1300):
        assert hierarchy.drain(60)
        store(hierarchy, chain_of(8, first_token=first))
    removed, stored = of_tier("l2", source.take())
    assert {name for event in removed for name in event.hashes} == {*old.hashes[:4], *new.hashes}
    assert [event.blocks[0].tokens for event in stored] == [np.arange(1300, 1304, dtype="<u4").tobytes()]


def test_a_block_that_goes_and_comes_back_is_told_as_gone_and_then_stored(pool_of: PoolOf, chain: Chain) -> None:
    pool, records = pool_of(4), [BlockRecord(b"", b"", b"", 0)] * 4
    first, second = chain(1, 2), chain(3, 4, 5, 6)
    pool.listen()

    def keep(hashes: list[ChainHash]) -> None:
        reservation = pool.reserve(hashes)
        assert reservation is not None
        for slot, name in zip(reservation.slots, reservation.hashes, strict=True):
            records[slot] = BlockRecord(name, b"", b"", 0)
        pool.seal(reservation).release()

    keep(first)
    assert [record.chain_hash for record in pool.changes(records, 9).stored] == first
    keep(second)  # all four slots
    keep(first)  # two of the four
    changes = pool.changes(records, 9)
    assert (sorted(changes.gone), changes.cleared) == (sorted(first), False)
    assert [record.chain_hash for record in changes.stored] == [*second[:2], *first]


def test_few_blocks_at_a_time_and_a_removal_never_waits(tiers_of: Tiered) -> None:
    hierarchy, chain, shelf = tiers_of(), chain_of(7), Shelf()
    source = EventSource(hierarchy)
    store(hierarchy, chain)
    assert hierarchy.drain(60)
    shelf.apply(source.take(3))
    assert shelf.names("l2") == shelf.names("file") == set(chain.hashes[:3])
    hierarchy.host.pool.evict(chain.hashes[2:4])  # one the reader knows, one it does not
    shelf.apply(source.take(1))
    assert shelf.names("l2") == set(chain.hashes[:2])  # the next in line was the one that is gone
    shelf.read(source, 2)
    assert shelf.blocks["file"].keys() == set(chain.hashes)
    assert {tier: shelf.names(tier) for tier in ("l2", "file")} == held(hierarchy, chain.hashes)


def test_a_reset_is_told_as_everything_gone(tiers_of: Tiered) -> None:
    hierarchy, chain, shelf = tiers_of(), chain_of(5), Shelf()
    source = EventSource(hierarchy)
    store(hierarchy, chain)
    assert hierarchy.drain(60)
    shelf.read(source)
    hierarchy.host.pool.evict(chain.hashes[4:])
    hierarchy.reset()
    hierarchy.reset()
    events = source.take()
    assert [(event.tier, isinstance(event, Removed) and event.all) for event in events] == [
        ("l2", True),
        ("file", True),
    ]
    shelf.apply(events)
    assert shelf.names("l2") == shelf.names("file") == set()
    # A store is told anew, behind it; a reset of what nobody was told of is no news.
    store(hierarchy, chain)
    assert hierarchy.drain(60)
    hierarchy.reset()
    assert source.take() == []


def test_a_reopened_slab_is_told_as_it_was_found(tiers_of: Tiered) -> None:
    first, chain = tiers_of(), chain_of(5)
    store(first, chain)
    assert first.drain(60)
    source, shelf = EventSource(tiers_of()), Shelf()
    assert source.waiting
    events = source.take()
    assert events == [Stored("file", tuple(record_of(chain, i) for i in range(5)))]
    shelf.apply(events)
    # Somebody who lost count starts over, and hears it all again.
    assert EventSource(tiers_of()).take() == events


def test_a_bad_block_is_told_as_removed(tiers_of: Tiered) -> None:
    hierarchy, chain, shelf = tiers_of(), chain_of(4), Shelf()
    source = EventSource(hierarchy)
    store(hierarchy, chain)
    assert hierarchy.drain(60)
    shelf.read(source)
    slab = hierarchy.ports[0].tier
    assert isinstance(slab, FileStore)
    with slab.path.open("r+b") as file:
        file.seek(slab.superblock.payload_offset(slab._blocks.index.find_one(chain.hashes[1])))
        file.write(b"rot")
    hierarchy.host.pool.reset()
    prefetch = hierarchy.ask(chain.hashes, chain.root)
    wait_until(lambda: hierarchy.poll(prefetch) == 1)
    hierarchy.cancel(prefetch)
    shelf.read(source)
    assert {tier: shelf.names(tier) for tier in ("l2", "file")} == held(hierarchy, chain.hashes)
    assert chain.hashes[1] not in shelf.names("file")


def test_a_tier_that_goes_off_is_told_as_emptied_and_told_anew_when_it_is_back(tiers_of: Tiered) -> None:
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


def test_nobody_listens_and_nothing_is_noted(tiers_of: Tiered) -> None:
    hierarchy, chain = tiers_of(), chain_of(4)
    store(hierarchy, chain)
    assert hierarchy.drain(60)
    pool, slab = hierarchy.host.pool, hierarchy.ports[0].tier
    assert isinstance(slab, FileStore)
    assert pool._core.changes is None
    assert not pool.has_changes
    assert not slab.announcer.waiting
    assert pool.changes(hierarchy.host.records, 9) == slab.announcer.take(9)
    assert slab.announcer.stop_listening() == []
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


def test_the_log_stays_small_however_late_its_reader_comes() -> None:
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
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        dice = random.Random(seed)
        try:
            for turn in range(60):
                chain = dice.choice(chains)
                deed = dice.random()
                if deed < 0.6:
                    store_unwatched(hierarchy, chain, dice.randrange(7))
                elif deed < 0.8:
                    hierarchy.cancel(hierarchy.ask(chain.hashes, chain.root))
                elif deed < 0.95:
                    hierarchy.host.pool.evict(chain.hashes[dice.randrange(7) :])
                elif turn > 50:
                    hierarchy.reset()
        except BaseException as error:
            errors.append(error)

    def read() -> None:
        try:
            while not ended.is_set():
                shelf.apply(source.take(5))
        except BaseException as error:
            errors.append(error)

    reader = threading.Thread(target=read)
    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in (reader, *workers):
        thread.start()
    for thread in workers:
        thread.join(60)
    assert hierarchy.drain(60)
    ended.set()
    reader.join(60)
    assert not errors, errors
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
