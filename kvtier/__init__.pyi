from .connector import LocalConnector, SchedulerSide, StepPlan, WorkerSide
from .connector.segments import Repair, Segment
from .engine import Completion, Engine, EngineConfig, Output, SamplingParams, open_engine
from .tiers import (
    ConfigError,
    FingerprintMismatch,
    FormatError,
    KVTierError,
    Metrics,
    RequestError,
    StoreLocked,
    TierUnavailable,
)
from .tiers.config import Config
from .tiers.file import FileStore
from .tiers.hierarchy import Hierarchy
from .tiers.naming import KVLayout, KVShape, ModelIdentity, TokenChain
from .tiers.pool import SlotPool

__version__: str

__all__ = [
    "Completion",
    "Config",
    "ConfigError",
    "Engine",
    "EngineConfig",
    "FileStore",
    "FingerprintMismatch",
    "FormatError",
    "Hierarchy",
    "KVLayout",
    "KVShape",
    "KVTierError",
    "LocalConnector",
    "Metrics",
    "ModelIdentity",
    "Output",
    "Repair",
    "RequestError",
    "SamplingParams",
    "SchedulerSide",
    "Segment",
    "SlotPool",
    "StepPlan",
    "StoreLocked",
    "TierUnavailable",
    "TokenChain",
    "WorkerSide",
    "__version__",
    "open_engine",
]
