"""Where an engine keeps its blocks, as data: strided parts of its own tensors, and where their bytes lie in a slot."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from kvtier.tiers.copies.block_copier import CANCELLED, BlockCopies, CopyDirection, invalid_copies
from kvtier.tiers.host import HostRegion, memory

if TYPE_CHECKING:
    import torch

_UINTS: Final = {1: "u1", 2: "u2", 4: "u4", 8: "u8"}
_BATCH_BYTES: Final = 32 << 20  # copied between two looks at `cancelled`


@dataclass(frozen=True, slots=True)
class BlockPart:
    """One piece of every block of a KV group, e.g. the keys of one layer.

    `tensor` is `[num_blocks, …]` with any strides, a view of the engine's own memory. In a slot the piece's elements
    lie back to back, in the order of the view's dimensions, from byte `offset` on. `layer` says with which layer it is
    copied, by its number among the slot's.
    """

    tensor: "torch.Tensor"
    layer: int
    offset: int
    group: int = 0
    record: int = 0  # parts of different records lie in different slots

    @property
    def num_bytes(self) -> int:
        return math.prod(self.tensor.shape[1:]) * self.tensor.itemsize

    def run_bytes(self) -> int:
        """Length of the runs that the piece's bytes form in the engine."""
        run = self.tensor.itemsize
        for size, stride in zip(reversed(self.tensor.shape[1:]), reversed(self.tensor.stride()[1:]), strict=True):
            if size > 1 and stride * self.tensor.itemsize != run:
                return run
            run *= size
        return run


@dataclass(frozen=True)
class EngineBlocks:
    """An engine's whole L1: the parts of its blocks. A layout is data here, not a class for each engine.

    An engine with several KV groups has a block table for each group. In the copies of a stream, block `b` of group
    `g` has the id `g * blocks_per_group + b`.
    """

    parts: Sequence[BlockPart]
    slot_bytes: int
    num_groups: int = field(init=False)
    blocks_per_group: int = field(init=False)
    num_layers: int = field(init=False)

    def __post_init__(self) -> None:
        """ValueError if parts disagree on the number of blocks, overlap in a slot or do not fit one."""
        sizes = {part.tensor.shape[0] for part in self.parts}
        if len(sizes) != 1:
            raise ValueError(f"parts of {sorted(sizes)} blocks: all of an engine's parts have as many")
        record, end = -1, 0
        for part in sorted(self.parts, key=lambda part: (part.record, part.offset)):
            end = end if part.record == record else 0
            if part.offset < end or part.offset + part.num_bytes > self.slot_bytes:
                raise ValueError(f"a part at byte {part.offset} overlaps another, or a slot of {self.slot_bytes} bytes")
            record, end = part.record, part.offset + part.num_bytes
        object.__setattr__(self, "num_groups", 1 + max(part.group for part in self.parts))
        object.__setattr__(self, "blocks_per_group", sizes.pop())
        object.__setattr__(self, "num_layers", 1 + max(part.layer for part in self.parts))

    @property
    def num_blocks(self) -> int:
        """How many ids of blocks there are, over all groups."""
        return self.num_groups * self.blocks_per_group

    @property
    def device(self) -> "torch.device":
        return self.parts[0].tensor.device

    def select(self, group: int, layers: tuple[int, int] | None) -> list[BlockPart]:
        """The parts of one group within a half-open range of layers."""
        first, last = layers or (0, self.num_layers)
        return [part for part in self.parts if part.group == group and first <= part.layer < last]

    def by_group(self, copies: BlockCopies) -> "list[tuple[int, NDArray[np.int64], NDArray[np.int64]]]":
        """The copies as (group, block numbers in it, slots), groups without any left out."""
        groups = copies.device_blocks // self.blocks_per_group
        split = [(group, groups == group) for group in np.unique(groups).tolist()]
        return [
            (group, copies.device_blocks[mine] - group * self.blocks_per_group, copies.host_slots[mine])
            for group, mine in split
        ]


