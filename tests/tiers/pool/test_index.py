"""HashIndex against a dict: hits, misses, full buckets, and keys that are no good hashes."""

from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.tiers.pool.index import NAME_MIX, HashIndex, to_words
from kvtier.tiers.tier import ChainHash


def name(number: int) -> ChainHash:
    return number.to_bytes(32, "big")


@cache
def crowd(num_slots: int, count: int) -> list[ChainHash]:
    """Names that all fall into one bucket of an index."""
    index = HashIndex(num_slots)
    found: list[ChainHash] = []
    number = 0
    while len(found) < count:
        words = to_words([name(number)])
        before = np.count_nonzero(index._buckets[0])
        index.add(words, np.array([0]))
        if np.count_nonzero(index._buckets[0]) > before:
            found.append(name(number))
        index.remove(np.array([0]))
        number += 1
    return found


@given(
    st.lists(st.tuples(st.booleans(), st.sets(st.integers(0, 40), min_size=1, max_size=8))),
    st.sampled_from([1, 2, 50]),
)
def test_an_index_is_a_dict(steps: list[tuple[bool, set[int]]], spread: int) -> None:
    index, model = HashIndex(41), dict[int, int]()
    for is_add, numbers in steps:
        chosen = np.array(sorted(n for n in numbers if (n in model) != is_add), np.int64)
        if is_add:
            assert index.add(to_words([name(n * spread) for n in chosen.tolist()]), chosen)
            model.update((n, n) for n in chosen.tolist())
        else:
            index.remove(chosen)
            for n in chosen.tolist():
                del model[n]
        everyone = list(range(41))
        found = index.find([name(n * spread) for n in everyone])[1]
        assert found.tolist() == [model.get(n, -1) for n in everyone]
        assert sorted(index.check().tolist()) == sorted(model)


def test_a_crowded_bucket_overflows_and_nothing_is_lost() -> None:
    index = HashIndex(16)
    names = crowd(16, 9)  # of four places
    assert index.add(to_words(names[:6]), np.arange(6))
    assert index.find(names)[1].tolist() == [0, 1, 2, 3, 4, 5, -1, -1, -1]
    index.check()
    index.remove(np.array([], np.int64))  # of nothing, while some are outside
    # Room in the bucket again: those outside are found all the same, and new ones come in.
    index.remove(np.array([1, 2]))
    assert index.add(to_words(names[6:]), np.array([6, 7, 8]))
    assert index.find(names)[1].tolist() == [0, -1, -1, 3, 4, 5, 6, 7, 8]
    assert sorted(index.check().tolist()) == [0, 3, 4, 5, 6, 7, 8]
    assert index.names(np.array([4, 7])) == [names[4], names[7]]
    index.remove(np.array([8, 0, 5, 4, 3, 7, 6]))
    assert len(index.check()) == 0


@given(st.lists(st.tuples(st.integers(0, 8), st.booleans()), max_size=40))
def test_a_crowded_bucket_is_the_same_for_names_that_come_alone(steps: list[tuple[int, bool]]) -> None:
    index, model = HashIndex(16), dict[int, int]()
    names = crowd(16, 9)
    for number, alone in steps:
        if number in model:
            del model[number]
            if alone:
                index.remove_one(number)
            else:
                index.remove(np.array([number]))
        else:
            model[number] = number
            if alone:
                index.add_one(names[number], number)
            else:
                assert index.add(to_words([names[number]]), np.array([number]))
        expected = [model.get(n, -1) for n in range(9)]
        assert [index.find_one(name) for name in names] == index.find(names)[1].tolist() == expected
        assert sorted(index.check().tolist()) == sorted(model)


@pytest.mark.parametrize("num_before", [0, 3, 6])
def test_a_name_given_twice_is_refused_and_nothing_changes(num_before: int) -> None:
    index = HashIndex(16)
    names = crowd(16, 9)
    assert index.add(to_words(names[:num_before]), np.arange(num_before))
    twice = [names[6], names[7], names[8], names[7]]
    assert not index.add(to_words(twice), np.arange(10, 14))
    assert sorted(index.check().tolist()) == list(range(num_before))
    assert index.find(twice)[1].tolist() == [-1] * 4
    assert index.add(to_words(twice[:3]), np.arange(10, 13))


def test_names_are_compared_whole() -> None:
    index = HashIndex(4)
    zeros, last_byte = bytes(32), bytes(31) + b"\1"
    assert index.find([zeros])[1].tolist() == [-1]
    assert index.add(to_words([last_byte]), np.array([0]))
    assert index.find([zeros, last_byte])[1].tolist() == [-1, 0]
    # Another name with the same mixed word, so the same bucket and tag: only the whole name tells them apart.
    words = to_words([last_byte]).copy()
    a, b = int(NAME_MIX[0]), int(NAME_MIX[3])
    twin = words.copy()
    twin[0, 0] = 1
    twin[0, 3] += np.uint64(-a * pow(b, -1, 1 << 64) % (1 << 64))
    assert (twin @ NAME_MIX == words @ NAME_MIX).all()
    assert index.find([twin.tobytes()])[1].tolist() == [-1]
    assert index.add(twin, np.array([1]))
    assert index.find([last_byte, twin.tobytes()])[1].tolist() == [0, 1]
    index.reset()
    assert index.find([last_byte])[1].tolist() == [-1]


def test_hashes_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match=r"of \[31, 32\] bytes: must be 32"):
        to_words([bytes(32), bytes(31)])
    assert to_words([]).shape == (0, 4)
