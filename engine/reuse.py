"""A request's segments from its arrival to its blend: which are waited for, which blocks are held, what is reused.

No torch: the scheduler calls this.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvtier.connector.segments import BlendRequest, Repair, ReusedPart, Segment
from kvtier.engine.sequence import Sequence, SequenceState
from kvtier.tiers import ChainHash

if TYPE_CHECKING:
    from kvtier.connector.segments import Blend, Blender
    from kvtier.tiers.copies import BlockPool  # these need torch, this module does not


@dataclass(slots=True)
class HeldSegment:
    """A segment that is worth reusing."""

    segment: Segment
    hashes: tuple[ChainHash, ...]  # names of its full blocks, in its own chain
    child: Sequence | None  # that brings it to L1
    blocks: list[int] | None = None  # referenced; None: not there yet, or let go

    @property
    def is_coming(self) -> bool:
        return self.child is not None and self.child.state is not SequenceState.FINISHED


@dataclass(slots=True)
class SegmentReuse:
    """What one request reuses. The blocks of segments that it holds are let go when the request releases its own.

    Its children bring missing segments → it is admitted and holds blocks of segments (`allocate`, `settle`) → it is
    blended, step by step (`claim`) → `let_go`. With a check pass it may be admitted while children still load, once: a
    check needs no segment. It holds the others as they come (`take`).
    """

    repair: Repair
    wanted: tuple[HeldSegment, ...]
    block_size: int
    stats: Counter[str]  # counts segments that were not in L1 when their request was to hold them
    blender: "Blender"
    blend: "Blend | None" = None  # under way
    _parts: list[ReusedPart] = field(default_factory=list)  # to be copied when the request is blended; then empty
    _awaits: bool = False  # it was admitted before its segments were there
    _may_be_early: bool = True
    _reach: tuple[int, int] = (0, 0)  # tokens that were cached when it was admitted, and all but the last

    @property
    def children(self) -> list[Sequence]:
        """Those that are not done yet."""
        return [wanted.child for wanted in self.wanted if wanted.child is not None and wanted.is_coming]

    @property
    def is_waiting(self) -> bool:
        return any(wanted.is_coming for wanted in self.wanted)

    @property
    def is_due(self) -> bool:
        return bool(self._parts) or self._awaits

    @property
    def is_early(self) -> bool:
        return self._awaits and self.is_waiting

    def may_start(self, num_seats: int) -> bool:
        if not self.is_waiting:
            return True
        is_checked = self.repair.rule == "deviation" and 0 < self.repair.share < 1
        num_queued = sum(child.state is SequenceState.WAITING for child in self.children)
        return self._may_be_early and is_checked and num_queued < num_seats

    def allocate(self, pool: "BlockPool", num_blocks: int, leaving: int) -> list[int] | None:
        """The request's own blocks, as `BlockPool.allocate`, while those of its segments are held.

        Where both do not fit, the request's own go first, and what that leaves of the segments is reused. A request
        whose segments are still to come leaves room for them.
        """
        self._hold(pool)
        coming = [child for child in self.children if child.state is SequenceState.WAITING]
        leaving += sum(-(-child.num_tokens // self.block_size) for child in coming)
        fresh = pool.allocate(num_blocks, leaving=leaving)
        if fresh is None and not self.is_waiting and any(wanted.blocks for wanted in self.wanted):
            self.let_go(pool)
            if (fresh := pool.allocate(num_blocks, leaving=leaving)) is not None:
                self._hold(pool)
        if fresh is None:
            self.let_go(pool)
        return fresh

    def settle(self, num_cached: int, num_tokens: int) -> int | None:
        """Decide what is reused behind `num_cached` tokens; returns where that begins at the earliest.

        None: nothing is. The last token is never reused: it brings the next one.
        """
        self._reach = (num_cached, num_tokens - 1)
        self._parts = []
        for wanted in self.wanted:
            if wanted.blocks is not None:
                self._reuse(wanted, len(wanted.blocks))
        coming = [self._part(wanted, len(wanted.hashes)) for wanted in self.wanted if wanted.is_coming]
        expected = [part for part in coming if part is not None]
        self._awaits = bool(expected)
        self._may_be_early = self._may_be_early and not expected
        return min((part.start for part in self._parts + expected), default=None)

    def take(self, pool: "BlockPool") -> bool:
        """Hold the segments that came since the request was admitted. False: none of all is left to be reused."""
        for wanted in self.wanted if self._awaits else ():
            if wanted.blocks is None and not wanted.is_coming:
                wanted.blocks = pool.match(wanted.hashes)
                self._reuse(wanted, len(wanted.blocks))
        self._awaits = self._awaits and self.is_waiting
        return self.is_due

    def claim(self, sequence: Sequence, budget: int) -> int:
        if self.blend is None:
            tokens, table = sequence.token_ids, sequence.block_table
            request = BlendRequest(tokens, table, sequence.num_computed, None, self.repair)
            self.blend = self.blender.begin(request)
        self.blend.bring(self._parts, whole=not self._awaits)
        return min(budget, self.blend.num_tokens_left)

    def let_go_of_sources(self, pool: "BlockPool") -> None:
        """Give the segments' blocks back: they were copied, or are not going to be."""
        for wanted in self.wanted:
            held, wanted.blocks = wanted.blocks, None
            if held:
                pool.free(held)

    def let_go(self, pool: "BlockPool") -> None:
        self.let_go_of_sources(pool)
        self.blend, self._parts, self._awaits = None, [], False

    def _hold(self, pool: "BlockPool") -> None:
        """What is there; that of segments that are still to come waits for all of them."""
        for wanted in self.wanted:
            wanted.blocks = None if wanted.is_coming else pool.match(wanted.hashes)

    def _reuse(self, wanted: HeldSegment, num_blocks: int) -> None:
        self.stats["segments_lost"] += num_blocks < len(wanted.hashes)
        if (part := self._part(wanted, num_blocks)) is not None:
            self._parts.append(part)

    def _part(self, wanted: HeldSegment, num_blocks: int) -> ReusedPart | None:
        """What is reused of a segment of which so many blocks are there, if anything is."""
        origin, (num_cached, most) = wanted.segment.start, self._reach
        start, end = max(origin, num_cached), min(origin + num_blocks * self.block_size, most)
        return ReusedPart(start, end, origin, tuple(wanted.blocks or ())) if start < end else None
