"""Drives the load: sessions begin at a rate or as many at once as asked for, on one server or on two by turns."""

import asyncio
import json
import random
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import httpx2

from kvtier.service.bench.patterns import ScriptedSession
from kvtier.tiers import ConfigError

# --- one server, asked -----------------------------------------------------------------------------------------------

Api = Literal["chat", "completions"]

_CONNECT: Final = 5.0  # seconds
_MOST_ANSWER: Final = 16 << 20  # bytes of one answer, so that a stream without an end is no memory without one
_NO_USAGE: Final = (400, 422)  # what servers answer that know no `stream_options`
_MALFORMED: Final = (ValueError, LookupError, TypeError, AttributeError, RecursionError)


@dataclass(slots=True)
class Answer:
    """What came of one request. Times are in seconds."""

    began: float = 0.0  # after the load's start
    error: str | None = None  # its kind; None: it went well
    ttft: float | None = None  # from the request to the first text
    gaps: list[float] = field(default_factory=list)  # between two pieces of text
    seconds: float = 0.0  # from the request to the end
    text: str = ""
    num_prompt: int | None = None  # tokens; None: the server does not say
    num_cached: int | None = None
    num_output: int | None = None  # None: as many as there were pieces


class Server:
    """One server under load. `close` it."""

    def __init__(self, url: str, *, api: Api, model: str | None, token: str | None, deadline: float) -> None:
        """`url` is http://HOST:PORT, or with a path up to /v1; `deadline` is in seconds for each request."""
        self.url = url.rstrip("/").removesuffix("/v1")
        try:
            given = httpx2.URL(self.url)
            is_url = given.scheme in ("http", "https") and bool(given.host) and (given.port or 0) < 1 << 16
        except httpx2.InvalidURL:
            is_url = False
        if not is_url:
            raise ConfigError(f"URL {url!r}: write it as in http://127.0.0.1:8000")
        self.model = model or ""
        self._api, self._deadline = api, deadline
        self._tells_usage = True
        plain = self.url.startswith("http://")
        self._client = httpx2.AsyncClient(
            base_url=self.url,
            headers={} if token is None else {b"authorization": b"Bearer " + token.encode(errors="surrogateescape")},
            timeout=httpx2.Timeout(deadline, connect=min(_CONNECT, deadline)),
            limits=httpx2.Limits(max_connections=None),
            trust_env=False,
            verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if plain else True,  # certificates take 20 ms to read
        )

    async def find_model(self) -> None:
        """Take the first model it has, unless one was named. ConfigError if it does not answer, or has none."""
        if self.model:
            return
        try:
            async with asyncio.timeout(self._deadline), self._client.stream("GET", "/v1/models") as answer:
                if answer.status_code != 200:
                    fix = "check the URL, and --token if it wants one"
                    raise ConfigError(f"{self.url}/v1/models: status {answer.status_code}; {fix}")
                lines = [line async for line in _lines(answer)]
            names = [each["id"] for each in json.loads("\n".join(lines))["data"]]
        except TimeoutError:
            raise ConfigError(f"{self.url}: no answer within {self._deadline:g} s; is the server up?") from None
        except (httpx2.HTTPError, httpx2.InvalidURL, OverflowError) as error:
            raise ConfigError(f"{self.url}: {str(error) or type(error).__name__}; is the server up?") from None
        except _MALFORMED:
            names = [None]
        if not names:
            raise ConfigError(f"{self.url}: it has no model; start one, or name it with --model")
        if not isinstance(names[0], str):
            raise ConfigError(f"{self.url}/v1/models: not an OpenAI server's answer; check the URL")
        self.model = names[0]

    async def ask(self, system: str, said: Sequence[str], max_tokens: int) -> Answer:
        """Ask; `said` are the user's texts and the answers in turns. Raises nothing but a cancellation."""
        answer, began = Answer(), time.perf_counter()
        try:
            async with asyncio.timeout(self._deadline):
                await self._stream(self._body(system, said, max_tokens), answer, began)
        except TimeoutError:
            answer.error = f"no end within {self._deadline:g} s"
        except httpx2.ConnectError:
            answer.error = "connection refused"
        except httpx2.TimeoutException:
            answer.error = "no answer in time"
        except (httpx2.HTTPError, httpx2.StreamError):
            answer.error = "connection broken"
        except _MALFORMED:
            answer.error = "malformed answer"
        answer.seconds = time.perf_counter() - began
        return answer

    async def close(self) -> None:
        await self._client.aclose()

    def _body(self, system: str, said: Sequence[str], max_tokens: int) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model, "max_tokens": max_tokens, "temperature": 0, "stream": True}
        if self._tells_usage:
            body["stream_options"] = {"include_usage": True}
        if self._api == "chat":
            roles = ("user", "assistant")
            turns = [{"role": roles[i % 2], "content": text or " "} for i, text in enumerate(said)]
            first = [{"role": "system", "content": system}] if system else []
            return {**body, "messages": [*first, *turns]}
        return {**body, "prompt": "\n".join((system, *said) if system else said)}

    async def _stream(self, body: Mapping[str, Any], answer: Answer, began: float) -> None:
        path = "/v1/chat/completions" if self._api == "chat" else "/v1/completions"
        async with self._client.stream("POST", path, json=body) as response:
            if response.status_code in _NO_USAGE and "stream_options" in body:
                self._tells_usage = False  # asked again without, from here on
            elif response.status_code != 200:
                answer.error = f"status {response.status_code}"
                return
            else:
                await self._read(response, answer, began)
                return
        await self._stream({key: value for key, value in body.items() if key != "stream_options"}, answer, began)

    async def _read(self, response: httpx2.Response, answer: Answer, began: float) -> None:
        last, ended = began, False
        async for line in _lines(response):
            data = line.removeprefix("data:").strip()
            if not line.startswith("data:") or not data:
                continue
            if data == "[DONE]":
                ended = True
                break
            event = json.loads(data)
            if event.get("error") is not None:
                answer.error = "error in the stream"
                return
            _note_usage(answer, event.get("usage"))
            for choice in event.get("choices") or ():
                ended |= choice.get("finish_reason") is not None
                piece = choice.get("text") or (choice.get("delta") or {}).get("content")
                if not piece:
                    continue
                now = time.perf_counter()
                if answer.ttft is None:
                    answer.ttft = now - began
                else:
                    answer.gaps.append(now - last)
                last = now
                answer.text += piece
        if not ended:
            answer.error = "stream cut off"


