"""Lossless compression of blocks for slow or dear storage: bytes split by their place in a number, then zstd.

A number's first bytes (sign, exponent) are alike from number to number, its last ones are noise. Side by side they
compress badly; each plane of them by itself does what it can. This is the byte shuffle of HDF5 and Blosc, with a frame
of zstd for each plane, so that each has codes of its own. Which width the numbers have is tried out, and every block
says how it was written. What does not shrink is stored as it is. The library `zstandard` is the extra `compression`; it
lets go of the GIL while it works.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvtier.tiers.errors import ConfigError
from kvtier.tiers.extras import install_command
from kvtier.tiers.finding import Finding, ok

AS_IS: Final = 0  # the split of a block that was stored as it is
_WIDTHS: Final = (1, 2, 4)  # bytes of a number that are tried: 1 is no split
_LEVEL: Final = 1  # zstd's fastest that still codes noise tightly (benchmarks/compression.py)
_LEAST: Final = 1 / 16  # of a block, or of a plane, that compression has to save
_BETTER: Final = 0.98  # times the bytes of a narrower split: a wider one has to save so much more
_LENGTH_BYTES: Final = 4  # u32 before a block's planes, for each: how long it is
_SAMPLE: Final = 64 << 10  # bytes of a block that a choice is made by …
_AGAIN: Final = 256  # … and for how many blocks it holds


class BlockCodec:
    """Compresses payloads of `num_bytes` each. Thread-safe.

    Which split is best, or that none saves enough, is tried on a sample of the first block, and again from time to
    time. Until then blocks are written that way: KV that does not shrink costs next to nothing.
    """

    def __init__(self, num_bytes: int) -> None:
        """Needs the package: see `require_compression`."""
        self.num_bytes = num_bytes
        self._widths = [width for width in _WIDTHS if num_bytes % width == 0]
        self._own = _Contexts()
        self._lock = threading.Lock()  # guards the two that follow
        self._split, self._left = AS_IS, 0

    def shrink(self, payload: memoryview) -> tuple[int, memoryview]:
        """How the payload was split, and what to store: shorter memory of its own, or, AS_IS, the payload itself."""
        split = self._chosen(payload)
        if split != AS_IS:
            stored = self._packed(_bytes_of(payload), split)
            if len(stored) <= self.num_bytes * (1 - _LEAST):
                return split, memoryview(stored)
        return AS_IS, payload

    def restore(self, split: int, stored: memoryview, into: memoryview) -> bool:
        """Write the payload into `into`, which may begin with `stored`; False if it is no such block's.

        No more than `num_bytes` is ever made of it. What comes out may still be wrong: compare its checksum.
        """
        if split == AS_IS:
            if stored.nbytes != self.num_bytes:
                return False
            _bytes_of(into)[:] = _bytes_of(stored)
            return True
        if split not in self._widths or stored.nbytes >= self.num_bytes or stored.nbytes < split * _LENGTH_BYTES:
            return False
        lengths = np.frombuffer(stored[: split * _LENGTH_BYTES], "<u4").tolist()
        if sum(lengths) != stored.nbytes - split * _LENGTH_BYTES:
            return False
        planes, at = [], split * _LENGTH_BYTES
        for length in lengths:
            plane = self._plane(stored[at : at + length], self.num_bytes // split)
            if plane is None:
                return False
            planes.append(plane)
            at += length
        whole = _bytes_of(into).reshape(-1, split)
        for place, plane in enumerate(planes):
            whole[:, place] = np.frombuffer(plane, np.uint8)
        return True

    def _packed(self, payload: NDArray[np.uint8], split: int) -> bytes:
        """The lengths of all planes, and each plane as a frame, or as it is."""
        parts, lengths = list[bytes | memoryview](), list[int]()
        for place in range(split):
            plane = memoryview(np.ascontiguousarray(payload[place::split]))
            frame = self._own.compressor.compress(plane)
            parts.append(frame if len(frame) <= plane.nbytes * (1 - _LEAST) else plane)
            lengths.append(len(parts[-1]))
        return b"".join([np.array(lengths, "<u4").tobytes(), *parts])

    def _plane(self, stored: memoryview, num_bytes: int) -> bytes | None:
        """A plane of `num_bytes`; None if it is none. Always memory of its own: where it came may be written over."""
        import zstandard

        if stored.nbytes == num_bytes:
            return bytes(stored)
        try:
            if zstandard.get_frame_parameters(stored).content_size != num_bytes:
                return None
            plane = self._own.decompressor.decompress(stored, allow_extra_data=False)
        except zstandard.ZstdError:
            return None
        return plane if len(plane) == num_bytes else None

    def _chosen(self, payload: memoryview) -> int:
        """The split for this block: as chosen before, or tried on it."""
        with self._lock:
            if self._left:
                self._left -= 1
                return self._split
        whole, most = _bytes_of(payload), max(_WIDTHS)
        piece = min(self.num_bytes, _SAMPLE // 4) // most * most
        starts = [self.num_bytes * i // 4 // most * most for i in range(4)]
        sample = np.concatenate([whole[start : start + piece] for start in starts])
        sample = sample[: len(sample) // most * most]
        best, least = AS_IS, len(sample) * (1 - _LEAST)
        for width in self._widths:
            if (size := len(self._packed(sample, width))) <= least:
                best, least = width, size * _BETTER
        with self._lock:
            self._split, self._left = best, _AGAIN
        return best


def require_compression(field: str) -> None:
    """ConfigError, which names `field` (as "[redis] compression"), if the package that compresses is not installed."""
    try:
        import zstandard  # noqa: F401
    except ImportError:
        raise ConfigError(
            f'{field} "zstd": needs zstandard; {install_command("compression")}, or leave {field} out'
        ) from None


class _Contexts(threading.local):
    """A compressor and a decompressor for each thread: neither may be used by two at once."""

    def __init__(self) -> None:
        import zstandard

        self.compressor = zstandard.ZstdCompressor(level=_LEVEL, write_content_size=True, write_checksum=False)
        self.decompressor = zstandard.ZstdDecompressor()


def _bytes_of(memory: memoryview) -> NDArray[np.uint8]:
    return np.frombuffer(memory, np.uint8)


# --- whether it would pay: what this CPU shrinks and restores a second, beside what a store moves ---------------------

SAMPLE_BYTES: Final = 2 << 20
_ROUNDS: Final = 3  # the best counts


@dataclass(frozen=True, slots=True)
class CodecRates:
    """Of one core, in bytes of payload a second of CPU time."""

    ratio: float  # bytes of a payload over what is stored
    shrink: float
    restore: float

    def reads_pay_below(self) -> float:
        """Bytes a second of a store, below which a block comes sooner if it is compressed.

        A block takes 1/rate without. With it it takes 1/(ratio × rate) and 1/restore, one after the other.
        """
        return self.restore * (1 - 1 / self.ratio)

    def writes_pay_below(self) -> float:
        """The same of writes."""
        return self.shrink * (1 - 1 / self.ratio)


def rates_of(payload: bytes) -> CodecRates:
    """Measured on this payload, on this thread: some hundredths of a second for 2 MiB."""
    codec = BlockCodec(len(payload))
    view, into = memoryview(payload), memoryview(bytearray(len(payload)))
    split, stored = codec.shrink(view)  # chooses the split
    shrinking = _best(lambda: codec.shrink(view))
    restoring = _best(lambda: codec.restore(split, stored, into))
    return CodecRates(len(payload) / stored.nbytes, len(payload) / shrinking, len(payload) / restoring)


def made_up_kv(num_bytes: int = SAMPLE_BYTES) -> bytes:
    """Numbers in bf16 around zero, as KV is for a codec: no model is needed."""
    numbers = np.random.default_rng(0).standard_normal(num_bytes // 2, np.float32)
    return (numbers.view(np.uint32) >> 16).astype("<u2").tobytes()


def compression_finding(tier: str, compression: str, rate: float) -> Finding:
    """What the doctor says of a tier whose store brings `rate` bytes a second; `compression` is its setting."""
    found = f"{verdict(rate, rates_of(made_up_kv()))}; [{tier}] compression is {compression}"
    return ok(f"{tier} compression", found)


def verdict(rate: float, rates: CodecRates) -> str:
    """What is to be said of a store that brings `rate` bytes a second."""
    limit = rates.reads_pay_below()
    pays = "would pay" if rate < limit else "would not pay"
    return (
        f"compression {pays}: it reads {rate / 1e9:.2f} GB/s, the limit is {limit / 1e9:.2f} GB/s (bf16 shrinks "
        f"{rates.ratio:.2f} times, one core restores {rates.restore / 1e9:.2f} GB/s); blocks take less room either way"
    )


def _best(work: Callable[[], object]) -> float:
    """CPU seconds of the fastest round."""
    seconds = []
    for _ in range(_ROUNDS):
        began = time.thread_time()
        work()
        seconds.append(time.thread_time() - began)
    return max(min(seconds), 1e-9)
