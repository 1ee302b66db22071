"""Who is admitted next, over what is cached: the longest cached prefix first, within an aging bound. No torch."""

from bisect import insort
from operator import itemgetter
from typing import TYPE_CHECKING, Final, NamedTuple

from kvtier.connector import best_child
from kvtier.engine.config import EngineConfig
from kvtier.engine.offload import NoOffload
from kvtier.engine.sequence import ALL, Sequence, SequenceState
from kvtier.tiers import ChainHash, ChildBlock
from kvtier.tiers.hierarchy import Pending

if TYPE_CHECKING:
    from kvtier.connector import SchedulerSide
    from kvtier.tiers.copies import BlockPool  # it needs torch, this module does not

WINDOW: Final = 16  # waiting requests that are looked up and ranked in one step


class Admissible(NamedTuple):
    """A waiting request, and what was found of it."""

    sequence: Sequence
    usable: list[ChainHash]  # its blocks that may be found: at least its last token is always computed
    num_l1: int  # leading blocks of those that L1 holds
    num_external: int  # tokens beyond them that can be loaded
    child: tuple[ChildBlock, int] | None  # what L1 has of the block behind `num_l1`: where, and how many tokens


class CachedBlocks(NamedTuple):
    """What an admitted request is spared."""

    matched: list[int]  # blocks of L1, referenced
    num_external: int  # tokens beyond them that can be loaded
    source: int | None = None  # a block of L1, referenced, that begins as the request's next one does
    in_part: int = 0  # … with so many tokens


