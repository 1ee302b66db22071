"""L2: one region of host memory cut into slots, pre-faulted and pinned in the background, and their records."""

import contextlib
import fcntl
import logging
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from struct import Struct
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvtier.tiers import BlockRecord, ChainHash, ChildBlock, ConfigError, Lineage, checksum, cut_off_in_children
from kvtier.tiers.compiled import extension
from kvtier.tiers.config import format_size, show_size
from kvtier.tiers.host import memory
from kvtier.tiers.host.limits import Limits, limits
from kvtier.tiers.host.pinning import PinDriver, PinnedPieces, cuda_driver
from kvtier.tiers.pool import MAX_CHILDREN, SlotPool, make_child_index

logger = logging.getLogger(__name__)

_PREFAULT_PIECE: Final = 4 << 20  # bytes per madvise, in a ms or a few: close() and the engine's own mmap wait for it
_LARGEST_BLOCK: Final = 256  # tokens, unless the caller gives a number
# Memory that a device may still write to: mapped and pinned until the process ends.
_KEPT: Final[list[tuple[object, ...]]] = []
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

# A row of `BlockRecords`.
_HASH_BYTES: Final = 32
_HEAD: Final = Struct("<32sQII")  # parent, checksum, the slot's generation, lengths: 48 bytes
_HEAD_ROW: Final = np.dtype([("parent", "V32"), ("checksum", "<u8"), ("generation", "<u4"), ("lengths", "<u4")])
_GENERATION: Final = (1 << 32) - 1  # the low half of a generation: it does not repeat during one read
_NAME: Final = Struct(f"{_HASH_BYTES}s")
_SIZE_BITS: Final = 26  # of the lengths: bytes of tokens; above them the parent's, as that of none is b""


