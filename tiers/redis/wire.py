"""One payload connection to a Redis server: RESP by hand, so that payloads go straight between socket and host slots.

redis-py opens the socket (address, TLS, login) and hands it over in `socket_of`, the one place that reaches into it.
From then on only this file uses it. A payload never becomes a Python object: it is sent from the caller's memory and
received into it. One call moves many payloads and gives up the GIL once. It takes every value to be as long as ours
are. If the server answers otherwise, the payloads of one call at most are taken back from there, and read one by one.
"""

import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from struct import Struct
from typing import Final

from redis.connection import AbstractConnection

from kvtier.tiers import Outcome
from kvtier.tiers.redis.stream import SendBuffer, TooLongError, WireError, cut, stream_of
from kvtier.tiers.redis.turns import MakeTurns, Turns

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
        self._stream = stream_of(sock)
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
        """`value` for each buffer (all of one size), which are received together: for values that should be there.

        A list if they were. If one was not, the others' bytes came into the wrong places. Nothing of them is lost:
        they are taken back and read one by one.
        """
        return self._run(head_bytes, into) or self.one_by_one(head_bytes, into)

    def one_by_one(
        self, head_bytes: int, into: Sequence[memoryview], stored_bytes: StoredBytes | None = None
    ) -> Iterator[Head]:
        """`value` for each buffer, when the caller asks for it."""
        for buffer in into:
            yield self.value(head_bytes, buffer, stored_bytes)

    def time_reply(self, asked_at: float) -> None:
        """Wait until the next reply begins, and take in how long it took since `asked_at` (time.monotonic).

        A server that was busy once makes the round trip look twice as long at most; one fast answer corrects that.
        """
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
            back = b"".join([*cut(places[run.whole], run.part)[0], self._view[self._start : self._end]])
            self._view, self._start, self._end = memoryview(back), 0, len(back)
        return run, begun

    # inside

    def _run(self, head_bytes: int, into: Sequence[memoryview]) -> list[bytes]:
        """Every value's head; [] if the replies are not all there and all of the right length: then all are unread."""
        run = self._shape(head_bytes, into[0].nbytes, len(into))
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
        back = b"".join([*cut(places, received)[0], self._view[self._start : self._end]])
        self._view, self._start, self._end = memoryview(back), 0, len(back)
        return []

    def _shape(self, head_bytes: int, payload_bytes: int, count: int) -> _ValueRun:
        key = (head_bytes, payload_bytes, count)
        run = self._runs.get(key)
        if run is None:
            if len(self._runs) >= _MAX_RUNS:
                self._runs.clear()
            run = self._runs[key] = _ValueRun(*key)
        return run

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
