"""The checksum that guards every payload: xxh3-64, computed without giving up the GIL.

python-xxhash releases the GIL for large inputs (from 100,000 bytes in version 3, from 64 KiB in version 4). Taking it
back beside a busy Python thread costs up to the interpreter's switch interval (5 ms), which turns a 20 us hash of
1 MiB into 5 ms. So a payload is fed in slices well below that threshold: the GIL is held for a microsecond at a time,
and never lost.
"""

from typing import Final

import xxhash

_SLICE: Final = 32 * 1024  # bytes; at 64 KiB and more python-xxhash lets go of the GIL


def checksum(payload: memoryview) -> int:
    """xxh3-64 (seed 0) of `payload` (contiguous, format 'B'): an unsigned 64-bit integer."""
    if payload.nbytes <= _SLICE:
        return xxhash.xxh3_64_intdigest(payload)
    digest = xxhash.xxh3_64()
    for start in range(0, payload.nbytes, _SLICE):
        digest.update(payload[start : start + _SLICE])
    return digest.intdigest()
