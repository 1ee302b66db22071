"""The whole cluster as `kvtier cluster` starts it: conversations that go on at another engine, from KV of the first."""

import json
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from cluster_rig import Running, wait_for
from command_rig import kvtier
from extent import brief
from openai import OpenAI
from redis_rig import NO_REDIS
from server_rig import MODEL, save_checkpoint

from kvtier.service.command_line import Exit

pytestmark = pytest.mark.skipif(NO_REDIS is not None, reason=NO_REDIS or "")

SMALL = {
    "host__size": "32MiB",
    "file__size": "64MiB",
    "l1__size": "8MiB",
    "cache__load_or_recompute": "load",  # of so small a model computing is always faster
}


@pytest.fixture
def running() -> Iterator[Running]:
    with tempfile.TemporaryDirectory(prefix="kvc-") as home:
        model = save_checkpoint(Path(home))
        verbs = ("serve", *brief((), ("engine",)), "route")  # one of each is started as `kvtier cluster` starts it
        cluster = Running(Path(home) / "state", "--profile", "cluster", "--model", str(model), by_python=verbs, **SMALL)
        up = cluster.up()
        assert up.returncode == Exit.OK, up.stderr
        yield cluster
        cluster.close()
        assert (model / "config.json").exists()  # a model of the user's is not purged


def chat(client: OpenAI, *turns: str) -> tuple[str, dict[str, Any], str]:
    """The answer to a conversation, its usage, and the replica a router says it is of."""
    roles = ("user", "assistant")
    messages: Any = [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=messages, max_tokens=12, temperature=0)
    answer = raw.parse()
    assert answer.usage is not None
    return answer.choices[0].message.content or "", answer.usage.model_dump(), raw.headers.get("x-kvtier-replica", "")


@pytest.mark.exhaustive  # test_fault_cluster.py has such conversations, and kills beside them
@pytest.mark.timeout(400)
def test_conversations_go_on_at_the_other_engine(running: Running) -> None:
    def url(offset: int) -> str:
        return f"http://127.0.0.1:{running.port + offset}"

    def page(offset: int, path: str) -> Any:
        return httpx2.get(url(offset) + path, timeout=60).json()

    def stored_in_redis(offset: int) -> int:
        models = page(offset, "/status")["models"]
        return sum(each["stored"].get("redis", 0) for each in models)

    assert not running.unwell
    router, *engines = (OpenAI(base_url=f"{url(offset)}/v1", api_key="none", max_retries=0) for offset in (0, 1, 2))
    wait_for(lambda: [each["state"] for each in page(0, "/status")["replicas"]] == ["up", "up"])
    # two conversations begin, one at each engine
    openings = ["The harbour at dawn. " * 24, "A letter from the north. " * 20]
    for place, opening in enumerate(openings):
        answer, usage, _ = chat(engines[place], opening)
        assert usage["prompt_tokens_details"]["cached_tokens"] < 16  # all chats begin alike, inside a block
        blocks = usage["prompt_tokens"] // 16
        wait_for(lambda node=11 + place, blocks=blocks: stored_in_redis(node) >= blocks)  # type: ignore[misc]
        # and go on at the other one, which finds in Valkey what the first has computed
        _, usage, _ = chat(engines[1 - place], opening, answer, "And then?")
        details = usage["prompt_tokens_details"]
        assert details["kvtier"]["redis"] >= 16 * (blocks - 1), usage
        assert details["cached_tokens"] == sum(details["kvtier"].values())
    # at the router such a one is sent to where it is, and the page says why
    wait_for(lambda: all(sum(each["blocks"].values()) for each in page(0, "/status")["replicas"]))
    _, usage, _ = chat(router, openings[0], "Yes.", "And then?")
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0
    decision = page(0, "/status")["decisions"][0]
    assert max(score["cached"] for score in decision["scores"]) > 0, decision
    # some load, as profile `bench` puts on it
    done = kvtier("bench", url(0), "--requests", 8, "--prompt-tokens", 48, "--json")
    assert done.returncode == 0, done.stderr
    (figures,) = json.loads(done.stdout)["servers"]
    assert (figures["requests"], figures["errors"]) == (8, {}), figures
    # one that began at an engine which is killed then goes on at the other, again from what the first has computed
    opening = "A lamp in the window. " * 22
    before = [stored_in_redis(node) for node in (11, 12)]
    answer, usage, replica = chat(router, opening)
    place = int(replica.rpartition(":")[2]) - running.port - 1
    wait_for(lambda: stored_in_redis(11 + place) >= before[place] + usage["prompt_tokens"] // 16)
    victim = ("engine-a", "engine-b")[place]
    os.kill(running.pids()[victim], signal.SIGKILL)
    wait_for(lambda: running.states()[victim] == "dead")
    assert running.unwell == [victim]
    _, usage, replica = chat(router, opening, answer, "And then?")
    assert replica == f"127.0.0.1:{running.port + 2 - place}"
    assert usage["prompt_tokens_details"]["kvtier"]["redis"] > 0, usage
