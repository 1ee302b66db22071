from .chat import AS_SENT, ChatPrefix, hint_in, is_cache_mark, named_line
from .local import LocalConnector, open_apart, open_tiers
from .overlapped import Back
from .plan import CopyOp, StepPlan, WorkerReport
from .request import Answered, BlockChain, ClosedChain, ConnectedRequest, Request, StatePieces, best_child
from .scheduler import ConnectorUpdate, SchedulerSide
from .turn import Turn, Turns
from .worker import WorkerSide

__all__ = [
    "AS_SENT",
    "Answered",
    "Back",
    "BlockChain",
    "ChatPrefix",
    "ClosedChain",
    "ConnectedRequest",
    "ConnectorUpdate",
    "CopyOp",
    "LocalConnector",
    "Request",
    "SchedulerSide",
    "StatePieces",
    "StepPlan",
    "Turn",
    "Turns",
    "WorkerReport",
    "WorkerSide",
    "best_child",
    "hint_in",
    "is_cache_mark",
    "named_line",
    "open_apart",
    "open_tiers",
]
