"""Fp8Codec: a block's numbers as float8 e4m3 with a scale for each few of them. Lossy: only if it is configured.

A number keeps its sign, 4 bits of exponent and 3 of mantissa (OCP 8-bit floating point, E4M3). The scale of a group is
the least power of two that brings its largest number within range. So it costs a byte, nothing but mantissas is
rounded, and what comes back packs to the same bytes again: a block that goes around loses nothing more. A number some
2^14 times smaller than its group's largest one keeps fewer bits, one 2^18 times smaller becomes zero. Bytes:
docs/format.md.
"""

from types import ModuleType
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from kvtier.tiers.errors import FormatError

LEAST_GROUP: Final = 8  # numbers: with fewer of them scales would take too much
MOST_GROUP: Final = 128
_NAME: Final = "fp8-e4m3"
_BITS: Final = {"bfloat16": np.uint16, "float16": np.uint16, "float32": np.uint32}
_MOST: Final = {
    "bfloat16": (2 - 2**-7) * 2.0**127,
    "float16": 65504.0,
    "float32": float(np.finfo(np.float32).max),
}
_KINDS: Final = tuple(_BITS)  # their places are the twin's numbers for them
_FITS: Final = 464 / 512  # mantissa of the largest number that is rounded to 448, the largest of e4m3
_NAN: Final = 0x7F  # without its sign
_BIAS: Final = 127  # of a group's exponent, as a byte
_SCALES: Final = (1, 247)  # from where float32 has no fewer bits, to that of its largest number
_REBASED: Final = 120 << 3  # between the exponents' biases of float32 and e4m3, above three bits
_LEAST_NORMAL: Final = 121 << 23  # 2^-6 as float32; below it e4m3 counts in steps of 2^-9
_STEPS: Final = np.float32(2**14)  # plus it, a float32 has its last bit there
_PIECE: Final = 1 << 16  # numbers at once: what they need meanwhile stays in a CPU's cache


def fp8_form(dtype: str, group: int) -> str:
    """What names this way to store: it is part of a model's identity, and says all that `Fp8Codec.of` needs."""
    return f"{_NAME}/{dtype}/{group}"


class Fp8Codec:
    """Packs `num_bytes` into `packed_bytes`: a byte a number, one a group of `group` numbers. Thread-safe."""

    def __init__(self, dtype: str, group: int, num_bytes: int, loops: ModuleType | None = None) -> None:
        """`loops`: `fp8_compiled.pyx`, which makes the same bytes.

        FormatError for numbers or groups that a block of so many bytes does not consist of.
        """
        if dtype not in _BITS or not LEAST_GROUP <= group <= MOST_GROUP or num_bytes < 1:
            raise FormatError(f"fp8: groups of {group} {dtype} are none that can be packed")
        self.num_bytes = num_bytes
        self._dtype, self._group, self._bits = dtype, group, np.dtype(_BITS[dtype])
        self._count, rest = divmod(num_bytes, self._bits.itemsize)
        if rest or self._count % group:
            raise FormatError(f"fp8: {num_bytes} bytes are not whole groups of {group} {dtype}")
        self.packed_bytes = self._count + self._count // group
        self._piece = _PIECE // group * group
        self._loops = loops

    @classmethod
    def of(cls, form: str, num_bytes: int, loops: ModuleType | None = None) -> Self:
        """The codec that `fp8_form` names. FormatError for another form, or one that does not fit the block."""
        name, _, rest = form.partition("/")
        dtype, _, group = rest.partition("/")
        if name != _NAME or not group.isdecimal() or len(group) > 3:
            raise FormatError(f"lossy form {form!r:.60}: not known here; run one kvtier everywhere")
        return cls(dtype, int(group), num_bytes, loops)

    def pack(self, payload: memoryview) -> memoryview | None:
        """Memory of its own; None if a number is not finite: e4m3 has no infinity, and such a block is of no use."""
        packed = np.empty(self.packed_bytes, np.uint8)
        codes, scales = packed[: self._count], packed[self._count :]
        numbers = np.frombuffer(payload, self._bits)
        if self._loops is not None:
            is_finite: bool = self._loops.pack(numbers, codes, scales, self._group, _KINDS.index(self._dtype))
            return memoryview(packed) if is_finite else None
        for at in range(0, self._count, self._piece):
            rows = self._floats(numbers[at : at + self._piece]).reshape(-1, self._group)
            largest = np.abs(rows).max(axis=1)  # NaN if one is
            if not np.isfinite(largest).all():
                return None
            mantissas, exponents = np.frexp(largest)
            scale = exponents + np.where(mantissas <= _FITS, _BIAS - 9, _BIAS - 8)
            scale[largest == 0] = 0
            scale = np.maximum(scale, _SCALES[0])
            scales[at // self._group :][: len(scale)] = scale
            rows *= np.ldexp(np.float32(1), _BIAS - scale)[:, None]
            codes[at : at + rows.size] = _codes(rows.reshape(-1))
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
        if self._loops is not None:
            return bool(self._loops.unpack(codes, scales, numbers, self._group, _KINDS.index(self._dtype)))
        if int(scales.min()) < _SCALES[0] or int(scales.max()) > _SCALES[1] or ((codes & _NAN) == _NAN).any():
            return False
        most = _MOST[self._dtype]
        for at in range(0, self._count, self._piece):
            rows = np.take(_VALUES, codes[at : at + self._piece]).reshape(-1, self._group)
            exponents = scales[at // self._group :][: len(rows)].astype(np.int32) - _BIAS
            with np.errstate(over="ignore"):
                rows *= np.ldexp(np.float32(1), exponents)[:, None]
            np.clip(rows, -most, most, out=rows)  # rounding may have given more than the dtype has
            self._write(rows.reshape(-1), numbers[at : at + self._piece])
        return True

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


def _codes(floats: NDArray[np.float32]) -> NDArray[np.uint32]:
    """The nearest codes of numbers up to 464, of two the even one; without float32's subnormals, which may be off."""
    bits = floats.view(np.uint32)
    magnitudes: NDArray[np.uint32] = bits & np.uint32(0x7FFFFFFF)
    small = np.flatnonzero(magnitudes < _LEAST_NORMAL)
    steps = (magnitudes[small].view(np.float32) + _STEPS).view(np.uint32) & 0xF
    codes = magnitudes >> np.uint32(20)
    codes &= 1
    codes += 0x7FFFF
    codes += magnitudes
    codes >>= 20
    codes -= _REBASED
    codes[small] = steps
    codes |= (bits >> 24) & 0x80
    return codes


def _all_values() -> NDArray[np.float32]:
    """What each code stands for."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    values = np.where(exponent > 0, np.ldexp(1 + mantissa / 8, exponent - 7), mantissa * 2.0**-9)
    return np.where(code & 0x80, -values, values).astype(np.float32)


_VALUES: Final = _all_values()
