"""The memory of L2: one pinned, shareable region of slots."""

from kvtier.tiers.host import memory
from kvtier.tiers.host.host import BlockRecords, HostRegion, HostTier, slot_stride
from kvtier.tiers.host.limits import Limits, available_bytes, limits, may_lock_all
from kvtier.tiers.host.pinning import CudaDriver, cuda_driver
