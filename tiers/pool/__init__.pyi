from .changes import ChangeLog, Slots, Words, to_words
from .core import ChildIndex, Lease
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
from .lease import FILLING, READY, Places, Reservation
from .policy import MAX_CHILDREN, lease_type, make_child_index, make_core, make_index
from .pool import SlotPool

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
    "Words",
    "causes_of",
    "lease_type",
    "make_child_index",
    "make_core",
    "make_index",
    "to_words",
    "why_gone",
]
