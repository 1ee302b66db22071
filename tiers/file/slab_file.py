"""A slab's file: opening, creating, growing and shrinking it, within one byte budget for all slabs of a directory."""

import errno
import logging
import mmap
import os
import re
import stat
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np
import xxhash

from kvtier.tiers import ConfigError, FormatError, KVTierError, StoreLocked, TierUnavailable
from kvtier.tiers.config import format_size, show_size
from kvtier.tiers.file import slab
from kvtier.tiers.file.file_io import PAGE, FileIO, read_all, write_all
from kvtier.tiers.file.slab import Superblock

_log = logging.getLogger(__name__)
FULL_ERRNOS: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
STEP_BYTES: Final = 64 << 20  # of payloads whose disk space is taken at once
_CHUNK_BYTES: Final = 8 << 20
_SHRINK_REQUEST: Final = struct.Struct("<QQ")  # bytes, and their xxh3: rubbish on the disk is no request


@dataclass(slots=True)
class SlabFile:
    """An open, locked slab file; `fd` is buffered. Only the holder of `rewriting` replaces `superblock`."""

    path: Path
    fd: int
    superblock: Superblock
    rewriting: threading.Lock = field(default_factory=threading.Lock, repr=False)  # held across the superblock's I/O


def open_existing(io: FileIO, path: Path, wanted: Superblock | None = None, *, read_only: bool = False) -> SlabFile:
    """Lock and check a slab, any if `wanted` is None. StoreLocked, FormatError, FingerprintMismatch, OSError."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise FormatError(f"{path}: not a regular file; it was left untouched: choose another [file] path")
    fd = io.open(path, os.O_RDONLY if read_only else os.O_RDWR)
    try:
        header = read_header(io, fd)
        if not io.lock(fd):
            owner = int.from_bytes(header[slab.OWNER_OFFSET : slab.OWNER_OFFSET + 8], "little")
            fix = "stop it or choose another [file] path"
            if owner == os.getpid():  # mostly a call from before a detach that has not returned
                fix = "it is this one: close that store, or wait until its last call has ended"
            raise StoreLocked(f"{path}: in use by process {owner or 'unknown'}; {fix}")
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
    """The superblock and its copy, as far as the file has them."""
    header = bytearray(min(slab.HEADER_BYTES, io.size(fd)))
    if header:
        read_all(io, fd, [memoryview(header)], 0)
    return bytes(header)


def write_owner(io: FileIO, fd: int, pid: int) -> None:
    """Write our pid for a process that finds the slab locked, or 0; OSError if the disk refuses."""
    write_all(io, fd, [memoryview(pid.to_bytes(8, "little"))], slab.OWNER_OFFSET)


def request_shrink(io: FileIO, fd: int, num_bytes: int) -> None:
    """Request that the slab's owner shrink it to `num_bytes`; 0 withdraws the request."""
    size = num_bytes.to_bytes(8, "little")
    digest = xxhash.xxh3_64_intdigest(size) if num_bytes else 0
    packed = _SHRINK_REQUEST.pack(num_bytes, digest)
    write_all(io, fd, [memoryview(packed)], slab.SHRINK_OFFSET)


def read_shrink_request(fd: int) -> int:
    """The bytes in the last request to shrink; 0 if there is none, or the file is cut short."""
    packed = os.pread(fd, _SHRINK_REQUEST.size, slab.SHRINK_OFFSET)
    if len(packed) < _SHRINK_REQUEST.size:
        return 0
    num_bytes, digest = _SHRINK_REQUEST.unpack(packed)
    return int(num_bytes) if digest == xxhash.xxh3_64_intdigest(packed[:8]) else 0


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
    """Overwrite the extents' rows with zeros, adjacent ones in one write."""
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
    """Fit a slab to its room, and log it. It grows only if the disk has all that space; else a warning, no change."""
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
    request_shrink(io, file.fd, 0)
    os.utime(file.fd)
    return file


