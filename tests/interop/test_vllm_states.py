"""vLLM's models with recurrent states, and quantised KV: a prompt goes on from a border where blocks and states are.

Qwen3-Next: two of four layers keep a state, which vLLM has at the end of a block where a step ended. vLLM's CPU kernels
for it compute in bf16.
"""

from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from extent import brief

pytest.importorskip("vllm", reason="no vLLM here; run `make test-vllm`")

import torch
from vllm_rig import VOCAB, Engine, FailingLoads, engine, greedy, make_checkpoint, prompt, tiers

from kvtier.tiers.naming import state_name

pytestmark = pytest.mark.timeout(600)

BLOCK = 160  # tokens: a block of K and V is no smaller than a state. vLLM itself chooses 96 or 160, by the CPU
OPTIONS: dict[str, Any] = {
    "dtype": "bfloat16",
    "block_size": BLOCK,
    "max_model_len": 2048,
    "max_num_batched_tokens": 512,  # a step ends at 480 tokens: there and at a prompt's last border states are kept
    "num_gpu_blocks_override": 64,
}
LONG = prompt(1, 1400)
# How a prompt is cut into steps moves log probabilities in bf16: by 0.1 on most CPUs, by 0.5 on one without AVX-512.
# What is expected is what plain vLLM answers by each of these cuts, up to its first near tie.
STEPS = (512, 480, 1000)
NEAR_TIE = 0.2
PROMPTS = [LONG, LONG[:1000] + prompt(2, 100), LONG + prompt(3, 300), LONG[:700]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3-next", tmp_path_factory.mktemp("models") / "next", dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def right(model: Path) -> list[list[int]]:
    return decided(model, PROMPTS)


def decided(model: Path, prompts: Sequence[list[int]], num_tokens: int = 12) -> list[list[int]]:
    """As much of each text as a vLLM without kvtier, and without a cache of its own, answers however a prompt is cut.

    Behind the wrong KV already the first token would be another.
    """
    ways = []
    for step in STEPS:
        options = OPTIONS | {"max_num_batched_tokens": step, "enable_prefix_caching": False}
        with engine(model, **options) as plain:
            ways.append([up_to_a_near_tie(plain, tokens, num_tokens) for tokens in prompts])
    texts = []
    for answers in zip(*ways, strict=True):
        agreed = takewhile(lambda tokens: len(set(tokens)) == 1, zip(*answers, strict=False))
        texts.append([tokens[0] for tokens in agreed])
    assert sum(map(len, texts)) >= len(prompts)
    return texts


def up_to_a_near_tie(plain: Engine, tokens: list[int], num_tokens: int) -> list[int]:
    params = greedy(num_tokens)
    params.logprobs = 2
    [output] = plain.llm.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)
    text: list[int] = []
    for token, told in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True):
        first, second = sorted((each.logprob for each in told.values()), reverse=True)
        if first - second < NEAR_TIE:
            break
        text.append(token)
    return text


def one_by_one(
    vllm: Engine, prompts: Sequence[list[int]], expected: Sequence[list[int]]
) -> tuple[list[int], list[list[int]]]:
    """Cached tokens of each, and as much of its text as is expected. By itself each: a batch's shape rounds, too."""
    outputs = [vllm.run([tokens], max(1, len(text)))[0] for tokens, text in zip(prompts, expected, strict=True)]
    texts = [list(output.outputs[0].token_ids)[: len(text)] for output, text in zip(outputs, expected, strict=True)]
    return [output.num_cached_tokens for output in outputs], texts


