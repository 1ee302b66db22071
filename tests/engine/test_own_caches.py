"""Stories of models that compute each sequence over transformers' own cache: with and without recurrent states."""

import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _architectures import ARCHITECTURES
from extent import brief
from small_engines import end, settled
from state_models import COARSE_STEPS, CONFIGS, PURE, SHOWN, config_of
from tiny_models import prompt

from kvtier.connector import ClosedChain, StatePieces, WorkerReport
from kvtier.connector.local import LocalConnector
from kvtier.engine import states
from kvtier.engine.config import EngineConfig
from kvtier.engine.llm import Engine
from kvtier.engine.model import Model
from kvtier.engine.requests import SamplingParams
from kvtier.engine.states import StateScheduler
from kvtier.tiers.config.config import Config
from kvtier.tiers.errors import ConfigError
from kvtier.tiers.hierarchy.hierarchy import evict_everywhere

BLOCK = 16
NEW = 24
LONG = 1200  # tokens: states at powers of two, behind blocks 32 and 64, and behind the last block, 74
ROWS = {one.name: one for one in ARCHITECTURES}
Open = Callable[..., Engine]


@cache
def model(kind: str) -> Model:
    """With its module as transformers made it: what it says alone is the truth."""
    return Model.from_config(config_of(kind) if kind in CONFIGS else ROWS[kind].make_config())


