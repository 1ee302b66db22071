"""One payload connection: replies in any pieces, payloads in place, nothing believed, nothing waited for too long."""

import socket
import threading
import time
import tracemalloc
from collections.abc import Iterator, Sequence

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st
from redis_rig import NO_REDIS, standalone
from redis_stories import together

from kvtier.tiers.redis.wire import RedisReply, Refusal, TooLongError, Wire, WireError, socket_of
from kvtier.tiers.shared import stream
from kvtier.tiers.shared.stream import ByteStream, Transfer
from kvtier.tiers.tier import Outcome

HEAD, PAYLOAD = 40, 3000


class Script(ByteStream):
    """A stream that says what it is given, in the pieces it is given."""

    is_plain = False

    def __init__(self, data: bytes, pieces: Sequence[int]) -> None:
        self.data = data
        self.pieces = list(pieces)
        self.longest = 0

    def move(self, run: Transfer, under_way: int, deadline: float, until: int = 1 << 40) -> None:
        run.run(self, under_way, deadline, until)

    def send(self, parts: Sequence[object], deadline: float) -> None:
        raise AssertionError("nobody sends here")

    def receive(self, into: memoryview, deadline: float) -> int:
        size = min(into.nbytes, len(self.data), self.pieces.pop() if self.pieces else 1 << 20)
        if not size:
            raise WireError(Outcome.IO_ERROR, "the script is over")
        into[:size], self.data = self.data[:size], self.data[size:]
        return size

    def receive_all(self, into: memoryview, deadline: float) -> None:
        while into.nbytes:
            into = into[self.receive(into, deadline) :]

    def receive_run(self, into: Sequence[memoryview], deadline: float) -> int:
        """As much as there is: what a socket has given when patience ends."""
        if not (before := len(self.data)):
            raise WireError(Outcome.IO_ERROR, "the script is over")
        for view in into:
            here = min(view.nbytes, len(self.data))
            view[:here], self.data = self.data[:here], self.data[here:]
        return before - len(self.data)

    def is_quiet(self) -> bool:
        return not self.data


def scripted(data: bytes, num_replies: int, pieces: Sequence[int] = ()) -> Wire:
    mine, other = socket.socketpair()
    with mine, other:  # only for its shape
        wire = Wire(mine)
    wire._stream = Script(data, pieces)
    wire.begin(time.monotonic() + 5)
    wire.num_expected = num_replies
    return wire


@pytest.fixture
def ends() -> Iterator[tuple[Wire, socket.socket]]:
    """A wire, and the server's end of it."""
    mine, server = socket.socketpair()
    with mine, server:
        yield Wire(mine), server


Item = bytes | None | Refusal

ITEMS = st.lists(
    st.none()
    | st.binary(min_size=HEAD + 8, max_size=HEAD + 8).map(lambda seed: (seed * PAYLOAD)[: HEAD + PAYLOAD])
    | st.sampled_from([Refusal("ERR no"), Refusal("MISCONF " + "x" * 900), Refusal("")]),
    max_size=6,
)


def spelled(item: Item) -> bytes:
    """A GET's answer as the server sends it."""
    if isinstance(item, bytes):
        return b"$%d\r\n%b\r\n" % (len(item), item)
    return b"$-1\r\n" if item is None else b"-" + item.encode() + b"\r\n"


@given(items=ITEMS, pieces=st.lists(st.integers(1, 700), max_size=60))
def test_values_misses_and_refusals_in_any_pieces(items: list[Item], pieces: list[int]) -> None:
    """One by one, each GET followed by a PEXPIRE, however the bytes arrive."""
    said = b""
    for item in items:
        said += spelled(item) + (b":1" if item else b"-READONLY You can't write") + b"\r\n"
    wire = scripted(said, 2 * len(items), pieces)
    for item in items:
        into = memoryview(bytearray(PAYLOAD))
        head = wire.value(HEAD, into)
        if isinstance(item, bytes):
            assert head == item[:HEAD]
            assert into == item[HEAD:]
        else:
            assert head == item
        assert wire.reply() == (1 if item else Refusal("READONLY You can't write"))
    assert wire.is_clean


