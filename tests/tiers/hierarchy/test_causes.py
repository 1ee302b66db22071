"""A miss says what became of the block: evicted from where, removed, reset, refused for a reason, or never seen."""

from functools import partial
from pathlib import Path

import doubles
import numpy as np
import pytest
from doubles import FakeClock, MemoryTier, chain_of, hierarchy_of, store
from fault_rig import ask, forget_l2, over_slab, settle

from kvtier.tiers.hierarchy.hierarchy import Hierarchy, evict_everywhere
from kvtier.tiers.hierarchy.lower_tier import HierarchySettings
from kvtier.tiers.host.host import HostTier
from kvtier.tiers.naming.chain import TokenChain
from kvtier.tiers.reuse import RequestEnd
from kvtier.tiers.tier import Outcome


def count_misses(hierarchy: Hierarchy, chain: TokenChain) -> dict[tuple[str, str], int]:
    """A request's lookup, counted as an engine counts it; what the metrics say of absent blocks since the start."""
    claim = ask(hierarchy, chain)
    hierarchy.poll(claim)
    assert claim.found is not None
    hierarchy.count(claim.found, claim.missing, claim.causes)
    hierarchy.cancel(claim)
    return dict(claim.causes or {})


def test_a_miss_says_which_blocks_were_evicted_and_which_were_never_stored() -> None:
    clock = FakeClock()
    hierarchy = hierarchy_of(slots=8, clock=clock)
    chain, other = chain_of(6), chain_of(8, first_token=1000)
    store(hierarchy, chain, 0, 4)
    assert count_misses(hierarchy, chain) == {("never_seen", ""): 2}
    clock.now += 30.0
    store(hierarchy, other)  # all eight slots: the four blocks go
    clock.now += 40.0
    # the first missing block says when, and from where; the two behind were never stored
    assert hierarchy.eviction_reason(chain.hashes[0]) == ("evicted", "l2", 40)
    assert count_misses(hierarchy, chain) == {("evicted", "l2"): 4, ("never_seen", ""): 2}
    stats = hierarchy.stats()
    assert stats['kvtier_absent_blocks_total{cause="evicted",tier="l2"}'] == 4
    assert stats['kvtier_absent_blocks_total{cause="never_seen",tier=""}'] == 4
    assert stats['kvtier_miss_total{reason="absent"}'] == 8
    # thirty seconds old: not within 16, within 32
    assert stats['kvtier_evicted_age_seconds_bucket{tier="l2",le="16.0"}'] == 0
    assert stats['kvtier_evicted_age_seconds_bucket{tier="l2",le="32.0"}'] == 4
    assert stats['kvtier_evicted_age_seconds_count{tier="l2"}'] == 4
    assert stats['kvtier_evicted_age_seconds_sum{tier="l2"}'] == 120
    assert count_misses(hierarchy, other) == {}
    settle(hierarchy)


@pytest.mark.parametrize("has_lower", [False, True])
def test_what_is_outranked_is_refused_unless_a_lower_tier_takes_it(
    has_lower: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doubles, "HostTier", partial(HostTier, policy="predicted"))
    tier = MemoryTier() if has_lower else None
    hierarchy = hierarchy_of(slots=8, tier=tier)
    order = hierarchy.host.pool._learned
    assert order is not None
    monkeypatch.setattr(order.returns, "places", lambda kinds, seconds: np.full(len(kinds), 1 << 20))
    chain, other = chain_of(6), chain_of(4, first_token=1000)
    store(hierarchy, chain)
    hierarchy.ended(RequestEnd(chain.hashes, 6, 100))
    order.rival.leads = False  # as after the first requests
    hierarchy.host.pool.lease(chain.hashes).release()
    hierarchy.ended(RequestEnd(chain.hashes, 6, 100))
    assert store(hierarchy, other) == (4 if has_lower else 2)  # two slots are free
    assert hierarchy.drain(60)
    assert tier is None or tier.lookup(other.hashes) == 4
    assert count_misses(hierarchy, other) == ({} if has_lower else {("outranked", "l2"): 2})
    dropped = hierarchy.stats().get('kvtier_store_dropped_total{tier="l2",reason="outranked"}', 0)
    assert dropped == (0 if has_lower else 2)
    settle(hierarchy)


def test_what_was_refused_or_forgotten_says_so() -> None:
    hierarchy = hierarchy_of(slots=8, settings=HierarchySettings(admit_after=2))
    chain = chain_of(4)
    assert store(hierarchy, chain) == 0
    assert count_misses(hierarchy, chain) == {("not_admitted", "l2"): 4}
    assert store(hierarchy, chain) == 4
    assert evict_everywhere(hierarchy, chain.hashes[2:], 60.0) == {"l2": 2}
    assert count_misses(hierarchy, chain) == {("removed", "l2"): 2}
    hierarchy.reset()
    assert count_misses(hierarchy, chain) == {("reset", "l2"): 2, ("removed", "l2"): 2}
    hierarchy.stores.abandon(hierarchy.host.pool.reserve(chain.hashes[:1]), Outcome.COPY_FAILED)  # type: ignore[arg-type]
    assert hierarchy.eviction_reason(chain.hashes[0]).cause == "copy_failed"
    settle(hierarchy)


def test_the_slab_remembers_what_it_evicted(disk_dir: Path) -> None:
    hierarchy = over_slab(disk_dir, slots=32)
    first = chain_of(8)
    store(hierarchy, first)
    assert hierarchy.drain(60)
    (port,) = hierarchy.ports
    assert port.tier is not None
    start = 1000
    while port.lookup(first.hashes) == len(first.hashes):  # others take the slab's first extent
        start += 1000
        store(hierarchy, chain_of(16, first_token=start))
        assert hierarchy.drain(60)
    assert hierarchy.eviction_reason(first.hashes[-1])[:2] == ("evicted", "file")  # L2 let it go earlier
    assert sum(hierarchy.metrics.age_counts()["file"]) == port.tier.stats()["evicted"]
    # the same, if an operator removes blocks that the slab alone holds
    last = chain_of(16, first_token=start)
    forget_l2(hierarchy)
    evict_everywhere(hierarchy, last.hashes[4:8], 60.0)
    assert hierarchy.causes(last.hashes[4:8]) == {("removed", "file"): 4}
    settle(hierarchy)
