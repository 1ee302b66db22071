"""The router and its HTTP application: reads a prompt, looks up who holds it, has the proxy forward the request."""

import asyncio
import contextlib
import json
import logging
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from threading import Event
from typing import Annotated, Any, Final

import msgspec
import xxhash
from prometheus_client.metrics_core import Metric
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvtier.connector import AS_SENT, ChatPrefix
from kvtier.service import Json, Reloads, openai
from kvtier.service.events import CurveKeys
from kvtier.service.observe import (
    EXPOSITION,
    LivePage,
    RouterStatus,
    counter,
    gauge,
    reloads,
    router_lines,
    statuses,
    text_of,
    wanting,
)
from kvtier.service.openai import OpenAIError, Prompts, bad_field, json_object, unknown_model
from kvtier.service.router.client import Deadlines, Headers, trusted
from kvtier.service.router.fleet import Fleet, ModelVersion, ProbeSettings, Replica, ReplicaState
from kvtier.service.router.holdings import FleetHoldings, Held
from kvtier.service.router.processes import TELL, Seat, stopped_line
from kvtier.service.router.proxy import NOT_ASKED, ClientReply, Ledger, Proxy, RoutedRequest, passed
from kvtier.service.router.replica_list import Publishers, ReplicaList
from kvtier.service.router.replica_tokenizer import CHAT, ReplicaTokenizer
from kvtier.service.web import Guard, HttpServer, HttpSocket, cors, disconnected, page, read_body
from kvtier.tiers import TIERS, tier_captions, tracing
from kvtier.tiers.config import Config, RouterConfig

# --- its conversation ------------------------------------------------------------------------------------------------

_MAX_VALUES: Final = 1024  # JSON values of a conversation's head that are hashed; later ones rarely differ
_MAX_TEXT: Final = 64 << 10  # characters of one text that are hashed
# The field with the turns, by path.
_TURNS: Final = {"/v1/chat/completions": "messages", "/v1/messages": "messages", "/v1/responses": "input"}
# What identifies an agent's session, or its family's: a sub-agent goes where its parent's beginning is. In order.
_SESSION_HEADERS: Final = (
    *(b"x-dynamo-parent-session-id", b"x-dynamo-session-id", b"x-claude-code-session-id", b"x-parent-session-id"),
    *(b"x-session-id", b"session-id", b"x-correlation-id"),
)
_HEAD_FIELDS: Final = ("model", "cache_salt", "system", "instructions")  # hashed besides the first turns


def session_of(path: str, body: Mapping[str, Any], headers: Headers = ()) -> bytes | None:
    """A digest of `prompt_cache_key`, else of a session's header, else of all up to the first user turn; or None.

    Chats, Anthropic's messages and OpenAI's responses have turns. A plain prompt has none, so it has no conversation.
    Sources of the headers: NVIDIA Dynamo 1.5, "Session IDs" (its own, Claude Code's, Codex's, OpenCode's); AIPerf.
    """
    key = body.get("prompt_cache_key")
    if isinstance(key, str) and key:
        return _digest([body.get("cache_salt"), key])
    given = {name: value for name, value in headers if value}
    if (name := next((each for each in _SESSION_HEADERS if each in given), None)) is not None:
        return _digest([body.get("cache_salt"), given[name].decode("latin-1")])
    turns = body.get(_TURNS.get(path, ""))
    if isinstance(turns, str):
        turns = [{"role": "user", "content": turns}]
    if not isinstance(turns, list) or not turns:
        return None
    first = next((at for at, turn in enumerate(turns) if isinstance(turn, dict) and turn.get("role") == "user"), 0)
    return _digest([*(body.get(name) for name in _HEAD_FIELDS), *turns[: first + 1]])


def _digest(values: Sequence[Any]) -> bytes:
    hasher = xxhash.xxh3_128()
    left = list(reversed(values))
    for _ in range(_MAX_VALUES):
        if not left:
            break
        value = left.pop()
        if isinstance(value, dict):
            hasher.update(b"{%d" % len(value))
            left.extend(part for item in list(islice(value.items(), _MAX_VALUES))[::-1] for part in reversed(item))
        elif isinstance(value, list):
            hasher.update(b"[%d" % len(value))
            left.extend(value[:_MAX_VALUES][::-1])
        else:
            text = str(value)
            leading = text[:_MAX_TEXT].encode("utf-8", "surrogatepass")
            hasher.update(b"%s%d:%s" % (type(value).__name__.encode(), len(text), leading))
    return hasher.digest()


