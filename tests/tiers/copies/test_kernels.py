"""Layout kernels: the numpy reference, and the CUDA source run on a CPU as C++.

g++ compiles the very source CuPy would, with a prelude that turns CUDA's built-ins into loops: the kernel's index
arithmetic and the launch arguments are checked for real, without a device.
"""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from cpu_cupy import CpuKernel, FakeCupy
from layout_reference import gather_reference, geometry_of, scatter_reference
from lazy_cuda import LazyCuda, pin
from numpy.typing import NDArray

from kvtier.tiers.copies import packer
from kvtier.tiers.copies.cuda_transfer import CudaCopyStream
from kvtier.tiers.copies.kernels import Canonical, Geometry, LayoutKernels
from kvtier.tiers.copies.transfer import BlockCopies
from kvtier.tiers.host.host import HostRegion
from kvtier.tiers.naming.identity import KVLayout, KVShape

SHAPE = KVShape(num_layers=3, num_kv_heads=2, head_dim=12, block_size=4, dtype="bfloat16")
NUM_BLOCKS = 6
HEAD_BYTES = 24


@pytest.fixture
def cupy(tmp_path: Path) -> FakeCupy:
    if shutil.which("g++") is None:
        pytest.skip("no g++ to run the kernel's source on this CPU")
    return FakeCupy()


class Memory:
    """Per-layer tensors of an engine, `dims` naming their order: b(lock), k(v), t(oken), h(ead)."""

    def __init__(self, dims: str, padding: int = 0) -> None:
        sizes = {"b": NUM_BLOCKS, "k": 2, "t": SHAPE.block_size, "h": SHAPE.num_kv_heads}
        shape = [*(sizes[dim] for dim in dims), HEAD_BYTES + padding]
        rng = np.random.default_rng(3)
        self.layers = [rng.integers(0, 256, shape, np.uint8) for _ in range(SHAPE.num_layers)]
        strides = dict(zip(dims, self.layers[0].strides, strict=False))
        self.dims, self.padding = dims, padding
        addresses = tuple(layer.ctypes.data for layer in self.layers)
        self.layout = KVLayout(addresses, strides["b"], strides["k"], strides["t"], strides["h"])

    def block(self, index: int) -> NDArray[np.uint8]:
        """The canonical bytes of one block, by plain transposition."""
        order = [self.dims.index(dim) for dim in "bkth"]
        parts = [layer.transpose(*order, 4)[index, ..., :HEAD_BYTES].reshape(-1) for layer in self.layers]
        return np.concatenate(parts)


# vLLM with flash attention, with K and V outermost, on a CPU (K and V side by side in a head), our own, and padded
LAYOUTS = [("bkth", 0), ("kbth", 0), ("bhtk", 0), ("kbht", 0), ("bthk", 0), ("bkth", 8), ("bkth", 1)]


@pytest.fixture(params=LAYOUTS, ids=lambda param: f"{param[0]}+{param[1]}")
def engine(request: pytest.FixtureRequest) -> Memory:
    return Memory(*request.param)


def test_gather_makes_canonical_blocks(engine: Memory, cupy: FakeCupy) -> None:
    blocks, slots = np.array([5, 0, 2], np.int64), np.array([1, 3, 0], np.int64)
    stride = SHAPE.block_bytes + 64
    canonical = np.zeros((5, stride), np.uint8)
    kernels = LayoutKernels(geometry_of(engine.layout, SHAPE), cupy)
    kernels.gather(blocks.ctypes.data, slots.ctypes.data, 3, Canonical(canonical.ctypes.data, stride), 77)
    expected = np.zeros_like(canonical)
    expected[slots, : SHAPE.block_bytes] = [engine.block(block) for block in blocks]
    assert np.array_equal(canonical, expected)  # padding and other slots untouched
    assert cupy.streams == [77]


