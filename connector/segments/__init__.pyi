from .blend import Blender, BlendRequest, BlendResult
from .paged_attention import PAGED_ATTENTION, Attention, PagedKV
from .rope_gate import require_rotatable
from .scoring import Scoring
from .segment import REPAIR_RULES, Repair, ReusedPart, Segment, WantedReuse, checked_segments

__all__ = [
    "PAGED_ATTENTION",
    "REPAIR_RULES",
    "Attention",
    "BlendRequest",
    "BlendResult",
    "Blender",
    "PagedKV",
    "Repair",
    "ReusedPart",
    "Scoring",
    "Segment",
    "WantedReuse",
    "checked_segments",
    "require_rotatable",
]
