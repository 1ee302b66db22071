"""Attention of rows at any positions over whole paged sequences, several sequences in one batch."""

from collections import abc
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

from kvtier.connector.segments.paged_attention import PagedKV, Scoring, for_each_head, uploaded
from kvtier.connector.segments.progress import Blend, Positions, Work
from kvtier.connector.segments.rope import PIECE, rotated
from kvtier.connector.segments.segment import BlendRequest, BlendResult, ReusedPart

_ROWS: Final = 256  # rows per call: a group of rows needs no key after its last


@dataclass(slots=True)
class BlendSpan:
    """One sequence's rows in the packed batch: at `positions`, rising, of a sequence whose KV is in `blocks`."""

    positions: torch.Tensor
    slots: torch.Tensor  # where their K goes
    blocks: torch.Tensor
    masks: dict[int | None, list[torch.Tensor]] = field(default_factory=dict)  # by window, one for each group of rows
    attended: torch.Tensor | None = None  # if requested: each key's attention, summed over heads, layers and rows
    asking_from: int = 0  # … of rows from this position on

    @property
    def length(self) -> int:
        """Keys visible to the last row."""
        return int(self.positions[-1]) + 1


class BlendAttention:
    """Attention of a blend's rows: writes their K and V, then each row attends to all keys up to its position."""

    def __init__(self, kv: PagedKV, spans: list[BlendSpan]) -> None:
        self._kv = kv
        self._spans = spans
        self._slots = torch.cat([span.slots for span in spans])

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        self._kv.write(layer, self._slots, key, value)
        outs, first = [], 0
        for span in self._spans:
            last = first + len(span.positions)
            outs.append(self._span(layer, span, query[0, :, first:last], scoring.scaling, scoring.window))
            first = last
        return torch.cat(outs, 1).transpose(0, 1)[None]

    def _span(
        self, layer: int, span: BlendSpan, query: torch.Tensor, scaling: float, window: int | None
    ) -> torch.Tensor:
        """`query` and the result are [heads, rows, head dim]."""
        keys, values = (states.transpose(0, 1) for states in self._kv.gather(layer, span.blocks, span.length))
        grouped = query.reshape(keys.shape[0], -1, *query.shape[1:])
        outs = []
        for number, mask in enumerate(self._masks(span, window)):
            rows = slice(number * _ROWS, (number + 1) * _ROWS)
            end = mask.shape[1]
            key, value = for_each_head(grouped.shape[1], keys[:, :end], values[:, :end])
            out = scaled_dot_product_attention(grouped[:, :, rows], key, value, attn_mask=mask, scale=scaling)
            outs.append(out)
            if span.attended is not None:
                asking = span.positions[rows] >= span.asking_from
                _collect(span.attended, grouped[:, :, rows][:, :, asking], keys[:, :end], mask[asking], scaling)
        return torch.cat(outs, 2).flatten(0, 1)

    def _masks(self, span: BlendSpan, window: int | None) -> list[torch.Tensor]:
        """Masks, True: visible; [rows of a group, keys up to its last]. Built once per blend and window."""
        if window not in span.masks:
            keys = torch.arange(span.length, device=span.positions.device)
            groups = []
            for rows in torch.split(span.positions, _ROWS):
                seen, places = keys[: int(rows[-1]) + 1], rows[:, None]
                mask = seen <= places
                groups.append(mask if window is None else mask & (seen > places - window))
            span.masks[window] = groups
        return span.masks[window]


def _collect(
    attended: torch.Tensor, query: torch.Tensor, keys: torch.Tensor, mask: torch.Tensor, scaling: float
) -> None:
    """Add the attention that each key gets from these rows."""
    scores = torch.einsum("kgtd,ksd->kgts", query.float(), keys.float()) * scaling
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    attended[: keys.shape[1]] += weights.sum((0, 1, 2))


Turns = tuple[torch.Tensor, ...]
"""What a decoder computes once for rows at some positions; each is `[1, rows, …]`."""


