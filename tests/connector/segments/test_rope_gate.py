"""Which models' KV can be moved: every kind of rotary embedding, measured on a tiny model of it."""

from typing import Any

import pytest
import torch
import transformers
from tiny_models import SIZES, plain

from kvtier.connector.segments.rope import require_rotatable
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


ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **SHORT},
    "yarn": {"rope_type": "yarn", "factor": 4.0, **SHORT},
    "bfloat16": {"rope_type": "default", "dtype": torch.bfloat16},
    "float16": {"rope_type": "default", "dtype": torch.float16},
}


@pytest.mark.parametrize("kind", ROPES)
def test_fixed_scalings_and_sixteen_bits_pass(kind: str) -> None:
    require_rotatable(llama(**ROPES[kind]))


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
    "layers without RoPE": (lambda: tiny(transformers.SmolLM3Config(**LONG, pad_token_id=0)), "layer 3 has no RoPE"),
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
