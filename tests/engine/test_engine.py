"""Stories of the engine: requests in, tokens out, in whatever order they come, through L1 and the tiers below."""

import time
from typing import Any

import numpy as np
import pytest
import torch
from small_engines import GREEDY, KEEP, Make, settled
from tiny_models import config_of, plain, plain_logits, prompt

from kvtier.connector.local import LocalConnector
from kvtier.connector.plan import WorkerReport
from kvtier.engine.config import EngineConfig
from kvtier.engine.llm import Engine
from kvtier.engine.requests import FinishReason, SamplingParams
from kvtier.engine.sequence import SequenceState
from kvtier.tiers import RequestError
from kvtier.tiers.hierarchy import Span


def test_a_batch_answers_each_prompt_as_if_alone(make: Make) -> None:
    engine, module = make(), plain("llama")
    prompts = [prompt(seed, 3 + 13 * seed) for seed in range(8)]
    for tokens, answer in zip(prompts, engine.generate(prompts, GREEDY), strict=True):
        logits = plain_logits(module, tokens + answer.token_ids[:-1])[len(tokens) - 1 :]
        assert answer.token_ids == logits.argmax(-1).tolist()
        assert answer.finish_reason is FinishReason.LENGTH
        assert answer.ttft is not None
        assert answer.ttft > 0


def test_caching_off_hashes_and_finds_nothing(make: Make) -> None:
    engine = make(tiers=True, enable_prefix_caching=False)
    first, second = (engine.generate([prompt(1, 40)], KEEP)[0] for _ in range(2))
    assert (second.num_l1_tokens, second.num_external_tokens) == (0, 0)
    assert np.array_equal(first.logits, second.logits)


def test_seeded_draws_do_not_depend_on_the_batch(make: Make) -> None:
    params = [
        SamplingParams(max_tokens=12, temperature=1.0, top_p=0.9, seed=seed, ignore_eos=True) for seed in range(6)
    ]
    prompts = [prompt(seed, 10 + 5 * seed) for seed in range(6)]
    packed = [answer.token_ids for answer in make().generate(prompts, params)]
    alone = make(max_num_batched_tokens=9)
    assert [alone.generate([one], [how])[0].token_ids for one, how in zip(prompts, params, strict=True)] == packed
    # Nor on preemption.
    tight = make(num_blocks=9, block_size=8, enable_prefix_caching=False)
    assert [answer.token_ids for answer in tight.generate(prompts, params)] == packed
    assert tight.stats["preempted"] > 0
    # Other seeds, other text; no seed, another text each time.
    assert make().generate(prompts[:1], [params[1]])[0].token_ids != packed[0]
    unseeded = SamplingParams(max_tokens=12, temperature=1.0, ignore_eos=True)
    answers = make().generate([prompts[0]] * 3, unseeded)
    assert len({tuple(answer.token_ids) for answer in answers}) == 3


def test_stop_tokens_end_an_answer(make: Make) -> None:
    engine = make()
    [full] = engine.generate([prompt(5, 20)], GREEDY)
    stop = full.token_ids[3]
    [cut] = engine.generate([prompt(5, 20)], SamplingParams(max_tokens=8, ignore_eos=True, stop_token_ids=[stop]))
    assert cut.token_ids == full.token_ids[: full.token_ids.index(stop) + 1]
    assert cut.finish_reason is FinishReason.STOP


def test_streams_are_read_in_turns_and_closing_one_aborts_it(make: Make) -> None:
    engine = make()
    expected = [answer.token_ids for answer in make().generate([prompt(1, 30), prompt(2, 50)], GREEDY)]
    left, right = engine.stream(prompt(1, 30), GREEDY), engine.stream(prompt(2, 50), GREEDY)
    dropped = engine.stream(prompt(3, 40), SamplingParams(max_tokens=500, ignore_eos=True))
    assert next(dropped).token_id is not None
    pairs = list(zip(left, right, strict=True))
    assert [[a.token_id for a, _ in pairs], [b.token_id for _, b in pairs]] == expected
    assert pairs[-1][0].finish_reason is FinishReason.LENGTH
    dropped.close()  # type: ignore[attr-defined]
    assert [output.finish_reason for output in engine.step()] == [FinishReason.ABORT]
    assert not engine.has_unfinished


def test_generate_keeps_what_step_has_to_tell_others(make: Make) -> None:
    engine = make()
    other = engine.add_request(prompt(9, 12), SamplingParams(max_tokens=3, ignore_eos=True), request_id="other")
    engine.generate([prompt(1, 30)], GREEDY)
    told = []
    while engine.has_unfinished:
        told += engine.step()
    assert [output.request_id for output in told] == [other] * 3
    assert told[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("bad", "params", "message"),
    [
        ([], GREEDY, "the prompt is empty"),
        ([1] * 1020, GREEDY, "together more than the model's context of 1024"),
        ([1] * 500, SamplingParams(max_tokens=600), "together more than the model's context of 1024"),
    ],
)
def test_bad_input_is_refused_and_the_others_go_on(make: Make, bad: Any, params: SamplingParams, message: str) -> None:
    engine = make()
    good = engine.stream(prompt(1, 30), GREEDY)
    first = next(good)
    with pytest.raises(RequestError, match=message):
        engine.add_request(bad, params)
    with pytest.raises(ValueError, match=message):
        engine.generate([[1, 2, 3], bad], params)
    tokens = [first.token_id, *(output.token_id for output in good)]
    assert tokens == make().generate([prompt(1, 30)], GREEDY)[0].token_ids
    assert not engine.has_unfinished