class HostRegion:
    """`num_slots` slots of `slot_bytes` in one mapping, each starting on a 4 KiB boundary; none in a forked child.

    Private ones are anonymous with huge pages advised; shared ones a memfd sealed in size, so that no process can make
    another fault.
    """

    def __init__(self, mapping: mmap.mmap, num_slots: int, slot_bytes: int, fd: int | None) -> None:
        """Take a mapping over; use `allocate` or `attach`."""
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self.slot_stride = slot_stride(slot_bytes)
        self.fd = fd
        # Names the region across processes: the shared file's inode, 0 for a private region.
        self.region_id = 0 if fd is None else os.fstat(fd).st_ino
        self._mapping = mapping
        self._view = memoryview(mapping)
        flat = np.frombuffer(mapping, np.uint8, num_slots * self.slot_stride)
        self.array: NDArray[np.uint8] = flat.reshape(num_slots, self.slot_stride)
        self.pinning: PinnedPieces | None = None  # the slots that a device may copy asynchronously
        self._checksums: Callable[..., list[int]] | None = memory.compiled("checksums")
        self._huge_pages = False
        self._kept = False
        self._closing = threading.Event()
        self._prefault_thread: threading.Thread | None = None
        cut_off_in_children(self)

    @classmethod
    def allocate(
        cls, num_slots: int, slot_bytes: int, *, shared: bool = False, huge_pages: bool = True, prefault: bool = True
    ) -> "HostRegion":
        """Map slots of 4 KiB pages (`slot_stride`), pre-faulted in a thread. ConfigError if memory is too small."""
        if num_slots < 1 or slot_bytes < 1:
            raise ConfigError(f"[host] size holds {num_slots} slots of {slot_bytes} bytes: raise it to a block or more")
        size = num_slots * slot_stride(slot_bytes)
        if size > (found := limits()).available:
            raise _too_large(size, found)
        fd = _create_memfd(size) if shared else None
        try:
            region = cls(_map(size, fd, huge_pages), num_slots, slot_bytes, fd)
        except OSError as error:
            if fd is not None:
                os.close(fd)
            raise _too_large(size, limits()) from error
        region._huge_pages = huge_pages
        if huge_pages:
            memory.advise_huge_pages(region.address, size)
        if not shared:
            memory.advise_no_fork(region.address, size)
        if prefault:
            region._prefault_thread = threading.Thread(target=region._prefault, name="kvtier-prefault", daemon=True)
            region._prefault_thread.start()
        return region

    @classmethod
    def attach(cls, fd: int, num_slots: int, slot_bytes: int) -> "HostRegion":
        """Map another process's region; `fd` stays the caller's. ConfigError if not sealed, or of another size."""
        size, actual = num_slots * slot_stride(slot_bytes), os.fstat(fd).st_size
        if actual != size or fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            needed = f"{num_slots} slots of {slot_bytes} bytes need a sealed {size}"
            raise ConfigError(f"shared region of {actual} bytes: {needed}")
        return cls(_map(size, fd, huge_pages=False), num_slots, slot_bytes, os.dup(fd))

    @property
    def address(self) -> int:
        """Where slot 0 starts in this process."""
        return int(self.array.ctypes.data)

    def slot(self, index: int) -> memoryview:
        """The writable bytes of one slot, exactly `slot_bytes` long. IndexError outside the region."""
        if not 0 <= index < self.num_slots:
            raise IndexError(f"slot {index}: the region has {self.num_slots}")
        start = index * self.slot_stride
        return self._view[start : start + self.slot_bytes]

    def checksums(self, slots: Sequence[int]) -> list[int]:
        """The checksum of each slot's bytes now. IndexError outside the region."""
        if slots and not 0 <= min(slots) <= max(slots) < self.num_slots:
            raise IndexError(f"slots {min(slots)}..{max(slots)}: the region has {self.num_slots}")
        if self._checksums is not None:
            return self._checksums(self.array, np.array(slots, np.int64), self.slot_bytes)
        return [checksum(self.slot(slot)) for slot in slots]

    def pin(self, device: int, driver: PinDriver | None = None) -> None:
        """Have the region pinned for a CUDA device, in the background (`pinning`). Idempotent; needs a driver."""
        driver = driver or cuda_driver()
        if self.pinning is None and driver is not None:
            self.pinning = PinnedPieces(self, driver, device)

    @property
    def pinned(self) -> bool:
        """Whether all of it is pinned by now."""
        return self.pinning is not None and self.pinning.num_bytes == self.array.nbytes

    def is_pinned(self, slots: NDArray[np.int64]) -> bool:
        """Whether a device may copy from and to all of these slots asynchronously."""
        return self.pinning is not None and self.pinning.cover(slots)

    def pinned_soon(self, slots: NDArray[np.int64], timeout: float) -> bool:
        """As `is_pinned`, but these slots are pinned before all others, and waited for up to `timeout` seconds."""
        return self.pinning is not None and self.pinning.cover_soon(slots, timeout)

    def wait_prefaulted(self, timeout: float | None = None) -> bool:
        """Wait until every page was faulted in or the attempt ended; False if `timeout` seconds passed first."""
        if self._prefault_thread is None:
            return True
        self._prefault_thread.join(timeout)
        return not self._prefault_thread.is_alive()

    def keep(self) -> None:
        """A device may still write here: `close` leaves the memory mapped and pinned."""
        self._kept = True

    def close(self, *, for_all: bool = False) -> None:
        """Unpin and unmap; idempotent. Memory that a slot's view still shows is unmapped with the last such view.

        `for_all`: no process copies from or to it: its memory is free though others still map it.
        """
        if for_all and self.num_slots and not self._kept:
            memory.free_everywhere(self.address, self.array.nbytes)
        self._closing.set()
        self.wait_prefaulted(None)
        if self._kept:
            if self.pinning is not None:
                self.pinning.stop()
            _KEPT.append((self._mapping, self._view, self.array, self.pinning))
        elif self.pinning is not None:
            self.pinning.close()
        self.pinning = None
        self.array = np.empty((0, self.slot_stride), np.uint8)
        self.num_slots = 0
        if not self._kept:
            with contextlib.suppress(BufferError):
                self._view.release()
                self._mapping.close()
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None

    def forked(self) -> None:
        """In a child its copies fail for want of slots, and later mappings do not lie where the region ends."""
        if self.num_slots:
            memory.fence_off(self.address, len(self._mapping), is_mapped=self.fd is not None)
        self.array, self.num_slots = np.empty((0, self.slot_stride), np.uint8), 0

    def _prefault(self) -> None:
        """Thread: fault the region in, piece by piece, without the GIL."""
        start, size = self.address, self.array.nbytes
        collapses = self.fd is not None and self._huge_pages
        for offset in range(0, size, _PREFAULT_PIECE):
            if self._closing.is_set():
                return
            try:
                collapses = collapses and memory.collapse(start + offset, min(_PREFAULT_PIECE, size - offset))
                memory.populate(start + offset, min(_PREFAULT_PIECE, size - offset))
            except OSError as error:
                logger.warning(
                    "[host] pre-fault stopped at %s: %s; first copies will be slower", show_size(offset), error
                )
                return


