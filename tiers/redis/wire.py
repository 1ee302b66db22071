"""One payload connection to a Redis server: RESP by hand, so that payloads go straight between socket and host slots.

redis-py opens the socket (address, TLS, login) and hands it over in `socket_of`, the one place that reaches into it.
From then on only this file uses it. A payload never becomes a Python object: it is sent from the caller's memory and
received into it. One call moves many payloads and gives up the GIL once. If the server answers otherwise than it
just said, the payloads of one call at most are taken back from there.
"""

import socket
import time
from collections.abc import Iterator, Sequence
from typing import Final

from redis.connection import AbstractConnection

from kvtier.tiers import Outcome
from kvtier.tiers.redis.stream import SendBuffer, TooLongError, WireError, cut, stream_of

_BUFFER: Final = 16 << 10
_SHORTEST: Final = 4  # bytes of a reply, as in ":1" CRLF
_GLANCE: Final = 64  # bytes looked at for the end of a line
_PATIENCE: Final = 0.05  # seconds a run of values may take until its replies are read one by one
_MAX_LINE: Final = 4096  # bytes of an error message
_MAX_SMALL: Final = 4096  # bytes of a reply that is no payload


class Refusal(str):
    """An error reply: what the server said, without its leading "-"."""

    @property
    def code(self) -> str:
        """Its first word, as in OOM, MOVED, READONLY."""
        return self.partition(" ")[0]


RedisReply = int | bytes | None | Refusal
Head = bytes | Outcome | Refusal | None
"""What a GET brought: a record's first bytes, or why there is none (None for nil)."""


def socket_of(connection: AbstractConnection) -> socket.socket:
    """The socket of a connected redis-py connection, for our use alone; tested against the installed redis-py."""
    sock = getattr(connection, "_sock", None)  # there is no public way; this one held from redis-py 6.0 to 8.1
    if not isinstance(sock, socket.socket):
        raise WireError(Outcome.IO_ERROR, "redis-py gave no socket: this version of it is not known to kvtier")
    return sock


