"""The router before a replica that speaks raw bytes: what it says unasked, of itself or not to the end harms nobody."""

import json
import logging
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from extent import brief
from router_rig import MODEL, PATIENCE, RawReplica, RoutedReplicas, Says, page, routed, until

from kvtier.service.web import http_server

CHUNKED = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"


@contextmanager
def before(says: Says, **options: object) -> Iterator[tuple[RawReplica, RoutedReplicas]]:
    replica = RawReplica(says)
    try:
        with routed(f"http://{replica.name}", **options) as router:
            until(lambda: state(router) == "up")
            yield replica, router
    finally:
        replica.close()


def state(router: RoutedReplicas) -> str:
    return str(router.status()["replicas"][0]["state"])


def test_what_follows_an_answer_is_nobodys() -> None:
    with before(lambda path, headers: page("mine") + page("of somebody else")) as (_, router):
        for _ in range(5):
            assert router.complete().text == "mine"


def test_a_stream_that_only_breaks_off_is_no_whole_one() -> None:
    def half(path: str, headers: dict[str, str]) -> bytes:
        return STREAM + b'\r\ndata: {"choices": []}\n\n'

    with before(half) as (_, router):
        *_, last, rest = router.complete(stream=True).text.split("\n\n")
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "mid_stream_broken"
        assert rest == ""
    with before(lambda path, headers: half(path, headers) + b"data: [DONE]\n\n") as (_, router):
        assert router.complete(stream=True).text.endswith("data: [DONE]\n\n")
        assert router.status()["errors"] == {}


STATUSES = ["99", "099", "000", "600", "999", "1000", "20", "-20", "abc", "2OO", "", "100", "101", "102", "103", "199"]


