"""The scheduler of models with recurrent states: requests go on from borders where a state was kept. No torch."""

from typing import TYPE_CHECKING

from kvtier.engine.admission import WINDOW, Admissible, Admission
from kvtier.engine.batch import Chunk
from kvtier.engine.config import EngineConfig
from kvtier.engine.offload import NoOffload
from kvtier.engine.scheduler import Scheduler
from kvtier.engine.sequence import FinishReason, Sequence, SequenceState
from kvtier.engine.state_borders import RequestStates, StateBorders, StateKeeper
from kvtier.tiers import L2, TIERS, ChainHash
from kvtier.tiers.hierarchy import Attribution, Pending

if TYPE_CHECKING:
    from kvtier.connector import BothEndsSide
    from kvtier.tiers.copies import BlockPool  # it needs torch, this module does not


class StateAdmission(Admission):
    """As `Admission`; a cached prefix ends where a state is held. Loads are waited for."""

    def __init__(
        self, config: EngineConfig, pool: "BlockPool", connector: "BothEndsSide | NoOffload", states: StateBorders
    ) -> None:
        super().__init__(config, pool, connector)
        self._states = states

    def rank(self, num_seats: int) -> list[Admissible]:
        ranked = []
        for sequence in self.waiting[:WINDOW]:
            usable = list(sequence.hashes[: (sequence.num_tokens - 1) // self._config.block_size])
            if self._is_computed_now(usable):
                continue
            found = self._states.find(sequence, usable)
            if isinstance(found, Pending):
                continue
            num_l1, num_external = found
            cached = num_l1 * self._config.block_size + num_external
            ranked.append((self._place(sequence, cached), Admissible(sequence, usable, num_l1, num_external, None)))
        return [candidate for _, candidate in sorted(ranked, key=lambda each: each[0])]

    def seat(self, candidate: Admissible, room_to_grow: int) -> bool | None:
        sequence, usable, num_l1, num_external, _ = candidate
        traits = self._states.traits
        if self._is_computed_now(usable):
            return False
        matched: list[int] = self._pool.match(usable[:num_l1]) if num_l1 and traits.keeps_blocks else []
        if traits.keeps_blocks and len(matched) != num_l1:  # an admission before this one took some of them
            self._pool.free(matched)
            return False
        num_fresh = -(-sequence.num_tokens // self._config.block_size) - num_l1 if traits.keeps_blocks else 0
        num_pieces = traits.num_pieces if num_external else 0
        fresh = self._pool.allocate(num_fresh + num_pieces, leaving=room_to_grow if traits.keeps_blocks else 0)
        if fresh is None:
            self._pool.free(matched)
            return None
        table, pieces = [*matched, *fresh[:num_fresh]], fresh[num_fresh:]
        sequence.block_table = table
        is_there = False
        try:
            if num_external:
                is_there = self._states.allocated(sequence, num_l1, table, pieces)
            else:
                is_there = not num_l1 or self._states.restore(sequence, num_l1)
        finally:  # also where the device has no room: then it waits, and the caller of the step decides
            if not is_there:
                sequence.block_table = []
                self._pool.free([*table, *pieces])
        if not is_there:
            return False
        self._states.settle(sequence, usable, num_l1 + num_external // self._config.block_size)
        sequence.block_table = [*table, *pieces]
        if not traits.by_steps:
            sequence.num_exact = sequence.num_prompt_tokens
        self._enter(sequence, num_l1, num_l1 * self._config.block_size, num_external)
        return True

    def _is_computed_now(self, usable: list[ChainHash]) -> bool:
        """Whether another request computes this very prompt: soon its state is in L1."""
        return bool(usable) and usable[-1] in self.computing


class StateScheduler(Scheduler):
    """As `Scheduler`, for one model with recurrent states."""

    def __init__(
        self,
        config: EngineConfig,
        pool: "BlockPool",
        connector: "BothEndsSide | NoOffload | None",
        eos_token_ids: frozenset[int],
        keeper: StateKeeper,
    ) -> None:
        super().__init__(config, pool, connector, eos_token_ids)
        self._states = StateBorders(config, pool, self._connector, keeper, self._held, self.stats)
        self._admission = StateAdmission(config, pool, self._connector, self._states)
        self.waiting = self._admission.waiting

    def add(self, sequence: Sequence) -> None:
        sequence.states = RequestStates()
        super().add(sequence)

    def _compute(self, sequence: Sequence, budget: int, chunks: list[Chunk]) -> int:
        start, end = sequence.num_computed, self._states.stop(sequence, budget)
        chunks.append(Chunk(sequence, start, end, samples=end == sequence.num_tokens))
        return min(budget, end - start)

    def _grow(self, sequence: Sequence, chunks: list[Chunk]) -> bool:
        return not self._states.traits.keeps_blocks or super()._grow(sequence, chunks)

    def _begin(self, sequence: Sequence, budget: int, chunks: list[Chunk]) -> int:
        num_tokens = super()._begin(sequence, budget, chunks)
        if not self._states.traits.keeps_blocks and sequence.found is not None and sequence.num_loading:
            # Of the pieces, which stand for all tokens. L2, if they came there since they were first asked for.
            farthest = max(sequence.found.by_tier, key=list(TIERS).index, default=L2)
            num_blocks = sequence.num_loading // self._config.block_size
            sequence.found = Attribution(num_blocks, **{farthest: num_blocks})
        return num_tokens

    def _loaded(self, request_id: str, first_failed: int | None) -> None:
        sequence = self.loading.get(request_id)
        if sequence is None or request_id in self.orphans:
            super()._loaded(request_id, first_failed)
            return
        end = sequence.num_computed + sequence.num_loading
        if first_failed is None and not sequence.states.is_short and self._states.resume(sequence, end):
            super()._loaded(request_id, None)
            self._states.loaded(sequence)
            return
        del self.loading[request_id]  # blocks without the state behind them are of no use
        self.stats["failed_loads"] += 1
        self._release(sequence)
        self._states.lost(sequence, end // self._config.block_size)
        sequence.state = SequenceState.WAITING
        self._admission.put_back(sequence)

    def _name(self, sequence: Sequence) -> None:
        if self._states.traits.keeps_blocks:
            super()._name(sequence)
        else:
            start = sequence.num_named
            end = min(sequence.num_computed, sequence.num_shareable) // self._config.block_size
            sequence.num_named = max(start, end)
            self._forget(sequence, sequence.hashes[start:end])
        self._states.reached(sequence)

    def _store(self, sequence: Sequence, end: int) -> None:
        if self._states.traits.keeps_blocks:
            super()._store(sequence, end)

    def _preempt(self, sequence: Sequence) -> None:
        latest = sequence.states.latest
        super()._preempt(sequence)
        if latest is not None:  # it goes on from there, if blocks and state are still held then
            self._states.keep(sequence, *latest)

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        if sequence.states.latest is not None:
            self._states.keep(sequence, *sequence.states.latest)
        super()._end(sequence, reason)

    def _release(self, sequence: Sequence) -> None:
        super()._release(sequence)
        sequence.states = RequestStates(num_lost=sequence.states.num_lost)
