from .application import build
from .asked import EngineRequest
from .options import RayOptions

__all__ = [
    "EngineRequest",
    "RayOptions",
    "build",
]
