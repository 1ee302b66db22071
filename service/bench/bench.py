"""`kvtier bench`: generates load for OpenAI servers, measures them, and shows figures, charts and pages."""

import asyncio
import json
import random
import re
import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any, Final, Literal

import httpx2
import numpy as np

from kvtier.service import Chart, Line, Table
from kvtier.service.traces import TraceLine, load_lines
from kvtier.tiers import ConfigError

# --- generated load --------------------------------------------------------------------------------------------------

Pattern = Literal["shared", "turns", "rag", "agents"]

PATTERNS: Final[tuple[Pattern, ...]] = ("shared", "turns", "rag", "agents")
_WORDS: Final = tuple(  # short English words
    re.findall(
        r"\w+",
        """
        time year people way day man thing woman life child world school state family student group country problem
        hand part place case week company system program question work government number night point home water room
        mother area money story fact month lot right study book eye job word business issue side kind head house
        service friend father power hour game line end member law car city community name president team minute idea
        body information
        """,
    )
)
_PREFIXES: Final = 8  # different shared prefixes, or documents for each one in a prompt
_DOCUMENTS: Final = 3  # in a prompt of the pattern "rag"
_KEPT: Final = 0.75  # share of a first prompt that others share
_MOST: Final = 1 << 20  # for each number of a shape
_MOST_WORDS: Final = 1 << 28  # of all texts, generated before the first request
_TOOL: Final = 4  # a tool's answer, in multiples of a turn's tokens


@dataclass(frozen=True, slots=True)
class ScriptedTurn:
    text: str
    max_tokens: int
    wait: float = 0.0  # seconds after the last answer: a person reads, a tool runs


@dataclass(frozen=True, slots=True)
class ScriptedSession:
    number: int
    system: str  # the beginning of its first prompt
    turns: Sequence[ScriptedTurn]
    at: float | None = None  # seconds from the start, if a trace has times


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of generated load. Words stand for tokens: most tokenizers have one for each of these."""

    pattern: Pattern = "shared"
    num_requests: int = 64
    prompt_tokens: int = 512  # of a session's first prompt
    turn_tokens: int = 64  # added by each further turn
    answer_tokens: int = 32
    num_turns: int = 4  # of "turns" and "agents"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_requests", "prompt_tokens", "turn_tokens", "answer_tokens", "num_turns"):
            if not 1 <= (value := getattr(self, name)) <= _MOST:
                raise ConfigError(
                    f"--{name.removeprefix('num_').replace('_', '-')} {value}: use a whole number from 1 to {_MOST}"
                )
        if (num_words := self.num_requests * max(self.prompt_tokens, _TOOL * self.turn_tokens)) > _MOST_WORDS:
            raise ConfigError(f"--requests {self.num_requests}: {num_words} tokens in all; at most {_MOST_WORDS}")


def sessions_of(shape: Shape) -> list[ScriptedSession]:
    dice = random.Random(shape.seed)
    found, left = list[ScriptedSession](), shape.num_requests
    for session in _sessions(shape, dice):
        turns = session.turns[:left]
        found.append(ScriptedSession(session.number, session.system, turns))
        left -= len(turns)
        if not left:
            break
    return found


def _sessions(shape: Shape, dice: random.Random) -> Iterator[ScriptedSession]:
    kept = int(shape.prompt_tokens * _KEPT)
    own = shape.prompt_tokens - kept
    beginnings = [words(dice, kept) for _ in range(_PREFIXES)]
    documents = [words(dice, kept // _DOCUMENTS) for _ in range(_PREFIXES * _DOCUMENTS)]
    for number in cycle(range(1 << 30)):
        system = dice.choice(beginnings)
        if shape.pattern == "rag":
            system = "\n\n".join(dice.sample(documents, _DOCUMENTS))
        first = ScriptedTurn(words(dice, own), shape.answer_tokens)
        turns = [first]
        for _ in range(min(shape.num_turns, shape.num_requests) - 1 if shape.pattern in ("turns", "agents") else 0):
            is_agents = shape.pattern == "agents"
            text = words(dice, shape.turn_tokens * (_TOOL if is_agents and dice.random() < 0.5 else 1))
            turns.append(ScriptedTurn(f"Tool result:\n{text}" if is_agents else text, shape.answer_tokens))
        yield ScriptedSession(number, system, turns)


def words(dice: random.Random, number: int) -> str:
    return " ".join(dice.choices(_WORDS, k=max(1, number)))


# --- of a trace ------------------------------------------------------------------------------------------------------

_BLOCK: Final = 512  # tokens of a block if the trace does not say
_MOST_TOKENS: Final = 1 << 28  # tokens of all requests: their texts are generated before the first request


def sessions_of_trace(path: Path, num_requests: int, answer_tokens: int, speed: float) -> list[ScriptedSession]:
    """One session for each of the first requests; times are divided by `speed`. ConfigError as `load_lines`."""
    if not speed > 0:
        raise ConfigError(f"speed {speed}: use a number above 0; 2 is twice as fast as the trace")
    lines = load_lines(path, num_requests)
    if (num_tokens := sum(line.input_length for line in lines)) > _MOST_TOKENS:
        fix = f"ask for at most {_MOST_TOKENS}, by fewer --requests"
        raise ConfigError(f"{path}: input_length: {num_tokens} tokens in {len(lines)} requests; {fix}")
    return [_session(number, line, answer_tokens, speed) for number, line in enumerate(lines)]


def _session(number: int, line: TraceLine, answer_tokens: int, speed: float) -> ScriptedSession:
    """A block's words follow from its number. Without times, sessions begin at the requested pace."""
    size, left, texts = line.block_size or _BLOCK, line.input_length, []
    for name in line.hash_ids:
        texts.append(words(random.Random(name), min(size, left)))
        left -= size
        if left <= 0:
            break
    at = line.timestamp / 1000 / speed if line.has_time else None
    return ScriptedSession(number, "", [ScriptedTurn(" ".join(texts), line.output_length or answer_tokens)], at)


