"""Checks every HTTP request: who may ask, how large its body may be, and how long that may take; routes of pages."""

import asyncio
import hmac
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from pydantic import SecretStr
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

_BODY: Final = 10.0  # seconds in which a request's body must arrive
_LOOPBACK: Final = ("127.", "::1", "::ffff:127.")
_FROM_A_PAGE: Final = {"origin", "sec-fetch-site"}  # of browsers, which may send some other types to any site
_LOCAL_NAMES: Final = ("127.0.0.1", "localhost", "[::1]", "::1")


@dataclass(frozen=True, slots=True)
class Guard:
    """Who may use guarded routes: holders of the token; without a token, local programs that are not web pages."""

    token: SecretStr | None

    def admit(self, request: Request, *, any_type: bool = False) -> None:
        """Raises HTTPException: 401 without a hint, or 415.

        `any_type` also admits bodies of other types than JSON, except from a web page in a local browser.
        """
        if self.token is not None:
            given = request.headers.get("authorization", "").encode("latin-1")  # the bytes as received
            expected = f"Bearer {self.token.get_secret_value()}".encode()
            allowed = hmac.compare_digest(given, expected)
        else:  # a web page in a local browser may send requests too, but not under a local name to itself
            client = request.client.host if request.client is not None else ""
            host = request.headers.get("host", "")
            name = host if host.endswith("]") else host.rpartition(":")[0] or host
            allowed = client.startswith(_LOOPBACK) and name in _LOCAL_NAMES
        if not allowed:
            raise HTTPException(401, "not allowed")
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        is_free = any_type and (self.token is not None or _FROM_A_PAGE.isdisjoint(request.headers.keys()))
        if request.method == "POST" and kind != "application/json" and not is_free:
            raise HTTPException(415, f'content-type "{kind[:40]}": send application/json')


async def read_body(request: Request, limit: int) -> bytes:
    """The request's body. Raises HTTPException if it has more than `limit` bytes, is too slow or is cut short."""
    too_large = HTTPException(413, f"body: more than {limit} bytes; send less at a time")
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length[:20]) > limit:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY):
            async for piece in request.stream():
                body += piece
                if len(body) > limit:
                    raise too_large
    except TimeoutError:
        raise HTTPException(408, f"body: not received within {_BODY:g} s; send it at once") from None
    except ClientDisconnect:
        raise HTTPException(400, "body: cut short; send all of it") from None
    return bytes(body)


# --- pages that need nothing but leave to be read --------------------------------------------------------------------


def page(path: str, answer: Callable[[], Response | Awaitable[Response]], guard: Guard | None = None) -> Route:
    """`GET path`, called on the event loop. Without a guard everybody may read it."""

    async def endpoint(request: Request) -> Response:
        if guard is not None:
            guard.admit(request)
        answered = answer()
        return answered if isinstance(answered, Response) else await answered

    return Route(path, endpoint, methods=["GET"])
