from .ends import ClassifiedEnd, Hint, RequestEnd, hint_of
from .lru_shadow import LruShadow
from .predictor import EDGES, MOST_AHEAD, UNTOLD, ReusePredictor
from .recent_requests import MATCH_NAMES

__all__ = [
    "EDGES",
    "MATCH_NAMES",
    "MOST_AHEAD",
    "UNTOLD",
    "ClassifiedEnd",
    "Hint",
    "LruShadow",
    "RequestEnd",
    "ReusePredictor",
    "hint_of",
]
