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
    from kvtier.tiers.config import Config
    from kvtier.tiers.metrics import Metrics
    from kvtier.tiers.shape import KVLayout, KVShape

__version__ = "0.1.0"

_LAZY: Final = {
    "Config": "kvtier.tiers.config",
    "KVLayout": "kvtier.tiers.shape",
    "KVShape": "kvtier.tiers.shape",
    "Metrics": "kvtier.tiers.metrics",
}

__all__ = [
    "Config",
    "ConfigError",
    "FingerprintMismatch",
    "FormatError",
    "KVLayout",
    "KVShape",
    "KVTierError",
    "Metrics",
    "StoreLocked",
    "TierUnavailable",
    "__version__",
]


if not TYPE_CHECKING:  # a type checker shall see the imports above, and refuse any other name

    def __getattr__(name: str) -> object:
        if name not in _LAZY:
            raise AttributeError(f"module 'kvtier' has no attribute {name!r}")
        globals()[name] = value = getattr(import_module(_LAZY[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
