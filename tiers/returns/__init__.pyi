from .ends import Hint, RequestEnd, hint_of
from .hazards import UNTOLD
from .returns import Returns

__all__ = ["UNTOLD", "Hint", "RequestEnd", "Returns", "hint_of"]
