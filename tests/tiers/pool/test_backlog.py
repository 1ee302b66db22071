"""Stories of a backlog: blocks in line for a lower tier, oldest first, each once, which nobody's eviction waits for."""

from typing import Any

import pytest
from pools import Chain, PoolOf, store

from kvtier.tiers.pool.pool import Backlog, SlotPool
from kvtier.tiers.tier import ChainHash


def names_of(line: Backlog, count: int = 99) -> list[ChainHash]:
    names, slots = line.take(count)
    assert len(names) == len(slots)
    return names


def test_a_slot_that_was_taken_again_is_another_blocks_place_in_line(pool_of: PoolOf, chain: Chain) -> None:
    pool = pool_of(2)
    old, new = chain(1, 2), chain(11, 12)
    line = pool.backlog()
    store(pool, old)
    line.add(old)
    store(pool, new)  # in the same slots
    line.add(new[:1])
    assert names_of(line) == new[:1]
    assert line.take_lost() == 2
    # A block that left and came back was not written meanwhile either: it stands in line when it is added again.
    line.add(new)
    pool.evict(new)
    store(pool, new)
    assert names_of(line) == []
    line.add(new)
    assert names_of(line) == new
    assert line.take_lost() == 2


def test_a_look_finds_what_has_left_and_a_reset_forgets_all(pool_of: PoolOf, chain: Chain) -> None:
    pool = pool_of(4)
    blocks = chain(1, 2, 3)
    store(pool, blocks)
    line = pool.backlog()
    line.add([*blocks, *chain(99)])  # one that is not here
    pool.evict(blocks[2:])
    assert line.take_lost(look=True) == 2
    assert len(line) == 2
    line.remove([*blocks[:1], *chain(99)])
    line.remove(blocks[:1])
    assert names_of(line) == blocks[1:2]
    line.add(blocks[:2])
    pool.reset()
    assert (len(line), line.take_lost(look=True)) == (0, 0)


def test_an_eviction_looks_past_so_many_dirty_blocks_and_no_further(
    pool_of: PoolOf, chain: Chain, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all blocks are dirty, finding that out takes a look at each: not in one go, under the lock."""
    monkeypatch.setenv("KVTIER_COMPILED", "off")  # its calls can be counted
    monkeypatch.setattr("kvtier.tiers.pool.core.MOST_PASSED", 8)
    pool: SlotPool = pool_of(64, policy)
    singles = [chain(number) for number in range(100, 164)]
    for each in singles:
        store(pool, each)
    for each in singles[:60]:
        pool.mark_dirty(each)
    popped: list[int] = []
    order: Any = pool._core.order
    real = order.pop

    def pop() -> int:
        popped.append(real())
        return popped[-1]

    order.pop = pop
    store(pool, chain(1))
    assert 8 <= len(popped) <= 16  # not sixty, to come to a clean one
    assert pool.num_dirty_dropped == 1
    assert pool.lookup(singles[0]) == 0  # the first in line went after all
    for number in range(2, 9):
        store(pool, chain(number))
    assert pool.num_dirty_dropped < 8  # clean ones were found by and by
    pool.check()


def test_where_nothing_is_to_be_kept_any_more_the_policys_order_is_back(
    pool_of: PoolOf, chain: Chain, policy: str
) -> None:
    pool = pool_of(4, policy)
    dirty, clean = chain(1, 2), chain(11, 12)
    store(pool, dirty)
    pool.mark_dirty(dirty)
    store(pool, clean)
    store(pool, chain(21))  # a clean one goes, and the dirty ones were passed over
    assert pool.lookup(dirty) == 2
    pool.mark_all_clean()
    assert not pool.has_dirty
    store(pool, chain(22, 23))
    assert pool.lookup(dirty) == 0
    assert pool.num_dirty_dropped == 0
    pool.check()
