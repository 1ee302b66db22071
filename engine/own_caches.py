"""Runs models over transformers' own cache: one for each running sequence, beside its blocks in L1."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache

from kvtier.connector.transformers import Blocks, StateForm, empty_cache, feed, fill, per_token, step_cost
from kvtier.engine.batch import Batch, Chunk
from kvtier.engine.config import EngineConfig
from kvtier.engine.model import Model
from kvtier.engine.model_runner import ModelRunner
from kvtier.engine.scheduler import Scheduler
from kvtier.engine.sequence import Sequence as Request
from kvtier.engine.state_borders import StateTraits, TakenState
from kvtier.engine.state_scheduler import StateScheduler

if TYPE_CHECKING:
    from kvtier.connector import BothEndsSide
    from kvtier.engine.offload import NoOffload
    from kvtier.tiers.copies import BlockPool


@dataclass(slots=True)
class OwnCache:
    """What a running sequence has computed or loaded, as its model keeps it."""

    cache: DynamicCache
    num_tokens: int


class OwnCacheRunner(ModelRunner):
    """A forward for each sequence of a batch, over that sequence's own cache: `Sequence.cache`.

    What a forward adds is copied to the sequence's blocks. A sequence without a cache gets one from its blocks.
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
        """Layer, name and place in all blocks, `[num_blocks, block_size, heads, dim]`, of what grows by the token."""
        for number, plane, view in self._form.planes(self._blocks):
            start = 0
            for part in plane.parts:
                yield number, part.name, view[..., start : start + part.dim]
                start += part.dim

    def _forward(self, chunks: list[Chunk], batch: Batch) -> torch.Tensor:
        """Logits of the one chunk's last row, if it samples."""
        [chunk] = chunks
        if batch.plan.loads:
            batch.arrived &= self._wait_layer(self._last_layer)
        sequence = chunk.sequence
        own: OwnCache | None = sequence.cache
        if own is None or own.num_tokens != chunk.start:  # its blocks were loaded, or came from another sequence
            assert self._form.states is None or not chunk.start, "behind a border `go_on` makes the cache"
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
        is_answer = chunk.start >= chunk.sequence.num_prompt_tokens  # computed again, as it was computed first
        return 1 if is_answer and not self.model.going_on.by_steps else None

    def _filled(self, table: Sequence[int], num_tokens: int) -> DynamicCache:
        cache = empty_cache(self.model.module)
        if num_tokens and self._form.layers:
            rows = self._blocks[self._places(table[: -(-num_tokens // self._form.block_size)])]
            fill(cache, self._form, [Blocks.of(rows, self._form, len(rows))], num_tokens, self.model.device)
        return cache

    def _copy_rows(self, cache: Any, table: Sequence[int], chunk: Chunk) -> None:
        """What the chunk's tokens added to the cache, in their blocks."""
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
    """The same for a model that keeps recurrent states, which lie in blocks of their own: a `StateKeeper`."""

    @property
    def traits(self) -> StateTraits:
        """What the scheduler has to know of the model."""
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
        rows.view(-1)[: len(state)] = state  # what is left of the last block is zero
        self._bytes[self._places(pieces)] = rows


def runner_of(model: Model, pool: torch.Tensor, config: EngineConfig, wait_layer: Callable[[int], bool]) -> ModelRunner:
    """What runs this model over a pool's tensor."""
    kind = StateRunner if model.has_states else OwnCacheRunner if model.has_own_cache else ModelRunner
    return kind(model, pool, config, wait_layer)


def scheduler_of(
    runner: ModelRunner, config: EngineConfig, pool: "BlockPool", connector: "BothEndsSide | NoOffload | None"
) -> Scheduler:
    """What decides what this runner computes."""
    ends = runner.model.eos_token_ids
    if isinstance(runner, StateRunner):
        return StateScheduler(config, pool, connector, ends, runner)
    return Scheduler(config, pool, connector, ends)