class BlockRecords:
    """The record of the block in each slot besides its bytes, in one array: no Python object a block. It takes no lock.

    A row is 48 bytes and 4 for each token a block may have. Names are in the pool's index alone. A row has the
    generation of its slot: once the slot is taken again, the row is invalid. A row is packed and unpacked by one call
    that keeps the GIL. So a reader beside a writer sees a whole row, of the block before or of the new one. The memory
    is the kernel's zeros until it is written.
    """

    def __init__(self, names: memoryview, generations: memoryview, block_size: int) -> None:
        """A pool's `names` (32 bytes a slot), `generations` (int64, raised before naming); tokens of a block."""
        self.block_size = block_size
        self._num_slots = len(names) // _HASH_BYTES
        self._names, self._generations = names, generations
        self._row = Struct(f"{_HEAD.format}{4 * block_size}s")
        self._array = np.zeros(self._num_slots * self._row.size, np.uint8)
        self._rows = memoryview(self._array)
        module = extension("kvtier.tiers.host.records_compiled") if sys.byteorder == "little" else None
        self._packs: Callable[..., int] | None = None if module is None else module.put_columns

    def __len__(self) -> int:
        return self._num_slots

    @property
    def num_bytes(self) -> int:
        """Memory it takes once every slot was described."""
        return self._array.nbytes

    def __getitem__(self, slot: int) -> BlockRecord | None:
        """The record of the block that the slot holds or held last; None if it was not described. IndexError."""
        if not 0 <= slot < self._num_slots:
            raise IndexError(f"slot {slot}: there are {self._num_slots}")
        parent, checksum, generation, lengths, tokens = self._row.unpack_from(self._rows, slot * self._row.size)
        [name] = _NAME.unpack_from(self._names, slot * _HASH_BYTES)
        if not generation or generation != self._generations[slot] & _GENERATION:  # read last: the name is of this one
            return None
        size = lengths & ((1 << _SIZE_BITS) - 1)
        return BlockRecord(name, parent[: lengths >> _SIZE_BITS], tokens[:size], checksum)

    def __setitem__(self, slot: int, record: BlockRecord) -> None:
        self.put_columns([slot], [record.chain_hash], [record.parent], [record.tokens], [record.checksum])

    def __iter__(self) -> Iterator[BlockRecord | None]:
        return map(self.__getitem__, range(self._num_slots))

    def put_columns(
        self,
        slots: Sequence[int],
        chain_hashes: Sequence[ChainHash],
        parents: Sequence[ChainHash],
        tokens: Sequence[bytes],
        checksums: Sequence[int],
    ) -> None:
        """Describe taken and named slots. ValueError for a record that is another block's, or that fits no row."""
        if self._packs is not None:
            lists = [each if isinstance(each, list) else [*each] for each in (chain_hashes, parents, tokens, checksums)]
            if self._packs(self._rows, self._names, self._generations, [*slots], *lists) == len(slots):
                return  # else the loop below finds the error
        pack, rows, stride, width = self._row.pack_into, self._rows, self._row.size, 4 * self.block_size
        names, generations, name_at = self._names, self._generations, _NAME.unpack_from
        columns = zip(slots, chain_hashes, parents, tokens, checksums, strict=True)
        for slot, chain_hash, parent, block_tokens, sum_of_payload in columns:
            if len(block_tokens) > width or len(parent) > _HASH_BYTES:
                raise ValueError(
                    f"a parent of {len(parent)} bytes and {len(block_tokens) // 4} tokens: a name has {_HASH_BYTES}, "
                    f"a block here at most {self.block_size}"
                )
            if name_at(names, slot * _HASH_BYTES)[0] != chain_hash:
                raise ValueError(f"chain_hash: slot {slot} is named for another block")
            lengths = len(parent) << _SIZE_BITS | len(block_tokens)
            pack(rows, slot * stride, parent, sum_of_payload, generations[slot] & _GENERATION, lengths, block_tokens)

    def lineage(self, slots: NDArray[np.int64]) -> Lineage:
        """Names and parents of the blocks in these slots, if they were described and have a parent."""
        rows = self._array.reshape(self._num_slots, self._row.size)[slots, : _HEAD.size]
        heads = np.ascontiguousarray(rows).view(_HEAD_ROW).reshape(-1)
        now = np.frombuffer(self._generations, np.int64)[slots] & _GENERATION
        names = np.frombuffer(self._names, np.uint64).reshape(-1, 4)[slots]
        known = (heads["generation"] == now) & (now != 0) & (heads["lengths"] >> _SIZE_BITS == _HASH_BYTES)
        parents = np.ascontiguousarray(heads["parent"][known])
        return Lineage(names[known], parents.view(np.uint64).reshape(-1, 4))

    def children(
        self, slots: Sequence[int], parent: ChainHash, start: bytes, is_ready: Callable[[int], bool]
    ) -> list[ChildBlock]:
        """The blocks in these slots that are ready, have this parent and begin with these tokens."""
        found: list[ChildBlock] = []
        rows, stride, most = self._rows, self._row.size, len(parent)
        tokens, end = _HEAD.size, _HEAD.size + len(start)
        for slot in slots:
            at = slot * stride
            if rows[at : at + most] != parent or rows[at + tokens : at + end] != start:  # quick, and no proof
                continue
            record = self[slot]  # may be of a block that was evicted, or is not sealed yet
            if record is not None and record.parent == parent and record.tokens.startswith(start) and is_ready(slot):
                found.append(ChildBlock(record.chain_hash, record.tokens))
        return found


