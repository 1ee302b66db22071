"""An engine behind the OpenAI API: its process, its routes, what it reports and explains, and how answers are sent."""

import asyncio
import json
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from prometheus_client.metrics_core import Metric
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from transformers.utils.logging import disable_progress_bar

from kvtier import __version__
from kvtier.connector import ChatPrefix, LocalConnector
from kvtier.connector.models import name_of, require_checkpoint
from kvtier.connector.segments import SEGMENT_OUTCOMES, Spread
from kvtier.engine import Engine, NamedPrompt, open_engine
from kvtier.service import Json, Reloads, explain, openai
from kvtier.service.engine import completion, request_parser
from kvtier.service.engine.completion import OpenAICompletion, Precomputation
from kvtier.service.engine.loop import EngineLoop, late
from kvtier.service.engine.request_parser import Served
from kvtier.service.events import Publisher, Source, namespace_of
from kvtier.service.explain import RequestLog
from kvtier.service.observe import (
    EXPOSITION,
    LastStores,
    brief_time,
    counter,
    counts,
    figures,
    gauge,
    histogram,
    labelled,
    reloads,
    spans,
    statuses,
    text_of,
    wanting,
)
from kvtier.service.openai import ChatBody, CompletionBody, MessagesBody, OpenAIError, Prompts, ResponsesBody, bad_field
from kvtier.service.web import Guard, HttpServer, HttpSocket, cors, disconnected, page, read_body
from kvtier.tiers import L1, ChainHash, RequestError
from kvtier.tiers.config import Config
from kvtier.tiers.hierarchy import EventSource, Hierarchy, TierEvents, check_tiers
from kvtier.tiers.naming import root_hash

_LOCATE: Final = 5.0  # seconds for a daemon's or shared tiers


def explain_prompt(loop: EngineLoop, prompts: Prompts, data: bytes) -> Json:
    """Which blocks of a body's prompt or request are held, why the rest are not, and lines for people. OpenAIError."""
    body, engine = openai.parse(openai.ExplainBody, data), loop.engine
    salt = body.cache_salt
    if not engine.config.enable_prefix_caching:
        raise OpenAIError(400, "[l1] enable_prefix_caching: off, so that nothing is ever held; turn it on")
    if body.request is not None:
        prompt, cut = _of_request(loop, body.request, salt), None
    else:
        assert body.wanted_prompt is not None
        given = prompts.tokenized(body.wanted_prompt)
        if len(given) != 1:
            raise bad_field("prompt", f"{len(given)} prompts; one at a time is explained")
        tokens = given[0].token_ids
        try:
            prompt = engine.prompt(tokens, salt)
        except RequestError as error:
            raise bad_field("prompt", str(error)) from None
        cut = _other_cut(tokens, body.tokens)
    answer = _explained(engine, prompt)
    answer["other_cut"] = cut
    answer["lines"] = list(explain.explained(answer, prompts.text, prompt.token_ids, prompts.special))
    return answer


def _explained(engine: Engine, prompt: NamedPrompt) -> Json:
    chain, fingerprint = prompt.chain, engine.identity.fingerprint()
    assert chain is not None
    connector = engine.connector
    tiers = connector.tiers if isinstance(connector, LocalConnector) else None
    hierarchy = tiers if isinstance(tiers, Hierarchy) else None
    names = list(chain.hashes)
    where = None if tiers is None else tiers.locate(names, _LOCATE)  # looks up shared tiers
    wanted = explain.PromptChain(names, chain.root, chain.block_size, prompt.token_ids)
    answer = explain.explain_chain(fingerprint.hex()[:16], wanted, hierarchy, engine.pool)
    if where is not None and hierarchy is None:
        _add_below(answer, dict(where.by_tier))
        answer["unreachable"] = [] if tiers is None else [*tiers.wanting]
    if explain.is_unknown(answer["cause"]) and (unsalted := root_hash(fingerprint)) != chain.root:
        # every tenant shares unsalted blocks; the answer reveals nothing of other tenants

        def held(some: Sequence[ChainHash]) -> int:
            return max(engine.pool.lookup(some), 0 if hierarchy is None else hierarchy.lookup(some).loadable)

        roots = [(unsalted, explain.tenant_name(unsalted, unsalted))]
        answer["tenants"] = explain.held_by_tenants(wanted, roots, held, answer["held"], engine.config.hash_scheme)
    return answer


