"""Shared by verbs and processes: exit statuses, log lines, JSON from outside, new files, which client is dropped."""

import itertools
import json
import logging
import os
import re
import secrets
import sys
import time
from collections.abc import Callable
from contextvars import ContextVar
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Generic, Literal, TypeVar

from kvtier.tiers import ConfigError, tracing

if TYPE_CHECKING:
    from pydantic import ValidationError


class Exit(IntEnum):
    OK = 0
    FAILED = 1
    USAGE = 2
    DEGRADED = 3


LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]
REQUEST_ID: Final = b"x-request-id"  # the header, coming in and going out
_ID: Final = re.compile(r"[\w.:@/+=-]{1,128}", re.ASCII)
_under_way: ContextVar[str | None] = ContextVar("request under way", default=None)
_BREAKS: Final = str.maketrans({"\n": "\\n", "\r": "\\r"})  # a record is one line, whatever a client sends


def request_id() -> str | None:
    return _under_way.get()


def begin_request(given: str | None) -> str:
    """Enter a request, for the rest of this task. Its id is the client's, if valid, else a new one."""
    named = given if given is not None and _ID.fullmatch(given) else secrets.token_hex(8)
    _under_way.set(named)
    return named


class TextLine(logging.Formatter):
    """`2026-11-27 09:03:00.123 INFO kvtier: message`, times in UTC."""

    default_msec_format = "%s.%03d"

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s kvtier: %(about)s%(message)s")
        self.converter = time.gmtime

    def format(self, record: logging.LogRecord) -> str:
        named = request_id()
        record.about = "" if named is None else f"request {named}: "
        return super().format(record)

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = record.message.translate(_BREAKS)
        return super().formatMessage(record)


class JsonLine(logging.Formatter):
    """One object: `time` (UTC, ISO 8601), `level`, `logger`, `message`, `request_id`, `trace_id`, `traceback`.

    The last three if there are any.
    """

    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def __init__(self) -> None:
        super().__init__()
        self.converter = time.gmtime

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (named := request_id()) is not None:
            fields["request_id"] = named
        if (trace := tracing.current.get()) is not None:
            fields["trace_id"] = trace.trace_id
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def log_to_stderr(level: LogLevel, form: LogFormat) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLine() if form == "json" else TextLine())
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.captureWarnings(True)  # else Python's own would be plain lines


# --- JSON from outside -----------------------------------------------------------------------------------------------

# Control characters, those that turn the direction of text, and halves of surrogates.
_OBEYED: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")

_MOST_INSIDE: Final = 100_000  # lists and objects in one body: each costs far more to make than to send
_TEXTS: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)

Json = dict[str, Any]  # a JSON object, whatever it holds


def writable(text: str) -> str:
    """The text. ValueError if UTF-8 cannot write it, as with a lone surrogate from JSON's escapes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("not a text that UTF-8 can write") from None
    return text


def harmless(text: str) -> str:
    """The text for a terminal: control characters and unwritable ones become Python's escapes. Lines and tabs stay."""
    return _OBEYED.sub(lambda found: ascii(found[0])[1:-1], text)


def shown(value: object) -> str:
    """A value as JSON: one line of ASCII, 60 characters at most."""
    pieces = json.JSONEncoder(default=str).iterencode(value)  # encodes no more of a long list than is shown
    text = "".join(itertools.islice(pieces, 61))
    return text if len(text) <= 60 else f"{text[:57]}..."


def object_in(data: bytes, loads: Callable[[bytes], Any] = json.loads) -> Json:
    """The JSON object in a request's body. The ValueError says in one line what is wrong."""
    if _num_inside(data) > _MOST_INSIDE and (num := _num_inside(_TEXTS.sub(b"", data))) > _MOST_INSIDE:
        raise ValueError(f"body: {num} lists and objects; at most {_MOST_INSIDE} are taken, so send fewer")
    try:
        values = loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"body: not JSON ({flat(str(error))[:100]}); send an object") from None
    if not isinstance(values, dict):
        raise ValueError(f"body {shown(values)}: not a JSON object; send one")
    return values


def _num_inside(data: bytes) -> int:
    """The number of lists and objects in the JSON, and of brackets in its texts."""
    return data.count(b"[") + data.count(b"{")


def first_error(error: "ValidationError") -> tuple[str, str, str, object]:
    """The first wrong field: its name in ASCII without a union's tags (=…), the error, its kind, and the value."""
    first = error.errors(include_url=False)[0]
    name = ".".join(str(part) for i, part in enumerate(first["loc"]) if not i or not str(part).startswith("="))
    why = str(first["ctx"]["error"]) if first["type"] == "value_error" else flat(first["msg"])
    return json.dumps(name)[1:-1], why, first["type"], first["input"]


def flat(text: str) -> str:
    return " ".join(text.split())


def private_file(path: Path) -> BinaryIO:
    """Create a file that only its owner can read: it holds users' texts. ConfigError if it exists or cannot be made."""
    try:
        return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb")
    except FileExistsError:
        raise ConfigError(f"{path}: exists already; remove it or choose another name") from None
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{str(path)!r}: {reason}; choose a file that can be written") from error


# --- which client is dropped -----------------------------------------------------------------------------------------

T = TypeVar("T")


class Crowd(Generic[T]):
    """Connections that wait, by the address they come from. Each call looks at one of them. Not thread-safe."""

    def __init__(self, most: int) -> None:
        """`most` may wait at once, so there are no more addresses."""
        self._most = most
        self._by_address: dict[str, dict[T, None]] = {}  # the longest waiting first
        self._addresses: dict[T, str] = {}

    def __len__(self) -> int:
        return len(self._addresses)

    def add(self, one: T, address: str) -> None:
        self.discard(one)
        self._by_address.setdefault(address, {})[one] = None
        self._addresses[one] = address

    def discard(self, one: T) -> None:
        if (address := self._addresses.pop(one, None)) is not None:
            own = self._by_address[address]
            del own[one]
            if not own:
                del self._by_address[address]

    def surplus(self) -> T | None:
        """The connection to drop if there are too many; it is removed from the crowd."""
        if len(self) <= self._most:
            return None
        most = max(self._by_address, key=lambda address: len(self._by_address[address]))
        victim = next(iter(self._by_address[most]))
        self.discard(victim)
        return victim
