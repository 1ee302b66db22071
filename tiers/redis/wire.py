"""One payload connection to a Redis server: RESP by hand, so that payloads go straight between socket and host slots.

redis-py opens the socket (address, TLS, login) and hands it over in `socket_of`, the one place that reaches into it.
From then on only this file uses it. A payload never becomes a Python object: it is sent from the caller's memory and
received into it. One call moves many payloads and gives up the GIL once. It takes every value to be as long as ours
are. If the server answers otherwise, the payloads of one call at most are taken back from there, and read one by one.
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
_UNDER_WAY: Final = 512 << 10  # bytes; with more answers at hand a server is slower
_BYTES_PER_SECOND: Final = 2e9  # more than one connection brings: so much must be under way for a round trip's length


class Turns(Protocol):
    """Commands and replies of one shape, as far as they went; of `turns_compiled.pyx`."""

    whole: int
    """Replies received that are as usual."""
    part: int
    """Bytes of the next one that are in their places."""
    asked: int
    """Commands sent."""
    sent: int
    """Bytes of the next one that were sent."""

    def run(self, fd: int, depth: int, deadline: float) -> None:
        """Go on, at most `depth` commands under way, until `deadline` (time.monotonic) or what is not as usual."""

    def hash_at(self, i: int) -> int | None:
        """xxh3-64 of a whole reply's payload; None if the reply has none."""


MakeTurns = Callable[[list[Sequence[bytes | memoryview]], list[Sequence[memoryview]], bytes, int, int], Turns]
"""Given commands, the places of their replies, what a usual one begins with, and what was done: `asked`, `part`."""


def make_turns(payload_bytes: int) -> MakeTurns | None:
    """What makes `Turns`; None where the twin was not built, or blocks are too small for it."""
    module = extension(_TWIN) if payload_bytes >= _LEAST else None
    made: MakeTurns | None = module.Turns if module is not None else None
    return made


