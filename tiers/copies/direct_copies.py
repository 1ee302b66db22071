"""Copies pieces that are one run on both sides, in L1 and in its slot: all of a batch by one call of the driver."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtier.tiers.copies.block_copier import CopyDirection
from kvtier.tiers.host import HostRegion

if TYPE_CHECKING:
    from kvtier.tiers.host import CudaDriver


class Run(NamedTuple):
    """The same bytes of every block: one run in L1, one run in the slot."""

    address: int  # in L1, of block 0
    stride: int  # in L1, from block to block
    offset: int  # in the slot
    num_bytes: int


class DirectCopies:
    """Copies runs of blocks between L1 and pinned slots."""

    def __init__(self, driver: "CudaDriver", region: HostRegion) -> None:
        self._driver = driver
        self._region = region

    def copy(
        self,
        direction: CopyDirection,
        pieces: tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]],
        stream: int,
        *,
        is_chained: bool,
    ) -> None:
        """Enqueue what `pieces_of` told on a stream, by its driver's number. RuntimeError is the driver's.

        `is_chained`: what is read is there only when the stream comes to it. Slots that nobody fills any more may be
        read at once.
        """
        at_once = direction == "load" and not is_chained
        self._driver.copy(*pieces, stream, at_any_time=at_once)


def pieces_of(
    direction: CopyDirection, runs: Sequence[Run], blocks: NDArray[np.int64], slots: NDArray[np.int64],
    region: HostRegion,
) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]]:  # fmt: skip
    """Targets, sources and sizes of a batch's copies, ascending in the slots; what goes on on both sides is one piece.

    None reaches over the border of two pieces of pinned memory.
    """
    order = np.argsort(slots, kind="stable")
    blocks, slots = blocks[order][:, None], slots[order][:, None]
    table = np.array(runs, np.int64)
    table = table[np.argsort(table[:, 2], kind="stable")]
    address, stride, offset, size = table.T
    device = (address + blocks * stride).ravel()
    host = (region.address + slots * region.slot_stride + offset).ravel()
    sizes = np.broadcast_to(size, (len(slots), len(size))).ravel()
    joined = (device[1:] == device[:-1] + sizes[:-1]) & (host[1:] == host[:-1] + sizes[:-1])
    if region.pinning is not None:
        piece = np.repeat(slots.ravel() // region.pinning.slots_per_piece, len(size))
        joined &= piece[1:] == piece[:-1]
    starts = np.flatnonzero(np.concatenate(([True], ~joined)))
    device, host, sizes = (
        array.astype(np.uint64) for array in (device[starts], host[starts], np.add.reduceat(sizes, starts))
    )
    return (device, host, sizes) if direction == "load" else (host, device, sizes)


def rows_of(
    direction: CopyDirection, run: Run, slots: NDArray[np.int64], region: HostRegion
) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]]:
    """`pieces_of` blocks 0, 1, … whose only run is this one, a piece each: a fifth of the numpy calls."""
    device = (run.address + run.stride * np.arange(len(slots))).astype(np.uint64)
    host = (region.address + run.offset + region.slot_stride * slots).astype(np.uint64)
    sizes = np.full(len(slots), run.num_bytes, np.uint64)
    return (device, host, sizes) if direction == "load" else (host, device, sizes)
