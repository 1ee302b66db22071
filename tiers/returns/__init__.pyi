from .ends import HearsEnds, Hint, RequestEnd, ReturnOrder, ToldEnd, hint_of
from .hazards import EDGES, UNTOLD
from .returns import Returns
from .rival import LruRival

__all__ = [
    "EDGES",
    "UNTOLD",
    "HearsEnds",
    "Hint",
    "LruRival",
    "RequestEnd",
    "ReturnOrder",
    "Returns",
    "ToldEnd",
    "hint_of",
]
