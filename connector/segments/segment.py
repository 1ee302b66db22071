"""Segments of a request and their repair as callers give them, and the counters of all engines."""

from bisect import bisect_left
from collections import Counter, abc
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal

from kvtier.tiers import RequestError

REPAIR_RULES: Final = ("deviation", "question", "first", "borders", "random")
"""The rules for choosing the reused tokens that are recomputed."""

Share = float | Literal["auto"]

AUTO_SHARES: Final = (0.05, 0.2)
"""The least and the largest share of a repair that chooses its share."""

_UNMEASURED: Final = 0.15  # the share "auto" of a rule that measures no deviation


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens `start … end` of a prompt, whose KV may be reused from the same tokens computed at another place."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Repair:
    """Which share of the reused tokens is recomputed. Raises RequestError for values out of range.

    The rules: "deviation" computes the layers before `check_layer` for all tokens, and repairs those that differ most
    there. "question" repairs what the text after the last segment attends to. "first" and "borders" repair a segment's
    ends. "random" is for comparison. Share 1 computes everything, as if nothing were reused. With the share "auto" the
    rule "deviation" chooses 5 to 20 % by what it measures; the others, which measure none, take 15 %.
    """

    rule: str = "deviation"
    share: Share = 0.15
    check_layer: int = 1  # 1 … layers - 1; for the rule "deviation"
    max_deviation: float = 0.5  # of the unrepaired tokens, relative; above it the request is computed in full

    def __post_init__(self) -> None:
        if self.rule not in REPAIR_RULES:
            raise RequestError(f"repair rule {self.rule!r}: use one of {', '.join(REPAIR_RULES)}")
        if self.share != "auto" and (not _is_number(self.share) or not 0 <= self.share <= 1):
            raise RequestError(f'repair share {self.share!r}: use a number from 0 to 1, or "auto"')
        if not _is_whole(self.check_layer) or self.check_layer < 1:
            raise RequestError(f"check_layer {self.check_layer!r}: use a whole number from 1; layer 0 never deviates")
        if not _is_number(self.max_deviation) or not self.max_deviation >= 0:
            raise RequestError(f"max_deviation {self.max_deviation!r}: use a number of at least 0")

    @property
    def most(self) -> float:
        """The share, or the largest that may be chosen."""
        if self.share != "auto":
            return self.share
        return AUTO_SHARES[1] if self.rule == "deviation" else _UNMEASURED

    @property
    def measures(self) -> bool:
        """Whether the choice takes a measurement: of the deviation, or of what the question attends to."""
        return self.rule in ("deviation", "question") and 0 < self.most < 1


@dataclass(frozen=True, slots=True)
class WantedReuse:
    """The segments of one request, validated and in order, and their repair. None: they are to be found."""

    segments: tuple[Segment, ...] | None
    repair: Repair


@dataclass(frozen=True, slots=True)
class ReusedPart:
    """Tokens `start … end` of a request, copied from `blocks`, whose first token is at `origin` of the request."""

    start: int
    end: int
    origin: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlendRequest:
    """One request to blend: the KV of all its tokens but the last goes to the blocks of `block_table`."""

    token_ids: abc.Sequence[int]
    block_table: list[int]
    num_computed: int  # leading tokens whose KV is there already
    parts: abc.Sequence[ReusedPart] | None  # after those; None: `Blend.bring` adds them later
    repair: Repair


@dataclass(frozen=True, slots=True)
class BlendResult:
    """The result of one request's blend. `deviation`: of the unrepaired tokens; None if not measured."""

    num_reused: int
    num_repaired: int  # of the reused
    num_computed: int  # rows through all layers, including the repaired ones
    deviation: float | None = None
    fell_back: bool = False  # the deviation was too large: everything was computed


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


def checked_repair(repair: Repair | None, default: Repair, num_layers: int) -> Repair:
    """`repair`, else the default; RequestError for another type, and for a check beyond the model's layers."""
    if not isinstance(repair, Repair | None):
        raise RequestError(f"repair {repair!r}: use Repair(rule, share)")
    chosen = default if repair is None else repair
    if chosen.rule == "deviation" and chosen.check_layer >= num_layers:
        raise RequestError(
            f"check_layer {chosen.check_layer}: this model's layers are 0 to {num_layers - 1}; use a lower one"
        )
    return chosen


def _is_segment(value: object) -> bool:
    return isinstance(value, Segment) and _is_whole(value.start) and _is_whole(value.end)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


SEGMENT_OUTCOMES: Final = ("held", "loaded", "computed", "lost", "short", "prefix", "new", "few")
"""Outcomes of segments: in L1 at lookup, loaded whole, (partly) computed alone; evicted from L1 before the request's
admission; too short; at the prompt's start, where it is an ordinary prefix. Of unmarked ones: first seen, and in no
tier; too few for a blend."""

COUNTED: Final = (
    "segment_tokens",
    "repaired_tokens",
    "blends",
    "blends_in_full",
    *(f"segments_{way}" for way in SEGMENT_OUTCOMES),
)


class Spread:
    """A histogram: the number of values by upper bound, each in one bucket, and their sum."""

    def __init__(self, *bounds: float) -> None:
        self.bounds = (*bounds, float("inf"))
        self.counts: Counter[float] = Counter(dict.fromkeys(self.bounds, 0))
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[self.bounds[bisect_left(self.bounds, value)]] += 1
        self.sum += value


class BlendCounts:
    """Counts of one engine's blends since its start: `stats` under the names in `COUNTED`, and two histograms."""

    def __init__(self) -> None:
        self.stats: Counter[str] = Counter(dict.fromkeys(COUNTED, 0))
        self.deviations = Spread(0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0)  # of the unrepaired tokens, by request
        self.shares = Spread(0.05, 0.075, 0.1, 0.125, 0.15, 0.175, 0.2, 1.0)  # repaired, by request

    def add(self, result: BlendResult) -> None:
        self.stats["blends"] += 1
        self.stats["blends_in_full"] += result.fell_back
        if result.deviation is not None:
            self.deviations.add(result.deviation)
        if result.num_reused:
            self.shares.add(result.num_repaired / result.num_reused)
