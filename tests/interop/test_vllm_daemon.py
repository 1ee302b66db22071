"""vLLM over the node's daemon: engines share its memory and outlive it, and it them."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from extent import brief

pytest.importorskip("vllm", reason="no vLLM here; run `make test-vllm`")

from node_rig import Node
from test_vllm_processes import CACHED, NUM_BLOCKS, PROMPTS, TWO_RANKS, run
from vllm_rig import BLOCK, engine, greedy, said

from kvtier.connector.scheduler import SchedulerSide

pytestmark = pytest.mark.timeout(300)


def told(daemon: Node) -> dict[str, Any]:
    """An engine's whole configuration: where the daemon is, and patience with it on a machine that has other work."""
    return {"service": daemon.section, "host": {"size": "16MiB"}, "cache": {"prefetch_deadline": "60s"}}


def test_a_second_engine_finds_what_the_first_computed(model: Path, expected: list[list[int]], daemon: Node) -> None:
    with engine(model, told(daemon)) as first:
        assert said(first.run(PROMPTS)) == (expected, [0, 0, 0])
    with engine(model, told(daemon)) as second:
        assert said(second.run(PROMPTS)) == (expected, CACHED)
        assert second.found_in("l2") == sum(CACHED) // BLOCK  # the memory is the daemon's: it outlived the engine


def test_a_daemon_that_dies_costs_hits_and_nothing_else(model: Path, expected: list[list[int]], daemon: Node) -> None:
    with engine(model, told(daemon)) as vllm:
        assert said(vllm.run(PROMPTS)) == (expected, [0, 0, 0])
        vllm.settle()
        daemon.kill()
        assert vllm.llm.llm_engine.reset_prefix_cache()
        assert said(vllm.run(PROMPTS)) == (expected, [0, 0, 0])  # misses: the engine goes on
        daemon.start()
        vllm.until_attached()
        assert vllm.llm.llm_engine.reset_prefix_cache()
        assert said(vllm.run(PROMPTS)) == (expected, CACHED)  # other memory, mapped anew, and the slab is warm
        assert vllm.found_in("file") == sum(CACHED) // BLOCK


def test_an_engine_that_waits_for_nothing_but_the_daemon_leaves_it_the_core(
    model: Path, expected: list[list[int]], daemon: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM steps on and on while a request has no answer; ranks that spin so starved the daemon."""
    waits: list[float] = []
    wait = SchedulerSide.wait

    def noted(self: SchedulerSide, timeout: float) -> None:
        waits.append(timeout)
        wait(self, timeout)

    monkeypatch.setattr(SchedulerSide, "wait", noted)
    with engine(model, told(daemon)) as vllm:
        assert said(vllm.run(PROMPTS)) == (expected, [0, 0, 0])
        vllm.forget_l1()
        llm = vllm.llm.llm_engine
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            waits.clear()
            llm.add_request("waiting", {"prompt_token_ids": PROMPTS[0]}, greedy())
            assert not any(output.finished for _ in range(20) for output in llm.step())
            assert waits
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        end = time.monotonic() + 60
        while not (outputs := [output for output in llm.step() if output.finished]):
            assert time.monotonic() < end
        assert (list(outputs[0].outputs[0].token_ids), outputs[0].num_cached_tokens) == (expected[0], CACHED[0])


@pytest.mark.exhaustive  # three minutes; test_vllm_processes.py has vLLM's own processes
@pytest.mark.timeout(500)  # two starts of three processes each: `run` gives each 200 seconds
@pytest.mark.parametrize("options", brief([TWO_RANKS], [{}, TWO_RANKS]))
def test_workers_in_processes_of_their_own_map_the_daemons_memory(
    model: Path, expected: list[list[int]], daemon: Node, options: dict[str, Any]
) -> None:
    # kill -9, once the daemon has the prompts' blocks: all that it held comes back.
    first = run(model, told(daemon), killed=lambda: daemon.num_written == NUM_BLOCKS, **options)
    assert (first.text, first.cached) == (expected, [0, 0, 0]), first.told
    second = run(model, told(daemon), **options)
    assert (second.text, second.cached) == (expected, CACHED), f"{second.told}\nthe daemon: {daemon.told()}"
    # vLLM counts a prompt as cached even if it was computed since a rank could not load it: the rank says so.
    for lost in ("cannot be mapped here", "they are computed again"):
        assert lost not in first.log + second.log
