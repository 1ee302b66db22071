"""The router's HTTP face: OpenAI's requests handed to the proxy, and the router's own pages."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from threading import Event
from typing import Any, Final

from pydantic import SecretStr
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvtier.service import router_summary as summary
from kvtier.service.dashboard import dashboard_routes
from kvtier.service.guard import Guard, read_body
from kvtier.service.http_server import HttpServer, HttpSocket
from kvtier.service.openai_errors import OpenAIError, error_handlers, unknown_model
from kvtier.service.router import Router
from kvtier.service.router_metrics import exposition
from kvtier.service.router_reply import Reply
from kvtier.tiers.config_router import RouterConfig

MAX_BODY: Final = 16 << 20  # bytes of a request: a million token ids, and some
_MAX_CONNECTIONS: Final = 1024
_GRACE: Final = 10  # seconds for the answers under way at a stop
_EXPOSITION: Final = "text/plain; version=0.0.4; charset=utf-8"


def serve(config: RouterConfig, *, strict: bool = False) -> HttpServer:
    """A router's server, not started yet. `strict` as `Router`'s. Raises ConfigError."""
    router, stopping = Router(config, strict=strict), Event()
    app = make_app(router, config.token, stopping)
    crowded = OpenAIError(503, "too many connections; come again later", code="crowded").response
    listening = HttpSocket(config.http, "router")
    return HttpServer(
        app, listening, max_connections=_MAX_CONNECTIONS, crowded=crowded, grace=_GRACE, stopping=stopping
    )


def make_app(router: Router, token: SecretStr | None, stopping: Event) -> Starlette:
    """The application; the router starts and stops with it. Pages are everybody's, `/v1/` for those with the token.

    `stopping` ends streams of the live page.
    """
    guard = Guard(token)

    def page(path: str, answer: Callable[[], Response]) -> Route:
        async def endpoint(request: Request) -> Response:
            return answer()

        return Route(path, endpoint, methods=["GET"])

    async def models(request: Request) -> Response:
        guard.admit(request)
        return JSONResponse({"object": "list", "data": router.fleet.models()})

    async def status() -> dict[str, Any]:
        return router.status()

    async def model(request: Request) -> Response:
        guard.admit(request)
        asked, served = request.path_params["name"], {entry["id"]: entry for entry in router.fleet.models()}
        if asked not in served:
            raise unknown_model(asked, ", ".join(served))
        return JSONResponse(served[asked])

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await router.start()
        try:
            yield
        finally:
            await router.stop()

    routes = [
        Route("/v1/completions", _Forwarding(router, guard), methods=["POST"]),
        Route("/v1/chat/completions", _Forwarding(router, guard), methods=["POST"]),
        Route("/v1/models", models, methods=["GET"]),
        Route("/v1/models/{name:path}", model, methods=["GET"]),
        page("/metrics", lambda: Response(exposition(router), media_type=_EXPOSITION)),
        page("/healthz", lambda: JSONResponse({"status": "ok"})),
        page("/readyz", lambda: _readiness(router)),
        page("/summary", lambda: PlainTextResponse(summary.page(router.status()))),
        page("/status", lambda: JSONResponse(router.status())),
        *dashboard_routes(status, stopping),
    ]
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers=error_handlers(router.ledger.errors))


class _Forwarding:
    """An endpoint that answers with what a replica does. ASGI without a response object: bytes go straight through."""

    def __init__(self, router: Router, guard: Guard) -> None:
        self._router, self._guard = router, guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        self._guard.admit(request)
        body = await read_body(request, MAX_BODY)
        reply = Reply(send, scope["state"]["pass_chunks"])
        answering = asyncio.create_task(self._router.answer(request.url.path, scope["headers"], body, reply))
        leaving = asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            if not answering.done():  # the client has hung up, or this server stops: so does the replica's work
                answering.cancel()
                self._router.ledger.errors["client_gone"] += 1
        with contextlib.suppress(asyncio.CancelledError):
            await answering


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _readiness(router: Router) -> Response:
    num_up = sum(replica["state"] == "up" for replica in router.status()["replicas"])
    return JSONResponse({"ready": num_up > 0, "replicas_up": num_up}, 200 if num_up else 503)