class HostTier:
    """L2: the region's bytes, the pool that names its slots, and the record of the block in each slot."""

    def __init__(
        self,
        region: HostRegion,
        *,
        block_size: int = _LARGEST_BLOCK,
        policy: str = "lru",
        verify: bool = False,
        partial_blocks: bool = True,
    ) -> None:
        """Take the region over; `policy` is the pool's. `verify`: blocks are hashed before they are promised.

        `block_size`: tokens in a block at most. Without `partial_blocks` no block's children are known.
        """
        self.verify = verify
        self.region = region
        self.pool = SlotPool(region.num_slots, policy=policy)
        self.records = BlockRecords(*self.pool.naming, block_size)
        self._child_index = make_child_index(region.num_slots) if partial_blocks else None
        self._indexing = threading.Lock()  # held while blocks are added there; lookups take none

    def describe(self, places: list[int], records: Sequence[BlockRecord]) -> None:
        """Store the records of filled slots, just before they are sealed. ValueError as `BlockRecords.put_columns`."""
        names, parents = [each.chain_hash for each in records], [each.parent for each in records]
        self.describe_each(
            places, names, parents, [each.tokens for each in records], [each.checksum for each in records]
        )

    def describe_each(
        self,
        places: list[int],
        names: Sequence[ChainHash],
        parents: Sequence[ChainHash],
        tokens: Sequence[bytes],
        checksums: Sequence[int],
    ) -> None:
        """As `describe`, from columns instead of records."""
        self.records.put_columns(places, names, parents, tokens, checksums)
        if self._child_index is not None and len(places):
            with self._indexing:
                self._child_index.enter([*parents], places)

    def children(self, parent: ChainHash, limit: int, start: bytes = b"") -> list[ChildBlock]:
        """Up to `limit` held blocks of this parent that begin with these tokens, each once; some may be left out."""
        if self._child_index is None:
            return []
        known = self.records.children(self._child_index.find(parent), parent, start, self.pool.is_ready)
        return [child for child in known if child.tokens][:limit]

    @property
    def keeps_partial(self) -> bool:
        """Whether a chain's unfinished last block can be found here."""
        return self._child_index is not None

    def is_covered(self, record: BlockRecord) -> bool:
        """Whether a held block begins with this one's tokens and is longer, so that it serves as well."""
        following = self.children(record.parent, MAX_CHILDREN)
        return any(each.tokens.startswith(record.tokens) and each.tokens != record.tokens for each in following)

    def partial_behind(self, parents: Sequence[ChainHash]) -> list[BlockRecord]:
        """The unfinished last blocks held now that follow one of these."""
        if self._child_index is None or not self.pool.partial:
            return []
        partial, found = self.pool.partial, []
        for parent in parents:
            for slot in self._child_index.find(parent):
                record = self.records[slot]
                if slot in partial and record is not None and record.parent == parent:
                    found.append(record)
        return found

    def drop_covered(self, first: BlockRecord) -> None:
        """Consecutive blocks were added: drop a partial block that is the start of the first of them."""
        if not self.pool.partial:
            return
        behind, new = self.partial_behind([first.parent]), first.tokens  # parents of the others are new themselves
        covered = [each.chain_hash for each in behind if len(each.tokens) < len(new) and new.startswith(each.tokens)]
        if covered:
            self.pool.evict(covered)

    def check(self) -> None:
        """Raise AssertionError if the index of children contradicts itself. A full scan."""
        if self._child_index is not None:
            with self._indexing:
                self._child_index.check()

    def parent_of(self, chain_hash: ChainHash) -> ChainHash | None:
        """The name of the block before this one; None if it is not held."""
        found = self.pool.places([chain_hash])
        return self.parent_in(found[0], chain_hash) if found else None

    def parent_in(self, slot: int, chain_hash: ChainHash) -> ChainHash | None:
        """As `parent_of`, for a block that was just in this slot."""
        record = self.records[slot]
        return record.parent if record is not None and record.chain_hash == chain_hash else None

    def lineage(self, *, partial: bool = True) -> Lineage:
        """As `Tier.lineage`; unfinished last blocks are among them only if `partial`."""
        slots = self.pool.ready_slots()
        return self.records.lineage(slots if partial else np.setdiff1d(slots, list(self.pool.partial)))

    def close(self) -> None:
        """Give the memory back; idempotent."""
        self.region.close()


