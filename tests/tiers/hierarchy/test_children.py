"""What a claim says of the blocks behind its last common one: held by L2, by the slab, by both, or gone meanwhile."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from doubles import BLOCK_SIZE, MemoryTier, chain_of, fill_slots, hand_in, hierarchy_of, record_of, reserve, store
from fault_rig import Settled, forget_l2, over_slab

from kvtier.tiers.config.config import Config
from kvtier.tiers.hierarchy.cache_tiers import Claim, Pending
from kvtier.tiers.hierarchy.hierarchy import Hierarchy
from kvtier.tiers.hierarchy.opening import open_hierarchy
from kvtier.tiers.naming.chain import TokenChain, is_named_by, root_hash
from kvtier.tiers.naming.identity import KVShape
from kvtier.tiers.tier import BlockRecord, ChainHash, ChildBlock

COMMON = list(range(2 * BLOCK_SIZE))  # two blocks that all prompts here begin with
Open = Callable[..., Hierarchy]


@pytest.fixture(params=[None, bytes(range(32))], ids=["plain", "encrypted"])
def opened(settled: Settled, tmp_path: Path, request: pytest.FixtureRequest) -> Open:
    """Opens hierarchies over a slab."""
    return lambda slots=32: settled(over_slab(tmp_path, slots=slots, key=request.param))


def prompt(*tokens: int) -> TokenChain:
    """The common blocks, and then these tokens."""
    chain = TokenChain(root_hash(b"f" * 32), BLOCK_SIZE)
    chain.extend([*COMMON, *tokens])
    return chain


def branch(number: int) -> TokenChain:
    """One block behind the common ones, which begins like the others."""
    return prompt(70, 71, 72, number)


def told(chain: TokenChain, block: int = 2) -> ChildBlock:
    return ChildBlock(chain.hashes[block], chain.block_tokens(block))


def answered(hierarchy: Hierarchy, hashes: list[ChainHash], parent: ChainHash, num_l1: int = 0) -> Claim:
    """A request's claim, once it knows where its blocks are; it wants them no more."""
    claim = hierarchy.submit(hashes, parent, num_l1)
    while isinstance(hierarchy.poll(claim), Pending):
        hierarchy.wait_progress(0.01)
    assert claim.found is not None
    hierarchy.cancel(claim)
    return claim


def children(hierarchy: Hierarchy, chain: TokenChain) -> set[ChildBlock]:
    found = answered(hierarchy, chain.hashes, chain.root).children
    assert len({name for name, _ in found}) == len(found) <= 8
    return set(found)


def test_children_in_l2_in_the_slab_and_in_both_are_listed_once(opened: Open) -> None:
    hierarchy = opened()
    below, both, above = branch(1), branch(2), branch(3)
    store(hierarchy, below)
    store(hierarchy, both, first=2)
    assert hierarchy.drain(60)  # the slab has them as well
    forget_l2(hierarchy)
    # The slab alone.
    assert children(hierarchy, branch(9)) == {told(below), told(both)}
    # One of them comes up, another one is stored: L2, the slab, and both at once.
    store(hierarchy, both, first=2)
    store(hierarchy, above, first=2)
    assert hierarchy.drain(60)
    for port in hierarchy.ports:
        assert port.tier is not None
        port.tier.discard([above.hashes[2]])
    assert children(hierarchy, branch(9)) == {told(below), told(both), told(above)}
    # A block that is held and asked for is found, not told of: what follows it is.
    assert children(hierarchy, both) == set()


def test_the_runs_end_decides_whose_children_are_listed(opened: Open) -> None:
    hierarchy = opened()
    long = prompt(*range(100, 100 + 2 * BLOCK_SIZE))  # four blocks
    other = prompt(*range(100, 100 + BLOCK_SIZE), 1, 2, 3, 4)  # parts from it behind the third
    store(hierarchy, long)
    store(hierarchy, other, first=3)
    # All blocks asked for are held: what follows the last of them.
    whole = answered(hierarchy, long.hashes[:3], long.root)
    assert (whole.found, set(whole.children)) == (hierarchy.lookup(long.hashes[:3]), {told(long, 3), told(other, 3)})
    # The run ends early: what follows the last one found, whether L1 has it or not.
    third = prompt(*range(100, 100 + BLOCK_SIZE), 5, 6, 7, 8)
    assert children(hierarchy, third) == {told(long, 3), told(other, 3)}
    assert set(answered(hierarchy, third.hashes, third.root, num_l1=3).children) == {told(long, 3), told(other, 3)}
    # Nothing asked for is held: what follows the claim's parent.
    behind = answered(hierarchy, third.hashes[3:], third.hashes[2])
    assert set(behind.children) == {told(long, 3), told(other, 3)}
    assert children(hierarchy, chain_of(3, first_token=5000)) == {told(long, 0)}
    assert children(hierarchy, chain_of(3, first_token=5000, salt="another tenant")) == set()
    # The request's own next block is no partial hit.
    assert answered(hierarchy, long.hashes[3:], long.hashes[2]).children == ()