class Wire:
    """Commands out, replies in, in order. Not thread-safe: borrowed by one thread at a time.

    `begin` sets the deadline for everything until the next `begin`. `num_expected` counts the replies still due.
    Others may use a connection only if it is 0 (`is_clean`): else the next command would get the last one's answer.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._stream = stream_of(sock)
        self._buffer = self._view = memoryview(bytearray(_BUFFER))
        self._start = self._end = 0  # what was received and not yet consumed, in `_view`
        self._deadline = 0.0
        self.num_expected = 0

    def begin(self, deadline: float) -> None:
        self._deadline = deadline

    def send(self, parts: Sequence[SendBuffer], num_replies: int) -> None:
        self.num_expected += num_replies
        self._stream.send(parts, self._deadline)

    @property
    def is_clean(self) -> bool:
        return not self.num_expected and self._start == self._end

    def is_quiet(self) -> bool:
        """Whether an idle connection still stands and has said nothing unasked."""
        return self._stream.is_quiet()

    def reply(self) -> RedisReply:
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

    def all_are(self, usual: bytes, count: int) -> bool:
        """Whether the next `count` replies are all `usual` (one short reply, CRLF and all); if so, they are read."""
        wanted = usual * count
        assert len(wanted) <= _BUFFER, f"{count} replies at once"
        while (have := self._end - self._start) < len(wanted):
            if self._view[self._start : self._end] != wanted[:have]:
                return False
            num_whole, part = divmod(len(wanted) - have, len(usual))
            self._receive_more(num_whole * _SHORTEST + part)
        if self._view[self._start : self._start + len(wanted)] != wanted:
            return False
        self._start += len(wanted)
        self.num_expected -= count
        return True

    def value(self, head_bytes: int, into: memoryview) -> Head:
        """The next reply, of a GET: a record whose payload fills `into`; returns its first `head_bytes` bytes.

        CHECKSUM if it has another length: a shorter one is read past, into `into`. TooLongError if it is longer.
        """
        line = self._line()
        if not _opens_bulk(line):
            simple = self._simple(line)
            if isinstance(simple, Refusal) or simple is None:
                return simple
            raise WireError(Outcome.CHECKSUM, f"no answer to GET: {line[:32]!r}")
        size = _length(line)
        if size != head_bytes + into.nbytes:
            if size > into.nbytes:
                raise TooLongError(size)
            self._fill(into[:size])
            self._end_of_bulk()
            return Outcome.CHECKSUM
        head = self._take(head_bytes)
        self._fill(into)
        self._end_of_bulk()
        return head

    def values(self, head_bytes: int, into: Sequence[memoryview]) -> Iterator[Head]:
        """`value` for each buffer (all of one size), which are received together: for values known to be there.

        If one is not, after all, the others' bytes came into the wrong places. Nothing of them is lost: they are
        taken back and read one by one.
        """
        if heads := self._run(head_bytes, into):
            yield from heads
        else:
            for buffer in into:
                yield self.value(head_bytes, buffer)

    # inside

    def _run(self, head_bytes: int, into: Sequence[memoryview]) -> list[bytes]:
        """Every value's head; [] if the replies are not all there and all of the right length: then all are unread."""
        line = b"$%d\r\n" % (head_bytes + into[0].nbytes)
        before = len(line) + head_bytes
        each = before + 2  # and the CRLF behind the payload
        around = memoryview(bytearray(each * len(into)))
        places = [around[:before]]
        for number, buffer in enumerate(into, 1):  # behind a payload: its end, and the next one's beginning
            places += (buffer, around[number * each - 2 : number * each + before])
        received = sum(self._give(place) for place in places)  # what is there already
        rest = cut(places, received)[1]
        if rest:
            received += self._stream.receive_run(rest, min(self._deadline, time.monotonic() + _PATIENCE))
        got = bytes(around)
        starts = range(0, len(got), each)
        if received == sum(place.nbytes for place in places) and all(
            got.startswith(line, start) and got.startswith(b"\r\n", start + before) for start in starts
        ):
            self.num_expected -= len(into)
            return [got[start + len(line) : start + before] for start in starts]
        back = b"".join([*cut(places, received)[0], self._view[self._start : self._end]])
        self._view, self._start, self._end = memoryview(back), 0, len(back)
        return []

    def _simple(self, line: bytes) -> RedisReply:
        """The reply that one line is."""
        kind, rest = line[:1], line[1:]
        reply: RedisReply
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

    def _end_of_bulk(self) -> None:
        if self._take(2) != b"\r\n":
            raise WireError(Outcome.CHECKSUM, "a bulk without its end")
        self.num_expected -= 1

    def _line(self) -> bytes:
        """Up to the next CRLF, without it."""
        line = b""
        while not line.endswith(b"\n"):
            if self._start == self._end:
                self._view, self._start = self._buffer, 0
                self._end = self._stream.receive(self._buffer, self._deadline)
            chunk = bytes(self._view[self._start : min(self._end, self._start + _GLANCE)])
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
        taken = bytearray(count)
        self._fill(memoryview(taken))
        return bytes(taken)

    def _fill(self, into: memoryview) -> None:
        """The next bytes, as many as there is room for: what is there already, the rest straight from the socket."""
        here = self._give(into)
        if here < into.nbytes:
            self._stream.receive_all(into[here:], self._deadline)

    def _give(self, into: memoryview) -> int:
        """As many of the buffer's bytes as it has and there is room for; how many."""
        here = min(into.nbytes, self._end - self._start)
        into[:here] = self._view[self._start : self._start + here]
        self._start += here
        return here

    def _receive_more(self, count: int) -> None:
        """`count` bytes, which are sure to come, behind the few that are there."""
        here = bytes(self._view[self._start : self._end])
        self._view, self._start, self._end = self._buffer, 0, len(here) + count
        self._view[: len(here)] = here
        self._stream.receive_all(self._view[len(here) : self._end], self._deadline)


def _opens_bulk(line: bytes) -> bool:
    return line[:1] == b"$" and line != b"$-1"


def _length(line: bytes) -> int:
    digits = line[1:]
    if not digits.isdigit() or len(digits) > 12:
        raise WireError(Outcome.CHECKSUM, f"no length: {line[:32]!r}")
    return int(digits)
