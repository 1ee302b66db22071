from .cache_tiers import PENDING, Attribution, BlockClaims, CacheTiers, Claim, Ends, Filled, Pending, Wanted, bring
from .events import Event, EventSource, Removed, Stored, TierEvents, events_of
from .evict import evict_everywhere
from .hierarchy import Hierarchy
from .inventory import HeldRun, held_runs, in_runs, lineages
from .io_queue import IoQueue, JoinedJob, begun
from .lower_tier import TierPort
from .opening import check_tiers, lower_modules, open_hierarchy, open_ports
from .probed_opening import ProbedOpening, require_alike
from .rates import Meeting, Rates

__all__ = [
    "PENDING",
    "Attribution",
    "BlockClaims",
    "CacheTiers",
    "Claim",
    "Ends",
    "Event",
    "EventSource",
    "Filled",
    "HeldRun",
    "Hierarchy",
    "IoQueue",
    "JoinedJob",
    "Meeting",
    "Pending",
    "ProbedOpening",
    "Rates",
    "Removed",
    "Stored",
    "TierEvents",
    "TierPort",
    "Wanted",
    "begun",
    "bring",
    "check_tiers",
    "events_of",
    "evict_everywhere",
    "held_runs",
    "in_runs",
    "lineages",
    "lower_modules",
    "open_hierarchy",
    "open_ports",
    "require_alike",
]
