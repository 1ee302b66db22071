"""One OpenAI completion: an engine's updates become choices, stream chunks and usage; or texts are precomputed."""

import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from kvtier.engine import FinishReason, TokenLogprobs
from kvtier.service import Json, openai, request_id
from kvtier.service.engine.loop import EngineLoop, LiveRequest, PromptSource, SequenceInput, SequenceUpdate
from kvtier.service.openai import AnswerPart, MessagesBody, OpenAIError, ResponsesBody, ToolCall

# --- how likely an answer's tokens were ------------------------------------------------------------------------------

_LEAST: Final = -9999.0  # JSON has no infinity; OpenAI and vLLM write this


class ChatLogprobs:
    """Of one choice of a chat: each token with its bytes, and the likeliest in its place. Each is sent once."""

    def __init__(self, texts: openai.TokenTexts) -> None:
        self._texts = texts
        self._content: list[Json] = []

    def add(self, token: TokenLogprobs) -> None:
        likeliest = [self._entry(*each) for each in token.likeliest]
        self._content.append({**self._entry(token.token_id, token.logprob), "top_logprobs": likeliest})

    def taken(self) -> Json:
        content, self._content = self._content, []
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> Json:
        text, data = self._texts.of(token_id)
        return {"token": text, "logprob": max(logprob, _LEAST), "bytes": list(data)}


class TextLogprobs:
    """Of one choice of a completion: four lists. `top_logprobs` includes the token itself, as OpenAI's does."""

    def __init__(self, texts: openai.TokenTexts) -> None:
        self._texts = texts
        self._offset = 0  # characters of the tokens so far, each by itself
        self._begin()

    def add(self, token: TokenLogprobs) -> None:
        text = self._note(token.token_id)
        self._logprobs.append(max(token.logprob, _LEAST))
        found: dict[str, float] = {}
        for token_id, logprob in (*token.likeliest, (token.token_id, token.logprob)):
            found.setdefault(text if token_id == token.token_id else self._texts.of(token_id)[0], max(logprob, _LEAST))
        self._likeliest.append(found)

    def add_first(self, token_id: int) -> None:
        self._note(token_id)
        self._logprobs.append(None)
        self._likeliest.append(None)

    def taken(self) -> Json:
        lists = {
            "tokens": self._tokens,
            "token_logprobs": self._logprobs,
            "top_logprobs": self._likeliest,
            "text_offset": self._offsets,
        }
        self._begin()
        return lists

    def _begin(self) -> None:
        self._tokens: list[str] = []
        self._logprobs: list[float | None] = []
        self._likeliest: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def _note(self, token_id: int) -> str:
        text = self._texts.of(token_id)[0]
        self._tokens.append(text)
        self._offsets.append(self._offset)
        self._offset += len(text)
        return text


# --- an answer's text ------------------------------------------------------------------------------------------------


