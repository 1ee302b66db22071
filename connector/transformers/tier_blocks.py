"""Blocks of token chains: from the tiers into memory of our own, and from there to the tiers, on the calling thread."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch

from kvtier.connector import BlockChain
from kvtier.connector.transformers.cache_form import CacheForm
from kvtier.tiers import L2, BlockRecord, ChainHash, Outcome
from kvtier.tiers.config import Config
from kvtier.tiers.copies import BlockCopier, BlockCopies
from kvtier.tiers.hierarchy import Attribution, CacheTiers, Wanted, bring
from kvtier.tiers.naming import TokenChain

_SEALED: Final = 1.0  # seconds for new blocks to be hashed
_GRACE: Final = 1.0  # seconds the tiers' answer may come after their own deadline: it is what has arrived by then


@dataclass(slots=True)
class PromptRow:
    """One sequence of a batch."""

    token_ids: list[int]
    chain: TokenChain
    epoch: int  # the tiers' before anything of it was computed
    num_pads: int = 0  # columns of the batch before the first token
    num_loaded: int = 0  # blocks
    num_exact: int | None = None  # tokens that may be named: those behind them are approximate. None: all may

    def copies(self, number: int) -> "list[PromptRow]":
        """This row, and others that go on from the same prompt. Their blocks of the prompt are left to this one."""
        num_blocks = len(self.chain.hashes)
        others = [replace(self, chain=self.chain.copy(), num_loaded=num_blocks) for _ in range(number - 1)]
        return [self, *others]


class TierBlocks:
    """Loads and stores blocks of one model's chains. Waits for them; never raises for a storage failure."""

    def __init__(self, tiers: CacheTiers, root: ChainHash, form: CacheForm, config: Config) -> None:
        self.tiers = tiers
        self.form = form
        self._root = root
        self._config = config.cache

    @property
    def dtype(self) -> torch.dtype:
        """Of a block's elements."""
        dtype: torch.dtype = getattr(torch, self.form.dtype)
        return dtype

    def row(self, token_ids: list[int], num_pads: int = 0) -> PromptRow:
        """The tokens under their names, behind that many columns of padding."""
        chain = TokenChain(self._root, self.form.block_size, self._config.hash)
        chain.extend(token_ids)
        return PromptRow(token_ids, chain, self.tiers.epoch, num_pads)

    @property
    def deadline(self) -> float:
        """When what is asked for now has to be there, on the monotonic clock."""
        return time.monotonic() + self._config.prefetch_deadline

    def found(self, hashes: Sequence[ChainHash], deadline: float) -> Attribution:
        """Where the blocks of a chain are; nothing is promised or counted."""
        return self.tiers.locate(hashes, max(0.0, deadline - time.monotonic()))

    def load(self, hashes: Sequence[ChainHash], deadline: float | None = None) -> torch.Tensor:
        """Leading blocks of a chain that came in time, `[num_blocks, num_elements]`, in host memory of their own.

        `deadline` as the property tells it; by default that of a question asked now.
        """
        left = self._config.prefetch_deadline if deadline is None else max(0.0, deadline - time.monotonic())
        self.tiers.count(self.tiers.locate(hashes, left))
        until = time.monotonic() + left if deadline is None else deadline
        return self.bring(hashes, self._root, until, self.form.block_size)

    def bring(self, hashes: Sequence[ChainHash], parent: ChainHash, deadline: float, block_size: int) -> torch.Tensor:
        """As `load`, for a chain that begins behind `parent`, and without counting a lookup.

        `block_size` as the tiers' `ask` takes it.
        """
        tiers = self.tiers
        region = tiers.region  # before asking: a daemon that was restarted since has another
        started = time.monotonic()
        lease = bring(tiers, hashes, parent, deadline + _GRACE, block_size=block_size)
        if lease is None:
            tiers.metrics.missed(Outcome.NO_SLOT, len(hashes))
            return self._empty(0)
        with lease:
            blocks, num_loaded = self._empty(len(lease)), 0
            if len(lease) and region is not None and region is tiers.region:
                pairs = BlockCopies(np.arange(len(lease)), lease.slots)
                if BlockCopier(blocks.unsqueeze(1), region).copy("load", pairs) is None:
                    num_loaded = len(lease)
                    tiers.metrics.moved(L2, "load", num_loaded * region.slot_bytes, time.monotonic() - started)
                else:
                    tiers.metrics.missed(Outcome.COPY_FAILED, len(lease))
        return blocks[:num_loaded]

    def store(self, row: PromptRow, run: range, blocks: torch.Tensor) -> None:
        """Copy those of a row's blocks `run` that are not held yet to L2, and have them sealed."""
        self.store_chain(row.chain, run, blocks, row.epoch)

    def store_chain(self, chain: BlockChain, run: range, blocks: torch.Tensor, epoch: int) -> None:
        """`store` for any chain, of what was computed in the tiers' epoch `epoch`."""
        tiers = self.tiers
        region = tiers.region  # before asking, as in `bring`
        wanted = Wanted(chain.hashes[run.start : run.stop], chain.parent(run.start), chain.tenant)
        [reservation] = tiers.reserve([wanted])
        if reservation is None or not reservation.hashes:
            return
        pairs = BlockCopies(np.array(reservation.indices, np.int64), reservation.slots)
        is_same = region is tiers.region
        if region is None or not is_same or BlockCopier(blocks.unsqueeze(1), region).copy("store", pairs):
            tiers.abandon(reservation, Outcome.COPY_FAILED)
            return
        positions = [run[index] for index in reservation.indices]
        records = [BlockRecord(chain.hashes[i], chain.parent(i), chain.block_tokens(i), 0) for i in positions]
        tiers.metrics.moved(L2, "store", len(records) * region.slot_bytes, 0.0)
        tiers.seal(reservation, records, epoch)

    def settle(self) -> None:
        """Wait a moment for new blocks: the next call finds what this one computed."""
        self.tiers.drain(_SEALED, below=False)

    def _empty(self, num_blocks: int) -> torch.Tensor:
        return torch.empty(num_blocks, self.form.num_elements, dtype=self.dtype)
