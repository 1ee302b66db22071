"""Names of blocks with draft KV: a drafter reads the token behind a position, so the next tokens are in the name."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.connector.vllm.keys import AheadChain, RequestNames, VllmChain, has_kv, lookahead, require_known_method
from kvtier.tiers.config.sections import CacheConfig
from kvtier.tiers.errors import ConfigError
from kvtier.tiers.naming.chain import pack_tokens
from kvtier.tiers.naming.key_schemes import VllmKeys

ROOT = b"r" * 32


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
    assert len(ahead([*range(1, 10)], by=2).hashes) == 1


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
    asked.mm_features = [object()]
    assert names.of(asked) is None


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
