"""The slab tier from the configuration section [file]: opening it, its directory, the doctor's checks. `TierModule`."""

import errno
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvtier.tiers import (
    BATCH_BYTES,
    BlockShape,
    ConfigError,
    ConfiguredTier,
    Finding,
    FormatError,
    error,
    key_id,
    load_key,
    ok,
    refusal,
    warning,
)
from kvtier.tiers.config import Config, FileConfig, format_size, show_size
from kvtier.tiers.file import slab
from kvtier.tiers.file.about import apart_by_size
from kvtier.tiers.file.file_io import FileIO, PayloadIO
from kvtier.tiers.file.slab_file import SLAB_NAME, no_space
from kvtier.tiers.file.store import FileStore
from kvtier.tiers.naming import FORMAT_VERSION

SECTOR: Final = 512  # bytes in which st_blocks counts
# Errors of the path, not of the disk behind it: waiting does not help.
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
    """Of a directory, which may not exist yet, whose slabs may take `size` bytes of a disk with `free` left."""
    slabs = slabs_in(path)
    on_disk = sum(slab.stat().st_blocks * SECTOR for slab in slabs)
    return DiskUse(path, len(slabs), on_disk, size, free)


def require_directory(config: FileConfig) -> DiskUse | None:
    """Make the directory of [file] path, and try it. None: the disk fails now, perhaps not for long.

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
    if not use.num_slabs and use.size > use.free:  # likely a slip; existing slabs keep their size
        raise ConfigError(no_space(use.size, use.free))
    return use


_CALL_BYTES: Final = 4 << 20
_NUM_THREADS: Final = 2  # as many as the file tier has
_SPAN_BYTES: Final = 256 << 20  # most bytes of the probe's file
_SECONDS: Final = 0.8  # seconds of writing, then of reading
_PATIENCE: Final = 5.0  # seconds without a call that ends, after which a disk counts as hung
_LOOK: Final = 0.05  # seconds between two checks of that
_MOST_NAMED: Final = 4  # slabs in one line
_SLOW: Final = 0.5e9  # bytes per second; a local NVMe reads and writes several times that


@dataclass(frozen=True, slots=True)
class DiskRates:
    write: float
    read: float
    is_direct: bool


def check_disk(config: FileConfig) -> list[Finding]:
    """Free space, O_DIRECT and rates of [file] path."""
    if config.path is None:
        return [ok("file tier", "off: no [file] path")]
    home = _nearest(config.path)
    if home is None:
        fix = "choose another [file] path, or put a directory there"
        return [error("file tier", f'[file] path "{config.path}": not a directory', fix)]
    try:
        free = FileIO().free_bytes(home)
        findings = [_check_room(config, free)]
        if not os.access(home, os.W_OK | os.X_OK):
            fix = f"let this user write in {home}, or choose another [file] path"
            return [*findings, error("disk rate", f'[file] path "{config.path}": no permission to write', fix)]
        return findings + _judge(probe_disk(home, free), config)
    except OSError as failed:
        found = f'[file] path "{config.path}": {failed.strerror or failed}'
        return [error("disk rate", found, "repair the disk, or choose another [file] path")]


def check_key(config: FileConfig) -> Finding:
    """Whether [file] key_file holds a key that fits the slabs of [file] path. Reads the slabs' headers."""
    name, wanted = "encryption", None
    if config.key_file is not None:
        try:
            wanted = key_id(load_key(config.key_file, "[file] key_file"))
        except ConfigError as failed:
            return refusal(name, failed)
    for path, superblock, _ in _headers(config):
        try:
            slab.require_key(superblock, wanted, path.name)
        except ConfigError as failed:
            return refusal(name, failed, "; it was left untouched: ")
    if wanted is None:
        return ok(name, "off: a reader of [file] path can reconstruct prompts")
    return ok(name, f"[file] key_file holds key {wanted.hex()}")


