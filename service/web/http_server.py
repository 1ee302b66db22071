"""An HTTP server on its own thread: which clients are admitted, by which host names, and which are too slow."""

import asyncio
import errno
import hmac
import ipaddress
import logging
import math
import resource
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import h11
import uvicorn
from pydantic import SecretStr
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvtier.service import REQUEST_ID, Crowd, begin_request, request_id
from kvtier.tiers import ConfigError, tracing

_BODY: Final = 10.0  # seconds in which a request's body must arrive
_LOOPBACK: Final = ("127.", "::1", "::ffff:127.")
_FROM_A_PAGE: Final = {"origin", "sec-fetch-site"}  # of browsers, which may send some other types to any site
_LOCAL_NAMES: Final = ("127.0.0.1", "localhost", "[::1]", "::1")


def cors(origins: Sequence[str]) -> list[Middleware]:
    """Lets pages of these origins call an API from a browser. Empty: no page may."""
    if not origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id"],
        )
    ]


@dataclass(slots=True)
class Guard:
    """Who may use guarded routes: holders of the token; without a token, local programs that are not web pages."""

    token: SecretStr | None  # a reload may change it

    def admit(self, request: Request, *, any_type: bool = False) -> None:
        """HTTPException 401 without a hint, or 415. `any_type`: other types than JSON, too, except from a web page."""
        if self.token is not None:
            key = request.headers.get("x-api-key", "")  # Anthropic's header
            given = request.headers.get("authorization", f"Bearer {key}").encode("latin-1")  # the bytes as received
            expected = f"Bearer {self.token.get_secret_value()}".encode()
            allowed = hmac.compare_digest(given, expected)
        else:  # a web page in a local browser may send requests too, but not under a local name to itself
            client = request.client.host if request.client is not None else ""
            host = request.headers.get("host", "")
            name = host if host.endswith("]") else host.rpartition(":")[0] or host
            allowed = client.startswith(_LOOPBACK) and name in _LOCAL_NAMES
        if not allowed:
            raise HTTPException(401, "not allowed")
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        is_free = any_type and (self.token is not None or _FROM_A_PAGE.isdisjoint(request.headers.keys()))
        if request.method == "POST" and kind != "application/json" and not is_free:
            raise HTTPException(415, f'content-type "{kind[:40]}": send application/json')


async def disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def read_body(request: Request, limit: int) -> bytes:
    """The request's body. Raises HTTPException if it has more than `limit` bytes, is too slow or is cut short."""
    too_large = HTTPException(413, f"body: more than {limit} bytes; send less at a time")
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length[:20]) > limit:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY):
            async for piece in request.stream():
                body += piece
                if len(body) > limit:
                    raise too_large
    except TimeoutError:
        raise HTTPException(408, f"body: not received within {_BODY:g} s; send it at once") from None
    except ClientDisconnect:
        raise HTTPException(400, "body: cut short; send all of it") from None
    return bytes(body)


# --- pages without a body --------------------------------------------------------------------------------------------


def page(path: str, answer: Callable[[], Response | Awaitable[Response]], guard: Guard | None = None) -> Route:
    async def endpoint(request: Request) -> Response:
        if guard is not None:
            guard.admit(request)
        answered = answer()
        return answered if isinstance(answered, Response) else await answered

    return Route(path, endpoint, methods=["GET"])


# --- names it answers to ---------------------------------------------------------------------------------------------

_ANY: Final = "*"
_GUARDED: Final = ("/v1/", "/admin/")  # `Guard` requires the token, or a local name if there is no token
_HEALTH: Final = ("/healthz", "/readyz")  # they report health only, nothing of what the server holds


class HostNames:
    """The names a server answers to: localhost, IP addresses, its address, this machine's name, and those configured.

    This prevents DNS rebinding: a page of evil.example may make that name point to 127.0.0.1, and then read the answers
    as its own. But its requests carry `Host: evil.example`. An IP address was never looked up, so it is safe.
    """

    def __init__(self, address: str, names: Iterable[str] = ()) -> None:
        """`address` is the configured HOST:PORT. A * in `names` allows every name."""
        known = (address.rpartition(":")[0], socket.gethostname(), *names)
        self._names = {_plain_name(name) for name in known if name}

    def admits(self, path: str, host: bytes | None) -> bool:
        """Whether a request for `path` under the Host header `host` is answered; `host` is None without a header."""
        if host is None or path in _HEALTH or path.startswith(_GUARDED) or _ANY in self._names:
            return True  # None is allowed since every browser sends the header
        name = _plain_name(name_in(host.decode("latin-1")))
        return name in self._names or name == "localhost" or name.endswith(".localhost") or _is_address(name)


