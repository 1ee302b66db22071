"""Copies on the current stream: an engine's blocks through staging laid out like slots, our own L1 block-first."""

import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvtier.tiers import install_command
from kvtier.tiers.copies.copy_ways import CopyWay, CopyWays
from kvtier.tiers.copies.kernels import Canonical, Geometry, LayoutKernels, PartKernels
from kvtier.tiers.copies.transfer import (
    DEVICE_ERRORS,
    BlockCopies,
    BlockPart,
    CopyDirection,
    EngineBlocks,
    is_out_of_memory,
)
from kvtier.tiers.host import CudaDriver, HostRegion

logger = logging.getLogger(__name__)


class Run(NamedTuple):
    """The same bytes of every block: one run in L1, one run in the slot."""

    address: int  # in L1, of block 0
    stride: int  # in L1, from block to block
    offset: int  # in the slot
    num_bytes: int


def pieces_of(
    direction: CopyDirection, runs: Sequence[Run], blocks: NDArray[np.int64], slots: NDArray[np.int64],
    region: HostRegion,
) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]]:  # fmt: skip
    """Targets, sources and sizes of a batch's copies, ascending in the slots; bytes adjacent on both sides are one.

    No piece crosses the border of two pieces of pinned memory.
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


_Pieces = tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]]
"""Targets, sources and sizes of copies."""


def _by_driver(
    driver: CudaDriver, device: torch.device, direction: CopyDirection, is_chained: bool, pieces: _Pieces
) -> None:
    """One batch on the current stream. Slots that are filled already may be read at once."""
    stream = torch.cuda.current_stream(device).cuda_stream
    driver.copy(*pieces, stream, at_any_time=direction == "load" and not is_chained)


STAGING_BYTES: Final = 64 << 20  # for each direction; more bytes go in batches of this size
_UNITS: Final = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_ALIGNMENT: Final = 8  # bytes: the largest unit of a torch call
_ROW_ALIGNMENT: Final = 16  # bytes: the largest of a kernel

ByteRange = tuple[int, int]  # of bytes in a slot, half-open
_Repack = Callable[[CopyDirection, int, torch.Tensor, int], None]
"""Moves data between blocks, from a position on, and staging, whose rows hold a slot's bytes from a first one on."""


