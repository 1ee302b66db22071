from .changes import ChangeLog
from .child_index import MAX_CHILDREN, ChildIndex
from .index import Slots, Words, to_words
from .lease import Lease, Reservation
from .pool import SlotPool
from .slots import SlotTable
from .states import FILLING, READY, listed

__all__ = [
    "FILLING",
    "MAX_CHILDREN",
    "READY",
    "ChangeLog",
    "ChildIndex",
    "Lease",
    "Reservation",
    "SlotPool",
    "SlotTable",
    "Slots",
    "Words",
    "listed",
    "to_words",
]
