"""vllm-router's `kv_aware` policy reads kvtier's events as they are, and knows its tiers: `make test-routers`."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import httpx2
import pytest
from event_rig import until
from node_rig import ROOT, free_port
from router_rig import RawReplica, page
from server_rig import BLOCK, ServerProcess, save_checkpoint
from tokenizers import Tokenizer

from kvtier.service.events.publisher import Publisher
from kvtier.tiers.config.sections import EventsConfig
from kvtier.tiers.hierarchy.hierarchy import Stored
from kvtier.tiers.naming.chain import TokenChain, root_hash
from kvtier.tiers.tier import BlockRecord

PROGRAM: Final = shutil.which("vllm-router", path=f"{ROOT / '.venv-routers' / 'bin'}{os.pathsep}{os.environ['PATH']}")
MODEL: Final = "tiny"
NAMED: Final = b"a model".ljust(32, b".")
ABSENT: Final = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"
PATIENCE: Final = 120.0  # seconds

pytestmark = [
    pytest.mark.skipif(PROGRAM is None, reason="vllm-router is not installed: make test-routers does it"),
    pytest.mark.timeout(600),
]


def text(number: int) -> str:
    """A prompt like no other, of 15 blocks: every byte is a token."""
    return (f"{number:03d} " * 80)[: 15 * BLOCK]


class VllmRouter:
    """The router, in front of replicas by their addresses: url → (events, replay)."""

    def __init__(self, model: Path, replicas: dict[str, tuple[str, str]]) -> None:
        assert PROGRAM is not None
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        command = [PROGRAM, "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
        command += [
            "--log-level",
            "warning",
            "--policy",
            "kv_aware",
            "--kv-event-model",
            MODEL,
            "--kv-event-block-size",
            str(BLOCK),
        ]
        for url, (events, replay) in replicas.items():
            command += ["--kv-event-source", f"{url}={events}", "--kv-event-replay-source", f"{url}={replay}"]
        env = {**os.environ, "VLLM_ROUTER_TOKENIZER": str(model)}
        self._process = subprocess.Popen([*command, "--worker-urls", *replicas], env=env)
        self._client = httpx2.Client(base_url=self.url, timeout=60, trust_env=False)

    def ask(self, prompt: str) -> httpx2.Response:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 2}
        return self._client.post("/v1/completions", json=body).raise_for_status()

    def is_up(self) -> bool:
        assert self._process.poll() is None, "vllm-router has ended"
        try:
            return self._client.get("/health").status_code == 200
        except httpx2.TransportError:
            return False

    def close(self) -> None:
        self._client.close()
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(30)


@contextmanager
def routed(model: Path, replicas: dict[str, tuple[str, str]]) -> Iterator[VllmRouter]:
    router = VllmRouter(model, replicas)
    try:
        until(router.is_up, PATIENCE)
        yield router
    finally:
        router.close()


def test_prompts_go_to_the_engine_that_has_them(tmp_path: Path) -> None:
    """Two real engines. What one of them computed is found there: in its L1, and in the tiers below it."""
    model = save_checkpoint(tmp_path)
    with ExitStack() as stack:
        engines, replicas = list[ServerProcess](), dict[str, tuple[str, str]]()
        for number in range(2):
            addresses = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
            options = dict(zip(("events__publish", "events__replay"), addresses, strict=True))
            slab = {"file__path": str(tmp_path / f"kv-{number}"), "file__size": "16MiB"}
            engines.append(ServerProcess(model, l1__num_blocks="48", events__topic="", **options, **slab))
            stack.callback(engines[-1].end, signal.SIGTERM)
            replicas[engines[-1].url] = addresses[0], addresses[1]
        router = stack.enter_context(routed(model, replicas))
        asked = 0

        def all_are_found() -> bool:
            """Of twelve new prompts that one engine each computed. L1 has room for three; by chance, once in 2^12."""
            nonlocal asked
            asked += 12
            prompts = [text(number) for number in range(asked, asked + 12)]
            for number, prompt in enumerate(prompts):
                engines[number % 2].client.completions.create(model=MODEL, prompt=prompt, max_tokens=2)
            usages = [router.ask(prompt).json()["usage"] for prompt in prompts]
            return all((usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0) for usage in usages)

        until(all_are_found, PATIENCE)


def stored(chain: TokenChain, tier: str) -> Stored:
    blocks = range(len(chain.hashes))
    return Stored(tier, tuple(BlockRecord(chain.hashes[i], chain.parent(i), chain.block_tokens(i), 0) for i in blocks))


class ToldFleet:
    """Two replicas that compute nothing, and publish what they are told to have."""

    def __init__(self, model: Path, stack: ExitStack) -> None:
        self._tokenizer: Any = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._number = 100
        done = {"id": "c", "object": "text_completion", "choices": [{"index": 0, "text": "x", "finish_reason": "stop"}]}
        self.replicas, self._publishers = list[RawReplica](), list[Publisher]()
        addresses = dict[str, tuple[str, str]]()
        for _ in range(2):
            self.replicas.append(RawReplica(lambda path, _: page(done) if path == "/v1/completions" else ABSENT))
            self.replicas[-1].pages["/v1/models"] = {"object": "list", "data": [{"id": MODEL, "object": "model"}]}
            stack.callback(self.replicas[-1].close)
            publish, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
            config = EventsConfig.model_validate({"publish": publish, "replay": replay, "topic": ""})
            self._publishers.append(stack.enter_context(Publisher(config)))
            addresses[f"http://{self.replicas[-1].name}"] = publish, replay
        self.router = stack.enter_context(routed(model, addresses))

    def choice(self, tiers: tuple[str, str]) -> int:
        """Which replica gets a new prompt that each has in that tier, or nowhere."""
        self._number += 1
        prompt = text(self._number)
        tokens = self._tokenizer.encode(prompt).ids
        chain = TokenChain(root_hash(NAMED), BLOCK)
        chain.extend(tokens)
        for publisher, tier in zip(self._publishers, tiers, strict=True):
            if tier:
                publisher.announce(NAMED, [stored(chain, tier)])
                assert publisher.flush(60)
        for each in self.replicas:
            each.pages["/tokenize"] = {"tokens": tokens, "count": len(tokens), "max_model_len": 4096}
        before = self._asked()
        time.sleep(0.2)  # what is published arrives
        self.router.ask(prompt)
        [place] = [i for i, (one, other) in enumerate(zip(before, self._asked(), strict=True)) if one != other]
        return place

    def _asked(self) -> list[int]:
        return [each.asked["/v1/completions"] for each in self.replicas]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToldFleet]:
    with ExitStack() as stack:
        made = ToldFleet(save_checkpoint(tmp_path_factory.mktemp("models")), stack)
        until(lambda: [made.choice(tiers) for tiers in (("l1", ""), ("", "l1")) * 2] == [0, 1, 0, 1], PATIENCE)
        yield made


def test_the_nearer_tier_wins(fleet: ToldFleet) -> None:
    """Each tier against the next one, with either replica in either role; nothing is the farthest."""
    for near, far in pairwise(("l1", "l2", "file", "")):
        until(lambda near=near, far=far: (fleet.choice((near, far)), fleet.choice((far, near))) == (0, 1), 30)


def test_media_that_it_does_not_know_are_the_devices_to_it(fleet: ToldFleet) -> None:
    """So kvtier need not announce what every replica can reach: `[events] shared`."""
    for tier in ("peers", "redis", "objects"):
        until(lambda tier=tier: (fleet.choice((tier, "l2")), fleet.choice(("l2", tier))) == (0, 1), 30)
        until(lambda tier=tier: fleet.choice((tier, "l1")) == fleet.choice(("l1", tier)), 30)
