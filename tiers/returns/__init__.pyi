from .ends import Hint, RequestEnd, hint_of
from .hazards import EDGES, UNTOLD
from .returns import Returns

__all__ = ["EDGES", "UNTOLD", "Hint", "RequestEnd", "Returns", "hint_of"]
