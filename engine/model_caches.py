"""What a model takes for its cache: latents that MLA layers expand, or the whole KV of the one sequence it computes."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from kvtier.connector.segments import PackedAttention, Scoring

Expand = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""A layer's own: latents and rotated keys, `[1, 1, T, dim]` each, to K and V, `[1, heads, T, head dim]` each."""


class LatentAttention(PackedAttention):
    """Attention over a pool of latents (MLA). transformers' layers give theirs to `update`, as they do to a cache.

    A layer expands what `update` returns: this step's tokens. What came before them, it expands chunk by chunk.
    """

    def __init__(self, expand: Mapping[int, Expand], *packed: Any) -> None:
        """`expand` has one for each layer; the rest as `PackedAttention` takes it."""
        super().__init__(*packed)
        self._expand = expand
        self._rank = 0  # of a latent; the rest of a row is the rotated key

    def update(
        self, latent: torch.Tensor, rotated: torch.Tensor, layer: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write this step's latents and rotated keys, `[1, 1, T, dim]` each. Returns them as they are."""
        self._rank = latent.shape[-1]
        self.write(layer, torch.cat((latent, rotated), -1))
        return latent, rotated

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        return self.attend_written(layer, query, key, value, scoring)

    def context(self, layer: int, blocks: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, ...]:
        [rows] = self.kv.gather(layer, blocks, num_tokens)
        rows = rows.transpose(0, 1)[None]
        expanded = self._expand[layer](rows[..., : self._rank], rows[..., self._rank :])
        return tuple(states[0].transpose(0, 1) for states in expanded)


class SequenceCache:
    """One sequence's KV in the pool, in place of transformers' cache: for layers that call no attention function.

    `step` has the chunk of this sequence alone.
    """

    def __init__(self, step: PackedAttention) -> None:
        self._step = step
        [self._span] = step.spans

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write this step's K and V, `[1, kv heads, T, head dim]` each. Returns those of the whole sequence so far."""
        self._step.write(layer, key, value)
        if not self._span.start:
            return key, value
        key, value = self._step.context(layer, self._span.blocks, self._span.end)
        return key.transpose(0, 1)[None], value.transpose(0, 1)[None]

    def get_seq_length(self, layer: int = 0) -> int:
        """Tokens before this chunk."""
        return self._span.start

    def get_query_offset(self, layer: int = 0) -> int:
        """The position of the chunk's first token."""
        return self._span.start

    def get_mask_sizes(self, query_length: int, layer: int = 0) -> tuple[int, int]:
        """How many keys `update` returns, and the position of the first."""
        return self._span.end, 0
