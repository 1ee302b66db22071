"""What tiers say they hold: every block once, in runs that never come before their parents."""

from pathlib import Path

from doubles import MemoryTier, chain_of, hierarchy_of, store
from fault_rig import over_slab, settle
from hypothesis import given, strategies

from kvtier.tiers.hierarchy.hierarchy import HeldRun, held_runs, in_runs
from kvtier.tiers.tier import ChainHash


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
    assert sorted(hierarchy.host.held()) == sorted(zip(chain.hashes, [chain.root, chain.hashes[0]], strict=True))
    settle(hierarchy)