def _add_below(answer: Json, found: dict[str, int]) -> None:
    first, below = answer["held"], sum(found.values())
    if below <= first:
        return
    runs = [] if not first else [{"first": 0, "blocks": first, "tier": L1}]
    at = 0
    for tier, count in found.items():
        end = at + count
        if end > first:
            runs.append({"first": max(at, first), "blocks": end - max(at, first), "tier": tier})
        at = end
    if below < answer["blocks"]:
        runs.append({"first": below, "blocks": answer["blocks"] - below, "tier": None})
        answer["cause"] = {**answer["cause"], "block": below}
    else:
        answer["cause"] = None
    answer["held"], answer["runs"], answer["differs"], answer["nothing_alike"] = below, runs, None, False


def _of_request(loop: EngineLoop, request: str, salt: str | None) -> NamedPrompt:
    """The prompt of a request that ended lately. OpenAIError unless it is this tenant's."""
    own = loop.engine.config.cache_salt if salt is None else salt
    root = root_hash(loop.engine.identity.fingerprint(), cache_salt=own)
    known = loop.ended.recent.find(explain.client_of(root), request)
    prompt = None if known is None else loop.engine.prompt(known.tokens.tolist(), salt)
    if known is None or prompt is None or prompt.chain is None or prompt.chain.root != known.root:
        why = f"request {request[:80]!r}: no request of this id and cache_salt ended here lately"
        raise OpenAIError(404, f"{why}; give its prompt instead", param="request", code="not_found")
    return prompt


def _other_cut(tokens: list[int], other: Sequence[int] | None) -> Json | None:
    if other is None or list(other) == tokens:
        return None
    at = explain.num_same(tokens, other)
    return {"token": at, "tokens": tokens[at : at + 4], "other_tokens": list(other[at : at + 4])}


# --- its reports -----------------------------------------------------------------------------------------------------

_STARTED: Final = int(time.time())
_STATES: Final = ("waiting", "loading", "running")
_TOKENS: Final = ("prompt_tokens", "computed_tokens", "generated_tokens")


def model_entry(
    loop: EngineLoop, name: str, events: Mapping[str, str | None] | None, node: Mapping[str, str | None] | None = None
) -> Json:
    """The model's entry in `/v1/models`. A router reads `kvtier`: the engine's and its daemon's event endpoints."""
    engine = loop.engine
    salt, fingerprint = engine.config.cache_salt, bytes.fromhex(loop.fingerprint)
    return {
        "id": name,
        "object": "model",
        "created": _STARTED,
        "owned_by": "kvtier",
        "max_model_len": loop.room,
        "kvtier": {
            "block_size": engine.config.block_size,
            "fingerprint": loop.fingerprint,
            "max_model_len": loop.room,
            "events": events,
            "node": node,
            # as in events, for requests without a salt; the engine's own salt cannot be computed from it
            "namespace": None if salt is None else namespace_of(root_hash(fingerprint, cache_salt=salt)),
        },
    }


def status(loop: EngineLoop, name: str) -> statuses.EngineStatus:
    engine, stats, tally = loop.engine, loop.stats, loop.tally
    connector = engine.connector
    own_tiers: Json = {"tiers": figures(connector.tiers.metrics)} if isinstance(connector, LocalConnector) else {}
    segments = _segments(loop)
    missed = loop.wanting
    reused: Json = {} if segments is None else {"segments": segments}
    return statuses.EngineStatus(
        version=__version__,
        pid=os.getpid(),
        status=loop.ailment or ("stopping" if loop.stop_at is not None else "degraded" if missed else "ok"),
        wanting=[statuses.WantingPart(part=part, why=why) for part, why in missed.items()],
        model=name,
        fingerprint=loop.fingerprint,
        block_size=engine.config.block_size,
        max_model_len=loop.room,
        requests=statuses.SequenceCounts(
            live=loop.num_live, capacity=loop.capacity, **{state: stats[state] for state in _STATES}
        ),
        outcomes=dict(tally.outcomes),
        refused=dict(tally.refused),
        l1=statuses.DeviceTierStatus(blocks=engine.pool.num_blocks, free=stats["free_blocks"]),
        tokens=statuses.TokenCounts(**{kind: stats[kind] for kind in _TOKENS}),
        cached_tokens=dict(tally.cached),
        steps=statuses.StepCounts(done=stats["steps"], failed=tally.failed_steps),
        preempted=stats["preempted"],
        **reused,
        **own_tiers,
    )