@pytest.mark.parametrize("layers", [None, (1, 3), (0, 1)])
def test_scatter_equals_the_reference(engine: Memory, cupy: FakeCupy, layers: tuple[int, int] | None) -> None:
    blocks, slots = np.array([4, 1], np.int64), np.array([0, 2], np.int64)
    canonical = np.random.default_rng(9).integers(0, 256, (3, SHAPE.block_bytes), np.uint8)
    before = [layer.copy() for layer in engine.layers]
    scatter_reference(engine.layout, SHAPE, blocks, canonical[slots], layers)
    expected = [layer.copy() for layer in engine.layers]
    for layer, original in zip(engine.layers, before, strict=True):
        layer[:] = original
    kernels = LayoutKernels(geometry_of(engine.layout, SHAPE), cupy)
    target = Canonical(canonical.ctypes.data, SHAPE.block_bytes, layers)
    kernels.scatter(blocks.ctypes.data, slots.ctypes.data, 2, target, 0)
    for number, (layer, wanted, original) in enumerate(zip(engine.layers, expected, before, strict=True)):
        assert np.array_equal(layer, wanted)
        assert np.array_equal(layer, original) == (number not in range(*(layers or (0, 3))))


def test_block_first_l1_is_one_run_per_layer(cupy: FakeCupy) -> None:
    l1 = np.random.default_rng(4).integers(0, 256, (NUM_BLOCKS, 3, 4096), np.uint8)
    canonical = np.zeros((4, 3 * 4096), np.uint8)
    geometry = Geometry.block_first(l1.ctypes.data, 3, 4096)
    blocks, slots = np.array([2, 5], np.int64), np.array([3, 1], np.int64)
    kernels = LayoutKernels(geometry, cupy)
    kernels.gather(blocks.ctypes.data, slots.ctypes.data, 2, Canonical(canonical.ctypes.data, 3 * 4096, (1, 2)), 0)
    assert np.array_equal(canonical[slots, 4096:8192], l1[blocks, 1])
    assert not canonical[:, :4096].any()
    assert not canonical[:, 8192:].any()


