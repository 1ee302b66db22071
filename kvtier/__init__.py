"""kvtier: a hierarchical KV-cache offload service for LLM inference.

The public API. Names are imported when they are first used, so that `import kvtier` needs neither torch nor time.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Final

from kvtier.tiers.errors import (
    ConfigError,
    FingerprintMismatch,
    FormatError,
    KVTierError,
    StoreLocked,
    TierUnavailable,
)

if TYPE_CHECKING:
    from kvtier.connector.local import LocalConnector
    from kvtier.connector.plan import StepPlan
    from kvtier.connector.scheduler import SchedulerSide
    from kvtier.connector.worker import WorkerSide
    from kvtier.engine.config import EngineConfig
    from kvtier.engine.llm import Completion, Engine
    from kvtier.engine.local import open_engine
    from kvtier.engine.sequence import Output, RequestError, SamplingParams
    from kvtier.tiers.chain import TokenChain
    from kvtier.tiers.config import Config
    from kvtier.tiers.file_store import FileStore
    from kvtier.tiers.hierarchy import Hierarchy
    from kvtier.tiers.identity import ModelIdentity
    from kvtier.tiers.metrics import Metrics
    from kvtier.tiers.pool import SlotPool
    from kvtier.tiers.shape import KVLayout, KVShape

__version__ = "0.1.0"

_LAZY: Final = {
    "Completion": "kvtier.engine.llm",
    "Config": "kvtier.tiers.config",
    "Engine": "kvtier.engine.llm",
    "EngineConfig": "kvtier.engine.config",
    "FileStore": "kvtier.tiers.file_store",
    "Hierarchy": "kvtier.tiers.hierarchy",
    "KVLayout": "kvtier.tiers.shape",
    "KVShape": "kvtier.tiers.shape",
    "LocalConnector": "kvtier.connector.local",
    "Metrics": "kvtier.tiers.metrics",
    "ModelIdentity": "kvtier.tiers.identity",
    "Output": "kvtier.engine.sequence",
    "RequestError": "kvtier.engine.sequence",
    "SamplingParams": "kvtier.engine.sequence",
    "SchedulerSide": "kvtier.connector.scheduler",
    "SlotPool": "kvtier.tiers.pool",
    "StepPlan": "kvtier.connector.plan",
    "TokenChain": "kvtier.tiers.chain",
    "WorkerSide": "kvtier.connector.worker",
    "open_engine": "kvtier.engine.local",
}

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
    "RequestError",
    "SamplingParams",
    "SchedulerSide",
    "SlotPool",
    "StepPlan",
    "StoreLocked",
    "TierUnavailable",
    "TokenChain",
    "WorkerSide",
    "__version__",
    "open_engine",
]


if not TYPE_CHECKING:  # a type checker shall see the imports above, and refuse any other name

    def __getattr__(name: str) -> object:
        if name not in _LAZY:
            raise AttributeError(f"module 'kvtier' has no attribute {name!r}")
        globals()[name] = value = getattr(import_module(_LAZY[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