def name_in(host: str) -> str:
    name, _, port = host.rpartition(":")
    return name if port.isdecimal() and name else host


def _plain_name(name: str) -> str:
    return name.strip().strip("[]").rstrip(".").lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


# --- the server ------------------------------------------------------------------------------------------------------

_log = logging.getLogger(__name__)
_BACKLOG: Final = 1024  # connections that the kernel queues; those past the limit below get an answer that says so
_MAX_REQUESTS: Final = 64  # requests answered at once; as many connections may wait for their next request
_RESERVED: Final = 16  # health checks answered beside them
_MAX_HEADERS: Final = 16 << 10  # bytes
_HEAD: Final = 5.0  # seconds until the head of a connection's first request must be whole
_IDLE: Final = 10.0  # seconds from one request to the end of the next one's head
_GRACE: Final = 2  # seconds that requests may take to end at a stop
_STOPPED: Final = 3.0  # seconds that the thread may take beyond that
_LOOK: Final = 0.02  # seconds between two checks that they have ended
_PAUSE: Final = 60.0  # seconds between two log lines that no connection can be accepted
_NO_FILES: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_MAX_HELD: Final = 64 << 10  # bytes of an answer that wait for the next turn of the loop
_MANY: Final = "too many requests at once; try again later"
_TWO_LENGTHS: Final = "content-length, transfer-encoding: a body has only one of them; send one"
_NO_HTTP: Final = "request: not HTTP/1.1; see what the client sends before the body"

RefusalForm = Callable[[int, str], Response]
"""Makes the answer that refuses a request, from its status and message."""


def _plain(status: int, message: str) -> Response:
    return JSONResponse({"error": message}, status)


class _Listening(socket.socket):
    """One backlog, whatever asyncio requests: asyncio accepts so many connections in a row, and logs each failure."""

    def listen(self, backlog: int = _BACKLOG, /) -> None:
        del backlog
        super().listen(_BACKLOG)


class HttpSocket:
    def __init__(
        self,
        address: str,
        section: str = "service",
        names: Iterable[str] = (),
        *,
        is_shared: bool = False,
        listens: bool = True,
    ) -> None:
        """HOST:PORT from `http` of that section, port 0: any; `names`: its `allowed_hosts`. ConfigError.

        `is_shared`: other processes of this user may listen there, too; each connection goes to one of them.
        Without `listens` it only reserves the address.
        """
        self.section, self._given = section, address
        self.answer_to(names)
        host, _, port = address.rpartition(":")
        try:
            info = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            # asyncio disables Nagle only if the socket says it is TCP; else kept connections answer 40 ms later
            family, kind, protocol, _, where = info[0]
            self.socket = _Listening(family, kind | socket.SOCK_CLOEXEC, protocol)
            try:
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if is_shared:
                    self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                self.socket.bind(where)
                if listens:
                    self.socket.listen()
            except OSError:
                self.socket.close()
                raise
        except OSError as error:
            why = f"{error.strerror}; choose another address or port"
            raise ConfigError(f'[{section}] http "{address}": {why}') from None

    def answer_to(self, names: Iterable[str]) -> None:
        """Change the `allowed_hosts`."""
        self.hosts = HostNames(self._given, names)

    @property
    def address(self) -> str:
        host, port = self.socket.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def close(self) -> None:
        self.socket.close()