def _too_large(size: int, found: Limits) -> ConfigError:
    free = f"only {show_size(found.available)} of memory is free"
    whose = "" if size <= found.most else f" ({found.by} has {show_size(found.most)})"
    return ConfigError(f'[host] size "{format_size(size)}": {free}{whose}; lower it')


def slot_stride(slot_bytes: int) -> int:
    """Bytes from one slot to the next: `slot_bytes` rounded up to 4 KiB."""
    return -(-slot_bytes // memory.PAGE) * memory.PAGE


def _map(size: int, fd: int | None, huge_pages: bool) -> mmap.mmap:
    if fd is not None:
        return _map_shared(size, fd)
    if huge_pages and size >= memory.HUGE_PAGE:  # only whole huge pages are placed on their boundary
        size = -(-size // memory.HUGE_PAGE) * memory.HUGE_PAGE
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _map_shared(size: int, fd: int) -> mmap.mmap:
    """A shared mapping on a huge page's boundary, if possible: placed below a stopgap, as the kernel maps downwards."""
    mapping = mmap.mmap(fd, size, flags=mmap.MAP_SHARED)
    over = int(np.frombuffer(mapping, np.uint8).ctypes.data) % memory.HUGE_PAGE
    if over and size >= memory.HUGE_PAGE:
        mapping.close()
        with mmap.mmap(-1, over, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS):
            mapping = mmap.mmap(fd, size, flags=mmap.MAP_SHARED)
    return mapping


def _create_memfd(size: int) -> int:
    fd = os.memfd_create("kvtier-l2", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    return fd
