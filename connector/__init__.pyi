from .chat import AS_SENT, ChatPrefix, agent_hint, hint_in, is_cache_mark, named_line
from .local import LocalConnector, open_apart, open_tiers
from .overlapped import OverlappedLoad
from .plan import CopyOp, StepPlan, WorkerReport
from .request import (
    Answered,
    BlockChain,
    ClosedChain,
    ClosedRequest,
    ConnectedRequest,
    Request,
    StatePieces,
    best_child,
    borders_to_keep,
    prefill_of,
)
from .scheduler import ConnectorUpdate, SchedulerSide
from .turn import Turn, Turns
from .worker import WorkerSide

__all__ = [
    "AS_SENT",
    "Answered",
    "BlockChain",
    "ChatPrefix",
    "ClosedChain",
    "ClosedRequest",
    "ConnectedRequest",
    "ConnectorUpdate",
    "CopyOp",
    "LocalConnector",
    "OverlappedLoad",
    "Request",
    "SchedulerSide",
    "StatePieces",
    "StepPlan",
    "Turn",
    "Turns",
    "WorkerReport",
    "WorkerSide",
    "agent_hint",
    "best_child",
    "borders_to_keep",
    "hint_in",
    "is_cache_mark",
    "named_line",
    "open_apart",
    "open_tiers",
    "prefill_of",
]
