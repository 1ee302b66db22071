"""Stories of a cluster whose parts are killed while 32 clients chat: no wrong text, clean errors, nothing left behind.

Every answer is compared with one that was computed without a cache; engines are `--exact`, so that they are the same
bits. The parts are processes, started by `kvtier cluster` from the compose file: Valkey's three masters, two daemons,
two engines, the router.
"""

import os
import signal
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx2
import openai
import pytest
from cluster_rig import Running, wait_for
from redis_rig import NO_REDIS
from server_rig import MODEL, client, save_checkpoint, serving

from kvtier.service.cli_options import Exit

pytestmark = [
    pytest.mark.skipif(NO_REDIS is not None, reason=NO_REDIS or ""),
    pytest.mark.slow,
    pytest.mark.timeout(300),
]

ROOT: Final = Path(__file__).resolve().parent.parent.parent
NUM_CLIENTS: Final = 32
NUM_TURNS: Final = 2
SMALL: Final = {
    "host__size": "32MiB",
    "file__size": "64MiB",
    "l1__size": "8MiB",
    "cache__load_or_recompute": "load",
}
CLEAN: Final = {429, 502, 503, 504}  # what a client may be told instead of an answer

Messages = list[dict[str, str]]


def opening(number: int) -> str:
    """Four topics, each of several blocks; the rest is the client's own."""
    topics = ("The harbour at dawn. ", "A letter from the north. ", "What the miller said. ", "Rain over the hills. ")
    return topics[number % 4] * 8 + f"This is client {number}."


def converse(ask: Callable[[Messages], str], number: int) -> list[str]:
    """A client's whole conversation: the answer of each turn, told back in the next."""
    messages: Messages = [{"role": "user", "content": opening(number)}]
    answers = []
    for _ in range(NUM_TURNS):
        answers.append(ask(messages))
        messages += [{"role": "assistant", "content": answers[-1]}, {"role": "user", "content": "And then?"}]
    return answers


@dataclass
class Cluster:
    """The processes, and the right answers."""

    running: Running
    right: Sequence[list[str]]  # by client and turn

    def url(self, offset: int) -> str:
        return f"http://127.0.0.1:{self.running.port + offset}"

    def page(self, offset: int, path: str = "/status") -> Any:
        return httpx2.get(self.url(offset) + path, timeout=30, trust_env=False).json()

    def num_stored(self, node: int) -> int:
        """Blocks that a daemon has written to Valkey."""
        return sum(each["stored"].get("redis", 0) for each in self.page(node)["models"])

    def kill(self, name: str) -> None:
        os.kill(self.running.pids()[name], signal.SIGKILL)

    def mend(self) -> None:
        """Start what was killed; all is well again."""
        up = self.running.up()
        assert up.returncode == Exit.OK, up.stderr
        wait_for(lambda: not self.running.unwell)
        wait_for(lambda: [each["state"] for each in self.page(0)["replicas"]] == ["up", "up"])

    def require_nothing_left(self) -> None:
        """No request is live, no block of L1 is held, no slot below is leased or half filled."""
        wait_for(lambda: all(each["in_flight"] == 0 for each in self.page(0)["replicas"]))
        for engine in (1, 2):
            wait_for(lambda engine=engine: self.page(engine)["requests"]["live"] == 0)  # type: ignore[misc]
            wait_for(lambda engine=engine: len(set(self.page(engine)["l1"].values())) == 1)  # type: ignore[misc]
        for node in (11, 12):
            wait_for(lambda node=node: self._is_idle(node))  # type: ignore[misc]

    def _is_idle(self, node: int) -> bool:
        states = [each["l2"] for each in self.page(node)["models"]]
        return not any(each.get("leased") or each.get("filling") or each.get("quarantined") for each in states)


@dataclass
class Chatting:
    """32 clients that go on with their conversations, over and over, until the block ends."""

    cluster: Cluster
    answers: Counter[int] = field(default_factory=Counter)  # right ones, by client
    errors: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    cached: int = 0  # tokens, of answers since `cached` was last set
    _stopping: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> "Chatting":
        self._pool = ThreadPoolExecutor(NUM_CLIENTS)
        self._ends = [self._pool.submit(self._chat, number) for number in range(NUM_CLIENTS)]
        return self

    def __exit__(self, *exception: object) -> None:
        self._stopping.set()
        self._pool.shutdown()
        for end in self._ends:
            end.result()

    def go_on(self, times: int = 2) -> None:
        """Every client is answered so many times from now on."""
        before = Counter(self.answers)
        wait_for(lambda: all(self.answers[n] >= before[n] + times for n in range(NUM_CLIENTS)) or self.wrong)
        assert not self.wrong, self.wrong

    def _chat(self, number: int) -> None:
        with client(self.cluster.url(0)) as api:
            while not self._stopping.is_set():
                for turn in range(NUM_TURNS):
                    self._ask(api, number, turn)

    def _ask(self, api: openai.OpenAI, number: int, turn: int) -> None:
        """One turn, until it is answered; every other client streams."""
        right = self.cluster.right[number]
        messages: Messages = [{"role": "user", "content": opening(number)}]
        for answer in right[:turn]:
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "And then?"}]
        while not self._stopping.is_set():
            said = ""
            try:
                for piece, cached in _stream(api, messages) if number % 2 else _whole(api, messages):
                    said += piece
                    self.cached += cached
            except openai.APIStatusError as error:
                self._failed(str(error.status_code), error.status_code in CLEAN, said, right[turn])
            except openai.APIConnectionError:
                self._failed("connection", True, said, right[turn])
            except openai.APIError:  # in the middle of a stream
                self._failed("stream", True, said, right[turn])
            except httpx2.TransportError:
                self._failed("broken", True, said, right[turn])
            else:
                if said != right[turn]:
                    self.wrong.append(f"client {number}, turn {turn}: {said!r}, not {right[turn]!r}")
                self.answers[number] += 1
                return
            self._stopping.wait(0.1)

    def _failed(self, kind: str, is_clean: bool, said: str, right: str) -> None:
        self.errors[kind] += 1
        if not is_clean or not right.startswith(said):
            self.wrong.append(f"{kind} after {said!r}")


