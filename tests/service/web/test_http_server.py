"""Stories of the HTTP server that daemon, engine and router share: slow clients, two lengths, names of others."""

import asyncio
import contextlib
import errno
import io
import json
import logging
import re
import resource
import socket as sockets
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import cast

import httpx2
import pytest
from doubles import wait_until
from http_rig import ServedDaemon, talk
from hypothesis import given
from hypothesis import strategies as st
from router_rig import replicas, routed
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Scope

from kvtier.service.admin.http_app import Pages
from kvtier.service.command_line import JsonLine, LogFormat, TextLine, log_to_stderr
from kvtier.service.web import http_server
from kvtier.service.web.http_server import HostNames, HttpServer, HttpSocket, _OneSend
from kvtier.tiers.config.config import Config
from kvtier.tiers.errors import ConfigError

HEAD = b"POST /admin/reset HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def connected(served: ServedDaemon, opened: contextlib.ExitStack) -> sockets.socket:
    host, _, port = served.http.rpartition(":")
    return opened.enter_context(sockets.create_connection((host, int(port)), timeout=60))


def asked(served: ServedDaemon, path: str, **headers: str) -> int:
    """The status of a page asked for on a connection of its own."""
    return httpx2.get(f"http://{served.http}{path}", headers=headers, timeout=60).status_code


