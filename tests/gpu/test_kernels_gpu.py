"""Gather and scatter kernels on a device against the numpy reference on the host."""

from pathlib import Path

import numpy as np
import pytest
import torch
from device_rig import DeviceRig
from layout_reference import gather_reference, geometry_of, scatter_reference

from kvtier.tiers.copies.kernels import Canonical, LayoutKernels
from kvtier.tiers.naming.identity import KVLayout, KVShape

pytestmark = pytest.mark.filterwarnings("default")  # CuPy's and the driver's own

SHAPE = KVShape(num_layers=3, num_kv_heads=4, head_dim=64, block_size=16, dtype="bfloat16")
NUM_BLOCKS, NUM_SLOTS = 40, 50


def layout_of(layers: list[torch.Tensor], dims: str) -> KVLayout:
    strides = dict(zip(dims, (stride * 2 for stride in layers[0].stride()), strict=False))
    bases = [layer.data_ptr() for layer in layers]
    return KVLayout(bases, strides["b"], strides["k"], strides["t"], strides["h"])


@pytest.fixture(params=["bkth", "kbth", "bhtk", "kbht"])
def dims(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("layers", [None, (1, 3)])
def test_kernels_equal_the_reference(rig: DeviceRig, dims: str, layers: tuple[int, int] | None, tmp_path: Path) -> None:
    cupy, stream = rig.launcher(tmp_path)
    sizes = {"b": NUM_BLOCKS, "k": 2, "t": 16, "h": 4}
    torch.manual_seed(7)
    host = [torch.randn(*(sizes[dim] for dim in dims), 64).to(torch.bfloat16) for _ in range(3)]
    device = [rig.upload(layer) for layer in host]
    rng = np.random.default_rng(3)
    blocks, slots = rng.permutation(NUM_BLOCKS)[:17], rng.permutation(NUM_SLOTS)[:17]
    on_device = torch.from_numpy(np.stack((blocks, slots)).astype(np.int64)).to(rig.device)
    kernels = LayoutKernels(geometry_of(layout_of(device, dims), SHAPE), cupy)
    canonical = torch.zeros(NUM_SLOTS, SHAPE.block_bytes, dtype=torch.uint8, device=rig.device)
    target = Canonical(canonical.data_ptr(), SHAPE.block_bytes, layers)
    # gather: the slots hold what the reference reads on the host
    kernels.gather(on_device[0].data_ptr(), on_device[1].data_ptr(), 17, target, stream)
    expected = np.zeros((17, SHAPE.block_bytes), np.uint8)
    gather_reference(layout_of(host, dims), SHAPE, blocks, expected, layers)
    assert np.array_equal(canonical.cpu().numpy()[slots], expected)
    # scatter other bytes: every layer equals the reference's
    canonical.random_(0, 256)
    kernels.scatter(on_device[0].data_ptr(), on_device[1].data_ptr(), 17, target, stream)
    scatter_reference(layout_of(host, dims), SHAPE, blocks, canonical.cpu().numpy()[slots], layers)
    for mine, wanted in zip(device, host, strict=True):
        assert torch.equal(mine.cpu().view(torch.uint8), wanted.view(torch.uint8))
