"""One payload connection to a Redis server: RESP by hand, so that payloads go straight between socket and host slots.

redis-py opens the socket (address, TLS, login) and hands it over in `socket_of`, the one place that reaches into it.
From then on only this file uses it. A payload never becomes a Python object: it is sent from, and received into, the
caller's memory, in one call that lets go of the GIL once. A socket with a Python timeout would poll and receive piece
by piece, taking the GIL back each time: so it is a blocking one with SO_RCVTIMEO and SO_SNDTIMEO.
"""

import socket
import ssl
import struct
import time
from collections.abc import Sequence
from typing import Final, Protocol

from redis.connection import AbstractConnection

from kvtier.tiers.tier import Outcome

Part = bytes | memoryview

_SEND_BYTES: Final = 4 << 20  # per sendmsg
_SEND_PARTS: Final = 512  # per sendmsg; the kernel takes 1,024
_TLS_BYTES: Final = 256 << 10  # per call of a TLS socket
_BUFFER: Final = 64 << 10
_MAX_LINE: Final = 4096  # bytes of an error message
_MAX_SMALL: Final = 4096  # bytes of a reply that is no payload
_TAIL: Final = 2 + 4  # bytes surely behind a payload: its CRLF and the shortest reply, as in ":1" CRLF


class Refusal(str):
    """An error reply: what the server said, without its leading "-"."""

    @property
    def code(self) -> str:
        """Its first word, as in OOM, MOVED, READONLY."""
        return self.partition(" ")[0]


class WireError(Exception):
    """The connection is of no use any more: it failed (IO_ERROR), kept silent (TIMEOUT) or talks nonsense (CHECKSUM).

    Raised inside the Redis tier only, which drops the connection.
    """

    def __init__(self, outcome: Outcome, why: str) -> None:
        super().__init__(why)
        self.outcome = outcome


Reply = int | bytes | None | Refusal


class _Stream(Protocol):
    """Bytes in and out before `deadline` (time.monotonic); WireError otherwise."""

    def send(self, parts: Sequence[Part], deadline: float) -> None:
        """All of it."""

    def receive(self, into: memoryview, deadline: float) -> int:
        """Whatever there is, at least one byte."""

    def receive_all(self, into: Sequence[memoryview], deadline: float) -> None:
        """As many bytes as there is room for."""

    def is_quiet(self) -> bool:
        """Whether the peer is there and has said nothing unasked. Does not wait."""


def socket_of(connection: AbstractConnection) -> socket.socket:
    """The socket of a connected redis-py connection, for our use alone; tested against the installed redis-py."""
    sock = getattr(connection, "_sock", None)  # there is no public way; this one held from redis-py 6.0 to 8.1
    if not isinstance(sock, socket.socket):
        raise WireError(Outcome.IO_ERROR, "redis-py gave no socket: this version of it is not known to kvtier")
    return sock


