"""Where xxhash's C functions are, for twins that hash without the interpreter's lock."""

import ctypes
import importlib
import logging
from functools import cache
from typing import Final, NamedTuple

import xxhash

_log = logging.getLogger(__name__)
_SAMPLE: Final = bytes(range(256)) * 32
_SIZES: Final = (0, 1, 100, 4096, len(_SAMPLE))  # each is hashed another way
_SEED: Final = 7


class Digests(NamedTuple):
    """Addresses of functions in python-xxhash's own extension; the caller keeps nothing alive."""

    xxh3_64: int
    """`(const void *, size_t) → uint64_t`."""
    xxh3_64_seeded: int
    """`(const void *, size_t, uint64_t seed) → uint64_t`."""


@cache
def digests() -> Digests | None:
    """Tried against Python's; None where python-xxhash does not show them, or they differ: Python hashes then."""
    try:
        library = ctypes.CDLL(str(importlib.import_module("xxhash._xxhash").__file__))
    except (ImportError, OSError):
        return None
    for suffix in ("_dispatch", ""):  # the first takes the processor's widest instructions
        plain = getattr(library, f"XXH3_64bits{suffix}", None)
        seeded = getattr(library, f"XXH3_64bits_withSeed{suffix}", None)
        if plain is None or seeded is None:
            continue
        plain.restype = seeded.restype = ctypes.c_uint64
        plain.argtypes = (ctypes.c_char_p, ctypes.c_size_t)
        seeded.argtypes = (*plain.argtypes, ctypes.c_uint64)
        if all(
            plain(_SAMPLE, size) == xxhash.xxh3_64_intdigest(_SAMPLE[:size])
            and seeded(_SAMPLE, size, _SEED) == xxhash.xxh3_64_intdigest(_SAMPLE[:size], _SEED)
            for size in _SIZES
        ):
            return Digests(*(ctypes.cast(each, ctypes.c_void_p).value or 0 for each in (plain, seeded)))
    _log.info("python-xxhash %s does not show its C functions: Python hashes", xxhash.VERSION)
    return None
