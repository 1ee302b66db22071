"""Ingress: the HTTP server that clients reach. It reads whole requests and streams the answers."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, Final

import ray.exceptions
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from kvtier.service.openai import OpenAIError, busy
from kvtier.service.ray.options import RayOptions
from kvtier.service.ray.ranking import AnswerHead, EngineRequest, rankings
from kvtier.service.router import NOT_ANSWERED, NOT_ASKED, passed
from kvtier.service.web import read_body

_MAX_BODY: Final = 8 << 20  # bytes
_MAX_TRIES: Final = 3  # replicas that a request is given to, before a byte of its answer is sent
_MAX_BROKEN: Final = 2  # of these, replicas that may end under it: the request may be what ends them
_AGAIN: Final = (429, 500, 502, 503)  # another replica may do better
_REPLICA: Final = b"x-kvtier-replica"
_PAGES: Final = ("/metrics", "/status", "/healthz", "/health", "/readyz")  # of each engine, not of all


_Begun = tuple[AnswerHead, AsyncIterator[bytes]]  # of an answer


class Ingress:
    """Deployed by `build`; Ray Serve calls it with each request."""

    def __init__(self, engines: DeploymentHandle, options: RayOptions) -> None:
        self._engines = engines.options(stream=True, method_name="answer")
        self._options = options

    async def __call__(self, request: Request) -> Response:
        try:
            return await self._answered(request)
        except OpenAIError as error:
            return error.response
        except HTTPException as error:
            return OpenAIError(error.status_code, error.detail, headers=error.headers).response

    async def _answered(self, request: Request) -> Response:
        path = request.url.path.removeprefix(request.scope.get("root_path", "")) or "/"
        if path == "/healthz":
            return JSONResponse({"status": "ok"})
        if path == "/status":
            return JSONResponse({"routers": [each.figures() for each in rankings()]})
        if path in _PAGES:
            raise OpenAIError(404, f"{path}: each engine has its own; ask Ray's metrics, or /status")
        query = f"?{request.url.query}" if request.url.query else ""
        headers = passed(request.headers.raw, NOT_ASKED)
        body = await read_body(request, _MAX_BODY)
        forwarded = EngineRequest(request.method, path + query, headers, body, uuid.uuid4().hex)
        deadline = asyncio.get_running_loop().time() + self._options.request_timeout
        try:
            async with asyncio.timeout_at(deadline):
                head, pieces = await self._begun(forwarded)
        except TimeoutError:
            raise OpenAIError(504, "no answer began in time; ask for less, or later", code="deadline") from None
        for ranking in rankings():
            ranking.begun(forwarded.key)
        named = [*passed(head.headers, NOT_ANSWERED), (_REPLICA, head.replica.encode())]
        response = StreamingResponse(pieces, head.status)
        response.raw_headers = named
        return response

    async def _begun(self, forwarded: EngineRequest) -> _Begun:
        """The first answer that is no refusal, of `_MAX_TRIES` replicas; else the most informative one. OpenAIError."""
        last: _Begun | OpenAIError | None = None
        num_broken = num_tries = 0
        while num_tries < _MAX_TRIES and num_broken < _MAX_BROKEN:
            num_tries += 1
            response = self._engines.remote(forwarded)
            try:
                head = await anext(response)
            except BackPressureError:
                raise busy("every replica is at its limit, and so is the queue; try again later") from None
            except (ray.exceptions.RayError, DeploymentUnavailableError, StopAsyncIteration) as error:
                num_broken += isinstance(error, ray.exceptions.RayError)
                if last is None or isinstance(last, OpenAIError):  # an engine's own answer is more informative
                    why = f"no replica could answer ({type(error).__name__}); try again"
                    last = OpenAIError(502, why, code="broken")
                continue
            except BaseException:
                response.cancel()
                raise
            assert isinstance(head, AnswerHead)
            if head.status not in _AGAIN:
                return head, _pieces(response)
            num_broken += head.is_broken
            if not isinstance(last, tuple) or last[0].status != 429:  # "busy" is the most informative for a client
                last = head, _pieces(response)
            forwarded = replace(forwarded, tried=forwarded.tried | {head.replica})
        assert last is not None
        if isinstance(last, OpenAIError):
            raise last
        return last


async def _pieces(response: Any) -> AsyncIterator[bytes]:
    is_over = False
    try:
        async for piece in response:
            yield piece
        is_over = True
    finally:
        if not is_over:
            response.cancel()
