"""vLLM's sleep mode: copies end before its KV memory goes, and after waking hits come from the tiers alone.

vLLM has no sleep on a CPU: its worker ignores the call, and its engine does the rest. So here the worker does what that
of vLLM 0.33 does on a GPU: it calls the connector's hooks in that order, and between them the KV memory holds rubbish.
"""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from extent import brief

pytest.importorskip("vllm", reason="no vLLM here; run `make test-vllm`")

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm_rig import before_copies, engine, prompt, said, tiers

from kvtier.connector.vllm.worker import WorkerHalf
from kvtier.tiers.copies.transfer import HostCopyStream
from kvtier.tiers.host.host import HostRegion

pytestmark = pytest.mark.timeout(300)

PROMPTS = [prompt(1, 200), prompt(2, 96), prompt(3, 170)]
CACHED = [192, 95, 160]
KEEP = {"on_reset": "keep"}


def memory(vllm: Any) -> dict[str, torch.Tensor]:
    """The engine's KV, by layer: the very tensors that its kernels use."""
    runner = getattr(vllm, "model_runner", None) or vllm.worker
    layers = runner.vllm_config.compilation_config.static_forward_context
    return {name: layer.kv_cache for name, layer in layers.items()}


@pytest.fixture
def sleeps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The CPU's worker sleeps as a GPU's does. Levels of the sleeps it was told of."""
    levels: list[int] = []

    def sleep(self: CPUWorker, level: int = 1) -> None:
        get_kv_transfer_group().unregister_kv_caches()
        for tensor in memory(self).values():
            tensor.fill_(float("nan"))  # unmapped: whoever reads it now, or later believes it, has rubbish
        levels.append(level)

    def wake_up(self: CPUWorker, tags: list[str] | None = None) -> None:
        for tensor in memory(self).values():
            tensor.zero_()
        get_kv_transfer_group().restore_kv_caches()

    monkeypatch.setattr(CPUWorker, "sleep", sleep)
    monkeypatch.setattr(CPUWorker, "wake_up", wake_up)
    return levels


@pytest.mark.parametrize("level", brief([2], [1, 2]))
def test_tiers_outlive_a_plain_sleep(level: int, model: Path, expected: list[list[int]], sleeps: list[int]) -> None:
    with engine(model, tiers() | KEEP) as vllm:
        assert said(vllm.run(PROMPTS)) == (expected, [0, 0, 0])
        vllm.settle()
        for _ in range(2):
            vllm.llm.sleep(level=level)
            worker = get_kv_transfer_group()._worker
            assert worker._region is None  # no mapping of L2 is left, and so no pinned memory
            vllm.llm.wake_up()
            assert said(vllm.run(PROMPTS)) == (expected, CACHED)
        assert sleeps == [level, level]


def test_by_default_a_sleep_empties_the_tiers(model: Path, expected: list[list[int]], sleeps: list[int]) -> None:
    """vLLM says to the connector of a sleep what it says of new weights."""
    with engine(model, tiers()) as vllm:
        assert said(vllm.run(PROMPTS)) == (expected, [0, 0, 0])
        vllm.settle()
        vllm.llm.sleep(level=1)
        vllm.llm.wake_up()
        assert said(vllm.run(PROMPTS)) == (expected, [0, 0, 0])
        vllm.forget_l1()
        assert said(vllm.run(PROMPTS)) == (expected, CACHED)  # and it keeps what it computes from then on
        assert sleeps == [1]


def test_stores_under_way_end_before_the_memory_goes(
    model: Path, expected: list[list[int]], sleeps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(model, tiers() | KEEP) as vllm:
        with monkeypatch.context() as slow:
            before_copies(slow, lambda _: time.sleep(0.3))
            assert said(vllm.run(PROMPTS)) == (expected, [0, 0, 0])
            assert vllm.half.pending
            vllm.llm.sleep(level=1)
        vllm.llm.wake_up()
        outputs = vllm.run([prompt(4, 40)], 2)  # a step, with which the stores that ended are reported
        assert outputs[0].num_cached_tokens == 0
        vllm.settle()
        assert said(vllm.run(PROMPTS)) == (expected, CACHED)
        assert sleeps == [1]


def test_without_hooks_copies_end_in_step(
    model: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM 0.32 tells the connector's worker nothing of a sleep, and waits for its device alone."""
    made = WorkerHalf.__init__

    def sleepy(self: WorkerHalf, plan: Any, *, settles: bool, **options: Any) -> None:
        assert not settles  # sleep mode is off: vLLM refuses it on a CPU
        made(self, plan, settles=True, **options)

    before_copies(monkeypatch, lambda _: time.sleep(0.1))
    monkeypatch.setattr(WorkerHalf, "__init__", sleepy)
    with engine(model, tiers()) as vllm:
        llm = vllm.llm.llm_engine
        for number, tokens in enumerate(PROMPTS):
            llm.add_request(str(number), {"prompt_token_ids": tokens}, vllm.llm.get_default_sampling_params())
        while llm.has_unfinished_requests():
            llm.step()
            side = get_kv_transfer_group()._worker._side
            assert side is None or not (side._loads or side._stores)


