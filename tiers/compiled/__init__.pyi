from .building import build
from .twins import status, twin

__all__ = [
    "build",
    "status",
    "twin",
]
