"""Recurrent states of an engine's requests: where prompts may go on, and at which borders a state is kept. No torch."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from kvtier.connector import ClosedChain, StatePieces
from kvtier.engine.config import EngineConfig
from kvtier.engine.held_blocks import HeldBlocks
from kvtier.engine.offload import NoOffload
from kvtier.engine.sequence import Sequence as Request
from kvtier.tiers import BlockRecord, ChainHash
from kvtier.tiers.hierarchy import Pending

if TYPE_CHECKING:
    from kvtier.connector import BothEndsSide
    from kvtier.tiers.copies import BlockPool  # it needs torch, this module does not

_NEAR: Final = 32  # borders that are looked at, from the last one backwards; before them only powers of two
_ATTEMPTS: Final = 4  # borders that turned out to be lost, before a request asks the tiers no more
_SHORTEST: Final = 512  # tokens before the first of the states that a long prompt leaves at powers of two

TakenState = Any
"""A copy of one sequence's states, as bytes on the model's device: a tensor, which this module only hands on."""


@dataclass(frozen=True, slots=True)
class StateTraits:
    """What the scheduler has to know of a model with recurrent states."""

    num_pieces: int  # blocks of L1 that hold the states at one border
    keeps_blocks: bool  # it keeps K and V, too
    in_pieces: bool  # several tokens at once may follow a state; if not, one at a time
    by_steps: bool  # a state that an answer leaves is what a whole prompt would leave
    step_cost: int  # tokens of a prompt that take about as long as one token by itself


class StateKeeper(Protocol):
    """The model's side of states: `StateRunner`."""

    @property
    def traits(self) -> StateTraits:
        """What its model is like."""

    def go_on(self, sequence: Request, num_tokens: int, pieces: Sequence[int]) -> None:
        """Give a sequence its cache of so many tokens: rows from its blocks, states from L1's blocks `pieces`."""

    def take(self, sequence: Request) -> TakenState:
        """A copy of the states behind what the sequence has."""

    def put(self, state: TakenState, pieces: Sequence[int]) -> None:
        """Write what was taken to L1's blocks `pieces`."""


@dataclass(slots=True)
class BorderRequest:
    """What a lookup asks for: a request's blocks up to a border, and the states there. All of it, or nothing."""

    request_id: str
    chain: ClosedChain

    @property
    def num_tokens(self) -> int:
        """As if a token stood behind the states: all of them may be promised."""
        return len(self.chain.hashes) * self.chain.block_size + 1


@dataclass(slots=True)
class RequestStates:
    """What was asked and taken for one request, until it loses its blocks."""

    closed: BorderRequest | None = None  # what the tiers were asked for
    has_guessed: bool = False  # its last border was asked for, though no tier of this node has it
    num_lost: int = 0  # borders that were promised and not there
    limit: int | None = None  # the last border that may still be asked for
    is_short: bool = False  # less was loaded than it needs
    due: Sequence[int] = ()  # borders at which it keeps its state
    latest: tuple[int, TakenState] | None = None  # the last border of its answer so far, and the state there


