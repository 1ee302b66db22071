"""Opens and locks a slab that is there, and reads what it is; nothing of it changes."""

import os
import stat
from pathlib import Path

from kvtier.tiers import FormatError, StoreLocked
from kvtier.tiers.file import slab
from kvtier.tiers.file.file_io import FileIO, read_all
from kvtier.tiers.file.slab import Superblock
from kvtier.tiers.file.slab_space import SlabFile


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