class Admission:
    """The requests that wait, and which blocks the others are computing: those are soon in L1."""

    def __init__(self, config: EngineConfig, pool: "BlockPool", connector: "SchedulerSide | NoOffload") -> None:
        self.waiting: list[Sequence] = []  # by arrival
        self.computing: dict[ChainHash, str] = {}  # block that is being computed or loaded → request that does it
        self.lasting: dict[str, int] = {}  # request whose reasoning began → leading tokens that the next turn has, too
        self.copies: list[tuple[int, int]] = []  # this step's, within L1; the sources are referenced
        self._config = config
        self._pool = pool
        self._connector = connector

    def rank(self, num_seats: int) -> list[Admissible]:
        """Those who can be admitted, in the order in which they should be."""
        block_size = self._config.block_size
        ranked = []
        for sequence in self.waiting[:WINDOW]:
            if sequence.reuse is not None and not sequence.reuse.may_start(num_seats):
                continue  # for its segments
            if not sequence.looks_up:
                self._connector.admit(sequence)
                ranked.append((self._place(sequence, 0), Admissible(sequence, [], 0, 0, None)))
                continue
            usable = list(sequence.hashes[: (sequence.num_tokens - 1) // block_size])
            num_l1 = self._pool.lookup(usable)
            if num_l1 < len(usable) and usable[num_l1] in self.computing:
                continue  # soon it is in L1
            child = self._child(sequence, num_l1) if self._pool.partial_blocks else None
            in_part = 0 if child is None else child[1]
            num_external = self._connector.lookup(sequence, num_l1 * block_size, in_part)
            if isinstance(num_external, Pending):
                continue
            cached = num_l1 * block_size + max(num_external, in_part)
            ranked.append((self._place(sequence, cached), Admissible(sequence, usable, num_l1, num_external, child)))
        return [candidate for _, candidate in sorted(ranked, key=itemgetter(0))]

    def _place(self, sequence: Sequence, cached: int) -> tuple[bool, int, int]:
        """Where a request with so many cached tokens stands: the least is admitted first."""
        overdue = sequence.num_passed_over >= self._config.max_passed_over
        return not overdue, 0 if overdue else -cached, sequence.order

    def seat(self, candidate: Admissible, room_to_grow: int) -> bool | None:
        """Give a waiting request its blocks and start its load; it runs, or loads. None: no room; False: ask again.

        So many free blocks are left to others, as `room_to_grow` says.
        """
        if (held := self._hold(candidate)) is None:
            return False
        sequence = candidate.sequence
        num_fresh = -(-sequence.num_tokens // self._config.block_size) - len(held.matched)
        allocate = self._pool.allocate if sequence.reuse is None else sequence.reuse.allocate
        fresh = allocate(num_fresh, leaving=room_to_grow)
        if fresh is None and held.source is not None:  # that block's own room may be what is missing, and for ever
            self._pool.free([held.source])
            held = held._replace(source=None, in_part=0)
            fresh = allocate(num_fresh, leaving=room_to_grow)
        if fresh is None:
            self._pool.free(held.matched)
            return False if sequence.reuse is not None and sequence.reuse.is_waiting else None  # it has time
        sequence.block_table = held.matched + fresh
        if held.source is not None:
            self.copies.append((held.source, sequence.block_table[len(held.matched)]))
        num_l1 = len(held.matched)
        # A blend needs what is loaded, and what comes in pieces is loaded before anything is computed behind it.
        in_pieces = self._connector.is_cut(sequence.request_id, held.num_external)
        layerwise = self._config.loading == "layerwise" and sequence.reuse is None and not in_pieces
        loading = self._connector.allocated(  # fewer than asked for where a promise lapsed
            sequence.request_id, sequence.block_table, held.num_external, layerwise=layerwise
        )
        self._enter(sequence, num_l1, num_l1 * self._config.block_size + held.in_part, loading, layerwise=layerwise)
        return True

    def release_sources(self) -> None:
        """The step's copies within L1 were made, or never will be."""
        for source, _ in self.copies:  # two may have the same one
            self._pool.free([source])
        self.copies = []

    def put_back(self, sequence: Sequence) -> None:
        """It waits again, in its old place, and nobody overtakes it this time."""
        sequence.num_passed_over = self._config.max_passed_over
        insort(self.waiting, sequence, key=lambda sequence: sequence.order)

    def _hold(self, candidate: Admissible) -> CachedBlocks | None:
        """Reference what L1 has of it, and see what can be loaded. None: ask again next step."""
        sequence, usable, num_l1, num_external, child = candidate
        block_size = self._config.block_size
        if len(usable) > num_l1 and usable[num_l1] in self.computing:
            return None  # by one admitted in this very step
        # Nothing is named between the ranking and this: L1 holds no more than was found then.
        matched: list[int] = self._pool.match(usable[:num_l1]) if num_l1 else []
        if len(matched) != num_l1:  # an admission before this one took some of them
            child = self._child(sequence, len(matched)) if self._pool.partial_blocks else None
            in_part = 0 if child is None else child[1]
            answer = self._connector.lookup(sequence, len(matched) * block_size, in_part)
            if isinstance(answer, Pending):
                self._pool.free(matched)
                return None
            num_external = answer
        room = sequence.num_tokens - 1 - len(matched) * block_size
        if num_external > room:  # a connector that promises too much
            num_external = room // block_size * block_size
        if child is not None and not num_external:
            source = self._pool.match([child[0].chain_hash])
            if source:
                return CachedBlocks(matched, 0, source[0], child[1])
        return CachedBlocks(matched, num_external)

    def _child(self, sequence: Sequence, num_l1: int) -> tuple[ChildBlock, int] | None:
        """The block of L1 that begins most like the request's block behind `num_l1`, and with how many tokens."""
        start = num_l1 * self._config.block_size
        room = sequence.num_tokens - 1 - start
        if room <= 0:
            return None
        parent = sequence.hashes[num_l1 - 1] if num_l1 else sequence.chain.root
        children = self._pool.children(parent, sequence.token_ids[start].to_bytes(4, "little"))
        if not children:
            return None
        return best_child(sequence.chain, children, num_l1, sequence.chain.next_tokens(num_l1)[: 4 * room])

    def _enter(
        self, sequence: Sequence, num_l1: int, num_present: int, loading: int, *, layerwise: bool = False
    ) -> None:
        """The request has `num_present` tokens, `num_l1` blocks of L1's among them, and so many more are loading."""
        self.waiting.remove(sequence)
        for other in self.waiting:
            if other.order > sequence.order:
                break
            other.num_passed_over += 1
        if sequence.reuse is not None:
            first = sequence.reuse.resolve(num_present + loading, sequence.num_tokens)
            sequence.num_exact = ALL if first is None else first
        sequence.num_shareable = self.num_shareable(sequence)
        sequence.num_named = num_l1
        sequence.num_computed = num_present
        sequence.num_loading = loading
        sequence.state = SequenceState.LOADING if loading and not layerwise else SequenceState.RUNNING
        if self._config.enable_prefix_caching:  # others wait for the blocks that will have a name
            end = min(sequence.num_tokens, sequence.num_exact) // self._config.block_size
            for chain_hash in sequence.hashes[num_l1:end]:
                self.computing.setdefault(chain_hash, sequence.request_id)

    def num_shareable(self, sequence: Sequence) -> int:
        """Leading tokens of which others may find the blocks."""
        if not self._config.enable_prefix_caching:
            return 0
        if not self._config.store_generated:
            return min(sequence.num_exact, sequence.num_prompt_tokens)
        return min(sequence.num_exact, self.lasting.get(sequence.request_id, ALL))
