"""A socket's bytes in and out before a deadline, and rows of buffers moved over it: one loop for all shared tiers."""

import select
import socket
import ssl
import struct
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, Protocol, TypeAlias

from kvtier.tiers import Outcome, checksum
from kvtier.tiers.compiled import extension
from kvtier.tiers.shared.life import StorageFailed

SendBuffer = bytes | bytearray | memoryview
Failure = Callable[[Outcome, str], StorageFailed]

PATIENCE: Final = 0.05  # seconds a call waits at most before received bytes are checked
TIMED_OUT: Final = "the deadline passed"
_COMPILED: Final = "kvtier.tiers.shared.transfer_compiled"
_PARTS: Final = 512  # per call; the kernel takes 1,024 and no more
_TLS_BYTES: Final = 256 << 10  # per call of a TLS socket
_TOGETHER: Final = 4 << 20  # bytes under way at the least without the extension module: few calls, each takes the GIL
_ALL: Final = 1 << 40
_MIN_RTT: Final = 148  # where it is in the kernel's `tcp_info`: a u32 of microseconds


class BlockMac(Protocol):
    """A MAC over a block's head and payload."""

    @property
    def pointers(self) -> tuple[int, int, int, int]:
        """Its state, and its C functions reset(state), update(state, data, size), final(state, tag, 16)."""

    def tag(self, head: SendBuffer, payload: memoryview) -> bytes:
        """16 bytes."""


class PlainTransfer:
    """Rows of buffers to send, each answered by a row of places, or either alone; and how many were moved. In Python:
    over any stream, with many bytes in each call.

    A reply is as usual if it begins with `opening` and ends with CRLF; without `opening` every one is. Of each reply
    the second place is hashed. With `expected` a row to send is head, payload and tag, and goes only if the payload has
    that checksum. `mac` makes its tag if that is a bytearray, and the tags of replies of that form.
    """

    whole: int  # replies received as usual
    part: int  # bytes behind them that are in their places
    num_sent: int  # rows sent
    sent: int  # bytes of the next one that were sent
    unlike: bool  # whether it stopped at a reply that is not as usual, or a payload that has another checksum

    def __init__(
        self,
        sends: Sequence[Sequence[SendBuffer]],
        receives: Sequence[Sequence[memoryview]],
        opening: bytes = b"",
        num_sent: int = 0,
        part: int = 0,
        mac: BlockMac | None = None,
        expected: Sequence[int] | None = None,
    ) -> None:
        self.whole, self.part, self.num_sent, self.sent, self.unlike = 0, part, num_sent, 0, False
        self._sends, self._receives, self._opening, self._mac, self._expected = sends, receives, opening, mac, expected

    def run(self, stream: "ByteStream", under_way: int, deadline: float, until: int) -> None:
        """Go on until `until` replies are whole, or all rows sent that have none, until `deadline` (time.monotonic),
        `unlike` or the end of the connection. Raises nothing.

        A row is sent when less than `under_way` bytes, of rows sent and of their replies, are still to come.
        """
        rows = len(self._receives)
        together = max(under_way, _TOGETHER) if rows else under_way
        with suppress(StorageFailed):
            while not self.unlike and (self.whole < min(rows, until) if rows else self.num_sent < len(self._sends)):
                if time.monotonic() >= deadline:
                    return
                if self.num_sent < len(self._sends) and (not rows or self._waiting() < together):
                    self._send(stream, together, deadline)
                elif not self._receive(stream, deadline):
                    return

    def hash_at(self, i: int) -> int:
        """xxh3-64 of a whole reply's payload."""
        return checksum(self._receives[i][1])

    def tag_at(self, i: int) -> bytes:
        """The tag that a whole reply should have."""
        assert self._mac is not None
        head, payload, _ = self._receives[i]
        return self._mac.tag(head, payload)

    def _waiting(self) -> int:
        rows = range(self.whole, self.num_sent)
        return sum(_size(self._sends[i]) + _size(self._receives[i]) for i in rows) - self.part

    def _send(self, stream: "ByteStream", together: int, deadline: float) -> None:
        """As many rows as may go now."""
        parts: list[SendBuffer] = []
        end, size = self.num_sent, 0
        while end < len(self._sends) and size < together and not self.unlike:
            row = self._sends[end]
            if self._expected is not None:
                head, payload, tag = row[0], memoryview(row[1]), row[2]
                self.unlike = checksum(payload) != self._expected[end]
                if self._mac is not None and isinstance(tag, bytearray) and not self.unlike:
                    tag[:] = self._mac.tag(head, payload)
            if not self.unlike:
                parts += row
                size += _size(row) + (_size(self._receives[end]) if self._receives else 0)
                end += 1
        stream.send(parts, deadline)
        self.num_sent = end

    def _receive(self, stream: "ByteStream", deadline: float) -> bool:
        """False if there is nothing to wait for any more, as far as one can tell."""
        end = self.num_sent if self._sends else len(self._receives)
        places = [place for row in self._receives[self.whole : min(end, self.whole + _PARTS)] for place in row]
        came = stream.receive_run(cut(places, self.part)[1][:_PARTS], deadline)
        self.part += came
        self._take()
        return bool(came) or not self._opening or self.part >= len(self._opening)

    def _take(self) -> None:
        while self.part and self.whole < len(self._receives):
            row, begun = self._receives[self.whole], min(self.part, len(self._opening))
            if row[0][:begun] != self._opening[:begun]:
                self.unlike = True
                return
            if self.part < (size := _size(row)):
                return
            if self._opening and bytes(row[-1][-2:]) != b"\r\n":
                self.unlike = True
                return
            self.part -= size
            self.whole += 1


