"""Stories of tails, the unfinished last blocks of chains, in L2: told as children, of no use as blocks, soon gone."""

from dataclasses import replace

import pytest
from doubles import (
    BLOCK_SIZE,
    MemoryTier,
    bytes_in_l2,
    chain_of,
    fill_slots,
    hand_in,
    hierarchy_of,
    payload_of,
    store,
    wait_until,
)
from event_rig import Shelf

from kvtier.tiers.hierarchy.cache_tiers import Wanted
from kvtier.tiers.hierarchy.hierarchy import EventSource, Hierarchy, evict_everywhere, held_runs
from kvtier.tiers.hierarchy.lower_tier import HierarchySettings
from kvtier.tiers.host.host import HostRegion, HostTier
from kvtier.tiers.naming.chain import TokenChain, is_named_by
from kvtier.tiers.tier import BlockRecord, ChildBlock

WHOLE = BLOCK_SIZE * 2  # tokens of the blocks before the tails


def tail_of(num_tokens: int = WHOLE + 3, first_token: int = 0, last: int | None = None) -> BlockRecord:
    """The tail of consecutive tokens, or with another last one."""
    chain = TokenChain(chain_of(0).root, BLOCK_SIZE)
    tokens = list(range(first_token, first_token + num_tokens))
    chain.extend(tokens if last is None else [*tokens[:-1], last])
    tail = chain.partial_block(num_tokens)
    assert tail is not None
    return tail


def store_partial(hierarchy: Hierarchy, tail: BlockRecord) -> int:
    """Reserve, fill and seal it; how many slots were taken. Waits for the sealing."""
    tenant = chain_of(0).root
    [reservation] = hierarchy.reserve([Wanted([tail.chain_hash], tail.parent, tenant, is_partial=True)])
    if reservation is None or not len(reservation):
        return 0
    fill_slots(hierarchy, reservation.slots, reservation.hashes)
    hierarchy.seal(reservation, [tail], hierarchy.epoch)
    assert hierarchy.stores.sealing_queue.drain(60)
    return len(reservation)


def is_held(hierarchy: Hierarchy, tail: BlockRecord) -> bool:
    return hierarchy.holds([tail.chain_hash])[0]


def close(hierarchy: Hierarchy) -> None:
    assert hierarchy.drain(60)
    hierarchy.check()
    hierarchy.close()


def test_a_tail_is_listed_as_a_child_and_found_by_its_own_name_only() -> None:
    hierarchy, chain = hierarchy_of(16), chain_of(3)
    store(hierarchy, chain, 0, 2)
    tail = tail_of()
    assert store_partial(hierarchy, tail) == 1
    assert is_named_by(tail)
    claim = hierarchy.submit(chain.hashes, chain.root, block_size=BLOCK_SIZE)
    assert hierarchy.poll(claim) == 2  # the whole block that begins as the tail does is nowhere
    assert list(claim.children) == [ChildBlock(tail.chain_hash, tail.tokens)]
    hierarchy.cancel(claim)
    view = hierarchy.submit([*chain.hashes[:2], tail.chain_hash], chain.root, block_size=BLOCK_SIZE)
    assert hierarchy.poll(view) == 3
    hierarchy.lease(view).release()
    assert bytes_in_l2(hierarchy, tail.chain_hash) == payload_of(tail.chain_hash)
    assert store_partial(hierarchy, tail) == 0  # held already
    stats = hierarchy.stats()
    assert stats['kvtier_pool_slots{tier="l2",state="tails"}'] == 1
    assert stats['kvtier_pool_slots{tier="l2",state="ready"}'] == 3
    close(hierarchy)


@pytest.mark.parametrize("write_policy", ["write_through", "write_back"])
def test_a_tail_enters_no_other_tier_and_no_archive(write_policy: str) -> None:
    tier = MemoryTier()
    hierarchy = hierarchy_of(16, tier, HierarchySettings(write_policy=write_policy))  # type: ignore[arg-type]
    store(hierarchy, chain_of(2))
    tail = tail_of()
    store_partial(hierarchy, tail)
    assert hierarchy.drain(60)
    assert set(tier.blocks) == set(chain_of(2).hashes)
    assert hierarchy.host.pool.counts().dirty == 0
    assert [run.hashes for run in held_runs(hierarchy)] == [chain_of(2).hashes]
    assert dict(hierarchy.host.lineage().pairs())[tail.chain_hash] == tail.parent
    close(hierarchy)


def test_no_event_has_a_tail() -> None:
    hierarchy, shelf = hierarchy_of(16), Shelf()
    store_partial(hierarchy, tail_of(3))  # before anybody listened
    source = EventSource(hierarchy)
    store(hierarchy, chain_of(2))
    tail = tail_of()
    store_partial(hierarchy, tail)
    shelf.apply(source.take())
    assert not source.waiting
    hierarchy.host.pool.evict([tail.chain_hash])
    assert source.take() == []
    store_partial(hierarchy, tail)
    hierarchy.reset()
    [removed] = source.take()
    assert set(removed.hashes) == set(chain_of(2).hashes)  # type: ignore[union-attr]
    close(hierarchy)


