"""The names of CuPy that `LayoutKernels` uses, over this CPU: g++ compiles the very source that CuPy would.

A prelude turns CUDA's built-ins into loops, so the kernels' index arithmetic and launch arguments run for real.
"""

import ctypes
import itertools
import math
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
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


@cache
def _library(source: str, name: str, options: tuple[str, ...]) -> ctypes.CDLL:
    """Compiled once in a process: it takes a second."""
    code = PRELUDE + source.replace('extern "C" __global__', "__global__") + MAIN.replace("NAME", name)
    compiler = ["g++", "-O1", "-fwrapv", "-fno-strict-aliasing", "-shared", "-fPIC", "-x", "c++", "-"]
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / f"{name}.so"
        subprocess.run([*compiler, *options, "-o", str(library)], input=code, text=True, check=True)
        return ctypes.CDLL(str(library))


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

    def __init__(self) -> None:
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
        return CpuKernel(getattr(_library(source, name, options), f"run_{name}"))


class LazyCupy(FakeCupy):
    """The same below an adversary's device: a launch is an op of the stream that it names."""

    def __init__(self, cuda: "LazyCuda") -> None:
        super().__init__()
        self.cuda_device = cuda

    def RawKernel(self, source: str, name: str, options: tuple[str, ...]) -> CpuKernel:
        return _LazyKernel(super().RawKernel(source, name, options), name, self)


class _LazyKernel(CpuKernel):
    """Knows which bytes a launch touches: in L1 the runs of each layer of a block, in a slot the layers one by one."""

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
        first, num_layers, *counts, run_units, count = numbers[9:]
        run = run_units * self.unit_bytes
        layer_bytes = math.prod(counts) * run
        layers = list((ctypes.c_uint64 * (first + num_layers)).from_address(bases))[first:]
        steps = [
            range(0, each * stride, stride) if stride else [0]
            for each, stride in zip(counts, numbers[6:9], strict=True)
        ]
        inner = [sum(step) for step in itertools.product(*steps)]
        starts = [layer + each * block_stride for each in _numbers_at(blocks, count) for layer in layers]
        own = np.add.outer(np.array(starts, np.int64), np.array(inner, np.int64)).ravel()
        kept = np.array([canonical + first * layer_bytes + each * slot_stride for each in _numbers_at(slots, count)])
        sides = [np.stack([at, at + size], 1) for at, size in ((own, run), (kept, num_layers * layer_bytes))]
        reads, writes = sides if self.name == "kv_gather" else reversed(sides)
        index = [(address, address + 8 * count) for address in (blocks, slots)]
        # torch's allocator gives the numbers' memory to later ops of the stream alone; here nobody would keep it
        numbers_held = [np.array(_numbers_at(address, count), np.int64) for address in (blocks, slots)]
        held = [arguments[0], *(np.uint64(each.ctypes.data) for each in numbers_held), *arguments[3:]]
        launch = super().__call__
        stream = streams[0] if streams else cuda.elsewhere
        what = f"{self.name} by {grid[0] * grid[1]} blocks"
        touched = np.concatenate([reads, index])
        cuda.issue(stream, what, touched, writes, lambda: (launch(grid, block, held), numbers_held))


def _numbers_at(address: int, count: int) -> list[int]:
    return list((ctypes.c_int64 * count).from_address(address))
