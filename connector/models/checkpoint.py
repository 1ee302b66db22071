"""Names a checkpoint: a name for its weights and one for its configuration, the same under every engine."""

import functools
import json
import logging
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import xxhash

from kvtier.tiers import ConfigError
from kvtier.tiers.config import format_size
from kvtier.tiers.naming import config_digest

_log = logging.getLogger(__name__)

_WEIGHTS: Final = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")  # the first kind that exists
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_PIECE: Final = 16 << 20  # bytes read at a time
_SLOW: Final = 5.0  # seconds between two log lines about a long read


def name_of(path: Path) -> str:
    path = path.resolve()
    if path.parent.name == "snapshots":  # models--OWNER--NAME/snapshots/COMMIT
        return path.parent.parent.name.removeprefix("models--").replace("--", "/")
    return path.name


def revision_of(path: Path) -> str:
    """A name for the weights in a checkpoint directory, for `ModelIdentity.revision`.

    A snapshot of a model hub is named by its commit. Any other directory is named by the xxh3-128 of its weight files,
    and of code and adapter settings beside them. The files are read again only when they change. Raises ConfigError if
    there are no weights.
    """
    if path.parent.name == "snapshots" and _COMMIT.fullmatch(path.name):
        return f"git:{path.name}"
    files = weight_files(path)
    if not files:
        fix = f"name a directory with one of {', '.join(_WEIGHTS)}"
        raise ConfigError(f"checkpoint {path}: no weights there; {fix}")
    files += sorted([*path.glob("*.py"), *path.glob("adapter_config.json")])
    stamp = tuple((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    return _digest(path, stamp)


def weight_files(path: Path) -> list[Path]:
    """The weight files of a checkpoint directory, sorted by name."""
    found = (sorted(path.glob(pattern)) for pattern in _WEIGHTS)
    return next((files for files in found if files), [])


def config_digest_of(path: Path) -> str:
    """The `config_digest` of a checkpoint's config.json. A library's parsed form would differ between releases."""
    return config_digest(config_of(path))


def config_of(path: Path) -> dict[str, Any]:
    """The checkpoint's configuration as saved. Raises ConfigError if there is none."""
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"checkpoint {path}: config.json cannot be read ({error}); name a model's directory"
        ) from None
    if not isinstance(config, dict):
        raise ConfigError(f"checkpoint {path}: config.json holds no object; name a model's directory")
    return config


@functools.lru_cache(maxsize=16)
def _digest(path: Path, stamp: tuple[tuple[str, int, int], ...]) -> str:
    """xxh3-128 over names and bytes of the files in `stamp`, the cache key: files that change are read again."""
    digest = xxhash.xxh3_128()
    total, read, last = sum(size for _, size, _ in stamp), 0, time.monotonic()
    for name, size, _ in stamp:
        digest.update(f"{name} {size}".encode())
        for piece in _pieces(path / name):
            digest.update(piece)
            read += len(piece)
            if time.monotonic() - last > _SLOW:
                last = time.monotonic()
                _log.warning("naming the weights in %s: %s of %s read", path, format_size(read), format_size(total))
    return f"xxh3:{digest.hexdigest()}"


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as file:
        while piece := file.read(_PIECE):
            yield piece
