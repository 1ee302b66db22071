"""Opens the slab of a fingerprint: creation, lock, one byte budget per directory, growing and shrinking."""

import errno
import logging
import mmap
import os
import re
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from kvtier.tiers import slab
from kvtier.tiers.errors import ConfigError, FormatError, KVTierError, StoreLocked, TierUnavailable
from kvtier.tiers.file_io import PAGE, FileIO, read_all, write_all
from kvtier.tiers.slab import Superblock, format_bytes

_log = logging.getLogger(__name__)
_SLAB_NAME: Final = re.compile(r"[0-9a-f]{64}\.slab")
_HALF: Final = 2  # an opened slab gets at least half of the directory's budget
_DIRECTORY_LOCK_SECONDS: Final = 10.0
FULL_ERRNOS: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_CHUNK_BYTES: Final = 8 << 20


@dataclass(frozen=True, slots=True)
class SlabFile:
    """An open, locked slab file; `fd` is buffered and serves table and superblock."""

    path: Path
    fd: int
    superblock: Superblock


def slab_path(directory: Path, fingerprint: bytes) -> Path:
    """Where the slab of a fingerprint lies."""
    return directory / f"{fingerprint.hex()}.slab"


def open_slab(io: FileIO, directory: Path, wanted: Superblock, size: int) -> SlabFile:
    """Open the slab that `wanted` describes, or create it, within the directory's budget of `size` bytes.

    Raises ConfigError (size), StoreLocked, FormatError, FingerprintMismatch or TierUnavailable; a file that is refused
    is left as it was. `wanted` is a plan for the whole budget: a new slab may get less beside other slabs.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _directory_lock(directory):
            return _open_locked(io, directory, wanted, size)
    except OSError as error:
        raise TierUnavailable(
            f"[file] path {str(directory)!r}: {error.strerror or error}; the file tier is off"
        ) from error


def _open_locked(io: FileIO, directory: Path, wanted: Superblock, size: int) -> SlabFile:
    path = slab_path(directory, wanted.fingerprint)
    for leftover in directory.glob("*.slab.new"):  # a creation that was killed; nobody else is in here
        if _SLAB_NAME.fullmatch(leftover.name.removesuffix(".new")):
            leftover.unlink()
    existing = _open_existing(io, path, wanted) if os.path.lexists(path) else None
    try:
        room = _room_for(io, path, size, existing)
        if room < size // _HALF:
            _log.warning(
                "[file] %s: %s of %s: other slabs keep the rest",
                path,
                *map(format_bytes, (max(room, 0), size)),
            )
        if existing is None:
            return _create(io, path, wanted, room)
        return _resize(io, existing, size, room)
    except BaseException:
        if existing is not None:
            io.close(existing.fd)
        raise


def release(io: FileIO, file: SlabFile) -> None:
    """Unlock and close; the file's time of use is what the least recently used slab is found by."""
    try:
        write_owner(io, file.fd, 0)
        os.utime(file.fd)
    except OSError as error:
        _log.warning("[file] %s: %s while closing", file.path, error.strerror)
    with suppress(OSError):
        io.unlock(file.fd)
    with suppress(OSError):  # Linux has closed it all the same
        io.close(file.fd)


def write_owner(io: FileIO, fd: int, pid: int) -> None:
    """Leave our pid for whoever finds the slab locked, or 0; OSError where the disk refuses."""
    write_all(io, fd, [memoryview(pid.to_bytes(8, "little"))], slab.OWNER_OFFSET)


def is_ours(io: FileIO, file: SlabFile) -> bool:
    """Whether the path still names the file we hold, whole and with our superblock; OSError where it cannot be read."""
    try:
        if not os.path.samestat(file.path.stat(), os.fstat(file.fd)):
            return False
        found = slab.decode(_read_header(io, file.fd), str(file.path))
    except (FileNotFoundError, FormatError):
        return False
    return found == file.superblock and io.size(file.fd) >= file.superblock.file_bytes


def read_rows(io: FileIO, fd: int, superblock: Superblock) -> slab.Rows:
    """The whole entry table, read in large pieces; OSError where the file ends first."""
    rows = np.empty(superblock.num_slots, slab.entry_dtype(superblock.block_size))
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
    """Make single slots' rows name nothing."""
    blank = memoryview(bytes(superblock.entry_bytes))
    for slot in slots:
        write_all(io, fd, [blank], superblock.row_offset(slot))


# Below: called with the directory locked.


@contextmanager
def _directory_lock(directory: Path) -> Iterator[None]:
    """Alone in here: sizes are added up and slabs created and removed by one process at a time."""
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


