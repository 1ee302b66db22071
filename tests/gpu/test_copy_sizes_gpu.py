"""Pieces of 4 KiB to 8 MiB between a device and L2, one way and both ways at once, by each way of copying."""

import numpy as np
import pytest
import torch
from device_rig import WAYS, DeviceRig, ended_well, pairs
from extent import brief

from kvtier.tiers.copies.cuda_transfer import CudaCopyStream
from kvtier.tiers.copies.transfer import BlockPart, EngineBlocks
from kvtier.tiers.host.host import HostRegion

pytestmark = pytest.mark.filterwarnings("default")  # CuPy's and the driver's own

KIB = 1024
SIZES = [4 * KIB, 24 * KIB, 64 * KIB, 512 * KIB, 2048 * KIB, 8192 * KIB]
NUM_BLOCKS = 10


def both_ways(rig: DeviceRig, stream: CudaCopyStream, l1: list[torch.Tensor], region: HostRegion) -> None:
    """Lower blocks are stored while upper ones are loaded; in L1 each tensor is a part of a slot."""
    half, rng = NUM_BLOCKS // 2, np.random.default_rng(len(l1))
    region.array[half:] = rng.integers(0, 256, (half, region.slot_stride), np.uint8)
    before = [rig.read(tensor).numpy() for tensor in l1]
    stored_from, stored_to = rng.permutation(half), rng.permutation(half)
    loaded_from, loaded_to = (half + rng.permutation(half) for _ in range(2))
    stored = stream.store(pairs(stored_from.tolist(), stored_to.tolist()))
    loaded = stream.load(pairs(loaded_to.tolist(), loaded_from.tolist()))
    assert stream.fence(loaded, 30)
    after = [rig.read(tensor).numpy() for tensor in l1]
    ended_well(stored, loaded)
    rig.host_reads(region, stored_to.tolist())
    start = 0
    for old, new in zip(before, after, strict=True):
        end = start + old[0].size
        assert np.array_equal(region.array[stored_to, start:end], old[stored_from].reshape(half, -1))
        assert np.array_equal(new[loaded_to].reshape(half, -1), region.array[loaded_from, start:end])
        assert np.array_equal(new[:half], old[:half])
        start = end


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", brief([4 * KIB, 512 * KIB], SIZES))
def test_blocks_of_one_piece(rig: DeviceRig, size: int, way: str) -> None:
    l1 = rig.upload(torch.randint(0, 256, (NUM_BLOCKS, 4, size // 4), dtype=torch.uint8))
    region = HostRegion.allocate(NUM_BLOCKS, size)
    rig.pin(region, slots_per_piece=3)
    with rig.stream(l1, region, way) as stream:
        for _ in range(2):
            both_ways(rig, stream, [l1], region)
    region.close()


@pytest.mark.parametrize("way", ["batch", "copies"])
@pytest.mark.parametrize("size", brief([24 * KIB], SIZES[:4]))
def test_a_piece_of_each_layer(rig: DeviceRig, size: int, way: str) -> None:
    tensors = [rig.upload(torch.randint(0, 256, (NUM_BLOCKS, size), dtype=torch.uint8)) for _ in range(3)]
    parts = [BlockPart(tensor, layer, layer * size) for layer, tensor in enumerate(tensors)]
    region = HostRegion.allocate(NUM_BLOCKS, 3 * size)
    rig.pin(region, slots_per_piece=3)
    with rig.stream(EngineBlocks(parts, 3 * size), region, way) as stream:
        for _ in range(2):
            both_ways(rig, stream, tensors, region)
    region.close()
