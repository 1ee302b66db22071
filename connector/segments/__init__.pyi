from .blend import Blender
from .paged_attention import PAGED_ATTENTION, Attention, PagedKV
from .progress import Blend, BlendResult
from .rope_gate import require_rotatable
from .segment import REPAIR_RULES, BlendRequest, Repair, ReusedPart, Segment, WantedReuse, checked_segments

__all__ = [
    "PAGED_ATTENTION",
    "REPAIR_RULES",
    "Attention",
    "Blend",
    "BlendRequest",
    "BlendResult",
    "Blender",
    "PagedKV",
    "Repair",
    "ReusedPart",
    "Segment",
    "WantedReuse",
    "checked_segments",
    "require_rotatable",
]
