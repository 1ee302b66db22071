"""A replica that does as it is told: an OpenAI server without a model, a process that can be killed.

argv: its port, and as JSON its model's entry in /v1/models. POST /behave sets what it does from then on.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import uvicorn

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

NATURE = json.loads(sys.argv[2])
CACHED = {"cached_tokens": 32, "kvtier": {"L1": 24, "L2": 0, "file": 0, "redis": 8}}
BEHAVIOUR: dict[str, Any] = {}
SEEN: list[dict[str, Any]] = []
ASKED: list[dict[str, Any]] = []  # for tokens


async def app(scope: Message, receive: Receive, send: Send) -> None:
    if scope["type"] != "http":
        return
    path, body = scope["path"], b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    if path == "/behave":
        BEHAVIOUR.clear()
        BEHAVIOUR.update(json.loads(body))
        await _json(send, BEHAVIOUR)
    elif path == "/seen":
        await _json(send, SEEN)
    elif path == "/asked":
        await _json(send, ASKED)
    elif path == "/v1/models":
        await _json(send, {"object": "list", "data": [NATURE, *NATURE.get("adapters", ())]})
    elif path == "/metrics":
        await _json(send, {}, 404)
    elif path == "/status":
        await _json(send, {"requests": {"live": BEHAVIOUR.get("live", 0)}})
    elif path in ("/readyz", "/healthz", "/health"):
        is_there = path == NATURE.get("probe", "/readyz")
        await _json(send, {}, BEHAVIOUR.get("ready", 200) if is_there else 404)
    elif path.endswith(("/render", "/tokenize")):
        await _tokenize(path, body, send)
    elif path.startswith(("/v1/completions", "/v1/chat/")):
        await _complete(scope, json.loads(body), receive, send)
    else:
        await _echo(scope, body, send)


async def _tokenize(path: str, body: bytes, send: Send) -> None:
    """As vLLM's pages: `BEHAVIOUR["tokenizer"]` names those that are there; a text's bytes are its tokens."""
    pages = BEHAVIOUR.get("tokenizer", ())
    if not any(path.endswith(page) for page in pages):
        await _json(send, {}, 404)
        return
    ASKED.append({"path": path, "body": json.loads(body)})
    await asyncio.sleep(BEHAVIOUR.get("tokenizer_wait", 0))
    asked = ASKED[-1]["body"]
    text = asked["prompt"] if "prompt" in asked else json.dumps([asked["messages"], asked.get("tools")])
    await _json(send, {"token_ids" if path.endswith("/render") else "tokens": list(text.encode())})


async def _echo(scope: Message, body: bytes, send: Send) -> None:
    """Any other page: what came, as it came; `?chunks` of it in as many pieces, without a length."""
    headers = {name.decode(): value.decode() for name, value in scope["headers"]}
    query = scope["query_string"].decode()
    SEEN.append({"path": scope["path"], "query": query, "headers": headers, "size": len(body)})
    kind = headers.get("content-type", "").encode()
    if not query.startswith("chunks="):
        lines = [(b"content-type", kind), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": lines})
        await send({"type": "http.response.body", "body": body})
        return
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"audio/mpeg")]})
    for number in range(int(query.removeprefix("chunks="))):
        await send({"type": "http.response.body", "body": body, "more_body": True})
        while BEHAVIOUR.get("gate", number) < number:  # until it is told to go on
            await asyncio.sleep(0.02)
    await send({"type": "http.response.body", "body": b""})


async def _complete(scope: Message, body: dict[str, Any], receive: Receive, send: Send) -> None:
    headers = {name.decode(): value.decode() for name, value in scope["headers"]}
    seen = {"path": scope["path"], "body": body, "headers": headers, "gone": False}
    SEEN.append(seen)
    wait_until = asyncio.get_running_loop().time() + BEHAVIOUR.get("wait", 0.0)
    while asyncio.get_running_loop().time() < wait_until and "wait" in BEHAVIOUR:  # or until it behaves
        await asyncio.sleep(0.02)
    if BEHAVIOUR.get("die"):
        os.kill(os.getpid(), signal.SIGKILL)
    if (status := BEHAVIOUR.get("status", 200)) != 200:
        await _json(send, {"error": {"message": "as told", "type": "told", "param": None, "code": "told"}}, status)
        return
    usage = {"prompt_tokens": 40, "completion_tokens": 3, "prompt_tokens_details": CACHED}
    if not body.get("stream"):
        await _json(send, {"object": "text_completion", "choices": [{"index": 0, "text": "abc"}], "usage": usage})
        return
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    gone, number = asyncio.create_task(_gone(receive)), 0
    while number < BEHAVIOUR.get("events", 3):  # or until it behaves
        choice = {"index": 0, "text": f"{number} ".ljust(BEHAVIOUR.get("size", 0)), "finish_reason": None}
        await _event(send, {"object": "text_completion", "choices": [choice]})
        if (pause := BEHAVIOUR.get("pause", 0.0)) and (await asyncio.wait([gone], timeout=pause))[0]:
            seen["gone"] = True
            return
        if number == BEHAVIOUR.get("die_after"):
            if half := BEHAVIOUR.get("half"):
                await send({"type": "http.response.body", "body": half.encode(), "more_body": True})
                await asyncio.sleep(0.1)
            os.kill(os.getpid(), signal.SIGKILL)
        number += 1
    gone.cancel()
    await _event(send, {"object": "text_completion", "choices": [], "usage": usage})
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": True})
    await asyncio.sleep(BEHAVIOUR.get("linger", 0.0))
    await send({"type": "http.response.body", "body": b""})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _event(send: Send, value: object) -> None:
    data = b"data: " + json.dumps(value).encode() + b"\n\n"
    await send({"type": "http.response.body", "body": data, "more_body": True})


async def _json(send: Send, value: object, status: int = 200) -> None:
    headers = [(b"content-type", b"application/json"), (b"x-kvtier-cached", b"{}")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(value).encode()})


if __name__ == "__main__":
    uvicorn.run(
        app,
        host=NATURE.get("host", "127.0.0.1"),
        port=int(sys.argv[1]),
        ssl_keyfile=NATURE.get("key"),
        ssl_certfile=NATURE.get("certificate"),
        log_level="critical",
        lifespan="off",
        ws="none",
    )
