"""Blocks of token chains: from the tiers to where the model computes, and back, on the calling thread."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from transformers import DynamicCache

from kvtier.connector import BlockChain
from kvtier.connector.transformers.blocks import Blocks
from kvtier.connector.transformers.cache_form import CacheForm, PassWatch, WatchedCache, is_torn
from kvtier.connector.transformers.device_copies import DEADLINE, Sent, copies_of
from kvtier.tiers import L2, BlockRecord, ChainHash, Outcome
from kvtier.tiers.config import Config
from kvtier.tiers.copies import BlockCopier, BlockCopies
from kvtier.tiers.hierarchy import Attribution, CacheTiers, Wanted, bring
from kvtier.tiers.host import HostRegion
from kvtier.tiers.naming import HashCache, TokenChain
from kvtier.tiers.pool import Lease, Reservation

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


@dataclass(frozen=True, slots=True)
class _Store:
    """What is sealed, or given up, once its copies have ended."""

    reservation: Reservation
    records: list[BlockRecord]
    epoch: int
    sent: Sent


class TierBlocks:
    """Loads and stores blocks of one model's chains. Waits for them; never raises for a storage failure.

    On a GPU a store is only enqueued: `settle`, `drain` and `close` wait for its copies, and have them sealed.
    """

    def __init__(
        self, tiers: CacheTiers, root: ChainHash, form: CacheForm, config: Config, device: torch.device
    ) -> None:
        """`device` is where the model computes."""
        self.tiers = tiers
        self.form = form
        self.root = root  # where chains of new rows begin
        self.follow: Callable[[], bool] = lambda: True  # sets `root` to the model's as it is now; False: it has no name
        self.passing: Callable[[], ChainHash | None] = lambda: self.root  # inside a pass: the root of what it computes
        self._config = config.cache
        self._device = copies_of(form, device, config.host, tiers.metrics)  # None: the CPU copies
        self._kept = HashCache()
        self._stores: list[_Store] = []  # whose copies are under way, the oldest first
        self._lost: list[tuple[Lease, Sent]] = []  # loads that a dead device has not ended: it may still read

    @property
    def dtype(self) -> torch.dtype:
        """Of a block's elements."""
        dtype: torch.dtype = getattr(torch, self.form.dtype)
        return dtype

    def row(self, token_ids: list[int], num_pads: int = 0) -> PromptRow:
        """The tokens under their names, behind that many columns of padding."""
        chain = TokenChain(self.root, self.form.block_size, self._config.hash, kept=self._kept)
        chain.extend(token_ids)
        return PromptRow(token_ids, chain, self.tiers.epoch, num_pads)

    def watch(self, cache: DynamicCache) -> None:
        """Have all passes into the cache looked at: whether the model computes what rows are named after now."""
        if isinstance(cache, WatchedCache):
            cache.watch = PassWatch(self.root, self.passing, self.form.kept[0] if self.form.layers else 0)

    def are_current(self, rows: Sequence[PromptRow], cache: DynamicCache) -> bool:
        """Whether the model computes, and did in all passes seen, what these rows are named after.

        If not, what would be stored is counted.
        """
        if self.follow() and all(row.chain.root == self.root for row in rows) and not is_torn(cache):
            return True
        num_blocks = sum(len(row.chain.hashes) - row.num_loaded for row in rows)
        self.tiers.metrics.dropped(L2, Outcome.UNSUPPORTED, num_blocks)
        return False

    @property
    def deadline(self) -> float:
        """When what is asked for now has to be there, on the monotonic clock."""
        return time.monotonic() + self._config.prefetch_deadline

    def found(self, hashes: Sequence[ChainHash], deadline: float) -> Attribution:
        """Where the blocks of a chain are; nothing is promised or counted."""
        return self.tiers.locate(hashes, max(0.0, deadline - time.monotonic()))

    def load(self, hashes: Sequence[ChainHash], deadline: float | None = None) -> Blocks:
        """Leading blocks of a chain that came in time, in memory of their own, on the model's device if it has room.

        `deadline` as the property tells it; by default that of a question asked now.
        """
        left = self._config.prefetch_deadline if deadline is None else max(0.0, deadline - time.monotonic())
        self.tiers.count(self.tiers.locate(hashes, left))
        until = time.monotonic() + left if deadline is None else deadline
        return self.bring(hashes, self.root, until, self.form.block_size, len(hashes))

    def bring(
        self, hashes: Sequence[ChainHash], parent: ChainHash, deadline: float, block_size: int, num_blocks: int
    ) -> Blocks:
        """As `load`, for a chain that begins behind `parent`, and without counting a lookup.

        `block_size` as the tiers' `ask` takes it. The first `num_blocks` names are blocks', the others states'. What
        one request may not hold of L2 at once comes in pieces.
        """
        most, at, parts = self.tiers.num_slots // 2, 0, list[Blocks]()
        while not parts or (len(parts[-1]) >= most > 0 and at < len(hashes)):
            first = hashes[at - 1] if at else parent
            parts.append(self._bring(hashes[at:], first, deadline, block_size, max(0, num_blocks - at)))
            at += len(parts[-1])
        return Blocks.joined(parts)

    def _bring(
        self, hashes: Sequence[ChainHash], parent: ChainHash, deadline: float, block_size: int, num_blocks: int
    ) -> Blocks:
        """What L2 has room for at once."""
        tiers = self.tiers
        self._release_ended()
        region = tiers.region  # before asking: a daemon that was restarted since has another
        started = time.monotonic()
        lease = bring(tiers, hashes, parent, deadline + _GRACE, block_size=block_size)
        if lease is None:
            tiers.metrics.missed(Outcome.NO_SLOT, len(hashes))
            return self._none()
        try:
            if not len(lease) or region is None or region is not tiers.region:
                return self._none()
            blocks = self._copied(region, lease, min(num_blocks, len(lease)))
            if blocks is None:
                tiers.metrics.missed(Outcome.COPY_FAILED, len(lease))
                return self._none()
            tiers.metrics.moved(L2, "load", len(lease) * region.slot_bytes, time.monotonic() - started)
            return blocks
        finally:
            if not any(lost is lease for lost, _ in self._lost):
                lease.release()

    def store(self, row: PromptRow, run: range, blocks: Blocks) -> None:
        """Copy those of a row's blocks `run` that are not held yet to L2, and have them sealed."""
        self.store_chain(row.chain, run, blocks, row.epoch)

    def store_chain(self, chain: BlockChain, run: range, blocks: Blocks, epoch: int) -> None:
        """`store` for any chain, of what was computed in the tiers' epoch `epoch`.

        What is larger than L2 goes in pieces, each once those before it are below, as long as a prompt may wait.
        """
        tiers, size, deadline = self.tiers, len(run), self.deadline
        if 0 < tiers.num_slots < len(run) and tiers.has_lower:
            size = max(1, tiers.num_slots // 2)
        for at in range(0, len(run), size):
            if at and not (self._seal(left := max(0.0, deadline - time.monotonic())) and tiers.drain(left)):
                tiers.metrics.dropped(L2, Outcome.NO_SLOT, len(run) - at)
                return
            self._store_piece(chain, run, range(at, min(at + size, len(run))), blocks, epoch)

    def _store_piece(self, chain: BlockChain, run: range, piece: range, blocks: Blocks, epoch: int) -> None:
        """Those of a run's blocks: `piece` counts from where it begins."""
        tiers = self.tiers
        region = tiers.region  # before asking, as in `bring`
        own = run[piece.start : piece.stop]
        wanted = Wanted(chain.hashes[own.start : own.stop], chain.parent(own.start), chain.tenant)
        [reservation] = tiers.reserve([wanted])
        if reservation is None or not reservation.hashes:
            return
        if region is None or region is not tiers.region:
            tiers.abandon(reservation, Outcome.COPY_FAILED)
            return
        at = [piece[index] for index in reservation.indices]
        records = [
            BlockRecord(chain.hashes[i], chain.parent(i), chain.block_tokens(i), 0) for i in (run[j] for j in at)
        ]
        sent = self._sent(region, reservation, blocks, at)
        self._stores.append(_Store(reservation, records, epoch, sent))
        self._seal(0.0)

    def settle(self) -> None:
        """Wait a moment for new blocks: the next call finds what this one computed."""
        self._seal(_SEALED)
        self.tiers.drain(_SEALED, below=False)

    def drain(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds until everything stored so far is in the lowest tier; False if it is not."""
        until = time.monotonic() + timeout
        return self._seal(timeout) and self.tiers.drain(max(0.0, until - time.monotonic()))

    def close(self) -> None:
        """End the copies. What a dead device has not ended keeps its slots. Idempotent."""
        self._seal(DEADLINE)
        if self._device is not None:
            self._device.close()

    def _copied(self, region: HostRegion, lease: Lease, num_blocks: int) -> Blocks | None:
        """What lies in the lease's slots, in memory of its own; None if the copy failed."""
        held = np.array(lease.slots, np.int64)
        if self._device is not None and (loaded := self._device.load(region, held, num_blocks)) is not None:
            blocks, sent = loaded
            if not sent.done():
                self._lost.append((lease, sent))
                return None
            return blocks if sent.failure is None else None
        slots = self._slots(len(lease))
        pairs = BlockCopies(np.arange(len(lease)), held)
        if BlockCopier(slots.unsqueeze(1), region).copy("load", pairs) is not None:
            return None
        return Blocks.of(slots, self.form, num_blocks)

    def _sent(self, region: HostRegion, reservation: Reservation, blocks: Blocks, at: list[int]) -> Sent:
        """Copy the blocks `at` to their slots, or have the device do it. States, in host memory, go at once."""
        if self._device is not None and not len(blocks.states):
            sent = self._device.store(region, np.array(reservation.slots), blocks, at)
            if sent is not None:
                return sent
        slots = self._slots(len(reservation))
        blocks.read(slots, self.form, at)
        pairs = BlockCopies(np.arange(len(reservation)), np.array(reservation.slots, np.int64))
        return Sent(error=BlockCopier(slots.unsqueeze(1), region).copy("store", pairs))

    def _seal(self, timeout: float) -> bool:
        """Seal what has been copied, in order, waiting for it up to `timeout` seconds. False if some is not yet."""
        until = time.monotonic() + timeout
        self._release_ended()
        while self._stores:
            store = self._stores[0]
            if not store.sent.wait(until):
                return False
            self._stores.pop(0)
            if store.sent.failure is not None:
                self.tiers.abandon(store.reservation, Outcome.COPY_FAILED)
                continue
            num_bytes = len(store.records) * self.form.block_bytes
            self.tiers.metrics.moved(L2, "store", num_bytes, 0.0)
            self.tiers.seal(store.reservation, store.records, store.epoch)
        return True

    def _release_ended(self) -> None:
        """Release the leases of loads that were given up and have ended by now."""
        ended = [lost for lost in self._lost if lost[1].done()]
        self._lost = [lost for lost in self._lost if lost not in ended]
        for lease, _ in ended:
            lease.release()

    def _none(self) -> Blocks:
        return Blocks.of(self._slots(0), self.form, 0)

    def _slots(self, number: int) -> torch.Tensor:
        return torch.empty(number, self.form.num_elements, dtype=self.dtype)
