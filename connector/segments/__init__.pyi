from .blend import Blender
from .paged_attention import PAGED_ATTENTION, AttentionSpan, PackedAttention, PagedKV, Scoring, uploaded
from .progress import Blend, BlendResult
from .rope import require_rotatable
from .segment import (
    COUNTED,
    DEVIATION_BOUNDS,
    REPAIR_RULES,
    SEGMENT_OUTCOMES,
    BlendRequest,
    Repair,
    ReusedPart,
    Segment,
    WantedReuse,
    checked_repair,
    checked_segments,
    deviation_bound,
)

__all__ = [
    "COUNTED",
    "DEVIATION_BOUNDS",
    "PAGED_ATTENTION",
    "REPAIR_RULES",
    "SEGMENT_OUTCOMES",
    "AttentionSpan",
    "Blend",
    "BlendRequest",
    "BlendResult",
    "Blender",
    "PackedAttention",
    "PagedKV",
    "Repair",
    "ReusedPart",
    "Scoring",
    "Segment",
    "WantedReuse",
    "checked_repair",
    "checked_segments",
    "deviation_bound",
    "require_rotatable",
    "uploaded",
]
