"""One payload connection to a Redis server: RESP by hand, so that payloads go straight between socket and host slots.

redis-py opens the socket (address, TLS, login). `socket_of` takes it over, the one place that uses redis-py's private
parts. From then on only this file uses it. A payload never becomes a Python object: it is sent from the caller's
memory and received into it. One call moves many payloads and releases the GIL once. It expects every value to have
our records' length. If a reply differs, the payloads of at most one call are unread from there, and read one by one.
"""

import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from struct import Struct
from typing import Final, Protocol

from redis.connection import AbstractConnection

from kvtier.tiers import Outcome
from kvtier.tiers.compiled import extension
from kvtier.tiers.shared import StorageFailed

_TWIN: Final = "kvtier.tiers.redis.turns_compiled"
_LEAST: Final = 64 << 10  # bytes of a block; below, many of them go by one call
_UNDER_WAY: Final = 512 << 10  # bytes; with more replies ready a server is slower
_BYTES_PER_SECOND: Final = 2e9  # more than one connection moves: times the round trip, the bytes to keep under way


class Turns(Protocol):
    """Commands and replies of one shape, and how many have been moved; from `turns_compiled.pyx`."""

    whole: int
    """Replies received as expected."""
    part: int
    """Bytes of the next one that are in their places."""
    num_sent: int
    """Commands sent."""
    sent: int
    """Bytes of the next one that were sent."""

    def run(self, fd: int, depth: int, deadline: float) -> None:
        """Go on, at most `depth` commands under way, until `deadline` (time.monotonic) or an unexpected reply."""

    def hash_at(self, i: int) -> int | None:
        """xxh3-64 of a whole reply's payload; None if the reply has none."""


MakeTurns = Callable[[list[Sequence[bytes | memoryview]], list[Sequence[memoryview]], bytes, int, int], Turns]
"""Arguments: commands, places of their replies, the start of an expected one, and the progress: `num_sent`, `part`."""


def make_turns(payload_bytes: int) -> MakeTurns | None:
    """The constructor of `Turns`; None if it was not built, or blocks are too small for it."""
    module = extension(_TWIN) if payload_bytes >= _LEAST else None
    made: MakeTurns | None = module.Turns if module is not None else None
    return made


