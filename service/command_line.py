"""What every verb and every process shares: exit statuses, and log lines as text or as JSON."""

import json
import logging
import re
import secrets
import sys
import time
from contextvars import ContextVar
from enum import IntEnum
from typing import Final, Literal


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
_BREAKS: Final = str.maketrans({"\n": "\\n", "\r": "\\r"})  # a line is a record, whatever a client named


def request_id() -> str | None:
    return _under_way.get()


def begin_request(given: str | None) -> str:
    """Enter a request, for the rest of this task. Its id is the client's, if that is one, else a new one."""
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
    """One object: `time` (UTC, ISO 8601), `level`, `logger`, `message`; if there are, `request_id` and `traceback`."""

    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def __init__(self) -> None:
        super().__init__()
        self.converter = time.gmtime

    def format(self, record: logging.LogRecord) -> str:
        told = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (named := request_id()) is not None:
            told["request_id"] = named
        if record.exc_info:
            told["traceback"] = self.formatException(record.exc_info)
        return json.dumps(told)


def log_to_stderr(level: LogLevel, form: LogFormat) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLine() if form == "json" else TextLine())
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.captureWarnings(True)  # Python's own would be lines of no form