@given(
    said=st.lists(st.sampled_from([b"+OK\r\n", b":1\r\n", b"-OOM no memory\r\n", b"$-1\r\n"]), min_size=1, max_size=30),
    usual=st.sampled_from([b"+OK\r\n", b":1\r\n"]),
    pieces=st.lists(st.integers(1, 9), max_size=30),
)
def test_replies_that_are_not_all_as_usual_are_all_still_there(
    said: list[bytes], usual: bytes, pieces: list[int]
) -> None:
    wire = scripted(b"".join(said), len(said), pieces)
    if wire.all_are(usual, len(said)):
        assert set(said) == {usual}
    else:
        assert set(said) != {usual}
        assert [spelled_short(wire.reply()) for _ in said] == said
    assert wire.is_clean


def spelled_short(reply: RedisReply) -> bytes:
    """A short reply as the server sent it."""
    if isinstance(reply, Refusal):
        return b"-%b\r\n" % reply.encode()
    if isinstance(reply, int):
        return b":%d\r\n" % reply
    return b"$-1\r\n" if reply is None else b"+%b\r\n" % reply


@given(data=st.binary(max_size=300), pieces=st.lists(st.integers(1, 50), max_size=10), as_value=st.booleans())
def test_random_bytes_are_a_reply_or_the_end_of_the_connection(data: bytes, pieces: list[int], as_value: bool) -> None:
    wire = scripted(data, 1, pieces)
    into = memoryview(bytearray(PAYLOAD))
    try:
        reply = wire.value(HEAD, into) if as_value else wire.reply()
    except WireError:
        return
    assert data[:1] in (b"+", b"-", b":", b"$")
    assert reply is None or isinstance(reply, bytes | int | Refusal | Outcome)


@given(kind=st.sampled_from(b"+-:$*_#,(!=%~>|"), rest=st.binary(max_size=40), as_value=st.booleans())
def test_nothing_but_resp2_is_believed(kind: int, rest: bytes, as_value: bool) -> None:
    wire = scripted(bytes([kind]) + rest + b"\r\n", 1)
    try:
        reply = wire.value(HEAD, memoryview(bytearray(PAYLOAD))) if as_value else wire.reply()
    except WireError:
        return
    assert chr(kind) in "+-:$"
    assert not (as_value and isinstance(reply, bytes)), "there was no value"


@pytest.mark.parametrize("length", [b"1073741824", b"999999999999999999999", b"-7", b"", b"4 ", b"0x10", b"\xd9\xa1"])
def test_a_hostile_length_costs_the_connection_and_no_memory(length: bytes) -> None:
    wire = scripted(b"$" + length + b"\r\n" + bytes(500), 1)
    into = memoryview(bytearray(PAYLOAD))
    tracemalloc.start()
    try:
        with pytest.raises(WireError) as caught:
            wire.value(HEAD, into)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
    assert caught.value.outcome is Outcome.CHECKSUM
    assert not wire.is_clean


def test_a_value_too_long_says_so_before_any_of_it_is_read() -> None:
    for size in (PAYLOAD + 1, HEAD + PAYLOAD + 1, 1 << 29):
        wire = scripted(b"$%d\r\n" % size + bytes(500), 1)
        with pytest.raises(TooLongError, match=f"{size} bytes"):
            wire.value(HEAD, memoryview(bytearray(PAYLOAD)))
        assert not wire.is_clean


