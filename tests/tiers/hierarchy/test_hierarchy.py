"""Stories of the hierarchy: what is stored, found, fetched, passed down, refused, forgotten, and how it is counted."""

from pathlib import Path

import pytest
from doubles import FakeClock, MemoryTier, chain_of, hierarchy_of, reserve, store, wait_until
from fault_rig import Settled, drops, over_slab, settle
from hypothesis import given, strategies

from kvtier.tiers.hierarchy.cache_tiers import PENDING, Attribution
from kvtier.tiers.hierarchy.hierarchy import HeldRun, Hierarchy, held_runs, in_runs
from kvtier.tiers.hierarchy.lower_tier import HierarchySettings
from kvtier.tiers.naming.chain import TokenChain
from kvtier.tiers.tier import ChainHash, Outcome


class Stories:
    """Opens hierarchies that end by the laws: I1 and I3 after every story."""

    def __init__(self, settled: Settled) -> None:
        self._settled = settled

    def open(self, *args: object, **kwargs: object) -> Hierarchy:
        return self._settled(hierarchy_of(*args, **kwargs))  # type: ignore[arg-type]

    def waiting(self, num_blocks: int, slots: int) -> tuple[MemoryTier, TokenChain, Hierarchy]:
        """A chain that only the lower tier has, whose reads wait at its gate."""
        tier, chain = MemoryTier(), chain_of(num_blocks)
        tier.fill(chain)
        tier.gate.clear()
        return tier, chain, self.open(slots=slots, tier=tier)


@pytest.fixture
def stories(settled: Settled) -> Stories:
    return Stories(settled)


def test_attribution_follows_a_run_through_the_tiers_and_always_sums(stories: Stories) -> None:
    tier = MemoryTier()
    chain = chain_of(6)
    tier.fill(chain, 1, 2, 3)
    hierarchy = stories.open(slots=8, tier=tier)
    store(hierarchy, chain, 2, 3)  # block 2 is in both: L2 counts
    assert hierarchy.lookup(chain.hashes, num_l1=1) == Attribution(6, l1=1, l2=1, file=2, miss=2)
    assert len({Attribution(3, l2=1, file=2), Attribution(3, file=2, l2=1), Attribution(3, l2=3)}) == 2  # a value
    with pytest.raises(AssertionError, match="does not sum"):
        Attribution(6, l1=1, l2=2)


def test_a_request_that_starts_inside_another_ones_flight_gets_its_part(stories: Stories) -> None:
    tier, chain, hierarchy = stories.waiting(6, slots=64)
    whole = hierarchy.submit(chain.hashes, chain.root)
    inner = hierarchy.submit(chain.hashes[2:5], chain.parent(2))  # blocks 0 and 1 it has in L1
    tier.read_fails[chain.hashes[1]] = Outcome.IO_ERROR  # a hole before its part is none of its business
    tier.gate.set()
    wait_until(lambda: hierarchy.poll(inner) is not PENDING and hierarchy.poll(whole) is not PENDING)
    assert hierarchy.poll(whole) == 1
    assert hierarchy.poll(inner) == 3
    hierarchy.cancel(whole)
    hierarchy.cancel(inner)


def test_at_the_deadline_a_request_gets_what_has_arrived(stories: Stories) -> None:
    tier, clock = MemoryTier(), FakeClock()
    chain = chain_of(4)
    tier.fill(chain, 2, 3)
    hierarchy = stories.open(slots=16, tier=tier, clock=clock, settings=HierarchySettings(prefetch_deadline=0.5))
    store(hierarchy, chain, 0, 2)  # 0 and 1 are in L2; 2 and 3 hang below
    tier.gate.clear()
    prefetch = hierarchy.submit(chain.hashes, chain.root)
    assert hierarchy.poll(prefetch) is PENDING
    clock.advance(0.6)
    assert hierarchy.poll(prefetch) == 2
    hierarchy.lease(prefetch).release()
    tier.gate.set()


def test_a_pool_without_room_takes_the_head_and_refuses_the_tail(stories: Stories) -> None:
    """FAULTS 22: no wait, no exception."""
    hierarchy = stories.open(slots=4)
    pinned = chain_of(3)
    store(hierarchy, pinned)
    with hierarchy.host.pool.lease(pinned.hashes):
        chain = chain_of(2, first_token=100)
        assert store(hierarchy, chain) == 1
        assert hierarchy.lookup(chain.hashes) == Attribution(2, l2=1, miss=1)
        assert drops(hierarchy, "l2", Outcome.NO_SLOT) == 1


def test_admission_stores_a_block_on_its_second_sighting(stories: Stories) -> None:
    hierarchy = stories.open(slots=8, settings=HierarchySettings(admit_after=2))
    chain = chain_of(2)
    assert store(hierarchy, chain) == 0
    assert drops(hierarchy, "l2", Outcome.NOT_ADMITTED) == 2
    assert store(hierarchy, chain) == 2


def test_a_long_prefix_is_loaded_in_windows_of_a_quarter_of_l2(stories: Stories) -> None:
    tier, chain, hierarchy = stories.waiting(8, slots=16)
    prefetch = hierarchy.submit(chain.hashes, chain.root)
    assert hierarchy.host.pool.counts().filling == 4
    tier.gate.set()
    wait_until(lambda: hierarchy.poll(prefetch) == 8)
    hierarchy.cancel(prefetch)


