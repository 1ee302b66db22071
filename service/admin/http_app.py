"""The daemon's HTTP application: pages, operators' verbs and transfers; each error is one line of JSON."""

import asyncio
import contextlib
import json
import logging
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from threading import Event
from typing import Annotated, Any, Final, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from kvtier.service import Json, first_error, node, object_in, shown, writable
from kvtier.service.archive import ArchiveProgress, export_blocks, import_blocks
from kvtier.service.node import Daemon, Namespace, NotFound, Pins, explain, held_open, memory
from kvtier.service.node import status as status_of
from kvtier.service.observe import EXPOSITION, LivePage, daemon_lines, statuses
from kvtier.service.web import Guard, HttpServer, HttpSocket, OperatorToken, page, read_body
from kvtier.tiers import ConfigError, FingerprintMismatch, FormatError, KVTierError, TierUnavailable, load_key
from kvtier.tiers.config import ByteSize, Config, Lifetime
from kvtier.tiers.hierarchy import evict_everywhere

# --- the bodies of requests ------------------------------------------------------------------------------------------

MAX_BODY: Final = 1 << 20  # bytes
B = TypeVar("B", bound=BaseModel)

_MAX_NUMBER: Final = 2**32 - 1


def _matching(pattern: str, why: str, made: Callable[[str], object] = str) -> BeforeValidator:
    """What is `made` of a text of this form, which UTF-8 can write; `why` is the error of any other value."""
    form = re.compile(pattern, re.DOTALL)

    def check(value: object) -> object:
        if not isinstance(value, str) or not form.fullmatch(value):
            raise ValueError(why)
        return made(writable(value))

    return BeforeValidator(check)


_DIGITS: Final = "not the first 4 to 64 hexadecimal digits of a fingerprint; `kvtier status` shows them"
_ARCHIVE: Final = "not a file on the daemon's machine; write its name below [service] archives"
FingerprintDigits = Annotated[str, _matching("[0-9a-f]{4,64}", _DIGITS)]
_NAME: Final = "not a block's name; write 64 hexadecimal digits"
BlockName = Annotated[bytes, _matching("[0-9a-fA-F]{64}", _NAME, bytes.fromhex)]
TokenId = Annotated[int, Field(ge=0, le=_MAX_NUMBER)]
TenantSalt = Annotated[str, _matching(".{1,1024}", "not a text of 1 to 1024 characters")]
DaemonFile = Annotated[Path, _matching(r"[^\0]{1,4096}", _ARCHIVE, Path)]


