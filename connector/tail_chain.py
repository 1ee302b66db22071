"""A chain's unfinished last block, as a chain of one block: what is stored of it is stored like any other block."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.tiers import BlockRecord, ChainHash


@dataclass(slots=True)
class TailChain:
    """A `BlockChain` of one tail. It says nothing of the blocks before."""

    tail: BlockRecord
    tenant: ChainHash
    block_size: int  # tokens in a whole block

    @property
    def hashes(self) -> Sequence[ChainHash]:
        """The tail's name."""
        return [self.tail.chain_hash]

    @property
    def root(self) -> ChainHash:
        """Where this chain of one block begins."""
        return self.tail.parent

    def parent(self, block: int) -> ChainHash:
        """The name of the last whole block; the root if there is none."""
        return self.tail.parent

    def block_tokens(self, block: int) -> bytes:
        """The tail's tokens, fewer than a block has."""
        return self.tail.tokens
