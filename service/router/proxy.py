"""Decides which replica a request goes to, and forwards it: tries the next on failure, passes the answer on, counts."""

import asyncio
import json
import math
import re
import time
from bisect import bisect_right
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, overload

import numpy as np
import xxhash

from kvtier.service import Json
from kvtier.service.observe import ReplicaScore, statuses
from kvtier.service.openai import OpenAIError
from kvtier.service.router.client import Deadlines, Failure, Headers, ReplicaAnswer, ReplicaFailed, Shortcut
from kvtier.service.router.fleet import AssignedWork, Fleet, ModelVersion, Replica, make_scores
from kvtier.service.router.holdings import NO_PREFIXES, WIDTH, Held, Prefixes
from kvtier.tiers import TIERS, tracing

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvtier.service.router.scores import Scores

# The share of a block's compute that is saved if a tier holds it; benchmarks/ttft.py measures the cost of loading.
WEIGHTS: Final[Mapping[str, float]] = MappingProxyType({kind.medium: kind.weight for kind in TIERS.values()})
# Both were tuned with benchmarks/routing.py. A request that waits behind other work loses that time only. A second copy
# of a prefix costs compute, and room for its blocks. So waiting work weighs less than work to do.
LOAD_WEIGHT: Final = 0.1  # weight of a block of waiting work; a block to compute weighs 1
CROWD: Final = 16.0  # extra requests that a replica may have; each time as many again weigh a whole prompt
FEW: Final = 8  # requests at a replica that never count as a crowd
SPREAD: Final = 1.25  # times the mean number of requests; a replica with more takes no session


class Reason(StrEnum):
    PREFIX = "prefix"  # it holds more of the prompt than any other
    NEARER = "nearer"  # its part of the prompt is in a faster tier: worth more, even if not longer
    LOAD = "load"  # another's blocks are worth as much or more, but this one has less to do
    EQUAL = "equal"  # several are equally good: they take turns
    ONLY = "only"  # no other can take a request
    UNSURE = "unsure"  # it is not known what any replica holds: they take turns
    SESSION = "session"  # its session belongs to this replica
    FULL = "full"  # none chosen: every live replica is at its limit
    DEAD = "dead"  # none chosen: no replica is alive


REASONS: Final = tuple(each for each in Reason if each is not Reason.SESSION)  # by the number of `Scores.choose`


@dataclass(frozen=True, slots=True)
class Candidate:
    name: str
    prefix: Mapping[str, int]  # blocks of the prompt's longest prefix that it need not compute, by medium
    load: float  # blocks of work given to it and not finished
    limit: float = float("inf")  # upper limit of `load`; at the limit the replica is full
    num_requests: int = 0  # requests given to it and not finished
    is_alive: bool = True
    is_sure: bool = True  # its events are up to date, so `prefix` can be believed

    @property
    def can_take(self) -> bool:
        return self.is_alive and self.load < self.limit


class ScoreList(Sequence[ReplicaScore]):
    """Every replica's score, made on access: few decisions are looked at."""

    def __init__(self, names: Sequence[str], scores: "Scores") -> None:
        self._names, self._columns = names, scores.columns()

    def __len__(self) -> int:
        return len(self._names)

    @overload
    def __getitem__(self, place: int) -> ReplicaScore: ...
    @overload
    def __getitem__(self, place: slice) -> list[ReplicaScore]: ...
    def __getitem__(self, place: int | slice) -> ReplicaScore | list[ReplicaScore]:
        if isinstance(place, slice):
            return [self[each] for each in range(len(self))[place]]
        cached, load, work = (column[place].item() for column in self._columns)
        return ReplicaScore(self._names[place], cached, load, None if math.isnan(work) else work)


@dataclass(frozen=True, slots=True)
class Choice:
    name: str | None
    reason: Reason
    scores: Sequence[ReplicaScore]  # in the order of the candidates
    cached: int = 0  # blocks of the prompt that the chosen one holds