# --- one server ------------------------------------------------------------------------------------------------------

Api = Literal["chat", "completions"]

_CONNECT: Final = 5.0  # seconds
_MOST_ANSWER: Final = 16 << 20  # bytes of one answer, bounds the memory of an endless stream
_NO_USAGE: Final = (400, 422)  # statuses of servers that do not know `stream_options`
_MALFORMED: Final = (ValueError, LookupError, TypeError, AttributeError, RecursionError)


@dataclass(slots=True)
class Answer:
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
        """Take its first model, unless one was named. ConfigError if it does not answer, or has none."""
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

    async def ask(self, system: str, texts: Sequence[str], max_tokens: int, **more: object) -> Answer:
        """Send one request, `more` in its body. `texts` alternate: the user's, answers. Raises only a cancellation."""
        answer, began = Answer(), time.perf_counter()
        try:
            async with asyncio.timeout(self._deadline):
                await self._stream({**self.body(system, texts, max_tokens), **more}, answer, began)
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

    def body(self, system: str, texts: Sequence[str], max_tokens: int) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model, "max_tokens": max_tokens, "temperature": 0, "stream": True}
        if self._tells_usage:
            body["stream_options"] = {"include_usage": True}
        if self._api == "chat":
            roles = ("user", "assistant")
            turns = [{"role": roles[i % 2], "content": text or " "} for i, text in enumerate(texts)]
            first = [{"role": "system", "content": system}] if system else []
            return {**body, "messages": [*first, *turns]}
        return {**body, "prompt": "\n".join((system, *texts) if system else texts)}

    async def _stream(self, body: Mapping[str, Any], answer: Answer, began: float) -> None:
        path = "/v1/chat/completions" if self._api == "chat" else "/v1/completions"
        async with self._client.stream("POST", path, json=body) as response:
            if response.status_code in _NO_USAGE and "stream_options" in body:
                self._tells_usage = False  # retried without, as are later requests
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
    """Lines as JSON has them: other line separators may stand within one. ValueError past _MOST_ANSWER bytes."""
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
    return value if type(value) is int and 0 <= value < 1 << 53 else None


# --- the load --------------------------------------------------------------------------------------------------------

_MOST_SESSIONS: Final = 4096  # sessions under way at once: bounds memory if a server falls behind the rate


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
    answers: list[list[Answer]]
    seconds: float = 0.0
    is_whole: bool = True  # False: it was interrupted
    in_flight: int = 0  # requests under way
    began: float = field(default_factory=time.perf_counter)


