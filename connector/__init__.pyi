from .back import Back
from .both_ends import BothEndsSide
from .chat_prefix import AS_SENT, ChatPrefix, named_line
from .kv_hints import hint_in, is_cache_mark
from .local import LocalConnector
from .opening import open_apart, open_tiers
from .partial import best_child
from .plan import CopyOp, StepPlan, WorkerReport
from .request import Answered, BlockChain, ConnectedRequest, Request
from .scheduler import ConnectorUpdate, SchedulerSide
from .states import ClosedChain, StatePieces
from .turn import Turn, Turns
from .worker import WorkerSide

__all__ = [
    "AS_SENT",
    "Answered",
    "Back",
    "BlockChain",
    "BothEndsSide",
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
