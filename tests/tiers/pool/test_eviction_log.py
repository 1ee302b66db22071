"""What left a pool is remembered: when, why, and how long it had lived there; both ways of the pool agree."""

import numpy as np
import pytest
from doubles import FakeClock
from pools import Chain, store

from kvtier.tiers.pool.eviction_log import (
    AGE_BOUNDS,
    EVICTED,
    NEVER_SEEN,
    REMOVED,
    RESET,
    SECONDS,
    EvictionLog,
    EvictionReason,
    causes_of,
    eviction_reason,
)
from kvtier.tiers.pool.pool import SlotPool
from kvtier.tiers.tier import Outcome


def pool_of(num_slots: int, clock: FakeClock, *, tier: str = "l2") -> tuple[SlotPool, EvictionLog]:
    pool, eviction_log = SlotPool(num_slots), EvictionLog(tier, 1 << 16, num_slots + 1, clock)
    pool.remember(eviction_log)
    return pool, eviction_log


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("count", [3, 40])
def test_evicted_blocks_say_when_they_left_and_how_old_they_were(chain: Chain, count: int) -> None:
    clock = FakeClock(0.0)
    pool, eviction_log = pool_of(count, clock)
    first, second = chain(*range(count)), chain(*range(1000, 1000 + count))
    store(pool, first)
    clock.now = 100.0
    store(pool, second)  # all of the first go
    clock.now = 140.0
    assert {eviction_reason([eviction_log], name) for name in first} == {EvictionReason(EVICTED, "l2", 40)}
    assert {eviction_reason([eviction_log], name) for name in second} == {EvictionReason(NEVER_SEEN)}
    # a hundred seconds: behind 64, up to 128
    assert eviction_log.ages[AGE_BOUNDS.index(128)] == count
    assert eviction_log.ages[:SECONDS].sum() == count
    assert eviction_log.ages[SECONDS] == 100 * count
    pool.check()


@pytest.mark.usefixtures("way")
def test_every_other_way_out_has_its_name(chain: Chain) -> None:
    pool, eviction_log = pool_of(32, FakeClock(0.0))
    names = chain(*range(10))
    store(pool, names)
    pool.evict(names[8:])
    pool.evict(names[7:8], Outcome.CHECKSUM)
    pool.not_stored(chain(70), Outcome.NOT_ADMITTED)
    pool.evict_idle(names[6:7])
    pool.reset()
    causes = [eviction_reason([eviction_log], name).cause for name in [*names, *chain(70)]]
    assert causes == [RESET] * 6 + [Outcome.QUOTA, Outcome.CHECKSUM, REMOVED, REMOVED, Outcome.NOT_ADMITTED]
    assert not eviction_log.ages.any()  # nothing was evicted to make room


def test_the_tier_that_a_block_left_last_counts(chain: Chain) -> None:
    clock = FakeClock(0.0)
    upper, lower = EvictionLog("l2", 64, 0, clock), EvictionLog("file", 64, 0, clock)
    names = chain(*range(6))
    upper.left(names[:4], EVICTED)
    clock.now = 5.0
    lower.left(names[2:4], EVICTED)
    lower.left(names[4:5], Outcome.QUEUE_FULL)
    clock.now = 7.0
    assert eviction_reason([upper, lower], names[0]) == EvictionReason(EVICTED, "l2", 7)
    assert eviction_reason([upper, lower], names[3]) == EvictionReason(EVICTED, "file", 2)
    counted = causes_of([upper, lower], names)
    assert counted == {
        (EVICTED, "l2"): 2, (EVICTED, "file"): 2, (Outcome.QUEUE_FULL, "file"): 1, (NEVER_SEEN, ""): 1
    }  # fmt: skip
    assert causes_of([upper, lower], names[5:]) == {(NEVER_SEEN, ""): 1}
    assert causes_of([upper, lower], []) == {}


def test_memory_is_bounded_and_what_left_lately_is_remembered() -> None:
    eviction_log = EvictionLog("l2", 4096)
    size = eviction_log.entries.nbytes
    rng = np.random.default_rng(3)
    words = rng.integers(0, 1 << 63, (40_960, 4), np.uint64)
    for batch in np.split(words, 10):
        eviction_log.left(batch, EVICTED)
    assert eviction_log.entries.nbytes == size
    known = eviction_log.find_each(words) > 0
    assert known[-400:].mean() > 0.85
    assert known[:4096].mean() < 0.05
    strangers = rng.integers(0, 1 << 63, (40_960, 4), np.uint64)
    assert not eviction_log.find_each(strangers).any()
