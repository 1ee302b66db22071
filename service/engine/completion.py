"""One OpenAI completion: it turns the engine's updates into choices, stream chunks and usage."""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvtier.engine import FinishReason
from kvtier.service import Json, request_id
from kvtier.service.engine.loop import EngineLoop, LiveRequest, PromptSource, SequenceInput, SequenceUpdate
from kvtier.service.engine.text import AnswerText
from kvtier.service.openai import OpenAIError

DONE: Final = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Piece:
    index: int
    text: str
    finish_reason: str | None
    is_first: bool


@dataclass(frozen=True, slots=True)
class CompletionFormat:
    """The JSON of one kind of completion: object names, and how a piece becomes a choice, whole or in a stream."""

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


TEXT: Final = CompletionFormat("cmpl-", "text_completion", "text_completion", _text, _text)
CHAT: Final = CompletionFormat("chatcmpl-", "chat.completion", "chat.completion.chunk", _message, _delta)


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """What the client asked for. `texts` has one entry for each input; `num_choices` inputs share a prompt."""

    model: str
    fingerprint: str
    inputs: Sequence[SequenceInput]
    texts: Sequence[AnswerText]
    num_choices: int
    deadline: float  # on the event loop's clock
    streams: bool = False
    wants_usage: bool = False  # at the end of a stream


@dataclass(slots=True)
class _Usage:
    prompt_tokens: int
    has_segments: bool = False
    completion_tokens: int = 0
    cached: dict[str, int] = field(default_factory=dict)
    num_segment: int = 0  # tokens taken from segments, never among the cached ones
    num_repaired: int = 0  # of these: computed anew

    @property
    def content(self) -> Json:
        cached = {"cached_tokens": sum(self.cached.values()), "kvtier": self.cached}
        reused = {"segment": self.num_segment, "repaired": self.num_repaired}
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": cached,
            **({"kvtier": reused} if self.has_segments else {}),
        }

    def add(self, source: PromptSource) -> None:
        for tier, num_tokens in source.cached.items():
            self.cached[tier] = self.cached.get(tier, 0) + num_tokens
        self.num_segment += source.num_segment
        self.num_repaired += source.num_repaired


class OpenAICompletion:
    """One request's completion, whole or chunk by chunk. `close` aborts what is still computed; idempotent."""

    def __init__(self, request: CompletionRequest, form: CompletionFormat, loop: EngineLoop) -> None:
        """Submits the request. Raises OpenAIError if the engine has no room for it."""
        self.streams = request.streams
        self._wanted = request
        self._form = form
        self._loop = loop
        name = f"{form.prefix}{request_id() or 'local'}-{secrets.token_hex(6)}"  # clients may send one id twice
        self._live = LiveRequest(request.inputs, name)
        self._unfinished = set(range(len(request.inputs)))
        self._begun: set[int] = set()
        self._usage = _Usage(
            sum(len(each.prompt.token_ids) for each in request.inputs[:: request.num_choices]),
            any(each.segments for each in request.inputs),
        )
        self._approximate: dict[int, int] = {}  # by prompt: most tokens that a choice reuses and does not repair
        self._head = {
            "id": name,
            "object": form.whole,
            "created": int(time.time()),
            "model": request.model,
            "system_fingerprint": request.fingerprint,
        }
        loop.submit(self._live)

    @property
    def headers(self) -> dict[str, str]:
        """Where the prompt's KV came from. Valid once the completion has ended; of a stream, at its first event."""
        cached = {} if self.streams else {"x-kvtier-cached": json.dumps(self._usage.cached)}
        num_approximate = sum(self._approximate.values())
        return {**cached, **({"x-kvtier-approximate": str(num_approximate)} if num_approximate else {})}

    async def whole(self) -> Json:
        """All choices at once, as the response's JSON. Raises OpenAIError."""
        texts: dict[int, list[str]] = {index: [] for index in self._unfinished}
        reasons: dict[int, str | None] = {}
        async for piece in self._pieces():
            texts[piece.index].append(piece.text)
            reasons[piece.index] = piece.finish_reason
        ended = [Piece(index, "".join(parts), reasons[index], is_first=True) for index, parts in texts.items()]
        return {**self._head, "choices": [self._form.choice(piece) for piece in ended], "usage": self._usage.content}

    async def chunks(self) -> AsyncIterator[bytes]:
        """Server-sent events. An error before the first is raised; a later one is the last event, without [DONE].

        With segments the first event waits for every choice's first token: then it is known what is approximate.
        """
        head = {**self._head, "object": self._form.chunk}
        usage = {"usage": None} if self._wanted.wants_usage else {}
        num_awaited = len(self._wanted.inputs) if self._usage.has_segments else 1
        held: list[Piece] = []
        is_sent = False
        try:
            async for piece in self._pieces():
                held.append(piece)
                if len(self._begun) < num_awaited:
                    continue
                is_sent = True
                for each in held:
                    yield _event({**head, "choices": [self._form.delta(each)], **usage})
                held.clear()
        except OpenAIError as error:
            if not is_sent:
                raise
            yield _event(error.content)
            return
        if self._wanted.wants_usage:
            yield _event({**head, "choices": [], "usage": self._usage.content})
        yield DONE

    def close(self) -> None:
        if self._unfinished:
            self._loop.abort(self._live, list(self._unfinished))
            self._unfinished.clear()

    async def _pieces(self) -> AsyncIterator[Piece]:
        """Text that can be sent, until every choice has ended."""
        while self._unfinished:
            update = await self._next()
            if update.index not in self._unfinished:
                continue  # tokens after a stop string
            text, reason = self._text_of(update)
            if text or reason is not None or update.index not in self._begun:
                piece = Piece(update.index, text, reason, is_first=update.index not in self._begun)
                self._begun.add(update.index)
                yield piece

    async def _next(self) -> SequenceUpdate:
        try:
            async with asyncio.timeout_at(self._wanted.deadline):
                return await self._live.next()
        except TimeoutError:
            raise late() from None

    def _text_of(self, update: SequenceUpdate) -> tuple[str, str | None]:
        """The text that a token adds, and why its choice has ended, if it has."""
        text = self._wanted.texts[update.index]
        self._usage.completion_tokens += 1
        if update.source is not None:
            number, choice = divmod(update.index, self._wanted.num_choices)
            left = update.source.num_segment - update.source.num_repaired
            self._approximate[number] = max(left, self._approximate.get(number, 0))
            if not choice:
                self._usage.add(update.source)
        is_text = update.finish_reason is not FinishReason.STOP  # the stop token is none
        sent = text.push(update.token_id) if is_text else ""
        reason = update.finish_reason
        if reason is not None and not text.is_stopped:
            sent += text.end()
        if text.is_stopped:
            if reason is None:
                self._loop.abort(self._live, [update.index], FinishReason.STOP)
            reason = FinishReason.STOP
        if reason is None:
            return sent, None
        self._unfinished.discard(update.index)
        return sent, reason.value


def late() -> OpenAIError:
    message = "the answer was not there in time; ask for less, or raise [server] request_timeout"
    return OpenAIError(504, message, code="timeout", headers={"x-should-retry": "false"})


def _event(content: Json) -> bytes:
    """One event, in ASCII: some clients take U+2028 and similar characters for line ends."""
    return b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"
