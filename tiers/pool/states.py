"""The states of a slot, as `core.py` has them."""

from collections.abc import Sequence
from typing import Final, TypeVar

FREE: Final = 0
FILLING: Final = 1  # taken, and invisible to every lookup
READY: Final = 2
QUARANTINED: Final = 3  # an operation that hangs may still write here

T = TypeVar("T")


def picked(items: Sequence[T], at: Sequence[int]) -> list[T]:
    """The items at these positions, which are distinct and in order."""
    return list(items) if len(at) == len(items) else [items[i] for i in at]