def depth_of(payload_bytes: int, window: int, round_trip: float) -> int:
    """Blocks under way, `window` at most: bandwidth times `round_trip`, in seconds, 0 if not known."""
    under_way = max(_UNDER_WAY, int(round_trip * _BYTES_PER_SECOND))
    return min(window, max(2, under_way // payload_bytes))


SendBuffer = bytes | memoryview

PATIENCE: Final = 0.05  # seconds a call waits at most before received bytes are checked
_SEND_PARTS: Final = 1024  # per sendmsg; the kernel takes no more
_TLS_BYTES: Final = 256 << 10  # per call of a TLS socket


class WireError(StorageFailed):
    """A connection is unusable: it failed (IO_ERROR), sent nothing (TIMEOUT) or broke the protocol (CHECKSUM)."""


class TooLongError(WireError):
    """A value is longer than ours: that costs the connection. The blocks behind it can be read anew."""

    def __init__(self, size: int) -> None:
        super().__init__(Outcome.CHECKSUM, f"a value of {size} bytes, not one of ours")


class ByteStream:
    """A plain socket's bytes in and out before `deadline` (time.monotonic); WireError otherwise.

    It is blocking, and the kernel limits its calls to `PATIENCE`, so that the timeout is rarely set anew. A socket
    with a Python timeout polls and receives piece by piece, and takes the GIL back each time.
    """

    takes_turns = True  # whether `take_turns` may be called: the extension module knows no TLS

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(None)
        self._sock = sock
        self._armed = {socket.SO_RCVTIMEO: 0.0, socket.SO_SNDTIMEO: 0.0}  # seconds; 0 waits forever

    def send(self, parts: Sequence[SendBuffer], deadline: float) -> None:
        """All of it."""
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
        """Receive at least one byte."""
        return self._received(into, 0, deadline)

    def receive_all(self, into: memoryview, deadline: float) -> None:
        """Fill the buffer."""
        while into.nbytes:
            into = into[self._received(into, socket.MSG_WAITALL, deadline) :]

    def receive_run(self, into: Sequence[memoryview], deadline: float) -> int:
        """Fill the buffers, until `PATIENCE` or the connection ends; returns the bytes. Only `receive` raises."""
        left = deadline - time.monotonic()
        if left <= 0:
            return 0
        self._arm(socket.SO_RCVTIMEO, left)
        try:
            return self._sock.recvmsg_into(into, 0, socket.MSG_WAITALL)[0]
        except OSError:
            return 0

    def take_turns(self, run: Turns, depth: int, deadline: float) -> None:
        """Run `run` as far as possible. Never raises: if the connection failed, the next `receive` raises."""
        left = deadline - time.monotonic()
        if left > 0:
            with suppress(OSError):  # closed meanwhile
                self._arm(socket.SO_RCVTIMEO, left)
                self._arm(socket.SO_SNDTIMEO, left)
                run.run(self._sock.fileno(), depth, deadline)

    def is_quiet(self) -> bool:
        """Whether the peer is connected and has sent nothing unexpected. Does not wait."""
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
        """Set the kernel's timeout for all waits of one call. 0 would mean to wait forever."""
        seconds = max(0.001, min(left, PATIENCE))
        if seconds != self._armed[option]:
            self._sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", 0, int(seconds * 1e6)))
            self._armed[option] = seconds


class _TlsStream(ByteStream):
    """TLS knows no iovecs and no MSG_WAITALL, and has its own record layer between kernel and us."""

    takes_turns = False

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._sock = sock  # of which Python keeps the time

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

    def is_quiet(self) -> bool:
        self._sock.settimeout(0)
        try:
            self._sock.recv(1)  # consumes session tickets, which are no data
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


_BUFFER: Final = 16 << 10
_GLANCE: Final = 64  # bytes searched for the end of a line
_MAX_RUNS: Final = 4  # shapes of runs kept ready
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


def socket_of(connection: AbstractConnection) -> socket.socket:
    """The socket of a connected redis-py connection, for our use alone; tested with the installed redis-py."""
    sock = getattr(connection, "_sock", None)  # there is no public way; this one held from redis-py 6.0 to 8.1
    if not isinstance(sock, socket.socket):
        raise WireError(Outcome.IO_ERROR, "redis-py gave no socket: this version of it is not known to kvtier")
    return sock


class _ValueRun:
    """The wire format of `count` values of one length, and memory for all but the payloads."""

    def __init__(self, head_bytes: int, payload_bytes: int, count: int) -> None:
        self.line = b"$%d\r\n" % (head_bytes + payload_bytes)
        self.each = len(self.line) + head_bytes + 2  # bytes around a payload, its CRLF among them
        self.value_bytes = self.each + payload_bytes
        self.count = count
        self._around = bytearray(count * self.each)
        self._fields = Struct(f"{len(self.line)}s{head_bytes}s2s")
        view, before = memoryview(self._around), self.each - 2
        # in front of the first payload; behind a payload its end, and the next one's beginning
        self.pieces = [view[:before]] + [
            view[end - 2 : end + before] for end in range(self.each, len(view) + 1, self.each)
        ]

    def places(self, into: Sequence[memoryview]) -> list[memoryview]:
        """Where the bytes of the values go, in order."""
        places = [self.pieces[0]]
        for buffer, behind in zip(into, self.pieces[1:], strict=True):
            places += (buffer, behind)
        return places

    def heads(self) -> list[bytes]:
        """Every value's head; [] if not all of them are of the right length."""
        line, fields = self.line, list(self._fields.iter_unpack(self._around))
        heads = [head for begin, head, end in fields if begin == line and end == b"\r\n"]
        return heads if len(heads) == self.count else []

    def is_promised(self, received: int) -> bool:
        """Whether these bytes begin values of the right length."""
        number, part = divmod(received, self.value_bytes)
        begins = [self._around[i * self.each :][: len(self.line)] == self.line for i in range(number)]
        begun = min(part, len(self.line))
        return all(begins) and self._around[number * self.each :][:begun] == self.line[:begun]


class Wire:
    """Commands out, replies in, in order. Not thread-safe: one thread at a time has it.

    `begin` sets the deadline for everything until the next `begin`. `num_expected` counts the replies still due.
    Others may use a connection only if it is 0 (`is_clean`): else the next command would get the last one's reply.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._stream = _TlsStream(sock) if isinstance(sock, ssl.SSLSocket) else ByteStream(sock)
        self._buffer = self._view = memoryview(bytearray(_BUFFER))
        self._start = self._end = 0  # received bytes that were not consumed, in `_view`
        self._deadline = 0.0
        self._runs: dict[tuple[int, int, int], _ValueRun] = {}
        self.num_expected = 0
        self.round_trip = 0.0  # seconds, from `time_reply`; 0: not measured

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

    def values(self, head_bytes: int, into: Sequence[memoryview]) -> Iterable[Head]:
        """`value` for buffers of one size, received together: a list if all came, else read one by one."""
        return self._run(head_bytes, into) or self.one_by_one(head_bytes, into)

    def one_by_one(
        self, head_bytes: int, into: Sequence[memoryview], stored_bytes: StoredBytes | None = None
    ) -> Iterator[Head]:
        """`value` for each buffer, when the caller takes it."""
        for buffer in into:
            yield self.value(head_bytes, buffer, stored_bytes)

    def time_reply(self, sent_at: float) -> None:
        """Wait for the next reply, and measure the round trip since `sent_at`: at most twice the last."""
        if self._start == self._end:
            self._receive_more(1)
        took = time.monotonic() - sent_at
        self.round_trip = min(took, 2 * self.round_trip) if self.round_trip else took

    @property
    def takes_turns(self) -> bool:
        return self._stream.takes_turns

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
        make: MakeTurns,
        commands: list[Sequence[SendBuffer]],
        places: list[Sequence[memoryview]],
        opening: bytes,
        num_sent: int,
        depth: int,
    ) -> tuple[Turns, int]:
        """Send commands, at most `depth` under way, and receive replies into their places while these are as expected.

        `num_sent` commands were sent before. Returns the progress, and how many commands are now sent whole.
        Unexpected replies are unread.
        """
        first = places[0]
        here = self._end - self._start
        part = self._give_all(first)
        run = make(commands, places, opening, num_sent, part)
        self.num_expected += len(commands) - num_sent
        state = None
        while (
            here == part
            and run.whole < len(commands)
            and state != (state := (run.whole, run.part, run.num_sent, run.sent))
        ):
            self._stream.take_turns(run, depth, self._deadline)
            if run.part and not _is_begun(places[run.whole], run.part, opening):
                break  # another reply; the rest of one that has begun is sure to come
        if run.sent:
            rest = cut([memoryview(part) for part in commands[run.num_sent]], run.sent)[1]
            self._stream.send(rest, self._deadline)
        begun = run.num_sent + bool(run.sent)
        self.num_expected -= run.whole + len(commands) - begun
        if run.part:
            self._take_back(places[run.whole], run.part)
        return run, begun

    def _run(self, head_bytes: int, into: Sequence[memoryview]) -> list[bytes]:
        """Every value's head; [] if the replies are not all there and of the right length: then all are unread."""
        key = head_bytes, into[0].nbytes, len(into)
        if (run := self._runs.get(key)) is None:
            if len(self._runs) >= _MAX_RUNS:
                self._runs.clear()
            run = self._runs[key] = _ValueRun(*key)
        places = run.places(into)
        size = run.count * run.value_bytes
        received = self._give_all(places) if self._start < self._end else 0
        while received < size:
            rest = cut(places, received)[1] if received else places
            came = self._stream.receive_run(rest, self._deadline)
            received += came
            if received < size and not (came and run.is_promised(received)):
                break  # silence, the end, or another reply; the rest of a value that has begun is sure to come
        else:
            if heads := run.heads():
                self.num_expected -= run.count
                return heads
        self._take_back(places, received)
        return []

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


def _is_begun(places: Sequence[memoryview], part: int, opening: bytes) -> bool:
    """Whether so many bytes are the start of an expected reply, and not all of one."""
    begun = min(part, len(opening))
    return part < sum(place.nbytes for place in places) and places[0][:begun] == opening[:begun]


def _opens_bulk(line: bytes) -> bool:
    return line[:1] == b"$" and line != b"$-1"


def _length(line: bytes) -> int:
    digits = line[1:]
    if not digits.isdigit() or len(digits) > 12:
        raise WireError(Outcome.CHECKSUM, f"no length: {line[:32]!r}")
    return int(digits)
