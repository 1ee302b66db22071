"""One request's way through the router: choose, ask, try the next where nothing was streamed yet, pass bytes on."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from kvtier.service.openai_errors import OpenAIError
from kvtier.service.router_client import Answer, Deadlines, Failure, Headers, ReplicaFailed
from kvtier.service.router_holdings import Held
from kvtier.service.router_ledger import Ledger
from kvtier.service.router_replicas import Fleet, Replica, State, Work
from kvtier.service.router_reply import Relayed, Reply
from kvtier.service.routing_policy import Candidate, Choice, Reason, choose

_MAX_FAILED: Final = 4  # replicas that could not answer one request
_MAX_BROKEN: Final = 2  # of these, that hung up on it: it may be what ends them
_MAX_WHOLE: Final = 4 << 20  # bytes of an answer that is no stream and is held back until it is whole
_HOP: Final = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization te trailer transfer-encoding upgrade".split()
)
_LATER: Final = {"retry-after": "1"}
_NOT_AGAIN: Final = {"x-should-retry": "false"}  # a second try would take as long
NOT_ASKED: Final = _HOP | frozenset(b"host content-length authorization accept-encoding expect".split())
NOT_ANSWERED: Final = _HOP | frozenset(b"content-length date server".split())


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, and what is known of its prompt."""

    path: str
    headers: Headers  # for the replica
    body: bytes
    num_tokens: int  # of the prompt; 0 where it could not be tokenised
    held: Held  # of the prompt, by whom; then its number of blocks is an estimate
    arrived: float  # on the event loop's clock


@dataclass(slots=True)
class _Tries:
    """What became of one request so far."""

    tried: set[str] = field(default_factory=set)
    num_failed: int = 0
    num_broken: int = 0
    last: OpenAIError | Relayed | None = None

    @property
    def is_over(self) -> bool:
        return self.num_failed >= _MAX_FAILED or self.num_broken >= _MAX_BROKEN

    def failed(self, error: ReplicaFailed) -> None:
        self.num_failed += 1
        self.num_broken += error.failure is Failure.BROKEN
        if self.last is None or self.last.status == 502:
            self.last = OpenAIError(502, "no replica could answer; try again", code=error.failure)

    def refused(self, refusal: Relayed) -> None:
        """A replica's own refusal; that it is busy says more to a client than any failure."""
        self.num_failed += refusal.status != 429
        if self.last is None or self.last.status != 429:
            self.last = refusal


class Proxy:
    """Forwards requests to the fleet's replicas. Belongs to one event loop."""

    def __init__(self, fleet: Fleet, ledger: Ledger, deadlines: Deadlines, weights: Mapping[str, float]) -> None:
        self._fleet, self._ledger = fleet, ledger
        self._deadlines, self._weights = deadlines, weights
        self._turn = 0  # requests so far; if retries counted, a pair would have the same one asked first for ever

    async def forward(self, asked: Asked, reply: Reply) -> None:
        """Have a request answered by the best replica that can; whatever goes wrong, the client is told."""
        try:
            async with asyncio.timeout_at(asked.arrived + self._deadlines.whole):
                error = await self._try(asked, reply)
        except TimeoutError:
            why = f"not answered within {self._deadlines.whole:g} s; ask for less"
            error = OpenAIError(504, why, code="deadline", headers=_NOT_AGAIN)
        if error is not None:
            self._ledger.errors[str(error.status if isinstance(error, Relayed) else error.code)] += 1
            await reply.fail(error)

    async def _try(self, asked: Asked, reply: Reply) -> OpenAIError | Relayed | None:
        tries, loop = _Tries(), asyncio.get_running_loop()
        due = asked.arrived + self._deadlines.first_byte  # one for all who are tried
        self._turn += 1
        while not tries.is_over:
            choice = self._choose(asked, tries.tried)
            if choice.name is None:
                return tries.last or _nobody(choice)
            replica = self._fleet[choice.name]
            tries.tried.add(replica.name)
            cached = next(score.cached for score in choice.scores if score.name == replica.name)
            work = Work(replica, asked.held.num_blocks - cached)
            try:
                attempt = _Attempt(replica, work, self._ledger, reply)
                refusal = await attempt.make(asked, replace(self._deadlines, first_byte=due - loop.time()))
            except ReplicaFailed as error:
                replica.failed(error.failure)
                if reply.is_begun:
                    why = f"replica {replica.name} ended in the middle of the answer; ask again"
                    return OpenAIError(502, why, code=f"mid_stream_{error.failure}")
                if loop.time() >= due:
                    why = f"no answer began within {self._deadlines.first_byte:g} s; ask for less, or later"
                    return OpenAIError(504, why, code=error.failure, headers=_NOT_AGAIN)
                tries.failed(error)
                self._ledger.retries[error.failure] += 1
            else:
                if refusal is None:
                    self._ledger.prompt_tokens += asked.num_tokens
                    self._ledger.promised_tokens += cached * (self._fleet.block_size or 0)
                    return None
                tries.refused(refusal)
                self._ledger.retries[str(refusal.status)] += 1
            finally:
                work.end()
        return tries.last

    def _choose(self, asked: Asked, tried: set[str]) -> Choice:
        """The best of those that are up; where none is, those that seem to be down may yet answer."""
        left = [replica for replica in self._fleet.replicas if replica.name not in tried]
        usable = [r for r in left if r.state is State.UP] or [r for r in left if r.state is State.DOWN]
        begun = time.perf_counter()
        candidates = [
            Candidate(
                replica.name,
                asked.held.prefixes.get(replica.name, {}),
                replica.load,
                num_requests=replica.in_flight,
                is_alive=replica in usable,
                is_sure=replica.name in asked.held.sure,
                limit=replica.limit,
            )
            for replica in self._fleet.replicas
        ]
        choice = choose(candidates, asked.held.num_blocks, weights=self._weights, turn=self._turn)
        self._ledger.seconds["score"] += time.perf_counter() - begun
        self._ledger.decided(choice, asked.held.num_blocks)
        return choice


