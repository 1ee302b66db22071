"""The router: reads each request's prompt, looks up who holds it, and has the proxy forward it."""

import asyncio
import json
import ssl
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Final

from kvtier.connector import AS_SENT, ChatPrefix
from kvtier.service import Json
from kvtier.service.events import CurveKeys
from kvtier.service.observe import RouterStatus, statuses
from kvtier.service.openai import OpenAIError, Prompts, json_object, unknown_model
from kvtier.service.router.client import Deadlines, Headers
from kvtier.service.router.fleet import Fleet
from kvtier.service.router.holdings import FleetHoldings, Held
from kvtier.service.router.prompts import CHAT, COMPLETION, READ, KnownPrompt, ReplicaTokenizer, read_prompt, session_of
from kvtier.service.router.proxy import NOT_ASKED, ClientReply, Ledger, Proxy, RoutedRequest, passed
from kvtier.service.router.replica_list import Publishers, ReplicaList
from kvtier.service.router.replicas import ModelVersion, ProbeSettings, Replica
from kvtier.tiers import TIERS, ConfigError, tier_captions
from kvtier.tiers.config import RouterConfig

# --- what it answers to `kvtier explain` -----------------------------------------------------------------------------

_UNKNOWN_PROMPT = {
    "unreadable": "the router cannot read it; give a prompt or messages as the API takes them",
    "no_tokenizer": "the router has no tokenizer; start it with --model DIR, or give token ids by --blocks",
    "late": "no replica has tokenised it in time; give token ids by --blocks",
}


def explained_holdings(known: KnownPrompt, held: Held, block_size: int | None) -> Json:
    """Who holds the prompt, with lines for people. Raises OpenAIError if its tokens are not known."""
    if known.unknown is not None:
        why = _UNKNOWN_PROMPT.get(
            known.unknown, f"its tokens are not known ({known.unknown}); give token ids by --blocks"
        )
        raise OpenAIError(400, f"prompt: {why}", param="prompt", code="unknown_prompt")
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
    """For people."""
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

_BYTES: Final = 64  # bytes of a body that count as a block if the prompt is not known
_MAX_ITEMS: Final = 1 << 18  # values in a body that is parsed: more block the event loop for over 20 ms
_LONG: Final = 1 << 15  # tokens; the blocks of longer prompts are named on a thread
_MOST: Final = 1024  # most blocks of work of a request that is forwarded unread
_USUAL: Final = 8  # the same if its body is not text
_START: Final = 64  # tokens, or bytes, of a prompt by which one without a conversation chooses among versions


