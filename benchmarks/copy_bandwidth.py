"""L1 ↔ L2 copies of scattered blocks on a CPU, against the fastest plain copy of as many bytes in the same run.

HostCopyStream, from enqueue to event, against the better of one `np.take(out=)` (scattered blocks into one contiguous
run, an easier task) and a loop of `numpy.copyto` (block by block). Then with an ordinary tensor as L1, as other engines
have, against the loop alone; kvtier's own pool is on huge pages. Both ways are measured: with the extension module and
Python alone. A ratio is the median over interleaved rounds of the
limit's time by ours; `cpu` is CPU s/GB of all threads, and `cpu_ratio` that of the medians; GB = 1e9 bytes. Run it on
an idle machine: a stream hands its work to a thread, which a crowded scheduler delays. gpu_bandwidth.py measures a
GPU's copies.
"""

import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Final
from unittest.mock import patch

import _report
import numpy as np
import torch
from _busy import busy_thread
from numpy.typing import NDArray

from kvtier.tiers.copies import BlockCopies, BlockPool, CopyStream, HostCopyStream, block_bytes_view
from kvtier.tiers.host import HostRegion, memory
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

GIL_SIZES: Final = [size * KIB for size in (4, 16, 64, 256, 1024, 4096)]

WAYS: Final = {"compiled": "", "Python alone": "off"}  # → KVTIER_COMPILED

Copy = Callable[[NDArray[np.int64], NDArray[np.int64]], None]


