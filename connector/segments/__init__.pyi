from .blend import Blender
from .figures import COUNTED, DEVIATION_BOUNDS, SEGMENT_OUTCOMES, deviation_bound
from .paged_attention import PAGED_ATTENTION, AttentionSpan, PackedAttention, PagedKV
from .progress import Blend, BlendResult
from .rope_gate import require_rotatable
from .scoring import Scoring
from .segment import (
    REPAIR_RULES,
    BlendRequest,
    Repair,
    ReusedPart,
    Segment,
    WantedReuse,
    checked_repair,
    checked_segments,
)
from .uploads import uploaded

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
