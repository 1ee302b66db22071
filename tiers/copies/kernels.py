"""Copies between an engine's own KV layout and canonical blocks: one CUDA kernel each way.

A layout is data (`Geometry`), so one kernel serves vLLM's per-layer tensors in any dimension order as well as our own
block-first L1. CuPy compiles it at first use (NVRTC); nothing here needs CuPy to be imported.
"""

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
import torch

from kvtier.tiers.copies.copy_ways import DEFAULT
from kvtier.tiers.copies.transfer import BlockPart, CopyDirection

# The units of all (block, slot) pairs are one row. Each block of threads has an equal share of it, within one unit.
# Consecutive threads take consecutive units, so canonical accesses always coalesce, and layout accesses within a run.
# A thread reads several units before it writes the first: over PCIe a read takes more than a microsecond.
SOURCE: Final = r"""
#define KV_AHEAD 4
#define KV_KERNEL(NAME, COPY)                                                                                  \
extern "C" __global__ void NAME(                                                                               \
    const unsigned long long* bases, const long long* blocks, const long long* slots, unsigned char* canonical, \
    long long slot_stride, long long block_stride, long long kv_stride, long long token_stride,                \
    long long head_stride, unsigned first_layer, unsigned num_layers, unsigned num_kv, unsigned num_tokens,    \
    unsigned num_heads, unsigned run_units, unsigned num_pairs)                                                \
{                                                                                                              \
    const unsigned layer_units = num_kv * num_tokens * num_heads * run_units;                                  \
    const unsigned units = num_layers * layer_units;                                                           \
    const unsigned long long all = (unsigned long long)units * num_pairs;                                      \
    const unsigned start = (unsigned)(all * blockIdx.x / gridDim.x);                                           \
    const unsigned end = (unsigned)(all * (blockIdx.x + 1) / gridDim.x);                                       \
    for (unsigned first = start + threadIdx.x; first < end; first += KV_AHEAD * blockDim.x) {                  \
        UNIT held[KV_AHEAD];                                                                                   \
        UNIT* targets[KV_AHEAD];                                                                               \
        KV_UNROLL                                                                                              \
        for (unsigned k = 0; k < KV_AHEAD; k++) {                                                              \
            const unsigned i = first + k * blockDim.x;                                                         \
            if (i < end) {                                                                                     \
                const unsigned pair = i / units, u = i % units;                                                \
                UNIT* slot = (UNIT*)(canonical + slots[pair] * slot_stride) + (long long)first_layer * layer_units; \
                unsigned rest = u / run_units;                                                                 \
                const unsigned head = rest % num_heads; rest /= num_heads;                                     \
                const unsigned token = rest % num_tokens; rest /= num_tokens;                                  \
                const unsigned kv = rest % num_kv;                                                             \
                const unsigned layer = rest / num_kv;                                                          \
                UNIT* run = (UNIT*)(bases[first_layer + layer] + blocks[pair] * block_stride + kv * kv_stride  \
                                    + token * token_stride + head * head_stride);                              \
                COPY(slot[u], run[u % run_units]);                                                             \
            }                                                                                                  \
        }                                                                                                      \
        KV_UNROLL                                                                                              \
        for (unsigned k = 0; k < KV_AHEAD; k++)                                                                \
            if (first + k * blockDim.x < end) *targets[k] = held[k];                                           \
    }                                                                                                          \
}
#ifdef __CUDACC__
#define KV_UNROLL _Pragma("unroll")
#else
#define KV_UNROLL
#endif
#define KV_TAKE(canonical, own) held[k] = own, targets[k] = &(canonical)
#define KV_GIVE(canonical, own) held[k] = canonical, targets[k] = &(own)
KV_KERNEL(kv_gather, KV_TAKE)
KV_KERNEL(kv_scatter, KV_GIVE)
"""
UNIT_TYPES: Final = {16: "uint4", 8: "uint2", 4: "unsigned int", 2: "unsigned short", 1: "unsigned char"}
THREADS: Final = 512
_MOST_UNITS: Final = 1 << 31  # of a launch: the kernel counts in 32 bits


