"""Fp8Codec: a block's numbers as float8 e4m3 with a scale for each few of them. Lossy: only for who asked for it.

A number keeps its sign, 4 bits of exponent and 3 of mantissa (OCP 8-bit floating point, E4M3). The scale of a group is
the least power of two that brings its largest number within range. So it costs a byte, nothing but mantissas is
rounded, and what comes back packs to the same bytes again: a block that goes around loses nothing more. A number some
2^14 times smaller than its group's largest one keeps fewer bits, one 2^18 times smaller becomes zero. Bytes:
docs/format.md.
"""

from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from kvtier.tiers.errors import FormatError

LEAST_GROUP: Final = 8  # numbers: with fewer of them scales would take too much
MOST_GROUP: Final = 128
_NAME: Final = "fp8-e4m3"
_BITS: Final = {"bfloat16": np.uint16, "float16": np.uint16, "float32": np.uint32}
_MOST: Final = {"bfloat16": (2 - 2**-7) * 2.0**127, "float16": 65504.0, "float32": float(np.finfo(np.float32).max)}
_FITS: Final = 464 / 512  # mantissa of the largest number that is rounded to 448, the largest of e4m3
_NAN: Final = 0x7F  # without its sign
_BIAS: Final = 127  # of a group's exponent, as a byte
_LAST_SCALE: Final = 247  # of float32's largest number
_REBASED: Final = 120  # between the exponents' biases of float32 and e4m3: shifted by it the bits are the same
_PIECE: Final = 1 << 16  # numbers at once: what they need meanwhile stays in a CPU's cache


def fp8_form(dtype: str, group: int) -> str:
    """What names this way to store: it is part of a model's identity, and says all that `Fp8Codec.of` needs."""
    return f"{_NAME}/{dtype}/{group}"


class Fp8Codec:
    """Packs payloads of `num_bytes` each into `packed_bytes`: a byte for each number, then one for each group.

    Thread-safe: it keeps nothing. A group is `group` consecutive numbers.
    """

    def __init__(self, dtype: str, group: int, num_bytes: int) -> None:
        """FormatError for numbers or groups that a block of so many bytes does not consist of."""
        if dtype not in _BITS or not LEAST_GROUP <= group <= MOST_GROUP or num_bytes < 1:
            raise FormatError(f"fp8: groups of {group} {dtype} are none that can be packed")
        self.num_bytes = num_bytes
        self._dtype, self._group, self._bits = dtype, group, np.dtype(_BITS[dtype])
        self._count, rest = divmod(num_bytes, self._bits.itemsize)
        if rest or self._count % group:
            raise FormatError(f"fp8: {num_bytes} bytes are not whole groups of {group} {dtype}")
        self.packed_bytes = self._count + self._count // group
        self._piece = max(1, _PIECE // group) * group

    @classmethod
    def of(cls, form: str, num_bytes: int) -> Self:
        """The codec that `fp8_form` names. FormatError for another form, or one that does not fit the block."""
        name, _, told = form.partition("/")
        dtype, _, group = told.partition("/")
        if name != _NAME or not group.isdecimal() or len(group) > 3:
            raise FormatError(f"lossy form {form!r:.60}: not known here; run one kvtier everywhere")
        return cls(dtype, int(group), num_bytes)

    def pack(self, payload: memoryview) -> memoryview | None:
        """Memory of its own; None if a number is not finite: e4m3 has no infinity, and such a block is of no use."""
        packed = np.empty(self.packed_bytes, np.uint8)
        codes, scales = packed[: self._count], packed[self._count :]
        numbers = np.frombuffer(payload, self._bits)
        for at in range(0, self._count, self._piece):
            whole = self._floats(numbers[at : at + self._piece]).reshape(-1, self._group)
            largest = np.abs(whole).max(axis=1)  # NaN if one is
            if not np.isfinite(largest).all():
                return None
            mantissas, exponents = np.frexp(largest)
            scale = np.clip(exponents + np.where(mantissas <= _FITS, -9, -8), -_BIAS, None)
            scales[at // self._group :][: len(scale)] = scale + _BIAS
            bits = _scaled(whole, -scale - _REBASED).view(np.uint32).reshape(-1)
            signs = bits >> 24
            signs &= 0x80
            rounded = bits >> 20  # to the nearest, and to the even one of two
            rounded &= 1
            rounded += 0x7FFFF
            rounded += bits
            rounded >>= 20
            rounded &= _NAN
            rounded |= signs
            codes[at : at + len(bits)] = rounded
        return memoryview(packed)

    def unpack(self, packed: memoryview, into: memoryview) -> bool:
        """Write the numbers into `into` (num_bytes), which may begin with `packed` itself.

        False, and rubbish there, if `packed` is nothing that `pack` makes.
        """
        if packed.nbytes != self.packed_bytes:
            return False
        whole = np.frombuffer(packed, np.uint8).copy()
        codes, scales = whole[: self._count], whole[self._count :]
        numbers = np.frombuffer(into, self._bits)
        if int(scales.max()) > _LAST_SCALE:
            return False
        for at in range(0, self._count, self._piece):
            bits = codes[at : at + self._piece].astype(np.uint32)
            signs = bits & 0x80
            bits &= _NAN
            if int(bits.max()) == _NAN:
                return False
            signs <<= 24
            bits <<= 20
            bits |= signs
            scale = scales[at // self._group :][: len(bits) // self._group].astype(np.int32) - _BIAS
            floats = _scaled(bits.view(np.float32).reshape(-1, self._group), scale + _REBASED)
            if int(scale.max()) >= self._near_the_top:
                np.clip(floats, -_MOST[self._dtype], _MOST[self._dtype], out=floats)
            self._write(floats.reshape(-1), numbers[at : at + self._piece])
        return True

    @property
    def _near_the_top(self) -> int:
        """The scale from which on rounding may give more than the dtype has."""
        return int(np.frexp(_MOST[self._dtype])[1]) - 8

    def _floats(self, numbers: NDArray[np.uint16] | NDArray[np.uint32]) -> NDArray[np.float32]:
        """A copy of the numbers as float32: exact."""
        if self._dtype == "bfloat16":
            return (numbers.astype(np.uint32) << 16).view(np.float32)
        return numbers.view(self._dtype).astype(np.float32)

    def _write(self, floats: NDArray[np.float32], numbers: NDArray[np.uint16] | NDArray[np.uint32]) -> None:
        """Four bits of mantissa: exact but for the smallest numbers that the dtype has."""
        if self._dtype == "bfloat16":
            np.right_shift(floats.view(np.uint32), 16, out=numbers, casting="unsafe")
        else:
            numbers.view(self._dtype)[:] = floats


def _scaled(rows: NDArray[np.float32], exponents: NDArray[np.int32]) -> NDArray[np.float32]:
    """The rows times two to the power of their exponents, in place: exact, if the result has bits for it."""
    first = np.clip(exponents, -126, 127)
    rows *= np.ldexp(np.float32(1), first)[:, None]
    if np.any(first != exponents):
        with np.errstate(over="ignore"):  # behind it comes what brings it back within range
            rows *= np.ldexp(np.float32(1), exponents - first)[:, None]
    return rows
