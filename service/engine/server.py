"""The OpenAI API of an engine: its routes, and how answers are sent."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Final, TypeVar

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvtier.service import Json
from kvtier.service.engine.completion import CHAT, TEXT, CompletionFormat, OpenAICompletion, Precomputation, late
from kvtier.service.engine.explaining import explain_prompt
from kvtier.service.engine.loop import EngineLoop
from kvtier.service.engine.request_parser import (
    Served,
    completion_of,
    precomputation_of,
    require_model,
    text_of_tokens,
    tokens_of,
)
from kvtier.service.engine.status import exposition, model_entry, status
from kvtier.service.observe import EXPOSITION, version
from kvtier.service.openai import ChatBody, CompletionBody, error_handlers, stopping_error
from kvtier.service.web import Guard, page, read_body

MAX_BODY: Final = 8 << 20  # bytes
_READING: Final = 4  # bodies tokenized at once: a tokenizer takes about 100 bytes of memory for each byte of a body
_GONE: Final = 499  # what proxies log for a client that hung up
T = TypeVar("T")


def make_app(served: Served) -> Starlette:
    guard = Guard(served.config.token)
    reading = asyncio.Semaphore(_READING)

    def entry() -> Json:
        return model_entry(served.loop, served.name, served.events, served.node)

    async def model(request: Request) -> Response:
        guard.admit(request)
        require_model(served, request.path_params["name"])
        return JSONResponse(entry())

    async def read(request: Request, wanted: Callable[[bytes, float], T]) -> T:
        """What a request wants; `wanted` reads it from the body, knowing the deadline."""
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
            return await run_in_threadpool(wanted, data, deadline)  # cannot be cut short
        finally:
            reading.release()

    def post(path: str, body_type: type[CompletionBody] | type[ChatBody], form: CompletionFormat) -> Route:
        async def endpoint(request: Request) -> Response:
            wanted = await read(request, partial(completion_of, served, body_type))
            return await _answered(request, OpenAICompletion(wanted, form, served.loop))

        return Route(path, endpoint, methods=["POST"])

    async def precompute(request: Request) -> Response:
        wanted = await read(request, partial(precomputation_of, served))
        return await _answered(request, Precomputation(wanted, served.loop))

    async def explain(request: Request) -> Response:
        told = await read(request, lambda data, deadline: explain_prompt(served.loop, served.prompts, data))
        return JSONResponse(told)

    def about_tokens(path: str, wanted: Callable[[Served, bytes], Json]) -> Route:
        async def endpoint(request: Request) -> Response:
            return JSONResponse(await read(request, lambda data, deadline: wanted(served, data)))

        return Route(path, endpoint, methods=["POST"])

    routes = [
        post("/v1/completions", CompletionBody, TEXT),
        post("/v1/chat/completions", ChatBody, CHAT),
        Route("/explain", explain, methods=["POST"]),
        about_tokens("/tokenize", tokens_of),
        about_tokens("/detokenize", text_of_tokens),
        _resetting(served, guard),
        Route("/v1/kvtier/precompute", precompute, methods=["POST"]),
        page("/v1/models", lambda: JSONResponse({"object": "list", "data": [entry()]}), guard),
        Route("/v1/models/{name:path}", model, methods=["GET"]),
        page("/metrics", lambda: Response(exposition(served.loop), media_type=EXPOSITION)),
        page("/healthz", lambda: _health(served.loop)),
        page("/health", lambda: Response(status_code=_health(served.loop).status_code)),  # vLLM's, without a body
        page("/version", lambda: JSONResponse({"version": version()})),
        page("/readyz", lambda: _readiness(served.loop)),
        page("/status", lambda: JSONResponse(status(served.loop, served.name).as_json())),
    ]
    return Starlette(routes=routes, exception_handlers=error_handlers(served.loop.tally.refused))


def _resetting(served: Served, guard: Guard) -> Route:
    """Forgets every block; the answer is the fingerprint that names them from then on."""

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
    """The response. A stream begins with its first event, so a failure before that has a status of its own."""
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
    """Server-sent events. However they end, the completion is closed."""

    def __init__(self, completion: OpenAICompletion, first: bytes, chunks: AsyncIterator[bytes]) -> None:
        headers = {"cache-control": "no-store", **completion.headers}
        super().__init__(self._all(first, chunks), media_type="text/event-stream", headers=headers)
        self._completion = completion

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
    """The result of `work`. Raises ClientDisconnect if the client hangs up first."""
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        gone.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _health(loop: EngineLoop) -> Response:
    ailment = loop.ailment
    return JSONResponse({"status": ailment or "ok"}, 503 if ailment else 200)


def _readiness(loop: EngineLoop) -> Response:
    missing = str(stopping_error()) if loop.is_stopping else loop.ailment
    page = {"ready": missing is None, "missing": [missing] if missing else [], "wanting": [*loop.wanting.values()]}
    return JSONResponse(page, 503 if missing else 200)
