"""Stories of KVTier with RoPE that depends on the text's length: kept as far as one RoPE holds, and said where not."""

from importlib import metadata
from typing import Any

import pytest
import torch
from kv_tier_rig import Open
from tiny_models import SIZES, config_of, prompt
from transformers import AutoModelForCausalLM, Phi3Config

from kvtier.connector.models import cache_option, returned_cache
from kvtier.connector.models.hf_model import identity_of
from kvtier.connector.models.hf_versions import rope_limit
from kvtier.connector.transformers.cache_form import CacheForm
from kvtier.engine.config import EngineConfig
from kvtier.engine.llm import Engine
from kvtier.engine.requests import SamplingParams
from kvtier.tiers.errors import ConfigError

GREEDY: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def config(kind: str) -> Any:
    """Up to 128 tokens (longrope), or 127 (dynamic), have one RoPE."""
    if kind == "dynamic":
        rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
        made = config_of("llama")
        made.max_position_embeddings, made.rope_parameters = 128, rope
        return made
    half = SIZES["hidden_size"] // SIZES["num_attention_heads"] // 2
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * half, "long_factor": [3.0] * half}
    return Phi3Config(
        **SIZES, pad_token_id=0, original_max_position_embeddings=128,
        rope_parameters={**rope, "original_max_position_embeddings": 128},
    )  # fmt: skip


def model_of(kind: str) -> Any:
    auto: Any = AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return auto.from_config(config(kind)).eval()


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_texts_with_one_rope_are_kept_and_longer_ones_go_on_as_ever(
    open_tier: Open, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = model_of(kind)
    kv = open_tier(model)
    tokens = torch.tensor([prompt(1, 90)])
    expected = model.generate(tokens, **GREEDY)
    assert not torch.equal(expected[0, 90:], model.generate(torch.tensor([prompt(2, 90)]), **GREEDY)[0, 90:])
    for num_cached in (0, 80):
        assert torch.equal(kv.generate(tokens, **GREEDY), expected)
        assert kv.num_cached_tokens == num_cached
    # A long text that begins alike: other keys, in every block.
    longer = torch.cat([tokens, torch.tensor([prompt(3, 60)])], dim=1)
    expected_longer = model_of(kind).generate(longer, **GREEDY)
    for _ in range(2):
        model.generate(tokens, **GREEDY)  # "dynamic" remembers the longest text since the last short one
        assert torch.equal(kv.generate(longer, **GREEDY), expected_longer)
        assert kv.num_cached_tokens == 0
    assert f"150 tokens: this model's RoPE is another for texts above {rope_limit(model.config)}" in caplog.text
    # The long text left nothing behind, and the short one is found again, also by another process.
    assert kv.drain()
    kv.close()
    again = open_tier(model)
    assert torch.equal(again.generate(tokens, **GREEDY), expected)
    assert again.num_cached_tokens == 80


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_a_text_that_grows_out_of_its_rope_is_loaded_and_its_answer_not_kept(open_tier: Open, kind: str) -> None:
    model = model_of(kind)
    kv = open_tier(model)
    tokens = torch.tensor([prompt(1, 120)])
    kv.generate(tokens, **GREEDY | {"max_new_tokens": 4})
    for _ in range(2):
        grown = GREEDY | {"max_new_tokens": 40}
        assert torch.equal(kv.generate(tokens, **grown), model.generate(tokens, **grown))
        assert kv.num_cached_tokens == 112
    with torch.inference_mode():
        cache = kv.load(tokens)[0]
        model(torch.cat([tokens, tokens], dim=1)[:, 112:], **cache_option(model, cache))
    kv.store(tokens, cache)  # computed with the RoPE of 240 tokens from the 113th on
    assert kv.load(torch.cat([tokens[:, :112], tokens[:, :10]], dim=1))[1] == 112


def test_the_keys_of_short_and_long_texts_do_differ() -> None:
    """Without this the stories above prove nothing."""
    for kind in ("longrope", "dynamic"):
        model = model_of(kind)
        tokens = torch.tensor([prompt(1, 150)])
        with torch.inference_mode():
            short, long = (returned_cache(model(part, use_cache=True)) for part in (tokens[:, :90], tokens))
        assert not torch.allclose(short.layers[0].keys, long.layers[0].keys[:, :, :90], atol=1e-2)


def test_our_engine_ends_where_rope_changes() -> None:
    tokens = prompt(1, 90)
    for kind, limit in (("longrope", 128), ("dynamic", 127)):
        with Engine.from_config(config(kind), EngineConfig(block_size=16, num_blocks=32)) as engine:
            assert engine.max_model_len == limit
            [answer] = engine.generate([tokens], SamplingParams(max_tokens=8, ignore_eos=True))
            plain: Any = engine.model.module
            plain.set_attn_implementation("sdpa")
            expected: Any = plain.generate(torch.tensor([tokens]), **GREEDY)
            assert answer.token_ids == expected[0, 90:].tolist()


def test_another_kind_that_depends_on_the_length_is_refused_by_name() -> None:
    model = model_of("longrope")
    shape = CacheForm.of(model, 16).outline
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_type": "unheard of"}
    with pytest.raises(ConfigError, match="RoPE depends on the text's length in a way unknown here; leave kvtier out"):
        identity_of(model, "m", shape, hash_scheme="sha256", epoch=0)


def test_a_transformers_that_does_not_return_from_a_long_text_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: "5.12.1")
    with pytest.raises(ConfigError, match=r"transformers 5\.12\.1 does not return from .*; install 5\.19 or newer"):
        rope_limit(config("dynamic"))
    assert rope_limit(config("longrope")) == 128
