from .changes import ChangeLog
from .child_index import MAX_CHILDREN, ChildIndex
from .departures import (
    EVICTED,
    LOST,
    NEVER_SEEN,
    NUM_AGES,
    REMOVED,
    RESET,
    Causes,
    Departure,
    Departures,
    causes_of,
    why_gone,
)
from .few import BatchTable
from .index import Slots, Words, to_words
from .lease import Lease, Places, Reservation
from .pool import SlotPool
from .states import FILLING, READY, AnySlots, listed
from .tail_index import TailIndex

__all__ = [
    "EVICTED",
    "FILLING",
    "LOST",
    "MAX_CHILDREN",
    "NEVER_SEEN",
    "NUM_AGES",
    "READY",
    "REMOVED",
    "RESET",
    "AnySlots",
    "BatchTable",
    "Causes",
    "ChangeLog",
    "ChildIndex",
    "Departure",
    "Departures",
    "Lease",
    "Places",
    "Reservation",
    "SlotPool",
    "Slots",
    "TailIndex",
    "Words",
    "causes_of",
    "listed",
    "to_words",
    "why_gone",
]
