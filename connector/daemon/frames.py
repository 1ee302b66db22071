"""The daemon's wire, below its words: frames of u32 length ‖ msgpack, cut from a stream and decoded within bounds."""

import struct
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import msgpack
import numpy as np
from numpy.typing import NDArray

from kvtier.tiers import ChainHash, FormatError

T = TypeVar("T")

MAX_HELLO: Final = 4 << 10  # bytes of a frame from a client that has not said yet who it is
MAX_FRAME: Final = 16 << 20  # bytes of any other
MAX_ITEMS: Final = 4096  # of one array: a decoder makes room for as many as an array claims to have
MAX_HASHES: Final = 1 << 17  # names in one message
MAX_TEXT: Final = 1024  # bytes of one text
ID_BYTES: Final = 16  # of the random names of clients and of a namespace's opening

_LENGTH: Final = struct.Struct("<I")
_HASH_BYTES: Final = 32


class FrameReader:
    """Cuts a stream of bytes into frames. Holds less than `limit` bytes besides what it was last fed."""

    def __init__(self, limit: int) -> None:
        self.limit = limit  # bytes of one frame; may be changed between two calls of `feed`
        self._rest = bytearray()  # of the frame that is not whole yet

    @property
    def num_waiting(self) -> int:
        """Bytes of a frame that is not whole yet."""
        return len(self._rest)

    def feed(self, data: bytes) -> list[Any]:
        """The bodies of the frames that these bytes complete, decoded.

        Raises FormatError for a length over the limit, as soon as its four bytes are there, and for what is no msgpack.
        """
        stream: bytes | bytearray = data
        if self._rest:
            self._rest += data
            stream = self._rest
        bodies, at = [], 0
        while len(stream) - at >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(stream, at)
            if not 0 < size <= self.limit:
                raise FormatError(f"frame of {size} bytes: this side takes 1 to {self.limit}")
            end = at + _LENGTH.size + size
            if end > len(stream):
                break
            bodies.append(_unpack(stream[at + _LENGTH.size : end]))
            at = end
        if at or stream is data:
            self._rest = bytearray(stream[at:])
        return bodies


def pack_frame(body: object) -> bytes:
    """One frame. ValueError if it would be longer than any reader takes."""
    packed: bytes = msgpack.packb(body)
    if len(packed) > MAX_FRAME:
        raise ValueError(f"frame of {len(packed)} bytes: at most {MAX_FRAME}")
    return _LENGTH.pack(len(packed)) + packed


def decoded(decode: Callable[[Any], T], body: Any) -> T:
    """`decode(body)`. Whatever is wrong with the body is a FormatError."""
    try:
        return decode(body)
    except FormatError:
        raise
    except (ValueError, TypeError, LookupError, AssertionError) as error:
        raise FormatError(f"not a message of this version: {error}") from None


def pack_hashes(hashes: Sequence[ChainHash]) -> bytes:
    """Names back to back."""
    return b"".join(hashes)


def unpack_hashes(data: Any) -> list[ChainHash]:
    """Inverse of `pack_hashes`."""
    if not isinstance(data, bytes) or len(data) % _HASH_BYTES or len(data) > MAX_HASHES * _HASH_BYTES:
        raise FormatError(f"names: not {_HASH_BYTES} bytes for each of at most {MAX_HASHES}")
    hashes: list[ChainHash] = np.frombuffer(data, f"V{_HASH_BYTES}").tolist()
    return hashes


def pack_numbers(numbers: NDArray[np.int64]) -> bytes:
    """i64 little-endian, back to back."""
    return numbers.astype("<i8", copy=False).tobytes()


def unpack_numbers(data: Any, below: int, *, least: int = 0) -> NDArray[np.int64]:
    """Inverse of `pack_numbers`; each must be in [least, below)."""
    if not isinstance(data, bytes) or len(data) % 8:
        raise FormatError("numbers: not eight bytes for each")
    numbers = np.frombuffer(data, "<i8").astype(np.int64)
    if len(numbers) and not (numbers.min() >= least and numbers.max() < below):
        raise FormatError(f"numbers: not all in [{least}, {below})")
    return numbers


def number(value: Any, below: int = 1 << 63) -> int:
    """A whole number in [0, below)."""
    if type(value) is not int or not 0 <= value < below:
        raise FormatError(f"{value!r:.40}: not a whole number in [0, {below})")
    return value


def numbers(values: Any) -> list[int]:
    """A list of whole numbers in [0, 2**63), looked at in one go."""
    if type(values) is not list or not all(type(each) is int and 0 <= each < 1 << 63 for each in values):
        raise FormatError(f"{values!r:.40}: not a list of whole numbers in [0, {1 << 63})")
    return values


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


def text(value: Any) -> str:
    """A text."""
    if type(value) is not str:
        raise FormatError(f"not a text: {value!r:.40}")
    return value


def _unpack(body: bytes | bytearray) -> Any:
    try:
        return msgpack.unpackb(
            body,
            max_array_len=MAX_ITEMS,
            max_map_len=0,
            max_ext_len=0,
            max_str_len=MAX_TEXT,
            strict_map_key=True,
            ext_hook=_no_extension,
        )
    except (ValueError, msgpack.UnpackException) as error:
        raise FormatError(f"frame of {len(body)} bytes: not msgpack within bounds ({error!s:.80})") from None


def _no_extension(code: int, data: bytes) -> None:
    raise ValueError(f"extension type {code}")
