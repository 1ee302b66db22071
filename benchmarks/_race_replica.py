"""A replica that computes nothing: a bounded prefix cache, prefill that takes its time, KV events as vLLM's.

argv: its port, and JSON: `events` and `replay` (addresses), `blocks` of its cache, `token_us` of prefill, `pace` of an
answer's tokens in seconds. A prompt's tokens are the words of its text, as of the tokenizer that `save_model` writes.
"""

import asyncio
import json
import re
import sys
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import xxhash
import zmq
import zmq.asyncio

BLOCK_SIZE: Final = 16
MODEL: Final = "m"
WORDS: Final = 4096
BASE: Final = 0.004  # seconds of any prefill
KEPT: Final = 10_000  # batches of events that can be sent again
TEMPLATE: Final = (
    "{% for tool in tools or [] %}tool {{ tool | tojson }}\n{% endfor %}"
    "{% for message in messages %}{{ message['role'] }} : {{ message['content'] }}\n{% endfor %}assistant :"
)
_WORD: Final = re.compile(r"\w+|[^\w\s]+")
_KEYS: Final = ("system", "user", "assistant", "tool", "type", "function", "name", "description", "parameters")
VOCABULARY: Final = {word: number for number, word in enumerate(["[UNK]", *_KEYS, *(f"w{i}" for i in range(WORDS))])}
_END: Final = (-1).to_bytes(8, "big", signed=True)
_HEAD: Final = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def save_model(folder: Path) -> None:
    model = {"type": "WordLevel", "vocab": VOCABULARY, "unk_token": "[UNK]"}
    tokenizer: dict[str, Any] = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}}
    tokenizer |= {"model": model, **dict.fromkeys(("normalizer", "post_processor", "decoder"))}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE, "unk_token": "[UNK]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": len(VOCABULARY)}
    (folder / "config.json").write_text(json.dumps(config))


def tokens_of(body: dict[str, Any]) -> list[int]:
    if "messages" in body:
        tools = "".join(f"tool {json.dumps(tool)}\n" for tool in body.get("tools") or ())
        turns = "".join(f"{each['role']} : {each['content']}\n" for each in body["messages"])
        text = f"{tools}{turns}assistant :"
    else:
        text = body["prompt"]
    return [VOCABULARY.get(word, 0) for word in _WORD.findall(text)]


