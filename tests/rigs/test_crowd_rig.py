"""What the crowd of clients takes for an answer, for a clean error, and for a fault."""

import asyncio
import json
from contextlib import suppress

import httpx2
import pytest
from crowd_rig import Json, Said, Turn, hear

BODY = Turn("tiny", ({"role": "user", "content": "How deep is it?"},), "six").body(streams=True)
USAGE: Json = {"prompt_tokens_details": {"kvtier": {}}}


def event(text: str = "", reason: str | None = None) -> bytes:
    choice = {"delta": {"content": text}, "finish_reason": reason}
    return b"data: " + json.dumps({"choices": [choice], "usage": USAGE}).encode() + b"\n\n"


ERROR = b'data: {"error": {"message": "gone", "type": "server_error", "param": null, "code": "mid_stream"}}\n\n'
DONE = b"data: [DONE]\n\n"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n"
STREAM = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


def chunked(*events: bytes, is_ended: bool = True) -> bytes:
    pieces = b"".join(f"{len(each):x}\r\n".encode() + each + b"\r\n" for each in events)
    return STREAM + pieces + (b"0\r\n\r\n" if is_ended else b"")


async def told(answer: bytes, *, leaves: bool = False) -> Said:
    served = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.write_eof()
        with suppress(ConnectionError):
            await reader.read()  # until the client has hung up
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
        served.set()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server, asyncio.timeout(60):
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            async with httpx2.AsyncClient(base_url=url, timeout=60, trust_env=False) as http:
                return await hear(http, BODY, leaves=leaves)
        finally:
            await served.wait()


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (chunked(event("si"), event("x", "length"), DONE), Said("six", is_whole=True, usage=USAGE)),
        (chunked(event("si"), ERROR), Said("si", trouble="mid_stream")),
        (chunked(event("si"), is_ended=False), Said("si", trouble="RemoteProtocolError")),
        (b"", Said(trouble="RemoteProtocolError")),
        # as if it were all: what a client could take for a whole answer
        (chunked(event("si")), Said("si", fault="a stream ended like a whole one after 'si'")),
        (chunked(event("six", "length")), Said("six", fault="a stream ended like a whole one after 'six'")),
        (b"HTTP/1.1 500 Oh\r\nContent-Length: 2\r\n\r\noh", Said(fault="500: oh")),
    ],
)
def test_how_a_stream_ends(answer: bytes, expected: Said) -> None:
    assert asyncio.run(told(answer)) == expected


def test_an_end_without_a_reason_or_an_error_of_another_shape_is_not_taken() -> None:
    with pytest.raises(AssertionError):
        asyncio.run(told(chunked(event("six"), DONE)))
    with pytest.raises(AssertionError):
        asyncio.run(told(chunked(event("si"), b'data: {"error": {"message": "gone"}}\n\n')))


def test_one_that_leaves_has_heard_some_words() -> None:
    said = asyncio.run(told(chunked(event(), event("si"), event("x", "length"), DONE), leaves=True))
    assert said == Said("si")
