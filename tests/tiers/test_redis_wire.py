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

from kvtier.tiers.redis_wire import Refusal, Reply, Wire, WireError, socket_of
from kvtier.tiers.tier import Outcome

HEAD, PAYLOAD = 40, 3000
AHEAD = len(b"$%d\r\n" % (HEAD + PAYLOAD)) + HEAD


class Script:
    """A stream that says what it is given, in the pieces it is given."""

    def __init__(self, data: bytes, pieces: Sequence[int]) -> None:
        self.data = data
        self.pieces = list(pieces)
        self.longest = 0

    def send(self, parts: Sequence[object], deadline: float) -> None:
        raise AssertionError("nobody sends here")

    def receive(self, into: memoryview, deadline: float) -> int:
        size = min(into.nbytes, len(self.data), self.pieces.pop() if self.pieces else 1 << 20)
        if not size:
            raise WireError(Outcome.IO_ERROR, "the script is over")
        into[:size], self.data = self.data[:size], self.data[size:]
        return size

    def receive_all(self, into: Sequence[memoryview], deadline: float) -> None:
        for view in into:
            while view.nbytes:
                view = view[self.receive(view, deadline) :]

    def is_quiet(self) -> bool:
        return not self.data


def scripted(data: bytes, num_replies: int, pieces: Sequence[int] = ()) -> Wire:
    mine, other = socket.socketpair()
    with mine, other:  # only for its shape
        wire = Wire(mine)
    wire._stream = Script(data, pieces)
    wire.begin(time.monotonic() + 5, ahead=AHEAD)
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


@given(items=ITEMS, pieces=st.lists(st.integers(1, 700), max_size=60))
def test_values_misses_and_refusals_in_any_pieces(items: list[Item], pieces: list[int]) -> None:
    """Each GET is followed by a PEXPIRE: a payload never starts in the buffer, however the bytes arrive."""
    said = b""
    for item in items:
        value = (
            b"$-1"
            if item is None
            else b"$%d\r\n%b" % (len(item), item)
            if isinstance(item, bytes)
            else b"-" + item.encode()
        )
        said += value + b"\r\n" + (b":1" if item else b"-READONLY You can't write") + b"\r\n"
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


@pytest.mark.parametrize(
    ("said", "reply"),
    [
        (b"+OK", b"OK"),
        (b":12", 12),
        (b":-1", -1),
        (b"$-1", None),
        (b"$0\r\n", b""),
        (b"$3\r\nabc", b"abc"),
        (b"-OOM x", "OOM x"),
    ],
)
def test_short_replies(said: bytes, reply: Reply) -> None:
    wire = scripted(said + b"\r\n", 1)
    assert wire.reply() == reply
    assert wire.is_clean


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


def test_a_short_value_is_read_past() -> None:
    wire = scripted(b"$5\r\nshort\r\n:1\r\n$-1\r\n:0\r\n", 4, pieces=[3] * 20)
    into = memoryview(bytearray(PAYLOAD))
    assert wire.value(HEAD, into) is Outcome.CHECKSUM
    assert wire.reply() == 1
    assert wire.value(HEAD, into) is None
    assert wire.reply() == 0
    assert wire.is_clean


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
    wire.begin(time.monotonic() + 20, ahead=len(b"$%d\r\n" % (HEAD + size)) + HEAD)
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


def test_many_parts_are_sent_in_order(ends: tuple[Wire, socket.socket]) -> None:
    wire, server = ends
    parts = [bytes([i % 256]) * (i % 70) for i in range(3000)]
    received: list[bytes] = []

    def drain() -> None:
        while data := server.recv(1 << 16):
            received.append(data)

    peer = threading.Thread(target=drain)
    peer.start()
    wire.begin(time.monotonic() + 10)
    wire.send([memoryview(part) for part in parts], 0)
    wire._stream._sock.shutdown(socket.SHUT_WR)  # type: ignore[attr-defined]
    peer.join()
    assert b"".join(received) == b"".join(parts)


@pytest.mark.parametrize("at", ["line", "payload"])
def test_a_server_that_drips_cannot_outlast_the_deadline(ends: tuple[Wire, socket.socket], at: str) -> None:
    wire, server = ends
    said = b"$%d\r\n" % (HEAD + PAYLOAD) + bytes(HEAD) if at == "payload" else b""
    server.sendall(said)
    stop = threading.Event()

    def drip() -> None:
        while not stop.wait(0.01):
            server.sendall(b"+")

    peer = threading.Thread(target=drip)
    peer.start()
    wire.begin(time.monotonic() + 0.2, ahead=AHEAD)
    wire.num_expected = 2
    with pytest.raises(WireError) as caught:
        wire.value(HEAD, memoryview(bytearray(PAYLOAD)))
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
        wire.begin(time.monotonic() + 10, ahead=len(b"$1000000\r\n") + HEAD)
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
