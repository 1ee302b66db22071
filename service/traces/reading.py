"""Reads traces of requests, every line checked: as they come, or whole with all that is wrong named."""

import gzip
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import BinaryIO, Final

from kvtier.service.traces import forms
from kvtier.service.traces.forms import TraceLine
from kvtier.tiers import ConfigError, FormatError

_MOST_FAULTS: Final = 20  # lines that are named, of those that are wrong
_LOG_FILES: Final = "lookup_hashes_*.jsonl*"  # of LMCache's directory

Progress = Callable[[int, int], None]  # bytes read of all


def read_trace(path: Path) -> Iterator[TraceLine]:
    """The requests of a trace (`.gz`: compressed), one after another, each line checked before it is handed out.

    ConfigError if the file cannot be read, FormatError with the number of the first line that is wrong.
    """
    for line in _each(Path(path), None):
        if isinstance(line, FormatError):
            raise line
        yield line


def load_lines(path: Path, limit: int | None = None, progress: Progress | None = None) -> list[TraceLine]:
    """The first `limit` requests of a trace: a file, or a directory of LMCache's lookup logs.

    ConfigError, also if a line is wrong: it names all such lines, up to twenty, each with its number and reason.
    """
    found: list[TraceLine] = []
    faults: list[str] = []
    num_faults = 0
    for line in _each(Path(path), progress):
        if isinstance(line, FormatError):
            num_faults += 1
            faults += [str(line)] if len(faults) < _MOST_FAULTS else []
        else:
            found.append(line)
        if limit is not None and len(found) >= limit:
            break
    if num_faults > len(faults):
        faults.append(f"{path}: {num_faults - len(faults)} more lines are wrong")
    if faults:
        raise ConfigError("\n".join(faults))
    if not found:
        raise ConfigError(f"{path}: no requests; name a trace that has some")
    return found


def _each(path: Path, progress: Progress | None) -> Iterator[TraceLine | FormatError]:
    """Every line as a request, or as what is wrong with it; nothing comes after a fault that ends the file."""
    last, read, file, number = 0, 0, path, 0
    try:
        files = sorted(path.glob(_LOG_FILES)) if path.is_dir() else [path]
        if not files:
            raise ConfigError(f"{path}: no {_LOG_FILES} there; name a trace, or a directory of LMCache's lookup logs")
        total = sum(os.path.getsize(file) for file in files)
        parser: Callable[[forms.Fields], TraceLine] | None = None
        for file in files:
            with file.open("rb") as raw:
                number = 0
                for number, line in _numbered(file, raw):
                    parser, request = _taken(file, number, line, parser)
                    if isinstance(request, TraceLine):
                        if request.timestamp < last:
                            why = f"timestamp {request.timestamp} is before the {last} of the line above"
                            request = FormatError(f"{file}:{number}: {why}")
                        else:
                            last = request.timestamp
                    yield request
                    if isinstance(request, forms.ForeignTrace):
                        return
                    if progress is not None and not number % 256:
                        progress(read + raw.tell(), total)
                read += raw.tell()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        yield FormatError(f"{file}: after line {number}: {error}")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}; name a trace that can be read") from error


def _numbered(file: Path, raw: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Lines with their numbers; a line past the limit comes cut, and then the file is over."""
    number = 0
    with gzip.open(raw) if file.suffix == ".gz" else nullcontext(raw) as stream:
        while line := stream.readline(forms.MAX_LINE + 1):
            number += 1
            yield number, line
            if len(line) > forms.MAX_LINE:
                return


def _taken(
    file: Path, number: int, line: bytes, parser: Callable[[forms.Fields], TraceLine] | None
) -> tuple[Callable[[forms.Fields], TraceLine] | None, TraceLine | FormatError]:
    """The line as a request or a fault; and the parser of the file, which its first whole line decides."""
    try:
        fields = forms.fields_of(line)
        parser = parser or forms.parser_of(forms.form_of(fields))
        return parser, parser(fields)
    except FormatError as error:
        return parser, type(error)(f"{file}:{number}: {error}")


def parse_line(line: bytes) -> TraceLine:
    """One line by itself, whatever its form. FormatError."""
    fields = forms.fields_of(line)
    return forms.parser_of(forms.form_of(fields))(fields)


def times_told(lines: Sequence[TraceLine]) -> bool:
    """Whether the trace says when its requests came."""
    return bool(lines) and all(line.has_time for line in lines) and any(line.timestamp for line in lines)
