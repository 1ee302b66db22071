"""The gate of segment reuse: a model's KV can be moved, and its layers compute by themselves what the model does."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

import torch
from transformers import AttentionInterface, DynamicCache, PreTrainedModel

from kvtier.connector.models import cache_option
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
_PROBE: Final = "kvtier-probe"
_UNHEEDED: Final = ("attention_mask", "softcap", "s_aux")  # a mask of the layer's own, capped scores, attention sinks
_FAILURES: Final = (
    RuntimeError,
    TypeError,
    ValueError,
    AttributeError,
    LookupError,
)  # of a layer called as none expects


def paged_attention(model: PreTrainedModel) -> AbstractContextManager[None]:
    """The model with the attention that a blend needs; its own again afterwards, whatever happens."""
    return _attending(model, PAGED_ATTENTION)


@contextmanager
def _attending(model: PreTrainedModel, way: str) -> Iterator[None]:
    chosen: str = model.config._attn_implementation
    try:
        model.set_attn_implementation(way)
        yield
    finally:
        model.set_attn_implementation(chosen)


def require_blendable(model: PreTrainedModel, shape: KVShape | None) -> torch.Tensor:
    """The model's `inv_freq`, if segments can be reused in it. ConfigError names what forbids it.

    It measures: 24 tokens, computed layer by layer as a blend does, must have the K and V that the model gives them.
    """
    kind = model.config.model_type
    if shape is None:
        raise _refusal(kind, "layers whose K and V differ in shape")
    if model.training:
        raise ConfigError('segments "on": the model is in training mode; call model.eval() before KVTier(model)')
    try:
        inv_freq = require_rotatable(model)
    except _FAILURES as error:
        raise _refusal(kind, _failure(error)) from error
    trait = _missing(model)
    if trait:
        raise _refusal(kind, trait)
    try:
        own, trait = _own_cache(model), _unheeded(model)
        with paged_attention(model):
            trait = trait or _difference(model, own, shape, inv_freq)
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


def _noting(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """An attention that computes nothing, and notes what each layer asks for."""
    noted: dict[int, dict[str, Any]] = options.get("noted", {})
    layer: int = module.layer_idx  # type: ignore[assignment]
    noted[layer] = {"attention_mask": attention_mask, **options}
    return query.transpose(1, 2).contiguous(), None


AttentionInterface.register(_PROBE, _noting)


@torch.inference_mode()
def _unheeded(model: PreTrainedModel) -> str | None:
    """What a layer asks of its attention that a blend's does not heed."""
    config: Any = model.config.get_text_config(decoder=True)
    window = getattr(config, "sliding_window", None)
    usual = "full_attention" if window is None else "sliding_attention"
    kinds = getattr(config, "layer_types", None) or [usual] * config.num_hidden_layers
    noted: dict[int, dict[str, Any]] = {}
    decoder: Any = model.model
    with _attending(model, _PROBE):
        decoder(input_ids=_token_ids(model)[None], use_cache=False, noted=noted)
    for layer, kind in enumerate(kinds):
        if (asked := noted.get(layer)) is None:
            return f"a layer {layer} whose attention a blend does not reach"
        if odd := [name for name in _UNHEEDED if asked.get(name) is not None]:
            return f"a layer {layer} whose attention takes {odd[0]}"
        told = window if kind == "sliding_attention" else None
        if kind == "chunked_attention" or asked.get("sliding_window") != told:
            return f"a layer {layer} of kind {kind}, whose window only a mask tells"
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
                return f"a layer {layer} whose {name} a blend computes otherwise"
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
    model(input_ids=_token_ids(model)[None], use_cache=True, **cache_option(model, cache))
    return cache


def _token_ids(model: PreTrainedModel) -> torch.Tensor:
    numbers = torch.arange(_NUM_TOKENS, device=model.device)
    vocab_size: int = model.config.get_text_config(decoder=True).vocab_size
    return (numbers * 7919 + 3) % vocab_size


def _failure(error: Exception) -> str:
    reason = str(error).partition("\n")[0]
    return f"parts that a blend cannot run ({type(error).__name__}: {reason})"


def _refusal(kind: str, trait: str) -> ConfigError:
    return ConfigError(
        f'segments "on": model kind {kind!r} has {trait}; '
        'models built as Llama, Mistral, Qwen2 and Qwen3 work, for others set them "off"'
    )
