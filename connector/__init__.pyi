from .back import Back
from .both_ends import BothEndsSide
from .local import LocalConnector
from .opening import open_apart, open_tiers
from .partial import best_child
from .plan import CopyOp, StepPlan, WorkerReport
from .request import Answered, BlockChain, ConnectedRequest, Request
from .scheduler import ConnectorUpdate, SchedulerSide
from .states import ClosedChain, StatePieces
from .turn import Turn
from .worker import WorkerSide

__all__ = [
    "Answered",
    "Back",
    "BlockChain",
    "BothEndsSide",
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
    "WorkerReport",
    "WorkerSide",
    "best_child",
    "open_apart",
    "open_tiers",
]
