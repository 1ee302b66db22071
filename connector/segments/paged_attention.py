"""A transformers model's attention over a paged tensor: one registered function, how a layer scores, one step's."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface


def uploaded(arrays: Sequence[NDArray[np.int64]], device: torch.device) -> list[torch.Tensor]:
    """The arrays, each of one dimension, as tensors on the device. Work enqueued behind the call sees them.

    A GPU takes them from pinned memory: any other copy waits until it has done all that it was given before.
    """
    numbers = torch.from_numpy(np.concatenate(arrays))
    if device.type == "cuda":
        numbers = numbers.pin_memory()
    sent = numbers.to(device, non_blocking=True)
    ends = np.cumsum([len(array) for array in arrays]).tolist()
    return [sent[start:end] for start, end in zip([0, *ends], ends, strict=False)]


@dataclass(frozen=True, slots=True, eq=False)
class Scoring:
    """What a layer's attention depends on beside Q, K and V."""

    scaling: float
    window: int | None = None  # tokens: a row sees so many, its own included
    chunk: int | None = None  # tokens: a row sees those of its own chunk, which begin at multiples of this
    softcap: float | None = None  # scores are bent below it by a tanh
    sinks: torch.Tensor | None = None  # [heads]: the score of a key that is not there

    @property
    def reach(self) -> tuple[int | None, int | None]:
        """What decides who sees whom."""
        return self.window, self.chunk

    @property
    def is_plain(self) -> bool:
        """Whether torch's own attention does all of it."""
        return self.softcap is None and self.sinks is None

    def lowest(self, position: int) -> int:
        """The first key that a row at `position` sees."""
        first = 0 if self.window is None else max(0, position - self.window + 1)
        return first if self.chunk is None else max(first, position // self.chunk * self.chunk)

    def sees(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """True where the row at position `queries` sees the key at position `keys`; the two are broadcast."""
        sees = keys <= queries
        if self.window is not None:
            sees &= keys > queries - self.window
        return sees if self.chunk is None else sees & (keys >= queries // self.chunk * self.chunk)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, rows_a_head: int
    ) -> torch.Tensor:
        """Attention by hand, `[batch, kv heads, rows, head dim]` each; for layers that are not plain.

        Rows are those of the heads of one group below each other, `rows_a_head` of each. Without a mask each row sees
        every key.
        """
        scores = query @ key.transpose(-2, -1) * self.scaling
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        if self.sinks is not None:
            sinks = self.sinks.view(1, key.shape[1], -1).repeat_interleave(rows_a_head, -1)[..., None]
            scores = torch.cat([scores, sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)], -1)
        weights = scores.softmax(-1, dtype=torch.float32)
        if self.sinks is not None:
            weights = weights[..., :-1]
        return weights.to(value.dtype) @ value


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
    layer = _source_of(module)
    paged: Attention = options["paged"]
    scoring = Scoring(
        options["scaling"],
        options.get("sliding_window"),
        _chunk_of(module.config, layer),
        options.get("softcap"),
        options.get("s_aux"),
    )
    return paged.attend(layer, query, key, value, scoring), None


def _source_of(module: Any) -> int:
    """The layer whose K and V it attends to: its own, or an earlier one of its kind (Gemma 3n)."""
    layer: int = module.layer_idx
    if not getattr(module, "is_kv_shared_layer", False):
        return layer
    kinds, modes = module.config.layer_types, module.config.kv_sharing_modes
    return next(i for i in range(layer) if modes[i] == "store" and kinds[i] == kinds[layer])


def _chunk_of(config: Any, layer: int) -> int | None:
    """Tokens of the chunks that a layer stays in; transformers knows them in its masks alone."""
    kinds = getattr(config, "layer_types", None)
    return config.attention_chunk_size if kinds and kinds[layer] == "chunked_attention" else None


# The function only, no mask function: transformers then builds no mask at all.
AttentionInterface.register(PAGED_ATTENTION, _paged_attention)


class PagedKV:
    """The pool's tensor seen as rows, and the scratch its blocks are gathered into.

    `tensor` is `[num_blocks, num_layers, num_kv, block_size, num_kv_heads, head_dim]`, contiguous; `num_kv` is 2 (K and
    V) or 1 (a latent).
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.num_layers, self.num_kv, self.block_size, self.num_kv_heads, self.head_dim = tensor.shape[1:]
        self._token_rows = tensor.view(-1, self.num_kv_heads * self.head_dim)
        self._block_rows = tensor.view(-1, self.block_size * self.num_kv_heads * self.head_dim)
        self._scratch = (tensor.new_empty(0),) * self.num_kv

    def slots(self, table: list[int], start: int, end: int) -> NDArray[np.int64]:
        """Row of K (or the latent) of layer 0 for tokens `start … end` of a sequence with this block table."""
        position = np.arange(start, end)
        blocks = np.asarray(table, np.int64)[position // self.block_size]
        return blocks * (self.num_layers * self.num_kv * self.block_size) + position % self.block_size

    def write(self, layer: int, slots: torch.Tensor, *kv: torch.Tensor) -> None:
        """Put the first `len(slots)` tokens of K and V, or of the latent, where `slots` says.

        Each is `[1, kv heads, T, head dim]`.
        """
        for part, states in enumerate(kv):
            tokens = states[0, :, : len(slots)].transpose(0, 1).reshape(len(slots), -1)
            self._token_rows.index_copy_(0, slots + (layer * self.num_kv + part) * self.block_size, tokens)

    def gather(self, layer: int, blocks: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, ...]:
        """K and V of these blocks, or the latent, `[num_tokens, kv heads, head dim]` each; good until the next gather.

        `num_tokens` may lie beyond the blocks: those rows hold rubbish.
        """
        rows, width = -(-max(num_tokens, len(blocks) * self.block_size) // self.block_size), self._block_rows.shape[1]
        if len(self._scratch[0]) < rows:
            self._scratch = tuple(self._block_rows.new_zeros(rows * 2, width) for _ in range(self.num_kv))
        for part, scratch in enumerate(self._scratch):
            index = (blocks * self.num_layers + layer) * self.num_kv + part
            torch.index_select(self._block_rows, 0, index, out=scratch[: len(blocks)])
        return tuple(
            scratch[:rows].view(-1, self.num_kv_heads, self.head_dim)[:num_tokens] for scratch in self._scratch
        )


@dataclass(slots=True)
class AttentionSpan:
    """One chunk's rows in the packed batch, `first … last`, and where its context lies."""

    first: int
    last: int
    start: int  # position of its first token
    end: int
    blocks: torch.Tensor  # its block table, up to `end`
    masks: dict[tuple[tuple[int | None, int | None], int], torch.Tensor] = field(default_factory=dict)  # by reach


class PackedAttention:
    """One step's attention: every chunk by itself, so that no bit depends on what it is packed with."""

    def __init__(
        self, kv: PagedKV, spans: list[AttentionSpan], slots: torch.Tensor, wait_layer: Callable[[int], bool] | None
    ) -> None:
        """Without `wait_layer` nothing is being loaded in this step."""
        self.kv = kv
        self.spans = spans
        self.arrived = True
        self._slots = slots
        self._wait_layer = wait_layer

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        self.write(layer, key, value)
        return self.attend_written(layer, query, key, value, scoring)

    def write(self, layer: int, *kv: torch.Tensor) -> None:
        """Put this step's K and V, or its latents, into the pool, behind what is being loaded there."""
        if self._wait_layer is not None:
            self.arrived &= self._wait_layer(layer)
        self.kv.write(layer, self._slots, *kv)

    def context(self, layer: int, blocks: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, ...]:
        """K and V of these blocks, `[num_tokens, kv heads, head dim]` each; good until the next call."""
        return self.kv.gather(layer, blocks, num_tokens)

    def attend_written(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """As `attend`, of a step that is in the pool by now."""
        if len(self.spans) == 1 and query.shape[2] == self.spans[0].last:
            span = self.spans[0]
            return self._span(layer, span, (query[0], key[0], value[0]), scoring).transpose(0, 1)[None]
        out = value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])
        for span in self.spans:
            rows = slice(span.first, span.last)
            fresh = (query[0, :, rows], key[0, :, rows], value[0, :, rows])
            out[0, rows] = self._span(layer, span, fresh, scoring).transpose(0, 1)
        return out

    def _span(self, layer: int, span: AttentionSpan, fresh: tuple[torch.Tensor, ...], scoring: Scoring) -> torch.Tensor:
        """`fresh`: the chunk's own Q, K, V, [heads, T, head dim] each. Returns [heads, T, head dim]."""
        query, key, value = fresh
        lowest = scoring.lowest(span.start)  # the first key anybody sees
        if span.start:
            first_block = lowest // self.kv.block_size
            origin = first_block * self.kv.block_size
            key, value = self.context(layer, span.blocks[first_block:], span.end - origin)
            key, value = (states[lowest - origin :].transpose(0, 1) for states in (key, value))
        num_kv_heads, shape = len(key), (*query.shape[:2], value.shape[2])
        if query.shape[1] == 1:  # the heads of a group become rows: one pass over their keys
            grouped = query.view(1, num_kv_heads, -1, query.shape[2])
            if not scoring.is_plain:
                return scoring.attend(grouped, key[None], value[None], None, 1).reshape(shape)
            scaling = scoring.scaling
            return scaled_dot_product_attention(grouped, key[None], value[None], scale=scaling).reshape(shape)
        if not scoring.is_plain:
            grouped = query.reshape(1, num_kv_heads, -1, query.shape[2])
            sees = _mask(span, scoring, lowest, query.device).repeat(grouped.shape[2] // query.shape[1], 1)
            return scoring.attend(grouped, key[None], value[None], sees, query.shape[1]).reshape(shape)
        grouped = query.view(num_kv_heads, -1, *query.shape[1:])
        key, value = (for_each_head(states, grouped.shape[1]) for states in (key, value))
        causal = not span.start and not scoring.lowest(span.end - 1)
        mask = None if causal else _mask(span, scoring, lowest, query.device)
        out = scaled_dot_product_attention(grouped, key, value, attn_mask=mask, is_causal=causal, scale=scoring.scaling)
        return out.flatten(0, 1)


def for_each_head(states: torch.Tensor, group: int) -> torch.Tensor:
    """K or V, `[kv heads, T, head dim]`, for each head of a group: `[kv heads, group, T, head dim]`.

    On a GPU it is a copy. Of strided ones torch's memory-efficient kernel (2.11, on an H200) makes wrong rows where
    there are 64 n + 1 queries and a mask: what follows is another text.
    """
    expanded = states[:, None].expand(-1, group, -1, -1)
    return expanded.contiguous() if states.is_cuda else expanded


def _mask(span: AttentionSpan, scoring: Scoring, lowest: int, device: torch.device) -> torch.Tensor:
    """Who sees whom, [T, keys from position `lowest`], True: sees. Built once per step and reach."""
    mask = span.masks.get((scoring.reach, 0))
    if mask is None:
        queries = torch.arange(span.start, span.end, device=device)[:, None]
        mask = scoring.sees(queries, torch.arange(lowest, span.end, device=device))
        span.masks[scoring.reach, 0] = mask
    return mask
