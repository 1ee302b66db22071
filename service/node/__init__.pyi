from .daemon import Daemon
from .explaining import explain, explain_request
from .exposition import exposition
from .lending import Lender
from .lookup_trace import TraceRecorder
from .memory_page import memory
from .memory_use import MemoryUse
from .namespaces import Namespace, OperatorHold
from .operator_access import NotThere, held_open, hold_open, name_of, release_hold
from .past_lookups import OptimumWatch, Watched
from .peer_feeds import PeerFeeds
from .pins import Pins, PinView
from .quota import MAX_QUOTAS
from .selection import BlockSelection
from .status import degraded_tiers, refused_clients, status, wanting_parts

__all__ = [
    "MAX_QUOTAS",
    "BlockSelection",
    "Daemon",
    "Lender",
    "MemoryUse",
    "Namespace",
    "NotThere",
    "OperatorHold",
    "OptimumWatch",
    "PeerFeeds",
    "PinView",
    "Pins",
    "TraceRecorder",
    "Watched",
    "degraded_tiers",
    "explain",
    "explain_request",
    "exposition",
    "held_open",
    "hold_open",
    "memory",
    "name_of",
    "refused_clients",
    "release_hold",
    "status",
    "wanting_parts",
]
