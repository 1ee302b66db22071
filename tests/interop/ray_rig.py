"""A real Ray cluster of several nodes' processes on this machine, with an application of ours and its clients."""

import contextlib
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import httpx2
import openai
import ray
from node_rig import free_port
from ray import serve
from ray.cluster_utils import Cluster
from server_rig import save_checkpoint
from transformers import LlamaConfig

from kvtier.service.ray import RayOptions, build

MODEL: Final = "tiny"
_STORE: Final = 100 << 20  # bytes of Ray's own object store, at each node
SLOW: Final = {
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    "RAY_worker_niceness": "0",
}
"""Variables of Ray for a busy machine: its workers have nice 15, and a proxy not ready in 5 s is started anew."""

_PATIENCE: Final = 400.0  # seconds: what takes longer hangs, on however busy a machine


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    replica: str
    num_prompt: int  # tokens
    cached: dict[str, int]  # tokens by tier

    @property
    def num_cached(self) -> int:
        return sum(self.cached.values())


class RayApp:
    """An application on its cluster. Every node but the first has room for one replica."""

    def __init__(self, cluster: Cluster, port: int, **options: Any) -> None:
        self.cluster, self.url, self._options = cluster, f"http://127.0.0.1:{port}", options
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    def deploy(self, **changed: Any) -> None:
        """Run it with these options in place of what it had; returns when Ray Serve says that all replicas run."""
        self._options |= changed
        serve.run(build(RayOptions(**self._options)))

    def ask(self, turns: Sequence[str], *, stream: bool = False) -> Answer:
        """One turn of a conversation: user and assistant by turns, the user first."""
        roles = ("user", "assistant")
        messages: Any = [{"role": roles[at % 2], "content": text} for at, text in enumerate(turns)]
        asked = {"model": MODEL, "messages": messages, "max_tokens": 8, "temperature": 0.0, "logit_bias": {"257": -100}}
        if not stream:
            raw = self.client.chat.completions.with_raw_response.create(**asked)
            told = raw.parse()
            return _answer(told.choices[0].message.content or "", raw.headers, told.usage)
        pieces, usage = [], None
        with self.client.chat.completions.with_streaming_response.create(
            **asked, stream=True, stream_options={"include_usage": True}
        ) as raw:
            for chunk in raw.parse():
                usage = chunk.usage or usage
                pieces += [choice.delta.content or "" for choice in chunk.choices]
            return _answer("".join(pieces), raw.headers, usage)

    def status(self) -> dict[str, Any]:
        """What the ingress tells of its request router."""
        (figures,) = httpx2.get(f"{self.url}/status", timeout=30).raise_for_status().json()["routers"]
        found: dict[str, Any] = figures
        return found

    def num_known(self, medium: str) -> int:
        """Blocks that the request router knows of there, at all replicas."""
        return sum(each["blocks"].get(medium, 0) for each in self.status()["replicas"].values())

    def running(self) -> list[str]:
        """The replicas of which Ray Serve says that they run."""
        deployment = serve.status().applications["default"].deployments["engines"]
        count = deployment.replica_states.get("RUNNING", 0)
        replicas = self.status()["replicas"]
        names = [name for name, told in replicas.items() if told.get("events", {}).get("state") == "live"]
        return names if len(names) == count else []

    def is_up(self) -> bool:
        """Whether all replicas run and answer, whoever routes."""
        app = serve.status().applications["default"]
        return app.status == "RUNNING" and httpx2.get(f"{self.url}/v1/models", timeout=30).is_success

    def require_right(self, answers: "Sequence[tuple[Sequence[str], Answer]]") -> None:
        """The same questions, asked alone, have the same answers: the engine is exact. Of many, some are asked."""
        assert answers
        for turns, answer in answers[:: max(1, len(answers) // 40)]:
            assert self.ask(turns).text == answer.text

    def engines(self) -> list[int]:
        """The pids of the engines' processes; not of another model's on this machine."""
        own = "--model", self._options["model"]
        return pids(lambda words: own in pairwise(words))


def _answer(text: str, headers: Any, usage: Any) -> Answer:
    details = usage.prompt_tokens_details
    cached = getattr(details, "kvtier", None) or {"anywhere": details.cached_tokens or 0}  # vLLM tells no tiers
    return Answer(text, headers["x-kvtier-replica"], usage.prompt_tokens, {k: v for k, v in cached.items() if v})


def pids(wanted: Callable[[Sequence[str]], bool]) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if wanted(entry.read_bytes().decode("utf-8", "replace").split("\0")):
                found.append(int(entry.parent.name))
    return found


def vllm_checkpoint(folder: Path) -> Path:
    """A tiny Llama whose tokenizer vLLM takes."""
    config = LlamaConfig(
        hidden_size=128, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        max_position_embeddings=1024,
    )  # fmt: skip
    model = save_checkpoint(folder, config=config)
    settings = model / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "tokenizer_class": "PreTrainedTokenizerFast"}))
    return model


