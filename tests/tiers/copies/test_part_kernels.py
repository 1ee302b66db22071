"""Parts that are alike, packed by one kernel: the bytes are those that a call for each part copies."""

import shutil
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cpu_cupy import FakeCupy
from engine_layouts import dimension_first, keys_and_values, one_rank, tokens_first, whole_layers

from kvtier.tiers.copies.kernels import PartKernels
from kvtier.tiers.copies.packer import Packer
from kvtier.tiers.copies.transfer import BlockCopies, BlockPart, CopyDirection, EngineBlocks, PartCopier
from kvtier.tiers.host.host import HostRegion

BLOCKS, LAYERS, HEADS, TOKENS, DIM, SLOTS = 10, 4, 2, 8, 16, 16
PLANE = TOKENS * HEADS * DIM * 2  # keys or values of one layer in bfloat16
LAYER = 2 * PLANE
SLOT = LAYERS * LAYER + 64


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
    if shutil.which("g++") is None:
        pytest.skip("no g++ to run the kernel's source on this CPU")
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
    return FakeCupy()


def kv() -> list[torch.Tensor]:
    torch.manual_seed(1)
    shape = (BLOCKS, HEADS, TOKENS, 2 * DIM)
    return [torch.randint(-(2**15), 2**15, shape, dtype=torch.int16).view(torch.bfloat16) for _ in range(LAYERS)]


KINDS: dict[str, Callable[[list[torch.Tensor], int], list[BlockPart]]] = {  # each lies 32 bytes into its slot
    "one run": whole_layers,
    "tokens first": tokens_first,
    "every element by itself": dimension_first,
    "keys and values": keys_and_values,
    "a rank's heads": one_rank,
}


def parts_of(kind: str, tensors: list[torch.Tensor]) -> list[BlockPart]:
    return KINDS[kind](tensors, 32)


@pytest.mark.parametrize("direction", ["load", "store"])
@pytest.mark.parametrize("layers", [None, (1, 3)])
@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_are_those_of_a_call_for_each_part(
    kind: str, layers: tuple[int, int] | None, direction: CopyDirection, cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = kv(), kv()
    regions = [HostRegion.allocate(SLOTS, SLOT) for _ in range(2)]
    for region in regions:
        region.array[:] = np.random.default_rng(3).integers(0, 256, region.array.shape, np.uint8)
    monkeypatch.setattr("kvtier.tiers.copies.packer.STAGING_BYTES", 3 * (SLOT + 32))  # three batches
    packer = Packer(EngineBlocks(parts_of(kind, ours), SLOT), regions[0])
    packer._kernels = {0: PartKernels.of(packer._blocks.parts, cupy)}  # type: ignore[dict-item]
    copies = BlockCopies(np.array([8, 1, 5, 0, 3, 9, 2]), np.array([2, 14, 0, 7, 1, 9, 4]), layers)
    packer.copy(direction, copies)
    assert PartCopier(EngineBlocks(parts_of(kind, theirs), SLOT), regions[1]).copy(direction, copies) is None
    assert np.array_equal(regions[0].array, regions[1].array)  # and no byte beside them
    assert all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(ours, theirs, strict=True))
    assert set(cupy.streams) == {7}
    assert 0 < len(cupy.streams) <= 3  # a launch a batch, and not one for each of seven blocks
    for region in regions:
        region.close()


def test_parts_that_differ_have_no_kernel(cupy: FakeCupy) -> None:
    tensors = kv()
    alike = parts_of("one run", tensors)
    assert PartKernels.of(alike[::-1], cupy) is not None  # in whatever order they are named
    for other in (
        BlockPart(tensors[1][:, :1], 1, alike[1].offset),  # of other sizes
        BlockPart(tensors[1].transpose(1, 2).contiguous().transpose(1, 2), 1, alike[1].offset),  # of other strides
        BlockPart(tensors[1], 1, LAYERS * LAYER - 64),  # elsewhere
    ):
        assert PartKernels.of([alike[0], other], cupy) is None
    deep = [torch.zeros(2, 4, 4, 4, 4, 4)[..., ::2, ::2, ::2, ::2] for _ in range(2)]  # runs in four dimensions
    assert PartKernels.of([BlockPart(t, i, i * 64) for i, t in enumerate(deep)], cupy) is None


def test_only_parts_that_follow_each_other_are_covered(cupy: FakeCupy) -> None:
    parts = parts_of("one run", kv())
    kernels: Any = PartKernels.of(parts, cupy)
    assert kernels.range_of(parts[1:3]) == (1, 3)
    assert kernels.range_of(parts[2:0:-1]) == (1, 3)
    assert kernels.range_of([parts[0], parts[2]]) is None
    assert kernels.range_of([]) is None
    assert kernels.range_of([BlockPart(parts[0].tensor, 0, 0)]) is None  # another's
