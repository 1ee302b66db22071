"""The forms of traces: one JSON object a line, taken apart and checked, and foreign files named as what they are."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvtier.tiers import FormatError


@dataclass(frozen=True, slots=True)
class TraceLine:
    """One request. Equal `hash_ids` are equal blocks; a chain's come head first, each once.

    What a form does not tell has its default; `None` where zero could be meant.
    """

    timestamp: int  # milliseconds since the trace began
    input_length: int  # tokens
    output_length: int  # tokens; 0 if it was not known
    hash_ids: tuple[int, ...]
    block_size: int | None = None  # tokens
    answer_ids: tuple[int, ...] | None = None  # the full blocks that its answer left behind those of the prompt
    ended: int | None = None  # milliseconds since the trace began
    hint: str | None = None
    tenant: int | None = None
    has_time: bool = True  # whether `timestamp` was told


MAX_LINE: Final = 8 << 20  # bytes of a line that is read: a prompt of a million blocks
_MAX_NUMBER: Final = 1 << 63
_MAX_SECONDS: Final = 1e12
HINTS: Final = ("goes_on", "tool", "finished")

Fields = dict[str, Any]

MOONCAKE: Final = "Mooncake"
BAILIAN: Final = "Bailian"
LMCACHE: Final = "LMCache lookup log"

# What a line of another kind of file has, and what such a file is.
_FOREIGN: Final[Mapping[str, str]] = {
    "custom_id": "a batch of OpenAI requests: it has texts, and no names of blocks",
    "messages": "a list of chats: it has texts, and no names of blocks",
    "conversations": "a list of ShareGPT conversations: it has texts, and no names of blocks",
    "prompt": "a list of prompts: it has texts, and no names of blocks",
    "block_hashes": "KV events: they tell what is stored and removed, and not what is asked for",
    "ContextTokens": "a trace of lengths alone, which tells no names of blocks",
    "traceEvents": "a profile of a program",
}
_KNOWN: Final = "name a trace in Mooncake's form, one of `kvtier trace`, or a lookup log of LMCache's"


class ForeignTrace(FormatError):
    """A file of a form that has no requests by their blocks: no line of it can be read."""


def fields_of(line: bytes) -> Fields:
    """The JSON object of a line. FormatError says why it is none."""
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


def form_of(fields: Fields) -> str:
    """The form that a file with this line has. ForeignTrace names a file of another kind."""
    if "hash_ids" in fields:
        return BAILIAN if "chat_id" in fields else MOONCAKE
    if "chunk_hashes" in fields:
        return LMCACHE
    for name, what in _FOREIGN.items():
        if name in fields:
            raise ForeignTrace(f"it has {name!r}: this is {what}; {_KNOWN}")
    if fields.keys().isdisjoint(("timestamp", "input_length", "output_length")):
        named = ", ".join(map(repr, sorted(fields)[:6]))[:80]
        raise ForeignTrace(f"no hash_ids among {named or 'no fields'}; {_KNOWN}")
    return MOONCAKE


def mooncake(fields: Fields) -> TraceLine:
    """A line in Mooncake's form, with what `kvtier trace` adds. FormatError names the field that is wrong."""
    input_length = _count("input_length", fields.get("input_length"))
    ids = _ids("hash_ids", fields.get("hash_ids"))
    if len(ids) > input_length:
        raise FormatError(f"hash_ids: {len(ids)} blocks for an input_length of {input_length} tokens")
    answer = fields.get("answer_ids")
    hint = fields.get("hint")
    if hint is not None and hint not in HINTS:
        raise FormatError(f"hint {hint!r:.40}: use one of {', '.join(HINTS)}")
    return TraceLine(
        timestamp=_optional("timestamp", fields) or 0,
        input_length=input_length,
        output_length=_optional("output_length", fields) or 0,
        hash_ids=ids,
        block_size=_optional("block_size", fields, least=1),
        answer_ids=None if answer is None else _ids("answer_ids", answer),
        ended=_optional("ended", fields),
        hint=hint,
        tenant=_optional("tenant", fields),
        has_time=fields.get("timestamp") is not None,
    )


def bailian(fields: Fields) -> TraceLine:
    """A line of Alibaba's Bailian traces: Mooncake's form with seconds, and blocks of 16 tokens."""
    timestamp = fields.get("timestamp")
    return mooncake(
        {
            **{name: fields.get(name) for name in ("input_length", "output_length", "hash_ids")},
            "timestamp": None if timestamp is None else int(1000 * _seconds("timestamp", timestamp)),
            "block_size": fields.get("block_size", 16),
        }
    )


class LookupLog:
    """Lines of LMCache's lookup logs: names of chunks become numbers, times count from the first line on."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, str], int] = {}
        self._start: float | None = None

    def __call__(self, fields: Fields) -> TraceLine:
        names = fields.get("chunk_hashes")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise FormatError("chunk_hashes: not a list of names")
        chunk_size = _count("chunk_size", fields.get("chunk_size"), least=1)
        length = _count("seq_len", fields.get("seq_len"))
        if len(names) * chunk_size > length:
            raise FormatError(f"chunk_hashes: {len(names)} chunks of {chunk_size} for a seq_len of {length} tokens")
        if len(set(names)) < len(names):
            raise FormatError("chunk_hashes: a name stands there twice")
        when = fields.get("timestamp")
        seconds = None if when is None else _seconds("timestamp", when)
        if self._start is None:
            self._start = seconds
        model, numbers = str(fields.get("model_name", "")), self._numbers
        return TraceLine(
            timestamp=0 if seconds is None or self._start is None else int(1000 * max(0.0, seconds - self._start)),
            input_length=length,
            output_length=0,
            hash_ids=tuple(numbers.setdefault((model, name), len(numbers)) for name in names),
            block_size=chunk_size,
            has_time=seconds is not None,
        )


def parser_of(form: str) -> Callable[[Fields], TraceLine]:
    """What takes the lines of one file of this form apart, one after another."""
    return {MOONCAKE: mooncake, BAILIAN: bailian}.get(form) or LookupLog()


def _optional(name: str, fields: Fields, least: int = 0) -> int | None:
    return None if fields.get(name) is None else _count(name, fields[name], least)


def _count(name: str, value: object, least: int = 0) -> int:
    if type(value) is not int or not least <= value < _MAX_NUMBER:
        raise FormatError(f"{name}: {'missing' if value is None else f'not a whole number from {least} on'}")
    return value


def _ids(name: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise FormatError(f"{name}: {'missing' if value is None else 'not a list of numbers'}")
    ids = tuple(value)
    if ids and (set(map(type, ids)) != {int} or not 0 <= min(ids) <= max(ids) < _MAX_NUMBER):
        raise FormatError(f"{name}: not a whole number from 0 on")
    if len(set(ids)) < len(ids):
        raise FormatError(f"{name}: a block stands there twice; each is named by all before it")
    return ids


def _seconds(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < _MAX_SECONDS:
        raise FormatError(f"{name}: not a time in seconds")
    return float(value)
