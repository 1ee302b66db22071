"""Runs one batch: packs its chunks into tensors, attends over the paged pool, samples."""

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kvtier.connector.segments import AttentionSpan, PackedAttention, PagedKV, Scoring, uploaded
from kvtier.engine.adjusting import adjusted
from kvtier.engine.batch import Batch, Chunk
from kvtier.engine.config import TILE, EngineConfig
from kvtier.engine.logprobs import PromptRows, sampled_logprobs
from kvtier.engine.model import Model
from kvtier.engine.model_caches import LatentAttention
from kvtier.engine.sampler import sample
from kvtier.engine.sequence import SampledToken

_TILE_KEYS: Final = 256  # an exact tile sees its keys rounded up to this: few shapes, little waste


class TiledAttention(PackedAttention):
    """The same in absolute tiles of 16 tokens: a token's bits depend on its position and the tokens before it alone.

    A tile's queries are padded to 16 rows and its keys to a length its position determines, so every token meets the
    same shapes, and the same arithmetic, in whichever chunk it comes.
    """

    def _span(self, layer: int, span: AttentionSpan, fresh: tuple[torch.Tensor, ...], scoring: Scoring) -> torch.Tensor:
        query = fresh[0]
        first_tile, last_tile = span.start // TILE, (span.end - 1) // TILE
        key, value = self.context(layer, span.blocks, _tile_keys(last_tile))
        key[span.end :] = 0
        value[span.end :] = 0
        tiles = query.new_zeros((last_tile - first_tile + 1) * TILE, query.shape[0], query.shape[2])
        offset = span.start - first_tile * TILE
        tiles[offset : offset + query.shape[1]] = query.transpose(0, 1)
        outs = []
        for num_keys, group in itertools.groupby(range(first_tile, last_tile + 1), _tile_keys):
            members = list(group)
            rows = slice((members[0] - first_tile) * TILE, (members[-1] - first_tile + 1) * TILE)
            queries = tiles[rows].view(-1, TILE, *query.shape[::2]).transpose(1, 2)
            grouped = queries.reshape(len(members), self.kv.num_kv_heads, -1, query.shape[2])  # a group's heads as rows
            keys, values = (
                states[:num_keys].transpose(0, 1)[None].expand(len(members), -1, -1, -1) for states in (key, value)
            )
            mask = _tile_mask(span, scoring, members, num_keys, grouped.shape[2] // TILE)
            if scoring.is_plain:
                out = scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scoring.scaling)
            else:
                out = scoring.attend(grouped, keys, values, mask, TILE)
            out = out.reshape(queries.shape)  # a device's attention lays it out in its own way
            outs.append(out.transpose(1, 2).flatten(0, 1))
        return torch.cat(outs)[offset : offset + query.shape[1]].transpose(0, 1)


