"""A request's segments from its admission to its blend: which are waited for, which blocks are held, what is reused.

No torch: the scheduler calls this.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvtier.connector.segments import Repair, ReusedPart, Segment
from kvtier.engine.sequence import Sequence, SequenceState
from kvtier.tiers import ChainHash

if TYPE_CHECKING:
    from kvtier.tiers.copies import BlockPool  # it needs torch, this module does not


@dataclass(frozen=True, slots=True)
class HeldSegment:
    """A segment that is worth reusing, and the names of its full blocks in its own chain."""

    segment: Segment
    hashes: tuple[ChainHash, ...]


@dataclass(slots=True)
class SegmentReuse:
    """What one request reuses. The blocks of segments that it holds are let go when the request releases its own.

    waiting for `children` → blocks of segments held (`allocate`) → `settle` → blended, which clears `parts`.
    """

    repair: Repair
    wanted: tuple[HeldSegment, ...]
    block_size: int
    stats: Counter[str]  # counts segments that were not in L1 when their request got its blocks
    children: list[Sequence] = field(default_factory=list)  # that bring missing segments to L1
    parts: list[ReusedPart] = field(default_factory=list)  # to be copied when the request is blended; then empty
    _held: list[list[int]] = field(default_factory=list)

    @property
    def is_waiting(self) -> bool:
        """Whether segments are still being loaded or computed."""
        self.children = [child for child in self.children if child.state is not SequenceState.FINISHED]
        return bool(self.children)

    @property
    def is_due(self) -> bool:
        """Whether anything is to be copied."""
        return bool(self.parts)

    def allocate(self, pool: "BlockPool", num_blocks: int, leaving: int) -> NDArray[np.int64] | None:
        """The request's own blocks, as `BlockPool.allocate`, while those of its segments are held.

        Where both do not fit, the request's own go first, and what that leaves of the segments is reused.
        """
        self._hold(pool)
        fresh = pool.allocate(num_blocks, leaving=leaving)
        if fresh is None and any(self._held):
            self.let_go(pool)
            if (fresh := pool.allocate(num_blocks, leaving=leaving)) is not None:
                self._hold(pool)
        if fresh is None:
            self.let_go(pool)
        return fresh

    def settle(self, num_cached: int, num_tokens: int) -> int | None:
        """Decide what is reused behind `num_cached` tokens; returns where that begins, None if nothing is.

        The last token is never reused: it brings the next one.
        """
        self.parts = []
        for wanted, blocks in zip(self.wanted, self._held, strict=True):
            origin = wanted.segment.start
            self.stats["segments_lost"] += len(blocks) < len(wanted.hashes)
            start = max(origin, num_cached)
            end = min(origin + len(blocks) * self.block_size, num_tokens - 1)
            if start < end:
                self.parts.append(ReusedPart(start, end, origin, tuple(blocks)))
        return self.parts[0].start if self.parts else None

    def let_go(self, pool: "BlockPool") -> None:
        """Give the segments' blocks back: they were copied, or are not going to be."""
        held, self._held, self.parts = self._held, [], []
        for blocks in held:
            pool.free(blocks)

    def _hold(self, pool: "BlockPool") -> None:
        self._held = [pool.match(wanted.hashes).tolist() for wanted in self.wanted]
