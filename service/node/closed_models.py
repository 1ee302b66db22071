"""A small file beside each slab says what its model was made from: for answers about slabs that are closed."""

import json
import logging
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from kvtier.tiers.file import SLAB_NAME

_log = logging.getLogger(__name__)
_SUFFIX: Final = ".about.json"
_MOST: Final = 16  # slabs that are told
_LONGEST: Final = 1 << 16  # bytes of such a file


class ClosedModel(NamedTuple):
    """A slab that no engine of this daemon has open, and the fields its fingerprint was made from."""

    fingerprint: bytes
    num_bytes: int
    about: dict[str, str]


def note_model(directory: Path, fingerprint: bytes, about: Mapping[str, str]) -> None:
    """Keep what a slab's model was made from, and forget it of slabs that are gone. A failure is logged."""
    new = directory / f"{fingerprint.hex()}{_SUFFIX}.new"  # one that was killed is written over
    try:
        for path in directory.glob(f"*{_SUFFIX}"):
            if not _slab_of(path).exists():
                path.unlink(missing_ok=True)
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(dict(about), file)
        new.replace(directory / f"{fingerprint.hex()}{_SUFFIX}")
    except OSError as error:
        with suppress(OSError):
            new.unlink()
        _log.warning("[file] path %s: what its models are is not kept: %s", directory, error.strerror)


def closed_models(directory: Path | None, known: Collection[bytes]) -> list[ClosedModel]:
    """The directory's slabs of other fingerprints than those `known`, the last used first. Torn files are left out."""
    if directory is None:
        return []
    found = [each for each in _read_all(directory) if each[1].fingerprint not in known]
    return [model for _, model in sorted(found, key=lambda each: -each[0])[:_MOST]]


def _read_all(directory: Path) -> Iterator[tuple[float, ClosedModel]]:
    for path in directory.glob(f"*{_SUFFIX}"):
        slab = _slab_of(path)
        with suppress(OSError, ValueError, RecursionError):
            if SLAB_NAME.fullmatch(slab.name) and path.stat().st_size <= _LONGEST:
                stat, about = slab.stat(), json.loads(path.read_bytes())
                if isinstance(about, dict):
                    fields = {str(name): str(value) for name, value in about.items()}
                    yield stat.st_mtime, ClosedModel(bytes.fromhex(slab.stem), stat.st_size, fields)


def _slab_of(path: Path) -> Path:
    return path.with_name(f"{path.name.removesuffix(_SUFFIX)}.slab")
