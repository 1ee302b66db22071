"""What copies beside it cost a GPU that decodes: each step alone, beside stores, beside loads, and beside both.

A step is the matrix products of a Llama-8B for 64 requests and one read of their KV, as a CUDA graph where that can be
captured; its end is waited for, as by an engine that reads its tokens. In every step a worker stores four blocks, as
many as 64 requests fill; beside loads a load of 64 blocks is always on its way. All this for each place where engines
keep blocks. Rounds are interleaved; the slowdown is the median over rounds of a round's median step by that of the same
round alone. `--dry` runs the same code on this CPU.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import _gpu
import numpy as np
import torch
from _gpu import Geometry8B, mid
from _report import Given, Result, Row, Target, program, progress

from kvtier.connector import CopyOp, StepPlan, WorkerSide

BESIDE: Final = ("alone", "stores", "loads", "stores and loads")
SLOWDOWN: Final = 1.02
NUM_STORED: Final = 4  # blocks a step
WARM_UP: Final = 3

Plans = list[tuple[StepPlan | None, StepPlan | None]]
"""Of each step: loads and stores."""


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """How much is decoded beside how much: on a GPU, or on this CPU."""

    device: torch.device
    geometry: Geometry8B
    hidden: int
    intermediate: int
    num_requests: int
    kv_elements: int
    num_blocks: int
    num_loaded: int  # blocks of a load
    rounds: int
    steps: int

    @classmethod
    def of(cls, device: torch.device, quick: bool) -> "DecodeLoad":
        if device.type == "cpu":
            return cls(device, _gpu.SMALL, 64, 128, 4, 1 << 16, 32, 8, 2, 4)
        return cls(device, Geometry8B(), 4096, 14336, 64, 4 << 30, 1024, 64, *((3, 20) if quick else (5, 30)))


class DecodeStep:
    """One step's compute on random weights: `run` enqueues it, `is_graph` says whether it is one launch."""

    def __init__(self, load: DecodeLoad) -> None:
        self.device = load.device
        hidden, both = load.hidden, 2 * load.intermediate
        shapes = [(hidden, hidden * 3 // 2), (hidden, hidden), (hidden, both), (load.intermediate, hidden)]
        self._weights = [[self._random(shape) for shape in shapes] for _ in range(load.geometry.num_layers)]
        self._input = self._random((load.num_requests, hidden))
        self._kv = torch.zeros((load.kv_elements // 1024, 1024), dtype=torch.bfloat16, device=load.device)
        self.run: Callable[[], object] = self._compute
        self.is_graph = False
        if load.device.type == "cuda":
            self._capture()

    def _random(self, shape: tuple[int, int]) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=self.device) * 0.01

    def _compute(self) -> torch.Tensor:
        hidden = self._input
        for qkv, out, up, down in self._weights:
            hidden = (hidden @ qkv)[:, : out.shape[0]] @ out
            gate, value = (hidden @ up).chunk(2, dim=1)
            hidden = (torch.nn.functional.silu(gate) * value) @ down
        return hidden.sum() + self._kv.sum()

    def _capture(self) -> None:
        """As engines do; without a graph a step is launched kernel by kernel."""
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                self._compute()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._compute()
        except RuntimeError as error:
            progress(f"no CUDA graph, steps are launched kernel by kernel: {error}")
            torch.cuda.synchronize()
            return
        self.run, self.is_graph = graph.replay, True


@dataclass
class Beside:
    """A worker's copies beside the steps: stores have the lower half of blocks and slots, loads the upper one."""

    worker: WorkerSide
    load: DecodeLoad
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(5))
    num_ops: int = 0
    num_blocks: int = 0
    loads_under_way: int = 0
    _to_load: StepPlan | None = None

    def plans(self, kind: str, count: int) -> Plans:
        """So many steps', made before they are timed: planning is the scheduler's."""
        plans: Plans = []
        for _ in range(count):
            loads = StepPlan(0, 0, (self._op(self.load.num_loaded, upper=True),)) if "loads" in kind else None
            stored = tuple(self._op(1, upper=False) for _ in range(NUM_STORED if "stores" in kind else 0))
            plans.append((loads, StepPlan(0, 0, (), stored) if stored else None))
        return plans

    def before(self, loads: StepPlan | None) -> None:
        """What a worker is told at a step's begin: as vLLM's, it only notes where a load may start."""
        self._to_load = None if self.loads_under_way else loads
        if self._to_load is not None:
            self.loads_under_way = 1
            self.worker.begin(self._to_load, early=True)

    def behind(self, stores: StepPlan | None) -> None:
        """What it is told once the step's compute is issued: the calls for copies cost the device no time then."""
        for plan, start in ((self._to_load, self.worker.start_load), (stores, self.worker.start_store)):
            if plan is not None:
                start(plan)
                self.num_blocks += sum(len(op.device_blocks) for op in (*plan.loads, *plan.stores))

    def collect(self) -> None:
        report = self.worker.poll()
        if report.failed:
            raise SystemExit(f"{len(report.failed)} copies beside the steps failed")
        self.loads_under_way -= sum(op % 2 for op in report.finished)

    def settle(self) -> None:
        deadline = time.monotonic() + _gpu.DEADLINE
        while not self.worker.idle and time.monotonic() < deadline:
            self.worker.wait(1)
            self.collect()

    def _op(self, count: int, *, upper: bool) -> CopyOp:
        """Ops of loads have odd numbers."""
        half = self.load.num_blocks // 2
        self.num_ops += 1
        blocks, slots = (self.rng.permutation(half)[:count] + upper * half for _ in range(2))
        return CopyOp(2 * self.num_ops + upper, "r", tuple(blocks.tolist()), tuple(slots.tolist()), (0,) * count)


def steps(decode: DecodeStep, beside: Beside, plans: Plans) -> list[float]:
    """Milliseconds of each step."""
    wall = []
    for loads, stores in plans:
        started = time.perf_counter()
        beside.before(loads)
        decode.run()
        beside.behind(stores)
        _gpu.synchronize(decode.device)
        beside.collect()
        wall.append((time.perf_counter() - started) * 1e3)
    return wall


def measure(decode: DecodeStep, load: DecodeLoad, layout: str) -> Iterator[Row]:
    l1 = _gpu.engine_tensor(layout, load.num_blocks, load.geometry, load.device)
    region = _gpu.pinned_region(load.num_blocks, load.geometry.block_bytes, load.device)
    seen: dict[str, list[list[float]]] = {kind: [] for kind in BESIDE}
    rates = {kind: list[float]() for kind in BESIDE}
    with _gpu.copying(l1, region, load.device) as stream:
        side = WorkerSide(stream, load.geometry.num_layers, load.geometry.layer_bytes, _gpu.DEADLINE, by_layers=False)
        beside = Beside(side, load)
        for round_, kind in itertools.product(range(load.rounds + 1), BESIDE):
            plans = beside.plans(kind, load.steps if round_ else WARM_UP)
            before, started = beside.num_blocks, time.perf_counter()
            step_ms = steps(decode, beside, plans)
            beside.settle()
            if round_:
                seen[kind].append(step_ms)
                moved = (beside.num_blocks - before) * load.geometry.block_bytes
                rates[kind].append(moved / (time.perf_counter() - started) / 1e9)
    region.close()
    alone = [float(np.median(each)) for each in seen["alone"]]
    for kind in BESIDE:
        every = np.concatenate(seen[kind])
        slowdown = [float(np.median(each)) / base for each, base in zip(seen[kind], alone, strict=True)]
        row: Row = {"layout": layout, "beside": kind, "CUDA graph": decode.is_graph}
        row |= {"p50 ms": mid(every), "p99 ms": mid(every, quantile=0.99), "slowdown": mid(slowdown, 4)}
        yield row | {"GB/s": mid(rates[kind], 2)}


def goals(rows: Sequence[Row]) -> list[Target]:
    worst = {kind: max(row["slowdown"] for row in rows if row["beside"] == kind) for kind in BESIDE[1:]}
    return [Target(f"a decode step beside {kind}: ÷ alone", SLOWDOWN, value) for kind, value in worst.items()]


@program(_gpu.DRY)
@torch.no_grad()
def main(options: Given) -> Result:
    load = DecodeLoad.of(_gpu.device(options), options.quick)
    progress(f"{load.device}: a decode step's weights and graph")
    decode = DecodeStep(load)
    rows: list[Row] = []
    for layout in _gpu.LAYOUTS:
        progress(f"blocks: {layout}")
        rows += _gpu.told(measure(decode, load, layout))
    return rows, goals(rows), _gpu.setup_of(options)
