"""Requests of traces: read line by line, each error named, and as arrays, ready to be replayed."""

import gzip
import json
import math
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final, Literal, TypeVar, get_args

import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from kvtier.tiers import ConfigError, FormatError

Hint = Literal["goes_on", "tool", "finished"]
Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Size = Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]
Seconds = Annotated[float, Meta(ge=0, le=1e12)]


class TraceLine(Struct, frozen=True):
    """One request. Equal `hash_ids` are equal blocks, head first. Missing fields have their defaults."""

    timestamp: Count  # milliseconds since the trace began
    input_length: Count  # tokens
    output_length: Count  # tokens; 0 if it was not known
    hash_ids: tuple[Count, ...]
    block_size: Size | None = None  # tokens
    answer_ids: tuple[Count, ...] | None = None  # the full blocks of its answer behind those of the prompt
    ended: Count | None = None  # milliseconds since the trace began
    hint: Hint | None = None
    tenant: Count | None = None
    has_time: bool = True  # whether the line has `timestamp`


MAX_LINE: Final = 8 << 20  # bytes of a line that is read: a prompt of a million blocks
HINTS: Final[tuple[Hint, ...]] = get_args(Hint)

Fields = dict[str, Any]

# A field of another kind of file, and what such a file is.
_FOREIGN: Final[Mapping[str, str]] = {
    "custom_id": "a batch of OpenAI requests: it has texts, and no names of blocks",
    "messages": "a list of chats: it has texts, and no names of blocks",
    "conversations": "a list of ShareGPT conversations: it has texts, and no names of blocks",
    "prompt": "a list of prompts: it has texts, and no names of blocks",
    "block_hashes": "KV events: they list blocks stored and removed, and no requests",
    "ContextTokens": "a trace of lengths alone, without names of blocks",
    "traceEvents": "a profile of a program",
}
_KNOWN: Final = "name a trace in Mooncake's form, one of `kvtier trace`, or a lookup log of LMCache's"


class ForeignTrace(FormatError):
    """A file of a form without requests by their blocks: none of its lines can be read."""


def fields_of(line: bytes) -> Fields:
    """The JSON object of a line. FormatError says what is wrong."""
    if len(line) > MAX_LINE:
        raise FormatError(f"longer than {MAX_LINE} bytes")
    if line.startswith(b"\x1f\x8b"):
        raise ForeignTrace("compressed by gzip; give the file a name that ends in .gz")
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        if line.count(b",") and not line.lstrip().startswith((b"{", b"[")) and line.isascii() and line[:1].isalpha():
            raise ForeignTrace(f"comma-separated values, not JSON lines; {_KNOWN}") from None
        raise FormatError("not a JSON object; was the file cut short?") from None
    if not isinstance(value, dict):
        raise FormatError("not a JSON object; write one a line" if isinstance(value, list) else "not a JSON object")
    return value


F = TypeVar("F", bound=Struct)


def _checked(fields: Fields, form: type[F]) -> F:
    """The fields of this form; others are left out. FormatError names the first that is missing or wrong."""
    try:
        return msgspec.convert(fields, form)
    except msgspec.ValidationError as error:
        why, _, place = str(error).partition(" - at `$.")
        raise FormatError(f"{place[:-1]}: {why}" if place else why) from None


def mooncake(fields: Fields) -> TraceLine:
    """A line in Mooncake's form, with the fields `kvtier trace` adds. FormatError names a wrong field."""
    given = {name: value for name, value in fields.items() if value is not None}
    for name in ("timestamp", "ended"):  # some writers give floats
        if isinstance(value := given.get(name), float) and math.isfinite(value):
            given[name] = math.floor(value)
    line = _checked({"timestamp": 0, "output_length": 0, **given, "has_time": "timestamp" in given}, TraceLine)
    if len(line.hash_ids) > line.input_length:
        raise FormatError(f"hash_ids: {len(line.hash_ids)} blocks for an input_length of {line.input_length} tokens")
    for name, ids in (("hash_ids", line.hash_ids), ("answer_ids", line.answer_ids or ())):
        if len(set(ids)) < len(ids):
            raise FormatError(f"{name}: a block stands there twice; each is named by all before it")
    return line


