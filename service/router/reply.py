"""What the router's client gets: a replica's bytes as they come, or in their place, or after them, a plain error."""

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from kvtier.service.openai_errors import OpenAIError
from kvtier.service.router_client import Headers, Shortcut

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_ENDS: Final = (b"\n\n", b"\r\n\r\n")  # of an event
_DONE: Final = (b"data: [DONE]\n\n", b"data: [DONE]\r\n\r\n")
_DONE_CHUNK: Final = tuple(done + b"\r\n" for done in _DONE)
_MAX_TAIL: Final = 64 << 10  # bytes of an event that has not come to its end
_LAST_WORD: Final = 1.0  # seconds a client may take to read why its stream ends


@dataclass(frozen=True, slots=True)
class Relayed:
    """A replica's answer that is none, and that nobody could better: passed on as it is."""

    status: int
    headers: Headers
    body: bytes


class Reply:
    """One answer by an ASGI `send`: `whole`, or `begin`, `write` …, `end`; `fail` at any time instead.

    `pass_chunks` is the server's way past ASGI, for chunks that need nothing done to them.
    """

    def __init__(self, send: Send, pass_chunks: Shortcut) -> None:
        self.is_begun = False
        self._send, self._pass_chunks = send, pass_chunks
        self._events: WholeEvents | None = None

    @property
    def is_done(self) -> bool:
        """Whether a stream's own last word has passed."""
        return self._events is not None and self._events.is_done

    async def whole(self, status: int, headers: Headers, body: bytes) -> None:
        """All at once."""
        await self.begin(status, [*headers, (b"content-length", b"%d" % len(body))], is_stream=False)
        await self._body(body, more=False)

    async def begin(self, status: int, headers: Headers, *, is_stream: bool) -> None:
        """The head. From here on nobody else can answer."""
        self.is_begun = True
        self._events = WholeEvents() if is_stream else None
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, piece: bytes) -> None:
        """More of the body, as the replica sent it."""
        whole = piece if self._events is None else self._events.cut(piece)
        if whole:
            await self._body(whole, more=True)

    def pass_on(self, chunks: bytes) -> bool:
        """Whole events of a stream, in chunks as the replica sent them. False where they are to be written, instead."""
        if self._events is None or self._events.has_rest or not self._pass_chunks(chunks):
            return False
        self._events.is_done = chunks.endswith(_DONE_CHUNK)
        return True

    async def end(self) -> None:
        """No more of it."""
        await self._body(b"" if self._events is None else self._events.rest(), more=False)

    async def fail(self, error: OpenAIError | Relayed) -> None:
        """Say why there is no answer, or no end to it: as a stream's last event; anything else begun stays without end.

        A server that is left in the middle of an answer hangs up, so that no client takes it for a whole one.
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
    """Cuts a stream of server-sent events after whole ones, so that a word of ours may come after any of them.

    A replica sends whole events: as a rule nothing is held back, and nothing is copied.
    """

    def __init__(self) -> None:
        self.is_done = False  # the stream's own last word has passed
        self._tail = b""

    @property
    def has_rest(self) -> bool:
        """Whether the beginning of an event is held back."""
        return bool(self._tail)

    def cut(self, piece: bytes) -> bytes:
        """What of the stream can be passed on now."""
        data = self._tail + piece if self._tail else piece
        if data.endswith(_ENDS):
            self._tail, self.is_done = b"", data.endswith(_DONE)
            return data
        end = max((data.rfind(mark) + len(mark) for mark in _ENDS if mark in data), default=0)
        if not end and len(data) > _MAX_TAIL:
            end = len(data)
        self._tail = data[end:]
        return data[:end]

    def rest(self) -> bytes:
        """What was held back, once the replica has ended the stream."""
        return self._tail
