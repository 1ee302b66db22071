"""How many calls a device is given: few a layer and few a plan, however many blocks there are."""

import ctypes
import random
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from extent import brief
from lazy_cuda import LazyCuda, LazyDriver, pin

from kvtier.connector.plan import CopyOp, StepPlan
from kvtier.connector.worker import WorkerSide
from kvtier.tiers.copies.copy_ways import CopyChoice, CopyWays
from kvtier.tiers.copies.cuda_transfer import CudaCopyStream
from kvtier.tiers.copies.packer import Run, pieces_of
from kvtier.tiers.copies.transfer import L1, BlockCopies, BlockPart, CopyDirection, EngineBlocks
from kvtier.tiers.host.host import HostRegion
from kvtier.tiers.host.pinning import CudaDriver, PinnedPieces

BLOCKS, LAYERS, TOKENS, HEADS, DIM = 300, 8, 4, 2, 256
LAYER = TOKENS * HEADS * 2 * DIM * 2  # bytes: layers of a load of all blocks are some MiB, so each is a group
SLOT = LAYERS * LAYER
OWN, COMPACT, STRIDED = "our own", "an engine's, compact", "an engine's, tokens before heads"


@dataclass
class Setting:
    cuda: LazyCuda
    region: HostRegion
    driver: LazyDriver
    memory: L1

    def stream(self, **choice: Any) -> CudaCopyStream:
        assert not isinstance(self.memory, np.ndarray)
        driver: Any = self.driver
        return CudaCopyStream(self.memory, self.region, driver=driver, ways=CopyWays(CopyChoice(**choice)))


