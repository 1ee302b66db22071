"""Stories of requests that want more of L2 than others leave them: who waits for room, how long, and in which order."""

from collections.abc import Iterator
from typing import Any

import pytest
from doubles import FakeClock, MemoryTier, chain_of, hierarchy_of, store, wait_until
from fault_rig import misses

from kvtier.tiers.hierarchy.cache_tiers import PENDING, Claim
from kvtier.tiers.hierarchy.hierarchy import Hierarchy
from kvtier.tiers.hierarchy.lower_tier import HierarchySettings
from kvtier.tiers.naming.chain import TokenChain
from kvtier.tiers.tier import Outcome

PATIENCE = 2.0  # seconds


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def hierarchy(clock: FakeClock) -> Iterator[Hierarchy]:
    """Of 8 slots, of which requests that wait may hold 4."""
    settings = HierarchySettings(prefetch_deadline=PATIENCE)
    hierarchy = hierarchy_of(slots=8, tier=MemoryTier(), clock=clock, settings=settings, load_policy="auto")
    yield hierarchy
    for claim in [*hierarchy.promoter.active]:
        hierarchy.cancel(claim)
    assert hierarchy.drain(60)
    hierarchy.check()
    hierarchy.close()


def chains(hierarchy: Hierarchy, *sizes: int) -> list[TokenChain]:
    """Different chains of so many blocks, all of which only the lower tier has."""
    made = [chain_of(size, first_token=1000 * number) for number, size in enumerate(sizes)]
    [port] = hierarchy.ports
    for chain in made:
        port.tier.fill(chain)  # type: ignore[union-attr]
    return made


def ask(hierarchy: Hierarchy, chain: TokenChain, **options: Any) -> Claim:
    return hierarchy.submit(chain.hashes, chain.root, **options)


def promised(hierarchy: Hierarchy, claim: Claim) -> int:
    """Once it has come."""
    wait_until(lambda: hierarchy.poll(claim) is not PENDING)
    count = hierarchy.poll(claim)
    assert isinstance(count, int)
    return count


def test_who_finds_no_room_is_served_in_order_of_arrival(hierarchy: Hierarchy) -> None:
    first, large, small = (ask(hierarchy, chain) for chain in chains(hierarchy, 3, 4, 1))
    assert promised(hierarchy, first) == 3
    assert (
        hierarchy.poll(large) is hierarchy.poll(small) is PENDING
    )  # there is room for the small one, but it came later
    hierarchy.check(in_use=True)
    hierarchy.lease(first).release()
    assert promised(hierarchy, large) == 4
    assert hierarchy.poll(small) is PENDING
    hierarchy.cancel(large)
    assert promised(hierarchy, small) == 1
    assert misses(hierarchy, Outcome.NO_SLOT) == 0


def test_patience_ends_with_what_room_there_is(hierarchy: Hierarchy, clock: FakeClock) -> None:
    first, second, third = (ask(hierarchy, chain) for chain in chains(hierarchy, 3, 3, 2))
    assert promised(hierarchy, first) == 3
    clock.advance(PATIENCE)
    assert promised(hierarchy, second) == 1
    assert misses(hierarchy, Outcome.NO_SLOT) == 2
    assert hierarchy.poll(third) == 0
    assert third.refusal is Outcome.NO_SLOT  # for now: it may ask again


def test_nobody_waits_longer_than_computing_takes(hierarchy: Hierarchy, clock: FakeClock) -> None:
    size, (one, other) = 16, chains(hierarchy, 4, 4)
    hierarchy.computed(4 * size, 0.5)  # as long as a prompt of four blocks takes
    first = ask(hierarchy, one, block_size=size)
    assert promised(hierarchy, first) == 4
    second = ask(hierarchy, other, block_size=size)
    clock.advance(0.4)
    assert hierarchy.poll(second) is PENDING
    clock.advance(0.2)
    assert hierarchy.poll(second) == 0
    assert second.refusal is Outcome.NO_SLOT