class PrefixCache:
    """Full blocks by name, the one used longest ago first; of one prompt the last block counts as the oldest."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()

    @staticmethod
    def names(tokens: Sequence[int]) -> list[int]:
        """A prompt's blocks: each name covers all that stands before it. The last token is always computed."""
        found, parent = list[int](), 0
        data = array("I", tokens).tobytes()
        for at in range(0, (len(tokens) - 1) // BLOCK_SIZE * BLOCK_SIZE * 4, BLOCK_SIZE * 4):
            parent = xxhash.xxh3_64_intdigest(data[at : at + BLOCK_SIZE * 4], parent)
            found.append(parent)
        return found

    def num_held(self, names: Sequence[int]) -> int:
        return next((at for at, name in enumerate(names) if name not in self._blocks), len(names))

    def use(self, names: Sequence[int]) -> tuple[int, list[int]]:
        """Hold these blocks, or as many as there is room for: how many were held, and the names of what went."""
        names = names[: self._num_blocks]
        num_held = self.num_held(names)
        for name in reversed(names):
            self._blocks[name] = None
            self._blocks.move_to_end(name)
        num_gone = max(0, len(self._blocks) - self._num_blocks)
        return num_held, [self._blocks.popitem(last=False)[0] for _ in range(num_gone)]


class Events:
    def __init__(self, events: str, replay: str) -> None:
        context = zmq.asyncio.Context()
        self._out, self._again = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        self._out.bind(events)
        self._again.bind(replay)
        self._number, self._kept = 0, deque[tuple[bytes, bytes]](maxlen=KEPT)
        self._pack = msgspec.msgpack.Encoder().encode

    async def publish(self, names: list[int], num_held: int, tokens: list[int], gone: list[int]) -> None:
        events: list[dict[str, Any]] = []
        if gone:
            events.append({"type": "BlockRemoved", "block_hashes": gone, "medium": "GPU"})
        if new := names[num_held:]:
            here = tokens[num_held * BLOCK_SIZE : len(names) * BLOCK_SIZE]
            parent = names[num_held - 1] if num_held else None
            stored = {"type": "BlockStored", "block_hashes": new, "parent_block_hash": parent, "token_ids": here}
            events.append({**stored, "block_size": BLOCK_SIZE, "lora_id": None, "medium": "GPU", "lora_name": None})
        if events:
            batch = self._number.to_bytes(8, "big"), self._pack([time.time(), events, 0])
            self._number += 1
            self._kept.append(batch)
            await self._out.send_multipart([b"", *batch])

    async def answer_replays(self) -> None:
        while True:
            who, _, first = await self._again.recv_multipart()
            for number, payload in list(self._kept):
                if number >= first:
                    await self._again.send_multipart([who, b"", b"", number, payload])
            await self._again.send_multipart([who, b"", b"", _END, b""])


class FakeReplica:
    def __init__(self, *, blocks: int, events: str, replay: str, token_us: float, pace: float) -> None:
        self._cache, self.events = PrefixCache(blocks), Events(events, replay)
        self._token_seconds, self._pace = token_us / 1e6, pace
        self._prefill = asyncio.Lock()  # one prompt after the other, first come, first served
        self._live = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                verb, path, _ = head.split(" ", 2)
                length = re.search(r"(?i)content-length: *(\d+)", head)
                body = await reader.readexactly(int(length[1])) if length else b""
                if verb == "POST" and path in ("/v1/chat/completions", "/v1/completions"):
                    self._live += 1
                    try:
                        await self._complete(json.loads(body), writer)
                    finally:
                        self._live -= 1
                else:
                    self._page(path.partition("?")[0], body, writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, ValueError):  # ValueError: HTTP/2, which a router may try
            pass
        finally:
            writer.close()

    def _page(self, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        info = {"model_path": MODEL, "served_model_name": MODEL, "model_id": MODEL, "max_model_len": 1 << 20}
        entry = {"id": MODEL, "object": "model", "owned_by": "vllm", "root": MODEL, "max_model_len": 1 << 20}
        pages: dict[str, Any] = {
            "/health": {},
            "/version": {"version": "0.33.0"},
            "/v1/models": {"object": "list", "data": [entry]},
            **dict.fromkeys(("/get_server_info", "/server_info", "/get_model_info", "/model_info"), info),
            "/get_load": {"load": self._live},
        }
        if path in ("/tokenize", "/v1/chat/completions/render"):
            tokens = tokens_of(json.loads(body))
            pages[path] = {"tokens": tokens, "token_ids": tokens, "count": len(tokens), "max_model_len": 1 << 20}
        _write(writer, pages.get(path), 200 if path in pages else 404)

    async def _complete(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        tokens = tokens_of(body)
        names = self._cache.names(tokens)
        async with self._prefill:
            num_cached = self._cache.num_held(names) * BLOCK_SIZE
            await asyncio.sleep(BASE + (len(tokens) - num_cached) * self._token_seconds)
            num_held, gone = self._cache.use(names)
            await self.events.publish(names, num_held, tokens, gone)
        num_answer = int(body.get("max_tokens") or body.get("max_completion_tokens") or 8)  # sglang-router renames it
        usage: dict[str, Any] = {"prompt_tokens": len(tokens), "completion_tokens": num_answer}
        usage |= {"total_tokens": len(tokens) + num_answer, "prompt_tokens_details": {"cached_tokens": num_cached}}
        kind = {"id": "c", "created": int(time.time()), "model": MODEL}
        if not body.get("stream"):
            message = {"message": {"role": "assistant", "content": "a"}, "text": "a"}
            choice: dict[str, Any] = {"index": 0, **message, "finish_reason": "stop"}
            _write(writer, {**kind, "object": "chat.completion", "choices": [choice], "usage": usage})
            return
        writer.write(_HEAD)
        for number in range(num_answer):
            choice = {"index": 0, "delta": {"content": "a "}, "text": "a ", "finish_reason": None}
            _chunk(writer, {**kind, "object": "chat.completion.chunk", "choices": [choice]})
            await writer.drain()
            if number < num_answer - 1:
                await asyncio.sleep(self._pace)
        _chunk(writer, {**kind, "object": "chat.completion.chunk", "choices": [], "usage": usage})
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")


def _chunk(writer: asyncio.StreamWriter, value: object) -> None:
    data = b"data: " + json.dumps(value).encode() + b"\n\n"
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))


def _write(writer: asyncio.StreamWriter, value: object, status: int = 200) -> None:
    body = json.dumps(value).encode()
    head = f"HTTP/1.1 {status} {'OK' if status == 200 else 'Not Found'}\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)


async def main() -> None:
    replica = FakeReplica(**json.loads(sys.argv[2]))
    server = await asyncio.start_server(replica.serve, "127.0.0.1", int(sys.argv[1]), limit=1 << 24)
    print("ready on", sys.argv[1], flush=True)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(replica.events.answer_replays())
        tasks.create_task(server.serve_forever())


if __name__ == "__main__":
    asyncio.run(main())
