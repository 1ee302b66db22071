from .adapter import KVTier

__all__ = [
    "KVTier",
]