class AnswerText:
    """Tokens in, text out. Holds back text that may begin a stop string until it is certain."""

    def __init__(self, detokenizer: openai.Detokenizer, stops: Sequence[str], min_tokens: int = 0) -> None:
        """`min_tokens`: in the text of so many no stop string is looked for."""
        self._num_free = min_tokens
        self.stopped_by: str | None = None  # the stop string that was found: no more text is sent
        self._detokenizer, self._stops = detokenizer, stops
        self._held = ""

    def push(self, token_id: int) -> str:
        piece = self._detokenizer.push(token_id)
        if self._num_free:
            self._num_free -= 1
            return piece
        return self._release(piece)

    def end(self) -> str:
        ready = self._release(self._detokenizer.end())
        ready, self._held = ready + self._held, ""
        return ready

    def _release(self, piece: str) -> str:
        if self.stopped_by is not None:
            return ""
        text = self._held + piece
        found = min(((at, stop) for stop in self._stops if (at := text.find(stop)) >= 0), default=None)
        if found is not None:
            stopped_at, self.stopped_by = found
            self._held = ""
            return text[:stopped_at]
        num_held = max((openai.overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]


# --- completions -----------------------------------------------------------------------------------------------------

DONE: Final = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Piece:
    index: int
    text: str
    finish_reason: str | None
    is_first: bool
    logprobs: Json | None = None
    calls: tuple[ToolCall, ...] = ()  # of tools
    stopped_by: str | None = None  # the stop string that ended it


@dataclass(frozen=True, slots=True)
class CompletionFormat:
    """The JSON of one kind of completion: object names, and how a piece becomes a choice, whole or in a stream."""

    prefix: str
    whole: str
    chunk: str
    choice: Callable[[Piece], Json]
    delta: Callable[[Piece], Json]


def _text_choice(piece: Piece) -> Json:
    return {"index": piece.index, "text": piece.text, "logprobs": piece.logprobs, "finish_reason": piece.finish_reason}


def _chat_choice(piece: Piece) -> Json:
    message: Json = {"role": "assistant", "content": piece.text or (None if piece.calls else ""), "refusal": None}
    if piece.calls:
        message["tool_calls"] = [call.content for call in piece.calls]
    return {"index": piece.index, "message": message, "logprobs": piece.logprobs, **_end_of(piece)}


def _chat_delta(piece: Piece) -> Json:
    role = {"role": "assistant"} if piece.is_first else {}
    text: Json = {"content": piece.text} if piece.text or (piece.is_first and not piece.calls) else {}
    if piece.calls:
        text["tool_calls"] = [{"index": call.index, **call.content} for call in piece.calls]
    delta = {**role, **text}
    return {"index": piece.index, "delta": delta, "logprobs": piece.logprobs, **_end_of(piece)}


def _end_of(piece: Piece) -> Json:
    """With vLLM's `stop_reason`, if a stop string ended it."""
    stop = {} if piece.stopped_by is None else {"stop_reason": piece.stopped_by}
    return {"finish_reason": piece.finish_reason, **stop}


TEXT: Final = CompletionFormat("cmpl-", "text_completion", "text_completion", _text_choice, _text_choice)
CHAT: Final = CompletionFormat("chatcmpl-", "chat.completion", "chat.completion.chunk", _chat_choice, _chat_delta)


@dataclass(frozen=True, slots=True)
class Echo:
    text: str
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """What the client requested. Lists have one entry for each input; `num_choices` inputs share a prompt."""

    model: str
    fingerprint: str
    inputs: Sequence[SequenceInput]
    texts: Sequence[AnswerText]
    logprobs: Sequence[ChatLogprobs | TextLogprobs | None]
    echoes: Sequence[Echo | None]
    readers: Sequence[openai.CallReader | None]  # of tool calls
    num_choices: int
    deadline: float  # on the event loop's clock
    streams: bool = False
    only_echoes: bool = False  # no token of an answer is sent
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
        share = round(self.num_repaired / self.num_segment, 4) if self.num_segment else 0.0
        reused = {"segment": self.num_segment, "repaired": self.num_repaired, "repair_share": share}
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
    """One request's completion, whole or in chunks. `close` aborts sequences still being computed; idempotent."""

    def __init__(self, request: CompletionRequest, form: CompletionFormat, loop: EngineLoop) -> None:
        """Submits the request. Raises OpenAIError if the engine has no room for it."""
        self.streams = request.streams
        self._wanted = request
        self._form, self._loop = form, loop
        name = f"{form.prefix}{request_id() or 'local'}-{secrets.token_hex(6)}"  # clients may send one id twice
        self._live = LiveRequest(request.inputs, name, request.deadline)
        self._unfinished = set(range(len(request.inputs)))
        self._begun: set[int] = set()
        self._usage = _Usage(
            sum(len(each.prompt.token_ids) for each in request.inputs[:: request.num_choices]),
            any(each.segments or each.segments is None for each in request.inputs),
        )
        self._approximate: dict[int, int] = {}  # by prompt: most tokens that a choice reuses and does not repair
        self._head = {
            "id": name,
            "object": form.whole,
            "created": int(time.time()),
            "model": request.model,
            "system_fingerprint": request.fingerprint,
        }
        self._error: OpenAIError | None = None  # a stream's last event
        loop.submit(self._live)

    @property
    def headers(self) -> dict[str, str]:
        """Where the prompt's KV came from. Valid once the completion has ended; of a stream, at its first event."""
        cached = {} if self.streams else {"x-kvtier-cached": json.dumps(self._usage.cached)}
        num_approximate = sum(self._approximate.values())
        return {**cached, **({"x-kvtier-approximate": str(num_approximate)} if num_approximate else {})}

    async def whole(self) -> Json:
        """All choices at once, as the response's JSON. Raises OpenAIError."""
        pieces: dict[int, list[Piece]] = {index: [] for index in self._unfinished}
        async for piece in self._pieces():
            pieces[piece.index].append(piece)
        choices = []
        for index, each in pieces.items():
            text, calls = "".join(piece.text for piece in each), sum((piece.calls for piece in each), ())
            logprobs = self._taken_logprobs(index)
            choices.append(self._form.choice(replace(each[-1], text=text, calls=calls, logprobs=logprobs)))
        return {**self._head, "choices": choices, "usage": self._usage.content}

    async def chunks(self) -> AsyncIterator[bytes]:
        """Server-sent events. An error before the first is raised; a later one is the last event, without [DONE].

        With segments the first event waits for every choice's first token, which shows what is approximate.
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
                    complete = replace(each, logprobs=self._taken_logprobs(each.index))
                    yield _event({**head, "choices": [self._form.delta(complete)], **usage})
                held.clear()
        except OpenAIError as error:
            if not is_sent:
                raise
            self._error = error
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
        while self._unfinished:
            update = await self._live.next()
            if update.index not in self._unfinished:
                continue  # tokens after a stop string
            text, reason = self._text_of(update)
            parsed, reason = self._parsed(update.index, text, reason)
            if parsed.text or parsed.calls or reason is not None or update.index not in self._begun:
                is_first = update.index not in self._begun
                self._begun.add(update.index)
                stopped_by = None if reason is None else self._wanted.texts[update.index].stopped_by
                yield Piece(update.index, parsed.text, reason, is_first, calls=parsed.calls, stopped_by=stopped_by)

    def _parsed(self, index: int, text: str, reason: str | None) -> tuple[AnswerPart, str | None]:
        """The text and the calls in a piece of an answer's text, and why the answer has ended, if it has."""
        reader = self._wanted.readers[index]
        if reader is None:
            return AnswerPart(text), reason
        parsed = reader.push(text)
        if reason is not None:
            last = reader.end()
            parsed = AnswerPart(parsed.text + last.text, parsed.calls + last.calls)
        is_call = reason == FinishReason.STOP and reader.num_calls
        return parsed, "tool_calls" if is_call else reason

    def _taken_logprobs(self, index: int) -> Json | None:
        logprobs = self._wanted.logprobs[index]
        return None if logprobs is None else logprobs.taken()

    def _begin(self, update: SequenceUpdate, source: PromptSource) -> str:
        """Record what arrives with a choice's first token. Returns the text before it."""
        number, choice = divmod(update.index, self._wanted.num_choices)
        left = source.num_segment - source.num_repaired
        self._approximate[number] = max(left, self._approximate.get(number, 0))
        if not choice:
            self._usage.add(source)
        echo, logprobs = self._wanted.echoes[update.index], self._wanted.logprobs[update.index]
        if echo is not None and isinstance(logprobs, TextLogprobs):
            logprobs.add_first(echo.token_ids[0])
            for position in sorted(source.scores or {}):
                logprobs.add((source.scores or {})[position])
        return "" if echo is None else echo.text

    def _text_of(self, update: SequenceUpdate) -> tuple[str, str | None]:
        """The text that a token adds, and why its choice has ended, if it has."""
        text = self._wanted.texts[update.index]
        sent = "" if update.source is None else self._begin(update, update.source)
        if self._wanted.only_echoes:
            self._unfinished.discard(update.index)
            return sent, FinishReason.LENGTH.value
        self._usage.completion_tokens += 1
        if update.finish_reason is not FinishReason.STOP:  # a stop token has no text
            sent += text.push(update.token_id)
            logprobs = self._wanted.logprobs[update.index]
            if logprobs is not None and update.logprobs is not None:
                logprobs.add(update.logprobs)
        reason = update.finish_reason
        if reason is not None and text.stopped_by is None:
            sent += text.end()
        if text.stopped_by is not None:
            if reason is None:
                self._loop.abort(self._live, [update.index], FinishReason.STOP)
            reason = FinishReason.STOP
        if reason is None:
            return sent, None
        self._unfinished.discard(update.index)
        return sent, reason.value


class TranslatedCompletion(OpenAICompletion):
    """A chat's completion in the form of another API."""

    def __init__(self, request: CompletionRequest, loop: EngineLoop, body: MessagesBody | ResponsesBody) -> None:
        super().__init__(request, CHAT, loop)
        self._body = body

    async def whole(self) -> Json:
        return self._body.whole(await super().whole())

    async def chunks(self) -> AsyncIterator[bytes]:
        """Server-sent events with names. An error behind the first is the last event."""
        stream = self._body.stream_of()
        async for chunk in super().chunks():
            if chunk == DONE:
                events = stream.end()
            elif self._error is not None:
                events = iter([("error", self._body.refused(self._error))])
            else:
                events = stream.push(json.loads(chunk.removeprefix(b"data: ")))
            named = [b"event: %b\n%b" % (name.encode(), _event({"type": name, **each})) for name, each in events]
            if named:
                yield b"".join(named)


def _event(content: Json) -> bytes:
    """One event, in ASCII: some clients treat U+2028 and similar characters as line ends."""
    return b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"


# --- texts computed ahead, to be segments ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PrecomputeRequest:
    model: str
    inputs: Sequence[SequenceInput]
    deadline: float  # on the event loop's clock


class Precomputation:
    """One request's texts on their way through the engine. `close` aborts texts still being computed; idempotent."""

    headers: dict[str, str] = {}  # noqa: RUF012 - always empty

    def __init__(self, request: PrecomputeRequest, loop: EngineLoop) -> None:
        """Submits the texts. Raises OpenAIError if the engine has no room for them."""
        self._wanted = request
        self._loop = loop
        self._live = LiveRequest(request.inputs, f"precompute-{secrets.token_hex(12)}", request.deadline)
        self._unfinished = set(range(len(request.inputs)))
        loop.submit(self._live)

    async def whole(self) -> Json:
        """How many tokens of each text were held and computed, as the response's JSON. Raises OpenAIError."""
        num_held = [0] * len(self._wanted.inputs)
        while self._unfinished:
            update = await self._live.next()
            self._unfinished.discard(update.index)
            if update.source is not None:
                num_held[update.index] = sum(update.source.cached.values())
        lengths = [len(each.prompt.token_ids) for each in self._wanted.inputs]
        texts = [_counts(length, held) for length, held in zip(lengths, num_held, strict=True)]
        total = _counts(sum(lengths), sum(num_held))
        return {"object": "precompute", "model": self._wanted.model, **total, "texts": texts}

    def close(self) -> None:
        if self._unfinished:
            self._loop.abort(self._live, list(self._unfinished))
            self._unfinished.clear()


def _counts(num_tokens: int, num_held: int) -> Json:
    return {"tokens": num_tokens, "held": num_held, "computed": num_tokens - num_held}
