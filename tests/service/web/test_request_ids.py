"""Stories of a request's id and the log: it comes with the request or is made, and is in the log and in the answer."""

import io
import json
import logging
import re
import sys
from collections.abc import Iterator

import httpx2
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvtier.service.command_line import JsonLine, LogFormat, TextLine, log_to_stderr
from kvtier.service.web.http_server import HttpServer, HttpSocket

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