def _open_existing(io: FileIO, path: Path, wanted: Superblock | None) -> SlabFile:
    """Lock a slab and read its superblock; it stays as it is until both are known to be fine."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise FormatError(f"{path}: not a regular file; it was left untouched: choose another [file] path")
    fd = io.open(path, os.O_RDWR)
    try:
        header = _read_header(io, fd)
        if not io.lock(fd):
            owner = int.from_bytes(header[slab.OWNER_OFFSET : slab.OWNER_OFFSET + 8], "little")
            raise StoreLocked(f"{path}: in use by process {owner or 'unknown'}; stop it or choose another [file] path")
        superblock = slab.decode(_read_header(io, fd), str(path))  # read again: its owner may just have resized it
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


def _read_header(io: FileIO, fd: int) -> bytes:
    """The superblock and its copy, or what there is of them."""
    header = bytearray(min(slab.HEADER_BYTES, io.size(fd)))
    if header:
        read_all(io, fd, [memoryview(header)], 0)
    return bytes(header)


def _room_for(io: FileIO, path: Path, size: int, existing: SlabFile | None) -> int:
    """Bytes the slab at `path` may have, after the other slabs gave up what they do not need."""
    others = _other_slabs(path)
    own = existing.superblock.file_bytes if existing else 0
    free = io.free_bytes(path.parent)
    if size > free + own + sum(others.values()):
        raise ConfigError(_no_space(size, free))
    room = size - sum(others.values())
    by_age = sorted(others, key=lambda other: other.stat().st_mtime_ns)
    for verb in (_trim, _remove):
        for other in by_age:
            # Unused space is taken whenever some is missing; blocks only while we have less than our half.
            if room >= (size if verb is _trim else size // _HALF) or other not in others:
                continue
            try:
                left = verb(io, other)
            except OSError as error:  # no permission, or the disk refuses: it keeps its space, we open ours
                _log.warning("[file] %s: %s; it was left as it is", other, error.strerror or error)
                continue
            room += others[other] - left
            others[other] = left
            if not left:
                del others[other]
    return room


def _other_slabs(path: Path) -> dict[Path, int]:
    """The directory's other slabs and their sizes in bytes."""
    found = {}
    for other in path.parent.glob("*.slab"):
        if other != path and _SLAB_NAME.fullmatch(other.name) and other.is_file():
            found[other] = other.stat().st_size
    return found


def _trim(io: FileIO, path: Path) -> int:
    """Cut the unused end off an unlocked slab of ours; returns its size."""
    try:
        file = _open_existing(io, path, None)
    except KVTierError:
        return path.stat().st_size  # in use, or not ours to touch
    try:
        rows = read_rows(io, file.fd, file.superblock)
        used = np.flatnonzero(slab.find_valid(rows, np.arange(len(rows)), file.superblock))
        extents = int(used[-1]) // file.superblock.slots_per_extent + 1 if len(used) else 1
        before = os.stat(path)
        end = file.superblock.payload_offsets[extents - 1] + file.superblock.extent_bytes
        left = _cut(io, file, file.superblock.resized(end)).superblock.file_bytes
        os.utime(file.fd, ns=(before.st_atime_ns, before.st_mtime_ns))  # this was no use of it
        return left
    finally:
        io.close(file.fd)


def _remove(io: FileIO, path: Path) -> int:
    """Delete an unlocked slab of ours; returns the bytes it still takes."""
    try:
        file = _open_existing(io, path, None)
    except KVTierError:
        return path.stat().st_size
    path.unlink()
    io.close(file.fd)
    _log.warning("[file] path %s: full; removed the least recently used slab %s", path.parent, path.name)
    return 0


def _create(io: FileIO, path: Path, wanted: Superblock, room: int) -> SlabFile:
    """A new slab, under its name only when it is whole."""
    planned = slab.plan(wanted.fingerprint, wanted.slot_bytes, wanted.block_size, room)
    if not planned.segments:
        least = slab.smallest(wanted.slot_bytes, wanted.block_size)
        raise ConfigError(
            f"[file] size: {format_bytes(max(room, 0))} are left of it in {str(path.parent)!r}, a slab "
            f"needs at least {format_bytes(least)}; raise size or choose another path"
        )
    unfinished = path.with_name(path.name + ".new")
    fd = io.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        io.lock(fd)
        _allocate(io, fd, path, 0, planned.file_bytes)
        _write_superblock(io, fd, planned)
        os.rename(unfinished, path)
        _sync_directory(path.parent)
        write_owner(io, fd, os.getpid())
    except BaseException:
        io.close(fd)
        unfinished.unlink(missing_ok=True)
        raise
    return SlabFile(path, fd, planned)