class Wire:
    """Commands out, replies in, in order. Not thread-safe: borrowed by one thread at a time.

    `begin` sets the deadline for everything until the next `begin`. `num_expected` counts the replies still due: a
    connection is fit for others only if it is 0 (`is_clean`), else the next command would get the last one's answer.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._stream: _Stream = _TlsStream(sock) if isinstance(sock, ssl.SSLSocket) else _PlainStream(sock)
        self._view = memoryview(bytearray(_BUFFER))
        self._start = self._end = 0  # what was received and not yet consumed
        self._ahead = _BUFFER
        self._deadline = 0.0
        self.num_expected = 0

    def begin(self, deadline: float, ahead: int = _BUFFER) -> None:
        """Before a batch. `ahead`: how far past a reply's start a receive may run: to where a payload would begin."""
        self._deadline = deadline
        self._ahead = ahead

    def send(self, parts: Sequence[Part], num_replies: int) -> None:
        """Send commands that bring `num_replies` replies."""
        self.num_expected += num_replies
        self._stream.send(parts, self._deadline)

    @property
    def is_clean(self) -> bool:
        """Whether every reply was read, and nothing beyond."""
        return not self.num_expected and self._start == self._end

    def is_quiet(self) -> bool:
        """Whether an idle connection still stands and has said nothing unasked."""
        return self._stream.is_quiet()

    def reply(self) -> Reply:
        """The next reply, of a command that answers briefly. None for nil."""
        line = self._line()
        if not _opens_bulk(line):
            return self._simple(line)
        size = _length(line)
        if size > _MAX_SMALL:
            raise WireError(Outcome.CHECKSUM, f"{size} bytes where a short answer was due")
        body = self._take(size + 2)
        self.num_expected -= 1
        return body[:-2]

    def value(self, head_bytes: int, into: memoryview) -> bytes | Outcome | Refusal | None:
        """The next reply, of a GET: a record whose payload fills `into`; returns its first `head_bytes` bytes.

        None for nil. CHECKSUM where it has another length; a short one is read past, into `into`, a longer one costs
        the connection. Another reply must be due behind it: its first bytes are received along.
        """
        line = self._line()
        if not _opens_bulk(line):
            simple = self._simple(line)
            if isinstance(simple, Refusal) or simple is None:
                return simple
            raise WireError(Outcome.CHECKSUM, f"no answer to GET: {line[:32]!r}")
        size = _length(line)
        if size != head_bytes + into.nbytes:
            self._skip(size, into)
            return Outcome.CHECKSUM
        head = self._take(head_bytes)
        assert self._start == self._end, "received into the payload"
        self._stream.receive_all([into, self._view[:_TAIL]], self._deadline)
        self._start, self._end = 0, _TAIL
        self._end_of_bulk()
        return head

    # inside

    def _simple(self, line: bytes) -> Reply:
        """The reply that one line is."""
        kind, rest = line[:1], line[1:]
        reply: Reply
        if line == b"$-1":
            reply = None
        elif kind == b"+":
            reply = rest
        elif kind == b"-":
            reply = Refusal(rest.decode("utf-8", "replace"))
        elif kind == b":" and rest.removeprefix(b"-").isdigit() and len(rest) <= 20:
            reply = int(rest)
        else:
            raise WireError(Outcome.CHECKSUM, f"no reply in RESP2: {line[:32]!r}")
        self.num_expected -= 1
        return reply

    def _skip(self, size: int, scratch: memoryview) -> None:
        """Read past a bulk of the wrong length, if it is short enough to be worth the connection."""
        if size > scratch.nbytes:
            raise WireError(Outcome.CHECKSUM, f"a value of {size} bytes, not one of ours")
        here = min(size, self._end - self._start)
        self._start += here
        if size > here:
            self._stream.receive_all([scratch[: size - here]], self._deadline)
        self._end_of_bulk()

    def _end_of_bulk(self) -> None:
        if self._take(2) != b"\r\n":
            raise WireError(Outcome.CHECKSUM, "a bulk without its end")
        self.num_expected -= 1

    def _line(self) -> bytes:
        """Up to the next CRLF, without it."""
        line = b""
        while not line.endswith(b"\n"):
            if self._start == self._end:
                # what belongs to this reply was counted: a "$" line's payload begins `ahead` bytes after its start
                self._receive(self._ahead - len(line) if line[:1] in (b"", b"$") else self._ahead)
            chunk = bytes(self._view[self._start : self._end])
            end = chunk.find(b"\n") + 1 or len(chunk)
            line += chunk[:end]
            self._start += end
            if len(line) > (24 if line[:1] == b"$" else _MAX_LINE):
                raise WireError(Outcome.CHECKSUM, "a line without an end")
        if line[-2:] != b"\r\n":
            raise WireError(Outcome.CHECKSUM, f"no reply in RESP2: {line[:32]!r}")
        return line[:-2]

    def _take(self, count: int) -> bytes:
        """The next `count` bytes (few)."""
        taken = bytes(self._view[self._start : min(self._end, self._start + count)])
        self._start += len(taken)
        while len(taken) < count:
            self._receive(count - len(taken))
            taken += self._view[: self._end]
            self._start = self._end
        return taken

    def _receive(self, limit: int) -> None:
        """Refill the empty buffer with 1 to `limit` bytes."""
        self._start = 0
        self._end = self._stream.receive(self._view[: min(limit, _BUFFER)], self._deadline)


