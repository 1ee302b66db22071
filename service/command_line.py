"""What verbs and the parts they start share: exit statuses, and the error for a missing package."""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Final

from kvtier.tiers import KVTierError

_EXTRAS: Final = {
    "charts": ("matplotlib",),
    "engine": ("llguidance", "safetensors", "tokenizers", "transformers"),
    "service": ("h11", "httpx2", "jinja2", "starlette", "uvicorn", "yaml", "zmq"),
}


class Exit(IntEnum):
    OK = 0
    FAILED = 1
    USAGE = 2
    DEGRADED = 3


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