class Body(BaseModel):
    """A request about the model whose fingerprint begins with `model`, or the only one open."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, hide_input_in_errors=False)

    model: FingerprintDigits | None = None


class ResetBody(Body):
    all: bool = False

    @model_validator(mode="after")
    def _one(self) -> Self:
        if self.all == (self.model is not None):
            raise ValueError("model, all: give a model, or all")
        return self


class BlocksBody(Body):
    """Consecutive blocks: by name, or by a prompt's tokens and its tenant's salt."""

    hashes: Annotated[list[BlockName], Field(min_length=1)] | None = None
    tokens: Annotated[list[TokenId], Field(min_length=1)] | None = None
    cache_salt: TenantSalt | None = None

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        self._check_way()
        return self

    def _check_way(self) -> None:
        if self.hashes is not None and self.tokens is not None:
            raise ValueError("hashes, tokens: give one of the two")
        if self.tokens is None and self.cache_salt is not None:
            raise ValueError("cache_salt: only for tokens; names of blocks include it")
        if self.hashes is not None and len(set(self.hashes)) < len(self.hashes):
            raise ValueError("hashes: a name is given twice; give each once")

    @property
    def selection(self) -> node.BlockSelection | None:
        """The selected blocks; None if neither names nor tokens were given."""
        if self.hashes is None and self.tokens is None:
            return None
        return node.BlockSelection(self.hashes or (), self.tokens or (), self.cache_salt)

    @property
    def blocks(self) -> node.BlockSelection:
        if (selection := self.selection) is None:
            raise ConfigError("hashes, tokens: neither is given; select blocks by one of them")
        return selection


class ExplainedBody(BlocksBody):
    request: Annotated[str, Field(min_length=1, max_length=512)] | None = None

    def _check_way(self) -> None:
        if sum(each is not None for each in (self.hashes, self.tokens, self.request)) > 1:
            raise ValueError("hashes, tokens, request: give one of the three")
        if self.request is None:
            super()._check_way()


class PinBody(BlocksBody):
    ttl: Lifetime


class UnpinBody(BaseModel):
    model_config = Body.model_config

    pin: Annotated[int, Field(ge=1, le=_MAX_NUMBER)]


class QuotaBody(BaseModel):
    model_config = Body.model_config

    cache_salt: TenantSalt
    size: ByteSize | None = None
    slab: ByteSize | None = None


class ExportBody(BlocksBody):
    file: DaemonFile
    force: bool = False


class ImportBody(Body):
    file: DaemonFile
    unsealed: bool = False


class TraceBody(Body):
    file: DaemonFile
    duration: Lifetime | None = None


def parse(body_type: type[B], data: bytes) -> B:
    try:
        return body_type.model_validate(object_in(data))
    except ValidationError as error:
        raise ConfigError(_one_line(error, ", ".join(body_type.model_fields))) from None
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _one_line(error: ValidationError, known: str) -> str:
    field, why, kind, value = first_error(error)
    if not field:
        return why
    if kind == "missing":
        return f"{field}: missing; the fields are {known}"
    if kind == "extra_forbidden":
        return f"{field[:60]} {shown(value)}: unknown field; known are {known}"
    return f"{field} {shown(value)}: {why}"


# --- the verbs -------------------------------------------------------------------------------------------------------

_PATIENCE: Final = 15.0  # seconds for lower tiers


class Admin:
    """The verbs, for any thread but the loop's: each has a deadline. ConfigError, NotFound, TierUnavailable."""

    def __init__(self, daemon: Daemon, pins: Pins) -> None:
        self._daemon, self._pins = daemon, pins

    def reset(self, body: ResetBody) -> Json:
        models = [each.fingerprint.hex() for each in self._open()] if body.all else [body.model]
        names = []
        for model in models:
            with held_open(self._daemon, model) as namespace:
                namespace.hierarchy.reset()
                self._daemon.submit(namespace.notify)  # clients drop their promises
                names.append(namespace.name)
        self._pins.expire()
        return {"reset": names}

    def evict(self, body: BlocksBody) -> Json:
        with held_open(self._daemon, body.model) as namespace:
            hashes, _ = body.blocks.names(namespace, _PATIENCE)
            num_unpinned = self._pins.unpin_blocks(namespace, hashes)
            evicted = evict_everywhere(namespace.hierarchy, hashes, _PATIENCE)
            return {"model": namespace.name, "evicted": evicted, "unpinned": num_unpinned}

    def explain(self, body: ExplainedBody) -> Json:
        with held_open(self._daemon, body.model) as namespace:
            if body.request is not None:
                return node.explain_request(namespace, body.request, body.cache_salt, _PATIENCE)
            others = [each for each in self._open() if each is not namespace]
            return explain(namespace, others, body.blocks, _PATIENCE, self._daemon.config.file.path)

    def pin(self, body: PinBody) -> Json:
        return self._pins.pin(body.model, body.blocks, body.ttl, _PATIENCE)

    def unpin(self, body: UnpinBody) -> Json:
        self._pins.unpin(body.pin)
        return {"unpinned": body.pin}

    def pins(self) -> Json:
        return {"pins": self._pins.listing()}

    def quota(self, body: QuotaBody) -> Json:
        salt, limits = body.cache_salt, node.TenantLimits(body.size, body.slab)
        if not any(limits):
            for namespace in self._daemon.call(lambda: self._forget_quota(salt)):
                namespace.tiers.quotas.remove(salt)
            return {"removed": salt}
        namespaces = self._daemon.call(lambda: self._note_quota(salt, limits))
        for namespace in namespaces:
            namespace.tiers.quotas.set(salt, limits)
        given = {"cache_salt": salt, "size": limits.host, "slab": limits.slab}
        return {**given, "models": [each.name for each in namespaces]}

    def quotas(self) -> Json:
        limits = self._daemon.call(lambda: dict(self._daemon.limits))
        used: dict[str, dict[str, node.Quota]] = {salt: {} for salt in limits}
        for namespace in self._open():
            for quota in namespace.tiers.quotas.listing(namespace.slab_used):
                used.setdefault(quota.cache_salt, {})[namespace.name] = quota
        return {
            "quotas": [
                {
                    "cache_salt": salt,
                    "size": each.host,
                    "used": {name: quota.used for name, quota in used[salt].items()},
                    "slab": each.slab,
                    "slab_used": {name: quota.slab_used for name, quota in used[salt].items()},
                }
                for salt, each in limits.items()
            ]
        }

    def _note_quota(self, salt: str, quota: node.TenantLimits) -> list[Namespace]:
        """On the loop's thread."""
        limits, namespaces = self._daemon.limits, self._daemon.namespaces()
        if len(limits) >= node.MAX_QUOTAS and salt not in limits:
            raise ConfigError(f"cache_salt: {node.MAX_QUOTAS} tenants have a quota already; remove one first")
        for namespace in namespaces:
            namespace.tiers.quotas.require(quota)
        limits[salt] = quota
        return namespaces

    def _forget_quota(self, salt: str) -> list[Namespace]:
        """On the loop's thread."""
        if self._daemon.limits.pop(salt, None) is None:
            raise NotFound("cache_salt: this tenant has no quota; `kvtier quota` lists those that have one")
        return self._daemon.namespaces()

    def _open(self) -> list[Namespace]:
        return self._daemon.call(self._daemon.namespaces)


