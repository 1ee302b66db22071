"""Beside a slab, what its model's fingerprint was made from: for people, and to compare models by."""

import json
import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Final, NamedTuple

from kvtier.tiers.file.slab_file import SLAB_NAME

_log = logging.getLogger(__name__)

_SUFFIX: Final = ".about.json"
_MOST: Final = 16  # slabs that are reported
_LONGEST: Final = 1 << 16  # bytes of such a file
_OF_RANKS: Final = ("share_across_tp", "tp_size"), ("share_across_pp", "pp_size")  # [cache] option, field
_RANGES: Final = {"tp_ranks", "pp_stages", "num_kv_heads", "layers"}  # of a rank: they differ if those sizes do


class ClosedModel(NamedTuple):
    fingerprint: bytes
    num_bytes: int
    about: dict[str, str]


def record_model(directory: Path, fingerprint: bytes, about: Mapping[str, str]) -> None:
    """Record what a slab's model was made from, and delete the records of removed slabs. A failure is logged."""
    new = directory / f"{fingerprint.hex()}{_SUFFIX}.new"  # overwrites one left by a killed process
    try:
        for path in directory.glob(f"*{_SUFFIX}"):
            if not _slab_of(path).exists():
                path.unlink(missing_ok=True)
        new.touch(0o600)
        new.write_text(json.dumps(dict(about)))
        new.replace(directory / f"{fingerprint.hex()}{_SUFFIX}")
    except OSError as error:
        with suppress(OSError):
            new.unlink()
        _log.warning("[file] path %s: its models are not recorded: %s", directory, error.strerror)


def record_beside(directory: Path, fingerprint: bytes, about: Mapping[str, str]) -> None:
    """`record_model` on a thread of its own: the disk may hang."""
    Thread(target=record_model, args=(directory, fingerprint, about), name="kvtier-note", daemon=True).start()


def closed_models(directory: Path | None, known: Collection[bytes]) -> list[ClosedModel]:
    """The directory's slabs of other fingerprints than those `known`, the last used first. Torn files are left out."""
    found: list[tuple[float, ClosedModel]] = []
    for path in () if directory is None else directory.glob(f"*{_SUFFIX}"):
        slab = _slab_of(path)
        with suppress(OSError, ValueError, RecursionError):
            if SLAB_NAME.fullmatch(slab.name) and path.stat().st_size <= _LONGEST:
                stat, about = slab.stat(), json.loads(path.read_bytes())
                if isinstance(about, dict) and (fingerprint := bytes.fromhex(slab.stem)) not in known:
                    fields = {str(name): str(value) for name, value in about.items()}
                    found.append((stat.st_mtime, ClosedModel(fingerprint, stat.st_size, fields)))
    return [model for _, model in sorted(found, key=lambda each: -each[0])[:_MOST]]


def options_that_share(here: Mapping[str, str], there: Mapping[str, str]) -> dict[str, str]:
    """The options of [cache], with values, by which `here` finds blocks of `there`; empty if more than sizes differ."""
    differing = {field for field in {*here, *there} if here.get(field) != there.get(field)}
    sizes = {option: there[field] for option, field in _OF_RANKS if field in differing and field in there}
    return sizes if differing <= {"model", *_RANGES, *(field for _, field in _OF_RANKS)} else {}


def apart_by_size(directory: Path) -> Iterator[str]:
    """Of each checkpoint whose slabs there, or in folders of ranks, are of several sizes: its name, and the sizes."""
    models = [model for folder in (directory, *directory.glob("tp*-pp*")) for model in closed_models(folder, ())]
    while models:
        first, *models = models
        alike = {model.fingerprint: options_that_share(first.about, model.about) for model in models}
        for option, field in _OF_RANKS:
            if found := {sizes[option] for sizes in alike.values() if option in sizes}:
                shown = " and ".join(sorted({first.about.get(field, "none"), *found}))
                yield f"{first.about.get('model', 'a model')}, {field} {shown}: [cache] {option}"
        models = [model for model in models if not alike[model.fingerprint]]


def _slab_of(path: Path) -> Path:
    return path.with_name(f"{path.name.removesuffix(_SUFFIX)}.slab")
