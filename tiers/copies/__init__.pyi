from .block_copier import BlockCopier, BlockCopies, BlockPart, CopyDirection, EngineBlocks, PartCopier, block_bytes_view
from .copy_ways import CopyWays, KeptChoice, KeptChoices
from .cuda_transfer import CudaCopyStream, CudaEvent
from .device import BlockPool
from .transfer import COPIED, DEVICE_ERRORS, CopyEvent, CopyStream, HostCopyStream, ended, is_out_of_memory

__all__ = [
    "COPIED",
    "DEVICE_ERRORS",
    "BlockCopier",
    "BlockCopies",
    "BlockPart",
    "BlockPool",
    "CopyDirection",
    "CopyEvent",
    "CopyStream",
    "CopyWays",
    "CudaCopyStream",
    "CudaEvent",
    "EngineBlocks",
    "HostCopyStream",
    "KeptChoice",
    "KeptChoices",
    "PartCopier",
    "block_bytes_view",
    "ended",
    "is_out_of_memory",
]
