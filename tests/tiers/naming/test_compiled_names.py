"""The extension module of naming: names, errors and growth as the Python way has them, and a GIL that is given up."""

import hashlib
import random
import struct
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvtier.tiers.naming import chain
from kvtier.tiers.naming.chain import TokenChain, chain_hashes, compiled, root_hash, token_array

ROOT = root_hash(bytes(range(32)))
TWIN = compiled()
pytestmark = pytest.mark.skipif(TWIN is None, reason="not built: `make compiled`")
IDS = st.one_of(
    st.integers(0, 2**32 - 1),
    st.sampled_from([0, 1, 256, 2**30 - 1, 2**30, 2**31, 2**32 - 1]),  # where an int gets another digit, or a sign
)
ODD = st.one_of(
    st.sampled_from([-1, -(2**31), 2**32, 2**63, 2**64, -(2**64), 2**200]),
    st.sampled_from([True, False, 1.0, "1", None, b"1", np.int64(7), np.uint32(2**32 - 1), np.float32(1), np.int8(-1)]),
)


class Id:
    """Counts as an integer, and is none."""

    def __index__(self) -> int:
        return 12


@contextmanager
def python_way() -> Iterator[None]:
    with mock.patch.object(chain, "compiled", return_value=None):
        yield


def outcome(tokens: Any) -> tuple[str, Any]:
    """What `token_array` makes of this: the ids, or the error and its words."""
    try:
        return "ids", token_array(tokens).tolist()
    except (TypeError, ValueError) as error:
        return type(error).__name__, str(error)


def both_ways(tokens: Any) -> None:
    got = outcome(tokens)
    with python_way():
        assert got == outcome(tokens)


@pytest.mark.parametrize("way", range(4))  # plain C, then what this processor has, from narrow to wide
def test_digests_of_every_length_are_those_of_xxhash_and_hashlib(way: int) -> None:
    assert TWIN is not None
    draw = random.Random(way)
    for size in (*range(1300), 2047, 2048, 2049, 4095, 4096, 8200, 65536, 100_001):
        data = draw.randbytes(size)
        seed = draw.choice((0, 7, draw.getrandbits(64)))
        short, both, state, num_ways = TWIN.digests(data, seed, way)
        assert short == xxhash.xxh3_64_intdigest(data, seed), f"way {way} of {num_ways}, {size} bytes, seed {seed}"
        assert both == (xxhash.xxh3_128_intdigest(data) if size > 16 else None), f"way {way}, {size} bytes"
        assert struct.pack(">8I", *state) == hashlib.sha256(data).digest(), f"way {way}, {size} bytes"


@given(st.lists(IDS, max_size=40), st.lists(st.tuples(st.integers(0, 40), st.one_of(ODD, st.builds(Id))), max_size=2))
def test_ids_and_errors_are_those_of_the_python_way(ids: list[Any], odd: list[tuple[int, Any]]) -> None:
    for at, value in odd:
        ids.insert(at, value)
    both_ways(ids)
    both_ways(tuple(ids))


@pytest.mark.parametrize("dtype", [np.bool_, np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64, np.float32])
def test_arrays_of_any_type_fare_alike(dtype: type) -> None:
    for values in ([], [1, 0, 100], [3, 2, 1, 0][::-2]):
        both_ways(np.array(values).astype(dtype))
        both_ways(np.array(values).astype(dtype).tolist())
    both_ways(np.array([[1]], dtype))
    both_ways(np.array([1, 2**32], np.int64))
    both_ways(np.array([1, -1], np.int64))
    for code in "iIqQlLhHbBd":
        both_ways(array(code, [1, 2, 3]))


def test_ids_are_copied() -> None:
    for tokens in ([1, 2, 3], array("I", [1, 2, 3]), np.array([1, 2, 3], np.uint32)):
        grown: TokenChain = TokenChain(ROOT, 2)
        grown.extend(tokens)
        tokens[0] = 9
        assert grown.block_tokens(0) == array("I", [1, 2]).tobytes()


@pytest.mark.parametrize("scheme", ["sha256", "xxh3"])
@pytest.mark.parametrize("size", [5, 6, 7, 16, 21, 22, 23, 64, 1000])  # where padding needs one more chunk, and beside
def test_more_than_a_piece_of_blocks_with_the_gil_given_up(scheme: str, size: int) -> None:
    num_blocks = chain.PIECE + 5 if size < 10 else 1030
    ids = np.random.default_rng(size).integers(0, 2**32, num_blocks * size + size - 1, np.uint32)
    names = chain_hashes(ROOT, ids, size, scheme)
    assert len(names) == num_blocks
    with python_way():
        assert names == chain_hashes(ROOT, ids, size, scheme)


def test_what_is_out_of_bounds_is_refused() -> None:
    assert TWIN is not None
    words, names_of = array("I", range(64)), partial(TWIN.names, "sha256")
    for parent, first, count, size in (
        (b"short", 0, 1, 16), (ROOT, -1, 1, 16), (ROOT, 1, 4, 16), (ROOT, 65, 0, 16), (ROOT, 0, 1, 0),
        (ROOT, 0, -1, 16), (ROOT, 0, 1, 2**60), (ROOT, 0, 2**60, 16),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"must be 32|there are 64 words"):
            names_of(parent, words, first, count, size)
    for wrong in (array("i", [1] * 64), array("Q", [1] * 64), bytes(256), np.zeros(64, np.float32)):
        with pytest.raises(TypeError, match="array of u32"):
            names_of(ROOT, wrong, 0, 1, 16)
    with pytest.raises(TypeError, match="NoneType"):
        names_of(None, words, 0, 1, 16)
    with pytest.raises(ValueError, match="scheme 'md5': use sha256 or xxh3"):
        TWIN.names("md5", ROOT, words, 0, 1, 16)
    assert TWIN.digests(bytes(5000), 0, -1) == TWIN.digests(bytes(5000), 0, 0)
    assert not TWIN.fill(words, [1, 2], 0, 3)
    assert not TWIN.fill(words, [1, 2], -1, 1)
    assert not TWIN.fill(array("I", [0]), [1, 2], 0, 2)
