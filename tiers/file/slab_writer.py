"""The slab's write path: reserve → invalidate → payload → (sync) → entry → (sync) → findable; and forgetting.

`SlabGrowth` takes disk space for extents before they are first filled.
"""

import logging
import mmap
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from kvtier.tiers import BlockRecord, ChainHash, Outcome
from kvtier.tiers.config import show_size
from kvtier.tiers.file import slab
from kvtier.tiers.file.extents import ClaimedExtent, ExtentMap, Owner, SlotRun
from kvtier.tiers.file.file_io import CALL_BYTES, FileIO, PayloadIO, write_all
from kvtier.tiers.file.slab import Codec
from kvtier.tiers.file.slab_file import FULL_ERRNOS, STEP_BYTES, SlabFile, blank_rows, blank_slots, write_superblock
from kvtier.tiers.file.slab_rows import SlabRows
from kvtier.tiers.pool import EVICTED, REMOVED

_log = logging.getLogger(__name__)

_RETRY: Final = 10.0  # seconds until a full disk is tried again


class SlabGrowth:
    """Which extents have disk space: at the start only those with blocks are known to.

    Thread-safe. The lock is held across the system call, as some file systems take space by writing zeros.
    """

    def __init__(self, io: FileIO, file: SlabFile, clock: Callable[[], float] = time.monotonic) -> None:
        self._io = io
        self._file = file
        self._clock = clock
        self._has_space = bytearray(file.superblock.num_extents)
        self._lock = threading.Lock()
        self.retry_at: float | None = None  # on the clock, while the disk is full
        self._warned = False

    def found(self, extents: Iterable[int]) -> None:
        """These hold blocks."""
        for extent in extents:
            self._has_space[extent] = 1

    def lacks(self, extent: int) -> bool:
        """Whether its space was not taken yet, or could not be had."""
        return not self._has_space[extent]

    def may_retry(self) -> bool:
        """Whether a full disk should be tried again now. True once, until it is full again."""
        if self.retry_at is None or self._clock() < self.retry_at:
            return False
        self.retry_at = None
        return True

    def make_room(self, extent: int) -> bool:
        """Take the extent's space, and that of some behind it. False if the disk is full; OSError if it refuses."""
        if self._has_space[extent]:
            return True
        with self._lock:
            if self._has_space[extent]:
                return True
            size, offset = self._file.superblock.extent_bytes, self._file.superblock.payload_offsets[extent]
            for end in dict.fromkeys((self._step(extent), extent + 1)):
                try:
                    self._io.allocate(self._file.fd, offset, (end - extent) * size)
                except OSError as error:
                    if error.errno not in FULL_ERRNOS:
                        raise
                else:
                    self._has_space[extent:end] = b"\1" * (end - extent)
                    self._warned = False
                    return True
            if not self._warned:
                self._warned = True
                _log.warning(
                    "[file] %s: the disk is full, the slab stays at %s of %s until there is room",
                    self._file.path,
                    show_size(self._has_space.count(1) * size),
                    show_size(self._file.superblock.file_bytes),
                )
            self.retry_at = self._clock() + _RETRY
            return False

    def _step(self, extent: int) -> int:
        """The end of the step's extents: those behind this one that lack space and lie next to it."""
        superblock, end = self._file.superblock, extent + 1
        most = min(extent + max(1, STEP_BYTES // superblock.extent_bytes), superblock.num_extents)
        offsets = superblock.payload_offsets
        while end < most and not self._has_space[end] and offsets[end] == offsets[end - 1] + superblock.extent_bytes:
            end += 1
        return end


@dataclass(frozen=True, slots=True)
class _FilledRun:
    """A run and its blocks: new ones, or hit blocks of an evicted extent, which are stored again."""

    run: SlotRun
    records: Sequence[BlockRecord]
    payloads: Sequence[memoryview]
    is_new: bool


@dataclass(eq=False, slots=True)
class SlabWriter:
    """Stores and forgets blocks of one open slab. Thread-safe: several threads write at once, each its own slots.

    A write has three stages: reserve slots, store payloads and then entries, publish. `blocks` and `rows` change only
    under `lock`, which is never held across I/O. `file.superblock` is replaced when the slab shrinks, but only after
    calls that began before have ended.
    """

    io: FileIO
    file: SlabFile
    payload: PayloadIO
    blocks: ExtentMap
    rows: SlabRows
    lock: threading.Lock
    codec: Codec
    growth: SlabGrowth
    sync: Callable[[], None] | None  # makes earlier writes durable; None: they need not be
    next_seq: int = 1

    def write(
        self, records: Sequence[BlockRecord], payloads: Sequence[memoryview], owner: Owner | None = None
    ) -> list[Outcome]:
        names, entered = [record.chain_hash for record in records], set[int]()
        if owner is not None:
            with self.lock:
                excess = self.blocks.excess(owner)
            self.discard(excess, EVICTED)
        with self.lock:
            is_new = max(self.blocks.index.find_each(names), default=-1) < 0 and len(set(names)) == len(names)
        outcomes = [Outcome.ABSENT] * len(records)
        if not is_new:
            entered = self._skip_held(records, names, outcomes)
        todo = [position for position, outcome in enumerate(outcomes) if outcome is Outcome.ABSENT]
        parts, failure = self._reserve([records[i] for i in todo], [payloads[i] for i in todo], owner)
        try:
            stored, failed = self._store(parts) if parts else ([], None)
        finally:
            with self.lock:
                for extent in [*entered, *(part.run.extent for part in parts)]:
                    self.blocks.leave(extent)
        failure = failed or failure
        for position, outcome in zip(todo, stored, strict=False):
            outcomes[position] = outcome
        for position in todo[len(stored) :]:
            outcomes[position] = failure
            # The rest of the chain cannot be reached without these blocks.
            failure = Outcome.FULL if failure is Outcome.FULL else Outcome.PARENT_FAILED
        if Outcome.ABORTED in outcomes:  # a block named twice was stored once: the second has the first one's outcome
            first: dict[ChainHash, Outcome] = {}
            outcomes = [first.setdefault(*named) for named in zip(names, outcomes, strict=True)]
        return outcomes

    def discard(self, hashes: Sequence[ChainHash], cause: str = REMOVED) -> None:
        """Forget blocks, on disk too. If the disk refuses, the next start finds them again. `cause` is logged."""
        with self.lock:
            dropped = (self.blocks.drop(chain_hash, cause) for chain_hash in hashes)
            slots = [slot for slot in dropped if slot is not None]
        try:
            blank_slots(self.io, self.file.fd, self.file.superblock, slots)
        except OSError as error:
            _log.warning("[file] %s: %s while forgetting %d blocks", self.file.path, error, len(slots))
        finally:
            with self.lock:
                for slot in slots:
                    self.blocks.leave(slot // self.file.superblock.slots_per_extent)

    def reset(self) -> None:
        """Forget every block, on disk too, by a superblock with a higher `min_seq`; writes under way end as EPOCH.

        If the disk refuses it, the file is unlinked: the next start must not find these blocks.
        """
        with self.file.rewriting:
            with self.lock:
                self.blocks.clear()
                old = self.file.superblock
                self.file.superblock = replace(old, min_seq=self.next_seq, update=old.update + 1)
            try:
                write_superblock(self.io, self.file.fd, self.file.superblock)
            except OSError as error:
                _log.warning("[file] %s: %s while forgetting every block; it was removed", self.file.path, error)
                with suppress(OSError):
                    self.file.path.unlink()

    def _skip_held(self, records: Sequence[BlockRecord], names: list[ChainHash], outcomes: list[Outcome]) -> set[int]:
        """Put OK for a block whose stored entry is equal, and ABORTED for a duplicate within the batch.

        A stored block with other bytes is dropped. Returns the extents of blocks that are OK: entered, so that none is
        evicted for another block of the batch. The caller calls `leave` for each.
        """
        per_extent = self.file.superblock.slots_per_extent
        with self.lock:
            slots = self.blocks.index.find_each(names)
            held = sorted((position for position, slot in enumerate(slots) if slot >= 0), key=slots.__getitem__)
            entered = {slots[position] // per_extent for position in held}
            for extent in entered:
                self.blocks.enter(extent)
        if held:
            stored = zip(held, self.rows.entries([slots[position] for position in held]), strict=True)
            differing = {at for at, entry in stored if isinstance(entry, Outcome) or entry[0] != records[at]}
            needed: set[int] = set()
            with self.lock:
                for position in held:
                    slot = slots[position]
                    if position not in differing and self.blocks.index.find_one(names[position]) == slot:
                        outcomes[position] = Outcome.OK  # not discarded since
                        self.blocks.hits[slot] = 1
                        needed.add(slot // per_extent)
                for extent in entered - needed:
                    self.blocks.leave(extent)
            entered = needed
            self.discard([names[position] for position in sorted(differing)], Outcome.CHECKSUM)
        seen: set[ChainHash] = set()
        for position, name in enumerate(names):
            if outcomes[position] is Outcome.ABSENT and name in seen:
                outcomes[position] = Outcome.ABORTED
            seen.add(name)
        return entered

    def _reserve(
        self, records: Sequence[BlockRecord], payloads: Sequence[memoryview], owner: Owner | None
    ) -> tuple[list[_FilledRun], Outcome]:
        """Slots for leading records, the head of the chain first; and why there are no more."""
        parts: list[_FilledRun] = []
        hashes, done = [record.chain_hash for record in records], 0
        name = None if owner is None else owner.name
        if self.growth.retry_at is not None and self.growth.may_retry():  # once: extents without space are withheld
            with self.lock:
                self.blocks.offer()
        try:
            while done < len(records):
                rest, parent = hashes[done:], records[done].parent
                with self.lock:
                    run = self.blocks.take(rest, parent, name)
                    claim = None if run else self.blocks.claim(owner)
                    if claim is None and not (run := run or self.blocks.take(rest, None, name)):
                        break  # every extent is being written
                if claim is not None:
                    if (kept := self._empty(claim)) is None:
                        continue  # the next one has its space
                    with self.lock:
                        if not self.blocks.opened(claim):
                            continue  # a reset took it
                        again = self.blocks.take_in(claim.extent, claim.keep_hashes) if kept else None
                        run = self.blocks.take_in(claim.extent, rest)
                    if again and kept:
                        parts.append(_FilledRun(again, *kept, is_new=False))
                assert run is not None
                part = slice(done, done + run.size)
                parts.append(_FilledRun(run, records[part], payloads[part], is_new=True))
                done += run.size
        except OSError as error:
            _log.debug("[file] %s: %s while emptying an extent", self.file.path, error)
            return parts, _outcome_of(error)
        return parts, Outcome.FULL

    def _empty(self, claim: ClaimedExtent) -> tuple[list[BlockRecord], list[memoryview]] | tuple[()] | None:
        """Blank a claimed extent's rows; returns the blocks to store again. None, unclaimed: no disk space."""
        try:
            if not self.growth.make_room(claim.extent):
                with self.lock:
                    self.blocks.withhold(claim, self.growth.lacks)
                return None
            kept = self._read_kept(claim) if claim.keep else ()
            if claim.dirty:
                blank_rows(self.io, self.file.fd, self.file.superblock, [claim.extent])
        except OSError:
            with self.lock:
                self.blocks.unclaim(claim)
            raise
        return kept

    def _read_kept(self, claim: ClaimedExtent) -> tuple[list[BlockRecord], list[memoryview]] | tuple[()]:
        stride = self.file.superblock.stride
        memory = memoryview(mmap.mmap(-1, len(claim.keep) * stride))
        buffers = [memory[i * stride : i * stride + self.file.superblock.slot_bytes] for i in range(len(claim.keep))]
        offsets = [self.file.superblock.payload_offset(slot) for slot in claim.keep]
        try:
            for run in self.payload.runs(offsets):
                self.payload.read(offsets[run.start], buffers[run])
        except OSError:
            return ()  # keeping hit blocks is optional; the extent is evicted anyway
        entries = [each for each in self.rows.entries(claim.keep) if not isinstance(each, Outcome)]
        if [record.chain_hash for record, _ in entries] != claim.keep_hashes:
            return ()
        if not all(self.codec.show(*entry, buffer) for entry, buffer in zip(entries, buffers, strict=True)):
            return ()  # sealed again, an entry that is not authentic would become so
        return [record for record, _ in entries], buffers

    def _store(self, parts: Sequence[_FilledRun]) -> tuple[list[Outcome], Outcome | None]:
        """Payloads, then entries, of leading parts. Outcomes of the new blocks stored, and of what stopped the rest."""
        superblock, fd, failure = self.file.superblock, self.file.fd, None
        groups, stamps = self._adjacent(parts) if len(parts) > 1 else [parts], list[bytes]()
        for number, group in enumerate(groups):
            records, payloads = group[0].records, group[0].payloads
            if len(group) > 1:
                records = [record for part in group for record in part.records]
                payloads = [payload for part in group for payload in part.payloads]
            try:
                if self.codec.hides_payloads:
                    payloads, part_stamps = self.codec.hide(records, payloads)
                    stamps += part_stamps
                self.payload.write(superblock.payload_offset(group[0].run.first), payloads)
            except OSError as error:
                _log.debug("[file] %s: %s while writing payloads", self.file.path, error)
                groups, failure = groups[:number], _outcome_of(error)
                break
        if not groups:
            return [], failure
        parts = [part for group in groups for part in group]
        slots = [slot for part in parts for slot in part.run.slots]
        try:
            if self.sync:
                self.sync()
            rows = self.codec.make_rows(slots, [record for part in parts for record in part.records], stamps)
            with self.lock:
                epoch, seq = self.blocks.epoch, self.next_seq
                self.next_seq = seq + len(slots)
                rows["generation"] = self.blocks.generations[slots]
            are_late = [part.run.epoch != epoch for part in parts for _ in part.run.slots]
            rows["seq"] = [0 if is_late else seq + at for at, is_late in enumerate(are_late)]  # 0: never valid
            on_disk, done = self.codec.seal_rows(rows).view(np.uint8).data, 0
            try:
                for group in groups:
                    end = done + superblock.entry_bytes * sum([part.run.size for part in group])
                    write_all(self.io, fd, [on_disk[done:end]], superblock.row_offset(group[0].run.first))
                    done = end
                if self.sync:
                    self.sync()
            except OSError:
                with suppress(OSError):  # blocks reported as not stored must not be found at the next start
                    blank_slots(self.io, fd, superblock, slots)
                raise
            return self._publish(parts, rows), failure
        except OSError as error:
            _log.debug("[file] %s: %s while writing entries", self.file.path, error)
            return [], _outcome_of(error)

    def _publish(self, parts: Sequence[_FilledRun], rows: slab.Rows) -> list[Outcome]:
        """Make stored blocks findable; the outcomes of the new ones."""
        outcomes, duplicates, done = list[Outcome](), list[int](), 0
        with self.lock:
            for part in parts:
                run, outcome = part.run, Outcome.OK
                if run.epoch != self.blocks.epoch:
                    outcome = Outcome.EPOCH
                elif run.extent >= self.blocks.num_in_use:
                    outcome = Outcome.EVICTED
                    duplicates += run.slots
                else:
                    self.rows.store(run.first, rows[done : done + run.size])
                    duplicates += self.blocks.publish(run, [record.chain_hash for record in part.records])
                if part.is_new:
                    outcomes += [outcome] * run.size
                done += run.size
        if duplicates:
            blank_slots(self.io, self.file.fd, self.file.superblock, duplicates)
        return outcomes

    def _adjacent(self, parts: Sequence[_FilledRun]) -> list[Sequence[_FilledRun]]:
        """Parts whose runs lie next to each other in the file, together at most CALL_BYTES."""
        superblock, groups = self.file.superblock, [[part] for part in parts[:1]]
        for part in parts[1:]:
            last, run = groups[-1][-1].run, part.run
            size = sum(member.run.size for member in groups[-1]) + run.size
            is_next = (
                last.first + last.size == run.first
                and superblock.payload_offset(last.first) + last.size * superblock.stride
                == superblock.payload_offset(run.first)
                and size * superblock.stride <= CALL_BYTES
            )
            groups[-1].append(part) if is_next else groups.append([part])
        return list(groups)


def _outcome_of(error: OSError) -> Outcome:
    return Outcome.FULL if error.errno in FULL_ERRNOS else Outcome.IO_ERROR
