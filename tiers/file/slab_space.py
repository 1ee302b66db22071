"""A slab's file: opening one that is there, its superblock, its entry table in bulk, growing and shrinking."""

import errno
import logging
import mmap
import os
import stat
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np
import xxhash

from kvtier.tiers import ConfigError, FormatError, StoreLocked, TierUnavailable
from kvtier.tiers.config import format_size, show_size
from kvtier.tiers.file import slab
from kvtier.tiers.file.file_io import PAGE, FileIO, read_all, write_all
from kvtier.tiers.file.slab import Superblock

_log = logging.getLogger(__name__)
FULL_ERRNOS: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
STEP_BYTES: Final = 64 << 20  # of payloads whose disk space is taken at once
_CHUNK_BYTES: Final = 8 << 20
_ASKED: Final = struct.Struct("<QQ")  # bytes, and their xxh3: rubbish on the disk is no request


@dataclass(slots=True)
class SlabFile:
    """An open, locked slab file; `fd` is buffered and serves table and superblock.

    `superblock` is replaced by a reset and when the slab gives up its tail, each while it holds `rewriting`.
    """

    path: Path
    fd: int
    superblock: Superblock
    rewriting: threading.Lock = field(default_factory=threading.Lock, repr=False)  # held across the superblock's I/O


def open_existing(io: FileIO, path: Path, wanted: Superblock | None = None, *, read_only: bool = False) -> SlabFile:
    """Lock a slab and read its superblock; it stays as it is until both are known to be fine.

    `wanted` None takes a slab of any model. Raises StoreLocked, FormatError, FingerprintMismatch or OSError.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise FormatError(f"{path}: not a regular file; it was left untouched: choose another [file] path")
    fd = io.open(path, os.O_RDONLY if read_only else os.O_RDWR)
    try:
        header = read_header(io, fd)
        if not io.lock(fd):
            owner = int.from_bytes(header[slab.OWNER_OFFSET : slab.OWNER_OFFSET + 8], "little")
            raise StoreLocked(f"{path}: in use by process {owner or 'unknown'}; stop it or choose another [file] path")
        superblock = slab.decode(read_header(io, fd), str(path))  # read again: its owner may just have resized it
        if wanted is not None:
            slab.require_identity(superblock, wanted, str(path))
        if io.size(fd) < superblock.file_bytes:
            raise FormatError(
                f"{path}: cut short, {io.size(fd)} bytes of {superblock.file_bytes}; it was left untouched: "
                "restore it, or delete it to start anew"
            )
    except BaseException:
        io.close(fd)
        raise
    return SlabFile(path, fd, superblock)


def read_header(io: FileIO, fd: int) -> bytes:
    """The superblock and its copy, or what there is of them."""
    header = bytearray(min(slab.HEADER_BYTES, io.size(fd)))
    if header:
        read_all(io, fd, [memoryview(header)], 0)
    return bytes(header)


def write_owner(io: FileIO, fd: int, pid: int) -> None:
    """Leave our pid for whoever finds the slab locked, or 0; OSError if the disk refuses."""
    write_all(io, fd, [memoryview(pid.to_bytes(8, "little"))], slab.OWNER_OFFSET)


def ask_for_room(io: FileIO, fd: int, num_bytes: int) -> None:
    """Ask whoever has the slab open to cut it down to `num_bytes`; 0 takes the question back."""
    asked = num_bytes.to_bytes(8, "little")
    told = _ASKED.pack(num_bytes, xxhash.xxh3_64_intdigest(asked)) if num_bytes else bytes(_ASKED.size)
    write_all(io, fd, [memoryview(told)], slab.ASKED_OFFSET)


def read_asked(fd: int) -> int:
    """The bytes that the slab was last asked to be cut down to; 0 if it was not, or the file is cut short."""
    told = os.pread(fd, _ASKED.size, slab.ASKED_OFFSET)
    if len(told) < _ASKED.size:
        return 0
    num_bytes, digest = _ASKED.unpack(told)
    return int(num_bytes) if digest == xxhash.xxh3_64_intdigest(told[:8]) else 0


def read_rows(io: FileIO, fd: int, superblock: Superblock) -> slab.Rows:
    """The whole entry table, read in large pieces; OSError if the file ends first."""
    rows = np.empty(superblock.num_slots, superblock.row_dtype)
    view, start = slab.byte_view(rows), 0
    for segment in superblock.segments:
        offset, end = segment.table_offset, start + segment.num_slots * superblock.entry_bytes
        while start < end:
            piece = min(_CHUNK_BYTES, end - start)
            read_all(io, fd, [view[start : start + piece]], offset)
            start, offset = start + piece, offset + piece
    return rows


def blank_rows(io: FileIO, fd: int, superblock: Superblock, extents: list[int]) -> None:
    """Make the extents' rows name nothing, adjacent ones in one write."""
    num_bytes = superblock.slots_per_extent * superblock.entry_bytes
    zeros = memoryview(bytes(min(_CHUNK_BYTES, len(extents) * num_bytes)))
    starts = sorted(superblock.table_offsets[extent] for extent in extents)
    index = 0
    while index < len(starts):
        begin = end = starts[index]
        while index < len(starts) and starts[index] == end:
            end, index = end + num_bytes, index + 1
        for offset in range(begin, end, len(zeros)):
            write_all(io, fd, [zeros[: end - offset]], offset)


