from . import memory
from .cuda_driver import CudaDriver, cuda_driver
from .host import HostRegion, HostTier, slot_stride
from .records import BlockRecords
from .surroundings import Limits, limits, may_lock_all

__all__ = [
    "BlockRecords",
    "CudaDriver",
    "HostRegion",
    "HostTier",
    "Limits",
    "cuda_driver",
    "limits",
    "may_lock_all",
    "memory",
    "slot_stride",
]
