"""What one check of a machine or a server found, and how to fix it."""

from dataclasses import dataclass
from enum import StrEnum

from kvtier.tiers.errors import KVTierError


class Status(StrEnum):
    """How bad it is: `warning` works, but not as well as it could; `error` does not work."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of `kvtier doctor`; `fix` says what to do, and is empty where there is nothing to do."""

    check: str
    status: Status
    found: str
    fix: str = ""


def ok(check: str, found: str) -> Finding:
    return Finding(check, Status.OK, found)


def warning(check: str, found: str, fix: str) -> Finding:
    return Finding(check, Status.WARNING, found, fix)


def error(check: str, found: str, fix: str) -> Finding:
    return Finding(check, Status.ERROR, found, fix)


def refusal(check: str, refused: KVTierError, between: str = "; ") -> Finding:
    """What was found, and behind the first `between` of its text the fix."""
    found, _, fix = str(refused).partition(between)
    return error(check, found, fix)