Transfer: TypeAlias = PlainTransfer
"""What `ByteStream.transfer` makes: this, or the same compiled."""


class ByteStream:
    """A plain socket's bytes in and out before `deadline` (time.monotonic); else what `failure` makes.

    It is blocking, and the kernel limits its calls to `PATIENCE`, so that the timeout is rarely set anew. A socket
    with a Python timeout polls and receives piece by piece, and takes the GIL back each time.
    """

    is_plain = True  # the extension module knows no TLS

    def __init__(self, sock: socket.socket, failure: Failure) -> None:
        sock.settimeout(None)
        self._sock = sock
        self._failure = failure
        self._armed = {socket.SO_RCVTIMEO: 0.0, socket.SO_SNDTIMEO: 0.0}  # seconds; 0 waits forever

    def fileno(self) -> int:
        return self._sock.fileno()

    def transfer(self, *rows: Any, **more: Any) -> Transfer:
        """A `Transfer` for this stream, with the arguments of `PlainTransfer`."""
        module = extension(_COMPILED) if self.is_plain else None
        make: Callable[..., Transfer] = PlainTransfer if module is None else module.Transfer
        return make(*rows, **more)

    def move(self, run: Transfer, under_way: int, deadline: float, until: int = _ALL) -> None:
        """Run it as far as possible. Never raises: if the connection failed, the next `receive` raises."""
        left = deadline - time.monotonic()
        if left > 0:
            with suppress(OSError):  # closed meanwhile
                self._arm(socket.SO_RCVTIMEO, left)
                self._arm(socket.SO_SNDTIMEO, left)
                run.run(self, under_way, deadline, until)

    def stopped(self, deadline: float) -> StorageFailed:
        """Why a transfer did not go on."""
        late = time.monotonic() >= deadline
        return self._failure(*((Outcome.TIMEOUT, TIMED_OUT) if late else (Outcome.IO_ERROR, "the connection ended")))

    def round_trip(self) -> float:
        """The shortest lately, in seconds, by the kernel; 0 if it does not say."""
        with suppress(OSError):
            info = self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MIN_RTT + 4)
            return 1e-6 * int.from_bytes(info[_MIN_RTT:], sys.byteorder)
        return 0.0

    def send(self, parts: Sequence[SendBuffer], deadline: float) -> None:
        """All of it."""
        rest = parts
        while rest:
            some = rest[:_PARTS]
            self._arm(socket.SO_SNDTIMEO, self._left(deadline))
            try:
                sent = self._sock.sendmsg(some)
            except BlockingIOError:
                continue
            except OSError as error:
                raise self._failed(error) from None
            if len(some) == len(rest) and sent == _size(some):
                return
            rest = cut([memoryview(part) for part in rest], sent)[1]

    def receive(self, into: memoryview, deadline: float) -> int:
        """Receive at least one byte."""
        return self._received(into, 0, deadline)

    def receive_all(self, into: memoryview, deadline: float) -> None:
        """Fill the buffer."""
        while into.nbytes:
            into = into[self._received(into, socket.MSG_WAITALL, deadline) :]

    def receive_run(self, into: Sequence[memoryview], deadline: float) -> int:
        """Fill the buffers, until `PATIENCE`; returns the bytes."""
        self._arm(socket.SO_RCVTIMEO, self._left(deadline))
        try:
            return self._sock.recvmsg_into(into, 0, socket.MSG_WAITALL)[0] or self._closed()
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self._failed(error) from None

    def wait(self, seconds: float) -> bool:
        """Whether there is something to receive, or the connection has ended, within that time."""
        poll = select.poll()
        poll.register(self._sock.fileno(), select.POLLIN)
        return bool(poll.poll(max(0.0, 1e3 * seconds)))

    def is_quiet(self) -> bool:
        """Whether the peer is connected and has sent nothing unexpected. Does not wait."""
        return not self.wait(0)

    def _received(self, into: memoryview, flags: int, deadline: float) -> int:
        while True:
            self._arm(socket.SO_RCVTIMEO, self._left(deadline))
            try:
                received = self._sock.recv_into(into, 0, flags)
            except BlockingIOError:
                continue
            except OSError as error:
                raise self._failed(error) from None
            return received or self._closed()

    def _arm(self, option: int, left: float) -> None:
        """Set the kernel's timeout for all waits of one call. 0 would mean to wait forever."""
        seconds = max(0.001, min(left, PATIENCE))
        if seconds != self._armed[option]:
            self._sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", 0, int(seconds * 1e6)))
            self._armed[option] = seconds

    def _left(self, deadline: float) -> float:
        """Seconds until `deadline`, more than 0."""
        left = deadline - time.monotonic()
        if left <= 0:
            raise self._failure(Outcome.TIMEOUT, TIMED_OUT)
        return left

    def _failed(self, error: OSError) -> StorageFailed:
        timed_out = isinstance(error, BlockingIOError | TimeoutError | ssl.SSLWantReadError | ssl.SSLWantWriteError)
        return self._failure(Outcome.TIMEOUT if timed_out else Outcome.IO_ERROR, str(error))

    def _closed(self) -> int:
        raise self._failure(Outcome.IO_ERROR, "the server closed the connection")


