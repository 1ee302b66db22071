from .building import build
from .digests import digests
from .twins import status, twin

__all__ = [
    "build",
    "digests",
    "status",
    "twin",
]
