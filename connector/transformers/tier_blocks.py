"""Blocks of token chains: from the tiers into memory of our own, and from there to the tiers, on the calling thread."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from kvtier.tiers import L2, BlockRecord, ChainHash, Outcome
from kvtier.tiers.config import Config
from kvtier.tiers.copies import BlockCopier, BlockCopies
from kvtier.tiers.hierarchy import CacheTiers, Wanted, bring
from kvtier.tiers.naming import KVShape, TokenChain

_SEALED: Final = 1.0  # seconds for new blocks to be hashed
_GRACE: Final = 1.0  # seconds the tiers' answer may come after their own deadline: it is what has arrived by then


@dataclass(slots=True)
class PromptRow:
    """One sequence of a batch."""

    token_ids: list[int]
    chain: TokenChain
    epoch: int  # the tiers' before anything of it was computed
    num_loaded: int = 0  # blocks
    num_exact: int | None = None  # tokens that may be named: those behind them are approximate. None: all may


class TierBlocks:
    """Loads and stores blocks of one model's chains. Waits for them; never raises for a storage failure."""

    def __init__(self, tiers: CacheTiers, root: ChainHash, shape: KVShape, dtype: torch.dtype, config: Config) -> None:
        self.tiers = tiers
        self.shape = shape
        self.dtype = dtype
        self._root = root
        self._config = config.cache

    def row(self, token_ids: list[int]) -> PromptRow:
        """The tokens under their names."""
        chain = TokenChain(self._root, self.shape.block_size, self._config.hash)
        chain.extend(token_ids)
        return PromptRow(token_ids, chain, self.tiers.epoch)

    @property
    def deadline(self) -> float:
        """When what is asked for now has to be there, on the monotonic clock."""
        return time.monotonic() + self._config.prefetch_deadline

    def load(self, hashes: Sequence[ChainHash], deadline: float | None = None) -> torch.Tensor:
        """Leading blocks of a chain that came in time, `[num_blocks, *block_shape]`, in host memory of their own.

        `deadline` as the property tells it; by default that of a question asked now.
        """
        tiers = self.tiers
        left = self._config.prefetch_deadline if deadline is None else max(0.0, deadline - time.monotonic())
        tiers.count(tiers.locate(hashes, left))
        region = tiers.region  # before asking: a daemon that was restarted since has another
        started = time.monotonic()
        until = (started + left if deadline is None else deadline) + _GRACE
        lease = bring(tiers, hashes, self._root, until, block_size=self.shape.block_size)
        if lease is None:
            tiers.metrics.missed(Outcome.NO_SLOT, len(hashes))
            return self._empty(0)
        with lease:
            blocks, num_loaded = self._empty(len(lease)), 0
            if len(lease) and region is not None and region is tiers.region:
                pairs = BlockCopies(np.arange(len(lease)), lease.slots)
                if BlockCopier(blocks, region).copy("load", pairs) is None:
                    num_loaded = len(lease)
                    tiers.metrics.moved(L2, "load", num_loaded * region.slot_bytes, time.monotonic() - started)
                else:
                    tiers.metrics.missed(Outcome.COPY_FAILED, len(lease))
        return blocks[:num_loaded]

    def store(self, row: PromptRow, run: range, blocks: torch.Tensor) -> None:
        """Copy those of a row's blocks `run` that are not held yet to L2, and have them sealed."""
        tiers, chain = self.tiers, row.chain
        region = tiers.region  # before asking, as in `load`
        [reservation] = tiers.reserve([Wanted(chain.hashes[run.start : run.stop], chain.parent(run.start), chain.root)])
        if reservation is None or not reservation.hashes:
            return
        pairs = BlockCopies(np.array(reservation.indices, np.int64), reservation.slots)
        if region is None or region is not tiers.region or BlockCopier(blocks, region).copy("store", pairs):
            tiers.abandon(reservation, Outcome.COPY_FAILED)
            return
        positions = [run[index] for index in reservation.indices]
        records = [BlockRecord(chain.hashes[i], chain.parent(i), chain.block_tokens(i), 0) for i in positions]
        tiers.metrics.moved(L2, "store", len(records) * region.slot_bytes, 0.0)
        tiers.seal(reservation, records, row.epoch)

    def settle(self) -> None:
        """Wait a moment for new blocks: the next call finds what this one computed."""
        self.tiers.drain(_SEALED, below=False)

    def _empty(self, num_blocks: int) -> torch.Tensor:
        return torch.empty(num_blocks, *self.shape.block_shape, dtype=self.dtype)
