"""Recurrent states beside a request's blocks: the names of their records, and the border a prompt may go on from.

vLLM has a group's state at the end of some blocks, where a step ended. A prompt can go on behind a border if its blocks
up to there are held, and the state of every such group at it.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, overload

from kvtier.connector import BlockChain, ClosedChain
from kvtier.tiers import ChainHash
from kvtier.tiers.hierarchy import CacheTiers
from kvtier.tiers.naming import state_name

_BORDERS: Final = 32  # that are looked at, from the last one held backwards: a step's tokens end in one of them
_PATIENCE: Final = 0.02  # seconds that may take: over a daemon each look is a round trip
_MARK: Final = "\0"  # in the names of what belongs to a request; vLLM's have none


def owner(request_id: str) -> str:
    """The request of vLLM's that `ClosedRequest` and `StateRequest` of this name belong to."""
    return request_id.partition(_MARK)[0]


class StateChain:
    """A request's state records as one chain: of its first block all groups', then of its second. A `BlockChain`."""

    __slots__ = ("_blocks", "_groups", "block_size")

    def __init__(self, blocks: BlockChain, groups: Sequence[int]) -> None:
        """`groups` are vLLM's numbers of the groups that have a state."""
        self._blocks = blocks
        self._groups = groups
        self.block_size = blocks.block_size

    def index(self, block: int, group: int) -> int:
        """Where the record of the state behind `block` stands in this chain."""
        return block * len(self._groups) + self._groups.index(group)

    @property
    def hashes(self) -> Sequence[ChainHash]:
        return _StateNames(self._blocks.hashes, self._groups)

    @property
    def tenant(self) -> ChainHash:
        return self._blocks.tenant

    @property
    def root(self) -> ChainHash:
        return self._blocks.root

    def parent(self, block: int) -> ChainHash:
        """The name of the block that the state stands behind."""
        return self._blocks.hashes[block // len(self._groups)]

    def block_tokens(self, block: int) -> bytes:
        return self._blocks.block_tokens(block // len(self._groups))


class _StateNames(Sequence[ChainHash]):
    """Hashed only where somebody looks: most borders have no state."""

    def __init__(self, names: Sequence[ChainHash], groups: Sequence[int]) -> None:
        self._names = names
        self._groups = groups

    def __len__(self) -> int:
        return len(self._names) * len(self._groups)

    @overload
    def __getitem__(self, index: int) -> ChainHash: ...

    @overload
    def __getitem__(self, index: slice) -> list[ChainHash]: ...

    def __getitem__(self, index: int | slice) -> ChainHash | list[ChainHash]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        block, group = divmod(index, len(self._groups))
        return state_name(self._names[block], self._groups[group])


@dataclass(frozen=True, slots=True)
class UnnamedStates:
    """What a step leaves behind at a border while its last token is still being sampled, so that it has no name yet."""

    border: int
    blocks: tuple[tuple[int, int], ...]  # groups, and vLLM's block of each


@dataclass(frozen=True, slots=True)
class StateRequest:
    """Stores a request's states: a `Request` of the scheduler side's."""

    request_id: str
    chain: StateChain
    num_tokens: int = 0  # nothing is looked up by it

    @classmethod
    def of(cls, request_id: str, blocks: BlockChain, groups: Sequence[int]) -> "StateRequest":
        return cls(f"{request_id}{_MARK}states", StateChain(blocks, groups))


@dataclass(frozen=True, slots=True)
class ClosedRequest:
    """What a lookup asks for: a request's blocks up to a border, and the states there. All of it, or nothing."""

    request_id: str
    chain: ClosedChain

    @classmethod
    def of(
        cls, request_id: str, blocks: BlockChain, border: int, groups: Sequence[int], *, keeps_blocks: bool = True
    ) -> "ClosedRequest":
        """`keeps_blocks`: the model keeps K and V, too."""
        return cls(f"{request_id}{_MARK}{border}", ClosedChain(blocks, border, groups, keeps_blocks=keeps_blocks))

    @property
    def border(self) -> int:
        return self.chain.border

    @property
    def num_tokens(self) -> int:
        """As if a token stood behind the states: all of them may be promised."""
        return len(self.chain.hashes) * self.chain.block_size + 1


def last_border(
    tiers: CacheTiers, blocks: BlockChain, among: range, groups: Sequence[int], *, keeps_blocks: bool = True
) -> int:
    """The last border in `among` at which blocks and states are known to be held; 0: there is none.

    `keeps_blocks`: the model keeps K and V, too; otherwise states are looked for at every border. It knows L2 and the
    tiers of this node. Tiers that nodes share are asked by a claim, of one border.
    """
    until = time.monotonic() + _PATIENCE
    first, last = among.start, among.stop - 1
    if keeps_blocks:
        found = tiers.locate(blocks.hashes[:last], 0.0)
        last = min(last, found.blocks - found.miss)
        first = max(first, last - _BORDERS + 1)
    for border in range(last, first - 1, -1):
        if time.monotonic() >= until:
            return 0
        states = [state_name(blocks.hashes[border - 1], group) for group in groups]
        if all(not tiers.locate([state], 0.0).miss for state in states):
            return border
    return 0