def test_a_copy_older_than_the_pin_does_not_outlive_its_step(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """L2 is pinned in the background. The last piece may be pinned while a thread still copies from pageable memory."""
    made, begun = WorkerHalf.__init__, list[bool]()

    def sleepy(self: WorkerHalf, plan: Any, *, settles: bool, **options: Any) -> None:
        made(self, plan, settles=True, **options)

    def store(self: HostCopyStream, copies: Any, after: object | None = None) -> Any:
        event = self._enqueue("store", copies, after)
        begun.append(True)
        return event

    before_copies(monkeypatch, lambda _: time.sleep(0.3))
    monkeypatch.setattr(WorkerHalf, "__init__", sleepy)
    monkeypatch.setattr(HostCopyStream, "store", store)
    monkeypatch.setattr(HostRegion, "pinned", property(lambda _: bool(begun)))
    with engine(model, tiers()) as vllm:
        llm = vllm.llm.llm_engine
        llm.add_request("0", {"prompt_token_ids": PROMPTS[0]}, vllm.llm.get_default_sampling_params())
        while not begun:
            llm.step()
        side = get_kv_transfer_group()._worker._side
        assert not side._loads
        assert not side._stores
        while llm.has_unfinished_requests():
            llm.step()


def test_a_copy_that_does_not_end_keeps_the_memory_where_it_is(
    model: Path, expected: list[list[int]], sleeps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    with engine(model, tiers() | KEEP) as vllm:
        before_copies(monkeypatch, lambda _: goes_on.wait(60))
        monkeypatch.setattr("kvtier.connector.vllm.worker._DEADLINE", 0.2)
        assert said(vllm.run(PROMPTS)) == (expected, [0, 0, 0])
        with pytest.raises(RuntimeError, match="a copy from or to KV memory has not ended in 0 s, so it must stay"):
            vllm.llm.sleep(level=1)
        assert not sleeps
        goes_on.set()
        vllm.llm.sleep(level=1)
        assert sleeps == [1]
        vllm.llm.wake_up()
        vllm.run([prompt(4, 40)], 2)
        vllm.settle()
        assert said(vllm.run(PROMPTS)) == (expected, CACHED)


def test_other_memory_after_a_sleep_is_where_loads_go(model: Path, expected: list[list[int]]) -> None:
    with engine(model, tiers()) as vllm:
        assert said(vllm.run(PROMPTS)) == (expected, [0, 0, 0])
        vllm.forget_l1()
        connector = get_kv_transfer_group()
        connector.unregister_kv_caches()
        old = memory(vllm)
        new = {name: torch.zeros_like(tensor) for name, tensor in old.items()}
        for name, layer in vllm.worker.vllm_config.compilation_config.static_forward_context.items():
            layer.kv_cache = new[name]
        for tensor in old.values():
            tensor.fill_(float("nan"))
        connector.register_kv_caches(new)
        assert said(vllm.run(PROMPTS)) == (expected, CACHED)
        assert all(bool(torch.isnan(tensor).all()) for tensor in old.values())


def test_nothing_is_copied_while_the_engine_sleeps(model: Path, expected: list[list[int]]) -> None:
    """A step without KV memory, as dummy batches of idle ranks are: its copies fail, and are counted."""
    with engine(model, tiers()) as vllm:
        connector = get_kv_transfer_group()
        connector.unregister_kv_caches()
        connector.unregister_kv_caches()
        assert said(vllm.run(PROMPTS)) == (expected, [0, 0, 0])
        vllm.settle()
        assert vllm.stats()['kvtier_store_dropped_total{tier="l2",reason="copy_failed"}'] > 0
        connector.restore_kv_caches()
        connector.restore_kv_caches()
        vllm.forget_l1()
        assert said(vllm.run(PROMPTS)) == (expected, [0, 0, 0])
        vllm.forget_l1()
        assert said(vllm.run(PROMPTS)) == (expected, CACHED)
