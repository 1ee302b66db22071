"""The daemon's pages and admin verbs over HTTP: who may, what was asked, and every error as one line of JSON."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from threading import Event
from typing import Any, Final, TypeVar

from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from kvtier.service import Json
from kvtier.service.admin import bodies
from kvtier.service.admin.admin import Admin
from kvtier.service.admin.transfers import RunningTransfer, Steps, Transfers
from kvtier.service.node import (
    Daemon,
    MemoryUse,
    Namespace,
    NotFound,
    OptimumWatch,
    Pins,
    WatchedModel,
    degraded_tiers,
    exposition,
    memory,
    refused_clients,
    wanting_parts,
)
from kvtier.service.node import status as status_of
from kvtier.service.observe import EXPOSITION, LivePage, daemon_page, statuses
from kvtier.service.web import Guard, HttpServer, HttpSocket, OperatorToken, page, read_body
from kvtier.tiers import ConfigError, FingerprintMismatch, FormatError, KVTierError, TierUnavailable

T = TypeVar("T")

_log = logging.getLogger(__name__)

_NOTHING_ELSE: Final[Json] = {"wanting": [], "degraded": [], "refused": []}
_HEALTHY: Final = 1.0  # seconds the daemon's loop may take to answer
_EXPIRY: Final = 0.25  # seconds between looks at the pins
_REMEMBERED: Final = ("uptime_s", "budget", "models")  # of a status, for the live page's past hour


class Pages:
    """The daemon's HTTP server, and the pins that live as long as it."""

    def __init__(self, daemon: Daemon, listening: HttpSocket) -> None:
        """Takes the socket over."""
        self.pins = Pins(daemon)
        given = daemon.config.service.token
        self.token = OperatorToken.made(daemon.path, listening.address) if given is None else OperatorToken(given, None)
        self._optimum = OptimumWatch(lambda: _watched(daemon))
        stopping = Event()
        self._server = HttpServer(
            make_app(daemon, self.pins, stopping, self.token, self._optimum), listening, stopping=stopping
        )
        self.address = self._server.address

    def start(self) -> None:
        self._server.start()
        self._optimum.start()

    def stop(self) -> None:
        """End requests under way, let every pin go, close the socket: within seconds. Idempotent."""
        self._optimum.stop()
        self._server.stop()
        self.pins.clear()
        self.token.forget()


def make_app(
    daemon: Daemon, pins: Pins, stopping: Event, token: OperatorToken, optimum: OptimumWatch | None = None
) -> Starlette:
    """The application. What waits does so on threads, with deadlines. Verbs want the token, pages do not.

    `optimum` is what the status tells of it; `stopping` ends what would go on.
    """
    guard = Guard(token.secret)

    def status() -> statuses.DaemonStatus:
        return _status(daemon, pins, optimum, token)

    use = MemoryUse()
    admin, transfers = Admin(daemon, pins), Transfers(daemon)
    live = LivePage(lambda: run_in_threadpool(lambda: status().as_json()), stopping, _REMEMBERED)

    def get(path: str, answer: Callable[[], Response], guard: Guard | None = None) -> Route:
        return page(path, lambda: run_in_threadpool(answer), guard)

    def do(path: str, body_type: type[BaseModel], verb: Callable[[Any], Mapping[str, Any]]) -> Route:
        async def endpoint(request: Request) -> Response:
            guard.admit(request)
            body = bodies.parse(body_type, await read_body(request, bodies.MAX_BODY))
            return JSONResponse(await run_in_threadpool(verb, body))

        return Route(path, endpoint, methods=["POST"])

    def tell(path: str, body_type: type[BaseModel], verb: Callable[[Any], Steps]) -> Route:
        async def endpoint(request: Request) -> Response:
            guard.admit(request)
            body = bodies.parse(body_type, await read_body(request, bodies.MAX_BODY))
            running = RunningTransfer(verb(body), stopping)
            await running.begun()
            return StreamingResponse(running.lines(), media_type="application/x-ndjson")

        return Route(path, endpoint, methods=["POST"])

    async def tell_memory(request: Request) -> Response:
        named = _is_operator(guard, request)
        return JSONResponse((await run_in_threadpool(partial(memory, daemon, use, named=named))).as_json())

    async def expire() -> None:
        while True:
            await asyncio.sleep(_EXPIRY)
            await asyncio.to_thread(_upkeep, pins, token)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(expire())
        async with live.remembering():
            yield
        task.cancel()

    routes = [
        get("/metrics", lambda: Response(exposition(daemon, pins, use, optimum), media_type=EXPOSITION)),
        page("/healthz", lambda: _health(daemon)),
        page("/readyz", lambda: _readiness(daemon)),
        get("/summary", lambda: PlainTextResponse(daemon_page(status()))),
        get("/status", lambda: JSONResponse(status().as_json())),
        *live.routes(),
        Route("/memory", tell_memory, methods=["GET"]),
        do("/admin/reset", bodies.ResetBody, admin.reset),
        do("/admin/evict", bodies.BlocksBody, admin.evict),
        do("/admin/explain", bodies.ExplainedBody, admin.explain),
        do("/admin/pin", bodies.PinBody, admin.pin),
        do("/admin/unpin", bodies.UnpinBody, admin.unpin),
        get("/admin/pins", lambda: JSONResponse(admin.pins()), guard),
        do("/admin/quota", bodies.QuotaBody, admin.quota),
        get("/admin/quotas", lambda: JSONResponse(admin.quotas()), guard),
        tell("/admin/export", bodies.ExportBody, transfers.export),
        tell("/admin/import", bodies.ImportBody, transfers.import_),
        tell("/admin/trace", bodies.TraceBody, transfers.trace),
    ]
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers=_HANDLERS)