def _resize(io: FileIO, file: SlabFile, size: int, room: int) -> SlabFile:
    """Fit an existing slab to the room there is; says so where that changes it."""
    superblock = file.superblock
    resized = superblock.resized(room)
    if not resized.segments:
        least = superblock.payload_offsets[0] + superblock.extent_bytes
        raise ConfigError(
            f'[file] size "{format_bytes(size)}": {file.path.name} cannot shrink below '
            f"{format_bytes(least)}; raise size or delete it"
        )
    old, new = format_bytes(superblock.file_bytes), format_bytes(resized.file_bytes)
    if len(resized.segments) == slab.MAX_SEGMENTS and room - resized.file_bytes > superblock.extent_bytes:
        _log.warning("[file] %s: grown so often that it stays at %s; delete it to use more", file.path, new)
    if resized.num_slots > superblock.num_slots:
        _log.warning("[file] %s: grows from %s to %s; every block is kept", file.path, old, new)
        file = _grow(io, file, resized)
    elif resized.num_slots < superblock.num_slots:
        _log.warning("[file] %s: shrinks from %s to %s; the blocks stored last are kept", file.path, old, new)
        file = _shrink(io, file, resized)
    if io.size(file.fd) > file.superblock.file_bytes:
        io.truncate(file.fd, file.superblock.file_bytes)  # a resize that was killed left more
    write_owner(io, file.fd, os.getpid())
    os.utime(file.fd)
    return file


def _grow(io: FileIO, file: SlabFile, resized: Superblock) -> SlabFile:
    old = file.superblock
    _allocate(io, file.fd, file.path, old.file_bytes, resized.file_bytes - old.file_bytes)
    blank_rows(io, file.fd, resized, list(range(old.num_extents, resized.num_extents)))
    _write_superblock(io, file.fd, resized)
    return replace(file, superblock=resized)


def _shrink(io: FileIO, file: SlabFile, resized: Superblock) -> SlabFile:
    """Move the extents stored last into the part that stays, over those stored first, then cut."""
    old = file.superblock
    rows = read_rows(io, file.fd, old)
    valid = slab.find_valid(rows, np.arange(len(rows)), old)
    _, first = np.unique(rows["chain_hash"], return_index=True)
    valid &= np.isin(np.arange(len(rows)), first)  # a killed shrink left some blocks at both places
    newest = np.where(valid, rows["seq"], 0).reshape(old.num_extents, -1).max(axis=1)
    ranked = np.argsort(newest, kind="stable")[::-1].tolist()
    kept = [extent for extent in ranked[: resized.num_extents] if newest[extent]]
    stay = {extent for extent in kept if extent < resized.num_extents}
    places = [extent for extent in range(resized.num_extents) if extent not in stay]
    scratch = memoryview(mmap.mmap(-1, old.extent_bytes))
    for source, target in zip([extent for extent in kept if extent not in stay], places, strict=False):
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
    return _cut(io, file, resized)


def _cut(io: FileIO, file: SlabFile, resized: Superblock) -> SlabFile:
    """Drop the extents beyond `resized`: rows, then superblock, then space."""
    old = file.superblock
    if resized.num_slots >= old.num_slots:
        return file
    io.sync(file.fd)
    dropped = [extent for extent in range(resized.num_extents, old.num_extents)]
    blank_rows(io, file.fd, old, dropped)
    _write_superblock(io, file.fd, resized)
    io.truncate(file.fd, resized.file_bytes)
    return replace(file, superblock=resized)


def _write_superblock(io: FileIO, fd: int, superblock: Superblock) -> None:
    """The copy, then the superblock; one of both is whole at any time."""
    encoded = memoryview(slab.encode(superblock))
    for offset in (PAGE, 0):
        write_all(io, fd, [encoded], offset)
        io.sync(fd)


def _sync_directory(directory: Path) -> None:
    """The name of a new file survives a power loss too."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _allocate(io: FileIO, fd: int, path: Path, offset: int, length: int) -> None:
    try:
        io.allocate(fd, offset, length)
    except OSError as error:
        if error.errno not in FULL_ERRNOS:
            raise
        io.truncate(fd, offset)
        if error.errno == errno.EFBIG:
            raise ConfigError(
                f'[file] size "{format_bytes(offset + length)}": larger than a file may be here '
                "(ulimit -f, or the file system's limit); lower size or choose another path"
            ) from error
        raise ConfigError(_no_space(offset + length, io.free_bytes(path.parent))) from error


def _no_space(size: int, free: int) -> str:
    return (
        f'[file] size "{format_bytes(size)}": the directory has {format_bytes(free, exact=False)} free; '
        "lower size or choose another path"
    )
