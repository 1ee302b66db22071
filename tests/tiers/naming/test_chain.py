"""Chain hashes: frozen vectors, the formula written out once more, and growth that hashes each token once."""

import hashlib
import os
import struct
import subprocess
import sys
from array import array
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvtier.tiers.naming.chain import (
    BlockExtraKeys,
    TokenChain,
    Tokens,
    chain_hashes,
    pack_tokens,
    pool_name,
    root_hash,
    token_array,
)

pytestmark = pytest.mark.usefixtures("way")

ROOT = Path(__file__).resolve().parents[3]
FINGERPRINT = bytes(range(32))
TOKEN_IDS = st.integers(0, 2**32 - 1)

# Frozen when the format was. A change here leaves every block stored so far behind: that takes a new FORMAT_VERSION.
GOLDEN_ROOT = "903add6274630c74ab47231a6216ade49efb2e93d6561220a5fcddc0c867af81"
GOLDEN = {
    "sha256": [
        "becd563fe3788451951de62b615eb5c74e6693d7dca269552ce3c82c1d037e3a",
        "2b415bbdd82997dbe042e453a8855eaace236c3aab117bbb77af09404af76e44",
    ],
    "xxh3": ["727618622107e2f0e204f4602d3b2779" * 2, "8378bbe2198ce45c62f6e628949fdb23" * 2],
}


