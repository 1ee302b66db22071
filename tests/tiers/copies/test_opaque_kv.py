"""Quantised KV is bytes to every way of copying: each pattern of bits, NaNs among them, comes back as it was."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from lazy_cuda import LazyCuda, LazyDriver, pin

from kvtier.tiers.copies import packer
from kvtier.tiers.copies.block_copier import BlockCopies, BlockPart, EngineBlocks
from kvtier.tiers.copies.cuda_transfer import CudaCopyStream
from kvtier.tiers.copies.transfer import CopyStream, HostCopyStream
from kvtier.tiers.host.host import HostRegion

BLOCKS, LAYERS, BLOCK = 6, 2, 512  # a layer's bytes in a block: every pattern of a byte twice, in K and in V
TYPES = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.uint8]  # the last has its scales inside
Make = Callable[[torch.Tensor], CopyStream]


@pytest.fixture
def region() -> Iterator[HostRegion]:
    region = HostRegion.allocate(BLOCKS, LAYERS * BLOCK)
    yield region
    region.close()


@pytest.fixture(params=["cpu", "cpu, in parts", "gpu", "gpu, in parts", "gpu, in batches"])
def make(
    request: pytest.FixtureRequest, region: HostRegion, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[torch.Tensor], CopyStream]]:
    """A stream between a region and `[layers, blocks, bytes]`, as an engine has it, or block-first, as ours has."""
    streams: list[CopyStream] = []
    cuda = LazyCuda(eager=0.1)
    on_gpu = request.param.startswith("gpu")
    if on_gpu:
        cuda.patch(monkeypatch)
        pin(region, cuda)
        monkeypatch.setattr(packer, "LayoutKernels", lambda *_: (_ for _ in ()).throw(ImportError("no cupy")))

    def made(tensor: torch.Tensor) -> CopyStream:
        l1: torch.Tensor | EngineBlocks = tensor
        if "parts" in request.param:
            parts = [BlockPart(layer.transpose(1, 2), number, number * BLOCK) for number, layer in enumerate(tensor)]
            l1 = EngineBlocks(parts, LAYERS * BLOCK)
        if on_gpu:
            driver = LazyDriver(cuda) if "batches" in request.param else None
            streams.append(CudaCopyStream(l1, region, driver=driver))  # type: ignore[arg-type]
        else:
            streams.append(HostCopyStream(l1, region))
        return streams[-1]

    made.in_parts = "parts" in request.param  # type: ignore[attr-defined]
    yield made
    for stream in streams:
        stream.close(60)
    cuda.finish()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_pattern_of_bits_comes_back(make: Make, region: HostRegion, dtype: torch.dtype) -> None:
    in_parts: bool = make.in_parts  # type: ignore[attr-defined]
    every = torch.arange(BLOCKS * LAYERS * BLOCK).mul(167).to(torch.uint8)
    shape = (LAYERS, BLOCKS, 16, BLOCK // 16) if in_parts else (BLOCKS, LAYERS, BLOCK)
    tensor = every.clone().view(dtype).view(shape)
    stream = make(tensor)
    copies = BlockCopies(np.arange(BLOCKS), np.array([3, 1, 4, 0, 5, 2]))
    stored = stream.store(copies)
    assert stored.wait(60)
    assert stored.error is None
    raw = every.view(shape)
    for block, slot in zip(copies.device_blocks.tolist(), copies.host_slots.tolist(), strict=True):
        own = raw[:, block].transpose(1, 2) if in_parts else raw[block]
        assert region.slot(slot).tobytes() == own.contiguous().numpy().tobytes()
    tensor.view(torch.uint8).fill_(0)
    loaded = stream.load(copies)
    assert loaded.wait(60)
    assert loaded.error is None
    assert torch.equal(tensor.view(torch.uint8), raw)
