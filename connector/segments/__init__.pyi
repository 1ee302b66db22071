from .blend import Blender
from .paged_attention import PAGED_ATTENTION, AttentionSpan, PackedAttention, PagedKV, Scoring, uploaded
from .progress import Blend
from .rope import attending, require_rotatable
from .segment import (
    REPAIR_RULES,
    SEGMENT_OUTCOMES,
    BlendCounts,
    BlendRequest,
    BlendResult,
    Repair,
    ReusedPart,
    Segment,
    Share,
    Spread,
    WantedReuse,
    checked_repair,
    checked_segments,
)
from .unmarked import FoundSegments, UnmarkedSegments

__all__ = [
    "PAGED_ATTENTION",
    "REPAIR_RULES",
    "SEGMENT_OUTCOMES",
    "AttentionSpan",
    "Blend",
    "BlendCounts",
    "BlendRequest",
    "BlendResult",
    "Blender",
    "FoundSegments",
    "PackedAttention",
    "PagedKV",
    "Repair",
    "ReusedPart",
    "Scoring",
    "Segment",
    "Share",
    "Spread",
    "UnmarkedSegments",
    "WantedReuse",
    "attending",
    "checked_repair",
    "checked_segments",
    "require_rotatable",
    "uploaded",
]
