"""ChildIndex against a dict: nothing false is kept, what fits is found, a full bucket forgets, collisions are told."""

import hashlib
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvtier.tiers.compiled import extension
from kvtier.tiers.pool import core
from kvtier.tiers.pool.core import ChildIndex
from kvtier.tiers.pool.policy import MAX_CHILDREN
from kvtier.tiers.pool.policy import make_child_index as made
from kvtier.tiers.tier import ChainHash


def name(number: int) -> ChainHash:
    return hashlib.sha256(number.to_bytes(32, "big")).digest()


def enter(index: ChildIndex, slots: dict[int, int]) -> None:
    """Slots with the numbers of their parents."""
    index.enter([name(parent) for parent in slots.values()], list(slots))


def bucket_of(index: ChildIndex, parent: int) -> int:
    return int.from_bytes(name(parent)[4:8], "little") * index.num_buckets >> 32


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
    index, model = made(41), dict[int, int]()
    crowded: set[int] = set()  # buckets that have once been offered more than they hold
    for verb, slots in steps:
        if verb == "add":
            offered = {slot: parent * spread for slot, parent in slots.items()}
            enter(index, offered)
            model.update(offered)
        elif verb == "remove":
            index.remove(list(slots))
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


def test_parents_of_one_bucket_are_told_together() -> None:
    """The owner of the slots has to look at their blocks' parents: the index cannot tell these two apart."""
    index = made(1000)
    pair = [name(1), name(1)[:8] + name(2)[8:]]
    index.enter(pair, [10, 20])
    assert index.find(pair[0]) == index.find(pair[1]) == [10, 20]


def test_half_full_it_forgets_less_than_one_block_in_fifty() -> None:
    num_slots = 20_000
    index, names = made(num_slots), np.random.default_rng(1)
    parents = [names.bytes(32) for _ in range(num_slots)]
    for first in range(0, num_slots, 5000):
        index.enter(parents[first : first + 5000], list(range(first, first + 5000)))
    num_found = sum(slot in index.find(parents[slot]) for slot in range(num_slots))
    assert num_found > 0.98 * num_slots
    assert index.num_bytes <= 12 * num_slots + 64
    index.check()


@pytest.mark.skipif(extension("kvtier.tiers.pool.core_compiled") is None, reason="not built: `make compiled`")
@given(
    st.lists(st.dictionaries(st.integers(0, 29), st.integers(0, 5), max_size=15), max_size=20),
    st.sampled_from([30, 50, 5000]),
)
def test_compiled_they_are_entered_in_the_same_places(steps: list[dict[int, int]], num_slots: int) -> None:
    compiled, interpreted = made(num_slots), ChildIndex(num_slots)
    assert type(compiled) is not type(interpreted)
    for step in steps:
        parents = [hashlib.sha256(bytes([number])).digest() for number in step.values()]
        for index in (compiled, interpreted):
            index.enter(parents, list(step))
            index.check()
        for number in range(6):
            parent = hashlib.sha256(bytes([number])).digest()
            assert compiled.find(parent) == interpreted.find(parent)


@pytest.mark.parametrize("form", [core, extension("kvtier.tiers.pool.core_compiled") or core])
def test_what_cannot_be_entered_is_refused_and_the_index_stays_whole(form: Any) -> None:
    index = form.ChildIndex(30)
    index.enter([name(1)], [3])
    for parents, slots, error in (
        ([name(2)], [30], IndexError), ([name(2)], [-1], IndexError), ([name(2)], [2**63], OverflowError),
        ([name(2)], [], ValueError), ([name(2)] * 2, [3, 99], IndexError),
    ):  # fmt: skip
        with pytest.raises((error, IndexError)):
            index.enter(parents, slots)
        index.check()
    index.enter([b"short", b"another"], [4, 5])  # no block has such a parent
    assert index.find(b"short") == index.find(b"")
    index.check()
