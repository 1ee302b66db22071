from . import memory
from .cuda_driver import CudaDriver, cuda_driver
from .host import HostRegion, HostTier, slot_stride
from .records import BlockRecords
from .surroundings import Limits, available_bytes, limits, may_lock_all

__all__ = [
    "BlockRecords",
    "CudaDriver",
    "HostRegion",
    "HostTier",
    "Limits",
    "available_bytes",
    "cuda_driver",
    "limits",
    "may_lock_all",
    "memory",
    "slot_stride",
]
