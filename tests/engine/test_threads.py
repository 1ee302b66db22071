"""Threads share an engine, and a step that fails half way: every answer is right, and so is all that a store keeps."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from at_once import at_once
from small_engines import GREEDY, end, over_slab, settled, small_engine
from tiny_models import prompt
from transformers.models.llama.modeling_llama import LlamaMLP

from kvtier.connector.local import LocalConnector
from kvtier.engine.llm import Engine
from kvtier.engine.requests import SamplingParams
from kvtier.tiers import RequestError

SMALL: dict[str, Any] = {"num_blocks": 64, "partial_blocks": False}
PROMPTS = [prompt(seed, 60 + 7 * seed) for seed in range(6)]


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    """What each prompt is answered with."""
    engine = small_engine()
    told = [engine.generate([tokens], GREEDY)[0].token_ids for tokens in PROMPTS]
    end(engine)
    return told


def test_threads_generate_and_stream_at_once_and_all_of_it_is_found_again(
    tmp_path: Path, texts: list[list[int]]
) -> None:
    engine, wrong = over_slab(tmp_path, **SMALL), []

    def generate(first: int) -> None:
        for turn in range(4):
            number = (first + turn) % len(PROMPTS)
            [answer] = engine.generate([PROMPTS[number]], GREEDY)
            if answer.token_ids != texts[number]:
                wrong.append(number)

    def stream(first: int) -> None:
        for turn in range(4):
            number = (first + turn) % len(PROMPTS)
            outputs = engine.stream(PROMPTS[number], GREEDY)
            tokens = [next(outputs).token_id, *(output.token_id for output in outputs)]
            if tokens != texts[number]:
                wrong.append(number)
            next(engine.stream(PROMPTS[0], GREEDY))  # and one that nobody reads to its end

    def look() -> None:
        for _ in range(8):
            engine.drain(0.01)
            assert not engine.abort("nobody")
            assert engine.stats["waiting"] >= 0

    at_once(*(lambda first=first: generate(first) for first in (0, 2)), lambda: stream(1), look)
    assert not wrong
    ends = set()
    while engine.has_unfinished:
        ends |= {output.finish_reason for output in engine.step()}
    assert ends - {None} == {"abort"}  # of the streams left: one that went behind a step is told a token more
    end(engine)
    again = over_slab(tmp_path, **SMALL)
    answers = again.generate(PROMPTS, GREEDY)
    assert [answer.token_ids for answer in answers] == texts
    assert all(answer.num_external_tokens for answer in answers)
    end(again)


def test_a_stream_that_is_collected_inside_a_step_is_aborted_after_it(texts: list[list[int]]) -> None:
    engine = small_engine()
    forgotten = [engine.stream(PROMPTS[0], GREEDY)]
    next(forgotten[0])
    run = engine.runner.run

    def collecting(batch: Any) -> Any:
        engine.runner.run = run  # type: ignore[method-assign]
        forgotten.clear()
        gc.collect()
        assert len(engine.scheduler.live) == 2  # the scheduler counts on what it has just scheduled
        return run(batch)

    engine.runner.run = collecting  # type: ignore[method-assign]
    outputs = engine.stream(PROMPTS[1], GREEDY)
    assert [output.token_id for output in outputs] == texts[1]
    assert engine.scheduler.stats["aborted"] == 1
    end(engine)


class Interrupt(BaseException):
    """As an interrupt from the keyboard: it comes anywhere."""


def fail(engine: Engine, place: str) -> Callable[[], None]:
    """Let the engine's next step fail there. Returns what heals it."""
    owner_name, _, name = place.partition(".")
    owner = {"runner": engine.runner, "worker": engine.worker, "scheduler": engine.scheduler, "engine": engine}[
        owner_name
    ]
    method = getattr(owner, name)

    def raising(*arguments: Any) -> Any:
        if name in ("schedule", "postprocess", "run", "sample"):
            method(*arguments)  # all of it, and then the failure
        raise Interrupt

    setattr(owner, name, raising)
    return lambda: setattr(owner, name, method)


@pytest.mark.parametrize("place", ["runner.run", "runner.sample", "worker.start_store"])
def test_of_a_step_that_fails_nothing_is_stored_and_the_engine_goes_on(
    tmp_path: Path, texts: list[list[int]], place: str
) -> None:
    engine = over_slab(tmp_path, **SMALL)
    heal = fail(engine, place)
    with pytest.raises(Interrupt):
        engine.generate([PROMPTS[0]], GREEDY)
    assert engine.drain(30)
    settled(engine)
    assert isinstance(engine.connector, LocalConnector)
    assert engine.connector.hierarchy.host.pool.counts().ready == 0
    heal()
    assert [answer.token_ids for answer in engine.generate(PROMPTS, GREEDY)] == texts
    end(engine)


