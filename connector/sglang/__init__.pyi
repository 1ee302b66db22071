from .storage import KVTierStorage

__all__ = [
    "KVTierStorage",
]