class Packer:
    """Gathers the parts of many blocks into staging on their device, and copies from there to slots; or the other way.

    Equal parts take one kernel for all of them, others of any strides one call each, and slots few large copies.
    Bytes of a slot outside the requested parts (another rank's, other layers') are neither written nor read. Nothing
    here waits: the current stream alone orders the use of the staging, so the calls of one direction belong on one
    stream.
    """

    def __init__(
        self,
        blocks: EngineBlocks,
        region: HostRegion,
        driver: CudaDriver | None = None,
        ways: CopyWays | None = None,
        kernels: Mapping[int, PartKernels] | None = None,
    ) -> None:
        """With a `driver` that copies in batches, parts that are one run in L1 go without staging, if `ways` says so.

        `kernels`, by group: they gather and scatter the parts of that group at once.

        ValueError if the blocks are not as large as the region's slots, or a part's elements lie askew in a slot."""
        if blocks.slot_bytes != region.slot_bytes:
            raise ValueError(f"blocks of {blocks.slot_bytes} bytes, slots of {region.slot_bytes}")
        self.device = blocks.device
        self.num_blocks, self.num_layers = blocks.num_blocks, blocks.num_layers
        self._blocks = blocks
        self._region = region
        self._slots = torch.from_numpy(region.array)
        self._parts = {id(part): _IntegerPart(part) for part in blocks.parts}
        self._driver = driver  # None: without batched copies
        self._ways = ways or CopyWays()
        self._kernels = kernels or {}
        self.ways: tuple[CopyWay, ...] = ("staging",) if driver is None else ("batch", "staging")
        self._runs = {id(part): run for part in blocks.parts if (run := _run_of(part)) is not None}
        self._mean_runs: dict[tuple[int, tuple[int, int] | None], float] = {}
        self._selections: dict[tuple[tuple[int, ...], tuple[int, int] | None, frozenset[int]], _Selection] = {}
        self._staging: dict[CopyDirection, torch.Tensor] = {}
        # bytes to request: never more than all slots at once take
        most = min(STAGING_BYTES, region.num_slots * self._least_staging)
        self._to_stage = dict.fromkeys(("load", "store"), max(most, self._least_staging))
        self.counts: Counter[str] = Counter()  # events since the device had no memory

    def copy(self, direction: CopyDirection, copies: BlockCopies, *, is_chained: bool = True) -> None:
        """Enqueue valid copies; RuntimeError of the driver. `is_chained`: earlier copies may still write the source."""
        made = self._copy_runs(direction, copies, is_chained) if self._driver is not None else frozenset[int]()
        with torch.inference_mode():  # an engine's tensors may have been made in it; then only it may write to them
            for slots, blocks in _by_slot(self._blocks, copies):
                selection = self._select(tuple(blocks), copies.layers, made)
                if selection.parts:
                    self._copy(direction, slots, selection, blocks, is_chained=is_chained)
                    self._ways.count("staging", len(slots) * selection.num_bytes)

    def _select(self, groups: tuple[int, ...], layers: tuple[int, int] | None, made: frozenset[int]) -> "_Selection":
        """These groups' and layers' parts without the runs of `made`. Cached: picking takes as long as launching."""
        if (known := self._selections.get((groups, layers, made))) is not None:
            return known
        parts = [
            (self._parts[id(part)], group)
            for group in groups
            for part in self._blocks.select(group, layers)
            if group not in made or id(part) not in self._runs
        ]
        kernels = self._kernels.get(groups[0]) if len(groups) == 1 else None
        self._selections[groups, layers, made] = _Selection(parts, kernels)
        return self._selections[groups, layers, made]

    def _copy_runs(self, direction: CopyDirection, copies: BlockCopies, is_chained: bool) -> frozenset[int]:
        """Copy the parts that are one run each by one call of the driver, if that is fast. Returns their groups."""
        assert self._driver is not None
        if not len(copies) or not self._region.is_pinned(copies.host_slots):
            return frozenset()
        made, batches = set[int](), []
        for group, blocks, slots in self._blocks.by_group(copies):
            if not self._ways.choice.is_batched(self._mean_run(group, copies.layers)):
                continue
            parts = [part for part in self._blocks.select(group, copies.layers) if id(part) in self._runs]
            made.add(group)
            runs = [self._runs[id(part)] for part in parts]
            batches.append(pieces_of(direction, runs, blocks, slots, self._region))
        if batches:
            targets, sources, sizes = (np.concatenate(columns) for columns in zip(*batches, strict=True))
            _by_driver(self._driver, self.device, direction, is_chained, (targets, sources, sizes))
            self._ways.count("batch", int(sizes.sum()))
        return frozenset(made)

    def _mean_run(self, group: int, layers: tuple[int, int] | None) -> float:
        """Mean bytes of the pieces of a block: its parts that are one run, joined if adjacent on both sides."""
        if (known := self._mean_runs.get((group, layers))) is not None:
            return known
        parts = [part for part in self._blocks.select(group, layers) if id(part) in self._runs]
        runs = sorted((self._runs[id(part)] for part in parts), key=lambda run: run.offset)
        joined = sum(
            last.address + last.num_bytes == run.address and last.offset + last.num_bytes == run.offset
            for last, run in itertools.pairwise(runs)
        )
        mean = sum(run.num_bytes for run in runs) / (len(runs) - joined) if runs else -1.0
        self._mean_runs[group, layers] = mean
        return mean

    def _copy(
        self,
        direction: CopyDirection,
        slots: NDArray[np.int64],
        selection: "_Selection",
        blocks: Mapping[int, NDArray[np.int64]],
        *,
        is_chained: bool,
    ) -> None:
        """Copy slots of which the same parts are requested; `blocks` are the groups' blocks."""
        spans, first, width = selection.spans, selection.first, selection.width
        room = self._room(direction)
        if not room:
            return self._copy_unstaged(direction, slots, selection.parts, blocks)
        per_batch = max(1, room // width)
        between = self._by_kernel(selection, blocks, per_batch) or self._by_part(selection.parts, blocks)
        for start in range(0, len(slots), per_batch):
            batch = slice(start, start + per_batch)
            staging = self._rows(direction, len(slots[batch]), width)
            if direction == "load":
                self._between(direction, staging, first, slots[batch], spans, is_chained)
                between(direction, start, staging, first)
            else:
                between(direction, start, staging, first)
                self._between(direction, staging, first, slots[batch], spans, is_chained)
        return None

    def _by_kernel(
        self, selection: "_Selection", blocks: Mapping[int, NDArray[np.int64]], per_batch: int
    ) -> "_Repack | None":
        """One launch a batch; None if the parts are of several groups, or differ."""
        kernels, alike = selection.kernels, selection.alike
        if kernels is None or alike is None:
            return None
        [numbers] = blocks.values()
        index = self._on_device(np.array((numbers, np.arange(len(numbers)) % per_batch)))

        def repack(direction: CopyDirection, start: int, staging: torch.Tensor, first: int) -> None:
            kernels.launch(direction, alike, index, start, staging, first)

        return repack

    def _by_part(
        self, parts: "Sequence[tuple[_IntegerPart, int]]", blocks: Mapping[int, NDArray[np.int64]]
    ) -> "_Repack":
        """One torch call for each part."""
        index = {group: self._on_device(blocks[group]) for group in dict.fromkeys(group for _, group in parts)}

        def repack(direction: CopyDirection, start: int, staging: torch.Tensor, first: int) -> None:
            batch = slice(start, start + len(staging))
            for part, group in parts:
                rows = part.within(staging, first)
                if direction == "load":
                    part.tensor.index_copy_(0, index[group][batch], rows)
                else:
                    torch.index_select(part.tensor, 0, index[group][batch], out=rows)

        return repack

    def _copy_unstaged(
        self,
        direction: CopyDirection,
        slots: NDArray[np.int64],
        parts: "Sequence[tuple[_IntegerPart, int]]",
        blocks: Mapping[int, NDArray[np.int64]],
    ) -> None:
        """One copy for each run, straight between block and slot: slow, and takes no memory."""
        self.counts["without staging"] += 1
        for part, group in parts:
            low, high = part.span
            for slot, number in zip(slots.tolist(), blocks[group].tolist(), strict=True):
                block = part.tensor[number]
                kept = self._slots[slot, low:high].view(block.dtype).view(block.shape)
                for at in part.runs():
                    target, source = (block[at], kept[at]) if direction == "load" else (kept[at], block[at])
                    target.copy_(source, non_blocking=True)

    def _between(
        self,
        direction: CopyDirection,
        staging: torch.Tensor,
        first: int,
        slots: NDArray[np.int64],
        spans: Sequence[ByteRange],
        is_chained: bool,
    ) -> None:
        """Copy spans of slots from or to rows of the staging, which hold a slot's bytes from `first` on.

        By one call of the driver; with an older one, by a torch call for each run. Neighbouring slots go together,
        others one by one: torch makes any other copy through pageable memory and waits for it.
        """
        if self._driver is not None and self._region.is_pinned(slots):
            width = staging.stride(0)
            runs = [Run(staging.data_ptr() + low - first, width, low, high - low) for low, high in spans]
            if len(runs) == 1:
                pieces = rows_of(direction, runs[0], slots, self._region)
            else:
                pieces = pieces_of(direction, runs, np.arange(len(slots)), slots, self._region)
            return _by_driver(self._driver, self.device, direction, is_chained, pieces)
        whole = list(spans) == [(0, self._slots.shape[1])]
        starts = np.append(0, np.flatnonzero(ends_of_runs(slots, self._region)) + 1) if whole else np.arange(len(slots))
        for start, end in zip(starts.tolist(), [*starts[1:].tolist(), len(slots)], strict=True):
            slot = int(slots[start])
            for low, high in spans:
                rows = staging[start:end, low - first : high - first]
                kept = self._slots[slot : slot + end - start, low:high]
                target, source = (rows, kept) if direction == "load" else (kept, rows)
                target.copy_(source, non_blocking=True)
        return None

    @property
    def _least_staging(self) -> int:
        """The least bytes with which every block can be staged."""
        return self._blocks.slot_bytes + 2 * _ROW_ALIGNMENT

    def _room(self, direction: CopyDirection) -> int:
        """Bytes of staging, allocated at the first copy, as the device has memory; 0: not enough for a block."""
        while direction not in self._staging:
            wanted = self._to_stage[direction]
            try:
                self._staging[direction] = torch.empty(wanted, dtype=torch.uint8, device=self.device)
            except DEVICE_ERRORS as failure:
                if not is_out_of_memory(failure):
                    raise
                if not self.counts:
                    logger.warning("no memory on the device for %d bytes of staging: copies get slower", wanted)
                self.counts["smaller staging"] += 1
                self._to_stage[direction] = max(wanted // 2, self._least_staging)  # the next copy's request
                if wanted == self._least_staging:
                    return 0
        return len(self._staging[direction])

    def _rows(self, direction: CopyDirection, num_rows: int, width: int) -> torch.Tensor:
        """`[num_rows, width]` bytes of staging."""
        return self._staging[direction][: num_rows * width].view(num_rows, width)

    def _on_device(self, numbers: NDArray[np.int64]) -> torch.Tensor:
        index = torch.from_numpy(numbers)
        return index.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else index


def _run_of(part: BlockPart) -> Run | None:
    """The part as one run in L1; None if its bytes lie scattered there."""
    if part.run_bytes() != part.num_bytes:
        return None
    tensor = part.tensor
    return Run(tensor.data_ptr(), tensor.stride(0) * tensor.itemsize, part.offset, part.num_bytes)


def ends_of_runs(slots: NDArray[np.int64], region: HostRegion) -> NDArray[np.bool_]:
    """Behind which of these ascending slots a copy has to end: the next is no neighbour, or in another pinned piece."""
    breaks: NDArray[np.bool_] = np.diff(slots) != 1
    if region.pinning is not None:
        breaks |= np.diff(slots // region.pinning.slots_per_piece) != 0
    return breaks


class _IntegerPart:
    """A part as integers, the largest that its runs are made of: fewer elements to move, and no arithmetic on them."""

    def __init__(self, part: BlockPart) -> None:
        self.part = part
        tensor, unit = part.tensor, part.tensor.itemsize
        if tensor.ndim > 1 and tensor.stride(-1) == 1:
            sides = (tensor.shape[-1], tensor.storage_offset(), *tensor.stride()[:-1])
            unit = math.gcd(_ALIGNMENT, part.offset, tensor.data_ptr(), *(side * unit for side in sides))
        elif part.offset % unit:
            raise ValueError(f"a part at byte {part.offset} of a slot: its elements of {unit} bytes lie askew there")
        self.span: ByteRange = (part.offset, part.offset + part.num_bytes)
        self.tensor = tensor.view(_UNITS[unit])

    def runs(self) -> Iterator[tuple[int, ...]]:
        """Where the runs of a block begin, as indices of its outer dimensions."""
        axis = self.tensor.ndim
        while axis > 1 and self.tensor.stride(axis - 1) == math.prod(self.tensor.shape[axis:]):
            axis -= 1
        return np.ndindex(*self.tensor.shape[1:axis])

    def within(self, staging: torch.Tensor, first: int) -> torch.Tensor:
        """The part's place in rows that hold a slot's bytes from `first` on; shaped as the part, a block a row."""
        low, high = self.span
        columns = staging[:, low - first : high - first].view(self.tensor.dtype)
        return columns.view(len(staging), *self.tensor.shape[1:])


class _Selection:
    """Parts that are copied together, each with its group, and the range of bytes that they cover."""

    def __init__(self, parts: "Sequence[tuple[_IntegerPart, int]]", kernels: PartKernels | None) -> None:
        self.parts = parts
        self.kernels = kernels
        self.alike = kernels.range_of([part.part for part, _ in parts]) if kernels is not None else None
        self.spans = _spans([part for part, _ in parts])
        self.num_bytes = sum(high - low for low, high in self.spans)
        low, high = (self.spans[0][0], self.spans[-1][1]) if parts else (0, 0)
        self.first = low // _ROW_ALIGNMENT * _ROW_ALIGNMENT  # byte of a slot that a row of the staging starts with
        self.width = -(-(high - self.first) // _ROW_ALIGNMENT) * _ROW_ALIGNMENT  # bytes of a row


def _by_slot(
    blocks: EngineBlocks, copies: BlockCopies
) -> Iterator[tuple[NDArray[np.int64], dict[int, NDArray[np.int64]]]]:
    """The copies as ascending slots and, for each group that has blocks for all of them, these.

    Only all its groups together fill a slot in long runs, so copies to one slot are made at once.
    """
    if not len(copies):
        return
    if blocks.num_groups == 1:
        order = np.argsort(copies.host_slots)
        slots = copies.host_slots[order]
        if (np.diff(slots) != 0).all():
            yield slots, {0: copies.device_blocks[order]}
            return
    groups, numbers = np.divmod(copies.device_blocks, blocks.blocks_per_group)
    order = np.lexsort((groups, copies.host_slots))
    groups, numbers, slots = groups[order], numbers[order], copies.host_slots[order]
    # a row is one slot's groups; a slot that is loaded into two blocks of a group has two
    begins = np.append(True, (np.diff(slots) != 0) | (np.diff(groups) <= 0))
    table = np.full((np.count_nonzero(begins), blocks.num_groups), -1, np.int64)
    table[np.cumsum(begins) - 1, groups] = numbers
    slots = slots[begins]
    present, kinds = np.unique(table >= 0, axis=0, return_inverse=True)
    for kind, has in enumerate(present):
        rows = np.flatnonzero(kinds.reshape(-1) == kind)
        yield slots[rows], {group: table[rows, group] for group in np.flatnonzero(has).tolist()}


def _spans(parts: Sequence[_IntegerPart]) -> list[ByteRange]:
    """The bytes of a slot that the parts fill, ascending, neighbours joined."""
    spans: list[ByteRange] = []
    for low, high in sorted(part.span for part in parts):
        if spans and spans[-1][1] == low:
            spans[-1] = (spans[-1][0], high)
        else:
            spans.append((low, high))
    return spans


# Errors of a CuPy that is missing, broken, or for another driver.
NO_CUPY: Final = (ImportError, AttributeError, TypeError, ValueError, OSError, *DEVICE_ERRORS)
_SORTED: Final = 2048  # blocks of a copy, at most, among which neighbours are found out of order, too


class TensorCopier:
    """Copies our own L1, block-first: neighbours merged, small pieces by kernel, others by the driver, or by torch."""

    def __init__(
        self,
        tensor: torch.Tensor,
        region: HostRegion,
        cupy: Any,
        driver: CudaDriver | None = None,
        ways: CopyWays | None = None,
    ) -> None:
        """ValueError if the tensor's blocks are not as large as the region's slots."""
        self.l1 = tensor.view(torch.uint8).view(tensor.shape[0], tensor.shape[1], -1)
        self.device = tensor.device
        self.num_blocks, self.num_layers, self._layer_bytes = self.l1.shape
        if self.num_layers * self._layer_bytes != region.slot_bytes:
            raise ValueError(f"blocks of {self.num_layers * self._layer_bytes} bytes, slots of {region.slot_bytes}")
        self._region = region
        self._driver = driver  # None: without batched copies
        self._ways = ways or CopyWays()
        self._l2 = torch.from_numpy(region.array)
        self.kernels = self._compiled(cupy) if region.pinning is not None else None

    @property
    def ways(self) -> tuple[CopyWay, ...]:
        """The ways that exist on this machine."""
        batch: tuple[CopyWay, ...] = ("batch",) if self._driver is not None else ()
        return (*batch, *(("kernel",) if self.kernels is not None else ()), "torch")

    def copy(self, direction: CopyDirection, copies: BlockCopies, *, is_chained: bool = True) -> None:
        """Enqueue valid copies; RuntimeError of the driver. `is_chained`: earlier copies may still write the source."""
        first, last = copies.layers or (0, self.num_layers)
        blocks, slots = copies.device_blocks, copies.host_slots
        if len(slots) <= _SORTED:
            order = np.argsort(slots)
            blocks, slots = blocks[order], slots[order]
        starts = self._runs(blocks, slots, last - first)
        if not len(starts):
            return
        num_bytes = len(blocks) * (last - first) * self._layer_bytes
        way: CopyWay = "torch"
        if self._region.is_pinned(slots):
            has_batch, has_kernel = self._driver is not None, self.kernels is not None
            way = self._ways.choice.way(num_bytes / len(starts), has_batch=has_batch, has_kernel=has_kernel)
        self._ways.count(way, num_bytes)
        if way == "batch" and self._driver is not None:
            start, stride = first * self._layer_bytes, self.num_layers * self._layer_bytes
            run = Run(self.l1.data_ptr() + start, stride, start, (last - first) * self._layer_bytes)
            pieces = pieces_of(direction, [run], blocks, slots, self._region)
            return _by_driver(self._driver, self.device, direction, is_chained, pieces)
        if way == "kernel" and self.kernels is not None:
            indices = torch.from_numpy(np.stack((blocks, slots))).pin_memory().to(self.l1.device, non_blocking=True)
            canonical = Canonical(self._region.address, self._region.slot_stride, copies.layers)
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

    def _compiled(self, cupy: Any) -> LayoutKernels | None:
        """The kernels, compiled now rather than under the first copy; None: CuPy or its compiler is missing."""
        geometry = Geometry.block_first(self.l1.data_ptr(), self.num_layers, self._layer_bytes)
        try:
            with torch.cuda.device(self.l1.device):
                kernels = LayoutKernels(geometry, cupy)
                kernels.compile(Canonical(self._region.address, self._region.slot_stride))
        except NO_CUPY as failure:
            say_what_is_lost(failure)
            return None
        return kernels

    def _runs(self, blocks: NDArray[np.int64], slots: NDArray[np.int64], num_layers: int) -> NDArray[np.int64]:
        """Where a new piece starts: whole blocks join if adjacent on both sides, parts of blocks never."""
        whole = num_layers == self.num_layers and self._region.slot_stride == self._region.slot_bytes
        if not whole or not len(blocks):
            return np.arange(len(blocks))
        breaks = (np.diff(blocks) != 1) | ends_of_runs(slots, self._region)
        return np.flatnonzero(np.concatenate(([True], breaks)))


def say_what_is_lost(failure: Exception) -> None:
    """Warn that there are no kernels, since CuPy does not work. Once in a process, as every stream finds the same."""
    _say_once(f"{type(failure).__name__}: {str(failure).strip().partition(chr(10))[0]}")


@cache
def _say_once(reason: str) -> None:
    extra = "cuda12" if (torch.version.cuda or "").startswith("12.") else "cuda13"
    logger.warning(
        "no copy kernels, so small or scattered blocks are copied more slowly: CuPy does not work here (%s);"
        " %s, or the one for this driver",
        reason,
        install_command(extra, "cupy"),
    )
