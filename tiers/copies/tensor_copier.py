"""Copies our own L1, block-first, on the current stream: neighbours merged, each batch the way that is best for it."""

import logging
from functools import cache
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from kvtier.tiers import install_command
from kvtier.tiers.copies.block_copier import BlockCopies, CopyDirection
from kvtier.tiers.copies.copy_ways import CopyWay, CopyWays
from kvtier.tiers.copies.device_errors import DEVICE_ERRORS
from kvtier.tiers.copies.direct_copies import DirectCopies, Run, pieces_of
from kvtier.tiers.copies.kernels import Canonical, Geometry, LayoutKernels
from kvtier.tiers.copies.packer import ends_of_runs
from kvtier.tiers.host import HostRegion

logger = logging.getLogger(__name__)

# Of a CuPy that is missing, broken, or for another driver.
NO_CUPY: Final = (ImportError, AttributeError, TypeError, ValueError, OSError, *DEVICE_ERRORS)
_SORTED: Final = 2048  # blocks of a copy, at most, among which neighbours are looked for out of order, too


class TensorCopier:
    """Copies our own L1, block-first: neighbours are merged, small pieces go by kernel if there is one.

    The others go by one call of the driver, or by one copy of torch's for each where the driver is older.
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        region: HostRegion,
        cupy: Any,
        direct: DirectCopies | None = None,
        ways: CopyWays | None = None,
    ) -> None:
        """ValueError if the tensor's blocks are not as large as the region's slots."""
        self.l1 = tensor.view(torch.uint8).view(tensor.shape[0], tensor.shape[1], -1)
        self.device = tensor.device
        self.num_blocks, self.num_layers, self._layer_bytes = self.l1.shape
        if self.num_layers * self._layer_bytes != region.slot_bytes:
            raise ValueError(f"blocks of {self.num_layers * self._layer_bytes} bytes, slots of {region.slot_bytes}")
        self._region = region
        self._direct = direct
        self._ways = ways or CopyWays()
        self._l2 = torch.from_numpy(region.array)
        self.kernels = self._compiled(cupy) if region.pinning is not None else None

    @property
    def ways(self) -> tuple[CopyWay, ...]:
        """Those there are on this machine."""
        batch: tuple[CopyWay, ...] = ("batch",) if self._direct is not None else ()
        return (*batch, *(("kernel",) if self.kernels is not None else ()), "torch")

    def copy(self, direction: CopyDirection, copies: BlockCopies, *, is_chained: bool = True) -> None:
        """Enqueue valid copies on the current stream. RuntimeError is the driver's.

        `is_chained`: what is read may still be on its way there, on a stream that this one waits for.
        """
        first, last = copies.layers or (0, self.num_layers)
        blocks, slots = copies.device_blocks, copies.host_slots
        if len(slots) <= _SORTED:
            order = np.argsort(slots)
            blocks, slots = blocks[order], slots[order]
        starts = self._runs(blocks, slots, last - first)
        if not len(starts):
            return
        num_bytes = len(blocks) * (last - first) * self._layer_bytes
        way = self._way(num_bytes / len(starts), slots)
        self._ways.count(way, num_bytes)
        if way == "batch" and self._direct is not None:
            start, stride = first * self._layer_bytes, self.num_layers * self._layer_bytes
            run = Run(self.l1.data_ptr() + start, stride, start, (last - first) * self._layer_bytes)
            pieces = pieces_of(direction, [run], blocks, slots, self._region)
            stream = torch.cuda.current_stream(self.device)
            self._direct.copy(direction, pieces, stream.cuda_stream, is_chained=is_chained)
            return
        if way == "kernel" and self.kernels is not None:
            indices = torch.from_numpy(np.stack((blocks, slots))).pin_memory().to(self.l1.device, non_blocking=True)
            canonical = self._canonical(copies.layers)
            self.kernels.grid = self._ways.choice.grid
            launch = self.kernels.scatter if direction == "load" else self.kernels.gather
            stream = torch.cuda.current_stream(self.device)
            launch(indices[0].data_ptr(), indices[1].data_ptr(), len(blocks), canonical, stream.cuda_stream)
            return
        span = slice(first * self._layer_bytes, last * self._layer_bytes)
        l1, l2 = self.l1.flatten(1)[:, span], self._l2[:, span]
        target, source, into, out_of = (l1, l2, blocks, slots) if direction == "load" else (l2, l1, slots, blocks)
        ends = np.append(starts[1:], len(blocks))
        for i, j, length in zip(into[starts].tolist(), out_of[starts].tolist(), (ends - starts).tolist(), strict=True):
            target[i : i + length].copy_(source[j : j + length], non_blocking=True)

    def _way(self, mean_bytes: float, slots: NDArray[np.int64]) -> CopyWay:
        if not self._region.is_pinned(slots):
            return "torch"
        has = self._direct is not None, self.kernels is not None
        return self._ways.choice.way(mean_bytes, has_batch=has[0], has_kernel=has[1])

    def _canonical(self, layers: tuple[int, int] | None = None) -> Canonical:
        return Canonical(self._region.address, self._region.slot_stride, layers)

    def _compiled(self, cupy: Any) -> LayoutKernels | None:
        """The kernels, compiled now rather than under the first copy; None: CuPy or its compiler is not there."""
        geometry = Geometry.block_first(self.l1.data_ptr(), self.num_layers, self._layer_bytes)
        try:
            with torch.cuda.device(self.l1.device):
                kernels = LayoutKernels(geometry, cupy)
                kernels.compile(self._canonical())
        except NO_CUPY as failure:
            say_what_is_lost(failure)
            return None
        return kernels

    def _runs(self, blocks: NDArray[np.int64], slots: NDArray[np.int64], num_layers: int) -> NDArray[np.int64]:
        """Where a new piece starts: whole blocks join if both sides go on without a gap, parts of blocks never."""
        whole = num_layers == self.num_layers and self._region.slot_stride == self._region.slot_bytes
        if not whole or not len(blocks):
            return np.arange(len(blocks))
        breaks = (np.diff(blocks) != 1) | ends_of_runs(slots, self._region)
        return np.flatnonzero(np.concatenate(([True], breaks)))


def say_what_is_lost(failure: Exception) -> None:
    """Warn that there are no kernels, since CuPy does not work."""
    _say_once(f"{type(failure).__name__}: {str(failure).strip().partition(chr(10))[0]}")


@cache
def _say_once(reason: str) -> None:
    """Once in a process: every stream finds the same."""
    extra = "cuda12" if (torch.version.cuda or "").startswith("12.") else "cuda13"
    logger.warning(
        "no copy kernels, so small or scattered blocks are copied more slowly: CuPy does not work here (%s);"
        " %s, or the one for this driver",
        reason,
        install_command(extra, "cupy"),
    )
