"""Names as arrays of words: what remembers, counts or compares many at once."""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvtier.tiers import ChainHash

Slots = NDArray[np.int64]
Words = NDArray[np.uint64]

HASH_BYTES: Final = 32
# Odd constants: keys that are no good hashes (a counter, zero padding) must spread over the buckets all the same. Such
# keys differ at one end; words between would cost a name that comes alone a fifth more.
NAME_MIX: Final = np.array([0x9E3779B97F4A7C15, 0, 0, 0x27D4EB2F165667C5], np.uint64)


def to_words(hashes: Sequence[ChainHash]) -> Words:
    """Chain hashes as `[n, 4]` uint64. ValueError if they are not 32 bytes each."""
    joined = b"".join(hashes)
    if len(joined) != HASH_BYTES * len(hashes):
        raise ValueError(f"chain hashes of {sorted(set(map(len, hashes)))} bytes: must be {HASH_BYTES}")
    return np.frombuffer(joined, np.uint64).reshape(-1, 4)
