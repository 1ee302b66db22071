"""A deadline for answers that come byte by byte, since a socket's timeout restarts at each; and one GET under it."""

import http.client
import socket
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from threading import Event, Timer


@contextmanager
def disconnect_after(connected: Callable[[], socket.socket | None], seconds: float) -> Iterator[Event]:
    """Shut the connection down after so many seconds, and set the event. `connected` is called only then."""
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


def get_page(address: str, path: str, seconds: float, most: int = 1 << 20) -> tuple[int, bytes]:
    """Status and body at HOST:PORT: no proxy, no redirect, one deadline. OSError, HTTPException, ValueError."""
    host, _, port = address.rpartition(":")
    with closing(http.client.HTTPConnection(host.strip("[]"), int(port), timeout=seconds)) as connection:
        connection.connect()
        connected = connection.sock
        with disconnect_after(lambda: connected, seconds) as late:
            connection.request("GET", path)
            answer = connection.getresponse()
            status, body = answer.status, answer.read(most)
        if late.is_set():  # otherwise a cut-off head or body would count as whole
            raise TimeoutError(f"no whole answer within {seconds:g} s")
        return status, body
