from .application import build
from .asked import AnswerHead, EngineRequest
from .options import RayOptions
from .request_router import KVTierRequestRouter

__all__ = [
    "AnswerHead",
    "EngineRequest",
    "KVTierRequestRouter",
    "RayOptions",
    "build",
]
