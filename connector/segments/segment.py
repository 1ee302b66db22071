"""What a caller says of segments: where they lie in a prompt, and how much of what is reused is computed anew."""

from collections import abc
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from kvtier.tiers import RequestError

REPAIR_RULES: Final = ("deviation", "question", "first", "borders", "random")
"""How the reused tokens are chosen that are computed anew."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens `start … end` of a prompt, whose KV may come from these tokens alone, computed at another place."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Repair:
    """Which share of the reused tokens is computed anew. Raises RequestError for values out of range.

    The rules: "deviation" computes the layers before `check_layer` for all tokens, and anew what differs most there.
    "question" takes what the text behind the last segment attends to. "first" and "borders" take a segment's ends.
    "random" is for comparison. Share 1 computes everything, as if nothing were reused.
    """

    rule: str = "deviation"
    share: float = 0.15
    check_layer: int = 1  # 1 … layers - 1; of the rule "deviation"
    max_deviation: float = 0.5  # of what is left unrepaired, relative; above it the request is computed in full

    def __post_init__(self) -> None:
        if self.rule not in REPAIR_RULES:
            raise RequestError(f"repair rule {self.rule!r}: use one of {', '.join(REPAIR_RULES)}")
        if not _is_number(self.share) or not 0 <= self.share <= 1:
            raise RequestError(f"repair share {self.share!r}: use a number from 0 to 1")
        if not _is_whole(self.check_layer) or self.check_layer < 1:
            raise RequestError(f"check_layer {self.check_layer!r}: use a whole number from 1; layer 0 never deviates")
        if not _is_number(self.max_deviation) or not self.max_deviation >= 0:
            raise RequestError(f"max_deviation {self.max_deviation!r}: use a number of at least 0")


@dataclass(frozen=True, slots=True)
class WantedReuse:
    """The segments of one request, checked and in order, and their repair."""

    segments: tuple[Segment, ...]
    repair: Repair


@dataclass(frozen=True, slots=True)
class ReusedPart:
    """Tokens `start … end` of a request, copied from `blocks`, whose first token stands at `origin` of the request."""

    start: int
    end: int
    origin: int
    blocks: tuple[int, ...]


def checked_segments(segments: abc.Sequence[Segment], num_tokens: int) -> tuple[Segment, ...]:
    """The segments in order; RequestError if one is empty or out of range, or two overlap."""
    for segment in segments:
        if not _is_segment(segment):
            raise RequestError(f"segment {segment!r}: use Segment(start, end) with whole numbers")
        named = f"segment {segment.start} to {segment.end}"
        if segment.start < 0 or segment.end > num_tokens:
            raise RequestError(f"{named}: not within the {num_tokens} tokens of the prompt")
        if segment.start >= segment.end:
            raise RequestError(f"{named}: it is empty; its end must be above its start")
    ordered = tuple(sorted(segments, key=lambda segment: segment.start))
    for before, after in pairwise(ordered):
        if after.start < before.end:
            raise RequestError(f"segments {before.start} to {before.end} and {after.start} to {after.end} overlap")
    return ordered


def _is_segment(value: object) -> bool:
    return isinstance(value, Segment) and _is_whole(value.start) and _is_whole(value.end)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