def _opens_bulk(line: bytes) -> bool:
    return line[:1] == b"$" and line != b"$-1"


def _length(line: bytes) -> int:
    digits = line[1:]
    if not digits.isdigit() or len(digits) > 12:
        raise WireError(Outcome.CHECKSUM, f"no length: {line[:32]!r}")
    return int(digits)


class _PlainStream:
    """A blocking socket whose calls the kernel ends in time."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(None)
        self._sock = sock

    def send(self, parts: Sequence[Part], deadline: float) -> None:
        queue = [memoryview(part) for part in parts]
        first = 0
        while first < len(queue):
            last, size = first, 0
            while last < len(queue) and last - first < _SEND_PARTS and (last == first or size < _SEND_BYTES):
                size += queue[last].nbytes
                last += 1
            self._arm(socket.SO_SNDTIMEO, deadline)
            try:
                sent = self._sock.sendmsg(queue[first:last])
            except OSError as error:
                raise _failed(error) from None
            while first < last and sent >= queue[first].nbytes:
                sent -= queue[first].nbytes
                first += 1
            if sent:
                queue[first] = queue[first][sent:]

    def receive(self, into: memoryview, deadline: float) -> int:
        self._arm(socket.SO_RCVTIMEO, deadline)
        try:
            received = self._sock.recv_into(into)
        except OSError as error:
            raise _failed(error) from None
        return received or _closed()

    def receive_all(self, into: Sequence[memoryview], deadline: float) -> None:
        rest = list(into)
        while rest:
            self._arm(socket.SO_RCVTIMEO, deadline)
            try:
                received = self._sock.recvmsg_into(rest, 0, socket.MSG_WAITALL)[0]
            except OSError as error:
                raise _failed(error) from None
            if not received:
                _closed()
            while rest and received >= rest[0].nbytes:
                received -= rest[0].nbytes
                del rest[0]
            if received:
                rest[0] = rest[0][received:]

    def is_quiet(self) -> bool:
        try:
            self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def _arm(self, option: int, deadline: float) -> None:
        """The kernel counts all waits of one call against this."""
        left = _left(deadline)
        self._sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(left), int(left % 1 * 1e6)))


class _TlsStream:
    """TLS knows no iovecs and no MSG_WAITALL, and has its own record layer between kernel and us."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._sock = sock

    def send(self, parts: Sequence[Part], deadline: float) -> None:
        for part in parts:
            view = memoryview(part)
            while view.nbytes:
                self._sock.settimeout(_left(deadline))
                try:
                    view = view[self._sock.send(view[:_TLS_BYTES]) :]
                except OSError as error:
                    raise _failed(error) from None

    def receive(self, into: memoryview, deadline: float) -> int:
        self._sock.settimeout(_left(deadline))
        try:
            received = self._sock.recv_into(into)
        except OSError as error:
            raise _failed(error) from None
        return received or _closed()

    def receive_all(self, into: Sequence[memoryview], deadline: float) -> None:
        for view in into:
            while view.nbytes:
                view = view[self.receive(view[:_TLS_BYTES], deadline) :]

    def is_quiet(self) -> bool:
        self._sock.settimeout(0)
        try:
            self._sock.recv(1)  # takes in session tickets, which are no data
        except ssl.SSLWantReadError:
            return True
        except OSError:
            return False
        return False


def _left(deadline: float) -> float:
    """Seconds until `deadline`, never 0, which would mean to wait forever."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise WireError(Outcome.TIMEOUT, "the deadline passed")
    return max(left, 0.001)


def _failed(error: OSError) -> WireError:
    timed_out = isinstance(error, BlockingIOError | TimeoutError | ssl.SSLWantReadError | ssl.SSLWantWriteError)
    return WireError(Outcome.TIMEOUT if timed_out else Outcome.IO_ERROR, str(error))


def _closed() -> int:
    raise WireError(Outcome.IO_ERROR, "the server closed the connection")
