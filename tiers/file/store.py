"""L3 on a local disk: one slab of verified blocks that survives the process (format: docs/format.md)."""

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from kvtier.tiers import (
    BlockRecord,
    ChainHash,
    ChildBlock,
    ConfigError,
    Direction,
    Encryption,
    LastRoom,
    Lineage,
    Outcome,
    StoragePlace,
    Tier,
    TierUnavailable,
    require_buffers,
    require_records,
    require_space,
)
from kvtier.tiers.config import show_size
from kvtier.tiers.file import slab
from kvtier.tiers.file.extents import ExtentMap, Owner
from kvtier.tiers.file.file_io import FileIO, GroupSync, Mode, PayloadIO, probe_mode, write_all
from kvtier.tiers.file.slab import Codec, Superblock, codec_of, verified
from kvtier.tiers.file.slab_file import (
    SlabFile,
    blank_slots,
    cut,
    is_ours,
    is_removed,
    open_slab,
    read_shrink_request,
    release,
    request_shrink,
    write_owner,
)
from kvtier.tiers.file.slab_rows import SlabRows
from kvtier.tiers.file.slab_writer import SlabGrowth, SlabWriter
from kvtier.tiers.naming import PROBE_BYTES
from kvtier.tiers.pool import EvictionLog, make_child_index
from kvtier.tiers.reuse import ClassifiedEnd

_log = logging.getLogger(__name__)
_CHECK_SECONDS: Final = 0.2  # between two checks for a request to shrink
_RETRY_SECONDS: Final = 5.0  # from a cut that the disk refused to the next try
_STOP_SECONDS: Final = 1.0
_QUIET_SECONDS: Final = 10.0  # for calls under way to end; with a hung disk the next check tries again
_FIRST_LOOK: Final = 4  # names of a lookup found at once; twice as many while all are found
_MOST_LOOKED: Final = 2048
_LOOK: Final = 2.0  # seconds between two checks whether the path still names the slab
_SECTOR: Final = 512  # bytes; what `stat` counts a file's blocks in
_FEWEST: Final = 4  # extents of a tenant that has a bound: with two writers, fewer are often all being written
_PIECE: Final = 1 << 16  # slots whose blocks are listed under the lock at a time


class Calls:
    """Counts the calls inside an open store. Its file is released when it is closed and the last of them has ended.

    A descriptor closed under a call could be another file's by the time the call uses it. Thread-safe.
    """

    def __init__(self, release: Callable[[], None]) -> None:
        self._release = release
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._round = 0  # `quiet` waits for the calls of earlier rounds
        self._inside: dict[int, int] = {}
        self._closed = False

    @contextmanager
    def enter(self) -> Iterator[bool]:
        """Whether the store is open; its file then stays open until the block ends."""
        number = self.begin()
        try:
            yield number is not None
        finally:
            if number is not None:
                self.end(number)

    def begin(self) -> int | None:
        """A call begins. Returns the round it is counted in, for `end`. None: the store is closed."""
        with self._lock:
            if self._closed:
                return None
            self._inside[self._round] = self._inside.get(self._round, 0) + 1
            return self._round

    def end(self, number: int) -> None:
        """The call has ended."""
        with self._lock:
            left = self._inside[number] - 1
            if left:
                self._inside[number] = left
            else:
                del self._inside[number]
                self._changed.notify_all()
            is_last = self._closed and not self._inside
        if is_last:
            self._release()

    def close(self) -> None:
        """Refuse new calls. Idempotent."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
            is_last = not self._inside
        if is_last:
            self._release()

    def quiet(self, timeout: float) -> bool:
        """Wait until all calls but the caller's have ended. False: it took `timeout` seconds, or the store closed."""
        with self._changed:
            self._round += 1
            number = self._round
            self._changed.wait_for(lambda: self._closed or min(self._inside, default=number) >= number, timeout)
            return not self._closed and min(self._inside, default=number) >= number