@cache
def _said(kind: str, tokens: tuple[int, ...], number: int) -> list[int]:
    options: dict[str, Any] = {"max_new_tokens": number, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    module: Any = model(kind).module
    ids = torch.tensor([tokens])
    mask = torch.ones_like(ids)  # else it takes token 0 for padding
    text: list[int] = module.generate(ids, attention_mask=mask, **options)[0, len(tokens) :].tolist()
    return text


def said(kind: str, tokens: Sequence[int], number: int = NEW) -> list[int]:
    """What transformers alone answers."""
    return _said(kind, tuple(tokens), number)


def settings(home: Path | None, **section: Any) -> Config:
    sections: dict[str, Any] = {"host": {"size": "16MiB"}}
    if home is not None:
        sections["file"] = {"path": str(home), "size": "64MiB", "deadline": "60s"}
    cache_section = {"block_size": BLOCK, "load_or_recompute": "load", "prefetch_deadline": "60s", **section}
    return Config(**sections, cache=cache_section)


@pytest.fixture
def open_engine(tmp_path: Path, at_end: ExitStack) -> Open:
    """Opens engines over one slab; at the end laws are checked, and nothing leaked."""

    def factory(kind: str, slab: bool = True, **options: Any) -> Engine:
        chosen: dict[str, Any] = {"block_size": BLOCK, "num_blocks": 256, "max_num_batched_tokens": 100}
        connect = LocalConnector.connect(settings(tmp_path / "slab" if slab else None))
        engine = Engine(model(kind), EngineConfig(**chosen | {"max_num_seqs": 4} | options), connect)
        at_end.callback(end, engine)
        return engine

    return factory


def run(engine: Engine, prompts: Sequence[Sequence[int]], number: int = NEW) -> list[list[int]]:
    """All answers at once; the pool's laws hold after each step."""
    params = SamplingParams(max_tokens=number, ignore_eos=True)
    texts: dict[str, list[int]] = {engine.add_request(list(tokens), params): [] for tokens in prompts}
    while engine.has_unfinished:
        for output in engine.step():
            if output.token_id is not None:
                texts[output.request_id].append(output.token_id)
        engine.pool.check()
    assert engine.drain(60)
    return list(texts.values())


def ask(engine: Engine, tokens: Sequence[int], number: int = NEW) -> tuple[list[int], int, int]:
    """The answer, and how many tokens of the prompt L1 had and were loaded."""
    [answer] = engine.generate([list(tokens)], SamplingParams(max_tokens=number, ignore_eos=True))
    engine.pool.check()
    settled(engine)
    return answer.token_ids, answer.num_l1_tokens, answer.num_external_tokens


def pieces_of(engine: Engine, tokens: Sequence[int], border: int) -> list[bytes]:
    """The names of a state's pieces behind the first `border` blocks."""
    chain = engine.prompt(list(tokens)).chain
    assert chain is not None
    assert isinstance(engine.scheduler, StateScheduler)
    return list(StatePieces(chain, border, range(engine.scheduler._states.traits.num_pieces)).hashes)


def hierarchy(engine: Engine) -> Any:
    connector: Any = engine.connector
    return connector.hierarchy


@pytest.mark.parametrize("kind", SHOWN)
def test_a_prompt_is_found_in_l1_below_and_after_a_restart(open_engine: Open, kind: str) -> None:
    tokens = prompt(1, 391)
    expected = said(kind, tokens)
    assert expected != said(kind, prompt(2, 391))  # the comparison proves something
    engine = open_engine(kind)
    assert ask(engine, tokens) == (expected, 0, 0)
    assert ask(engine, tokens) == (expected, 384, 0)
    engine.pool.reset()
    assert ask(engine, tokens) == (expected, 0, 384)
    # The next turn goes on behind the answer, or behind the prompt if transformers computes answers less exactly.
    turn = [*tokens, *expected, *prompt(3, 6)]
    at = 384 if kind in COARSE_STEPS else 400
    assert ask(engine, turn) == (said(kind, turn), at, 0)
    engine.close()
    again = open_engine(kind)
    assert ask(again, turn) == (said(kind, turn), 0, 416)
    # L1 has blocks enough of the prompt, and not its state: that comes with the last block.
    assert ask(again, tokens) == ((expected, 0, 384) if kind in PURE else (expected, 368, 16))


@pytest.mark.parametrize("name", ["deepseek-v3.2", *brief([], ["gemma4", "gemma4-shared", "mimo-v2-flash"])])
def test_layers_that_differ_lie_in_flat_blocks(open_engine: Open, name: str) -> None:
    tokens = prompt(1, 150)
    engine = open_engine(name)
    assert engine.shape.block_shape[:4] == (1, 1, 1, 1)
    expected = said(name, tokens, 6)
    assert expected != said(name, prompt(2, 150), 6)
    assert ask(engine, tokens, 6) == (expected, 0, 0)
    assert ask(engine, tokens, 6) == (expected, 149, 0)  # a part of the last block, too
    engine.pool.reset()
    assert ask(engine, tokens, 6) == (expected, 0, 149)
    engine.close()
    assert ask(open_engine(name), tokens, 6)[::2] == (expected, 144)  # the slab has whole blocks alone


@pytest.mark.parametrize("kind", ["kimi-linear", *brief([], ["mamba2", "qwen3.5"])])
def test_prompts_that_part_in_the_middle_share_what_is_before(open_engine: Open, kind: str) -> None:
    shared, found = prompt(1, 1100), []
    engine = open_engine(kind)
    for seed in (2, 3, 4):
        tokens = [*shared, *prompt(seed, 100)]
        text, num_l1, _ = ask(engine, tokens, 8)
        assert text == said(kind, tokens, 8)
        found.append(num_l1)
    # A long prompt leaves states at powers of two. With K and V the second prompt sees where it parts from the first.
    assert found == ([0, 1024, 1024] if kind in PURE else [0, 1024, 1088])


@pytest.mark.parametrize(
    ("kind", "preemption"),
    brief(
        [("qwen3.5", "recompute"), ("mamba2", "offload")],
        [*product(["mamba2", "qwen3.5", "jamba", "nemotron-h", "gemma4"], ["recompute", "offload"])],
    ),
)
def test_a_batch_in_a_pool_too_small_for_it_says_the_same(open_engine: Open, kind: str, preemption: str) -> None:
    prompts = [prompt(seed, 60 + 7 * seed) for seed in range(4)]
    engine = open_engine(kind, num_blocks=20, preemption=preemption, max_num_batched_tokens=53)
    for _ in range(2):
        assert run(engine, prompts, 40) == [said(kind, tokens, 40) for tokens in prompts]
    assert bool(engine.stats["preempted"]) == (kind not in PURE)  # without K and V nobody is in anybody's way


def test_equal_prompts_at_once_are_computed_once(open_engine: Open) -> None:
    engine = open_engine("qwen3.5")
    tokens = prompt(1, 391)
    assert run(engine, [tokens] * 3, 8) == [said("qwen3.5", tokens, 8)] * 3
    assert engine.stats["l1_tokens"] == 2 * 384


@pytest.mark.parametrize("kind", ["qwen3.5", *brief([], ["mamba2", "falcon-h1"])])
def test_a_lost_piece_costs_hits_and_nothing_else(open_engine: Open, kind: str) -> None:
    tokens = prompt(1, LONG)
    expected = said(kind, tokens, 8)
    engine = open_engine(kind)
    assert ask(engine, tokens, 8) == (expected, 0, 0)
    # One piece of the last border's state is gone below, and its blocks are there: the border before serves.
    engine.pool.reset()
    assert evict_everywhere(hierarchy(engine), pieces_of(engine, tokens, 74)[-1:], 60)["file"] == 1
    assert ask(engine, tokens, 8) == (expected, 0, 1024)
    assert ask(engine, tokens, 8) == (expected, 1184, 0)  # it was stored again
    # All states are gone.
    engine.pool.reset()
    for border in (32, 64, 74):
        evict_everywhere(hierarchy(engine), pieces_of(engine, tokens, border), 60)
    assert ask(engine, tokens, 8) == (expected, 0, 0)


class OneBorderOff(ClosedChain):
    """A request's blocks up to a border, and behind them the states of the border before."""

    def __init__(self, blocks: Any, border: int, groups: Sequence[int], *, keeps_blocks: bool) -> None:
        super().__init__(blocks, border, groups, keeps_blocks=keeps_blocks)
        own = len(self.hashes) - len(groups)
        self.hashes = [*self.hashes[:own], *StatePieces(blocks, border - 1, range(len(groups))).hashes]


@pytest.mark.parametrize("kind", ["mamba2", "qwen3.5"])
def test_logits_tell_a_state_from_that_of_the_border_before(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    tokens = prompt(1, 391)
    module: Any = model(kind).module
    with torch.inference_mode():
        expected = module(torch.tensor([tokens]), use_cache=False).logits[0, -1].numpy()
    engine = open_engine(kind)
    for length in (375, 391):  # states behind 23 blocks, and behind 24
        ask(engine, tokens[:length])

    def distance(found: tuple[int, int]) -> float:
        params = SamplingParams(max_tokens=1, ignore_eos=True, keep_logits=True)
        [answer] = engine.generate([tokens], params)
        assert (answer.num_l1_tokens, answer.num_external_tokens) == found
        assert engine.drain(60)
        return float(np.linalg.norm(answer.logits[0] - expected) / np.linalg.norm(expected))

    for found in ((384, 0), (0, 384)):
        if found[1]:
            engine.pool.reset()
        right = distance(found)
        assert right < 1e-5
        with monkeypatch.context() as patch:
            patch.setattr(states, "StatePieces", lambda chain, border, groups: StatePieces(chain, border - 1, groups))
            patch.setattr(states, "ClosedChain", OneBorderOff)
            if found[1]:
                engine.pool.reset()
            assert distance(found) > 100 * right


@pytest.mark.parametrize("kind", ["mamba2", "qwen3.5"])
def test_an_abort_leaves_nothing(open_engine: Open, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    tokens = prompt(1, 391)
    params = SamplingParams(max_tokens=NEW, ignore_eos=True)
    engine = open_engine(kind)
    name = engine.add_request(tokens, params)
    for _ in range(6):  # in its answer
        engine.step()
    assert engine.request(name).num_generated
    engine.abort(name)
    engine.pool.check()
    assert ask(engine, tokens) == (said(kind, tokens), 384, 0)
    engine.pool.reset()
    name = engine.add_request(tokens, params)
    with monkeypatch.context() as patch:
        patch.setattr(engine.worker, "poll", WorkerReport)
        while name not in engine.scheduler.loading:
            engine.step()
        engine.abort(name)  # its copy may still write
        engine.step()
        engine.pool.check()
        assert engine.pool.num_free_blocks < engine.pool.num_blocks
    assert run(engine, [tokens]) == [said(kind, tokens)]


def test_a_load_that_fails_is_computed(open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = prompt(1, 391)
    engine = open_engine("qwen3.5")
    ask(engine, tokens)
    engine.pool.reset()

    def broken(*_: Any) -> None:
        raise OSError("no copies today")

    with monkeypatch.context() as patch:
        worker: Any = engine.worker
        stream: Any = worker.connect(hierarchy(engine).region.region_id)
        patch.setattr(stream, "load", broken)
        name = engine.add_request(tokens, SamplingParams(max_tokens=NEW, ignore_eos=True))
        text: list[int] = []
        while engine.has_unfinished:
            try:
                text += [output.token_id for output in engine.step() if output.token_id is not None]
            except OSError:
                assert name in engine.scheduler.live
            engine.pool.check()
    assert text == said("qwen3.5", tokens)
    assert engine.stats["failed_loads"]


@pytest.mark.parametrize(
    ("kind", "act", "is_below"),
    brief(
        [("qwen3.5", "take", False), ("mamba2", "put", True), ("qwen3.5", "go_on", True)],
        [*product(["qwen3.5", "mamba2"], ["take", "put", "go_on"], [False, True])],
    ),
)
def test_a_device_without_room_for_a_state_costs_hits_and_no_token(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch, kind: str, act: str, is_below: bool
) -> None:
    engine = open_engine(kind)
    first = [prompt(1, 100), prompt(2, 77)]
    texts = run(engine, first)
    turns = [[*tokens, *text, *prompt(3, 60)] for tokens, text in zip(first, texts, strict=True)]
    if is_below:
        settled(engine)
        engine.pool.reset()
    runner: Any = engine.runner
    whole, calls = getattr(runner, act), 0

    def full(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls in (1, 3):
            raise torch.OutOfMemoryError("no room for a state")
        return whole(*given)

    params = SamplingParams(max_tokens=NEW, ignore_eos=True)
    told: dict[str, list[int]] = {engine.add_request(list(tokens), params): [] for tokens in turns}
    with monkeypatch.context() as patch:
        patch.setattr(runner, act, full)
        while engine.has_unfinished:
            for output in engine.step():
                told[output.request_id] += [output.token_id] if output.token_id is not None else []
            engine.pool.check()
    assert calls >= 3
    assert list(told.values()) == [said(kind, tokens) for tokens in turns]
    assert engine.drain(60)
    assert engine.pool.num_free_blocks == engine.pool.num_blocks
    assert engine.stats["unkept_states"] == (2 if act != "go_on" else 0)
    assert engine.stats["failed_loads"] == (2 if act == "go_on" and is_below else 0)
    assert run(engine, turns) == list(told.values())


@pytest.mark.parametrize("kind", ["qwen3.5", *brief([], ["mamba2", "jamba"])])
def test_random_stories_say_what_transformers_says(open_engine: Open, kind: str) -> None:
    """Turns of chats, shared beginnings, aborts and lost blocks, in a pool that is too small."""
    dice = random.Random(kind)
    engine = open_engine(
        kind, num_blocks=48, max_num_batched_tokens=70, preemption=dice.choice(["recompute", "offload"])
    )
    chats = [prompt(seed, dice.randrange(20, 120)) for seed in range(4)]
    wanted: dict[str, list[int]] = {}
    texts: dict[str, list[int]] = {}
    for _ in range(brief(25, 100)):
        if dice.random() < 0.3 and len(engine.scheduler.live) < 5:
            which = dice.randrange(len(chats))
            number = dice.randrange(1, 30)
            if len(chats[which]) > 250:
                chats[which] = chats[which][: dice.randrange(30, 100)]
            name = engine.add_request(chats[which], SamplingParams(max_tokens=number, ignore_eos=True))
            wanted[name], texts[name] = said(kind, chats[which], 30)[:number], []
            chats[which] = [*chats[which], *wanted[name], *prompt(dice.randrange(99), dice.randrange(1, 40))]
        for output in engine.step():
            if output.token_id is not None:
                texts[output.request_id].append(output.token_id)
        engine.pool.check()
        if dice.random() < 0.03 and engine.scheduler.live:
            name = dice.choice(list(engine.scheduler.live))
            engine.abort(name)
            wanted[name] = wanted[name][: len(texts[name])]
        if dice.random() < 0.05:
            chain: Any = engine.prompt(dice.choice(chats)).chain
            evict_everywhere(hierarchy(engine), [dice.choice(chain.hashes)] if chain.hashes else [], 60)
        if dice.random() < 0.05 and not engine.scheduler.live:
            engine.pool.reset()
    while engine.has_unfinished:
        for output in engine.step():
            if output.token_id is not None:
                texts[output.request_id].append(output.token_id)
        engine.pool.check()
    assert texts == wanted
    if kind != "jamba":  # it goes on from a border only if little of the prompt is left, so seldom here
        assert engine.stats["l1_tokens"] + engine.stats["external_tokens"] > 0


def test_what_such_a_model_leaves_out(open_engine: Open) -> None:
    engine = open_engine("qwen3.5", loading="layerwise")
    assert (engine.config.partial_blocks, engine.config.loading) == (False, "async")
    for kind in ("qwen3.5", "gemma4"):
        with pytest.raises(ConfigError, match=r"exact, model kind '.*': transformers computes it over .*; leave exact"):
            Engine(model(kind), EngineConfig(exact=True))
        with pytest.raises(ConfigError, match=r"a blend supports the layers of llama"):
            Engine(model(kind), EngineConfig(segments="on"))


def test_a_prompt_longer_than_l1_needs_no_block_without_k_and_v(open_engine: Open) -> None:
    engine = open_engine("mamba2", num_blocks=4, max_model_len=2000)
    tokens = prompt(1, 391)
    assert ask(engine, tokens) == (said("mamba2", tokens), 0, 0)
    assert ask(engine, tokens) == (said("mamba2", tokens), 384, 0)


def test_states_of_answers_are_kept_only_where_answers_are(open_engine: Open) -> None:
    tokens = prompt(1, 391)
    engine = open_engine("qwen3.5", store_generated=False)
    text, *_ = ask(engine, tokens)
    turn = [*tokens, *text, *prompt(3, 6)]
    assert ask(engine, turn) == (said("qwen3.5", turn), 384, 0)
    assert not np.asarray(engine.pool._core.refs).any()


def test_a_reader_of_events_learns_of_states_as_of_blocks(open_engine: Open) -> None:
    engine = open_engine("qwen3.5")
    engine.pool.listen()
    tokens = prompt(1, 391)
    ask(engine, tokens, 1)
    told = {record.chain_hash: record.parent for record in engine.pool.take(1000).stored}
    chain: Any = engine.prompt(tokens).chain
    pieces = pieces_of(engine, tokens, 24)
    assert set(told) == {*chain.hashes, *pieces}
    assert [told[piece] for piece in pieces] == [chain.hashes[23], *pieces[:-1]]


def test_a_prompt_that_fills_l1_is_answered_and_its_state_left_out(open_engine: Open) -> None:
    tokens = prompt(1, 391)
    engine = open_engine("qwen3.5", num_blocks=26)  # 415 tokens, and no piece of a state
    for _ in range(2):
        assert ask(engine, tokens) == (said("qwen3.5", tokens), 0, 0)
    assert engine.stats["unkept_states"]