class HttpServer:
    """Serves an application from `start` until `stop`, on its own thread.

    A request past `max_requests` at once is refused; health checks have room of their own. `refusal` makes refusals in
    the form of the application's errors. Connections without a whole request head do not count; past `max_requests`
    of them one is closed: the longest waiting of the address that has most. Either bound is at most a quarter of the
    files that the process may open. `stop` sets `stopping`, for endless streams and the application, which goes on
    for at most `drain` seconds while requests are under way. Requests left then have `grace` seconds.
    """

    def __init__(
        self,
        app: ASGIApp,
        listening: HttpSocket,
        *,
        max_requests: int = _MAX_REQUESTS,
        refusal: RefusalForm = _plain,
        grace: int = _GRACE,
        drain: float = 0.0,
        stopping: threading.Event | None = None,
    ) -> None:
        self.address = listening.address
        self._app = _traced(app) if tracing.ON else app
        self.listening, self._grace, self.drain = listening, grace, drain
        max_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        max_requests = min(max_requests, max_files // 4)  # the rest is for files of requests, and for engines
        self._max_requests, self._refuse, self._logged_at = max_requests, refusal, -math.inf
        self._num_requests = self._num_health = 0
        self._stopping = stopping or threading.Event()
        config = uvicorn.Config(
            self._admit,
            interface="asgi3",
            loop="asyncio",
            http=type(
                "_ProtocolOf", (_Protocol,), {"waiting": Crowd(max_requests), "no_http": self._last(400, _NO_HTTP)}
            ),
            ws="none",
            lifespan="on",
            backlog=1,
            log_config=None,
            log_level="critical",
            access_log=False,
            proxy_headers=False,  # the client is the peer of the connection
            server_header=False,
            h11_max_incomplete_event_size=_MAX_HEADERS,
            timeout_keep_alive=int(_IDLE),
            timeout_graceful_shutdown=grace,
        )
        self._server = uvicorn.Server(config)
        sockets = [listening.socket]
        self._thread = threading.Thread(target=self._server.run, args=(sockets,), name="kvtier-http", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> int:
        """Let requests under way end, for at most `drain` and `grace` seconds, and close the socket. Idempotent.

        Returns how many were still under way after `drain`.
        """
        self._stopping.set()
        end = time.monotonic() + self.drain
        while self._num_requests and self._thread.is_alive() and time.monotonic() < end:
            time.sleep(_LOOK)
        num_left, self._server.should_exit = self._num_requests, True
        if self._thread.is_alive():
            self._thread.join(self._grace + _STOPPED)
        self.listening.close()
        return num_left

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            asyncio.get_running_loop().set_exception_handler(self._not_accepted)
            await self._app(scope, receive, send)
        elif (refusal := self._refusal(scope)) is not None:
            await refusal(scope, receive, send)
        elif scope["path"] in _HEALTH:
            await self._answer_health(scope, receive, send)
        else:
            self._num_requests += 1
            try:
                await self._app(*_named(scope, receive, send))
            finally:
                self._num_requests -= 1

    def _not_accepted(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle asyncio's reports: of connections it cannot accept, each second, and of other errors."""
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in _NO_FILES:
            loop.default_exception_handler(context)
        elif loop.time() - self._logged_at >= _PAUSE:
            self._logged_at = loop.time()
            _log.warning("http %s: takes no connection: %s; raise the limit of open files", self.address, error)

    async def _answer_health(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a health check. Its room is free once the answer is made: a client that never reads keeps none."""
        answer: list[Message] = []

        async def keep(message: Message) -> None:
            answer.append(message)

        self._num_health += 1
        try:
            await self._app(scope, receive, keep)
        finally:
            self._num_health -= 1
        for message in answer:
            await send(message)

    def _refusal(self, scope: Scope) -> Response | None:
        """The refusal of a request, if it is refused. A refusal takes no room, since some clients do not read it."""
        headers: dict[bytes, bytes] = dict(scope["headers"])
        path, host = scope["path"], headers.get(b"host")
        if b"content-length" in headers and b"transfer-encoding" in headers:
            # A proxy in between may use the other length, and see a second request in the body.
            return self._last(400, _TWO_LENGTHS)
        if self._num_health >= _RESERVED if path in _HEALTH else self._num_requests >= self._max_requests:
            return self._last(503, _MANY)
        if not self.listening.hosts.admits(path, host):
            name = name_in((host or b"").decode("latin-1"))[:100]
            why = f'host "{name}": not a name of this server; add it to [{self.listening.section}] allowed_hosts'
            return self._refuse(421, why)
        return None

    def _last(self, status: int, message: str) -> Response:
        """A refusal after which the connection closes: the rest of the request is not read."""
        answer = self._refuse(status, message)
        answer.headers["connection"] = "close"
        return answer


def _named(scope: Scope, receive: Receive, send: Send) -> tuple[Scope, Receive, Send]:
    """The request with an id, the client's or ours: for the log, for forwarding, and in the answer."""
    given = next((value for name, value in scope["headers"] if name == REQUEST_ID), None)
    header = (REQUEST_ID, begin_request(None if given is None else given.decode("latin-1")).encode())

    async def answer(message: Message) -> None:
        if message["type"] == "http.response.start":
            others = [each for each in message.get("headers", ()) if each[0].lower() != REQUEST_ID]
            message = {**message, "headers": [*others, header]}
        await send(message)

    passed = [each for each in scope["headers"] if each[0] != REQUEST_ID]
    return {**scope, "headers": [*passed, header]}, receive, answer


_TRACEPARENT: Final = b"traceparent"  # the W3C's header
_SPANS: Final = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")  # that name their path


def _traced(app: ASGIApp) -> ASGIApp:
    """The application with a span for each request of an API, which goes on the client's trace."""

    async def traced(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        tracing.current.set(None)  # a pipelined request begins in the context of the one before it
        if not path.startswith("/v1/") or scope["method"] != "POST":
            await app(scope, receive, send)
            return
        given = next((value.decode("latin-1") for name, value in scope["headers"] if name == _TRACEPARENT), None)
        name, status = f"POST {path}" if path in _SPANS else "POST", 0
        trace = tracing.begin(name, given, "server", {"url.path": path[:128], "request_id": request_id() or ""})
        if trace is None:  # the server stops
            await app(scope, receive, send)
            return

        async def answer(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        others = [each for each in scope["headers"] if each[0] != _TRACEPARENT]
        header = (_TRACEPARENT, trace.traceparent.encode())
        tracing.current.set(trace if trace.is_recorded else None)
        try:
            await app({**scope, "headers": [*others, header]}, receive, answer)
        finally:
            error = f"status {status}" if status >= 500 else None if status else "not answered"
            trace.end({"http.response.status_code": status}, error)

    return traced


class _OneSend:
    """A transport that joins what is written in one turn of the loop: each `send` of a socket costs as much.

    So an answer's head, its body and its end go together. All else is the transport's own.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._held = b""
        self.is_closing = transport.is_closing

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._held:
            self._loop.call_soon(self.flush)
        self._held += data
        if len(self._held) > _MAX_HELD:
            self.flush()

    def flush(self, data: bytes = b"") -> None:
        """Send what was written, and this behind it."""
        data, self._held = self._held + data, b""
        if data:
            self._transport.write(data)

    def close(self) -> None:
        self.flush()
        self._transport.close()


class _Protocol(H11Protocol):
    """Closes connections whose request head is late, or whose client reads nothing: uvicorn would wait for ever.

    Requests that are not HTTP get the application's refusal, not uvicorn's text.
    A request's `state` has `pass_chunks`, which writes ready-made chunks of an answer.
    """

    waiting: "Crowd[_Protocol]"
    no_http: Response
    _timer: asyncio.TimerHandle | None = None
    _requests_seen: Any = None
    _num_unread: int = 0

    @property
    def waits(self) -> bool:
        """Whether no request is under way: the next head is not whole, or none has come."""
        cycle: Any = self.cycle  # of the last request; None before the first
        return cycle is None or bool(cycle.response_complete)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(cast(asyncio.Transport, _OneSend(transport, self.loop)))
        self.app_state = {**self.app_state, "pass_chunks": self._pass_chunks}
        self._timer = self.loop.call_later(_HEAD, self._look)
        self._wait()
        if (victim := self.waiting.surplus()) is not None:
            victim.transport.abort()

    def _wait(self) -> None:
        self.waiting.add(self, self.client[0] if self.client is not None else "")

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self.waits:
            self.waiting.discard(self)

    def connection_lost(self, error: Exception | None) -> None:
        self.waiting.discard(self)
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(error)

    def send_400_response(self, msg: str) -> None:
        """`msg` is uvicorn's, without details."""
        del msg
        answer = (
            h11.Response(status_code=400, headers=self.no_http.raw_headers, reason=b"Bad Request"),
            h11.Data(data=bytes(self.no_http.body)),
            h11.EndOfMessage(),
        )
        for event in answer:
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def on_response_complete(self) -> None:
        if not self.transport.is_closing():
            self._wait()
        super().on_response_complete()
        if not self.waits:  # the next request has arrived already
            self.waiting.discard(self)

    def _pass_chunks(self, chunks: bytes) -> bool:
        """Write ready chunks past ASGI and h11. False, unwritten, for a slow or dead client, or no chunks."""
        is_body = self.conn.our_state is h11.SEND_BODY and self.conn.their_http_version == b"1.1"
        if not is_body or self.flow.write_paused or self.transport.is_closing():
            return False
        cast(_OneSend, self.transport).flush(chunks)
        return True

    def _look(self) -> None:
        """Every `_IDLE` seconds: close a connection that makes no progress, neither in reading nor with a request."""
        num_unread = self.transport.get_write_buffer_size()
        if num_unread and num_unread == self._num_unread:
            self.transport.abort()
            return
        if not num_unread and self.waits and self.cycle is self._requests_seen:
            self.transport.close()
            return
        self._requests_seen, self._num_unread = self.cycle, num_unread
        self._timer = self.loop.call_later(_IDLE, self._look)