# --- its prompt, read here -------------------------------------------------------------------------------------------

_LONG_BODY: Final = 8 << 10  # bytes of a body; longer ones are tokenized on a thread, so that streams go on meanwhile
COMPLETION: Final = "/v1/completions"
_Ids = list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]]
READ: Final = (CHAT, COMPLETION)  # paths whose prompts are read; all others are forwarded unread


@dataclass(frozen=True, slots=True)
class KnownPrompt:
    tokens: list[int]
    cache_salt: str | None = None
    unknown: str | None = None  # why there are no tokens: `unreadable`, or `no_tokenizer`


async def read_prompt(path: str, value: Mapping[str, Any], num_bytes: int, prompts: Prompts | None) -> KnownPrompt:
    """The first prompt of a request's JSON. Raises nothing: another engine may accept what this code cannot read."""
    if num_bytes > _LONG_BODY or "chat_template_kwargs" in value:  # chat_template_kwargs can make a template slow
        return await asyncio.to_thread(_read, path, value, prompts)
    return _read(path, value, prompts)


def _read(path: str, value: Mapping[str, Any], prompts: Prompts | None) -> KnownPrompt:
    try:
        cache_salt = openai.RequestBody.model_validate(value).cache_salt
        if path == CHAT:
            chat = openai.chat_of(value)
            if prompts is None:
                return KnownPrompt([], cache_salt, "no_tokenizer")
            return KnownPrompt(prompts.chat(chat).token_ids, cache_salt)
        if value.get("truncate_prompt_tokens") is not None or value.get("prompt_embeds") is not None:
            return KnownPrompt([], cache_salt, "unreadable")
        if isinstance(value.get("prompt"), list):
            with suppress(msgspec.ValidationError):  # pydantic reads other forms, at four times the cost
                ids = msgspec.convert(value["prompt"], _Ids)
                return KnownPrompt(ids, cache_salt) if ids else KnownPrompt([], cache_salt, "unreadable")
        first = openai.CompletionPrompt.model_validate(value).prompts[0]
        if isinstance(first, list):
            return KnownPrompt(first, cache_salt)
        if prompts is None:
            return KnownPrompt([], cache_salt, "no_tokenizer")
        adds_special = value.get("add_special_tokens") is not False
        return KnownPrompt(prompts.prompt(first, add_special_tokens=adds_special).token_ids, cache_salt)
    except (ValidationError, OpenAIError):
        return KnownPrompt([], unknown="unreadable")


# --- what it answers to `kvtier explain` -----------------------------------------------------------------------------

_UNKNOWN_PROMPT = {
    "unreadable": "the router cannot read it; give a prompt or messages as the API takes them",
    "no_tokenizer": "the router has no tokenizer; start it with --model DIR, or give token ids by --blocks",
    "late": "no replica has tokenised it in time; give token ids by --blocks",
}


def explained_holdings(known: KnownPrompt, held: Held, block_size: int | None) -> Json:
    """Who holds the prompt, with lines for people. Raises OpenAIError if its tokens are not known."""
    if known.unknown is not None:
        why = f"its tokens are not known ({known.unknown}); give token ids by --blocks"
        raise bad_field("prompt", _UNKNOWN_PROMPT.get(known.unknown, why), "unknown_prompt")
    replicas = [
        {"replica": name, "blocks": sum(found.values()), "media": dict(found), "sure": name in held.sure}
        for name, found in held.prefixes.items()
    ]
    answer: Json = {
        "block_size": block_size,
        "tokens": len(known.tokens),
        "blocks": held.num_blocks,
        "replicas": sorted(replicas, key=lambda each: -each["blocks"]),
    }
    return {**answer, "lines": list(_lines(answer))}


def _lines(answer: Json) -> Iterator[str]:
    if answer["block_size"] is None or not answer["replicas"]:
        yield "No replica publishes KV events: the router knows nothing of what they hold."
        return
    shown = {kind.medium: kind.shown for kind in TIERS.values()}
    yield f"{answer['tokens']:,} tokens, {answer['blocks']:,} whole blocks of {answer['block_size']}"
    for each in answer["replicas"]:
        where = ", ".join(f"{count:,} in {shown.get(medium, medium)}" for medium, count in each["media"].items())
        unsure = "" if each["sure"] else "; its events are not up to date"
        yield f"{each['replica']}: {each['blocks']:,} blocks{' (' + where + ')' if where else ''}{unsure}"
    yield "A router knows no reasons: ask the engine by --url, or its node's daemon by --http, why it lacks the others."


