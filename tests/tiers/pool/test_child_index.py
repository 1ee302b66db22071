"""ChildIndex against a dict: nothing false is kept, what fits is found, a full bucket forgets, collisions are told."""

import hashlib

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvtier.tiers.compiled import extension
from kvtier.tiers.pool.child_index import MAX_CHILDREN, ChildIndex
from kvtier.tiers.pool.names import to_words
from kvtier.tiers.tier import ChainHash


def name(number: int) -> ChainHash:
    return hashlib.sha256(number.to_bytes(32, "big")).digest()


def enter(index: ChildIndex, slots: dict[int, int]) -> None:
    """Slots with the numbers of their parents."""
    index.add(to_words([name(parent) for parent in slots.values()]), np.array(list(slots), np.int64))


def bucket_of(index: ChildIndex, parent: int) -> int:
    return int.from_bytes(name(parent)[4:8], "little") * index._num_buckets >> 32


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "remove", "reset"]),
            st.dictionaries(st.integers(0, 40), st.integers(0, 12), max_size=20),
        )
    ),
    st.sampled_from([1, 2, 50, 2**40 + 1]),
)
@example([("add", dict.fromkeys([0, 1, 2, 5, 4, 6, 7, 8], 0)), ("add", {0: 0, 1: 0, 2: 0, 3: 0, 4: 1})], 1)
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


def test_parents_of_one_bucket_are_told_together() -> None:
    """The owner of the slots has to look at their blocks' parents: the index cannot tell these two apart."""
    index = ChildIndex(1000)
    pair = [name(1), name(1)[:8] + name(2)[8:]]
    index.add(to_words(pair), np.array([10, 20]))
    assert index.find(pair[0]) == index.find(pair[1]) == [10, 20]


@given(st.lists(st.binary(min_size=32, max_size=32), min_size=17, max_size=50, unique=True), st.integers(50, 5000))
def test_one_by_one_and_all_at_once_are_the_same(names: list[bytes], num_slots: int) -> None:
    one_by_one, at_once = ChildIndex(num_slots), ChildIndex(num_slots)
    at_once.add(to_words(names), np.arange(len(names)))
    for slot, each in enumerate(names):
        one_by_one.add(to_words([each]), np.array([slot]))
    for each in names:
        found = one_by_one.find(each)
        assert set(found) == set(at_once.find(each)) or len(found) == MAX_CHILDREN
    at_once.check()
    one_by_one.check()


def test_half_full_it_forgets_less_than_one_block_in_fifty() -> None:
    num_slots = 20_000
    index, names = ChildIndex(num_slots), np.random.default_rng(1)
    parents = names.integers(0, 2**64, (num_slots, 4), np.uint64)
    for first in range(0, num_slots, 5000):
        index.add(parents[first : first + 5000], np.arange(first, first + 5000))
    num_found = sum(slot in index.find(parents[slot].tobytes()) for slot in range(num_slots))
    assert num_found > 0.98 * num_slots
    assert index.num_bytes <= 12 * num_slots + 64
    index.check()


def test_edges() -> None:
    index = ChildIndex(1)
    assert index.find(name(1)) == []
    enter(index, {})
    index.remove(np.array([0]))
    enter(index, {0: 1})
    assert index.find(name(1)) == [0]
    index.reset()
    assert index.find(name(1)) == []
    enter(index, {0: 2})
    assert index.find(name(2)) == [0]
    index.check()


@pytest.mark.skipif(extension("kvtier.tiers.pool.child_index_compiled") is None, reason="not built: `make compiled`")
@given(
    st.lists(st.dictionaries(st.integers(0, 29), st.integers(0, 5), max_size=15), max_size=20),
    st.sampled_from([30, 50, 5000]),
)
def test_the_compiled_way_enters_them_in_the_same_places(steps: list[dict[int, int]], num_slots: int) -> None:
    compiled, few = ChildIndex(num_slots), ChildIndex(num_slots)
    few._enter = None
    for step in steps:
        parents = [hashlib.sha256(bytes([number])).digest() for number in step.values()]
        for index in (compiled, few):
            index.enter(parents, list(step))
            index.check()
        assert (compiled._entries == few._entries).all()
        assert (compiled._where == few._where).all()
    assert compiled._enter is not None
    assert not compiled._enter(compiled._entry, compiled._place, [b"p" * 32], [num_slots])
    assert not compiled._enter(compiled._entry, compiled._place, [b"p" * 32], [])
    assert not compiled._enter(compiled._entry, compiled._place, [b"short"], [0])