class StateBorders:
    """Finds and keeps states as blocks of L1 behind the blocks they belong to, under the names that `KVTier` gives.

    A border counts only if all blocks before it and all pieces of its state are held.
    """

    def __init__(
        self,
        config: EngineConfig,
        pool: "BlockPool",
        connector: "BothEndsSide | NoOffload",
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

    # Looking.

    def find(self, sequence: Request, usable: list[ChainHash]) -> tuple[int, int] | Pending:
        """Blocks in L1, and tokens beyond them that can be loaded: up to a state. PENDING: ask again."""
        num_l1 = self._pool.lookup(usable) if self.traits.keeps_blocks else len(usable)
        least = self._least(sequence.num_tokens)
        here = self._last(num_l1, least, lambda border: self._is_in_l1(sequence, border))
        states, connector = sequence.states, self._connector
        if isinstance(connector, NoOffload):
            return here, 0
        if states.num_lost >= _ATTEMPTS or not self._fits(sequence):
            connector.know_as(sequence)  # it stores all the same
            return here, 0
        if states.closed is None or states.closed.chain.border <= here:
            states.closed = self._asked(sequence, usable, num_l1, max(here + 1, least))
        if (closed := states.closed) is None:
            return here, 0
        border, chain = closed.chain.border, closed.chain
        start = min(num_l1, border - 1) if self.traits.keeps_blocks else 0  # a load has one block or more
        connector.know_as(closed)
        connector.computes_alone = False  # nothing is computed before the state
        promised = connector.lookup(closed, start * chain.block_size)
        if isinstance(promised, Pending):
            return promised
        if promised == self._in_all(closed, start):
            return start, (border - start) * self._size
        self.lost(sequence, border)
        if connector.requests[sequence.request_id].recompute:
            states.num_lost = _ATTEMPTS
        return self.find(sequence, usable)

    def allocated(self, sequence: Request, num_l1: int, table: Sequence[int], pieces: Sequence[int]) -> bool:
        """The request got its blocks, and some for its states: load what was promised. False: it is gone."""
        closed, connector = sequence.states.closed, self._connector
        assert closed is not None
        assert not isinstance(connector, NoOffload)
        wanted = self._in_all(closed, num_l1)
        targets = [*table[: closed.chain.border], *pieces]
        loading = connector.allocated(sequence.request_id, targets, wanted)
        connector.know_as(sequence)
        sequence.states.closed = None
        sequence.states.is_short = loading != wanted
        if not loading:
            self.lost(sequence, closed.chain.border)
        return bool(loading)

    def lost(self, sequence: Request, border: int) -> None:
        """What a border needs is not there: ask for earlier ones, a few times."""
        sequence.states.closed = None
        sequence.states.num_lost += 1
        sequence.states.limit = border - 1

    def restore(self, sequence: Request, border: int) -> bool:
        """Have a sequence go on from a border in L1. False: a piece is gone by now, or no room on the device."""
        pieces = self._pieces(sequence, border)
        blocks: list[int] = self._pool.match(pieces.hashes)
        is_whole = len(blocks) == self.traits.num_pieces
        try:
            if is_whole:
                try:
                    self._keeper.go_on(sequence, border * self._size, blocks)
                except RuntimeError:
                    return False
                self._store(sequence, pieces, blocks)  # the tiers below may have lost or refused it
        finally:
            self._pool.free(blocks)
        return is_whole

    def resume(self, sequence: Request, num_tokens: int) -> bool:
        """Have a sequence go on from what was loaded: a state's pieces end its table. False: no room on the device."""
        try:
            self._keeper.go_on(sequence, num_tokens, sequence.block_table[-self.traits.num_pieces :])
        except RuntimeError:
            return False
        return True

    def loaded(self, sequence: Request) -> None:
        """The sequence runs, and the pieces that it went on from are ordinary blocks of L1."""
        split = len(sequence.block_table) - self.traits.num_pieces
        sequence.block_table, blocks = sequence.block_table[:split], sequence.block_table[split:]
        self._name(self._pieces(sequence, sequence.num_computed // self._size), blocks)
        self._pool.free(blocks)

    # Keeping.

    def settle(self, sequence: Request, usable: list[ChainHash], border: int) -> None:
        """Decide at which borders behind the one it goes on from a request that was admitted keeps its states.

        As `KVTier` does: at the last one before its last token, where known blocks end, and at powers of two.
        """
        last = (sequence.num_tokens - 1) // self._size
        if not self._config.enable_prefix_caching or border >= last:
            sequence.states.due = ()
            return
        if not self.traits.in_pieces:
            sequence.states.due = (last,) if self._least(sequence.num_tokens) <= last else ()
            return
        wanted, power = {last, self._parted(usable)}, 1
        while power < last:
            if power * self._size >= _SHORTEST:
                wanted.add(power)
            power *= 2
        sequence.states.due = sorted(
            each for each in wanted if border < each <= last and not self._is_in_l1(sequence, each)
        )

    def stop(self, sequence: Request, budget: int) -> int:
        """Up to which token a request may compute in this step, of `budget` tokens at most.

        A model that takes only one token behind a state computes its prompt at once, whatever the budget.
        """
        start, end = sequence.num_computed, sequence.num_tokens
        borders = (border * self._size for border in sequence.states.due)
        due = next((at for at in borders if at > start), end)
        if not start and not self.traits.in_pieces:
            return due
        if not self.traits.by_steps and start < sequence.num_prompt_tokens:
            end = min(end, sequence.num_prompt_tokens)  # what it answered is computed as it was computed first
        return min(due, end, start + budget)

    def reached(self, sequence: Request) -> None:
        """A request has computed as far as it says: take its state if that is where one is kept."""
        border, rest = divmod(sequence.num_computed, self._size)
        if rest or not border or sequence.cache is None or sequence.num_computed > sequence.num_shareable:
            return
        is_due = border in sequence.states.due
        if not is_due and sequence.num_computed < sequence.num_prompt_tokens:
            return
        try:
            state = self._keeper.take(sequence)
        except RuntimeError:  # no room on the device: what the step computed counts all the same
            self._stats["unkept_states"] += 1
            return
        if is_due:
            self.keep(sequence, border, state)
        else:
            sequence.states.latest = border, state

    def keep(self, sequence: Request, border: int, state: TakenState) -> None:
        """Name a state in L1 and store it, if there is room."""
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

    def _pieces(self, sequence: Request, border: int) -> StatePieces:
        return StatePieces(sequence.chain, border, self.traits.num_pieces)

    def _is_in_l1(self, sequence: Request, border: int) -> bool:
        pieces = self._pieces(sequence, border)
        return self._pool.lookup(pieces.hashes) == self.traits.num_pieces

    def _name(self, pieces: StatePieces, blocks: Sequence[int]) -> None:
        records = []
        if self._pool.wants_records:
            told = [(name, pieces.parent(i), pieces.block_tokens(i)) for i, name in enumerate(pieces.hashes)]
            records = [BlockRecord(name, parent, tokens, 0) for name, parent, tokens in told]
        self._pool.publish(blocks, pieces.hashes, pieces.root, records)

    def _store(self, sequence: Request, pieces: StatePieces, blocks: Sequence[int]) -> None:
        """Copy a state to the tiers below; its blocks stay until that has ended."""
        if isinstance(self._connector, NoOffload):
            return
        self._held.hold(blocks)
        self._held.leave(blocks)
        self._connector.store_chain(sequence.request_id, pieces, blocks)

    def _asked(self, sequence: Request, usable: list[ChainHash], num_l1: int, first: int) -> BorderRequest | None:
        """The last border from `first` on that tiers of this node have; once, if there is none, a prompt's last one."""
        connector, states = self._connector, sequence.states
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
        if not border and not states.has_guessed and last >= first:  # perhaps tiers that nodes share have it
            states.has_guessed, border = True, last
        if not border:
            return None
        groups = range(self.traits.num_pieces)
        chain = ClosedChain(sequence.chain, border, groups, keeps_blocks=self.traits.keeps_blocks)
        if not self.traits.keeps_blocks:
            chain.block_size = border * self._size  # what a piece saves
        return BorderRequest(sequence.request_id, chain)

    def _in_all(self, closed: BorderRequest, start: int) -> int:
        """How many tokens a whole promise is, behind `start` blocks of L1."""
        return (len(closed.chain.hashes) - start) * closed.chain.block_size

    def _parted(self, usable: list[ChainHash]) -> int:
        """How many leading blocks are held: there another prompt went on in another way."""
        if not self.traits.keeps_blocks or not usable:
            return 0
        num_l1 = self._pool.lookup(usable)
        if isinstance(self._connector, NoOffload) or num_l1 == len(usable):
            return num_l1
        found = self._connector.tiers.locate(usable[num_l1:], 0.0)
        return num_l1 + found.blocks - found.miss

    def _least(self, num_tokens: int) -> int:
        """The first border from which going on is worth it."""
        if self.traits.in_pieces:
            return 1
        return max(1, -(-(num_tokens - num_tokens // self.traits.step_cost) // self._size))

    def _fits(self, sequence: Request) -> bool:
        """Whether L1 could hold a request's blocks and the states that are loaded for it."""
        num_blocks = -(-sequence.num_tokens // self._size) if self.traits.keeps_blocks else 0
        return num_blocks + self.traits.num_pieces <= self._pool.num_blocks

    def _last(self, last: int, first: int, is_held: Callable[[int], bool]) -> int:
        """The last border in `first … last` that is held, of those where states are likely; 0: none."""
        return next((border for border in _likely(last, first) if is_held(border)), 0)


def _likely(last: int, first: int) -> Iterator[int]:
    """Borders where states may be: near the end of what is held, and at powers of two."""
    border = last
    while border >= first:
        yield border
        border -= 1
        if last - border >= _NEAR and border > 0:
            border = 1 << border.bit_length() - 1
