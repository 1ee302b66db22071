"""Stories of bias, penalties, min-p and logprobs: what they are by definition, alone and in batches."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from small_engines import end, small_engine

from kvtier.engine.llm import Engine
from kvtier.engine.requests import SamplingParams, TokenLogprobs
from kvtier.engine.sampler import adjusted, sample
from kvtier.engine.sequence import Sequence
from kvtier.tiers import RequestError

VOCAB = 32
EOS = frozenset({5, 99})  # the second is no token
PROMPT = [int(token) for token in np.random.default_rng(3).integers(0, 200, 150)]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    made = small_engine()
    yield made
    end(made)


def logs(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Of probabilities, in double precision."""
    values = logits.astype(np.float64)
    shifted = values - values.max()
    found: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return found


def by_definition(logits: NDArray[np.float32], prompt: list[int], answer: list[int], params: Any) -> list[float]:
    """Token by token, as the docstring of `adjusting` says it."""
    found = []
    for token, logit in enumerate(logits.tolist()):
        logit += params.logit_bias.get(token, 0.0)
        if token in prompt or token in answer:
            logit = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
        count = answer.count(token)
        logit -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
        is_end = token in params.stop_token_ids or (token in EOS and not params.ignore_eos)
        found.append(-np.inf if is_end and len(answer) < params.min_tokens else logit)
    return found


def test_a_batch_is_adjusted_by_definition() -> None:
    dice = np.random.default_rng(5)
    everything = {"presence_penalty": 0.5, "frequency_penalty": -0.25, "repetition_penalty": 1.5}
    asked = [
        SamplingParams(**everything, logit_bias={3: 100.0, 7: -1.5}),
        SamplingParams(),
        SamplingParams(frequency_penalty=2.0),
        SamplingParams(repetition_penalty=0.5),
        SamplingParams(min_tokens=4, stop_token_ids=[9]),
        SamplingParams(min_tokens=4, stop_token_ids=[9], ignore_eos=True),
    ]
    prompt, answer = dice.integers(0, VOCAB, 6).tolist(), dice.integers(0, VOCAB, 9).tolist()
    rows = [Sequence(str(number), list(prompt), params, None, number) for number, params in enumerate(asked)]
    for length in range(len(answer) + 1):  # step by step, as an answer grows
        logits = dice.normal(size=(len(rows), VOCAB)).astype(np.float32)
        kept = torch.from_numpy(logits.copy())
        found = adjusted(kept, rows, EOS)
        expected = [
            by_definition(row, prompt, answer[:length], params) for row, params in zip(logits, asked, strict=True)
        ]
        assert np.allclose(found.numpy(), expected, rtol=1e-5, atol=1e-5)
        assert np.array_equal(kept.numpy(), logits)  # logprobs are of these
        for each in rows if length < len(answer) else ():
            each.token_ids.append(answer[length])
            each.num_tokens += 1
            each.num_generated += 1


def test_min_p_keeps_what_is_near_the_likeliest() -> None:
    logits = np.log(np.array([0.1, 0.4, 0.2, 0.3], np.float32))
    params = SamplingParams(temperature=1.0, min_p=0.6)  # of 0.4
    assert {sample(logits, params, 7, position) for position in range(200)} == {1, 3}
    flat = SamplingParams(temperature=100.0, min_p=0.6)  # behind the temperature all are alike
    assert {sample(logits, flat, 7, position) for position in range(200)} == {0, 1, 2, 3}


