"""L1 ↔ L2 copies of scattered blocks on a CPU, against the fastest plain copy of as many bytes in the same run.

HostCopyStream, from enqueue to event, against the better of one `np.take(out=)` (scattered blocks into one contiguous
run, an easier task) and a loop of `numpy.copyto` (block by block). Then with an ordinary tensor as L1, as other engines
have, against the loop alone; kvtier's own pool is on huge pages. Both ways are measured: with the extension module and
Python alone. A ratio is the median over interleaved rounds of the limit's time by ours; `cpu` is CPU s/GB of all
threads, and `cpu_ratio` that of the medians; GB = 1e9 bytes. Run it on an idle machine: a stream hands its work to a
thread, which a crowded scheduler delays. gpu_bandwidth.py measures a GPU's copies.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from _report import PYTHON, Given, Result, Row, form, in_turns, program, progress, took
from _rig import busy_thread
from numpy.typing import NDArray

from kvtier.tiers.copies import BlockCopies, BlockPool, CopyStream, HostCopyStream, block_bytes_view
from kvtier.tiers.host import HostRegion, memory
from kvtier.tiers.naming import KVShape

KIB: Final = 1024
POOL_BYTES: Final = 512 << 20  # of L1 and of L2: far more than the processor's caches
BATCH_BYTES: Final = 64 << 20  # some 10 ms: a look at an event is no part of the figure
BLOCK_SIZES: Final = [size * KIB for size in (64, 128, 256, 512, 1024, 2048, 4096, 8192)]
PATTERNS: Final = ("slots", "both")  # what is scattered: L2 slots alone, or L1 blocks as well
WAYS: Final = ("compiled", PYTHON) if memory.compiled("copy_blocks") else (PYTHON,)

Indices = NDArray[np.int64]
Copy = Callable[[Indices, Indices], None]
Times = dict[str, NDArray[np.float64]]
"""Seconds and CPU seconds of each way in each round, `[2, rounds]`."""


class Pools:
    """L1, L2 and the streams between them, for one block size."""

    def __init__(self, block_bytes: int, *, is_ordinary: bool = False) -> None:
        heads = block_bytes // (4 * 2 * 16 * 64 * 2)  # 4 layers, K and V, 16 tokens, head_dim 64, bfloat16
        shape = KVShape(num_layers=4, num_kv_heads=heads, head_dim=64, block_size=16, dtype="bfloat16")
        self.num_blocks = POOL_BYTES // block_bytes
        self.per_batch = BATCH_BYTES // block_bytes
        self.gb_per_batch = self.per_batch * block_bytes / 1e9
        if is_ordinary:  # L1 is any tensor, not kvtier's own pool
            self.l1 = torch.ones((self.num_blocks, *shape.block_shape), dtype=torch.bfloat16)
        else:
            self.l1 = BlockPool(shape, self.num_blocks).tensor
        self.region = HostRegion.allocate(self.num_blocks, block_bytes)
        self.region.wait_prefaulted()
        self.rng = np.random.default_rng(7)
        self.streams: dict[str, CopyStream] = {}
        for way in WAYS:
            with form(way):
                self.streams[way] = HostCopyStream(self.l1, self.region)

    def close(self) -> None:
        for stream in self.streams.values():
            stream.close(10)
        self.region.close()

    def batch(self, pattern: str) -> tuple[Indices, Indices]:
        """Random distinct L2 slots, and L1 blocks that are as random, or a run such as an idle pool hands out."""
        slots = self.rng.permutation(self.num_blocks)[: self.per_batch]
        if pattern == "slots":
            return self.start() + np.arange(self.per_batch), slots
        return self.rng.permutation(self.num_blocks)[: self.per_batch], slots

    def start(self) -> int:
        """Of a run."""
        return int(self.rng.integers(0, self.num_blocks - self.per_batch + 1))

    def limits(self, direction: str) -> dict[str, Copy]:
        """The plain numpy copies of the same blocks."""
        l1, l2 = block_bytes_view(self.l1).reshape(self.num_blocks, -1), self.region.array
        target, source = (l1, l2) if direction == "load" else (l2, l1)

        def take(blocks: Indices, slots: Indices) -> None:
            start, index = self.start(), slots if direction == "load" else blocks
            np.take(source, index, axis=0, out=target[start : start + len(index)], mode="clip")  # "raise" would buffer

        def copyto(blocks: Indices, slots: Indices) -> None:
            into, out_of = (blocks, slots) if direction == "load" else (slots, blocks)
            for i, j in zip(into.tolist(), out_of.tolist(), strict=True):
                np.copyto(target[i], source[j])

        return {"np.take": take, "np.copyto": copyto}

    def times(self, copies: Mapping[str, Copy], rounds: int, pattern: str) -> Times:
        """By turns, each with a batch of its own."""

        def turn(copy: Copy) -> tuple[float, float]:
            blocks, slots = self.batch(pattern)
            busy = time.process_time()
            return took(lambda: copy(blocks, slots)), time.process_time() - busy

        turns = {name: partial(turn, copy) for name, copy in copies.items()}
        return {name: np.array(times).T for name, times in in_turns(turns, rounds, warm_up=1).items()}

    def gbps(self, times: NDArray[np.float64]) -> float:
        return round(self.gb_per_batch / mid(times[0]), 2)


def mid(values: Any) -> float:
    return float(np.median(values))


def stream_copy(stream: CopyStream, direction: str, blocks: Indices, slots: Indices) -> None:
    event = (stream.load if direction == "load" else stream.store)(BlockCopies(blocks, slots))
    if not event.wait(60) or event.error:
        raise RuntimeError(event.error or "the copy hangs")


def measure(block_bytes: int, rounds: int, *, is_ordinary: bool = False) -> Iterator[Row]:
    """One row per direction and pattern; with an ordinary tensor everything is scattered."""
    with closing(Pools(block_bytes, is_ordinary=is_ordinary)) as these:
        for direction, pattern in itertools.product(("load", "store"), PATTERNS[1:] if is_ordinary else PATTERNS):
            limits = these.limits(direction)
            if is_ordinary:
                del limits["np.take"]  # its target is one run: no copy of scattered blocks
            ours: dict[str, Copy] = {way: partial(stream_copy, each, direction) for way, each in these.streams.items()}
            times = these.times({**ours, **limits}, rounds, pattern)
            best = min(limits, key=lambda name: mid(times[name][0]))
            for way in ours:
                shown = {"kvtier": times[way]} | {name: times[name] for name in limits}
                row: Row = {"device": "cpu", "block_kib": block_bytes // KIB, "direction": direction}
                row |= {"scattered": pattern, "l1": "ordinary tensor" if is_ordinary else "kvtier's", "way": way}
                row |= {f"{name}_gbps": these.gbps(each) for name, each in shown.items()}
                row |= {f"{name}_cpu": round(mid(each[1]) / these.gb_per_batch, 3) for name, each in shown.items()}
                row["ratio"] = round(mid(times[best][0] / times[way][0]), 3)
                yield row | {"cpu_ratio": round(mid(times[best][1]) / mid(times[way][1]), 3)}


def measure_busy(rounds: int) -> Iterator[Row]:
    """128 KiB loads beside a busy Python thread."""
    for way in WAYS:
        with closing(Pools(128 * KIB)) as these, busy_thread():
            gbps = these.gbps(these.times({way: partial(stream_copy, these.streams[way], "load")}, rounds, "both")[way])
        row: Row = {"device": "cpu", "block_kib": 128, "direction": "load", "scattered": "both, busy thread"}
        yield row | {"way": way, "kvtier_gbps": gbps}


@program()
def main(given: Given) -> Result:
    rounds, sizes = (5, [128 * KIB, 2048 * KIB]) if given.quick else (31, BLOCK_SIZES)
    rows: list[Row] = []
    for block_bytes, is_ordinary in itertools.product(sizes, (False, True)):
        progress(f"blocks of {block_bytes // KIB} KiB")
        rows += measure(block_bytes, rounds, is_ordinary=is_ordinary)
    rows += measure_busy(rounds)
    return rows
