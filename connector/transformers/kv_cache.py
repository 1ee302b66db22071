"""Between blocks and transformers' caches: a cache made of blocks, and the blocks that a cache holds."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from kvtier.connector.transformers.blocks import Blocks
from kvtier.connector.transformers.cache_form import CacheForm, layers_of, per_token
from kvtier.connector.transformers.padding import with_room
from kvtier.connector.transformers.pass_watch import WatchedCache


class BlendedCache(WatchedCache):
    """A cache with reused segments: behind the first `num_exact` tokens of every row nothing may be stored."""

    num_exact: int = 0


def fill(cache: DynamicCache, form: CacheForm, rows: Sequence[Blocks], num_tokens: int, device: torch.device) -> None:
    """Put the first tokens of each row's blocks into an empty cache; zeros where a row has fewer. Takes the planes."""
    if not num_tokens:
        return
    num_blocks = -(-num_tokens // form.block_size)
    taken = [blocks.take() for blocks in rows]
    for number, layer in enumerate(form.layers):
        held: dict[str, torch.Tensor] = {}
        for plane in layer:
            views = [with_room(next(planes), num_blocks) for planes in taken]
            start = 0
            for part in plane.parts:
                both = torch.stack([view[..., start : start + part.dim] for view in views]).to(device)
                tokens = both.flatten(1, 2)[:, :num_tokens].transpose(1, 2)  # [rows, heads, tokens, dim]
                held[part.name] = tokens.contiguous()
                start += part.dim
        if held:
            cache.update(held["keys"], held["values"], number)
        if "indexer_keys" in held:
            cache.update_indexer(held["indexer_keys"].squeeze(1), number)


def blocks_of(cache: DynamicCache, row: int, run: range, form: CacheForm, num_pads: int = 0) -> Blocks:
    """Blocks `run` of one row of a cache, as views of it. The row's first token stands in column `num_pads`."""
    layers: Any = cache.layers
    columns = slice(num_pads + run.start * form.block_size, num_pads + run.stop * form.block_size)
    planes = []
    for number, layer in enumerate(form.layers):
        for plane in layer:
            parts = []
            for part in plane.parts:
                tensor = per_token(layers[number], part.name)
                assert tensor is not None  # `is_whole`
                held = tensor[row, :, columns].detach().transpose(0, 1)  # [tokens, heads, dim]
                parts.append(held.view(len(run), form.block_size, *held.shape[1:]))
            planes.append(parts)
    return Blocks(planes, torch.empty(0, form.num_elements))


def is_whole(cache: DynamicCache, num_rows: int, form: CacheForm, model: PreTrainedModel) -> bool:
    """Whether a cache has every token of every row, as blocks hold them."""
    try:
        return layers_of(cache, num_rows, cache.get_seq_length(), model) == form.layers
    except ValueError:
        return False