async def drive(
    servers: Sequence[Server],
    sessions: Sequence[ScriptedSession],
    pace: LoadPace,
    done: Callable[[Answer], None],
    seed: int = 0,
) -> MeasuredLoad:
    """Send all sessions to every server, each server's in turn; if cancelled, it returns what was measured."""
    measured = MeasuredLoad([[] for _ in servers])
    jobs = [
        (number, session)
        for session in sessions
        for number in (range(len(servers)) if session.number % 2 else reversed(range(len(servers))))
    ]

    async def run(number: int, session: ScriptedSession) -> None:
        """A session's turns. A failed one ends it: the next turn would lack its answer."""
        texts: list[str] = []
        for turn in session.turns:
            if texts and turn.wait:
                await asyncio.sleep(turn.wait)
            texts.append(turn.text)
            began = time.perf_counter() - measured.began
            measured.in_flight += 1
            answer = await servers[number].ask(session.system, texts, turn.max_tokens)
            measured.in_flight -= 1
            answer.began = began
            measured.answers[number].append(answer)
            done(answer)
            if answer.error is not None:
                return
            texts.append(answer.text)

    async def work(left: Iterator[tuple[int, ScriptedSession]], room: asyncio.Semaphore | None = None) -> None:
        try:
            for number, session in left:
                await run(number, session)
        finally:
            if room is not None:
                room.release()

    try:
        async with asyncio.TaskGroup() as group:
            if pace.rate is None and all(session.at is None for session in sessions):
                left = iter(jobs)
                for _ in range(min(pace.concurrency, len(jobs))):
                    group.create_task(work(left))
            else:  # each at its time, whether earlier ones have ended or not; a trace's sessions at their own times
                room, at, dice = asyncio.Semaphore(_MOST_SESSIONS), 0.0, random.Random(seed)
                for job in jobs:
                    own = job[1].at
                    at = at + dice.expovariate((pace.rate or 1.0) * len(servers)) if own is None else own
                    await asyncio.sleep(max(0.0, measured.began + at - time.perf_counter()))
                    await room.acquire()
                    group.create_task(work(iter([job]), room))
    except asyncio.CancelledError:
        measured.is_whole = False
    measured.seconds = time.perf_counter() - measured.began
    return measured


# --- figures of the answers ------------------------------------------------------------------------------------------

FORM: Final = 1  # of the JSON: `kvtier_bench`


@dataclass(frozen=True, slots=True)
class Percentiles:
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Percentiles | None":
        return cls(*np.percentile(values, (50, 90, 99)).tolist()) if values else None


@dataclass(frozen=True, slots=True)
class LoadFigures:
    url: str
    model: str
    requests: int
    errors: dict[str, int]  # by kind
    ttft: Percentiles | None
    inter_token: Percentiles | None
    output_tokens: int
    output_tokens_per_second: float
    prompt_tokens: int | None
    cached_tokens: int | None

    @property
    def cached_share(self) -> float | None:
        if self.cached_tokens is None or not self.prompt_tokens:
            return None
        return self.cached_tokens / self.prompt_tokens

    @classmethod
    def of(cls, url: str, model: str, answers: Sequence[Answer], seconds: float) -> "LoadFigures":
        good = [each for each in answers if each.error is None]
        pieces = (
            len(each.gaps) + (each.ttft is not None) if each.num_output is None else each.num_output for each in good
        )
        output = sum(pieces)
        counted = [each for each in good if each.num_prompt is not None]
        cached = [each for each in counted if each.num_cached is not None]
        return cls(
            url,
            model,
            len(answers),
            dict(Counter(each.error for each in answers if each.error is not None)),
            Percentiles.of([each.ttft for each in good if each.ttft is not None]),
            Percentiles.of([gap for each in good for gap in each.gaps]),
            output,
            output / seconds if seconds > 0 else 0.0,
            sum(each.num_prompt or 0 for each in counted) if counted else None,
            sum(each.num_cached or 0 for each in cached) if cached else None,
        )