@dataclass(frozen=True, slots=True)
class Geometry:
    """A layout merged as far as it is contiguous: `num_kv × num_tokens × num_heads` runs a layer. All in bytes."""

    bases: tuple[int, ...]
    block_stride: int
    kv_stride: int
    token_stride: int
    head_stride: int
    num_kv: int
    num_tokens: int
    num_heads: int
    run_bytes: int

    @classmethod
    def block_first(cls, address: int, num_layers: int, layer_bytes: int) -> "Geometry":
        """Our own L1, `[num_blocks, num_layers, layer_bytes]` at an address."""
        bases = tuple(address + layer * layer_bytes for layer in range(num_layers))
        return cls(bases, num_layers * layer_bytes, 0, 0, 0, 1, 1, 1, layer_bytes)

    @property
    def layer_bytes(self) -> int:
        return self.num_kv * self.num_tokens * self.num_heads * self.run_bytes

    def unit_bytes(self, canonical: int, slot_stride: int) -> int:
        """The widest access (16 bytes at most) that every address of both sides allows."""
        strides = (self.block_stride, self.kv_stride, self.token_stride, self.head_stride)
        return math.gcd(16, self.run_bytes, canonical, slot_stride, *self.bases, *strides)


class LayoutKernels:
    """Enqueues gathers (layout → canonical) and scatters (canonical → layout) on a CUDA stream. Not thread-safe.

    Index arrays are device pointers to int64; canonical memory is an address that the device may use.
    """

    def __init__(self, geometry: Geometry, cupy: Any = None) -> None:
        """Upload the layers' addresses. Raises ImportError without CuPy."""
        self.geometry = geometry
        self.grid = DEFAULT.grid  # blocks of threads of a launch, at most
        self._cupy = cupy or importlib.import_module("cupy")
        # blocking: the launches run on another stream than CuPy's, and would not wait for the upload
        self._bases = self._cupy.asarray(np.array(geometry.bases, np.uint64), blocking=True)
        self._kernels: dict[tuple[str, int], Any] = {}
        self._known: dict[tuple[int, int, tuple[int, int] | None], tuple[int, int, tuple[np.generic, ...]]] = {}

    def compile(self, canonical: "Canonical") -> None:
        """Compile both kernels for such slots now, not at first use. RuntimeError if that fails."""
        unit = self.geometry.unit_bytes(canonical.address, canonical.slot_stride)
        try:
            for name in ("kv_gather", "kv_scatter"):
                self._kernel(name, unit).compile()
        except self._cupy.cuda.compiler.CompileException as failure:  # no RuntimeError, as CuPy's others are
            raise RuntimeError(str(failure)) from failure

    def gather(self, blocks: int, slots: int, count: int, canonical: "Canonical", stream: int) -> None:
        """Copy `count` blocks of the layout into canonical slots, in stream order."""
        self._launch("kv_gather", blocks, slots, count, canonical, stream)

    def scatter(self, blocks: int, slots: int, count: int, canonical: "Canonical", stream: int) -> None:
        """Copy `count` canonical slots into blocks of the layout, in stream order."""
        self._launch("kv_scatter", blocks, slots, count, canonical, stream)

    def _launch(self, name: str, blocks: int, slots: int, count: int, canonical: "Canonical", stream: int) -> None:
        unit, units, of_geometry = self._counts(canonical)
        per_launch = max(1, (_MOST_UNITS - 1) // units)
        for start in range(0, count, per_launch):
            pairs = min(per_launch, count - start)
            grid = min(self.grid, -(-pairs * units // THREADS))
            index = np.uint64(blocks + 8 * start), np.uint64(slots + 8 * start)  # int64 each
            addresses = np.uint64(self._bases.data.ptr), *index, np.uint64(canonical.address)
            with self._cupy.cuda.Stream.from_external(_StreamPointer(stream)):
                self._kernel(name, unit)((grid, 1), (THREADS,), (*addresses, *of_geometry, np.uint32(pairs)))

    def _counts(self, canonical: "Canonical") -> tuple[int, int, tuple[np.generic, ...]]:
        """Bytes of a unit, units of a block, a launch's fixed arguments: stored, as making them costs a launch."""
        kind = (canonical.address % 16, canonical.slot_stride, canonical.layers)
        if (known := self._known.get(kind)) is not None:
            return known
        geometry = self.geometry
        unit = geometry.unit_bytes(canonical.address, canonical.slot_stride)
        first, last = canonical.layers or (0, len(geometry.bases))
        units = (last - first) * geometry.layer_bytes // unit
        if units >= _MOST_UNITS:
            raise ValueError(f"{units} units of {unit} bytes per block: the kernel counts in 32 bits")
        arguments = (
            *(np.int64(canonical.slot_stride), np.int64(geometry.block_stride), np.int64(geometry.kv_stride)),
            *(np.int64(geometry.token_stride), np.int64(geometry.head_stride), np.uint32(first)),
            *(np.uint32(last - first), np.uint32(geometry.num_kv), np.uint32(geometry.num_tokens)),
            *(np.uint32(geometry.num_heads), np.uint32(geometry.run_bytes // unit)),
        )
        self._known[kind] = unit, units, arguments
        return self._known[kind]

    def _kernel(self, name: str, unit: int) -> Any:
        if (name, unit) not in self._kernels:
            options = (f"-DUNIT={UNIT_TYPES[unit]}",)
            self._kernels[name, unit] = self._cupy.RawKernel(SOURCE, name, options=options)
        return self._kernels[name, unit]


@dataclass(frozen=True, slots=True)
class Canonical:
    """Canonical blocks in memory: where slot 0 starts, bytes from slot to slot, which layers to copy (None: all)."""

    address: int
    slot_stride: int
    layers: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class _StreamPointer:
    """Another library's stream, in the form CuPy (14 and later) takes it."""

    pointer: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.pointer)  # version of the protocol, cudaStream_t


# Blocks of threads of a launch: four for each processor of a large device. Both sides are the device's own memory, so
# 64 MiB take it a few hundredths of a millisecond. Only kernels that wait for PCIe starve a model's compute. On an
# H200 a decode step beside loads took 3.4 % longer on the device with 32, 2.1 to 2.3 % with 264 to 1,056.
_GRID: Final = 528


class PartKernels:
    """Gathers and scatters a group's parts by kernel: a torch call for each costs 15 us of Python. Not thread-safe."""

    def __init__(self, parts: Sequence[BlockPart], geometry: Geometry, cupy: Any) -> None:
        """`parts` ascend in the slot. ImportError without CuPy."""
        self._offset = parts[0].offset
        self._numbers = {id(part): number for number, part in enumerate(parts)}
        self._kernels = LayoutKernels(geometry, cupy)
        self._kernels.grid = _GRID

    @classmethod
    def of(cls, parts: Sequence[BlockPart], cupy: Any = None) -> Self | None:
        """Compiled; None if parts differ in more than place. ImportError without CuPy; RuntimeError if that fails."""
        parts = sorted(parts, key=lambda part: part.offset)
        geometry = _geometry_of(parts)
        if geometry is None:
            return None
        made = cls(parts, geometry, cupy)
        with torch.cuda.device(parts[0].tensor.device):
            made._kernels.compile(Canonical(made._offset, geometry.unit_bytes(made._offset, 0)))
        return made

    def range_of(self, parts: Sequence[BlockPart]) -> "tuple[int, int] | None":
        """The half-open range of this group's parts that these are; None if they do not follow each other in a slot."""
        numbers = sorted(self._numbers.get(id(part), -1) for part in parts)
        if not numbers or numbers[0] < 0 or numbers[-1] - numbers[0] != len(numbers) - 1:
            return None
        return numbers[0], numbers[-1] + 1

    def launch(
        self, direction: CopyDirection, parts: tuple[int, int], index: torch.Tensor, start: int,
        staging: torch.Tensor, first: int,
    ) -> None:  # fmt: skip
        """Between blocks `index[0, start:]` and rows `index[1, start:]` of the staging, on the current stream.

        A row holds a slot's bytes from `first` on; `parts` is a range of this group's.
        """
        rows = Canonical(staging.data_ptr() + self._offset - first, staging.stride(0), parts)
        launch = self._kernels.scatter if direction == "load" else self._kernels.gather
        blocks, targets = (row[start:].data_ptr() for row in index)
        count = min(len(staging), index.shape[1] - start)
        launch(blocks, targets, count, rows, torch.cuda.current_stream(index.device).cuda_stream)


def _geometry_of(parts: Sequence[BlockPart]) -> Geometry | None:
    """The parts of a block as a kernel's layers; None if they differ too much."""
    first, num_bytes = parts[0], parts[0].num_bytes
    for number, part in enumerate(parts):
        if _form_of(part) != _form_of(first):
            return None
        if part.offset != first.offset + number * num_bytes:
            return None
    item, run = first.tensor.itemsize, first.tensor.itemsize
    sizes, strides = list(first.tensor.shape[1:]), [stride * item for stride in first.tensor.stride()[1:]]
    while sizes and (sizes[-1] == 1 or strides[-1] == run):
        run *= sizes.pop()
        strides.pop()
    outer = [(size, stride) for size, stride in zip(sizes, strides, strict=True) if size > 1]
    if len(outer) > 3:
        return None
    (kv, kv_stride), (tokens, token_stride), (heads, head_stride) = [(1, 0)] * (3 - len(outer)) + outer
    bases = tuple(part.tensor.data_ptr() for part in parts)
    block_stride = first.tensor.stride(0) * item
    return Geometry(bases, block_stride, kv_stride, token_stride, head_stride, kv, tokens, heads, run)


def _form_of(part: BlockPart) -> tuple[object, ...]:
    return part.tensor.shape[1:], part.tensor.stride(), part.tensor.itemsize