class _BailianTime(Struct):
    timestamp: Seconds | None = None


def bailian(fields: Fields) -> TraceLine:
    """A line of Alibaba's Bailian traces: Mooncake's form with seconds, and blocks of 16 tokens."""
    seconds = _checked(fields, _BailianTime).timestamp
    time = None if seconds is None else int(1000 * seconds)
    kept = {name: fields.get(name) for name in ("input_length", "output_length", "hash_ids")}
    return mooncake({**kept, "timestamp": time, "block_size": fields.get("block_size", 16)})


class _Lookup(Struct):
    chunk_hashes: list[str]
    chunk_size: Size
    seq_len: Count
    timestamp: Seconds | None = None
    model_name: str = ""


class LookupLog:
    """Lines of LMCache's lookup logs: chunks' names become numbers; times count from the first line."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, str], int] = {}
        self._start: float | None = None

    def __call__(self, fields: Fields) -> TraceLine:
        each, numbers = _checked(fields, _Lookup), self._numbers
        names, size, length, seconds = each.chunk_hashes, each.chunk_size, each.seq_len, each.timestamp
        if len(names) * size > length:
            raise FormatError(f"chunk_hashes: {len(names)} chunks of {size} for a seq_len of {length} tokens")
        if len(set(names)) < len(names):
            raise FormatError("chunk_hashes: a name stands there twice")
        if self._start is None:
            self._start = seconds
        return TraceLine(
            timestamp=0 if seconds is None or self._start is None else int(1000 * max(0.0, seconds - self._start)),
            input_length=length,
            output_length=0,
            hash_ids=tuple(numbers.setdefault((each.model_name, name), len(numbers)) for name in names),
            block_size=size,
            has_time=seconds is not None,
        )


def parser_of(fields: Fields) -> Callable[[Fields], TraceLine]:
    """What reads the lines of a file with this one. ForeignTrace names a file of another kind."""
    if "hash_ids" in fields:
        return bailian if "chat_id" in fields else mooncake
    if "chunk_hashes" in fields:
        return LookupLog()
    for name, what in _FOREIGN.items():
        if name in fields:
            raise ForeignTrace(f"it has {name!r}: this is {what}; {_KNOWN}")
    if fields.keys().isdisjoint(("timestamp", "input_length", "output_length")):
        named = ", ".join(map(repr, sorted(fields)[:6]))[:80]
        raise ForeignTrace(f"no hash_ids among {named or 'no fields'}; {_KNOWN}")
    return mooncake


# --- reading ---------------------------------------------------------------------------------------------------------

_MOST_FAULTS: Final = 20  # wrong lines that are listed
_LOG_FILES: Final = "lookup_hashes_*.jsonl*"  # of LMCache's directory

Progress = Callable[[int, int], None]  # bytes read of all


def read_trace(path: Path) -> Iterator[TraceLine]:
    """The requests of a trace (`.gz`: compressed), each line checked. ConfigError; FormatError with its number."""
    for line in _each(Path(path), None):
        if isinstance(line, FormatError):
            raise line
        yield line


def load_lines(path: Path, limit: int | None = None, progress: Progress | None = None) -> list[TraceLine]:
    """The first `limit` requests of a file or LMCache's directory. ConfigError lists up to twenty wrong lines."""
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
    """Every line as a request, or as its error; a fault that ends the file is the last."""
    last, read, file, number = 0, 0, path, 0
    try:
        files = sorted(path.glob(_LOG_FILES)) if path.is_dir() else [path]
        if not files:
            raise ConfigError(f"{path}: no {_LOG_FILES} there; name a trace, or a directory of LMCache's lookup logs")
        total = sum(os.path.getsize(file) for file in files)
        parser: Callable[[Fields], TraceLine] | None = None
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
                    if isinstance(request, ForeignTrace):
                        return
                    if progress is not None and not number % 256:
                        progress(read + raw.tell(), total)
                read += raw.tell()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        yield FormatError(f"{file}: after line {number}: {error}")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}; name a trace that can be read") from error