def _segments(loop: EngineLoop) -> statuses.SegmentCounts | None:
    stats, reuse = loop.stats, loop.engine.segments
    if reuse is None:
        return None
    return statuses.SegmentCounts(
        tokens={"reused": stats["segment_tokens"], "repaired": stats["repaired_tokens"]},
        blends={"in_part": stats["blends"] - stats["blends_in_full"], "in_full": stats["blends_in_full"]},
        outcomes={way: stats[f"segments_{way}"] for way in SEGMENT_OUTCOMES},
        deviations=_buckets(reuse.counts.deviations),
        deviation_sum=reuse.counts.deviations.sum,
        shares=_buckets(reuse.counts.shares),
        share_sum=reuse.counts.shares.sum,
    )


def _buckets(spread: Spread) -> dict[str, int]:
    return {f"{bound:g}": number for bound, number in spread.counts.items()}


def exposition(loop: EngineLoop) -> str:
    """Prometheus' text format: the engine's metrics, and those of the tiers below L1 as the engine sees them."""
    connector = loop.engine.connector
    tiers = labelled({loop.fingerprint[:16]: connector.tiers.metrics}) if isinstance(connector, LocalConnector) else []
    return text_of([*_own(loop), *loop.tally.ttft.collect(), *loop.tally.itl.collect(), *tiers])


def _own(loop: EngineLoop) -> Iterator[Metric]:
    stats, tally, pool = loop.stats, loop.tally, loop.engine.pool
    yield gauge("kvtier_build_info", "The version in use", {__version__: 1}, "version")
    yield wanting(loop.wanting)
    yield reloads(loop.reloads.counts)
    yield spans()
    yield gauge("kvtier_engine_requests", "Sequences by state", {state: stats[state] for state in _STATES}, "state")
    yield gauge("kvtier_engine_live", "Sequences that wait or are computed", loop.num_live)
    yield gauge("kvtier_engine_capacity", "Sequences there is room for; more get status 429", loop.capacity)
    yield counter("kvtier_engine_ended", "Sequences by how they ended", dict(tally.outcomes), "outcome")
    yield counter("kvtier_engine_refused", "Requests refused, by status", dict(tally.refused), "status")
    about = "Requests with a field that is unknown here and so ignored"
    yield counter("kvtier_engine_ignored_fields", about, tally.ignored.counts, "field")
    yield counter("kvtier_engine_tokens", "Tokens by what became of them", {k: stats[k] for k in _TOKENS}, "kind")
    yield counter("kvtier_engine_cached_tokens", "Prompt tokens found cached, by tier", dict(tally.cached), "tier")
    blocks = {"all": pool.num_blocks, "free": stats["free_blocks"]}
    yield gauge("kvtier_engine_l1_blocks", "Blocks of L1", blocks, "state")
    yield counter("kvtier_engine_steps", "Steps computed", stats["steps"])
    yield counter("kvtier_engine_failed_steps", "Steps that raised", tally.failed_steps)
    yield counter("kvtier_engine_preempted", "Sequences preempted", stats["preempted"])
    log = {} if loop.ended.log is None else dict(loop.ended.log.counts)
    yield counter("kvtier_request_log_lines", "Lines of the request log", log, "outcome")
    if (counts := _segments(loop)) is not None:
        yield counter("kvtier_engine_segment_tokens", "Prompt tokens of reused segments", counts.tokens, "kind")
        yield counter("kvtier_engine_blends", "Requests with segments, by what was computed", counts.blends, "kind")
        yield counter("kvtier_engine_segments", "Segments by what became of them", counts.outcomes, "outcome")
        about = "Requests by the relative deviation of KV left unrepaired; the rule deviation measures it"
        yield histogram("kvtier_engine_segment_deviation", about, counts.deviations, counts.deviation_sum)
        about = "Requests by the share of their reused tokens that was repaired"
        yield histogram("kvtier_engine_repair_share", about, counts.shares, counts.share_sum)