def blank_slots(io: FileIO, fd: int, superblock: Superblock, slots: Sequence[int]) -> None:
    blank = memoryview(bytes(superblock.entry_bytes))
    for slot in slots:
        write_all(io, fd, [blank], superblock.row_offset(slot))


# Below: called with the directory locked.


def resize(io: FileIO, file: SlabFile, size: int, room: int) -> SlabFile:
    """Fit an existing slab to the room there is; says so if that changes it.

    It grows only if the disk has all that takes: else it stays as it is, after one warning.
    """
    superblock = file.superblock
    resized = superblock.resized(room)
    if not resized.segments:
        least = superblock.payload_offsets[0] + superblock.extent_bytes
        if least <= size:
            raise TierUnavailable(f"{file.path}: other slabs keep all but {show_size(max(room, 0))}; it stays closed")
        raise ConfigError(
            f'[file] size "{format_size(size)}": {file.path.name} cannot shrink below '
            f"{format_size(least)}; raise size or delete it"
        )
    if resized.num_slots > superblock.num_slots:
        resized = _room_to_grow(io, file, resized, size)
    old, new = show_size(superblock.file_bytes), show_size(resized.file_bytes)
    if len(resized.segments) == slab.MAX_SEGMENTS and room - resized.file_bytes > superblock.extent_bytes:
        _log.warning("[file] %s: grown so often that it stays at %s; delete it to use more", file.path, new)
    if resized.num_slots > superblock.num_slots:
        _log.warning("[file] %s: grows from %s to %s; every block is kept", file.path, old, new)
        blank_rows(io, file.fd, resized, list(range(superblock.num_extents, resized.num_extents)))
        write_superblock(io, file.fd, resized)
        file = replace(file, superblock=resized)
    elif resized.num_slots < superblock.num_slots:
        _log.warning("[file] %s: shrinks from %s to %s; the blocks stored last are kept", file.path, old, new)
        file = _shrink(io, file, resized)
    if io.size(file.fd) > file.superblock.file_bytes:
        io.truncate(file.fd, file.superblock.file_bytes)  # a resize that was killed left more
    write_owner(io, file.fd, os.getpid())
    ask_for_room(io, file.fd, 0)
    os.utime(file.fd)
    return file


def _room_to_grow(io: FileIO, file: SlabFile, resized: Superblock, size: int) -> Superblock:
    """Take the disk space that growing needs; if there is none, the slab as it is."""
    old = file.superblock
    added = resized.file_bytes - old.file_bytes
    free = io.free_bytes(file.path.parent)
    reason = f"the directory has {show_size(free)} free"
    if added <= free:
        try:
            take_space(io, file.fd, file.path, resized, old)
            return resized
        except ConfigError as error:  # a quota, or a limit on a file's size
            reason = str(error)
    _log.warning(
        '[file] %s: stays at %s of [file] size "%s", %s more do not fit: %s',
        file.path,
        show_size(old.file_bytes),
        format_size(size),
        show_size(added),
        reason,
    )
    return old


