"""Stories of hits that end inside a block: the same bits from every tier, tails, and what is counted."""

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exact_engines import Bits, Over, bits, forget, keep
from extent import brief
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_engines import settled
from tiny_models import prompt

from kvtier.engine.llm import Engine

TIERS = ("L1", "L2", "slab")


@pytest.fixture(scope="module")
def cold() -> Bits:
    return Bits()


@pytest.mark.parametrize(("tier", "loading"), [("L1", "async"), *product(("L2", "slab"), ("async", "layerwise"))])
@pytest.mark.parametrize("block_size", brief([64], [16, 64, 256]))
def test_every_bit_is_as_without_a_cache(
    over: Over, tier: str, block_size: int, loading: str, cold: Bits, tmp_path: Path
) -> None:
    engine = over(tmp_path, block_size, loading=loading)
    size = block_size
    first = prompt(1, size + size // 2 + 9 + size)  # two blocks, and a part of a third
    engine.generate([first], keep())
    for own, shared in ((1, size // 2 + 3), (1, 1), (0, size - 1), (1, size - 2)):
        forget(engine, tier)
        cut = own * size + shared
        tokens = [*first[:cut], (first[cut] - 2) % 200 + 3, *prompt(2, 20)]
        assert tokens[cut] != first[cut]
        [answer] = engine.generate([tokens], keep())
        cached = answer.num_l1_tokens if tier == "L1" else answer.num_external_tokens
        assert cached == cut
        assert answer.num_l1_tokens + answer.num_external_tokens == cut
        assert bits(answer) == cold.of(tokens)
        [again] = engine.generate([tokens], keep())  # its own blocks, filled behind what it shared
        assert bits(again) == cold.of(tokens)
    forget(engine, tier)
    [answer] = engine.generate([first[: 2 * size]], keep())  # it ends with a block that is held
    assert answer.num_l1_tokens + answer.num_external_tokens == 2 * size - 1
    assert bits(answer) == cold.of(first[: 2 * size])


@pytest.mark.parametrize("family", brief(["qwen2-mixed"], ["qwen2-mixed", "qwen3", "mistral-window"]))
def test_sliding_windows_and_other_families_keep_their_bits(over: Over, family: str, tmp_path: Path) -> None:
    engine, own = over(tmp_path, 64, family), Bits(family)
    first = prompt(1, 150)
    engine.generate([first], keep())
    for tier in TIERS:
        for cut in (70, 101, 127):
            forget(engine, tier)
            tokens = [*first[:cut], 3 + TIERS.index(tier), *prompt(2, 20)]
            assert tokens[cut] != first[cut]
            [answer] = engine.generate([tokens], keep())
            assert answer.num_l1_tokens + answer.num_external_tokens == cut
            assert bits(answer) == own.of(tokens)


def cached(engine: Engine, tokens: list[int]) -> dict[str, int]:
    """Ask for one token; where the prompt's were."""
    request = engine.request(engine.add_request(tokens, keep(1)))
    while engine.has_unfinished:
        engine.step()
    return request.cached_tokens


def test_usage_says_where_each_token_came_from(over: Over, tmp_path: Path) -> None:
    engine = over(tmp_path, 16)
    first = prompt(1, 64)
    engine.generate([first], keep(1))
    forget(engine, "slab")
    engine.generate([[*first[:32], *prompt(5, 9)]], keep(1))  # brings two blocks back to L1 and L2
    tokens = [*first[:40], *prompt(2, 20)]
    assert cached(engine, tokens) == {"L1": 32, "L2": 0, "file": 8, "peers": 0, "redis": 0, "objects": 0}
    forget(engine, "L2")
    assert cached(engine, tokens[:41]) == {"L1": 0, "L2": 40, "file": 0, "peers": 0, "redis": 0, "objects": 0}
    stats = engine.stats
    assert stats["prompt_tokens"] == 64 + 41 + 60 + 41
    computed = stats["prompt_tokens"] - stats["l1_tokens"] - stats["external_tokens"]
    assert stats["computed_tokens"] == computed == 64 + 9 + 20 + 1


def test_the_tail_of_an_answer_begins_the_next_turn(over: Over, cold: Bits) -> None:
    engine = over(None, 64)
    first = prompt(1, 70)
    [answer] = engine.generate([first], keep(9))
    turn = [*first, *answer.token_ids, *prompt(2, 30)]
    [second] = engine.generate([turn], keep())
    assert second.num_l1_tokens == 78  # all but the last token of the answer was computed
    assert bits(second) == cold.of(turn)
    assert engine.pool.lookup([]) == 0


def test_tails_go_first_and_answers_that_stay_private_leave_none(over: Over, cold: Bits) -> None:
    engine = over(None, 16, num_blocks=8)
    first, other = prompt(1, 24), prompt(2, 24)
    engine.generate([first], keep(1))
    assert engine.pool.lookup(engine.prompt(first).chain.hashes) == 1  # type: ignore[union-attr]
    settled(engine)  # the tail is in L2, too: until then its copy holds it
    engine.generate([prompt(3, 100)], keep(1))  # seven of eight blocks: six were free, the tail is the seventh
    assert engine.pool.lookup(engine.prompt(first).chain.hashes) == 1  # type: ignore[union-attr]
    [again] = engine.generate([first], keep())
    assert again.num_l1_tokens == 16
    assert bits(again) == cold.of(first)
    private = over(None, 16, store_generated=False)
    [answer] = private.generate([other], keep(6))
    [turn] = private.generate([[*other, *answer.token_ids, 5]], keep())
    assert turn.num_l1_tokens == 24


def test_switched_off_hits_are_whole_blocks(over: Over, cold: Bits) -> None:
    engine = over(None, 16, partial_blocks=False)
    first = prompt(1, 40)
    for tier, expected in (("L1", (32, 0)), ("L2", (0, 32))):
        engine.generate([first], keep(1))
        forget(engine, tier)
        [answer] = engine.generate([first], keep())
        assert (answer.num_l1_tokens, answer.num_external_tokens) == expected
        assert bits(answer) == cold.of(first)


def test_a_request_that_needs_the_whole_pool_is_admitted_without_the_source(over: Over, cold: Bits) -> None:
    engine = over(None, 16, num_blocks=4)
    first = prompt(1, 60)
    engine.generate([first], keep(1))
    tokens = [*first[:10], *prompt(2, 50)]
    engine.add_request(tokens, keep())
    logits = [output.logits for _ in range(8) for output in engine.step()]  # it waited for ever for a fifth block
    assert np.stack([row for row in logits if row is not None]).tobytes() == cold.of(tokens)


def test_a_step_that_raises_before_it_computed_lets_go_of_the_source(over: Over, cold: Bits) -> None:
    engine = over(None, 64)
    first = prompt(1, 70)
    engine.generate([first], keep(1))
    run = engine.runner.run

    def fail(*_: object) -> None:
        engine.runner.run = run  # type: ignore[method-assign]
        raise MemoryError

    engine.runner.run = fail  # type: ignore[method-assign, assignment]
    tokens = [*first[:30], *prompt(2, 9)]
    name = engine.add_request(tokens, keep())
    with pytest.raises(MemoryError):
        engine.step()
    assert engine.abort(name)
    [answer] = engine.generate([tokens], keep())
    assert answer.num_l1_tokens == 30
    assert bits(answer) == cold.of(tokens)


# A random story: prompts over few tokens and prefixes, in batches, from whichever tier is left, some aborted.

TEXTS = [prompt(seed, 140) for seed in range(3)]


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    """A prompt that leaves one of few texts at any token, for another of them or for its own way."""
    text, other = draw(st.sampled_from(TEXTS)), draw(st.sampled_from(TEXTS))
    cut = draw(st.integers(0, 120))
    return [*text[:cut], *other[: draw(st.integers(1, 40))]]


@settings(max_examples=brief(4, 20), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rounds=st.lists(
        st.tuples(st.sampled_from(TIERS), st.lists(prompts(), min_size=1, max_size=4), st.booleans()),
        min_size=2,
        max_size=4,
    ),
    block_size=st.sampled_from([16, 64]),
    loading=st.sampled_from(["async", "layerwise"]),
    preemption=st.sampled_from(["recompute", "offload"]),
    tight=st.booleans(),
)
def test_requests_that_share_prefixes_get_the_bits_of_an_engine_without_a_cache(
    over: Over,
    rounds: list[tuple[str, list[list[int]], bool]],
    block_size: int,
    loading: str,
    preemption: str,
    tight: bool,
    cold: Bits,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    size: dict[str, Any] = {"num_blocks": -(-170 // block_size) + 2} if tight else {}
    home = tmp_path_factory.mktemp("slab")
    engine = over(home, block_size, loading=loading, preemption=preemption, **size)
    for tier, batch, aborts in rounds:
        forget(engine, tier)
        gone = engine.add_request(batch[0], keep(6)) if aborts else None
        if gone is not None:
            engine.step()
        answers = engine.generate(batch, keep(3))
        if gone is not None:
            engine.abort(gone)
        for tokens, answer in zip(batch, answers, strict=True):
            assert bits(answer) == cold.of(tokens, 3)
        while engine.has_unfinished:
            engine.step()