# a number beyond all, no number, none at all, and those of answers that are no last ones
@pytest.mark.parametrize("status", brief(["600", "2OO", "", "100", "101"], STATUSES))
def test_a_status_that_cannot_be_is_a_502_and_counted(status: str) -> None:
    def says(path: str, headers: dict[str, str]) -> bytes:
        return page("not an answer").replace(b"200 OK", f"{status} Imagined".encode())

    with before(says) as (replica, router):
        replica_is_well = page("mine")
        for stream in (False, True):
            answer = router.complete(stream=stream)
            assert answer.status_code == 502
            error = answer.json()["error"]
            assert (error["code"], error["type"]) == ("garbled", "server_error")
            assert error["message"] == "no replica could answer; try again"
        assert router.status()["errors"] == {"garbled": 2}
        assert router.status()["replicas"][0]["errors"]["garbled"] >= 2
        # and it is asked again
        replica._says = lambda path, headers: replica_is_well
        until(lambda: state(router) == "up")
        assert router.complete().text == "mine"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(text: object) -> bytes:
    return b"data: " + json.dumps(text).encode() + b"\n\n"


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What went to a client past everything that a server does for an answer."""
    found: list[bytes] = []
    real = http_server._Protocol._pass_chunks

    def noting(self: http_server._Protocol, chunks: bytes) -> bool:
        has_passed = real(self, chunks)
        if has_passed:
            found.append(chunks)
        return has_passed

    monkeypatch.setattr(http_server._Protocol, "_pass_chunks", noting)
    return found


@pytest.mark.parametrize("seed", range(brief(1, 4)))
def test_a_stream_is_the_same_wherever_its_bytes_are_cut(seed: int) -> None:
    # events alone, several in a chunk, one in several chunks, whole chunks and halves of them in one piece
    draw = random.Random(seed)
    events = [event("x" * draw.randrange(40)) for _ in range(60)] + [b"data: [DONE]\n\n"]
    stream = b"".join(events)
    chunks, at = [], 0
    for _ in range(40):
        end = at + draw.choice([len(events[0]), draw.randrange(1, 60), stream.find(b"\n\n", at + 1) + 2 - at])
        if at < end <= len(stream):
            chunks.append(chunk(stream[at:end]))
            at = end
    chunks += [chunk(stream[at:]), b"0\r\n\r\n"] if at < len(stream) else [b"0\r\n\r\n"]

    def says(path: str, headers: dict[str, str]) -> Iterator[bytes]:
        yield CHUNKED
        wire = b"".join(chunks)
        borders = {sum(map(len, chunks[:i])) for i in range(len(chunks)) if draw.random() < 0.7}
        borders |= {draw.randrange(len(wire)) for _ in range(5)}
        for begin, end in zip([0, *sorted(borders)], [*sorted(borders), len(wire)], strict=True):
            yield wire[begin:end]
            time.sleep(0.005)

    with before(says) as (_, router):
        assert router.complete(stream=True).content == stream
        assert router.status()["errors"] == {}


def test_events_that_come_alone_are_passed_on_as_they_are(passed: list[bytes]) -> None:
    events = [event(number) for number in range(50)] + [b"data: [DONE]\n\n"]
    usage = event({"usage": {"prompt_tokens": 7, "prompt_tokens_details": {"cached_tokens": 4}}})
    taken = threading.Semaphore(0)

    def says(path: str, headers: dict[str, str]) -> Iterator[bytes]:
        yield CHUNKED
        for each in [*events[:-1], usage, events[-1]]:
            yield chunk(each)
            taken.acquire(timeout=PATIENCE)  # each has arrived before the next is sent
        yield b"0\r\n\r\n"

    with before(says) as (_, router):
        asked = {"model": "m", "prompt": "x", "stream": True}
        told = b""
        with router.client.stream("POST", "/v1/completions", json=asked) as answer:
            for piece in answer.iter_raw():
                told += piece
                taken.release()
        assert told == b"".join([*events[:-1], usage, events[-1]])
        assert passed[-1] == chunk(events[-1])
        assert len(passed) > 45
        assert router.status()["tokens"]["told_cached"] == 4  # what is passed on is read, all the same

        # who knows no chunks gets none
        passed.clear()
        host, _, port = router.server.address.rpartition(":")
        with socket.create_connection((host, int(port)), PATIENCE) as old:
            body = json.dumps(asked).encode()
            head = f"POST /v1/completions HTTP/1.0\r\nhost: {host}\r\ncontent-type: application/json\r\n"
            old.sendall(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
            told = b""
            while piece := old.recv(65_536):
                told += piece
                taken.release(len(events))
        assert told.partition(b"\r\n\r\n")[2] == b"".join([*events[:-1], usage, events[-1]])
        assert not passed


@pytest.mark.parametrize("rubbish", [b"zz\r\n", b"\n\n\r\n", b"3\r\nabc\n\n\r\n", b"-1\r\n\n\n\r\n"])
def test_rubbish_among_chunks_ends_a_stream_with_an_error(rubbish: bytes) -> None:
    def says(path: str, headers: dict[str, str]) -> Iterator[bytes]:
        yield CHUNKED
        for number in range(5):
            yield chunk(event(number))
            time.sleep(0.05)
        yield rubbish

    with before(says) as (_, router):
        *told, last, rest = router.complete(stream=True).text.split("\n\n")
        assert told[:5] == [f"data: {number}" for number in range(5)]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "mid_stream_garbled"
        assert rest == ""


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\n", CHUNKED])
def test_an_answer_that_only_drips_does_not_begin(head: bytes) -> None:
    def says(path: str, headers: dict[str, str]) -> Iterator[bytes]:
        yield head
        with suppress(OSError):
            for number in range(10_000):  # lines of a head, or of a chunk that has no bytes
                yield b"x-%d: 1\r\n" % number if head is not CHUNKED else b"1"[: number == 0]
                time.sleep(0.02)

    with before(says, first_byte_timeout="500ms", request_timeout="40s") as (_, router):
        answer = router.complete(stream=True)
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "slow_first_byte")
        assert answer.headers["x-should-retry"] == "false"


def test_one_slow_to_tell_its_load_is_up(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("kvtier.service.router.fleet._LOAD_PATIENCE", 0.5)
    monkeypatch.setattr("kvtier.service.router.fleet.EVERY", 0.05)
    caplog.set_level(logging.INFO)
    with before(lambda path, headers: page("{}"), probe_timeout="2s") as (replica, router):
        replica.pages["/status"] = {"requests": {"live": 3}}
        until(lambda: router.status()["replicas"][0]["load"] > 0)
        replica.hangs["/status"] = threading.Event()
        until(lambda: router.status()["replicas"][0]["errors"].get("no_status", 0) >= 3)
        assert state(router) == "up"
        assert not [line for line in caplog.messages if "is down" in line]
        assert router.status()["replicas"][0]["load"] == 0  # what it said long ago is not believed
        replica.hangs.pop("/status").set()
        until(lambda: router.status()["replicas"][0]["load"] > 0)


def test_headers_of_one_hop_stay_there() -> None:
    seen: list[dict[str, str]] = []

    def says(path: str, headers: dict[str, str]) -> bytes:
        seen.append(headers)
        return page("{}", "connection: x-inner", "x-inner: 1", "x-outer: 2")

    with before(says) as (_, router):
        asked = {"connection": "keep-alive, X-Hop", "x-hop": "1", "x-end": "2", "te": "trailers"}
        answer = router.client.post("/v1/completions", json={"model": "m", "prompt": "x"}, headers=asked)
        assert answer.headers["x-outer"] == "2"
        assert "x-inner" not in answer.headers
    assert seen[0]["x-end"] == "2"
    assert not seen[0].keys() & {"x-hop", "te"}


@pytest.mark.parametrize("live", ["1e999", *brief([], ["1" + "0" * 400, "-1e999", "null"]), "[" * 10_000, '"a"'])
def test_a_load_that_is_none_is_looked_at_again(live: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.service.router.fleet.EVERY", 0.05)
    with before(lambda path, headers: page("{}")) as (replica, router):
        replica.pages["/status"] = f'{{"requests": {{"live": {live}}}}}'
        replica.asked.clear()
        until(lambda: replica.asked["/status"] >= 2)
        assert state(router) == "up"


@pytest.mark.parametrize("size", [0, *brief([], [-1, 16.0]), 10**30, True, "16"])
def test_a_block_size_that_is_none_is_refused(size: object) -> None:
    replica = RawReplica(lambda path, headers: None)
    replica.pages["/v1/models"] = {"data": [{**MODEL, "kvtier": {"block_size": size}}]}
    try:
        with routed(f"http://{replica.name}") as router:
            until(lambda: "block_size" in router.status()["replicas"][0]["why"])
            assert state(router) == "down"
            replica.pages["/v1/models"] = {"data": [MODEL]}
            until(lambda: state(router) == "up")
    finally:
        replica.close()


def test_who_hung_up_is_asked_anew_who_it_is() -> None:
    with before(lambda path, headers: page("{}")) as (replica, router):
        replica.pages["/v1/models"] = {"data": [{**MODEL, "id": "another"}]}
        replica.hang_up()  # and listens as before: what is there is another by now
        until(lambda: router.status()["models"] == ["another"])
