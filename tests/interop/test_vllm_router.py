"""The router before a real vLLM server: by vLLM's own events a conversation goes where its KV is, to the very token."""

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no vLLM here; run `make test-vllm`")

from chat_shapes import QWEN_3
from node_rig import free_port
from pair_rig import serving
from router_rig import RoutedReplicas, ToldReplica, replicas, routed, until
from server_rig import MODEL, tokenizer
from vllm_rig import BLOCK, make_checkpoint

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that can chat, with tools and reasoning; its tokens are bytes."""
    directory = make_checkpoint("llama", tmp_path_factory.mktemp("models") / MODEL)
    tokenizer().save(str(directory / "tokenizer.json"))
    settings = {"eos_token": "<|end|>", "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": QWEN_3}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


@pytest.fixture(scope="module")
def spec(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with events, as the router is told of it."""
    port, publish, replay = (free_port() for _ in range(3))
    events = {"enable_kv_cache_events": True, "publisher": "zmq"}
    events |= {"endpoint": f"tcp://*:{publish}", "replay_endpoint": f"tcp://*:{replay}"}  # without * it connects
    command = ["vllm", "serve", str(model), "--served-model-name", MODEL, "--port", str(port)]
    command += ["--kv-events-config", json.dumps(events)]
    command += ["--num-gpu-blocks-override", "2000"]  # no story evicts another's blocks
    with serving(command, tmp_path_factory.mktemp("vllm") / "log") as server:
        yield f"{server.url},events=tcp://127.0.0.1:{publish},replay=tcp://127.0.0.1:{replay},block_size={BLOCK}"


class Asked:
    """A router before that server and a replica that says nothing of what it holds."""

    def __init__(self, router: RoutedReplicas, vllm: str) -> None:
        self._router, self._vllm = router, vllm
        self.salt = uuid.uuid4().hex  # all stories use one vLLM: what one has sent, no other finds
        self.num_known = 0  # tokens of the last prompt, as the router knew it

    @property
    def held(self) -> int:
        """Blocks of vLLM's that the router knows of."""
        found: int = self._router.status()["replicas"][0]["blocks"].get("GPU", 0)
        return found

    def until_vllm(self, path: str, **body: Any) -> tuple[Any, str, int]:
        """Ask until vLLM answers and the router knows what vLLM computed: the answer, the reason, what was promised."""
        for _ in range(2):
            before, held = self._router.metrics(), self.held
            asked = {"model": MODEL, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
            asked |= {"cache_salt": self.salt, **body}
            answer = self._router.client.post(path, json=asked)
            assert answer.status_code == 200, answer.text
            if answer.headers["x-kvtier-replica"] == self._vllm:
                now = self._router.metrics()
                prompt, promised = (
                    int(now[name] - before[name])
                    for name in ("kvtier_route_prompt_tokens_total", "kvtier_route_promised_tokens_total")
                )
                self.num_known = prompt
                reason = self._router.status()["decisions"][0]["reason"]
                usage = answer.json()["usage"]  # the last token was sampled and not computed
                expected = held + (usage["total_tokens"] - 1) // BLOCK - whole_blocks(usage) // BLOCK
                until(lambda expected=expected: self.held >= expected)
                return answer.json(), reason, promised
        raise AssertionError("they take turns, and vLLM had none")


@pytest.fixture(params=["by its own tokenizer", "by vLLM's"])
def asked(request: pytest.FixtureRequest, model: Path, spec: str) -> Iterator[Asked]:
    silent: list[ToldReplica]
    own = {"model": str(model)} if request.param == "by its own tokenizer" else {"tokenize_timeout": "60s"}
    with replicas(1, {"id": MODEL, "object": "model"}) as silent, routed(spec, silent[0].url, **own) as router:
        until(lambda: router.status()["replicas"][0]["state"] == "up")
        until(lambda: router.status()["replicas"][0]["events"]["state"] == "live")
        yield Asked(router, spec.partition(",")[0].removeprefix("http://"))


TOOL = {
    "type": "function",
    "function": {"name": "ls", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}},
}


def test_an_agents_chat_is_known_to_the_token(asked: Asked) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You are an agent."},
        {"role": "user", "content": [{"type": "text", "text": "What is"}, {"type": "text", "text": "there?"}]},
    ]
    for number in range(3):
        answer, reason, promised = asked.until_vllm(
            "/v1/chat/completions",
            messages=messages,
            tools=[TOOL],
            tool_choice="none",  # else vLLM wants to know how to read a call; the tools are told all the same
            chat_template_kwargs={"enable_thinking": False},
        )
        assert asked.num_known == answer["usage"]["prompt_tokens"]
        if number:
            assert reason == "prefix"
            assert promised == whole_blocks(answer["usage"]) > 0
        call = {"id": f"call_{number}", "type": "function", "function": {"name": "ls", "arguments": '{"path": "/é"}'}}
        messages.append({"role": "assistant", "content": None, "reasoning_content": "Look.", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"call_{number}", "content": "nothing, again"})


def whole_blocks(usage: dict[str, Any]) -> int:
    """Cached tokens without those of a block that was reused in part: the router promises whole blocks."""
    return int(usage["prompt_tokens_details"]["cached_tokens"]) // BLOCK * BLOCK


def test_a_chat_with_vllm_stays_with_vllm(asked: Asked) -> None:
    messages = [{"role": "user", "content": "Once upon a time there was a cache that knew what it held. " * 2}]
    answer, _, promised = asked.until_vllm("/v1/chat/completions", messages=messages)
    assert promised == 0
    for _ in range(3):
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        messages.append({"role": "user", "content": "And then what did it say?"})
        answer, reason, promised = asked.until_vllm("/v1/chat/completions", messages=messages)
        assert reason == "prefix"
        assert promised == whole_blocks(answer["usage"]) > 0


def test_a_tenants_prompt_is_that_tenants(asked: Asked) -> None:
    prompt = list(range(3, 203))
    alice, bob = ({"prompt": prompt, "cache_salt": f"{name} {asked.salt}"} for name in ("alice", "bob"))
    asked.until_vllm("/v1/completions", **alice)
    answer, reason, promised = asked.until_vllm("/v1/completions", **alice)
    assert (reason, promised) == ("prefix", 192)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 192
    answer, _, promised = asked.until_vllm("/v1/completions", **bob)
    assert (promised, answer["usage"]["prompt_tokens_details"]["cached_tokens"]) == (0, 0)