class TlsStream(ByteStream):
    """TLS knows no iovecs and no MSG_WAITALL, and has its own record layer between kernel and us."""

    is_plain = False

    def __init__(self, sock: ssl.SSLSocket, failure: Failure) -> None:
        self._sock = sock  # of which Python keeps the time
        self._failure = failure

    def send(self, parts: Sequence[SendBuffer], deadline: float) -> None:
        for part in parts:
            view = memoryview(part)
            while view.nbytes:
                self._sock.settimeout(self._left(deadline))
                try:
                    view = view[self._sock.send(view[:_TLS_BYTES]) :]
                except OSError as error:
                    raise self._failed(error) from None

    def receive(self, into: memoryview, deadline: float) -> int:
        self._sock.settimeout(self._left(deadline))
        try:
            received = self._sock.recv_into(into)
        except OSError as error:
            raise self._failed(error) from None
        return received or self._closed()

    def receive_all(self, into: memoryview, deadline: float) -> None:
        while into.nbytes:
            into = into[self.receive(into[:_TLS_BYTES], deadline) :]

    def receive_run(self, into: Sequence[memoryview], deadline: float) -> int:
        received = 0
        soon = min(deadline, time.monotonic() + PATIENCE)
        for view in into:
            end = received + view.nbytes
            while received < end:
                try:
                    received += self.receive(view[received - end :][:_TLS_BYTES], soon)
                except StorageFailed as failed:
                    if failed.outcome is not Outcome.TIMEOUT and not received:
                        raise
                    return received
        return received

    def is_quiet(self) -> bool:
        self._sock.settimeout(0)
        try:
            self._sock.recv(1)  # consumes session tickets, which are no data
        except ssl.SSLWantReadError:
            return True
        except OSError:
            return False
        return False

    def _arm(self, option: int, left: float) -> None:
        """Each call has its own timeout."""


def cut(parts: Sequence[memoryview], count: int) -> tuple[list[memoryview], list[memoryview]]:
    """The first `count` bytes of the parts, and those behind."""
    for number, part in enumerate(parts):
        if count <= 0:
            return list(parts[:number]), list(parts[number:])
        if count < part.nbytes:
            return [*parts[:number], part[:count]], [part[count:], *parts[number + 1 :]]
        count -= part.nbytes
    return list(parts), []


def _size(parts: Sequence[SendBuffer]) -> int:
    return sum(part.nbytes if isinstance(part, memoryview) else len(part) for part in parts)