def _upkeep(pins: Pins, token: OperatorToken) -> None:
    pins.expire()
    token.keep()


def _status(daemon: Daemon, pins: Pins, optimum: OptimumWatch | None, token: OperatorToken) -> statuses.DaemonStatus:
    told = status_of(daemon, pins, optimum)
    return told if token.file is None else told.model_copy(update={"token_file": str(token.file)})


def _watched(daemon: Daemon) -> list[WatchedModel]:
    """The models whose lookups are kept. Waits for the loop."""
    namespaces = daemon.call(daemon.namespaces)
    return [
        WatchedModel(each.fingerprint, each.tiers.past, partial(_capacity, each))
        for each in namespaces
        if each.tiers.past is not None
    ]


def _capacity(namespace: Namespace) -> int:
    return namespace.capacity


def _is_operator(guard: Guard, request: Request) -> bool:
    """Whether names may be told: everybody may read the page, operators more of it."""
    try:
        guard.admit(request)
    except HTTPException:
        return False
    return True


async def _health(daemon: Daemon) -> Response:
    await _on_loop(daemon, lambda: None)
    return JSONResponse({"status": "ok"})


async def _on_loop(daemon: Daemon, function: Callable[[], T]) -> T:
    """As `Daemon.call`, without one of the threads that others may keep busy."""
    try:
        return await asyncio.wait_for(asyncio.wrap_future(daemon.submit(function)), _HEALTHY)
    except TimeoutError:
        raise TierUnavailable(f"the daemon's loop has not answered within {_HEALTHY:g} s") from None


async def _readiness(daemon: Daemon) -> Response:
    """Ready: engines find the socket, and [host] size can be had. What else is wanting is named: a miss, no outage."""
    try:
        namespaces, refused = await _on_loop(daemon, lambda: (daemon.namespaces(), refused_clients(daemon)))
    except TierUnavailable as error:
        return JSONResponse({"ready": False, "missing": [str(error)]} | _NOTHING_ELSE, 503)
    degraded = [each.as_json() for each in degraded_tiers(namespaces)]
    told = [each.as_json() for each in refused]
    wanting = wanting_parts(daemon, namespaces)
    missing = [each.why for each in wanting if each.is_needed]
    less = [each.why for each in wanting if not each.is_needed]
    page = {"ready": not missing, "missing": missing, "wanting": less, "degraded": degraded, "refused": told}
    return JSONResponse(page, 503 if missing else 200)


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


_CODES: Final = {NotFound: 404, TierUnavailable: 503, ConfigError: 400, FormatError: 400, FingerprintMismatch: 400}
_HANDLERS: Final = {HTTPException: _refused, KVTierError: _failed, Exception: _broke}
