"""The names of CuPy that `LayoutKernels` uses, over this CPU: g++ compiles the very source that CuPy would.

A prelude turns CUDA's built-ins into loops, so the kernels' index arithmetic and launch arguments run for real.
"""

import ctypes
import subprocess
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from kvtier.tiers.copies.kernels import UNIT_TYPES

if TYPE_CHECKING:
    from lazy_cuda import LazyCuda

PRELUDE: Final = r"""
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct dim3 { unsigned x, y; };
static dim3 gridDim, blockDim, blockIdx, threadIdx;
#define __global__ static
"""
MAIN: Final = r"""
extern "C" void run_NAME(unsigned columns, unsigned rows, unsigned threads, void** a)
{
    gridDim = {columns, rows}; blockDim = {threads, 1};
    for (blockIdx.x = 0; blockIdx.x < columns; blockIdx.x++)
    for (blockIdx.y = 0; blockIdx.y < rows; blockIdx.y++)
    for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++)
        NAME(*(unsigned long long**)a[0], *(long long**)a[1], *(long long**)a[2], *(unsigned char**)a[3],
             *(long long*)a[4], *(long long*)a[5], *(long long*)a[6], *(long long*)a[7], *(long long*)a[8],
             *(unsigned*)a[9], *(unsigned*)a[10], *(unsigned*)a[11], *(unsigned*)a[12], *(unsigned*)a[13],
             *(unsigned*)a[14], *(unsigned*)a[15]);
}
"""


class CompileError(Exception):
    """CuPy's CompileException: no RuntimeError."""


class CpuKernel:
    """What a RawKernel is to its caller."""

    def __init__(self, run: Callable[..., None] | None) -> None:
        self.run = run

    def compile(self) -> None:
        """It was, when it was made; this fails where the test had the compiler fail."""
        if self.run is None:
            raise CompileError("nvrtc: error: invalid value for --gpu-architecture (-arch)")

    def __call__(self, grid: tuple[int, int], block: tuple[int], arguments: Sequence[np.generic]) -> None:
        values = [np.array(argument) for argument in arguments]  # passed by their own size, as CuPy does
        pointers = (ctypes.c_void_p * len(values))(*(value.ctypes.data for value in values))
        assert self.run is not None
        self.run(grid[0], grid[1], block[0], pointers)


class FakeCupy:
    """The names of CuPy that `LayoutKernels` uses, with kernels compiled for and run on this CPU."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.streams: list[int] = []
        self.options: list[tuple[str, ...]] = []
        self.compiled: dict[tuple[str, tuple[str, ...]], CpuKernel] = {}
        compiler = SimpleNamespace(CompileException=CompileError)
        self.cuda = SimpleNamespace(Stream=SimpleNamespace(from_external=self._stream), compiler=compiler)

    def _stream(self, stream: Any) -> nullcontext[None]:
        version, pointer = stream.__cuda_stream__()
        assert version == 0
        self.streams.append(pointer)
        return nullcontext()

    @staticmethod
    def asarray(array: NDArray[np.uint64], blocking: bool) -> Any:
        assert blocking
        return SimpleNamespace(data=SimpleNamespace(ptr=array.ctypes.data), array=array)

    def RawKernel(self, source: str, name: str, options: tuple[str, ...]) -> CpuKernel:
        self.options.append(options)
        if (kernel := self.compiled.get((name, options))) is None:
            kernel = self.compiled[name, options] = self._compile(source, name, options)
        return kernel

    def _compile(self, source: str, name: str, options: tuple[str, ...]) -> CpuKernel:
        library = self.folder / f"{name}{len(self.options)}.so"
        code = PRELUDE + source.replace('extern "C" __global__', "__global__") + MAIN.replace("NAME", name)
        compiler = ["g++", "-O1", "-fwrapv", "-fno-strict-aliasing", "-shared", "-fPIC", "-x", "c++", "-"]
        subprocess.run([*compiler, *options, "-o", str(library)], input=code, text=True, check=True)
        return CpuKernel(getattr(ctypes.CDLL(str(library)), f"run_{name}"))


class LazyCupy(FakeCupy):
    """The same below an adversary's device: a launch is an op of the stream that it names."""

    def __init__(self, folder: Path, cuda: "LazyCuda") -> None:
        super().__init__(folder)
        self.cuda_device = cuda

    def RawKernel(self, source: str, name: str, options: tuple[str, ...]) -> CpuKernel:
        return _LazyKernel(super().RawKernel(source, name, options), name, self)


class _LazyKernel(CpuKernel):
    """Knows which bytes a launch over our own L1 touches: a layer of a block is one run there."""

    def __init__(self, kernel: CpuKernel, name: str, cupy: LazyCupy) -> None:
        super().__init__(kernel.run)
        self.name = name
        self.cupy = cupy
        [self.unit_bytes] = [size for size, kind in UNIT_TYPES.items() if f"-DUNIT={kind}" in cupy.options[-1]]

    def __call__(self, grid: tuple[int, int], block: tuple[int], arguments: Sequence[np.generic]) -> None:
        cuda, pointer = self.cupy.cuda_device, self.cupy.streams[-1]
        streams = [stream for stream in cuda.streams.values() if stream.cuda_stream == pointer]
        if not streams:
            cuda.complaints.append(f"{self.name} was launched on stream {pointer}, which waits for nothing of ours")
        numbers = [int(argument) for argument in arguments]
        bases, blocks, slots, canonical, slot_stride, block_stride = numbers[:6]
        first, num_layers, *runs, run_units, count = numbers[9:]
        assert runs == [1, 1, 1], "a layout whose layers are several runs"
        layer_bytes = run_units * self.unit_bytes
        layers = list((ctypes.c_uint64 * (first + num_layers)).from_address(bases))[first:]
        own = [layer + each * block_stride for each in _numbers_at(blocks, count) for layer in layers]
        kept = [canonical + first * layer_bytes + each * slot_stride for each in _numbers_at(slots, count)]
        sides = [[(at, at + layer_bytes) for at in own], [(at, at + num_layers * layer_bytes) for at in kept]]
        reads, writes = sides if self.name == "kv_gather" else reversed(sides)
        index = [(address, address + 8 * count) for address in (blocks, slots)]
        launch, held = super().__call__, list(arguments)
        stream = streams[0] if streams else cuda.elsewhere
        what = f"{self.name} by {grid[0] * grid[1]} blocks"
        cuda.issue(stream, what, [*reads, *index], writes, lambda: launch(grid, block, held))


def _numbers_at(address: int, count: int) -> list[int]:
    return list((ctypes.c_int64 * count).from_address(address))
