"""Between blocks and transformers' caches: a cache made of blocks, and the blocks that a cache holds."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from kvtier.connector.transformers.cache_form import CacheForm, layers_of, per_token


class BlendedCache(DynamicCache):
    """A cache with reused segments: behind the first `num_exact` tokens of every row nothing may be stored."""

    num_exact: int = 0


def fill(
    cache: DynamicCache, form: CacheForm, rows: Sequence[torch.Tensor], num_tokens: int, device: torch.device
) -> None:
    """Put the first tokens of each row's blocks, `[num_blocks, num_elements]`, into an empty cache."""
    if not num_tokens:
        return
    tensors: dict[int, dict[str, torch.Tensor]] = {}
    for planes in zip(*(form.planes(blocks) for blocks in rows), strict=True):
        number, plane, _ = planes[0]
        views = [view for _, _, view in planes]
        start = 0
        for part in plane.parts:
            both = torch.stack([view[..., start : start + part.dim] for view in views]).to(device)
            tokens = both.flatten(1, 2)[:, :num_tokens].transpose(1, 2)  # [rows, heads, tokens, dim]
            tensors.setdefault(number, {})[part.name] = tokens.contiguous()
            start += part.dim
    for number, held in tensors.items():
        cache.update(held["keys"], held["values"], number)
        if "indexer_keys" in held:
            cache.update_indexer(held["indexer_keys"].squeeze(1), number)


def blocks_of(cache: DynamicCache, row: int, run: range, form: CacheForm, num_pads: int = 0) -> torch.Tensor:
    """Blocks `run` of one row of a cache, `[num_blocks, num_elements]` in host memory.

    The row's first token stands in column `num_pads`.
    """
    layers: Any = cache.layers
    columns = slice(num_pads + run.start * form.block_size, num_pads + run.stop * form.block_size)
    blocks = torch.empty(len(run), form.num_elements, dtype=getattr(torch, form.dtype))
    for number, plane, view in form.planes(blocks):
        start = 0
        for part in plane.parts:
            tensor = per_token(layers[number], part.name)
            assert tensor is not None  # `is_whole`
            held = tensor[row, :, columns].transpose(0, 1)  # [tokens, heads, dim]
            view[..., start : start + part.dim] = held.reshape(*view.shape[:3], part.dim)
            start += part.dim
    return blocks


def is_whole(cache: DynamicCache, num_rows: int, form: CacheForm, model: PreTrainedModel) -> bool:
    """Whether a cache has every token of every row, as blocks hold them."""
    try:
        return layers_of(cache, num_rows, cache.get_seq_length(), model) == form.layers
    except ValueError:
        return False