def check_naming(config: FileConfig) -> list[Finding]:
    """A warning if slabs of [file] path have names of an older format, which are not found. Reads their headers."""
    found_old = [(path, size) for path, superblock, size in _headers(config) if superblock.naming < FORMAT_VERSION]
    if not found_old:
        return []
    old, num_bytes = [path.name for path, _ in found_old], sum(size for _, size in found_old)
    made = "made by a kvtier to which the name of a model's directory was part of its KV's name"
    found = f"{len(old)} of [file] path, {show_size(num_bytes)}: {made}; engines find nothing there, but make new slabs"
    more = f" and {len(old) - _MOST_NAMED} more" if len(old) > _MOST_NAMED else ""
    return [warning("older slabs", found, f"remove {', '.join(old[:_MOST_NAMED])}{more}")]


def check_sizes(config: FileConfig) -> list[Finding]:
    """A warning if slabs of [file] path differ only in how many ranks they are laid out for: they share nothing."""
    apart = [] if config.path is None else list(apart_by_size(config.path))
    if not apart:
        return []
    found = f"blocks that find each other only with one value: {'; '.join(apart)}"
    return [warning("sizes of engines", found, "give all engines one value, or remove the other slabs")]


def _headers(config: FileConfig) -> Iterator[tuple[Path, slab.Superblock, int]]:
    """Each slab of [file] path, its superblock, and the bytes it takes. Opening a slab reports its errors."""
    for path in slabs_in(config.path) if config.path else []:
        with suppress(OSError, FormatError), path.open("rb") as file:
            superblock = slab.decode(file.read(slab.HEADER_BYTES), path.name)
            yield path, superblock, os.fstat(file.fileno()).st_blocks * SECTOR


def _nearest(path: Path) -> Path | None:
    """The directory, or its nearest existing parent: kvtier creates the rest. None: a file is in the way."""
    for found in (path, *path.absolute().parents):
        if os.path.lexists(found):
            return found if found.is_dir() else None
    return None


def _check_room(config: FileConfig, free: int) -> Finding:
    """Whether free space and what slabs take together hold [file] size, as checked at start."""
    assert config.path is not None
    use = disk_use(config.path, config.size, free)
    if use.size > use.free + use.on_disk:
        verdict = warning if use.num_slabs else error  # a start is refused only for the first slab of a directory
        return verdict("free space", str(use), "lower [file] size, or choose another [file] path")
    return ok("free space", str(use))


def _judge(rates: DiskRates | None, config: FileConfig) -> list[Finding]:
    if rates is None:
        found = f"no answer within {_PATIENCE:.0f} s"
        return [error("disk rate", found, "repair the disk, or choose another [file] path")]
    if rates.is_direct:
        direct = ok("O_DIRECT", "works there")
    elif config.mode in ("buffered", "mmap"):
        direct = ok("O_DIRECT", f'refused there; [file] mode "{config.mode}" does without')
    else:
        found = "refused there: the page cache holds a second copy of every block"
        direct = warning("O_DIRECT", found, "choose a [file] path on ext4 or XFS")
    found = f"write {rates.write / 1e9:.2f} GB/s, read {rates.read / 1e9:.2f} GB/s"
    if min(rates.write, rates.read) < _SLOW:
        fix = "choose a [file] path on a local NVMe; a slow tier helps long prompts only"
        return [direct, warning("disk rate", found, fix)]
    return [direct, ok("disk rate", found)]


