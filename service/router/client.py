"""The router's HTTP client: HTTP/1.1 by h11 on an asyncio protocol, kept connections, a deadline on every wait.

A request costs about a quarter of what it costs through a general client (`benchmarks/router_overhead.py` measures it).
The client notices at once when a replica closes an idle connection. So a killed replica is known before the next probe.
"""

import asyncio
import re
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Final, cast

import h11

from kvtier.tiers import ConfigError

Headers = Sequence[tuple[bytes, bytes]]

Shortcut = Callable[[bytes], bool]
"""Called with whole chunks of an answer, framed as they came. Returns whether it has passed them on."""

_MAX_HEAD: Final = 64 << 10  # bytes of an answer's head
_MAX_HELD: Final = 256 << 10  # bytes read ahead of the client; beyond that the replica has to wait
_MAX_IDLE: Final = 32  # connections kept for later
_LAST_STATUS: Final = 599
_SAYS_BODY: Final = {b"content-length", b"transfer-encoding"}
_CHUNK: Final = re.compile(rb"([0-9A-Fa-f]{1,6})\r\n")  # the line before a chunk's bytes
_ENDS: Final = (b"\n\n\r\n", b"\r\n\r\n\r\n")  # how a chunk ends if an event ends with it


class Failure(StrEnum):
    UNREACHABLE = "unreachable"  # no process listens there
    UNTRUSTED = "untrusted"  # no TLS, or a certificate that cannot be trusted
    BROKEN = "broken"  # it closed the connection before the end
    SLOW_CONNECT = "slow_connect"  # no connection in time
    SLOW_FIRST_BYTE = "slow_first_byte"  # no answer in time
    STALLED = "stalled"  # an answer stopped in the middle
    GARBLED = "garbled"  # not HTTP


class ReplicaFailed(Exception):
    def __init__(self, failure: Failure, detail: str = "") -> None:
        super().__init__(f"{failure}{': ' if detail else ''}{detail}")
        self.failure = failure


@dataclass(frozen=True, slots=True)
class Deadlines:
    connect: float
    first_byte: float
    between: float  # from one piece of an answer to the next
    whole: float = float("inf")  # for the whole request; the proxy enforces it, not this client


@cache
def trusted(ca_file: Path | None) -> ssl.SSLContext:
    """Verifies https replicas by this file, else by the system's authorities, which take 20 ms to read."""
    try:
        context = ssl.create_default_context(cafile=ca_file)
    except OSError as error:  # ssl.SSLError is one
        why = error.strerror or str(error)
        raise ConfigError(f'[router] replica_ca "{ca_file}": {why}; give a file of PEM certificates') from None
    context.set_alpn_protocols(["http/1.1"])
    return context


class ReplicaClient:
    """Connections to one replica. Used by one event loop."""

    def __init__(
        self,
        host: str,
        port: int,
        on_lost: Callable[[], None],
        tls: ssl.SSLContext | None = None,
        server_name: str | None = None,
    ) -> None:
        """`on_lost`: a kept connection was closed. `tls` wants a certificate for `server_name` or `host`."""
        self._host, self._port = host, port
        self._tls, self._server_name = tls, None if tls is None else server_name or host
        name = host if server_name is None else server_name
        self._authority = (f"[{name}]" if ":" in name else name).encode() + b":%d" % port
        self._on_lost = on_lost
        self.idle: deque[_ReplicaConnection] = deque()
        self.open: set[_ReplicaConnection] = set()  # connections keep these two

    async def ask(self, method: str, path: str, headers: Headers, body: bytes, deadlines: Deadlines) -> "ReplicaAnswer":
        """Send a request, and return when the head of its answer is here. Raises ReplicaFailed."""
        lines = [(b"host", self._authority), *headers]
        if body or method == "POST":
            lines.append((b"content-length", b"%d" % len(body)))
        request = h11.Request(method=method, target=path, headers=lines)
        due = asyncio.get_running_loop().time() + deadlines.first_byte
        lost: ReplicaFailed | None = None
        while True:
            try:
                connection, is_kept = await self._connection(deadlines.connect)
            except ReplicaFailed as error:
                raise lost or error from None  # after `lost` the replica is gone, perhaps because of the request
            try:
                connection.send(request, body)
                return ReplicaAnswer(connection, await connection.head(due), due, deadlines.between)
            except ReplicaFailed as error:
                connection.abort()
                if not (is_kept and error.failure is Failure.BROKEN):
                    raise
                lost = error  # the kept connection may have ended meanwhile: try another, then a new one
                self._on_lost()
            except BaseException:
                connection.abort()
                raise

    def trust(self, tls: ssl.SSLContext) -> None:
        """Verify by this from now on, if the replica has TLS: kept connections end."""
        if self._tls is not None:
            self._tls = tls
            for connection in list(self.idle):
                connection.abort()

    def give_up(self) -> None:
        for connection in list(self.open):
            connection.give_up()

    def close(self) -> None:
        self._on_lost = lambda: None
        for connection in list(self.open):
            connection.abort()

    async def _connection(self, timeout: float) -> tuple["_ReplicaConnection", bool]:
        if self.idle:
            return self.idle.pop(), True
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout):
                _, connection = await loop.create_connection(
                    lambda: _ReplicaConnection(self),
                    self._host,
                    self._port,
                    ssl=self._tls,
                    server_hostname=self._server_name,
                )
        except TimeoutError:
            raise ReplicaFailed(Failure.SLOW_CONNECT) from None
        except ssl.SSLError as error:
            why = getattr(error, "verify_message", "") or error.reason or "no TLS"
            raise ReplicaFailed(Failure.UNTRUSTED, why) from None
        except OSError as error:
            raise ReplicaFailed(Failure.UNREACHABLE, error.strerror or "") from None
        except UnicodeError:
            raise ReplicaFailed(Failure.UNREACHABLE, "not a valid host name") from None
        return connection, False

    def lost(self, connection: "_ReplicaConnection") -> None:
        self.open.discard(connection)
        with suppress(ValueError):
            self.idle.remove(connection)
            self._on_lost()


