"""Slots and the index of the blocks they hold, leases, and the order of eviction."""

from kvtier.tiers.pool.changes import ChangeLog, Slots, Words, to_words
from kvtier.tiers.pool.core import ChildIndex, Lease
from kvtier.tiers.pool.eviction_log import (
    EVICTED,
    LOST,
    NEVER_SEEN,
    NUM_AGES,
    REMOVED,
    RESET,
    Causes,
    EvictionLog,
    EvictionReason,
    causes_of,
    eviction_reason,
)
from kvtier.tiers.pool.policy import MAX_CHILDREN, lease_type, make_child_index, make_core, make_index, make_slot_counts
from kvtier.tiers.pool.pool import FILLING, READY, Reservation, SlotPool
