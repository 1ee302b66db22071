"""Copies blocks from the tiers into an archive and back, a bounded window of L2 at a time."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from threading import Event
from typing import Final

import xxhash

from kvtier.service.archive import format as archive_format
from kvtier.service.archive.format import HEADER_BYTES, ArchiveCipher, Header, Parser
from kvtier.service.web import LoopFile
from kvtier.tiers import L2, BlockRecord, ChainHash, FormatError, KVTierError, Outcome, checksum
from kvtier.tiers.hierarchy import HeldRun, Hierarchy, bring
from kvtier.tiers.pool import Lease, Reservation

UNKNOWN: Final = bytes(32)  # stands for an unknown parent; no block has this name

_SHARE: Final = 8  # at most 1/8 of L2 is taken at a time for blocks that were not in it
_WINDOW_BYTES: Final = 32 << 20  # bytes of an export's window: several reads of the slab in flight
_BATCH_BYTES: Final = 4 << 20  # bytes of an import's batch: hashed and copied in one go
_SYNC_BYTES: Final = 256 << 20  # bytes written between syncs, so that the last sync is short
_LOOK: Final = 0.002  # seconds between polls of what is under way
_PATIENCE: Final = 30.0  # seconds an export waits for a window, also while other requests hold all that may be held
_SETTLE: Final = 5.0  # seconds an import waits for a batch to be written below
_LEAVE: Final = 1.0  # seconds it then waits for readers of that batch
_RECOUNT: Final = 4096  # blocks looked up at a time


@dataclass(frozen=True, slots=True)
class ArchiveProgress:
    """How far an export or import has come. The last one is the total."""

    num_blocks: int  # blocks in the archive, or held by the tiers, so far
    num_planned: int  # blocks there are to copy
    num_bytes: int  # bytes of the file written or read so far
    lost: Mapping[str, int]  # blocks that could not be copied, by reason (an `Outcome`)


class Export:
    """One export under way: windows of blocks through L2 into the file."""

    def __init__(self, hierarchy: Hierarchy, header: Header, file: LoopFile, key: bytes | None) -> None:
        self._cipher = ArchiveCipher(header, key) if key is not None else None
        self._hierarchy = hierarchy
        self._host = hierarchy.host
        self._header = header
        self._file = file
        self._window = max(1, min(self._host.pool.num_slots // _SHARE, _WINDOW_BYTES // header.slot_bytes))
        self._digest = xxhash.xxh3_128()
        self._num_blocks = self._num_bytes = self._num_synced = 0
        self._lost: Counter[str] = Counter()
        self._lost_names: set[ChainHash] = set()
        self._corrupt: set[ChainHash] = set()  # found corrupt in L2, and read again from lower tiers

    def progress(self) -> ArchiveProgress:
        return ArchiveProgress(self._num_blocks, self._header.num_blocks, self._num_bytes, dict(self._lost))

    async def begin(self) -> None:
        encoded = archive_format.encode_header(self._header)
        self._digest.update(encoded)
        await self._write([encoded])

    async def run(self, run: HeldRun) -> AsyncIterator[ArchiveProgress]:
        """Copy a run's blocks, up to the first that is lost: without it those after it cannot be reached."""
        at = 0
        reason = Outcome.PARENT_FAILED if run.parent in self._lost_names else None
        while at < len(run.hashes) and reason is None:
            window = run.hashes[at : at + self._window]
            num_copied, reason = await self._copy(window)
            at += num_copied
            yield self.progress()
        if reason is not None:
            self._lost.update([reason, *[Outcome.PARENT_FAILED] * (len(run.hashes) - at - 1)])
            self._lost_names.update(run.hashes[at:])
            yield self.progress()

    async def end(self) -> None:
        await self._write([archive_format.encode_trailer(self._num_blocks, self._digest.digest())])
        await self._file.sync()
        await self._file.close()

    async def _copy(self, window: Sequence[ChainHash]) -> tuple[int, Outcome | None]:
        """Copy leading blocks. Returns how many, and why the run cannot go on, if so."""
        was_held = self._host.pool.holds(window)
        lease = await self._bring(window)
        if lease is None:
            return 0, Outcome.NO_SLOT
        with lease:
            pieces = await asyncio.to_thread(self._encode, lease)
            await self._write(pieces)
            num_copied = len(pieces) // 2
            corrupt = lease.hashes[num_copied : num_copied + 1]
            self._host.pool.evict(corrupt)
        self._num_blocks += num_copied
        _give_back(self._hierarchy, [h for h, held in zip(lease.hashes, was_held, strict=False) if not held])
        if corrupt:
            self._hierarchy.metrics.corrupted(L2, 1)
            if corrupt[0] in self._corrupt:
                return num_copied, Outcome.CHECKSUM
            self._corrupt.update(corrupt)
            return num_copied, None
        if num_copied:
            return num_copied, None
        return 0, Outcome.ABSENT if self._hierarchy.lookup(window[:1]).miss else Outcome.TIMEOUT

    async def _bring(self, window: Sequence[ChainHash]) -> Lease | None:
        """Lease the blocks in L2, after loading them if needed. None if requests hold all that may be held."""
        # Not linked to the block before it, which L2 may hold: its chain could not make room for the window then.
        deadline = time.monotonic() + _PATIENCE
        is_over = Event()
        taken: list[Lease] = []

        def work() -> Lease | None:
            lease = bring(self._hierarchy, window, UNKNOWN, deadline, cancelled=is_over.is_set)
            if lease is not None:
                taken.append(lease)
                if is_over.is_set():
                    lease.release()
            return lease

        try:
            return await asyncio.to_thread(work)
        except asyncio.CancelledError:
            is_over.set()
            for lease in taken:  # nobody takes it any more; releasing twice is harmless
                lease.release()
            raise

    def _encode(self, lease: Lease) -> list[bytes | memoryview]:
        """Entry and payload of each block, up to the first whose bytes do not match their checksum."""
        pieces: list[bytes | memoryview] = []
        for number, slot in enumerate(lease.slots, self._num_blocks):
            record, payload = self._host.records[slot], self._host.region.slot(slot)
            if record is None or checksum(payload) != record.checksum:
                break
            entry = archive_format.encode_entry(self._header, number, record)
            if self._cipher is not None:
                entry, payload = self._cipher.seal(number, entry, record.chain_hash, payload)
            self._digest.update(entry)
            self._digest.update(payload)
            pieces += [entry, payload]
        return pieces

    async def _write(self, pieces: Sequence[bytes | memoryview]) -> None:
        await self._file.write(pieces)
        self._num_bytes += sum(map(len, pieces))
        if self._num_bytes - self._num_synced >= _SYNC_BYTES:
            self._num_synced = self._num_bytes
            await self._file.sync()


