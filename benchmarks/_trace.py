"""Reads traces of requests in Mooncake's JSON lines, such as `kvtier trace` records; every line is checked."""

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvtier.tiers import ConfigError, FormatError

_MAX_LINE: Final = 8 << 20  # bytes of a line that is read: a prompt of a million blocks
_MAX_NUMBER: Final = 1 << 63
_FIELDS: Final = ("timestamp", "input_length", "output_length")


@dataclass(frozen=True, slots=True)
class TraceLine:
    """One request. Equal `hash_ids` are equal blocks; a chain's come head first."""

    timestamp: int  # milliseconds since the trace began
    input_length: int  # tokens
    output_length: int  # tokens; 0 if it was not known
    hash_ids: tuple[int, ...]


def read_trace(path: Path) -> Iterator[TraceLine]:
    """The requests of a trace (`.gz`: compressed), one after another, each line checked before it is handed out.

    ConfigError if the file cannot be read, FormatError with the number of the first line that is wrong.
    """
    path = Path(path)
    last, number = 0, 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            while line := file.readline(_MAX_LINE + 1):
                number += 1
                request = _parse(line)
                if request.timestamp < last:
                    raise FormatError(f"timestamp {request.timestamp} is before the {last} of the line above")
                last = request.timestamp
                yield request
    except FormatError as error:
        raise FormatError(f"{path}:{number}: {error}") from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise FormatError(f"{path}: after line {number}: {error}") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}; name a trace that can be read") from error


def _parse(line: bytes) -> TraceLine:
    if len(line) > _MAX_LINE:
        raise FormatError(f"longer than {_MAX_LINE} bytes")
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise FormatError("not a JSON object; was the file cut short?") from None
    if not isinstance(value, dict):
        raise FormatError("not a JSON object")
    timestamp, input_length, output_length = (_count(name, value.get(name)) for name in _FIELDS)
    ids = value.get("hash_ids")
    if not isinstance(ids, list):
        raise FormatError("hash_ids: not a list of numbers")
    if len(ids) > input_length:
        raise FormatError(f"hash_ids: {len(ids)} blocks for an input_length of {input_length} tokens")
    return TraceLine(timestamp, input_length, output_length, tuple(_count("hash_ids", number) for number in ids))


def _count(name: str, value: object) -> int:
    if type(value) is not int or not 0 <= value < _MAX_NUMBER:
        raise FormatError(f"{name}: {'missing' if value is None else 'not a whole number from 0 on'}")
    return value
