"""Routes of pages that need nothing of the request but leave to be read."""

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvtier.service.web.guard import Guard


def page(path: str, answer: Callable[[], Response | Awaitable[Response]], guard: Guard | None = None) -> Route:
    """`GET path`, called on the event loop. Without a guard everybody may read it."""

    async def endpoint(request: Request) -> Response:
        if guard is not None:
            guard.admit(request)
        answered = answer()
        return answered if isinstance(answered, Response) else await answered

    return Route(path, endpoint, methods=["GET"])
