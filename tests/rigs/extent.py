"""How much of a matrix runs: one of each class in `make test`, all of it in `make test-all`."""

import os
from typing import Final, TypeVar

T = TypeVar("T")

ALL: Final = bool(os.environ.get("TEST_ALL"))
"""Set by `make test-all`. (Not KVTIER_…: kvtier refuses a variable of that name that is no option.)"""


def brief(short: T, whole: T) -> T:
    """`short` in `make test`, `whole` in `make test-all`: a number of examples, or the values of a parameter."""
    return whole if ALL else short
