"""Moves stored keys to other positions by the model's rotation, and checks that a model's keys can be moved."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from transformers import PreTrainedModel

from kvtier.connector.models import returned_cache
from kvtier.tiers import ConfigError

PIECE: Final = 1024  # tokens rotated at once, which bounds the fp32 copies


def inverse_frequencies(module: torch.nn.Module) -> torch.Tensor | None:
    """The `inv_freq` of a transformers model, [rotated dimensions / 2]. None: it has no rotary embedding."""
    for part in module.modules():
        if isinstance(found := getattr(part, "inv_freq", None), torch.Tensor):
            return found
    return None


def rotated(keys: torch.Tensor, distance: int, inv_freq: torch.Tensor, *, interleaved: bool = False) -> torch.Tensor:
    """Keys `[…, head dim]` as if their tokens were `distance` positions later; a copy, computed in fp32.

    Dimensions beyond the rotated ones stay as they are (partial rotary). An attention scaling is in the keys already.
    `interleaved` rotates neighbours instead of halves: only the check uses it, to name the model's kind of RoPE.
    """
    angles = distance * inv_freq.to(keys.device, torch.float64)
    cos, sin = angles.cos().float(), angles.sin().float()
    half = len(inv_freq)
    if interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        first, second = slice(0, half), slice(half, 2 * half)
    left, right = keys[..., first].float(), keys[..., second].float()
    moved = keys.clone()
    moved[..., first] = (left * cos - right * sin).to(keys.dtype)
    moved[..., second] = (right * cos + left * sin).to(keys.dtype)
    return moved


_NUM_TOKENS: Final = 24
_NEAR, _FAR = 17, 3000  # distances in positions
_MOVING: Final = {
    "dynamic": "dynamic NTK scaling, whose frequencies depend on the length of the prompt",
    "longrope": "longrope scaling, whose frequencies depend on the length of the prompt",
}

Layers = list[tuple[torch.Tensor, torch.Tensor]]
"""K and V of every layer, `[1, kv heads, tokens, head dim]`."""


def tolerance_of(dtype: torch.dtype) -> float:
    """The relative error that rounding alone may cause; a wrong rotation is off by about 1.

    That of 16-bit types adds up over the layers.
    """
    return 5e-3 if dtype is torch.float32 else 0.1


def require_rotatable(module: PreTrainedModel) -> torch.Tensor:
    """The model's `inv_freq`, if its KV can be moved from one position to another. ConfigError names the obstacle."""
    inv_freq, computed = inverse_frequencies(module), partial(_keys_and_values, module)
    return checked_rotation(module.config, module.dtype, inv_freq, computed)


def checked_rotation(
    config: Any,
    dtype: torch.dtype,
    inv_freq: torch.Tensor | None,
    keys_and_values: Callable[[torch.Tensor, torch.Tensor], Layers],
) -> torch.Tensor:
    """`require_rotatable` for any engine's model of this transformers configuration.

    Has `keys_and_values` compute 24 tokens at three positions: in every layer K must be the rotated one and V equal.
    """
    kind = config.model_type
    if (trait := _trait_of(config)) is not None:
        raise _refusal(kind, trait)
    if inv_freq is None:
        raise _refusal(kind, "no rotary embedding")
    tolerance = tolerance_of(dtype)
    longest = getattr(config, "max_position_embeddings", None) or _FAR
    numbers = torch.arange(_NUM_TOKENS)
    token_ids = (numbers * 7919 + 3) % config.get_text_config(decoder=True).vocab_size
    at_start = keys_and_values(token_ids, numbers)
    for distance in sorted({min(_NEAR, longest), max(1, min(_FAR, longest - _NUM_TOKENS))}):
        moved = keys_and_values(token_ids, numbers + distance)
        for layer, (here, there) in enumerate(zip(at_start, moved, strict=True)):
            if trait := _difference(here, there, (distance, inv_freq), tolerance):
                raise _refusal(kind, f"layer {layer} has {trait}")
    return inv_freq


def _trait_of(config: Any) -> str | None:
    """What in the configuration forbids it; None: nothing."""
    rope = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    by_layer = [each for each in rope.values() if isinstance(each, dict)]
    if len({str(sorted(each.items(), key=str)) for each in by_layer}) > 1:
        return "layers that rotate by different frequencies"
    for each in by_layer or [rope]:
        if (found := _MOVING.get(each.get("rope_type", "default"))) is not None:
            return found
    return None


def _difference(
    here: tuple[torch.Tensor, torch.Tensor],
    there: tuple[torch.Tensor, torch.Tensor],
    move: tuple[int, torch.Tensor],
    tolerance: float,
) -> str | None:
    """What one layer does to K and V beyond the rotation; None: nothing."""
    distance, inv_freq = move
    (key, value), (moved_key, moved_value) = here, there
    if 2 * len(inv_freq) > key.shape[-1]:
        return "a rotary embedding wider than its keys"
    if _error(rotated(key, distance, inv_freq), moved_key) > tolerance:
        if _error(key, moved_key) <= tolerance:
            return "no RoPE"
        if _error(rotated(key, distance, inv_freq, interleaved=True), moved_key) <= tolerance:
            return "interleaved RoPE"
        return "keys that are not rotated by its frequencies alone"
    return "values that depend on the position" if _error(value, moved_value) > tolerance else None


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


@torch.inference_mode()
def _keys_and_values(module: PreTrainedModel, token_ids: torch.Tensor, positions: torch.Tensor) -> Layers:
    """K and V of tokens at these positions, as transformers itself caches them."""
    ids, places = token_ids.to(module.device), positions.to(module.device)
    with attending(module, "sdpa"):  # transformers' attention, not ours over a paged pool
        output = module(input_ids=ids[None], position_ids=places[None], use_cache=True)
    cache = returned_cache(output)
    return [(layer.keys, layer.values) for layer in cache.layers]


@contextmanager
def attending(module: PreTrainedModel, way: str) -> Iterator[None]:
    """The model with this attention function; its own is restored afterwards."""
    chosen: str = module.config._attn_implementation
    try:
        module.set_attn_implementation(way)
        yield
    finally:
        module.set_attn_implementation(chosen)


def _refusal(kind: str, trait: str) -> ConfigError:
    return ConfigError(f'segments "on": model kind {kind!r} has {trait}, so its KV cannot be moved; set them "off"')
