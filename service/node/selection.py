"""The blocks an operator means: by their names, or by the tokens of a prompt and whose it is."""

from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Final

from kvtier.service.node.namespaces import Namespace
from kvtier.tiers import ChainHash, ConfigError
from kvtier.tiers.naming import chain_hashes, root_hash

UNKNOWN: Final = bytes(32)  # the parent of blocks given by name alone; no block's name
_SCHEMES: Final = ("sha256", "xxh3")


@dataclass(frozen=True, slots=True)
class BlockSelection:
    """Consecutive blocks of one chain: their names, or the tokens they were computed from, from the prompt's first."""

    hashes: Sequence[ChainHash] = ()
    tokens: Sequence[int] = ()
    cache_salt: str | None = None

    def names(self, namespace: Namespace, timeout: float) -> tuple[Sequence[ChainHash], ChainHash]:
        """The blocks' names in this model, and the name before the first.

        Waits up to `timeout` seconds for tiers that nodes share, which know of the blocks then. Which hash the engine
        names blocks by is found out: the one by which something is held. ConfigError for less than a block.
        """
        if self.hashes:
            namespace.hierarchy.locate(self.hashes, timeout)
            return self.hashes, UNKNOWN
        size = namespace.blocks.block_size
        if len(self.tokens) < size:
            raise ConfigError(f"tokens: {len(self.tokens)} of them, this model's blocks have {size}; give one block's")
        root = root_hash(namespace.fingerprint, cache_salt=self.cache_salt)
        chains = [chain_hashes(root, self.tokens, size, scheme) for scheme in _SCHEMES]
        until = monotonic() + timeout
        found = [namespace.hierarchy.locate(chain, max(0.0, until - monotonic())).loadable for chain in chains]
        return chains[found.index(max(found))], root

    def scheme_of(self, names: Sequence[ChainHash], root: ChainHash, block_size: int) -> str:
        """By which hash the blocks of these tokens were named."""
        first = self.tokens[:block_size]
        return next(each for each in _SCHEMES if chain_hashes(root, first, block_size, each)[0] == names[0])
