"""Names a checkpoint: a name for its weights and one for its configuration, the same under every engine."""

import hashlib
import json
import logging
import os
import re
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import xxhash

from kvtier.tiers import ConfigError
from kvtier.tiers.config import format_size
from kvtier.tiers.naming import config_digest

_log = logging.getLogger(__name__)

_WEIGHTS: Final = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")  # the first kind that exists
_OF_FORMAT: Final = {"pt": ("*.pt",), "npcache": ("*.bin", "*.pt")}  # vLLM's and SGLang's formats with another order
_BESIDE: Final = (  # the last two are Mistral's: its images' settings, and what vLLM may read for config.json
    *("*.py", "adapter_config.json", "*processor_config.json", "*quant*_config.json", "tekken.json", "params.json"),
)
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_BLOB: Final = re.compile(r"[0-9a-f]{64}")  # a large file's name in the hub's cache: its SHA-256
_PIECE: Final = 4 << 20  # bytes read at a time
_NUM_READERS: Final = 8  # files read at once
_SLOW: Final = 5.0  # seconds between two warnings about a long read
_TICK: Final = 2_000_000_000  # ns: two changes within it may get the same timestamp
_MOST_KNOWN: Final = 4096  # digests cached
_NUM_SAMPLES: Final = 16  # pieces of a file compared before its cached digest is used
_SAMPLE: Final = 4096  # bytes of each
_ATTEMPTS: Final = 3  # at reading a file that changes during the read

_NEEDED: Final = {
    "config.json": "name a local checkpoint directory",
    "tokenizer.json": "save the tokenizer with the model",
}


