"""The copy stream of a GPU: torch streams and events both ways, and how an event ends if its device fails."""

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch

from kvtier.tiers.copies.copy_probe import Calibration, CopyProbe, MakeCopier
from kvtier.tiers.copies.copy_ways import ChoiceKey, CopyWays
from kvtier.tiers.copies.kernels import PartKernels
from kvtier.tiers.copies.packer import NO_CUPY, Packer, TensorCopier, say_what_is_lost
from kvtier.tiers.copies.transfer import (
    CANCELLED,
    DEVICE_ERRORS,
    MAX_QUEUED,
    BlockCopies,
    CopyDirection,
    CopyEvent,
    EngineBlocks,
    invalid_copies,
    is_lasting,
    is_of_capture,
)
from kvtier.tiers.host import CudaDriver, HostRegion, cuda_driver

logger = logging.getLogger(__name__)

_POLL: Final = 50e-6  # seconds between looks at a device event in `wait`

OnLost = Callable[[str], None]


class CudaEvent:
    """A `CopyEvent` of the device: done once it was issued and the device's event has passed.

    If the query of that event fails, another one is recorded behind it. If that query fails, too, the copy is lost: it
    is done, with an error, and its blocks and slots must stay out of use.
    """

    __slots__ = ("_event", "_failure", "_issued", "_on_lost", "_stream", "driver", "error", "is_lost")

    def __init__(self, driver: CudaDriver | None = None, on_lost: OnLost | None = None) -> None:
        self.error: str | None = None
        self.is_lost = False
        self.driver = driver
        self._on_lost = on_lost
        self._event: torch.cuda.Event | None = None
        self._stream: torch.cuda.Stream | None = None  # on which it is recorded
        self._failure: str | None = None  # known at issue; it becomes `error` when the device has ended the rest
        self._issued = threading.Event()

    def done(self) -> bool:
        """Whether the copy has ended; a driver error is found here and becomes `error`."""
        if not self._issued.is_set():
            return False
        if self.error is not None or self._event is None:
            return True
        with beside_captures(self.driver):
            passed = self._passed()
        if passed and not self.is_lost:
            self.error = self._failure
        return passed

    def wait(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for the end; False if it has not come. Releases the GIL, does not spin."""
        deadline = time.monotonic() + timeout
        if not self._issued.wait(timeout):
            return False
        while not self.done():
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL)
        return True

    def issued(self, event: torch.cuda.Event, stream: torch.cuda.Stream, failure: str | None = None) -> None:
        """The device has the copy, or the part of it before `failure`; `event` is recorded behind that."""
        self._event, self._stream, self._failure = event, stream, failure
        self._issued.set()

    def fail(self, error: str) -> None:
        """The device was given nothing of the copy; no effect on one that was issued."""
        if not self._issued.is_set():
            self.error = error
            self._issued.set()

    def lose(self, error: str) -> None:
        """The device was given part of the copy, and its end cannot be observed."""
        self.is_lost, self.error = True, error
        self._issued.set()
        if self._on_lost is not None:
            self._on_lost(error)

    @property
    def is_issued(self) -> bool:
        """Whether the device was given the copy, or never will be."""
        return self._issued.is_set()

    @property
    def failure(self) -> str | None:
        """Why the copy is known to fail, even while the device is still busy with a part of it."""
        return self.error or self._failure

    def fence(self, stream: torch.cuda.Stream, timeout: float) -> bool:
        """Make `stream` wait for the copy; False if that fails or was not issued within `timeout` seconds."""
        if not self._issued.wait(timeout) or self.failure is not None:
            return False
        if self._event is not None:
            stream.wait_event(self._event)
        return True

    def _passed(self) -> bool:
        assert self._event is not None
        try:
            return bool(self._event.query())  # type: ignore[no-untyped-call]
        except DEVICE_ERRORS as failure:
            if is_of_capture(failure):
                return False
            first = str(failure)
        try:
            assert self._stream is not None
            again = _device_event()
            again.record(self._stream)
            passed = bool(again.query())  # type: ignore[no-untyped-call]
        except DEVICE_ERRORS:
            self.lose(first)
            return True
        self._event, self._failure = again, self._failure or first
        return passed


def beside_captures(driver: CudaDriver | None) -> AbstractContextManager[None]:
    """`CudaDriver.beside_captures`, if there is a driver."""
    return nullcontext() if driver is None else driver.beside_captures()


def _device_event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


_PINNED: Final = 5.0  # seconds for the slots of a copy to be pinned; then it goes through pageable memory
_GRACE: Final = 0.5  # seconds at least for the thread to end its current copy
_CAPTURING: Final = "a CUDA graph is being captured on the calling stream"


class CudaCopyStream:
    """Copies between an L1 on a GPU and a region, on one stream per direction. Thread-safe.

    Fences: a copy without `after` waits for all earlier work of the calling thread's current stream. So a store
    sees finished blocks, and a load overwrites no block that is still read. `fence` makes that stream wait for a
    copy.
    A copy that the device was given cannot be cancelled: it ends even after `close`. Until its event is done, its L1
    block and L2 slot must stay out of use. Slots that are not pinned yet are pinned first. A thread waits for that,
    and gives the device these copies and later ones of the same direction.
    A device that fails for good (`CudaEvent`) ends the stream: every later copy fails at once, and the region's memory
    stays mapped.
    """

    def __init__(
        self,
        device: torch.Tensor | EngineBlocks,
        region: HostRegion,
        *,
        max_queued: int = MAX_QUEUED,
        cupy: Any = None,
        driver: CudaDriver | None = None,
        ways: CopyWays | None = None,
    ) -> None:
        """`device` is L1: contiguous `[num_blocks, num_layers, …]`, or an engine's own blocks.

        `cupy` and `driver` are the machine's by default. `ways` choose how to copy, and may start a measurement in the
        background; by default published figures count. ValueError if its blocks don't fit the slots.
        """
        self._driver = driver = driver or cuda_driver()
        self.ways = ways or CopyWays()

        def make_copier(
            memory: torch.Tensor | EngineBlocks, region: HostRegion, ways: CopyWays
        ) -> TensorCopier | Packer:
            direct = driver if driver is not None and driver.copies_in_batches else None
            if isinstance(memory, EngineBlocks):
                return Packer(memory, region, direct, ways, _part_kernels(memory, region, cupy))
            return TensorCopier(memory, region, cupy, direct, ways)

        self._copier = make_copier(device, region, self.ways)
        tensors = [part.tensor for part in device.parts] if isinstance(device, EngineBlocks) else [device]
        self._calibration: Calibration | None = None
        if driver is not None and region.pinning is not None and self.ways.wants_measuring:
            self._calibration = _calibration(self._copier, self.ways, driver, make_copier)
        self._region = region
        self._max_queued = max_queued
        self._streams: dict[CopyDirection, torch.cuda.Stream] = {"load": _stream(tensors), "store": _stream(tensors)}
        self._issuer = ThreadPoolExecutor(1, "kvtier-copy")  # has no thread before its first copy
        self._last_issued: dict[CopyDirection, Future[None]] = {}  # the thread's last work
        self._lock = threading.Lock()  # guards the two fields below and the order of issue; never held in a wait
        self._pending: dict[CopyDirection, deque[CudaEvent]] = {"load": deque(), "store": deque()}
        self._closed = False
        self._lost: str | None = None  # the device's last error

    def load(self, copies: BlockCopies, after: object | None = None) -> CopyEvent:
        """Enqueue L2 → L1 copies; `after` is a torch.cuda.Event or an event of this stream."""
        return self._enqueue("load", copies, after)

    def store(self, copies: BlockCopies, after: object | None = None) -> CopyEvent:
        """Enqueue L1 → L2 copies; `after` is a torch.cuda.Event or an event of this stream."""
        return self._enqueue("store", copies, after)

    def fence(self, event: CopyEvent, timeout: float) -> bool:
        """Make the calling thread's stream wait for the copy. A captured one cannot: the copy has to have ended."""
        if not isinstance(event, CudaEvent):
            return event.wait(timeout)
        if _is_capturing():
            return event.done() and event.error is None
        try:
            return event.fence(torch.cuda.current_stream(self._copier.device), timeout)
        except DEVICE_ERRORS as failure:
            self._notice(failure)
            return False

    def mark(self) -> object | None:
        """The work of the calling thread's current stream by now, as an `after`."""
        try:
            return None if _is_capturing() else self._now()
        except DEVICE_ERRORS as failure:
            self._notice(failure)
            return None

    def drain(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        with self._lock:
            pending = [event for events in self._pending.values() for event in events]
        return all(event.wait(max(0.0, deadline - time.monotonic())) for event in pending)

    def close(self, timeout: float) -> None:
        """Drain; copies that the device does not have yet are cancelled, others run on. Idempotent."""
        with self._lock:
            self._closed = True
        if self._calibration is not None:
            self._calibration.close(timeout)
        if not self.drain(timeout):
            self._region.keep()
            logger.warning("closed with copies in flight after %.1f s; their memory is not used again", timeout)
        ending = threading.Thread(target=self._issuer.shutdown, kwargs={"cancel_futures": True}, daemon=True)
        ending.start()
        ending.join(max(timeout, _GRACE))
        if is_stuck := ending.is_alive():  # in a copy of pageable memory
            self._region.keep()
        with self._lock:
            for event in [*self._pending["load"], *self._pending["store"]]:
                if is_stuck and not event.done():
                    event.lose("a copy hung when the stream was closed")
                event.fail(CANCELLED)  # no effect on copies that the device has

    def _enqueue(self, direction: CopyDirection, copies: BlockCopies, after: object | None) -> CopyEvent:
        event = CudaEvent(self._driver, self._end)
        error = invalid_copies(copies, self._copier.num_blocks, self._copier.num_layers, self._region.num_slots)
        if after is None and _is_capturing():
            error = _CAPTURING
        try:
            before = self._predecessor(after) if error is None else event
        except DEVICE_ERRORS as failure:
            self._notice(failure)
            event.fail(str(failure))
            return event
        with self._lock:
            pending = self._pending[direction]
            while pending and pending[0].done():
                pending.popleft()
            if error is None and self._lost is not None:
                error = f"the device is lost: {self._lost}"
            if error is None and self._closed:
                error = "the stream is closed"
            if error is None and len(pending) >= self._max_queued:
                error = "the copy queue is full"
            if error is not None:
                event.fail(error)
                return event
            pending.append(event)
            last = self._last_issued.get(direction)
            is_next = (last is None or last.done()) and (not isinstance(before, CudaEvent) or before.is_issued)
            if is_next and self._region.is_pinned(copies.host_slots):
                self._issue(direction, copies, before, event)
            else:
                issued = self._issuer.submit(self._issue_pinned, direction, copies, before, event)
                self._last_issued[direction] = issued
        return event

    def _issue_pinned(
        self, direction: CopyDirection, copies: BlockCopies, before: "torch.cuda.Event | CudaEvent", event: CudaEvent
    ) -> None:
        """`_issue` once the slots are pinned. If they cannot be, the copy blocks this thread, maybe the device, too."""
        self._region.pinned_soon(copies.host_slots, _PINNED)
        self._issue(direction, copies, before, event)

    def _predecessor(self, after: object | None) -> "torch.cuda.Event | CudaEvent":
        if after is None:
            return self._now()
        if isinstance(after, torch.cuda.Event | CudaEvent):
            return after
        raise TypeError(f"after: a torch.cuda.Event or an event of this stream, not {type(after).__name__}")

    def _now(self) -> torch.cuda.Event:
        now = _device_event()
        now.record(torch.cuda.current_stream(self._copier.device))
        return now

    def _issue(
        self, direction: CopyDirection, copies: BlockCopies, before: "torch.cuda.Event | CudaEvent", event: CudaEvent
    ) -> None:
        """Give the device the copies. A failure ends in the event, also on the issuing thread."""
        stream, failure, is_given = self._streams[direction], None, False
        try:
            with beside_captures(self._driver):
                if isinstance(before, torch.cuda.Event):
                    stream.wait_event(before)
                elif before.failure is not None:
                    return event.fail(f"what it waited for failed: {before.failure}")
                elif not before.fence(stream, 0):
                    return event.fail("what it waits for was not enqueued")
                with torch.cuda.device(self._copier.device), torch.cuda.stream(stream):
                    is_given = True
                    try:
                        self._copier.copy(direction, copies, is_chained=isinstance(before, CudaEvent))
                    except DEVICE_ERRORS as error:  # the device still runs the copies given before
                        failure = str(error)
                    ended = _device_event()
                    ended.record(stream)
            event.issued(ended, stream, failure)
        except DEVICE_ERRORS as error:
            if is_given:  # its end cannot be observed
                event.lose(failure or str(error))
            else:
                self._notice(error)
                event.fail(str(error))
        return None

    def _notice(self, failure: Exception) -> None:
        if is_lasting(failure):
            self._end(str(failure))

    def _end(self, error: str) -> None:
        """The device has failed for good. Logs it once."""
        self._region.keep()
        if self._lost is None:
            self._lost = error
            logger.error(
                "CUDA has failed for good, so KV is neither stored nor loaded any more, and memory that copies may "
                "still write to is not used again; if the engine cannot compute either, restart it: %s",
                error.partition("\n")[0],
            )


def _part_kernels(blocks: EngineBlocks, region: HostRegion, cupy: Any) -> dict[int, PartKernels]:
    """By group, compiled now; none without CuPy or its compiler."""
    made: dict[int, PartKernels] = {}
    try:
        for group in range(blocks.num_groups) if region.pinning is not None else ():
            if (kernels := PartKernels.of(blocks.select(group, None), cupy)) is not None:
                made[group] = kernels
    except NO_CUPY as failure:
        say_what_is_lost(failure)
        return {}
    return made


def _calibration(
    copier: TensorCopier | Packer, ways: CopyWays, driver: CudaDriver, make_copier: MakeCopier
) -> Calibration | None:
    """The measurement of the copier's device; None if nothing is to be measured."""
    try:
        name = torch.cuda.get_device_name(copier.device)
    except RuntimeError as error:  # the driver's: copies will fail, too, and say so
        logger.warning("the device's name is not known, so how copies go best is not measured: %s", error)
        return None
    key = ChoiceKey(
        device=name,
        driver=driver.version,
        cuda=str(torch.version.cuda),
        cupy=_version_of("cupy"),
        kvtier=_version_of("kvtier"),
        kind="engine" if isinstance(copier, Packer) else "own",
        ways="+".join(copier.ways),
    )
    return Calibration(ways, key, lambda: CopyProbe.open(copier.device, driver, make_copier, copier.ways))


def _version_of(module: str) -> str:
    """Of a module that is loaded; to load CuPy only for its version would take seconds."""
    return str(getattr(sys.modules.get(module), "__version__", "none"))


def _stream(tensors: Sequence[torch.Tensor]) -> torch.cuda.Stream:
    """A stream of their device; the tensors' memory is not reused before the stream's work has ended."""
    stream = torch.cuda.Stream(tensors[0].device)  # type: ignore[no-untyped-call]
    for tensor in tensors:
        tensor.record_stream(stream)
    return stream


def _is_capturing() -> bool:
    """Whether a CUDA graph is being captured on the calling thread's current stream."""
    return torch.cuda.is_current_stream_capturing()
