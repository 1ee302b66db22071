"""L1 ↔ L2 copies of scattered blocks on a CPU, against the fastest plain copy of as many bytes in the same run.

HostCopyStream, from enqueue to event, against the better of one `np.take(out=)` (scattered blocks into one contiguous
run, an easier task) and a loop of `numpy.copyto` (block by block). A ratio is the median over interleaved rounds of the
limit's time by ours; GB = 1e9 bytes. Run it on an idle machine: a stream hands its work to a thread, which a crowded
scheduler delays. gpu_bandwidth.py measures a GPU's copies.
"""

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

import _report
import numpy as np
from _busy import busy_thread
from numpy.typing import NDArray

from kvtier.tiers.copies import BlockCopies, BlockPool, CopyStream, HostCopyStream, block_bytes_view
from kvtier.tiers.host import HostRegion
from kvtier.tiers.naming import KVShape

KIB: Final = 1024
POOL_BYTES: Final = 512 << 20  # of L1 and of L2: far more than the processor's caches
BATCH_BYTES: Final = 64 << 20  # some 10 ms: a look at an event is no part of the figure
BLOCK_SIZES: Final = [size * KIB for size in (64, 128, 256, 512, 1024, 2048, 4096, 8192)]
DIRECTIONS: Final = ("load", "store")
PATTERNS: Final = ("slots", "both")  # what is scattered: L2 slots alone, or L1 blocks as well
RATIO: Final = 0.9
RATIO_FROM: Final = 128 * KIB
BUSY_GBPS: Final = 0.8

Copy = Callable[[NDArray[np.int64], NDArray[np.int64]], None]


@dataclass
class Pools:
    """L1, L2 and the stream between them, for one block size."""

    block_bytes: int
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(7))

    def __post_init__(self) -> None:
        heads = self.block_bytes // (4 * 2 * 16 * 64 * 2)  # 4 layers, K and V, 16 tokens, head_dim 64, bfloat16
        shape = KVShape(num_layers=4, num_kv_heads=heads, head_dim=64, block_size=16, dtype="bfloat16")
        self.batch_bytes = BATCH_BYTES
        self.num_blocks = POOL_BYTES // self.block_bytes
        self.l1 = BlockPool(shape, self.num_blocks).tensor
        self.region = HostRegion.allocate(self.num_blocks, self.block_bytes)
        self.region.wait_prefaulted()
        self.stream = HostCopyStream(self.l1, self.region)

    def batch(self, pattern: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Random distinct L2 slots, and L1 blocks that are as random, or a run such as an idle pool hands out."""
        count = self.batch_bytes // self.block_bytes
        slots = self.rng.permutation(self.num_blocks)[:count]
        if pattern == "slots":
            return self.rng.integers(0, self.num_blocks - count + 1) + np.arange(count), slots
        return self.rng.permutation(self.num_blocks)[:count], slots

    def close(self) -> None:
        """Stop the stream and give the memory back."""
        self.stream.close(10)
        self.region.close()


def stream_copy(stream: CopyStream, direction: str) -> Copy:
    enqueue = stream.load if direction == "load" else stream.store

    def copy(blocks: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        event = enqueue(BlockCopies(blocks, slots))
        if not event.wait(60) or event.error:
            raise RuntimeError(event.error or "the copy hangs")

    return copy


def cpu_limits(pools: Pools, direction: str) -> dict[str, Copy]:
    """The plain numpy copies of the same blocks."""
    l1 = block_bytes_view(pools.l1).reshape(pools.num_blocks, -1)
    l2 = pools.region.array
    target, source = (l1, l2) if direction == "load" else (l2, l1)

    def take(blocks: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        start = int(pools.rng.integers(0, pools.num_blocks - len(blocks) + 1))
        index = slots if direction == "load" else blocks
        np.take(source, index, axis=0, out=target[start : start + len(index)], mode="clip")  # "raise" would buffer

    def copyto(blocks: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        into, out_of = (blocks, slots) if direction == "load" else (slots, blocks)
        for i, j in zip(into.tolist(), out_of.tolist(), strict=True):
            np.copyto(target[i], source[j])

    return {"np.take": take, "np.copyto": copyto}


def timings(pools: Pools, variants: dict[str, Copy], rounds: int, pattern: str) -> dict[str, NDArray[np.float64]]:
    """Seconds of each variant in each round, interleaved, each on its own batch; a round before them warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds + 1):
        for name, copy in variants.items():
            blocks, slots = pools.batch(pattern)
            started = time.perf_counter()
            copy(blocks, slots)
            seconds[name].append(time.perf_counter() - started)
    return {name: np.array(times[1:]) for name, times in seconds.items()}


def gbps(pools: Pools, seconds: NDArray[np.float64]) -> float:
    """The median rate."""
    moved = pools.batch_bytes // pools.block_bytes * pools.block_bytes
    return float(moved / np.median(seconds) / 1e9)


def measure(block_bytes: int, rounds: int) -> Iterator[dict[str, object]]:
    """One row per direction and pattern."""
    pools = Pools(block_bytes)
    try:
        for direction, pattern in itertools.product(DIRECTIONS, PATTERNS):
            limits = cpu_limits(pools, direction)
            copies = {"kvtier": stream_copy(pools.stream, direction), **limits}
            seconds = timings(pools, copies, rounds, pattern)
            best = min(limits, key=lambda name: float(np.median(seconds[name])))
            row: dict[str, object] = {"device": "cpu", "block_kib": block_bytes // KIB, "direction": direction}
            row["scattered"] = pattern
            row |= {f"{name}_gbps": round(gbps(pools, times), 2) for name, times in seconds.items()}
            row["ratio"] = round(float(np.median(seconds[best] / seconds["kvtier"])), 3)
            yield row
    finally:
        pools.close()


def measure_busy(rounds: int) -> float:
    """GB/s of 128 KiB loads beside a busy Python thread."""
    pools = Pools(128 * KIB)
    try:
        with busy_thread():
            copies = {"kvtier": stream_copy(pools.stream, "load")}
            return gbps(pools, timings(pools, copies, rounds, "both")["kvtier"])
    finally:
        pools.close()


def main() -> int:
    """Measure, print, and say whether the targets were met."""
    options = _report.parser(__doc__).parse_args()
    rounds = 5 if options.quick else 31
    sizes = [128 * KIB, 2048 * KIB] if options.quick else BLOCK_SIZES
    rows: list[dict[str, object]] = []
    for block_bytes in sizes:
        _report.progress(f"blocks of {block_bytes // KIB} KiB")
        rows += measure(block_bytes, rounds)
    targets = [
        _report.Target(
            f"{row['direction']} {row['block_kib']} KiB, scattered {row['scattered']}: of the best plain copy",
            RATIO,
            float(str(row["ratio"])),
            at_most=False,
        )
        for row in rows
        if int(str(row["block_kib"])) * KIB >= RATIO_FROM
    ]
    busy = round(measure_busy(rounds), 2)
    busy_row: dict[str, object] = {"device": "cpu", "block_kib": 128, "direction": "load"}
    rows.append(busy_row | {"scattered": "both, busy thread", "kvtier_gbps": busy})
    targets.append(_report.Target("GB/s beside a busy Python thread", BUSY_GBPS, busy, False))
    return _report.report("copy_bandwidth", rows, targets, options.json, options.save)


if __name__ == "__main__":
    sys.exit(main())
