"""Names for vLLM's blocks: its own hashes as they are, or our chain; held to vLLM's golden vectors."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.connector.request import Answered
from kvtier.connector.vllm.keys import (
    AheadChain,
    OwnChain,
    RequestNames,
    VllmChain,
    has_kv,
    lookahead,
    require_known_method,
)
from kvtier.tiers.config.sections import CacheConfig
from kvtier.tiers.errors import ConfigError
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


# Names of blocks with draft KV: a drafter reads the token behind a position, so the next tokens are in the name.


def request_of(tokens: list[int]) -> Any:
    hashes = VllmKeys().hashes(tokens, 4)
    return SimpleNamespace(all_token_ids=tokens, num_tokens=len(tokens), block_hashes=hashes, cache_salt=None)


def ahead(tokens: list[int], by: int = 1) -> AheadChain:
    request = request_of(tokens)
    return AheadChain(VllmChain(request, ROOT, (4, 4), None), request, by)


def test_what_follows_a_block_is_in_its_name() -> None:
    one, other = ahead([1, 2, 3, 4, 5, 6, 7, 8, 9]), ahead([1, 2, 3, 4, 5, 6, 7, 8, 10])
    assert one.hashes[0] == other.hashes[0]  # 5 follows in both
    assert one.hashes[1] != other.hashes[1]
    # The second block is not its own continuation: what vLLM calls it is in the name as well.
    assert ahead([0, 2, 3, 4, 5, 6, 7, 8, 9]).hashes[1] != one.hashes[1]


def test_a_full_block_has_no_name_before_the_next_tokens_are_known() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    chain = ahead(tokens)
    assert len(chain.hashes) == 1
    chain._request.num_tokens = 9
    tokens.append(9)
    assert list(chain.hashes) == list(ahead([*range(1, 10)]).hashes)
    assert (chain.parent(0), chain.parent(1)) == (ROOT, chain.hashes[0])
    assert chain.block_tokens(1) == pack_tokens([5, 6, 7, 8])
    # Two tokens ahead, as several modules of a drafter read: one of them is not known.
    assert len(short := ahead([*range(1, 10)], by=2).hashes) == 1
    # An answer of one token: the prompt's second block has no name yet, so it is none that the end reports.
    end = Answered(8, 1).finish_of(ahead([*range(1, 10)], by=2))
    assert (end.names, end.num_prompt) == (short, 1)


def test_tokens_that_vllm_took_back_take_names_with_them() -> None:
    chain = ahead([1, 2, 3, 4, 5, 6, 7, 8, 9])
    named = list(chain.hashes)
    chain._request.num_tokens, chain._request.block_hashes = 6, chain._request.block_hashes[:1]
    assert list(chain.hashes) == named[:1]


def test_tokens_that_vllm_exchanged_are_in_the_names() -> None:
    """A session goes on: the last answer's last token goes, and the next turn's tokens come, before anybody looks."""
    chain = ahead([1, 2, 3, 4, 5, 6, 7, 8, 9])
    first = chain.hashes[0]
    assert len(chain.hashes) == 2
    chain._request.all_token_ids[8:] = [10]
    assert list(chain.hashes) == list(ahead([1, 2, 3, 4, 5, 6, 7, 8, 10]).hashes)
    assert chain.hashes[0] == first


def test_a_block_before_an_image_has_no_name() -> None:
    plan: Any = SimpleNamespace(canonical=False, block_size=4, hash_size=4, lookahead=1)
    names = RequestNames(plan, CacheConfig(), ROOT)
    asked = request_of([1, 2, 3, 4, 5])
    asked.lora_request = asked.prompt_embeds = asked.mm_features = None
    assert isinstance(names.of(asked), AheadChain)
    asked.mm_features = [SimpleNamespace(identifier="c" * 64)]
    assert names.of(asked) is None


@pytest.mark.parametrize(
    ("identifier", "is_kept"),
    [("c" * 64, True), ("d" * 128, True), ("an adapter:" + "c" * 64, True), ("my-image", False), ("0-image-0", False),
     ("", False), ("C" * 64, False), ("c" * 63, False), ("c" * 64 + "\n", False), ("c" * 64 + ":my-image", False)],
)  # fmt: skip
def test_a_request_whose_image_has_no_digest_for_a_name_has_no_chain(identifier: str, is_kept: bool) -> None:
    """In another process that name may mean another image."""
    plan: Any = SimpleNamespace(canonical=False, block_size=4, hash_size=4, lookahead=0)
    asked = request_of([1, 2, 3, 4, 5])
    asked.lora_request = asked.prompt_embeds = asked.cache_salt = None
    asked.mm_features = [SimpleNamespace(identifier="c" * 64), SimpleNamespace(identifier=identifier)]
    assert (RequestNames(plan, CacheConfig(), ROOT).of(asked) is not None) == is_kept


@pytest.mark.parametrize(
    ("method", "kept", "tokens"),
    [("ngram", False, 0), ("suffix", False, 0), ("draft_model", True, 0), ("eagle3", True, 1), ("mtp", True, 1)],
)
def test_what_a_drafter_keeps(method: str, kept: bool, tokens: int) -> None:
    config = SimpleNamespace(speculative_config=SimpleNamespace(method=method))
    require_known_method(config.speculative_config)
    assert (has_kv(config.speculative_config), lookahead(config)) == (kept, tokens)


def test_an_unknown_drafter_is_refused_with_those_that_are_kept() -> None:
    require_known_method(None)
    with pytest.raises(
        ConfigError, match="speculative method 'dspark': its KV is not kept; use one of draft_model, eag"
    ):
        require_known_method(SimpleNamespace(method="dspark"))