def probe_disk(directory: Path, free: int) -> DiskRates | None:
    """Write and read at most a quarter of `free` bytes, 2 s. None: no answer in time. OSError if refused."""
    span = min(_SPAN_BYTES, free // 4) // (_NUM_THREADS * _CALL_BYTES) * _NUM_THREADS * _CALL_BYTES
    if not span:
        raise OSError(f"too little free space to measure in: {show_size(free)}")
    answer: list[DiskRates | OSError] = []
    moved_at = [time.monotonic()]

    def moved() -> None:
        moved_at[0] = time.monotonic()

    def measure() -> None:
        try:
            answer.append(_measure(directory, span, moved))
        except OSError as failed:
            answer.append(failed)

    thread = threading.Thread(target=measure, name="kvtier-doctor-disk", daemon=True)
    thread.start()
    while thread.is_alive() and time.monotonic() - moved_at[0] < _PATIENCE:
        thread.join(_LOOK)  # on a busy machine a disk is slow, and does not hang
    if not answer:
        return None
    if isinstance(answer[0], OSError):
        raise answer[0]
    return answer[0]


def _measure(directory: Path, span: int, moved: Callable[[], None]) -> DiskRates:
    """`moved` is called after every call that moved bytes."""
    io = FileIO()
    with ExitStack() as undo:
        fd, name = tempfile.mkstemp(prefix=".kvtier-doctor-", dir=directory)
        undo.callback(io.close, fd)
        try:
            payload = PayloadIO(io, Path(name), fd, slot_bytes=_CALL_BYTES, mode="direct")
        finally:
            os.unlink(name)  # before any byte is written, so that a kill leaves nothing
        undo.callback(payload.close)
        is_direct = payload.mode == "direct"  # not refused there
        io.allocate(fd, 0, span)

        def write(buffer: memoryview, offset: int) -> None:
            payload.write(offset, [buffer])
            if not is_direct:
                io.sync(fd)
            moved()

        def read(buffer: memoryview, offset: int) -> None:
            if not is_direct:
                os.posix_fadvise(fd, offset, len(buffer), os.POSIX_FADV_DONTNEED)
            payload.read(offset, [buffer])
            moved()

        part = span // _NUM_THREADS
        write_rate, covered = _rate(write, part, part)
        io.sync(fd)
        moved()
        read_rate, _ = _rate(read, part, min(covered, part))  # beyond that no data was written
        return DiskRates(write_rate, read_rate, is_direct)


def _rate(transfer: Callable[[memoryview, int], None], part: int, covered: int) -> tuple[float, int]:
    """Bytes per second over all threads, which cycle through `covered` bytes each, and the fewest that one moved."""
    moved = [0] * _NUM_THREADS
    failures: list[OSError] = []
    noise = os.urandom(_CALL_BYTES)  # random, or a compressing file system would look fast
    buffers = [memoryview(mmap.mmap(-1, _CALL_BYTES)) for _ in moved]
    for buffer in buffers:
        buffer[:] = noise
    begin = time.perf_counter()

    def work(index: int) -> None:
        try:
            while time.perf_counter() - begin < _SECONDS or not moved[index]:
                transfer(buffers[index], index * part + moved[index] % covered)
                moved[index] += _CALL_BYTES
        except OSError as failed:
            failures.append(failed)

    threads = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(_NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return sum(moved) / (time.perf_counter() - begin), min(moved)


_JOINED: Final = 16  # blocks of requests that want one each: as many as a read has in flight


def configured(config: Config, fingerprint: bytes, shape: BlockShape) -> ConfiguredTier | None:
    """None if [file] names no path. Raises ConfigError if [file] key_file holds no key."""
    path = config.file.path
    if path is None:
        return None
    key = load_key(config.file.key_file, "[file] key_file") if config.file.key_file else None

    def open_slab() -> FileStore:
        return FileStore.open(
            path,
            fingerprint,
            slot_bytes=shape.block_bytes,
            block_size=shape.block_size,
            size=config.file.size,
            mode=config.file.mode,
            durable=config.file.durable,
            key=key,
            partial_blocks=config.cache.partial_blocks,
        )

    joined = max(1, min(_JOINED, BATCH_BYTES // shape.block_bytes))
    return ConfiguredTier(open_slab, config.file.deadline, joined)


def checked(config: Config) -> str | None:
    """Makes the directory if need be, and reads the key."""
    if config.file.path is None:
        return None
    if config.file.key_file is not None:
        load_key(config.file.key_file, "[file] key_file")
    use = require_directory(config.file)
    return f"[file] {use if use is not None else f'{config.file.path} does not answer as it should'}"


def answers(config: Config) -> list[Finding]:
    """Whether the directory can be used. One that is not there is made when a model's slab is opened."""
    path = config.file.path
    if path is None or not path.exists() or (path.is_dir() and os.access(path, os.W_OK | os.X_OK, effective_ids=True)):
        return []
    return [error("file", f'[file] path "{path}": no directory that this user can write in', "make it one")]


def examine(config: Config) -> list[Finding]:
    """The disk under [file] path, the key, old slabs. Some seconds; writes one file there and removes it."""
    file = config.file
    return [*check_disk(file), check_key(file), *check_naming(file), *check_sizes(file)]
