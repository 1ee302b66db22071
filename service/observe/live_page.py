"""The live page: its files, the status as server-sent events while pages watch, and the past hour."""

import asyncio
import contextlib
import json
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from importlib import resources
from threading import Event, Lock
from typing import Any, Final

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvtier.service import Json
from kvtier.service.web import page
from kvtier.tiers import KVTierError

# --- the past hour ---------------------------------------------------------------------------------------------------

PERIOD: Final = 5.0  # seconds between two samples
_KEPT: Final = 720  # samples: an hour
_MOST_SERIES: Final = 512  # series; with the samples that is 12 MiB at most
_DEEPEST: Final = 6  # names in a path
_IDENTITIES: Final = ("model", "name")  # the field by which an entry of a list is the same in two statuses

Path = tuple[str, ...]  # a number's place in the status: keys, and an identity for an entry of a list


class PageHistory:
    """Samples of a status's numbers by path, the last `kept` of each; dead series make room. Thread-safe."""

    def __init__(self, parts: Sequence[str], *, kept: int = _KEPT, most: int = _MOST_SERIES) -> None:
        self._parts, self._kept, self._most = tuple(parts), kept, most
        self._lock = Lock()  # guards the fields below
        self._at: deque[int] = deque(maxlen=kept)  # ms of the monotonic clock, as in a stream's events
        self._series: dict[Path, deque[float]] = {}

    def add(self, status: Mapping[str, Any], at: float | None = None) -> None:
        found = dict(_numbers({part: status[part] for part in self._parts if part in status}))
        with self._lock:
            self._at.append(int(1000 * (time.monotonic() if at is None else at)))
            for path, values in self._series.items():
                values.append(found.get(path, math.nan))
            if len(self._series.keys() | found.keys()) > self._most:
                alive = (path for path, values in self._series.items() if not all(map(math.isnan, values)))
                self._series = {path: self._series[path] for path in alive}
            for path, value in found.items():
                if path not in self._series and len(self._series) < self._most:
                    self._series[path] = deque([*[math.nan] * (len(self._at) - 1), value], self._kept)

    def as_json(self) -> Json:
        """Series by path at times `at` (monotonic ms); one value if all are equal; null: not known."""
        with self._lock:
            at, known = list(self._at), [(path, list(values)) for path, values in self._series.items()]
        plain = ((path, [_plain(each) for each in values]) for path, values in known)
        series = [{"path": path, "values": each[0] if len(set(each)) == 1 else each} for path, each in plain]
        return {"now": int(1000 * time.monotonic()), "period_s": PERIOD, "at": at, "series": series}


def _numbers(value: object, path: Path = ()) -> Iterator[tuple[Path, float]]:
    if isinstance(value, bool) or len(path) > _DEEPEST:
        return
    if isinstance(value, int | float):
        yield path, float(value)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _numbers(inner, (*path, str(key)))
    elif isinstance(value, list):
        for entry in value:
            if isinstance(entry, Mapping):
                name = next((entry[field] for field in _IDENTITIES if field in entry), None)
                if isinstance(name, str):
                    yield from _numbers(entry, (*path, name))


def _plain(value: float) -> int | float | None:
    if not math.isfinite(value):
        return None
    return int(value) if value == int(value) else round(value, 6)


# --- the page --------------------------------------------------------------------------------------------------------

StatusSource = Callable[[], Awaitable[Json]]

_TYPES: Final = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_HEADERS: Final = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
_MAX_WATCHERS: Final = 16
_PERIOD: Final = 1.0  # seconds between two reads of the status
_TICK: Final = 0.25  # seconds until a stream sees that the server stops
_LIFE: Final = 600.0  # seconds a stream lasts; the page then asks for another
_PATIENCE: Final = 10.0  # seconds longer, for a client that reads nothing


class LivePage:
    """The page of one server, and its samples of the past hour. On the HTTP loop alone.

    `status` returns the status as JSON. Streams await it once a second however many watch, and never without watchers;
    the past hour once in five seconds while `remembering` is entered. A KVTierError it raises is shown.
    It must not contain what only operators may see: everyone may read the page.
    """

    def __init__(self, status: StatusSource, stopping: Event, parts: Sequence[str] = ()) -> None:
        """`stopping` ends every stream. The numbers in the fields `parts` of the status are kept for an hour."""
        self._status, self._stopping = status, stopping
        self._history = PageHistory(parts)
        self._num_watchers = 0
        self._asking = asyncio.Lock()
        self._latest = b""  # the status as an event
        self._due = 0.0  # when it is too old

    def routes(self) -> list[Route]:
        pages = resources.files("kvtier.service.observe") / "pages"

        def file(name: str, content: bytes, media_type: str) -> Route:
            path = "/" if name == "index.html" else f"/{name}"
            return page(path, lambda: Response(content, media_type=media_type, headers=_HEADERS))

        types = {each: _TYPES.get(each.name.rpartition(".")[2]) for each in pages.iterdir()}
        files = [file(each.name, each.read_bytes(), known) for each, known in types.items() if known is not None]

        async def past() -> Response:
            return JSONResponse(await run_in_threadpool(self._history.as_json), headers=_HEADERS)

        return [*files, Route("/stream", self._stream, methods=["GET"]), page("/history", past)]

    @contextlib.asynccontextmanager
    async def remembering(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self._remember())
        try:
            yield
        finally:
            task.cancel()

    async def _remember(self) -> None:
        due = time.monotonic()
        while True:
            with contextlib.suppress(KVTierError):  # the hour has a gap then
                at = time.monotonic()
                self._history.add(await self._status(), at)
            due = max(due + PERIOD, time.monotonic())  # no catching up after a slow sample
            await asyncio.sleep(due - time.monotonic())

    async def _stream(self, request: Request) -> Response:
        if self._num_watchers >= _MAX_WATCHERS:
            error = f"{_MAX_WATCHERS} pages are watching already; close one, or ask for /status"
            return JSONResponse({"error": error}, 503, {"retry-after": "5"})
        return _WatchStream(self._events(), self._count)

    def _count(self, more: int) -> None:
        self._num_watchers += more

    async def _events(self) -> AsyncIterator[bytes]:
        """One event at once, then one a second, until the stream's life or the server ends."""
        end = time.monotonic() + _LIFE
        yield b"retry: 1000\n\n"
        while time.monotonic() < end and not self._stopping.is_set():
            yield await self._fresh()
            due = self._due  # of the status just sent: another watcher may advance it
            while (wait := due - time.monotonic()) > 0 and not self._stopping.is_set():
                await asyncio.sleep(min(wait, _TICK))

    async def _fresh(self) -> bytes:
        async with self._asking:  # a watcher that waited here finds a fresh status
            if time.monotonic() >= self._due:
                self._latest = await self._look()
                self._due = time.monotonic() + _PERIOD
            return self._latest

    async def _look(self) -> bytes:
        at = int(time.monotonic() * 1000)  # the page computes its rates by this clock
        try:
            return _event("status", at, await self._status())
        except KVTierError as error:
            return _event("trouble", at, {"error": str(error)})


class _WatchStream(StreamingResponse):
    def __init__(self, events: AsyncIterator[bytes], count: Callable[[int], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers=_HEADERS)
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._count(1)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LIFE + _PATIENCE):
                    await super().__call__(scope, receive, send)
        finally:
            self._count(-1)


def _event(kind: str, number: int, value: Json) -> bytes:
    return f"event: {kind}\nid: {number}\ndata: {json.dumps(value)}\n\n".encode()
