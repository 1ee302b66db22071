"""Recurrent states beside a chain's blocks: the names of their records, alone and behind the blocks they belong to."""

from collections.abc import Sequence

from kvtier.connector.request import BlockChain
from kvtier.tiers import ChainHash
from kvtier.tiers.naming import state_name


class StatePieces:
    """The records of the states behind a block, as a chain that begins at that block. A `BlockChain`."""

    __slots__ = ("_blocks", "block_size", "border", "hashes")

    def __init__(self, blocks: BlockChain, border: int, count: int) -> None:
        """`border` is the number of blocks before the states, which lie in `count` slots."""
        self._blocks = blocks
        self.block_size = blocks.block_size
        self.border = border
        self.hashes: Sequence[ChainHash] = [state_name(self.root, piece) for piece in range(count)]

    @property
    def tenant(self) -> ChainHash:
        return self._blocks.tenant

    @property
    def root(self) -> ChainHash:
        """The name of the block that the states stand behind."""
        return self._blocks.hashes[self.border - 1]

    def parent(self, block: int) -> ChainHash:
        return self.hashes[block - 1] if block else self.root

    def block_tokens(self, block: int) -> bytes:
        return self._blocks.block_tokens(self.border - 1)


class ClosedChain:
    """A request's blocks up to a border, and behind them the states to go on from. A `BlockChain` that is only read.

    Of a model that keeps states alone it is the states alone.
    """

    __slots__ = ("_blocks", "block_size", "border", "hashes")

    def __init__(self, blocks: BlockChain, border: int, groups: Sequence[int], *, keeps_blocks: bool) -> None:
        self._blocks = blocks
        self.block_size = blocks.block_size
        self.border = border
        last = blocks.hashes[border - 1]
        own = blocks.hashes[:border] if keeps_blocks else ()
        self.hashes: Sequence[ChainHash] = [*own, *(state_name(last, group) for group in groups)]

    @property
    def tenant(self) -> ChainHash:
        return self._blocks.tenant

    @property
    def root(self) -> ChainHash:
        return self._blocks.root

    def parent(self, block: int) -> ChainHash:
        return self.hashes[block - 1] if block else self.root

    def block_tokens(self, block: int) -> bytes:
        return self._blocks.block_tokens(min(block, self.border - 1))
