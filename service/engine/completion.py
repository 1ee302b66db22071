"""One OpenAI request from its jobs to its answer: news in, choices, chunks and usage out."""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvtier.engine.sequence import FinishReason
from kvtier.engine.server_loop import EngineLoop, Flight, Job, News
from kvtier.engine.server_text import AnswerText
from kvtier.service.openai_errors import OpenAIError

Json = dict[str, Any]

DONE: Final = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Piece:
    """Some more text of one choice, its end, or both."""

    index: int
    text: str
    finish_reason: str | None
    is_first: bool


@dataclass(frozen=True, slots=True)
class Form:
    """How a kind of answer is written: the names of its objects, and a piece as a choice, whole or in a stream."""

    prefix: str
    whole: str
    chunk: str
    choice: Callable[[Piece], Json]
    delta: Callable[[Piece], Json]


def _text(piece: Piece) -> Json:
    return {"index": piece.index, "text": piece.text, "logprobs": None, "finish_reason": piece.finish_reason}


def _message(piece: Piece) -> Json:
    message = {"role": "assistant", "content": piece.text, "refusal": None}
    return {"index": piece.index, "message": message, "logprobs": None, "finish_reason": piece.finish_reason}


def _delta(piece: Piece) -> Json:
    role = {"role": "assistant"} if piece.is_first else {}
    text = {"content": piece.text} if piece.text or piece.is_first else {}
    return {"index": piece.index, "delta": {**role, **text}, "logprobs": None, "finish_reason": piece.finish_reason}


TEXT: Final = Form("cmpl-", "text_completion", "text_completion", _text, _text)
CHAT: Final = Form("chatcmpl-", "chat.completion", "chat.completion.chunk", _message, _delta)


@dataclass(frozen=True, slots=True)
class Asked:
    """What an answer needs to know of its request: `texts` has one for each job, `num_choices` jobs share a prompt."""

    model: str
    fingerprint: str
    jobs: Sequence[Job]
    texts: Sequence[AnswerText]
    num_choices: int
    deadline: float  # on the event loop's clock
    streams: bool = False
    wants_usage: bool = False  # at a stream's end


@dataclass(slots=True)
class _Usage:
    prompt_tokens: int
    completion_tokens: int = 0
    cached: dict[str, int] = field(default_factory=dict)

    @property
    def content(self) -> Json:
        cached = {"cached_tokens": sum(self.cached.values()), "kvtier": self.cached}
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": cached,
        }


class Answer:
    """One request's answer, whole or chunk by chunk. `close` lets go of what is still computed; idempotent."""

    def __init__(self, asked: Asked, form: Form, loop: EngineLoop) -> None:
        """OpenAIError where the engine has no room for it."""
        self.streams = asked.streams
        self._asked = asked
        self._form = form
        self._loop = loop
        self._flight = Flight(asked.jobs)
        self._unfinished = set(range(len(asked.jobs)))
        self._begun: set[int] = set()
        self._usage = _Usage(sum(len(job.prompt.token_ids) for job in asked.jobs[:: asked.num_choices]))
        self._head = {
            "id": form.prefix + secrets.token_hex(12),
            "object": form.whole,
            "created": int(time.time()),
            "model": asked.model,
            "system_fingerprint": asked.fingerprint,
        }
        loop.submit(self._flight)

    @property
    def cached(self) -> str:
        """Cached prompt tokens by tier, as JSON. Valid at the end."""
        return json.dumps(self._usage.cached)

    async def whole(self) -> Json:
        """All choices at once."""
        texts: dict[int, list[str]] = {index: [] for index in self._unfinished}
        reasons: dict[int, str | None] = {}
        async for piece in self._pieces():
            texts[piece.index].append(piece.text)
            reasons[piece.index] = piece.finish_reason
        ended = [Piece(index, "".join(told), reasons[index], is_first=True) for index, told in texts.items()]
        return {**self._head, "choices": [self._form.choice(piece) for piece in ended], "usage": self._usage.content}

    async def chunks(self) -> AsyncIterator[bytes]:
        """Server-sent events. An error before the first is raised; a later one is the last event, without [DONE]."""
        head = {**self._head, "object": self._form.chunk}
        usage = {"usage": None} if self._asked.wants_usage else {}
        try:
            async for piece in self._pieces():
                yield _event({**head, "choices": [self._form.delta(piece)], **usage})
        except OpenAIError as error:
            if not self._begun:
                raise
            yield _event(error.content)
            return
        if self._asked.wants_usage:
            yield _event({**head, "choices": [], "usage": self._usage.content})
        yield DONE

    def close(self) -> None:
        """Nobody reads it any more."""
        if self._unfinished:
            self._loop.abort(self._flight, list(self._unfinished))
            self._unfinished.clear()

    async def _pieces(self) -> AsyncIterator[Piece]:
        """What can be told, until every choice has ended."""
        while self._unfinished:
            news = await self._next()
            if news.index not in self._unfinished:
                continue  # tokens behind a stop string
            text, reason = self._heard(news)
            if text or reason is not None or news.index not in self._begun:
                piece = Piece(news.index, text, reason, is_first=news.index not in self._begun)
                self._begun.add(news.index)
                yield piece

    async def _next(self) -> News:
        try:
            async with asyncio.timeout_at(self._asked.deadline):
                return await self._flight.next()
        except TimeoutError:
            raise late() from None

    def _heard(self, news: News) -> tuple[str, str | None]:
        """The text a token brought, and why its choice has ended if it has."""
        text = self._asked.texts[news.index]
        self._usage.completion_tokens += 1
        if news.cached is not None and news.index % self._asked.num_choices == 0:
            for tier, num_tokens in news.cached.items():
                self._usage.cached[tier] = self._usage.cached.get(tier, 0) + num_tokens
        told = "" if news.finish_reason is FinishReason.STOP else text.push(news.token_id)  # the stop token is no text
        if news.finish_reason is not None and not text.is_stopped:
            told += text.end()
        if text.is_stopped:
            if news.finish_reason is None:
                self._loop.abort(self._flight, [news.index], FinishReason.STOP)
            self._unfinished.discard(news.index)
            return told, FinishReason.STOP.value
        if news.finish_reason is not None:
            self._unfinished.discard(news.index)
            return told, news.finish_reason.value
        return told, None


def late() -> OpenAIError:
    """The request's time is over."""
    message = "the answer was not there in time; ask for less, or raise [server] request_timeout"
    return OpenAIError(504, message, code="timeout", headers={"x-should-retry": "false"})


def _event(content: Json) -> bytes:
    """In ASCII: some clients take U+2028 and its like for line ends."""
    return b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"
