"""A socket's bytes in and out before a deadline, in as few calls as can be: plain, or TLS.

A socket with a Python timeout polls and receives piece by piece, and takes the GIL back each time. So a plain socket
is blocking, with SO_RCVTIMEO and SO_SNDTIMEO.
"""

import socket
import ssl
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, Protocol

from kvtier.tiers import Outcome
from kvtier.tiers.redis.turns import Turns

SendBuffer = bytes | memoryview

PATIENCE: Final = 0.05  # seconds a call waits at most before somebody looks at what has come
_SEND_PARTS: Final = 1024  # per sendmsg; the kernel takes no more
_TLS_BYTES: Final = 256 << 10  # per call of a TLS socket


class WireError(Exception):
    """The connection is of no use any more: it failed (IO_ERROR), kept silent (TIMEOUT) or talks nonsense (CHECKSUM).

    Raised inside the Redis tier only, which drops the connection.
    """

    def __init__(self, outcome: Outcome, why: str) -> None:
        super().__init__(why)
        self.outcome = outcome


class TooLongError(WireError):
    """A value is longer than ours are: it costs the connection, and only itself, for the rest can be asked for anew."""

    def __init__(self, size: int) -> None:
        super().__init__(Outcome.CHECKSUM, f"a value of {size} bytes, not one of ours")


class ByteStream(Protocol):
    """Bytes in and out before `deadline` (time.monotonic); WireError otherwise."""

    takes_turns: bool
    """Whether `take_turns` may be called: the extension module knows no TLS."""

    def take_turns(self, run: Turns, depth: int, deadline: float) -> None:
        """Go on with `run` as far as it goes. Never raises: if something is wrong, the next `receive` tells."""

    def send(self, parts: Sequence[SendBuffer], deadline: float) -> None:
        """All of it."""

    def receive(self, into: memoryview, deadline: float) -> int:
        """Whatever there is, at least one byte."""

    def receive_all(self, into: memoryview, deadline: float) -> None:
        """As many bytes as there is room for."""

    def receive_run(self, into: Sequence[memoryview], deadline: float) -> int:
        """As many bytes as there is room for, or what had come of them, nothing even, when `PATIENCE` or the
        connection ended. Never raises: if something is wrong, the next `receive` tells."""

    def is_quiet(self) -> bool:
        """Whether the peer is there and has said nothing unasked. Does not wait."""


def stream_of(sock: socket.socket) -> ByteStream:
    """Over a connected socket, which is the stream's from now on."""
    return _TlsStream(sock) if isinstance(sock, ssl.SSLSocket) else _PlainStream(sock)


class _PlainStream:
    """A blocking socket whose calls the kernel ends in time: after `PATIENCE` at the latest, so that nearly no call has
    to tell it anew."""

    takes_turns = True

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(None)
        self._sock = sock
        self._armed = {socket.SO_RCVTIMEO: 0.0, socket.SO_SNDTIMEO: 0.0}  # seconds; 0 waits forever

    def send(self, parts: Sequence[SendBuffer], deadline: float) -> None:
        rest = parts
        while rest:
            some = rest[:_SEND_PARTS]
            self._arm(socket.SO_SNDTIMEO, _left(deadline))
            try:
                sent = self._sock.sendmsg(some)
            except BlockingIOError:
                continue
            except OSError as error:
                raise _failed(error) from None
            if len(some) == len(rest) and sent == sum(map(_nbytes, some)):
                return
            rest = cut([memoryview(part) for part in rest], sent)[1]

    def receive(self, into: memoryview, deadline: float) -> int:
        return self._received(into, 0, deadline)

    def receive_all(self, into: memoryview, deadline: float) -> None:
        while into.nbytes:
            into = into[self._received(into, socket.MSG_WAITALL, deadline) :]

    def receive_run(self, into: Sequence[memoryview], deadline: float) -> int:
        left = deadline - time.monotonic()
        if left <= 0:
            return 0
        self._arm(socket.SO_RCVTIMEO, left)
        try:
            return self._sock.recvmsg_into(into, 0, socket.MSG_WAITALL)[0]
        except OSError:
            return 0

    def take_turns(self, run: Turns, depth: int, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left > 0:
            with suppress(OSError):  # closed meanwhile
                self._arm(socket.SO_RCVTIMEO, left)
                self._arm(socket.SO_SNDTIMEO, left)
                run.run(self._sock.fileno(), depth, deadline)

    def is_quiet(self) -> bool:
        try:
            self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def _received(self, into: memoryview, flags: int, deadline: float) -> int:
        while True:
            self._arm(socket.SO_RCVTIMEO, _left(deadline))
            try:
                received = self._sock.recv_into(into, 0, flags)
            except BlockingIOError:
                continue
            except OSError as error:
                raise _failed(error) from None
            return received or _closed()

    def _arm(self, option: int, left: float) -> None:
        """The kernel counts all waits of one call against these seconds, of which 0 would mean to wait forever."""
        seconds = max(0.001, min(left, PATIENCE))
        if seconds != self._armed[option]:
            self._sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", 0, int(seconds * 1e6)))
            self._armed[option] = seconds


class _TlsStream:
    """TLS knows no iovecs and no MSG_WAITALL, and has its own record layer between kernel and us."""

    takes_turns = False

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._sock = sock

    def send(self, parts: Sequence[SendBuffer], deadline: float) -> None:
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

    def receive_all(self, into: memoryview, deadline: float) -> None:
        while into.nbytes:
            into = into[self.receive(into[:_TLS_BYTES], deadline) :]

    def receive_run(self, into: Sequence[memoryview], deadline: float) -> int:
        received = 0
        deadline = min(deadline, time.monotonic() + PATIENCE)
        with suppress(WireError):
            for view in into:
                end = received + view.nbytes
                while received < end:
                    received += self.receive(view[received - end :][:_TLS_BYTES], deadline)
        return received

    def take_turns(self, run: Turns, depth: int, deadline: float) -> None:
        """Nothing: what it is to do is done without it."""

    def is_quiet(self) -> bool:
        self._sock.settimeout(0)
        try:
            self._sock.recv(1)  # takes in session tickets, which are no data
        except ssl.SSLWantReadError:
            return True
        except OSError:
            return False
        return False


def cut(parts: Sequence[memoryview], count: int) -> tuple[list[memoryview], list[memoryview]]:
    """The first `count` bytes of the parts, and those behind."""
    for number, part in enumerate(parts):
        if count <= 0:
            return list(parts[:number]), list(parts[number:])
        if count < part.nbytes:
            return [*parts[:number], part[:count]], [part[count:], *parts[number + 1 :]]
        count -= part.nbytes
    return list(parts), []


def _nbytes(part: SendBuffer) -> int:
    return part.nbytes if isinstance(part, memoryview) else len(part)


def _left(deadline: float) -> float:
    """Seconds until `deadline`, more than 0; WireError once it has passed."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise WireError(Outcome.TIMEOUT, "the deadline passed")
    return left


def _failed(error: OSError) -> WireError:
    timed_out = isinstance(error, BlockingIOError | TimeoutError | ssl.SSLWantReadError | ssl.SSLWantWriteError)
    return WireError(Outcome.TIMEOUT if timed_out else Outcome.IO_ERROR, str(error))


def _closed() -> int:
    raise WireError(Outcome.IO_ERROR, "the server closed the connection")
