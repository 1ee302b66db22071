"""The KV of a few tokens in short, by which a model checks that it computes the KV kept in a namespace.

A name covers a model's readable parts: weights, configuration, adapters. Other differences (a library's release, a
function replaced in it) show in the KV alone. Bytes of KV differ between CPUs and kernels, so probes are compared
within a tolerance, and never hashed.
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvtier.tiers import FormatError

PROBE_BYTES: Final = 2048
"""The longest packed probe."""

# Relative. Over six models, two kernels and four sets of CPU instructions, rounding took seven tokens' KV apart by at
# most 8e-6, 1.2e-2 and 7.6e-2; TF32 keeps ten bits.
TOLERANCES: Final = {"float32": 2e-3, "float16": 3e-2, "bfloat16": 0.2}

_HEAD: Final = struct.Struct("<8s16sHH")  # magic ‖ dtype ‖ planes ‖ numbers of each
_SUM: Final = struct.Struct("<Q")  # xxh3-64 of all before it
_MAGIC: Final = b"KVPROBE1"
_MOST_NUMBERS: Final = (PROBE_BYTES - _HEAD.size - _SUM.size) // 4
_MOST_EACH: Final = 17  # a plane's norm, and 16 sums


@dataclass(frozen=True, slots=True, eq=False)
class KVProbe:
    """Of each plane (K or V of one layer, say) its norm, and sums of its elements under fixed signs."""

    dtype: str  # in which the model computes: a key of TOLERANCES
    numbers: NDArray[np.float32]  # [planes, 1 + sums]

    @classmethod
    def of(cls, planes: Sequence[NDArray[Any]], dtype: str) -> "KVProbe":
        """`planes` are the tokens' parts of the model's cache, any shape each, in a fixed order. Many are thinned."""
        chosen = np.unique(np.linspace(0, len(planes) - 1, min(len(planes), _MOST_NUMBERS // 2)).astype(int)).tolist()
        each = min(_MOST_EACH, _MOST_NUMBERS // max(1, len(chosen)))
        numbers = np.empty((len(chosen), each), np.float32)
        with np.errstate(invalid="ignore", over="ignore"):  # a model may compute NaN
            for row, number in enumerate(chosen):
                plane = np.asarray(planes[number], np.float64).ravel()
                sums = (_signs(len(plane), column) @ plane for column in range(each - 1))
                numbers[row] = [np.linalg.norm(plane), *sums]
        return cls(dtype, numbers)

    @property
    def is_finite(self) -> bool:
        """Whether it can be compared: NaN equals nothing, not even the same model's KV."""
        return bool(np.isfinite(self.numbers).all())

    def packed(self) -> bytes:
        """Its bytes, `PROBE_BYTES` at most (docs/format.md)."""
        head = _HEAD.pack(_MAGIC, self.dtype.encode(), *self.numbers.shape)
        body = head + self.numbers.astype("<f4").tobytes()
        return body + _SUM.pack(xxhash.xxh3_64_intdigest(body))

    @classmethod
    def unpack(cls, data: bytes) -> "KVProbe":
        """The probe at the start of these bytes; FormatError if there is none."""
        if len(data) < _HEAD.size or not data.startswith(_MAGIC):
            raise FormatError("no KV probe")
        _, dtype, num_planes, each = _HEAD.unpack_from(data)
        end = _HEAD.size + 4 * num_planes * each
        if (
            each < 1
            or len(data) < end + _SUM.size
            or _SUM.unpack_from(data, end)[0] != xxhash.xxh3_64_intdigest(data[:end])
        ):
            raise FormatError("a KV probe that is not whole")
        numbers = np.frombuffer(data, "<f4", num_planes * each, _HEAD.size).reshape(num_planes, each)
        return cls(dtype.rstrip(b"\0").decode(errors="replace"), numbers)

    def distance(self, other: "KVProbe") -> float:
        """The relative distance of the KV, in the plane where it is largest; infinite if it cannot be compared."""
        if self.numbers.shape != other.numbers.shape or self.dtype != other.dtype:
            return float("inf")
        if not (self.is_finite and other.is_finite):
            return float("inf")
        ours, theirs = self.numbers.astype(np.float64), other.numbers.astype(np.float64)
        norms = np.maximum(np.maximum(ours[:, 0], theirs[:, 0]), np.finfo(np.float32).tiny)
        apart = np.abs(ours - theirs) / norms[:, None]
        sums = np.sqrt((apart[:, 1:] ** 2).mean(axis=1)) if apart.shape[1] > 1 else apart[:, 0]
        return float(np.maximum(sums, apart[:, 0]).max(initial=0.0))

    @property
    def tolerance(self) -> float:
        """The distance up to which rounding alone may be the cause."""
        return TOLERANCES.get(self.dtype, max(TOLERANCES.values()))


def _signs(length: int, column: int) -> NDArray[np.float64]:
    """1 or -1 for each element: the same ones everywhere, without a library's random numbers."""
    digest = hashlib.shake_256(f"kvtier-probe {column}".encode()).digest(-(-length // 8))
    bits: NDArray[np.float64] = np.unpackbits(np.frombuffer(digest, np.uint8), count=length).astype(np.float64)
    return 1.0 - 2.0 * bits
