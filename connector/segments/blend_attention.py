"""Attention of rows at any positions over whole paged sequences, several sequences in one batch."""

from dataclasses import dataclass, field
from typing import Final

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvtier.connector.segments.paged_attention import PagedKV, for_each_head
from kvtier.connector.segments.scoring import Scoring

_ROWS: Final = 256  # of one call: a group of rows needs no key behind its last


@dataclass(slots=True)
class BlendSpan:
    """One sequence's rows in the packed batch: at `positions`, rising, of a sequence whose KV is in `blocks`."""

    positions: torch.Tensor
    slots: torch.Tensor  # where their K goes
    blocks: torch.Tensor
    masks: dict[int | None, list[torch.Tensor]] = field(default_factory=dict)  # by window, one for each group of rows
    attended: torch.Tensor | None = None  # where wanted: the attention every key gets, over heads, layers and rows
    asking_from: int = 0  # … from this position on

    @property
    def length(self) -> int:
        """Keys that the last row sees."""
        return int(self.positions[-1]) + 1


class BlendAttention:
    """Attention of a blend's rows: writes their K and V, then each sees every key up to its own place."""

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
        """`query` is [heads, rows, head dim], and so is what is returned."""
        keys, values = (states.transpose(0, 1) for states in self._kv.gather(layer, span.blocks, span.length))
        grouped = query.reshape(keys.shape[0], -1, *query.shape[1:])
        outs = []
        for number, mask in enumerate(self._masks(span, window)):
            rows = slice(number * _ROWS, (number + 1) * _ROWS)
            end = mask.shape[1]
            key, value = (for_each_head(states[:, :end], grouped.shape[1]) for states in (keys, values))
            out = scaled_dot_product_attention(grouped[:, :, rows], key, value, attn_mask=mask, scale=scaling)
            outs.append(out)
            if span.attended is not None:
                asking = span.positions[rows] >= span.asking_from
                _collect(span.attended, grouped[:, :, rows][:, :, asking], keys[:, :end], mask[asking], scaling)
        return torch.cat(outs, 2).flatten(0, 1)

    def _masks(self, span: BlendSpan, window: int | None) -> list[torch.Tensor]:
        """Who sees whom, True: sees; [rows of a group, keys up to its last]. Built once per blend and window."""
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
    """Add what each key gets of these rows' attention."""
    scores = torch.einsum("kgtd,ksd->kgts", query.float(), keys.float()) * scaling
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    attended[: keys.shape[1]] += weights.sum((0, 1, 2))
