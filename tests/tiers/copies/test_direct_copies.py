"""Batched copies of any geometry leave the bytes that copying run by run leaves, over a libcuda for this CPU."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from extent import brief

from kvtier.tiers.copies.block_copier import CopyDirection
from kvtier.tiers.copies.packer import Run, pieces_of
from kvtier.tiers.host.host import HostRegion
from kvtier.tiers.host.pinning import CudaDriver, PinnedPieces


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
