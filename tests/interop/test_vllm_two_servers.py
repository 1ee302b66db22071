"""Prefill and decode vLLM servers at once, as docs/vllm.md prints them, over Redis and over a daemon; and replicas."""

import json
import time
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="no vLLM here; run `make test-vllm`")

import httpx
from monitoring_rig import asked, labels_of, strays_in
from node_rig import free_port, node
from pair_rig import Server, pair, serving
from redis_rig import NO_REDIS, standalone
from test_vllm_processes import chat_model
from vllm_rig import BLOCK, engine, prompt

from kvtier.tiers.metrics import Metrics

__all__ = ["chat_model"]  # a fixture

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.slow,
    pytest.mark.skipif(NO_REDIS is not None, reason=str(NO_REDIS)),
]

PROMPTS = [prompt(1, 200), prompt(2, 330), prompt(3, 170), prompt(4, 230), prompt(5, 130), prompt(6, 290)]
LOOKED_UP = "vllm:kvtier_lookup_blocks_total"
WHOLE = [len(tokens) // BLOCK * BLOCK for tokens in PROMPTS]


@pytest.fixture(scope="module")
def expected(chat_model: Path) -> list[list[int]]:
    """What a vLLM alone answers."""
    with engine(chat_model) as plain:
        return [plain.text([tokens])[0] for tokens in PROMPTS]


def test_over_redis_the_decode_server_finds_what_the_prefill_server_just_stored(
    chat_model: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    with standalone() as redis:
        changes = {"path/to/checkpoint": str(chat_model), "redis://redis.example:6379": redis.url, "16GiB": "32MiB"}
        with pair(False, changes, tmp_path) as servers:
            for number in (0, 1):
                assert servers.ask(PROMPTS[number]) == (expected[number], WHOLE[number])
            # again, and nothing is in vLLM's own caches: the prefill server loads, the decode server loads
            servers.prefill.forget_l1()
            servers.decode.forget_l1()
            assert servers.ask(PROMPTS[0]) == (expected[0], WHOLE[0])
            # the prefill server dies right behind its answer: what has come is loaded, the rest is computed
            handed = servers.hand_over(PROMPTS[2])
            servers.prefill.kill()
            answer, _ = servers.decode.ask(PROMPTS[2], 16, handed)
            assert answer.tokens == expected[2]
            assert answer.cached in range(0, WHOLE[2] + 1, BLOCK)
            # nobody prefills any more: a proxy sends the prompt as it is
            assert servers.decode.ask(PROMPTS[3], 16)[0] == (expected[3], 0)
            # Redis dies, and a hand-over from before is answered all the same
            redis.kill()
            servers.decode.forget_l1()
            answer, _ = servers.decode.ask(PROMPTS[4], 16, handed)
            assert answer == (expected[4], 0)
            assert servers.decode.ask(PROMPTS[1], 16)[0].tokens == expected[1]
            shows_what_the_dashboard_asks(servers.decode)


def shows_what_the_dashboard_asks(server: Server) -> None:
    """The page has series of what has happened to the server; the others are those that kvtier's metrics can have."""
    ours = {
        f"vllm:{each.name}_total" if each.is_counter else f"vllm:{each.name}": {*each.labels, "engine", "model_name"}
        for each in Metrics().families()
    }
    end = time.monotonic() + 30
    while LOOKED_UP not in (page := labels_of([httpx.get(f"{server.url}/metrics").text])):
        assert time.monotonic() < end, page  # vLLM hears of kvtier's counters once a second, in its steps
        server.ask(PROMPTS[3], 4)
    shown = {name: labels for name, labels in page.items() if name in ours and labels}
    assert shown == {name: ours[name] for name in shown}
    assert not [stray for expression in asked("kvtier-vllm") for stray in strays_in(expression, {**page, **ours})]


@pytest.mark.exhaustive  # test_vllm_daemon.py has a second engine over it
def test_over_one_daemon_the_decode_server_finds_it_in_the_same_memory(
    chat_model: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    with node() as daemon:
        changes = {"path/to/checkpoint": str(chat_model), "/run/kvtier.sock": str(daemon.socket), "16GiB": "16MiB"}
        with pair(True, changes, tmp_path) as servers:
            for number in (0, 1):
                assert servers.ask(PROMPTS[number]) == (expected[number], WHOLE[number])
            # the daemon dies and comes back between prefill and decode
            handed = servers.hand_over(PROMPTS[2])
            daemon.kill()
            answer, _ = servers.decode.ask(PROMPTS[2], 16, handed)
            assert answer.tokens == expected[2]
            daemon.start()
            handed = servers.hand_over(PROMPTS[3])
            answer, _ = servers.decode.ask(PROMPTS[3], 16, handed)
            assert answer.tokens == expected[3]
            # once both have found it again, hand-overs are as before
            end = time.monotonic() + 120
            while (answer := servers.ask(PROMPTS[5])).cached != WHOLE[5]:
                assert answer.tokens == expected[5]
                assert time.monotonic() < end
                servers.prefill.forget_l1()
                servers.decode.forget_l1()
            assert answer.tokens == expected[5]


@pytest.mark.exhaustive
def test_data_parallel_replicas_share_a_daemon(chat_model: Path, expected: list[list[int]], tmp_path: Path) -> None:
    """What one replica of a server computed, the other one loads."""
    with node() as daemon:
        kvtier = {"service": {"socket": str(daemon.socket)}, "host": {"size": "16MiB"}}
        transfer = {"kv_connector": "KVTierConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
        command = ["vllm", "serve", str(chat_model), "--port", str(free_port()), "--data-parallel-size", "2"]
        command += ["--kv-transfer-config", json.dumps({**transfer, "kv_connector_extra_config": kvtier})]
        with serving(command, tmp_path / "log") as server:
            for number in (0, 1):
                first, second = number, 1 - number
                assert server.ask(PROMPTS[number], 16, replica=first)[0] == (expected[number], 0)
                end = time.monotonic() + 60  # its stores are on their way to the daemon's memory
                while (answer := server.ask(PROMPTS[number], 16, replica=second)[0]).cached != WHOLE[number]:
                    assert answer.tokens == expected[number]
                    assert time.monotonic() < end
                    server.forget_l1()
                assert answer.tokens == expected[number]
