"""Blocks of L1 that copies under way read or write: they stay until each copy is reported to have ended."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier.tiers.copies import BlockPool  # it needs torch, this module does not


class HeldBlocks:
    """Counts the copies of each block. True while there are any."""

    def __init__(self, pool: "BlockPool") -> None:
        self._pool = pool
        self.copies: Counter[int] = Counter()  # under way, by block
        self.left: set[int] = set()  # blocks that their request has let go

    def __bool__(self) -> bool:
        return bool(self.copies)

    @property
    def are_draining(self) -> bool:
        """Whether there is room soon: blocks without a request, whose copies end before long."""
        return bool(self.left)

    def hold(self, blocks: Sequence[int]) -> None:
        """A copy of each of them begins."""
        self._pool.hold(blocks)
        self.copies.update(blocks)

    def leave(self, blocks: Sequence[int]) -> None:
        """Their request lets them go. Those that copies hold are soon free."""
        self.left.update(block for block in blocks if block in self.copies)

    def release(self, blocks: Sequence[int]) -> None:
        """A copy has ended for each mention of a block."""
        distinct = len(set(blocks)) == len(blocks)
        for some in [blocks] if distinct else [(block,) for block in blocks]:
            self._pool.free(some)
            self.copies.subtract(some)
        for block in blocks:
            if not self.copies[block]:
                del self.copies[block]
                self.left.discard(block)
