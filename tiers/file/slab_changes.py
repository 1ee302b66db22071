"""SlabChanges: which blocks come to a slab and leave it, for one reader. An `Announcer`."""

import threading

import numpy as np

from kvtier.tiers import ChainHash, Changes
from kvtier.tiers.file import slab
from kvtier.tiers.file.extents import ExtentMap
from kvtier.tiers.file.slab_codec import Codec
from kvtier.tiers.pool import ChangeLog


class SlabChanges:
    """The reader's end of the log that an open slab's `ExtentMap` writes. `lock` guards both, and `rows`."""

    def __init__(self, blocks: ExtentMap, rows: slab.Rows, lock: threading.Lock, codec: Codec) -> None:
        self._blocks = blocks
        self._rows = rows
        self._lock = lock
        self._codec = codec

    def listen(self) -> None:
        """Keep a log from now on. What is held already comes first, in the order it was stored."""
        with self._lock:
            slots = np.fromiter(self._blocks.index.values(), np.int64)
            self._blocks.changes = ChangeLog(len(self._rows))
            self._blocks.changes.stored(slots[np.argsort(self._rows["seq"][slots], kind="stable")])

    @property
    def waiting(self) -> bool:
        log = self._blocks.changes
        return log is not None and log.waiting

    def take(self, limit: int) -> Changes:
        with self._lock:
            if (log := self._blocks.changes) is None:
                return Changes([], [])
            gone, slots, cleared = log.take(limit)
            rows = self._rows[slots]
        return Changes(gone, self._codec.to_records(rows), cleared)

    def stop_listening(self) -> list[ChainHash]:
        """Keep no log any more; returns what the reader knows."""
        with self._lock:
            log, self._blocks.changes = self._blocks.changes, None
            if log is None:
                return []
            log.cleared(self._blocks.words)
            return log.take(0)[0]