class ReplicaAnswer:
    """One answer under way. Call `close` in every case: it ends the request at the replica."""

    def __init__(self, connection: "_ReplicaConnection", head: h11.Response, due: float, between: float) -> None:
        self.status: Final = head.status_code
        self.headers: Final = head.headers
        self._connection = connection
        self._due, self._between = due, between

    def header(self, name: bytes) -> bytes:
        """The value of a header, by its name in lower case; empty if there is none."""
        return next((value for key, value in self.headers if key == name), b"")

    async def first(self) -> bytes:
        """The first piece of the body, within the rest of the first byte's deadline. Raises ReplicaFailed."""
        return await self._connection.piece(self._due, 0.0, Failure.SLOW_FIRST_BYTE)

    async def piece(self, shortcut: Shortcut | None = None) -> bytes:
        """What came since the last piece; empty at the end. ReplicaFailed if late. `shortcut` may take whole events."""
        return await self._connection.piece(0.0, self._between, Failure.STALLED, shortcut)

    async def read(self, most: int) -> bytes:
        body = bytearray()
        while len(body) <= most and (piece := await self.piece()):
            body += piece
        return bytes(body)

    def close(self) -> None:
        """Keep the connection if the answer has ended, else close it. Idempotent."""
        self._connection.release()


class _ReplicaConnection(asyncio.Protocol):
    """One connection. It serves one request at a time, and reads up to `_MAX_HELD` bytes ahead of it."""

    _transport: asyncio.Transport

    def __init__(self, client: ReplicaClient) -> None:
        self._client = client
        self._loop = asyncio.get_running_loop()
        self._h11 = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_HEAD)
        self._head: h11.Response | None = None
        self._held: list[bytes] = []
        self._num_held = 0
        self._is_whole = False
        self._is_released = True
        self._is_paused = False
        self._failed: ReplicaFailed | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._on_timeout: Failure | None = None  # the failure to report if the wait times out
        self._shortcut: Shortcut | None = None
        self._is_between = False  # the last chunk fed to h11 ended with an event, and nothing came after it
        self._received_at = 0.0

    # --- what a request does -----------------------------------------------------------------------------------------

    def send(self, request: h11.Request, body: bytes) -> None:
        """Begin an exchange. A replica that reads slowly is caught by the first byte's deadline."""
        if self._failed is not None:
            raise self._failed
        self._is_released = False
        events = [request, *([h11.Data(data=body)] if body else []), h11.EndOfMessage()]
        self._transport.writelines([self._h11.send(event) or b"" for event in events])

    async def head(self, due: float) -> h11.Response:
        while self._head is None:
            await self._wait(due, 0.0, Failure.SLOW_FIRST_BYTE)
        return self._head

    async def piece(self, due: float, pause: float, failure: Failure, shortcut: Shortcut | None = None) -> bytes:
        self._shortcut = shortcut
        try:
            while not self._held and not self._is_whole:
                await self._wait(due, pause, failure)
        finally:
            self._shortcut = None
        data = b"".join(self._held)
        self._held.clear()
        self._num_held = 0
        if self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()
        return data

    def release(self) -> None:
        """End the exchange: keep the connection for another, or close it in the middle of an answer."""
        if self._is_released:
            return
        self._is_released = True
        is_clean = self._is_whole and not self._held and self._failed is None
        is_over = self._h11.our_state is h11.DONE and self._h11.their_state is h11.DONE
        if not is_clean or not is_over or self._h11.trailing_data[0]:  # bytes that came unasked belong to no answer
            self.abort()
            return
        self._h11.start_next_cycle()
        self._head, self._is_whole, self._is_between = None, False, False
        if len(self._client.idle) < _MAX_IDLE:
            self._client.idle.append(self)
        else:
            self.abort()

    def give_up(self) -> None:
        if self._on_timeout is Failure.SLOW_FIRST_BYTE:
            self._fail(ReplicaFailed(self._on_timeout, "it does not answer other requests either"))

    def abort(self) -> None:
        self._is_released = True
        self._transport.abort()

    # --- what the network does ---------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's derives from no class of asyncio
        self._client.open.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        if error is None:
            self._feed(b"")
        self._fail(ReplicaFailed(Failure.BROKEN, str(error) if error is not None else "it hung up"))
        self._client.lost(self)

    def data_received(self, data: bytes) -> None:
        self._received_at = self._loop.time()
        may_pass = self._shortcut if self._is_between and not self._held else None
        if may_pass is not None and _are_events(data) and may_pass(data):
            return
        self._feed(data)
        if self._num_held > _MAX_HELD and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def _feed(self, data: bytes) -> None:
        if self._failed is not None or self._is_released:  # bytes that belong to no request
            if data:
                self._transport.abort()
            return
        self._is_between = False
        try:
            self._h11.receive_data(data)
            while (event := self._h11.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
                self._take(event)
                if isinstance(event, h11.ConnectionClosed):
                    break
                self._is_between = isinstance(event, h11.Data) and event.chunk_end and data.endswith(_ENDS)
        except h11.RemoteProtocolError as error:
            is_end = not data  # h11 raises the same error for an answer that is cut short
            self._fail(ReplicaFailed(Failure.BROKEN if is_end else Failure.GARBLED, str(error)))
            self._transport.abort()
        self._wake()

    def _take(self, event: object) -> None:
        if isinstance(event, h11.Data):
            self._held.append(bytes(event.data))
            self._num_held += len(event.data)
        elif isinstance(event, h11.Response):
            if event.status_code > _LAST_STATUS:
                raise h11.RemoteProtocolError(f"{event.status_code} is not an HTTP status")
            self._head = event
        elif isinstance(event, h11.InformationalResponse) and _SAYS_BODY & {name for name, _ in event.headers}:
            raise h11.RemoteProtocolError(f"status {event.status_code} must not have a body")
        elif isinstance(event, h11.EndOfMessage):
            self._is_whole = True

    def _fail(self, error: ReplicaFailed) -> None:
        self._failed = self._failed or error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self, due: float, pause: float, failure: Failure) -> None:
        """Wait until something has come: ReplicaFailed past `due` after `pause` quiet seconds. One timer."""
        if self._failed is not None:
            raise self._failed
        waiter, self._on_timeout = self._loop.create_future(), failure
        self._waiter = waiter
        begun = self._loop.time()
        timer: asyncio.TimerHandle

        def look() -> None:
            nonlocal timer
            until = max(due, max(begun, self._received_at) + pause)
            if until > self._loop.time():
                timer = self._loop.call_at(until, look)
            else:
                self._fail(ReplicaFailed(failure, f"nothing for {self._loop.time() - begun:g} s"))

        timer = self._loop.call_at(max(due, begun + pause), look)
        try:
            await waiter
        finally:
            timer.cancel()
            self._waiter = self._on_timeout = None


def _are_events(data: bytes) -> bool:
    """Whether `data` is whole chunks of a stream, without the last one, and the last of them ends with an event."""
    if not data.endswith(_ENDS):
        return False
    at = 0
    while at < len(data):
        line = _CHUNK.match(data, at)
        if line is None:
            return False
        num_bytes = int(line[1], 16)
        at = line.end() + num_bytes + 2
        if not num_bytes or data[at - 2 : at] != b"\r\n":
            return False
    return at == len(data)
