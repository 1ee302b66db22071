"""The exit statuses that verbs share."""

from enum import IntEnum


class Exit(IntEnum):
    OK = 0
    FAILED = 1
    USAGE = 2
    DEGRADED = 3
