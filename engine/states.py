"""Recurrent states of an engine's requests: borders with stored states, and the scheduler that continues from them."""

from collections import Counter, abc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from kvtier.connector import ClosedChain, ClosedRequest, StatePieces, borders_to_keep
from kvtier.engine.admission import WINDOW, Admissible, Admission
from kvtier.engine.config import EngineConfig
from kvtier.engine.offload import NoOffload
from kvtier.engine.requests import FinishReason
from kvtier.engine.scheduler import HeldBlocks, Scheduler
from kvtier.engine.sequence import Chunk, Sequence, SequenceState
from kvtier.tiers import L2, TIERS, ChainHash
from kvtier.tiers.hierarchy import Attribution, Pending

if TYPE_CHECKING:
    from kvtier.connector import SchedulerSide
    from kvtier.tiers.copies import BlockPool


_NEAR: Final = 32  # borders that are tried, from the last one backwards; before them only powers of two
_ATTEMPTS: Final = 4  # lost borders, before a request stops claiming

TakenState = Any
"""A copy of one sequence's states, as bytes on the model's device: a tensor, which this module only passes on."""


@dataclass(frozen=True, slots=True)
class StateTraits:
    num_pieces: int  # blocks of L1 for the states at one border
    keeps_blocks: bool  # it has K and V, too
    in_pieces: bool  # several tokens at once may follow a state; if not, one at a time
    by_steps: bool  # a state after an answer equals that after a whole prompt
    step_cost: int  # tokens of a prompt that take about as long as one token by itself


class StateKeeper(Protocol):
    """The model's side of states: `StateRunner`."""

    @property
    def traits(self) -> StateTraits:
        """Its model's traits."""

    def go_on(self, sequence: Sequence, num_tokens: int, pieces: abc.Sequence[int]) -> None:
        """Set a sequence's cache of so many tokens: rows from its blocks, states from L1's blocks `pieces`."""

    def take(self, sequence: Sequence) -> TakenState:
        """A copy of the sequence's current states."""

    def put(self, state: TakenState, pieces: abc.Sequence[int]) -> None:
        """Write a taken state to L1's blocks `pieces`."""


@dataclass(slots=True)
class RequestStates:
    """The lookups and states of one request, until it loses its blocks."""

    closed: ClosedRequest | None = None  # the tiers' current claim
    has_guessed: bool = False  # its last border was claimed, though no tier of this node has it
    num_lost: int = 0  # borders that were promised and lost
    limit: int | None = None  # the last border that may still be claimed
    is_short: bool = False  # less was loaded than needed
    due: abc.Sequence[int] = ()  # borders at which its state is stored
    latest: tuple[int, TakenState] | None = None  # the last border of its answer so far, and the state there


