"""KV groups of kinds that this machine has no model for, under vLLM's own scheduler: no step reads anything wrong.

Sliding windows smaller than kvtier's block, models of states alone, states beside groups of unequal blocks; with vLLM
scheduling step by step and ahead. `ScriptedRunner` looks at every byte a step would read.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from extent import brief

pytest.importorskip("vllm", reason="no vLLM here; run `make test-vllm`")

import torch
from scripted_runner import ScriptedRunner
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowMLASpec, SlidingWindowSpec
from vllm.v1.request import Request, RequestStatus
from vllm_rig import greedy, make_checkpoint, prompt, tiers

from kvtier.connector.vllm import slot_plan as vllm_slot_plan
from kvtier.tiers.naming import state_name

pytestmark = pytest.mark.timeout(600)

BF16 = torch.bfloat16
FULL = FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=32, dtype=BF16)
WINDOW = SlidingWindowSpec(block_size=16, num_kv_heads=1, head_size=32, dtype=BF16, sliding_window=24)
SHORT = SlidingWindowSpec(block_size=4, num_kv_heads=1, head_size=32, dtype=BF16, sliding_window=8)
REPLAYED = SlidingWindowMLASpec(
    block_size=16, num_kv_heads=1, head_size=64, dtype=BF16, sliding_window=24, bounded_replay=True
)
STATE = MambaSpec(block_size=32, shapes=((4, 16), (64,)), dtypes=(BF16, BF16), mamba_cache_mode="align")
SMALL_STATE = MambaSpec(block_size=16, shapes=((4, 16), (64,)), dtypes=(BF16, BF16), mamba_cache_mode="align")


def layers(**kinds: Any) -> dict[str, Any]:
    """Two layers of each kind."""
    made = [spec for spec in kinds.values() for _ in range(2)]
    return {f"model.layers.{i}.mixer": spec for i, spec in enumerate(made)}


MODELS: dict[str, dict[str, Any]] = {
    "windows smaller than a block": layers(full=FULL, window=WINDOW, short=SHORT),
    "a window that is computed anew": layers(full=FULL, window=REPLAYED),  # behind every hit (DeepSeek V4.1)
    "states alone": layers(state=SMALL_STATE),
    "states beside K and V": layers(full=FULL, state=STATE),
    "hits inside blocks": layers(full=FULL, state=STATE),
}
UNITS = {"hits inside blocks": 8}  # `--prefix-match-unit`: vLLM's own hits end there


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its configuration and its name are all that is used of it."""
    return make_checkpoint("llama", tmp_path_factory.mktemp("models") / "m")


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_slot_plan, "block_content", lambda spec, dtype: "plain")
    monkeypatch.setattr(vllm_slot_plan, "fails_behind_prefix", lambda spec: False)


Make = Callable[..., ScriptedRunner]


@pytest.fixture
def made(checkpoint: Path, tmp_path: Path) -> Make:
    def make(model: str, **options: Any) -> ScriptedRunner:
        small = tiers(host={"size": "1MiB"}, file={"path": str(tmp_path), "size": "16MiB"})
        cache: dict[str, Any] = {
            "mamba_cache_mode": "align",
            "num_gpu_blocks_override": 400,
            "prefix_match_unit": UNITS.get(model),
        }
        return ScriptedRunner(checkpoint, MODELS[model], small, **cache, **options)

    return make


@pytest.mark.parametrize("ahead", brief([True], [False, True]), ids=lambda ahead: "ahead" if ahead else "step by step")
@pytest.mark.parametrize("model", MODELS)
def test_prompts_and_answers_are_found_by_the_next_engine(model: str, ahead: bool, made: Make) -> None:
    first = made(model, ahead=ahead)
    size = first.half._plan.block_size
    tokens = prompt(1, 300)
    first.add("first", tokens, 150)
    first.run()
    told = first.digests["first"].tokens[:449]  # the last token's KV was never computed
    first.close()
    second = made(model, ahead=ahead)
    second.add("again", tokens, 4)
    second.add("next turn", [*told, *prompt(2, 30)], 4)
    second.run()
    replayed = second.scheduler.prefix_replay_tokens
    assert second.cached["again"] >= (300 - 1) // size * size - replayed
    assert second.cached["next turn"] == 449 // size * size - replayed
    second.close()