def test_an_engine_answers_by_them_alone_and_in_a_batch(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [
        SamplingParams(max_tokens=12, ignore_eos=True),
        SamplingParams(max_tokens=12, ignore_eos=True, frequency_penalty=2.0, presence_penalty=2.0, keep_logits=True),
        SamplingParams(max_tokens=12, ignore_eos=True, logit_bias={5: 100.0}),
        SamplingParams(max_tokens=12, ignore_eos=True, temperature=1.0, seed=1, repetition_penalty=1.3),
    ]
    alone = [engine.generate([PROMPT], params)[0].token_ids for params in asked]
    assert alone[2] == [5] * 12
    # What an answer has already is less likely by the penalties each time: the logits show it.
    runner, forward, num_failed = engine.runner, engine.runner.run, 0

    def failing(batch: Any) -> torch.Tensor:
        nonlocal num_failed
        num_failed += 1
        if num_failed in (2, 5):
            raise RuntimeError("out of memory")
        return forward(batch)

    monkeypatch.setattr(runner, "run", failing)
    names = [engine.add_request(PROMPT, params) for params in asked]
    answers: dict[str, list[int]] = {name: [] for name in names}
    while engine.has_unfinished:
        try:
            outputs = engine.step()
        except RuntimeError:
            continue
        for output in outputs:
            assert output.token_id is not None
            answers[output.request_id].append(output.token_id)
    assert list(answers.values()) == alone  # a step that is computed again counts no token twice


def test_logprobs_are_the_models_own(engine: Engine) -> None:
    kept = {"max_tokens": 6, "ignore_eos": True, "keep_logits": True}
    [plain] = engine.generate([PROMPT], SamplingParams(**kept, logprobs=3))
    for token, row, told in zip(plain.token_ids, plain.logits, plain.logprobs, strict=True):
        assert told.token_id == token == told.likeliest[0][0]  # greedy
        assert np.isclose(told.logprob, logs(row)[token], atol=1e-4)
        assert [each for each, _ in told.likeliest] == np.argsort(-row, kind="stable")[:3].tolist()
    # A bias decides, and is no part of what the model thinks.
    [biased] = engine.generate([PROMPT], SamplingParams(max_tokens=1, logprobs=1, logit_bias={9: 100.0}))
    assert biased.token_ids == [9]
    assert biased.logprobs[0].likeliest == plain.logprobs[0].likeliest[:1]
    assert biased.logprobs[0].logprob < -1


def test_a_prompts_logprobs_are_computed_though_it_is_cached(engine: Engine) -> None:
    engine.generate([PROMPT], SamplingParams(max_tokens=1))
    [scored] = engine.generate([PROMPT], SamplingParams(max_tokens=2, ignore_eos=True, prompt_logprobs=2))
    assert scored.num_l1_tokens == 0
    assert [each.token_id for each in scored.prompt_logprobs] == PROMPT[1:]
    for length in (1, 2, 64, 65, 149):  # chunks of a step are 64 tokens
        [asked] = engine.generate([PROMPT[:length]], SamplingParams(max_tokens=1, keep_logits=True))
        told: TokenLogprobs = scored.prompt_logprobs[length - 1]
        assert np.isclose(told.logprob, logs(asked.logits[0])[PROMPT[length]], atol=1e-3)
        assert told.likeliest[0][0] == int(asked.logits[0].argmax())
    # Who asks for nothing finds the prompt in L1 as before.
    [again] = engine.generate([PROMPT], SamplingParams(max_tokens=2, ignore_eos=True))
    assert again.num_l1_tokens == 144
    assert again.token_ids == scored.token_ids


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"min_p": 1.1}, "min_p 1.1: use a number from 0 to 1"),
        ({"presence_penalty": float("nan")}, "presence_penalty nan: use"),
        ({"frequency_penalty": -3}, "frequency_penalty -3: use"),
        ({"repetition_penalty": 0}, "repetition_penalty 0: use a number from 0.01 to 100"),
        ({"logit_bias": {5: 101.0}}, "logit_bias 5: 101.0: use"),
        ({"logit_bias": {100_000: 1.0}}, "logit_bias 100000: this model's token ids are 0 to"),
        ({"logprobs": -1}, "logprobs -1: use"),
    ],
)
def test_what_cannot_be_is_refused_by_name(engine: Engine, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message.replace("(", r"\(")):
        engine.generate([PROMPT], SamplingParams(**wrong))


def test_plain_requests_adjust_and_score_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """No logits are copied, no logarithm is taken."""
    for name in ("adjusted", "sampled_logprobs", "PromptRows"):
        monkeypatch.setattr(f"kvtier.engine.model_runner.{name}", SimpleNamespace(__call__=None))
    assert len(engine.generate([PROMPT, PROMPT[:20]], SamplingParams(max_tokens=3, ignore_eos=True))) == 2


