from . import memory
from .host import HostRegion, HostTier, slot_stride
from .limits import Limits, available_bytes, limits, may_lock_all
from .pinning import CudaDriver, cuda_driver
from .records import BlockRecords

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