# --- exports, imports and traces -------------------------------------------------------------------------------------

Steps = AsyncGenerator[Json, None]

PERIOD: Final = 0.25  # seconds between lines


class Transfers:
    """Running transfers: one export or import at a time, and one trace of each model. On the HTTP loop alone."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._is_copying = False
        self._traced: set[bytes] = set()  # models, by fingerprint

    async def export(self, body: ExportBody) -> Steps:
        async with self._copying(), self._held_open(body.model) as namespace:
            names = None
            if (selection := body.selection) is not None:
                names, _ = await asyncio.to_thread(selection.names, namespace, _PATIENCE)
            what = namespace.hierarchy, namespace.fingerprint, namespace.blocks.block_size
            file = await self._archive(body.file)
            probe, key = namespace.kv_probe, await self._key()
            steps = export_blocks(*what, file, names, force=body.force, key=key, probe=probe)
            async with aclosing(steps):
                async for progress in steps:
                    yield _shown(namespace, progress)

    async def import_(self, body: ImportBody) -> Steps:
        async with self._copying(), self._held_open(body.model) as namespace:
            what = namespace.hierarchy, namespace.fingerprint, namespace.blocks.block_size
            file = await self._archive(body.file)

            def require_alike(probe: bytes) -> None:
                self._daemon.call(lambda: namespace.require_alike(probe))

            key = await self._key()
            steps = import_blocks(*what, file, key, unsealed=body.unsealed, require_alike=require_alike)
            try:
                async with aclosing(steps):
                    async for progress in steps:
                        yield _shown(namespace, progress)
            finally:
                await asyncio.to_thread(namespace.tiers.quotas.recount)

    async def trace(self, body: TraceBody) -> Steps:
        async with self._held_open(body.model) as namespace, AsyncExitStack() as at_end:
            tiers = namespace.tiers
            if namespace.fingerprint in self._traced:
                raise TierUnavailable("a trace of this model is being recorded already; wait for its end")
            self._traced.add(namespace.fingerprint)  # before anything is awaited: another request would pass
            at_end.callback(self._traced.discard, namespace.fingerprint)
            recorder = tiers.recorder = await node.TraceRecorder.start(await self._archive(body.file))
            until = time.monotonic() + (body.duration or float("inf"))
            try:
                while time.monotonic() < until:
                    yield _counts(namespace, recorder)
                    await asyncio.sleep(min(PERIOD, max(0.0, until - time.monotonic())))
            finally:
                tiers.recorder = None
                await recorder.stop()
            yield _counts(namespace, recorder)

    async def _archive(self, file: Path) -> Path:
        """A file's path: below one directory, so that the daemon writes nowhere else."""
        service, slabs = self._daemon.config.service, self._daemon.config.file.path
        root = service.archives or (slabs and slabs / "archives")
        if root is None:
            raise ConfigError(
                "[service] archives none: there is no [file] path either; name a directory for such files"
            )
        return await asyncio.to_thread(_below, root, file)

    async def _key(self) -> bytes | None:
        path = self._daemon.config.file.key_file
        return await asyncio.to_thread(load_key, path, "[file] key_file") if path is not None else None

    @asynccontextmanager
    async def _copying(self) -> AsyncIterator[None]:
        if self._is_copying:
            raise TierUnavailable("an export or import is under way already; wait for its end")
        self._is_copying = True
        try:
            yield
        finally:
            self._is_copying = False

    @asynccontextmanager
    async def _held_open(self, model: str | None) -> AsyncIterator[Namespace]:
        hold = node.OperatorHold()
        namespace = await asyncio.to_thread(node.hold_open, self._daemon, model, hold)
        try:
            yield namespace
        finally:
            node.release_hold(self._daemon, namespace, hold)