class PartCopier:
    """Copies between an engine's blocks in host memory and a region's slots, on the calling thread.

    Pieces that are one run on both sides go in one system call for many; others by one numpy assignment a part.
    """

    def __init__(self, blocks: EngineBlocks, region: HostRegion) -> None:
        """ValueError if the blocks are not in host memory or not as large as the region's slots."""
        if blocks.device.type != "cpu" or blocks.slot_bytes != region.slot_bytes:
            raise ValueError(f"slots of {region.slot_bytes} bytes for {blocks.slot_bytes} on {blocks.device}")
        self._blocks = blocks
        self._region = region
        self._views = {id(part): _Views(part, region) for part in blocks.parts}

    def invalid(self, copies: BlockCopies) -> str | None:
        """Why the copies may not be made: an index or a layer outside its tier."""
        return invalid_copies(copies, self._blocks.num_blocks, self._blocks.num_layers, self._region.num_slots)

    def copy(self, direction: CopyDirection, copies: BlockCopies, cancelled: Callable[[], bool] = bool) -> str | None:
        """Copy now. Returns why it failed, or None. `cancelled` is asked before every 32 MiB."""
        if error := self.invalid(copies):
            return error
        per_batch = max(1, _BATCH_BYTES // self._region.slot_bytes)
        for group, blocks, slots in self._blocks.by_group(copies):
            parts = [self._views[id(part)] for part in self._blocks.select(group, copies.layers)]
            for start in range(0, len(blocks), per_batch):
                if cancelled():
                    return CANCELLED
                batch = slice(start, start + per_batch)
                try:
                    _copy(direction, parts, blocks[batch], slots[batch])
                except OSError as failure:
                    return str(failure)
        return None


class _Views:
    """One part seen from both sides: as addresses if it is one run, as equally shaped arrays in any case."""

    def __init__(self, part: BlockPart, region: HostRegion) -> None:
        tensor = part.tensor
        run = part.run_bytes()
        kind = np.dtype(_UINTS.get(run, f"V{run}"))
        inner: list[int] = []  # dimensions outside the runs
        for size in tensor.shape[1:]:
            if math.prod(inner) * run == part.num_bytes:
                break
            inner.append(size)
        strides = tuple(stride * tensor.itemsize for stride in tensor.stride()[: 1 + len(inner)])
        shape = (tensor.shape[0], *inner)
        extent = run + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        self.is_run = not inner
        self.num_bytes = part.num_bytes
        self.engine_address, self.engine_stride = tensor.data_ptr(), strides[0]
        self.slot_address, self.slot_stride = region.address + part.offset, region.slot_stride
        self.engine: NDArray[np.generic] = np.ndarray(
            shape, kind, memory.bytes_at(tensor.data_ptr(), extent).data, 0, strides
        )
        packed = [math.prod(inner[axis + 1 :]) * run for axis in range(len(inner))]
        self.slots: NDArray[np.generic] = np.ndarray(
            (region.num_slots, *inner), kind, region.array.data, part.offset, (region.slot_stride, *packed)
        )


def _copy(
    direction: CopyDirection, parts: Sequence[_Views], blocks: NDArray[np.int64], slots: NDArray[np.int64]
) -> None:
    runs = [part for part in parts if part.is_run and memory.can_copy_pieces()]
    if runs:
        _copy_runs(direction, runs, blocks, slots)
    for part in parts:
        if part not in runs:
            if direction == "load":
                part.engine[blocks] = part.slots[slots]
            else:
                part.slots[slots] = part.engine[blocks]


def _copy_runs(
    direction: CopyDirection, parts: Sequence[_Views], blocks: NDArray[np.int64], slots: NDArray[np.int64]
) -> None:
    """All parts of all blocks as one list of pieces."""
    engine = np.concatenate([part.engine_address + blocks * part.engine_stride for part in parts])
    host = np.concatenate([part.slot_address + slots * part.slot_stride for part in parts])
    lengths = np.repeat(np.array([part.num_bytes for part in parts], np.int64), len(blocks))
    targets, sources = (engine, host) if direction == "load" else (host, engine)
    per_call = memory.pieces_per_call(int(lengths.max()))
    for start in range(0, len(targets), per_call):
        piece = slice(start, start + per_call)
        memory.copy_pieces(targets[piece], sources[piece], lengths[piece], lookup_targets=direction == "store")
