"""An open slab's entry table: some columns in memory, whole rows from the disk, verified; and changes.

Names are in the `ExtentMap`'s index. Rows with tokens would take more memory than all of that together. They are
needed only when the block's payload is read or written, too.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvtier.tiers import BlockRecord, ChainHash, Changes, Outcome
from kvtier.tiers.file import slab
from kvtier.tiers.file.extents import ExtentMap
from kvtier.tiers.file.file_io import FileIO, ReadEach, peeking, read_all, read_each
from kvtier.tiers.file.slab import NO_CHECKSUM, Codec, Rows, SlabEntry, Superblock
from kvtier.tiers.file.slab_file import SlabFile
from kvtier.tiers.pool import ChangeLog, ChildIndex, Slots, Words

_PIECE_BYTES: Final = 2 << 20  # of the table read at once: it stays in the processor's cache while it is parsed
_CHILDREN: Final = 1 << 12  # slots whose parents are entered at once: bounds the copy of their names
NUM_VERIFIED: Final = 4096  # newest rows verified at opening; the others, when they are used

Flags = NDArray[np.bool_]


class SlabRows:
    """`parents` and `seqs` of every slot, 40 bytes; rows read on demand; the log of changes. A `ChangeFeed`.

    `lock`, the store's, guards `blocks`, the arrays, and changes of the index of children. That index gets blocks
    that are stored, and no removals: `FileStore.children` checks each slot that it names.
    """

    def __init__(
        self,
        io: FileIO,
        file: SlabFile,
        codec: Codec,
        blocks: ExtentMap,
        lock: threading.Lock,
        inside: Callable[[], AbstractContextManager[bool]],
    ) -> None:
        """`inside` is `Calls.enter`."""
        self._io = io
        self._file = file
        self._codec = codec
        self._blocks = blocks
        self._lock = lock
        self._inside = inside
        self.child_index: ChildIndex | None = None  # None: no children are looked up
        self._peek, self._read_each = peeking(io, file.fd), partial(read_each, io)
        num_slots = file.superblock.num_slots
        self.parents: Words = np.zeros((num_slots, 4), np.uint64)
        self._parent_names = self.parents.view("V32").reshape(-1)
        self.seqs = np.zeros(num_slots, np.uint64)

    def store(self, first: int, rows: Rows) -> None:
        """These rows, as they lie in memory, are on the disk now, from slot `first` on. The caller holds the lock."""
        part = slice(first, first + len(rows))
        self._parent_names[part], self.seqs[part] = rows["parent"], rows["seq"]
        if self.child_index is not None:
            self.child_index.enter(rows["parent"].tolist(), list(range(first, first + len(rows))))

    def parents_of(self, slots: Slots) -> list[ChainHash]:
        """The names of the parents of the blocks in these slots."""
        joined = self.parents.take(slots, 0).tobytes()
        return [joined[i : i + 32] for i in range(0, len(joined), 32)]

    def entries(self, slots: Sequence[int]) -> list[SlabEntry | Outcome]:
        """The entries in these slots' rows; IO_ERROR if one cannot be read, CHECKSUM if it is not whole.

        Waits for the disk.
        """
        superblock = self._file.superblock
        rows = np.empty(len(slots), superblock.row_dtype)
        offsets = superblock.row_offsets(slots)
        came = self._io.read_rows(self._file.fd, offsets, superblock.entry_bytes, slab.byte_view(rows))
        is_read = np.ones(len(slots), np.bool_)
        if came is None or 0 in came:
            rows, is_read = self._filled(slots, self._read_each)
        found = zip(self._codec.entries(rows, slots), is_read.tolist(), strict=True)
        return [(entry or Outcome.CHECKSUM) if could_read else Outcome.IO_ERROR for entry, could_read in found]

    def peek(self, slots: Sequence[int]) -> list[BlockRecord | None]:
        """The records in these slots' rows, without waiting. None: not whole, or not cached, and its read starts."""
        rows, is_read = self._filled(slots, self._peek)
        found = zip(self._codec.entries(rows, slots), is_read.tolist(), strict=True)
        return [entry[0] if entry is not None and could_read else None for entry, could_read in found]

    def recover(self) -> list[int]:
        """Read the whole table into the arrays and indexes; returns older duplicates, whose rows must be blanked.

        Only the newest rows, which a crash may have torn, and duplicates are compared with their checksums now; others
        when they are read.
        """
        blocks, (plausible, written) = self._blocks, self._load()
        slots = self._without_torn(np.flatnonzero(plausible))
        losers: list[int] = []
        if others := blocks.index.load(slots):
            held = sorted(set(blocks.index.find_each(blocks.index.names(np.array(others)))))
            duplicates = np.union1d(others, held)
            losers, bad = self._older_duplicates(duplicates)
            blocks.index.remove(held)
            blocks.index.load(np.setdiff1d(duplicates, losers + bad, assume_unique=True))
            slots = np.setdiff1d(slots, losers + bad, assume_unique=True)
        dirty = np.flatnonzero(written.reshape(-1, blocks.per_extent).any(1)).tolist()
        blocks.restore(slots, self.seqs[slots], dirty)
        for first in range(0, len(slots), _CHILDREN):
            if self.child_index is None:
                break
            piece = slots[first : first + _CHILDREN]
            self.child_index.enter(self.parents_of(piece), piece.tolist())
        return losers

    # Changes. No call waits for the disk.

    def listen(self) -> None:
        """Keep a log from now on. Blocks stored before come first, in that order."""
        with self._lock:
            slots = self._blocks.index.named()
            self._blocks.changes = ChangeLog(len(self.seqs))
            self._blocks.changes.stored(slots[np.argsort(self.seqs[slots], kind="stable")])

    @property
    def waiting(self) -> bool:
        log = self._blocks.changes
        return log is not None and log.waiting

    def take(self, limit: int) -> Changes:
        """A record whose entry is not in the page cache, or not whole, has no tokens."""
        with self._inside() as is_open:
            with self._lock:
                if (log := self._blocks.changes) is None:
                    return Changes([], [])
                gone, slots, cleared = log.take(limit)
                names, parents = self._blocks.index.names(slots), self.parents_of(slots)
            records = [BlockRecord(name, parent, b"", NO_CHECKSUM) for name, parent in zip(names, parents, strict=True)]
            if is_open and records:
                for position, record in enumerate(self.peek(slots.tolist())):
                    if record is not None and record.chain_hash == names[position]:
                        records[position] = record
        return Changes(gone, records, cleared)

    def stop_listening(self) -> list[ChainHash]:
        """Keep no log any more; returns the names of blocks that the reader knows."""
        with self._lock:
            log, self._blocks.changes = self._blocks.changes, None
            if log is None:
                return []
            log.cleared(self._blocks.index.words)
            return log.take(0)[0]

    def check(self) -> None:
        """Raise AssertionError unless the index of children matches these rows. The caller holds the lock."""
        if self.child_index is not None:
            self.child_index.check()
            assert self.child_index.num_slots == len(self.seqs), "the index of children is of another slab"

    def _load(self) -> tuple[Flags, Flags]:
        """Which rows are plausible, and which are not blank; their columns go into the arrays."""
        superblock = self._file.superblock
        plausible, written = np.zeros((2, superblock.num_slots), np.bool_)
        for first, rows in self._pieces(superblock):
            part = slice(first, first + len(rows))
            plausible[part] = found = slab.find_plausible(rows, np.arange(first, first + len(rows)), superblock)
            self._codec.show_names(rows, np.flatnonzero(found))
            self._blocks.index.write(part, slab.words_of(rows, "chain_hash"))
            self._blocks.generations[part] = rows["generation"]
            self._parent_names[part], self.seqs[part] = rows["parent"], rows["seq"]
            written[part] = (rows["state"] != 0) | (rows["checksum"] != 0)
        return plausible, written

    def _pieces(self, superblock: Superblock) -> Iterator[tuple[int, Rows]]:
        """The table piece by piece, each with its first slot; the memory is the same every time."""
        size = max(1, _PIECE_BYTES // superblock.entry_bytes)
        memory = np.empty(min(size, superblock.num_slots), superblock.row_dtype)
        slot = 0
        for segment in superblock.segments:
            for first in range(0, segment.num_slots, size):
                rows = memory[: min(size, segment.num_slots - first)]
                offset = segment.table_offset + first * superblock.entry_bytes
                read_all(self._io, self._file.fd, [slab.byte_view(rows)], offset)
                yield slot, rows
                slot += len(rows)

    def _without_torn(self, slots: Slots) -> Slots:
        """The slots without those of the newest rows that are not whole."""
        window = NUM_VERIFIED
        while len(slots):
            newest = slots
            if window < len(slots):
                newest = np.sort(slots[np.argpartition(self.seqs[slots], -window)[-window:]])
            whole = self._are_whole(newest)
            if whole.all():
                break
            slots = np.setdiff1d(slots, newest[~whole], assume_unique=True)
            window *= 2
        return slots

    def _older_duplicates(self, slots: Slots) -> tuple[list[int], list[int]]:
        """Of slots whose rows have the same name: those of lower seq, and those whose row is not whole."""
        whole = self._are_whole(slots)
        by_age = slots[whole][np.argsort(self.seqs[slots[whole]], kind="stable")]
        newest = dict(zip(self._blocks.index.names(by_age), by_age.tolist(), strict=True))
        return np.setdiff1d(by_age, list(newest.values())).tolist(), slots[~whole].tolist()

    def _filled(self, slots: Sequence[int], read: ReadEach) -> tuple[Rows, Flags]:
        """Rows of slots, neighbours in one stretch, and which could be read."""
        superblock, num_slots = self._file.superblock, len(slots)
        rows, is_read = np.empty(num_slots, superblock.row_dtype), np.empty(num_slots, np.bool_)
        offsets, view, size = superblock.row_offsets(slots), slab.byte_view(rows), superblock.entry_bytes
        firsts = [at for at in range(num_slots) if not at or offsets[at] != offsets[at - 1] + size]
        spans = [*zip(firsts, [*firsts[1:], num_slots], strict=False)]
        parts = [view[first * size : end * size] for first, end in spans]
        came = read(self._file.fd, parts, [offsets[first] for first in firsts])
        for (first, end), could_read in zip(spans, came, strict=True):
            is_read[first:end] = could_read
        return rows, is_read

    def _are_whole(self, slots: Slots) -> Flags:
        """Which of these slots' rows are whole. Waits for the disk."""
        rows, is_read = self._filled(slots.tolist(), self._read_each)
        return is_read & slab.find_valid(rows, slots, self._file.superblock)