def choose(
    replicas: Sequence[Candidate],
    num_blocks: int,
    *,
    weights: Mapping[str, float] = WEIGHTS,
    load_weight: float = LOAD_WEIGHT,
    crowd: float = CROWD,
    turn: int = 0,
) -> Choice:
    """Choose the replica with the least work before the prompt's first token.

    Work is a sum of three parts. First the prompt's blocks, less what the cached prefix saves by `weights`; a medium
    without a weight saves nothing. Second the replica's present work, times `load_weight`. Third a penalty for crowds:
    for each `crowd` requests more than the replica with the fewest has, beyond the first `crowd`, the prompt counts
    once more. So a prefix that all requests share comes to be held by several replicas.

    Equally good replicas take turns by `turn`, the number of the request. A prefix counts only if the replica is sure
    of it. If no replica is sure, all take turns.
    """
    scores = make_scores(len(replicas))
    for row, each in enumerate(replicas):
        prefix = each.prefix if each.is_sure else {}
        saved = sum(weights.get(medium, 0.0) * count for medium, count in prefix.items())
        scores.standing(row, each.load, each.limit, each.num_requests)
        scores.credit(row, each.is_alive | each.is_sure << 1, sum(prefix.values()), saved)
    return decide(scores, [each.name for each in replicas], num_blocks, turn, load_weight, crowd)


def decide(
    scores: "Scores",
    names: Sequence[str],
    num_blocks: int,
    turn: int,
    load_weight: float = LOAD_WEIGHT,
    crowd: float = CROWD,
) -> Choice:
    """`choose`, of replicas whose work and blocks stand in columns, by their names in that order."""
    row, reason = scores.choose(num_blocks, load_weight, crowd, turn)
    name = names[row] if row >= 0 else None
    return Choice(name, REASONS[reason], ScoreList(names, scores), scores.cached(row))


def weights_by_tier(weights: Mapping[str, float] = WEIGHTS) -> "NDArray[np.float64]":
    """`[8]`, by tier; a medium without a weight saves nothing."""
    media = [kind.medium for kind in TIERS.values()]
    return np.array([weights.get(medium, 0.0) for medium in media] + [0.0] * (WIDTH - len(media)))


def sticky(replicas: Sequence[Candidate], session: bytes, *, spread: float = float("inf")) -> Choice:
    """Send all requests of a session to one replica, whatever it holds; if that is full or down, to a fixed next one.

    The choice is rendezvous hashing: when a replica comes or goes, only the sessions that must move do. A replica with
    at least `FEW` requests and `spread` times the mean takes no more sessions: they go to the next replica in their
    order. This is consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, 2018). So a session that
    everybody asks for overloads no replica.
    """
    cached = {each.name: sum(each.prefix.values()) if each.is_sure else 0 for each in replicas}
    by_load = ((each, each.load if each.can_take else None) for each in replicas)
    scores = [ReplicaScore(each.name, cached[each.name], each.load, work) for each, work in by_load]
    able = {replica.name: replica.num_requests for replica in replicas if replica.can_take}
    if len(able) <= 1:
        return replace(choose(replicas, 0), scores=scores)
    most = max(FEW, spread * (sum(able.values()) + 1) / len(able))
    ranks = {name: xxhash.xxh3_64_intdigest(session, xxhash.xxh3_64_intdigest(name.encode())) for name in able}
    ranked = sorted(able, key=ranks.__getitem__, reverse=True)
    chosen = next(name for name in ranked if able[name] < most)  # there is one: the fewest are less than the mean
    return Choice(chosen, Reason.SESSION if chosen == ranked[0] else Reason.LOAD, scores, cached[chosen])


def choose_or_stick(
    replicas: Sequence[Candidate],
    num_blocks: int,
    session: bytes | None,
    *,
    weights: Mapping[str, float] = WEIGHTS,
    turn: int = 0,
) -> Choice:
    """`choose`, or `sticky` for a session if it is not known what any replica holds that can take it."""
    if session is None or any(each.is_sure and each.can_take for each in replicas):
        return choose(replicas, num_blocks, weights=weights, turn=turn)
    return sticky(replicas, session, spread=SPREAD)


# --- what is counted -------------------------------------------------------------------------------------------------

