"""A transformers model's attention over a paged tensor: one registered function, and that tensor as rows."""

from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AttentionInterface

from kvtier.connector.segments.scoring import Scoring

PAGED_ATTENTION: Final = "kvtier-paged"
"""Its name among transformers' attention functions."""


class Attention(Protocol):
    """One step's attention over the paged pool."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """Write this step's K and V ([1, kv heads, T, head dim]) and attend; returns [1, T, heads, head dim]."""


def _paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in every layer; `paged` came with the forward's keyword arguments."""
    layer: int = module.layer_idx  # type: ignore[assignment]
    paged: Attention = options["paged"]
    scoring = Scoring(
        options["scaling"],
        options.get("sliding_window"),
        _chunk_of(module.config, layer),
        options.get("softcap"),
        options.get("s_aux"),
    )
    return paged.attend(layer, query, key, value, scoring), None


def _chunk_of(config: Any, layer: int) -> int | None:
    """Tokens of the chunks that a layer stays in; transformers knows them in its masks alone."""
    kinds = getattr(config, "layer_types", None)
    return config.attention_chunk_size if kinds and kinds[layer] == "chunked_attention" else None


# The function only, no mask function: transformers then builds no mask at all.
AttentionInterface.register(PAGED_ATTENTION, _paged_attention)


class PagedKV:
    """The pool's tensor seen as rows, and the scratch its blocks are gathered into.

    `tensor` is `[num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]`, contiguous.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.num_layers, _, self.block_size, self.num_kv_heads, self.head_dim = tensor.shape[1:]
        self._token_rows = tensor.view(-1, self.num_kv_heads * self.head_dim)
        self._block_rows = tensor.view(-1, self.block_size * self.num_kv_heads * self.head_dim)
        self._scratch = (tensor.new_empty(0), tensor.new_empty(0))

    def slots(self, table: list[int], start: int, end: int) -> NDArray[np.int64]:
        """Row of K of layer 0 for tokens `start … end` of a sequence with this block table."""
        position = np.arange(start, end)
        blocks = np.asarray(table, np.int64)[position // self.block_size]
        return blocks * (self.num_layers * 2 * self.block_size) + position % self.block_size

    def write(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Put the first `len(slots)` tokens of K and V ([1, kv heads, T, head dim]) where `slots` says."""
        for half, states in enumerate((key, value)):
            tokens = states[0, :, : len(slots)].transpose(0, 1).reshape(len(slots), -1)
            self._token_rows.index_copy_(0, slots + (layer * 2 + half) * self.block_size, tokens)

    def gather(self, layer: int, blocks: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of these blocks, `[num_tokens, kv heads, head dim]` each; good until the next gather.

        `num_tokens` may lie beyond the blocks: those rows hold rubbish.
        """
        rows, width = -(-max(num_tokens, len(blocks) * self.block_size) // self.block_size), self._block_rows.shape[1]
        if len(self._scratch[0]) < rows:
            self._scratch = (self._block_rows.new_zeros(rows * 2, width), self._block_rows.new_zeros(rows * 2, width))
        for half, scratch in enumerate(self._scratch):
            index = blocks * (self.num_layers * 2) + (layer * 2 + half)
            torch.index_select(self._block_rows, 0, index, out=scratch[: len(blocks)])
        key, value = (scratch[:rows].view(-1, self.num_kv_heads, self.head_dim) for scratch in self._scratch)
        return key[:num_tokens], value[:num_tokens]
