"""Admission by cached prefix: the longest one first, within an aging bound. No torch."""

from bisect import insort
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
    """A waiting request, and its lookup's result."""

    sequence: Sequence
    usable: list[ChainHash]  # its blocks that may be reused: its last token is always computed
    num_l1: int  # leading blocks in L1
    num_external: int  # tokens beyond them that can be loaded
    child: tuple[ChildBlock, int] | None  # a block of L1 that begins like the one after `num_l1`, and its shared tokens


class CachedBlocks(NamedTuple):
    matched: list[int]  # blocks of L1, referenced
    num_external: int  # tokens beyond them that can be loaded
    source: int | None = None  # a block of L1, referenced, that begins like the request's next one
    in_part: int = 0  # … number of shared tokens


class Admission:
    """The waiting requests, and the blocks that others are computing: those will soon be in L1."""

    def __init__(self, config: EngineConfig, pool: "BlockPool", connector: "SchedulerSide | NoOffload") -> None:
        self.waiting: list[Sequence] = []  # by arrival
        self.computing: dict[ChainHash, str] = {}  # block being computed or loaded → its request
        self.lasting: dict[str, int] = {}  # request whose reasoning began → leading tokens that the next turn shares
        self.copies: list[tuple[int, int]] = []  # this step's copies within L1; the sources are referenced
        # Of the last `rank`: requests that only load, of which a block is missing (the caller ends them); and whether
        # another one in the same step may find more.
        self.absent: list[str] = []
        self.has_changed = False
        self._config = config
        self._pool = pool
        self._connector = connector

    def rank(self, num_seats: int) -> list[Admissible]:
        """The requests that can be admitted, in order of preference."""
        block_size = self._config.block_size
        self.absent, self.has_changed = [], False
        ranked = []
        for sequence in self.waiting[:WINDOW]:
            if sequence.reuse is not None and not sequence.reuse.may_start(num_seats):
                continue  # it waits for its segments
            if not sequence.looks_up:
                self._connector.admit(sequence)
                ranked.append(Admissible(sequence, [], 0, 0, None))
                continue
            usable = list(sequence.hashes[: (sequence.num_tokens - 1) // block_size])
            num_l1 = self._pool.lookup(usable)
            if num_l1 < len(usable) and usable[num_l1] in self.computing:
                continue  # it will soon be in L1
            child = self._child(sequence, num_l1) if self._pool.partial_blocks else None
            in_part = 0 if child is None else child[1]
            num_external = self._connector.lookup(sequence, num_l1 * block_size, in_part)
            if isinstance(num_external, Pending):
                continue
            if sequence.only_loads and num_l1 * block_size + num_external < len(usable) * block_size:
                self.absent.append(sequence.request_id)
                self.has_changed = True
                continue
            ranked.append(Admissible(sequence, usable, num_l1, num_external, child))
        return sorted(ranked, key=self._place) if len(ranked) > 1 else ranked

    def _place(self, candidate: Admissible) -> tuple[bool, int, int]:
        """The sort key: the least is admitted first."""
        sequence, _, num_l1, num_external, child = candidate
        overdue = sequence.num_passed_over >= self._config.max_passed_over
        cached = num_l1 * self._config.block_size + max(num_external, 0 if child is None else child[1])
        return not overdue, 0 if overdue else -cached, sequence.order

    def seat(self, candidate: Admissible, room_to_grow: int) -> bool | None:
        """Give a waiting request its blocks and start its load; it runs, or loads. None: no room; False: retry later.

        `room_to_grow`: free blocks that are left to others.
        """
        if (cached := self._reference(candidate)) is None:
            return False
        sequence = candidate.sequence
        if sequence.find is not None and self._waits_for_found(sequence, cached):
            return False
        num_fresh = -(-sequence.num_tokens // self._config.block_size) - len(cached.matched)
        allocate = self._pool.allocate if sequence.reuse is None else sequence.reuse.allocate
        fresh = allocate(num_fresh, leaving=room_to_grow)
        if fresh is None and cached.source is not None:  # else its reference could block the request for ever
            self._pool.free([cached.source])
            cached = cached._replace(source=None, in_part=0)
            fresh = allocate(num_fresh, leaving=room_to_grow)
        if fresh is None:
            self._pool.free(cached.matched)
            return False if sequence.reuse is not None and sequence.reuse.is_waiting else None  # it can wait
        sequence.block_table = cached.matched + fresh
        if cached.source is not None:
            self.copies.append((cached.source, sequence.block_table[len(cached.matched)]))
        num_l1 = len(cached.matched)
        # A blend needs the whole load, and a load in pieces ends before anything after it is computed.
        in_pieces = cached.num_external > 0 and self._connector.is_cut(sequence.request_id, cached.num_external)
        layerwise = self._config.loading == "layerwise" and sequence.reuse is None and not in_pieces
        loading = self._connector.allocated(  # fewer than promised if the promise expired
            sequence.request_id, sequence.block_table, cached.num_external, layerwise=layerwise
        )
        is_whole = loading == cached.num_external
        sequence.is_in_pieces = in_pieces and (is_whole or self._connector.is_cut(sequence.request_id, loading))
        self._enter(sequence, num_l1, num_l1 * self._config.block_size + cached.in_part, loading, layerwise=layerwise)
        return True

    def _waits_for_found(self, sequence: Sequence, cached: CachedBlocks) -> bool:
        """Find what a prompt without marks may reuse. True: it waits for that, and its references are dropped."""
        assert sequence.find is not None
        num_l1 = len(cached.matched) * self._config.block_size
        find, sequence.find = sequence.find, None
        sequence.reuse = find(sequence, num_l1 + max(cached.num_external, cached.in_part))
        if sequence.reuse is None or not sequence.reuse.is_waiting:
            return False
        self._pool.free([*cached.matched, *([] if cached.source is None else [cached.source])])
        self.has_changed = True
        return True

    def release_sources(self) -> None:
        """Drop the references of the step's copies within L1: they were made, or never will be."""
        for source, _ in self.copies:  # several may have the same one
            self._pool.free([source])
        self.copies = []

    def put_back(self, sequence: Sequence) -> None:
        """Queue it again in its old place; no later request overtakes it this time."""
        sequence.num_passed_over = self._config.max_passed_over
        insort(self.waiting, sequence, key=lambda sequence: sequence.order)

    def _reference(self, candidate: Admissible) -> CachedBlocks | None:
        """Reference its blocks in L1 and determine what can be loaded. None: retry in the next step."""
        sequence, usable, num_l1, num_external, child = candidate
        block_size = self._config.block_size
        if len(usable) > num_l1 and usable[num_l1] in self.computing:
            return None  # by a request admitted in this step
        # No block is named between the ranking and this: L1 has no more than was found then.
        matched: list[int] = self._pool.match(usable[:num_l1]) if num_l1 else []
        if len(matched) != num_l1:  # an earlier admission evicted some of them
            child = self._child(sequence, len(matched)) if self._pool.partial_blocks else None
            in_part = 0 if child is None else child[1]
            answer = self._connector.lookup(sequence, len(matched) * block_size, in_part)
            if isinstance(answer, Pending):
                self._pool.free(matched)
                return None
            num_external = answer
        room = sequence.num_tokens - 1 - len(matched) * block_size
        if num_external > room:  # the connector promises too much
            num_external = room // block_size * block_size
        if child is not None and not num_external:
            source = self._pool.match([child[0].chain_hash])
            if source:
                return CachedBlocks(matched, 0, source[0], child[1])
        return CachedBlocks(matched, num_external)

    def _child(self, sequence: Sequence, num_l1: int) -> tuple[ChildBlock, int] | None:
        """The block of L1 that begins most like the request's block after `num_l1`, and the number of shared tokens."""
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
        """Admit the request with `num_present` tokens (`num_l1` blocks are L1's) and so many more that are loading."""
        self.waiting.remove(sequence)
        for other in self.waiting:
            if other.order >= sequence.order:  # equal: the request of a segment
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
        if self._config.enable_prefix_caching:  # other requests wait for the blocks that will be named
            end = min(sequence.num_tokens, sequence.num_exact) // self._config.block_size
            for chain_hash in sequence.hashes[num_l1:end]:
                self.computing.setdefault(chain_hash, sequence.request_id)

    def num_shareable(self, sequence: Sequence) -> int:
        """Leading tokens whose blocks other requests may find."""
        if not self._config.enable_prefix_caching:
            return 0
        if not self._config.store_generated:
            return min(sequence.num_exact, sequence.num_prompt_tokens)
        return min(sequence.num_exact, self.lasting.get(sequence.request_id, ALL))
