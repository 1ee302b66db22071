"""The states of a slot, and how batches of slots are written."""

from typing import Final

from kvtier.tiers.pool.index import Slots

FREE: Final = 0
FILLING: Final = 1  # taken, and invisible to every lookup
READY: Final = 2
QUARANTINED: Final = 3  # an operation that hangs may still write here

AnySlots = Slots | list[int]  # many in numpy; a few in a list


def listed(slots: AnySlots) -> list[int]:
    """Slots or generations as a list."""
    return slots if isinstance(slots, list) else slots.tolist()
