"""Names for vLLM's blocks: its own hashes as they are, or our chain; held to vLLM's golden vectors."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvtier.connector.vllm.keys import OwnChain, VllmChain
from kvtier.tiers.naming.chain import chain_hashes, pack_tokens, root_hash
from kvtier.tiers.naming.key_schemes import VllmKeys
from kvtier.tiers.tier import ChildBlock

ROOT = b"r" * 32


@dataclass
class Request:
    """What of vLLM's request names its blocks."""

    all_token_ids: list[int]
    block_hashes: list[bytes] = field(default_factory=list)
    cache_salt: str | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


def vllm_request(tokens: list[int]) -> Request:
    return Request(tokens, VllmKeys().hashes(tokens, 4))


def test_vllms_hashes_are_taken_as_they_are() -> None:
    request = vllm_request([1, 2, 3, 4, 5, 6, 7, 8, 9])
    chain = VllmChain(request, ROOT, (4, 4), None)
    assert chain.hashes is request.block_hashes  # nothing is copied, however often it is asked
    assert chain.hashes[0].hex() == "58d0879dff3800f65f8c5fd449d73048c0f7699dd238a03b84b146b151d55111"
    assert chain.parent(0) == ROOT
    assert chain.parent(1) == chain.hashes[0]
    assert chain.block_tokens(1) == pack_tokens([5, 6, 7, 8])


def test_short_hashes_are_written_twice() -> None:
    request = Request([1, 2], [b"x" * 16])
    assert VllmChain(request, ROOT, (2, 2), None).hashes == [b"x" * 32]


@pytest.mark.parametrize("lora", [None, b"adapter"])
def test_a_block_of_several_hashes_has_the_last_ones_name(lora: bytes | None) -> None:
    request = vllm_request(list(range(21)))
    every = VllmChain(request, ROOT, (4, 4), lora).hashes
    chain = VllmChain(request, ROOT, (8, 4), lora)
    assert list(chain.hashes) == [every[1], every[3]]
    assert chain.parent(1) == every[1]
    assert chain.block_tokens(1) == pack_tokens(list(range(8, 16)))
    request.block_hashes = VllmKeys().hashes(list(range(25)), 4)  # the answer goes on
    assert list(chain.hashes) == [every[1], every[3], VllmChain(request, ROOT, (4, 4), lora).hashes[5]]


@pytest.mark.parametrize(("sizes", "lora"), [((8, 4), None), ((4, 4), b"adapter")])
def test_tokens_that_vllm_takes_back_take_their_names_along(sizes: tuple[int, int], lora: bytes | None) -> None:
    """A session's prompt may go on otherwise than it did."""
    request = vllm_request(list(range(16)))
    chain = VllmChain(request, ROOT, sizes, lora)
    assert len(chain.hashes) == 16 // sizes[0]
    other = vllm_request([*range(8), *range(50, 62)])
    request.block_hashes = other.block_hashes
    assert list(chain.hashes) == list(VllmChain(other, ROOT, sizes, lora).hashes)


def test_a_tenants_blocks_are_its_own_whichever_the_names() -> None:
    salted, plain = Request([1, 2], cache_salt="tenant"), Request([1, 2])
    tenant = root_hash(ROOT, cache_salt="tenant")
    assert VllmChain(salted, ROOT, (2, 2), None).tenant == tenant
    assert OwnChain(salted, (ROOT, "tenant", None, None), 2, "sha256").current().tenant == tenant
    assert VllmChain(plain, ROOT, (2, 2), None).tenant == ROOT


def test_an_adapters_weights_are_part_of_the_name() -> None:
    request = vllm_request([1, 2, 3, 4])
    plain = VllmChain(request, ROOT, (4, 4), None).hashes
    one, other = (VllmChain(request, ROOT, (4, 4), digest).hashes for digest in (b"one", b"other"))
    assert len({plain[0], one[0], other[0]}) == 3