def reference(root: bytes, tokens: Sequence[int], block_size: int, scheme: str, extra: BlockExtraKeys) -> list[bytes]:
    """The formula at the top of chain.py, one block at a time."""
    hashes, parent = [], root
    for block in range(len(tokens) // block_size):
        ids = tokens[block * block_size : (block + 1) * block_size]
        data = parent + struct.pack(f"<{1 + block_size}I", block_size, *ids)
        for tag, value in extra.get(block, ()):
            data += struct.pack("<I", len(tag.encode())) + tag.encode() + struct.pack("<Q", len(value)) + value
        parent = hashlib.sha256(data).digest() if scheme == "sha256" else xxhash.xxh3_128_digest(data) * 2
        hashes.append(parent)
    return hashes


def test_golden_vectors() -> None:
    root = root_hash(FINGERPRINT, cache_salt="t1")
    assert root.hex() == GOLDEN_ROOT
    for scheme, golden in GOLDEN.items():
        assert [name.hex() for name in chain_hashes(root, [1, 2, 3, 4, 5, 6, 7, 8], 4, scheme)] == golden
    # an extra key changes its own block and all after it
    chain = TokenChain(root, 4, extra_keys={1: [("image", b"\x01\x02")]})
    chain.extend([1, 2, 3, 4, 5, 6, 7, 8])
    assert chain.hashes[0].hex() == GOLDEN["sha256"][0]
    assert chain.hashes[1].hex() == "5d1a29c2d8725576d04534d9b99725b9bf03f773234471f6fbaa4a0a04bd1de0"


@given(
    pieces=st.lists(st.lists(TOKEN_IDS, max_size=12), max_size=8),
    block_size=st.integers(1, 7),
    scheme=st.sampled_from(["sha256", "xxh3"]),
    extra=st.dictionaries(
        st.integers(0, 12), st.lists(st.tuples(st.text(max_size=3), st.binary(max_size=3)), max_size=3)
    ),
)
def test_growing_in_any_steps_equals_one_shot(
    pieces: list[list[int]], block_size: int, scheme: str, extra: BlockExtraKeys
) -> None:
    root = root_hash(FINGERPRINT)
    tokens = [token for piece in pieces for token in piece]
    chain = TokenChain(root, block_size, scheme, extra)
    for piece in pieces:
        chain.extend(piece)

    assert chain.num_tokens == len(tokens)
    assert chain.hashes == reference(root, tokens, block_size, scheme, extra)
    assert chain_hashes(root, tokens, block_size, scheme) == reference(root, tokens, block_size, scheme, {})
    # each block knows its parent and gives its tokens back
    assert [root, *chain.hashes] == [chain.parent(i) for i in range(len(chain.hashes) + 1)]
    packed = b"".join(chain.block_tokens(i) for i in range(len(chain.hashes)))
    assert packed == struct.pack(f"<{len(packed) // 4}I", *tokens[: len(packed) // 4])


def test_parts_of_a_page_have_names_of_their_own() -> None:
    page = bytes(range(32))
    golden = "0e12ca3c5143043dd6510b5b9fbc0f77c7d23d6392161aa250be5ef9a80cfbbb"  # as docs/format.md says
    assert pool_name(page, "mamba x", 3).hex() == golden
    others = {pool_name(page, "mamba x", 2), pool_name(page, "mamba", 3), pool_name(page[::-1], "mamba x", 3)}
    assert len(others - {bytes.fromhex(golden), page}) == 3


def test_every_kind_of_sequence_gives_the_same_hashes() -> None:
    ids = [0, 1, 255, 65536, 2**31 - 1, 7]
    root = root_hash(FINGERPRINT)
    expected = chain_hashes(root, ids, 2)
    same: list[Tokens] = [tuple(ids), array("I", ids), array("q", ids), np.array(ids), np.array(ids, np.uint32)]
    same += [np.array(ids, ">u8"), np.repeat(np.array(ids, np.int32), 2)[::2]]  # foreign byte order, strided
    for tokens in same:
        assert chain_hashes(root, tokens, 2) == expected
    assert chain_hashes(root, np.array([]), 2) == []
    assert pack_tokens([1, 2**32 - 1]) == b"\x01\0\0\0\xff\xff\xff\xff"


@pytest.mark.parametrize("of", [list, tuple, lambda ids: array("q", ids), np.array])
@pytest.mark.parametrize("bad", [-1, 2**32])
def test_a_bad_token_id_is_named_and_changes_nothing(of: Callable[[list[int]], Tokens], bad: int) -> None:
    chain = TokenChain(root_hash(FINGERPRINT), 2)
    chain.extend([1, 2, 3])
    before = list(chain.hashes)
    with pytest.raises(ValueError, match=rf"token id {bad} at position 2: must be in \[0, 2\*\*32\)"):
        chain.extend(of([4, 5, bad, 6]))
    assert (chain.num_tokens, chain.hashes) == (3, before)
    chain.extend([4])
    assert chain.hashes == chain_hashes(chain.root, [1, 2, 3, 4], 2)


@pytest.mark.parametrize(
    "tokens", [[1.0], ["1"], [None], b"\x01\0\0\0", "12", memoryview(b"1234"), np.array([1.0]), np.array([[1]])]
)
def test_what_is_no_token_id_is_a_type_error(tokens: Tokens) -> None:
    with pytest.raises(TypeError):
        token_array(tokens)


def test_roots_keep_their_parts_apart() -> None:
    roots = [
        root_hash(FINGERPRINT),
        root_hash(FINGERPRINT, cache_salt=""),
        root_hash(FINGERPRINT, cache_salt="a", lora_name="bc"),
        root_hash(FINGERPRINT, cache_salt="ab", lora_name="c"),
        root_hash(FINGERPRINT, cache_salt="abc"),
        root_hash(FINGERPRINT, lora_name="abc"),
        root_hash(FINGERPRINT, lora_digest=b"abc"),
        root_hash(bytes(32)),
    ]
    assert len(set(roots)) == len(roots)
    expected = b"kvtier-root-v1" + FINGERPRINT + b"\x00" + b"\x01" + struct.pack("<Q", 2) + "é".encode() + b"\x00"
    assert root_hash(FINGERPRINT, lora_name="é") == hashlib.sha256(expected).digest()


def test_the_block_size_is_hashed() -> None:
    # [1, 2] as one block is neither [1] nor a block of two whose first half is [1]
    root = root_hash(FINGERPRINT)
    names = {*chain_hashes(root, [1, 2], 2), *chain_hashes(root, [1, 2], 1)}
    assert len(names) == 3


@pytest.mark.parametrize("scheme", ["sha256", "xxh3"])
def test_any_eight_bytes_of_a_name_tell_blocks_apart(scheme: str) -> None:
    names = chain_hashes(root_hash(FINGERPRINT), range(1000), 1, scheme)
    for start in (0, 8, 16, 24):
        assert len({name[start : start + 8] for name in names}) == len(names)


def test_extra_keys_keep_their_parts_apart() -> None:
    root = root_hash(FINGERPRINT)
    lists: list[list[tuple[str, bytes]]] = [
        [],
        [("", b"")],
        [("a", b"bc")],
        [("ab", b"c")],
        [("a", b""), ("", b"bc")],
        [("a", b"bc"), ("", b"")],
    ]
    names = []
    for keys in lists:
        chain = TokenChain(root, 1, extra_keys={0: keys})
        chain.extend([1])
        names += chain.hashes
    assert len(set(names)) == len(lists)
    assert names[0] == chain_hashes(root, [1], 1)[0]  # an empty list is no list


def test_another_process_gives_the_same_names() -> None:
    code = (
        "from kvtier.tiers.naming.chain import chain_hashes, root_hash\n"
        "root = root_hash(bytes(range(32)), cache_salt='t1')\n"
        "print([name.hex() for scheme in ('sha256', 'xxh3') for name in chain_hashes(root, range(1, 9), 4, scheme)])"
    )
    printed = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        printed.add(done.stdout.strip())
    assert printed == {str(GOLDEN["sha256"] + GOLDEN["xxh3"])}


def test_arguments_out_of_range() -> None:
    root = root_hash(FINGERPRINT)
    with pytest.raises(ValueError, match="fingerprint of 3 bytes"):
        root_hash(b"abc")
    with pytest.raises(ValueError, match="root of 3 bytes"):
        TokenChain(b"abc", 4)
    with pytest.raises(ValueError, match="block_size 0"):
        TokenChain(root, 0)
    with pytest.raises(ValueError, match="scheme 'md5': use one of sha256, xxh3"):
        TokenChain(root, 4, "md5")
    chain = TokenChain(root, 2)
    chain.extend([1, 2, 3])
    for ask in (chain.block_tokens, chain.parent):
        with pytest.raises(IndexError, match="block -1 of a chain with 1 full blocks"):
            ask(-1)
    with pytest.raises(IndexError):
        chain.block_tokens(1)  # begun, not full
    assert chain.parent(1) == chain.hashes[0]  # of the block to come
    with pytest.raises(IndexError):
        chain.parent(2)
    assert repr(chain) == "TokenChain(3 tokens, 1 full blocks of 2)"


@given(st.lists(TOKEN_IDS, min_size=3, max_size=40, unique=True), st.data())
def test_a_changed_token_changes_its_block_and_all_after_it(tokens: list[int], data: st.DataObject) -> None:
    root = root_hash(FINGERPRINT)
    changed = data.draw(st.integers(0, len(tokens) - 1))
    others = [*tokens[:changed], tokens[changed] ^ 1, *tokens[changed + 1 :]]
    one, other = chain_hashes(root, tokens, 3), chain_hashes(root, others, 3)
    equal = [a == b for a, b in zip(one, other, strict=True)]
    assert equal == [block < changed // 3 for block in range(len(one))]
    assert all(a != b for a, b in pairwise(one))