def depth_of(payload_bytes: int, window: int, round_trip: float) -> int:
    """Blocks under way, `window` at most: bandwidth times `round_trip`, in seconds, 0 if not known."""
    under_way = max(_UNDER_WAY, int(round_trip * _BYTES_PER_SECOND))
    return min(window, max(2, under_way // payload_bytes))


SendBuffer = bytes | memoryview

PATIENCE: Final = 0.05  # seconds a call waits at most before somebody looks at what has come
_SEND_PARTS: Final = 1024  # per sendmsg; the kernel takes no more
_TLS_BYTES: Final = 256 << 10  # per call of a TLS socket


class WireError(StorageFailed):
    """A connection is of no use: it failed (IO_ERROR), kept silent (TIMEOUT) or talks nonsense (CHECKSUM)."""


class TooLongError(WireError):
    """A value is longer than ours are: it costs the connection, and only itself, for the rest can be asked for anew."""

    def __init__(self, size: int) -> None:
        super().__init__(Outcome.CHECKSUM, f"a value of {size} bytes, not one of ours")


class ByteStream:
    """A plain socket's bytes in and out before `deadline` (time.monotonic); WireError otherwise.

    It is blocking, and the kernel ends its calls in time: after `PATIENCE` at the latest, so that nearly no call has to
    tell it anew. One with a Python timeout polls and receives piece by piece, and takes the GIL back each time.
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
        """Whatever there is, at least one byte."""
        return self._received(into, 0, deadline)

    def receive_all(self, into: memoryview, deadline: float) -> None:
        """As many bytes as there is room for."""
        while into.nbytes:
            into = into[self._received(into, socket.MSG_WAITALL, deadline) :]

    def receive_run(self, into: Sequence[memoryview], deadline: float) -> int:
        """As many bytes as there is room for, or what had come of them, nothing even, when `PATIENCE` or the
        connection ended. Never raises: if something is wrong, the next `receive` tells."""
        left = deadline - time.monotonic()
        if left <= 0:
            return 0
        self._arm(socket.SO_RCVTIMEO, left)
        try:
            return self._sock.recvmsg_into(into, 0, socket.MSG_WAITALL)[0]
        except OSError:
            return 0

    def take_turns(self, run: Turns, depth: int, deadline: float) -> None:
        """Go on with `run` as far as it goes. Never raises: if something is wrong, the next `receive` tells."""
        left = deadline - time.monotonic()
        if left > 0:
            with suppress(OSError):  # closed meanwhile
                self._arm(socket.SO_RCVTIMEO, left)
                self._arm(socket.SO_SNDTIMEO, left)
                run.run(self._sock.fileno(), depth, deadline)

    def is_quiet(self) -> bool:
        """Whether the peer is there and has said nothing unasked. Does not wait."""
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


_BUFFER: Final = 16 << 10
_GLANCE: Final = 64  # bytes looked at for the end of a line
_MAX_RUNS: Final = 4  # shapes of runs kept ready
_MAX_LINE: Final = 4096  # bytes of an error message
_MAX_SMALL: Final = 4096  # bytes of a reply that is no payload


class Refusal(str):
    """An error reply: what the server said, without its leading "-"."""

    @property
    def code(self) -> str:
        """Its first word, as in OOM, MOVED, READONLY."""
        return self.partition(" ")[0]


RedisReply = int | bytes | None | Refusal
StoredBytes = Callable[[bytes], int]
Head = bytes | Outcome | Refusal | None
"""What a GET brought: a record's first bytes, or why there is none (None for nil)."""


def socket_of(connection: AbstractConnection) -> socket.socket:
    """The socket of a connected redis-py connection, for our use alone; tested against the installed redis-py."""
    sock = getattr(connection, "_sock", None)  # there is no public way; this one held from redis-py 6.0 to 8.1
    if not isinstance(sock, socket.socket):
        raise WireError(Outcome.IO_ERROR, "redis-py gave no socket: this version of it is not known to kvtier")
    return sock


class _ValueRun:
    """What `count` values of one length look like on the wire, and memory for all of them but the payloads."""

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
        """Whether so many bytes are the beginning of values of the right length."""
        number, part = divmod(received, self.value_bytes)
        begins = [self._around[i * self.each :][: len(self.line)] == self.line for i in range(number)]
        begun = min(part, len(self.line))
        return all(begins) and self._around[number * self.each :][:begun] == self.line[:begun]


class Wire:
    """Commands out, replies in, in order. Not thread-safe: borrowed by one thread at a time.

    `begin` sets the deadline for everything until the next `begin`. `num_expected` counts the replies still due.
    Others may use a connection only if it is 0 (`is_clean`): else the next command would get the last one's answer.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._stream = _TlsStream(sock) if isinstance(sock, ssl.SSLSocket) else ByteStream(sock)
        self._buffer = self._view = memoryview(bytearray(_BUFFER))
        self._start = self._end = 0  # what was received and not yet consumed, in `_view`
        self._deadline = 0.0
        self._runs: dict[tuple[int, int, int], _ValueRun] = {}
        self.num_expected = 0
        self.round_trip = 0.0  # seconds, as `time_reply` saw them; 0: it never did

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

        CHECKSUM if it has another length: a shorter one is read past, into `into`. TooLongError if it is longer.
        `stored_bytes`: tells from a head how much of `into` its payload fills; what it says is the right length then.
        """
        line = self._line()
        if not _opens_bulk(line):
            simple = self._simple(line)
            if isinstance(simple, Refusal) or simple is None:
                return simple
            raise WireError(Outcome.CHECKSUM, f"no answer to GET: {line[:32]!r}")
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
        """`value` for buffers of one size, received together: a list if all were there, else read anew, one by one."""
        return self._run(head_bytes, into) or self.one_by_one(head_bytes, into)

    def one_by_one(
        self, head_bytes: int, into: Sequence[memoryview], stored_bytes: StoredBytes | None = None
    ) -> Iterator[Head]:
        """`value` for each buffer, when the caller asks for it."""
        for buffer in into:
            yield self.value(head_bytes, buffer, stored_bytes)

    def time_reply(self, asked_at: float) -> None:
        """Wait for the next reply, and learn the round trip since `asked_at`: at most twice the last."""
        if self._start == self._end:
            self._receive_more(1)
        took = time.monotonic() - asked_at
        self.round_trip = min(took, 2 * self.round_trip) if self.round_trip else took

    @property
    def takes_turns(self) -> bool:
        return self._stream.takes_turns

    def value_places(self, head_bytes: int, into: Sequence[memoryview]) -> tuple[bytes, list[Sequence[memoryview]]]:
        """What a value begins with, and where each goes: its line and head, its payload, its end."""
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
        asks: list[Sequence[SendBuffer]],
        places: list[Sequence[memoryview]],
        opening: bytes,
        asked: int,
        depth: int,
    ) -> tuple[Turns, int]:
        """Commands, each when fewer than `depth` are under way, and their replies in their places, as long as these are
        as usual. `asked` commands were sent before. Returns how far it went, and how many commands are sent by then,
        none in part. What else came is unread.
        """
        first = places[0]
        here = self._end - self._start
        part = self._give_all(first)
        run = make(asks, places, opening, asked, part)
        self.num_expected += len(asks) - asked
        state = None
        while here == part and run.whole < len(asks) and state != (state := (run.whole, run.part, run.asked, run.sent)):
            self._stream.take_turns(run, depth, self._deadline)
            if run.part and not _is_begun(places[run.whole], run.part, opening):
                break  # another answer; of one that has begun the rest is sure to come
        if run.sent:
            rest = cut([memoryview(part) for part in asks[run.asked]], run.sent)[1]
            self._stream.send(rest, self._deadline)
        begun = run.asked + bool(run.sent)
        self.num_expected -= run.whole + len(asks) - begun
        if run.part:
            self._take_back(places[run.whole], run.part)
        return run, begun

    # inside

    def _run(self, head_bytes: int, into: Sequence[memoryview]) -> list[bytes]:
        """Every value's head; [] if the replies are not all there and all of the right length: then all are unread."""
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
                break  # silence, the end, or another answer; of a value that has begun the rest is sure to come
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

    def _give_all(self, places: Sequence[memoryview]) -> int:
        """The places filled in turn with what is there already; how many bytes."""
        given = 0
        for place in places:
            given += (here := self._give(place))
            if here < place.nbytes:
                break
        return given

    def _receive_more(self, count: int) -> None:
        """Up to `count` bytes, one at least, behind the few that are there."""
        here = bytes(self._view[self._start : self._end])
        self._view, self._start, self._end = self._buffer, 0, len(here)
        self._view[: len(here)] = here
        room = self._view[len(here) : len(here) + count]
        came = self._stream.receive_run([room], self._deadline) or self._stream.receive(room, self._deadline)
        self._end += came


def _is_begun(places: Sequence[memoryview], part: int, opening: bytes) -> bool:
    """Whether so many bytes of a reply are the beginning of a usual one, and not all of one."""
    begun = min(part, len(opening))
    return part < sum(place.nbytes for place in places) and places[0][:begun] == opening[:begun]


def _opens_bulk(line: bytes) -> bool:
    return line[:1] == b"$" and line != b"$-1"


def _length(line: bytes) -> int:
    digits = line[1:]
    if not digits.isdigit() or len(digits) > 12:
        raise WireError(Outcome.CHECKSUM, f"no length: {line[:32]!r}")
    return int(digits)