class SlabShrinker:
    """Shrinks the slab when another process requests it, on a thread of its own.

    First the blocks in the part to be cut are forgotten, then every call under way ends. Then its rows are blanked,
    the superblock is rewritten and the file is cut. A kill at any moment leaves the slab whole, at its old size or its
    new one. `lock` guards `blocks`.
    """

    def __init__(self, io: FileIO, file: SlabFile, blocks: ExtentMap, lock: threading.Lock, calls: Calls) -> None:
        self._io = io
        self._file = file
        self._blocks = blocks
        self._lock = lock
        self._calls = calls
        self._uncut: Superblock | None = None  # the file's superblock, if the disk refused to cut it
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._look, name="kvtier-file-tail", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Check no more; call it after `Calls.close`. Waits a moment for a cut under way, idempotent."""
        self._stopped.set()
        self._thread.join(_STOP_SECONDS)

    def _look(self) -> None:
        pause = _CHECK_SECONDS
        while not self._stopped.wait(pause):
            pause = _CHECK_SECONDS
            try:
                with self._calls.enter() as is_open:
                    requested = read_shrink_request(self._file.fd) if is_open else 0
                if requested or self._uncut:
                    self.shrink(requested or self._file.superblock.file_bytes)
            except OSError as error:
                pause = _RETRY_SECONDS
                _log.warning("[file] %s: %s while shrinking", self._file.path, error)

    def shrink(self, num_bytes: int) -> bool:
        """Shrink the slab to `num_bytes`, at least one extent. False, and no change: a call under way did not end.

        OSError if the disk refuses: then the cut-off part is out of use, and removed by the next call or opening.
        """
        superblock = self._file.superblock
        least = superblock.payload_offsets[0] + superblock.extent_bytes
        target = max(num_bytes, least)
        num_extents = superblock.resized(target).num_extents
        num_lost = 0
        if num_extents < superblock.num_extents:
            with self._lock:
                num_lost = self._blocks.retire(num_extents)
            if not self._calls.quiet(_QUIET_SECONDS):
                with self._lock:
                    self._blocks.revive(num_extents)
                return False
        with self._calls.enter() as is_open:
            if is_open:
                self._cut(target, num_lost)
                request_shrink(self._io, self._file.fd, 0)
        return True

    def _cut(self, num_bytes: int, num_lost: int) -> None:
        file = self._file
        with file.rewriting:
            old = file.superblock
            resized = old.resized(num_bytes)
            if resized.num_slots < old.num_slots:
                self._uncut = self._uncut or old
                with self._lock:
                    self._blocks.shorten(resized.num_extents)
                    file.superblock = resized
                _log.warning(
                    "[file] %s: cut down from %s to %s for another model's slab, %d blocks were dropped",
                    file.path,
                    show_size(old.file_bytes),
                    show_size(resized.file_bytes),
                    num_lost,
                )
            if self._uncut:
                cut(self._io, replace(file, superblock=self._uncut), file.superblock)
                self._uncut = None


class FileStore(Tier):
    """A `Tier` over one slab file. Thread-safe; several I/O threads may read and write at once.

    A block is findable from the moment its entry is written until its extent is evicted. Names and parents are in
    memory: a lookup costs no I/O. A read reads the entries, then one call per run of adjacent slots, and verifies both.
    One lock guards the arrays and is never held across I/O. A read notices afterwards that its block was evicted.
    """

    def __init__(
        self, io: FileIO, file: SlabFile, payload: PayloadIO, codec: Codec, *, durable: bool, partial_blocks: bool
    ) -> None:
        """Recover an open slab's index by one pass over its table. Use `FileStore.open`; raises OSError."""
        self.path = file.path
        self.num_recovered = 0
        self._io = io
        self._file = file
        self._payload = payload
        self._codec = codec
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._warn_at = 0.0  # when corrupt blocks are logged again
        self._look_at, self._removed = 0.0, False  # whether the path is another file's; written on I/O threads
        self._calls = Calls(self._release)
        self._inside = self._calls.enter
        num_extents = file.superblock.num_extents
        self.eviction_log: EvictionLog = EvictionLog("file", file.superblock.num_slots // 2, num_extents)
        self._blocks = ExtentMap(num_extents, file.superblock.slots_per_extent, self.eviction_log)
        self.change_feed: SlabRows = SlabRows(io, file, codec, self._blocks, self._lock, self._inside)
        self._rows = self.change_feed
        if partial_blocks:
            self._rows.child_index = make_child_index(file.superblock.num_slots)
        sync = GroupSync(lambda: io.sync(file.fd)) if durable else None
        self._growth = SlabGrowth(io, file)
        self._writer = SlabWriter(io, file, payload, self._blocks, self._rows, self._lock, codec, self._growth, sync)
        self._shrinker = SlabShrinker(io, file, self._blocks, self._lock, self._calls)
        self._recover()
        self._storage = LastRoom(self._room, self._room())

    @classmethod
    def open(
        cls,
        directory: Path,
        fingerprint: bytes,
        *,
        slot_bytes: int,
        block_size: int,
        size: int,
        mode: Mode = "auto",
        durable: bool = False,
        key: bytes | None = None,
        partial_blocks: bool = True,
        io: FileIO | None = None,
    ) -> "FileStore":
        """Open or create the slab of `fingerprint` (32 bytes) in `directory`, whose slabs take at most `size` bytes.

        With `key` (32 bytes, `cipher.load_key`) all blocks are sealed. Without `partial_blocks` no block's children
        are known. The directory is created if need be. Raises ConfigError if the size cannot be had or the slab needs
        another key; StoreLocked, FormatError and FingerprintMismatch; and TierUnavailable for other file errors.
        """
        require_space(fingerprint, slot_bytes, block_size)
        encryption = Encryption.fresh(key) if key is not None else None
        wanted = slab.plan(fingerprint, slot_bytes, block_size, size, encryption)
        if not wanted.segments:
            least = slab.smallest(slot_bytes, block_size, encryption)
            raise ConfigError(f'[file] size "{size}": too small for one block; use at least {least} bytes')
        directory, io = Path(directory), io or FileIO()
        file = open_slab(io, directory, wanted, size)
        try:
            with ExitStack() as undo:
                undo.callback(release, io, file)
                chosen = probe_mode(io, directory) if mode == "auto" else mode
                payload = PayloadIO(io, file.path, file.fd, slot_bytes=slot_bytes, mode=chosen)
                undo.callback(payload.close)
                codec = codec_of(file.superblock, key, str(file.path))
                store = cls(io, file, payload, codec, durable=durable, partial_blocks=partial_blocks)
                undo.pop_all()
                store._shrinker.start()
                return store
        except OSError as error:
            raise TierUnavailable(f"[file] path {str(directory)!r}: {error}; the file tier is off") from error

    @property
    def superblock(self) -> slab.Superblock:
        """The slab's superblock: it is replaced when the slab is reset or shrinks."""
        return self._file.superblock

    def _recover(self) -> None:
        """Index every valid row; of two rows for one block the one with the highest seq."""
        losers = self._rows.recover()
        slots = self._blocks.index.named()
        self._growth.found(np.unique(slots // self.superblock.slots_per_extent).tolist())
        newest = int(self._rows.seqs[slots].max()) if len(slots) else 0
        self._writer.next_seq = max(newest + 1, self.superblock.min_seq)
        self.num_recovered = len(slots)
        blank_slots(self._io, self._file.fd, self.superblock, losers)

    # Lookup: the index alone.

    def lookup(self, hashes: Sequence[ChainHash]) -> int:
        first, size = 0, _FIRST_LOOK
        while first < len(hashes):
            with self._lock:
                found = self._blocks.index.find_each(list(hashes[first : first + size]))
            if -1 in found:
                return first + found.index(-1)
            first, size = first + size, min(2 * size, _MOST_LOOKED)
        return len(hashes)

    def holds(self, hashes: Sequence[ChainHash]) -> list[bool]:
        with self._lock:
            return [slot >= 0 for slot in self._blocks.index.find_each(list(hashes))]

    def lineage(self) -> Lineage:
        index, names, parents = self._blocks.index, [], []
        for first in range(0, index.num_slots, _PIECE):
            with self._lock:
                slots = index.named(first, min(first + _PIECE, index.num_slots))
                names.append(index.words(slots))
                parents.append(self._rows.parents.take(slots, 0))
        return Lineage(np.concatenate(names), np.concatenate(parents))

    def ended(self, end: ClassifiedEnd) -> None:
        """Passed on to the eviction order of extents."""
        blocks = self._blocks
        with self._lock:
            blocks.room.ended(end, blocks.index.find_each(list(end.names)), blocks.live)

    def children(self, parent: ChainHash, limit: int, start: bytes = b"") -> list[ChildBlock]:
        """A child whose entry left the page cache is left out, and its read starts. Does not wait for the disk."""
        rows, first_word = self._rows, int.from_bytes(parent[:8], "little")
        known = rows.child_index.find(parent) if rows.child_index is not None else []
        likely = [slot for slot in known if rows.parents.item(slot, 0) == first_word]  # a hint: no lock
        if not likely or (visit := self._calls.begin()) is None:
            return []
        try:
            with self._lock:
                are_held = self._blocks.index.holds(np.array(likely, np.int64)).tolist()
            held = [slot for slot, is_held in zip(likely, are_held, strict=True) if is_held]
            records = rows.peek(held) if held else []
        finally:
            self._calls.end(visit)
        found = [each for each in records if each is not None and each.parent == parent and each.tokens]
        return [ChildBlock(each.chain_hash, each.tokens) for each in found if each.tokens.startswith(start)][:limit]

    def room(self) -> Sequence[StoragePlace]:
        return self._storage.latest()

    def used_by(self, tenant: ChainHash) -> int:
        with self._lock:
            return self._blocks.live_of(tenant) * self.superblock.stride

    def read(self, hashes: Sequence[ChainHash], into: Sequence[memoryview]) -> list[BlockRecord | Outcome]:
        """Entries, then payloads with many in flight, each verified when it is read; bad blocks are dropped."""
        require_buffers(len(hashes), into, self._file.superblock.slot_bytes)
        if (visit := self._calls.begin()) is None:
            return [Outcome.CLOSED] * len(hashes)
        try:
            with self._lock:
                slots, generations = self._blocks.find_each(list(hashes))
            found: list[BlockRecord | Outcome] = [Outcome.ABSENT if slot < 0 else Outcome.IO_ERROR for slot in slots]
            positions = [i for i, slot in enumerate(slots) if slot >= 0]
            if len(positions) > 1:
                positions.sort(key=slots.__getitem__)
            if positions and not self._codec.hides_payloads:  # in the extension module
                held, names = [slots[i] for i in positions], [hashes[i] for i in positions]
                fd, layout, buffers = self._file.fd, self._file.superblock.layout, [into[i] for i in positions]
                records = self._payload.read_blocks(fd, layout, held, names, buffers)
                if records is not None:
                    for position, record in zip(positions, records, strict=True):
                        found[position] = record or Outcome.IO_ERROR
                    positions = [i for i in positions if found[i] is Outcome.IO_ERROR]
            if positions:
                self._read_held(positions, slots, hashes, into, found)
            self._record_results(hashes, slots, generations, found)
            return found
        finally:
            self._calls.end(visit)

    def _read_held(
        self,
        positions: list[int],
        slots: list[int],
        hashes: Sequence[ChainHash],
        into: Sequence[memoryview],
        found: list[BlockRecord | Outcome],
    ) -> None:
        """Put each block's result at its position; positions are in the order of their slots."""
        superblock, held = self._file.superblock, [slots[position] for position in positions]
        entries, buffers = self._rows.entries(held), [into[position] for position in positions]
        offsets = [superblock.payload_offset(slot) for slot in held]
        came = self._payload.read_slots(superblock.layout, held, offsets, buffers)
        for position, entry, is_there, buffer in zip(positions, entries, came, buffers, strict=True):
            if isinstance(entry, Outcome):
                found[position] = entry
            elif is_there:
                found[position] = verified(self._codec, entry, hashes[position], buffer)

    def _record_results(
        self,
        hashes: Sequence[ChainHash],
        slots: list[int],
        generations: list[int],
        found: list[BlockRecord | Outcome],
    ) -> None:
        """Mark hits; forget bad blocks unless evicted meanwhile, and blocks that a working disk cannot read."""
        bad, lost, num_whole, answers = list[ChainHash](), list[ChainHash](), 0, False
        with self._lock:
            are_current = self._blocks.still_hold(slots, generations)
            for position, (slot, is_current) in enumerate(zip(slots, are_current, strict=True)):
                result = found[position]
                if isinstance(result, BlockRecord):
                    num_whole += 1
                    if is_current:
                        self._blocks.hits[slot] = 1
                elif result is Outcome.IO_ERROR:
                    lost.append(hashes[position])
                elif result is not Outcome.ABSENT:
                    answers = True
                    if is_current:
                        bad.append(hashes[position])
                    else:
                        found[position] = Outcome.EVICTED
            self._counts["read_ok"] += num_whole
            if num_whole < len(found):
                self._counts.update(f"read_{result}" for result in found if isinstance(result, Outcome))
        answers = answers or num_whole > 0
        if bad and (now := time.monotonic()) >= self._warn_at:  # clients cause reads: at most one line a second
            self._warn_at = now + 1.0
            _log.warning("[file] %s: dropped %d corrupt blocks, first %s", self.path, len(bad), bad[0].hex())
        if bad or (lost and answers):
            self._writer.discard(bad, Outcome.CHECKSUM)
            if answers:
                self._writer.discard(lost, Outcome.IO_ERROR)

    # Writing and forgetting.

    def write(self, records: Sequence[BlockRecord], payloads: Sequence[memoryview]) -> list[Outcome]:
        """As `Tier.write`. After a failure the rest of the chain, which cannot be reached, is PARENT_FAILED or FULL."""
        superblock = self._file.superblock
        require_records(records, payloads, superblock.slot_bytes, superblock.block_size)
        if (visit := self._calls.begin()) is None:
            return [Outcome.CLOSED] * len(records)
        try:
            is_lost = self._is_removed()
            bound = None if self.bounds is None or not records else self.bounds(records[0].chain_hash)
            owner = (
                None if bound is None else Owner(bound.tenant, max(_FEWEST, bound.num_bytes // superblock.extent_bytes))
            )
            outcomes = [Outcome.IO_ERROR] * len(records) if is_lost else self._writer.write(records, payloads, owner)
            with self._lock:
                self._counts.update(f"write_{outcome}" for outcome in outcomes)
        finally:
            self._calls.end(visit)
        return outcomes

    def _is_removed(self) -> bool:
        """Whether the slab was removed from outside, so that blocks written there would be lost.

        The path is checked now and then, as a disk may be slow. The breaker's next probe opens the tier anew.
        """
        if not self._removed:
            by_path = (at := time.monotonic()) >= self._look_at
            self._look_at = at + _LOOK if by_path else self._look_at
            with self._file.rewriting:
                has_name = os.fstat(self._file.fd).st_nlink > 0
            self._removed = not has_name or (by_path and is_removed(self._file))
            if self._removed:
                _log.warning("[file] %s: it was removed or replaced; a new one is made", self.path)
        return self._removed

    def discard(self, hashes: Sequence[ChainHash]) -> None:
        with self._inside() as is_open:
            if is_open:
                self._writer.discard(hashes)

    def reset(self) -> None:
        with self._inside() as is_open:
            if is_open:
                self._writer.reset()

    def kv_probe(self) -> bytes | None:
        try:
            packed = os.pread(self._file.fd, PROBE_BYTES, slab.KV_PROBE_OFFSET)
        except OSError as error:
            raise TierUnavailable(f"[file] {self.path}: {error}; the file tier is off") from error
        return packed if any(packed) else None

    def keep_kv_probe(self, packed: bytes) -> None:
        """Stored beside the superblock's copy."""
        try:
            if self.kv_probe() is None:
                write_all(self._io, self._file.fd, [memoryview(packed)], slab.KV_PROBE_OFFSET)
        except OSError as error:
            raise TierUnavailable(f"[file] {self.path}: {error}; the file tier is off") from error

    def stats(self) -> Mapping[str, int]:
        """Counts since open: read_{outcome}, write_{outcome}, evicted, recovered, queue_refused; slots by state now."""
        with self._lock:
            slots = {f"slots_{state}": count for state, count in self._blocks.counts().items()}
            counts = {**self._counts, **slots, "evicted": self._blocks.num_evicted}
        counts |= {"recovered": self.num_recovered, "queue_refused": self._payload.num_refused}
        return {**counts, "slots": self.superblock.num_slots}

    def _room(self) -> list[StoragePlace]:
        """The slab's file system, as `df` counts it, and the slab's own bytes. Waits for the disk."""
        with suppress(OSError):
            disk, taken = os.statvfs(self.path.parent), os.stat(self.path).st_blocks * _SECTOR
            used = (disk.f_blocks - disk.f_bfree) * disk.f_frsize
            return [
                StoragePlace(str(self.path.parent), used, used + disk.f_bavail * disk.f_frsize),
                StoragePlace(str(self.path), taken, self.superblock.file_bytes, is_own=True),
            ]
        return []

    def check(self) -> None:
        with self._lock:
            self._blocks.check()
            self._rows.check()
            counts = self._blocks.counts()
            assert min(counts.values()) >= 0, f"slot counts: {counts}"

    def probe(self, direction: Direction) -> bool:
        """Whether the disk works in that direction, and the path still names our slab."""
        with self._inside() as is_open:
            if not is_open:
                return False
            try:
                with self._file.rewriting:
                    if not is_ours(self._io, self._file):
                        return False
                if direction == "read":
                    self._payload.read(
                        self.superblock.payload_offset(0), [memoryview(bytearray(self._payload.slot_bytes))]
                    )
                else:
                    write_owner(self._io, self._file.fd, os.getpid())
                    self._io.sync(self._file.fd)
            except OSError as error:
                _log.debug("[file] %s: %s while probing", self.path, error)
                return False
        return True

    def close(self) -> None:
        """Refuse new calls; file and lock are released once the last call under way has ended. Idempotent."""
        self._calls.close()
        self._shrinker.stop()

    def _release(self) -> None:
        try:
            self._payload.close()
        except OSError as error:
            _log.warning("[file] %s: %s while closing", self.path, error)
        release(self._io, self._file)