_KEPT: Final = 64  # decisions
# The quotes are unescaped, so no text of a model or a user can match.
_CACHED: Final = re.compile(rb'"cached_tokens":\s*(\d{1,12})\b')
_TIERS: Final = re.compile(rb'"prompt_tokens_details":\s*\{[^{}]{0,400}"kvtier":\s*\{([^{}]{1,200})\}')
_TIER: Final = re.compile(rb'"([^"\\]{1,32})":\s*(\d{1,12})\b')
_PROMPT: Final = re.compile(rb'"prompt_tokens":\s*(\d{1,12})\b')


@dataclass(slots=True)
class Ledger:
    requests: Counter[tuple[str, str]] = field(default_factory=Counter)  # (replica, reason) chosen
    answers: Counter[tuple[str, str]] = field(default_factory=Counter)  # (replica, "2xx") passed on
    retries: Counter[str] = field(default_factory=Counter)  # why another replica was tried before a byte was streamed
    errors: Counter[str] = field(default_factory=Counter)  # why the router answered with an error of its own
    untokenised: Counter[str] = field(default_factory=Counter)  # why the prompt of a request was not known
    prompt_tokens: int = 0  # of prompts that were known, and whose answers began
    promised_tokens: int = 0  # of these, held by the answering replica according to the index
    told_prompt_tokens: int = 0  # as reported in the replicas' usage
    told_cached_tokens: int = 0
    told_tiers: Counter[str] = field(default_factory=Counter)  # of these, by tier; only kvtier's engines report it
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))  # by "tokenise", "score"
    failures: Counter[tuple[str, str]] = field(default_factory=Counter)  # (replica, reason) of failed requests
    given: Counter[str] = field(default_factory=Counter)  # requests by replica
    list_errors: Counter[str] = field(default_factory=Counter)  # why the list of replicas could not be read
    skipped: Counter[str] = field(default_factory=Counter)  # events that could not be true
    forgotten: int = 0  # blocks, for lack of room in the index
    cpu: float = 0.0  # seconds
    spans: Counter[str] = field(default_factory=Counter)  # of requests that are traced, by what became of them
    decisions: deque[tuple[float, int, Choice]] = field(default_factory=lambda: deque(maxlen=_KEPT))

    def counts(self) -> Json:
        """All that is counted, for `add`; decisions are not."""
        every = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "decisions"}
        return {name: [*value.items()] if isinstance(value, dict) else value for name, value in every.items()}

    def add(self, counts: Json) -> None:
        """Count what another process has counted, too."""
        for name, value in counts.items():
            mine = getattr(self, name)
            if isinstance(mine, dict):
                for key, number in value:
                    mine[tuple(key) if isinstance(key, list | tuple) else key] += number
            else:
                setattr(self, name, mine + value)

    def decided(self, choice: Choice, num_blocks: int) -> None:
        if choice.name is not None:
            self.requests[choice.name, choice.reason] += 1
        self.decisions.append((time.time(), num_blocks, choice))

    def latest(self) -> list[statuses.RoutingDecision]:
        """The decisions that are kept, the last one first."""
        return [
            statuses.RoutingDecision(
                time=at, prompt_blocks=num_blocks, chosen=choice.name, reason=choice.reason, scores=list(choice.scores)
            )
            for at, num_blocks, choice in reversed(self.decisions)
        ]

    def read_usage(self, piece: bytes) -> None:
        """Count the usage in a piece of an answer, if there is one; the rest is not parsed."""
        if b'"usage"' not in piece:
            return
        prompts, cached = _PROMPT.findall(piece), _CACHED.findall(piece)
        if prompts:
            self.told_prompt_tokens += int(prompts[-1])
            self.told_cached_tokens += int(cached[-1]) if cached else 0
            for by_tier in _TIERS.findall(piece)[-1:]:
                counts = {label.encode(): label for label in (kind.label for kind in TIERS.values())}
                self.told_tiers.update({counts[tier]: int(n) for tier, n in _TIER.findall(by_tier) if tier in counts})


# --- what the client receives ----------------------------------------------------------------------------------------

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_ENDS: Final = (b"\n\n", b"\r\n\r\n")  # how an event ends
_DONE: Final = (b"data: [DONE]\n\n", b"data: [DONE]\r\n\r\n")
_DONE_CHUNK: Final = tuple(done + b"\r\n" for done in _DONE)
_MAX_TAIL: Final = 64 << 10  # bytes held back of an event that has not ended
_LAST_WORD: Final = 1.0  # seconds a client may take to read the error that ends its stream