def _numbered(file: Path, raw: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Lines with their numbers; a line past the limit is cut, and ends the file."""
    number = 0
    with gzip.open(raw) if file.suffix == ".gz" else nullcontext(raw) as stream:
        while line := stream.readline(MAX_LINE + 1):
            number += 1
            yield number, line
            if len(line) > MAX_LINE:
                return


def _taken(
    file: Path, number: int, line: bytes, parser: Callable[[Fields], TraceLine] | None
) -> tuple[Callable[[Fields], TraceLine] | None, TraceLine | FormatError]:
    """The line as a request or a fault, and the parser of the file, set by its first whole line."""
    try:
        fields = fields_of(line)
        parser = parser or parser_of(fields)
        return parser, parser(fields)
    except FormatError as error:
        return parser, type(error)(f"{file}:{number}: {error}")


def parse_line(line: bytes) -> TraceLine:
    fields = fields_of(line)
    return parser_of(fields)(fields)


# --- the blocks of answers -------------------------------------------------------------------------------------------

_MOST_BLOCKS: Final = 1 << 20  # of one answer: the most that a line can have of a prompt

Ids = Sequence[int]


def answers_of(lines: Sequence[TraceLine], prompts: Sequence[Ids], size: int, assumed: list[str]) -> list[Ids]:
    """For each request the full blocks of its answer, behind those of its prompt.

    If the trace does not list them, they come from the next turn: the first later prompt that begins with all full
    blocks of this one, two or more, and is longer than it with its answer. Other answers get blocks that no request
    uses again. Assumptions are added to `assumed`.
    """
    answers: list[Ids] = [line.answer_ids or () for line in lines]
    unknown = [line.answer_ids is None and line.output_length > 0 for line in lines]
    if any(unknown):
        known = _from_next_turns(lines, prompts, unknown)
        fresh = 1 + max((number for line in lines for number in (*line.hash_ids, *(line.answer_ids or ()))), default=0)
        for i in (i for i, is_unknown in enumerate(unknown) if is_unknown):
            count = (lines[i].input_length + lines[i].output_length) // size - len(prompts[i])
            if count > _MOST_BLOCKS:
                what = f"output_length {lines[i].output_length}: {count} blocks of {size} tokens"
                raise ConfigError(f"{what}, of one answer at most {_MOST_BLOCKS} are simulated; count tokens there")
            found = known.get(i, ())[:count]
            answers[i] = (*found, *range(fresh, fresh + count - len(found)))
            fresh += count - len(found)
        assumed.append("answers: their blocks are those of the next turn's prompt; without a next turn, of no other")
    if all(line.answer_ids is None and not line.output_length for line in lines):
        assumed.append("answers: no lengths are given, so only prompts are stored, and each counts as short")
    return answers


def _from_next_turns(lines: Sequence[TraceLine], prompts: Sequence[Ids], unknown: Sequence[bool]) -> dict[int, Ids]:
    """Request → blocks of its next turn's prompt behind its own full blocks."""
    waiting: dict[int, int] = {}  # last full block of a prompt → the request, until its next turn is found
    known: dict[int, Ids] = {}
    for i, (line, prompt) in enumerate(zip(lines, prompts, strict=True)):
        for block in reversed(prompt):
            before = waiting.get(block)
            if before is not None and line.input_length > lines[before].input_length + lines[before].output_length:
                known[before] = prompt[len(prompts[before]) :]
                del waiting[block]
                break
        if unknown[i] and len(prompt) > 1:
            waiting[prompt[-1]] = i
    return known


# --- the whole trace -------------------------------------------------------------------------------------------------

_MOST_BLOCK: Final = 1 << 20  # tokens
_GAP: Final = 1.0  # seconds between two requests if the trace has no times


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """Requests in order. A request's blocks are `blocks[starts[i]:starts[i + 1]]`: its prompt's, then its answer's."""

    block_size: int  # tokens
    blocks: NDArray[np.int64]  # numbers from 0 on, each a block of one name
    starts: NDArray[np.int64]  # [requests + 1]
    num_prompt: NDArray[np.int64]  # of a request's blocks
    num_tokens: NDArray[np.int64]  # of its prompt
    num_output: NDArray[np.int64]  # tokens
    begun: NDArray[np.float64]  # seconds
    hints: NDArray[np.int8]  # 0 for none, then as in HINTS
    tenants: NDArray[np.int64]
    assumed: tuple[str, ...] = field(default=())

    def __len__(self) -> int:
        return len(self.num_prompt)

    @property
    def num_names(self) -> int:
        return int(self.blocks.max()) + 1 if len(self.blocks) else 0

    def chain(self, request: int) -> NDArray[np.int64]:
        return self.blocks[self.starts[request] : self.starts[request + 1]]


def load_trace(
    path: Path, *, block_size: int | None = None, limit: int | None = None, progress: Progress | None = None
) -> RequestTrace:
    """The first `limit` requests of a trace; `block_size` if the trace has none. ConfigError lists wrong lines."""
    lines = load_lines(path, limit, progress)
    try:
        return trace_of(lines, block_size=block_size)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def trace_of(lines: Sequence[TraceLine], *, block_size: int | None = None) -> RequestTrace:
    assumed: list[str] = []
    size = _block_size(lines, block_size, assumed)
    prompts = [line.hash_ids[: line.input_length // size] for line in lines]
    answers = answers_of(lines, prompts, size, assumed)
    numbers: dict[int, int] = {}
    blocks = np.fromiter(
        (
            numbers.setdefault(number, len(numbers))
            for prompt, answer in zip(prompts, answers, strict=True)
            for number in (*prompt, *answer)
        ),
        np.int64,
    )
    lengths = [len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True)]
    if lines and all(line.has_time for line in lines) and any(line.timestamp for line in lines):
        begun = np.array([line.timestamp / 1e3 for line in lines])
    else:
        begun = _GAP * np.arange(len(lines))
        assumed.append(f"times: none are given, so a request comes every {_GAP:g} s")
    if all(line.tenant is None for line in lines) and any(line.hint for line in lines):
        assumed.append("tenants: none are given, so all hints count as one client's")
    return RequestTrace(
        size,
        blocks,
        np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]),
        np.array([len(prompt) for prompt in prompts], np.int64),
        np.array([line.input_length for line in lines], np.int64),
        np.array([line.output_length for line in lines], np.int64),
        begun,
        np.array([0 if line.hint is None else 1 + HINTS.index(line.hint) for line in lines], np.int8),
        np.array([line.tenant or 0 for line in lines], np.int64),
        tuple(assumed),
    )