# --- the router ------------------------------------------------------------------------------------------------------

_log = logging.getLogger(__name__)

_BYTES: Final = 64  # bytes of a body that count as a block if the prompt is not known
_MAX_ITEMS: Final = 1 << 18  # values in a body that is parsed: more block the event loop for over 20 ms
_APPLY: Final = 60.0  # seconds a busy event loop may take until it puts a new configuration in force
_MOST: Final = 1024  # most blocks of work of a request that is forwarded unread
_USUAL: Final = 8  # the same if its body is not text
_START: Final = 64  # tokens, or bytes, of a prompt by which one without a conversation chooses among versions


class Router:
    """Belongs to the event loop that calls `start`; `status` and the ledger are read there too."""

    def __init__(
        self,
        config: RouterConfig,
        *,
        strict: bool = False,
        prefix: ChatPrefix = AS_SENT,
        seat: Seat | None = None,
        reloads: Reloads | None = None,
    ) -> None:
        """Raises ConfigError if a replica's spec is wrong or contradicts another, or if the tokenizer cannot be read.

        `strict`: events that contradict earlier ones are errors. `prefix`: in which form chats reach replicas.
        `seat`: this process's, if there are several.
        """
        self._prefix, self.seat = prefix, seat
        self.reloads, self.prompt_price = reloads or Reloads(Config), config.prompt_price
        terms = _terms(config)
        keys = CurveKeys.load("router", config.curve_key_file, "curve_publisher_file", config.curve_publisher_file)
        self.holdings = FleetHoldings[ModelVersion](strict=strict, max_blocks=config.max_blocks, keys=keys)
        self.list = ReplicaList(config.replicas, config.replicas_file, config.resolve_interval)
        self.fleet = Fleet(self.list.specs, terms, self._joined, self.holdings.leave)
        self._prompts = None if config.model is None else Prompts.open(config.model)
        self.ledger = Ledger()
        self._proxy = Proxy(self.fleet, self.ledger, _deadlines(config), config.weights)
        self._headers = terms.headers
        self._tokens = ReplicaTokenizer(config.tokenize_timeout, terms.headers) if config.model is None else None
        self._started = time.time()
        self._loop: Future[asyncio.AbstractEventLoop] = Future()  # once it runs

    def prepare(self, config: RouterConfig) -> Callable[[], None]:
        """As `Reloads.prepare`, on another thread than the router's."""
        trusted.cache_clear()  # the file may have other certificates now
        terms = _terms(config)
        listed = self.list.prepare(config.replicas, config.replicas_file, config.resolve_interval)

        async def apply() -> None:
            self.prompt_price = config.prompt_price
            self._proxy.set_policy(_deadlines(config), config.weights)
            self._headers = terms.headers
            if self._tokens is not None:
                self._tokens.set_terms(config.tokenize_timeout, terms.headers)
            self.fleet.set_terms(terms)
            listed()
            self.fleet.change(await self.list.looked_up())

        def commit() -> None:
            wait([asyncio.run_coroutine_threadsafe(apply(), self._loop.result(_APPLY))], _APPLY)

        return commit

    async def start(self) -> None:
        """Probe every replica once, then start probing, watching the list and following events until `stop`."""
        self._loop.set_result(asyncio.get_running_loop())
        self.fleet.change(await self.list.looked_up())
        await self.fleet.start()
        self._tasks = [asyncio.create_task(self.list.follow(self.fleet.change))]
        if self.seat is not None:
            self.ledger.add(self.seat.before.get("counts", {}))
            self._tasks.append(asyncio.create_task(self._share(self.seat)))

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self.seat is not None:
            with suppress(OSError):
                self.seat.publish({"counts": self._counted().counts()})  # for the last line of the parent
        await self.fleet.stop()
        await asyncio.to_thread(self.holdings.close)

    async def answer(self, target: str, headers: Headers, body: bytes, reply: ClientReply) -> None:
        """Answer a client's request. `target` is its path; of a request that is forwarded unread, with the query."""
        sent = [*passed(headers, NOT_ASKED), *self._headers]
        request = RoutedRequest(target, sent, body, asyncio.get_running_loop().time())
        try:
            request = await self._with_prompt(request) if target in READ else self._unread(request)
        except OpenAIError as error:
            self.ledger.errors[str(error.code)] += 1
            await reply.fail(error)
            return
        await self._proxy.forward(request, reply)

    async def _share(self, seat: Seat) -> None:
        """Run until cancelled: tell the other processes what is counted and under way here, and take in theirs."""
        while True:
            live = {each.name: (each.in_flight, each.given) for each in self.fleet.replicas if each.in_flight}
            try:
                seat.publish({"counts": self._counted().counts(), "live": live})
            except OSError as error:
                _log.warning("other processes of the router cannot read this one's counts: %s", error)
            beside = [value.get("live", {}) for value, is_fresh in seat.others() if is_fresh]
            self.reloads.apply(seat.reloads)
            for replica in self.fleet.replicas:
                each = [live[replica.name] for live in beside if replica.name in live]
                replica.has_beside(sum(requests for requests, _ in each), sum(blocks for _, blocks in each))
            await asyncio.sleep(TELL)

    def _counted(self) -> Ledger:
        """What this process has counted, and those that had its place before."""
        counted = replace(self.ledger, failures=Counter(self.ledger.failures), given=Counter(self.ledger.given))
        counted.list_errors = counted.list_errors + self.list.errors
        counted.skipped = counted.skipped + Counter(self.holdings.skipped)
        counted.forgotten += self.holdings.num_forgotten
        counted.cpu += time.process_time()
        counted.spans = counted.spans + Counter(tracing.counts())
        for replica in self.fleet.replicas:
            counted.given[replica.name] += replica.num_requests
            counted.failures.update({(replica.name, reason): count for reason, count in replica.errors.items()})
        return counted

    def total(self) -> Ledger:
        """What all processes of this router have counted; the last decisions are this one's."""
        total = Ledger(decisions=self.ledger.decisions)
        total.add(self._counted().counts())
        for value, _ in () if self.seat is None else self.seat.others():
            total.add(value.get("counts", {}))
        return total

    def status(self) -> RouterStatus:
        ledger, version, by_reason = self.total(), self.fleet.version, Counter[str]()
        for (_, reason), count in ledger.requests.items():
            by_reason[reason] += count
        return RouterStatus(
            uptime_s=time.time() - self._started,
            block_size=None if version is None else version.block_size,
            fingerprint=None if version is None else version.fingerprint,
            models=sorted(self.fleet.served),
            wanting=[statuses.WantingPart(part=part, why=why) for part, why in self.wanting.items()],
            tier_captions=[statuses.TierCaption.model_validate(each) for each in tier_captions()],
            replicas=[self._replica(replica, ledger) for replica in (*self.fleet.replicas, *self.fleet.leaving)],
            list=statuses.ReplicaListStatus(errors=dict(ledger.list_errors), why=self.list.why),
            decisions=ledger.latest(),
            requests=dict(by_reason),
            retries=dict(ledger.retries),
            errors=dict(ledger.errors),
            unknown_prompts=dict(ledger.untokenised),
            tokens=statuses.RoutedTokens(
                prompt=ledger.prompt_tokens,
                promised=ledger.promised_tokens,
                told_prompt=ledger.told_prompt_tokens,
                told_cached=ledger.told_cached_tokens,
                told_tiers=dict(ledger.told_tiers),
            ),
            indexed_blocks=self.holdings.num_blocks,
            forgotten_blocks=ledger.forgotten,
            cpu_s=ledger.cpu,
            prompt_price=self.prompt_price,
        )

    @property
    def wanting(self) -> dict[str, str]:
        return {**tracing.wanting(), **self.reloads.wanting}

    def _replica(self, replica: Replica, ledger: Ledger) -> statuses.ReplicaStatus:
        return statuses.ReplicaStatus(
            name=replica.name,
            url=replica.spec.url,
            state=replica.state,
            why=replica.why,
            load=replica.load,
            in_flight=replica.num_live,
            requests=ledger.given[replica.name],
            errors={reason: count for (name, reason), count in ledger.failures.items() if name == replica.name},
            fingerprint=None if replica.version is None else replica.version.fingerprint,
            **self.holdings.of(replica.name).state(replica.name)._asdict(),
            latency=replica.latencies.figures(),
        )

    def _joined(self, replica: Replica, publishers: Publishers) -> None:
        version = replica.version
        assert version is not None
        self.holdings.follow(replica.name, version, publishers, version.block_size, version.fingerprint)

    async def _with_prompt(self, request: RoutedRequest) -> RoutedRequest:
        """The request with who holds its prompt. Raises OpenAIError if it must not reach a replica."""
        if request.body.count(b",") >= _MAX_ITEMS:
            return self._unknown("too_long", request)
        fields = json_object(request.body)
        if (made := self._prefix.body(fields)) is not fields:
            fields = dict(made)
            request = replace(request, body=json.dumps(fields).encode())
        model, served = fields.get("model"), self.fleet.served
        if isinstance(model, str) and served and model not in served:
            raise unknown_model(model, ", ".join(sorted(served)))
        begun = time.perf_counter()
        known = await self._known(request.path, fields, request.body)
        self.ledger.seconds["tokenise"] += time.perf_counter() - begun
        session = session_of(request.path, fields, request.headers)
        version = self.fleet.version_for(model, session, known.tokens[:_START])
        request = replace(request, session=session, model=model, version=version)
        if known.unknown is not None:
            return self._unknown(known.unknown, request)
        begun = time.perf_counter()
        held = await self._held(known, model, version)
        self.ledger.seconds["score"] += time.perf_counter() - begun
        return replace(request, num_tokens=len(known.tokens), held=held)

    async def explain(self, body: bytes) -> Json:
        """Who holds the prompt of a request with this body, as far as events tell. Raises OpenAIError."""
        fields = json_object(body)
        if "request" in fields:
            why = "a router knows no requests that ended; ask the engine or its node's daemon"
            raise bad_field("request", why, "unsupported_parameter")
        if body.count(b",") >= _MAX_ITEMS:
            raise OpenAIError(400, "prompt: too long for a router to read; ask an engine", param="prompt")
        fields = dict(self._prefix.body(fields))
        fields.setdefault("model", next((str(each["id"]) for each in self.fleet.models()), ""))
        path = CHAT if "messages" in fields else COMPLETION
        known = await self._known(path, fields, json.dumps(fields).encode())
        version, held = self.fleet.version, Held()
        if known.unknown is None:
            for each in list(self.holdings):
                found = await self._held(known, fields["model"], each)
                num_blocks = found.num_blocks if each is version else held.num_blocks
                held = Held(num_blocks, {**held.prefixes, **found.prefixes}, held.sure | found.sure)
        return explained_holdings(known, held, None if version is None else version.block_size)

    async def _held(self, known: KnownPrompt, model: object, version: ModelVersion | None) -> Held:
        if version is None or version not in self.holdings:
            return Held()
        lora = self.fleet.adapter(model)
        return await self.holdings[version].held(known.tokens, known.cache_salt, version.namespace, lora)

    async def _known(self, path: str, fields: Json, body: bytes) -> KnownPrompt:
        """The prompt, tokenized by the router's own tokenizer, or by a replica if it has none."""
        known = await read_prompt(path, fields, len(body), self._prompts)
        if known.unknown != "no_tokenizer" or self._tokens is None:
            return known
        tokens = await self._tokens.of(self.fleet.replicas, path, body, fields)
        return known if tokens is None else KnownPrompt(tokens, known.cache_salt)

    def _unread(self, request: RoutedRequest) -> RoutedRequest:
        """A request that is forwarded unread: to the replica of its conversation, else to the least busy one."""
        self.ledger.untokenised["passed_on"] += 1
        body = request.body
        kind = next((value for name, value in request.headers if name == b"content-type"), b"").lower()
        is_json = kind.startswith(b"application/json")
        session, model = None, None
        if is_json and body.count(b",") < _MAX_ITEMS:
            with suppress(OpenAIError):  # the replica reports whatever is wrong
                fields = json_object(body)
                model = fields.get("model")
                session = session_of(request.path.partition("?")[0], fields, request.headers)
        if not isinstance(model, str) or model not in self.fleet.served:
            model = None  # the replica reports that, too
        sure = frozenset(self.fleet.names) if session is None else frozenset[str]()
        held = Held(min(-(-len(body) // _BYTES), _MOST if is_json else _USUAL), {}, sure)
        version = self.fleet.version_for(model, session, body[:_START])
        return replace(request, held=held, session=session, model=model, version=version)

    def _unknown(self, why: str, request: RoutedRequest) -> RoutedRequest:
        self.ledger.untokenised[why] += 1
        return replace(request, held=Held(-(-len(request.body) // _BYTES)))


def _deadlines(config: RouterConfig) -> Deadlines:
    first_byte, whole = config.first_byte_timeout, config.request_timeout
    return Deadlines(config.connect_timeout, first_byte, config.stall_timeout, whole)


def _terms(config: RouterConfig) -> ProbeSettings:
    token = config.replica_token
    headers = [] if token is None else [(b"authorization", b"Bearer " + token.get_secret_value().encode())]
    return ProbeSettings(
        config.probe_interval,
        config.probe_timeout,
        headers,
        config.max_requests,
        config.probe_failures,
        trusted(config.replica_ca),
    )


# --- its metrics, `kvtier_route_*` -----------------------------------------------------------------------------------


# Of what is counted: name, help, field of the ledger, labels.
_COUNTED: Final = (
    ("kvtier_route_requests", "Requests given to a replica, by reason of the choice", "requests", "replica", "reason"),
    ("kvtier_route_answers", "Answers passed on, by status class", "answers", "replica", "status"),
    (
        "kvtier_route_retries",
        "Requests given to another replica before a byte was streamed, by reason",
        "retries",
        "reason",
    ),
    ("kvtier_route_errors", "Requests the router answered with an error of its own, by reason", "errors", "reason"),
    (
        "kvtier_route_unknown_prompts",
        "Requests routed without knowing their prompt, by reason",
        "untokenised",
        "reason",
    ),
    ("kvtier_route_seconds", "Time spent on requests, by stage", "seconds", "stage"),
    ("kvtier_route_cpu_seconds", "CPU time of the router's processes", "cpu"),
    ("kvtier_route_prompt_tokens", "Tokens of prompts that were known", "prompt_tokens"),
    ("kvtier_route_promised_tokens", "Of these, held by the chosen replica according to the index", "promised_tokens"),
    ("kvtier_route_told_prompt_tokens", "Tokens of prompts, by the replicas' usage", "told_prompt_tokens"),
    ("kvtier_route_told_cached_tokens", "Cached tokens of these, by the replicas' usage", "told_cached_tokens"),
    (
        "kvtier_route_list_errors",
        "Changes of the list of replicas that could not be read, by reason",
        "list_errors",
        "reason",
    ),
    ("kvtier_route_forgotten_blocks", "Blocks forgotten because too many are held", "forgotten"),
    ("kvtier_trace_spans", "Spans of requests, by what became of them", "spans", "outcome"),
    ("kvtier_route_skipped_events", "Events that could not be true, by reason", "skipped", "reason"),
)


def exposition(router: Router) -> str:
    total = router.total()
    return text_of([*_counted(router, total), *_replicas(router, total), *_held(router)])


def _counted(router: Router, ledger: Ledger) -> Iterator[Metric]:
    for name, text, what, *labels in _COUNTED:
        yield counter(name, text, getattr(ledger, what), *labels)
    yield wanting(router.wanting)
    yield reloads(router.reloads.counts)
    text = "Processes of the router that ended and were replaced, by reason"
    replaced = {} if router.seat is None else router.seat.replaced
    yield counter("kvtier_route_replaced_processes", text, replaced, "reason")


def _replicas(router: Router, ledger: Ledger) -> Iterator[Metric]:
    replicas = router.fleet.replicas
    states = {(replica.name, state): replica.state is state for replica in replicas for state in ReplicaState}
    yield gauge("kvtier_route_replica_state", "1 for the state that it is in", states, "replica", "state")
    loads = {replica.name: replica.load for replica in replicas}
    yield gauge("kvtier_route_replica_load", "Blocks of work given to it and not finished", loads, "replica")
    running = {replica.name: replica.num_live for replica in replicas}
    yield gauge("kvtier_route_in_flight", "Requests from the router under way there", running, "replica")
    names = {replica.name for replica in replicas}
    failures = {key: count for key, count in ledger.failures.items() if key[0] in names}
    yield counter("kvtier_route_replica_failures", "Requests it failed, by reason", failures, "replica", "reason")
    for what, text in (("ttft", "Time to the first token"), ("itl", "Time between two tokens")):
        waits: dict[tuple[str, str], float] = {}
        for replica in replicas:
            if (found := replica.latencies.figures().get(what)) is not None:
                waits |= {(replica.name, "0.5"): found.p50_s, (replica.name, "0.95"): found.p95_s}
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


# --- its application -------------------------------------------------------------------------------------------------

MAX_BODY: Final = 32 << 20  # bytes of a request: a million token ids, or the 25 MB of audio that OpenAI accepts
_MAX_REQUESTS: Final = 1024  # answered at once
# Of the status, for the live page's past hour.
_REMEMBERED: Final = ("uptime_s", "requests", "retries", "errors", "unknown_prompts", "tokens", "replicas")
# A proxy in front of a replica could read other paths differently.
_PATH: Final = re.compile(rb"/v1(/(?!\.{1,2}(/|$))[\w.~:@-]+)+", re.ASCII)
_FOR_ONE: Final = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")  # an operator sends these to each replica


def serve(
    config: RouterConfig,
    *,
    strict: bool = False,
    prefix: ChatPrefix = AS_SENT,
    seat: Seat | None = None,
    reloads: Reloads | None = None,
) -> HttpServer:
    """The router's server, not started yet. The options are passed to `Router`. Raises ConfigError."""
    router, stopping = Router(config, strict=strict, prefix=prefix, seat=seat, reloads=reloads), Event()
    guard = Guard(config.token)
    app = make_app(router, guard, stopping, config.cors_origins)
    listening = HttpSocket(config.http, "router", config.allowed_hosts, is_shared=seat is not None)
    server = RouterServer(
        router,
        app,
        listening,
        max_requests=_MAX_REQUESTS,
        refusal=openai.refusal,
        drain=config.patience,
        stopping=stopping,
    )

    def prepare(config: Config) -> Callable[[], None]:
        in_router = router.prepare(config.router)

        def commit() -> None:
            guard.token, server.drain = config.router.token, config.router.patience
            listening.answer_to(config.router.allowed_hosts)
            in_router()

        return commit

    router.reloads.prepare = prepare
    return server


class RouterServer(HttpServer):
    """At its end it logs what it did; with several processes their parent does."""

    def __init__(self, router: Router, app: Starlette, listening: HttpSocket, **options: Any) -> None:
        super().__init__(app, listening, **options)
        self._router, self._began = router, time.monotonic()

    def stop(self) -> int:
        at = time.monotonic()
        num_left = super().stop()
        if self._router.seat is None and self._began:
            ends = f"the last in {time.monotonic() - at:.1f} s, {num_left} cut off"
            _log.info("%s", stopped_line(at - self._began, [self._router.total().counts()], ends))
            self._began = 0.0  # once
        return num_left


def make_app(router: Router, guard: Guard, stopping: Event, origins: Sequence[str] = ()) -> Starlette:
    """The application; the router starts and stops with it. Pages are free, `/v1/` needs the guard's token."""

    async def status() -> Json:
        return router.status().as_json()

    live = LivePage(status, stopping, _REMEMBERED)

    async def model(request: Request) -> Response:
        guard.admit(request)
        wanted, served = request.path_params["name"], {entry["id"]: entry for entry in router.fleet.models()}
        if wanted not in served:
            raise unknown_model(wanted, ", ".join(served))
        return JSONResponse(served[wanted])

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
    handlers, pages = openai.error_handlers(router.ledger.errors), cors(origins)
    return Starlette(routes=routes, middleware=pages, lifespan=lifespan, exception_handlers=handlers)


class _Forwarding:
    """An endpoint that forwards to a replica. It is plain ASGI without a response object: bytes go straight through."""

    def __init__(self, router: Router, guard: Guard, stopping: Event, *, any_path: bool = False) -> None:
        """`any_path`: also forward bodies that the router does not read, under their own path and query."""
        self._router, self._guard, self._stopping, self._any_path = router, guard, stopping, any_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        self._guard.admit(request, any_type=self._any_path)
        if self._stopping.is_set():
            raise openai.stopping_error()
        target = _target(scope) if self._any_path else request.url.path
        body = await read_body(request, MAX_BODY)
        reply = ClientReply(send, scope["state"]["pass_chunks"])
        answering = asyncio.create_task(self._router.answer(target, scope["headers"], body, reply))
        leaving = asyncio.create_task(disconnected(receive))
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


def _readiness(router: Router, stopping: Event) -> Response:
    num_up, is_stopping = router.status().num_up, stopping.is_set()
    is_ready = num_up > 0 and not is_stopping
    answer: Json = {"ready": is_ready, "replicas_up": num_up} | ({"stopping": True} if is_stopping else {})
    if less := [*router.wanting.values()]:
        answer["wanting"] = less
    return JSONResponse(answer, 200 if is_ready else 503)
