"""Reuse inside a block: which held block shares most tokens with a request's next one, and the chain it ends."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeGuard

import numpy as np

from kvtier.tiers import L2, ChainHash, ChildBlock
from kvtier.tiers.hierarchy import Attribution

LEAST: Final = 8  # of a block, one part of so many is worth a load of its own


class NamedByTokens(Protocol):
    """A chain that can say where equal tokens mean equal KV. A `TokenChain` is one."""

    @property
    def hashes(self) -> Sequence[ChainHash]:
        """The names of its full blocks."""

    @property
    def block_size(self) -> int:
        """Tokens in a block."""

    def parent(self, block: int) -> ChainHash:
        """The name before block `block`."""

    def next_tokens(self, block: int) -> bytes:
        """The tokens of block `block`, u32 little-endian, as many as it has; none if more shapes its KV."""

    def is_plain(self, child: ChildBlock, parent: ChainHash) -> bool:
        """Whether this name is what the parent and the tokens alone make it."""


def is_named_by_tokens(chain: object) -> TypeGuard[NamedByTokens]:
    """Whether this is such a chain. Asked at each lookup, so it looks at one method."""
    return hasattr(chain, "is_plain")


@dataclass(frozen=True, slots=True)
class PartialView:
    """The chain that is held in a request's stead: its own leading blocks, then one that begins as its next one does.

    What is promised of it may be loaded in the request's name, but the last block is the request's own only up to
    `shared` tokens.
    """

    hashes: list[ChainHash]  # the last one is the child's
    shared: int  # leading tokens of the child that are the request's own
    block_size: int

    @property
    def num_own(self) -> int:
        """Leading blocks that are the request's own."""
        return len(self.hashes) - 1

    @property
    def num_tokens(self) -> int:
        """Tokens of the request that it brings, if it is held whole."""
        return self.num_own * self.block_size + self.shared

    def covered(self, num_blocks: int) -> int:
        """Tokens of the request in the view's first `num_blocks`."""
        return self.num_tokens if num_blocks > self.num_own else num_blocks * self.block_size


def best_child(
    chain: NamedByTokens, children: Sequence[ChildBlock], block: int, own: bytes
) -> tuple[ChildBlock, int] | None:
    """The child that shares most of the leading tokens of the chain's block `block`, and how many; None: none does.

    `own`: those tokens of the block that may be had, as bytes.
    """
    first = own[:4]  # most children part here, and cost nothing more
    if not first:
        return None
    counted = [(_num_shared(own, child.tokens), child) for child in children if child.tokens.startswith(first)]
    for num_shared, child in sorted(counted, key=lambda pair: -pair[0]):
        if chain.is_plain(child, chain.parent(block)):
            return child, num_shared
    return None


def pays(num_held: int, shared: int, block_size: int, *, in_l1: int, least: int) -> bool:
    """Whether a child's `shared` tokens behind `num_held` blocks bring more than the `least` tokens had anyway.

    Where nothing else is to be loaded, they must be an eighth of a block: the first token of all prompts is often the
    same, and a load costs a step.
    """
    is_alone = num_held <= in_l1
    return num_held * block_size + shared > least and (not is_alone or LEAST * shared >= block_size)


def tier_of_last(of_view: Attribution | None, of_own: Attribution | None) -> str:
    """The tier that had a view's last block: it had one more than of the request's own. L2 where others came there."""
    if of_view is None or of_own is None:
        return L2
    more = [tier for tier, count in of_view.by_tier.items() if count > of_own[tier]]
    return more[0] if len(more) == 1 else L2  # blocks moved in between; whatever is loaded comes from L2


def _num_shared(own: bytes, held: bytes) -> int:
    size = min(len(own), len(held))
    if own[:size] == held[:size]:
        return size // 4
    return int((np.frombuffer(own[:size], "<u4") != np.frombuffer(held[:size], "<u4")).argmax())
