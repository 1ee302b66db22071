from .application import build
from .options import RayOptions
from .ranking import EngineRequest

__all__ = [
    "EngineRequest",
    "RayOptions",
    "build",
]