def _room_to_grow(io: FileIO, file: SlabFile, resized: Superblock, size: int) -> Superblock:
    """Take the disk space for growing. Returns the new superblock, or the old one if there is no space."""
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
    valid = np.isin(np.arange(len(rows)), used[first])  # a killed shrink left some blocks in two slots
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
            _log.warning("[file] %s: the disk is full, the blocks of some extents are lost", file.path)
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
    """Drop the extents beyond `resized`: rows, superblock, then space. Removes the rest of a killed resize, too."""
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
    """Make the file as long as `wanted`, with space for tables and a first step; else ConfigError, no change."""
    size, before = wanted.file_bytes, old.file_bytes if old is not None else 0
    ranges = [(each.table_offset, each.payload_offset) for each in wanted.segments if each.table_offset >= before]
    if old is None:
        ranges[0] = 0, min(size, wanted.payload_offsets[0] + STEP_BYTES)
    try:
        for begin, end in (*ranges, (size - PAGE, size)):  # the last page sets the file's length
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


SLAB_NAME: Final = re.compile(r"[0-9a-f]{64}\.slab")
_HALF: Final = 2  # without other open slabs a slab gets at least half, the closed ones keep the rest
_RECENT: Final = 7 * 24 * 3600 * 10**9  # ns since its last use within which a closed slab counts as in use


@dataclass(slots=True)
class Room:
    num_bytes: int
    share: int  # bytes it is entitled to: less is worth a warning
    others: int  # other slabs in the directory
    shrinking: dict[Path, int] = field(default_factory=dict)  # open slabs with a request to shrink, and to which size


@dataclass(eq=False, slots=True)
class _Other:
    """Another slab of the directory: closed, and locked by us meanwhile; or open; or of another version or owner."""

    path: Path
    size: int
    used_at: int  # ns, of its last use
    file: SlabFile | None = None
    is_open: bool = False

    def is_rival(self, *, of_existing: bool) -> bool:
        """Whether it is entitled to a share of its own.

        A slab that exists spares those used lately: a daemon opens all of its slabs again, one by one. A new one needs
        room first.
        """
        is_recent = self.file is not None and time.time_ns() - self.used_at < _RECENT
        return self.is_open or (of_existing and is_recent)


def room_for(io: FileIO, path: Path, size: int, existing: SlabFile | None, least: int) -> Room:
    """Bytes the slab at `path` may have, after others shrank to their content and their share.

    Its share is the budget over the number of slabs in use, itself included, and at most half. An existing slab
    takes space from others only if it would have less than half its share. Extents are cut off whole, and no slab
    should lose some at every start. `least` is the size of the smallest slab: nothing is cut for less. An open slab
    shrinks by itself on request (`shrinking`): check again later. Call with the directory locked.
    """
    with _others(io, path) as others:
        rivals = [other for other in others if other.is_rival(of_existing=existing is not None)]
        share = size // max(_HALF, 1 + len(rivals))
        room = Room(size - sum(other.size for other in others), share, len(others))
        by_age = sorted(others, key=lambda other: other.used_at)
        for other in by_age:
            if room.num_bytes < size:
                room.num_bytes += _freed(io, other, None)
        for other in by_age:
            if room.num_bytes < share and other not in rivals:
                left = max(share, other.size - (share - room.num_bytes)) if other.size > share else 0
                room.num_bytes += _freed(io, other, left)
        takes_ends = existing is None or min(existing.superblock.file_bytes, room.num_bytes) < share // 2
        if takes_ends and room.num_bytes + sum(max(0, rival.size - share) for rival in rivals) >= least:
            missing = share - room.num_bytes
            for rival in sorted(rivals, key=lambda rival: -rival.size):  # what each has above the share
                left = max(share, rival.size - missing)
                if missing <= 0 or left >= rival.size:
                    break
                missing -= rival.size - left
                if not rival.is_open:
                    room.num_bytes += _freed(io, rival, left)
                elif _send_shrink_request(io, rival, left):
                    room.shrinking[rival.path] = left
        return room


@contextmanager
def _others(io: FileIO, path: Path) -> Iterator[list[_Other]]:
    """The directory's other slabs, the closed ones locked as long as this lasts."""
    others: list[_Other] = []
    try:
        for name in path.parent.glob("*.slab"):
            if name == path or not SLAB_NAME.fullmatch(name.name) or not name.is_file():
                continue
            status = name.stat()
            other = _Other(name, status.st_size, status.st_mtime_ns)
            others.append(other)
            try:
                other.file = open_existing(io, name)
            except StoreLocked:
                other.is_open = True
            except KVTierError:
                pass  # of another version, or not kvtier's
            except OSError as error:
                _log.warning("[file] %s: %s; it was left as it is", name, error.strerror or error)
        yield others
    finally:
        for other in others:
            if other.file is not None:
                io.close(other.file.fd)


