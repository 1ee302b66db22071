"""Ends a wait for an answer that comes byte by byte: for a socket each byte begins a new wait."""

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event, Timer


@contextmanager
def disconnect_after(connected: Callable[[], socket.socket | None], seconds: float) -> Iterator[Event]:
    """Shut the connection down after so many seconds: who reads from it reads its end. Then the event is set.

    `connected` is asked at that time; None: there is no connection yet.
    """
    late = Event()

    def end() -> None:
        late.set()
        if (found := connected()) is not None:
            with suppress(OSError):
                socket.socket.shutdown(found, socket.SHUT_RDWR)  # that of TLS would say goodbye first

    timer = Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield late
    finally:
        timer.cancel()
