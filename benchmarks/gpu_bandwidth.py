"""Copies between a GPU's KV blocks and pinned memory, against one big copy of as many bytes in the same run.

Pieces of 4 KiB to 8 MiB, scattered on both sides, one way and both ways at once. "own": a block is one piece, as in
kvtier's own L1; "layers": a block is a piece of each of 32 tensors, as in vLLM. A timing is four batches, enqueued back
to back, until the last has ended; a ratio is the median over interleaved rounds. Then: the CPU time in which a worker
enqueues a step's stores, and the longest step of a GPU's loop while a large L2 is used for the first time. GB = 1e9
bytes. `--dry` runs the same code on this CPU.
"""

import gc
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Final

import _gpu
import numpy as np
import torch
from _gpu import KIB, MIB, Geometry8B, mid
from _report import Given, Result, Row, Target, program, progress, took

from kvtier.connector import CopyOp, StepPlan, WorkerSide
from kvtier.tiers.copies import BlockCopies, CopyEvent, CopyStream
from kvtier.tiers.host import HostRegion

PIECES_KIB: Final = (4, 8, 16, 24, 64, 128, 256, 512, 2048, 8192)
QUICK_KIB: Final = (4, 24, 512, 2048)
LAYERED_TO_KIB: Final = 256  # vLLM's pieces of a layer are hardly larger
DIRECTIONS: Final = (("load",), ("store",), ("load", "store"))
DEPTH: Final = 4  # batches enqueued back to back
MAX_PIECES: Final = 16384  # of a batch: more only cost time to list
LARGE_KIB, SMALL_KIB = 512, 24  # the goals' borders


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is moved: a GPU's, or (`--dry`) as little as shows that the code runs."""

    device: torch.device
    pieces_kib: Sequence[int]
    pool_bytes: int
    batch_bytes: int
    rounds: int
    num_layers: int
    first_use_bytes: int
    geometry: Geometry8B

    @classmethod
    def of(cls, device: torch.device, quick: bool) -> "Scale":
        if device.type == "cpu":
            return cls(device, QUICK_KIB, 8 * MIB, MIB, 1, 4, 16 * MIB, _gpu.SMALL)
        half_of_memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
        pieces, rounds, gib = (QUICK_KIB, 3, 4) if quick else (PIECES_KIB, 5, 64)
        return cls(device, pieces, 4 << 30, 512 * MIB, rounds, 32, min(gib << 30, half_of_memory), Geometry8B())


