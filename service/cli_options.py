"""What the verbs of the command line share: exit statuses, options, logging, and the error for a missing package."""

import logging
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import Annotated, Final

import typer

from kvtier.tiers import KVTierError

_EXTRAS: Final = {
    "engine": ("safetensors", "tokenizers", "transformers"),
    "service": ("h11", "httpx2", "jinja2", "starlette", "uvicorn", "yaml", "zmq"),
}


class Exit(IntEnum):
    """The exit statuses of every verb."""

    OK = 0
    FAILED = 1
    USAGE = 2
    DEGRADED = 3


JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
ConfigOption = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="TOML file; the environment overrides it.")
]


class _LogLine(logging.Formatter):
    """Formats a log record as one line; errors are marked."""

    def format(self, record: logging.LogRecord) -> str:
        kind = "error: " if record.levelno >= logging.ERROR else ""
        return f"kvtier: {kind}{super().format(record)}"


def log_to_stderr() -> None:
    """Write log records from INFO on to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_LogLine())
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def use_all_descriptors() -> None:
    """Raise the limit of open files to the most allowed: each client takes one or more."""
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))


@contextmanager
def needing(what: str) -> Iterator[None]:
    """Wraps the import of optional packages: raises KVTierError with the extra to install if one is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        extra = next((extra for extra, packages in _EXTRAS.items() if package in packages), None)
        if extra is None:
            raise
        raise KVTierError(f"{what} needs {package}: install kvtier[{extra}]") from None
