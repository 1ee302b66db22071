from .page_store import CutPageStore, PageStore
from .storage import KVTierStorage

__all__ = [
    "CutPageStore",
    "KVTierStorage",
    "PageStore",
]
