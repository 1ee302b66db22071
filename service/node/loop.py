"""One thread that waits for many files at once, for calls from other threads, and for time to pass."""

import contextlib
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, TypeVar

from kvtier.tiers import TierUnavailable

T = TypeVar("T")

READABLE: Final = select.EPOLLIN
WRITABLE: Final = select.EPOLLOUT
_MAX_CALLS: Final = 4096  # from other threads, waiting for their turn
_BUFFER: Final = 256 << 10  # bytes read at once

ReadyHandler = Callable[[int], object]
"""Called with what is ready: READABLE, WRITABLE, or more of epoll's bits."""


class Loop:
    """Readiness, calls and time on one thread. `call`, `submit`, `wake` and `stop` are for any thread."""

    def __init__(self) -> None:
        self.buffer = memoryview(bytearray(_BUFFER))  # what a handler reads into: good until it returns
        self._epoll = select.epoll()
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._handlers: dict[int, tuple[ReadyHandler, int]] = {}  # fd → handler, and the round it came in
        self._round = 0
        self.watch(self._event, self._woken)
        self._calls: deque[Callable[[], None]] = deque()
        self._thread = 0
        self._stopped = False

    def watch(self, fd: int, handler: ReadyHandler, events: int = READABLE) -> None:
        self._handlers[fd] = handler, self._round
        self._epoll.register(fd, events)

    def change(self, fd: int, events: int) -> None:
        self._epoll.modify(fd, events)

    def forget(self, fd: int) -> None:
        """Watch the file no more: before it is closed."""
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def run(self, turn: Callable[[], float]) -> None:
        """Serve until `stop`. After every round `turn` is called and says how many seconds to wait at most."""
        self._thread = threading.get_ident()
        wait = 0.0
        while not self._stopped:
            ready = self._epoll.poll(wait)
            self._round += 1
            for fd, events in ready:
                handler, since = self._handlers.get(fd, (None, 0))  # an earlier one may have let it go,
                if handler is not None and since < self._round:  # and yet another have opened a file of that number
                    handler(events)
            while self._calls:
                self._calls.popleft()()
            wait = turn()

    def call(self, function: Callable[[], None]) -> None:
        """Have `function` called on the loop's thread, soon. It must not wait."""
        self._calls.append(function)
        self.wake()

    def submit(self, function: Callable[[], T]) -> "Future[T]":
        """As `call`, and the result in a future: wait for it with a deadline. It may hold TierUnavailable instead."""
        future: Future[T] = Future()
        if self._stopped or len(self._calls) >= _MAX_CALLS:
            future.set_exception(TierUnavailable("the daemon is stopping, or has too much to do"))
        else:
            self.call(lambda: _settle(future, function))
        return future

    def wake(self) -> None:
        if threading.get_ident() != self._thread and not self._stopped:
            with contextlib.suppress(OSError):  # as full of wake-ups as can be
                os.eventfd_write(self._event, 1)

    def stop(self) -> None:
        """End `run` after this round. Safe in a signal handler."""
        self._stopped = True
        with contextlib.suppress(OSError):
            os.eventfd_write(self._event, 1)

    def close(self) -> None:
        """Give the files of its own back; calls that still wait are made, so that nobody waits for them."""
        while self._calls:
            self._calls.popleft()()
        self._handlers.clear()
        self._epoll.close()
        os.close(self._event)

    def _woken(self, events: int) -> None:
        os.eventfd_read(self._event)


def _settle(future: "Future[T]", function: Callable[[], T]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(function())
        except Exception as error:
            future.set_exception(error)


now: Final = time.monotonic  # the clock of the daemon, in seconds