# --- the routes ------------------------------------------------------------------------------------------------------

MAX_BODY: Final = 8 << 20  # bytes
_READING: Final = 4  # bodies tokenized at once: a tokenizer takes about 100 bytes of memory for each byte of a body
_GONE: Final = 499  # proxies log this for a client that has disconnected
T = TypeVar("T")


def make_app(served: Served, guard: Guard) -> Starlette:
    reading = asyncio.Semaphore(_READING)

    def entry() -> Json:
        return model_entry(served.loop, served.name, served.events, served.node)

    async def model(request: Request) -> Response:
        guard.admit(request)
        request_parser.require_model(served, request.path_params["name"])
        return JSONResponse(entry())

    async def read(request: Request, wanted: Callable[[bytes, float], T]) -> T:
        guard.admit(request)
        began = asyncio.get_running_loop().time()
        data = await read_body(request, MAX_BODY)
        deadline = began + served.config.request_timeout
        try:
            async with asyncio.timeout_at(deadline):
                await reading.acquire()
        except TimeoutError:
            raise late() from None
        try:
            return await run_in_threadpool(wanted, data, deadline)  # runs to its end
        finally:
            reading.release()

    def post(path: str, body_type: type[CompletionBody] | type[ChatBody], form: completion.CompletionFormat) -> Route:
        async def endpoint(request: Request) -> Response:
            wanted = await read(request, _completing(served, body_type, request))
            return await _answered(request, OpenAICompletion(wanted, form, served.loop))

        return Route(path, endpoint, methods=["POST"])

    async def precompute(request: Request) -> Response:
        wanted = await read(request, partial(request_parser.precomputation_of, served))
        return await _answered(request, Precomputation(wanted, served.loop))

    async def explain(request: Request) -> Response:
        answer = await read(request, lambda data, deadline: explain_prompt(served.loop, served.prompts, data))
        return JSONResponse(answer)

    def about_tokens(path: str, wanted: Callable[[Served, bytes], Json]) -> Route:
        async def endpoint(request: Request) -> Response:
            return JSONResponse(await read(request, lambda data, deadline: wanted(served, data)))

        return Route(path, endpoint, methods=["POST"])

    routes = [
        post("/v1/completions", CompletionBody, completion.TEXT),
        post("/v1/chat/completions", ChatBody, completion.CHAT),
        _translated(served, read, "/v1/responses", ResponsesBody),
        _translated(served, read, "/v1/messages", MessagesBody),
        about_tokens("/v1/messages/count_tokens", request_parser.count_of),
        Route("/explain", explain, methods=["POST"]),
        about_tokens("/tokenize", request_parser.tokens_of),
        about_tokens("/detokenize", request_parser.text_of_tokens),
        _resetting(served, guard),
        Route("/v1/kvtier/precompute", precompute, methods=["POST"]),
        page("/v1/models", lambda: JSONResponse({"object": "list", "data": [entry()]}), guard),
        Route("/v1/models/{name:path}", model, methods=["GET"]),
        page("/metrics", lambda: Response(exposition(served.loop), media_type=EXPOSITION)),
        page("/healthz", lambda: _health(served.loop)),
        page("/health", lambda: Response(status_code=_health(served.loop).status_code)),  # vLLM's, without a body
        page("/version", lambda: JSONResponse({"version": __version__})),
        page("/readyz", lambda: _readiness(served.loop)),
        page("/status", lambda: JSONResponse(status(served.loop, served.name).as_json())),
    ]
    handlers = openai.error_handlers(served.loop.tally.refused)
    return Starlette(routes=routes, middleware=cors(served.config.cors_origins), exception_handlers=handlers)


Completing = Callable[[bytes, float], completion.CompletionRequest]
"""(body, deadline) → what it requests."""


def _completing(served: Served, kind: type[CompletionBody] | type[ChatBody], request: Request) -> Completing:
    """`completion_of` for this request. Dynamo's header says that it is the last one of its session."""
    is_last = request.headers.get("x-dynamo-session-final", "").lower() == "true"
    return partial(request_parser.completion_of, served, kind, is_last=is_last)