@pytest.mark.parametrize("lapses", [False, True], ids=["in time", "too late"])
@pytest.mark.parametrize("model", ["windows smaller than a block", "states beside K and V"])
def test_vllm_may_start_a_load_steps_later(
    model: str, lapses: bool, made: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM 0.33 does while an earlier step may still write to the request's blocks. What lapsed is computed."""
    first = made(model, ahead=True)
    tokens = prompt(1, 300)
    first.add("first", tokens, 4)
    first.run()
    first.close()
    runner = made(model, ahead=True)
    connector, manager = runner.scheduler.connector, runner.scheduler.kv_cache_manager
    start, deferred = connector.update_state_after_alloc, list[tuple[Any, int]]()

    def defer(request: Any, blocks: Any, num_tokens: int) -> None:
        if num_tokens:
            deferred.append((request, num_tokens))
        else:
            start(request, blocks, num_tokens)

    monkeypatch.setattr(connector, "update_state_after_alloc", defer)
    runner.add("again", tokens, 4)
    runner.add("other", prompt(2, 300), 200)  # there are steps
    end = time.monotonic() + 60
    while not deferred:
        assert time.monotonic() < end, "nothing was promised"
        runner.step()
    for _ in range(5):
        runner.step()
    if lapses:
        runner.half.side.forget_promises()
    monkeypatch.setattr(connector, "update_state_after_alloc", start)
    [(request, num_tokens)] = deferred
    start(request, manager.get_blocks(request.request_id), num_tokens)
    runner.run()
    size = runner.half._plan.block_size
    assert runner.cached["again"] == (0 if lapses else (300 - 1) // size * size)
    assert len(runner.digests["again"].tokens) == 300 + 4
    runner.close()


@pytest.mark.parametrize("ahead", brief([True], [False, True]), ids=lambda ahead: "ahead" if ahead else "step by step")
@pytest.mark.parametrize("model", MODELS)
def test_whatever_is_asked_nothing_wrong_is_gone_on_from(model: str, ahead: bool, made: Make) -> None:
    random = np.random.default_rng(7)
    stems = [prompt(100 + i, 400) for i in range(4)]
    runner = made(model, ahead=ahead)
    alive: list[str] = []
    for number in range(60):
        stem = stems[random.integers(4)][: random.integers(0, 400)]
        name = str(number)
        runner.add(name, stem + prompt(1000 + number, int(random.integers(1, 60))), int(random.integers(1, 60)))
        alive.append(name)
        for _ in range(int(random.integers(1, 12))):
            runner.step()
        chance = random.random()
        if chance < 0.1:
            gone = alive.pop(int(random.integers(len(alive))))
            runner.scheduler.finish_requests([gone], RequestStatus.FINISHED_ABORTED)
        elif chance < 0.2:
            runner.forget_l1()
        elif chance < 0.3:
            runner.half.side.tiers.host.pool.check()
        elif chance < 0.35:
            runner.run()
            [port] = runner.half.side.tiers.ports
            held = [name for row in stems for name in blocks_of(runner, row)]
            port.tier.discard(held[:: int(random.integers(2, 9))])  # some records are gone, of blocks and of states
    runner.run()
    assert runner.half.side.tiers.stats()['kvtier_lookup_blocks_total{tier="l2"}'] > 0
    assert sum(runner.cached.values()) > 0
    runner.close()


def blocks_of(runner: ScriptedRunner, tokens: list[int]) -> list[bytes]:
    """The names of a prompt's blocks, and of the states behind them."""
    plan = runner.half._plan
    request = Request("names", tokens, greedy(1), None, block_hasher=runner.hasher)
    per_block = plan.block_size // plan.hash_size
    names = [bytes(name) for name in request.block_hashes[per_block - 1 :: per_block]]
    return [*names, *(state_name(name, state.group) for name in names for state in plan.states)]
