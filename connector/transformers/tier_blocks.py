"""Blocks of token chains: copied between the tiers and the model's memory, on the calling thread."""

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
from kvtier.tiers.hierarchy import Attribution, CacheTiers, Wanted, load_and_lease
from kvtier.tiers.host import HostRegion
from kvtier.tiers.naming import HashCache, TokenChain
from kvtier.tiers.pool import Lease, Reservation

_SEALED: Final = 1.0  # seconds for new blocks to be hashed
_GRACE: Final = 1.0  # seconds that the tiers' answer may take beyond their own deadline


@dataclass(slots=True)
class PromptRow:
    token_ids: list[int]
    chain: TokenChain
    epoch: int  # the tiers' epoch before anything was computed
    num_pads: int = 0  # columns of the batch before the first token
    num_loaded: int = 0  # blocks
    num_exact: int | None = None  # exact leading tokens: later ones are approximate and not stored. None: all are exact

    def copies(self, number: int) -> "list[PromptRow]":
        """This row, and others that continue the same prompt. Only this one stores the prompt's blocks."""
        num_blocks = len(self.chain.hashes)
        others = [replace(self, chain=self.chain.copy(), num_loaded=num_blocks) for _ in range(number - 1)]
        return [self, *others]


@dataclass(frozen=True, slots=True)
class _Store:
    """A store that is sealed or abandoned once its copies have ended."""

    reservation: Reservation
    records: list[BlockRecord]
    epoch: int
    sent: Sent