def test_filling_blocks_are_not_published(opened: Open) -> None:
    hierarchy = opened()
    sibling = branch(1)
    store(hierarchy, sibling, last=2)
    reservation = reserve(hierarchy, sibling.hashes[2:], sibling.hashes[1])
    assert reservation is not None
    fill_slots(hierarchy, reservation.slots, reservation.hashes)
    hierarchy.host.describe(reservation.slots, [record_of(sibling, 2)])  # as a store does that is called off then
    assert children(hierarchy, branch(9)) == set()
    hierarchy.seal(reservation, [record_of(sibling, 2)], hierarchy.epoch)
    assert hierarchy.drain(60)
    assert children(hierarchy, branch(9)) == {told(sibling)}


def test_more_children_than_eight_are_eight_and_l2_has_the_first_word(opened: Open) -> None:
    hierarchy = opened(slots=32)
    below = [branch(number) for number in range(6)]
    for each in below:
        store(hierarchy, each)
    assert hierarchy.drain(60)
    forget_l2(hierarchy)
    above = [branch(number) for number in range(10, 16)]
    for each in above:
        store(hierarchy, each)
    found = answered(hierarchy, branch(99).hashes, below[0].root).children
    assert len(found) == 8
    assert set(found[:6]) == {told(each) for each in above}


def test_a_tier_that_lists_no_children_has_none() -> None:
    tier = MemoryTier()
    hierarchy = hierarchy_of(slots=32, tier=tier)
    sibling = branch(1)
    tier.fill(sibling)
    assert children(hierarchy, branch(9)) == set()
    store(hierarchy, sibling)
    assert children(hierarchy, branch(9)) == {told(sibling)}
    hierarchy.close()


def test_switched_off_no_claim_has_children_and_no_memory_is_taken(tmp_path: Path) -> None:
    shape = KVShape(2, 1, 64, BLOCK_SIZE, "float32")
    for is_on in (False, True):
        config = Config(
            host={"size": "1MiB", "pin": False}, file={"path": tmp_path / str(is_on), "size": "1MiB"},
            cache={"block_size": BLOCK_SIZE, "partial_blocks": is_on},
        )  # fmt: skip
        hierarchy = open_hierarchy(config, b"f" * 32, shape)
        sibling = branch(1)
        reservation = reserve(hierarchy, sibling.hashes, sibling.root)
        assert reservation is not None
        hierarchy.seal(reservation, [record_of(sibling, i) for i in range(3)], hierarchy.epoch)
        assert hierarchy.drain(60)
        expected = {told(sibling)} if is_on else set()
        assert children(hierarchy, branch(9)) == expected
        forget_l2(hierarchy)
        assert children(hierarchy, branch(9)) == expected
        assert (hierarchy.host._child_index is not None) == is_on
        hierarchy.close()


def test_children_listed_while_blocks_change_are_never_another_blocks(opened: Open) -> None:
    """The index is asked without a lock: its answers may be out of date, never mixed up."""
    hierarchy = opened(slots=16)
    root = prompt().root

    def store_many() -> None:
        for number in range(150):
            hand_in(hierarchy, chain_of(2, first_token=1000 * number))

    storing = threading.Thread(target=store_many)
    storing.start()
    num_told = 0
    while storing.is_alive() or not num_told:
        for name, tokens in answered(hierarchy, chain_of(1, first_token=777_777).hashes, root).children:
            assert is_named_by(BlockRecord(name, root, tokens, 0)), "another block's tokens, or another parent's"
            num_told += 1
    storing.join()
