"""The completion of a copy on a GPU: what its device's event says, and what it means if the device says no more."""

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Final

import torch

from kvtier.tiers.copies.device_errors import DEVICE_ERRORS, is_of_capture
from kvtier.tiers.host import CudaDriver

_POLL: Final = 50e-6  # seconds between looks at a device event in `wait`

OnLost = Callable[[str], None]


class CudaEvent:
    """A `CopyEvent` of the device: done once it was issued and the device's event has passed.

    If the device cannot say of its event whether it has passed, another one is recorded behind it. If it cannot say of
    that either, the copy is lost: done, with an error, and what it touched must stay out of use.
    """

    __slots__ = ("_event", "_failure", "_issued", "_on_lost", "_stream", "driver", "error", "is_lost")

    def __init__(self, driver: CudaDriver | None = None, on_lost: OnLost | None = None) -> None:
        self.error: str | None = None
        self.is_lost = False
        self.driver = driver
        self._on_lost = on_lost
        self._event: torch.cuda.Event | None = None
        self._stream: torch.cuda.Stream | None = None  # on which it is recorded
        self._failure: str | None = None  # known at issue; it becomes `error` once the device is past the rest
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
        """Wait up to `timeout` seconds for the end; False if it has not come. Gives up the GIL, spins on nothing."""
        deadline = time.monotonic() + timeout
        if not self._issued.wait(timeout):
            return False
        while not self.done():
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL)
        return True

    def issued(self, event: torch.cuda.Event, stream: torch.cuda.Stream, failure: str | None = None) -> None:
        """The device now knows the copy, or the part of it before `failure`; `event` is recorded behind that."""
        self._event, self._stream, self._failure = event, stream, failure
        self._issued.set()

    def fail(self, error: str) -> None:
        """The device was given nothing of the copy; no effect on one that was issued."""
        if not self._issued.is_set():
            self.error = error
            self._issued.set()

    def lose(self, error: str) -> None:
        """The device was given some of the copy, and nobody can tell when that ends."""
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
            again = device_event()
            again.record(self._stream)
            passed = bool(again.query())  # type: ignore[no-untyped-call]
        except DEVICE_ERRORS:
            self.lose(first)
            return True
        self._event, self._failure = again, self._failure or first
        return passed


def beside_captures(driver: CudaDriver | None) -> AbstractContextManager[None]:
    """`CudaDriver.beside_captures`, where there is a driver."""
    return nullcontext() if driver is None else driver.beside_captures()


def device_event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]
