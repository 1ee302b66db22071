"""BlockPool, L1, as scripted stories: sequences share, free and reuse blocks."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from kvtier.tiers.copies.device import BlockPool
from kvtier.tiers.hierarchy.hierarchy import Removed, Stored, TierEvents
from kvtier.tiers.naming.identity import KVShape
from kvtier.tiers.tier import BlockRecord, ChainHash

pytestmark = pytest.mark.usefixtures("way")

SHAPE = KVShape(num_layers=2, num_kv_heads=1, head_dim=4, block_size=2, dtype="float32")

PoolOf = Callable[..., BlockPool]
Chain = Callable[..., list[ChainHash]]


@pytest.fixture
def pool_of() -> Iterator[PoolOf]:
    """Makes pools whose laws are checked when the test is over."""
    pools: list[BlockPool] = []

    def make(blocks: int, enable_prefix_caching: bool = True) -> BlockPool:
        pools.append(BlockPool(SHAPE, blocks, enable_prefix_caching=enable_prefix_caching))
        return pools[-1]

    yield make
    for pool in pools:
        pool.check()


def allocated(pool: BlockPool, n: int) -> list[int]:
    block_ids = pool.allocate(n)
    assert block_ids is not None
    pool.check()
    return [int(block_id) for block_id in block_ids]


def test_the_tensor_is_block_first_and_clean() -> None:
    pool = BlockPool(SHAPE, 3)
    assert pool.tensor.shape == (3, 2, 2, 2, 1, 4)
    assert pool.tensor.dtype == torch.float32
    assert pool.tensor[0].is_contiguous()
    assert not pool.tensor.any()


def test_fewer_than_no_blocks_are_a_mistake_and_nothing_changes(pool_of: PoolOf) -> None:
    pool = pool_of(4)
    with pytest.raises(ValueError, match="allocate: -1 blocks; ask for 0 or more"):
        pool.allocate(-1)
    assert pool.num_free_blocks == 4
    # No block is handed out twice, and asking for none is fine.
    assert allocated(pool, 0) == []
    assert sorted(allocated(pool, 4)) == [0, 1, 2, 3]
    assert pool.allocate(1) is None


def test_blocks_are_taken_from_the_left_and_freed_to_the_right(pool_of: PoolOf, chain: Chain) -> None:
    pool, first, second = pool_of(6), chain(1, 2), chain(11, 12)
    a = allocated(pool, 2)
    b = allocated(pool, 2)
    pool.publish(a, first, None)
    pool.publish(b, second, None)
    pool.free(a)
    pool.free(b)
    assert pool.num_free_blocks == 6
    # Unnamed blocks go first, then the named ones, oldest first and tail before head.
    assert set(allocated(pool, 2)).isdisjoint([*a, *b])
    assert (pool.lookup(first), pool.lookup(second)) == (2, 2)
    assert allocated(pool, 1) == [a[1]]
    assert (pool.lookup(first), pool.lookup(second)) == (1, 2)
    assert allocated(pool, 2) == [a[0], b[1]]
    assert pool.allocate(2) is None  # one is left: all or nothing
    assert pool.lookup(second) == 1


def test_a_freed_block_keeps_its_name_until_it_is_taken_again(pool_of: PoolOf, chain: Chain) -> None:
    pool, blocks = pool_of(3), chain(1, 2, 3)
    ids = allocated(pool, 3)
    assert pool.match(blocks) == []  # not published
    pool.publish(ids, blocks, None)
    pool.free(ids)
    # A hit takes the blocks back out of the free ones.
    assert pool.match([*blocks[:2], *chain(9)]) == ids[:2]
    assert pool.num_free_blocks == 1
    assert allocated(pool, 1) == [ids[2]]
    assert pool.allocate(1) is None
    assert pool.lookup(blocks) == 2
    pool.free(ids[:2])
    assert pool.num_free_blocks == 2


def test_shared_prefixes_are_counted(pool_of: PoolOf, chain: Chain) -> None:
    pool, prefix = pool_of(4), chain(1, 2)
    ids = allocated(pool, 2)
    pool.publish(ids, prefix, None)
    # A second sequence with the same prefix, and a tail of its own, while the first still runs.
    assert pool.match(prefix) == ids
    tail = allocated(pool, 1)
    pool.publish(tail, chain(1, 2, 3)[2:], prefix[-1])
    pool.free(ids)  # the first ends
    assert pool.num_free_blocks == 1
    pool.free([*ids, *tail])  # the second, its whole table at once
    assert pool.num_free_blocks == 4
    assert pool.lookup(chain(1, 2, 3)) == 3
    # Under pressure the shared prefix goes last.
    allocated(pool, 2)
    assert pool.lookup(chain(1, 2, 3)) == 2


def test_a_duplicate_stays_unnamed(pool_of: PoolOf, chain: Chain) -> None:
    pool, blocks = pool_of(5), chain(1, 2)
    first, second = allocated(pool, 2), allocated(pool, 2)
    pool.publish(first[:1], blocks[:1], None)
    pool.publish(second, blocks, None)  # computed in the same step: block 1 is held, block 2 is new
    assert pool.match(blocks) == [first[0], second[1]]
    pool.free([first[0], second[1]])
    pool.publish(second, blocks, None)  # again: nothing to do
    pool.publish(first, chain(7, 8), None)  # a named block keeps its name
    assert pool.lookup(chain(7)) == 0
    pool.free(first)
    pool.check()
    # `second[1]` runs on under a parent that is free. That parent counts as free, so it can be had.
    assert pool.num_free_blocks == 3
    assert len(allocated(pool, 3)) == 3
    pool.free(second)


def test_a_copy_in_flight_holds_its_block(pool_of: PoolOf, chain: Chain) -> None:
    """FAULTS 16: a freed block does not return to the free ones before its copy is done."""
    pool = pool_of(2)
    ids = allocated(pool, 2)
    pool.publish(ids[:1], chain(1), None)
    pool.hold(ids)  # d2h begins
    pool.free(ids)  # the request is aborted
    assert pool.num_free_blocks == 0
    assert pool.allocate(1) is None
    pool.free(ids)  # the copy's event
    assert pool.num_free_blocks == 2
    with pytest.raises(ValueError, match=r"hold: blocks .* have no reference"):
        pool.hold(ids)


def test_freeing_what_is_free_is_refused(pool_of: PoolOf) -> None:
    pool = pool_of(3)
    ids = allocated(pool, 2)
    pool.free(ids[:1])
    with pytest.raises(ValueError, match=rf"slots \[{ids[0]}\] have no reference"):
        pool.free(ids)
    assert pool.num_free_blocks == 2  # and the other one was not freed
    with pytest.raises(ValueError, match="publish: 1 blocks, 2 hashes"):
        pool.publish(ids[1:], [bytes(32), bytes(32)], None)
    with pytest.raises(ValueError, match=r"publish: blocks .* have no reference"):
        pool.publish(ids[:1], [bytes(32)], None)
    with pytest.raises(ValueError, match="comes twice"):
        pool.publish([*ids[1:], *allocated(pool, 1)], [bytes(32), bytes(32)], None)
    pool.free([])
    pool.check()


def test_reset_unnames_running_blocks_too(pool_of: PoolOf, chain: Chain) -> None:
    pool, blocks = pool_of(4), chain(1, 2)
    running, done = allocated(pool, 2), allocated(pool, 1)
    pool.publish(running, blocks, None)
    pool.publish(done, chain(9), None)
    pool.free(done)
    pool.reset()
    assert pool.lookup(blocks) == pool.lookup(chain(9)) == 0
    assert pool.num_free_blocks == 2
    pool.check()
    pool.free(running)
    assert pool.num_free_blocks == 4
    assert sorted(allocated(pool, 4)) == [0, 1, 2, 3]


def test_without_prefix_caching_nothing_is_named(pool_of: PoolOf, chain: Chain) -> None:
    pool, blocks = pool_of(3, enable_prefix_caching=False), chain(1, 2)
    ids = allocated(pool, 2)
    pool.publish(ids, blocks, None)
    assert pool.match(blocks) == []
    assert pool.lookup(blocks) == 0
    pool.free(ids)
    assert pool.num_free_blocks == 3
    assert pool.generation(ids[0]) == 1
    assert sorted(allocated(pool, 3)) == [0, 1, 2]
    assert pool.generation(ids[0]) == 2


def test_content_stays_what_its_name_says(pool_of: PoolOf, chain: Chain) -> None:
    """A run of random sequences: whatever block a lookup returns holds the value derived from its hash."""
    pool, rng = pool_of(24), np.random.default_rng(3)
    running: list[list[int]] = []
    for _ in range(400):
        if running and (rng.random() < 0.5 or pool.num_free_blocks < 9):
            pool.free(running.pop(int(rng.integers(len(running)))))
            continue
        blocks = chain(*rng.integers(0, 2, int(rng.integers(1, 9))).tolist())
        held = pool.match(blocks)
        for block_id, name in zip(held, blocks, strict=False):
            assert (pool.tensor[block_id] == name[0]).all()
        own = pool.allocate(len(blocks) - len(held))
        if own is None:
            pool.free(held)
            continue
        for block_id, name in zip(own, blocks[len(held) :], strict=True):
            pool.tensor[block_id] = name[0]
        table = [*held, *own]
        pool.publish(own, blocks[len(held) :], blocks[len(held) - 1] if len(held) else None)
        running.append(table)
        pool.check()
    for table in running:
        pool.free(table)
    assert pool.num_free_blocks == 24


def test_who_listens_is_told_what_comes_and_goes(pool_of: PoolOf, chain: Chain) -> None:
    pool = pool_of(3)
    source = TierEvents("l1", pool)
    names = chain(1, 2, 3, 4)
    records = [BlockRecord(name, parent, b"", 0) for name, parent in zip(names, [b"root", *names], strict=False)]
    first = allocated(pool, 2)
    with pytest.raises(ValueError, match="records"):  # it has to be said what they are
        pool.publish(first, names[:2], None)
    pool.publish(first, names[:2], None, records[:2])
    assert source.take() == [Stored("l1", tuple(records[:2]))]
    assert not source.waiting
    # what is there keeps its block; a duplicate is not told
    second = allocated(pool, 1)
    pool.publish(second, names[1:2], names[0], records[1:2])
    assert source.take() == []
    pool.free([*first, *second])
    third = allocated(pool, 2)  # the unnamed one, and the tail
    pool.publish(third, names[2:], None, records[2:])
    assert source.take() == [Removed("l1", (names[1],)), Stored("l1", tuple(records[2:]))]
    pool.reset()
    [gone] = source.take()
    assert isinstance(gone, Removed)
    assert gone.all
    assert set(gone.hashes) == {names[0], *names[2:]}
    assert pool.stop_listening() == []
    pool.free(third)
    fourth = allocated(pool, 1)
    pool.publish(fourth, names[:1], None)  # nobody listens any more
    assert source.take() == []
    with pytest.raises(ValueError, match="name already"):
        pool.listen()
    pool.free(fourth)


def test_a_record_of_another_block_names_nothing(pool_of: PoolOf, chain: Chain) -> None:
    pool = pool_of(4)
    pool.listen()
    names, blocks = chain(1, 2), allocated(pool, 2)
    good = [BlockRecord(names[0], b"", b"", 0), BlockRecord(names[1], names[0], b"", 0)]
    with pytest.raises(ValueError, match="another block"):
        pool.publish(blocks, names, None, [good[0], good[0]])
    pool.check()
    assert pool.lookup(names) == 0
    pool.publish(blocks, names, None, good)
    pool.check()
    assert pool.lookup(names) == 2
    pool.free(blocks)
