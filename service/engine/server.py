"""The OpenAI API of an engine: its routes, and what a request body asks of the engine."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvtier.engine import SamplingParams
from kvtier.service import Json
from kvtier.service.engine.completion import CHAT, TEXT, CompletionFormat, CompletionRequest, OpenAICompletion, late
from kvtier.service.engine.explaining import explain_prompt
from kvtier.service.engine.loop import EngineLoop, SequenceInput, stopping
from kvtier.service.engine.precompute import Precomputation, PrecomputeRequest
from kvtier.service.engine.segments import repair_of, segments_of
from kvtier.service.engine.status import exposition, model_entry, status
from kvtier.service.engine.text import AnswerText
from kvtier.service.engine.tokenizing import detokenized, tokenized
from kvtier.service.observe import EXPOSITION, version
from kvtier.service.openai import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    OpenAIError,
    PrecomputeBody,
    Prompts,
    TokenizeBody,
    error_handlers,
    parse,
    too_long,
    unknown_model,
)
from kvtier.service.web import Guard, page, read_body
from kvtier.tiers.config import ServerConfig

MAX_BODY: Final = 8 << 20  # bytes
_READING: Final = 4  # bodies tokenized at once: a tokenizer takes about 100 bytes of memory for each byte of a body
_SHORT_ANSWER: Final = 16  # OpenAI's default for max_tokens of a text completion
_SEEDS: Final = 2**64
_GONE: Final = 499  # what proxies log for a client that hung up
T = TypeVar("T")
B = TypeVar("B", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Served:
    """What the API needs. `events` are the endpoints at which KV events are published, if they are."""

    loop: EngineLoop
    prompts: Prompts
    name: str
    config: ServerConfig
    events: Mapping[str, str | None] | None = None


def make_app(served: Served) -> Starlette:
    guard = Guard(served.config.token)
    reading = asyncio.Semaphore(_READING)

    def entry() -> Json:
        return model_entry(served.loop, served.name, served.events)

    async def model(request: Request) -> Response:
        guard.admit(request)
        _require_model(served, request.path_params["name"])
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
            wanted = await read(request, partial(_wanted, served, body_type))
            return await _answered(request, OpenAICompletion(wanted, form, served.loop))

        return Route(path, endpoint, methods=["POST"])

    async def precompute(request: Request) -> Response:
        wanted = await read(request, partial(_texts, served))
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
        about_tokens("/tokenize", _tokenized),
        about_tokens("/detokenize", _detokenized),
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


def _require_model(served: Served, name: str) -> None:
    if name != served.name:
        raise unknown_model(name, served.name)


def _require_room(loop: EngineLoop, param: str, num: int) -> None:
    """Raise OpenAIError if there is no room for so many sequences, now or ever; called before work is done."""
    if num > loop.capacity:
        message = f"{param}: {num} answers at once; this server has room for {loop.capacity}: ask for fewer"
        raise OpenAIError(400, message, param=param, code="invalid_value")
    loop.require_room(num)


def _parsed(served: Served, body_type: type[B], data: bytes) -> B:
    """The body of a request. What nobody here knows of it is ignored, and counted."""
    unknown: set[str] = set()
    body = parse(body_type, data, unknown)
    if unknown:
        served.loop.tally.ignored.note(unknown)
    return body


def _wanted(
    served: Served, body_type: type[CompletionBody] | type[ChatBody], data: bytes, deadline: float
) -> CompletionRequest:
    """What a body asks for, with `n` inputs for each prompt. Raises OpenAIError if it cannot be computed."""
    body: CompletionBody | ChatBody = _parsed(served, body_type, data)
    loop, num_choices = served.loop, body.n or 1
    _require_model(served, body.model)
    num_prompts = 1 if isinstance(body, ChatBody) else len(body.prompts)
    _require_room(loop, "n" if num_choices > 1 else "prompt", num_prompts * num_choices)
    prompts = served.prompts.tokenized(body)
    params = [_params(loop, body, prompt.token_ids) for prompt in prompts]
    repair = repair_of(body, loop.engine)
    segments = segments_of(body, prompts, repair, loop.engine)
    named = [loop.engine.prompt(prompt.token_ids, body.cache_salt) for prompt in prompts]
    inputs = [
        SequenceInput(prompt, _seeded(options, choice), some, repair)
        for prompt, options, some in zip(named, params, segments, strict=True)
        for choice in range(num_choices)
    ]
    return CompletionRequest(
        model=served.name,
        fingerprint=f"kvtier-{loop.fingerprint[:16]}",
        inputs=inputs,
        texts=[AnswerText(served.prompts.detokenizer(), body.stop or ()) for _ in inputs],
        num_choices=num_choices,
        deadline=deadline,
        streams=bool(body.stream),
        wants_usage=body.wants_usage,
    )


def _tokenized(served: Served, data: bytes) -> Json:
    body = _parsed(served, TokenizeBody, data)
    _require_model(served, served.name if body.model is None else body.model)
    return tokenized(served.prompts, body, served.loop.room)


def _detokenized(served: Served, data: bytes) -> Json:
    body = _parsed(served, DetokenizeBody, data)
    _require_model(served, served.name if body.model is None else body.model)
    return detokenized(served.prompts, body, served.loop.engine.model.vocab_size)


def _texts(served: Served, data: bytes, deadline: float) -> PrecomputeRequest:
    """The texts to precompute. Raises OpenAIError if one cannot be computed."""
    body, loop = parse(PrecomputeBody, data), served.loop
    _require_model(served, served.name if body.model is None else body.model)
    _require_room(loop, "texts", len(body.each))
    texts = [served.prompts.segment("texts", one) if isinstance(one, str) else one for one in body.each]
    for text in texts:
        _require_computable(loop, "texts", text, 1)
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    inputs = [SequenceInput(loop.engine.prompt(text, body.cache_salt), params) for text in texts]
    return PrecomputeRequest(served.name, inputs, deadline)


def _require_computable(loop: EngineLoop, param: str, prompt: list[int], num_asked: int) -> None:
    """Raise OpenAIError if the model cannot compute a prompt, and an answer of so many tokens."""
    if not prompt:
        raise OpenAIError(400, f"{param}: it has no tokens; write some text", param=param, code="invalid_value")
    vocab_size = loop.engine.model.vocab_size
    if (largest := max(prompt)) >= vocab_size:
        message = f"{param}: token id {largest}; this model's are 0 to {vocab_size - 1}"
        raise OpenAIError(400, message, param=param, code="invalid_value")
    if num_asked > loop.room - len(prompt):
        raise too_long(param, len(prompt), num_asked, loop.room)


def _params(loop: EngineLoop, body: CompletionBody | ChatBody, prompt: list[int]) -> dict[str, Any]:
    is_chat = isinstance(body, ChatBody)
    left = loop.room - len(prompt)
    wanted = body.max_completion_tokens or body.max_tokens if isinstance(body, ChatBody) else body.max_tokens
    max_tokens = wanted or max(1, left if is_chat else min(_SHORT_ANSWER, left))
    _require_computable(loop, "messages" if is_chat else "prompt", prompt, max_tokens)
    return {
        "max_tokens": max_tokens,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "top_k": max(0, body.top_k or 0),
        "seed": body.seed,
        "stop_token_ids": body.stop_token_ids or (),
        "ignore_eos": bool(body.ignore_eos),
        "hint": None if body.kvtier is None else body.kvtier.hint,
    }


def _seeded(params: dict[str, Any], choice: int) -> SamplingParams:
    """The parameters of one choice: each choice has its own random stream."""
    seed = params["seed"]
    return SamplingParams(**{**params, "seed": None if seed is None else (seed + choice) % _SEEDS})


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
    missing = str(stopping()) if loop.is_stopping else loop.ailment
    return JSONResponse({"ready": missing is None, "missing": [missing] if missing else []}, 503 if missing else 200)
