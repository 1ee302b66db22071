"""Rows over a socket, compiled and in Python: the same bytes, digests and stops, whatever the other end does."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtier.tiers import Outcome, checksum
from kvtier.tiers.compiled import extension
from kvtier.tiers.peers.stream import TAG_BYTES, BlockTags
from kvtier.tiers.shared import stream as streams
from kvtier.tiers.shared.life import StorageFailed
from kvtier.tiers.shared.stream import ByteStream, PlainTransfer

pytest.importorskip("aeg.aegis128x2", reason="no aeg here")
COMPILED = extension("kvtier.tiers.shared.transfer_compiled")
FORMS = [
    pytest.param(True, id="compiled", marks=pytest.mark.skipif(COMPILED is None, reason="not built: `make compiled`")),
    pytest.param(False, id="python"),
]
HEAD, NUM = 24, 5
SIZES = (1000, 240, 241, 5 << 20)  # the last one takes several pieces
Ends = tuple[ByteStream, ByteStream]
Row = tuple[bytes, bytes, bytes]


def soon() -> float:
    return time.monotonic() + 20


@pytest.fixture
def ends(is_plain: bool) -> Iterator[Ends]:
    """Both ends of a connection."""
    pair = [ByteStream(sock, StorageFailed) for sock in socket.socketpair()]
    for each in pair:
        each.is_plain = is_plain
    yield pair[0], pair[1]
    for each in pair:
        each._sock.close()


def blocks(size: int, tags: BlockTags) -> list[Row]:
    """Head, payload, tag."""
    rng = np.random.default_rng(size)
    found = []
    for i in range(NUM):
        head, payload = bytes([i]) * HEAD, rng.bytes(size)
        found.append((head, payload, tags.tag(head, memoryview(payload))))
    return found


def places(size: int) -> list[tuple[memoryview, memoryview, memoryview]]:
    head, payload, tag = (memoryview(bytearray(NUM * each)) for each in (HEAD, size, TAG_BYTES))
    return [(head[i * HEAD :][:HEAD], payload[i * size :][:size], tag[i * TAG_BYTES :][:TAG_BYTES]) for i in range(NUM)]


def meanwhile(action: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=action)
    thread.start()
    return thread


@pytest.mark.parametrize("is_plain", FORMS)
@pytest.mark.parametrize("other", FORMS)
@pytest.mark.parametrize("size", SIZES)
def test_blocks_are_digested_on_their_way_at_both_ends(ends: Ends, other: bool, size: int) -> None:
    """Known tags are sent, others made."""
    (lender, borrower), tags = ends, BlockTags(bytes(32))
    borrower.is_plain = other
    rows = blocks(size, tags)
    out = [(head, payload, tag if head[0] % 2 else bytearray(TAG_BYTES)) for head, payload, tag in rows]
    sums = [checksum(memoryview(payload)) for _, payload, _ in rows]
    sent = lender.transfer(out, [], mac=tags, expected=sums)
    sending = meanwhile(lambda: lender.move(sent, 1 << 20, soon()))
    into = places(size)
    run = borrower.transfer([], into, mac=BlockTags(bytes(32)))
    for end in (1, 3, NUM):  # looked at in between
        borrower.move(run, 0, soon(), end)
        assert run.whole >= end
    sending.join()
    assert (sent.num_sent, sent.unlike, run.whole, run.part) == (NUM, False, NUM, 0)
    for came, was, row in zip(into, out, rows, strict=True):
        assert tuple(map(bytes, came)) == tuple(map(bytes, was)) == row
    assert [run.hash_at(i) for i in range(NUM)] == sums
    assert [run.tag_at(i) for i in range(NUM)] == [tag for *_, tag in rows]


@pytest.mark.parametrize("is_plain", FORMS)
@pytest.mark.parametrize("size", SIZES)
def test_a_payload_that_changed_is_not_sent_whole(ends: Ends, size: int) -> None:
    """Those before it are; its own tag never is, so nobody can take it for a block."""
    lender, borrower = ends
    tags = BlockTags(bytes(32))
    rows = blocks(size, tags)
    sums = [checksum(memoryview(payload)) for _, payload, _ in rows]
    sums[2] ^= 1
    out = [(head, payload, bytearray(TAG_BYTES)) for head, payload, _ in rows]
    sent = lender.transfer(out, [], mac=tags, expected=sums)

    def lend() -> None:
        lender.move(sent, 1 << 20, soon())
        lender.move(sent, 1 << 20, soon())  # nor when it is asked again
        lender._sock.shutdown(socket.SHUT_WR)

    sending = meanwhile(lend)
    run = borrower.transfer([], places(size), mac=BlockTags(bytes(32)))
    borrower.move(run, 0, soon())
    sending.join()
    assert (sent.num_sent, sent.unlike, run.whole) == (2, True, 2)
    assert not any(out[2][2])
    assert run.part <= HEAD + size
    assert borrower.stopped(soon()).outcome is Outcome.IO_ERROR


@pytest.mark.parametrize("is_plain", FORMS)
def test_an_end_that_stops_amid_a_block_costs_the_deadline_and_no_whole_block(ends: Ends) -> None:
    """It hangs at any byte; then the connection ends there."""
    lender, borrower = ends
    rows = blocks(SIZES[0], BlockTags(bytes(32)))
    said = b"".join(b"".join(row) for row in rows[:2])
    lender.send([said[:-1]], soon())
    run = borrower.transfer([], into := places(SIZES[0]), mac=BlockTags(bytes(32)))
    deadline = time.monotonic() + 0.2
    borrower.move(run, 0, deadline)
    assert time.monotonic() < deadline + 10
    assert (run.whole, run.part) == (1, len(said) // 2 - 1)
    assert bytes(into[0][1]) == rows[0][1]
    assert borrower.stopped(deadline).outcome is Outcome.TIMEOUT
    lender._sock.close()
    borrower.move(run, 0, deadline := soon())
    assert run.whole == 1
    assert time.monotonic() < deadline - 5
    assert borrower.stopped(deadline).outcome is Outcome.IO_ERROR
    with pytest.raises(StorageFailed):
        borrower.receive(memoryview(bytearray(1)), soon())


@pytest.mark.parametrize("is_plain", FORMS)
def test_an_end_that_trickles_is_received_whole_or_cut_off_by_the_deadline(ends: Ends) -> None:
    lender, borrower = ends
    size = SIZES[0]
    tags = BlockTags(bytes(32))
    rows = blocks(size, tags)
    said, stop = b"".join(b"".join(row) for row in rows), threading.Event()

    def trickle(step: int, pause: float) -> None:
        with suppress(StorageFailed):
            for at in range(0, len(said), step):
                lender.send([said[at : at + step]], soon())
                if stop.wait(pause):
                    return

    sending = meanwhile(lambda: trickle(37, 0.0005))
    run = borrower.transfer([], places(size), mac=tags)
    borrower.move(run, 0, soon())
    sending.join()
    assert [run.tag_at(i) for i in range(NUM)] == [tag for *_, tag in rows]
    sending = meanwhile(lambda: trickle(1, 0.01))  # for a minute
    run = borrower.transfer([], into := places(size))
    borrower.move(run, 0, deadline := time.monotonic() + 0.2)
    assert time.monotonic() < deadline + 10
    assert run.whole == 0
    before = bytes(into[0][1])
    time.sleep(0.1)
    assert bytes(into[0][1]) == before  # nothing is written any more: the slot may be another block's
    stop.set()
    sending.join()


@pytest.mark.parametrize("is_plain", FORMS)
def test_garbage_is_received_and_has_other_digests(ends: Ends) -> None:
    lender, borrower = ends
    rows = blocks(SIZES[0], tags := BlockTags(bytes(32)))
    sending = meanwhile(lambda: lender.send([os.urandom(sum(map(len, rows[0])) * NUM)], soon()))
    run = borrower.transfer([], into := places(SIZES[0]), mac=tags)
    borrower.move(run, 0, soon())
    sending.join()
    assert run.whole == NUM
    assert all(run.tag_at(i) != bytes(into[i][2]) for i in range(NUM))
    assert [run.hash_at(i) for i in range(NUM)] == [checksum(row[1]) for row in into]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.parametrize("is_plain", FORMS)
@given(data=st.data())
def test_replies_stop_at_the_first_that_is_not_as_usual(is_plain: bool, data: st.DataObject) -> None:
    """However they come in pieces: all that came behind the whole ones is in the places, and is counted."""
    usual = [b"+%02d" % i + b"x" * 40 + b"\r\n" for i in range(NUM)]
    odd = data.draw(st.integers(0, NUM))
    last = data.draw(st.sampled_from([b"-ERR no\r\n", b"$-1\r\n", b"+x"])) if odd < NUM else b""
    said = b"".join(usual[:odd]) + last
    cuts = sorted(data.draw(st.lists(st.integers(0, len(said)), max_size=3)))
    mine, theirs = socket.socketpair()
    with mine, theirs:
        client = ByteStream(mine, StorageFailed)
        client.is_plain = is_plain

        def serve() -> None:
            for first, end in zip([0, *cuts], [*cuts, len(said)], strict=True):
                theirs.sendall(said[first:end])
                time.sleep(0.002)
            theirs.shutdown(socket.SHUT_WR)

        serving = meanwhile(serve)
        rows = [(memoryview(bytearray(3)), memoryview(bytearray(42))) for _ in range(NUM)]
        run = client.transfer([(b"GET",)] * NUM, rows, b"+", NUM)
        client.move(run, 1, soon())
        serving.join()
    is_short = said.endswith(b"+x")  # begins as usual, and ends
    assert run.whole == odd
    assert run.unlike == (odd < NUM and not is_short)
    came = b"".join(b"".join(map(bytes, row)) for row in rows)
    num_came = len(said) - len(last) + run.part
    assert came[:num_came] == said[:num_came]
    assert run.part or not last


@pytest.mark.parametrize("is_plain", FORMS[:1])  # in Python some megabytes go by one call
def test_no_more_is_under_way_than_asked_for(ends: Ends) -> None:
    """A server answers what it has, and sees how many commands had come by then."""
    client, server = ends
    seen: list[int] = []

    def serve() -> None:
        pending = 0
        for _ in range(NUM):
            while not pending or server.wait(0.01):
                buffer = memoryview(bytearray(64))
                pending += server.receive(buffer, soon()) // 3
            seen.append(pending)
            server.send([b"+OK" + bytes(97) + b"\r\n"], soon())
            pending -= 1

    serving = meanwhile(serve)
    rows = [(memoryview(bytearray(102)),) for _ in range(NUM)]
    run = client.transfer([(b"GET",)] * NUM, rows, b"+OK")
    client.move(run, 2 * 105, soon())
    serving.join()
    assert run.whole == NUM
    assert seen == [2, 2, 2, 2, 1]


@pytest.mark.skipif(COMPILED is None, reason="not built: `make compiled`")
def test_rows_that_cannot_be_are_refused() -> None:
    assert COMPILED is not None
    place = (memoryview(bytearray(8)), memoryview(bytearray(8)))
    tagged = (b"h", b"p", bytearray(TAG_BYTES))
    wrong: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        (([(b"a",)], [place], b"+OK\r\n", 2), {}),
        (([(b"a",)], [place], b"+OK\r\n", 1, -16), {}),
        (([(b"a",)] * 2, [place], b"+OK\r\n"), {}),
        (([(b"a",), (b"a", b"b")], [place, place]), {}),
        (([(b"a",)], [(memoryview(bytearray(1)), place[0])], b"+OK\r\n"), {}),
        (([()], [place]), {}),
        (([(b"a",) * 9], [place]), {}),
        (([tagged], []), {"expected": [1, 2]}),
        (([tagged], []), {"expected": [1]}),  # who should make the tag?
        (([(b"h", b"p", b"short")], []), {"expected": [1]}),
        (([(b"h", b"p")], []), {"expected": [1]}),
        (([], [place]), {"mac": BlockTags(bytes(32))}),
        (([], [(place[0], memoryview(bytearray(0)))]), {}),
        (([(b"h", b"", bytes(TAG_BYTES))], []), {"expected": [1]}),
    ]
    for rows, more in wrong:
        with pytest.raises(ValueError, match=r"give"):
            COMPILED.Transfer(*rows, **more)
    with pytest.raises(BufferError):
        COMPILED.Transfer([(b"a",)], [(memoryview(b"read only"),)])
    run = COMPILED.Transfer([(b"a",)], [place], b"+")
    for asked in (run.hash_at, run.tag_at):
        with pytest.raises(IndexError):
            asked(0)


def test_each_stream_has_the_form_that_it_can() -> None:
    mine, theirs = socket.socketpair()
    with mine, theirs:
        stream = ByteStream(mine, StorageFailed)
        assert isinstance(stream.transfer([], []), PlainTransfer) == (COMPILED is None)
        stream.is_plain = False
        assert isinstance(stream.transfer([], []), PlainTransfer)
        assert stream.round_trip() == 0.0  # of TCP alone
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as client:
        assert 0 < ByteStream(client, StorageFailed).round_trip() < 60
    assert streams.PATIENCE <= 0.05