@pytest.mark.parametrize("place", ["scheduler.schedule", "scheduler.postprocess", "scheduler.fail"])
def test_an_engine_interrupted_in_its_books_refuses_all_and_stores_nothing_more(
    tmp_path: Path, texts: list[list[int]], place: str
) -> None:
    engine = over_slab(tmp_path, **SMALL)
    assert engine.generate([PROMPTS[0]], GREEDY)[0].token_ids == texts[0]
    assert engine.drain(30)
    settled(engine)
    assert isinstance(engine.connector, LocalConnector)
    pool = engine.connector.hierarchy.host.pool
    num_stored = pool.counts().ready
    heals = [fail(engine, place)]
    if place == "scheduler.fail":
        heals.append(fail(engine, "runner.run"))
    with pytest.raises(Interrupt):
        engine.generate([PROMPTS[1]], GREEDY)
    for heal in heals:
        heal()
    said = "a step of this engine was interrupted half way; close it and make a new one"
    for call in (
        lambda: engine.generate([PROMPTS[1]], GREEDY),
        lambda: next(engine.stream(PROMPTS[1], GREEDY)),
        lambda: engine.add_request(PROMPTS[1]),
        engine.step,
        engine.reset_cache,
    ):
        with pytest.raises(RequestError, match=said):
            call()
    assert pool.counts().ready == num_stored
    engine.close()
    # what was stored before is there, and nothing of the step that was interrupted
    again = over_slab(tmp_path, **SMALL)
    answers = again.generate(PROMPTS, GREEDY)
    assert [answer.token_ids for answer in answers] == texts
    assert [bool(answer.num_external_tokens) for answer in answers] == [True, *[False] * 5]
    end(again)


def test_after_close_threads_get_an_error(texts: list[list[int]]) -> None:
    engine = small_engine()
    outputs = engine.stream(PROMPTS[0], SamplingParams(max_tokens=8, ignore_eos=True))
    assert next(outputs).token_id == texts[0][0]
    engine.close()
    with pytest.raises(RequestError, match="the engine is closed"):
        list(outputs)


def test_a_step_under_other_weights_is_refused_and_nothing_of_it_is_kept(
    tmp_path: Path, texts: list[list[int]]
) -> None:
    engine = over_slab(tmp_path, **SMALL)
    model: Any = engine.model.module
    weight, told = model.model.layers[1].mlp.up_proj.weight, list[int]()

    def read() -> None:
        for output in engine.stream(PROMPTS[0], SamplingParams(max_tokens=40, ignore_eos=True)):
            assert output.token_id is not None
            told.append(output.token_id)
            if len(told) == 20:
                weight.mul_(-1.0)

    with pytest.raises(RequestError, match=r"weights or adapters are others now; call reset_cache\(\) first"):
        read()
    assert len(told) == 20
    weight.mul_(-1.0)  # back as it was
    [answer] = engine.generate([PROMPTS[0]], GREEDY)
    assert answer.token_ids == texts[0]
    engine.drain(30)
    end(engine)
    engine = over_slab(tmp_path, **SMALL)
    asked = [*PROMPTS[0], *told, *PROMPTS[1]]
    [answer] = engine.generate([asked], GREEDY)
    assert answer.num_external_tokens == (len(PROMPTS[0]) + 19) // 16 * 16
    end(engine)
    bare = small_engine()
    assert bare.generate([asked], GREEDY)[0].token_ids == answer.token_ids
    end(bare)


def test_code_that_no_name_covers_is_found_by_what_it_computes(
    tmp_path: Path, texts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = over_slab(tmp_path, **SMALL)
    assert engine.generate([PROMPTS[0]], GREEDY)[0].token_ids == texts[0]
    other = "it computes other KV than when it was named"
    with monkeypatch.context() as swapped:
        swapped.setattr(LlamaMLP, "forward", torch.nn.Identity.forward)  # known code in another's place
        for _ in range(2):
            with pytest.raises(RequestError, match=other):
                engine.generate([PROMPTS[0]], GREEDY)
        with pytest.raises(RequestError, match=other):  # its weights have the same name
            engine.reset_cache()
    [answer] = engine.generate([PROMPTS[0]], GREEDY)  # as it was
    assert answer.token_ids == texts[0]
    end(engine)
