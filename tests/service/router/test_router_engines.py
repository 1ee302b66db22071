"""The router before two real engines: a conversation stays where its KV is, as events say and usage proves."""

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest
from command_rig import kvtier
from node_rig import event_ports
from router_rig import RoutedReplicas, routed, until
from server_rig import BLOCK, MODEL, ServerProcess, client

GREEDY: dict[str, Any] = {"model": MODEL, "max_tokens": 8, "temperature": 0}
STORY = "Once upon a time there was a cache that knew what it held, and told everybody who asked. " * 2


@pytest.fixture
def engines(model: Path) -> Iterator[dict[str, ServerProcess]]:
    """Two, by the name the router gives them; whoever is left at the end must end well."""
    with ExitStack() as stack:
        made = {}
        for _ in range(2):
            publish, replay = event_ports().values()
            told = {"events__publish": publish, "events__replay": replay}
            engine = ServerProcess(model, **told, cache__store_generated="false")  # `heard` counts the prompt's alone
            stack.callback(_end, engine)
            made[engine.url.removeprefix("http://")] = engine
        yield made


def _end(engine: ServerProcess) -> None:
    if engine.process.poll() is None:
        assert engine.end(signal.SIGTERM) == 0, engine.lines


class Conversation:
    """With the official client, through the router or with an engine itself."""

    def __init__(self, stack: ExitStack, url: str, **extra: object) -> None:
        """`stack` closes its client: a socket left open ends the whole run with a warning, whenever it is collected."""
        self.messages: list[Any] = []
        self._client = stack.enter_context(client(url))
        self._extra = {"ignore_eos": True, **extra}

    def say(self, text: str) -> tuple[str, str, Any]:
        """Who answered, what, and the usage; an engine that is asked itself has no name."""
        self.messages.append({"role": "user", "content": text})
        create: Any = self._client.chat.completions.with_raw_response.create
        raw = create(messages=self.messages, extra_body=self._extra, **GREEDY)
        answer = raw.parse()
        said = answer.choices[0].message.content
        self.messages.append({"role": "assistant", "content": said})
        return raw.headers.get("x-kvtier-replica", ""), said, answer.usage


def held(router: RoutedReplicas) -> dict[str, int]:
    return {each["name"]: each["blocks"].get("GPU", 0) for each in router.status()["replicas"]}


def heard(router: RoutedReplicas, replica: str, usage: Any) -> None:
    """The router knows of all the prompt that the replica holds now."""
    until(lambda: held(router)[replica] >= usage.prompt_tokens // BLOCK)


def live(router: RoutedReplicas) -> bool:
    return all((each["events"] or {}).get("state") == "live" for each in router.status()["replicas"])


def test_a_conversation_follows_its_kv_and_survives_a_replica(model: Path, engines: dict[str, ServerProcess]) -> None:
    specs = [engine.url for engine in engines.values()]
    with ExitStack() as stack, routed(*specs, model=str(model)) as router:
        url = f"http://{router.server.address}"
        until(lambda: live(router))

        # the first turn may go anywhere; the second follows it, and all that was promised is had
        talk = Conversation(stack, url)
        home, _, usage = talk.say(STORY)
        heard(router, home, usage)
        for _ in range(3):
            promised = router.metrics()["kvtier_route_promised_tokens_total"]
            before = usage.prompt_tokens
            who, _, usage = talk.say("And then?")
            assert who == home
            assert router.status()["decisions"][0]["reason"] == "prefix"
            cached = usage.prompt_tokens_details.cached_tokens
            assert cached >= before // BLOCK * BLOCK
            # a router is told of whole blocks; that the turn before ended inside one is the replica's own matter
            assert router.metrics()["kvtier_route_promised_tokens_total"] - promised == cached // BLOCK * BLOCK
            heard(router, home, usage)

        # the router says who holds how much of a prompt, and that it knows no reasons
        prompt = {"messages": talk.messages}
        told = httpx2.post(f"{url}/explain", json=prompt, timeout=60).json()
        assert (told["replicas"][0]["replica"], told["block_size"]) == (home, BLOCK)
        assert 0 < told["replicas"][0]["blocks"] <= told["blocks"]
        assert told["lines"][1].startswith(f"{home}: {told['replicas'][0]['blocks']} blocks (")
        assert told["lines"][-1].startswith("A router knows no reasons")
        asked = kvtier("explain", "--url", url, "--request", "chatcmpl-1")
        assert (asked.returncode, "a router knows no requests that ended" in asked.stderr) == (2, True)

        # a tenant's own chains are found by that tenant alone
        salted = Conversation(stack, url, cache_salt="alice")
        where, _, usage = salted.say(STORY)
        assert usage.prompt_tokens_details.cached_tokens == 0
        until(lambda: router.status()["indexed_blocks"] >= 2 * (usage.prompt_tokens // BLOCK))
        again, _, usage = salted.say("And then?")
        assert again == where
        assert usage.prompt_tokens_details.cached_tokens > 0

        # the replica dies: its conversation goes on at the other, which computes it anew, to the same words
        other = next(name for name in engines if name != home)
        cold = Conversation(stack, engines[other].url)
        cold.messages = [dict(message) for message in talk.messages]
        engines[home].process.kill()
        engines[home].end(signal.SIGKILL)
        who, said, _ = talk.say("And then?")
        assert who == other
        assert said == cold.say("And then?")[1]