def test_a_cancelled_or_expired_claim_leaves_the_line(hierarchy: Hierarchy, clock: FakeClock) -> None:
    first, gone, third = (ask(hierarchy, chain) for chain in chains(hierarchy, 4, 4, 4))
    assert promised(hierarchy, first) == 4
    hierarchy.cancel(gone)
    hierarchy.cancel(first)
    assert promised(hierarchy, third) == 4
    assert hierarchy.poll(gone) == 0


def test_blocks_that_others_hold_take_no_room(hierarchy: Hierarchy) -> None:
    [chain] = chains(hierarchy, 4)
    first, same = ask(hierarchy, chain), ask(hierarchy, chain)
    assert promised(hierarchy, first) == promised(hierarchy, same) == 4
    third = ask(hierarchy, chain)  # all of it is in L2 by now: promised at once, though the half is used up
    assert third.promised == 4
    hierarchy.check(in_use=True)
    store(hierarchy, other := chain_of(1, first_token=9000))
    assert ask(hierarchy, other).promised is None  # in L2 too, but not among the blocks that they use


def test_slots_that_copies_hold_are_waited_for(hierarchy: Hierarchy, clock: FakeClock) -> None:
    held, [wanted, late] = chain_of(8, first_token=9000), chains(hierarchy, 3, 3)
    store(hierarchy, held)
    assert hierarchy.drain(60)
    with hierarchy.host.pool.lease(held.hashes):
        claim = ask(hierarchy, wanted)
        assert hierarchy.poll(claim) is PENDING
    clock.advance(0.01)
    assert promised(hierarchy, claim) == 3
    hierarchy.cancel(claim)
    with hierarchy.host.pool.lease(held.hashes) as lease:
        assert len(lease) >= 5
        with hierarchy.host.pool.lease(wanted.hashes):
            claim = ask(hierarchy, late)
            assert hierarchy.poll(claim) is PENDING
            clock.advance(PATIENCE)
            assert promised(hierarchy, claim) == 0
    assert misses(hierarchy, Outcome.NO_SLOT) == 3


def test_a_prompt_larger_than_all_waits_until_it_is_alone_and_gets_all_there_is(hierarchy: Hierarchy) -> None:
    first, huge = (ask(hierarchy, chain) for chain in chains(hierarchy, 1, 20))
    assert promised(hierarchy, first) == 1
    assert hierarchy.poll(huge) is PENDING
    hierarchy.cancel(first)
    assert promised(hierarchy, huge) == 4


def test_who_took_a_piece_goes_on_before_who_came_meanwhile(hierarchy: Hierarchy) -> None:
    huge, other, small = chains(hierarchy, 10, 6, 1)
    first = ask(hierarchy, huge)
    assert promised(hierarchy, first) == 4
    waiting = [ask(hierarchy, other), ask(hierarchy, small)]
    with hierarchy.lease(first) as lease:
        assert len(lease) == 4
        assert [hierarchy.poll(claim) for claim in waiting] == [PENDING, PENDING]  # else they hold what it needs next
    second = hierarchy.submit(huge.hashes[4:], huge.hashes[3])
    assert promised(hierarchy, second) == 4
    hierarchy.lease(second).release()
    last = hierarchy.submit(huge.hashes[8:], huge.hashes[7])
    assert promised(hierarchy, last) == 2
    assert hierarchy.poll(waiting[0]) is PENDING  # it wants all there is
    hierarchy.lease(last).release()
    assert promised(hierarchy, waiting[0]) == 4
    assert misses(hierarchy, Outcome.NO_SLOT) == 6 + 2 + 2  # what was cut off, not what was lost


def test_who_takes_a_piece_and_does_not_come_back_holds_nobody_up(hierarchy: Hierarchy, clock: FakeClock) -> None:
    huge, other = chains(hierarchy, 10, 4)
    first = ask(hierarchy, huge)
    assert promised(hierarchy, first) == 4
    hierarchy.lease(first).release()
    second = ask(hierarchy, other)
    assert hierarchy.poll(second) is PENDING
    clock.advance(0.5)
    assert promised(hierarchy, second) == 4
