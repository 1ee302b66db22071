"""Every way in which vLLM keeps KV, between a device and L2: NHD, HND, cross-layer, MLA; bfloat16 and bytes of fp8."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from device_rig import DeviceRig, ended_well, pairs

from kvtier.connector.plan import CopyOp, StepPlan
from kvtier.connector.worker import WorkerSide
from kvtier.tiers.copies.transfer import BlockPart, EngineBlocks
from kvtier.tiers.host.host import HostRegion

pytestmark = pytest.mark.filterwarnings("default")  # CuPy's and the driver's own

NUM_BLOCKS, LAYERS, HEADS, TOKENS, DIM = 12, 3, 4, 16, 64
LATENT = 576  # MLA: one latent row a token, for all heads
LAYOUTS = ["NHD", "HND", "cross-layer", "MLA", "second rank"]
DTYPES = [torch.bfloat16, torch.float8_e4m3fn]


def kv_caches(rig: DeviceRig, layout: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """A tensor a layer, shown as `[blocks, heads, tokens, content]`, with the strides of that layout."""

    def some(*shape: int) -> torch.Tensor:
        values = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8)  # opaque bytes, NaNs too
        return rig.upload(values.view(dtype).view(shape))

    if layout == "cross-layer":
        whole = some(NUM_BLOCKS, LAYERS, TOKENS, HEADS, 2 * DIM)
        return [whole[:, layer].permute(0, 2, 1, 3) for layer in range(LAYERS)]
    if layout == "NHD":
        return [some(NUM_BLOCKS, TOKENS, HEADS, 2 * DIM).permute(0, 2, 1, 3) for _ in range(LAYERS)]
    if layout == "MLA":
        return [some(NUM_BLOCKS, 1, TOKENS, LATENT) for _ in range(LAYERS)]
    return [some(NUM_BLOCKS, HEADS, TOKENS, 2 * DIM) for _ in range(LAYERS)]


def slots_of(tensors: Sequence[torch.Tensor], layout: str) -> EngineBlocks:
    """Where a rank's layers lie in slots; of two ranks the second has the second half."""
    layer_bytes = tensors[0][0].numel() * tensors[0].itemsize
    first, ranks = (LAYERS * layer_bytes, 2) if layout == "second rank" else (0, 1)
    parts = [BlockPart(tensor, layer, first + layer * layer_bytes) for layer, tensor in enumerate(tensors)]
    return EngineBlocks(parts, ranks * LAYERS * layer_bytes)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("way", ["batch", "copies"])
@pytest.mark.parametrize("dtype", DTYPES, ids=["bfloat16", "fp8"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_come_back_to_other_blocks_by_a_workers_steps(
    rig: DeviceRig, layout: str, dtype: torch.dtype, way: str
) -> None:
    torch.manual_seed(5)
    tensors = kv_caches(rig, layout, dtype)
    before = [bits(rig.read(tensor)) for tensor in tensors]
    blocks = slots_of(tensors, layout)
    region = HostRegion.allocate(NUM_BLOCKS, blocks.slot_bytes)
    region.array[:] = 0x5A
    rig.pin(region, slots_per_piece=5)
    rng = np.random.default_rng(2)
    sources, slots, targets = (rng.permutation(NUM_BLOCKS)[:8].tolist() for _ in range(3))
    with rig.stream(blocks, region, way) as stream:
        worker = WorkerSide(stream, LAYERS, blocks.parts[0].num_bytes, 30)
        # A step's stores: each request's own op, one copy for the device.
        ops = [CopyOp(i, f"r{i}", (sources[i],), (slots[i],), (0,)) for i in range(8)]
        worker.start_store(StepPlan(1, 0, (), tuple(ops)))
        finished: set[int] = set()
        while len(finished) < 8:
            worker.wait(30)
            report = worker.poll()
            assert not report.failed
            finished.update(report.finished)
        rig.host_reads(region, slots)
        for part, kept in zip(blocks.parts, before, strict=True):
            stored = region.array[slots, part.offset : part.offset + part.num_bytes]
            assert np.array_equal(stored, kept[sources].reshape(8, -1).numpy())
        if layout == "second rank":  # the first rank's half is left alone
            assert (region.array[:, : blocks.slot_bytes // 2] == 0x5A).all()
        # Loaded into other blocks, layer by layer; compute waits for each.
        worker.start_load(StepPlan(2, 0, (CopyOp(9, "r", tuple(targets), tuple(slots), (0,) * 8, True),)))
        for layer, tensor in enumerate(tensors):
            assert worker.wait_layer(layer)
            now = bits(rig.read(tensor))
            assert torch.equal(now[targets], before[layer][sources])
            others = [block for block in range(NUM_BLOCKS) if block not in targets]
            assert torch.equal(now[others], before[layer][others])
        assert worker.arrived()
        worker.poll()
    region.close()


def test_copies_of_one_layer_leave_the_others_alone(rig: DeviceRig) -> None:
    tensors = kv_caches(rig, "NHD", torch.bfloat16)
    before = [bits(rig.read(tensor)) for tensor in tensors]
    blocks = slots_of(tensors, "NHD")
    region = HostRegion.allocate(NUM_BLOCKS, blocks.slot_bytes)
    region.array[:] = 0x11
    rig.pin(region)
    with rig.stream(blocks, region, "batch") as stream:
        loaded = stream.load(pairs([4], [2], (1, 2)))
        assert stream.fence(loaded, 30)
        assert torch.equal(bits(rig.read(tensors[0])), before[0])
        assert torch.equal(bits(rig.read(tensors[2])), before[2])
        assert (bits(rig.read(tensors[1]))[4] == 0x11).all()
        ended_well(loaded)
    region.close()