def test_more_than_l1_holds_and_ids_in_use_are_refused(make: Make) -> None:
    engine = make(num_blocks=4)
    with pytest.raises(RequestError, match="more than the 64 that fit L1"):
        engine.add_request(prompt(1, 60), GREEDY)
    engine.add_request(prompt(1, 20), GREEDY, request_id="x")
    with pytest.raises(RequestError, match="request id 'x'"):
        engine.add_request(prompt(1, 20), GREEDY, request_id="x")
    engine.abort("x")
    with pytest.raises(RequestError, match="request id 'x'"):  # its end was not told yet
        engine.add_request(prompt(1, 20), GREEDY, request_id="x")
    engine.step()
    engine.add_request(prompt(1, 20), GREEDY, request_id="x")
    engine.close()
    with pytest.raises(RequestError, match="the engine is closed"):
        engine.add_request(prompt(1, 20), GREEDY)


def test_a_forward_that_raises_leaves_the_engine_whole(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(tiers=True)
    expected = make().generate([prompt(1, 100)], GREEDY)[0].token_ids
    run, calls = engine.runner.run, iter(range(100))

    def failing(batch: Any) -> torch.Tensor:
        if next(calls) in (1, 4):  # in the middle of the prefill, and of decoding
            raise torch.OutOfMemoryError("no memory")
        return run(batch)

    monkeypatch.setattr(engine.runner, "run", failing)
    request_id = engine.add_request(prompt(1, 100), GREEDY)
    tokens: list[int | None] = []
    failures = 0
    while engine.has_unfinished:
        try:
            tokens += [output.token_id for output in engine.step()]
        except torch.OutOfMemoryError:
            failures += 1
            assert engine.request(request_id).state is SequenceState.WAITING
    assert failures == 2
    assert tokens == expected


def test_waiting_for_a_load_does_not_spin(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(tiers=True)
    engine.generate([prompt(1, 90)], GREEDY)
    settled(engine)
    engine.pool.reset()
    # The copy's report is late by 50 ms.
    poll, start = engine.worker.poll, time.monotonic()
    steps_before = engine.stats["steps"]
    monkeypatch.setattr(engine.worker, "poll", lambda: poll() if time.monotonic() - start > 0.05 else WorkerReport())
    monkeypatch.setattr(engine.worker, "wait", time.sleep)
    [answer] = engine.generate([prompt(1, 90)], SamplingParams(max_tokens=1))
    assert answer.num_external_tokens == 80
    assert engine.stats["steps"] - steps_before < 12


def test_prefill_teaches_the_tiers_how_fast_recomputing_is(make: Make) -> None:
    engine = make(tiers=True)
    assert isinstance(engine.connector, LocalConnector)
    rates = engine.connector.hierarchy.rates
    rates.policy = "auto"
    rates.loaded("file", 1, 1.0)  # a disk of one byte per second …
    assert rates.worth_loading(Span(0, 1000, {"file": 1000}))  # … is better than nothing known
    engine.generate([prompt(1, 100)], GREEDY)  # a step of 64 tokens, one of 36, then decoding
    assert not rates.worth_loading(Span(0, 1000, {"file": 1000}))


def test_what_the_last_step_stored_is_found_without_another_step(make: Make) -> None:
    """An idle engine makes no steps, and other engines look the prompt up meanwhile."""
    engine = make(tiers=True)
    engine.generate([prompt(1, 33)], SamplingParams(max_tokens=1, ignore_eos=True))
    chain = engine.prompt(prompt(1, 33)).chain
    assert chain is not None
    assert isinstance(engine.connector, LocalConnector)
    assert engine.connector.tiers.holds(chain.hashes) == [True, True]


def test_a_prompt_named_before_the_weights_changed_is_named_anew(make: Make) -> None:
    """Else other engines would find the new weights' KV under the old ones' names."""
    engine, tokens = make(), prompt(1, 40)
    named = engine.prompt(tokens, "a")
    assert named.chain is not None
    with torch.no_grad():
        next(engine.model.module.parameters()).mul_(2.0)
    engine.reset_cache()
    engine.add_request(named, GREEDY)
    while engine.has_unfinished:
        engine.step()
    assert engine.pool.lookup(named.chain.hashes) == 0
    assert engine.generate([tokens], GREEDY, cache_salt="a")[0].num_l1_tokens == 32


def test_the_configured_salt_holds_for_requests_without_one(make: Make) -> None:
    engine = make(cache_salt="a")
    engine.generate([prompt(1, 40)], GREEDY)
    assert engine.generate([prompt(1, 40)], GREEDY, cache_salt="b")[0].num_l1_tokens == 0
    assert engine.generate([prompt(1, 40)], GREEDY, cache_salt="a")[0].num_l1_tokens == 32


def test_an_l1_that_cuts_the_context_says_so_once_with_the_size_that_does_not(caplog: pytest.LogCaptureFixture) -> None:
    config = config_of("llama")
    config.max_position_embeddings = 1000

    def told(**options: Any) -> list[str]:
        caplog.clear()
        engine = Engine.from_config(config, EngineConfig(block_size=16, **options))
        engine.close()
        assert (engine.fits_l1 < engine.max_model_len) == bool(caplog.records)
        return [record.getMessage() for record in caplog.records]

    [line] = told(num_blocks=40)
    assert line == (
        "[l1] holds 640 tokens, and longer requests are refused: this model takes 1000; "
        '[l1] size = "1MiB" or num_blocks = 63 holds that many'
    )
    # either of the two, or to want no more than that
    assert told(num_blocks=63) == told(l1_bytes=1 << 20) == told(num_blocks=40, max_model_len=640) == []