def _block_size(lines: Sequence[TraceLine], given: int | None, assumed: list[str]) -> int:
    """The trace's block size, else the one given, else the only one that the lengths of all requests allow."""
    sizes = {line.block_size for line in lines}
    if len(sizes) > 1:
        raise ConfigError("block_size: not the same in all lines; simulate each part by itself")
    (size,) = sizes
    if size is not None:
        if given not in (None, size):
            raise ConfigError(f"--block-size {given}: the trace says {size}; leave the option out")
        return size
    lowest, highest = _sizes(lines)
    if given is not None:
        if not lowest <= given <= highest:
            raise ConfigError(f"--block-size {given}: its requests have blocks of {lowest} to {highest} tokens")
        return given
    exact = {line.input_length / len(line.hash_ids) for line in lines if line.hash_ids}
    powers = [size for size in (1 << n for n in range(21)) if lowest <= size <= highest]
    if len(exact) == 1 and (only := exact.pop()).is_integer():
        size = int(only)
    elif lowest == highest:
        size = lowest
    elif len(powers) == 1:
        size = powers[0]
    else:
        raise ConfigError("block_size: the trace does not say how many tokens a block has; give --block-size")
    assumed.append(f"block_size: {size} tokens, the size that fits the lengths of all requests")
    return size


def _sizes(lines: Sequence[TraceLine]) -> tuple[int, int]:
    """The least and largest block size that the lengths allow: the last block may be missing or partial."""
    lowest, highest = 1, _MOST_BLOCK
    for line in lines:
        count = len(line.hash_ids)
        lowest = max(lowest, line.input_length // (count + 1) + 1)
        if count > 1:
            highest = min(highest, -(-line.input_length // (count - 1)) - 1)
    if lowest > highest:
        raise ConfigError("block_size: no size fits the numbers of blocks and the input_length of all requests")
    return lowest, highest
