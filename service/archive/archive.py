"""Archive files of blocks: their format, exports and imports, while the hierarchy goes on serving."""

import asyncio
import contextlib
import os
import struct
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Final

import xxhash

from kvtier import tiers
from kvtier.service.web import LoopFile
from kvtier.tiers import BlockRecord, ChainHash, Encryption, FingerprintMismatch, FormatError, Outcome, checksum
from kvtier.tiers.hierarchy import HeldRun, Hierarchy, held_runs, load_and_lease
from kvtier.tiers.naming import PROBE_BYTES, KVProbe
from kvtier.tiers.pool import Lease, Reservation

MAGIC: Final = b"KVTARCHV"
VERSION: Final = 1
ENCRYPTED: Final = 1  # added to the version: records are encrypted
PROBED: Final = 2  # added to it: the model's KV probe is behind the header
HEADER_BYTES: Final = 128
TRAILER_BYTES: Final = 40

_HEADER: Final = struct.Struct("<8sII32sQI4xQ16s16s16x")
_ENTRY: Final = struct.Struct("<4sIQQ32s32sQ")
_TRAILER: Final = struct.Struct("<4s4xQ16s")
_CHECKSUM: Final = struct.Struct("<Q")
_BLOCK: Final = b"BLCK"
_SEALED: Final = b"SEAL"
_END: Final = b"DONE"


@dataclass(frozen=True, slots=True)
class Header:
    fingerprint: bytes  # 32 bytes
    slot_bytes: int  # bytes of a block's payload
    block_size: int  # most tokens of a block
    num_blocks: int  # planned blocks; the archive has fewer if some were lost during the export
    encryption: Encryption | None = None  # None: blocks are not encrypted
    probe: bytes = b""  # a packed `KVProbe` of the model whose KV it is; empty: not known

    @property
    def version(self) -> int:
        return VERSION + (ENCRYPTED if self.encryption else 0) + (PROBED if self.probe else 0)

    @property
    def entry_bytes(self) -> int:
        plain = _ENTRY.size + 4 * self.block_size + _CHECKSUM.size
        return plain + (len(_SEALED) + 2 * tiers.STAMP_BYTES if self.encryption else 0)

    @property
    def record_bytes(self) -> int:
        return self.entry_bytes + self.slot_bytes


def encode_header(header: Header) -> bytes:
    lock = header.encryption or Encryption(b"", b"")
    probe = header.probe.ljust(PROBE_BYTES if header.probe else 0, b"\0")
    sizes = HEADER_BYTES + len(probe), header.fingerprint, header.slot_bytes, header.block_size, header.num_blocks
    return _summed(_HEADER.pack(MAGIC, header.version, *sizes, lock.key_id, lock.salt)) + probe


def header_bytes_of(data: bytes | bytearray) -> int:
    """Bytes of the header that begins with these HEADER_BYTES."""
    version = int.from_bytes(data[len(MAGIC) : len(MAGIC) + 4], "little")
    return HEADER_BYTES + (PROBE_BYTES if version in (VERSION + PROBED, VERSION + PROBED + ENCRYPTED) else 0)


def decode_header(data: bytes) -> Header:
    """Decode what `encode_header` wrote. Raises FormatError for anything else."""
    if data[: len(MAGIC)] != MAGIC:
        raise FormatError("not a kvtier archive")
    if len(data) < HEADER_BYTES:
        raise FormatError(f"breaks off in its header, after {len(data)} bytes")
    _, version, header_bytes, fingerprint, slot_bytes, block_size, num_blocks, *lock = _HEADER.unpack_from(data)
    newest = VERSION + ENCRYPTED + PROBED
    if not VERSION <= version <= newest:
        known = f"{VERSION} to {newest}"
        raise FormatError(f"an archive of version {version}, but this kvtier reads {known}; export it again")
    if not _is_whole(data[:HEADER_BYTES]) or header_bytes != header_bytes_of(data):
        raise FormatError("its header is damaged")
    probe = data[HEADER_BYTES:header_bytes]
    if probe:
        probe = KVProbe.unpack(probe).packed()
    elif header_bytes > HEADER_BYTES:
        raise FormatError("breaks off in its header")
    encryption = Encryption(*lock) if version - VERSION & ENCRYPTED else None
    return Header(fingerprint, slot_bytes, block_size, num_blocks, encryption, probe)


