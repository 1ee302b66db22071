"""What vLLM's own tests say of a connector and the other files here do not: `make test-vllm-peer` runs them together.

Loads that fail in part, by both policies; children of a MultiConnector that fail in turn; requests preempted while
vLLM schedules ahead; hits exactly where vLLM's own prefix cache has them.
"""

import random
from pathlib import Path
from typing import Any, Final

import pytest
from extent import brief

pytest.importorskip("vllm", reason="no vLLM here; run `make test-vllm`")

from failing_connector import SWITCH
from scripted_runner import Digests, ScriptedRunner
from test_vllm_lora import LORA, make_adapter
from test_vllm_multi import FAILING
from test_vllm_multi_kinds import beside, cached, forget, order, texts
from test_vllm_scripted import MODELS
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm_rig import BLOCK, Engine, FailingLoads, engine, multi, prompt, said, tiers

from kvtier.connector.vllm import slot_plan as vllm_slot_plan
from kvtier.connector.vllm.worker import WorkerHalf

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

STEMS: Final = [prompt(200 + i, 400) for i in range(3)]
PROMPTS: Final = [STEMS[i % 3][: 32 * (i % 5 + 1)] + prompt(300 + i, 11 + 17 * i) for i in range(6)] + [
    prompt(400 + i, 100 + 30 * i) for i in range(3)
]


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("kind", brief(["asynchronous"], ["asynchronous", "synchronous", "layerwise"]))
def test_a_load_that_fails_costs_only_the_requests_that_need_its_blocks(
    kind: str, policy: str, model: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nine requests at once, some with one beginning. Some loads fail, of blocks that several requests may share."""
    if kind == "asynchronous":
        monkeypatch.setattr("kvtier.connector.vllm.scheduler._TINY", 0)
    loads = FailingLoads(monkeypatch, 0.4 if kind != "layerwise" else 0.1)
    reported, take = set[int](), WorkerHalf.take_invalid

    def taken(half: WorkerHalf) -> set[int]:
        blocks = take(half)
        reported.update(blocks)
        return blocks

    monkeypatch.setattr(WorkerHalf, "take_invalid", taken)
    with engine(model, tiers(layerwise=kind == "layerwise"), policy=policy) as vllm:
        assert vllm.text(PROMPTS) == expected
        loads.on, ends = True, set[str]()
        for _ in range(8):
            vllm.forget_l1()
            for output, wanted in zip(vllm.run(PROMPTS), expected, strict=True):
                end = output.outputs[0].finish_reason
                assert end == "error" or list(output.outputs[0].token_ids) == wanted  # never a wrong answer
                ends.add(end)
        assert loads.num_failed
        assert loads.num_well
        assert reported
        assert ends == ({"length"} if policy == "recompute" else {"error", "length"})
        # Nothing of what was computed on lost blocks is found later, in L1 or in the tiers.
        loads.on = False
        for _ in range(2):
            assert vllm.text(PROMPTS) == expected
            vllm.forget_l1()


def test_blocks_that_change_between_store_and_lookup_are_computed(model: Path, expected: list[list[int]]) -> None:
    """A byte in each block of host memory is another; with `[host] verify` that is seen before anything is promised."""
    with engine(model, tiers(host={"size": "32MiB", "verify": "always"})) as vllm:
        assert vllm.text(PROMPTS) == expected
        vllm.forget_l1()
        vllm.hierarchy.host.region.array[:, 5] ^= 1
        assert vllm.text(PROMPTS) == expected
        assert vllm.stats()['kvtier_corruption_total{tier="l2"}'] > 0
        vllm.forget_l1()
        assert said(vllm.run(PROMPTS))[0] == expected


@pytest.mark.parametrize("kvtier_first", [False, True], ids=["kvtier last", "kvtier first"])
def test_whichever_child_fails(
    kvtier_first: bool,
    model: Path,
    expected: list[list[int]],
    failing_loads: FailingLoads,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both promise and load nothing, in one step, of prompts that both know or one: vLLM computes, nothing is kept."""
    with beside(model, order(multi(tiers(), FAILING), kvtier_first)) as vllm:
        assert texts(vllm.run(PROMPTS[:6])) == expected[:6]
        forget(vllm)
        monkeypatch.setitem(SWITCH, "on", True)
        monkeypatch.setitem(SWITCH, "failed", 0)
        failing_loads.on = True
        assert texts(vllm.run(PROMPTS)) == expected
        assert SWITCH["failed"] > 0
        assert failing_loads.num_failed > 0
        monkeypatch.setitem(SWITCH, "on", False)
        failing_loads.on = False
        forget(vllm)
        assert texts(vllm.run(PROMPTS)) == expected
        forget(vllm)
        outputs = vllm.run(PROMPTS)
        assert texts(outputs) == expected
        assert all(
            count >= (len(each) - 1) // BLOCK * BLOCK for count, each in zip(cached(outputs), PROMPTS, strict=True)
        )


def answered(tokens: list[int], num_tokens: int) -> list[int]:
    """Prompt and answer, as the scripted engine says it without any cache."""
    digests = Digests(tokens)
    for _ in range(num_tokens):
        digests.extend([3 + int(digests.of(len(digests.tokens) - 1, len(digests.tokens))[0, 0])])
    return digests.tokens


@pytest.mark.parametrize("ahead", [True, *brief([], [False])], ids=lambda ahead: "ahead" if ahead else "step by step")
@pytest.mark.parametrize(
    "kinds", brief(["windows smaller than a block"], [kinds for kinds in MODELS if kinds != "states alone"])
)
def test_preempted_requests_load_again(
    kinds: str,
    ahead: bool,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """L1 has room for a third of the requests. The runner looks at every byte that a step reads."""
    monkeypatch.setattr(vllm_slot_plan, "block_content", lambda spec, dtype: "plain")  # as on a GPU
    monkeypatch.setattr(vllm_slot_plan, "fails_behind_prefix", lambda spec: False)
    small = tiers(host={"size": "1MiB"}, file={"path": str(tmp_path), "size": "16MiB"})
    cache: dict[str, Any] = {"mamba_cache_mode": "align", "num_gpu_blocks_override": 140}
    runner = ScriptedRunner(model, MODELS[kinds], small, ahead=ahead, num_at_once=24, **cache)
    preempted: list[str] = []
    preempt = runner.scheduler._preempt_request

    def seen(request: Any, *arguments: Any, **options: Any) -> Any:
        preempted.append(request.request_id)
        return preempt(request, *arguments, **options)

    monkeypatch.setattr(runner.scheduler, "_preempt_request", seen)
    for turn in range(2):
        asked = {f"{turn}-{i}": STEMS[i % 3][: 17 * i] + prompt(700 + i, 30 + i) for i in range(24)}
        for name, tokens in asked.items():
            runner.add(name, tokens, 150)
        runner.run()
        for name, tokens in asked.items():
            assert runner.digests[name].tokens == answered(tokens, 150), name
        runner.forget_l1()

    assert len(preempted) > 3
    found = runner.half.side.tiers.stats()['kvtier_lookup_blocks_total{tier="l2"}']
    assert found > 0
    runner.close()


def ask(vllm: Engine, number: int, adapters: list[Path]) -> tuple[list[int], int, int]:
    """One of the random requests: its answer, its cached tokens, and how many of its tokens have log probabilities."""
    lot = random.Random(number)
    tokens = STEMS[lot.randrange(3)][: lot.randrange(1, 160)] + prompt(
        900 + lot.randrange(4), lot.choice([0, 1, 5, 32, 70])
    )
    if lot.random() < 0.3:
        tokens = tokens[: max(1, len(tokens) // BLOCK * BLOCK)]  # ends with a block: its last token is computed
    asked: dict[str, Any] = {"prompt_token_ids": tokens}
    if (salt := lot.choice([None, None, None, "a", "b"])) is not None:
        asked["cache_salt"] = salt
    place = lot.choice([None, None, 0, 1])
    lora = None if place is None else LoRARequest(f"tone-{place}", 1 + place, str(adapters[place]))
    scored = 0 if lot.random() < 0.15 else None  # vLLM then reads no prefix
    params = SamplingParams(
        temperature=0, max_tokens=lot.choice([1, 8, 40]), detokenize=False, ignore_eos=True, prompt_logprobs=scored
    )
    [output] = vllm.llm.generate([asked], params, use_tqdm=False, lora_request=lora)
    [text], [num_cached] = said([output])
    return text, num_cached, len(output.prompt_logprobs or ())


def test_hits_are_those_of_vllms_own_prefix_cache(model: Path, tmp_path: Path) -> None:
    """Random requests with salts, adapters and scores: what an L1 that forgets nothing has is found without any L1."""
    adapters = [make_adapter(tmp_path / f"adapter-{seed}", seed) for seed in (1, 2)]
    options: dict[str, Any] = {**LORA, "max_loras": 2, "num_gpu_blocks_override": 2000}
    numbers, reset = brief(range(40), range(160)), brief(25, 100)
    with engine(model, **options) as plain:
        wanted = []
        for number in numbers:
            if number == reset:
                assert plain.llm.llm_engine.reset_prefix_cache()
            wanted.append(ask(plain, number, adapters))
    whole = tiers(cache={"partial_blocks": False}, host={"size": "64MiB"})
    with engine(model, whole, **options) as vllm:
        for number in numbers:
            vllm.forget_l1()
            if number == reset:
                assert vllm.llm.llm_engine.reset_prefix_cache(reset_connector=True)
            assert ask(vllm, number, adapters) == wanted[number], number
    hits = [num_cached for _, num_cached, _ in wanted]
    assert any(hits)
    assert all(count % BLOCK == 0 for count in hits)
    assert any(scored and not count for _, count, scored in wanted)