class TestWriteBack:
    SETTINGS = HierarchySettings(write_policy="write_back", clean_share=0.5)

    def test_a_block_is_demoted_when_the_clean_share_shrinks_and_at_close(self, stories: Stories) -> None:
        tier = MemoryTier()
        hierarchy = stories.open(slots=16, tier=tier, settings=self.SETTINGS)
        first, second = chain_of(6), chain_of(4, first_token=200)
        store(hierarchy, first)
        assert not tier.blocks  # six dirty of sixteen: nothing to do yet
        store(hierarchy, second)  # ten dirty: two more than half
        wait_until(lambda: len(tier.blocks) == 2)
        wait_until(lambda: hierarchy.host.pool.counts().dirty == 8)
        hierarchy.close()  # flushes
        assert set(tier.blocks) == {*first.hashes, *second.hashes}
        tier.check()

    def test_a_dirty_victim_is_dropped_and_counted_and_never_waited_for(self, stories: Stories) -> None:
        tier = MemoryTier()
        tier.gate.clear()
        hierarchy = stories.open(slots=8, tier=tier, settings=HierarchySettings("write_back", clean_share=0.0))
        store(hierarchy, chain_of(8))
        assert store(hierarchy, chain_of(3, first_token=300)) == 3
        shown = hierarchy.stats()
        assert shown['kvtier_store_dropped_total{tier="file",reason="evicted"}'] == 3
        assert shown['kvtier_evicted_total{tier="l2"}'] == 3
        assert hierarchy.stats() == shown  # reading counts nothing twice
        tier.gate.set()


def test_close_with_reads_under_way_ends_in_time(stories: Stories) -> None:
    """FAULTS 25."""
    tier = MemoryTier()
    chain = chain_of(4)
    tier.fill(chain)
    tier.gate.clear()
    hierarchy = hierarchy_of(slots=16, tier=tier)
    prefetch = hierarchy.submit(chain.hashes, chain.root)
    hierarchy.close(timeout=0.2)
    assert tier.closed
    hierarchy.cancel(prefetch)
    assert reserve(hierarchy, chain.hashes, chain.root) is None  # a closed store takes nothing, and says so
    tier.gate.set()


def test_a_write_that_failed_is_made_again_though_nobody_uses_the_tiers(stories: Stories) -> None:
    tier, chain = MemoryTier(), chain_of(3)
    tier.write_fails[chain.hashes[1]] = Outcome.TIMEOUT
    hierarchy = stories.open(slots=8, tier=tier)
    store(hierarchy, chain)
    wait_until(lambda: chain.hashes[1] in tier.writes)
    tier.write_fails.clear()
    wait_until(lambda: tier.holds(chain.hashes) == [True] * 3)


# What tiers say they hold: every block once, in runs that never come before their parents.


def names_of(*numbers: int) -> list[ChainHash]:
    return [number.to_bytes(32, "big") for number in numbers]


@given(strategies.lists(strategies.integers(0, 30), min_size=0, max_size=40), strategies.randoms())
def test_a_forest_falls_into_runs_parents_first(parents: list[int], dice: object) -> None:
    # Block n + 100 hangs on any earlier block, or on one that nobody holds.
    tree = {}
    for n, parent in enumerate(parents):
        name, before = names_of(n + 100, parent + 100 if parent < n else parent)
        tree[name] = before
    pairs = list(tree.items())
    dice.shuffle(pairs)  # type: ignore[attr-defined]
    seen: set[ChainHash] = set()
    for run in in_runs(dict(pairs)):
        assert run.parent in seen or run.parent not in tree
        for before, name in zip([run.parent, *run.hashes], run.hashes, strict=False):
            assert tree[name] == before
            assert name not in seen
            seen.add(name)
    assert seen == tree.keys()


def test_l2_and_the_slab_are_published_as_one(tmp_path: Path) -> None:
    # The head of a chain is in the slab alone, its tail in both, and another chain was evicted everywhere.
    hierarchy = over_slab(tmp_path, slots=16)
    chain, gone = chain_of(8), chain_of(4, first_token=900)
    for first in (0, 4):
        store(hierarchy, chain, first, first + 4)
        assert hierarchy.drain(60)
    store(hierarchy, gone)
    assert hierarchy.drain(60)
    hierarchy.host.pool.evict([*chain.hashes[:4], *gone.hashes])
    hierarchy.ports[0].tier.discard(gone.hashes)  # type: ignore[union-attr]
    assert held_runs(hierarchy) == [HeldRun(chain.root, chain.hashes)]
    # A chain that loses its middle ends as two runs.
    hierarchy.host.pool.evict(chain.hashes)
    hierarchy.ports[0].tier.discard(chain.hashes[5:6])  # type: ignore[union-attr]
    assert sorted(held_runs(hierarchy), key=lambda run: len(run.hashes)) == [
        HeldRun(chain.hashes[5], chain.hashes[6:]),
        HeldRun(chain.root, chain.hashes[:5]),
    ]
    settle(hierarchy)


def test_a_block_that_returned_to_another_slot_is_reported_once() -> None:
    hierarchy = hierarchy_of(slots=4, tier=MemoryTier())
    chain, other = chain_of(2), chain_of(2, first_token=900)
    for kept in (other, chain, other, chain):  # slots change hands, and keep the records of blocks that left
        hierarchy.host.pool.evict([*chain.hashes, *other.hashes])
        store(hierarchy, kept)
    assert hierarchy.drain(60)
    assert sorted(hierarchy.host.lineage(partial=False).pairs()) == sorted(
        zip(chain.hashes, [chain.root, chain.hashes[0]], strict=True)
    )
    settle(hierarchy)
