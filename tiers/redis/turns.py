"""Large blocks by the extension module, where it was built: few under way at once, each hashed as it comes."""

from collections.abc import Sequence
from typing import Final, Protocol

from kvtier.tiers.compiled import extension

_TWIN: Final = "kvtier.tiers.redis.turns_compiled"
_LEAST: Final = 64 << 10  # bytes of a block; below, many of them go by one call
_UNDER_WAY: Final = 512 << 10  # bytes; with more answers at hand a server is slower
_BYTES_PER_SECOND: Final = 2e9  # more than one connection brings: so much must be under way for a round trip's length


class Turns(Protocol):
    """Commands and replies of one shape, as far as they went; of `turns_compiled.pyx`."""

    whole: int
    """Replies received that are as usual."""
    part: int
    """Bytes of the next one that are in their places."""
    asked: int
    """Commands sent."""
    sent: int
    """Bytes of the next one that were sent."""

    def run(self, fd: int, depth: int, deadline: float) -> None:
        """Go on, at most `depth` commands under way, until `deadline` (time.monotonic) or what is not as usual."""

    def hash_at(self, i: int) -> int | None:
        """xxh3-64 of a whole reply's payload; None if the reply has none."""


class MakeTurns(Protocol):
    """How the twin is given its commands, the places of their replies, and what was done before."""

    def __call__(
        self,
        asks: list[Sequence[bytes | memoryview]],
        places: list[Sequence[memoryview]],
        opening: bytes,
        asked: int,
        part: int,
        /,
    ) -> Turns:
        """`Turns` of so many commands."""


def make_turns(payload_bytes: int) -> MakeTurns | None:
    """What makes `Turns`; None where the twin was not built, or blocks are too small for it."""
    module = extension(_TWIN) if payload_bytes >= _LEAST else None
    made: MakeTurns | None = module.Turns if module is not None else None
    return made


def depth_of(payload_bytes: int, window: int, round_trip: float) -> int:
    """Blocks under way at once, `window` at most. `round_trip`: seconds; 0 where it is not known yet.

    The bandwidth-delay product: with less under way, server and client would wait for each other.
    """
    under_way = max(_UNDER_WAY, int(round_trip * _BYTES_PER_SECOND))
    return min(window, max(2, under_way // payload_bytes))