class RunningTransfer:
    """A transfer as lines of JSON, in a task of its own: cancelled if its client leaves, or `stopping` is set."""

    def __init__(self, steps: Steps, stopping: Event) -> None:
        self._latest: Json = {}
        self._stopping = stopping
        self._task = asyncio.create_task(self._run(steps))

    async def begun(self) -> None:
        await asyncio.wait({self._task}, timeout=PERIOD)
        if self._task.done():
            self._task.result()

    async def lines(self) -> AsyncIterator[bytes]:
        try:
            while not self._task.done():
                yield _line(self._latest)
                await asyncio.wait({self._task}, timeout=PERIOD)
                if self._stopping.is_set():
                    self._task.cancel()
            yield _line(self._ending())
        finally:
            self._task.cancel()

    async def _run(self, steps: Steps) -> None:
        async with aclosing(steps):
            async for self._latest in steps:
                pass

    def _ending(self) -> Json:
        try:
            self._task.result()
        except (KVTierError, asyncio.CancelledError) as error:
            # would be status 400 if known at the start
            is_mistake = isinstance(error, ConfigError | FormatError | FingerprintMismatch)
            return {**self._latest, "error": str(error) or "the daemon is stopping", "mistake": is_mistake}
        return {**self._latest, "done": True}


def _below(root: Path, file: Path) -> Path:
    """The file below this directory, which is created. ConfigError if it lies elsewhere, also through links."""
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = (root / file).parent.resolve()
        if folder.is_relative_to(root.resolve()) and file.name not in ("", ".."):
            return folder / file.name
    except (OSError, RuntimeError) as error:
        raise ConfigError(f'[service] archives "{root}": {error}; name a directory that the daemon can use') from None
    raise ConfigError(f'file "{file}": not below [service] archives "{root}"; choose a name there, or set that')


def _shown(namespace: Namespace, progress: ArchiveProgress) -> Json:
    return {
        "model": namespace.name,
        "blocks": progress.num_blocks,
        "planned": progress.num_planned,
        "bytes": progress.num_bytes,
        "lost": dict(progress.lost),
    }


def _counts(namespace: Namespace, recorder: node.TraceRecorder) -> Json:
    now = recorder.counts()
    return {"model": namespace.name, "recorded": now.num_recorded, "dropped": now.num_dropped, "bytes": now.num_bytes}


def _line(value: Json) -> bytes:
    return json.dumps(value).encode() + b"\n"


# --- the pages -------------------------------------------------------------------------------------------------------

T = TypeVar("T")

_log = logging.getLogger(__name__)

