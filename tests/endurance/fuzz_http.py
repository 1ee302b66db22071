"""Parsers of what clients and replicas say by HTTP, for fuzz_child.py: a value or a typed error."""

import asyncio
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import h11
from fuzz_maker import CHAT_NAMES, Maker

from kvtier.service.admin import http_app as admin_bodies
from kvtier.service.openai import bodies as openai_bodies
from kvtier.service.openai.errors import OpenAIError
from kvtier.service.openai.prompts import Prompts
from kvtier.service.router import client as router_client
from kvtier.service.router import router as router_prompts
from kvtier.service.router.proxy import WholeEvents
from kvtier.tiers.errors import ConfigError

Target = Callable[[bytes], None]
_OPENAI: Final = (openai_bodies.ChatBody, openai_bodies.CompletionBody)
_ADMIN: Final = tuple(
    getattr(admin_bodies, name)
    for name in (
        "ResetBody",
        "BlocksBody",
        "PinBody",
        "UnpinBody",
        "QuotaBody",
        "ExportBody",
        "ImportBody",
        "TraceBody",
    )
)


def bodies(types: Sequence[type[Any]], parse: Callable[..., Any], error: type[Exception]) -> Target:
    """Bodies of these types: bytes as they are, and objects with the right names."""
    names = sorted({name for each in types for name in each.model_fields} | set(CHAT_NAMES))
    required = {each: [name for name, field in each.model_fields.items() if field.is_required()] for each in types}

    def target(data: bytes) -> None:
        kind = types[data[0] % len(types)] if data else types[0]
        made = json.dumps(Maker(data[2:], names).body(required[kind])).encode()
        for body in (data[2:], made):
            with suppress(error):
                parse(kind, body)

    return target


def prompts(directory: Path) -> Target:
    """What a chat template and a tokenizer are given of bodies that are right."""
    prepared = _prompts(directory)
    names = ("messages", "model", "prompt", *CHAT_NAMES)

    def target(data: bytes) -> None:
        made = Maker(data[1:], names)
        roles = ("user", "assistant", "system", "tool")
        messages = [{"role": roles[i % 4], "content": made.value(2), **made.mapping(1)} for i in range(1 + data[0] % 4)]
        chat = {**made.mapping(2), "model": "m", "messages": messages}
        for path, body in ((router_prompts.CHAT, chat), ("/v1/completions", {"model": "m", "prompt": made.value(2)})):
            known = asyncio.run(router_prompts.read_prompt(path, body, len(data), prepared))
            assert all(type(token) is int for token in known.tokens)

    return lambda data: target(data or b"\0")


def _prompts(directory: Path) -> Prompts:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(alphabet, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}{{ m | tojson }}{% endfor %}"
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return Prompts.open(directory)


def stream(data: bytes) -> None:
    """Server-sent events of a replica: cut after whole ones, nothing lost, nothing changed."""
    cutter, told, rest = WholeEvents(), b"", data
    while rest:
        size = 1 + rest[0] % 50
        told += cutter.cut(rest[:size])
        rest = rest[size:]
    assert told + cutter.tail == data


class _Pipe(asyncio.Transport):
    """What a connection to a replica writes to: nowhere."""

    def writelines(self, list_of_data: Any) -> None:
        """Nobody reads it."""

    def abort(self) -> None:
        """There is nothing to end."""

    def pause_reading(self) -> None:
        """Nothing comes by itself."""

    def resume_reading(self) -> None:
        """Nor is anything waiting."""


def replica(loop: asyncio.AbstractEventLoop) -> Target:
    """A replica's whole answer, head and body, in pieces."""

    async def ask(data: bytes) -> None:
        connection = router_client._ReplicaConnection(router_client.ReplicaClient("127.0.0.1", 1, lambda: None))
        connection.connection_made(_Pipe())
        connection.send(h11.Request(method="GET", target="/", headers=[("host", "x")]), b"")
        step = 1 + data[0] % 99 if data else 1
        said = b"HTTP/1.1 200 OK\r\n" + data[1:] if data[:1] < b"\x80" else data[1:]
        for at in range(0, len(said), step):
            connection.data_received(said[at : at + step])
        connection.connection_lost(None)
        with suppress(router_client.ReplicaFailed):
            head = await connection.head(0.0)
            assert 100 <= head.status_code < 1000
            while await connection.piece(0.0, 0.0, router_client.Failure.STALLED):
                pass
        connection.release()

    return lambda data: loop.run_until_complete(ask(data))


TARGETS: Final[dict[str, Callable[[Path], Target]]] = {
    "openai": lambda _: bodies(_OPENAI, openai_bodies.parse, OpenAIError),
    "admin": lambda _: bodies(_ADMIN, admin_bodies.parse, ConfigError),
    "prompts": prompts,
    "replica": lambda _: replica(asyncio.new_event_loop()),
    "stream": lambda _: stream,
}
