"""What a client of the router receives: a replica's bytes as they come, or a plain error."""

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from kvtier.service.openai import OpenAIError
from kvtier.service.router.client import Headers, Shortcut

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_ENDS: Final = (b"\n\n", b"\r\n\r\n")  # how an event ends
_DONE: Final = (b"data: [DONE]\n\n", b"data: [DONE]\r\n\r\n")
_DONE_CHUNK: Final = tuple(done + b"\r\n" for done in _DONE)
_MAX_TAIL: Final = 64 << 10  # bytes held back of an event that has not ended
_LAST_WORD: Final = 1.0  # seconds a client may take to read the error that ends its stream


@dataclass(frozen=True, slots=True)
class Relayed:
    """A replica's refusal that no other replica could better; passed on as it is."""

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
        """Send more of the body, as the replica sent it."""
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
    """Cuts a stream of server-sent events at the end of events, so that an error event may follow at any point.

    A replica usually sends whole events: then nothing is held back, and nothing is copied.
    """

    def __init__(self) -> None:
        self.is_done = False  # the stream's own last event has passed
        self.tail = b""  # bytes held back: the beginning of an event

    def cut(self, piece: bytes) -> bytes:
        """The part of the stream that can be passed on now."""
        data = self.tail + piece if self.tail else piece
        if data.endswith(_ENDS):
            self.tail, self.is_done = b"", data.endswith(_DONE)
            return data
        end = max((data.rfind(mark) + len(mark) for mark in _ENDS if mark in data), default=0)
        if not end and len(data) > _MAX_TAIL:
            end = len(data)
        self.tail = data[end:]
        return data[:end]