class Router:
    """Belongs to the event loop that calls `start`; `status` and the ledger are read there too."""

    def __init__(self, config: RouterConfig, *, strict: bool = False, prefix: ChatPrefix = AS_SENT) -> None:
        """Raises ConfigError if a replica's spec is wrong or contradicts another, or if the tokenizer cannot be read.

        `strict`: events that contradict earlier ones are errors. `prefix`: in which form chats reach replicas.
        """
        self._prefix = prefix
        terms = _terms(config)
        keys = CurveKeys.load("router", config.curve_key_file, "curve_publisher_file", config.curve_publisher_file)
        self.holdings = FleetHoldings[ModelVersion](strict=strict, max_blocks=config.max_blocks, keys=keys)
        self.list = ReplicaList(config.replicas, config.replicas_file, config.resolve_interval)
        self.fleet = Fleet(self.list.specs, terms, self._joined, self.holdings.leave)
        self._prompts = None if config.model is None else Prompts.open(config.model)
        self.ledger = Ledger()
        first_byte, whole = config.first_byte_timeout, config.request_timeout
        deadlines = Deadlines(config.connect_timeout, first_byte, config.stall_timeout, whole)
        self._proxy = Proxy(self.fleet, self.ledger, deadlines, config.weights)
        self._headers = terms.headers
        self._tokens = ReplicaTokenizer(config.tokenize_timeout, terms.headers) if config.model is None else None
        self._started = time.time()

    async def start(self) -> None:
        """Probe every replica once, then start probing, watching the list and following events until `stop`."""
        self.fleet.change(await self.list.looked_up())
        await self.fleet.start()
        self._following = asyncio.create_task(self.list.follow(self.fleet.change))

    async def stop(self) -> None:
        self._following.cancel()
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

    def status(self) -> RouterStatus:
        ledger, version = self.ledger, self.fleet.version
        return RouterStatus(
            uptime_s=time.time() - self._started,
            block_size=None if version is None else version.block_size,
            fingerprint=None if version is None else version.fingerprint,
            models=sorted(self._served()),
            tier_captions=[statuses.TierCaption.model_validate(each) for each in tier_captions()],
            replicas=[self._replica(replica) for replica in (*self.fleet.replicas, *self.fleet.leaving)],
            list=statuses.ReplicaListStatus(errors=dict(self.list.errors), why=self.list.why),
            decisions=list(reversed(ledger.decisions)),
            requests=_by_reason(ledger.requests),
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
            forgotten_blocks=self.holdings.num_forgotten,
            cpu_s=time.process_time(),
        )

    def _replica(self, replica: Replica) -> statuses.ReplicaStatus:
        return statuses.ReplicaStatus(
            name=replica.name,
            url=replica.spec.url,
            state=replica.state,
            why=replica.why,
            load=replica.load,
            in_flight=replica.in_flight,
            requests=replica.num_requests,
            errors=dict(replica.errors),
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
        model, served = fields.get("model"), self._served()
        if isinstance(model, str) and served and model not in served:
            raise unknown_model(model, ", ".join(sorted(served)))
        begun = time.perf_counter()
        known = await self._known(request.path, fields, request.body)
        self.ledger.seconds["tokenise"] += time.perf_counter() - begun
        session = session_of(request.path, fields)
        version = self.fleet.version_for(model, session, known.tokens[:_START])
        request = replace(request, session=session, model=model, version=version)
        if known.unknown is not None:
            return self._unknown(known.unknown, request)
        begun = time.perf_counter()
        held = await self._held(known, model, version)
        self.ledger.seconds["score"] += time.perf_counter() - begun
        return replace(request, num_tokens=len(known.tokens), held=held)

    def _served(self) -> set[str]:
        """Names of the models that some replica has."""
        return {str(each["id"]) for each in self.fleet.models()}

    async def explain(self, body: bytes) -> Json:
        """Who holds the prompt of a request with this body, as far as events tell. Raises OpenAIError."""
        fields = json_object(body)
        if "request" in fields:
            why = "a router knows no requests that ended; ask the engine or its node's daemon"
            raise OpenAIError(400, f"request: {why}", param="request", code="unsupported_parameter")
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
        holdings = self.holdings[version]
        what = known.tokens, known.cache_salt, version.namespace, self.fleet.adapter(model)
        is_long = len(known.tokens) > _LONG
        names = await asyncio.to_thread(holdings.names, *what) if is_long else holdings.names(*what)
        return holdings.of(len(known.tokens), names)

    async def _known(self, path: str, fields: Mapping[str, Any], body: bytes) -> KnownPrompt:
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
                model, session = fields.get("model"), session_of(request.path.partition("?")[0], fields)
        if not isinstance(model, str) or model not in self._served():
            model = None  # the replica reports that, too
        sure = frozenset(replica.name for replica in self.fleet.replicas) if session is None else frozenset[str]()
        held = Held(min(-(-len(body) // _BYTES), _MOST if is_json else _USUAL), {}, sure)
        version = self.fleet.version_for(model, session, body[:_START])
        return replace(request, held=held, session=session, model=model, version=version)

    def _unknown(self, why: str, request: RoutedRequest) -> RoutedRequest:
        self.ledger.untokenised[why] += 1
        return replace(request, held=Held(-(-len(request.body) // _BYTES)))


def _terms(config: RouterConfig) -> ProbeSettings:
    token = config.replica_token
    headers = [] if token is None else [(b"authorization", b"Bearer " + token.get_secret_value().encode())]
    return ProbeSettings(
        config.probe_interval,
        config.probe_timeout,
        headers,
        config.max_requests,
        config.probe_failures,
        _system_tls() if config.replica_ca is None else _tls(config.replica_ca),
    )


@cache
def _system_tls() -> ssl.SSLContext:
    """Verifies https replicas by the system's authorities; to read them takes 20 ms."""
    return _tls(None)


def _tls(ca_file: Path | None) -> ssl.SSLContext:
    """Verifies by `ca_file` alone, if there is one. ConfigError without certificates."""
    try:
        context = ssl.create_default_context(cafile=ca_file)
    except OSError as error:  # ssl.SSLError is one
        why = error.strerror or str(error)
        raise ConfigError(f'[router] replica_ca "{ca_file}": {why}; give a file of PEM certificates') from None
    context.set_alpn_protocols(["http/1.1"])
    return context


def _by_reason(requests: Counter[tuple[str, str]]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for (_, reason), count in requests.items():
        found[reason] += count
    return dict(found)
