from . import memory
from .host import HostRegion, HostTier, available_bytes, cuda_runtime, slot_stride

__all__ = [
    "HostRegion",
    "HostTier",
    "available_bytes",
    "cuda_runtime",
    "memory",
    "slot_stride",
]
