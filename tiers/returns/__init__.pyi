from .ends import Hint, RequestEnd, ToldEnd, hint_of
from .hazards import EDGES, MOST_AHEAD, UNTOLD
from .returns import Returns
from .rival import LruRival
from .tails import TAIL_NAMES

__all__ = [
    "EDGES",
    "MOST_AHEAD",
    "TAIL_NAMES",
    "UNTOLD",
    "Hint",
    "LruRival",
    "RequestEnd",
    "Returns",
    "ToldEnd",
    "hint_of",
]
