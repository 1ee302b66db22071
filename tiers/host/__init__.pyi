from . import memory
from .cuda_driver import CudaDriver, cuda_driver
from .host import HostRegion, HostTier, available_bytes, slot_stride
from .records import BlockRecords

__all__ = [
    "BlockRecords",
    "CudaDriver",
    "HostRegion",
    "HostTier",
    "available_bytes",
    "cuda_driver",
    "memory",
    "slot_stride",
]