class ModelRunner:
    """A model over a paged pool. `run` returns when the logits are enqueued; `sample` waits for them."""

    def __init__(
        self, model: Model, pool: torch.Tensor, config: EngineConfig, wait_layer: Callable[[int], bool]
    ) -> None:
        self.model = model
        self._kv = PagedKV(pool)
        self._config = config
        self._wait_layer = wait_layer
        self._attention: Callable[..., PackedAttention] = TiledAttention if config.exact else PackedAttention
        if model.expand:
            self._attention = partial(LatentAttention, model.expand)

    @torch.inference_mode()
    def run(self, batch: Batch) -> torch.Tensor:
        """Logits `[chunks that sample, vocab]`, on the model's device. Sets `batch.arrived`."""
        parts = [[chunk] for chunk in batch.chunks] if self.model.one_by_one else [batch.chunks]
        logits = [self._forward(chunks, batch) for chunks in parts]
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    def _forward(self, chunks: list[Chunk], batch: Batch) -> torch.Tensor:
        """Logits of these chunks, packed."""
        device = self.model.device
        token_ids = [token for chunk in chunks for token in chunk.sequence.token_ids[chunk.start : chunk.end]]
        positions = np.concatenate([np.arange(chunk.start, chunk.end) for chunk in chunks])
        slots = np.concatenate([self._kv.slots(chunk.sequence.block_table, chunk.start, chunk.end) for chunk in chunks])
        ends = itertools.accumulate(chunk.end - chunk.start for chunk in chunks)
        rows = [end - 1 for chunk, end in zip(chunks, ends, strict=True) if chunk.samples]
        num_rows = len(rows)
        scored = None if all(chunk.sequence.looks_up for chunk in chunks) else PromptRows(chunks)
        if scored is not None:
            rows += scored.rows
        if self._config.exact:  # one constant shape for every matrix product
            padding = self._config.exact_rows - len(token_ids)
            token_ids += [0] * padding
            positions = np.concatenate([positions, np.zeros(padding, np.int64)])
            rows += [0] * (self._config.max_num_seqs - num_rows)
        size = self._config.block_size
        tables = [np.array(chunk.sequence.block_table[: -(-chunk.end // size)], np.int64) for chunk in chunks]
        named = [np.array(token_ids, np.int64), positions, np.array(rows, np.int64), slots]
        sent_ids, sent_positions, sent_rows, sent_slots, *blocks = uploaded([*named, *tables], device)
        wait_layer = self._wait_layer if batch.plan.loads else None
        attention = self._attention(self._kv, _spans(chunks, blocks), sent_slots, wait_layer)
        with _kernels(device, self._config.exact):
            logits = self.model.forward(sent_ids[None], sent_positions[None], sent_rows, attention)
        batch.arrived &= attention.arrived
        if scored is not None:  # also where a load is late: it is another sequence's
            scored.note(logits[num_rows:])
        return logits[:num_rows]

    def sample(self, batch: Batch, logits: torch.Tensor) -> list[SampledToken]:
        """One token for each chunk that samples, in order."""
        sampling = [chunk.sequence for chunk in batch.chunks if chunk.samples]
        if not sampling:
            if logits.is_cuda:  # a step ends when it is computed: else its time would be counted as the next one's
                torch.cuda.current_stream(logits.device).synchronize()
            return []
        raw = logits
        if any(each.params.adjusts for each in sampling):
            logits = adjusted(raw, sampling)
        greedy: list[int] = logits.argmax(-1).tolist()
        read = [row for row, each in enumerate(sampling) if each.params.temperature or each.params.keep_logits]
        values_of: dict[int, NDArray[np.float32]] = {}
        if read:
            values_of = dict(zip(read, torch.stack([logits[row] for row in read]).float().cpu().numpy(), strict=True))
        tokens = [
            sample(values_of[row], params, each.seed, each.num_generated) if params.temperature else greedy[row]
            for row, (each, params) in enumerate((each, each.params) for each in sampling)
        ]
        wants_logprobs = any(each.params.logprobs is not None for each in sampling)
        logprobs = sampled_logprobs(raw, sampling, tokens) if wants_logprobs else {}
        return [
            SampledToken(token, values_of[row].copy() if each.params.keep_logits else None, logprobs.get(row))
            for row, (each, token) in enumerate(zip(sampling, tokens, strict=True))
        ]


def _spans(chunks: Sequence[Chunk], blocks: Sequence[torch.Tensor]) -> list[AttentionSpan]:
    """Where each chunk's tokens stand among the step's, and the blocks that they attend to."""
    spans, first = [], 0
    for chunk, table in zip(chunks, blocks, strict=True):
        last = first + chunk.end - chunk.start
        spans.append(AttentionSpan(first, last, chunk.start, chunk.end, table))
        first = last
    return spans


def _kernels(device: torch.device, exact: bool) -> AbstractContextManager[None]:
    """Which attention kernels a GPU may take. cuDNN prepares anew for every length; `exact` needs the one kernel whose
    tiles don't know of each other, where the matrix products of the others depend on how many there are.
    """
    if device.type != "cuda":
        return nullcontext()
    if exact:
        return sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION)
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def _tile_mask(span: AttentionSpan, scoring: Scoring, tiles: list[int], num_keys: int, num_heads: int) -> torch.Tensor:
    """Who sees whom in consecutive tiles, for `num_heads` heads below each other, [tiles, 1, heads * 16, num_keys]."""
    mask = span.masks.get((scoring.reach, num_keys))
    if mask is None:
        device = span.blocks.device
        queries = torch.arange(tiles[0] * TILE, (tiles[-1] + 1) * TILE, device=device).view(-1, 1, TILE, 1)
        sees = scoring.sees(queries, torch.arange(num_keys, device=device))
        mask = span.masks[scoring.reach, num_keys] = sees.repeat(1, 1, num_heads, 1)
    return mask


def _tile_keys(tile: int) -> int:
    """Keys that the tile attends to, rounded up."""
    return -(-(tile + 1) * TILE // _TILE_KEYS) * _TILE_KEYS