def _freed(io: FileIO, other: _Other, num_bytes: int | None) -> int:
    """Shrink a closed slab (None: by its unused end) or remove it. Returns the bytes freed, 0 if that is refused."""
    before, file = other.size, other.file
    if file is None:
        return 0
    try:
        old, end = file.superblock, num_bytes
        if end is None:
            rows = read_rows(io, file.fd, old)
            used = np.flatnonzero(slab.find_valid(rows, np.arange(len(rows)), old))
            last = int(used[-1]) // old.slots_per_extent if len(used) else 0
            end = old.payload_offsets[last] + old.extent_bytes
        resized = old.resized(end)
        if resized.segments:
            status = os.fstat(file.fd)
            file.superblock = cut(io, file, resized).superblock
            os.utime(file.fd, ns=(status.st_atime_ns, status.st_mtime_ns))  # shrinking it is no use of it
            other.size = file.superblock.file_bytes
            if num_bytes is not None:
                left = show_size(other.size)
                _log.warning("[file] %s: cut down to %s, its share beside other slabs", other.path, left)
        else:
            other.path.unlink()
            other.size = 0
            _log.warning(
                "[file] path %s: full; removed the least recently used slab %s", other.path.parent, other.path.name
            )
    except OSError as error:
        _log.warning("[file] %s: %s; it was left as it is", other.path, error.strerror or error)
    return before - other.size


def _send_shrink_request(io: FileIO, other: _Other, num_bytes: int) -> bool:
    """Request an open slab to shrink. False if it has another version, or cannot be written."""
    try:
        fd = io.open(other.path, os.O_RDWR)
        try:
            slab.decode(read_header(io, fd), str(other.path))
            request_shrink(io, fd, num_bytes)
        finally:
            io.close(fd)
    except (KVTierError, OSError) as error:
        _log.warning("[file] %s: %s; it was left as it is", other.path, error)
        return False
    return True


_DIRECTORY_LOCK_SECONDS: Final = 10.0
_ANSWER_SECONDS: Final = 5.0  # for open slabs to shrink; then we open with the space there is


def open_slab(io: FileIO, directory: Path, wanted: Superblock, size: int) -> SlabFile:
    """Open or create the slab that `wanted` plans for the whole directory, within its budget of `size` bytes.

    ConfigError (size), StoreLocked, FormatError, FingerprintMismatch or TierUnavailable; a refused file is left as it
    was.
    """
    deadline = time.monotonic() + _ANSWER_SECONDS
    try:
        directory.mkdir(parents=True, exist_ok=True)
        while True:
            with _directory_lock(directory):
                opened = _open_locked(io, directory, wanted, size, may_wait=time.monotonic() < deadline)
            if isinstance(opened, SlabFile):
                return opened
            while any(map(_is_larger, opened, opened.values())) and time.monotonic() < deadline:
                time.sleep(0.01)  # until they are as small as requested, or removed
    except OSError as error:
        raise TierUnavailable(
            f"[file] path {str(directory)!r}: {error.strerror or error}; the file tier is off"
        ) from error


def _is_larger(path: Path, num_bytes: int) -> bool:
    try:
        return path.stat().st_size > num_bytes
    except FileNotFoundError:
        return False


