"""Calls of a model with recurrent states: a prompt continues from a border, and its states at borders are stored."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from transformers import DynamicCache, PreTrainedModel

from kvtier.connector import StatePieces, borders_to_keep
from kvtier.connector.models import cache_option
from kvtier.connector.transformers.blocks import Blocks, blocks_of, fill
from kvtier.connector.transformers.cache_form import HostCopy, StateForm, empty_cache, layers_of, per_token
from kvtier.connector.transformers.calls import asked_for
from kvtier.connector.transformers.device_copies import DEADLINE
from kvtier.connector.transformers.going_on import FollowedPasses, GoingOn, PassHook, PassPositions, feed
from kvtier.connector.transformers.tier_blocks import PromptRow, TierBlocks
from kvtier.tiers import L2, Outcome
from kvtier.tiers.hierarchy import Attribution

_PATIENCE: Final = 0.25  # seconds in which every border is tried; then only powers of two
_ATTEMPTS: Final = 4  # borders with lost records, before loading is given up


@dataclass(frozen=True, slots=True)
class FoundBorder:
    """The border from which all rows of a call continue, with its blocks and states."""

    border: int = 0  # blocks
    parted: int = 0  # leading blocks in the tiers of the best known row
    blocks: Sequence[Blocks] = ()  # of each row
    states: torch.Tensor | None = None  # `[rows, num_bytes]` of bytes


class StateRecords:
    """Loads and stores the states of one model beside its blocks. Never raises for a storage failure."""

    def __init__(self, blocks: TierBlocks, states: StateForm) -> None:
        self._blocks = blocks
        self._states = states
        self._has_blocks = bool(blocks.form.layers)
        self._size = blocks.form.block_size
        self.num_slots = -(-states.num_bytes // blocks.form.block_bytes)  # of one row's states: a record each

    def find(self, rows: Sequence[PromptRow], least: int) -> FoundBorder:
        """The last border, at `least` or later, with every row's blocks and states complete in the tiers."""
        size, deadline = self._blocks.form.block_size, self._blocks.deadline
        usable = (min(len(row.token_ids) for row in rows) - 1) // size
        runs = [usable] * len(rows)
        if self._has_blocks and usable:
            where = [self._blocks.found(row.chain.hashes[:usable], deadline) for row in rows]
            runs = [found.blocks - found.miss for found in where]
        parted = max(runs) if self._has_blocks else 0
        num_lost = 0
        for border in _borders(min(runs), max(1, least)):
            if time.monotonic() >= deadline or num_lost >= _ATTEMPTS:
                break
            if not all(self.is_held(row, border, deadline) for row in rows):
                continue
            loaded = [self._bring(row, border, deadline) for row in rows]
            if all(each is not None for each in loaded):
                whole = [each for each in loaded if each is not None]
                self._count(rows, usable, border, deadline)
                return FoundBorder(border, parted, whole, self._bytes(whole))
            num_lost += 1
        self._count(rows, usable, 0, deadline)
        return FoundBorder(parted=parted)

    def is_held(self, row: PromptRow, border: int, deadline: float) -> bool:
        """Whether all of a row's states at a border seem to be in some tier."""
        return not self._blocks.found(self._pieces(row, border).hashes, deadline).miss

    def store(self, row: PromptRow, border: int, state: torch.Tensor) -> None:
        """Store a row's states, `[num_bytes]`, after its first `border` blocks: all their pieces."""
        pieces = self._pieces(row, border)
        slots = torch.zeros(self.num_slots, self._blocks.form.block_bytes, dtype=torch.uint8)
        slots.view(-1)[: len(state)] = state
        records = Blocks.of(slots.view(self._blocks.dtype), self._blocks.form, 0)
        self._blocks.store_chain(pieces, range(len(slots)), records, row.epoch)

    def _pieces(self, row: PromptRow, border: int) -> StatePieces:
        return StatePieces(row.chain, border, range(self.num_slots))

    def _bring(self, row: PromptRow, border: int, deadline: float) -> Blocks | None:
        """A row's blocks up to a border, if there are any, and its states there; None if any is lost."""
        pieces = self._pieces(row, border)
        if self._has_blocks:
            names, parent, block_size = [*row.chain.hashes[:border], *pieces.hashes], row.chain.root, self._size
        else:  # a few records replace the whole prompt
            names, parent, block_size = list(pieces.hashes), pieces.root, 0
        num_blocks = border if self._has_blocks else 0
        loaded = self._blocks.bring(names, parent, deadline, block_size, num_blocks)
        return loaded if len(loaded) == len(names) else None

    def _bytes(self, loaded: Sequence[Blocks]) -> torch.Tensor:
        rows = [each.states.reshape(-1).view(torch.uint8) for each in loaded]
        return torch.stack([row[: self._states.num_bytes] for row in rows])

    def _count(self, rows: Sequence[PromptRow], usable: int, border: int, deadline: float) -> None:
        """Count like a lookup of blocks: those up to the border as found, the others as misses."""
        tiers = self._blocks.tiers
        for row in rows:
            if self._has_blocks:
                if border:
                    tiers.count(self._blocks.found(row.chain.hashes[:border], deadline))
                if usable > border:
                    tiers.count(Attribution(usable - border, miss=usable - border))
            elif usable:
                names = self._pieces(row, border or usable).hashes
                found = self._blocks.found(names, deadline) if border else Attribution(len(names), miss=len(names))
                tiers.count(found)