@dataclass(frozen=True, slots=True)
class Relayed:
    status: int
    headers: Headers
    body: bytes


class ClientReply:
    """One answer through an ASGI `send`: `whole`, or `begin`, `write` …, `end`; `fail` at any time instead.

    `pass_chunks` writes chunks past ASGI if they need no change.
    """

    def __init__(self, send: Send, pass_chunks: Shortcut) -> None:
        self.is_begun = False
        self._send, self._pass_chunks = send, pass_chunks
        self._events: WholeEvents | None = None

    @property
    def is_done(self) -> bool:
        return self._events is not None and self._events.is_done

    async def whole(self, status: int, headers: Headers, body: bytes) -> None:
        await self.begin(status, [*headers, (b"content-length", b"%d" % len(body))], is_stream=False)
        await self._body(body, more=False)

    async def begin(self, status: int, headers: Headers, *, is_stream: bool) -> None:
        """Send the head. From here on no other replica can answer."""
        self.is_begun = True
        self._events = WholeEvents() if is_stream else None
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, piece: bytes) -> None:
        whole = piece if self._events is None else self._events.cut(piece)
        if whole:
            await self._body(whole, more=True)

    def pass_on(self, chunks: bytes) -> bool:
        """Pass on chunks of whole events, as the replica sent them. False: the caller must `write` them."""
        if self._events is None or self._events.tail or not self._pass_chunks(chunks):
            return False
        self._events.is_done = chunks.endswith(_DONE_CHUNK)
        return True

    async def end(self) -> None:
        await self._body(b"" if self._events is None else self._events.tail, more=False)

    async def fail(self, error: OpenAIError | Relayed) -> None:
        """Report why there is no answer, or why it breaks off.

        In a stream the error is the last event. Any other answer that has begun stays without an end: the server then
        closes the connection, so that no client takes the answer for a whole one.
        """
        if isinstance(error, Relayed):
            await self.whole(error.status, error.headers, error.body)
        elif not self.is_begun:
            headers = [(name.encode(), value.encode()) for name, value in error.headers.items()]
            headers.append((b"content-type", b"application/json"))
            await self.whole(error.status, headers, json.dumps(error.content).encode())
        elif self._events is not None:
            last = b"" if self.is_done else b"data: " + json.dumps(error.content).encode() + b"\n\n"
            with suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORD):
                    await self._body(last, more=False)

    async def _body(self, data: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})


class WholeEvents:
    """Cuts a stream of events at their ends, so that an error event may follow. Whole events are not copied."""

    def __init__(self) -> None:
        self.is_done = False  # the stream's own last event has passed
        self.tail = b""  # bytes held back: the beginning of an event

    def cut(self, piece: bytes) -> bytes:
        data = self.tail + piece if self.tail else piece
        if data.endswith(_ENDS):
            self.tail, self.is_done = b"", data.endswith(_DONE)
            return data
        end = max((data.rfind(mark) + len(mark) for mark in _ENDS if mark in data), default=0)
        if not end and len(data) > _MAX_TAIL:
            end = len(data)
        self.tail = data[end:]
        return data[:end]


# --- prompts that are being computed ---------------------------------------------------------------------------------

