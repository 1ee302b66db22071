"""SlotPool under write-back: dirty blocks outlive clean ones, and are listed in the order they must be written."""

import pytest
from pools import Chain, PoolOf, store

pytestmark = pytest.mark.usefixtures("way")


def test_clean_blocks_are_evicted_before_dirty_ones(pool_of: PoolOf, chain: Chain, policy: str) -> None:
    pool, dirty, clean = pool_of(4, policy), chain(1, 2), chain(11, 12)
    store(pool, dirty)  # older
    store(pool, clean)
    pool.mark_dirty([*dirty, *chain(99)])
    assert pool.counts().dirty == 2
    assert pool.oldest_dirty(9) == dirty  # parents before children
    assert pool.oldest_dirty(1) == dirty[:1]
    store(pool, chain(21, 22))
    assert (pool.lookup(dirty), pool.lookup(clean)) == (2, 0)
    # Written at last, they are the oldest again.
    pool.mark_clean(dirty[:1])
    pool.mark_clean(dirty[1:])
    assert pool.oldest_dirty(9) == []
    store(pool, chain(31, 32))
    assert pool.lookup(dirty) == 0
    assert pool.num_dirty_dropped == 0
