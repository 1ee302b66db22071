from .store import ObjectStore

__all__ = [
    "ObjectStore",
]
