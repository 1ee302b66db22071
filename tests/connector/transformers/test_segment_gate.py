"""Which models of transformers may reuse segments: what a blend needs is measured, and what lacks is named."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from tiny_models import SIZES, config_of, prompt

from kvtier.connector.transformers.adapter import KVTier
from kvtier.connector.transformers.cache_form import CacheForm
from kvtier.connector.transformers.segments import require_blendable
from kvtier.tiers import ConfigError
from kvtier.tiers.config.config import Config

HEAD: dict[str, Any] = {"head_dim": 16}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHARED: dict[str, Any] = {**EXPERTS, "shared_expert_intermediate_size": 32}
WINDOW: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}


def of_kind(name: str, **options: Any) -> Callable[[], Any]:
    sizes = {**SIZES, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **options}
    return lambda: getattr(transformers, name)(**sizes)


def tiny(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    auto: Any = transformers.AutoModelForCausalLM
    torch.manual_seed(0)
    return auto.from_config(config, dtype=dtype).eval()


PASSES: dict[str, Callable[[], Any]] = {
    "llama": lambda: config_of("llama"),
    "qwen2 with two windows": lambda: config_of("qwen2-mixed"),
    "qwen3": lambda: config_of("qwen3"),
    "mistral with a window": lambda: config_of("mistral-window"),
    "mixtral": of_kind("MixtralConfig", num_local_experts=4),
    "qwen3_moe": of_kind("Qwen3MoeConfig", **EXPERTS, **HEAD),
    "gemma": of_kind("GemmaConfig", **HEAD),
    "starcoder2": of_kind("Starcoder2Config", sliding_window=24),
    "one layer": of_kind("LlamaConfig", num_hidden_layers=1),
}


@pytest.mark.parametrize("kind", PASSES)
def test_models_built_like_llama_pass_and_keep_their_attention(kind: str) -> None:
    model = tiny(PASSES[kind]())
    require_blendable(model, CacheForm.of(model, 16).shape)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_pass(dtype: torch.dtype) -> None:
    model = tiny(config_of("qwen3"), dtype)
    require_blendable(model, CacheForm.of(model, 16).shape)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "fused projections": (of_kind("Phi3Config"), "'phi3' has no model.layers.0.self_attn.k_proj"),
    "norms elsewhere": (of_kind("Olmo2Config"), "'olmo2' has no model.layers.0.input_layernorm"),
    "another decoder": (of_kind("GPTNeoXConfig"), "'gpt_neox' has no model.embed_tokens"),
    "scaled embeddings": (
        of_kind("GraniteConfig", embedding_multiplier=12.0),
        "'granite' has a layer 1 whose K a blend computes otherwise",
    ),
    "a norm behind the rotation": (
        of_kind("HunYuanDenseV1Config", **HEAD),
        "'hunyuan_v1_dense' has a layer 1 whose K and V are not its projections, rotated",
    ),
    "partial rotary": (of_kind("PhiConfig"), "'phi' has parts that a blend cannot run"),
    "a window in masks alone": (
        of_kind("Qwen2MoeConfig", **SHARED, **WINDOW),
        "'qwen2_moe' has a layer 0 of kind sliding_attention, whose window is only in a mask",
    ),
    "masks of its own": (of_kind("DogeConfig"), "'doge' has a layer 0 whose attention takes attention_mask"),
    "attention out of reach": (of_kind("NemotronConfig"), "'nemotron' has a layer 0 whose attention a blend does not"),
    "no sdpa": (of_kind("Gemma2Config", **HEAD), "'gemma2' has parts that a blend cannot run"),
    "interleaved": (of_kind("CohereConfig"), "'cohere' has layer 0 has interleaved RoPE"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_others_are_refused_by_name_at_the_start(what: str) -> None:
    make, message = REFUSED[what]
    model = tiny(make())
    chosen = model.config._attn_implementation
    with pytest.raises(ConfigError, match=rf'segments "on": model kind {message}.*set them "off"'):
        KVTier(model, Config.load(host={"size": "4MiB"}, cache={"segments": "on"}))
    assert model.config._attn_implementation == chosen


def test_a_model_refused_for_segments_is_cached_exactly_without_them() -> None:
    model = tiny(of_kind("Phi3Config")())
    tokens = torch.tensor([prompt(1, 90)])
    with KVTier(model, Config.load(host={"size": "4MiB"}, cache={"block_size": 16})) as kv:
        for num_cached in (0, 80):
            kv.generate(tokens, max_new_tokens=4, do_sample=False)
            assert kv.num_cached_tokens == num_cached


def test_a_model_in_training_is_refused_with_the_fix() -> None:
    model = tiny(config_of("llama")).train()
    with pytest.raises(ConfigError, match=r"in training mode; call model\.eval\(\) before KVTier"):
        KVTier(model, Config.load(host={"size": "4MiB"}, cache={"segments": "on"}))


def test_weights_on_several_devices_are_refused() -> None:
    model = tiny(config_of("llama"))
    model.lm_head.to("meta")
    with pytest.raises(ConfigError, match=r"weights on several devices|cannot run"):
        require_blendable(model, CacheForm.of(model, 16).shape)
