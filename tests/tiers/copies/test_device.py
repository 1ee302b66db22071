"""BlockPool, L1, as scripted stories: sequences share, free and reuse blocks."""

from collections.abc import Callable, Iterator

import pytest
import torch

from kvtier.tiers.copies.device import BlockPool
from kvtier.tiers.naming.identity import KVShape
from kvtier.tiers.tier import ChainHash

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
    with pytest.raises(ValueError, match="allocate: -1 blocks; give 0 or more"):
        pool.allocate(-1)
    assert pool.num_free_blocks == 4
    # No block is handed out twice, and asking for none is fine.
    assert allocated(pool, 0) == []
    assert sorted(allocated(pool, 4)) == [0, 1, 2, 3]
    assert pool.allocate(1) is None


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


def test_tokens_of_another_block_size_name_nothing(pool_of: PoolOf, chain: Chain) -> None:
    pool = pool_of(4)
    pool.listen()
    names, blocks = chain(1, 2), allocated(pool, 2)
    with pytest.raises(ValueError, match="tokens of 0"):  # they are needed
        pool.publish(blocks, names, None)
    with pytest.raises(ValueError, match="a block here at most"):
        pool.publish(blocks, names, None, [b"", bytes(4096)])
    pool.check()
    assert pool.lookup(names) == 0
    pool.publish(blocks, names, None, [b"", b""])
    pool.check()
    assert pool.lookup(names) == 2
    pool.stop_listening()
    with pytest.raises(ValueError, match="name already"):
        pool.listen()
    pool.free(blocks)
