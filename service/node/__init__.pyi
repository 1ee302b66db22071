from .daemon import Daemon
from .lookups import OptimumWatch, TraceRecorder, WatchedModel
from .memory_use import MemoryUse, memory
from .namespaces import Namespace, OperatorHold
from .operators import (
    BlockSelection,
    NotFound,
    Pins,
    PinView,
    explain,
    explain_request,
    held_open,
    hold_open,
    name_of,
    release_hold,
)
from .peer_server import PeerFeeds, PeerServer
from .quota import MAX_QUOTAS
from .status import degraded_tiers, exposition, refused_clients, status, wanting_parts

__all__ = [
    "MAX_QUOTAS",
    "BlockSelection",
    "Daemon",
    "MemoryUse",
    "Namespace",
    "NotFound",
    "OperatorHold",
    "OptimumWatch",
    "PeerFeeds",
    "PeerServer",
    "PinView",
    "Pins",
    "TraceRecorder",
    "WatchedModel",
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
