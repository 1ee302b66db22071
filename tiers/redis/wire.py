"""One payload connection to a Redis server: RESP by hand, so that payloads go straight between socket and host slots.

redis-py opens the socket (address, TLS, login). `socket_of` takes it over, the one place that uses redis-py's private
parts. From then on only this file uses it. A payload never becomes a Python object: it is sent from the caller's
memory and received into it, many by one call without the GIL (`Transfer`). That expects every value to have our
records' length. If a reply differs, those behind it are unread from there, and read one by one.
"""

import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from redis.connection import AbstractConnection

from kvtier.tiers import Outcome
from kvtier.tiers.shared import ByteStream, SendBuffer, StorageFailed, TlsStream, Transfer, cut

_TOGETHER: Final = (
    4 << 20
)  # bytes of replies received at once: each time the GIL is taken back, beside a busy thread late
_BYTES_PER_SECOND: Final = 2e9  # more than one connection moves: times the round trip, the bytes to keep under way


class WireError(StorageFailed):
    """A connection is unusable: it failed (IO_ERROR), sent nothing (TIMEOUT) or broke the protocol (CHECKSUM)."""


class TooLongError(WireError):
    """A value is longer than ours: that costs the connection. The blocks behind it can be read anew."""

    def __init__(self, size: int) -> None:
        super().__init__(Outcome.CHECKSUM, f"a value of {size} bytes, not one of ours")


_BUFFER: Final = 16 << 10
_GLANCE: Final = 64  # bytes searched for the end of a line
_MAX_LINE: Final = 4096  # bytes of an error message
_MAX_SMALL: Final = 4096  # bytes of a reply that is no payload


class Refusal(str):
    """An error reply of the server, without its leading "-"."""

    @property
    def code(self) -> str:
        """Its first word, as in OOM, MOVED, READONLY."""
        return self.partition(" ")[0]


RedisReply = int | bytes | None | Refusal
StoredBytes = Callable[[bytes], int]
Head = bytes | Outcome | Refusal | None
"""A GET's result: a record's first bytes, or why there is none (None for nil)."""
ReportWhole = Callable[[Transfer, range], None]
"""Called with replies that are whole."""


def socket_of(connection: AbstractConnection) -> socket.socket:
    """The socket of a connected redis-py connection, for our use alone; tested with the installed redis-py."""
    sock = getattr(connection, "_sock", None)  # there is no public way; this one held from redis-py 6.0 to 8.1
    if not isinstance(sock, socket.socket):
        raise WireError(Outcome.IO_ERROR, "redis-py gave no socket: this version of it is not known to kvtier")
    return sock


