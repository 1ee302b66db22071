from .blend import BlendAttention, Blender, TransformersDecoder, Turns
from .paged_attention import PAGED_ATTENTION, AttentionSpan, PackedAttention, PagedKV, Scoring, uploaded
from .progress import Blend
from .rope import Layers, attending, checked_rotation, require_rotatable, tolerance_of
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
    "BlendAttention",
    "BlendCounts",
    "BlendRequest",
    "BlendResult",
    "Blender",
    "FoundSegments",
    "Layers",
    "PackedAttention",
    "PagedKV",
    "Repair",
    "ReusedPart",
    "Scoring",
    "Segment",
    "Share",
    "Spread",
    "TransformersDecoder",
    "Turns",
    "UnmarkedSegments",
    "WantedReuse",
    "attending",
    "checked_repair",
    "checked_rotation",
    "checked_segments",
    "require_rotatable",
    "tolerance_of",
    "uploaded",
]
