from .block_copier import BlockCopier, BlockCopies, CopyDirection, block_bytes_view
from .copy_ways import CopyWays
from .cuda_event import CudaEvent
from .cuda_transfer import CudaCopyStream
from .device import BlockPool
from .device_errors import DEVICE_ERRORS, is_out_of_memory
from .engine_blocks import BlockPart, EngineBlocks, PartCopier
from .kept_choices import KeptChoice, KeptChoices
from .transfer import COPIED, CopyEvent, CopyStream, HostCopyStream, ended

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
