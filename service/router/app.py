"""The router's HTTP application: OpenAI's requests go to the proxy; its own pages and metrics are answered here."""

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from threading import Event
from typing import Final

from prometheus_client.metrics_core import Metric
from pydantic import SecretStr
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvtier.connector import AS_SENT, ChatPrefix
from kvtier.service import Json
from kvtier.service.observe import EXPOSITION, LivePage, counter, gauge, router_lines, statuses, text_of
from kvtier.service.openai import error_handlers, refusal, stopping_error, unknown_model
from kvtier.service.router.fleet import ReplicaState
from kvtier.service.router.proxy import ClientReply
from kvtier.service.router.router import Router
from kvtier.service.web import Guard, HttpServer, HttpSocket, page, read_body
from kvtier.tiers.config import RouterConfig

# --- its metrics, `kvtier_route_*` -----------------------------------------------------------------------------------


def exposition(router: Router) -> str:
    """The metrics in Prometheus' text format. Called on the router's event loop."""
    families = [*_requests(router), *_tokens(router), *_replicas(router), *_held(router)]
    return text_of(families)


def _requests(router: Router) -> Iterator[Metric]:
    ledger = router.ledger
    by_reason = "Requests given to a replica, by reason of the choice"
    yield counter("kvtier_route_requests", by_reason, ledger.requests, "replica", "reason")
    yield counter("kvtier_route_answers", "Answers passed on, by status class", ledger.answers, "replica", "status")
    retries = "Requests given to another replica before a byte was streamed, by reason"
    yield counter("kvtier_route_retries", retries, ledger.retries, "reason")
    errors = "Requests the router answered with an error of its own, by reason"
    yield counter("kvtier_route_errors", errors, ledger.errors, "reason")
    list_errors = "Changes of the list of replicas that could not be read, by reason"
    yield counter("kvtier_route_list_errors", list_errors, router.list.errors, "reason")
    unknown = "Requests routed without knowing their prompt, by reason"
    yield counter("kvtier_route_unknown_prompts", unknown, ledger.untokenised, "reason")
    yield counter("kvtier_route_seconds", "Time spent on requests, by stage", ledger.seconds, "stage")
    yield counter("kvtier_route_cpu_seconds", "CPU time of the router's process", time.process_time())


def _tokens(router: Router) -> Iterator[Metric]:
    ledger = router.ledger
    yield counter("kvtier_route_prompt_tokens", "Tokens of prompts that were known", ledger.prompt_tokens)
    promised = "Of these, held by the chosen replica according to the index"
    yield counter("kvtier_route_promised_tokens", promised, ledger.promised_tokens)
    told = "Tokens of prompts, as reported in the replicas' usage"
    yield counter("kvtier_route_told_prompt_tokens", told, ledger.told_prompt_tokens)
    cached = "Cached tokens of these, as reported in the replicas' usage"
    yield counter("kvtier_route_told_cached_tokens", cached, ledger.told_cached_tokens)


def _replicas(router: Router) -> Iterator[Metric]:
    replicas = router.fleet.replicas
    states = {(replica.name, state): replica.state is state for replica in replicas for state in ReplicaState}
    yield gauge("kvtier_route_replica_state", "1 for the state that it is in", states, "replica", "state")
    loads = {replica.name: replica.load for replica in replicas}
    yield gauge("kvtier_route_replica_load", "Blocks of work given to it and not finished", loads, "replica")
    running = {replica.name: replica.in_flight for replica in replicas}
    yield gauge("kvtier_route_in_flight", "Requests from the router under way there", running, "replica")
    failures = {(replica.name, reason): count for replica in replicas for reason, count in replica.errors.items()}
    yield counter("kvtier_route_replica_failures", "Requests it failed, by reason", failures, "replica", "reason")
    yield from _waits({replica.name: replica.latencies.figures() for replica in replicas})


def _waits(figures: Mapping[str, Mapping[str, statuses.LatencyFigures]]) -> Iterator[Metric]:
    """How long the last minute's requests waited there, by replica, as its own metrics say."""
    kinds = (("ttft", "Time to the first token"), ("itl", "Time between two tokens"))
    for what, text in kinds:
        waits: dict[tuple[str, str], float] = {}
        for name, each in figures.items():
            if what in each:
                waits |= {(name, "0.5"): each[what].p50_s, (name, "0.95"): each[what].p95_s}
        help_text = f"{text} in the last minute, by the share of waits that were no longer"
        yield gauge(f"kvtier_route_{what}_seconds", help_text, waits, "replica", "quantile")


def _held(router: Router) -> Iterator[Metric]:
    holdings = router.holdings
    states = {each.name: holdings.of(each.name).state(each.name) for each in router.fleet.replicas}
    publishers = {(name, "engine"): state.events for name, state in states.items()}
    publishers |= {(name, "node"): state.node_events for name, state in states.items()}
    feeds = {key: feed for key, feed in publishers.items() if feed is not None}
    live = {key: feed.state == "live" for key, feed in feeds.items()}
    yield gauge("kvtier_route_events_live", "1 if the blocks a replica holds are known", live, "replica", "publisher")
    gaps = {key: feed.gaps for key, feed in feeds.items()}
    yield counter("kvtier_route_event_gaps", "Batches of events missed", gaps, "replica", "publisher")
    held = {(name, medium): count for name, state in states.items() for medium, count in state.blocks.items()}
    yield gauge("kvtier_route_held_blocks", "Blocks it reports", held, "replica", "medium")
    yield gauge("kvtier_route_indexed_blocks", "Blocks that replicas hold", holdings.num_blocks)
    forgotten = "Blocks forgotten because too many are held"
    yield counter("kvtier_route_forgotten_blocks", forgotten, holdings.num_forgotten)
    yield counter("kvtier_route_skipped_events", "Events that could not be true, by reason", holdings.skipped, "reason")