def rows_of(figures: Sequence[LoadFigures]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        ("requests", *(str(each.requests) for each in figures)),
        ("failed", *(str(sum(each.errors.values())) for each in figures)),
    ]
    for name, label in (("ttft", "TTFT"), ("inter_token", "inter-token")):
        for share in ("p50", "p90", "p99"):
            found = [getattr(each, name) for each in figures]
            texts = ["–" if each is None else f"{getattr(each, share) * 1000:.1f}" for each in found]
            rows.append((f"{label} {share}, ms", *texts))
    rows.append(("output tokens/s", *(f"{each.output_tokens_per_second:.1f}" for each in figures)))
    rows.append(("prompt tokens", *("?" if one.prompt_tokens is None else str(one.prompt_tokens) for one in figures)))
    shares = [each.cached_share for each in figures]
    rows.append(("cached, % of them", *("?" if share is None else f"{100 * share:.1f}" for share in shares)))
    kinds = sorted({kind for each in figures for kind in each.errors})
    rows += [(kind, *(str(each.errors.get(kind, 0)) for each in figures)) for kind in kinds]
    return rows


# --- the whole -------------------------------------------------------------------------------------------------------

_SHARES: Final = np.linspace(0.0, 100.0, 101)


@dataclass(frozen=True, slots=True)
class BenchOptions:
    urls: tuple[str, ...]
    shape: Shape
    pace: LoadPace
    api: Api = "chat"
    model: str | None = None
    token: str | None = None
    deadline: float = 120.0  # seconds for each request
    trace: Path | None = None  # sent instead of a pattern
    speed: float = 1.0  # of the trace


@dataclass(frozen=True, slots=True)
class BenchResult:
    measured: MeasuredLoad
    figures: list[LoadFigures]
    settings: dict[str, Any]

    @property
    def json(self) -> dict[str, Any]:
        measured = self.measured
        return {
            "kvtier_bench": FORM,
            "asked": self.settings,
            "seconds": measured.seconds,
            "is_whole": measured.is_whole,
            "in_flight": measured.in_flight,
            "servers": [{**asdict(each), "cached_share": each.cached_share} for each in self.figures],
            "ttft": [[answer.ttft for answer in answers if answer.error is None] for answers in measured.answers],
        }

    @property
    def table(self) -> Table:
        note = "" if self.measured.is_whole else f"interrupted: {self.measured.in_flight} requests were under way"
        return Table("kvtier bench", ["", *(each.url for each in self.figures)], rows_of(self.figures), note)

    @property
    def charts(self) -> list[Chart]:
        by_server = zip(self.figures, self.measured.answers, strict=True)
        ttfts = [
            (each.url, [one.ttft for one in answers if one.ttft is not None and one.error is None])
            for each, answers in by_server
        ]
        lines = [
            Line(url, (np.percentile(times, _SHARES) * 1000).tolist(), _SHARES.tolist())
            for url, times in ttfts
            if times
        ]
        return [Chart("Time to the first token", "TTFT, ms", "% of requests within", lines, log_x=True)]


def run_bench(options: BenchOptions, begins: Callable[[int], Callable[[], None]]) -> BenchResult:
    """Run the load. `begins` gets the number of requests, and returns what is called after each.

    Ctrl-C ends it early, with the results so far. ConfigError if a server does not answer at the start.
    """
    shape = options.shape  # sessions are made outside of the loop: there Ctrl-C would wait for all of them
    if options.trace is None:
        sessions = sessions_of(shape)
    else:
        sessions = sessions_of_trace(options.trace, shape.num_requests, shape.answer_tokens, options.speed)
    return asyncio.run(_run(options, sessions, begins))


async def _run(
    options: BenchOptions, sessions: list[ScriptedSession], begins: Callable[[int], Callable[[], None]]
) -> BenchResult:
    async with AsyncExitStack() as opened:
        servers = []
        for url in options.urls:
            given = {"api": options.api, "model": options.model, "token": options.token, "deadline": options.deadline}
            server = Server(url, **given)  # type: ignore[arg-type]
            opened.push_async_callback(server.close)
            await server.find_model()
            servers.append(server)
        advance = begins(len(servers) * sum(len(session.turns) for session in sessions))
        measured = await drive(servers, sessions, options.pace, lambda _: advance(), options.shape.seed)
    named = zip(servers, measured.answers, strict=True)
    figures = [LoadFigures.of(each.url, each.model, answers, measured.seconds) for each, answers in named]
    shape, pace = asdict(options.shape), asdict(options.pace)
    how = {"api": options.api, "deadline": options.deadline, "speed": options.speed}
    trace = None if options.trace is None else str(options.trace)
    return BenchResult(measured, figures, {**shape, **pace, **how, "trace": trace})
