"""SlabChanges: which blocks come to a slab and leave it, for one reader. An `Announcer`."""

import threading

import numpy as np

from kvtier.tiers import slab
from kvtier.tiers.changes import ChangeLog
from kvtier.tiers.extents import ExtentMap
from kvtier.tiers.tier import ChainHash, Changes


class SlabChanges:
    """The reader's end of the log that an open slab's `ExtentMap` writes. `lock` guards both, and `rows`."""

    def __init__(self, blocks: ExtentMap, rows: slab.Rows, lock: threading.Lock) -> None:
        self._blocks = blocks
        self._rows = rows
        self._lock = lock

    def listen(self) -> None:
        """Keep a log from now on. What is held already comes first, in the order it was stored."""
        with self._lock:
            slots = np.fromiter(self._blocks.index.values(), np.int64)
            self._blocks.changes = ChangeLog(len(self._rows))
            self._blocks.changes.stored(slots[np.argsort(self._rows["seq"][slots], kind="stable")])

    @property
    def waiting(self) -> bool:
        """Whether the reader may have something to learn."""
        log = self._blocks.changes
        return log is not None and log.waiting

    def take(self, limit: int) -> Changes:
        """What the reader has to forget and, up to `limit` blocks, to learn."""
        with self._lock:
            if (log := self._blocks.changes) is None:
                return Changes([], [])
            gone, slots, cleared = log.take(limit)
            rows = self._rows[slots]
        return Changes(gone, slab.to_records(rows), cleared)

    def hush(self) -> list[ChainHash]:
        """Keep no log any more; returns what the reader knows."""
        with self._lock:
            log, self._blocks.changes = self._blocks.changes, None
            if log is None:
                return []
            log.cleared(self._blocks.words)
            return log.take(0)[0]
