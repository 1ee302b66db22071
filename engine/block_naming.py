"""Which blocks of a request others may find in L1: full ones as they fill, and the unfinished last one at its end."""

from typing import TYPE_CHECKING

from kvtier.engine.admission import Admission
from kvtier.engine.config import EngineConfig
from kvtier.engine.sequence import Sequence
from kvtier.tiers import BlockRecord

if TYPE_CHECKING:
    from kvtier.tiers.copies import BlockPool  # it needs torch, this module does not


class BlockNaming:
    """Names blocks in L1. Only blocks whose KV is exact get a name, and an answer's only with `store_generated`."""

    def __init__(self, config: EngineConfig, pool: "BlockPool", admission: Admission) -> None:
        self._config = config
        self._pool = pool
        self._admission = admission

    def num_cacheable(self, sequence: Sequence, end: int) -> int:
        """Full blocks among the first `end` tokens that may be found by others."""
        return self._cacheable_tokens(sequence, end) // self._config.block_size

    def name(self, sequence: Sequence) -> None:
        """Name the blocks that have become full."""
        start, end = sequence.num_named, self.num_cacheable(sequence, sequence.num_computed)
        if end <= start or not self._config.enable_prefix_caching:
            return
        hashes = list(sequence.hashes[start:end])
        parent = sequence.chain.parent(start) if start else None
        records = sequence.records(start, end) if self._pool.wants_records else ()
        self._pool.publish(sequence.block_table[start:end], hashes, parent, records)
        sequence.num_named = end
        self._admission.forget(sequence, hashes)

    def take_tail(self, sequence: Sequence) -> tuple[int, BlockRecord] | None:
        """Take the unfinished last block of a request that ends from its table: the next turn may begin there."""
        if not (self._pool.partial_blocks and sequence.block_table):
            return None
        num_kept = self._cacheable_tokens(sequence, sequence.num_computed)
        tail = sequence.chain.tail(num_kept) if num_kept // self._config.block_size == sequence.num_named else None
        return None if tail is None else (sequence.block_table.pop(sequence.num_named), tail)

    def _cacheable_tokens(self, sequence: Sequence, end: int) -> int:
        if not self._config.store_generated:
            end = min(end, sequence.num_prompt_tokens)
        return sequence.exact_until(end)