async def _lines(response: httpx2.Response) -> AsyncIterator[str]:
    """Lines as JSON has them: other separators of lines may stand within one. ValueError past _MOST_ANSWER bytes."""
    begun: list[bytes] = []  # pieces of a line that has no end yet
    num_bytes = 0
    async for piece in response.aiter_bytes():
        num_bytes += len(piece)
        if num_bytes > _MOST_ANSWER:
            raise ValueError(f"more than {_MOST_ANSWER} bytes")
        *ends, rest = piece.split(b"\n")
        for end in ends:
            yield b"".join([*begun, end]).decode()
            begun = []
        begun.append(rest)
    yield b"".join(begun).decode()


def _note_usage(answer: Answer, usage: Any) -> None:
    if not isinstance(usage, Mapping):
        return
    answer.num_prompt, answer.num_output = _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens"))
    details = usage.get("prompt_tokens_details")
    answer.num_cached = _count(details.get("cached_tokens")) if isinstance(details, Mapping) else None


def _count(value: object) -> int | None:
    """A number of tokens; None if the server says none."""
    return value if type(value) is int and 0 <= value < 1 << 53 else None


# --- the load --------------------------------------------------------------------------------------------------------

_MOST_SESSIONS: Final = (
    4096  # sessions under way at once: a server that falls behind at a rate must not take all memory
)


@dataclass(frozen=True, slots=True)
class LoadPace:
    """How fast sessions begin: `concurrency` at once, or `rate` a second on average (Poisson) if that is given."""

    concurrency: int = 4
    rate: float | None = None

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ConfigError(f"--concurrency {self.concurrency}: use a whole number from 1 on")
        if self.rate is not None and not self.rate > 0:
            raise ConfigError(f"rate {self.rate}: use a number of sessions a second above 0")


@dataclass(slots=True)
class MeasuredLoad:
    """All answers of each server, in the order in which they ended."""

    answers: list[list[Answer]]
    seconds: float = 0.0
    is_whole: bool = True  # False: it was interrupted
    in_flight: int = 0  # requests that were under way then
    began: float = field(default_factory=time.perf_counter)


async def drive(
    servers: Sequence[Server],
    sessions: Sequence[ScriptedSession],
    pace: LoadPace,
    done: Callable[[Answer], None],
    seed: int = 0,
) -> MeasuredLoad:
    """Ask everything of every server; `done` is called for each answer. Cancelled, it returns what there is.

    Of two servers each session goes to both, first to the one and then to the other, by turns.
    """
    measured = MeasuredLoad([[] for _ in servers])
    jobs = [
        (number, session)
        for session in sessions
        for number in (range(len(servers)) if session.number % 2 else reversed(range(len(servers))))
    ]
    driver = _Driver(servers, measured, done)
    try:
        if pace.rate is None and all(session.at is None for session in sessions):
            await driver.at_once(jobs, pace.concurrency)
        else:
            await driver.at_rate(jobs, (pace.rate or 1.0) * len(servers), random.Random(seed))
    except asyncio.CancelledError:
        measured.is_whole = False
    measured.seconds = time.perf_counter() - measured.began
    measured.in_flight = driver.in_flight
    return measured


class _Driver:
    def __init__(self, servers: Sequence[Server], measured: MeasuredLoad, done: Callable[[Answer], None]) -> None:
        self.in_flight = 0
        self._servers = servers
        self._measured = measured
        self._done = done

    async def at_once(self, jobs: Sequence[tuple[int, ScriptedSession]], concurrency: int) -> None:
        left = iter(jobs)

        async def work() -> None:
            for number, session in left:
                await self._run(number, session)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(jobs))):
                group.create_task(work())

    async def at_rate(self, jobs: Sequence[tuple[int, ScriptedSession]], rate: float, dice: random.Random) -> None:
        """Each at its time, whether the ones before have ended or not; a trace's sessions at their own times."""
        room, at = asyncio.Semaphore(_MOST_SESSIONS), 0.0

        async def work(number: int, session: ScriptedSession) -> None:
            try:
                await self._run(number, session)
            finally:
                room.release()

        async with asyncio.TaskGroup() as group:
            for number, session in jobs:
                at = session.at if session.at is not None else at + dice.expovariate(rate)
                await asyncio.sleep(max(0.0, self._measured.began + at - time.perf_counter()))
                await room.acquire()
                group.create_task(work(number, session))

    async def _run(self, number: int, session: ScriptedSession) -> None:
        """A session's turns. One that fails ends it: the next turn would have no answer to go on from."""
        said: list[str] = []
        for turn in session.turns:
            if said and turn.wait:
                await asyncio.sleep(turn.wait)
            said.append(turn.text)
            began = time.perf_counter() - self._measured.began
            self.in_flight += 1
            answer = await self._servers[number].ask(session.system, said, turn.max_tokens)
            self.in_flight -= 1
            answer.began = began
            self._measured.answers[number].append(answer)
            self._done(answer)
            if answer.error is not None:
                return
            said.append(answer.text)
