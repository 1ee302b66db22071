"""ReplicaRanking: ranks replicas for a request, by their cached blocks of its prompt and by their load."""

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple
from weakref import WeakSet

from pydantic import BaseModel

from kvtier.service import router
from kvtier.service.openai import OpenAIError, Prompts, json_object
from kvtier.service.router import Candidate, Headers, Held, Publishers, ReplicaProfile
from kvtier.tiers import KVTierError
from kvtier.tiers.config import MAX_BLOCKS

# --- between ingress and replica -------------------------------------------------------------------------------------

METADATA: Final = "kvtier"  # the key of a replica's metadata for routers


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """An HTTP request for an engine. The request router reads its prompt; the replica forwards it unchanged."""

    method: str
    path: str  # with the query
    headers: Headers
    body: bytes
    key: str  # names this request in the process that routes it
    tried: frozenset[str] = frozenset()  # replicas that failed it, by `ReplicaID.unique_id`

    @property
    def prompt(self) -> str:
        """The body as text for Ray Serve's own prefix router, which divides by its length: never empty."""
        return self.body.decode("utf-8", "replace") or self.path


def engine_request(arguments: Sequence[Any]) -> EngineRequest | None:
    """The request among a call's arguments: ours, or one of `ray.serve.llm`, a pydantic model of OpenAI's fields."""
    for each in arguments:
        if isinstance(each, EngineRequest):
            return each
        if isinstance(each, BaseModel) and not {"messages", "prompt"}.isdisjoint(each.model_fields_set):
            path = router.READ["messages" not in each.model_fields_set]
            named: dict[str, str] = next((more.headers for more in arguments if hasattr(more, "headers")), {})
            headers = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in named.items()]
            return EngineRequest("POST", path, headers, each.model_dump_json(exclude_unset=True).encode(), "")
    return None


@dataclass(frozen=True, slots=True)
class AnswerHead:
    status: int
    headers: Headers
    replica: str  # `ReplicaID.unique_id`
    is_broken: bool = False  # the engine closed the connection: the request may have crashed it


# --- the ranking -----------------------------------------------------------------------------------------------------

_MAX_ITEMS: Final = 1 << 18  # values in a body that is parsed: more block the event loop for over 20 ms
_BYTES: Final = 64  # bytes of a body that count as a block if its prompt cannot be read
_KEPT: Final = 8192  # requests tracked until they end
_RUNNING: Final = 1.0  # blocks of work in an answer that has begun
_USUAL: Final = 8.0  # blocks of work in a request of another process


class Queue(NamedTuple):
    name: str
    num_requests: int  # of all clients, as far as known
    most: int


class _ModelIndex(NamedTuple):
    """What replicas must agree on to share one index; a new version of the deployment may differ."""

    block_size: int | None
    fingerprint: str | None
    namespace: str | None


@dataclass(slots=True)
class _RankedRequest:
    num_tokens: int
    held: Mapping[_ModelIndex, Held]
    num_blocks: int  # of the prompt, or an estimate
    session: bytes | None
    key: str
    replica: str | None = None  # the replica that serves it, once chosen
    work: float = 0.0  # blocks
    reason: str = ""
    ended: set[str] = field(default_factory=set)  # replicas that completed it before `routed` was called


