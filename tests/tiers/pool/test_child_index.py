"""ChildIndex against a dict: nothing false is kept, what fits is found, a full bucket forgets, collisions are told."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.tiers.pool.child_index import MAX_CHILDREN, ChildIndex
from kvtier.tiers.pool.index import NAME_MIX, to_words
from kvtier.tiers.tier import ChainHash


def name(number: int) -> ChainHash:
    return number.to_bytes(32, "big")


def enter(index: ChildIndex, slots: dict[int, int]) -> None:
    """Slots with the numbers of their parents."""
    index.add(to_words([name(parent) for parent in slots.values()]), np.array(list(slots), np.int64))


def bucket_of(index: ChildIndex, parent: int) -> int:
    return index._bucket_of(*to_words([name(parent)])[0].tolist())


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "remove", "reset"]),
            st.dictionaries(st.integers(0, 40), st.integers(0, 12), max_size=20),
        )
    ),
    st.sampled_from([1, 2, 50, 2**40 + 1]),
)
def test_an_index_is_a_dict_that_may_forget(steps: list[tuple[str, dict[int, int]]], spread: int) -> None:
    index, model = ChildIndex(41), dict[int, int]()
    crowded: set[int] = set()  # buckets that have once been offered more than they hold
    for verb, slots in steps:
        if verb == "add":
            offered = {slot: parent * spread for slot, parent in slots.items()}
            enter(index, offered)
            model.update(offered)
        elif verb == "remove":
            index.remove(np.array(list(slots), np.int64))
            for slot in slots:
                model.pop(slot, None)
        else:
            index.reset()
            model.clear()
        homes = [bucket_of(index, parent) for parent in model.values()]
        crowded |= {bucket for bucket in homes if homes.count(bucket) > MAX_CHILDREN}
        index.check()
        for parent in {number * spread for number in range(13)} | set(model.values()):
            found = index.find(name(parent))
            home = bucket_of(index, parent)
            assert len(found) == len(set(found)) <= MAX_CHILDREN
            assert all(bucket_of(index, model[slot]) == home for slot in found), "a slot that was removed, or moved on"
            if home not in crowded:
                assert set(found) == {slot for slot, other in model.items() if bucket_of(index, other) == home}


@pytest.mark.parametrize("at_once", [True, False])
def test_a_full_bucket_forgets_one_for_each_that_comes(at_once: bool) -> None:
    index = ChildIndex(64)
    if at_once:
        enter(index, dict.fromkeys(range(20), 7))
    else:
        for slot in range(20):
            enter(index, {slot: 7})
            assert slot in index.find(name(7)), "the last to come is always told"
    found = index.find(name(7))
    assert len(found) == MAX_CHILDREN
    assert set(found) <= set(range(20))
    index.check()
    # Slots whose entries were overwritten are not there any more, and removing them takes nobody else's entry.
    index.remove(np.array(sorted(set(range(20)) - set(found)), np.int64))
    assert index.find(name(7)) == found
    # A slot taken again for another block leaves its old parent.
    enter(index, {found[0]: 8})
    if bucket_of(index, 8) != bucket_of(index, 7):
        assert index.find(name(7)) == found[1:]
    assert found[0] in index.find(name(8))
    index.check()


def test_parents_of_one_mixed_word_are_told_together() -> None:
    """The owner of the slots has to look at their blocks' parents: the index cannot tell these two apart."""
    index = ChildIndex(1000)
    one, mask = [1, 2, 3, 4], (1 << 64) - 1
    inverse = pow(int(NAME_MIX[0]), -1, 1 << 64)
    # Another first word makes up for another second one.
    other = [(one[0] - int(NAME_MIX[1]) * inverse) & mask, one[1] + 1, *one[2:]]
    words = np.array([one, other], np.uint64)
    assert len(set((words @ NAME_MIX).tolist())) == 1
    index.add(words, np.array([10, 20]))
    assert index.find(words[0].tobytes()) == index.find(words[1].tobytes()) == [10, 20]


def test_half_full_it_forgets_less_than_one_block_in_fifty() -> None:
    num_slots = 20_000
    index, names = ChildIndex(num_slots), np.random.default_rng(1)
    parents = names.integers(0, 2**63, (num_slots, 4)).astype(np.uint64)
    for first in range(0, num_slots, 5000):
        index.add(parents[first : first + 5000], np.arange(first, first + 5000))
    num_found = sum(slot in index.find(parents[slot].tobytes()) for slot in range(num_slots))
    assert num_found > 0.98 * num_slots
    assert index.num_bytes <= 12 * num_slots + 64
    index.check()


def test_edges() -> None:
    index = ChildIndex(1)
    assert index.find(name(1)) == []
    assert index.find(b"root") == [], "no block's parent has such a name"
    enter(index, {})
    index.remove(np.array([0]))
    enter(index, {0: 1})
    assert index.find(name(1)) == [0]
    index.reset()
    assert index.find(name(1)) == []
    enter(index, {0: 2})
    assert index.find(name(2)) == [0]
    index.check()