def encode_entry(header: Header, number: int, record: BlockRecord) -> bytes:
    num_tokens = len(record.tokens) // 4
    block = record.chain_hash, record.parent, record.checksum
    fixed = _ENTRY.pack(_BLOCK, num_tokens, number, header.slot_bytes, *block)
    return _summed(fixed + record.tokens.ljust(4 * header.block_size, b"\0"))


def encode_trailer(num_blocks: int, digest: bytes) -> bytes:
    return _summed(_TRAILER.pack(_END, num_blocks, digest))


class ArchiveCipher:
    def __init__(self, header: Header, key: bytes) -> None:
        assert header.encryption is not None
        belongs_to = header.fingerprint + header.encryption.salt
        self._entries = tiers.RecordCipher(key, b"archive-entry" + belongs_to)
        self._payloads = tiers.RecordCipher(key, b"archive-payload" + belongs_to)

    def seal(self, number: int, entry: bytes, chain_hash: ChainHash, payload: memoryview) -> tuple[bytes, memoryview]:
        """The encrypted entry of block `number`, and its encrypted payload. `entry` is `encode_entry`'s result."""
        hidden = memoryview(bytearray(len(payload)))
        stamp = self._payloads.encrypt_into(payload, chain_hash, hidden)
        return _SEALED + self._entries.seal(entry, _CHECKSUM.pack(number)) + stamp, hidden

    def open(self, number: int, sealed: memoryview) -> bytes | None:
        if bytes(sealed[: len(_SEALED)]) != _SEALED:
            return None
        return self._entries.open(sealed[len(_SEALED) : -tiers.STAMP_BYTES], _CHECKSUM.pack(number))

    def show(self, sealed: memoryview, chain_hash: ChainHash, payload: memoryview) -> bool:
        return self._payloads.decrypt_into(payload, bytes(sealed[-tiers.STAMP_BYTES :]), chain_hash, payload)


