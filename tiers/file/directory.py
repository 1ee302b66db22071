"""The slabs' directory at a start: whether it can be used at all, and what slabs take of its disk."""

import errno
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvtier.tiers import ConfigError
from kvtier.tiers.config import FileConfig, format_size, show_size
from kvtier.tiers.file.file_io import FileIO
from kvtier.tiers.file.slab_budget import SLAB_NAME
from kvtier.tiers.file.slab_space import no_space

SECTOR: Final = 512  # bytes in which st_blocks counts
# What is wrong with a path, not with the disk behind it: waiting does not help.
_WRONG_PATH: Final = {
    errno.EEXIST: "a file is in its place",
    errno.ENOTDIR: "a file is in its place",
    errno.EACCES: "no permission",
    errno.EPERM: "no permission",
    errno.ENOENT: "it cannot be made",
    errno.EROFS: "the file system is read-only",
    errno.ENAMETOOLONG: "the name is too long",
    errno.ELOOP: "its links lead nowhere",
}


@dataclass(frozen=True, slots=True)
class DiskUse:
    """What the slabs of a directory take, in bytes."""

    path: Path
    num_slabs: int
    on_disk: int  # slabs grow as they are filled: at most `size`, together
    size: int
    free: int

    def __str__(self) -> str:
        slabs = "1 slab" if self.num_slabs == 1 else f"{self.num_slabs} slabs"
        limit = f"[file] size {format_size(self.size)}"
        return f"{slabs} in {self.path}, {show_size(self.on_disk)} of {limit}; {show_size(self.free)} free"


def slabs_in(directory: Path) -> list[Path]:
    """The slabs there; none if the directory cannot be read."""
    try:
        return [path for path in directory.iterdir() if SLAB_NAME.fullmatch(path.name) and path.is_file()]
    except OSError:
        return []


def disk_use(path: Path, size: int, free: int) -> DiskUse:
    """Of a directory, which need not be there yet, whose slabs may take `size` bytes of a disk with `free` left."""
    slabs = slabs_in(path)
    on_disk = sum(slab.stat().st_blocks * SECTOR for slab in slabs)
    return DiskUse(path, len(slabs), on_disk, size, free)


def require_directory(config: FileConfig) -> DiskUse | None:
    """Make the directory of [file] path, and try it. None: its disk does not do what it should, which may pass.

    ConfigError if the path cannot be used, or has too little room for the first slab of all.
    """
    path = config.path
    assert path is not None
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK, effective_ids=True):
            read_only = os.statvfs(path).f_flag & os.ST_RDONLY
            raise OSError(errno.EROFS if read_only else errno.EACCES, "not writable")
        use = disk_use(path, config.size, FileIO().free_bytes(path))
    except OSError as error:
        if error.errno not in _WRONG_PATH:
            return None
        why = _WRONG_PATH[error.errno]
        fix = "name a directory that this user can write in"
        raise ConfigError(f'[file] path "{path}": {why}; {fix}') from None
    if not use.num_slabs and use.size > use.free:  # likely a slip; slabs that are there keep what they have
        raise ConfigError(no_space(use.size, use.free))
    return use
