"""Stories of benchmarks/router_race.py: what its replicas keep of prompts, what counts as an answer, missing peers."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import router_race
from _race_replica import BLOCK_SIZE, PrefixCache, save_model, tokens_of
from command_rig import program

from kvtier.service.openai import Prompts, chat_of

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def test_a_cache_gives_up_the_end_of_what_was_used_longest_ago() -> None:
    cache = PrefixCache(6)
    first, second = ([start + at for at in range(4 * BLOCK_SIZE + 1)] for start in (0, 1000))
    one, two = cache.names(first), cache.names(second)
    assert len(one) == len(cache.names(first[:-1])) + 1 == 4  # the last token is always computed
    assert cache.use(one) == (0, [])
    assert cache.use(two) == (0, one[:1:-1])  # the tail goes before its head
    assert (cache.num_held(one), cache.num_held(two)) == (2, 4)
    assert cache.use(one[:2]) == (2, [])
    assert cache.use(one)[1] == two[:1:-1]


def test_routers_read_the_tokens_that_replicas_do(tmp_path: Path) -> None:
    save_model(tmp_path)
    prompts = Prompts.open(tmp_path)
    for load in router_race.loads(1.0):
        chat = load.chats[0]
        body = router_race.asked("http://127.0.0.1").body(chat.system, [chat.question], 8)
        body |= {"tools": chat.tools} if chat.tools else {}
        assert prompts.chat(chat_of(body)).token_ids == tokens_of(body)
        assert 2500 < len(tokens_of(body)) < 6000


CHUNK = b"data: {}\n\n"


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (b"200 OK\r\ntransfer-encoding: chunked\r\n\r\na\r\n%s\r\ne\r\ndata: [DONE]\n\n\r\n0\r\n\r\n" % CHUNK, "whole"),
        (b"200 OK\r\ntransfer-encoding: chunked\r\n\r\na\r\n%s\r\n0\r\n\r\n" % CHUNK, "cut"),
        (b"200 OK\r\ntransfer-encoding: chunked\r\n\r\na\r\n%s\r\n" % CHUNK, "cut"),
        (b'200 OK\r\ntransfer-encoding: chunked\r\n\r\n13\r\ndata: {"error": 1}\n\n\r\n0\r\n\r\n', "told"),
        (b"502 Bad Gateway\r\ncontent-length: 2\r\n\r\n{}", "status 502"),
        (b"", "cut"),
    ],
)
def test_an_answer_is_whole_told_or_cut(answer: bytes, outcome: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 " + answer if answer else b"")
        writer.close()

    async def ask(serving: Serve) -> str:
        async with await asyncio.start_server(serving, "127.0.0.1", 0) as server:
            client = router_race.asked(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            answer = await router_race.send(client, router_race.RaceChat(0.0, "", ""))
            await client.close()
            await asyncio.sleep(0.1)  # until it is closed
            return router_race.outcome(answer)

    assert asyncio.run(ask(serve)) == outcome


def test_peers_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    running, missing = router_race.arms({})
    assert list(running) == ["kvtier"]
    assert [row["router"].partition(",")[0] for row in missing] == ["sglang-router", "smg", *["vllm-router"] * 2]
    assert missing[1]["skipped"] == "no program smg: pip install smg in a venv, and give --smg PATH"
    ended = program(router_race.main, "router_race.py", "--quick", "--smg", "/none")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == "router_race: --smg '/none': no program; give the path of one\n"