def _shrink(io: FileIO, file: SlabFile, resized: Superblock) -> SlabFile:
    """Move the extents stored last into the part that stays, over those stored first, then cut."""
    old = file.superblock
    rows = read_rows(io, file.fd, old)
    valid = slab.find_valid(rows, np.arange(len(rows)), old)
    used = np.flatnonzero(valid)
    _, first = np.unique(rows["chain_hash"][used], return_index=True)
    valid = np.isin(np.arange(len(rows)), used[first])  # a killed shrink left some blocks at both places
    newest = np.where(valid, rows["seq"], 0).reshape(old.num_extents, -1).max(axis=1)
    ranked = np.argsort(newest, kind="stable")[::-1].tolist()
    kept = [extent for extent in ranked[: resized.num_extents] if newest[extent]]
    stay = {extent for extent in kept if extent < resized.num_extents}
    places = [extent for extent in range(resized.num_extents) if extent not in stay]
    scratch = memoryview(mmap.mmap(-1, old.extent_bytes))
    for source, target in zip([extent for extent in kept if extent not in stay], places, strict=False):
        try:
            io.allocate(file.fd, old.payload_offsets[target], old.extent_bytes)
        except OSError as error:
            if error.errno not in FULL_ERRNOS:
                raise
            _log.warning("[file] %s: the disk is full, the blocks of some extents go", file.path)
            break
        blank_rows(io, file.fd, old, [target])
        read_all(io, file.fd, [scratch], old.payload_offsets[source])
        write_all(io, file.fd, [scratch], old.payload_offsets[target])
        per = old.slots_per_extent
        moved = np.where(
            valid[source * per : (source + 1) * per], rows[source * per : (source + 1) * per], np.zeros(1, rows.dtype)
        )
        moved["slot"] = np.arange(target * per, (target + 1) * per)
        held = np.flatnonzero(valid[source * per : (source + 1) * per])
        sealed = moved[held].copy()
        slab.seal_rows(sealed, old)
        moved[held] = sealed
        write_all(io, file.fd, [slab.byte_view(moved)], old.table_offsets[target])
    return cut(io, file, resized)


def cut(io: FileIO, file: SlabFile, resized: Superblock) -> SlabFile:
    """Drop the extents beyond `resized`: rows, then superblock, then space; and what a kill left behind the last."""
    old = file.superblock
    if resized.num_slots < old.num_slots:
        io.sync(file.fd)
        blank_rows(io, file.fd, old, list(range(resized.num_extents, old.num_extents)))
        write_superblock(io, file.fd, resized)
        file = replace(file, superblock=resized)
    if io.size(file.fd) > file.superblock.file_bytes:
        io.truncate(file.fd, file.superblock.file_bytes)
    return file


def write_superblock(io: FileIO, fd: int, superblock: Superblock) -> None:
    """The copy, then the superblock; one of both is whole at any time."""
    encoded = memoryview(slab.encode(superblock))
    for offset in (PAGE, 0):
        write_all(io, fd, [encoded], offset)
        io.sync(fd)


def take_space(io: FileIO, fd: int, path: Path, wanted: Superblock, old: Superblock | None = None) -> None:
    """Make the file as long as `wanted`, with disk space for its tables and the first step of a new slab.

    Extents get theirs before they are filled (`SlabGrowth`). ConfigError, and the file as it was, if there is none.
    """
    size, before = wanted.file_bytes, old.file_bytes if old is not None else 0
    ranges = [(each.table_offset, each.payload_offset) for each in wanted.segments if each.table_offset >= before]
    if old is None:
        ranges[0] = 0, min(size, wanted.payload_offsets[0] + STEP_BYTES)
    try:
        for begin, end in (*ranges, (size - PAGE, size)):  # the last page makes it so long
            io.allocate(fd, begin, end - begin)
    except OSError as error:
        if error.errno not in FULL_ERRNOS:
            raise
        io.truncate(fd, before)
        if error.errno == errno.EFBIG:
            raise ConfigError(
                f'[file] size "{format_size(size)}": larger than a file may be here '
                "(ulimit -f, or the file system's limit); lower size or choose another path"
            ) from error
        raise ConfigError(no_space(size, io.free_bytes(path.parent))) from error


def no_space(size: int, free: int) -> str:
    return (
        f'[file] size "{format_size(size)}": the directory has {show_size(free)} free; '
        "lower size or choose another path"
    )
