"""Copies where no extension module was built: one system call for many blocks, or numpy where that is forbidden."""

import numpy as np
import pytest
from numpy.typing import NDArray

from kvtier.tiers.copies.block_copier import BlockCopier, BlockCopies, CopyDirection, block_bytes_view
from kvtier.tiers.host import memory
from kvtier.tiers.host.host import HostRegion


@pytest.mark.parametrize("direction", ["load", "store"])
@pytest.mark.parametrize("is_scattered", [True, False])
def test_scattered_blocks_and_layers_of_blocks_arrive(
    monkeypatch: pytest.MonkeyPatch, direction: CopyDirection, is_scattered: bool
) -> None:
    monkeypatch.setattr(memory, "compiled_blocks_copy", lambda: None)
    monkeypatch.setattr(memory, "can_copy_scattered", lambda: is_scattered)
    dice = np.random.default_rng(0)
    l1: NDArray[np.uint8] = dice.integers(0, 256, (20, 2, 128 << 10), np.uint8)
    region = HostRegion.allocate(18, 256 << 10, huge_pages=False, prefault=False)
    region.array[:] = dice.integers(0, 256, region.array.shape, np.uint8)
    scattered = dice.permutation(20)[:16], dice.permutation(18)[:16]
    for blocks, slots in (scattered, (np.arange(3, 19), np.arange(1, 17))):
        for layers, span in ((None, slice(None)), ((1, 2), slice(128 << 10, None))):
            expected_l1, expected_l2 = l1.reshape(20, -1).copy(), region.array.copy()
            if direction == "load":
                expected_l1[blocks, span] = region.array[slots, span]
            else:
                expected_l2[slots, span] = expected_l1[blocks, span]
            assert BlockCopier(l1, region).copy(direction, BlockCopies(blocks, slots, layers)) is None
            assert np.array_equal(block_bytes_view(l1).reshape(20, -1), expected_l1)
            assert np.array_equal(region.array, expected_l2)
    region.close()