def _open_locked(
    io: FileIO, directory: Path, wanted: Superblock, size: int, *, may_wait: bool
) -> SlabFile | dict[Path, int]:
    """The slab; or the open slabs that were requested to shrink for it, and how many bytes each is to have."""
    path = directory / f"{wanted.fingerprint.hex()}.slab"
    for leftover in directory.glob("*.slab.new"):  # a creation that was killed; the directory is locked
        if SLAB_NAME.fullmatch(leftover.name.removesuffix(".new")):
            leftover.unlink()
    existing = open_existing(io, path, wanted) if os.path.lexists(path) else None
    keeps = False
    try:
        least = slab.smallest(wanted.slot_bytes, wanted.block_size, wanted.encryption)
        room = room_for(io, path, size, existing, least)
        if room.shrinking and may_wait:
            return room.shrinking
        free = io.free_bytes(directory)
        num_bytes = room.num_bytes if existing else min(room.num_bytes, free)
        if existing is not None:
            opened = resize(io, existing, size, num_bytes)
        elif room.shrinking and num_bytes < room.share // 2:
            names = ", ".join(other.name for other in room.shrinking)
            raise TierUnavailable(f"[file] {names} were requested to shrink for this model's, and have not yet")
        elif not room.others and size > free:
            raise ConfigError(no_space(size, free))  # the first slab of all: likely a slip
        elif num_bytes < least:
            raise TierUnavailable(
                f"[file] path {str(directory)!r}: other slabs and files leave {show_size(max(num_bytes, 0))}, this "
                f"model's slab takes at least {format_size(least)}; raise [file] size or choose another path"
            )
        else:
            try:
                opened = _create(io, path, wanted, num_bytes)
            except ConfigError as error:
                if not room.others:
                    raise
                raise TierUnavailable(str(error)) from error  # too little room for another slab is no user error
        keeps = True
        if room.others and num_bytes < (room.share if existing is None else room.share // 2):
            left = show_size(num_bytes), format_size(size)
            _log.warning("[file] %s: %s of %s: other slabs and files keep the rest", path, *left)
        return opened
    finally:
        if existing is not None and not keeps:
            io.close(existing.fd)


def release(io: FileIO, file: SlabFile) -> None:
    """Unlock and close. The file's time shows which slab was used least recently."""
    try:
        write_owner(io, file.fd, 0)
        os.utime(file.fd)
    except OSError as error:
        _log.warning("[file] %s: %s while closing", file.path, error.strerror)
    with suppress(OSError):
        io.unlock(file.fd)
    with suppress(OSError):  # Linux has closed it all the same
        io.close(file.fd)


def is_ours(io: FileIO, file: SlabFile) -> bool:
    """Whether the path still names our file, whole and of our shape; OSError if it cannot be read."""
    try:
        if not os.path.samestat(file.path.stat(), os.fstat(file.fd)):
            return False
        found = slab.decode(read_header(io, file.fd), str(file.path))
    except (FileNotFoundError, FormatError):
        return False
    same_shape = replace(found, min_seq=0, update=0) == replace(file.superblock, min_seq=0, update=0)  # a reset is ours
    return same_shape and io.size(file.fd) >= file.superblock.file_bytes


def is_removed(file: SlabFile) -> bool:
    """Whether the path names no file any more, or another one than ours."""
    try:
        with file.rewriting:
            return not os.path.samestat(file.path.stat(), os.fstat(file.fd))
    except FileNotFoundError:
        return True
    except OSError:
        return False  # a disk error is another case


@contextmanager
def _directory_lock(directory: Path) -> Iterator[None]:
    """The directory's lock: one process at a time adds up sizes, creates and removes slabs."""
    io, fd = FileIO(), os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + _DIRECTORY_LOCK_SECONDS
        while not io.lock(fd):
            if time.monotonic() > deadline:
                raise TierUnavailable(
                    f"[file] path {str(directory)!r}: another process has been opening a slab "
                    f"in it for {_DIRECTORY_LOCK_SECONDS:.0f} s; try again"
                )
            time.sleep(0.01)
        yield
    finally:
        os.close(fd)


def _create(io: FileIO, path: Path, wanted: Superblock, num_bytes: int) -> SlabFile:
    """A new slab, under its name only when it is whole."""
    planned = slab.plan(wanted.fingerprint, wanted.slot_bytes, wanted.block_size, num_bytes, wanted.encryption)
    unfinished = path.with_name(path.name + ".new")
    fd = io.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        io.lock(fd)
        take_space(io, fd, path, planned)
        write_superblock(io, fd, planned)
        os.rename(unfinished, path)
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)  # the name of a new file survives a power loss, too
        finally:
            os.close(directory)
        write_owner(io, fd, os.getpid())
    except BaseException:
        io.close(fd)
        unfinished.unlink(missing_ok=True)
        raise
    return SlabFile(path, fd, planned)
