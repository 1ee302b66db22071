"""What every engine counts of reused segments, under the same names."""

from bisect import bisect_left
from typing import Final

SEGMENT_OUTCOMES: Final = ("held", "loaded", "computed", "lost", "short", "prefix")
"""What became of segments: in L1 when asked for, loaded whole, (partly) computed alone; gone again from L1 when its
request was admitted; too short; at the prompt's start, where it is an ordinary prefix."""

COUNTED: Final = (
    "segment_tokens",
    "repaired_tokens",
    "blends",
    "blends_in_full",
    *(f"segments_{way}" for way in SEGMENT_OUTCOMES),
)

DEVIATION_BOUNDS: Final = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, float("inf"))
"""Upper bounds of the histogram of what was left unrepaired."""


def deviation_bound(deviation: float) -> float:
    """The upper bound of its bucket in the histogram of what was left unrepaired."""
    return DEVIATION_BOUNDS[bisect_left(DEVIATION_BOUNDS, deviation)]