class Import:
    """One import under way: batches of an archive's records, verified, into L2 and from there down."""

    def __init__(self, hierarchy: Hierarchy, header: Header, encoded: bytes, key: bytes | None) -> None:
        self.parser = Parser(header, encoded, key)
        self.batch = max(1, min(hierarchy.host.pool.num_slots // _SHARE, _BATCH_BYTES // header.record_bytes))
        self.num_blocks = 0  # blocks that some tier holds
        self._hierarchy = hierarchy
        self._pool = hierarchy.host.pool
        self._epoch = hierarchy.epoch
        self._num_planned = header.num_blocks
        self._num_bytes = HEADER_BYTES
        self._lost: Counter[str] = Counter()
        self._lost_names: set[ChainHash] = set()

    def progress(self) -> ArchiveProgress:
        return ArchiveProgress(self.num_blocks, self._num_planned, self._num_bytes, dict(self._lost))

    def store(self, data: memoryview) -> tuple[list[ChainHash], FormatError | None]:
        """Verify the archive's next bytes, and store their blocks in L2. Returns their names, and the error after them.

        Runs to its end on its own thread: a slot must not be given back while a copy into it runs.
        """
        runs: list[list[tuple[BlockRecord, memoryview]]] = []
        problem = None
        try:
            for record, payload in self.parser.blocks(data):
                if not runs or record.parent != runs[-1][-1][0].chain_hash:
                    runs.append([])
                runs[-1].append((record, payload))
        except FormatError as error:
            problem = error
        for run in runs:
            self._store_run([record for record, _ in run], [payload for _, payload in run])
        return [record.chain_hash for run in runs for record, _ in run], problem

    def _store_run(self, records: Sequence[BlockRecord], payloads: Sequence[memoryview]) -> None:
        hashes = [record.chain_hash for record in records]
        if records[0].parent in self._lost_names:
            self._lose(hashes, Outcome.PARENT_FAILED)
            return
        # If there are lower tiers, batches are not linked in L2: a chain may be longer than L2.
        reservation = self._reserve(hashes, None if self._hierarchy.ports else records[0].parent)
        if reservation is not None and reservation.hashes:  # otherwise the blocks are held already
            for slot, i in zip(reservation.slots, reservation.indices, strict=True):
                self._hierarchy.host.region.slot(slot)[:] = payloads[i]
            self._hierarchy.seal(reservation, [records[i] for i in reservation.indices], self._epoch)

    def _reserve(self, hashes: Sequence[ChainHash], parent: ChainHash | None) -> Reservation | None:
        """Slots for as many leading blocks as fit. Reserved from the pool directly: an import needs no admission."""
        count, reservation = len(hashes), None
        while count and (reservation := self._pool.reserve(hashes[:count], parent)) is None:
            count //= 2
        self._lose(hashes[count:], Outcome.NO_SLOT)
        return reservation

    async def settle(self, hashes: Sequence[ChainHash], num_bytes: int) -> None:
        """Wait, up to a deadline, until a batch has reached its tier; count it, and free L2 for others."""
        self._num_bytes += num_bytes
        deadline = time.monotonic() + _SETTLE
        while not self._settled(hashes) and time.monotonic() < deadline:
            await asyncio.sleep(_LOOK)
        if self._hierarchy.settings.write_policy == "write_back" and self._hierarchy.ports:
            await asyncio.to_thread(self._hierarchy.drain, _SETTLE)
        if self._hierarchy.epoch != self._epoch:
            raise KVTierError("import: the tiers were reset meanwhile, and imported blocks were dropped; start again")
        names = [name for name in hashes if name not in self._lost_names]
        held = _held_anywhere(self._hierarchy, names)
        self.num_blocks += sum(held)
        self._lose([name for name, is_held in zip(names, held, strict=True) if not is_held], Outcome.EVICTED)
        if self._pool.counts().free < self.batch:
            deadline = time.monotonic() + _LEAVE
            while not self._left(names) and time.monotonic() < deadline:
                await asyncio.sleep(_LOOK)
            _give_back(self._hierarchy, names)

    async def recount(self) -> None:
        """Count what is held now: later blocks may have evicted earlier ones."""
        stored = [name for name in self.parser.names if name not in self._lost_names]
        self.num_blocks = 0
        for first in range(0, len(stored), _RECOUNT):
            held = _held_anywhere(self._hierarchy, stored[first : first + _RECOUNT])
            self.num_blocks += sum(held)
            self._lost.update([Outcome.EVICTED] * held.count(False))
            await asyncio.sleep(0)

    def _settled(self, hashes: Sequence[ChainHash]) -> bool:
        """Whether no write of a batch is under way, as far as can be known."""
        names = [name for name in hashes if name not in self._lost_names]
        write_back = self._hierarchy.settings.write_policy == "write_back"
        below = [port for port in self._hierarchy.ports if port.writable and not write_back]
        if all(_held_anywhere(self._hierarchy, names)) and all(all(port.holds(names)) for port in below):
            return True
        # Sealing first: a block is found in L2 shortly before it is offered to the tiers below.
        return self._hierarchy.drain(0, below=False) and all(port.queue.idle for port in below)

    def _left(self, names: Sequence[ChainHash]) -> bool:
        """Evict a batch from L2 if a lower tier holds it. False while one of its blocks is in use.

        A write of the block may still read its slot. If the slot were reused now, the write would store another block's
        bytes.
        """
        return all(self._pool.evict_idle(_held_below(self._hierarchy, names)[::-1]))

    def _lose(self, hashes: Sequence[ChainHash], reason: Outcome) -> None:
        if hashes:
            self._lost[reason] += len(hashes)
            self._lost_names.update(hashes)
            self._hierarchy.metrics.dropped(L2, reason, len(hashes))


def _held_anywhere(hierarchy: Hierarchy, hashes: Sequence[ChainHash]) -> list[bool]:
    return [any(where) for where in zip(*_held_by(hierarchy, hashes), strict=True)]


def _held_by(hierarchy: Hierarchy, hashes: Sequence[ChainHash]) -> list[list[bool]]:
    """Which of the blocks each tier holds, L2 first."""
    return [hierarchy.host.pool.holds(hashes), *(port.holds(hashes) for port in hierarchy.ports)]


def _held_below(hierarchy: Hierarchy, hashes: Sequence[ChainHash]) -> list[ChainHash]:
    _, *below = _held_by(hierarchy, hashes)
    return [name for name, *where in zip(hashes, *below, strict=True) if any(where)]


def _give_back(hierarchy: Hierarchy, hashes: Sequence[ChainHash]) -> None:
    """Evict from L2 the blocks that a lower tier holds."""
    hierarchy.host.pool.evict(_held_below(hierarchy, hashes))