def _borders(last: int, least: int) -> Iterator[int]:
    """Every border from the last one backwards; after `_PATIENCE` only powers of two, where long prompts have one."""
    started = time.monotonic()
    border = last
    while border >= least:
        yield border
        border -= 1
        if time.monotonic() - started > _PATIENCE:
            border = 1 << border.bit_length() - 1 if border > 0 else 0


_STEP_COSTS: Final = {"cpu": 16}  # `step_cost` by device; others: `_STEP_COST`
_STEP_COST: Final = 256


def step_cost(device: torch.device) -> int:
    """How many tokens of a prompt take about as long as one token by itself."""
    return _STEP_COSTS.get(device.type, _STEP_COST)


TakenStates = dict[int, HostCopy]
"""By border (blocks before it): the states of all rows, `[rows, num_bytes]` of bytes being copied to host memory."""


class StateCalls:
    """`KVTier`'s calls of a model whose cache has states. One thread at a time."""

    def __init__(
        self, model: PreTrainedModel, blocks: TierBlocks, going_on: GoingOn, limit: int | None, *, keeps_answers: bool
    ) -> None:
        """Texts above `limit` tokens are not stored. `keeps_answers`: what `generate` adds to a prompt is stored."""
        assert blocks.form.states is not None
        self.num_cached_tokens = 0  # of the last call, in every row
        self._model: Any = model
        self._blocks = blocks
        self._form = blocks.form
        self._states: StateForm = blocks.form.states
        self._records = StateRecords(blocks, self._states)
        self._going_on = going_on
        PassHook.of(model)  # so that its structure stays the same from the first call on
        self._positions = PassPositions.of(model, blocks.form) if going_on.from_zero else None
        self._limit = limit
        self._keeps_answers = keeps_answers and going_on.by_steps
        self._size = blocks.form.block_size

    @property
    def in_pieces(self) -> bool:
        return self._going_on.in_pieces

    def generate(
        self,
        rows: Sequence[PromptRow],
        input_ids: torch.Tensor,
        options: dict[str, Any],
        ends_of: Callable[[torch.Tensor], Sequence[int]],
    ) -> Any:
        """`model.generate(input_ids, **options)` after the known tokens of the rows. What is new is stored.

        `ends_of` returns where each row ends in `generate`'s result.
        """
        num_tokens = input_ids.shape[1]
        cache, found = self._load(rows)
        at_once = asked_for(self._model, options, "prefill_chunk_size")
        taken, num_fed = self._prefill(rows, input_ids.to(self._model.device), cache, found, at_once)
        passes = FollowedPasses(cache, self._states, num_fed, num_tokens, self._size)
        with passes.following(self._model):
            result = self._model.generate(input_ids, **{**options, **cache_option(self._model, cache)})
        sequences = result if isinstance(result, torch.Tensor) else result.sequences
        end = num_tokens
        if self._keeps_answers and passes.was_fed(sequences):
            end = passes.num_fed
            if passes.latest is not None:
                at, states = passes.latest
                taken[at // self._size] = self._states.rows(states)
        ends = [min(end, each) for each in ends_of(sequences)]
        if self._limit is None or passes.num_fed <= self._limit:  # else RoPE changed during the call
            self._store(rows, sequences, cache, ends, taken)
        return result

    def load(self, rows: Sequence[PromptRow], input_ids: torch.Tensor) -> tuple[DynamicCache, int]:
        """A cache with the known tokens of every row, and their number.

        A model that takes one token at a time gets all but the last here, since the caller would pass several.
        """
        cache, found = self._load(rows)
        num_fed = found.border * self._size
        if self._positions is not None:
            self._positions.follow(cache)
        return cache, self._feed_one_by_one(cache, input_ids.to(self._model.device), num_fed)

    def store(self, rows: Sequence[PromptRow], input_ids: torch.Tensor, cache: DynamicCache) -> bool:
        """Store the blocks of the rows, and the states if a block ends with the last token.

        The cache must have exactly these tokens. False if that cannot be verified, as without K and V, or if a pass may
        have counted its positions from 0.
        """
        num_tokens = input_ids.shape[1]
        if self._positions is not None and not self._positions.followed(cache):
            return False
        if not self._form.layers or not self._is_whole(cache, len(rows), num_tokens):
            return False
        border, rest = divmod(num_tokens, self._size)
        taken = {border: self._states.rows(self._states.take(cache))} if border and not rest else {}
        self._store(rows, input_ids, cache, [num_tokens] * len(rows), taken)
        return True

    def _load(self, rows: Sequence[PromptRow]) -> tuple[DynamicCache, FoundBorder]:
        """A cache at the last border from which all rows can continue; an empty one if there is none."""
        found = self._records.find(rows, self._least(len(rows[0].token_ids)))
        cache = empty_cache(self._model)
        self.num_cached_tokens = found.border * self._size
        if found.states is not None:
            if self._form.layers:
                fill(cache, self._form, found.blocks, self.num_cached_tokens, self._model.device)
            self._states.put(cache, found.states, self._model.device)
        for row in rows:
            row.num_loaded = found.border
        self._blocks.watch(cache)
        return cache, found

    def _least(self, num_tokens: int) -> int:
        """The first border from which continuing is worth it."""
        if self.in_pieces:
            return 1
        most = num_tokens // step_cost(self._model.device)  # tokens, one by one
        return max(1, -(-(num_tokens - most) // self._size))

    def _prefill(
        self,
        rows: Sequence[PromptRow],
        input_ids: torch.Tensor,
        cache: DynamicCache,
        found: FoundBorder,
        at_once: int | None,
    ) -> tuple[TakenStates, int]:
        """Compute the prompt up to its last border, and take states at borders. Returns how many tokens it has."""
        num_fed, taken = found.border * self._size, TakenStates()
        for border in self._borders(rows, input_ids.shape[1], found):
            end = border * self._size
            self._feed(cache, input_ids, num_fed, end, at_once)
            taken[border] = self._states.rows(self._states.take(cache))
            num_fed = end
        return taken, self._feed_one_by_one(cache, input_ids, num_fed)

    def _feed_one_by_one(self, cache: DynamicCache, input_ids: torch.Tensor, num_fed: int) -> int:
        """After a state, if necessary, feed all but the last token. Returns how many tokens the cache has."""
        if not num_fed or self.in_pieces:
            return num_fed
        end = input_ids.shape[1] - 1
        self._feed(cache, input_ids, num_fed, end, 1)
        return end

    def _feed(self, cache: DynamicCache, input_ids: torch.Tensor, start: int, end: int, at_once: int | None) -> None:
        if start and not self.in_pieces:
            at_once = 1
        if start < end:
            feed(self._model, cache, input_ids[:, start:end], start, at_once)

    def _borders(self, rows: Sequence[PromptRow], num_tokens: int, found: FoundBorder) -> list[int]:
        """Where to take states: at the prompt's last border, and at those `borders_to_keep` that some row lacks."""
        last = (num_tokens - 1) // self._size
        if not self.in_pieces:
            return [last] if max(found.border + 1, self._least(num_tokens)) <= last else []
        wanted, deadline = borders_to_keep(found.border, last, found.parted, self._size), self._blocks.deadline
        is_held = self._records.is_held
        return [each for each in wanted if each == last or not all(is_held(row, each, deadline) for row in rows)]

    def _store(
        self,
        rows: Sequence[PromptRow],
        sequences: torch.Tensor,
        cache: DynamicCache,
        ends: Sequence[int],
        taken: TakenStates,
    ) -> None:
        if not self._blocks.are_current(rows, cache):
            return
        if self._form.layers and not self._is_whole(cache, len(rows), None):
            self._blocks.tiers.metrics.dropped(L2, Outcome.UNSUPPORTED, sum(ends) // self._size)
            return
        arrived = {border: sent.wait(DEADLINE) for border, sent in sorted(taken.items())}
        if lost := sum(states is None for states in arrived.values()) * len(rows) * self._records.num_slots:
            self._blocks.tiers.metrics.dropped(L2, Outcome.COPY_FAILED, lost)
        for index, (row, end) in enumerate(zip(rows, ends, strict=True)):
            row.chain.extend(sequences[index, len(row.token_ids) : end].tolist())
            run = range(row.num_loaded, end // self._size)
            if run and self._form.layers:
                self._blocks.store(row, run, blocks_of(cache, index, run, self._form))
            for border, states in arrived.items():
                if states is not None and border * self._size <= end:
                    self._records.store(row, border, states[index])
        self._blocks.wait_sealed()

    def _is_whole(self, cache: Any, num_rows: int, num_tokens: int | None) -> bool:
        """Whether a cache has the K and V of all its tokens, and of that many."""
        first = self._form.kept[0]
        keys = per_token(cache.layers[first], "keys") if len(cache.layers) > first else None
        found = 0 if keys is None else keys.shape[2]
        try:
            layers = layers_of(cache, num_rows, found, self._model)
        except ValueError:
            return False
        return layers == self._form.layers and num_tokens in (None, found)
