"""Large blocks by the compiled twin, where it was built: few under way at once, each hashed as it comes."""

import ctypes
import importlib
import os
from collections.abc import Sequence
from functools import cache
from typing import Final, Protocol

from kvtier.tiers import checksum
from kvtier.tiers.compiled import twin

_TWIN: Final = "kvtier.tiers.redis.turns_compiled"
_LEAST: Final = 64 << 10  # bytes of a block; below, many of them go by one call
_UNDER_WAY: Final = 512 << 10  # bytes; with more answers at hand a server is slower
_BYTES_PER_SECOND: Final = 2e9  # more than one connection brings: so much must be under way for a round trip's length
_HASHERS: Final = ("XXH3_64bits_dispatch", "XXH3_64bits")  # in xxhash's extension, the faster one first


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
        """xxh3-64 of a whole reply's payload; None if Python is to compute it."""


class MakeTurns(Protocol):
    """How the twin is given its commands, the places of their replies, and what was done before."""

    def __call__(
        self,
        asks: list[Sequence[bytes | memoryview]],
        places: list[Sequence[memoryview]],
        opening: bytes,
        hasher: int,
        asked: int,
        part: int,
        /,
    ) -> Turns:
        """`Turns` of so many commands."""


def make_turns(payload_bytes: int) -> MakeTurns | None:
    """What makes `Turns`; None where the twin was not built, or blocks are too small for it."""
    module = twin(_TWIN) if payload_bytes >= _LEAST else None
    made: MakeTurns | None = module.Turns if module is not None else None
    return made


def depth_of(payload_bytes: int, window: int, round_trip: float) -> int:
    """Blocks under way at once, `window` at most. `round_trip`: seconds; 0 where it is not known yet.

    The bandwidth-delay product: with less under way, server and client would wait for each other.
    """
    under_way = max(_UNDER_WAY, int(round_trip * _BYTES_PER_SECOND))
    return min(window, max(2, under_way // payload_bytes))


@cache
def hasher() -> int:
    """Where xxh3-64 lies in python-xxhash's extension; 0 if it is not to be found: Python hashes then."""
    try:
        library = ctypes.CDLL(str(importlib.import_module("xxhash._xxhash").__file__))
    except (ImportError, OSError):
        return 0
    found = next((getattr(library, name) for name in _HASHERS if hasattr(library, name)), None)
    if found is None:
        return 0
    found.argtypes, found.restype = (ctypes.c_char_p, ctypes.c_size_t), ctypes.c_uint64
    samples = [os.urandom(size) for size in (0, 1, 100, 4096)]
    if any(found(sample, len(sample)) != checksum(memoryview(sample)) for sample in samples):
        return 0
    return ctypes.cast(found, ctypes.c_void_p).value or 0
