"""The extension module of naming's loops, where it was built: its digests are found, and tried against Python's."""

import ctypes
import hashlib
import struct
import sys
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, Final, NamedTuple

import xxhash

from kvtier.tiers import ChainHash
from kvtier.tiers.compiled import extension

PIECE: Final = 8192  # blocks named in one call: the GIL is kept while their names are made into objects
IDS: Final = 1 << 16  # ids read in one call: the GIL is kept meanwhile

NamesOf = Callable[[ChainHash, "array[int]", int, int, int], list[ChainHash]]
"""(parent, tokens, first token, blocks, tokens in a block) → the names of plain blocks."""

KeptRunsOf = Callable[[Mapping[int, Any], bytes, ChainHash, memoryview, int], tuple[list[ChainHash], list[int]]]
"""(runs, kind, parent, tokens, bytes of a run) → the names of the leading runs that are kept, and their keys."""

_LIBCRYPTO: Final = ("libcrypto.so.3", "libcrypto.so.1.1", "libcrypto.3.dylib")  # where hashlib's own has no such call
_TRIED: Final = (1, 4, 6, 7, 16, 64)  # tokens in a block: the padding of SHA-256 ends in the same chunk, or in the next


class CompiledNames(NamedTuple):
    """What `chain_compiled.pyx` does here."""

    fill: Callable[["array[int]", list[int], int, int], bool]
    names: Mapping[str, NamesOf]  # by scheme: those whose digest was found, and is right
    kept_runs: KeptRunsOf | None  # of `KeptNames`, likewise


@cache
def compiled() -> CompiledNames | None:
    """The twin, or None: it was not built or is turned off, or this machine is big-endian."""
    module = extension("kvtier.tiers.naming.chain_compiled") if sys.byteorder == "little" else None
    return None if module is None or array("I").itemsize != 4 else _checked(module)


def _checked(module: Any) -> CompiledNames:
    """The twin with those digests that could be found. One whose names are not Python's is not used."""
    init, transform = _address("SHA256_Init", *_LIBCRYPTO), _address("SHA256_Transform", *_LIBCRYPTO)
    short, xxh3 = _address("XXH3_64bits"), _address("XXH3_128bits")
    module.load(init, transform, short, xxh3)
    made: dict[str, NamesOf] = {}
    if init and transform and _is_right(module.sha256_names, lambda data: hashlib.sha256(data).digest()):
        made["sha256"] = module.sha256_names
    if xxh3 and _is_right(module.xxh3_names, lambda data: xxhash.xxh3_128_digest(data) * 2):
        made["xxh3"] = module.xxh3_names
    kept_runs = module.kept_runs if short and _finds(module.kept_runs) else None
    return CompiledNames(module.fill, made, kept_runs)


def _address(name: str, *libraries: str) -> int:
    """Where a C function is: in what Python itself hashes with, or else in one of these libraries. 0: nowhere."""
    for library in _loaded(*libraries):
        if (function := getattr(library, name, None)) is not None:
            return ctypes.cast(function, ctypes.c_void_p).value or 0
    return 0


def _loaded(*libraries: str) -> Iterator[ctypes.CDLL]:
    own = [getattr(sys.modules.get(name), "__file__", None) for name in ("_hashlib", "xxhash._xxhash")]
    for path in (*own, *libraries):
        try:
            if path:
                yield ctypes.CDLL(path)
        except OSError:
            continue


def _is_right(names_of: NamesOf, digest: Callable[[bytes], bytes]) -> bool:
    """Whether it names a few blocks of several sizes as Python does."""
    words = array("I", range(2**32 - 200, 2**32))
    for size in _TRIED:
        parent, names = bytes(range(32)), []
        for first in range(3, 3 + 3 * size, size):
            parent = digest(parent + struct.pack("<I", size) + words[first : first + size].tobytes())
            names.append(parent)
        if names_of(bytes(range(32)), words, 3, 3, size) != names:
            return False
    return True


def _finds(kept_runs: KeptRunsOf) -> bool:
    """Whether it finds a run by the key that Python gives it."""
    kind, parent, tokens, names = b"kind", bytes(range(32)), bytes(range(100)), (b"a" * 32, b"b" * 32)
    made_of = kind + parent + tokens
    key = xxhash.xxh3_64_intdigest(made_of)
    found = kept_runs(OrderedDict({key: (made_of, names)}), kind, parent, memoryview(tokens * 2), len(tokens))
    return found == ([*names], [key])