# --- its application -------------------------------------------------------------------------------------------------

MAX_BODY: Final = 32 << 20  # bytes of a request: a million token ids, or the 25 MB of audio that OpenAI accepts
_MAX_REQUESTS: Final = 1024  # answered at once
# Of the status, for the live page's past hour.
_REMEMBERED: Final = ("uptime_s", "requests", "retries", "errors", "unknown_prompts", "tokens", "replicas")
# A proxy in front of a replica could read other paths differently.
_PATH: Final = re.compile(rb"/v1(/(?!\.{1,2}(/|$))[\w.~:@-]+)+", re.ASCII)
_FOR_ONE: Final = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")  # an operator sends these to each replica


def serve(config: RouterConfig, *, strict: bool = False, prefix: ChatPrefix = AS_SENT) -> HttpServer:
    """The router's server, not started yet. `strict` and `prefix` are passed to `Router`. Raises ConfigError."""
    router, stopping = Router(config, strict=strict, prefix=prefix), Event()
    app = make_app(router, config.token, stopping)
    listening = HttpSocket(config.http, "router", config.allowed_hosts)
    return HttpServer(
        app, listening, max_requests=_MAX_REQUESTS, refusal=refusal, drain=config.patience, stopping=stopping
    )


def make_app(router: Router, token: SecretStr | None, stopping: Event) -> Starlette:
    """The application. The router starts and stops with it.

    Everybody may read the pages; `/v1/` needs the token. `stopping` ends the streams of the live page, and readiness.
    """
    guard = Guard(token)

    async def status() -> Json:
        return router.status().as_json()

    live = LivePage(status, stopping, _REMEMBERED)

    async def model(request: Request) -> Response:
        guard.admit(request)
        asked, served = request.path_params["name"], {entry["id"]: entry for entry in router.fleet.models()}
        if asked not in served:
            raise unknown_model(asked, ", ".join(served))
        return JSONResponse(served[asked])

    async def explain(request: Request) -> Response:
        guard.admit(request)
        return JSONResponse(await router.explain(await read_body(request, MAX_BODY)))

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await router.start()
        try:
            async with live.remembering():
                yield
        finally:
            await router.stop()

    routes = [
        Route("/v1/completions", _Forwarding(router, guard, stopping), methods=["POST"]),
        Route("/v1/chat/completions", _Forwarding(router, guard, stopping), methods=["POST"]),
        Route("/v1/{name:path}", _Forwarding(router, guard, stopping, any_path=True), methods=["POST"]),
        page("/v1/models", lambda: JSONResponse({"object": "list", "data": router.fleet.models()}), guard),
        Route("/v1/models/{name:path}", model, methods=["GET"]),
        Route("/explain", explain, methods=["POST"]),
        page("/metrics", lambda: Response(exposition(router), media_type=EXPOSITION)),
        page("/healthz", lambda: JSONResponse({"status": "ok"})),
        page("/readyz", lambda: _readiness(router, stopping)),
        page("/summary", lambda: PlainTextResponse("\n".join([*router_lines(router.status()), ""]))),
        page("/status", lambda: JSONResponse(router.status().as_json())),
        *live.routes(),
    ]
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers=error_handlers(router.ledger.errors))


class _Forwarding:
    """An endpoint that forwards to a replica. It is plain ASGI without a response object: bytes go straight through."""

    def __init__(self, router: Router, guard: Guard, stopping: Event, *, any_path: bool = False) -> None:
        """`any_path`: also forward bodies that the router does not read, under their own path and query."""
        self._router, self._guard, self._stopping, self._any_path = router, guard, stopping, any_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        self._guard.admit(request, any_type=self._any_path)
        if self._stopping.is_set():
            raise stopping_error()
        target = _target(scope) if self._any_path else request.url.path
        body = await read_body(request, MAX_BODY)
        reply = ClientReply(send, scope["state"]["pass_chunks"])
        answering = asyncio.create_task(self._router.answer(target, scope["headers"], body, reply))
        leaving = asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            if not answering.done():  # the client hung up, or this server stops: the replica's work ends too
                answering.cancel()
                if not reply.is_done:  # clients close a stream once they have its last event
                    self._router.ledger.errors["client_gone"] += 1
        with contextlib.suppress(asyncio.CancelledError):
            await answering


def _target(scope: Scope) -> str:
    """Path and query, as they came. HTTPException if no API has that path, or if it must go to each replica itself."""
    path, query = scope["raw_path"], scope["query_string"]
    if not _PATH.fullmatch(path) or scope["path"] in _FOR_ONE:
        raise HTTPException(404)
    return str((path + (b"?" + query if query else b"")).decode("latin-1"))


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _readiness(router: Router, stopping: Event) -> Response:
    num_up, is_stopping = router.status().num_up, stopping.is_set()
    is_ready = num_up > 0 and not is_stopping
    told: Json = {"ready": is_ready, "replicas_up": num_up} | ({"stopping": True} if is_stopping else {})
    return JSONResponse(told, 200 if is_ready else 503)