def _translated(
    served: Served,
    read: Callable[[Request, Callable[[bytes, float], Any]], Awaitable[Any]],
    path: str,
    body_type: type[MessagesBody] | type[ResponsesBody],
) -> Route:
    """Another API's requests, which are chats in other words."""

    def wanted(completing: Completing, data: bytes, deadline: float) -> Any:
        body = request_parser.parsed(served, body_type, data)
        try:
            return body, completing(json.dumps(body.chat).encode(), deadline)
        except OpenAIError as error:
            raise error.renamed(body.names) from None

    async def endpoint(request: Request) -> Response:
        body, of_chat = await read(request, partial(wanted, _completing(served, ChatBody, request)))
        return await _answered(request, completion.TranslatedCompletion(of_chat, served.loop, body))

    return Route(path, endpoint, methods=["POST"])


def _resetting(served: Served, guard: Guard) -> Route:
    """Forget every block. The answer is the fingerprint that names blocks from then on."""

    async def reset(request: Request) -> Response:
        guard.admit(request)
        try:
            async with asyncio.timeout(served.config.request_timeout):
                fingerprint = await asyncio.wrap_future(served.loop.reset())
        except TimeoutError:
            raise late() from None
        return JSONResponse({"reset": [fingerprint]})

    return Route("/admin/reset", reset, methods=["POST"])


async def _answered(request: Request, wanted: OpenAICompletion | Precomputation) -> Response:
    try:
        if isinstance(wanted, OpenAICompletion) and wanted.streams:
            chunks = wanted.chunks()
            first = await _while_connected(request, anext(chunks))
            return _EventStream(wanted, first, chunks)
        content = await _while_connected(request, wanted.whole())
        return JSONResponse(content, headers=wanted.headers)
    except ClientDisconnect:
        wanted.close()
        return Response(status_code=_GONE)
    except BaseException:
        wanted.close()
        raise