class StateBorders:
    """Finds and stores states as blocks of L1 after the blocks they belong to, with the same names as in `KVTier`.

    A border counts only if all blocks before it and all pieces of its state are there.
    """

    def __init__(
        self,
        config: EngineConfig,
        pool: "BlockPool",
        connector: "SchedulerSide | NoOffload",
        keeper: StateKeeper,
        held: HeldBlocks,
        stats: Counter[str],
    ) -> None:
        self.traits = keeper.traits
        self._held = held
        self._stats = stats
        self._config = config
        self._size = config.block_size
        self._pool = pool
        self._connector = connector
        self._keeper = keeper
        self.of: dict[str, RequestStates] = {}  # by request, while it lives

    # lookups

    def find(self, sequence: Sequence, usable: list[ChainHash]) -> tuple[int, int] | Pending:
        """Blocks in L1, and tokens after them that can be loaded: up to a state. PENDING: retry later."""
        num_l1 = self._pool.lookup(usable) if self.traits.keeps_blocks else len(usable)
        least = self._least(sequence.num_tokens)
        here = self._last(num_l1, least, lambda border: self._is_in_l1(sequence, border))
        states, connector = self.of[sequence.request_id], self._connector
        if isinstance(connector, NoOffload):
            return here, 0
        if states.num_lost >= _ATTEMPTS or not self._fits(sequence):
            connector.know_as(sequence)  # it only stores
            return here, 0
        if states.closed is None or states.closed.chain.border <= here:
            states.closed = self._claimed(sequence, usable, num_l1, max(here + 1, least))
        if (closed := states.closed) is None:
            return here, 0
        border, chain = closed.chain.border, closed.chain
        start = min(num_l1, border - 1) if self.traits.keeps_blocks else 0  # a load has one block or more
        connector.know_as(closed)
        promised = connector.lookup(closed, start * chain.block_size, spares=chain.spares)
        if isinstance(promised, Pending):
            return promised
        if promised == self._in_all(closed, start):
            return start, (border - start) * self._size
        self.lost(sequence, border)
        if connector.requests[sequence.request_id].recompute:
            states.num_lost = _ATTEMPTS
        return self.find(sequence, usable)

    def allocated(self, sequence: Sequence, num_l1: int, table: abc.Sequence[int], pieces: abc.Sequence[int]) -> bool:
        """The request got its blocks, and some for its states: load what was promised. False: the promise is gone."""
        states, connector = self.of[sequence.request_id], self._connector
        closed = states.closed
        assert closed is not None
        assert not isinstance(connector, NoOffload)
        wanted = self._in_all(closed, num_l1)
        targets = [*table[: closed.chain.border], *pieces]
        loading = connector.allocated(sequence.request_id, targets, wanted)
        connector.know_as(sequence)
        states.closed = None
        states.is_short = loading != wanted
        if not loading:
            self.lost(sequence, closed.chain.border)
        return bool(loading)

    def lost(self, sequence: Sequence, border: int) -> None:
        """A border's blocks or states are gone: claim earlier ones, a few times."""
        states = self.of[sequence.request_id]
        states.closed = None
        states.num_lost += 1
        states.limit = border - 1

    def restore(self, sequence: Sequence, border: int) -> bool:
        """Have a sequence continue from a border in L1. False: a piece was evicted, or the device has no room."""
        pieces = self._pieces(sequence, border)
        blocks: list[int] = self._pool.match(pieces.hashes)
        is_whole = len(blocks) == self.traits.num_pieces
        try:
            if is_whole:
                try:
                    self._keeper.go_on(sequence, border * self._size, blocks)
                except RuntimeError:
                    return False
                self._store(sequence, pieces, blocks)  # lower tiers may have evicted or refused it
        finally:
            self._pool.free(blocks)
        return is_whole

    def resume(self, sequence: Sequence, num_tokens: int) -> bool:
        """Have a sequence continue from a loaded state, the last blocks of its table. False: no room on the device."""
        try:
            self._keeper.go_on(sequence, num_tokens, sequence.block_table[-self.traits.num_pieces :])
        except RuntimeError:
            return False
        return True

    def loaded(self, sequence: Sequence) -> None:
        """The sequence runs; the pieces it continued from become ordinary blocks of L1."""
        split = len(sequence.block_table) - self.traits.num_pieces
        sequence.block_table, blocks = sequence.block_table[:split], sequence.block_table[split:]
        self._name(self._pieces(sequence, sequence.num_computed // self._size), blocks)
        self._pool.free(blocks)

    # storing

    def choose_borders(self, sequence: Sequence, usable: list[ChainHash], border: int) -> None:
        """Choose the borders, after the one it continues from, at which an admitted request's states are stored."""
        last = (sequence.num_tokens - 1) // self._size
        if not self._config.enable_prefix_caching or border >= last:
            self.of[sequence.request_id].due = ()
            return
        if not self.traits.in_pieces:
            self.of[sequence.request_id].due = (last,) if self._least(sequence.num_tokens) <= last else ()
            return
        wanted = borders_to_keep(border, last, self._parted(usable), self._size)
        self.of[sequence.request_id].due = [each for each in wanted if not self._is_in_l1(sequence, each)]

    def stop(self, sequence: Sequence, budget: int) -> int:
        """The token up to which a request may compute in this step, of `budget` tokens at most.

        A model that takes only one token after a state computes its prompt at once, whatever the budget.
        """
        start, end = sequence.num_computed, sequence.num_tokens
        borders = (border * self._size for border in self.of[sequence.request_id].due)
        due = next((at for at in borders if at > start), end)
        if not start and not self.traits.in_pieces:
            return due
        if not self.traits.by_steps and start < sequence.num_prompt_tokens:
            end = min(end, sequence.num_prompt_tokens)  # its answer is recomputed the same way as before
        return min(due, end, start + budget)

    def reached(self, sequence: Sequence) -> None:
        """A request has computed its chunk: take its state if one is stored at this border."""
        border, rest = divmod(sequence.num_computed, self._size)
        if rest or not border or sequence.cache is None or sequence.num_computed > sequence.num_shareable:
            return
        is_due = border in self.of[sequence.request_id].due
        if not is_due and sequence.num_computed < sequence.num_prompt_tokens:
            return
        try:
            state = self._keeper.take(sequence)
        except RuntimeError:  # no room on the device: the step's results are valid anyway
            self._stats["unkept_states"] += 1
            return
        if is_due:
            self.keep(sequence, border, state)
        else:
            self.of[sequence.request_id].latest = border, state

    def keep(self, sequence: Sequence, border: int, state: TakenState) -> None:
        if self._is_in_l1(sequence, border):
            return
        blocks = self._pool.allocate(self.traits.num_pieces)
        if blocks is None:
            self._stats["unkept_states"] += 1
            return
        pieces = self._pieces(sequence, border)
        try:
            self._keeper.put(state, blocks)
        except RuntimeError:
            self._stats["unkept_states"] += 1
        else:
            self._name(pieces, blocks)
            self._store(sequence, pieces, blocks)
        self._pool.free(blocks)

    def _pieces(self, sequence: Sequence, border: int) -> StatePieces:
        return StatePieces(sequence.chain, border, range(self.traits.num_pieces))

    def _is_in_l1(self, sequence: Sequence, border: int) -> bool:
        pieces = self._pieces(sequence, border)
        return self._pool.lookup(pieces.hashes) == self.traits.num_pieces

    def _name(self, pieces: StatePieces, blocks: abc.Sequence[int]) -> None:
        numbers = range(len(pieces.hashes)) if self._pool.wants_tokens else ()
        self._pool.publish(blocks, pieces.hashes, pieces.root, [*map(pieces.block_tokens, numbers)])

    def _store(self, sequence: Sequence, pieces: StatePieces, blocks: abc.Sequence[int]) -> None:
        if isinstance(self._connector, NoOffload):
            return
        self._held.hold(blocks)
        self._held.release_request(blocks)
        self._connector.store(sequence.request_id, 0, blocks, pieces)

    def _claimed(self, sequence: Sequence, usable: list[ChainHash], num_l1: int, first: int) -> ClosedRequest | None:
        """The last border from `first` on that this node's tiers have; if there is none, once the prompt's last one."""
        connector, states = self._connector, self.of[sequence.request_id]
        assert not isinstance(connector, NoOffload)
        connector.know_as(sequence)
        tiers = connector.tiers
        last = len(usable) if states.limit is None else min(len(usable), states.limit)
        run = last
        if self.traits.keeps_blocks and last > num_l1:
            found = tiers.locate(usable[num_l1:last], 0.0)
            run = num_l1 + found.blocks - found.miss
        border = self._last(
            min(run, last), first, lambda border: not tiers.locate(self._pieces(sequence, border).hashes, 0.0).miss
        )
        if not border and not states.has_guessed and last >= first:  # a shared tier may have it
            states.has_guessed, border = True, last
        if not border:
            return None
        groups = range(self.traits.num_pieces)
        chain = ClosedChain(sequence.chain, border, groups, keeps_blocks=self.traits.keeps_blocks)
        if not self.traits.keeps_blocks:
            chain.block_size = border * self._size  # the tokens that a piece saves
        return ClosedRequest(sequence.request_id, chain)

    def _in_all(self, closed: ClosedRequest, start: int) -> int:
        """The tokens of a complete promise, after `start` blocks of L1."""
        return (len(closed.chain.hashes) - start) * closed.chain.block_size

    def _parted(self, usable: list[ChainHash]) -> int:
        """How many leading blocks are stored: there the prompt diverges from earlier ones."""
        if not self.traits.keeps_blocks or not usable:
            return 0
        num_l1 = self._pool.lookup(usable)
        if isinstance(self._connector, NoOffload) or num_l1 == len(usable):
            return num_l1
        found = self._connector.tiers.locate(usable[num_l1:], 0.0)
        return num_l1 + found.blocks - found.miss

    def _least(self, num_tokens: int) -> int:
        """The first border from which continuing is worth it."""
        if self.traits.in_pieces:
            return 1
        return max(1, -(-(num_tokens - num_tokens // self.traits.step_cost) // self._size))

    def _fits(self, sequence: Sequence) -> bool:
        num_blocks = -(-sequence.num_tokens // self._size) if self.traits.keeps_blocks else 0
        return num_blocks + self.traits.num_pieces <= self._pool.num_blocks

    def _last(self, last: int, first: int, has_state: Callable[[int], bool]) -> int:
        """The last border in `first … last` with a state, of those where states are likely; 0: none."""
        return next((border for border in _likely(last, first) if has_state(border)), 0)


def _likely(last: int, first: int) -> Iterator[int]:
    """Likely borders of states: near the end of the stored blocks, and at powers of two."""
    border = last
    while border >= first:
        yield border
        border -= 1
        if last - border >= _NEAR and border > 0:
            border = 1 << border.bit_length() - 1


class StateAdmission(Admission):
    """`Admission` in which a cached prefix ends at a stored state. Loads are waited for."""

    def __init__(
        self, config: EngineConfig, pool: "BlockPool", connector: "SchedulerSide | NoOffload", states: StateBorders
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
            ranked.append(Admissible(sequence, usable, *found, None))
        return sorted(ranked, key=self._place)

    def seat(self, candidate: Admissible, room_to_grow: int) -> bool | None:
        sequence, usable, num_l1, num_external, _ = candidate
        traits = self._states.traits
        if self._is_computed_now(usable):
            return False
        matched: list[int] = self._pool.match(usable[:num_l1]) if num_l1 and traits.keeps_blocks else []
        if traits.keeps_blocks and len(matched) != num_l1:  # an earlier admission evicted some of them
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
        finally:  # also if the device has no room: then it waits, and the caller of the step decides
            if not is_there:
                sequence.block_table = []
                self._pool.free([*table, *pieces])
        if not is_there:
            return False
        self._states.choose_borders(sequence, usable, num_l1 + num_external // self._config.block_size)
        sequence.block_table = [*table, *pieces]
        if not traits.by_steps:
            sequence.num_exact = sequence.num_prompt_tokens
        self._enter(sequence, num_l1, num_l1 * self._config.block_size, num_external)
        return True

    def _is_computed_now(self, usable: list[ChainHash]) -> bool:
        """Whether another request computes the same prompt: its state will soon be in L1."""
        return bool(usable) and usable[-1] in self.computing


class StateScheduler(Scheduler):
    def __init__(
        self,
        config: EngineConfig,
        pool: "BlockPool",
        connector: "SchedulerSide | NoOffload | None",
        eos_token_ids: frozenset[int],
        keeper: StateKeeper,
    ) -> None:
        super().__init__(config, pool, connector, eos_token_ids)
        self._states = StateBorders(config, pool, self._connector, keeper, self._held, self.stats)
        self._admission = StateAdmission(config, pool, self._connector, self._states)
        self.waiting = self._admission.waiting

    def add(self, sequence: Sequence, *, is_segment: bool = False, before: Sequence | None = None) -> None:
        self._states.of[sequence.request_id] = RequestStates()
        super().add(sequence, is_segment=is_segment, before=before)

    def _compute(self, sequence: Sequence, budget: int, chunks: list[Chunk]) -> int:
        start, end = sequence.num_computed, self._states.stop(sequence, budget)
        chunks.append(Chunk(sequence, start, end, samples=end == sequence.num_tokens))
        return min(budget, end - start)

    def _grow(self, sequence: Sequence, chunks: list[Chunk]) -> bool:
        return not self._states.traits.keeps_blocks or super()._grow(sequence, chunks)

    def _begin(self, sequence: Sequence, budget: int, chunks: list[Chunk]) -> int:
        num_tokens = super()._begin(sequence, budget, chunks)
        known = sequence.lookup if sequence.num_loading and not sequence.num_preempted else None
        if not self._states.traits.keeps_blocks and known is not None and known.found is not None:
            # The pieces' tier counts for all tokens; L2 if they arrived there since the first lookup.
            farthest = max(known.found.by_tier, key=list(TIERS).index, default=L2)
            num_blocks = sequence.num_loading // self._config.block_size
            known.causes, known.found = known.missed, Attribution(num_blocks, **{farthest: num_blocks})
        return num_tokens

    def _loaded(self, request_id: str, first_failed: int | None) -> None:
        sequence = self.loading.get(request_id)
        if sequence is None or request_id in self.orphans:
            super()._loaded(request_id, first_failed)
            return
        end = sequence.num_computed + sequence.num_loading
        if first_failed is None and not self._states.of[request_id].is_short and self._states.resume(sequence, end):
            super()._loaded(request_id, None)
            self._states.loaded(sequence)
            return
        del self.loading[request_id]  # blocks without the state after them are useless
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
        latest = self._states.of[sequence.request_id].latest
        super()._preempt(sequence)
        if latest is not None:  # it continues from there, if blocks and state are still there then
            self._states.keep(sequence, *latest)

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        if (latest := self._states.of[sequence.request_id].latest) is not None:
            self._states.keep(sequence, *latest)
        super()._end(sequence, reason)
        del self._states.of[sequence.request_id]

    def _release(self, sequence: Sequence) -> None:
        super()._release(sequence)
        states = self._states.of
        states[sequence.request_id] = RequestStates(num_lost=states[sequence.request_id].num_lost)
