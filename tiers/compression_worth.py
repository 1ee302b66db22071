"""Whether compression would pay: what this CPU shrinks and restores a second, beside what a store moves."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvtier.tiers.compression import BlockCodec
from kvtier.tiers.finding import Finding, ok

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