# Stories of the sampler: greedy, temperature, top-k, top-p, and draws that depend on seed and position alone.


LOGITS = np.log(np.array([0.1, 0.4, 0.2, 0.3], np.float32))


def draws(params: SamplingParams, count: int = 4000, logits: NDArray[np.float32] = LOGITS) -> NDArray[np.float64]:
    """Shares of each token in `count` draws of one seed."""
    tokens = [sample(logits, params, 7, position) for position in range(count)]
    return np.bincount(tokens, minlength=len(logits)) / count


def test_draws_follow_the_probabilities() -> None:
    assert np.allclose(draws(SamplingParams(temperature=1.0)), [0.1, 0.4, 0.2, 0.3], atol=0.03)
    # A low temperature sharpens (p ** 2, normalised), a high one flattens.
    assert np.allclose(draws(SamplingParams(temperature=0.5)), np.array([1, 16, 4, 9]) / 30, atol=0.03)
    assert np.allclose(draws(SamplingParams(temperature=100.0)), 0.25, atol=0.03)


def test_top_k_keeps_the_likeliest() -> None:
    assert np.allclose(draws(SamplingParams(temperature=1.0, top_k=2)), [0, 4 / 7, 0, 3 / 7], atol=0.03)
    assert np.allclose(
        draws(SamplingParams(temperature=1.0, top_k=9)), [0.1, 0.4, 0.2, 0.3], atol=0.03
    )  # more than there are
    assert draws(SamplingParams(temperature=1.0, top_k=1))[1] == 1.0


def test_top_k_of_equals_keeps_exactly_k() -> None:
    shares = draws(SamplingParams(temperature=1.0, top_k=2), logits=np.zeros(5, np.float32))
    assert np.count_nonzero(shares) == 2


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    assert np.allclose(draws(SamplingParams(temperature=1.0, top_p=0.65)), [0, 4 / 7, 0, 3 / 7], atol=0.03)
    assert draws(SamplingParams(temperature=1.0, top_p=0.01))[1] == 1.0  # never fewer than one token
    # Both together: the three likeliest, then what reaches 0.5 of those.
    assert np.allclose(draws(SamplingParams(temperature=1.0, top_k=3, top_p=0.7)), [0, 4 / 7, 0, 3 / 7], atol=0.03)


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    params = SamplingParams(temperature=1.0)
    answer = [sample(LOGITS, params, 42, position) for position in range(32)]
    assert [sample(LOGITS, params, 42, position) for position in reversed(range(32))] == answer[::-1]
    assert [sample(LOGITS, params, 43, position) for position in range(32)] != answer


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", value) for value in (-0.1, float("nan"), float("inf"), "hot", True)),
        *(("top_p", value) for value in (0.0, 1.01, float("nan"), None)),
        *(("top_k", value) for value in (-1, 1.5, None)),
        *(("max_tokens", value) for value in (0, -3, 2.0, True)),
        *(("min_tokens", value) for value in (-1, 1.5, None)),
        *(("seed", value) for value in (-1, 2**64, 1.0, "x")),
        *(("stop_token_ids", value) for value in (5, "5", [-1], ["5"], [True])),
        *(("logit_bias", value) for value in (None, [(1, 2.0)])),
    ],
)
def test_values_out_of_range_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(RequestError, match=f"{field} .*: use"):
        SamplingParams(**{field: value})  # type: ignore[arg-type]


def test_an_answer_that_cannot_be_so_long_is_refused() -> None:
    with pytest.raises(RequestError, match="min_tokens 5: more than max_tokens 4; lower it"):
        SamplingParams(max_tokens=4, min_tokens=5)
    with pytest.raises(RequestError, match="min_tokens 2: a guide decides where an answer ends"):
        SamplingParams(min_tokens=2, guide=SimpleNamespace())  # type: ignore[arg-type]
