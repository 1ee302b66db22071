"""Stories of `exact` mode: the same bits, however a prompt is cut, packed or found; and what holds without it."""

from itertools import product

import numpy as np
import pytest
from extent import brief
from numpy.typing import NDArray
from tiny_models import FAMILIES, config_of, plain, plain_logits, prompt

from kvtier.engine.config import EngineConfig
from kvtier.engine.llm import Engine
from kvtier.engine.requests import SamplingParams
from kvtier.engine.sequence import Completion

KEEP = SamplingParams(max_tokens=3, ignore_eos=True, keep_logits=True)
PAIRS = brief([("qwen2-mixed", "bfloat16")], [*product(FAMILIES, ("float32", "bfloat16"))])
PROMPTS = [prompt(1, 90), prompt(2, 17), prompt(3, 120), [*prompt(1, 70), 5, 6, 7]]  # the last shares 70 tokens


def engine_of(family: str, dtype: str = "float32", **options: object) -> Engine:
    settings = {"block_size": 16, "num_blocks": 64, "exact": True, "exact_rows": 128, "max_num_seqs": 4, **options}
    return Engine.from_config(config_of(family), EngineConfig(**settings), dtype=dtype)  # type: ignore[arg-type]


def bits(answers: list[Completion]) -> list[NDArray[np.float32]]:
    return [np.stack(answer.logits) for answer in answers]


def same(left: list[NDArray[np.float32]], right: list[NDArray[np.float32]]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize(("family", "dtype"), PAIRS)
def test_logits_are_the_same_bits_across_packings(family: str, dtype: str) -> None:
    # One by one, each prompt in one forward, nothing cached: the cold run all others are held against.
    alone = engine_of(family, dtype, enable_prefix_caching=False)
    cold = [bits(alone.generate([tokens], KEEP))[0] for tokens in PROMPTS]
    # Packed together; cut into odd chunks; both; small blocks, so other physical places.
    assert same(bits(engine_of(family, dtype, enable_prefix_caching=False).generate(PROMPTS, KEEP)), cold)
    for budget, block_size in ((37, 16), (13, 8)):
        cut = engine_of(family, dtype, max_num_batched_tokens=budget, block_size=block_size, num_blocks=128)
        assert same(bits(cut.generate(PROMPTS, KEEP)), cold)
    # From L1: the second round finds all full blocks, and tails up to the last token but one.
    cached = engine_of(family, dtype, max_num_batched_tokens=50)
    cached.generate(PROMPTS, KEEP)
    answers = cached.generate(PROMPTS, KEEP)
    assert [answer.num_l1_tokens for answer in answers] == [89, 16, 119, 72]
    assert same(bits(answers), cold)
    cached.pool.check()


def test_exact_logits_are_near_plain_transformers() -> None:
    for family in FAMILIES:
        [answer] = engine_of(family).generate([PROMPTS[0]], KEEP)
        expected = plain_logits(plain(family), PROMPTS[0] + answer.token_ids[:-1])[len(PROMPTS[0]) - 1 :].numpy()
        assert np.abs(np.stack(answer.logits) - expected).max() < 1e-4


def test_contexts_beyond_one_tile_length_stay_exact() -> None:
    tokens = prompt(8, 600)  # keys are rounded up to 256: three lengths meet here
    cold = bits(engine_of("qwen2-mixed", exact_rows=640, max_num_batched_tokens=640).generate([tokens], KEEP))
    cut = engine_of("qwen2-mixed", exact_rows=640, max_num_batched_tokens=77)
    assert same(bits(cut.generate([tokens], KEEP)), cold)
    assert same(bits(cut.generate([tokens], KEEP)), cold)


@pytest.mark.parametrize(("family", "dtype"), PAIRS)
def test_without_exact_equal_boundaries_give_equal_bits(family: str, dtype: str) -> None:
    tokens = prompt(4, 90)
    options: dict[str, object] = {"exact": False, "max_num_batched_tokens": 32, "partial_blocks": False}
    cold = engine_of(family, dtype, enable_prefix_caching=False, **options).generate([tokens], KEEP)
    warm = engine_of(family, dtype, **options)
    warm.generate([tokens[:64]], SamplingParams(max_tokens=1))
    answers = warm.generate([[*tokens]], KEEP)
    assert answers[0].num_l1_tokens == 64  # chunks 0-32-64 are cached, 64-90 is cut as in the cold run
    assert same(bits(answers), bits(cold))