def test_a_payload_never_becomes_an_object(ends: tuple[Wire, socket.socket]) -> None:
    wire, server = ends
    size = 8 << 20
    payload, into = memoryview(bytes(range(256)) * (size // 256)), memoryview(bytearray(size))

    def echo() -> None:  # what it gets, as a value
        received = memoryview(bytearray(size))
        assert server.recv_into(received, size, socket.MSG_WAITALL) == size
        server.sendmsg([b"$%d\r\n" % (HEAD + size), b"h" * HEAD])
        server.sendall(received)
        server.sendall(b"\r\n:1\r\n")

    peer = threading.Thread(target=echo)
    peer.start()
    wire.begin(time.monotonic() + 20)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        wire.send([payload[: size // 2], payload[size // 2 :]], 2)
        assert wire.value(HEAD, into) == b"h" * HEAD
        assert wire.reply() == 1
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    peer.join()
    assert peak < size + (1 << 20)  # the peer's own copy, in this process too, and next to nothing else
    assert into == payload
    assert wire.is_clean


def test_a_value_gone_between_question_and_answer_costs_a_moment_and_no_other_block(
    ends: tuple[Wire, socket.socket],
) -> None:
    """A run waits for bytes that never come; long before its deadline its replies are read one by one."""
    wire, server = ends
    size = 300_000  # four of them are past the mark below which a run is woken for every packet
    values = [bytes([number]) * (HEAD + size) for number in range(5)]
    answers: list[Item] = [values[0], None, *values[2:]]
    peer = threading.Thread(target=server.sendall, args=[b"".join(spelled(item) for item in answers)])
    peer.start()
    wire.begin(time.monotonic() + 30)
    wire.num_expected = len(answers)
    buffers = [memoryview(bytearray(size)) for _ in answers]
    heads = list(together(wire, HEAD, buffers))
    assert wire._deadline - time.monotonic() > 10
    peer.join()
    for answer, head, into in zip(answers, heads, buffers, strict=True):
        assert head == (answer[:HEAD] if isinstance(answer, bytes) else None)
        assert head is None or (isinstance(answer, bytes) and into == answer[HEAD:])
    assert wire.is_clean
    server.sendall(b"+PONG\r\n")  # the socket wakes for a short answer again
    wire.num_expected = 1
    assert wire.reply() == b"PONG"


def test_a_run_outlasts_patience_as_long_as_its_values_come(ends: tuple[Wire, socket.socket]) -> None:
    """A slow network: pauses longer than patience, within the deadline of the batch. Nothing is taken back."""
    wire, server = ends
    size = 300_000
    values = [bytes([number]) * (HEAD + size) for number in range(3)]
    said = b"".join(spelled(value) for value in values)

    def trickle() -> None:
        for first in range(0, len(said), 250_000):
            server.sendall(said[first : first + 250_000])
            time.sleep(1.2 * stream.PATIENCE)

    wire.begin(time.monotonic() + 30)
    wire.num_expected = len(values)
    buffers = [memoryview(bytearray(size)) for _ in values]
    server.sendall(said[:7])
    said = said[7:]
    peer = threading.Thread(target=trickle)
    peer.start()
    heads = list(together(wire, HEAD, buffers))
    peer.join()
    assert heads == [value[:HEAD] for value in values]
    assert buffers == [value[HEAD:] for value in values]
    assert wire.is_clean


class Paused(Script):
    """A stream that pauses once, behind its first bytes."""

    def __init__(self, data: bytes, first: int) -> None:
        super().__init__(data, ())
        self.behind = data[first:]
        self.data = data[:first]

    def receive(self, into: memoryview, deadline: float) -> int:
        self._go_on()
        return super().receive(into, deadline)

    def receive_run(self, into: Sequence[memoryview], deadline: float) -> int:
        self._go_on()
        return super().receive_run(into, deadline)

    def _go_on(self) -> None:
        if not self.data:
            self.data, self.behind = self.behind, b""


SHORT = 24  # bytes of a payload, and 8 of a head: every boundary can be tried
ODD: list[list[Item]] = [
    [b"a" * 32, b"b" * 32, b"c" * 32],
    [b"a" * 32, None, b"c" * 32],
    [None, b"b" * 32, None],
    [b"a" * 32, Refusal("LOADING the dataset"), b"c" * 32],
    [b"a" * 32, b"too short", b"c" * 32],
    [b"", b"b" * 32, b"c" * 24],
    [b"a" * 32, b"b" * 31, b"c" * 32],
]


@pytest.mark.parametrize("items", ODD)
@pytest.mark.parametrize("asked", [0, 5])
def test_a_run_cut_at_any_byte_says_what_one_by_one_says(items: list[Item], asked: int) -> None:
    """The fast way beside the slow one, for two pieces at each boundary; `asked` bytes of it were read too early."""
    said = b"".join(spelled(item) for item in items) + b"+PONG\r\n"
    wanted = taken(scripted(said, 4), items, as_run=False)
    for boundary in range(1, len(said)):
        wire = scripted(said, 4)
        wire._stream = Paused(said, boundary)
        if asked:  # as a short reply before them would have left it
            wire._end = wire._stream.receive(wire._buffer[:asked], 0)
        assert taken(wire, items, as_run=True) == wanted, f"cut at {boundary}"


def taken(wire: Wire, items: Sequence[Item], *, as_run: bool) -> list[object]:
    """What each value was, its payload if it was one of ours, and what came behind them."""
    found: list[object] = []
    buffers = [memoryview(bytearray(SHORT)) for _ in items]
    try:
        heads = together(wire, 8, buffers) if as_run else wire.one_by_one(8, buffers)
        for head, buffer in zip(heads, buffers, strict=True):
            found.append((head, bytes(buffer) if isinstance(head, bytes) else None))
    except TooLongError as error:
        return [*found, str(error)]
    found.append(wire.reply())
    assert wire.is_clean
    return found


@pytest.mark.parametrize("at", ["line", "payload", "run"])
def test_a_server_that_drips_cannot_outlast_the_deadline(ends: tuple[Wire, socket.socket], at: str) -> None:
    wire, server = ends
    said = b"$%d\r\n" % (HEAD + PAYLOAD) + bytes(HEAD) if at != "line" else b""
    server.sendall(said)
    stop = threading.Event()

    def drip() -> None:
        while not stop.wait(0.01):
            server.sendall(b"+")

    peer = threading.Thread(target=drip)
    peer.start()
    wire.begin(time.monotonic() + 0.2)
    wire.num_expected = 2
    buffers = [memoryview(bytearray(PAYLOAD)) for _ in range(2)]
    with pytest.raises(WireError) as caught:
        list(together(wire, HEAD, buffers) if at == "run" else (wire.value(HEAD, buffer) for buffer in buffers))
    late = time.monotonic() - wire._deadline
    stop.set()
    peer.join()
    assert caught.value.outcome is Outcome.TIMEOUT
    assert late < 5  # 3,000 bytes take half a minute
    assert not wire.is_clean


def test_a_server_that_does_not_read_cannot_outlast_the_deadline(ends: tuple[Wire, socket.socket]) -> None:
    wire, _ = ends
    wire.begin(time.monotonic() + 0.1)
    with pytest.raises(WireError) as caught:
        wire.send([memoryview(bytes(32 << 20))], 1)
    assert caught.value.outcome is Outcome.TIMEOUT


def test_an_idle_connection_that_says_or_ends_something_is_not_quiet(ends: tuple[Wire, socket.socket]) -> None:
    wire, server = ends
    assert wire.is_quiet()
    server.sendall(b"+late\r\n")
    assert not wire.is_quiet()  # and the late answer stays where it is: nobody reads it
    other, peer = socket.socketpair()
    with other:
        peer.close()
        assert not Wire(other).is_quiet()


@pytest.mark.skipif(NO_REDIS is not None, reason=str(NO_REDIS))
@pytest.mark.parametrize("tls", [False, True])
def test_the_installed_redis_py_hands_over_its_socket(tls: bool) -> None:
    """The one place that reaches into redis-py: what a connected connection holds, and that nothing is left unread."""
    with standalone(tls=tls) as server:
        secure = {"ssl": True, "ssl_ca_certs": str(server.tls.authority)} if server.tls else {}
        client = redis.Redis("127.0.0.1", server.port, protocol=2, **secure)  # type: ignore[arg-type]
        pool = client.connection_pool
        connection = pool.connection_class(**pool.connection_kwargs)
        connection.connect()
        wire = Wire(socket_of(connection))
        wire.begin(time.monotonic() + 10)
        assert wire.is_quiet()  # of its login nothing is due any more
        wire.send([b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$1000000\r\n", bytes(1_000_000), b"\r\n"], 1)
        assert wire.reply() == b"OK"
        into = memoryview(bytearray(b"?" * (1_000_000 - HEAD)))
        wire.begin(time.monotonic() + 10)
        wire.send([b"*2\r\n$3\r\nGET\r\n$1\r\nk\r\n*1\r\n$4\r\nPING\r\n"], 2)
        assert wire.value(HEAD, into) == bytes(HEAD)
        assert into == bytes(1_000_000 - HEAD)
        assert wire.reply() == b"PONG"
        assert wire.is_clean
        assert wire.is_quiet()
        connection.disconnect()
        with pytest.raises(WireError, match="gave no socket"):
            socket_of(connection)
        client.close()
