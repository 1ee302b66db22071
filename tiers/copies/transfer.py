"""Asynchronous copies of blocks between L1 and L2: the contract of a copy stream, and the CPU's.

Every stream keeps two queues, loads (L2 → L1) and stores (L1 → L2). Copies of one direction complete in the order they
were given; the directions are independent. A call only enqueues; a failure is the event's `error`, never an exception.
`CudaCopyStream` (cuda_transfer.py) is a GPU's stream, `ManualCopyStream` (tests/rigs/manual_copies.py) the tests'.
"""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from kvtier.tiers.copies.block_copier import (
    CANCELLED,
    BlockCopier,
    BlockCopies,
    CopyDirection,
    EngineBlocks,
    PartCopier,
)
from kvtier.tiers.host import HostRegion

if TYPE_CHECKING:
    import torch


__all__ = ["COPIED", "L1", "BlockCopies", "CopyEvent", "CopyStream", "HostCopyStream", "HostEvent", "ended"]

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