def names(vllm: Engine, tokens: list[int]) -> tuple[list[bytes], list[bytes]]:
    """The blocks of a prompt and the states behind each of them, as the tiers name them."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.request import Request

    hasher = get_request_block_hasher(BLOCK, get_hash_fn_by_name("sha256"))
    request = Request("names", tokens, greedy(1), None, block_hasher=hasher)
    blocks = [bytes(name) for name in request.block_hashes]
    [state] = vllm.half._plan.states
    return blocks, [state_name(name, state.group) for name in blocks]


def forget(vllm: Engine, *lost: bytes) -> None:
    """These records are gone from L2 and from the slab, and vLLM has nothing itself."""
    vllm.forget_l1()
    [port] = vllm.hierarchy.ports
    assert all(port.holds(lost))
    port.tier.discard(lost)
    assert vllm.hierarchy.host.pool.evict(lost) == len(lost)
    assert not any(port.holds(lost))


def test_a_new_engine_goes_on_from_stored_states(model: Path, right: list[list[int]], tmp_path: Path) -> None:
    with engine(model, tiers(tmp_path), **OPTIONS) as first:
        assert [type(group.kv_cache_spec).__name__ for group in first.scheduler.kv_cache_config.kv_cache_groups] == [
            "MambaSpec",
            "FullAttentionSpec",
        ]
        assert one_by_one(first, PROMPTS, right)[1] == right
        first.forget_l1()
        assert one_by_one(first, PROMPTS, right) == ([1280, 960, 1600, 640], right)
    with engine(model, tiers(tmp_path), **OPTIONS) as second:
        assert one_by_one(second, PROMPTS, right) == ([1280, 960, 1600, 640], right)
        assert second.found_in("file") > 0


@pytest.mark.exhaustive
def test_a_group_may_have_more_states_than_there_are_layers_without(tmp_path: Path) -> None:
    odd = make_checkpoint("qwen3-next-odd", tmp_path / "model", dtype=torch.bfloat16)
    expected = decided(odd, PROMPTS[:1])
    with engine(odd, tiers(tmp_path / "slab"), **OPTIONS) as vllm:
        [state] = vllm.half._plan.states
        assert len(state.layers) > len(vllm.half._plan.layers)
        assert one_by_one(vllm, PROMPTS[:1], expected)[1] == expected
        vllm.forget_l1()
        assert one_by_one(vllm, PROMPTS[:1], expected) == ([1280], expected)


def test_the_next_turn_goes_on_from_the_answer(model: Path, tmp_path: Path) -> None:
    first_turn = prompt(5, 300)
    with engine(model, **OPTIONS) as plain:
        [answer] = plain.text([first_turn], 200)
        second_turns = [[*first_turn, *answer, *prompt(seed, 40)] for seed in range(6, 10)]
        assert one_by_one(plain, second_turns[:1], [[]])[0] == [160]  # what vLLM by itself has of it
    expected = decided(model, second_turns)
    with engine(model, tiers(tmp_path), **OPTIONS) as vllm:
        assert vllm.text([first_turn], 200) == [answer]
        vllm.forget_l1()
        # 300 + 200 tokens: the answer filled a third block
        assert one_by_one(vllm, second_turns, expected) == ([480] * 4, expected)


@pytest.mark.parametrize("lost", brief(["state", "first block"], ["state", "block", "first block"]))
def test_a_lost_record_costs_only_what_needs_it(model: Path, right: list[list[int]], tmp_path: Path, lost: str) -> None:
    with engine(model, tiers(tmp_path), **OPTIONS) as vllm:
        assert one_by_one(vllm, PROMPTS[:1], right[:1])[1] == right[:1]
        blocks, states = names(vllm, LONG)
        gone = {"state": states[7], "block": blocks[6], "first block": blocks[0]}[lost]
        forget(vllm, gone)
        cached = {"state": 960, "block": 960, "first block": 0}[lost]  # steps ended at 480, 960 and 1280 tokens
        assert one_by_one(vllm, PROMPTS[:1], right[:1]) == ([cached], right[:1])
        vllm.forget_l1()
        # What was computed instead is there again.
        assert one_by_one(vllm, PROMPTS[:1], right[:1]) == ([1280], right[:1])


def test_a_load_that_fails_is_computed(
    model: Path, right: list[list[int]], tmp_path: Path, failing_loads: FailingLoads
) -> None:
    with engine(model, tiers(tmp_path), **OPTIONS) as vllm:
        assert one_by_one(vllm, PROMPTS[:1], right[:1])[1] == right[:1]
        vllm.forget_l1()
        failing_loads.on = True
        assert one_by_one(vllm, PROMPTS[:1], right[:1]) == ([0], right[:1])
        assert failing_loads.num_failed
        failing_loads.on = False
        vllm.forget_l1()
        assert one_by_one(vllm, PROMPTS[:1], right[:1]) == ([1280], right[:1])


@pytest.mark.exhaustive
def test_random_prompts_that_share_beginnings(model: Path, tmp_path: Path) -> None:
    random = np.random.default_rng(7)
    prompts: list[list[int]] = []
    for _ in range(8):
        start = prompts[random.integers(len(prompts))] if prompts and random.random() < 0.8 else prompt(30, 900)
        cut = int(random.integers(1, len(start) + 1))
        prompts.append([*start[:cut], *random.integers(3, VOCAB, int(random.integers(1, 400))).tolist()][:1500])
    expected = decided(model, prompts, 8)
    with engine(model, tiers(tmp_path), **OPTIONS) as vllm:
        cached = []
        for _ in range(2):
            for tokens, text in zip(prompts, expected, strict=True):
                found, answer = one_by_one(vllm, [tokens], [text])
                assert answer == [text]
                cached += found
                vllm.forget_l1()
        assert sum(cached[: len(prompts)]) < sum(cached[len(prompts) :])


def test_without_prefix_caching_there_are_no_states_to_keep(model: Path) -> None:
    with pytest.raises(Exception, match="start with --enable-prefix-caching --mamba-cache-mode align"):
        Engine(model, tiers(), **OPTIONS, enable_prefix_caching=False)


# quantised KV


@pytest.mark.skipif(
    not (torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()),
    reason="vLLM has no fp8 KV on a CPU without AVX-512 and AMX",
)
@pytest.mark.parametrize("kind", brief(["fp8"], ["fp8", "fp8_e5m2"]))
def test_quantised_kv_travels_as_it_is(tmp_path: Path, kind: str) -> None:
    path = make_checkpoint("llama", tmp_path / "model")
    prompts = [prompt(1, 300), prompt(1, 200) + prompt(2, 50)]
    with engine(path, kv_cache_dtype=kind) as plain:
        expected = plain.text(prompts)
    with engine(path, tiers(tmp_path), kv_cache_dtype=kind) as first:
        assert first.text(prompts) == expected
    with engine(path, tiers(tmp_path), kv_cache_dtype=kind) as second:
        outputs = second.run(prompts)
        assert [list(output.outputs[0].token_ids) for output in outputs] == expected
        assert all(output.num_cached_tokens >= 192 for output in outputs)
    other = {"fp8": "fp8_e5m2", "fp8_e5m2": "auto"}[kind]
    with engine(path, tiers(tmp_path), kv_cache_dtype=other) as stranger:
        assert not stranger.run(prompts[:1])[0].num_cached_tokens
