"""Between blocks and transformers' caches: a cache made of blocks, and the blocks that a cache holds."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache

from kvtier.tiers.naming import KVShape


class BlendedCache(DynamicCache):
    """A cache with reused segments: behind the first `num_exact` tokens of every row nothing may be stored."""

    num_exact: int = 0


def fill(cache: DynamicCache, rows: Sequence[torch.Tensor], num_tokens: int, device: torch.device) -> None:
    """Put the first tokens of each row's blocks, `[num_blocks, *block_shape]`, into an empty cache.

    Every layer keeps all of them, sliding ones too: only their masks slide.
    """
    for layer in range(rows[0].shape[1] if num_tokens else 0):
        # [rows, K or V, blocks, tokens, heads, dim] → two of [rows, heads, tokens, dim]
        both = torch.stack([blocks[:, layer].transpose(0, 1) for blocks in rows]).to(device)
        keys, values = both.flatten(2, 3)[:, :, :num_tokens].transpose(2, 3).contiguous().unbind(1)
        cache.update(keys, values, layer)


def blocks_of(cache: DynamicCache, row: int, run: range, shape: KVShape) -> torch.Tensor:
    """Blocks `run` of one row of a cache, `[num_blocks, *block_shape]` in host memory."""
    layers: Any = cache.layers
    size = shape.block_size
    blocks = torch.empty(len(run), *shape.block_shape, dtype=layers[0].keys.dtype)
    for number, layer in enumerate(layers):
        for kv, tensor in enumerate((layer.keys, layer.values)):
            tokens = tensor[row, :, run.start * size : run.stop * size].transpose(0, 1)  # [tokens, heads, dim]
            blocks[:, number, kv] = tokens.unflatten(0, (-1, size))
    return blocks


def is_whole(cache: DynamicCache, num_rows: int, shape: KVShape, dtype: torch.dtype) -> bool:
    """Whether a cache has every token of every row, as blocks hold them."""
    expected = (num_rows, shape.num_kv_heads, cache.get_seq_length(), shape.head_dim)
    layers: Any = cache.layers
    return len(layers) == shape.num_layers and all(
        layer.keys.shape == layer.values.shape == expected and layer.keys.dtype == dtype for layer in layers
    )
