from .block_copier import BlockCopier, BlockCopies, CopyDirection, block_bytes_view
from .cuda_transfer import CudaCopyStream, CudaEvent
from .device import BlockPool
from .engine_blocks import BlockPart, EngineBlocks, PartCopier
from .transfer import CopyEvent, CopyStream, HostCopyStream, HostEvent

__all__ = [
    "BlockCopier",
    "BlockCopies",
    "BlockPart",
    "BlockPool",
    "CopyDirection",
    "CopyEvent",
    "CopyStream",
    "CudaCopyStream",
    "CudaEvent",
    "EngineBlocks",
    "HostCopyStream",
    "HostEvent",
    "PartCopier",
    "block_bytes_view",
]
