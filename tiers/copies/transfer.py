"""Copies of blocks between L1 and L2: which ones, an engine's layout, the contract of a copy stream, and the CPU's.

Every stream keeps two queues, loads (L2 → L1) and stores (L1 → L2). Copies of one direction complete in the order they
were given; the directions are independent. A call only enqueues; a failure is the event's `error`, never an exception.
`CudaCopyStream` (cuda_transfer.py) is a GPU's stream, `ManualCopyStream` (tests/rigs/manual_copies.py) the tests'.
"""

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from kvtier.tiers.host import HostRegion, memory

if TYPE_CHECKING:
    import torch


CopyDirection = Literal["load", "store"]

CANCELLED: Final = "cancelled: the stream was closed"
_STAGING_BYTES: Final = 1 << 20  # of numpy's scattered copies: stays in the cache between the two passes


@dataclass(frozen=True, slots=True)
class BlockCopies:
    """Pairs of L1 blocks and L2 slots, each the target of at most one. `layers`: a half-open range, None for all."""

    device_blocks: NDArray[np.int64]
    host_slots: NDArray[np.int64]
    layers: tuple[int, int] | None = None

    def __len__(self) -> int:
        return len(self.device_blocks)


class BlockCopier:
    """Copies blocks between L1 bytes `[num_blocks, num_layers, layer_bytes]` and a region, on the calling thread."""

    def __init__(self, device: "torch.Tensor | NDArray[np.generic]", region: HostRegion) -> None:
        """`device`: L1, C-contiguous `[num_blocks, num_layers, …]`. ValueError if its blocks do not fit the slots."""
        self._device = block_bytes_view(device)
        self._region = region
        self._rows_of_device = self._device.reshape(len(self._device), -1)
        self._copy_blocks = memory.compiled("copy_blocks") or _copy_blocks
        self._owner = device  # the view is by address and keeps nothing alive
        self.num_blocks, self.num_layers, self.layer_bytes = self._device.shape
        if self.num_layers * self.layer_bytes != region.slot_bytes:
            raise ValueError(f"blocks of {self.num_layers * self.layer_bytes} bytes, slots of {region.slot_bytes}")

    def invalid(self, copies: BlockCopies) -> str | None:
        """Why the copies are invalid, as an index or a layer is out of range; None if they are valid."""
        return invalid_copies(copies, self.num_blocks, self.num_layers, self._region.num_slots)

    def copy(self, direction: CopyDirection, copies: BlockCopies, cancelled: Callable[[], bool] = bool) -> str | None:
        """Copy now. Returns why it failed, or None. `cancelled` is called before every 32 MiB."""
        blocks, slots, num_layers = copies.device_blocks, copies.host_slots, self.num_layers
        first, last = copies.layers or (0, num_layers)
        offset, length = first * self.layer_bytes, (last - first) * self.layer_bytes
        is_short = len(blocks) * length <= memory.COPY_PIECE and 0 <= first < last <= num_layers
        if not is_short and (error := self.invalid(copies)):  # of a short one `_copy_blocks` finds it
            return error
        device, host, per_call = self._rows_of_device, self._region.array, max(1, memory.COPY_PIECE // length)
        for start in range(0, max(1, len(blocks)), per_call):
            if cancelled():
                return CANCELLED
            part = slice(start, start + per_call)
            try:
                self._copy_blocks(device, blocks[part], host, slots[part], offset, length, direction == "load")
            except (IndexError, ValueError) as failure:
                return self.invalid(copies) or str(failure)
        return None


def _copy_blocks(
    device: NDArray[np.uint8], blocks: NDArray[np.int64], host: NDArray[np.uint8], slots: NDArray[np.int64],
    offset: int, length: int, is_load: bool,
) -> None:  # fmt: skip
    """Twin of `copy_blocks` in memory_compiled.pyx: two numpy passes through a cache-sized buffer."""
    for rows, index in ((device, blocks), (host, slots)):
        if len(index) and not 0 <= index.min() <= index.max() < len(rows):
            raise IndexError(f"{index.min()}..{index.max()} of {len(rows)}")
    if blocks.shape != slots.shape or blocks.ndim != 1:
        raise ValueError(f"{blocks.shape} blocks for {slots.shape} slots")
    targets, to, sources, of = (device, blocks, host, slots) if is_load else (host, slots, device, blocks)
    step = max(1, _STAGING_BYTES // length)
    for start in range(0, len(blocks), step):
        part = slice(start, start + step)
        targets[to[part], offset : offset + length] = sources[of[part], offset : offset + length]


def invalid_copies(copies: BlockCopies, num_blocks: int, num_layers: int, num_slots: int) -> str | None:
    """Why the copies are invalid between tiers of that size; None if they are valid."""
    blocks, slots = copies.device_blocks, copies.host_slots
    if blocks.ndim != 1 or blocks.shape != slots.shape:
        return f"{blocks.shape} device blocks for {slots.shape} host slots"
    first, last = copies.layers or (0, num_layers)
    if not 0 <= first < last <= num_layers:
        return f"layers {first}..{last}: L1 has {num_layers}"
    for name, index, limit in (("L1 block", blocks, num_blocks), ("L2 slot", slots, num_slots)):
        if len(index) and (index.min() < 0 or index.max() >= limit):
            return f"{name} outside 0..{limit - 1}: {index.min()}..{index.max()}"
    return None


def block_bytes_view(device: "torch.Tensor | NDArray[np.generic]") -> NDArray[np.uint8]:
    """L1 in host memory, C-contiguous, as bytes `[num_blocks, num_layers, layer_bytes]`.

    A torch tensor is viewed by address, whatever its dtype and without importing torch; the caller keeps it alive.
    """
    num_blocks, num_layers = device.shape[:2]
    if isinstance(device, np.ndarray):
        if not device.flags.c_contiguous:
            raise ValueError("L1 must be C-contiguous")
        return device.reshape(num_blocks, num_layers, -1).view(np.uint8)
    if device.device.type != "cpu" or not device.is_contiguous():
        raise ValueError(f"L1 must be contiguous in host memory, not on {device.device}")
    return memory.bytes_at(device.data_ptr(), device.nbytes).reshape(num_blocks, num_layers, -1)


_UINTS: Final = {1: "u1", 2: "u2", 4: "u4", 8: "u8"}


@dataclass(frozen=True, slots=True)
class BlockPart:
    """One piece of every block of a KV group, e.g. the keys of one layer.

    `tensor` is `[num_blocks, …]` with any strides, a view of the engine's own memory. In a slot the piece's elements
    lie back to back, in the order of the view's dimensions, from byte `offset` on. `layer` is the number, among the
    slot's layers, of the layer with which it is copied.
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
    """Copies between an engine's blocks in host memory and slots: single runs by address, others by numpy."""

    def __init__(self, blocks: EngineBlocks, region: HostRegion) -> None:
        """ValueError if the blocks are not in host memory or not as large as the region's slots."""
        if blocks.device.type != "cpu" or blocks.slot_bytes != region.slot_bytes:
            raise ValueError(f"slots of {region.slot_bytes} bytes for {blocks.slot_bytes} on {blocks.device}")
        self._blocks = blocks
        self._region = region
        self._views = {id(part): _Views(part, region) for part in blocks.parts}

    def invalid(self, copies: BlockCopies) -> str | None:
        """Why the copies are invalid, as an index or a layer is out of range; None if they are valid."""
        return invalid_copies(copies, self._blocks.num_blocks, self._blocks.num_layers, self._region.num_slots)

    def copy(self, direction: CopyDirection, copies: BlockCopies, cancelled: Callable[[], bool] = bool) -> str | None:
        """Copy now. Returns why it failed, or None. `cancelled` is called before every 32 MiB."""
        if error := self.invalid(copies):
            return error
        per_batch = max(1, memory.COPY_PIECE // self._region.slot_bytes)
        for group, blocks, slots in self._blocks.by_group(copies):
            parts = [self._views[id(part)] for part in self._blocks.select(group, copies.layers)]
            for start in range(0, len(blocks), per_batch):
                if cancelled():
                    return CANCELLED
                batch = slice(start, start + per_batch)
                _copy(direction, parts, blocks[batch], slots[batch])
        return None


class _Views:
    """One part from both sides: as addresses if it is one run, and as equally shaped arrays in any case."""

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
    copy_pieces = memory.compiled("copy_pieces")
    runs = [part for part in parts if part.is_run and copy_pieces is not None]
    if runs and copy_pieces is not None:  # all parts of all blocks as one list of pieces
        engine = np.concatenate([part.engine_address + blocks * part.engine_stride for part in runs])
        host = np.concatenate([part.slot_address + slots * part.slot_stride for part in runs])
        lengths = np.repeat(np.array([part.num_bytes for part in runs], np.int64), len(blocks))
        copy_pieces(*((engine, host) if direction == "load" else (host, engine)), lengths)
    for part in parts:
        if part not in runs:
            if direction == "load":
                part.engine[blocks] = part.slots[slots]
            else:
                part.slots[slots] = part.engine[blocks]


L1: TypeAlias = "torch.Tensor | NDArray[np.generic] | EngineBlocks"
"""A stream's L1: one tensor `[num_blocks, num_layers, …]`, or blocks as some engine keeps them."""

MAX_QUEUED: Final = 1024  # copies per direction
_AT_ONCE: Final = 256 << 10  # bytes up to which copying them takes less than waking a thread for it
_LOOK_AGAIN: Final = 0.005  # seconds between queries of another stream's event that a copy waits for
_LAST_COPY: Final = 5.0  # seconds a close waits for the few bytes that a caller copies


@runtime_checkable
class CopyEvent(Protocol):
    """The completion of one enqueued batch of copies, successful or not."""

    @property
    def error(self) -> str | None:
        """Why the copy failed, which leaves its targets in any state; None while it is pending and after success."""

    @property
    def is_lost(self) -> bool:
        """Whether it failed and its end cannot be observed: its targets must never be used again."""

    def done(self) -> bool:
        """Whether the copy has ended."""

    def wait(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for the end; False if it has not come."""


class CopyStream(Protocol):
    """Copies between the L1 tensor and the L2 region it was made with. Thread-safe."""

    def load(self, copies: BlockCopies, after: object | None = None) -> CopyEvent:
        """Enqueue L2 → L1 copies behind the event `after`; without it, behind all work of this thread so far."""

    def store(self, copies: BlockCopies, after: object | None = None) -> CopyEvent:
        """Enqueue L1 → L2 copies; `after` as in `load`. The blocks must stay unchanged until the event is done."""

    def fence(self, event: CopyEvent, timeout: float) -> bool:
        """Make later compute of this thread see the copy: a device waits itself, a CPU here, `timeout` seconds."""

    def mark(self) -> object | None:
        """All compute that the calling thread has issued by now, as an `after` for copies enqueued later."""

    def drain(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds until all copies have ended; False if one has not."""

    def close(self, timeout: float) -> None:
        """Drain, then cancel the others: their events fail. Later copies fail at once. Idempotent.

        An event that is not done afterwards is of a copy that a device goes on with: its targets stay out of use.
        """


class HostEvent:
    """A `CopyEvent` that a thread completes."""

    __slots__ = ("_ended", "error")
    is_lost = False  # a thread's copy ends with the thread

    def __init__(self) -> None:
        self.error: str | None = None
        self._ended = threading.Event()

    def done(self) -> bool:
        return self._ended.is_set()

    def wait(self, timeout: float) -> bool:
        return self._ended.wait(timeout)

    def end(self, error: str | None = None) -> None:
        self.error = error
        self._ended.set()


COPIED: Final = HostEvent()
"""The event of every copy that was made at once, without an error."""
COPIED.end()


@dataclass(slots=True)
class CopyTask:
    direction: CopyDirection
    copies: BlockCopies
    after: CopyEvent | None
    event: HostEvent

    def ready(self) -> bool:
        """Whether the event that it waits for has ended."""
        return self.after is None or self.after.done()

    def run(self, copier: BlockCopier | PartCopier, cancelled: Callable[[], bool] = bool) -> str | None:
        """Copy now. Returns why it failed, or None."""
        if self.after is not None and self.after.error is not None:
            return f"what it waited for failed: {self.after.error}"
        return copier.copy(self.direction, self.copies, cancelled)


class HostCopyStream:
    """The copy stream of an L1 in host memory: threads that copy without the GIL. Loads overtake queued stores.

    If nothing is under way, a few bytes are copied at once. `_changed` guards queues and counters, never during a copy.
    """

    def __init__(
        self,
        device: L1,
        region: HostRegion,
        num_threads: int = 1,
        *,
        max_queued: int = MAX_QUEUED,
        at_once: int = _AT_ONCE,
    ) -> None:
        """Start the threads. One keeps the order of each direction; more only pay with several memory channels.

        `at_once`: bytes up to which a copy is made on the calling thread.
        """
        self._copier = PartCopier(device, region) if isinstance(device, EngineBlocks) else BlockCopier(device, region)
        self._blocks_at_once = at_once // region.slot_bytes
        self._max_queued = max_queued
        self._changed = threading.Condition()
        self._queues: dict[CopyDirection, deque[CopyTask]] = {"load": deque(), "store": deque()}
        self._num_running = 0
        self._closed = False
        self._cancelled = threading.Event()
        self._threads = [
            threading.Thread(target=self._work, name=f"kvtier-copy-{i}", daemon=True) for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def load(self, copies: BlockCopies, after: object | None = None) -> CopyEvent:
        return self._enqueue("load", copies, after)

    def store(self, copies: BlockCopies, after: object | None = None) -> CopyEvent:
        return self._enqueue("store", copies, after)

    def fence(self, event: CopyEvent, timeout: float) -> bool:
        """Wait for the event: compute on a CPU cannot wait by itself."""
        return event.wait(timeout)

    def mark(self) -> object | None:
        """None: on a CPU all work has ended."""
        return None

    def drain(self, timeout: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._num_pending(), timeout)

    def close(self, timeout: float) -> None:
        """Drain, then cancel; a copy under way ends within 32 MiB. Idempotent."""
        with self._changed:
            self._closed = True
        self.drain(timeout)
        with self._changed:
            self._cancelled.set()
            for queue in self._queues.values():
                while queue:
                    queue.popleft().event.end(CANCELLED)
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        with self._changed:  # the memory may go once this returns, and a caller may be copying
            self._changed.wait_for(lambda: not self._num_running, _LAST_COPY)

    def _num_pending(self) -> int:
        return self._num_running + sum(map(len, self._queues.values()))

    def _enqueue(self, direction: CopyDirection, copies: BlockCopies, after: object | None) -> CopyEvent:
        before = None
        if after is not None:
            if not isinstance(after, CopyEvent):
                raise TypeError(f"after: a CopyEvent, not {type(after).__name__}")
            before = after
        if before is not None and before.done() and before.error is None:
            before = None
        if before is None and len(copies.device_blocks) <= self._blocks_at_once:
            with self._changed:
                is_free = not (self._closed or self._num_running or self._queues["load"] or self._queues["store"])
                self._num_running += is_free
            if is_free:
                error: str | None = "interrupted"  # as by Ctrl-C
                try:
                    error = self._copier.copy(direction, copies, self._cancelled.is_set)
                except Exception as failure:
                    error = f"{type(failure).__name__}: {failure}"
                finally:
                    with self._changed:
                        self._num_running -= 1
                        self._changed.notify_all()
                return COPIED if error is None else ended(error)
        task = CopyTask(direction, copies, before, HostEvent())
        error = self._copier.invalid(copies)
        with self._changed:
            queue = self._queues[direction]
            if self._closed:
                error = error or "the stream is closed"
            elif len(queue) >= self._max_queued:
                error = error or "the copy queue is full"
            if error is None:
                queue.append(task)
                self._changed.notify()
        if error is not None:
            task.event.end(error)
        return task.event

    def _work(self) -> None:
        while (task := self._take()) is not None:
            self._run(task)

    def _run(self, task: CopyTask) -> None:
        error: str | None = "interrupted"  # a caller's thread may be, as by Ctrl-C
        try:
            error = task.run(self._copier, self._cancelled.is_set)
        except Exception as failure:  # the thread must live on for the others, and a caller gets no exception
            error = f"{type(failure).__name__}: {failure}"
        finally:
            with self._changed:
                self._num_running -= 1
                task.event.end(error)  # under the lock, so that drain() never returns before the event is done
                self._changed.notify_all()

    def _take(self) -> CopyTask | None:
        """Wait for a copy that may start; None once the stream is cancelled."""
        with self._changed:
            while not self._cancelled.is_set():
                for queue in (self._queues["load"], self._queues["store"]):
                    if queue and queue[0].ready():
                        self._num_running += 1
                        return queue.popleft()
                # events of this stream notify; those of another have to be queried
                self._changed.wait(_LOOK_AGAIN if any(self._queues.values()) else None)
        return None


def ended(error: str) -> HostEvent:
    """The event of a copy that has failed."""
    event = HostEvent()
    event.end(error)
    return event


DEVICE_ERRORS: Final = (RuntimeError, MemoryError)
"""All exceptions of torch, CuPy or the driver.

torch.OutOfMemoryError, torch.AcceleratorError, CuPy's CUDARuntimeError and CUDADriverError, and our CudaError are
RuntimeErrors. CuPy's OutOfMemoryError is a MemoryError. Its CompileException is neither; `LayoutKernels` translates it.
"""

_OUT_OF_MEMORY: Final = 2
_OF_CAPTURES: Final = frozenset(range(900, 909))
# "Any further CUDA work will return the same error. To continue, the process must be terminated and relaunched."
_LASTING: Final = frozenset({4, 201, 214, 220, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719})
# The same, if an older torch gives no number.
_LASTING_WORDS: Final = (
    *("illegal memory access", "launch timed out", "context is destroyed", "device-side assert", "uncorrectable"),
    *("hardware stack error", "illegal instruction", "misaligned address", "invalid program counter"),
    *("unspecified launch failure", "driver shutting down"),
)


def is_out_of_memory(error: Exception) -> bool:
    """Whether there was too little memory for the request; a smaller one may succeed."""
    import torch

    return isinstance(error, torch.OutOfMemoryError | MemoryError) or number_of(error) == _OUT_OF_MEMORY


def is_of_capture(error: Exception) -> bool:
    """Whether a call was refused only because some thread captures a CUDA graph."""
    return number_of(error) in _OF_CAPTURES or "captur" in str(error)


def is_lasting(error: Exception) -> bool:
    """Whether every later call of this process on the device fails, too."""
    number = number_of(error)
    return number in _LASTING if number is not None else any(words in str(error) for words in _LASTING_WORDS)


def number_of(error: Exception) -> int | None:
    """CUDA's number of the error; None if it has none."""
    for name in ("status", "error_code"):  # of the driver's and CuPy's errors, of torch's
        if isinstance(number := getattr(error, name, None), int):
            return number
    return None