def hung_up(connection: sockets.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


# slow clients


def test_pages_answer_beside_two_hundred_heads_that_drip(served: ServedDaemon) -> None:
    with contextlib.ExitStack() as opened:
        slow: list[sockets.socket] = []
        for number in range(200):
            slow.append(connected(served, opened))
            for connection in slow:
                with contextlib.suppress(OSError):  # it was the oldest, and had to go
                    connection.sendall(b"G" if connection is slow[-1] else b"E")
            if number % 20 == 19:
                assert [asked(served, path) for path in ("/healthz", "/readyz", "/status")] == [200, 200, 200]
        assert hung_up(slow[0])
        # The youngest are still waited for: it is the oldest that go.
        slow[-1].setblocking(False)
        with pytest.raises(BlockingIOError):
            slow[-1].recv(1)


def test_connections_that_wait_leave_files_for_the_rest(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    getrlimit = resource.getrlimit
    monkeypatch.setattr(
        resource, "getrlimit", lambda which: (64, 64) if which == resource.RLIMIT_NOFILE else getrlimit(which)
    )
    served = ServedDaemon(home / "s", host={"size": 1 << 20})
    try:
        with contextlib.ExitStack() as opened:
            waiting = [connected(served, opened) for _ in range(40)]
            assert asked(served, "/readyz") == 200
            assert all(hung_up(each) for each in waiting[: 40 - 16])
            waiting[-1].setblocking(False)
            with pytest.raises(BlockingIOError):
                waiting[-1].recv(1)
    finally:
        served.close()


def test_no_file_for_a_connection_is_one_line_and_they_are_taken_again(
    served: ServedDaemon, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried = 0

    def accept(listening: sockets.socket) -> None:
        nonlocal tried
        tried += 1
        raise OSError(errno.EMFILE, "Too many open files")

    assert asked(served, "/readyz") == 200
    with monkeypatch.context() as patched, contextlib.ExitStack() as opened:
        patched.setattr(http_server._Listening, "accept", accept)
        connected(served, opened)
        wait_until(lambda: tried >= 3)  # once a second
    assert asked(served, "/readyz") == 200
    assert tried < 10
    (line,) = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert "takes no connection: [Errno 24] Too many open files; raise the limit of open files" in line.getMessage()


def test_a_head_has_one_deadline_however_it_drips(served: ServedDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_HEAD", 0.3)
    with contextlib.ExitStack() as opened:
        connection = connected(served, opened)
        connection.settimeout(0.02)
        for letter in b"GET /healthz HTTP/1.1\r\nX: " + b"y" * 3000:
            try:
                connection.sendall(bytes([letter]))
                assert connection.recv(1) == b""
                break
            except TimeoutError:
                continue
            except ConnectionError:
                break
        else:
            pytest.fail("it was waited for, byte after byte")


def operators_head(served: ServedDaemon) -> bytes:
    """A request that is let in, up to its last headers."""
    return HEAD + f"Authorization: {served.client.headers['authorization']}\r\n".encode()


def test_health_has_room_where_bodies_that_do_not_come_take_all_other(served: ServedDaemon) -> None:
    request = operators_head(served) + b"Content-Length: 9\r\n\r\n{"
    with contextlib.ExitStack() as opened:

        def is_full() -> bool:
            connected(served, opened).sendall(request)
            return asked(served, "/status") == 503

        for _ in range(63):
            connected(served, opened).sendall(request)
        wait_until(is_full)  # one more each time: a question may have had the last place when it came
        assert (asked(served, "/healthz"), asked(served, "/readyz")) == (200, 200)
    wait_until(lambda: asked(served, "/status") == 200)


def test_health_has_room_whatever_answers_nobody_reads() -> None:
    # A server whose application answers at once; sixty-four requests are answered at a time, and some for health.
    server = http_server.HttpServer(PlainTextResponse("well"), HttpSocket("127.0.0.1:0"))

    async def unread(message: Message) -> None:
        await asyncio.Event().wait()  # what a client does not read can't be written to its end

    async def story() -> list[int]:
        clients = [
            asyncio.create_task(server._admit(scope(path), receive, unread))
            for path in ["/status"] * 100 + ["/healthz", "/readyz"] * 20
        ]
        await asyncio.sleep(0)
        told: list[int] = []

        async def tell(message: Message) -> None:
            if message["type"] == "http.response.start":
                told.append(message["status"])

        for path in ("/healthz", "/readyz", "/status"):
            await server._admit(scope(path), receive, tell)
        for client in clients:
            client.cancel()
        await asyncio.wait(clients)
        await server._admit(scope("/status"), receive, tell)
        return told

    async def receive() -> Message:
        return {"type": "http.request"}

    def scope(path: str) -> Scope:
        return {"type": "http", "path": path, "method": "GET", "headers": [(b"host", b"localhost")]}

    try:
        assert asyncio.run(story()) == [200, 200, 503, 200]  # others wait, and have room once these have gone
    finally:
        server.stop()


def test_who_asks_and_does_not_read_is_dropped(served: ServedDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_HEAD", 0.3)
    monkeypatch.setattr(http_server, "_IDLE", 0.3)
    with contextlib.ExitStack() as opened:
        for _ in range(70):
            connection = connected(served, opened)
            connection.setsockopt(sockets.SOL_SOCKET, sockets.SO_RCVBUF, 4096)
            connection.sendall(b"GET /dashboard.js HTTP/1.1\r\nHost: localhost\r\n\r\n" * 60)
        wait_until(lambda: not served.pages._server._server.server_state.connections)
    assert asked(served, "/status") == 200


# two lengths


@pytest.mark.parametrize("length", [b"2", b"9", b"0"])
def test_a_body_with_two_lengths_is_refused(served: ServedDaemon, length: bytes) -> None:
    head = operators_head(served)
    chunked = b"Transfer-Encoding: chunked\r\n"
    body = b"d\r\n" + b'{"all": true}' + b"\r\n0\r\n\r\n"
    assert talk(served.http, head + chunked + b"Connection: close\r\n\r\n" + body, more=True).startswith(
        b"HTTP/1.1 200"
    )
    smuggled = b"GET /status HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for headers in (chunked + b"Content-Length: " + length, b"Content-Length: " + length + b"\r\n" + chunked[:-2]):
        answer = talk(served.http, head + headers + b"\r\n\r\n" + body + smuggled, more=True)
        assert answer.startswith(b"HTTP/1.1 400")
        assert b"a body has only one of them" in answer
        assert answer.count(b"HTTP/1.1") == 1  # what follows is not read as another request


# what is refused before the application sees it


def test_every_refusal_has_the_form_of_the_applications_errors(served: ServedDaemon) -> None:
    answer = talk(served.http, b"NOT A REQUEST\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 Bad Request")
    assert b"connection: close" in head
    assert json.loads(body) == {"error": "request: not HTTP/1.1; see what the client sends before the body"}
    # In the router and the engine that is OpenAI's form.
    with replicas(1) as (one,), routed(one.url) as router:
        address = router.client.base_url.netloc.decode()
        told = [
            talk(address, b"NOT A REQUEST\r\n\r\n"),
            talk(address, b"GET /status HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n"),
            talk(address, HEAD + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"),
        ]
    for status, answer in zip((400, 421, 400), told, strict=True):
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 %d " % status), answer
        assert b"connection: close" in head.lower()
        error = json.loads(body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"


# names of others


def test_a_page_of_another_name_learns_nothing(served: ServedDaemon) -> None:
    port = served.http.rpartition(":")[2]
    for name in ("localhost", "127.0.0.1", "[::1]", "192.0.2.7", "node.localhost", "LOCALHOST.", sockets.gethostname()):
        for host in (name, f"{name}:{port}"):
            assert asked(served, "/status", host=host) == 200, host
    for name in ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "evil", "1.2.3"):
        for host in (name, f"{name}:{port}"):
            for path in ("/", "/status", "/metrics", "/summary", "/stream", "/daemon.js"):
                assert asked(served, path, host=host) == 421, (host, path)
    refused = httpx2.get(f"http://{served.http}/status", headers={"host": "evil.example:80"})
    why = 'host "evil.example": not a name of this server; add it to [service] allowed_hosts'
    assert refused.json() == {"error": why}
    # Health checks come under any name, and a client of old has none.
    assert asked(served, "/healthz", host="evil.example") == asked(served, "/readyz", host="evil.example") == 200
    assert talk(served.http, b"GET /status HTTP/1.0\r\n\r\n", more=True).startswith(b"HTTP/1.1 200")


def test_names_can_be_added(served: ServedDaemon) -> None:
    for names, known in (((), False), (("node-a",), True), (("other", "NODE-A"), True), (("*",), True)):
        pages = Pages(served.daemon, HttpSocket("127.0.0.1:0", names=names))
        pages.start()
        try:
            answer = httpx2.get(f"http://{pages.address}/metrics", headers={"host": "node-a:9400"}, timeout=60)
            assert answer.status_code == (200 if known else 421)
        finally:
            pages.stop()


def test_the_option_is_a_list_of_names(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Config.load(service={"allowed_hosts": ["node-a", "b.example"]}).service.allowed_hosts == (
        "node-a",
        "b.example",
    )
    monkeypatch.setenv("KVTIER_ROUTER__ALLOWED_HOSTS", "router r.example")
    assert Config.load().router.allowed_hosts == ("router", "r.example")
    with pytest.raises(ConfigError, match=r"\[server\] allowed_hosts .*: not a list of names without a port"):
        Config.load(server={"allowed_hosts": ["node-a:8000"]})


@given(st.text(max_size=30))
def test_no_text_is_taken_for_an_address_or_a_name_of_ours(text: str) -> None:
    hosts, host = HostNames("127.0.0.1:9400"), f"{text}.example".encode("latin-1", "replace")
    assert not hosts.admits("/status", host)
    assert hosts.admits("/healthz", host)


def test_what_is_written_in_one_turn_goes_by_one_send() -> None:
    class Sent:
        def __init__(self) -> None:
            self.pieces: list[bytes] = []
            self.is_closed = False

        def write(self, data: bytes) -> None:
            self.pieces.append(data)

        def close(self) -> None:
            self.is_closed = True

        def is_closing(self) -> bool:
            return self.is_closed

    async def story() -> None:
        sent = Sent()
        transport = _OneSend(cast(asyncio.Transport, sent), asyncio.get_running_loop())
        for piece in (b"head ", b"", b"body ", b"end"):
            transport.write(piece)
        assert sent.pieces == []
        await asyncio.sleep(0)
        assert sent.pieces == [b"head body end"]
        # a ready piece does not wait, and stays behind what was written before
        transport.write(b"head ")
        transport.flush(b"piece")
        assert sent.pieces[1:] == [b"head piece"]
        # much is not held back
        transport.write(bytes(1 << 20))
        assert len(sent.pieces[2]) == 1 << 20
        # an end is the last
        transport.write(b"rest")
        transport.close()
        await asyncio.sleep(0)
        assert sent.pieces[3:] == [b"rest"]
        assert transport.is_closing()

    asyncio.run(story())


def test_a_client_that_reads_nothing_bounds_what_is_made_and_then_gets_all_in_order() -> None:
    made: list[int] = []

    async def pieces() -> AsyncIterator[bytes]:
        for number in range(4000):
            made.append(number)
            yield b"%09d," % number + bytes(10_000)
            await asyncio.sleep(0)

    async def stream(_: Request) -> Response:
        return StreamingResponse(pieces())

    server = HttpServer(Starlette(routes=[Route("/", stream)]), HttpSocket("127.0.0.1:0"))
    server.start()
    host, _, port = server.address.rpartition(":")
    try:
        with sockets.socket() as client:
            client.setsockopt(sockets.SOL_SOCKET, sockets.SO_RCVBUF, 4096)
            client.settimeout(60)
            client.connect((host, int(port)))
            client.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            before = -1
            while before != (before := len(made)) or not made:  # until it waits
                time.sleep(0.3)
            assert before < 2000  # the kernel's buffers have some megabytes
            got = b"".join(iter(lambda: client.recv(1 << 20), b""))
        assert [int(each) for each in re.findall(rb"(\d{9}),", got)] == list(range(4000))
    finally:
        server.stop()


# Stories of a request's id and the log: it comes with the request or is made, and is in the log and in the answer.


_log = logging.getLogger("kvtier.test")


async def seen(request: Request) -> Response:
    """Logs one line, and answers with the id that it was handed."""
    _log.info("asked by\n%s", request.client.host if request.client else "nobody")
    return JSONResponse(request.headers.getlist("x-request-id"), headers={"x-request-id": "another program's"})


@pytest.fixture
def url() -> Iterator[str]:
    server = HttpServer(Starlette(routes=[Route("/seen", seen)]), HttpSocket("127.0.0.1:0"))
    server.start()
    yield f"http://{server.address}/seen"
    server.stop()


@pytest.fixture
def logged() -> Iterator[io.StringIO]:
    """What `kvtier.test` logs, as text."""
    lines = io.StringIO()
    handler = logging.StreamHandler(lines)
    handler.setFormatter(TextLine())
    _log.addHandler(handler)
    _log.setLevel(logging.INFO)
    yield lines
    _log.removeHandler(handler)
    _log.setLevel(logging.NOTSET)


def test_a_clients_id_goes_through_and_into_the_log(url: str, logged: io.StringIO) -> None:
    answer = httpx2.get(url, headers={"x-request-id": "trace-7/a"}, timeout=60)
    assert (answer.json(), answer.headers.get_list("x-request-id")) == (["trace-7/a"], ["trace-7/a"])
    line = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} INFO kvtier: request trace-7/a: asked by\\n127\.0\.0\.1\n"
    assert re.fullmatch(line, logged.getvalue())


@pytest.mark.parametrize("sent", [None, "", "two words", "x" * 129, 'quote"'])
def test_without_one_that_can_be_used_it_gets_one(url: str, logged: io.StringIO, sent: str | None) -> None:
    answer = httpx2.get(url, headers={} if sent is None else {"x-request-id": sent}, timeout=60)
    (own,) = answer.headers.get_list("x-request-id")
    assert re.fullmatch("[0-9a-f]{16}", own)
    assert answer.json() == [own]
    assert f"request {own}: asked by" in logged.getvalue()


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_line_outside_of_a_request(form: LogFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.getLogger()
    lines = io.StringIO()
    monkeypatch.setattr(sys, "stderr", lines)
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    log_to_stderr("warning", form)
    own = logging.getLogger("kvtier.test.outside")
    own.info("not told")
    try:
        raise ValueError("why")
    except ValueError:
        own.exception("it failed")
    if form == "text":
        assert re.match(r"[\d :.-]{23} ERROR kvtier: it failed\nTraceback", lines.getvalue())
        return
    (line,) = lines.getvalue().splitlines()
    told = json.loads(line)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", told.pop("time"))
    assert told.pop("traceback").endswith("ValueError: why")
    assert told == {"level": "error", "logger": "kvtier.test.outside", "message": "it failed"}
    assert isinstance(root.handlers[0].formatter, JsonLine)
