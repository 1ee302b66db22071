"""The gate of segment reuse: a model's KV can be moved, and its layers compute by themselves what the model does."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from transformers import DynamicCache, PreTrainedModel

from kvtier.connector.segments import (
    PAGED_ATTENTION,
    Blender,
    BlendRequest,
    Repair,
    ReusedPart,
    require_rotatable,
)
from kvtier.tiers import ConfigError
from kvtier.tiers.naming import KVShape

_NUM_TOKENS: Final = 24
_BLOCK: Final = 8  # tokens
_TABLE: Final = [0, 1, 2]  # the blocks of 24 tokens
_TOLERANCE: Final = {torch.float32: 5e-3}  # relative; what is computed otherwise is off by far more
_COARSE: Final = 0.1  # of 16-bit types
_DECODER: Final = ("embed_tokens", "rotary_emb", "layers")
_LAYER: Final = ("input_layernorm", "self_attn")
_ATTENTION: Final = ("layer_idx", "head_dim", "k_proj", "v_proj")
_FAILURES: Final = (
    RuntimeError,
    TypeError,
    ValueError,
    AttributeError,
    LookupError,
)  # of a layer called as none expects


@contextmanager
def paged_attention(model: PreTrainedModel) -> Iterator[None]:
    """The model with the attention that a blend needs; its own again afterwards, whatever happens."""
    chosen: str = model.config._attn_implementation
    model.set_attn_implementation(PAGED_ATTENTION)
    try:
        yield
    finally:
        model.set_attn_implementation(chosen)


def require_blendable(model: PreTrainedModel, shape: KVShape) -> torch.Tensor:
    """The model's `inv_freq`, if segments can be reused in it. ConfigError names what forbids it.

    It measures: 24 tokens, computed layer by layer as a blend does, must have the K and V that the model gives them.
    """
    kind = model.config.model_type
    if model.training:
        raise ConfigError('segments "on": the model is in training mode; call model.eval() before KVTier(model)')
    try:
        inv_freq = require_rotatable(model)
    except _FAILURES as error:
        raise _refusal(kind, _failure(error)) from error
    if trait := _missing(model):
        raise _refusal(kind, trait)
    own = _own_cache(model)
    with paged_attention(model):
        if model.config._attn_implementation != PAGED_ATTENTION:
            raise _refusal(kind, "an attention that does not go through transformers' AttentionInterface")
        try:
            trait = _hidden_window(model) or _difference(model, own, shape, inv_freq)
        except _FAILURES as error:
            raise _refusal(kind, _failure(error)) from error
    if trait:
        raise _refusal(kind, trait)
    return inv_freq


def _missing(model: PreTrainedModel) -> str | None:
    """A part of the decoder that a blend runs, and this model calls otherwise or lacks."""
    decoder: Any = getattr(model, "model", None)
    parts: list[tuple[str, Any, tuple[str, ...]]] = [("model", decoder, _DECODER)]
    for number, layer in enumerate(getattr(decoder, "layers", ())):
        place = f"model.layers.{number}"
        parts += [(place, layer, _LAYER), (f"{place}.self_attn", getattr(layer, "self_attn", None), _ATTENTION)]
    for place, part, names in parts:
        if absent := [name for name in names if not hasattr(part, name)]:
            return f"no {place}.{absent[0]}"
    if len({weight.device for weight in model.parameters()}) > 1:
        return "weights on several devices"
    return None


class _WindowProbe:
    """An attention that computes nothing and notes which window each layer asks for."""

    def __init__(self) -> None:
        self.windows: dict[int, int | None] = {}

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
    ) -> torch.Tensor:
        self.windows[layer] = window
        return query.transpose(1, 2).contiguous()


@torch.inference_mode()
def _hidden_window(model: PreTrainedModel) -> str | None:
    """A layer whose window is in the model's masks alone: a blend has none of these."""
    config: Any = model.config.get_text_config(decoder=True)
    window = getattr(config, "sliding_window", None)
    usual = "full_attention" if window is None else "sliding_attention"
    kinds = getattr(config, "layer_types", None) or [usual] * config.num_hidden_layers
    probe, decoder = _WindowProbe(), model.model
    decoder(input_ids=_token_ids(model)[None], use_cache=False, paged=probe)
    for layer, kind in enumerate(kinds):
        expected = window if kind == "sliding_attention" else None
        if kind == "chunked_attention" or probe.windows.get(layer) != expected:
            return f"layer {layer} of kind {kind}, whose window only a mask tells"
    return None


@torch.inference_mode()
def _difference(model: PreTrainedModel, own: DynamicCache, shape: KVShape, inv_freq: torch.Tensor) -> str | None:
    """How a blend's K and V differ from the model's own; None: not at all."""
    tolerance = _TOLERANCE.get(model.dtype, _COARSE)
    size = (shape.num_layers, 2, _BLOCK, shape.num_kv_heads, shape.head_dim)
    tensor = torch.zeros(2 * len(_TABLE), *size, dtype=model.dtype, device=model.device)
    blender = Blender(model, tensor, inv_freq, _NUM_TOKENS)
    ids: list[int] = _token_ids(model).tolist()
    blender.blend([BlendRequest(ids, _TABLE, 0, (), Repair(share=1.0))])
    layers: Any = own.layers
    for layer, states in enumerate(layers):
        for name, half, expected in (("K", 0, states.keys), ("V", 1, states.values)):
            found = tensor[: len(_TABLE), layer, half].flatten(0, 1)[: _NUM_TOKENS - 1].float()
            wanted = expected[0, :, : _NUM_TOKENS - 1].transpose(0, 1).float()
            if not float((found - wanted).norm() / wanted.norm()) <= tolerance:
                return f"a layer {layer} whose {name} depends on more than the layers before it"
    # What the check compares: the same tokens, copied from where they were just computed, deviate nowhere.
    second = [block + len(_TABLE) for block in _TABLE]
    part = ReusedPart(_BLOCK, _NUM_TOKENS - 1, 0, tuple(_TABLE))
    for layer in sorted({1, shape.num_layers - 1}) if shape.num_layers > 1 else ():
        repair = Repair(share=0.5, check_layer=layer, max_deviation=float("inf"))
        [result] = blender.blend([BlendRequest(ids, second, 0, (part,), repair)])
        if result.deviation is None or not result.deviation <= tolerance:
            return f"a layer {layer} whose K and V are not its projections, rotated"
    return None


@torch.inference_mode()
def _own_cache(model: PreTrainedModel) -> DynamicCache:
    """What the model itself caches of the tokens."""
    cache = DynamicCache()  # keeps every token in every layer
    model(input_ids=_token_ids(model)[None], past_key_values=cache, use_cache=True)
    return cache


def _token_ids(model: PreTrainedModel) -> torch.Tensor:
    numbers = torch.arange(_NUM_TOKENS, device=model.device)
    vocab_size: int = model.config.get_text_config(decoder=True).vocab_size
    return (numbers * 7919 + 3) % vocab_size


def _failure(error: Exception) -> str:
    reason = str(error).partition("\n")[0]
    return f"layers that do not run by themselves ({type(error).__name__}: {reason})"


def _refusal(kind: str, trait: str) -> ConfigError:
    return ConfigError(
        f'segments "on": model kind {kind!r} has {trait}; '
        'models built as Llama, Mistral, Qwen2 and Qwen3 work, for others set them "off"'
    )
