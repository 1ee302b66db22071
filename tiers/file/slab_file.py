"""Opens the slab of a fingerprint: creation, lock, one byte budget per directory."""

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from kvtier.tiers import ConfigError, FormatError, TierUnavailable
from kvtier.tiers.config import format_size, show_size
from kvtier.tiers.file import slab
from kvtier.tiers.file.file_io import FileIO
from kvtier.tiers.file.slab import Superblock
from kvtier.tiers.file.slab_budget import SLAB_NAME, room_for
from kvtier.tiers.file.slab_space import (
    SlabFile,
    no_space,
    open_existing,
    read_header,
    resize,
    take_space,
    write_owner,
    write_superblock,
)

_log = logging.getLogger(__name__)
_DIRECTORY_LOCK_SECONDS: Final = 10.0
_ANSWER_SECONDS: Final = 5.0  # that open slabs have to give up their tails; then we open with what there is


def slab_path(directory: Path, fingerprint: bytes) -> Path:
    return directory / f"{fingerprint.hex()}.slab"


def open_slab(io: FileIO, directory: Path, wanted: Superblock, size: int) -> SlabFile:
    """Open the slab that `wanted` describes, or create it, within the directory's budget of `size` bytes.

    Raises ConfigError (size), StoreLocked, FormatError, FingerprintMismatch or TierUnavailable; a file that is refused
    is left as it was. `wanted` is a plan for the whole budget: a new slab may get less beside other slabs.
    """
    deadline = time.monotonic() + _ANSWER_SECONDS
    try:
        directory.mkdir(parents=True, exist_ok=True)
        while True:
            with _directory_lock(directory):
                opened = _open_locked(io, directory, wanted, size, may_wait=time.monotonic() < deadline)
            if isinstance(opened, SlabFile):
                return opened
            _wait_shrunk(opened, deadline)
    except OSError as error:
        raise TierUnavailable(
            f"[file] path {str(directory)!r}: {error.strerror or error}; the file tier is off"
        ) from error


def _open_locked(
    io: FileIO, directory: Path, wanted: Superblock, size: int, *, may_wait: bool
) -> SlabFile | dict[Path, int]:
    """The slab; or the open slabs that were asked to make room for it, and how many bytes each is to have."""
    path = slab_path(directory, wanted.fingerprint)
    for leftover in directory.glob("*.slab.new"):  # a creation that was killed; nobody else is in here
        if SLAB_NAME.fullmatch(leftover.name.removesuffix(".new")):
            leftover.unlink()
    existing = open_existing(io, path, wanted) if os.path.lexists(path) else None
    keeps = False
    try:
        least = slab.smallest(wanted.slot_bytes, wanted.block_size, wanted.encryption)
        room = room_for(io, path, size, existing, least)
        if room.asked and may_wait:
            return room.asked
        free = io.free_bytes(directory)
        num_bytes = room.num_bytes if existing else min(room.num_bytes, free)
        if existing is not None:
            opened = resize(io, existing, size, num_bytes)
        elif room.asked and num_bytes < room.share // 2:
            names = ", ".join(other.name for other in room.asked)
            raise TierUnavailable(f"[file] {names} were asked to make room for this model's, and have not yet")
        elif room.others:
            opened = _create_beside(io, path, wanted, num_bytes)
        elif size > free:
            raise ConfigError(no_space(size, free))  # the first slab of all: likely a slip
        else:
            opened = _create(io, path, wanted, num_bytes)
        keeps = True
        if room.others and num_bytes < (room.share if existing is None else room.share // 2):
            left = show_size(num_bytes), format_size(size)
            _log.warning("[file] %s: %s of %s: other slabs and files keep the rest", path, *left)
        return opened
    finally:
        if existing is not None and not keeps:
            io.close(existing.fd)


def _wait_shrunk(asked: dict[Path, int], deadline: float) -> None:
    """Until the slabs are as small as they were asked to be, or gone, or the deadline has passed."""
    while any(_size(path) > num_bytes for path, num_bytes in asked.items()) and time.monotonic() < deadline:
        time.sleep(0.01)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


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
    """Whether the path still names the file we hold, whole and of our shape; OSError if it cannot be read."""
    try:
        if not os.path.samestat(file.path.stat(), os.fstat(file.fd)):
            return False
        found = slab.decode(read_header(io, file.fd), str(file.path))
    except (FileNotFoundError, FormatError):
        return False
    same_shape = replace(found, min_seq=0, update=0) == replace(file.superblock, min_seq=0, update=0)  # a reset is ours
    return same_shape and io.size(file.fd) >= file.superblock.file_bytes


def is_removed(file: SlabFile) -> bool:
    """Whether the path names no file any more, or another than the one we hold."""
    try:
        with file.rewriting:
            return not os.path.samestat(file.path.stat(), os.fstat(file.fd))
    except FileNotFoundError:
        return True
    except OSError:
        return False  # that the disk fails is another matter


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


def _create_beside(io: FileIO, path: Path, wanted: Superblock, num_bytes: int) -> SlabFile:
    """`_create` when other slabs are in use: that there is no room for one more is nobody's mistake."""
    least = slab.smallest(wanted.slot_bytes, wanted.block_size, wanted.encryption)
    if num_bytes < least:
        raise TierUnavailable(
            f"[file] path {str(path.parent)!r}: other slabs and files leave {show_size(max(num_bytes, 0))}, this "
            f"model's slab takes at least {format_size(least)}; raise [file] size or choose another path"
        )
    try:
        return _create(io, path, wanted, num_bytes)
    except ConfigError as error:
        raise TierUnavailable(str(error)) from error


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