class PiecePools:
    """L1, pinned L2 and the limit for pieces of one size."""

    def __init__(self, scale: Scale, layout: str, piece_bytes: int) -> None:
        per_block = 1 if layout == "own" else scale.num_layers
        block_bytes = piece_bytes * per_block
        num_blocks = max(4, scale.pool_bytes // block_bytes)
        self.count = max(1, min(scale.batch_bytes // block_bytes, MAX_PIECES // per_block, num_blocks // 2))
        self.half, self.batch_bytes = num_blocks // 2, self.count * block_bytes
        self.rng = np.random.default_rng(7)
        self.l1 = _gpu.piece_tensor(layout, num_blocks, piece_bytes, scale.num_layers, scale.device)
        self.region = _gpu.pinned_region(num_blocks, block_bytes, scale.device)
        self.limit = _gpu.BigCopies(self.batch_bytes, scale.device)
        self.close = self.region.close

    def batch(self, direction: str) -> BlockCopies:
        """Distinct blocks and slots, scattered: loads have the lower halves, stores the upper ones."""
        start = 0 if direction == "load" else self.half
        blocks, slots = (start + self.rng.permutation(self.half)[: self.count] for _ in range(2))
        return BlockCopies(blocks.astype(np.int64), slots.astype(np.int64))

    def ours(self, stream: CopyStream, directions: Sequence[str]) -> Callable[[], Callable[[], None]]:
        """DEPTH batches in each direction, by the stream."""

        def prepared() -> Callable[[], None]:
            batches = [(way, self.batch(way)) for _ in range(DEPTH) for way in directions]
            return lambda: _gpu.ended([_gpu.enqueue(stream, way, copies) for way, copies in batches])

        return prepared

    def gbps(self, directions: Sequence[str], seconds: Iterable[float]) -> float:
        return round(DEPTH * len(directions) * self.batch_bytes / float(np.median(list(seconds))) / 1e9, 2)


def measure_pieces(scale: Scale, layout: str, kib: int) -> Iterator[Row]:
    with (
        closing(PiecePools(scale, layout, kib * KIB)) as pools,
        _gpu.copying(pools.l1, pools.region, scale.device) as stream,
    ):
        for directions in DIRECTIONS:
            variants = {
                "ours": pools.ours(stream, directions),
                "one copy": lambda directions=directions: lambda: pools.limit.copy(directions, DEPTH),
            }
            seconds = _gpu.interleaved(variants, scale.rounds)
            row: Row = {"pieces": layout, "KiB": kib, "way": "chosen", "direction": " + ".join(directions)}
            row |= {"GB/s": pools.gbps(directions, seconds["ours"])}
            row |= {"one copy GB/s": pools.gbps(directions, seconds["one copy"])}
            yield row | {"of one copy": mid(seconds["one copy"] / seconds["ours"])}


def measure_steps(scale: Scale) -> Iterator[Row]:
    """What a worker's thread spends on a step's stores, for each place where engines keep blocks."""
    num_blocks = 128
    for layout in _gpu.LAYOUTS:
        l1 = _gpu.engine_tensor(layout, num_blocks, scale.geometry, scale.device)
        region = _gpu.pinned_region(num_blocks, scale.geometry.block_bytes, scale.device)
        with _gpu.copying(l1, region, scale.device) as stream:
            worker = WorkerSide(stream, scale.geometry.num_layers, scale.geometry.layer_bytes, _gpu.DEADLINE)
            for num_stores in (1, 16, 64):
                cpu = stores(worker, num_stores, 4 + 4 * scale.rounds)
                yield {"layout": layout, "stores of a step": num_stores, "CPU ms": mid(cpu)}
        region.close()


def stores(worker: WorkerSide, num_stores: int, num_steps: int) -> list[float]:
    """Milliseconds of this thread's CPU to enqueue a step's stores."""
    cpu = []
    for step in range(num_steps):
        ops = [CopyOp(step * num_stores + i, f"r{i}", (i,), (i,), (0,)) for i in range(num_stores)]
        plan = StepPlan(0, 0, (), tuple(ops))  # so many requests fill a block
        cpu.append(took(lambda plan=plan: worker.start_store(plan), time.thread_time) * 1e3)
        worker.wait(_gpu.DEADLINE)
        if len(worker.poll().finished) != num_stores:
            raise SystemExit("a step's stores failed, or have not ended")
    return cpu[4:]  # without those that warm up


class StepLoop:
    """Steps of a little compute, as an engine makes them, and a store in each once there is a stream for it."""

    def __init__(self, scale: Scale, num_slots: int) -> None:
        self.device = scale.device
        self.l1 = _gpu.engine_tensor("own", 64, scale.geometry, scale.device)
        self.stream: CopyStream | None = None
        self.events: list[CopyEvent] = []
        self._matrix = torch.randn((2048, 2048) if scale.device.type == "cuda" else (64, 64), device=scale.device)
        self._num_slots = num_slots
        self._rng = np.random.default_rng(3)

    def run(self, enough: Callable[[int], bool]) -> list[float]:
        steps: list[float] = []
        while not enough(len(steps)):
            started = time.perf_counter()
            for _ in range(8):
                self._matrix @ self._matrix
            if self.stream is not None and (not self.events or self.events[-1].done()):
                slots = self._rng.integers(0, self._num_slots, 1)
                self.events.append(self.stream.store(BlockCopies(np.array([len(self.events) % 64]), slots)))
            _gpu.synchronize(self.device)
            steps.append((time.perf_counter() - started) * 1e3)
        return steps


def first_use(scale: Scale) -> Iterator[Row]:
    """Steps before L2 is there, while it is pre-faulted and pinned, and behind that."""
    block_bytes = scale.geometry.block_bytes
    num_slots = scale.first_use_bytes // block_bytes
    loop = StepLoop(scale, num_slots)
    if scale.device.type == "cuda":
        gc.collect()
        gc.freeze()  # as engines do: a pass over all that was imported takes 100 ms, and would look like a long step
    loop.run(lambda n: n >= 20)  # warms up
    phases = {"before": loop.run(lambda n: n >= 200)}
    began = time.perf_counter()
    region = HostRegion.allocate(num_slots, block_bytes)
    if scale.device.type == "cuda":
        region.pin(scale.device.index)
    is_there = region.wait_prefaulted if region.pinning is None else region.pinning.wait
    with _gpu.copying(loop.l1, region, scale.device) as loop.stream:
        phases["first use"] = loop.run(lambda n: n >= 20 and is_there(0))
        seconds = time.perf_counter() - began
        phases["behind it"] = loop.run(lambda n: n >= 200)
        _gpu.ended(loop.events)
    error = None if region.pinning is None else region.pinning.error
    region.close()
    if error is not None:
        raise SystemExit(f"L2 could not be pinned: {error}; raise `ulimit -l`")
    for phase, ms in phases.items():
        row: Row = {"L2 MiB": scale.first_use_bytes // MIB, "phase": phase, "steps": len(ms)}
        row |= {"p50 ms": mid(ms), "p99 ms": mid(ms, quantile=0.99), "longest ms": round(max(ms), 3)}
        yield row | ({"seconds": round(seconds, 2)} if phase == "first use" else {})


def goals(rows: Sequence[Row]) -> list[Target]:
    """The worst value of each goal."""
    chosen = [row for row in rows if "way" in row]
    large = [row for row in chosen if row["KiB"] >= LARGE_KIB]
    one_way, both = ([row for row in large if ("+" in row["direction"]) == both] for both in (False, True))
    small = [row for row in chosen if row["KiB"] <= SMALL_KIB and "+" not in row["direction"]]
    step = max(row["CPU ms"] for row in rows if row.get("stores of a step") == 64)
    [first] = [row for row in rows if row.get("phase") == "first use"]
    gib = first["L2 MiB"] / 1024
    least: list[tuple[str, float, list[Row], str]] = [
        ("one way, 512 KiB and more: of one big copy", 0.95, one_way, "of one copy"),
        ("one way, 512 KiB and more: GB/s", 50, one_way, "GB/s"),
        ("both ways, 512 KiB and more: of big copies both ways", 0.85, both, "of one copy"),
        ("both ways, 512 KiB and more: GB/s", 80, both, "GB/s"),
        ("pieces of 4 to 24 KiB: GB/s", 40, small, "GB/s"),
    ]
    return [
        *(Target(name, goal, min(row[column] for row in of), at_most=False) for name, goal, of, column in least),
        Target("a step of 64 stores: CPU ms to enqueue", 1, step),
        Target(f"first use of {gib:.3g} GiB of L2: longest step beside it, ms", 50, first["longest ms"]),
    ]


@program(_gpu.DRY)
def main(options: Given) -> Result:
    scale = Scale.of(_gpu.device(options), options.quick)
    rows: list[Row] = []
    for layout, kib in itertools.product(("own", "layers"), scale.pieces_kib):
        if layout == "own" or kib <= LAYERED_TO_KIB:
            progress(f"{scale.device}: {layout}, pieces of {kib} KiB")
            rows += _gpu.told(measure_pieces(scale, layout, kib))
    progress("stores of a step; first use of L2")
    rows += _gpu.told(measure_steps(scale))
    rows += _gpu.told(first_use(scale))
    return rows, goals(rows), _gpu.setup_of(options)