class _EventStream(StreamingResponse):
    def __init__(self, answer: OpenAICompletion, first: bytes, chunks: AsyncIterator[bytes]) -> None:
        headers = {"cache-control": "no-store", **answer.headers}
        super().__init__(self._all(first, chunks), media_type="text/event-stream", headers=headers)
        self._completion = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._completion.close()

    @staticmethod
    async def _all(first: bytes, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        yield first
        async for chunk in chunks:
            yield chunk


async def _while_connected(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`. Raises ClientDisconnect if the client disconnects first."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(disconnected(request.receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


def _health(loop: EngineLoop) -> Response:
    ailment = loop.ailment
    return JSONResponse({"status": ailment or "ok"}, 503 if ailment else 200)


def _readiness(loop: EngineLoop) -> Response:
    missing = str(openai.stopping_error()) if loop.stop_at is not None else loop.ailment
    page = {"ready": missing is None, "missing": [missing] if missing else [], "wanting": [*loop.wanting.values()]}
    return JSONResponse(page, 503 if missing else 200)


# --- the process -----------------------------------------------------------------------------------------------------

_log = logging.getLogger(__name__)

_GRACE: Final = 2  # seconds for the last bytes of these answers
_SPARE: Final = 64  # HTTP requests beyond those being computed: pages, and refusals
_STORES: Final = 10.0  # seconds for stores to reach lower tiers


class EngineServer:
    def __init__(
        self,
        model: Path,
        config: Config,
        *,
        exact: bool = False,
        listening: HttpSocket | None = None,
        reloads: Reloads | None = None,
    ) -> None:
        """Binds the address first, unless `listening` is bound: loading a model takes long. Raises ConfigError."""
        disable_progress_bar()  # type: ignore[no-untyped-call]
        settings, reloads = config.server, reloads or Reloads(lambda: config)
        with ExitStack() as opened:
            if listening is not None:
                opened.enter_context(closing(listening))
            require_checkpoint(model)
            if config.service.socket is None:
                check_tiers(config)  # a daemon checks its own
            prompts = Prompts.open(model, ChatPrefix.of(config.chat))
            if listening is None:
                listening = opened.enter_context(closing(HttpSocket(settings.http, "server", settings.allowed_hosts)))
            self._log = RequestLog.opened(settings.request_log, "[server] request_log")
            if self._log is not None:
                opened.callback(self._log.close)
            self.publisher = Publisher(config.events) if config.events.publish is not None else None
            if self.publisher is not None:
                opened.callback(self.publisher.close)
            self.engine = open_engine(
                model,
                config,
                max_num_seqs=settings.max_num_seqs,
                max_num_batched_tokens=settings.max_num_batched_tokens,
                max_model_len=settings.max_model_len,
                exact=exact,
            )
            opened.pop_all()
        self.engine.scheduler.calls_tool = prompts.calls_tool
        if config.cache.store_generated == "answers" and not self.engine.model.has_own_cache:
            self.engine.scheduler.reasoning = prompts.reasoning()
            if self.engine.scheduler.reasoning is None:
                _log.info("this model's chat template keeps reasoning in later turns: whole answers are stored")
        self._feed = None
        if (
            self.publisher is not None
        ):  # of L1, and of lower tiers if they are this process's: a daemon publishes its own
            sources: list[Source] = [TierEvents(L1, lambda: self.engine.pool)]
            connector = self.engine.connector
            if isinstance(connector, LocalConnector) and isinstance(connector.tiers, Hierarchy):
                sources.append(EventSource(connector.hierarchy))
            self._feed = self.publisher.feed(self.engine.identity.fingerprint(), *sources)
        self.loop = EngineLoop(self.engine, settings.max_waiting, reloads, self._feed, self._log)
        self.name, self._guard = settings.name or name_of(model), Guard(settings.token)
        guides = request_parser.JsonGuides(
            prompts.tokenizer_json, self.engine.model.vocab_size, self.engine.model.eos_token_ids
        )
        form = request_parser.form_of(settings.tool_parser, prompts)
        own_events, publisher = config.events, self.publisher
        events = None if publisher is None else {"publish": publisher.endpoint, "replay": publisher.replay_endpoint}
        node = None if own_events.node is None else {"publish": own_events.node, "replay": own_events.node_replay}
        self._served = Served(self.loop, prompts, self.name, settings, guides, events, node, form)
        app = make_app(self._served, self._guard)
        room = self.loop.capacity + _SPARE
        self._http = HttpServer(app, listening, max_requests=room, refusal=openai.refusal, grace=_GRACE)
        self.address = self._http.address
        self._stopped: float | None = None
        reloads.prepare = self._prepare

    def _prepare(self, config: Config) -> Callable[[], None]:
        """As `Reloads.prepare`."""

        def commit() -> None:
            self._served.config, self._guard.token = config.server, config.server.token
            self._http.listening.answer_to(config.server.allowed_hosts)
            connector = self.engine.connector
            if isinstance(connector, LocalConnector) and isinstance(connector.tiers, Hierarchy):
                for port in connector.tiers.ports:
                    port.set_breakers(config.breaker.failures, config.breaker.retry_after)

        return commit

    def run(self) -> None:
        """Serve until stopped. Answers under way end first, then stores reach lower tiers, then everything closes."""
        self._http.start()
        _log.info("ready on %s, http on %s", self.name, self.address)
        try:
            self.loop.run()
        finally:
            self._http.stop()
            connector, began = self.engine.connector, time.monotonic()
            tiers = connector.tiers if isinstance(connector, LocalConnector) else None
            stores = LastStores([tiers] if isinstance(tiers, Hierarchy) else [])
            if not self.engine.drain(_STORES):
                _log.warning("stores not finished after %g s: they are dropped", _STORES)
            self.engine.close()
            if self._log is not None:
                self._log.close()
            if self.publisher is not None and self._feed is not None:
                self._feed.close()
                self.publisher.close()
            ended, answers = counts(self.loop.tally.outcomes), began - (self._stopped or began)
            up = brief_time(time.time() - _STARTED)
            _log.info("stopped after %s: ended %s, the last in %.1f s; %s", up, ended, answers, stores.line())

    def stop(self) -> None:
        """Take no more requests, and end those under way. Any thread or signal handler may call it."""
        self._stopped = time.monotonic()
        self.loop.stop(self._served.config.patience)