class Wire:
    """Commands out, replies in, in order. Not thread-safe: one thread at a time has it.

    `begin` sets the deadline for everything until the next `begin`. `num_expected` counts the replies still due.
    Others may use a connection only if it is 0 (`is_clean`): else the next command would get the last one's reply.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._stream = TlsStream(sock, WireError) if isinstance(sock, ssl.SSLSocket) else ByteStream(sock, WireError)
        self._buffer = self._view = memoryview(bytearray(_BUFFER))
        self._start = self._end = 0  # received bytes that were not consumed, in `_view`
        self._deadline = 0.0
        self.num_expected = 0
        self.under_way = 1  # bytes, by `keep_under_way`

    def begin(self, deadline: float) -> None:
        self._deadline = deadline

    def send(self, parts: Sequence[SendBuffer], num_replies: int) -> None:
        self.num_expected += num_replies
        self._stream.send(parts, self._deadline)

    @property
    def is_clean(self) -> bool:
        return not self.num_expected and self._start == self._end

    def is_quiet(self) -> bool:
        """Whether an idle connection is open and has received nothing unexpected."""
        return self._stream.is_quiet()

    def reply(self) -> RedisReply:
        """The next reply, of a command with a short one. None for nil."""
        line = self._line()
        if not _opens_bulk(line):
            return self._simple(line)
        size = _length(line)
        if size > _MAX_SMALL:
            raise WireError(Outcome.CHECKSUM, f"{size} bytes where a short reply was due")
        body = self._take(size + 2)
        self.num_expected -= 1
        return body[:-2]

    def all_are(self, usual: bytes, count: int) -> bool:
        """Whether the next `count` replies are all `usual` (one short reply, with its CRLF). If so, they are read."""
        wanted = usual * count
        assert len(wanted) <= _BUFFER, f"{count} replies at once"
        while (have := self._end - self._start) < len(wanted):
            if have and self._view[self._start : self._end] != wanted[:have]:
                return False
            self._receive_more(len(wanted) - have)
        if self._view[self._start : self._start + len(wanted)] != wanted:
            return False
        self._start += len(wanted)
        self.num_expected -= count
        return True

    def value(self, head_bytes: int, into: memoryview, stored_bytes: StoredBytes | None = None) -> Head:
        """The next reply, of a GET: a record whose payload fills `into`; returns its first `head_bytes` bytes.

        CHECKSUM if it has another length: a shorter one is skipped, into `into`. TooLongError if it is longer.
        `stored_bytes`: from a head, how much of `into` its payload fills: that is the right length then.
        """
        line = self._line()
        if not _opens_bulk(line):
            simple = self._simple(line)
            if isinstance(simple, Refusal) or simple is None:
                return simple
            raise WireError(Outcome.CHECKSUM, f"no reply to GET: {line[:32]!r}")
        size = _length(line)
        most = head_bytes + into.nbytes
        if size < head_bytes or (size != most and stored_bytes is None) or size > most:
            if size > into.nbytes:
                raise TooLongError(size)
            self._fill(into[:size])
            self._end_of_bulk()
            return Outcome.CHECKSUM
        head = self._take(head_bytes)
        self._fill(into[: size - head_bytes])
        self._end_of_bulk()
        is_whole = stored_bytes is None or stored_bytes(head) == size - head_bytes
        return head if is_whole else Outcome.CHECKSUM

    def one_by_one(
        self, head_bytes: int, into: Sequence[memoryview], stored_bytes: StoredBytes | None = None
    ) -> Iterator[Head]:
        """`value` for each buffer, when the caller takes it."""
        for buffer in into:
            yield self.value(head_bytes, buffer, stored_bytes)

    def keep_under_way(self, least: int, most: int) -> int:
        """Bytes of commands and replies under way at once: `least`, or bandwidth times round trip."""
        self.under_way = min(most, max(least, int(self._stream.round_trip() * _BYTES_PER_SECOND)))
        return self.under_way

    def value_places(self, head_bytes: int, into: Sequence[memoryview]) -> tuple[bytes, list[Sequence[memoryview]]]:
        """The start of a value, and where its parts go: its line and head, its payload, its end."""
        line = b"$%d\r\n" % (head_bytes + into[0].nbytes)
        before = len(line) + head_bytes
        around = memoryview(bytearray(len(into) * (before + 2)))
        starts = range(0, len(around), before + 2)
        return line, [
            (around[start : start + before], buffer, around[start + before :][:2])
            for start, buffer in zip(starts, into, strict=True)
        ]

    def in_turn(
        self,
        commands: Sequence[Sequence[SendBuffer]],
        places: Sequence[Sequence[memoryview]],
        opening: bytes,
        num_sent: int,
        whole: ReportWhole,
    ) -> tuple[int, int]:
        """Send commands and receive replies into their places while these are as expected; `under_way` was set.

        `num_sent` commands were sent before. Returns how many replies are whole and how many commands are now sent
        whole; unexpected replies are unread.
        """
        here = self._end - self._start
        part = self._give_all(places[0])
        run = self._stream.transfer(commands, places, opening, num_sent, part)
        self.num_expected += len(commands) - num_sent
        step = max(1, _TOGETHER // sum(place.nbytes for place in places[0]))
        done, goes_on = 0, here == part
        while goes_on:  # the server goes on while the caller looks at replies
            self._stream.move(run, self.under_way, self._deadline, done + step)
            goes_on = done + step <= run.whole < len(commands)
            whole(run, range(done, run.whole))
            done = run.whole
        if run.sent:
            rest = cut([memoryview(part) for part in commands[run.num_sent]], run.sent)[1]
            self._stream.send(rest, self._deadline)
        begun = run.num_sent + bool(run.sent)
        self.num_expected -= done + len(commands) - begun
        if run.part:
            self._take_back([place for row in places[done:] for place in row], run.part)
        return done, begun

    def _take_back(self, places: Sequence[memoryview], count: int) -> None:
        """The first bytes of these places are unread again."""
        back = b"".join([*cut(places, count)[0], self._view[self._start : self._end]])
        self._view, self._start, self._end = memoryview(back), 0, len(back)

    def _simple(self, line: bytes) -> RedisReply:
        """The reply in one line."""
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
        """Fill the buffer: received bytes first, the rest straight from the socket."""
        here = self._give(into)
        if here < into.nbytes:
            self._stream.receive_all(into[here:], self._deadline)

    def _give(self, into: memoryview) -> int:
        """Copy received bytes to the buffer, as many as there are and fit; returns how many."""
        here = min(into.nbytes, self._end - self._start)
        into[:here] = self._view[self._start : self._start + here]
        self._start += here
        return here

    def _give_all(self, places: Sequence[memoryview]) -> int:
        """Fill the places in turn from received bytes; returns how many bytes."""
        given = 0
        for place in places:
            given += (here := self._give(place))
            if here < place.nbytes:
                break
        return given

    def _receive_more(self, count: int) -> None:
        """Receive up to `count` more bytes, at least one."""
        here = bytes(self._view[self._start : self._end])
        self._view, self._start, self._end = self._buffer, 0, len(here)
        self._view[: len(here)] = here
        room = self._view[len(here) : len(here) + count]
        came = self._stream.receive_run([room], self._deadline) or self._stream.receive(room, self._deadline)
        self._end += came


def _opens_bulk(line: bytes) -> bool:
    return line[:1] == b"$" and line != b"$-1"


def _length(line: bytes) -> int:
    digits = line[1:]
    if not digits.isdigit() or len(digits) > 12:
        raise WireError(Outcome.CHECKSUM, f"no length: {line[:32]!r}")
    return int(digits)
