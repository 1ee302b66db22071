from .adapter import KVTier
from .cache_form import CacheForm

__all__ = [
    "CacheForm",
    "KVTier",
]