@dataclass
class Pools:
    """L1, L2 and the stream between them, for one block size."""

    block_bytes: int
    is_ordinary: bool = False  # L1 is any tensor, not kvtier's own pool
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(7))

    def __post_init__(self) -> None:
        heads = self.block_bytes // (4 * 2 * 16 * 64 * 2)  # 4 layers, K and V, 16 tokens, head_dim 64, bfloat16
        shape = KVShape(num_layers=4, num_kv_heads=heads, head_dim=64, block_size=16, dtype="bfloat16")
        self.batch_bytes = BATCH_BYTES
        self.num_blocks = POOL_BYTES // self.block_bytes
        if self.is_ordinary:
            self.l1 = torch.ones((self.num_blocks, *shape.block_shape), dtype=torch.bfloat16)
        else:
            self.l1 = BlockPool(shape, self.num_blocks).tensor
        self.region = HostRegion.allocate(self.num_blocks, self.block_bytes)
        self.region.wait_prefaulted()
        self.streams = {}
        for way in ways():
            with patch.dict(os.environ, {"KVTIER_COMPILED": WAYS[way]}):
                self.streams[way] = HostCopyStream(self.l1, self.region)

    def batch(self, pattern: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Random distinct L2 slots, and L1 blocks that are as random, or a run such as an idle pool hands out."""
        count = self.batch_bytes // self.block_bytes
        slots = self.rng.permutation(self.num_blocks)[:count]
        if pattern == "slots":
            return self.rng.integers(0, self.num_blocks - count + 1) + np.arange(count), slots
        return self.rng.permutation(self.num_blocks)[:count], slots

    def close(self) -> None:
        """Stop the streams and give the memory back."""
        for stream in self.streams.values():
            stream.close(10)
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
    """Seconds and CPU seconds of each variant in each round, `[2, rounds]`, interleaved, each on its own batch.

    A round before them warms up.
    """
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    for _ in range(rounds + 1):
        for name, copy in variants.items():
            blocks, slots = pools.batch(pattern)
            started, busy = time.perf_counter(), time.process_time()
            copy(blocks, slots)
            seconds[name].append((time.perf_counter() - started, time.process_time() - busy))
    return {name: np.array(times[1:]).T for name, times in seconds.items()}


def gbps(pools: Pools, seconds: NDArray[np.float64]) -> float:
    """The median rate."""
    moved = pools.batch_bytes // pools.block_bytes * pools.block_bytes
    return float(moved / np.median(seconds[0]) / 1e9)


def cpu_per_gb(pools: Pools, seconds: NDArray[np.float64]) -> float:
    """The median CPU s/GB."""
    moved = pools.batch_bytes // pools.block_bytes * pools.block_bytes
    return float(np.median(seconds[1]) / moved * 1e9)


def measure(block_bytes: int, rounds: int, *, is_ordinary: bool = False) -> Iterator[dict[str, object]]:
    """One row per direction and pattern; with an ordinary tensor everything is scattered."""
    pools = Pools(block_bytes, is_ordinary)
    try:
        for direction, pattern in itertools.product(DIRECTIONS, PATTERNS[1:] if is_ordinary else PATTERNS):
            limits = cpu_limits(pools, direction)
            if is_ordinary:
                del limits["np.take"]  # its target is one run: no copy of scattered blocks
            copies = {way: stream_copy(stream, direction) for way, stream in pools.streams.items()}
            seconds = timings(pools, {**copies, **limits}, rounds, pattern)
            best = min(limits, key=lambda name: float(np.median(seconds[name][0])))
            for way in copies:
                shown = {"kvtier": seconds[way]} | {name: seconds[name] for name in limits}
                row: dict[str, object] = {"device": "cpu", "block_kib": block_bytes // KIB, "direction": direction}
                row |= {"scattered": pattern, "l1": "ordinary tensor" if is_ordinary else "kvtier's", "way": way}
                row |= {f"{name}_gbps": round(gbps(pools, times), 2) for name, times in shown.items()}
                row |= {f"{name}_cpu": round(cpu_per_gb(pools, times), 3) for name, times in shown.items()}
                row["ratio"] = round(float(np.median(seconds[best][0] / seconds[way][0])), 3)
                row["cpu_ratio"] = round(float(np.median(seconds[best][1]) / np.median(seconds[way][1])), 3)
                yield row
    finally:
        pools.close()


def ways() -> list[str]:
    """Those there are here."""
    return [way for way in WAYS if way != "compiled" or memory.is_compiled()]


def measure_busy(rounds: int, way: str) -> float:
    """GB/s of 128 KiB loads beside a busy Python thread."""
    pools = Pools(128 * KIB)
    try:
        with busy_thread():
            copies = {"kvtier": stream_copy(pools.streams[way], "load")}
            return gbps(pools, timings(pools, copies, rounds, "both")["kvtier"])
    finally:
        pools.close()


def measure_gil(rounds: int) -> Iterator[dict[str, object]]:
    """Wall time of one compiled copy of one to many blocks of 4 KiB, with the GIL kept and given up, µs.

    The median with no other thread, and the mean beside a busy one: some copies then wait for 5 ms.
    """
    copy_blocks, blocks = memory.compiled_blocks_copy(), np.ones((2, 4096, 4 * KIB), np.uint8)
    if copy_blocks is None:
        return
    for num_bytes in GIL_SIZES:
        places = np.arange(num_bytes // (4 * KIB), dtype=np.int64)[::-1].copy()
        row: dict[str, object] = {
            "device": "cpu",
            "block_kib": num_bytes // KIB,
            "direction": "load",
            "way": "compiled",
        }
        for beside in ("idle", "busy"):
            took: dict[str, list[float]] = {"kept": [], "given up": []}
            with busy_thread() if beside == "busy" else nullcontext():
                for _ in range(20 * rounds):
                    for gil, times in took.items():
                        begun = time.perf_counter()
                        kept = num_bytes if gil == "kept" else 0
                        copy_blocks(blocks[0], places, blocks[1], places, 0, 4 * KIB, True, gil_bytes=kept)
                        times.append(1e6 * (time.perf_counter() - begun))
            middle = np.median if beside == "idle" else np.mean
            row |= {f"{beside}, GIL {gil}, us": round(float(middle(times)), 1) for gil, times in took.items()}
        yield row


def target_of(row: dict[str, object]) -> str:
    """What its ratio is of."""
    what = f"{row['way']}: {row['direction']} {row['block_kib']} KiB"
    if row["l1"] == "ordinary tensor":
        return f"{what}, L1 an ordinary tensor: of np.copyto, block by block"
    return f"{what}, scattered {row['scattered']}: of the best plain copy"


def main() -> int:
    """Measure, print, and say whether the targets were met."""
    options = _report.parser(__doc__).parse_args()
    rounds = 5 if options.quick else 31
    sizes = [128 * KIB, 2048 * KIB] if options.quick else BLOCK_SIZES
    rows: list[dict[str, object]] = []
    for block_bytes in sizes:
        _report.progress(f"blocks of {block_bytes // KIB} KiB")
        rows += measure(block_bytes, rounds)
        rows += measure(block_bytes, rounds, is_ordinary=True)
    targets = [
        _report.Target(target_of(row), RATIO, float(str(row["ratio"])), at_most=False)
        for row in rows
        if int(str(row["block_kib"])) * KIB >= RATIO_FROM
    ]
    for way in ways():
        busy = round(measure_busy(rounds, way), 2)
        busy_row: dict[str, object] = {"device": "cpu", "block_kib": 128, "direction": "load"}
        rows.append(busy_row | {"scattered": "both, busy thread", "way": way, "kvtier_gbps": busy})
        targets.append(_report.Target(f"{way}: GB/s beside a busy Python thread", BUSY_GBPS, busy, False))
    rows += measure_gil(rounds)
    return _report.report("copy_bandwidth", rows, targets, options.json, options.save)


if __name__ == "__main__":
    sys.exit(main())
