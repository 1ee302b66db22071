"""Errors in the OpenAI API's shape: `{"error": {"message", "type", "param", "code"}}`."""

import logging
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from kvtier.tiers import KVTierError

_log = logging.getLogger(__name__)

ErrorHandler = Callable[[Request, Exception], Awaitable[JSONResponse]]

_TYPES: Final = {401: "authentication_error", 408: "timeout_error", 429: "rate_limit_error", 504: "timeout_error"}
_MESSAGES: Final = "/v1/messages"  # Anthropic's pages begin so
_ANTHROPIC_TYPES: Final = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_NO_SUCH_PAGE: Final = (404, 405)
_CLOSING: Final = (408, 413, 503)  # after these the connection closes: the rest of the request is not read


class OpenAIError(KVTierError):
    """An error to answer with. `param` names the field at fault; `code` is for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.headers = {**(headers or {}), **({"connection": "close"} if status in _CLOSING else {})}

    def renamed(self, fields: Mapping[str, str]) -> "OpenAIError":
        """The same about a field of another API: by patterns of names here, the names there."""
        param = old = self.param or ""
        for pattern, other in fields.items():
            param = re.sub(f"^{pattern}", other, param)
        message = re.sub(rf"\b{re.escape(old)}", lambda _: param, str(self), count=1) if old else str(self)
        return OpenAIError(self.status, message, param=param or None, code=self.code, headers=self.headers)

    @property
    def content(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    @property
    def anthropic_content(self) -> dict[str, Any]:
        """The same in the form of Anthropic's API."""
        kind = _ANTHROPIC_TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": str(self)}}

    @property
    def response(self) -> JSONResponse:
        return JSONResponse(self.content, self.status, self.headers)


def bad_field(param: str, why: str, code: str = "invalid_value") -> OpenAIError:
    """A field that cannot be taken; the message begins with its name."""
    return OpenAIError(400, f"{param}: {why}", param=param, code=code)


def error_handlers(refused: Counter[str]) -> dict[Any, ErrorHandler]:
    """Starlette's handlers: each error becomes an OpenAIError, counted by status unless the page does not exist.

    Anthropic's pages answer in that API's form.
    """

    async def answer(request: Request, error: Exception) -> JSONResponse:
        converted = _as_openai(request, error)
        if not (isinstance(error, HTTPException) and error.status_code in _NO_SUCH_PAGE):
            refused[str(converted.status)] += 1
        is_anthropic = request.url.path.startswith(_MESSAGES)
        content = converted.anthropic_content if is_anthropic else converted.content
        return JSONResponse(content, converted.status, converted.headers)

    return dict.fromkeys((HTTPException, OpenAIError, Exception), answer)


def _as_openai(request: Request, error: Exception) -> OpenAIError:
    if isinstance(error, OpenAIError):
        return error
    if isinstance(error, HTTPException):
        message = {404: "no such page", 405: "this page does not take that method"}.get(error.status_code, error.detail)
        code = "invalid_api_key" if error.status_code == 401 else None
        return OpenAIError(error.status_code, message, code=code, headers=error.headers)
    _log.error("%s %s: %r", request.method, request.url.path, error)
    return OpenAIError(500, "an error in the server; see its log")


def refusal(status: int, message: str) -> JSONResponse:
    """A refusal by the HTTP server itself, in this form too."""
    return OpenAIError(status, message, code="overloaded" if status == 503 else None).response


def busy(message: str) -> OpenAIError:
    return OpenAIError(429, message, code="rate_limit_exceeded", headers={"retry-after": "1"})


def stopping_error() -> OpenAIError:
    return OpenAIError(503, "the server is stopping; ask another one", code="stopping")


def unknown_model(wanted: str, served: str) -> OpenAIError:
    shown = wanted if len(wanted) <= 60 else f"{wanted[:57]}..."
    return OpenAIError(404, f"model {shown!r}: not served here; use {served!r}", param="model", code="model_not_found")


def too_long(param: str, num_prompt: int, num_asked: int, room: int) -> OpenAIError:
    lengths = f"{param} has {num_prompt}, and the answer may have {num_asked}"
    message = f"This model's maximum context length is {room} tokens; {lengths}: shorten one of them"
    return OpenAIError(400, message, param=param, code="context_length_exceeded")
