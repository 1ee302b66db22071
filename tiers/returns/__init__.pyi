from .ends import Hint, RequestEnd, hint_of
from .hazards import EDGES, UNTOLD
from .returns import Returns
from .rival import LruRival

__all__ = ["EDGES", "UNTOLD", "Hint", "LruRival", "RequestEnd", "Returns", "hint_of"]
