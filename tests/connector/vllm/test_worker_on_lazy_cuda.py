"""vLLM's worker half over an adversary's CUDA, without vLLM: random steps in each layout, every byte and order checked.

The story keeps vLLM's contract: it computes where nothing is loaded or asks the half to wait, gives blocks out anew as
soon as their request has ended, and names the stores that still read them. Each planted fault is found.
"""

import random
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from engine_layouts import slot_plan_of
from extent import brief
from lazy_cuda import LazyCuda, LazyDriver, ranges_of
from numpy.typing import NDArray

from kvtier.connector import worker as worker_side
from kvtier.connector.plan import CopyOp, StepPlan
from kvtier.connector.vllm import worker as worker_half
from kvtier.connector.vllm.slots import GroupLane, SlotPlan, engine_blocks
from kvtier.connector.vllm.worker import RegionHandle, WorkerHalf, WorkerStep
from kvtier.connector.worker import WorkerSide
from kvtier.tiers.copies import copy_ways, cuda_transfer, packer
from kvtier.tiers.copies.copy_ways import CopyChoice
from kvtier.tiers.copies.transfer import BlockPart, EngineBlocks
from kvtier.tiers.host import host
from kvtier.tiers.host.host import HostRegion
from kvtier.tiers.host.pinning import PinnedPieces

