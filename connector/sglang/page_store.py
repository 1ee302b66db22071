"""Pages of SGLang's host pools in the tiers, by name, and how long a prefix is a hit over several pools."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvtier.tiers import L2, BlockRecord, ChainHash, Outcome
from kvtier.tiers.config import CacheConfig
from kvtier.tiers.copies import BlockCopies, CopyDirection, EngineBlocks, PartCopier
from kvtier.tiers.hierarchy import CacheTiers, Wanted, load_and_lease
from kvtier.tiers.host import HostRegion
from kvtier.tiers.naming import pool_name

_STORE_WAIT: Final = 5.0  # seconds one `store` waits for the tiers below; the engine gives its threads 10 s to stop


class PageStore:
    """The tiers for an engine with a host pool and I/O threads of its own. Thread-safe.

    Names are the engine's, 32 bytes each; those of one call are consecutive pages of a chain. `pages` are their numbers
    in `blocks`, whose memory outlives this object. One copy is between the engine's memory and an L2 slot. No method
    raises for a storage failure; every wait has a deadline; failures are counted.

    A page of the engine's first pool is a block of the tiers, under its own name. Another pool's data for a page are
    records under names of their own, one for each group of `blocks`: only all of them together count.
    """

    def __init__(
        self, tiers: CacheTiers, blocks: EngineBlocks, root: ChainHash, cache: CacheConfig, pool: str | None = None
    ) -> None:
        """`root`: the parent if it is unknown; `cache` limits the time of one call of `held` or `load`.

        `pool`: the name of a further pool, with everything that changes its bytes. ValueError if the blocks are not in
        host memory or differ in size from the tiers' slots.
        """
        self.tiers = tiers
        self._blocks = blocks
        self._pool = pool
        self._root = root
        self._load_deadline = cache.prefetch_deadline
        self._through = cache.write_policy == "write_through"
        self._store_queue = cache.store_queue
        self._copier: tuple[HostRegion, PartCopier] | None = None
        if tiers.region is not None:
            self._copier_of(tiers.region)

    def held(self, names: Sequence[ChainHash]) -> int:
        """How many leading pages some tier has: from the indexes, except shared tiers. Counts a lookup."""
        where = self.tiers.locate(self._records(names), self._load_deadline)
        if self._pool is None:
            self.tiers.count(where)
        return where.loadable // self._blocks.num_groups

    def held_ends(self, names: Sequence[ChainHash], window: int) -> Iterator[int]:
        """How many leading pages could be served, longest first, if only the last `window` of them are needed.

        Stops at the deadline.
        """
        end = time.monotonic() + self._load_deadline
        stop = len(names)
        while stop > 0 and (left := end - time.monotonic()) > 0:
            start = max(0, stop - window)
            found = self.tiers.locate(self._records(names[start:stop]), left).loadable // self._blocks.num_groups
            if found == stop - start:
                yield stop
                stop -= 1
            else:
                stop = start + found  # every longer prefix lacks the missing page

    def load(self, names: Sequence[ChainHash], pages: NDArray[np.int64], parent: ChainHash | None = None) -> int:
        """Fill the engine's pages; returns how many leading ones have the verified content of their names.

        The others are undefined. `parent`: the name of the page before the first.
        """
        end = time.monotonic() + self._load_deadline
        records, ids = self._records(names), self._ids(pages)
        done = 0
        while done < len(records):
            batch = slice(done, done + self._batch)
            loaded = self._load(records[batch], ids[batch], self._linked(parent), end)
            done += loaded
            if loaded < len(records[batch]):
                break
            parent = records[done - 1]
        return done // self._blocks.num_groups

    def store(
        self, names: Sequence[ChainHash], pages: NDArray[np.int64], parent: ChainHash | None = None
    ) -> list[bool]:
        """Copy the engine's pages, which may change after this returns; True for those that were stored.

        They are hashed and written in the background. Waits for the lower tiers, so that a small L2 suffices.
        """
        epoch = self.tiers.epoch
        end = time.monotonic() + _STORE_WAIT
        records, ids = self._records(names), self._ids(pages)
        taken: list[bool] = []
        while len(taken) < len(records) and all(taken):
            batch = slice(len(taken), len(taken) + self._batch)
            self.tiers.drain(max(0.0, end - time.monotonic()), below=self._through)
            previous = records[batch.start - 1] if batch.start else parent or self._root
            taken += self._store(records[batch], ids[batch], previous, epoch)
        if rest := len(records) - len(taken):  # unreachable after a page that was not stored
            self.tiers.metrics.dropped(L2, Outcome.PARENT_FAILED, rest)
        whole = self._blocks.num_groups
        return [all(taken[i : i + whole]) and i + whole <= len(taken) for i in range(0, len(records), whole)]

    def _records(self, names: Sequence[ChainHash]) -> Sequence[ChainHash]:
        """The names of the records of these pages, in order."""
        if self._pool is None:
            return names
        return [pool_name(name, self._pool, piece) for name in names for piece in range(self._blocks.num_groups)]

    def _ids(self, pages: NDArray[np.int64]) -> NDArray[np.int64]:
        """The ids of their records in `blocks`."""
        firsts = np.arange(self._blocks.num_groups) * self._blocks.blocks_per_group
        return (pages[:, None] + firsts).reshape(-1)

    def _load(self, names: Sequence[ChainHash], pages: NDArray[np.int64], parent: ChainHash, end: float) -> int:
        started = time.monotonic()
        region = self.tiers.region  # read before the claim: a restarted daemon has another
        lease = load_and_lease(self.tiers, names, parent, end, block_size=1)
        if lease is None:
            self.tiers.metrics.missed(Outcome.NO_SLOT, len(names))
            return 0
        with lease:
            count = len(lease)
            if count and self._copy("load", BlockCopies(pages[:count], np.array(lease.slots, np.int64)), region):
                self.tiers.metrics.missed(Outcome.COPY_FAILED, count)
                return 0
        self._moved("load", count, time.monotonic() - started)
        return count

    def _store(self, names: Sequence[ChainHash], pages: NDArray[np.int64], parent: ChainHash, epoch: int) -> list[bool]:
        region, present = self.tiers.region, self.tiers.holds(names)
        [reservation] = self.tiers.reserve([Wanted(names, self._linked(parent), self._root)])
        if reservation is None:
            return present
        if reservation.hashes:
            copies = BlockCopies(pages[reservation.indices], np.array(reservation.slots, np.int64))
            if self._copy("store", copies, region):
                self.tiers.abandon(reservation, Outcome.COPY_FAILED)
                return present
            parents = [parent, *names]
            records = [BlockRecord(names[i], parents[i], b"", 0) for i in reservation.indices]
            self.tiers.seal(reservation, records, epoch)
            self._moved("store", len(records), 0.0)
        end = reservation.indices[-1] + 1 if reservation.hashes else 0  # missing pages before it are others' stores
        return [i < end or is_held for i, is_held in enumerate(present)]

    @property
    def _batch(self) -> int:
        """Pages per claim: one may read a quarter of L2 at once, which is also the bound of a store queue."""
        region = self.tiers.region
        quarter = self.tiers.num_slots // 4
        if region is None or self._store_queue is None:
            return max(1, quarter)
        return max(1, min(quarter, self._store_queue // region.slot_bytes))

    def _copy(self, direction: CopyDirection, copies: BlockCopies, region: HostRegion | None) -> str | None:
        """Copy to or from the region of these slots; returns why that failed, or None."""
        if region is None or region is not self.tiers.region:
            return "the daemon was restarted meanwhile"
        return self._copier_of(region).copy(direction, copies)

    def _copier_of(self, region: HostRegion) -> PartCopier:
        if self._copier is None or self._copier[0] is not region:
            self._copier = region, PartCopier(self._blocks, region)
        return self._copier[1]

    def _linked(self, parent: ChainHash | None) -> ChainHash:
        """The parent for the pool.

        With lower tiers a chain may be longer than L2, which it only passes through: its batches are not linked, or the
        pool would retain the head and have no room for the rest.
        """
        return self._root if self.tiers.has_lower or parent is None else parent

    def _moved(self, direction: str, num_pages: int, seconds: float) -> None:
        if num_pages and (region := self.tiers.region) is not None:
            num_bytes = num_pages * region.slot_bytes
            self.tiers.metrics.moved(L2, direction, num_bytes, seconds)


_Answer = TypeVar("_Answer")


class CutPageStore:
    """A `PageStore` of pages in pieces, each of which is a block of other tiers. They work at once; all of them count.

    A store or load of pages counts once in each of the tiers.
    """

    def __init__(self, pieces: Sequence[PageStore]) -> None:
        self._pieces = pieces
        self.tiers = pieces[0].tiers
        self._threads = ThreadPoolExecutor(len(pieces), "kvtier-piece")

    def held(self, names: Sequence[ChainHash]) -> int:
        return min(self._each(lambda piece: piece.held(names)))

    def load(self, names: Sequence[ChainHash], pages: NDArray[np.int64], parent: ChainHash | None = None) -> int:
        return min(self._each(lambda piece: piece.load(names, pages, parent)))

    def store(
        self, names: Sequence[ChainHash], pages: NDArray[np.int64], parent: ChainHash | None = None
    ) -> list[bool]:
        of_pieces = self._each(lambda piece: piece.store(names, pages, parent))
        return [all(taken) for taken in zip(*of_pieces, strict=True)]

    def _each(self, work: Callable[[PageStore], _Answer]) -> list[_Answer]:
        return list(self._threads.map(work, self._pieces))


_ALL, _TRAILING = "all_pages", "trailing_pages"  # PoolHitPolicy


def hit_ends(
    names: Sequence[ChainHash], needed: Sequence[tuple[str, str, int]], stores: Mapping[str, PageStore], *, every: bool
) -> tuple[list[int], dict[str, int]]:
    """The possible lengths of a prefix of `names`, ascending, and how far each pool by itself reaches.

    The first pool has all of `names`. `needed`: each further pool's name, hit policy and window in pages; unknown
    policies are ignored. A pool that is not in `stores` has nothing. `every`: return all lengths, since ranks have to
    agree on one; else perhaps only the longest.
    """
    ends = range(1, len(names) + 1)
    allowed = set(ends)
    reached: dict[str, int] = {}
    trailing = sum(policy == _TRAILING for _, policy, _ in needed)
    for pool, policy, window in sorted(needed, key=lambda each: each[1] == _TRAILING):  # those that shorten first
        if policy not in (_ALL, _TRAILING) or not allowed:
            continue
        store = stores.get(pool)
        if store is None:
            allowed = set()
        elif policy == _ALL:
            reached[pool] = store.held(names)
            allowed &= set(range(1, reached[pool] + 1))
        else:
            mine = store.held_ends(names[: max(allowed)], max(1, window))
            found = set(mine) if every or trailing > 1 else {next(mine, 0)}
            reached[pool] = max(found, default=0)
            allowed &= found
    return sorted(allowed), {pool: end for pool, end in reached.items() if end}
