"""Reads and validates a checkpoint's config.json before torch is imported: its sizes must be usable."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from kvtier.tiers import ConfigError

CONFIG_FIX: Final = "name a checkpoint's directory or its config.json"
_MOST_BYTES: Final = 16 << 20  # of a file
_MOST_MODULES: Final = 4096  # layers, or experts of one: each is instantiated, without memory
_MOST_WHOLE: Final = 1 << 40
_WHOLE: Final = (
    "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size", "head_dim", "vocab_size",
)  # fmt: skip


def read_config(path: Path) -> tuple[Path, dict[str, Any]]:
    """The file that `path` names, itself or its directory, and its fields. ConfigError names the problem."""
    file = path if path.is_file() else path / "config.json"
    raw = _object_in(file)
    if not isinstance(raw.get("model_type"), str):
        raise ConfigError(f"{file}: model_type: missing, or no name; {CONFIG_FIX}")
    for name, value in fields_of(raw):
        least = 1 if name in raw else 0  # unused parts have 0
        if name in _WHOLE and not (value is None or isinstance(value, list)) and not _is_whole(value, least):
            raise ConfigError(
                f"{file}: {name} {value!r:.40}: not a whole number from {least} to {_MOST_WHOLE}; {CONFIG_FIX}"
            )
        if isinstance(value, int) and value > _MOST_MODULES and _counts_modules(name):
            raise ConfigError(f"{file}: {name} {value!r:.40}: more than {_MOST_MODULES}; {CONFIG_FIX}")
    return file, raw


def fields_of(raw: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every field and its value, including those of nested parts."""
    parts: list[Any] = [raw]
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            yield from part.items()
            parts += part.values()
        elif isinstance(part, list):
            parts += part


def _object_in(file: Path) -> dict[str, Any]:
    try:
        if file.exists() and not file.is_file():
            raise ConfigError(f"{file}: not a plain file; {CONFIG_FIX}")
        with file.open("rb") as opened:
            data = opened.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise ConfigError(f"{file}: more than {_MOST_BYTES >> 20} MiB; {CONFIG_FIX}")
        raw = json.loads(data.decode())
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}; {CONFIG_FIX}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: not JSON ({error}); {CONFIG_FIX}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{file}: not a JSON object; {CONFIG_FIX}")
    return raw


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= _MOST_WHOLE


def _counts_modules(name: str) -> bool:
    return ("layer" in name or "expert" in name) and "size" not in name and "dim" not in name