@contextlib.contextmanager
def ray_cluster(num_nodes: int) -> Iterator[Cluster]:
    """A head without room for replicas, and so many nodes with room for one."""
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", **SLOW}
    own = {"include_dashboard": False, "object_store_memory": _STORE}
    before = set(_nodes())  # left by a node that did not start within Ray's own 30 seconds
    cluster = Cluster()
    try:
        cluster.add_node(**own, num_cpus=0)
        for _ in range(num_nodes):
            add_node(cluster)
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
    until(lambda: before.issuperset(_nodes()))


def _nodes() -> list[int]:
    """Processes of Ray's that this process has started, and no other."""
    programs = pids(lambda words: words[0].endswith(("/raylet", "/gcs_server")))
    return [pid for pid in programs if parent(pid) == os.getpid()]


def parent(pid: int) -> int:
    """0 for a process that has ended."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def add_node(cluster: Cluster) -> Any:
    """One more node, with room for one replica."""
    return cluster.add_node(num_cpus=1, object_store_memory=_STORE)


@contextlib.contextmanager
def application(cluster: Cluster, model: Path, **options: Any) -> Iterator[RayApp]:
    """Our application, running; exact answers, so that they are the same whoever gives them."""
    serve.start(http_options={"host": "127.0.0.1", "port": (port := free_port())})
    env = {"KVTIER_HOST__SIZE": "8MiB", "OMP_NUM_THREADS": "1", **options.pop("env", {})}
    app = RayApp(cluster, port, model=str(model), env=env, **{"options": ("--exact",), **options})
    try:
        app.deploy()
        until(app.is_up if "router" in options else app.running)
        yield app
    finally:
        serve.shutdown()
        until(lambda: not app.engines())


def until(condition: Callable[[], object]) -> None:
    """Wait until the condition holds; what the asked cannot answer meanwhile counts as no."""
    end = time.monotonic() + _PATIENCE
    while True:
        with contextlib.suppress(httpx2.HTTPError, KeyError, ValueError):
            if condition():
                return
        assert time.monotonic() < end, f"not within {_PATIENCE:g} s"
        time.sleep(0.25)


@dataclass
class Crowd:
    """Clients that converse until told to stop, each with conversations of its own; what they got is kept."""

    app: RayApp
    size: int
    answers: list[tuple[tuple[str, ...], Answer]] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    _is_over: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> "Crowd":
        self._threads = [threading.Thread(target=self._converse, args=(number,)) for number in range(self.size)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(150)
        assert not any(thread.is_alive() for thread in self._threads), "a client waits for ever"

    def _converse(self, number: int) -> None:
        for talk in range(10_000):
            turns: list[str] = []
            for turn in range(3):
                if self._is_over.is_set():
                    return
                turns.append(f"client {number}, talk {talk}, turn {turn}: " + "what do you remember of it? " * 4)
                try:
                    answer = self.app.ask(turns, stream=bool(number % 2))
                except openai.APIStatusError as error:
                    self.failures[str(error.status_code)] += 1
                    break
                except (openai.APIError, httpx2.HTTPError) as error:
                    self.failures[type(error).__name__] += 1
                    break
                self.answers.append((tuple(turns), answer))
                turns.append(answer.text)


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
