"""Runs one batch: over the paged pool, or over one transformers cache per sequence."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers import DynamicCache

from kvtier.connector.segments import AttentionSpan, PackedAttention, PagedKV, Scoring, uploaded
from kvtier.connector.transformers import Blocks, StateForm, empty_cache, feed, fill, per_token, step_cost
from kvtier.engine.config import TILE, EngineConfig
from kvtier.engine.model import LatentAttention, Model
from kvtier.engine.requests import SampledToken
from kvtier.engine.sampler import PromptRows, adjusted, sample, sampled_logprobs
from kvtier.engine.scheduler import Scheduler
from kvtier.engine.sequence import Batch, Chunk
from kvtier.engine.sequence import Sequence as Request
from kvtier.engine.states import StateScheduler, StateTraits, TakenState

if TYPE_CHECKING:
    from kvtier.connector import SchedulerSide
    from kvtier.engine.offload import NoOffload
    from kvtier.tiers.copies import BlockPool


_TILE_KEYS: Final = 256  # an exact tile's number of keys is rounded up to this: few shapes, little waste


class TiledAttention(PackedAttention):
    """`PackedAttention` in absolute tiles of 16 tokens: a token's bits depend only on its position and earlier tokens.

    A tile's queries are padded to 16 rows and its keys to a length that depends on its position. So every token has the
    same shapes and arithmetic, in whichever chunk it is computed.
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
            out = out.reshape(queries.shape)  # the layout depends on the device's attention
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
        starts = itertools.accumulate((chunk.end - chunk.start for chunk in chunks), initial=0)
        spans = [
            AttentionSpan(first, first + chunk.end - chunk.start, chunk.start, chunk.end, table)
            for chunk, table, first in zip(chunks, blocks, starts, strict=False)
        ]
        attention = self._attention(self._kv, spans, sent_slots, wait_layer)
        with _kernels(self._config.exact) if device.type == "cuda" else nullcontext():
            logits = self.model.forward(sent_ids[None], sent_positions[None], sent_rows, attention)
        batch.arrived &= attention.arrived
        if scored is not None:  # also if a load is late: it is another sequence's
            scored.record(logits[num_rows:])
        return logits[:num_rows]

    def sample(self, batch: Batch, logits: torch.Tensor) -> list[SampledToken]:
        sampling = [chunk.sequence for chunk in batch.chunks if chunk.samples]
        if not sampling:
            if logits.is_cuda:  # wait, or this step's time would count as the next one's
                torch.cuda.current_stream(logits.device).synchronize()
            return []
        raw = logits
        if any(each.params.adjusts for each in sampling):
            logits = adjusted(raw, sampling, self.model.eos_token_ids)
        greedy: list[int] = logits.argmax(-1).tolist()
        read = [row for row, each in enumerate(sampling) if each.params.temperature or each.params.keep_logits]
        values_of: dict[int, NDArray[np.float32]] = {}
        if read:
            values_of = dict(zip(read, torch.stack([logits[row] for row in read]).float().cpu().numpy(), strict=True))
        tokens = [
            sample(values_of[row], params, each.sampling.seed, each.num_generated)
            if params.temperature
            else greedy[row]
            for row, (each, params) in enumerate((each, each.params) for each in sampling)
        ]
        wants_logprobs = any(each.params.logprobs is not None for each in sampling)
        logprobs = sampled_logprobs(raw, sampling, tokens) if wants_logprobs else {}
        return [
            SampledToken(token, values_of[row].copy() if each.params.keep_logits else None, logprobs.get(row))
            for row, (each, token) in enumerate(zip(sampling, tokens, strict=True))
        ]


def _kernels(exact: bool) -> AbstractContextManager[None]:
    """The attention kernels for a GPU. cuDNN recompiles for every length. `exact` needs the one kernel with independent
    tiles: in the others the matrix products depend on the number of tiles.
    """
    if exact:
        return sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION)
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def _tile_mask(span: AttentionSpan, scoring: Scoring, tiles: list[int], num_keys: int, num_heads: int) -> torch.Tensor:
    """The mask of consecutive tiles, with `num_heads` heads concatenated, [tiles, 1, heads * 16, num_keys]."""
    mask = span.masks.get((scoring.reach, num_keys))
    if mask is None:
        device = span.blocks.device
        queries = torch.arange(tiles[0] * TILE, (tiles[-1] + 1) * TILE, device=device).view(-1, 1, TILE, 1)
        sees = scoring.sees(queries, torch.arange(num_keys, device=device))
        mask = span.masks[scoring.reach, num_keys] = sees.repeat(1, 1, num_heads, 1)
    return mask


