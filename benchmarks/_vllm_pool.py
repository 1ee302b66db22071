"""vLLM's own BlockPool under the four verbs that pool_throughput times, where its package is installed."""

from importlib import util
from types import SimpleNamespace
from typing import Any

from kvtier.tiers import ChainHash

_GROUP = 0
_BLOCK_SIZE = 16


class VllmPool:
    """A full pool of `num_blocks`; a chain that is stored evicts the oldest blocks."""

    def __init__(self, num_blocks: int) -> None:
        from vllm.v1.core.block_pool import BlockPool

        self._pool: Any = BlockPool(num_blocks + 1, enable_caching=True, hash_block_size=_BLOCK_SIZE)  # one is null

    @staticmethod
    def is_installed() -> bool:
        """Whether this interpreter has vLLM."""
        return util.find_spec("vllm") is not None

    def look_up(self, hashes: list[ChainHash]) -> list[Any]:
        """The blocks of the leading hashes that are held, as vLLM's KVCacheManager asks for them."""
        found = []
        for name in hashes:
            blocks = self._pool.get_cached_block(name, [_GROUP])
            if blocks is None:
                break
            found += blocks
        return found

    def lease_and_release(self, hashes: list[ChainHash]) -> None:
        """Look up, touch and free."""
        blocks = self.look_up(hashes)
        self._pool.touch(blocks)
        self._pool.free_blocks(reversed(blocks))

    def store(self, hashes: list[ChainHash]) -> None:
        """New blocks, evicting, cached under these names, and freed."""
        blocks = self._pool.get_new_blocks(len(hashes))
        request = SimpleNamespace(block_hashes=hashes)
        self._pool.cache_full_blocks(request, blocks, 0, len(hashes), _BLOCK_SIZE, _GROUP)
        self._pool.free_blocks(reversed(blocks))

    def allocate_and_free(self, count: int) -> None:
        """New blocks without a name, and back."""
        self._pool.free_blocks(self._pool.get_new_blocks(count))