class Decoder(Protocol):
    """A model's decoder, layer by layer. States are `[rows, hidden]`."""

    device: torch.device

    def embed(self, tokens: torch.Tensor) -> torch.Tensor: ...

    def turns(self, states: torch.Tensor, positions: torch.Tensor) -> Turns: ...

    def run(
        self, number: int, states: torch.Tensor, positions: torch.Tensor, turns: Turns, attention: "BlendAttention"
    ) -> torch.Tensor:
        """One layer, whose attention is `attention`."""

    def keys_and_values(
        self, number: int, states: torch.Tensor, positions: torch.Tensor, turns: Turns
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer, `[rows, kv heads, head dim]`, without its attention and what follows."""


class TransformersDecoder:
    """The decoder of a transformers model whose attention is `PAGED_ATTENTION`."""

    def __init__(self, module: PreTrainedModel) -> None:
        self._decoder: Any = module.model
        self.device = module.device

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        states: torch.Tensor = self._decoder.embed_tokens(tokens)
        return states

    def turns(self, states: torch.Tensor, positions: torch.Tensor) -> Turns:
        """Cosine and sine."""
        turns: Turns = self._decoder.rotary_emb(states[None], positions[None])
        return turns

    def run(
        self, number: int, states: torch.Tensor, positions: torch.Tensor, turns: Turns, attention: BlendAttention
    ) -> torch.Tensor:
        states = self._decoder.layers[number](
            states[None],
            attention_mask=None,
            position_ids=positions[None],
            use_cache=False,
            position_embeddings=turns,
            paged=attention,
        )
        return states[0]

    def keys_and_values(
        self, number: int, states: torch.Tensor, positions: torch.Tensor, turns: Turns
    ) -> tuple[torch.Tensor, torch.Tensor]:
        layer = self._decoder.layers[number]
        attention = layer.self_attn
        normed = layer.input_layernorm(states)
        shape = (len(states), -1, attention.head_dim)
        keys, values = attention.k_proj(normed).view(shape), attention.v_proj(normed).view(shape)
        if hasattr(attention, "k_norm"):
            keys = attention.k_norm(keys)
        cos, sin = turns[0][0, :, None], turns[1][0, :, None]
        half = keys.shape[-1] // 2
        turned = torch.cat([-keys[..., half:], keys[..., :half]], -1)
        return keys * cos + turned * sin, values


@dataclass(slots=True)
class _BlendRows:
    """Rows of one request between layers; at most as many as a step computes."""

    blend: Blend
    positions: Positions
    span: BlendSpan
    states: torch.Tensor  # [rows, hidden], before `layer`
    turns: Turns
    layer: int
    until: int


class Blender:
    """Blends over one model and a paged tensor, as `PagedKV` takes it.

    Writes only the requests' own blocks. `blend` does everything at once; `begin` and `advance` do it in pieces.
    """

    def __init__(self, decoder: Decoder, tensor: torch.Tensor, inv_freq: torch.Tensor, max_rows: int) -> None:
        """`max_rows` pass a layer at once, which bounds the memory of a long prompt."""
        self._decoder = decoder
        self._device = decoder.device
        self._tensor = tensor
        self._kv = PagedKV(tensor)
        self._num_layers = self._kv.num_layers
        self._block_size = self._kv.block_size
        self._inv_freq = inv_freq
        self._max_rows = max_rows

    def blend(self, requests: abc.Sequence[BlendRequest]) -> list[BlendResult]:
        """Fill the KV of all their tokens but the last, all requests in the same passes."""
        blends = [self.begin(request) for request in requests]
        results = [blend.result for blend in blends]
        while None in results:
            self.advance([(blend, self._max_rows) for blend in blends])
            results = [blend.result for blend in blends]
        return [result for result in results if result is not None]

    def begin(self, request: BlendRequest) -> Blend:
        """A new blend. Computes nothing."""
        return Blend(request, self._num_layers, self._kv.slots(request.block_table, 0, len(request.token_ids)))

    @torch.inference_mode()
    def advance(self, pieces: abc.Sequence[tuple[Blend, int]]) -> list[int]:
        """Do as much of each blend as so many tokens pay for, in shared passes; returns the unspent tokens of each.

        With at least one token, a blend that does not wait advances. After an exception none of them may continue. The
        work is only enqueued on a device: until it is done, no other stream may write what a blend reads.
        """
        purses = [tokens * blend.unit for blend, tokens in pieces]
        while True:
            rows: list[_BlendRows] = []
            for number, (blend, _) in enumerate(pieces):
                purses[number] -= self._prepare(blend, purses[number], rows)
            if not rows:
                return [purse // blend.unit for purse, (blend, _) in zip(purses, pieces, strict=True)]
            self._run(rows)
            for each in rows:
                _keep(each)

    def synchronize(self) -> None:
        """Wait until all work is done: then others may write the blocks it read."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _prepare(self, blend: Blend, units: int, rows: list[_BlendRows]) -> int:
        """Do the work that needs no layer, up to the next `rows`, which are added. Returns its cost."""
        spent = 0
        while (work := blend.work) not in (Work.WAIT, Work.NOTHING):
            if work is Work.CHOOSE:
                blend.choose()
                continue
            number, price = blend.affordable(work, units - spent)
            if not number:
                break
            spent += price
            if work is Work.COPY:
                for part in blend.take_copies(number):
                    self._copy(blend, part)
            elif work is Work.COMPARE:
                for places in _pieces(blend.take(work, number), self._max_rows):
                    self._compare(blend, places)
            else:
                for places in _pieces(blend.take(work, number), self._max_rows):
                    rows.append(self._rows(blend, work, places))
                break  # what follows depends on them
        return spent

    def _copy(self, blend: Blend, part: ReusedPart) -> None:
        """Copy a part's KV to the request's own blocks, its keys rotated to the request's positions."""
        size, layers = self._block_size, slice(blend.num_kept_layers, None)
        blocks, own = uploaded([np.array(part.blocks, np.int64), self._own(blend, part.end)], self._device)
        for start in range(part.start, part.end, PIECE):
            there = torch.arange(start, min(start + PIECE, part.end), device=self._device)
            here = there - part.origin
            block, offset, own_block, own_offset = blocks[here // size], here % size, own[there // size], there % size
            keys = self._tensor[block, layers, 0, offset]
            self._tensor[own_block, layers, 0, own_offset] = rotated(keys, part.origin, self._inv_freq)
            self._tensor[own_block, layers, 1, own_offset] = self._tensor[block, layers, 1, offset]

    def _compare(self, blend: Blend, places: Positions) -> None:
        """Squared differences of these copied tokens' K and V from computed ones, and their squared norms."""
        assert blend.states is not None
        layer, size = blend.num_kept_layers, self._block_size
        positions, own = uploaded([places, self._own(blend, int(places[-1]) + 1)], self._device)
        states = blend.states[positions - blend.first]
        turns = self._decoder.turns(states, positions)
        block, offset = own[positions // size], positions % size
        apart, sizes = [], []
        for half, new in enumerate(self._decoder.keys_and_values(layer, states, positions, turns)):
            kept = self._tensor[block, layer, half, offset].float()
            apart.append((new.float() - kept).square().sum((1, 2)))
            sizes.append(kept.square().sum((1, 2)))
        blend.compared.append(torch.stack(apart + sizes))

    def _rows(self, blend: Blend, work: Work, places: Positions) -> _BlendRows:
        """These positions' rows before the first layer of this work."""
        token_ids = np.array([blend.request.token_ids[place] for place in places.tolist()], np.int64)
        numbers = [places, blend.slots[places], token_ids, self._own(blend, int(places[-1]) + 1)]
        positions, slots, tokens, own = uploaded(numbers, self._device)
        span = BlendSpan(positions, slots, own)
        first_layer = 0
        if work is Work.REPAIR and blend.states is not None:
            first_layer, states = blend.num_kept_layers, blend.states[: len(places)]
            blend.states = blend.states[len(places) :]
        else:
            states = self._decoder.embed(tokens)
        if work is Work.ASK:
            if blend.attended is None:
                blend.attended = torch.zeros(blend.end + 1, device=self._device)
            span.attended, span.asking_from = blend.attended, blend.asks_from
        turns = self._decoder.turns(states, positions)
        until = blend.num_kept_layers if work is Work.CHECK else self._num_layers
        return _BlendRows(blend, places, span, states, turns, first_layer, until)

    def _own(self, blend: Blend, num_tokens: int) -> NDArray[np.int64]:
        """The request's blocks with its first tokens."""
        return np.array(blend.request.block_table[: -(-num_tokens // self._block_size)], np.int64)

    def _run(self, rows: list[_BlendRows]) -> None:
        """Run all rows from their layer to where each stops, packed; a request's rows stay in order."""
        for number in range(self._num_layers):
            pack: list[_BlendRows] = []
            for each in rows:
                if not each.layer == number < each.until:
                    continue
                if pack and sum(len(other.positions) for other in pack) + len(each.positions) > self._max_rows:
                    self._run_layer(number, pack)
                    pack = []
                pack.append(each)
            if pack:
                self._run_layer(number, pack)

    def _run_layer(self, number: int, pack: list[_BlendRows]) -> None:
        spans = [each.span for each in pack]
        states = self._decoder.run(
            number,
            torch.cat([each.states for each in pack]),
            torch.cat([span.positions for span in spans]),
            tuple(torch.cat(turns, 1) for turns in zip(*(each.turns for each in pack), strict=True)),
            BlendAttention(self._kv, spans),
        )
        parts = torch.split(states, [len(each.positions) for each in pack])
        for each, part in zip(pack, parts, strict=True):
            each.states, each.layer = part, number + 1


def _pieces(places: Positions, size: int) -> list[Positions]:
    return [places[start : start + size] for start in range(0, len(places), size)]


def _keep(rows: _BlendRows) -> None:
    """Keep the states of checked rows in one tensor for the whole blend, so that no pack stays in memory."""
    blend = rows.blend
    if rows.until != blend.num_kept_layers:
        return
    if blend.states is None:
        blend.states = rows.states.new_empty(blend.end - blend.first, rows.states.shape[1])
    start = int(rows.positions[0]) - blend.first
    blend.states[start : start + len(rows.positions)] = rows.states
