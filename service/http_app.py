"""The daemon's pages and admin verbs over HTTP: who may, what was asked, and every error as one line of JSON."""

import asyncio
import contextlib
import hmac
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from threading import Event
from typing import Any, Final

from pydantic import BaseModel, SecretStr
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from kvtier.service.admin import Admin
from kvtier.service.admin_bodies import (
    MAX_BODY,
    BlocksBody,
    ExportBody,
    ImportBody,
    PinBody,
    QuotaBody,
    ResetBody,
    TraceBody,
    UnpinBody,
    parse,
)
from kvtier.service.daemon import Daemon
from kvtier.service.dashboard import dashboard_routes
from kvtier.service.exposition import exposition
from kvtier.service.pins import Pins
from kvtier.service.status import degraded_tiers, status
from kvtier.service.summary import page
from kvtier.service.transfers import Steps, Told, Transfers
from kvtier.service.visits import NotThere
from kvtier.tiers.errors import ConfigError, FingerprintMismatch, FormatError, KVTierError, TierUnavailable

_log = logging.getLogger(__name__)

_HEALTHY: Final = 1.0  # seconds the daemon's loop may take to answer
_BODY: Final = 10.0  # seconds a request's body may take
_EXPIRY: Final = 0.25  # seconds between looks at the pins
_LOOPBACK: Final = ("127.", "::1", "::ffff:127.")
_LOCAL_NAMES: Final = ("127.0.0.1", "localhost", "[::1]", "::1")
_EXPOSITION: Final = "text/plain; version=0.0.4; charset=utf-8"


def make_app(daemon: Daemon, pins: Pins, stopping: Event) -> Starlette:
    """The application; `stopping` ends what would go on. What waits does so on threads, with deadlines."""
    guard = _Guard(daemon.config.service.token)
    admin, transfers = Admin(daemon, pins), Transfers(daemon)

    def get(path: str, answer: Callable[[], Response]) -> Route:
        def endpoint(request: Request) -> Response:  # no coroutine: Starlette calls it on a thread
            return answer()

        return Route(path, endpoint, methods=["GET"])

    def ask(path: str, verb: Callable[[], Mapping[str, Any]]) -> Route:
        async def endpoint(request: Request) -> Response:
            guard.admit(request)
            return JSONResponse(await run_in_threadpool(verb))

        return Route(path, endpoint, methods=["GET"])

    def do(path: str, body_type: type[BaseModel], verb: Callable[[Any], Mapping[str, Any]]) -> Route:
        async def endpoint(request: Request) -> Response:
            guard.admit(request)
            body = parse(body_type, await _body(request))
            return JSONResponse(await run_in_threadpool(verb, body))

        return Route(path, endpoint, methods=["POST"])

    def tell(path: str, body_type: type[BaseModel], verb: Callable[[Any], Steps]) -> Route:
        async def endpoint(request: Request) -> Response:
            guard.admit(request)
            told = Told(verb(parse(body_type, await _body(request))), stopping)
            await told.begun()
            return StreamingResponse(told.lines(), media_type="application/x-ndjson")

        return Route(path, endpoint, methods=["POST"])

    async def expire() -> None:
        while True:
            await asyncio.sleep(_EXPIRY)
            await asyncio.to_thread(pins.expire)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(expire())
        yield
        task.cancel()

    routes = [
        get("/metrics", lambda: Response(exposition(daemon, pins), media_type=_EXPOSITION)),
        get("/healthz", lambda: _health(daemon)),
        get("/readyz", lambda: _readiness(daemon)),
        get("/summary", lambda: PlainTextResponse(page(status(daemon, pins)))),
        get("/status", lambda: JSONResponse(status(daemon, pins))),
        *dashboard_routes(lambda: run_in_threadpool(status, daemon, pins), stopping),
        do("/admin/reset", ResetBody, admin.reset),
        do("/admin/evict", BlocksBody, admin.evict),
        do("/admin/pin", PinBody, admin.pin),
        do("/admin/unpin", UnpinBody, admin.unpin),
        ask("/admin/pins", admin.pins),
        do("/admin/quota", QuotaBody, admin.quota),
        ask("/admin/quotas", admin.quotas),
        tell("/admin/export", ExportBody, transfers.export),
        tell("/admin/import", ImportBody, transfers.import_),
        tell("/admin/trace", TraceBody, transfers.trace),
    ]
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers=_HANDLERS)


@dataclass(frozen=True, slots=True)
class _Guard:
    """Who may use admin routes: who has the token; without one, programs of this machine that are no web page."""

    token: SecretStr | None

    def admit(self, request: Request) -> None:
        """Raises HTTPException: 401, without a hint, or 415."""
        if self.token is not None:
            given = request.headers.get("authorization", "").encode("latin-1")  # the bytes that came
            expected = f"Bearer {self.token.get_secret_value()}".encode()
            allowed = hmac.compare_digest(given, expected)
        else:  # a page in a browser here may send requests too, but not under a local name to itself
            client = request.client.host if request.client is not None else ""
            host = request.headers.get("host", "")
            name = host if host.endswith("]") else host.rpartition(":")[0] or host
            allowed = client.startswith(_LOOPBACK) and name in _LOCAL_NAMES
        if not allowed:
            raise HTTPException(401, "not allowed")
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if request.method == "POST" and kind != "application/json":
            raise HTTPException(415, f'content-type "{kind[:40]}": send application/json')


async def _body(request: Request) -> bytes:
    """The request's body. Raises HTTPException where it is too large, too slow or broken off."""
    too_large = HTTPException(413, f"body: more than {MAX_BODY} bytes; ask for less at a time")
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length[:20]) > MAX_BODY:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY):
            async for piece in request.stream():
                body += piece
                if len(body) > MAX_BODY:
                    raise too_large
    except TimeoutError:
        raise HTTPException(408, f"body: not here within {_BODY:g} s; send it at once") from None
    except ClientDisconnect:
        raise HTTPException(400, "body: broken off") from None
    return bytes(body)


def _health(daemon: Daemon) -> Response:
    daemon.call(lambda: None, _HEALTHY)
    return JSONResponse({"status": "ok"})


def _readiness(daemon: Daemon) -> Response:
    """Detached tiers are named, and are no reason to send nobody here: what they hold is a miss."""
    try:
        namespaces = daemon.call(daemon.namespaces, _HEALTHY)
    except TierUnavailable as error:
        return JSONResponse({"ready": False, "missing": [str(error)], "degraded": []}, 503)
    return JSONResponse({"ready": True, "missing": [], "degraded": degraded_tiers(namespaces)})


def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    why = {404: "no such page", 405: "this page does not take that method"}.get(error.status_code, error.detail)
    headers = {**(error.headers or {}), **({"connection": "close"} if error.status_code in (408, 413) else {})}
    return JSONResponse({"error": why}, error.status_code, headers)


def _failed(request: Request, error: Exception) -> Response:
    code = next((code for kind, code in _CODES.items() if isinstance(error, kind)), 500)
    return JSONResponse({"error": str(error)}, code)


def _broke(request: Request, error: Exception) -> Response:
    _log.error("%s %s: %r", request.method, request.url.path, error)
    return JSONResponse({"error": "an error of ours; the daemon's log has it"}, 500)


_CODES: Final = {NotThere: 404, TierUnavailable: 503, ConfigError: 400, FormatError: 400, FingerprintMismatch: 400}
_HANDLERS: Final = {HTTPException: _refused, KVTierError: _failed, Exception: _broke}