_MOST_COMING: Final = 1 << 16  # depths of prompts
_DEPTHS: Final = tuple(
    depth for power in range(15) for depth in range(1 << power, 2 << power, max(1, (1 << power) // 8))
)  # of blocks: eight to each power of two


class ComingBlocks:
    """Where a prompt's blocks are being computed: events tell of them only when they are done.

    Without it requests that come together, for one new document, would go to as many replicas, and each would compute
    it. A prompt is known at some depths only: to an eighth of its length.
    """

    def __init__(self) -> None:
        self._works: OrderedDict[int, AssignedWork] = OrderedDict()  # by the name of the block at that depth

    def add(self, names: Sequence[int], num_held: int, work: AssignedWork) -> None:
        """`work` computes these blocks but the first `num_held`."""
        for depth in _DEPTHS[bisect_right(_DEPTHS, num_held) : bisect_right(_DEPTHS, len(names))]:
            self._works[names[depth - 1]] = work
            self._works.move_to_end(names[depth - 1])
        while len(self._works) > _MOST_COMING:
            self._works.popitem(last=False)

    def of(self, names: Sequence[int]) -> tuple[str, int] | None:
        """The replica that computes most of these blocks, and how many."""
        for depth in reversed(_DEPTHS[: bisect_right(_DEPTHS, len(names))]):
            if (work := self._works.get(names[depth - 1])) is not None and work.is_coming:
                return work.name, depth
        return None


# --- the way of one request ------------------------------------------------------------------------------------------

_MOST_KEPT: Final = 16  # versions of the model, as good as surely
_MAX_FAILED: Final = 4  # replicas that may fail one request
_MAX_BROKEN: Final = 2  # of these, replicas that may hang up on it: the request may be what kills them
_MAX_WHOLE: Final = 4 << 20  # bytes of an answer without stream that are held back until it is whole
_HOP: Final = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization te trailer transfer-encoding upgrade".split()
)
_LATER: Final = {"retry-after": "1"}
_NOT_AGAIN: Final = {"x-should-retry": "false"}  # a second try would take as long
NOT_ASKED: Final = _HOP | frozenset(b"host content-length authorization x-api-key accept-encoding expect".split())
NOT_ANSWERED: Final = _HOP | frozenset(b"content-length date server".split())


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    path: str
    headers: Headers  # to send to the replica
    body: bytes
    arrived: float  # seconds on the event loop's clock
    num_tokens: int = 0  # tokens of the prompt; 0 if it could not be tokenized
    held: Held = field(default_factory=Held)  # its number of blocks is an estimate if there are no tokens
    model: object = None  # the requested name; None: any that a replica has
    version: ModelVersion | None = None  # of the model, which keeps the conversation
    session: bytes | None = None  # identifies the conversation; its turns stay together if no blocks are known


@dataclass(slots=True)
class _Tries:
    tried: set[str] = field(default_factory=set)
    num_failed: int = 0
    num_broken: int = 0
    last: OpenAIError | Relayed | None = None

    def failed(self, error: ReplicaFailed) -> None:
        self.num_failed += 1
        self.num_broken += error.failure is Failure.BROKEN
        if self.last is None or self.last.status == 502:
            self.last = OpenAIError(502, "no replica could answer; try again", code=error.failure)

    def refused(self, refusal: Relayed) -> None:
        """Note a replica's refusal. "Busy" (429) says more than any failure, so it is kept."""
        self.num_failed += refusal.status != 429
        if self.last is None or self.last.status != 429:
            self.last = refusal


_Kept = tuple[Sequence[str], Mapping[str, int], frozenset[str], "NDArray[np.int64]", "NDArray[np.uint8]"]


class Proxy:
    def __init__(self, fleet: Fleet, ledger: Ledger, deadlines: Deadlines, weights: Mapping[str, float]) -> None:
        self._fleet, self._ledger = fleet, ledger
        self.set_policy(deadlines, weights)
        self._kept: dict[int, _Kept] = {}
        self._coming = ComingBlocks()
        self._attempt = _TracedAttempt if tracing.ON else _Attempt
        self._turn = 0  # requests so far; retries do not count, or one of a pair would always be tried first

    def set_policy(self, deadlines: Deadlines, weights: Mapping[str, float]) -> None:
        self._deadlines, self._weights = deadlines, weights_by_tier(weights)

    async def forward(self, request: RoutedRequest, reply: ClientReply) -> None:
        """Have a request answered by the best replica that can. If none can, the client gets an error."""
        try:
            async with asyncio.timeout_at(request.arrived + self._deadlines.whole):
                error = await self._try(request, reply)
        except TimeoutError:
            why = f"not answered within {self._deadlines.whole:g} s; ask for less"
            error = OpenAIError(504, why, code="deadline", headers=_NOT_AGAIN)
        if error is not None:
            self._ledger.errors[str(error.status if isinstance(error, Relayed) else error.code)] += 1
            await reply.fail(error)

    async def _try(self, request: RoutedRequest, reply: ClientReply) -> OpenAIError | Relayed | None:
        tries, loop = _Tries(), asyncio.get_running_loop()
        due = request.arrived + self._deadlines.first_byte  # one deadline for all tries
        self._turn += 1
        while tries.num_failed < _MAX_FAILED and tries.num_broken < _MAX_BROKEN:
            choice = self._choose(request, tries.tried)
            if choice.name is None:
                if tries.last is None and choice.reason is Reason.FULL:
                    why = "every replica is at its limit of requests; try again"
                    return OpenAIError(429, why, code="full", headers=_LATER)
                return tries.last or OpenAIError(503, "no replica is up; try again", code="no_replica", headers=_LATER)
            replica = self._fleet[choice.name]
            tries.tried.add(replica.name)
            work = AssignedWork(replica, request.held.num_blocks - choice.cached)
            self._coming.add(request.held.names, choice.cached, work)
            size = None if replica.version is None else replica.version.block_size
            try:
                attempt = self._attempt(replica, work, self._ledger, reply, choice, choice.cached * (size or 0))
                refusal = await attempt.make(request, replace(self._deadlines, first_byte=due - loop.time()))
            except ReplicaFailed as error:
                replica.failed(error.failure)
                if reply.is_begun:
                    why = f"replica {replica.name} ended in the middle of the answer; send the request again"
                    return OpenAIError(502, why, code=f"mid_stream_{error.failure}")
                if loop.time() >= due:
                    why = f"no answer began within {self._deadlines.first_byte:g} s; ask for less, or later"
                    return OpenAIError(504, why, code=error.failure, headers=_NOT_AGAIN)
                tries.failed(error)
                self._ledger.retries[error.failure] += 1
            else:
                if refusal is None:
                    return None
                tries.refused(refusal)
                self._ledger.retries[str(refusal.status)] += 1
            finally:
                work.end()
        return tries.last

    def _choose(self, request: RoutedRequest, tried: set[str]) -> Choice:
        """Among replicas that are up, else those that seem down; first those of the request's version."""
        begun = time.perf_counter()
        fleet, held = self._fleet, request.held
        is_alive = fleet.usable(request.model, request.version, tried)
        counts, rows, is_sure = self._columns(held)
        fleet.scores.hold(is_alive + 2 * is_sure, counts, rows, self._weights)
        choice = decide(fleet.scores, fleet.names, held.num_blocks, self._turn)
        if choice.reason is Reason.UNSURE and request.session is not None:
            candidates = [
                Candidate(each.name, {}, each.load, each.limit, each.num_live, bool(alive), is_sure=False)
                for each, alive in zip(fleet.replicas, is_alive, strict=True)
            ]
            choice = sticky(candidates, request.session, spread=SPREAD)
        self._ledger.seconds["score"] += time.perf_counter() - begun
        self._ledger.decided(choice, held.num_blocks)
        return choice

    def _columns(self, held: Held) -> "tuple[NDArray[np.uint32], NDArray[np.int64], NDArray[np.uint8]]":
        """Blocks by tier, the row there of each replica in the fleet's order, and whether it is sure.

        Rows stay the same until a replica or a publisher comes or goes, so they are kept for as long.
        """
        prefixes = held.prefixes if isinstance(held.prefixes, Prefixes) else NO_PREFIXES
        if (coming := self._coming.of(held.names)) is not None and coming[0] in prefixes.rows:
            counts = prefixes.counts[prefixes.rows[coming[0]]]
            counts[0] += max(0, coming[1] - int(counts.sum()))
        names = self._fleet.names
        kept = self._kept.get(id(prefixes.rows))
        if kept is None or kept[0] is not names or kept[1] is not prefixes.rows or kept[2] is not held.sure:
            if len(self._kept) > _MOST_KEPT:
                self._kept.clear()
            rows = np.array([prefixes.rows.get(name, -1) for name in names], np.int64)
            is_sure = np.array([name in held.sure for name in names], np.uint8)
            kept = self._kept[id(prefixes.rows)] = names, prefixes.rows, held.sure, rows, is_sure
        return prefixes.counts.reshape(-1), kept[3], kept[4]


class _Attempt:
    def __init__(
        self,
        replica: Replica,
        work: AssignedWork,
        ledger: Ledger,
        reply: ClientReply,
        choice: Choice,
        promised: int,
    ) -> None:
        self._replica, self._work, self._ledger, self._reply, self._choice = replica, work, ledger, reply, choice
        self._promised = promised  # tokens that the replica holds of the prompt

    async def make(self, request: RoutedRequest, deadlines: Deadlines) -> Relayed | None:
        """Send the request. Returns None if the client has its answer, else the refusal. Raises ReplicaFailed."""
        answer = await self._replica.client.ask("POST", request.path, request.headers, request.body, deadlines)
        try:
            kind = answer.header(b"content-type")
            is_stream = kind.startswith(b"text/event-stream")
            is_refusal = answer.status == 429 or answer.status >= 500
            # a body without a length that is not JSON is passed on as it comes: speech, for example
            is_open = is_stream or not (answer.header(b"content-length") or kind.startswith(b"application/json"))
            # an open answer begins with its head, which engines send before they compute
            first = await answer.first() if is_open and not is_refusal else await answer.read(_MAX_WHOLE)
            headers = [*passed(answer.headers, NOT_ANSWERED), (b"x-kvtier-replica", self._replica.name.encode())]
            if is_refusal:
                return Relayed(answer.status, headers, first)
            self._work.begun()
            # booked here: a client may leave behind its last event, and end what would follow
            self._ledger.answers[self._replica.name, f"{answer.status // 100}xx"] += 1
            self._ledger.prompt_tokens += request.num_tokens
            self._ledger.promised_tokens += self._promised
            if is_open or len(first) > _MAX_WHOLE:
                await self._reply.begin(answer.status, headers, is_stream=is_stream)
                await self._stream(answer, first)
            else:
                self._ledger.read_usage(first)
                await self._reply.whole(answer.status, headers, first)
            return None
        finally:
            answer.close()

    async def _stream(self, answer: ReplicaAnswer, first: bytes) -> None:
        piece = first
        while piece:
            self._ledger.read_usage(piece)
            await self._reply.write(piece)
            piece = await answer.piece(self._pass_on)
        # without a length or chunks an end is no different from a broken connection
        has_end = answer.header(b"content-length") or answer.header(b"transfer-encoding")
        if not (has_end or self._reply.is_done):
            raise ReplicaFailed(Failure.BROKEN, "it hung up, and the answer has no marked end")
        await self._reply.end()

    def _pass_on(self, chunks: bytes) -> bool:
        """The shortcut for most pieces of a stream: no data waits before them, and no task needs to wake."""
        if not self._reply.pass_on(chunks):
            return False
        self._ledger.read_usage(chunks)
        return True


class _TracedAttempt(_Attempt):
    """With a span, from which the replica's go on."""

    async def make(self, request: RoutedRequest, deadlines: Deadlines) -> Relayed | None:
        choice: tracing.Attributes = {
            "replica": self._replica.name,
            "reason": str(self._choice.reason),
            "prompt_tokens": request.num_tokens,
            "promised_tokens": self._promised,
            "replica.load": self._replica.load,
        }
        under = tracing.current.get()
        if under is None or (trace := under.begin("replica", choice, "client")) is None:
            return await super().make(request, deadlines)
        others = [each for each in request.headers if each[0] != b"traceparent"]
        headers = [*others, (b"traceparent", trace.traceparent.encode())]
        why: str | None = "given up"  # the client left, or its time is over
        try:
            refusal = await super().make(replace(request, headers=headers), deadlines)
            why = None if refusal is None else f"status {refusal.status}"
            return refusal
        except ReplicaFailed as error:
            why = str(error.failure)
            raise
        finally:
            trace.end(error=why)


def passed(headers: Headers, without: frozenset[bytes]) -> list[tuple[bytes, bytes]]:
    """The headers to pass on: without hop-by-hop headers and those that `connection` names."""
    named = {name.strip().lower() for key, value in headers if key == b"connection" for name in value.split(b",")}
    return [(name, value) for name, value in headers if name not in without and name not in named]
