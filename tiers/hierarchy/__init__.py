"""Joins the tiers: looks a prompt up in all of them, promotes and demotes its blocks."""

from kvtier.tiers.hierarchy.cache_tiers import (
    PENDING,
    Attribution,
    BlockClaims,
    CacheTiers,
    Claim,
    Filled,
    Overlap,
    Pending,
    SplitPoint,
    Wanted,
    end_lookup,
    load_and_lease,
)
from kvtier.tiers.hierarchy.hierarchy import (
    Event,
    EventSource,
    HeldRun,
    Hierarchy,
    Removed,
    Stored,
    TierEvents,
    events_of,
    evict_everywhere,
    held_runs,
    in_runs,
    lineages,
)
from kvtier.tiers.hierarchy.io_queue import IoQueue, JoinedJob, begun
from kvtier.tiers.hierarchy.lower_tier import Rates, Span, TierPort
from kvtier.tiers.hierarchy.opening import (
    ProbedOpening,
    check_tiers,
    lower_modules,
    open_hierarchy,
    open_ports,
    require_alike,
)
