"""Which blocks to copy between L1 and L2, and the copy itself: scattered to scattered, on the calling thread."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

import numpy as np
from numpy.typing import NDArray

from kvtier.tiers.copies.gil_watch import GilWatch
from kvtier.tiers.host import HostRegion, memory

if TYPE_CHECKING:
    import torch

CopyDirection = Literal["load", "store"]

CANCELLED: Final = "cancelled: the stream was closed"
_ALONE_FROM: Final = 128 << 10  # bytes from which a call of numpy for each block is a small part of its copy
_STAGING_BYTES: Final = 1 << 20  # of numpy's scattered copies: stays in the cache between the two passes


@dataclass(frozen=True, slots=True)
class BlockCopies:
    """Which L1 block pairs with which L2 slot, index by index; no block or slot may be the target of two pairs.

    `layers` is a half-open range of layers; None means all.
    """

    device_blocks: NDArray[np.int64]
    host_slots: NDArray[np.int64]
    layers: tuple[int, int] | None = None

    def __len__(self) -> int:
        return len(self.device_blocks)


class BlockCopier:
    """Copies blocks between L1 bytes `[num_blocks, num_layers, layer_bytes]` and a region, on the calling thread."""

    def __init__(self, device: "torch.Tensor | NDArray[np.generic]", region: HostRegion) -> None:
        """`device` is L1, C-contiguous `[num_blocks, num_layers, …]`.

        ValueError if its blocks are not as large as the region's slots.
        """
        self._device = block_bytes_view(device)
        self._region = region
        self._rows_of_device = self._device.reshape(len(self._device), -1)
        self._copy_blocks = memory.compiled_blocks_copy()
        self._owner = device  # the view is by address and keeps nothing alive
        self._gil = GilWatch()
        self.num_blocks, self.num_layers, self.layer_bytes = self._device.shape
        if self.num_layers * self.layer_bytes != region.slot_bytes:
            raise ValueError(f"blocks of {self.num_layers * self.layer_bytes} bytes, slots of {region.slot_bytes}")

    def invalid(self, copies: BlockCopies) -> str | None:
        """Why the copies may not be made: an index or a layer outside its tier."""
        return invalid_copies(copies, self.num_blocks, self.num_layers, self._region.num_slots)

    def copy(self, direction: CopyDirection, copies: BlockCopies, cancelled: Callable[[], bool] = bool) -> str | None:
        """Copy now. Returns why it failed, or None. `cancelled` is called before every 32 MiB."""
        blocks, slots, num_layers = copies.device_blocks, copies.host_slots, self.num_layers
        first, last = copies.layers or (0, num_layers)
        offset, length, copy_blocks = first * self.layer_bytes, (last - first) * self.layer_bytes, self._copy_blocks
        is_short = len(blocks) * length <= memory.COPY_PIECE
        if not (copy_blocks is not None and is_short and 0 <= first < last <= num_layers):
            return self._copy_in_pieces(direction, copies, (offset, length), cancelled)
        if cancelled():
            return CANCELLED
        try:
            copy_blocks(self._rows_of_device, blocks, self._region.array, slots, offset, length, direction == "load")
        except (IndexError, ValueError) as failure:
            return self.invalid(copies) or str(failure)
        return None

    def _copy_in_pieces(
        self, direction: CopyDirection, copies: BlockCopies, span: tuple[int, int], cancelled: Callable[[], bool]
    ) -> str | None:
        """Up to 32 MiB at a time; `span` is first byte and length in each block. Invalid copies are not begun."""
        blocks, slots = copies.device_blocks, copies.host_slots
        if (error := self.invalid(copies)) or not len(blocks):
            return error
        copy_blocks, (offset, length) = self._copy_blocks, span
        most = memory.COPY_PIECE // length if copy_blocks is not None else memory.pieces_per_call(length)
        for start in range(0, len(blocks), per_call := max(1, most)):
            if cancelled():
                return CANCELLED
            some, where = blocks[start : start + per_call], slots[start : start + per_call]
            try:
                if copy_blocks is None:
                    self._copy_some(direction, some, where, span)
                else:
                    copy_blocks(
                        self._rows_of_device, some, self._region.array, where, offset, length, direction == "load"
                    )
            except (OSError, IndexError, ValueError) as failure:
                return str(failure)
        return None

    def _copy_some(
        self, direction: CopyDirection, blocks: NDArray[np.int64], slots: NDArray[np.int64], span: tuple[int, int]
    ) -> None:
        """By the fastest way there is now without a compiled one."""
        length = span[1]
        if length == self._region.slot_stride and self._copy_whole_run(direction, blocks, slots):
            return
        num_copied = self._copy_each(direction, blocks, slots, span) if length >= _ALONE_FROM else 0
        if num_copied < len(blocks):
            copy = self._copy_addresses if memory.can_copy_scattered() else self._copy_staged
            copy(direction, blocks[num_copied:], slots[num_copied:], span)

    def _copy_each(
        self, direction: CopyDirection, blocks: NDArray[np.int64], slots: NDArray[np.int64], span: tuple[int, int]
    ) -> int:
        """Block by block, while nobody else wants the GIL: 5 to 15 % faster then. Returns how many were copied."""
        target, source = self._rows(direction, span)
        into, out_of = (blocks, slots) if direction == "load" else (slots, blocks)
        targets, sources = into.tolist(), out_of.tolist()
        return self._gil.copy_each(lambda i: np.copyto(target[targets[i]], source[sources[i]]), len(targets), span[1])

    def _rows(self, direction: CopyDirection, span: tuple[int, int]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """These bytes of every target and of every source, one to a row."""
        offset, length = span
        device = self._device.reshape(self.num_blocks, -1)[:, offset : offset + length]
        host = self._region.array[:, offset : offset + length]
        return (device, host) if direction == "load" else (host, device)

    def _copy_addresses(
        self, direction: CopyDirection, blocks: NDArray[np.int64], slots: NDArray[np.int64], span: tuple[int, int]
    ) -> None:
        """Scattered to scattered in one pass and one release of the GIL, neighbours merged."""
        offset, length = span
        order = np.argsort(blocks if direction == "load" else slots)  # ascending targets: 5 % faster, and runs merge
        blocks, slots = blocks[order], slots[order]
        device = self._device.ctypes.data + offset + blocks * self._device.strides[0]
        host = self._region.address + offset + slots * self._region.slot_stride
        targets, sources = (device, host) if direction == "load" else (host, device)
        joined = (np.diff(targets) == length) & (np.diff(sources) == length)
        starts = np.flatnonzero(np.concatenate(([True], ~joined)))
        lengths = np.diff(np.append(starts, len(blocks))) * length
        # L1 may be any tensor, but the slots are on huge pages wherever the kernel has some.
        memory.copy_pieces(targets[starts], sources[starts], lengths, lookup_targets=direction == "store")

    def _copy_whole_run(self, direction: CopyDirection, blocks: NDArray[np.int64], slots: NDArray[np.int64]) -> bool:
        """Whole rows of which one side is a run: numpy is then a tenth faster below 1 MiB. False: not such a batch."""
        device, host = self._device.reshape(self.num_blocks, -1), self._region.array
        target, source = (device, host) if direction == "load" else (host, device)
        into, out_of = (blocks, slots) if direction == "load" else (slots, blocks)
        count = len(into)
        if _is_run(into):
            np.take(source, out_of, axis=0, out=target[into[0] : into[0] + count], mode="clip")  # "raise" would buffer
            return True
        if _is_run(out_of):
            target[into] = source[out_of[0] : out_of[0] + count]
            return True
        return False

    def _copy_staged(
        self, direction: CopyDirection, blocks: NDArray[np.int64], slots: NDArray[np.int64], span: tuple[int, int]
    ) -> None:
        """Two numpy passes through a cache-sized buffer, if the system call is forbidden."""
        target, source = self._rows(direction, span)
        into, out_of = (blocks, slots) if direction == "load" else (slots, blocks)
        step = max(1, _STAGING_BYTES // span[1])
        for start in range(0, len(into), step):
            target[into[start : start + step]] = source[out_of[start : start + step]]


def invalid_copies(copies: BlockCopies, num_blocks: int, num_layers: int, num_slots: int) -> str | None:
    """Why the copies may not be made between tiers of that size; None if they may."""
    blocks, slots = copies.device_blocks, copies.host_slots
    if blocks.ndim != 1 or blocks.shape != slots.shape:
        return f"{blocks.shape} device blocks for {slots.shape} host slots"
    first, last = copies.layers or (0, num_layers)
    if not 0 <= first < last <= num_layers:
        return f"layers {first}..{last}: L1 has {num_layers}"
    for name, index, limit in (
        ("L1 block", copies.device_blocks, num_blocks),
        ("L2 slot", copies.host_slots, num_slots),
    ):
        if len(index) and (index.min() < 0 or index.max() >= limit):
            return f"{name} outside 0..{limit - 1}: {index.min()}..{index.max()}"
    return None


def _is_run(index: NDArray[np.int64]) -> bool:
    """Whether each is the one before it and one."""
    return bool(index[-1] - index[0] == len(index) - 1) and bool((np.diff(index) == 1).all())


def block_bytes_view(device: "torch.Tensor | NDArray[np.generic]") -> NDArray[np.uint8]:
    """L1 `[num_blocks, num_layers, …]`, C-contiguous in host memory, as bytes `[num_blocks, num_layers, layer_bytes]`.

    A torch tensor is viewed by address, whatever its dtype (numpy has no bfloat16) and without importing torch; the
    caller keeps it alive.
    """
    num_blocks, num_layers = device.shape[:2]
    if isinstance(device, np.ndarray):
        if not device.flags.c_contiguous:
            raise ValueError("L1 must be C-contiguous")
        return device.reshape(num_blocks, num_layers, -1).view(np.uint8)
    if device.device.type != "cpu" or not device.is_contiguous():
        raise ValueError(f"L1 must be contiguous in host memory, not on {device.device}")
    return memory.bytes_at(device.data_ptr(), device.nbytes).reshape(num_blocks, num_layers, -1)
