"""An engine's own layout as strided parts: whatever their order, a block comes back as it was, and slots are packed."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from device_rig import pairs
from engine_layouts import Layout, dimension_first, keys_and_values, whole_layers
from numpy.typing import NDArray

from kvtier.tiers.copies import transfer
from kvtier.tiers.copies.transfer import (
    BlockCopier,
    BlockCopies,
    BlockPart,
    CopyDirection,
    EngineBlocks,
    PartCopier,
    block_bytes_view,
)
from kvtier.tiers.host.host import HostRegion

BLOCKS, LAYERS, HEADS, TOKENS, DIM, SLOTS = 10, 3, 2, 8, 4, 16
ITEM = 2  # bfloat16
PLANE = TOKENS * HEADS * DIM * ITEM  # keys or values of one layer
SLOT = LAYERS * 2 * PLANE


def canonical(tensor: torch.Tensor, kv: int) -> torch.Tensor:
    """Keys or values of one layer `[blocks, heads, tokens, 2 * dim]`, seen as `[blocks, tokens, heads, dim]`."""
    return tensor[..., kv * DIM : (kv + 1) * DIM].transpose(1, 2)


@pytest.fixture
def region() -> Iterator[HostRegion]:
    region = HostRegion.allocate(SLOTS, SLOT)
    yield region
    region.close()


@pytest.fixture
def tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (BLOCKS, HEADS, TOKENS, 2 * DIM)
    return [torch.randn(shape, generator=generator, dtype=torch.bfloat16) for _ in range(LAYERS)]


@pytest.mark.parametrize("parts", [keys_and_values, whole_layers, dimension_first])
@pytest.mark.parametrize("way", ["compiled", "numpy"])
def test_a_block_comes_back_as_it_was(
    parts: Layout, way: str, tensors: list[torch.Tensor], region: HostRegion, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way != "compiled":
        monkeypatch.setenv("KVTIER_COMPILED", "off")
    copier = PartCopier(EngineBlocks(parts(tensors), SLOT), region)
    before = [tensor.clone() for tensor in tensors]
    assert copier.copy("store", pairs([7, 0, 3], [2, 9, 5])) is None
    for tensor in tensors:
        tensor.zero_()
    assert copier.copy("load", pairs([1, 8], [9, 2])) is None
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor[1], old[0])
        assert torch.equal(tensor[8], old[7])
        assert not tensor[[0, 2, 3, 4, 5, 6, 7, 9]].any()


def test_a_slot_holds_the_parts_in_the_order_of_their_views(tensors: list[torch.Tensor], region: HostRegion) -> None:
    PartCopier(EngineBlocks(keys_and_values(tensors), SLOT), region).copy("store", pairs([4], [6]))
    slot = torch.frombuffer(region.slot(6), dtype=torch.bfloat16).view(LAYERS, 2, TOKENS, HEADS, DIM)
    for layer, tensor in enumerate(tensors):
        for kv in (0, 1):
            assert torch.equal(slot[layer, kv], canonical(tensor, kv)[4])


def test_a_range_of_layers_leaves_the_others_alone(tensors: list[torch.Tensor], region: HostRegion) -> None:
    copier = PartCopier(EngineBlocks(keys_and_values(tensors), SLOT), region)
    copier.copy("store", pairs([4], [6]))
    before = [tensor.clone() for tensor in tensors]
    assert copier.copy("load", pairs([5], [6], (1, 2))) is None
    assert torch.equal(tensors[1][5], before[1][4])
    for layer in (0, 2):
        assert torch.equal(tensors[layer], before[layer])


def test_cancelled_between_batches(
    tensors: list[torch.Tensor], region: HostRegion, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer.memory, "COPY_PIECE", SLOT)
    asked: list[bool] = []

    def cancelled() -> bool:
        asked.append(True)
        return len(asked) > 1

    copier = PartCopier(EngineBlocks(whole_layers(tensors), SLOT), region)
    assert "cancelled" in str(copier.copy("store", pairs([1, 2], [1, 2]), cancelled))
    assert np.frombuffer(region.slot(1), np.uint8).any()
    assert not np.frombuffer(region.slot(2), np.uint8).any()


def test_records_of_two_kinds_share_the_same_slots(tensors: list[torch.Tensor], region: HostRegion) -> None:
    """A block of group 0, and a smaller state of group 1, each in a slot of its own."""
    parts = [*whole_layers(tensors[:2]), BlockPart(tensors[2], 0, 0, group=1, record=1)]
    copier = PartCopier(EngineBlocks(parts, SLOT), region)
    before = [tensor.clone() for tensor in tensors]
    assert copier.copy("store", pairs([3, BLOCKS + 8], [0, 1])) is None
    assert copier.copy("load", pairs([5, BLOCKS + 6], [0, 1])) is None
    assert torch.equal(tensors[2][6], before[2][8])
    for tensor, old in zip(tensors[:2], before[:2], strict=True):
        assert torch.equal(tensor[5], old[3])


def test_parts_that_cannot_be_right_are_refused(tensors: list[torch.Tensor], region: HostRegion) -> None:
    with pytest.raises(ValueError, match="overlaps"):
        EngineBlocks([BlockPart(tensors[0], 0, 0), BlockPart(tensors[1], 1, PLANE)], SLOT)
    with pytest.raises(ValueError, match="overlaps another, or a slot"):
        EngineBlocks([BlockPart(tensors[0], 0, SLOT - PLANE)], SLOT)
    with pytest.raises(ValueError, match="blocks"):
        EngineBlocks([BlockPart(tensors[0], 0, 0), BlockPart(tensors[1][:5], 1, 2 * PLANE)], SLOT)
    with pytest.raises(ValueError, match="slots of"):
        PartCopier(EngineBlocks(whole_layers(tensors), SLOT + 64), region)


@pytest.mark.parametrize("direction", ["load", "store"])
def test_scattered_blocks_and_layers_of_blocks_arrive_where_nothing_is_compiled(
    monkeypatch: pytest.MonkeyPatch, direction: CopyDirection
) -> None:
    monkeypatch.setenv("KVTIER_COMPILED", "off")
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
