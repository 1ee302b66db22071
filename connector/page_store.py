"""Pages of an engine's own host pool, kept in the tiers by name; all the work is done on the engine's threads."""

import time
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvtier.tiers.block_copier import BlockCopies
from kvtier.tiers.engine_blocks import EngineBlocks, PartCopier
from kvtier.tiers.hierarchy import Hierarchy
from kvtier.tiers.metrics import LOOKUP_TIERS
from kvtier.tiers.prefetch import Pending
from kvtier.tiers.tier import BlockRecord, ChainHash, Outcome

_STORE_WAIT: Final = 5.0  # seconds one `store` waits for the tiers below; the engine gives its threads 10 to stop
_LOOK: Final = 0.05  # seconds between looks at a load under way


class PageStore:
    """The tiers as an engine with a host pool and I/O threads of its own sees them. Thread-safe.

    A page is a block of the tiers. Names are the engine's, 32 bytes each, those of a call consecutive pages of one
    chain; `pages` are their numbers in `blocks`, whose memory outlives this object. One copy lies between the engine's
    memory and an L2 slot. No method raises for a storage failure; every wait has a deadline; failures are counted.
    """

    def __init__(self, hierarchy: Hierarchy, blocks: EngineBlocks, root: ChainHash, load_deadline: float) -> None:
        """`root` stands for a parent that is not known; `load_deadline`, in seconds, bounds one call of `load`.

        ValueError if the blocks are not in host memory or not as large as the hierarchy's slots.
        """
        self.hierarchy = hierarchy
        self._copier = PartCopier(blocks, hierarchy.host.region)
        self._root = root
        self._load_deadline = load_deadline
        self._through = hierarchy.settings.write_policy == "write_through"
        # A quarter of L2 is what one prefetch may have under way and what a tier below takes into its queue.
        slot_bytes = hierarchy.host.region.slot_bytes
        # Over lower tiers L2 is a passage, which a chain longer than itself must pass: batches are not linked there, or
        # the pool would keep the head, and have no room for the tail.
        self._is_passage = bool(hierarchy.ports)
        in_queue = hierarchy.settings.store_queue // slot_bytes
        self._batch = max(1, min(hierarchy.host.pool.num_slots // 4, in_queue))

    def held(self, names: Sequence[ChainHash]) -> int:
        """How many leading pages some tier holds. From memory, without I/O."""
        where = self.hierarchy.lookup(names)
        for tier in LOOKUP_TIERS:
            self.hierarchy.metrics.looked_up(tier, getattr(where, tier))
        self.hierarchy.metrics.missed(Outcome.ABSENT, where.miss)
        return where.blocks - where.miss

    def load(self, names: Sequence[ChainHash], pages: NDArray[np.int64], parent: ChainHash | None = None) -> int:
        """Fill the engine's pages; how many leading ones hold what was stored under their names, verified.

        The others may hold anything. `parent` names the page before the first.
        """
        end = time.monotonic() + self._load_deadline
        done = 0
        while done < len(names):
            batch = slice(done, done + self._batch)
            loaded = self._load(names[batch], pages[batch], self._linked(parent), end)
            done += loaded
            if loaded < len(names[batch]):
                break
            parent = names[done - 1]
        return done

    def store(
        self, names: Sequence[ChainHash], pages: NDArray[np.int64], parent: ChainHash | None = None
    ) -> list[bool]:
        """Copy the engine's pages, which may change once this has returned; True for those that the tiers took.

        They are hashed and written in the background. Waits while the tiers below catch up, so that a small L2 does.
        """
        epoch = self.hierarchy.epoch
        end = time.monotonic() + _STORE_WAIT
        taken: list[bool] = []
        while len(taken) < len(names) and all(taken):
            batch = slice(len(taken), len(taken) + self._batch)
            self.hierarchy.drain(max(0.0, end - time.monotonic()), below=self._through)
            previous = names[batch.start - 1] if batch.start else parent or self._root
            taken += self._store(names[batch], pages[batch], previous, epoch)
        if rest := len(names) - len(taken):  # behind a page that was not taken nobody would find them
            self.hierarchy.metrics.dropped("l2", Outcome.PARENT_FAILED, rest)
        return taken + [False] * rest

    def _load(self, names: Sequence[ChainHash], pages: NDArray[np.int64], parent: ChainHash, end: float) -> int:
        started = time.monotonic()
        prefetch = self.hierarchy.prefetch(names, parent)
        if prefetch.refused:
            self.hierarchy.metrics.missed(Outcome.NO_SLOT, len(names))
        while isinstance(self.hierarchy.poll(prefetch), Pending) and (left := end - time.monotonic()) > 0:
            self.hierarchy.wait_progress(min(left, _LOOK))
        with self.hierarchy.claim(prefetch) as lease:
            count = len(lease)
            if count and self._copier.copy("load", BlockCopies(pages[:count], lease.slots)):
                self.hierarchy.metrics.missed(Outcome.COPY_FAILED, count)
                return 0
        self._moved("load", count, time.monotonic() - started)
        return count

    def _store(self, names: Sequence[ChainHash], pages: NDArray[np.int64], parent: ChainHash, epoch: int) -> list[bool]:
        held = self.hierarchy.host.pool.holds(names)
        reservation = self.hierarchy.reserve(names, self._linked(parent))
        if reservation is None:
            return held
        if reservation.hashes:
            copies = BlockCopies(pages[reservation.indices], reservation.slots)
            if self._copier.copy("store", copies):
                self.hierarchy.abandon(reservation, Outcome.COPY_FAILED)
                return held
            parents = [parent, *names]
            records = [BlockRecord(names[i], parents[i], b"", 0) for i in reservation.indices]
            self.hierarchy.seal(reservation, records, epoch)
            self._moved("store", len(records), 0.0)
        end = reservation.indices[-1] + 1 if reservation.hashes else 0  # before it, others are storing what is not held
        return [i < end or is_held for i, is_held in enumerate(held)]

    def _linked(self, parent: ChainHash | None) -> ChainHash:
        """The parent as the pool is told it."""
        return self._root if self._is_passage or parent is None else parent

    def _moved(self, direction: str, num_pages: int, seconds: float) -> None:
        if num_pages:
            num_bytes = num_pages * self.hierarchy.host.region.slot_bytes
            self.hierarchy.metrics.moved("l2", direction, num_bytes, seconds)
