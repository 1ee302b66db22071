"""What a slab may have of its directory's budget: unused ends, closed slabs, and the tails of open ones make room."""

import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from kvtier.tiers import KVTierError, StoreLocked
from kvtier.tiers.config import show_size
from kvtier.tiers.file import slab
from kvtier.tiers.file.file_io import FileIO
from kvtier.tiers.file.slab_space import SlabFile, ask_for_room, cut, open_existing, read_header, read_rows

_log = logging.getLogger(__name__)
SLAB_NAME: Final = re.compile(r"[0-9a-f]{64}\.slab")
_HALF: Final = 2  # a slab beside which none is open gets at least half, the closed ones keep the rest
_BACK_SOON: Final = 7 * 24 * 3600 * 10**9  # ns since its last use within which a closed slab is thought to be in use


@dataclass(slots=True)
class Room:
    num_bytes: int
    share: int  # what it is entitled to: less is worth a warning
    others: int  # slabs there are beside it
    asked: dict[Path, int] = field(default_factory=dict)  # open slabs that were asked to shrink, and to how many bytes


@dataclass(eq=False, slots=True)
class _Other:
    """Another slab of the directory: closed, and locked by us meanwhile; or open; or none of ours to touch."""

    path: Path
    size: int
    used_at: int  # ns, of its last use
    file: SlabFile | None = None
    is_open: bool = False

    def is_rival(self, *, of_existing: bool) -> bool:
        """Whether it is entitled to a share of its own.

        A slab that exists spares those that were in use lately: when a daemon restarts, all of them are opened
        again, one by one. A new slab needs room first.
        """
        is_recent = self.file is not None and time.time_ns() - self.used_at < _BACK_SOON
        return self.is_open or (of_existing and is_recent)


def room_for(io: FileIO, path: Path, size: int, existing: SlabFile | None, least: int) -> Room:
    """Bytes the slab at `path` may have, after others gave up what they don't need and what is above their share.

    Its share is the budget over the number of slabs in use, itself included, and at most half. A slab that exists
    takes others' tails only if it would have less than half its share. Extents are cut off whole, and no slab
    should lose some at every start. `least` is what the smallest slab takes: no tail goes for less. An open slab
    shrinks by itself when it sees that it was `asked`: look again later. Call with the directory locked.
    """
    with _others(io, path) as others:
        rivals = [other for other in others if other.is_rival(of_existing=existing is not None)]
        share = size // max(_HALF, 1 + len(rivals))
        room = Room(size - sum(other.size for other in others), share, len(others))
        by_age = sorted(others, key=lambda other: other.used_at)
        for other in by_age:
            if room.num_bytes < size:
                room.num_bytes += _shrunk(_trim, io, other, 0)
        for other in by_age:
            if room.num_bytes < share and other not in rivals:
                left = max(share, other.size - (share - room.num_bytes)) if other.size > share else 0
                room.num_bytes += _shrunk(_cut, io, other, left)
        takes_tails = existing is None or min(existing.superblock.file_bytes, room.num_bytes) < share // 2
        if takes_tails and room.num_bytes + sum(max(0, rival.size - share) for rival in rivals) >= least:
            _take_tails(io, sorted(rivals, key=lambda rival: -rival.size), room)
        return room


def _take_tails(io: FileIO, rivals: list[_Other], room: Room) -> None:
    """What rivals have above the share, the largest first, as far as it is missing."""
    missing = room.share - room.num_bytes
    for rival in rivals:
        left = max(room.share, rival.size - missing)
        if missing <= 0 or left >= rival.size:
            return
        missing -= rival.size - left
        if not rival.is_open:
            room.num_bytes += _shrunk(_cut, io, rival, left)
        elif _ask(io, rival, left):
            room.asked[rival.path] = left


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
                pass  # of another version, or none of ours
            except OSError as error:
                _log.warning("[file] %s: %s; it was left as it is", name, error.strerror or error)
        yield others
    finally:
        for other in others:
            if other.file is not None:
                io.close(other.file.fd)


def _shrunk(verb: Callable[[FileIO, SlabFile, int], int], io: FileIO, other: _Other, num_bytes: int) -> int:
    """Apply the verb to a closed slab of ours; returns how many bytes that freed."""
    if other.file is None:
        return 0
    before = other.size
    try:
        other.size = verb(io, other.file, num_bytes)
    except OSError as error:  # no permission, or the disk refuses: it keeps its space, we open ours
        _log.warning("[file] %s: %s; it was left as it is", other.path, error.strerror or error)
    return before - other.size


def _trim(io: FileIO, file: SlabFile, num_bytes: int) -> int:
    """Cut the unused end off; returns the slab's size."""
    rows = read_rows(io, file.fd, file.superblock)
    used = np.flatnonzero(slab.find_valid(rows, np.arange(len(rows)), file.superblock))
    extents = int(used[-1]) // file.superblock.slots_per_extent + 1 if len(used) else 1
    return _cut_at(io, file, file.superblock.payload_offsets[extents - 1] + file.superblock.extent_bytes)


def _cut(io: FileIO, file: SlabFile, num_bytes: int) -> int:
    """Cut down to `num_bytes`, blocks or not; removed if not one extent fits. Returns the slab's size."""
    if file.superblock.resized(num_bytes).segments:
        left = _cut_at(io, file, num_bytes)
        _log.warning("[file] %s: cut down to %s, its share beside other slabs", file.path, show_size(left))
        return left
    file.path.unlink()
    _log.warning("[file] path %s: full; removed the least recently used slab %s", file.path.parent, file.path.name)
    return 0


def _cut_at(io: FileIO, file: SlabFile, num_bytes: int) -> int:
    before = os.fstat(file.fd)
    file.superblock = cut(io, file, file.superblock.resized(num_bytes)).superblock
    os.utime(file.fd, ns=(before.st_atime_ns, before.st_mtime_ns))  # this was no use of it
    return file.superblock.file_bytes


def _ask(io: FileIO, other: _Other, num_bytes: int) -> bool:
    """Ask an open slab to shrink by itself; False if it is none of this version, or cannot be written."""
    try:
        fd = io.open(other.path, os.O_RDWR)
        try:
            slab.decode(read_header(io, fd), str(other.path))
            ask_for_room(io, fd, num_bytes)
        finally:
            io.close(fd)
    except (KVTierError, OSError) as error:
        _log.warning("[file] %s: %s; it was left as it is", other.path, error)
        return False
    return True
