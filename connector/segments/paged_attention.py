"""Attention of a transformers model over a paged tensor: a registered function, a layer's scoring, a step's spans."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface


def uploaded(arrays: Sequence[NDArray[np.int64]], device: torch.device) -> list[torch.Tensor]:
    """The 1-D arrays as tensors on the device. Work enqueued after the call sees them.

    To a GPU they are copied from pinned memory: any other copy waits for all earlier work.
    """
    numbers = torch.from_numpy(np.concatenate(arrays))
    if device.type == "cuda":
        numbers = numbers.pin_memory()
    sent = numbers.to(device, non_blocking=True)
    ends = np.cumsum([len(array) for array in arrays]).tolist()
    return [sent[start:end] for start, end in zip([0, *ends], ends, strict=False)]


@dataclass(frozen=True, slots=True, eq=False)
class Scoring:
    """A layer's attention parameters beside Q, K and V."""

    scaling: float
    window: int | None = None  # tokens that a row sees, including its own
    chunk: int | None = None  # tokens of a chunk: a row sees only its own chunk
    softcap: float | None = None  # bounds scores by a tanh
    sinks: torch.Tensor | None = None  # [heads]: the score of a virtual key

    @property
    def reach(self) -> tuple[int | None, int | None]:
        """The parameters of the mask."""
        return self.window, self.chunk

    @property
    def is_plain(self) -> bool:
        """Whether torch's own attention supports it."""
        return self.softcap is None and self.sinks is None

    def lowest(self, position: int) -> int:
        """The first key that a row at `position` sees."""
        first = 0 if self.window is None else max(0, position - self.window + 1)
        return first if self.chunk is None else max(first, position // self.chunk * self.chunk)

    def sees(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Whether the row at position `queries` sees the key at position `keys`; the two are broadcast."""
        sees = keys <= queries
        if self.window is not None:
            sees &= keys > queries - self.window
        return sees if self.chunk is None else sees & (keys >= queries // self.chunk * self.chunk)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, rows_a_head: int
    ) -> torch.Tensor:
        """Attention by hand, `[batch, kv heads, rows, head dim]` each; for layers that are not plain.

        The rows of a group's heads are concatenated, `rows_a_head` of each. Without a mask each row sees every key.
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
"""The function's name among transformers' attention functions."""


class Attention(Protocol):
    """One step's attention over the paged pool."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """Write this step's K and V ([1, kv heads, T, head dim]) and attend; returns [1, T, heads, head dim]."""


def _paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Called by transformers in every layer; `paged` is one of the forward's keyword arguments."""
    layer, config = module.layer_idx, module.config
    paged: Attention = options["paged"]
    kinds: Any = getattr(config, "layer_types", None)
    if getattr(module, "is_kv_shared_layer", False):  # it uses K and V of an earlier layer of its kind (Gemma 3n)
        modes = config.kv_sharing_modes
        layer = next(i for i in range(layer) if modes[i] == "store" and kinds[i] == kinds[layer])
    # in transformers only the masks have a layer's chunks
    chunk = config.attention_chunk_size if kinds and kinds[layer] == "chunked_attention" else None
    window, softcap, sinks = options.get("sliding_window"), options.get("softcap"), options.get("s_aux")
    scoring = Scoring(options["scaling"], window, chunk, softcap, sinks)
    return paged.attend(layer, query, key, value, scoring), None


# The function only, no mask function: transformers then builds no mask at all.
AttentionInterface.register(PAGED_ATTENTION, _paged_attention)


class PagedKV:
    """The pool's tensor as rows, and the scratch memory that its blocks are gathered into.

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
        """Write the first `len(slots)` tokens of K and V, or of the latent, to `slots`. Each is `[1, kv heads, T, head
        dim]`.
        """
        for part, states in enumerate(kv):
            tokens = states[0, :, : len(slots)].transpose(0, 1).reshape(len(slots), -1)
            self._token_rows.index_copy_(0, slots + (layer * self.num_kv + part) * self.block_size, tokens)

    def gather(self, layer: int, blocks: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, ...]:
        """K and V of these blocks, or the latent, `[num_tokens, kv heads, head dim]` each; valid until the next gather.

        `num_tokens` may exceed the blocks: those rows are undefined.
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
    """One chunk's rows in the packed batch, `first … last`, and its context."""

    first: int
    last: int
    start: int  # position of its first token
    end: int
    blocks: torch.Tensor  # its block table, up to `end`
    masks: dict[tuple[tuple[int | None, int | None], int], torch.Tensor] = field(default_factory=dict)  # by reach


class PackedAttention:
    """One step's attention: each chunk by itself, so that no bit depends on the other chunks."""

    writes: ClassVar[bool] = True  # False: this step's K and V are already in the pool

    def __init__(
        self, kv: PagedKV, spans: list[AttentionSpan], slots: torch.Tensor, wait_layer: Callable[[int], bool] | None
    ) -> None:
        """`wait_layer` None: nothing is loaded in this step."""
        self.kv = kv
        self.context = kv.gather
        self.spans = spans
        self.arrived = True
        self._slots = slots
        self._wait_layer = wait_layer

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        if self.writes:
            self.write(layer, key, value)
        if len(self.spans) == 1 and query.shape[2] == self.spans[0].last:
            span = self.spans[0]
            return self._span(layer, span, (query[0], key[0], value[0]), scoring).transpose(0, 1)[None]
        out = value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])
        for span in self.spans:
            rows = slice(span.first, span.last)
            fresh = (query[0, :, rows], key[0, :, rows], value[0, :, rows])
            out[0, rows] = self._span(layer, span, fresh, scoring).transpose(0, 1)
        return out

    def write(self, layer: int, *kv: torch.Tensor) -> None:
        """Write this step's K and V, or latents, to the pool, after the layer's load."""
        if self._wait_layer is not None:
            self.arrived &= self._wait_layer(layer)
        self.kv.write(layer, self._slots, *kv)

    def _span(self, layer: int, span: AttentionSpan, fresh: tuple[torch.Tensor, ...], scoring: Scoring) -> torch.Tensor:
        """`fresh`: the chunk's own Q, K, V, [heads, T, head dim] each. Returns [heads, T, head dim]."""
        query, key, value = fresh
        is_plain, lowest = scoring.softcap is None and scoring.sinks is None, 0
        sees_all = scoring.window is None and scoring.chunk is None
        if span.start:
            if not sees_all:
                lowest = scoring.lowest(span.start)  # the first visible key
            first_block = lowest // self.kv.block_size
            origin = first_block * self.kv.block_size
            key, value = self.context(layer, span.blocks[first_block:], span.end - origin)
            key, value = (states[lowest - origin :].transpose(0, 1) for states in (key, value))
        num_kv_heads, shape = len(key), (*query.shape[:2], value.shape[2])
        if query.shape[1] == 1:  # a group's heads become rows: one pass over their keys
            grouped = query.view(1, num_kv_heads, -1, query.shape[2])
            if not is_plain:
                return scoring.attend(grouped, key[None], value[None], None, 1).reshape(shape)
            scaling = scoring.scaling
            return scaled_dot_product_attention(grouped, key[None], value[None], scale=scaling).reshape(shape)
        if not is_plain:
            grouped = query.reshape(1, num_kv_heads, -1, query.shape[2])
            sees = _mask(span, scoring, lowest, query.device).repeat(grouped.shape[2] // query.shape[1], 1)
            return scoring.attend(grouped, key[None], value[None], sees, query.shape[1]).reshape(shape)
        grouped = query.view(num_kv_heads, -1, *query.shape[1:])
        key, value = for_each_head(grouped.shape[1], key, value)
        causal = not span.start and (sees_all or not scoring.lowest(span.end - 1))
        mask = None if causal else _mask(span, scoring, lowest, query.device)
        out = scaled_dot_product_attention(grouped, key, value, attn_mask=mask, is_causal=causal, scale=scoring.scaling)
        return out.flatten(0, 1)


def for_each_head(group: int, *kv: torch.Tensor) -> list[torch.Tensor]:
    """K and V, `[kv heads, T, head dim]` each, for each head of a group: `[kv heads, group, T, head dim]`.

    On a GPU it is a copy. For strided ones torch's memory-efficient kernel (2.11, on an H200) computes wrong rows if
    there are 64 n + 1 queries and a mask, which changes the text.
    """
    expanded = [states[:, None].expand(-1, group, -1, -1) for states in kv]
    return [each.contiguous() for each in expanded] if kv[0].is_cuda else expanded


def _mask(span: AttentionSpan, scoring: Scoring, lowest: int, device: torch.device) -> torch.Tensor:
    """The mask [T, keys from position `lowest`], True: visible. Built once per step and reach."""
    mask = span.masks.get((scoring.reach, 0))
    if mask is None:
        queries = torch.arange(span.start, span.end, device=device)[:, None]
        mask = scoring.sees(queries, torch.arange(lowest, span.end, device=device))
        span.masks[scoring.reach, 0] = mask
    return mask