_NOTHING_ELSE: Final[Json] = {"wanting": [], "degraded": [], "refused": []}
_HEALTHY: Final = 1.0  # seconds the daemon's loop may take to answer
_EXPIRY: Final = 0.25  # seconds between checks of the pins
_OPTIMUM: Final = 1.0  # seconds between two looks at recorded lookups
_REMEMBERED: Final = ("uptime_s", "budget", "models")  # of a status, for the live page's past hour


class Pages:
    def __init__(self, daemon: Daemon, listening: HttpSocket) -> None:
        self.pins = Pins(daemon)
        self.daemon, self.token = daemon, OperatorToken.of(daemon.config.service.token, daemon.path, listening.address)
        self.guard, self.stopping = Guard(self.token.secret), Event()
        self.optimum = node.OptimumWatch(lambda: _watched(daemon))
        self._server = HttpServer(make_app(self), listening, stopping=self.stopping)
        self.address = self._server.address

    def start(self) -> None:
        self._server.start()

    def prepare(self, config: Config) -> Callable[[], None]:
        """As `Reloads.prepare`, for the daemon and its pages."""

        def commit() -> None:
            if config.service.token != self.daemon.config.service.token:
                self.token.forget()
                self.token = OperatorToken.of(config.service.token, self.daemon.path, self.address)
                self.guard.token = self.token.secret
            self._server.listening.answer_to(config.service.allowed_hosts)
            self.daemon.reload(config)

        return commit

    def stop(self) -> None:
        self._server.stop()
        self.pins.clear()
        self.token.forget()


def make_app(pages: Pages) -> Starlette:
    """The application. What waits runs on threads, with deadlines. Verbs need the token, pages do not."""
    daemon, pins, guard, stopping, optimum = pages.daemon, pages.pins, pages.guard, pages.stopping, pages.optimum

    def status() -> statuses.DaemonStatus:
        daemon_status, file = status_of(daemon, pins, optimum), pages.token.file
        return daemon_status if file is None else daemon_status.model_copy(update={"token_file": str(file)})

    use = node.MemoryUse()
    admin, transfers = Admin(daemon, pins), Transfers(daemon)
    live = LivePage(lambda: run_in_threadpool(lambda: status().as_json()), stopping, _REMEMBERED)

    def get(path: str, answer: Callable[[], Response], guard: Guard | None = None) -> Route:
        return page(path, lambda: run_in_threadpool(answer), guard)

    def do(path: str, body_type: type[BaseModel], verb: Callable[[Any], Mapping[str, Any]]) -> Route:
        async def endpoint(request: Request) -> Response:
            guard.admit(request)
            body = parse(body_type, await read_body(request, MAX_BODY))
            return JSONResponse(await run_in_threadpool(verb, body))

        return Route(path, endpoint, methods=["POST"])

    def transfer(path: str, body_type: type[BaseModel], verb: Callable[[Any], Steps]) -> Route:
        async def endpoint(request: Request) -> Response:
            guard.admit(request)
            body = parse(body_type, await read_body(request, MAX_BODY))
            running = RunningTransfer(verb(body), stopping)
            await running.begun()
            return StreamingResponse(running.lines(), media_type="application/x-ndjson")

        return Route(path, endpoint, methods=["POST"])

    async def memory_page(request: Request) -> Response:
        named = True  # everyone may read the page; operators see more
        try:
            guard.admit(request)
        except HTTPException:
            named = False
        return JSONResponse((await run_in_threadpool(partial(memory, daemon, use, named=named))).as_json())

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(each) for each in (_upkeep(pages), _looking(optimum))]
        async with live.remembering():
            yield
        for task in tasks:
            task.cancel()

    routes = [
        get("/metrics", lambda: Response(node.exposition(daemon, pins, use, optimum), media_type=EXPOSITION)),
        page("/healthz", lambda: _health(daemon)),
        page("/readyz", lambda: _readiness(daemon)),
        get("/summary", lambda: PlainTextResponse("\n".join([*daemon_lines(status()), ""]))),
        get("/status", lambda: JSONResponse(status().as_json())),
        *live.routes(),
        Route("/memory", memory_page, methods=["GET"]),
        do("/admin/reset", ResetBody, admin.reset),
        do("/admin/evict", BlocksBody, admin.evict),
        do("/admin/explain", ExplainedBody, admin.explain),
        do("/admin/pin", PinBody, admin.pin),
        do("/admin/unpin", UnpinBody, admin.unpin),
        get("/admin/pins", lambda: JSONResponse(admin.pins()), guard),
        do("/admin/quota", QuotaBody, admin.quota),
        get("/admin/quotas", lambda: JSONResponse(admin.quotas()), guard),
        transfer("/admin/export", ExportBody, transfers.export),
        transfer("/admin/import", ImportBody, transfers.import_),
        transfer("/admin/trace", TraceBody, transfers.trace),
    ]
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers=_HANDLERS)


