"""Other engines' block names, held to vectors read from the engines themselves."""

import hashlib
import random
from unittest import mock

import cbor2
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvtier.tiers.naming.chain import Tokens
from kvtier.tiers.naming.key_schemes import (
    CborItem,
    VllmKeys,
    cbor,
    dynamo_block_hashes,
    dynamo_local_hashes,
    dynamo_seed,
    dynamo_sequence_hashes,
    sglang_hashes,
)

TOKENS = [1, 2, 3, 4, 5, 6, 7, 8]  # two blocks of four
TAIL = [9, 10, 11, 12]


def test_dynamo_local_and_sequence_hashes() -> None:
    local = dynamo_local_hashes([*TOKENS, *TAIL], 4)
    assert local == [14643705804678351452, 16777012769546811212, 483935686894639516]
    assert dynamo_sequence_hashes(local) == [14643705804678351452, 4945711292740353085, 12583592247330656132]
    assert dynamo_sequence_hashes([]) == []


def test_dynamo_blocks_are_hashed_in_one_call_as_in_two() -> None:
    rng = random.Random(4)
    for size, number in ((1, 3), (4, 0), (4, 50), (16, 7), (33, 5), (64, 9), (100, 3)):
        tokens = [rng.getrandbits(32) for _ in range(size * number + size // 2)]
        for seed, parent in ((1337, None), (1337, 2**64 - 1), (2**64 - 1, 0)):
            apart = dynamo_sequence_hashes(dynamo_local_hashes(tokens, size, seed), parent)
            assert dynamo_block_hashes(tokens, size, seed, parent) == apart
            with mock.patch("kvtier.tiers.naming.key_schemes.compiled", return_value=None):
                assert dynamo_block_hashes(tokens, size, seed, parent) == apart
    assert dynamo_sequence_hashes([5, 6], 4)[1:] == dynamo_sequence_hashes([6], dynamo_sequence_hashes([5], 4)[0])


def test_dynamo_adapter_and_namespace() -> None:
    assert dynamo_seed() == 1337
    assert dynamo_local_hashes(TOKENS[:4], 4, dynamo_seed(lora_name="ad1")) == [4033386159037673140]
    assert dynamo_local_hashes(TOKENS[:4], 4, dynamo_seed(namespace="t1")) == [17295713339124324089]
    # the sum wraps at 64 bits
    assert 0 <= dynamo_seed("ad1", "t1") < 2**64
    assert dynamo_seed("ad1", "t1") == (dynamo_seed("ad1") + dynamo_seed(None, "t1") - 1337) % 2**64


@pytest.mark.parametrize(
    ("seed", "none_hash", "blocks", "event"),
    [
        (
            None,  # $PYTHONHASHSEED not set: "vllm-none-hash"
            "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0",
            [
                "58d0879dff3800f65f8c5fd449d73048c0f7699dd238a03b84b146b151d55111",
                "e1bc29393a2da9fd798f35ff04d215f846aee6df4b803ce3d43b57df56b58fb1",
            ],
            9561501211280363793,
        ),
        (
            "0",
            "4e1195df020de59e0d65a33a4279f1183e7ae4e5d980e309f8b55adff2e61c3e",
            [
                "c9d58ba695280d69b243e1e0df813136ca9196b286fb1a021e0b2e028ef071cb",
                "24125b23e68883b5c2141db2959d48433fe6bde2f26bd914efad121d154ab2d6",
            ],
            2164874634404590027,
        ),
    ],
)
def test_vllm_sha256_cbor(seed: str | None, none_hash: str, blocks: list[str], event: int) -> None:
    keys = VllmKeys(seed)
    assert keys.none_hash.hex() == none_hash
    hashes = keys.hashes(TOKENS, 4)
    assert [name.hex() for name in hashes] == blocks
    assert int.from_bytes(hashes[0][-8:], "big") == event  # how vLLM's KV events name the block


def test_vllm_salt_tagged_and_untagged() -> None:
    keys = VllmKeys()
    tagged = keys.hashes(TOKENS[:4], 4, {0: (("cache_salt", "t1"),)})
    assert tagged[0].hex() == "bc0abc46785417423f71cd246855f99c062cf7cec259105bd67ecd7a0e2ca574"
    untagged = keys.hashes(TOKENS[:4], 4, {0: ("t1",)})
    assert untagged[0].hex() == "99430a8ce4930cfa8aa6a803f8004c857737cdae7e75c74f2c0a6b2ac7904a42"
    # no keys at all and an empty tuple are both None
    assert keys.hashes(TOKENS, 4, {0: ()}) == keys.hashes(TOKENS, 4)


def test_vllm_keys_of_every_kind_against_a_cbor_library() -> None:
    keys = VllmKeys()
    extra: tuple[CborItem, ...] = (
        ("lora", "ad1", "/adapters/ad1"),
        ("mm", "a0b1", -3),
        ("cache_salt", "t1"),
        ("prompt_embeds", b"\x01" * 32),
    )
    first = hashlib.sha256(cbor2.dumps((keys.none_hash, (1, 2, 3, 4), extra), canonical=True)).digest()
    second = hashlib.sha256(cbor2.dumps((first, (5, 6, 7, 8), None), canonical=True)).digest()
    assert keys.hashes(TOKENS, 4, {0: extra}) == [first, second]


@given(
    st.recursive(
        st.none() | st.integers(-(2**64), 2**64 - 1) | st.text() | st.binary(max_size=300),
        lambda items: st.lists(items, max_size=30).map(tuple),
    )
)
@example((0, 23, 24, 255, 256, 65535, 65536, 2**32 - 1, 2**32, 2**64 - 1))  # as short as can be, each of them
@example((-1, -24, -25, -256, -257, -65536, -65537, -(2**32), -(2**32) - 1, -(2**64)))
def test_cbor_agrees_with_a_cbor_library(item: CborItem) -> None:
    assert cbor(item) == cbor2.dumps(item, canonical=True)


def test_cbor_refuses_what_vllm_does_not_hash() -> None:
    for item in (1.5, True, {"a": 1}, [object()]):
        with pytest.raises(TypeError, match="cbor: no"):
            cbor(item)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="does not fit in 64 bits"):
        cbor(2**64)


def test_sglang_pages() -> None:
    pages = sglang_hashes(TOKENS, 4)
    assert [page.hex() for page in pages] == [
        "cf97adeedb59e05bfd73a2b4c2a8885708c4f4f70c84c64b27120e72ab733b72",
        "4ebfa8a1f3c341517621838c6e1b9aa350307e3f00b3cbd1a07ef740f54396d6",
    ]
    # How SGLang's KV events name the pages: signed.
    assert [int.from_bytes(page[:8], "big", signed=True) for page in pages] == [
        -3488128144981237669,
        5674439469042975057,
    ]


@pytest.mark.parametrize("tokens", [TOKENS, tuple(TOKENS), np.array(TOKENS), range(1, 9)])
def test_only_full_blocks_count_whatever_holds_the_tokens(tokens: Tokens) -> None:
    for count in range(9):
        head = tokens[:count]
        assert len(dynamo_local_hashes(head, 4)) == count // 4
        assert VllmKeys().hashes(head, 4) == VllmKeys().hashes(TOKENS, 4)[: count // 4]
        assert sglang_hashes(head, 4) == sglang_hashes(TOKENS, 4)[: count // 4]


def test_bad_block_size() -> None:
    for call in (dynamo_local_hashes, dynamo_block_hashes, sglang_hashes, VllmKeys().hashes):
        with pytest.raises(ValueError, match="block_size 0"):
            call(TOKENS, 0)
        with pytest.raises(ValueError, match="token id -1 at position 0"):
            call([-1], 1)