class Parser:
    """Reads the records after the header, in any pieces: yields verified blocks, or raises FormatError."""

    def __init__(self, header: Header, encoded: bytes, key: bytes | None = None) -> None:
        """`encoded` is the header as it is in the file. An encrypted archive needs `key`."""
        self.header = header
        self._cipher = ArchiveCipher(header, key) if header.encryption and key is not None else None
        self.names: dict[ChainHash, None] = {}  # names of the blocks so far, in order
        self.ended = False  # the trailer was read and is valid
        self._starts: set[ChainHash] = set()  # parents that were not in this archive when they were named
        self._digest = xxhash.xxh3_128(encoded)

    @property
    def num_blocks(self) -> int:
        return len(self.names)

    def blocks(self, data: memoryview) -> Iterator[tuple[BlockRecord, memoryview]]:
        """Verified blocks in the next bytes: whole records, decrypted in place. FormatError for others."""
        entry_bytes, record_bytes = self.header.entry_bytes, self.header.record_bytes
        at = 0
        while at < len(data):
            if self.ended:
                raise FormatError("bytes follow behind its end")
            if bytes(data[at : at + len(_END)]) == _END:
                self._end(data[at : at + TRAILER_BYTES])
                at += TRAILER_BYTES
                continue
            bytes_of_record = data[at : at + record_bytes]
            if len(bytes_of_record) < record_bytes:
                raise self.broken_off()
            self._digest.update(bytes_of_record)
            payload = bytes_of_record[entry_bytes:]
            record = self._opened(bytes_of_record[:entry_bytes], payload)
            if record is None or checksum(payload) != record.checksum:
                raise FormatError(f"block {self.num_blocks} is damaged")
            self._place(record)
            yield record, payload
            at += record_bytes

    def broken_off(self) -> FormatError:
        return FormatError(f"breaks off after {self.num_blocks} whole blocks of {self.header.num_blocks}")

    def _opened(self, head: memoryview, payload: memoryview) -> BlockRecord | None:
        if self._cipher is None:
            return self._entry(head)
        entry = self._cipher.open(self.num_blocks, head)
        if entry is None:
            return None
        record = self._entry(memoryview(entry))
        return record if self._cipher.show(head, record.chain_hash, payload) else None

    def _entry(self, entry: memoryview) -> BlockRecord:
        tag, num_tokens, number, payload_bytes, chain_hash, parent, payload_checksum = _ENTRY.unpack_from(entry)
        if not (
            _is_whole(entry)
            and tag == _BLOCK
            and number == self.num_blocks
            and payload_bytes == self.header.slot_bytes
            and num_tokens <= self.header.block_size
        ):
            raise FormatError(f"block {self.num_blocks} is damaged")
        tokens = bytes(entry[_ENTRY.size : _ENTRY.size + 4 * num_tokens])
        return BlockRecord(chain_hash, parent, tokens, payload_checksum)

    def _place(self, record: BlockRecord) -> None:
        """Add a block. Each must come once, and after its parent if the archive has that."""
        if record.chain_hash in self.names or record.chain_hash in self._starts:
            raise FormatError(f"block {self.num_blocks} comes twice, or after its child")
        if record.parent not in self.names:
            self._starts.add(record.parent)
        self.names[record.chain_hash] = None

    def _end(self, trailer: memoryview) -> None:
        if len(trailer) < TRAILER_BYTES:
            raise self.broken_off()
        _, num_blocks, digest = _TRAILER.unpack_from(trailer)
        if not _is_whole(trailer) or num_blocks != self.num_blocks or digest != self._digest.digest():
            raise FormatError(f"its end does not match the {self.num_blocks} blocks before it")
        self.ended = True


def _summed(data: bytes) -> bytes:
    return data + _CHECKSUM.pack(checksum(memoryview(data)))


def _is_whole(data: bytes | memoryview) -> bool:
    view = memoryview(data)
    return bool(_CHECKSUM.unpack(view[-8:])[0] == checksum(view[:-8]))


# --- copies between tiers and file -----------------------------------------------------------------------------------

UNKNOWN: Final = bytes(32)  # stands for an unknown parent; no block has this name

_SHARE: Final = 8  # at most 1/8 of L2 is taken at a time for blocks that were not in it
_WINDOW_BYTES: Final = 32 << 20  # bytes of an export's window: several reads of the slab in flight
_BATCH_BYTES: Final = 4 << 20  # bytes of an import's batch: hashed and copied in one go
_SYNC_BYTES: Final = 256 << 20  # bytes written between syncs, so that the last sync is short
_LOOK: Final = 0.002  # seconds between polls of operations under way
_PATIENCE: Final = 30.0  # seconds an export waits for a window, also while other requests hold all slots they may
_SETTLE: Final = 5.0  # seconds an import waits for a batch to be written below
_LEAVE: Final = 1.0  # seconds it then waits for readers of that batch
_RECOUNT: Final = 4096  # blocks looked up at a time


@dataclass(frozen=True, slots=True)
class ArchiveProgress:
    num_blocks: int  # blocks in the archive, or held by the tiers, so far
    num_planned: int  # blocks there are to copy
    num_bytes: int  # bytes of the file written or read so far
    lost: Mapping[str, int]  # blocks that could not be copied, by reason (an `Outcome`)


