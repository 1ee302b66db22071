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


def test_a_dirty_block_goes_when_nothing_else_is_left_and_is_counted(
    pool_of: PoolOf, chain: Chain, policy: str
) -> None:
    pool, blocks = pool_of(3, policy), chain(1, 2, 3)
    store(pool, blocks)
    pool.mark_dirty(blocks)
    pool.mark_dirty(blocks)
    store(pool, chain(9))
    assert pool.lookup(blocks) == 2  # the tail
    assert pool.num_dirty_dropped == 1
    assert pool.check().dirty == 2
    # A leased dirty block is no victim, but it is still to be written: it comes last.
    store(pool, chain(9))
    with pool.lease(blocks[:1]):
        assert set(pool.oldest_dirty(9)) == set(blocks[:2])
        assert pool.oldest_dirty(9)[0] == blocks[0]
    assert pool.evict(blocks) == 2
    assert pool.num_dirty_dropped == 3


def test_dirty_parents_come_first_across_branches(pool_of: PoolOf, chain: Chain) -> None:
    pool = pool_of(8)
    trunk, left, right = chain(1, 2), chain(1, 2, 3), chain(1, 2, 4)
    store(pool, left)
    store(pool, right)
    pool.mark_dirty([*left, *right[2:]])
    order = pool.oldest_dirty(9)
    assert sorted(order) == sorted({*left, *right})
    assert order[:2] == trunk
