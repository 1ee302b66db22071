"""One launch for all parts of many blocks, between an engine's memory and staging: where its parts are all alike."""

from collections.abc import Sequence
from typing import Any, Final, Self

import torch

from kvtier.tiers.copies.block_copier import CopyDirection
from kvtier.tiers.copies.engine_blocks import BlockPart
from kvtier.tiers.copies.kernels import Canonical, Geometry, LayoutKernels

# Blocks of threads of a launch: four for each processor of a large device. Both sides are the device's own memory, so
# 64 MiB take it a few hundredths of a millisecond; what starves a model's compute are kernels that wait for PCIe. On an
# H200 a decode step beside loads took 3.4 % longer on the device with 32, 2.1 to 2.3 % with 264 to 1,056.
_GRID: Final = 528


class PartKernels:
    """Gathers and scatters the parts of one group by kernel. Not thread-safe.

    A torch call for each part costs some 15 us of Python: 0.5 ms for 32 layers, however few blocks there are.
    """

    def __init__(self, parts: Sequence[BlockPart], geometry: Geometry, cupy: Any) -> None:
        """`parts` ascend in the slot. ImportError without CuPy."""
        self._offset = parts[0].offset
        self._numbers = {id(part): number for number, part in enumerate(parts)}
        self._kernels = LayoutKernels(geometry, cupy)
        self._kernels.grid = _GRID

    @classmethod
    def of(cls, parts: Sequence[BlockPart], cupy: Any = None) -> Self | None:
        """Kernels for these parts, compiled; None where one differs from another in more than its place.

        ImportError without CuPy; RuntimeError if its compiler or the driver refuses.
        """
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
    """The parts of a block as a kernel's layers; None if they are no such thing."""
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