class TierBlocks:
    """Loads and stores blocks of one model's chains. Waits for loads; never raises for a storage failure.

    On a GPU a store is only enqueued: `wait_sealed`, `drain` and `close` wait for its copies, and have them sealed.
    """

    def __init__(
        self, tiers: CacheTiers, root: ChainHash, form: CacheForm, config: Config, device: torch.device
    ) -> None:
        """`device`: where the model computes."""
        self.tiers = tiers
        self.form = form
        self.root = root  # the root of new rows' chains
        self.follow: Callable[[], bool] = lambda: True  # sets `root` to the current model's; False: it has no name
        self.passing: Callable[[], ChainHash | None] = lambda: self.root  # inside a pass: the root of what it computes
        self._config = config.cache
        self._device = copies_of(form, device, config.host, tiers.metrics)  # None: the CPU copies
        self._kept = HashCache()
        self._stores: list[_Store] = []  # with copies under way, oldest first
        self._lost: list[tuple[Lease, Sent]] = []  # loads that a dead device has not ended and may still read

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.form.dtype)
        return dtype

    def row(self, token_ids: list[int], num_pads: int = 0) -> PromptRow:
        """A row with these tokens and their names, after that many columns of padding."""
        chain = TokenChain(self.root, self.form.block_size, self._config.hash, kept=self._kept)
        chain.extend(token_ids)
        return PromptRow(token_ids, chain, self.tiers.epoch, num_pads)

    def watch(self, cache: DynamicCache) -> None:
        """Check in all passes into the cache that the model computes what rows are named after now."""
        if isinstance(cache, WatchedCache):
            cache.watch = PassWatch(self.root, self.passing, self.form.kept[0] if self.form.layers else 0)

    def are_current(self, rows: Sequence[PromptRow], cache: DynamicCache) -> bool:
        """Whether the model computes, and did in all passes seen, what these rows are named after.

        If not, their blocks are counted as dropped.
        """
        if self.follow() and all(row.chain.root == self.root for row in rows) and not is_torn(cache):
            return True
        num_blocks = sum(len(row.chain.hashes) - row.num_loaded for row in rows)
        self.tiers.metrics.dropped(L2, Outcome.UNSUPPORTED, num_blocks)
        return False

    @property
    def deadline(self) -> float:
        return time.monotonic() + self._config.prefetch_deadline

    def found(self, hashes: Sequence[ChainHash], deadline: float) -> Attribution:
        """Where the blocks of a chain are; without a claim or a count."""
        return self.tiers.locate(hashes, max(0.0, deadline - time.monotonic()))

    def load(self, hashes: Sequence[ChainHash], deadline: float | None = None) -> Blocks:
        """Leading blocks of a chain that arrived in time, copied, on the model's device if it has room.

        `deadline`: as the property; by default that of a load that starts now.
        """
        left = self._config.prefetch_deadline if deadline is None else max(0.0, deadline - time.monotonic())
        self.tiers.count(self.tiers.locate(hashes, left))
        until = time.monotonic() + left if deadline is None else deadline
        return self.bring(hashes, self.root, until, self.form.block_size, len(hashes))

    def bring(
        self, hashes: Sequence[ChainHash], parent: ChainHash, deadline: float, block_size: int, num_blocks: int
    ) -> Blocks:
        """As `load`, for a chain that begins after `parent`, without counting a lookup.

        `block_size` as in the tiers' `submit`. The first `num_blocks` names are blocks, the others states. More than
        one request may lease at once is loaded in pieces.
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
        """Load as many as L2 has room for at once."""
        tiers = self.tiers
        self._release_ended()
        region = tiers.region  # read before the claim: a restarted daemon has another
        started = time.monotonic()
        lease = load_and_lease(tiers, hashes, parent, deadline + _GRACE, block_size=block_size)
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
        """Copy those of a row's blocks `run` that L2 lacks, and have them sealed."""
        self.store_chain(row.chain, run, blocks, row.epoch)

    def store_chain(self, chain: BlockChain, run: range, blocks: Blocks, epoch: int) -> None:
        """`store` for any chain, of what was computed in the tiers' epoch `epoch`.

        A run larger than L2 is stored in pieces, each once the previous ones are below, up to a prompt's deadline.
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
        """Store a part of a run's blocks; `piece` is relative to the run's start."""
        tiers = self.tiers
        region = tiers.region  # read first, as in `load_and_lease`
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

    def wait_sealed(self) -> None:
        """Wait a moment until new blocks are sealed, so that the next call finds them."""
        self._seal(_SEALED)
        self.tiers.drain(_SEALED, below=False)

    def drain(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds until everything stored so far is in the lowest tier; False at timeout."""
        until = time.monotonic() + timeout
        return self._seal(timeout) and self.tiers.drain(max(0.0, until - time.monotonic()))

    def close(self) -> None:
        """End the copies. Slots of copies that a dead device has not ended stay reserved. Idempotent."""
        self._seal(DEADLINE)
        if self._device is not None:
            self._device.close()

    def _copied(self, region: HostRegion, lease: Lease, num_blocks: int) -> Blocks | None:
        """The content of the lease's slots, copied; None if the copy failed."""
        leased = np.array(lease.slots, np.int64)
        if self._device is not None and (loaded := self._device.load(region, leased, num_blocks)) is not None:
            blocks, sent = loaded
            if not sent.done():
                self._lost.append((lease, sent))
                return None
            return blocks if sent.failure is None else None
        slots = self._slots(len(lease))
        pairs = BlockCopies(np.arange(len(lease)), leased)
        if BlockCopier(slots.unsqueeze(1), region).copy("load", pairs) is not None:
            return None
        return Blocks.of(slots, self.form, num_blocks)

    def _sent(self, region: HostRegion, reservation: Reservation, blocks: Blocks, at: list[int]) -> Sent:
        """Copy the blocks `at` to their slots, or have the device do it. States, in host memory, are copied at once."""
        if self._device is not None and not len(blocks.states):
            sent = self._device.store(region, np.array(reservation.slots), blocks, at)
            if sent is not None:
                return sent
        slots = self._slots(len(reservation))
        blocks.read(slots, self.form, at)
        pairs = BlockCopies(np.arange(len(reservation)), np.array(reservation.slots, np.int64))
        return Sent(error=BlockCopier(slots.unsqueeze(1), region).copy("store", pairs))

    def _seal(self, timeout: float) -> bool:
        """Seal copied stores, in order, waiting up to `timeout` seconds. False if some are not sealed yet."""
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
        """Release the leases of timed-out loads that have ended by now."""
        ended = [lost for lost in self._lost if lost[1].done()]
        self._lost = [lost for lost in self._lost if lost not in ended]
        for lease, _ in ended:
            lease.release()

    def _none(self) -> Blocks:
        return Blocks.of(self._slots(0), self.form, 0)

    def _slots(self, number: int) -> torch.Tensor:
        return torch.empty(number, self.form.num_elements, dtype=self.dtype)
