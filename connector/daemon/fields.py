"""The fields of the daemon's messages: what each may be on the wire, checked when it is decoded."""

import struct
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Final, ParamSpec, TypeVar

import numpy as np

from kvtier.tiers import ChainHash, FormatError

P = ParamSpec("P")
T = TypeVar("T")

MAX_HASHES: Final = 1 << 17  # names in one message
MAX_BLOCK_SIZE: Final = 1 << 20  # tokens
ID_BYTES: Final = 16  # of the random names of clients and of a namespace's opening

_HASH_BYTES: Final = 32


def decoded(decode: Callable[P, T]) -> Callable[P, T]:
    """Decorator of what decodes a body: whatever is wrong with that is a FormatError."""

    @wraps(decode)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return decode(*args, **kwargs)
        except FormatError:
            raise
        except (ValueError, TypeError, LookupError, AssertionError) as error:
            raise FormatError(f"not a message of this version: {str(error)[:200]}") from None

    return checked


def pack_hashes(hashes: Sequence[ChainHash]) -> bytes:
    """Names back to back."""
    return b"".join(hashes)


def unpack_hashes(data: Any) -> list[ChainHash]:
    if not isinstance(data, bytes) or len(data) % _HASH_BYTES or len(data) > MAX_HASHES * _HASH_BYTES:
        raise FormatError(f"names: not {_HASH_BYTES} bytes for each of at most {MAX_HASHES}")
    hashes: list[ChainHash] = np.frombuffer(data, f"V{_HASH_BYTES}").tolist()
    return hashes


def pack_numbers(numbers: list[int]) -> bytes:
    """i64 little-endian, back to back."""
    return struct.pack(f"<{len(numbers)}q", *numbers)


def unpack_numbers(data: Any, below: int, *, least: int = 0) -> list[int]:
    """Inverse of `pack_numbers`; each must be in [least, below)."""
    if type(data) is not bytes or len(data) % 8:
        raise FormatError("numbers: not eight bytes for each")
    unpacked: list[int] = np.frombuffer(data, "<i8").tolist()
    if unpacked and not (min(unpacked) >= least and max(unpacked) < below):
        raise FormatError(f"numbers: not all in [{least}, {below})")
    return unpacked


def number(value: Any, below: int = 1 << 63) -> int:
    """A whole number in [0, below)."""
    if type(value) is not int or not 0 <= value < below:
        raise FormatError(f"{value!r:.40}: not a whole number in [0, {below})")
    return value


def numbers(values: Any) -> list[int]:
    """A list of whole numbers in [0, 2**63), looked at in one go."""
    whole: list[int] | None = values if type(values) is list and set(map(type, values)) <= {int} else None
    if whole is None or (whole and not 0 <= min(whole) <= max(whole) < 1 << 63):
        raise FormatError(f"{values!r:.40}: not a list of whole numbers in [0, {1 << 63})")
    return whole


def seconds(value: Any) -> float:
    """A time: finite and not negative."""
    if type(value) not in (int, float) or not 0 <= value < 1e9:
        raise FormatError(f"{value!r:.40}: not a time in seconds")
    return float(value)


def flag(value: Any) -> bool:
    """True or False, nothing that merely looks so."""
    if type(value) is not bool:
        raise FormatError(f"{value!r:.40}: neither true nor false")
    return value


def octets(value: Any, length: int) -> bytes:
    """Exactly `length` bytes."""
    if type(value) is not bytes or len(value) != length:
        raise FormatError(f"not {length} bytes: {value!r:.40}")
    return value


def octets_up_to(value: Any, most: int) -> bytes:
    """At most so many bytes."""
    if type(value) is not bytes or len(value) > most:
        raise FormatError(f"not bytes, {most} at most: {value!r:.40}")
    return value


def octets_of_tokens(value: Any) -> bytes:
    """Whole tokens of a block, or none: u32 little-endian each."""
    if type(value) is not bytes or len(value) % 4 or len(value) > 4 * MAX_BLOCK_SIZE:
        raise FormatError(f"not the tokens of a block: {value!r:.40}")
    return value


def octets_of_blocks(values: Any) -> list[bytes]:
    """A list of the tokens of blocks, looked at in one go."""
    if type(values) is not list or not set(map(type, values)) <= {bytes}:
        raise FormatError("tokens are not a list of bytes")
    for length in set(map(len, values)):
        if length % 4 or length > 4 * MAX_BLOCK_SIZE:
            raise FormatError(f"not the tokens of a block: {length} bytes")
    return values


def text(value: Any) -> str:
    if type(value) is not str:
        raise FormatError(f"not a text: {value!r:.40}")
    return value