BLOCKS, SLOTS, LAYERS, HEADS, TOKENS, CONTENT = 14, 16, 4, 2, 8, 64
NAMES = tuple(f"layer.{number}" for number in range(LAYERS))
LAYOUTS = ["NHD", "HND", "cross-layer", "MLA", "fp8", "two groups", "second rank of two", "padded"]
LAYOUTS += ["two pieces", "half a piece"]  # [cache] share_across_tp
WAYS = ["staging", "batches"]
ONCE = [(layout, WAYS[number // 2 % 2]) for number, layout in enumerate(LAYOUTS)]
STEPS = 25


def tensors(layout: str) -> list[torch.Tensor]:
    """vLLM's, each `[blocks, heads, tokens, content]` in whatever order its memory has."""
    if layout == "NHD":
        return [torch.zeros(BLOCKS, TOKENS, HEADS, CONTENT, dtype=torch.bfloat16).transpose(1, 2) for _ in NAMES]
    if layout == "cross-layer":
        together = torch.zeros(BLOCKS, LAYERS, HEADS, TOKENS, CONTENT, dtype=torch.bfloat16)
        return [together[:, number] for number in range(LAYERS)]
    if layout == "MLA":
        return [torch.zeros(BLOCKS, 1, TOKENS, CONTENT + 8, dtype=torch.bfloat16) for _ in NAMES]
    if layout == "fp8":
        return [torch.zeros(BLOCKS, HEADS, TOKENS, CONTENT, dtype=torch.uint8).view(torch.float8_e4m3fn) for _ in NAMES]
    if layout == "padded":  # pages of equal size, of which a layer uses a part
        page = HEADS * TOKENS * CONTENT
        pages = [torch.zeros(BLOCKS, page + 32, dtype=torch.bfloat16) for _ in NAMES]
        return [each[:, :page].view(BLOCKS, HEADS, TOKENS, CONTENT) for each in pages]
    return [torch.zeros(BLOCKS, HEADS, TOKENS, CONTENT, dtype=torch.bfloat16) for _ in NAMES]


def plan_of(layout: str, of: list[torch.Tensor]) -> SlotPlan:
    groups = (NAMES[::2], NAMES[1::2]) if layout == "two groups" else (NAMES,)
    lanes = tuple(GroupLane(number) for number in range(len(groups)))
    two = {"groups": groups, "group_sizes": (TOKENS,) * len(groups), "lanes": lanes}
    parts = 2 if layout in ("second rank of two", "half a piece") else 1
    pieces = {"two pieces": 2, "half a piece": 1}.get(layout)
    return slot_plan_of(NAMES, TOKENS, of[0][0].nbytes, **two, num_parts=parts, num_pieces=pieces)


def pattern(value: int, part: BlockPart) -> NDArray[np.uint8]:
    """What a block holds there: every byte is its own."""
    mixed = (
        np.arange(part.num_bytes) * 7 + value * 31 + part.layer * 11 + part.group * 5 + part.offset // part.num_bytes
    )
    return (mixed % 251).astype(np.uint8)


class Story:
    """One rank and its scheduler, step by step."""

    def __init__(self, cuda: LazyCuda, layout: str, *, layerwise: bool) -> None:
        self.cuda, self.rng, self.layerwise = cuda, random.Random(cuda.seed), layerwise
        self.tensors = tensors(layout)
        self.plan = plan_of(layout, self.tensors)
        for tensor in self.tensors:
            cuda.own(tensor)
        self.half = WorkerHalf(self.plan, layerwise=layerwise)
        caches, rank = dict(zip(NAMES, self.tensors, strict=True)), self.plan.num_parts - 1
        self.half.register(caches, rank)
        self.parts = engine_blocks(self.plan, caches, rank).parts
        self.regions: list[HostRegion] = []
        self.restart()
        self.held: dict[int, int] = {}  # block → what it holds; of a live request
        self.loading: dict[int, tuple[list[tuple[int, int]], list[int]]] = {}  # op → (block, value) of each; slots
        self.storing: dict[int, tuple[list[int], list[tuple[int, int]], HostRegion]] = {}  # op → blocks; (slot, value)
        self.ops = self.values = 0
        self.failed: list[int] = []

    def restart(self) -> None:
        """Another daemon, with other memory; what the old one had is gone."""
        self.regions.append(HostRegion.allocate(SLOTS, self.plan.block_bytes, shared=True, prefault=False))
        self.region, self.full = self.regions[-1], dict[int, int]()
        self.handle = RegionHandle.of(self.region)

    def run(self, num_steps: int = STEPS) -> None:
        for number in range(num_steps):
            if number == num_steps // 2:
                self.restart()
            self.step()
        while self.loading or self.storing:
            self.step(idle=True)
        self.compute(list(self.held), set())
        self.cuda.finish()

    def close(self) -> None:
        self.half.close()
        for region in self.regions:
            region.close()

    # One step, as vLLM makes it.

    def step(self, *, idle: bool = False) -> None:
        ended = [] if idle else self.some([block for block in self.held], 3)  # their requests end with the last step
        final_stores = self.stored(ended[:2])
        for block in ended:
            del self.held[block]
        fresh = [] if idle else self.some(self.free(), 3)
        loads = [] if idle else [op for op in (self.loaded(fresh, waits) for waits in (True, False)) if op is not None]
        written = {*fresh, *(block % BLOCKS for op in loads for block in op.device_blocks)}
        fences = tuple(op for op, (blocks, *_) in self.storing.items() if not written.isdisjoint(blocks))
        stores = self.stored(fresh[:2], self.values + 1)
        asynchronous = {block % BLOCKS for op in loads if not op.layerwise for block in op.device_blocks}
        zeroed = {block for block in asynchronous if self.rng.random() < 0.3}
        region_id = self.region.region_id
        message = WorkerStep(
            region=self.handle,
            plan=StepPlan(1, region_id, tuple(loads), stores).encode(),
            final_stores=StepPlan(1, region_id, (), final_stores).encode(),
            is_idle=idle,
            fences=fences,
            touches=bool(zeroed),
        )
        self.half.begin(message)
        self.zero(zeroed)
        awaited = any(op.layerwise for op in loads)
        if awaited:
            self.half.start_load(message)
        self.wait_layers(message)
        for op in loads:
            if op.layerwise:
                self.held |= dict(self.loading[op.op_id][0])
        self.compute(list(self.held), set(fresh))
        self.held |= dict.fromkeys(fresh, self.values)
        if not awaited:
            self.half.start_load(message)
        self.half.start_store(message)
        for _ in range(self.rng.randint(0, 5)):
            self.cuda.step()
        self.half.collect()
        self.take_in()

    def wait_layers(self, message: WorkerStep) -> None:
        for name in NAMES:
            self.half.wait_layer(name)

    def take_in(self) -> None:
        report = self.half.take_reports()
        self.half.take_received()
        self.failed += report.failed
        for op in (*report.finished, *report.failed):
            well = op in report.finished
            if op in self.loading:
                blocks, _ = self.loading.pop(op)
                if well:
                    self.held |= dict(blocks)
            elif op in self.storing:
                _, slots_of, region = self.storing.pop(op)
                for slot, value in slots_of if well and region is self.region else ():
                    self.seal(slot, value)
        if self.half._region is not None and self.half.memory == self.handle:
            assert self.half._region.pinned  # again after a restart, and its own mapping

    def seal(self, slot: int, value: int) -> None:
        """The scheduler's process reads the slot as soon as the store is reported."""
        mapped = self.half._region
        assert mapped is not None
        start = mapped.address + slot * mapped.slot_stride
        spans = [(start + part.offset, start + part.offset + part.num_bytes) for part in self.parts]
        self.cuda.host_touches("sealing", spans, writes=False)
        for part in self.parts:
            got = self.region.array[slot, part.offset : part.offset + part.num_bytes]
            assert np.array_equal(got, pattern(value, part)), "sealed before it was there"
        self.full[slot] = value

    # What the scheduler plans.

    def free(self) -> list[int]:
        """Blocks that no live request has. Stores may still read them; nothing may load into them."""
        coming = {block for blocks, _ in self.loading.values() for block, _ in blocks}
        return [block for block in range(BLOCKS) if block not in self.held and block not in coming]

    def stored(self, blocks: list[int], value: int | None = None) -> tuple[CopyOp, ...]:
        busy = {slot for _, slots, region in self.storing.values() if region is self.region for slot, _ in slots}
        busy |= {slot for _, slots in self.loading.values() for slot in slots}
        slots = self.some([slot for slot in range(SLOTS) if slot not in busy], len(blocks))
        if not blocks or len(slots) < len(blocks):
            return ()
        op = self.op(blocks, slots)
        for slot in slots:
            self.full.pop(slot, None)
        values = [self.held[block] if value is None else value for block in blocks]
        self.storing[op.op_id] = blocks, list(zip(slots, values, strict=True)), self.region
        return (op,)

    def loaded(self, taken: list[int], waits: bool) -> CopyOp | None:
        slots = self.some(list(self.full), 3)
        blocks = self.some([block for block in self.free() if block not in taken], len(slots))
        slots = slots[: len(blocks)]
        if not slots or self.rng.random() < 0.3:
            return None
        op = self.op(blocks, slots, waits)
        self.loading[op.op_id] = [(b, self.full[s]) for b, s in zip(blocks, slots, strict=True)], slots
        return op

    def op(self, blocks: list[int], slots: list[int], waits: bool = False) -> CopyOp:
        self.ops += 1
        lanes = range(len(self.plan.lanes))
        ids = tuple(lane * BLOCKS + block for lane in lanes for block in blocks)
        at = tuple(slots) * len(lanes)
        return CopyOp(self.ops, f"r{self.ops}", ids, at, (0,) * len(at), waits)

    def some(self, numbers: list[int], most: int) -> list[int]:
        return self.rng.sample(numbers, min(len(numbers), self.rng.randint(0, most) if most == 3 else most))

    # What the device computes.

    def compute(self, read: list[int], written: set[int]) -> None:
        for block in read:
            for part in self.parts:
                row = part.tensor[block]
                self.cuda.compute_op("attention", ranges_of(part.tensor[block : block + 1]), [])
                got = row.contiguous().view(torch.uint8).numpy().reshape(-1)
                assert np.array_equal(got, pattern(self.held[block], part)), "computed upon before it was there"
        self.values += bool(written)
        for block in written:
            self.write(block, "KV written", lambda part: pattern(self.values, part))

    def zero(self, blocks: set[int]) -> None:
        for block in blocks:
            self.write(block, "zeroed", lambda part: np.zeros(part.num_bytes, np.uint8))

    def write(self, block: int, what: str, value: Callable[[BlockPart], NDArray[np.uint8]]) -> None:
        for part in self.parts:
            self.cuda.compute_op(what, [], ranges_of(part.tensor[block : block + 1]))
            row = part.tensor[block]
            bits = torch.from_numpy(value(part)).view(row.dtype)
            row.view(torch.uint8).copy_(bits.view(row.shape).view(torch.uint8))


def story(
    seed: int, layout: str, way: str, plant: Callable[[pytest.MonkeyPatch], None] | None = None, *, layerwise: bool
) -> Story:
    """One random story; AssertionError for a wrong byte, a race or a complaint."""
    with pytest.MonkeyPatch.context() as patch:
        told = started(patch, seed, layout, way, layerwise=layerwise)
        if plant is not None:
            plant(patch)
        try:
            told.run()
        finally:
            told.close()
    return told


def started(patch: pytest.MonkeyPatch, seed: int, layout: str, way: str, *, layerwise: bool) -> Story:
    cuda = LazyCuda(seed, eager=random.Random(seed).choice([0.0, 0.05, 0.3]))
    cuda.patch(patch)
    driver = LazyDriver(cuda, copies_in_batches=way == "batches")
    patch.setattr(host, "cuda_driver", lambda: driver)
    patch.setattr(cuda_transfer, "cuda_driver", lambda: driver)
    patch.setattr(EngineBlocks, "device", property(lambda _: torch.device("cuda", 0)))
    patch.setattr(worker_side, "_GROUP_BYTES", 1)  # each layer by itself
    patch.setattr(copy_ways, "DEFAULT", CopyChoice(batch_from=0))  # of tiny pieces, too
    told = Story(cuda, layout, layerwise=layerwise)
    slot = told.region.slot_stride
    patch.setattr(packer, "STAGING_BYTES", random.Random(seed + 1).choice([slot, 3 * slot, 1 << 20]))

    def pinned(*given: Any) -> PinnedPieces:
        pieces = PinnedPieces(*given, piece_bytes=4 * slot)
        assert pieces.wait(60)  # what is copied before it is pinned, a thread copies
        return pieces

    patch.setattr(host, "PinnedPieces", pinned)
    return told


@pytest.mark.parametrize(("layout", "way"), brief(ONCE, [*product(LAYOUTS, WAYS)]))
def test_every_byte_is_right_and_nothing_is_left_to_chance(layout: str, way: str) -> None:
    for seed in brief([LAYOUTS.index(layout)], range(3)):
        told = story(seed, layout, way, layerwise=bool(seed % 2))
        assert not told.failed
        assert told.ops > 30


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[Story]:
    told = started(monkeypatch, 1, "HND", "staging", layerwise=False)
    yield told
    told.close()


def load_step(told: Story, op: CopyOp) -> Any:
    plan = StepPlan(1, told.region.region_id, (op,)).encode()
    return WorkerStep(told.handle, plan, StepPlan(0, 0).encode(), is_idle=False)


def test_an_asynchronous_load_does_not_wait_for_the_steps_compute(told: Story) -> None:
    for op_id, touches in enumerate((False, True), 1):
        op = CopyOp(op_id, "r", (op_id,), (0,), (0,))
        message = load_step(told, op)
        message.touches = touches
        told.half.begin(message)
        begun = told.cuda.compute.num_issued
        told.write(9, "the forward pass", lambda part: pattern(1, part))
        told.half.start_load(message)
        loads = [each for each in told.cuda._issued if each.what == "index_copy_"]
        assert (loads[-1].clock.get("compute", 0) > begun) == touches  # what vLLM zeroes first has to be waited for
    told.cuda.finish()


def fill(told: Story, *slots: int) -> None:
    for slot in slots:
        for part in told.parts:
            told.region.array[slot, part.offset : part.offset + part.num_bytes] = pattern(slot, part)


def test_a_load_refused_half_way_is_waited_for_and_fails_its_request(
    told: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = packer.Packer._rows, iter(range(99))

    def third_refused(self: packer.Packer, *sizes: Any) -> torch.Tensor:
        if next(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(self, *sizes)

    monkeypatch.setattr(packer, "STAGING_BYTES", 1)
    monkeypatch.setattr(packer.Packer, "_least_staging", property(lambda self: self._blocks.slot_bytes))
    monkeypatch.setattr(packer.Packer, "_rows", third_refused)
    fill(told, *range(6))
    blocks = tuple(range(2, 8))
    message = load_step(told, CopyOp(1, "r", blocks, tuple(range(6)), (0,) * 6, layerwise=True))
    told.half.begin(message)
    told.half.start_load(message)
    told.half.collect()  # once this said that memory was stuck, after no wait at all
    assert told.half.take_reports().failed == (1,)
    assert told.half.take_invalid() == {*blocks}
    for block in blocks:  # vLLM computes them again
        told.write(block, "KV written", lambda part: pattern(50, part))
    told.cuda.finish()


def stuck(told: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device does nothing more by itself."""
    monkeypatch.setattr(told.cuda, "let_run", lambda: None)
    monkeypatch.setattr(worker_half, "_DEADLINE", 0.05)


def test_copies_in_flight_at_close_are_lost_and_their_memory_stays(
    told: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(told, 3)
    message = WorkerStep(
        told.handle, load_step(told, CopyOp(1, "r", (2,), (3,), (0,))).plan, StepPlan(0, 0).encode(), False
    )
    told.half.begin(message)
    told.half.start_load(message)
    stuck(told, monkeypatch)
    kept = len(host._KEPT)
    report = told.half.close()
    assert (report.finished, report.failed, report.lost) == ((), (1,), (1,))
    assert len(host._KEPT) == kept + 1
    told.cuda.finish()  # the device ends it: into memory that is still there
    assert np.array_equal(told.tensors[0][2].view(torch.uint8).numpy().reshape(-1), pattern(3, told.parts[0]))
    del host._KEPT[kept:]


def test_a_load_that_does_not_end_keeps_its_blocks_from_being_computed(
    told: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_half, "_DEADLINE", 0.05)
    fill(told, 3)
    message = load_step(told, CopyOp(1, "r", (2,), (3,), (0,), layerwise=True))
    told.half.begin(message)
    stuck(told, monkeypatch)
    monkeypatch.setattr(WorkerSide, "wait_layer", lambda *_: False)
    told.half.start_load(message)
    with pytest.raises(RuntimeError, match="memory is stuck"):
        told.half.collect()
    told.cuda.finish()


def test_a_lost_device_fails_loads_and_stores_and_says_so_once(told: Story, caplog: pytest.LogCaptureFixture) -> None:
    kept = len(host._KEPT)
    fill(told, 3)
    for op_id in (1, 2, 3):
        message = load_step(told, CopyOp(op_id, f"r{op_id}", (op_id,), (3,), (0,)))
        told.half.begin(message)
        told.half.start_load(message)
        told.half.start_store(message)
        told.cuda.dead = "CUDA error: unspecified launch failure"
        told.half.collect()
        report = told.half.take_reports()
        assert report.failed == (op_id,)
        assert report.lost == ((1,) if op_id == 1 else ())
        assert told.half.take_received()[0] == {f"r{op_id}"}
        assert told.half.take_invalid() == {op_id}
    assert sum("CUDA has failed for good" in message for message in caplog.messages) == 1
    told.cuda.dead = ""
    told.half.close()
    assert len(host._KEPT) == kept + 1
    told.cuda.finish()
    del host._KEPT[kept:]


# Faults. Each is planted in every layout's story that may show it, and found.
