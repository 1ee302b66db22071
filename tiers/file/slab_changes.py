"""SlabChanges: which blocks come to a slab and leave it, for one reader. An `Announcer`."""

import threading
from dataclasses import dataclass

import numpy as np

from kvtier.tiers import ChainHash, Changes
from kvtier.tiers.file import slab
from kvtier.tiers.file.extents import ExtentMap
from kvtier.tiers.file.slab_codec import Codec
from kvtier.tiers.pool import ChangeLog


@dataclass(eq=False, slots=True)
class SlabChanges:
    """The reader's end of the log that an open slab's `ExtentMap` writes. `lock` guards both, and `rows`."""

    blocks: ExtentMap
    rows: slab.Rows
    lock: threading.Lock
    codec: Codec

    def listen(self) -> None:
        """Keep a log from now on. What is held already comes first, in the order it was stored."""
        with self.lock:
            slots = np.fromiter(self.blocks.index.values(), np.int64)
            self.blocks.changes = ChangeLog(len(self.rows))
            self.blocks.changes.stored(slots[np.argsort(self.rows["seq"][slots], kind="stable")])

    @property
    def waiting(self) -> bool:
        log = self.blocks.changes
        return log is not None and log.waiting

    def take(self, limit: int) -> Changes:
        with self.lock:
            if (log := self.blocks.changes) is None:
                return Changes([], [])
            gone, slots, cleared = log.take(limit)
            rows = self.rows[slots]
        return Changes(gone, self.codec.to_records(rows), cleared)

    def stop_listening(self) -> list[ChainHash]:
        """Keep no log any more; returns what the reader knows."""
        with self.lock:
            log, self.blocks.changes = self.blocks.changes, None
            if log is None:
                return []
            log.cleared(self.blocks.words)
            return log.take(0)[0]