def test_what_goes_on_as_a_tail_does_takes_its_place() -> None:
    hierarchy, chain = hierarchy_of(32), chain_of(3)
    store(hierarchy, chain, 0, 2)
    short, long, other = tail_of(WHOLE + 1), tail_of(WHOLE + 3), tail_of(WHOLE + 3, last=99)
    for tail in (short, long, other):
        assert store_partial(hierarchy, tail) == 1
    assert [is_held(hierarchy, tail) for tail in (short, long, other)] == [False, True, True]
    assert store_partial(hierarchy, short) == 1  # a slot until it is known what it has
    assert not is_held(hierarchy, short)  # a held one begins as it does
    store(hierarchy, chain, 2)  # the next turn's whole block
    assert [is_held(hierarchy, tail) for tail in (short, long, other)] == [False, False, True]
    store_partial(hierarchy, long)
    assert not is_held(hierarchy, long)
    assert hierarchy.host.pool.counts().filling == 0
    close(hierarchy)


def test_tails_have_an_eighth_of_l2_and_the_oldest_is_evicted_first() -> None:
    hierarchy = hierarchy_of(16)
    store(hierarchy, chain_of(2))
    first, second, third = (tail_of(WHOLE + 2, last=90 + number) for number in range(3))
    for tail in (first, second, third):
        store_partial(hierarchy, tail)
    assert [is_held(hierarchy, tail) for tail in (first, second, third)] == [False, True, True]
    with hierarchy.host.pool.lease([second.chain_hash]):  # in use: its name goes now, its slot at the end
        store_partial(hierarchy, first)
        assert not is_held(hierarchy, second)
        hierarchy.check(in_use=True)
    assert hierarchy.host.pool.counts().tails == 2
    close(hierarchy)


def test_whole_blocks_take_the_room_of_tails_that_are_older() -> None:
    hierarchy = hierarchy_of(8)
    store(hierarchy, chain_of(2))
    tail = tail_of()
    store_partial(hierarchy, tail)
    assert store(hierarchy, chain_of(6, first_token=1000)) == 6  # five slots are free: the tail is the sixth
    assert not is_held(hierarchy, tail)
    assert hierarchy.lookup(chain_of(2).hashes).loadable == 2
    close(hierarchy)


def test_admission_takes_a_tail_after_a_block_that_was_seen_often_enough() -> None:
    hierarchy, tail = hierarchy_of(16, settings=HierarchySettings(admit_after=2)), tail_of()
    assert store(hierarchy, chain_of(2)) == 0
    assert store_partial(hierarchy, tail) == 0
    assert hand_in(hierarchy, chain_of(2)) == 2
    assert store_partial(hierarchy, tail) == 1  # maybe before its parent is sealed
    short = tail_of(3)  # a prompt without a whole block
    assert store_partial(hierarchy, short) == 0
    close(hierarchy)


def test_switched_off_nothing_is_taken() -> None:
    hierarchy = hierarchy_of(16)
    hierarchy.host.close()
    region = HostRegion.allocate(16, 4096, huge_pages=False, prefault=False)
    hierarchy.host = hierarchy.stores._host = HostTier(region, partial_blocks=False)
    tenant = chain_of(0).root
    tail = tail_of()
    wanted = Wanted([tail.chain_hash], tail.parent, tenant, is_partial=True)
    reservations = hierarchy.reserve([wanted, replace(wanted, hashes=chain_of(1).hashes, is_partial=False)])
    assert [0 if each is None else len(each) for each in reservations] == [0, 1]
    assert not any(name.startswith("kvtier_store_dropped") for name in hierarchy.stats())


def test_evicting_a_block_evicts_the_tails_after_it() -> None:
    hierarchy, chain, tail = hierarchy_of(16), chain_of(2), tail_of()
    store(hierarchy, chain)
    store_partial(hierarchy, tail)
    assert evict_everywhere(hierarchy, chain.hashes, 60) == {"l2": 2}
    assert not is_held(hierarchy, tail)
    store_partial(hierarchy, tail)
    hierarchy.reset()
    assert not is_held(hierarchy, tail)
    assert hierarchy.host.pool.counts().tails == 0
    close(hierarchy)


def test_a_tail_that_somebody_changed_is_no_hit() -> None:
    hierarchy, chain, tail = hierarchy_of(16, verify=True), chain_of(2), tail_of()
    store(hierarchy, chain)
    store_partial(hierarchy, tail)
    with hierarchy.host.pool.lease([tail.chain_hash]) as lease:
        hierarchy.host.region.slot(lease.slots[0])[-1] ^= 1  # also behind its tokens: a slot is hashed whole
    view = hierarchy.submit([*chain.hashes, tail.chain_hash], chain.root, block_size=BLOCK_SIZE)
    wait_until(lambda: hierarchy.poll(view) == 2)
    hierarchy.cancel(view)
    assert not is_held(hierarchy, tail)
    close(hierarchy)