class Export:
    def __init__(self, hierarchy: Hierarchy, header: Header, file: LoopFile, key: bytes | None) -> None:
        self._cipher = ArchiveCipher(header, key) if key is not None else None
        self._hierarchy = hierarchy
        self._host = hierarchy.host
        self._header, self._file = header, file
        self._window = max(1, min(self._host.pool.num_slots // _SHARE, _WINDOW_BYTES // header.slot_bytes))
        self._digest = xxhash.xxh3_128()
        self._num_blocks = self._num_bytes = self._num_synced = 0
        self._lost: Counter[str] = Counter()
        self._lost_names: set[ChainHash] = set()
        self._corrupt: set[ChainHash] = set()  # found corrupt in L2, and read again from lower tiers

    def progress(self) -> ArchiveProgress:
        return ArchiveProgress(self._num_blocks, self._header.num_blocks, self._num_bytes, dict(self._lost))

    async def begin(self) -> None:
        encoded = encode_header(self._header)
        self._digest.update(encoded)
        await self._write([encoded])

    async def run(self, run: HeldRun) -> AsyncIterator[ArchiveProgress]:
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
        await self._write([encode_trailer(self._num_blocks, self._digest.digest())])
        await self._file.sync()
        await self._file.close()

    async def _copy(self, window: Sequence[ChainHash]) -> tuple[int, Outcome | None]:
        """Copy leading blocks. Returns how many, and the reason if the run must end."""
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
            self._hierarchy.metrics.corrupted(tiers.L2, 1)
            if corrupt[0] in self._corrupt:
                return num_copied, Outcome.CHECKSUM
            self._corrupt.update(corrupt)
            return num_copied, None
        if num_copied:
            return num_copied, None
        return 0, Outcome.ABSENT if self._hierarchy.lookup(window[:1]).miss else Outcome.TIMEOUT

    async def _bring(self, window: Sequence[ChainHash]) -> Lease | None:
        """Lease the blocks in L2, after loading them if needed. None if requests hold all slots they may."""
        # Not linked to the block before it, which L2 may hold: its chain could not make room for the window then.
        deadline = time.monotonic() + _PATIENCE
        is_over = Event()
        taken: list[Lease] = []

        def work() -> Lease | None:
            lease = load_and_lease(self._hierarchy, window, UNKNOWN, deadline, cancelled=is_over.is_set)
            if lease is not None:
                taken.append(lease)
                if is_over.is_set():
                    lease.release()
            return lease

        try:
            return await asyncio.to_thread(work)
        except asyncio.CancelledError:
            is_over.set()
            for lease in taken:  # the caller has left; releasing twice is harmless
                lease.release()
            raise

    def _encode(self, lease: Lease) -> list[bytes | memoryview]:
        """Entry and payload of each block, up to the first whose bytes do not match their checksum."""
        pieces: list[bytes | memoryview] = []
        for number, slot in enumerate(lease.slots, self._num_blocks):
            record, payload = self._host.records[slot], self._host.region.slot(slot)
            if record is None or checksum(payload) != record.checksum:
                break
            entry = encode_entry(self._header, number, record)
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
        """Verify the archive's next bytes, and store their blocks: names, and the error after them. On a thread."""
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
            raise tiers.KVTierError(
                "import: the tiers were reset meanwhile, and imported blocks were dropped; start again"
            )
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
        stored = [name for name in self.parser.names if name not in self._lost_names]
        self.num_blocks = 0
        for first in range(0, len(stored), _RECOUNT):
            held = _held_anywhere(self._hierarchy, stored[first : first + _RECOUNT])
            self.num_blocks += sum(held)
            self._lost.update([Outcome.EVICTED] * held.count(False))
            await asyncio.sleep(0)

    def _settled(self, hashes: Sequence[ChainHash]) -> bool:
        names = [name for name in hashes if name not in self._lost_names]
        write_back = self._hierarchy.settings.write_policy == "write_back"
        below = [port for port in self._hierarchy.ports if port.writable and not write_back]
        if all(_held_anywhere(self._hierarchy, names)) and all(all(port.holds(names)) for port in below):
            return True
        # Sealing first: a block is found in L2 shortly before it is offered to the tiers below.
        return self._hierarchy.drain(0, below=False) and all(port.queue.idle for port in below)

    def _left(self, names: Sequence[ChainHash]) -> bool:
        """Evict a batch from L2 if a lower tier holds it. False while a write may still read one of its slots."""
        return all(self._pool.evict_idle(_held_below(self._hierarchy, names)[::-1]))

    def _lose(self, hashes: Sequence[ChainHash], reason: Outcome) -> None:
        if hashes:
            self._lost[reason] += len(hashes)
            self._lost_names.update(hashes)
            self._hierarchy.metrics.dropped(tiers.L2, reason, len(hashes))


def _held_anywhere(hierarchy: Hierarchy, hashes: Sequence[ChainHash]) -> list[bool]:
    return [any(where) for where in zip(*_held_by(hierarchy, hashes), strict=True)]


def _held_by(hierarchy: Hierarchy, hashes: Sequence[ChainHash]) -> list[list[bool]]:
    return [hierarchy.host.pool.holds(hashes), *(port.holds(hashes) for port in hierarchy.ports)]


def _held_below(hierarchy: Hierarchy, hashes: Sequence[ChainHash]) -> list[ChainHash]:
    _, *below = _held_by(hierarchy, hashes)
    return [name for name, *where in zip(hashes, *below, strict=True) if any(where)]


def _give_back(hierarchy: Hierarchy, hashes: Sequence[ChainHash]) -> None:
    hierarchy.host.pool.evict(_held_below(hierarchy, hashes))


# --- exports and imports ---------------------------------------------------------------------------------------------

__all__ = ["ArchiveProgress", "export_blocks", "import_blocks"]


async def export_blocks(
    hierarchy: Hierarchy,
    fingerprint: bytes,
    block_size: int,
    path: Path,
    hashes: Sequence[ChainHash] | None = None,
    *,
    force: bool = False,
    key: bytes | None = None,
    probe: KVProbe | None = None,
) -> AsyncGenerator[ArchiveProgress, None]:
    """Write all blocks of L2 and of tiers that can list theirs to `path`, or one prompt's only (`hashes`, head first).

    `block_size` is the namespace's, in tokens. With `key` (32 bytes) the archive is encrypted. `probe` is that of the
    model, for the import to compare. Blocks stored meanwhile
    are left out. If a block is evicted meanwhile, it and those after it in its chain are lost. The file is written as
    `path`.part, and renamed at the end. The export takes at most an eighth of L2, and gives it back. To leave it early,
    call `aclose` (`contextlib.aclosing`); the hierarchy must stay open until then.

    Raises ConfigError if the file exists (without `force`) or cannot be created. Raises KVTierError if it cannot be
    written; then no file is left.
    """
    if len(fingerprint) != 32 or any(len(name) != 32 for name in hashes or ()):
        raise ValueError(f"fingerprint of {len(fingerprint)} bytes, or a chain hash: must be 32")
    if hashes is not None and len(set(hashes)) < len(hashes):
        raise ValueError("a chain hash is given twice")
    path = Path(path)
    await _require_vacant(path, force)
    part = path.with_name(path.name + ".part")
    file = await LoopFile.create(part)
    published = False
    try:
        if hashes is None:
            runs = await asyncio.to_thread(held_runs, hierarchy)
        else:
            runs = [HeldRun(UNKNOWN, list(hashes))]
        encryption = Encryption.fresh(key) if key is not None else None
        num_blocks = sum(len(run.hashes) for run in runs)
        packed = b"" if probe is None else probe.packed()
        header = Header(fingerprint, hierarchy.host.region.slot_bytes, block_size, num_blocks, encryption, packed)
        export = Export(hierarchy, header, file, key)
        await export.begin()
        for run in runs:
            async for progress in export.run(run):
                yield progress
        await export.end()
        await _require_vacant(path, force)
        await asyncio.to_thread(_publish, part, path)
        published = True
        yield export.progress()
    except OSError as error:
        raise tiers.KVTierError(f"{path}: {error.strerror}") from error
    finally:
        with contextlib.suppress(tiers.KVTierError):
            await file.close()
        if not published:
            part.unlink(missing_ok=True)


async def import_blocks(
    hierarchy: Hierarchy,
    fingerprint: bytes,
    block_size: int,
    path: Path,
    key: bytes | None = None,
    *,
    unsealed: bool = False,
    require_alike: Callable[[bytes], object] | None = None,
) -> AsyncGenerator[ArchiveProgress, None]:
    """Store every block of an archive as if it had been computed now. Each is verified before it can be found.

    With `key` an archive that is not encrypted by it is refused, unless `unsealed`: its origin is unknown.
    `require_alike` gets the archive's KV probe, if it has one, and raises KVMismatch if the model here computes other
    KV. To leave
    the import early, call `aclose`; the hierarchy must stay open until then. However it ends, blocks stored so far are
    whole and stay.

    Raises FingerprintMismatch for another model or block size, and ConfigError for another key. Raises FormatError if
    the file is not an archive, damaged or cut short, and KVTierError if it cannot be read or the tiers were reset.
    """
    path = Path(path)
    file = await LoopFile.open(path)
    work = None
    try:
        encoded = bytearray(HEADER_BYTES)
        encoded = encoded[: await file.read_into(memoryview(encoded))]
        more = bytearray(header_bytes_of(encoded) - HEADER_BYTES)
        encoded += more[: await file.read_into(memoryview(more))]
        header = decode_header(bytes(encoded))
        _require_same(header, Header(fingerprint, hierarchy.host.region.slot_bytes, block_size, 0))
        _require_key(header, key, path, unsealed=unsealed)
        if header.probe and require_alike is not None:
            await asyncio.to_thread(require_alike, header.probe)
        work = Import(hierarchy, header, bytes(encoded), key)
        buffer = memoryview(bytearray(work.batch * header.record_bytes))
        while True:
            num_read = await file.read_into(buffer)
            hashes, problem = await asyncio.to_thread(work.store, buffer[:num_read])
            await work.settle(hashes, num_read)
            yield work.progress()
            if problem is not None:
                raise problem
            if num_read < len(buffer):
                break
        if not work.parser.ended:
            raise work.parser.broken_off()
        await work.recount()
        yield work.progress()
    except FormatError as error:
        num_blocks = work.num_blocks if work is not None else 0
        raise FormatError(f"{path}: {error}; {num_blocks} blocks were imported and stay") from None
    except FingerprintMismatch as error:
        raise FingerprintMismatch(f"{path}: {error}") from None
    finally:
        await file.close()


def _publish(part: Path, path: Path) -> None:
    part.rename(path)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


async def _require_vacant(path: Path, force: bool) -> None:
    if not force and await asyncio.to_thread(os.path.lexists, path):
        raise tiers.ConfigError(f"{path}: exists already; choose another name, or overwrite it with --force")


def _require_key(header: Header, key: bytes | None, path: Path, *, unsealed: bool) -> None:
    if header.encryption is None and key is not None and not unsealed:
        raise tiers.ConfigError(
            f"{path}: not encrypted, and [file] key_file is set: its origin is unknown; import it by --unsealed"
        )
    if header.encryption is None or (key is not None and tiers.key_id(key) == header.encryption.key_id):
        return
    there = header.encryption.key_id.hex()
    why = f"encrypted with key {there}, and no [file] key_file is set"
    if key is not None:
        why = f"encrypted with key {there}, [file] key_file holds {tiers.key_id(key).hex()}"
    raise tiers.ConfigError(f"{path}: {why}; set the key it was exported with")


def _require_same(archive: Header, own: Header) -> None:
    if archive.fingerprint != own.fingerprint:
        raise FingerprintMismatch(
            f"an archive of model {archive.fingerprint.hex()}, not of {own.fingerprint.hex()}; "
            "import it on a daemon that serves that model"
        )
    if (archive.slot_bytes, archive.block_size) != (own.slot_bytes, own.block_size):
        raise FingerprintMismatch(
            f"its blocks have {archive.block_size} tokens and {archive.slot_bytes} bytes, "
            f"but here they have {own.block_size} and {own.slot_bytes}; export it again"
        )
