"""vLLM's real requests: what of images, embeddings, adapters and salts is in the names of their blocks."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, Final

import pytest

pytest.importorskip("vllm", reason="no vLLM here; run `make test-vllm`")

import torch
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request
from vllm_rig import BLOCK, prompt

from kvtier.connector.vllm.keys import RequestNames
from kvtier.tiers.config.sections import CacheConfig

TOKENS: Final = prompt(1, 4 * BLOCK)
ROOT: Final = b"r" * 32


@pytest.fixture(scope="module", autouse=True)
def chains_begin_as_in_an_engine() -> None:
    init_none_hash(sha256)


def image(name: str, offset: int = BLOCK + 5) -> MultiModalFeatureSpec:
    """An image of twenty tokens, by default in the second block."""
    where = PlaceholderRange(offset=offset, length=20)
    return MultiModalFeatureSpec(
        data=None, modality="image", identifier=hashlib.sha256(name.encode()).hexdigest(), mm_position=where
    )


def request_of(**options: Any) -> Request:
    hasher = get_request_block_hasher(BLOCK, sha256)
    tokens = options.pop("tokens", TOKENS)
    return Request("a", tokens, SamplingParams(max_tokens=1), None, block_hasher=hasher, **options)


def names(changed: Mapping[str, Any] = MappingProxyType({}), /, **options: Any) -> list[bytes]:
    plan: Any = SimpleNamespace(**{"canonical": False, "lookahead": 0, **changed}, block_size=BLOCK, hash_size=BLOCK)
    chain = RequestNames(plan, CacheConfig(), ROOT).of(request_of(**options))
    return [] if chain is None else list(chain.current().hashes)


def common(one: list[bytes], other: list[bytes]) -> int:
    """Leading blocks that two requests share."""
    return next((block for block, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


def test_an_image_is_in_the_names_from_its_block_on() -> None:
    cat, dog, text = names(mm_features=[image("cat")]), names(mm_features=[image("dog")]), names()
    assert (common(cat, dog), common(cat, text)) == (1, 1)
    assert common(cat, names(mm_features=[image("cat")])) == 4
    moved = names(mm_features=[image("cat", BLOCK + 6)])  # among the same tokens, one place further on
    assert common(cat, moved) == 1


def test_embeddings_in_place_of_tokens_are_in_the_names() -> None:
    def embedded(seed: int) -> list[bytes]:
        made = torch.randn(4 * BLOCK, 8, generator=torch.Generator().manual_seed(seed))
        return names(tokens=None, prompt_embeds=made)

    assert len(embedded(1)) == 4
    assert (common(embedded(1), embedded(1)), common(embedded(1), embedded(2))) == (4, 0)


@pytest.mark.parametrize("plan", [{"canonical": True}, {"lookahead": 1}])
def test_what_tokens_do_not_tell_is_not_kept_under_names_made_of_tokens(plan: dict[str, Any]) -> None:
    """Names of kvtier's own, and names that end with the next block's first token."""
    assert len(names(plan)) in (3, 4)
    assert names(plan, mm_features=[image("cat")]) == []
    assert names(plan, tokens=None, prompt_embeds=torch.zeros(4 * BLOCK, 8)) == []


def test_an_adapters_name_path_and_weights_are_in_the_names(tmp_path: Path) -> None:
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(b"one")
    asked = {"lora_request": LoRARequest("tone", 1, str(tmp_path))}
    one, plain = names(**asked), names()
    assert (common(one, plain), common(one, names(**asked))) == (0, 4)
    weights.write_bytes(b"another")  # trained anew in place
    assert common(one, names(**asked)) == 0
    # An adapter that lies elsewhere has no name: its requests are not kept, and those of others are.
    assert names(lora_request=LoRARequest("hub", 2, "somebody/adapter")) == []


def test_a_tenants_salt_is_in_the_names() -> None:
    assert common(names(cache_salt="one"), names(cache_salt="other")) == 0
