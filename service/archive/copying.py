"""Blocks on their way from the tiers into an archive and back, a bounded window of L2 at a time."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import xxhash

from kvtier.service import archive_format
from kvtier.service.archive_format import HEADER_BYTES, Header, Parser
from kvtier.service.loop_file import LoopFile
from kvtier.tiers.checksum import checksum
from kvtier.tiers.errors import FormatError, KVTierError
from kvtier.tiers.hierarchy import Hierarchy
from kvtier.tiers.inventory import Run
from kvtier.tiers.pool import Lease, Reservation
from kvtier.tiers.prefetch import Pending
from kvtier.tiers.tier import BlockRecord, ChainHash, Outcome

UNKNOWN: Final = bytes(32)  # stands for a parent that is not known; no block's name

_SHARE: Final = 8  # of L2 at most this part is taken at a time for blocks that were not in it
_WINDOW_BYTES: Final = 32 << 20  # an export's piece: several reads of the slab in flight
_BATCH_BYTES: Final = 4 << 20  # an import's piece: what is hashed and copied at one go
_SYNC_BYTES: Final = 256 << 20  # written between syncs: the last one must not take for ever
_LOOK: Final = 0.002  # seconds between looks at what is under way
_PATIENCE: Final = 30.0  # seconds an export asks again while waiting requests hold all that may be held
_SETTLE: Final = 5.0  # seconds an import waits for a piece to be written below
_LEAVE: Final = 1.0  # seconds it then waits for whoever still reads it
_RECOUNT: Final = 4096  # blocks looked up at a time


@dataclass(frozen=True, slots=True)
class Progress:
    """How far an export or import has come. The last one sums it up."""

    num_blocks: int  # in the archive, or held by the tiers, so far
    num_planned: int  # blocks there are to copy
    num_bytes: int  # of the file, written or read so far
    lost: Mapping[str, int]  # blocks that could not be copied, by reason (an `Outcome`)


class Export:
    """One export under way: windows of blocks through L2 into the file."""

    def __init__(self, hierarchy: Hierarchy, header: Header, file: LoopFile) -> None:
        self._hierarchy = hierarchy
        self._host = hierarchy.host
        self._header = header
        self._file = file
        self._window = max(1, min(self._host.pool.num_slots // _SHARE, _WINDOW_BYTES // header.slot_bytes))
        self._digest = xxhash.xxh3_128()
        self._num_blocks = self._num_bytes = self._num_synced = 0
        self._lost: Counter[str] = Counter()
        self._lost_names: set[ChainHash] = set()
        self._corrupt: set[ChainHash] = set()  # found so in L2, and asked of the tiers below

    def progress(self) -> Progress:
        """How far it has come."""
        return Progress(self._num_blocks, self._header.num_blocks, self._num_bytes, dict(self._lost))

    async def begin(self) -> None:
        """Write the header."""
        encoded = archive_format.encode_header(self._header)
        self._digest.update(encoded)
        await self._write([encoded])

    async def run(self, run: Run) -> AsyncIterator[Progress]:
        """Copy a run's blocks, up to the first that cannot be had: nobody could reach those behind it."""
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
        """Write the trailer; what was written is on the disk then, and the file closed."""
        await self._write([archive_format.encode_trailer(self._num_blocks, self._digest.digest())])
        await self._file.sync()
        await self._file.close()

    async def _copy(self, window: Sequence[ChainHash]) -> tuple[int, Outcome | None]:
        """Copy leading blocks: how many, and why it makes no sense to go on, if so."""
        was_held = self._host.pool.holds(window)
        lease = await self._claim(window)
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
            self._hierarchy.metrics.corrupted("l2", 1)
            if corrupt[0] in self._corrupt:
                return num_copied, Outcome.CHECKSUM
            self._corrupt.update(corrupt)
            return num_copied, None
        if num_copied:
            return num_copied, None
        return 0, Outcome.ABSENT if self._hierarchy.lookup(window[:1]).miss else Outcome.TIMEOUT

    async def _claim(self, window: Sequence[ChainHash]) -> Lease | None:
        """The blocks in L2, fetched where need be; None where others hold all that waiting requests may hold."""
        deadline = time.monotonic() + _PATIENCE
        while True:
            # Not linked to the block before it, which L2 may hold: its chain could not make room for the window then.
            claim = self._hierarchy.prefetch(window, UNKNOWN)
            try:
                while isinstance(self._hierarchy.poll(claim), Pending):
                    await asyncio.sleep(_LOOK)
                if not claim.refused:
                    return self._hierarchy.claim(claim)
            finally:
                self._hierarchy.cancel(claim)  # claimed, it has nothing left to give up
            if time.monotonic() >= deadline:
                return None
            await asyncio.sleep(_LOOK)

    def _encode(self, lease: Lease) -> list[bytes | memoryview]:
        """Entry and payload of each block, up to the first whose bytes are not those that were sealed."""
        pieces: list[bytes | memoryview] = []
        for number, slot in enumerate(lease.slots.tolist(), self._num_blocks):
            record, payload = self._host.records[slot], self._host.region.slot(slot)
            if record is None or checksum(payload) != record.checksum:
                break
            entry = archive_format.encode_entry(self._header, number, record)
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

    def __init__(self, hierarchy: Hierarchy, header: Header, encoded: bytes) -> None:
        self.parser = Parser(header, encoded)
        self.batch = max(1, min(hierarchy.host.pool.num_slots // _SHARE, _BATCH_BYTES // header.record_bytes))
        self.num_blocks = 0  # that some tier holds
        self._hierarchy = hierarchy
        self._pool = hierarchy.host.pool
        self._epoch = hierarchy.epoch
        self._num_planned = header.num_blocks
        self._num_bytes = HEADER_BYTES
        self._lost: Counter[str] = Counter()
        self._lost_names: set[ChainHash] = set()

    def progress(self) -> Progress:
        """How far it has come."""
        return Progress(self.num_blocks, self._num_planned, self._num_bytes, dict(self._lost))

    def store(self, data: memoryview) -> tuple[list[ChainHash], FormatError | None]:
        """Verify the archive's next bytes, and hand their blocks to L2: their names, and what is wrong behind them.

        Runs to its end on a thread of its own: a slot must not be given back while somebody still copies into it.
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
        # Over lower tiers L2 is a passage, and batches are not linked there: a chain may be longer than L2.
        reservation = self._reserve(hashes, None if self._hierarchy.ports else records[0].parent)
        if reservation is not None and reservation.hashes:  # without: held already
            for slot, i in zip(reservation.slots.tolist(), reservation.indices, strict=True):
                self._hierarchy.host.region.slot(slot)[:] = payloads[i]
            self._hierarchy.seal(reservation, [records[i] for i in reservation.indices], self._epoch)

    def _reserve(self, hashes: Sequence[ChainHash], parent: ChainHash | None) -> Reservation | None:
        """Slots for as many of the head as fit. Asked of the pool: what is imported needs no admission."""
        count, reservation = len(hashes), None
        while count and (reservation := self._pool.reserve(hashes[:count], parent)) is None:
            count //= 2
        self._lose(hashes[count:], Outcome.NO_SLOT)
        return reservation

    async def settle(self, hashes: Sequence[ChainHash], num_bytes: int) -> None:
        """Wait until a batch is where it will stay, within a deadline; count it, and leave L2 room for others."""
        self._num_bytes += num_bytes
        deadline = time.monotonic() + _SETTLE
        while not self._settled(hashes) and time.monotonic() < deadline:
            await asyncio.sleep(_LOOK)
        if self._hierarchy.settings.write_policy == "write_back" and self._hierarchy.ports:
            await asyncio.to_thread(self._hierarchy.drain, _SETTLE)
        if self._hierarchy.epoch != self._epoch:
            raise KVTierError("import: the tiers were reset meanwhile; what was imported is forgotten, start again")
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
        """Count what is held now: what came later may have taken the place of what came first."""
        stored = [name for name in self.parser.names if name not in self._lost_names]
        self.num_blocks = 0
        for first in range(0, len(stored), _RECOUNT):
            held = _held_anywhere(self._hierarchy, stored[first : first + _RECOUNT])
            self.num_blocks += sum(held)
            self._lost.update([Outcome.EVICTED] * held.count(False))
            await asyncio.sleep(0)

    def _settled(self, hashes: Sequence[ChainHash]) -> bool:
        """Whether nothing of a batch is still on its way, as far as can be told."""
        names = [name for name in hashes if name not in self._lost_names]
        write_back = self._hierarchy.settings.write_policy == "write_back"
        below = [port for port in self._hierarchy.ports if port.writable and not write_back]
        if all(_held_anywhere(self._hierarchy, names)) and all(all(port.holds(names)) for port in below):
            return True
        # Sealing first: a block is found in L2 shortly before it is offered to the tiers below.
        return self._hierarchy.drain(0, below=False) and all(port.queue.idle for port in below)

    def _left(self, names: Sequence[ChainHash]) -> bool:
        """Take a batch out of L2 where a tier below holds it; False while one of its blocks is in use.

        The write that made a tier hold it may be on its way out: its slot, taken meanwhile, would be another's block.
        """
        return all(self._pool.evict_idle(_held_below(self._hierarchy, names)[::-1]))

    def _lose(self, hashes: Sequence[ChainHash], reason: Outcome) -> None:
        if hashes:
            self._lost[reason] += len(hashes)
            self._lost_names.update(hashes)
            self._hierarchy.metrics.dropped("l2", reason, len(hashes))


def _held_anywhere(hierarchy: Hierarchy, hashes: Sequence[ChainHash]) -> list[bool]:
    """Which of the blocks some tier holds."""
    return [any(where) for where in zip(*_held_by(hierarchy, hashes), strict=True)]


def _held_by(hierarchy: Hierarchy, hashes: Sequence[ChainHash]) -> list[list[bool]]:
    """Which of the blocks each tier holds, L2 first."""
    return [hierarchy.host.pool.holds(hashes), *(port.holds(hashes) for port in hierarchy.ports)]


def _held_below(hierarchy: Hierarchy, hashes: Sequence[ChainHash]) -> list[ChainHash]:
    """Those of the blocks that a tier below L2 holds."""
    _, *below = _held_by(hierarchy, hashes)
    return [name for name, *where in zip(hashes, *below, strict=True) if any(where)]


def _give_back(hierarchy: Hierarchy, hashes: Sequence[ChainHash]) -> None:
    """Take blocks out of L2 again, those that a tier below holds."""
    hierarchy.host.pool.evict(_held_below(hierarchy, hashes))