def memory_of(kind: str) -> L1:
    if kind == OWN:
        return torch.randint(0, 99, (BLOCKS, LAYERS, LAYER // 2), dtype=torch.int16).view(torch.bfloat16)
    shape = (BLOCKS, TOKENS, HEADS, 2 * DIM) if kind == STRIDED else (BLOCKS, HEADS, TOKENS, 2 * DIM)
    tensors = [torch.randint(0, 99, shape, dtype=torch.int16).view(torch.bfloat16) for _ in range(LAYERS)]
    views = [tensor.permute(0, 2, 1, 3) if kind == STRIDED else tensor for tensor in tensors]
    return EngineBlocks([BlockPart(view, number, number * LAYER) for number, view in enumerate(views)], SLOT)


@pytest.fixture(params=[OWN, COMPACT, STRIDED])
def setting(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Setting]:
    cuda = LazyCuda(3, eager=0.3)
    cuda.patch(monkeypatch)
    region = HostRegion.allocate(BLOCKS, SLOT, prefault=False)
    pin(region, cuda)
    yield Setting(cuda, region, LazyDriver(cuda), memory_of(request.param))
    region.close()


def numbers(count: int, seed: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).sample(range(BLOCKS), count))


@pytest.mark.parametrize("batch_from", [0, 1 << 40], ids=["batches", "the break-even not reached"])
def test_a_layerwise_load_is_a_few_calls_a_layer(setting: Setting, batch_from: int) -> None:
    count = 256
    stream = setting.stream(batch_from=batch_from)
    setting.region.array[:] = np.random.default_rng(1).integers(0, 256, setting.region.array.shape, np.uint8)
    side = WorkerSide(stream, LAYERS, LAYER, 30.0)
    op = CopyOp(1, "request", numbers(count, 1), numbers(count, 2), (0,) * count, layerwise=True)
    before = setting.cuda.num_ops
    side.start_load(StepPlan(1, 0, (op,)))
    num_groups = len(side._loads[1])
    assert num_groups >= LAYERS // 4
    assert setting.cuda.num_ops - before <= 4 * LAYERS  # and not one for each of 256 blocks and layer
    assert side.wait_layer(LAYERS - 1)
    setting.cuda.finish()
    for block, slot in zip(op.device_blocks, op.host_slots, strict=True):
        assert np.array_equal(bytes_of(setting.memory, block), setting.region.array[slot, :SLOT])
    side.close(5)


def test_a_plan_of_scattered_blocks_is_a_few_calls(setting: Setting) -> None:
    stream = setting.stream(batch_from=0)
    copies = BlockCopies(np.array(numbers(200, 3)), np.array(numbers(200, 4)))
    before = setting.cuda.num_ops
    assert stream.store(copies).wait(5)
    assert setting.cuda.num_ops - before <= LAYERS + 2
    setting.cuda.finish()
    for block, slot in zip(copies.device_blocks.tolist(), copies.host_slots.tolist(), strict=True):
        assert np.array_equal(bytes_of(setting.memory, block), setting.region.array[slot, :SLOT])
    stream.close(5)


def test_a_canonical_l1_is_one_copy_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own engine's pool has the canonical order already: nothing is transposed, and neighbours are one piece."""
    cuda = LazyCuda(3, eager=0.3)
    cuda.patch(monkeypatch)
    region = HostRegion.allocate(BLOCKS, SLOT, prefault=False)
    pin(region, cuda)
    setting = Setting(cuda, region, LazyDriver(cuda), memory_of(OWN))
    stream = setting.stream(batch_from=0)
    assert stream.store(BlockCopies(np.array([5, 90, 33]), np.array([7, 1, 100]))).wait(5)
    assert (setting.driver.num_batches, setting.driver.num_pieces) == (1, 3)
    assert stream.load(BlockCopies(np.arange(10, 50), np.arange(20, 60))).wait(5)
    assert (setting.driver.num_batches, setting.driver.num_pieces) == (2, 4)
    cuda.finish()
    stream.close(5)
    region.close()


def bytes_of(memory: L1, block: int) -> Any:
    if isinstance(memory, EngineBlocks):
        parts = [part.tensor[block].contiguous().view(torch.uint8).numpy().reshape(-1) for part in memory.parts]
        return np.concatenate(parts)
    assert isinstance(memory, torch.Tensor)
    return memory[block].view(torch.uint8).numpy().reshape(-1)


# Batched copies of any geometry leave the bytes that copying run by run leaves, over a libcuda for this CPU.


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if shutil.which("gcc") is None:
        pytest.skip("no gcc to build a libcuda for this CPU")
    built = tmp_path_factory.mktemp("libcuda") / "libcuda.so"
    source = Path(__file__).parents[2] / "rigs" / "fake_libcuda.c"
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-o", str(built), str(source)], check=True)
    return ctypes.CDLL(str(built))


@pytest.mark.parametrize("direction", ["load", "store"])
@pytest.mark.parametrize("seed", range(brief(6, 60)))
def test_any_geometry(seed: int, direction: CopyDirection, library: ctypes.CDLL) -> None:
    rng = np.random.default_rng(seed)
    num_layers, num_blocks, num_slots = (int(rng.integers(1, most)) for most in (6, 20, 20))
    layer_bytes, gap = int(rng.integers(1, 3000)), int(rng.choice([0, 0, 64]))
    slot_bytes = num_layers * layer_bytes + int(rng.choice([0, 96]))
    by_layer = rng.random() < 0.5  # as vLLM keeps them, or block-first as our own
    shape = (num_layers, num_blocks, layer_bytes + gap) if by_layer else (num_blocks, num_layers * layer_bytes + gap)
    l1 = rng.integers(0, 256, shape, np.uint8)
    runs = [
        Run(
            l1.ctypes.data + (layer * l1.strides[0] if by_layer else layer * layer_bytes),
            l1.strides[1] if by_layer else l1.strides[0],
            layer * layer_bytes,
            layer_bytes,
        )
        for layer in range(num_layers)
    ]
    first = int(rng.integers(0, num_layers))
    asked = slice(first, int(rng.integers(first + 1, num_layers + 1)))
    count = int(rng.integers(1, min(num_blocks, num_slots) + 1))
    blocks, slots = (rng.permutation(most)[:count].astype(np.int64) for most in (num_blocks, num_slots))
    if rng.random() < 0.5:
        blocks, slots = np.sort(blocks), np.sort(slots)
    region = HostRegion.allocate(num_slots, slot_bytes, prefault=False)
    region.array[:] = rng.integers(0, 256, region.array.shape, np.uint8)
    driver = CudaDriver(library)
    region.pinning = PinnedPieces(region, driver, 0, piece_bytes=region.slot_stride * int(rng.integers(1, 5)))
    assert region.pinning.wait(60)
    expected_l1, expected_l2 = l1.copy(), region.array.copy()
    for layer in range(num_layers)[asked]:
        for block, slot in zip(blocks, slots, strict=True):
            start = 0 if by_layer else layer * layer_bytes
            row = expected_l1[layer, block] if by_layer else expected_l1[block]
            kept = expected_l2[slot, layer * layer_bytes : (layer + 1) * layer_bytes]
            mine = row[start : start + layer_bytes]
            (mine if direction == "load" else kept)[:] = kept if direction == "load" else mine
    pieces = pieces_of(direction, runs[asked], blocks, slots, region)
    driver.copy(*pieces, 7, at_any_time=direction == "load" and not seed % 2)
    assert np.array_equal(l1, expected_l1)
    assert np.array_equal(region.array, expected_l2)
    region.close()


def test_neighbours_on_both_sides_are_one_piece() -> None:
    region = HostRegion.allocate(8, 4096, prefault=False)
    runs = [Run(1 << 40, 4096, 0, 4096)]
    blocks, slots = np.array([5, 4, 9, 6], np.int64), np.array([3, 2, 7, 4], np.int64)
    targets, sources, sizes = pieces_of("load", runs, blocks, slots, region)
    assert sizes.tolist() == [3 * 4096, 4096]
    assert targets.tolist() == [(1 << 40) + 4 * 4096, (1 << 40) + 9 * 4096]
    assert sources.tolist() == [region.address + 2 * 4096, region.address + 7 * 4096]
    region.close()