async def _upkeep(pages: Pages) -> None:
    while True:
        await asyncio.sleep(_EXPIRY)
        await asyncio.to_thread(pages.pins.expire)
        await asyncio.to_thread(pages.token.keep)


async def _looking(optimum: node.OptimumWatch) -> None:
    while True:
        await asyncio.sleep(_OPTIMUM)
        with contextlib.suppress(KVTierError):  # the daemon is stopping, or busy: later
            await asyncio.to_thread(optimum.look)


def _watched(daemon: Daemon) -> list[node.WatchedModel]:
    """The models whose lookups are kept. Waits for the loop."""
    models = ((each, each.tiers.past) for each in daemon.call(daemon.namespaces))
    return [node.WatchedModel(each.fingerprint, past, each.capacity) for each, past in models if past is not None]


async def _health(daemon: Daemon) -> Response:
    await _on_loop(daemon, lambda: None)
    return JSONResponse({"status": "ok"})


async def _on_loop(daemon: Daemon, function: Callable[[], T]) -> T:
    """As `Daemon.call`, without a thread of the pool, which others may keep busy."""
    try:
        return await asyncio.wait_for(asyncio.wrap_future(daemon.submit(function)), _HEALTHY)
    except TimeoutError:
        raise TierUnavailable(f"the daemon's loop has not answered within {_HEALTHY:g} s") from None


async def _readiness(daemon: Daemon) -> Response:
    """Ready: engines find the socket, and [host] size is available. Other wanting parts are listed: misses only."""
    try:
        namespaces, refused = await _on_loop(daemon, lambda: (daemon.namespaces(), daemon.refusals.all()))
    except TierUnavailable as error:
        return JSONResponse({"ready": False, "missing": [str(error)]} | _NOTHING_ELSE, 503)
    degraded = [each.as_json() for each in node.degraded_tiers(namespaces)]
    clients_refused = [each.as_json() for each in refused]
    wanting = node.wanting_parts(daemon, namespaces)
    missing = [each.why for each in wanting if each.is_needed]
    less = [each.why for each in wanting if not each.is_needed]
    page = {"ready": not missing, "missing": missing, "wanting": less, "degraded": degraded, "refused": clients_refused}
    return JSONResponse(page, 503 if missing else 200)


async def _failed(request: Request, error: Exception) -> Response:
    why, headers = str(error), {}
    status = next((status for kind, status in _STATUSES.items() if isinstance(error, kind)), 500)
    if isinstance(error, HTTPException):
        status = error.status_code
        why = {404: "no such page", 405: "this page does not take that method"}.get(status, error.detail)
        headers = {**(error.headers or {}), **({"connection": "close"} if status in (408, 413) else {})}
    elif not isinstance(error, KVTierError):
        _log.error("%s %s: %r", request.method, request.url.path, error)
        why = "an internal error; see the daemon's log"
    return JSONResponse({"error": why}, status, headers)


_STATUSES: Final = {NotFound: 404, TierUnavailable: 503, ConfigError: 400, FormatError: 400, FingerprintMismatch: 400}
_HANDLERS: Final = dict.fromkeys((HTTPException, KVTierError, Exception), _failed)
