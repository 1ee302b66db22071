from .blend import Blender, BlendRequest, BlendResult
from .paged_attention import PAGED_ATTENTION, Attention, AttentionSpan, PackedAttention, PagedKV, visible
from .rope_gate import require_rotatable
from .segment import REPAIR_RULES, Repair, ReusedPart, Segment, WantedReuse, checked_segments

__all__ = [
    "PAGED_ATTENTION",
    "REPAIR_RULES",
    "Attention",
    "AttentionSpan",
    "BlendRequest",
    "BlendResult",
    "Blender",
    "PackedAttention",
    "PagedKV",
    "Repair",
    "ReusedPart",
    "Segment",
    "WantedReuse",
    "checked_segments",
    "require_rotatable",
    "visible",
]
