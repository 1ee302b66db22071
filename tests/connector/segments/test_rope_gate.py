"""Which models' KV can be moved: every kind of rotary embedding, measured on a tiny model of it."""

from typing import Any

import pytest
import torch
import transformers
from small_engines import Make
from tiny_models import FAMILIES, SIZES, plain

from kvtier.connector.segments.rope import require_rotatable, rotated
from kvtier.tiers.errors import ConfigError

LONG = SIZES | {"max_position_embeddings": 4096, "num_hidden_layers": 4}
THETA = {"rope_theta": 1e4}
SHORT = {"original_max_position_embeddings": 1024}


def tiny(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    auto: Any = transformers.AutoModelForCausalLM
    torch.manual_seed(0)
    return auto.from_config(config, dtype=dtype).train(False)


def llama(dtype: torch.dtype = torch.float32, **rope: Any) -> Any:
    return tiny(transformers.LlamaConfig(**LONG, rope_parameters={**THETA, **rope}), dtype)


@pytest.mark.parametrize("family", FAMILIES)
def test_models_the_engine_runs_pass(family: str) -> None:
    module: Any = plain(family)
    require_rotatable(module)
    assert module.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **SHORT},
        {"rope_type": "yarn", "factor": 4.0, **SHORT},
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_fixed_scalings_pass(rope: dict[str, Any]) -> None:
    require_rotatable(llama(**rope))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_pass(dtype: torch.dtype) -> None:
    require_rotatable(llama(dtype, rope_type="default"))


def test_partial_rotary_passes() -> None:
    rope = {"rope_type": "default", **THETA, "partial_rotary_factor": 0.25}
    inv_freq = require_rotatable(tiny(transformers.StableLmConfig(**LONG, rope_parameters=rope)))
    assert len(inv_freq) == 2  # of 16 dimensions four are rotated


def _phi3() -> Any:
    scaling: dict[str, Any] = {
        "rope_type": "longrope",
        "long_factor": [2.0] * 8,
        "short_factor": [1.0] * 8,
        **THETA,
        **SHORT,
    }
    sizes: dict[str, Any] = {**LONG, **SHORT}
    return tiny(transformers.Phi3Config(**sizes, pad_token_id=0, rope_parameters=scaling))


REFUSED: dict[str, tuple[Any, str]] = {
    "dynamic NTK": (lambda: llama(rope_type="dynamic", factor=2.0), "dynamic NTK scaling"),
    "longrope": (_phi3, "longrope scaling"),
    "interleaved": (lambda: tiny(transformers.CohereConfig(**LONG)), "layer 0 has interleaved RoPE"),
    "interleaved and partial": (
        lambda: tiny(transformers.Glm4Config(**LONG, head_dim=16, pad_token_id=0)),
        "layer 0 has interleaved RoPE",
    ),
    "layers without RoPE": (
        lambda: tiny(transformers.SmolLM3Config(**LONG, pad_token_id=0)),
        "layer 3 has no RoPE",
    ),
    "two frequencies": (
        lambda: tiny(transformers.Gemma3TextConfig(**LONG, head_dim=16, pad_token_id=0)),
        "layers that rotate by different frequencies",
    ),
    "learned positions": (
        lambda: tiny(transformers.GPT2Config(vocab_size=211, n_positions=512, n_embd=64, n_layer=2, n_head=4)),
        "no rotary embedding",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_others_are_refused_by_their_trait(kind: str) -> None:
    made, trait = REFUSED[kind]
    with pytest.raises(ConfigError, match=rf'segments "on": model kind .* has {trait}.*set them "off"'):
        require_rotatable(made())


def test_values_that_move_are_refused() -> None:
    module: Any = plain("llama")
    layer = module.model.layers[1].self_attn
    forward = layer.forward

    def shifted(hidden_states: torch.Tensor, position_ids: torch.Tensor, **others: Any) -> Any:
        return forward(hidden_states + position_ids[..., None] * 1e-2, position_ids=position_ids, **others)

    layer.forward = shifted
    with pytest.raises(ConfigError, match=r"layer 1 has (values|keys) that"):
        require_rotatable(module)


def test_the_engine_measures_its_own_model(make: Make) -> None:
    engine = make(segments="on")
    assert engine.model.module.config._attn_implementation == "kvtier-paged"
    answer = engine.generate([[5, 6, 7]])
    assert answer[0].token_ids


def test_a_rotation_leaves_what_it_is_given() -> None:
    keys = torch.randn(5, 2, 16)
    before, inv_freq = keys.clone(), torch.tensor([1.0, 0.1])
    there = rotated(keys, 40, inv_freq)
    assert torch.equal(keys, before)
    assert torch.equal(there[..., 4:], keys[..., 4:])  # not rotated: beyond twice the frequencies
    assert torch.allclose(rotated(there, -40, inv_freq), keys, atol=1e-5)
