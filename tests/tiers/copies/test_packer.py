"""Packing on a CPU: whatever the strides, groups, ranks and layers, the bytes are those `PartCopier` copies."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from device_rig import pairs
from engine_layouts import Layout, dimension_first, keys_and_values, one_rank_tokens_first, two_groups, whole_layers
from extent import brief

from kvtier.tiers.copies import packer
from kvtier.tiers.copies.packer import Packer
from kvtier.tiers.copies.transfer import BlockCopies, BlockPart, CopyDirection, EngineBlocks, PartCopier
from kvtier.tiers.host.host import HostRegion

BLOCKS, LAYERS, HEADS, TOKENS, DIM, SLOTS = 10, 4, 2, 8, 16, 16
PLANE = TOKENS * HEADS * DIM * 2  # keys or values of one layer in bfloat16
LAYER = 2 * PLANE
SLOT = LAYERS * LAYER  # a multiple of 4096: neighbouring slots lie without a gap


def kernel_blocks(tensors: list[torch.Tensor]) -> list[BlockPart]:
    """The engine's kernels use blocks a quarter as large: the same memory, four entries a block, heads inside."""
    parts = []
    for layer, tensor in enumerate(tensors):
        split = tensor.view(BLOCKS, 4, HEADS, TOKENS // 4, 2 * DIM)
        parts.append(BlockPart(split.transpose(1, 2), layer, layer * LAYER))
    return parts


def odd_offsets(tensors: list[torch.Tensor]) -> list[BlockPart]:
    """Nothing is aligned to more than a byte."""
    narrow = [tensor[..., :DIM] for tensor in tensors]
    return [BlockPart(tensor, layer, 1 + layer * (PLANE + 3)) for layer, tensor in enumerate(narrow)]


LAYOUTS = [
    whole_layers,
    keys_and_values,
    dimension_first,
    kernel_blocks,
    one_rank_tokens_first,
    two_groups,
    odd_offsets,
]


@pytest.fixture(params=[SLOT, SLOT + 2], ids=["", "padded"])
def slot_bytes(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def regions(slot_bytes: int) -> Iterator[tuple[HostRegion, HostRegion]]:
    """Two that hold the same bytes: one for the packer, one for what it is compared with."""
    ours, theirs = (HostRegion.allocate(SLOTS, slot_bytes) for _ in range(2))
    ours.array[:] = theirs.array[:] = np.random.default_rng(3).integers(0, 256, ours.array.shape, np.uint8)
    yield ours, theirs
    ours.close()
    theirs.close()


def kv(seed: int = 1) -> list[torch.Tensor]:
    """Any bits at all, NaNs of every kind among them."""
    generator = torch.Generator().manual_seed(seed)
    shape = (BLOCKS, HEADS, TOKENS, 2 * DIM)
    bits = (torch.randint(-(2**15), 2**15, shape, generator=generator, dtype=torch.int16) for _ in range(LAYERS))
    return [layer.view(torch.bfloat16) for layer in bits]


def bits(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.view(torch.int16) for tensor in tensors]


def assert_as_part_copier(
    layout: Layout, regions: tuple[HostRegion, HostRegion], direction: CopyDirection, *batches: BlockCopies
) -> None:
    """Both copy the same; every byte of both sides must be equal afterwards, touched or not."""
    ours, theirs = kv(), kv()
    slot_bytes = regions[0].slot_bytes
    packed = Packer(EngineBlocks(layout(ours), slot_bytes), regions[0])
    reference = PartCopier(EngineBlocks(layout(theirs), slot_bytes), regions[1])
    before = regions[1].array.copy(), [layer.clone() for layer in theirs]
    for copies in batches:
        packed.copy(direction, copies)
        assert reference.copy(direction, copies) is None
    assert np.array_equal(regions[0].array, regions[1].array)
    assert all(map(torch.equal, bits(ours), bits(theirs)))
    # and they did copy something
    copied = not np.array_equal(before[0], regions[1].array) or not all(map(torch.equal, bits(before[1]), bits(theirs)))
    assert copied


@pytest.mark.parametrize("direction", ["store", "load"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("staged_slots", brief([3], [1, 3, 100]))
def test_whole_blocks(
    layout: Layout,
    direction: CopyDirection,
    staged_slots: int,
    regions: tuple[HostRegion, HostRegion],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packer, "STAGING_BYTES", staged_slots * SLOT)
    # neighbours and strangers, in no order; then over the same staging once more
    copies = pairs([7, 0, 3, 4, 9, 1], [2, 9, 4, 5, 6, 0])
    assert_as_part_copier(layout, regions, direction, copies, pairs([2, 5], [15, 14]))


@pytest.mark.parametrize("direction", ["store", "load"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("layers", brief([(1, 3)], [(0, 1), (1, 3), (2, 4), (0, 4)]))
def test_ranges_of_layers(
    layout: Layout, direction: CopyDirection, layers: tuple[int, int], regions: tuple[HostRegion, HostRegion]
) -> None:
    assert_as_part_copier(layout, regions, direction, pairs([7, 0, 3, 4], [2, 9, 4, 5], layers))


def test_any_mixture_of_groups(regions: tuple[HostRegion, HostRegion]) -> None:
    rng = np.random.default_rng(7)
    for _ in range(30):
        count = int(rng.integers(1, 2 * BLOCKS))
        blocks = rng.permutation(2 * BLOCKS)[:count]  # each block of either group at most once, slots at random
        copies = BlockCopies(blocks, rng.integers(0, SLOTS, count))
        assert_as_part_copier(two_groups, regions, "load", copies)


def test_slots_take_few_copies(regions: tuple[HostRegion, HostRegion], monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    real = torch.Tensor.copy_

    def counted(target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        assert target.is_contiguous()  # or torch takes a detour through pageable memory and waits for it
        assert source.is_contiguous()
        copied.append(target.nbytes)
        return real(target, source)

    monkeypatch.setattr(torch.Tensor, "copy_", counted)
    region = regions[0]
    blocks = Packer(EngineBlocks(two_groups(kv()), region.slot_bytes), region)
    both = pairs([1, 2, 3, BLOCKS + 1, BLOCKS + 2, BLOCKS + 5], [4, 5, 9, 5, 4, 9])
    blocks.copy("store", both)
    # slots 4 and 5 in one piece, where nothing lies between them
    assert copied == ([2 * SLOT, SLOT] if region.slot_stride == SLOT else [SLOT] * 3)
    copied.clear()
    blocks.copy("load", pairs([1, 2], [4, 5]))
    assert copied == [LAYER] * 4  # of one group alone every layer, between those of the other
    copied.clear()
    rank = Packer(EngineBlocks(one_rank_tokens_first(kv()), region.slot_bytes), region)
    rank.copy("store", pairs([1, 2], [4, 5]))
    assert copied == [SLOT // 2] * 2  # a rank's half of each slot


def test_staging_holds_no_more_than_all_slots(regions: tuple[HostRegion, HostRegion]) -> None:
    region = regions[0]
    copier = Packer(EngineBlocks(two_groups(kv()), region.slot_bytes), region)
    copier.copy("store", pairs([1, 2], [4, 5]))
    assert len(copier._staging["store"]) <= SLOTS * (region.slot_bytes + 32) < packer.STAGING_BYTES


def test_elements_move_as_large_integers() -> None:
    # rows of 16 bfloat16 are four integers of 8 bytes each; single elements stay what they are
    assert packer._IntegerPart(keys_and_values(kv())[0]).tensor.dtype is torch.int64
    assert packer._IntegerPart(dimension_first(kv())[0]).tensor.dtype is torch.int16
    assert packer._IntegerPart(odd_offsets(kv())[0]).tensor.dtype is torch.uint8


@pytest.mark.parametrize("slot_bytes", [SLOT])
def test_tensors_made_in_inference_mode(regions: tuple[HostRegion, HostRegion]) -> None:
    with torch.inference_mode():  # where engines make theirs, and connect them
        tensors = kv()
        blocks = Packer(EngineBlocks(whole_layers(tensors), SLOT), regions[0])
    with pytest.raises(RuntimeError, match="inference tensor"):
        tensors[0][5] = 0  # out here torch lets nobody write to them
    before = [layer[4].clone() for layer in bits(tensors)]
    blocks.copy("store", pairs([4], [2]))
    blocks.copy("load", pairs([5], [2]))
    assert all(torch.equal(layer[5], old) for layer, old in zip(bits(tensors), before, strict=True))


@pytest.mark.parametrize("slot_bytes", [SLOT])
def test_blocks_that_do_not_fit_are_refused(regions: tuple[HostRegion, HostRegion]) -> None:
    with pytest.raises(ValueError, match=f"blocks of {SLOT - 2} bytes, slots of {SLOT}"):
        Packer(EngineBlocks(whole_layers(kv())[:-1], SLOT - 2), regions[0])
    askew = BlockPart(kv()[0].transpose(2, 3), 0, 3)
    with pytest.raises(ValueError, match="byte 3 of a slot: its elements of 2 bytes lie askew"):
        Packer(EngineBlocks([askew], SLOT), regions[0])
    Packer(EngineBlocks([BlockPart(kv()[0], 0, 3)], SLOT), regions[0])  # rows of bytes may lie anywhere


@pytest.mark.parametrize("slot_bytes", [SLOT])
def test_nothing_to_copy(regions: tuple[HostRegion, HostRegion]) -> None:
    before = regions[0].array.copy()
    blocks = Packer(EngineBlocks(two_groups(kv()), SLOT), regions[0])
    blocks.copy("store", pairs([], []))
    blocks.copy("store", pairs([3], [3], (1, 2)))  # the first group has no such layer
    assert np.array_equal(regions[0].array, before)