@pytest.mark.parametrize("named", [(None, None, None), ("tenant", None, None), (None, "adapter", b"digest")])
def test_our_own_chain_is_every_engines(named: tuple[Any, Any, Any]) -> None:
    salt, lora_name, lora_digest = named
    request = Request([1, 2, 3, 4, 5])
    chain = OwnChain(request, (ROOT, salt, lora_name, lora_digest), 2, "sha256")
    root = root_hash(ROOT, cache_salt=salt, lora_name=lora_name, lora_digest=lora_digest)
    assert chain.current().hashes == chain_hashes(root, [1, 2, 3, 4], 2)
    request.all_token_ids += [6, 7]
    assert chain.current().hashes == chain_hashes(root, [1, 2, 3, 4, 5, 6], 2)


@pytest.mark.parametrize("others", [[1, 2, 3, 9], [1, 2, 3, 9, 5, 6], [1, 2]])
def test_our_own_chain_follows_tokens_that_vllm_took_back(others: list[int]) -> None:
    """A session's next turn begins where the last sampled token stood."""
    request = Request([1, 2, 3, 4])
    chain = OwnChain(request, (ROOT, None, None, None), 2, "sha256")
    assert len(chain.current().hashes) == 2
    request.all_token_ids[:] = others
    full = others[: len(others) // 2 * 2]
    assert chain.current().hashes == chain_hashes(root_hash(ROOT), full, 2)


def instead(request: Request, block: int, tokens: Sequence[int]) -> bytes:
    """What vLLM would call a block with these tokens; its salt is part of the first one's name."""
    parent = request.block_hashes[block - 1] if block else b""
    salt = (request.cache_salt or "").encode() if not block else b""
    return hashlib.sha256(parent + pack_tokens(tokens) + salt).digest()


def named(tokens: list[int], salt: str | None = None) -> Request:
    request = Request(tokens, cache_salt=salt)
    for block in range(len(tokens) // 4):
        request.block_hashes.append(instead(request, block, tokens[4 * block : 4 * block + 4]))
    return request


@pytest.mark.parametrize("lora", [None, b"adapter"])
def test_a_child_is_known_by_the_name_it_would_have_in_this_request(lora: bytes | None) -> None:
    asked, held = named([1, 2, 3, 4, 5, 6, 9]), named([1, 2, 3, 4, 5, 6, 7, 8])
    chain, other = (VllmChain(request, ROOT, (4, 4), lora, instead) for request in (asked, held))
    child = ChildBlock(other.hashes[1], other.block_tokens(1))
    # The unfinished block of the request begins as the held one does.
    assert chain.next_tokens(1) == pack_tokens([5, 6, 9])
    assert chain.is_plain(child, chain.parent(1))
    # A name that other tokens, or something beside the tokens, made is no hit; nor is a tail, which vLLM never names.
    assert not chain.is_plain(ChildBlock(child.chain_hash, pack_tokens([5, 6, 7, 9])), chain.parent(1))
    assert not chain.is_plain(ChildBlock(child.chain_hash, pack_tokens([5, 6, 7])), chain.parent(1))
    # Without vLLM's function nobody knows.
    assert not VllmChain(asked, ROOT, (4, 4), lora).is_plain(child, chain.parent(1))


def test_the_first_blocks_of_tenants_and_adapters_differ() -> None:
    """They have one parent, the root."""
    chains = [
        VllmChain(named([1, 2, 3, 4], salt), ROOT, (4, 4), lora, instead)
        for salt, lora in ((None, None), ("one", None), ("other", None), (None, b"adapter"), ("one", b"adapter"))
    ]
    children = [ChildBlock(chain.hashes[0], chain.block_tokens(0)) for chain in chains]
    plain = [[chain.is_plain(child, chain.parent(0)) for child in children] for chain in chains]
    assert plain == [[chain is other for other in chains] for chain in chains]