@dataclass(frozen=True, slots=True)
class FileStamp:
    """Detects without reading it that a file was replaced or written to, even if size and mtime were kept."""

    path: Path
    device: int
    inode: int
    size: int
    modified: int  # ns
    changed: int  # ns: no program sets it

    @classmethod
    def of(cls, path: Path) -> Self:
        """Raises OSError if there is no such file."""
        found = path.stat()
        return cls(path, found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


@dataclass(frozen=True, slots=True)
class _Known:
    stamp: FileStamp
    samples: int
    digest: str


_KNOWN: Final[dict[Path, _Known]] = {}  # the oldest first


def name_of(path: Path) -> str:
    path = path.resolve()
    if path.parent.name == "snapshots":  # models--OWNER--NAME/snapshots/COMMIT
        return path.parent.parent.name.removeprefix("models--").replace("--", "/")
    return path.name


def revision_of(path: Path, load_format: str = "auto") -> str:
    """A name for the weights in a checkpoint directory, for `ModelIdentity.revision`.

    It is computed from the SHA-256 of each weight file, and of code and settings of adapters, processors and quantisers
    beside them: equal files have one name wherever they are. Files in the hub's cache are already named by it; others
    are read, again only when they change. `load_format`: the engine's, which may pick another kind of file. Raises
    ConfigError if there are no weights or they are being written, OSError if they are unreadable.
    """
    path = path.resolve()
    kinds = _OF_FORMAT.get(load_format, _WEIGHTS)
    weights, others = _named_files(path, kinds)
    if not weights and path.parent.name == "snapshots" and _COMMIT.fullmatch(path.name):
        return f"git:{path.name}"
    if not weights:
        fix = f"name a directory with one of {', '.join(kinds)}"
        raise ConfigError(f"checkpoint {path}: no weights there; {fix}")
    reading = _Reading(path, sum(file.stat().st_size for file in weights))
    with ThreadPoolExecutor(min(_NUM_READERS, len(weights), os.cpu_count() or 1), "kvtier-naming") as readers:
        digests = sorted(readers.map(reading.digest, weights))
    digests += [f"{file.name} {reading.digest(file)}" for file in others]
    return f"sha256:{hashlib.sha256(' '.join(digests).encode()).hexdigest()}"


def file_stamps(path: Path) -> tuple[FileStamp, ...]:
    """The stamps of all files that name a checkpoint. Raises OSError if one disappears meanwhile."""
    weights, others = _named_files(path)
    return tuple(map(FileStamp.of, [*weights, *others, *path.glob("config.json")]))


def _named_files(path: Path, kinds: Sequence[str] = _WEIGHTS) -> tuple[list[Path], list[Path]]:
    """Weights; code, and the settings of adapters, quantisers and what turns images, audio and video into an encoder's
    input.
    """
    return weight_files(path, kinds), sorted(file for pattern in _BESIDE for file in path.glob(pattern))


def weight_files(path: Path, kinds: Sequence[str] = _WEIGHTS) -> list[Path]:
    """The weight files of a checkpoint directory, sorted by name."""
    found = (sorted(path.glob(pattern)) for pattern in kinds)
    return next((files for files in found if files), [])


def config_digest_of(path: Path) -> str:
    """The `config_digest` of a checkpoint's config.json. A library's parsed form would differ between releases."""
    return config_digest(config_of(path))


def config_of(path: Path, file: str = "config.json") -> dict[str, Any]:
    """The checkpoint's configuration as saved. Raises ConfigError if there is none."""
    try:
        config = json.loads((path / file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"checkpoint {path}: {file} cannot be read ({error}); name a model's directory") from None
    if not isinstance(config, dict):
        raise ConfigError(f"checkpoint {path}: {file} holds no object; name a model's directory")
    return config


class _Reading:
    """Digests the files of one checkpoint, on any thread, and logs its progress."""

    def __init__(self, path: Path, total: int) -> None:
        self._path = path
        self._total = total
        self._lock = threading.Lock()
        self._read, self._logged_at = 0, time.monotonic()

    def digest(self, file: Path) -> str:
        """The file's SHA-256, in hex: from the name of a hub's blob, from the cache, or by reading it."""
        blob = file.resolve()
        is_named = blob.parent.name == "blobs" and _BLOB.fullmatch(blob.name)
        if is_named and file.is_symlink() and FileStamp.of(blob).changed <= file.lstat().st_ctime_ns:
            return blob.name  # unchanged since its link was made
        for _ in range(_ATTEMPTS):
            stamp, began = FileStamp.of(blob), time.time_ns()
            known = _KNOWN.get(blob)
            if known is not None and known.stamp == stamp and known.samples == _samples(blob, stamp.size):
                return known.digest
            digest = self._read_all(blob)
            samples = _samples(blob, stamp.size)
            if FileStamp.of(blob) == stamp:
                with self._lock:
                    self._keep(_Known(stamp, samples, digest), is_settled=began - stamp.changed > _TICK)
                return digest
        raise ConfigError(f"checkpoint {self._path}: {file.name} changes while it is read; start once it is written")

    def _keep(self, known: _Known, *, is_settled: bool) -> None:
        _KNOWN.pop(known.stamp.path, None)
        if is_settled:
            while len(_KNOWN) >= _MOST_KNOWN:
                del _KNOWN[next(iter(_KNOWN))]
            _KNOWN[known.stamp.path] = known

    def _read_all(self, file: Path) -> str:
        digest, buffer = hashlib.sha256(), bytearray(_PIECE)
        with file.open("rb", buffering=0) as opened, memoryview(buffer) as view:
            while num_read := opened.readinto(buffer):
                digest.update(view[:num_read])
                self._log_progress(num_read)
        return digest.hexdigest()

    def _log_progress(self, num_read: int) -> None:
        with self._lock:
            self._read += num_read
            if time.monotonic() - self._logged_at < _SLOW:
                return
            self._logged_at = time.monotonic()
            read, total = format_size(self._read), format_size(self._total)
        _log.warning("naming the weights in %s: %s of %s read", self._path, read, total)


def _samples(file: Path, size: int) -> int:
    """A digest of some pieces: if a file system's timestamps are unreliable, new weights still differ in these."""
    digest = xxhash.xxh3_64()
    with file.open("rb", buffering=0) as opened:
        for number in range(_NUM_SAMPLES):
            opened.seek(max(0, size - _SAMPLE) * number // (_NUM_SAMPLES - 1))
            digest.update(opened.read(_SAMPLE))
    return digest.intdigest()


def require_checkpoint(directory: Path) -> None:
    """Raise ConfigError if the directory is not a checkpoint with a tokenizer."""
    for name, fix in _NEEDED.items():
        if not (directory / name).is_file():
            raise ConfigError(f'--model "{directory}": no {name} there; {fix}')