def _tile_keys(tile: int) -> int:
    """The tile's number of keys, rounded up."""
    return -(-(tile + 1) * TILE // _TILE_KEYS) * _TILE_KEYS


@dataclass(slots=True)
class OwnCache:
    cache: DynamicCache
    num_tokens: int


class OwnCacheRunner(ModelRunner):
    """A forward per sequence of a batch, over that sequence's own cache: `Sequence.cache`.

    New rows are copied to the sequence's blocks. A sequence without a cache gets one from its blocks.
    """

    def __init__(
        self, model: Model, pool: torch.Tensor, config: EngineConfig, wait_layer: Callable[[int], bool]
    ) -> None:
        self.model = model
        self._config = config
        self._wait_layer = wait_layer
        self._last_layer = pool.shape[1] - 1
        self._form = model.form(config.block_size)
        self._blocks = pool.view(len(pool), -1)  # flat rows, as `CacheForm` has them
        self._bytes = self._blocks.view(torch.uint8)
        self._rows = list(self._rows_of_parts())

    def _rows_of_parts(self) -> Iterator[tuple[int, str, torch.Tensor]]:
        """Layer, name and view in all blocks, `[num_blocks, block_size, heads, dim]`, of per-token tensors."""
        for number, plane, view in self._form.planes(self._blocks):
            start = 0
            for part in plane.parts:
                yield number, part.name, view[..., start : start + part.dim]
                start += part.dim

    def _forward(self, chunks: list[Chunk], batch: Batch) -> torch.Tensor:
        [chunk] = chunks
        if batch.plan.loads:
            batch.arrived &= self._wait_layer(self._last_layer)
        sequence = chunk.sequence
        own: OwnCache | None = sequence.cache
        if own is None or own.num_tokens != chunk.start:  # its blocks were loaded, or are another sequence's
            assert self._form.states is None or not chunk.start, "after a border `go_on` makes the cache"
            own = sequence.cache = OwnCache(self._filled(sequence.block_table, chunk.start), chunk.start)
        tokens = torch.tensor([sequence.token_ids[chunk.start : chunk.end]], device=self.model.device)
        output = feed(self.model.module, own.cache, tokens, chunk.start, self._at_once(chunk))
        own.num_tokens = chunk.end
        self._copy_rows(own.cache, sequence.block_table, chunk)
        logits: torch.Tensor = output.logits[:, -1]
        return logits if chunk.samples else logits[:0]

    def _at_once(self, chunk: Chunk) -> int | None:
        """How many tokens a forward takes. None: all of them."""
        assert self.model.going_on is not None
        if chunk.start and not self.model.going_on.in_pieces:
            return 1
        is_answer = chunk.start >= chunk.sequence.num_prompt_tokens  # recomputed the same way as before
        return 1 if is_answer and not self.model.going_on.by_steps else None

    def _filled(self, table: Sequence[int], num_tokens: int) -> DynamicCache:
        cache = empty_cache(self.model.module)
        if num_tokens and self._form.layers:
            rows = self._blocks[self._places(table[: -(-num_tokens // self._form.block_size)])]
            fill(cache, self._form, [Blocks.of(rows, self._form, len(rows))], num_tokens, self.model.device)
        return cache

    def _copy_rows(self, cache: Any, table: Sequence[int], chunk: Chunk) -> None:
        if not self._rows:
            return
        positions = torch.arange(chunk.start, chunk.end, device=self.model.device)
        size = self._form.block_size
        blocks, offsets = self._places(table)[positions // size], positions % size
        for number, name, rows in self._rows:
            tensor = per_token(cache.layers[number], name)
            assert tensor is not None
            rows[blocks, offsets] = tensor[0, :, chunk.start : chunk.end].transpose(0, 1)

    def _places(self, block_ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(block_ids, dtype=torch.int64, device=self._blocks.device)


class StateRunner(OwnCacheRunner):
    """The same for a model with recurrent states, which are in blocks of their own: a `StateKeeper`."""

    @property
    def traits(self) -> StateTraits:
        going_on, num_pieces = self.model.going_on, -(-self._states.num_bytes // self._form.block_bytes)
        assert going_on is not None
        cost = step_cost(self.model.device)
        return StateTraits(num_pieces, bool(self._form.layers), going_on.in_pieces, going_on.by_steps, cost)

    @property
    def _states(self) -> StateForm:
        assert self._form.states is not None
        return self._form.states

    @torch.inference_mode()
    def go_on(self, sequence: Request, num_tokens: int, pieces: Sequence[int]) -> None:
        cache = self._filled(sequence.block_table, num_tokens)
        row = self._bytes[self._places(pieces)].view(1, -1)[:, : self._states.num_bytes]
        self._states.put(cache, row, self.model.device)
        sequence.cache = OwnCache(cache, num_tokens)

    @torch.inference_mode()
    def take(self, sequence: Request) -> TakenState:
        return self._states.device_rows(self._states.take(sequence.cache.cache))[0]

    @torch.inference_mode()
    def put(self, state: TakenState, pieces: Sequence[int]) -> None:
        rows = torch.zeros(len(pieces), self._bytes.shape[1], dtype=torch.uint8, device=self._bytes.device)
        rows.view(-1)[: len(state)] = state  # the rest of the last block is zero
        self._bytes[self._places(pieces)] = rows


def runner_of(model: Model, pool: torch.Tensor, config: EngineConfig, wait_layer: Callable[[int], bool]) -> ModelRunner:
    kind = StateRunner if model.has_states else OwnCacheRunner if model.has_own_cache else ModelRunner
    return kind(model, pool, config, wait_layer)


def scheduler_of(
    runner: ModelRunner, config: EngineConfig, pool: "BlockPool", connector: "SchedulerSide | NoOffload | None"
) -> Scheduler:
    ends = runner.model.eos_token_ids
    if isinstance(runner, StateRunner):
        return StateScheduler(config, pool, connector, ends, runner)
    return Scheduler(config, pool, connector, ends)
