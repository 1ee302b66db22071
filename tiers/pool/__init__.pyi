from .changes import ChangeLog
from .child_index import MAX_CHILDREN, ChildIndex
from .few import BatchTable
from .index import Slots, Words, to_words
from .lease import Lease, Reservation
from .pool import SlotPool
from .states import FILLING, READY, AnySlots, listed

__all__ = [
    "FILLING",
    "MAX_CHILDREN",
    "READY",
    "AnySlots",
    "BatchTable",
    "ChangeLog",
    "ChildIndex",
    "Lease",
    "Reservation",
    "SlotPool",
    "Slots",
    "Words",
    "listed",
    "to_words",
]