def _create(api: openai.OpenAI, messages: Messages, **more: Any) -> Any:
    create: Any = api.chat.completions.create
    return create(messages=messages, model=MODEL, max_tokens=8, temperature=0, **more)


def _whole(api: openai.OpenAI, messages: Messages) -> Iterator[tuple[str, int]]:
    done = _create(api, messages)
    yield done.choices[0].message.content, done.usage.prompt_tokens_details.cached_tokens


def _stream(api: openai.OpenAI, messages: Messages) -> Iterator[tuple[str, int]]:
    chunks = _create(api, messages, stream=True, stream_options={"include_usage": True})
    ended = False
    for chunk in chunks:
        for choice in chunk.choices:
            yield choice.delta.content or "", 0
        if chunk.usage is not None:
            ended = True
            yield "", chunk.usage.prompt_tokens_details.cached_tokens
    if not ended:
        raise httpx2.RemoteProtocolError("the stream ended before its end")


def right_answers(model: Path) -> list[list[str]]:
    """Computed without a cache, by an engine of the same kind."""
    uncached = {"l1": {"enable_prefix_caching": False}, "server": {"max_num_seqs": 16}}
    with serving(model, exact=True, **uncached) as server, ThreadPoolExecutor(8) as pool:

        def ask(messages: Messages) -> str:
            return next(_whole(server.client, messages))[0]

        return list(pool.map(lambda number: converse(ask, number), range(NUM_CLIENTS)))


@pytest.fixture(scope="module")
def started() -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="kvc-") as directory:
        home = Path(directory)
        model = save_checkpoint(home)
        text = (ROOT / "docker-compose.yml").read_text()
        exact = text.replace("[kvtier, engine, --model", "[kvtier, engine, --exact, --model")
        assert exact.count("--exact") == 2
        (home / "docker-compose.yml").write_text(exact)
        (home / "deploy").symlink_to(ROOT / "deploy")
        chosen = ("--file", str(home / "docker-compose.yml"), "--profile", "cluster", "--model", str(model))
        running = Running(home / "state", *chosen, **SMALL)
        try:
            up = running.up()
            assert up.returncode == Exit.OK, up.stderr
            yield Cluster(running, right_answers(model))
        finally:
            running.close()


@pytest.fixture
def cluster(started: Cluster) -> Iterator[Cluster]:
    """All well, before and after; nothing is left of any request."""
    started.mend()
    yield started
    started.mend()
    started.require_nothing_left()


def test_an_engine_is_killed(cluster: Cluster) -> None:
    # a prompt that engine-a alone has answered, and that its node has written to Valkey
    messages: Messages = [{"role": "user", "content": "Only one of them knows this story. " * 6}]
    before = cluster.num_stored(11)
    with client(cluster.url(1)) as api:
        done = _create(api, messages)
    wait_for(lambda: cluster.num_stored(11) >= before + done.usage.prompt_tokens // 16)
    with Chatting(cluster) as chatting:
        chatting.go_on()
        cluster.kill("engine-a")
        chatting.go_on()
        # what it had computed is found at the other one, which never saw it
        with client(cluster.url(0)) as api:
            again = _create(api, messages)
        assert again.choices[0].message.content == done.choices[0].message.content
        found = again.usage.prompt_tokens_details.model_dump()["kvtier"]
        assert found["redis"] >= 16 * (done.usage.prompt_tokens // 16 - 1), found
        chatting.go_on()
    # streams that had begun could not be saved, all others were asked anew by the router
    assert set(chatting.errors) <= {"stream", "502"}, chatting.errors
    wait_for(lambda: "engine-a" in cluster.running.unwell)


def test_the_router_is_killed(cluster: Cluster) -> None:
    with Chatting(cluster) as chatting:
        chatting.go_on()
        cluster.kill("router")
        wait_for(lambda: chatting.errors)
        cluster.mend()
        # a new one hears what the engines hold, and sends everybody to it
        chatting.go_on()
        chatting.cached = 0
        chatting.go_on()
        assert chatting.cached > 0
    assert set(chatting.errors) <= {"connection", "broken", "stream", "503"}, chatting.errors


def test_a_master_is_killed(cluster: Cluster) -> None:
    with Chatting(cluster) as chatting:
        chatting.go_on()
        cluster.kill("valkey-2")
        chatting.go_on(3)
    # a third of what nodes share is gone: no client noticed
    assert not chatting.errors


def test_a_daemon_is_killed(cluster: Cluster) -> None:
    with Chatting(cluster) as chatting:
        chatting.go_on()
        cluster.kill("node-a")
        chatting.go_on()
        chatting.cached = 0
        chatting.go_on()
        assert chatting.cached > 0
    # its engine computes what it can't load
    assert not chatting.errors
