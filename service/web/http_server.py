"""An HTTP server on a thread beside what it serves: its socket, no patience with who neither speaks nor reads."""

import asyncio
import socket
import threading
from typing import Any, Final

import h11
import uvicorn
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvtier.tiers.errors import ConfigError

_BACKLOG: Final = 1024  # connections the kernel keeps for us; those past the limit below are told so
_MAX_CONNECTIONS: Final = 64
_MAX_HEADERS: Final = 16 << 10  # bytes
_IDLE: Final = 10.0  # seconds a connection may take over a request's head, or between two
_GRACE: Final = 2  # seconds requests may take to their end at a stop
_STOPPED: Final = 3.0  # seconds the thread may take beyond that
_CROWDED: Final = JSONResponse({"error": "too many connections; come again later"}, 503, {"connection": "close"})


class HttpSocket:
    """A bound, listening socket, before there is anything to serve on it."""

    def __init__(self, address: str, section: str = "service") -> None:
        """`address` is HOST:PORT, from that section's `http`; port 0 is one the system chooses.

        ConfigError where it cannot be had.
        """
        host, _, port = address.rpartition(":")
        try:
            info = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            # asyncio sends at once only where a socket says it is TCP; else a kept connection's answers take 40 ms more
            family, kind, protocol, _, where = info[0]
            self.socket = socket.socket(family, kind | socket.SOCK_CLOEXEC, protocol)
            try:
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                self.socket.bind(where)
                self.socket.listen(_BACKLOG)
            except OSError:
                self.socket.close()
                raise
        except OSError as error:
            why = f"{error.strerror}; choose another address or port"
            raise ConfigError(f'[{section}] http "{address}": {why}') from None

    @property
    def address(self) -> str:
        """HOST:PORT in use."""
        host, port = self.socket.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def close(self) -> None:
        """Give the address back; idempotent."""
        self.socket.close()


class HttpServer:
    """Serves an application from `start` until `stop`, on a thread of its own.

    A request on a connection past `max_connections` is answered `crowded`. `grace`: seconds for requests at a stop;
    `stopping` is set then, for those that would go on.
    """

    def __init__(
        self,
        app: ASGIApp,
        listening: HttpSocket,
        *,
        max_connections: int = _MAX_CONNECTIONS,
        crowded: Response = _CROWDED,
        grace: int = _GRACE,
        stopping: threading.Event | None = None,
    ) -> None:
        """Takes the socket over."""
        self.address = listening.address
        self._app, self._listening, self._grace = app, listening, grace
        self._max_connections, self._crowded = max_connections, crowded
        self._stopping = stopping or threading.Event()
        config = uvicorn.Config(
            self._admit,
            interface="asgi3",
            loop="asyncio",
            http=_Impatient,
            ws="none",
            lifespan="on",
            log_config=None,
            log_level="critical",
            access_log=False,
            proxy_headers=False,  # who asks is who has connected
            server_header=False,
            h11_max_incomplete_event_size=_MAX_HEADERS,
            timeout_keep_alive=int(_IDLE),
            timeout_graceful_shutdown=grace,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="kvtier-http", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def stop(self) -> None:
        """Let requests under way end, for `grace` seconds, and close the socket. Idempotent."""
        self._stopping.set()
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(self._grace + _STOPPED)
        self._listening.close()

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_crowded = len(self._server.server_state.connections) > self._max_connections
        app = self._crowded if is_crowded and scope["type"] == "http" else self._app
        await app(scope, receive, send)

    def _run(self) -> None:
        self._server.run(sockets=[self._listening.socket])


class _Impatient(H11Protocol):
    """Hangs up on who brings no whole request head in time, or reads nothing of an answer: uvicorn waits for ever.

    A request's `state` has `pass_chunks`, for who has an answer's chunks already.
    """

    _timer: asyncio.TimerHandle | None = None
    _requests_seen: Any = None
    _num_unread: int = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app_state = {**self.app_state, "pass_chunks": self._pass_chunks}
        self._timer = self.loop.call_later(_IDLE, self._look)

    def connection_lost(self, error: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(error)

    def _pass_chunks(self, chunks: bytes) -> bool:
        """Write whole chunks of the body under way as they are: neither ASGI nor h11 has anything to do for them.

        False, and nothing is written, where there is something: the client is slow or gone, or knows no chunks.
        """
        is_body = self.conn.our_state is h11.SEND_BODY and self.conn.their_http_version == b"1.1"
        if not is_body or self.flow.write_paused or self.transport.is_closing():
            return False
        self.transport.write(chunks)
        return True

    def _look(self) -> None:
        """Each `_IDLE` seconds: a request must be under way, or another one than at the last look have come.

        And where an answer waits to be read, some of it must have been.
        """
        cycle: Any = self.cycle  # of the last request; None before the first
        is_waiting = cycle is None or cycle.response_complete
        if is_waiting and cycle is self._requests_seen:
            self.transport.close()
            return
        num_unread = self.transport.get_write_buffer_size()
        if num_unread and num_unread == self._num_unread:
            self.transport.abort()
            return
        self._requests_seen, self._num_unread = cycle, num_unread
        self._timer = self.loop.call_later(_IDLE, self._look)
