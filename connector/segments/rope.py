"""Moves stored keys to another place: a rotation by the distance, with the model's own frequencies."""

from typing import Final

import torch

PIECE: Final = 1024  # tokens that are rotated at once: what the fp32 copies take


def inverse_frequencies(module: torch.nn.Module) -> torch.Tensor | None:
    """The `inv_freq` of a transformers model, [rotated dimensions / 2]. None: it has no rotary embedding."""
    for part in module.modules():
        if isinstance(found := getattr(part, "inv_freq", None), torch.Tensor):
            return found
    return None


def rotated(keys: torch.Tensor, distance: int, inv_freq: torch.Tensor, *, interleaved: bool = False) -> torch.Tensor:
    """Keys `[…, head dim]` as if their tokens stood `distance` further on; a copy, computed in fp32.

    Dimensions beyond the rotated ones stay as they are (partial rotary). An attention scaling is in the keys already.
    `interleaved` turns neighbours instead of halves: only the gate asks for it, to name what a model does.
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