class ReplicaRanking:
    """Belongs to one event loop, except `begun` and `figures`, which any thread may call."""

    def __init__(
        self, model: str | None = None, max_blocks: int = MAX_BLOCKS, weights: Mapping[str, float] = router.WEIGHTS
    ) -> None:
        """`model`: the folder whose tokenizer reads prompts. Without one, conversations stay at their replica."""
        self._prompts: Prompts | None = None
        if model is not None:
            with suppress(KVTierError):
                self._prompts = Prompts.open(Path(model))
        self._weights = weights
        self._holdings = router.FleetHoldings[_ModelIndex](strict=False, max_blocks=max_blocks)
        self._models: dict[str, _ModelIndex] = {}  # by replica
        self._requests: OrderedDict[str, _RankedRequest] = OrderedDict()  # by the caller's request id
        self._turn = 0
        self._reasons: Counter[str] = Counter()
        self._unknown: Counter[str] = Counter()
        self._prompt_tokens = self._promised_tokens = 0
        _RANKINGS.add(self)

    def change(self, metadata: Mapping[str, Mapping[str, Any]]) -> None:
        """Set the current replicas, by name, with each one's metadata (`EngineReplica`)."""
        for name in self._models.keys() - metadata.keys():
            self._holdings.leave(name)
            del self._models[name]
        for name in metadata.keys() - self._models.keys():
            self._follow(name, metadata[name])

    async def rank(self, request_id: str, request: EngineRequest | None, queues: Sequence[Queue]) -> list[str] | None:
        """Replicas, the best first, without those that failed it. None: all are full. Reads each prompt once."""
        tried = frozenset[str]() if request is None else request.tried
        left = [each for each in queues if each.name not in tried] or queues
        if (ranked := self._requests.get(request_id)) is None:
            self._turn += 1
            ranked = self._requests[request_id] = await self._read(request)
            while len(self._requests) > _KEPT:
                self._requests.popitem(last=False)
        ranked.ended.clear()
        given: dict[str, list[float]] = {}
        for each in list(self._requests.values()):
            if each.replica is not None:
                given.setdefault(each.replica, []).append(each.work)
        able = [self._candidate(each, ranked, given.get(each.name, [])) for each in left]
        choice = router.choose_or_stick(able, ranked.num_blocks, ranked.session, weights=self._weights, turn=self._turn)
        if choice.name is None:
            return None
        ranked.reason = choice.reason
        work = {score.name: float("inf") if score.work is None else score.work for score in choice.scores}
        return sorted(work, key=lambda name: (name != choice.name, work[name]))

    def routed(self, request_id: str, name: str) -> None:
        if (ranked := self._requests.get(request_id)) is None:
            return
        if name in ranked.ended:  # Ray may report a short answer's end first
            del self._requests[request_id]
        ranked.replica, cached = name, sum(self._prefix(name, ranked).values())
        ranked.work = max(_RUNNING, ranked.num_blocks - cached)
        self._reasons[ranked.reason] += 1
        self._prompt_tokens += ranked.num_tokens
        if (model := self._models.get(name)) is not None:
            self._promised_tokens += cached * (model.block_size or 0)

    def completed(self, request_id: str, name: str) -> None:
        """The replica has completed or refused the request. Ray Serve may call this before `routed`."""
        if (ranked := self._requests.get(request_id)) is None:
            return
        if ranked.replica is None:
            ranked.ended.add(name)
        elif ranked.replica == name:
            self._requests.pop(request_id, None)

    def begun(self, key: str) -> None:
        """The answer to the request of this key has begun, so its prompt is computed."""
        for ranked in list(self._requests.values()):
            if ranked.key == key:
                ranked.work = _RUNNING

    def figures(self) -> dict[str, Any]:
        """Decisions so far by reason, and the blocks that each replica is known to hold, for people."""
        replicas = {}
        for name in list(self._models):
            state = self._holdings.of(name).state(name)
            feeds = {"events": state.events, "node": state.node_events}
            replicas[name] = {
                "blocks": dict(state.blocks),
                **{which: feed.model_dump(exclude_none=True) for which, feed in feeds.items() if feed is not None},
            }
        return {
            "requests": dict(self._reasons),
            "unknown_prompts": dict(self._unknown),
            "tokens": {"prompt": self._prompt_tokens, "promised": self._promised_tokens},
            "under_way": sum(each.replica is not None for each in list(self._requests.values())),
            "replicas": replicas,
        }

    def close(self) -> None:
        """Stop following events. Returns within seconds."""
        self._holdings.close()
        self._models.clear()

    def _follow(self, name: str, metadata: Mapping[str, Any]) -> None:
        try:
            profile = ReplicaProfile.of(metadata.get("models"))
        except router.ReplicaFailed:
            profile = ReplicaProfile((), None, None, Publishers())
        model = _ModelIndex(profile.block_size or metadata.get("block_size"), profile.fingerprint, profile.namespace)
        publishers = profile.publishers.reached_at(str(metadata.get("node", "127.0.0.1")))
        if publishers.events is None and metadata.get("endpoints"):
            publish, replay = metadata["endpoints"]
            publishers = Publishers(publish, replay, publishers.node, publishers.node_replay)
        self._models[name] = model
        self._holdings.follow(name, model, publishers, model.block_size, model.fingerprint)

    async def _read(self, request: EngineRequest | None) -> _RankedRequest:
        if request is None:
            return self._not_read("no_request", None)
        path = request.path.partition("?")[0]
        if path not in router.READ:
            return self._not_read("passed_on", request)
        if request.body.count(b",") >= _MAX_ITEMS:
            return self._not_read("too_long", request)
        try:
            fields = json_object(request.body)
        except OpenAIError:  # the engine reports what is wrong
            return self._not_read("unreadable", request)
        session = router.session_of(path, fields, request.headers)
        known = await router.read_prompt(path, fields, len(request.body), self._prompts)
        if known.unknown is not None:
            return self._not_read(known.unknown, request, session)
        held = {
            model: await holdings.held(known.tokens, known.cache_salt, model.namespace, None)
            for model, holdings in list(self._holdings.items())
        }
        num_blocks = max((each.num_blocks for each in held.values()), default=-(-len(request.body) // _BYTES))
        return _RankedRequest(len(known.tokens), held, num_blocks, session, request.key)

    def _not_read(self, why: str, request: EngineRequest | None, session: bytes | None = None) -> _RankedRequest:
        self._unknown[why] += 1
        if request is None:
            return _RankedRequest(0, {}, 1, None, "")
        return _RankedRequest(0, {}, -(-len(request.body) // _BYTES), session, request.key)

    def _candidate(self, queue: Queue, ranked: _RankedRequest, own: Sequence[float]) -> Candidate:
        num_requests = max(len(own), queue.num_requests)
        usual = sum(own) / len(own) if own else _USUAL
        held = self._held_of(queue.name, ranked)
        return Candidate(
            queue.name,
            self._prefix(queue.name, ranked),
            sum(own) + usual * (num_requests - len(own)),
            limit=0.0 if num_requests >= queue.most else float("inf"),
            num_requests=num_requests,
            is_sure=held is not None and queue.name in held.sure,
        )

    def _prefix(self, name: str, ranked: _RankedRequest) -> Mapping[str, int]:
        held = self._held_of(name, ranked)
        return {} if held is None else held.prefixes.get(name, {})

    def _held_of(self, name: str, ranked: _RankedRequest) -> Held | None:
        return ranked.held.get(self._models[name]) if name in self._models else None


_RANKINGS: Final[WeakSet[ReplicaRanking]] = WeakSet()


def rankings() -> Sequence[ReplicaRanking]:
    return list(_RANKINGS)