def _nobody(choice: Choice) -> OpenAIError:
    if choice.reason is Reason.FULL:
        return OpenAIError(429, "every replica has all it may have; try again", code="full", headers=_LATER)
    return OpenAIError(503, "no replica is up; try again", code="no_replica", headers=_LATER)


class _Attempt:
    """One replica's try at one request."""

    def __init__(self, replica: Replica, work: Work, ledger: Ledger, reply: Reply) -> None:
        self._replica, self._work, self._ledger, self._reply = replica, work, ledger, reply

    async def make(self, asked: Asked, deadlines: Deadlines) -> Relayed | None:
        """None where the client has its answer, or what the replica said instead of one. Raises ReplicaFailed."""
        answer = await self._replica.client.ask("POST", asked.path, asked.headers, asked.body, deadlines)
        try:
            is_stream = answer.header(b"content-type").startswith(b"text/event-stream")
            is_refusal = answer.status == 429 or answer.status >= 500
            has_begun = is_stream and not is_refusal  # with its head: engines send that before they compute
            first = await answer.first() if has_begun else await answer.read(_MAX_WHOLE)
            headers = [*passed(answer.headers, NOT_ANSWERED), (b"x-kvtier-replica", self._replica.name.encode())]
            if is_refusal:
                return Relayed(answer.status, headers, first)
            self._work.begun()
            self._ledger.answers[self._replica.name, f"{answer.status // 100}xx"] += 1
            if is_stream or len(first) > _MAX_WHOLE:
                await self._reply.begin(answer.status, headers, is_stream=is_stream)
                await self._stream(answer, first)
            else:
                self._ledger.told(first)
                await self._reply.whole(answer.status, headers, first)
            return None
        finally:
            answer.close()

    async def _stream(self, answer: Answer, first: bytes) -> None:
        piece = first
        while piece:
            self._ledger.told(piece)
            await self._reply.write(piece)
            piece = await answer.piece(self._pass_on)
        if not (answer.is_delimited or self._reply.is_done):
            raise ReplicaFailed(Failure.BROKEN, "it hung up, and nothing says that this was all")
        await self._reply.end()

    def _pass_on(self, chunks: bytes) -> bool:
        """What most pieces of a stream are: nothing is waiting before them, and no task need wake for them."""
        if not self._reply.pass_on(chunks):
            return False
        self._ledger.told(chunks)
        return True


def passed(headers: Headers, without: frozenset[bytes]) -> list[tuple[bytes, bytes]]:
    """The headers that go on to the other side; those that `connection` names are of this hop alone, too."""
    named = {name.strip().lower() for key, value in headers if key == b"connection" for name in value.split(b",")}
    return [(name, value) for name, value in headers if name not in without and name not in named]
