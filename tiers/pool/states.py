"""The states of a slot, as `core.py` has them, and how batches of slots are written."""

from collections.abc import Sequence
from typing import Final, TypeVar

from kvtier.tiers.pool.names import Slots

FREE: Final = 0
FILLING: Final = 1  # taken, and invisible to every lookup
READY: Final = 2
QUARANTINED: Final = 3  # an operation that hangs may still write here

T = TypeVar("T")
AnySlots = Slots | list[int]  # many in numpy; a few in a list


def listed(slots: AnySlots) -> list[int]:
    """Slots or generations as a list."""
    return slots if isinstance(slots, list) else slots.tolist()


def picked(items: Sequence[T], at: Sequence[int]) -> list[T]:
    """The items at these positions, which are distinct and in order."""
    return list(items) if len(at) == len(items) else [items[i] for i in at]
