"""SlabChanges: which blocks come to a slab and leave it, for one reader. An `Announcer`."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np

from kvtier.tiers import BlockRecord, ChainHash, Changes
from kvtier.tiers.file.extents import ExtentMap
from kvtier.tiers.file.slab_codec import NO_CHECKSUM, Codec
from kvtier.tiers.file.slab_rows import SlabRows
from kvtier.tiers.pool import ChangeLog


@dataclass(eq=False, slots=True)
class SlabChanges:
    """The reader's end of the log that an open slab's `ExtentMap` writes. `lock` guards both, and `rows`' arrays."""

    blocks: ExtentMap
    rows: SlabRows
    lock: threading.Lock
    codec: Codec
    inside: Callable[[], AbstractContextManager[bool]]  # `Calls.enter`

    def listen(self) -> None:
        """Keep a log from now on. What is held already comes first, in the order it was stored."""
        with self.lock:
            slots = self.blocks.index.named()
            self.blocks.changes = ChangeLog(len(self.rows.seqs))
            self.blocks.changes.stored(slots[np.argsort(self.rows.seqs[slots], kind="stable")])

    @property
    def waiting(self) -> bool:
        log = self.blocks.changes
        return log is not None and log.waiting

    def take(self, limit: int) -> Changes:
        """Never waits for the disk: a record whose entry is not in the page cache, or not whole, has no tokens."""
        with self.inside() as is_open:
            with self.lock:
                if (log := self.blocks.changes) is None:
                    return Changes([], [])
                gone, slots, cleared = log.take(limit)
                names, parents = self.blocks.index.names(slots), self.rows.parents_of(slots)
            told = [BlockRecord(name, parent, b"", NO_CHECKSUM) for name, parent in zip(names, parents, strict=True)]
            if is_open and told:
                rows, whole = self.rows.peek(slots.tolist())
                for position, record in enumerate(self.codec.to_records(rows)):
                    if whole[position] and record.chain_hash == names[position]:
                        told[position] = record
        return Changes(gone, told, cleared)

    def stop_listening(self) -> list[ChainHash]:
        """Keep no log any more; returns what the reader knows."""
        with self.lock:
            log, self.blocks.changes = self.blocks.changes, None
            if log is None:
                return []
            log.cleared(self.blocks.index.words)
            return log.take(0)[0]
