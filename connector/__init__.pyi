from .back import Back
from .both_ends import BothEndsSide
from .local import LocalConnector
from .opening import open_tiers
from .partial import best_child
from .plan import CopyOp, StepPlan, WorkerReport
from .request import BlockChain, ConnectedRequest, Request
from .scheduler import ConnectorUpdate, SchedulerSide
from .worker import WorkerSide

__all__ = [
    "Back",
    "BlockChain",
    "BothEndsSide",
    "ConnectedRequest",
    "ConnectorUpdate",
    "CopyOp",
    "LocalConnector",
    "Request",
    "SchedulerSide",
    "StepPlan",
    "WorkerReport",
    "WorkerSide",
    "best_child",
    "open_tiers",
]
