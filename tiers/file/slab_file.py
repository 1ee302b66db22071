"""Opens the slab of a fingerprint: creation, lock, one byte budget per directory."""

import logging
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from kvtier.tiers import slab
from kvtier.tiers.errors import ConfigError, FormatError, KVTierError, StoreLocked, TierUnavailable
from kvtier.tiers.file_io import FileIO, read_all
from kvtier.tiers.slab import Superblock, format_bytes
from kvtier.tiers.slab_space import SlabFile, allocate, cut, no_space, read_rows, resize, write_owner, write_superblock

_log = logging.getLogger(__name__)
SLAB_NAME: Final = re.compile(r"[0-9a-f]{64}\.slab")
_HALF: Final = 2  # an opened slab gets at least half of the directory's budget
_DIRECTORY_LOCK_SECONDS: Final = 10.0


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
        if SLAB_NAME.fullmatch(leftover.name.removesuffix(".new")):
            leftover.unlink()
    existing = open_existing(io, path, wanted) if os.path.lexists(path) else None
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
        return resize(io, existing, size, room)
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


def is_ours(io: FileIO, file: SlabFile) -> bool:
    """Whether the path still names the file we hold, whole and of our shape; OSError where it cannot be read."""
    try:
        if not os.path.samestat(file.path.stat(), os.fstat(file.fd)):
            return False
        found = slab.decode(read_header(io, file.fd), str(file.path))
    except (FileNotFoundError, FormatError):
        return False
    same_shape = replace(found, min_seq=0, update=0) == replace(file.superblock, min_seq=0, update=0)  # a reset is ours
    return same_shape and io.size(file.fd) >= file.superblock.file_bytes


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


def _room_for(io: FileIO, path: Path, size: int, existing: SlabFile | None) -> int:
    """Bytes the slab at `path` may have, after the other slabs gave up what they do not need."""
    others = _other_slabs(path)
    own = existing.superblock.file_bytes if existing else 0
    free = io.free_bytes(path.parent)
    if size > free + own + sum(others.values()):
        raise ConfigError(no_space(size, free))
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
        if other != path and SLAB_NAME.fullmatch(other.name) and other.is_file():
            found[other] = other.stat().st_size
    return found


def _trim(io: FileIO, path: Path) -> int:
    """Cut the unused end off an unlocked slab of ours; returns its size."""
    try:
        file = open_existing(io, path)
    except KVTierError:
        return path.stat().st_size  # in use, or not ours to touch
    try:
        rows = read_rows(io, file.fd, file.superblock)
        used = np.flatnonzero(slab.find_valid(rows, np.arange(len(rows)), file.superblock))
        extents = int(used[-1]) // file.superblock.slots_per_extent + 1 if len(used) else 1
        before = os.stat(path)
        end = file.superblock.payload_offsets[extents - 1] + file.superblock.extent_bytes
        left = cut(io, file, file.superblock.resized(end)).superblock.file_bytes
        os.utime(file.fd, ns=(before.st_atime_ns, before.st_mtime_ns))  # this was no use of it
        return left
    finally:
        io.close(file.fd)


def _remove(io: FileIO, path: Path) -> int:
    """Delete an unlocked slab of ours; returns the bytes it still takes."""
    try:
        file = open_existing(io, path)
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
        allocate(io, fd, path, 0, planned.file_bytes)
        write_superblock(io, fd, planned)
        os.rename(unfinished, path)
        _sync_directory(path.parent)
        write_owner(io, fd, os.getpid())
    except BaseException:
        io.close(fd)
        unfinished.unlink(missing_ok=True)
        raise
    return SlabFile(path, fd, planned)


def _sync_directory(directory: Path) -> None:
    """The name of a new file survives a power loss too."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