def test_contiguous_dimensions_merge_into_runs() -> None:
    merged = {dims: geometry_of(Memory(dims, padding).layout, SHAPE).run_bytes for dims, padding in LAYOUTS[:4]}
    layer_bytes = SHAPE.layer_bytes
    assert merged == {"bkth": layer_bytes, "kbth": layer_bytes // 2, "bhtk": HEAD_BYTES, "kbht": HEAD_BYTES}
    assert geometry_of(Memory("bkth", 8).layout, SHAPE).run_bytes == HEAD_BYTES  # padding keeps heads apart


@pytest.mark.parametrize(("offset", "unit"), [(0, 16), (8, 8), (4, 4), (2, 2), (1, 1)])
def test_the_unit_is_the_widest_every_address_allows(offset: int, unit: int) -> None:
    assert Geometry.block_first(4096, 2, 4096).unit_bytes(8192 + offset, 4096) == unit
    assert Geometry.block_first(4096 + offset, 2, 4096).unit_bytes(8192, 4096) == unit


def test_kernels_are_compiled_once_and_empty_batches_not_launched(cupy: FakeCupy) -> None:
    l1, canonical, index = np.zeros((2, 1, 64), np.uint8), np.zeros((2, 64), np.uint8), np.zeros(1, np.int64)
    kernels = LayoutKernels(Geometry.block_first(l1.ctypes.data, 1, 64), cupy)
    target = Canonical(canonical.ctypes.data, 64)
    kernels.gather(index.ctypes.data, index.ctypes.data, 0, target, 0)
    assert not cupy.options
    for _ in range(2):
        kernels.gather(index.ctypes.data, index.ctypes.data, 1, target, 0)
    assert cupy.options == [("-DUNIT=uint4",)]


def test_kernels_can_be_compiled_before_their_first_launch(cupy: FakeCupy) -> None:
    kernels = LayoutKernels(Geometry.block_first(4096, 1, 24), cupy)
    kernels.compile(Canonical(8192, 4096))
    assert cupy.options == [("-DUNIT=uint2",)] * 2  # both directions


def test_a_compiler_that_fails_is_an_error_like_the_drivers(cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cupy, "RawKernel", lambda source, name, options: CpuKernel(None))
    with pytest.raises(RuntimeError, match="nvrtc"):
        LayoutKernels(Geometry.block_first(4096, 1, 24), cupy).compile(Canonical(8192, 4096))


def test_a_block_too_large_for_32_bits_is_refused(cupy: FakeCupy) -> None:
    kernels = LayoutKernels(Geometry.block_first(0, 1 << 16, 1 << 20), cupy)
    with pytest.raises(ValueError, match="32 bits"):
        kernels.gather(0, 0, 1, Canonical(0, 1 << 36), 0)


def test_a_latent_is_there_once_not_as_keys_and_values() -> None:
    """MLA: num_kv is 1, whatever the stride between K and V would be."""
    shape = KVShape(num_layers=2, num_kv_heads=1, head_dim=6, block_size=4, dtype="float32", num_kv=1)
    assert shape.block_shape == (2, 1, 4, 1, 6)
    assert shape.block_bytes == 2 * 4 * 6 * 4
    pool = np.random.default_rng(0).integers(0, 256, (2, 5, 4, 24), dtype=np.uint8)  # [layers, blocks, tokens, bytes]
    layout = KVLayout([pool[layer].ctypes.data for layer in range(2)], pool.strides[1], 0, pool.strides[2], 24)
    assert geometry_of(layout, shape).run_bytes == shape.layer_bytes
    slots = np.zeros((2, shape.block_bytes), np.uint8)
    gather_reference(layout, shape, [3, 1], slots)
    assert np.array_equal(slots[0], pool[:, 3].reshape(-1))
    assert np.array_equal(slots[1], pool[:, 1].reshape(-1))
    with pytest.raises(ValueError, match="num_kv 0: must be at least 1"):
        KVShape(2, 1, 6, 4, "float32", num_kv=0)


# Without CuPy, or with one that does not fit, copies go on without its kernels, and one line says what is lost.


OLD_DRIVER = "CUDA driver version is insufficient for CUDA runtime version"
CUPIES = {  # what its file holds, and what the log says
    "missing": (None, "ModuleNotFoundError: "),
    "without its libraries": (
        "raise ImportError('''\n=====\nFailed to import CuPy.\nOriginal error: libcublas.so.13\n''')",
        "ImportError: =====",
    ),
    "of another NumPy": ("raise AttributeError('numpy.core')", "AttributeError: numpy.core"),
    "of a newer driver": (
        f"class CUDARuntimeError(RuntimeError): ...\ndef asarray(*_, **__): raise CUDARuntimeError('{OLD_DRIVER}')",
        f"CUDARuntimeError: {OLD_DRIVER}",
    ),
    "too old": ("def asarray(array): return array", "TypeError: "),
    "without a compiler": (
        """
class asarray:
    def __init__(self, array, blocking): pass
class CompileException(Exception): ...
class cuda:
    class compiler: CompileException = CompileException
class RawKernel:
    def __init__(self, *_, **__): pass
    def compile(self): raise CompileException('nvrtc: invalid value for --gpu-architecture')
""",
        "RuntimeError: nvrtc: invalid value",
    ),
}


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    packer._say_once.cache_clear()
    yield
    packer._say_once.cache_clear()


@pytest.mark.parametrize("case", CUPIES)
def test_copies_go_on_without_it_and_the_log_says_so_once(
    said: None, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source, expected = CUPIES[case]
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    if source is None:
        monkeypatch.setitem(sys.modules, "cupy", None)
    else:
        (tmp_path / "cupy.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
    cuda = LazyCuda()
    cuda.patch(monkeypatch)
    region = HostRegion.allocate(8, 4096)
    pin(region, cuda)
    for turn in range(2):  # as behind a daemon's restart
        l1 = torch.randint(0, 256, (8, 2, 2048), dtype=torch.uint8)
        before = l1.clone()
        stream = CudaCopyStream(l1, region)
        copies = BlockCopies(np.arange(8), np.array([3, 1, 4, 0, 5, 7, 2, 6]))
        stored = stream.store(copies)
        assert stored.wait(60)
        l1.fill_(turn)
        loaded = stream.load(copies)
        assert loaded.wait(60)
        assert (stored.error, loaded.error) == (None, None)
        assert torch.equal(l1, before)
        stream.close(60)
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    cuda.finish()
    region.close()
    [line] = [record.getMessage() for record in caplog.records if "CuPy" in record.getMessage()]
    assert "\n" not in line
    assert f"small or scattered blocks are copied more slowly: CuPy does not work here ({expected}" in line
    assert "pip install 'cupy-cuda13x>=14', or the one for this driver" in line
