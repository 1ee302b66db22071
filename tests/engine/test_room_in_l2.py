"""Stories of host memory smaller than what is asked of it: prompts wait for room in it, and pass through in pieces."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from extent import brief
from small_engines import GREEDY, end, settled
from tiny_models import config_of, plain, prompt

from kvtier.connector.local import LocalConnector
from kvtier.connector.transformers.adapter import KVTier
from kvtier.engine.config import EngineConfig
from kvtier.engine.llm import Engine
from kvtier.tiers.config.config import Config

BLOCK = 16
BLOCK_BYTES = 3 * 2 * 2 * BLOCK * 16 * 4  # layers, K and V, heads, tokens, dim, float32
PROMPTS = [prompt(seed, 20 * BLOCK + 9) for seed in range(6)]
WHOLE = 20 * BLOCK


def tiers(disk: Path, slots: int, policy: str = "load") -> Config:
    cache = {"block_size": BLOCK, "load_or_recompute": policy, "prefetch_deadline": "60s"}
    disk_section = {"path": str(disk), "size": "64MiB", "deadline": "60s"}
    return Config(host={"size": slots * BLOCK_BYTES}, file=disk_section, cache=cache)


def engine(disk: Path, slots: int, policy: str = "load", **options: Any) -> Engine:
    chosen: dict[str, Any] = {
        "block_size": BLOCK,
        "num_blocks": 256,
        "max_num_seqs": 8,
        "partial_blocks": False,
        **options,
    }
    return Engine.from_config(
        config_of("llama"), EngineConfig(**chosen), LocalConnector.connect(tiers(disk, slots, policy)), dtype="float32"
    )


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """A slab with all prompts, and their answers."""
    path = tmp_path_factory.mktemp("slab")
    first = engine(path, 256)
    answers = [answer.token_ids for answer in first.generate(PROMPTS, GREEDY)]
    settled(first)
    end(first)
    return path, answers


@pytest.mark.parametrize("slots", [128, *brief([], [48, 24])])
def test_held_prompts_at_once_hit_as_one_by_one(disk: tuple[Path, list[list[int]]], slots: int) -> None:
    path, expected = disk
    small = engine(path, slots)
    answers = small.generate(PROMPTS, GREEDY)
    assert [answer.token_ids for answer in answers] == expected
    assert [answer.num_external_tokens for answer in answers] == [WHOLE] * len(PROMPTS)
    end(small)


@pytest.mark.parametrize("loading", ["async", "layerwise"])
def test_a_prompt_larger_than_l2_comes_in_pieces(disk: tuple[Path, list[list[int]]], loading: str) -> None:
    path, expected = disk
    small = engine(path, 8, loading=loading)
    [answer] = small.generate(PROMPTS[:1], GREEDY)
    assert (answer.token_ids, answer.num_external_tokens) == (expected[0], WHOLE)
    end(small)


@pytest.mark.parametrize("budget", [512, 6 * BLOCK])
def test_a_prompt_larger_than_l2_is_stored_in_pieces(
    tmp_path: Path, disk: tuple[Path, list[list[int]]], budget: int
) -> None:
    _, expected = disk
    small = engine(tmp_path, 8, max_num_batched_tokens=budget)  # what a later step computes overtakes no earlier piece
    small.generate(PROMPTS[:1], GREEDY)
    settled(small)
    end(small)
    again = engine(tmp_path, 8)
    [answer] = again.generate(PROMPTS[:1], GREEDY)
    assert (answer.token_ids, answer.num_external_tokens) == (expected[0], WHOLE)
    end(again)


@pytest.mark.parametrize("policy", ["load", "auto"])
def test_held_prompts_larger_than_l2_hit_where_l1_cannot_hold_all(
    disk: tuple[Path, list[list[int]]], policy: str
) -> None:
    path, expected = disk
    small = engine(path, 24, num_blocks=48, policy=policy)
    began = time.monotonic()
    answers = small.generate(PROMPTS, GREEDY)
    assert time.monotonic() - began < 20.0  # the deadline is a minute
    assert [answer.token_ids for answer in answers] == expected
    assert sum(answer.num_external_tokens for answer in answers) >= (0.95 if policy == "load" else 0.5) * WHOLE * len(
        PROMPTS
    )
    end(small)


def test_pieces_that_wait_give_way_where_l1_is_needed(tmp_path: Path, disk: tuple[Path, list[list[int]]]) -> None:
    _, expected = disk
    small = engine(tmp_path, 8, num_blocks=24)
    assert isinstance(small.connector, LocalConnector)
    gate = small.connector.hierarchy.ports[0]
    gate.breakers["write"].trip()  # nothing goes down: what has no slot could wait for long
    began = time.monotonic()
    answers = small.generate(PROMPTS, GREEDY)
    assert [answer.token_ids for answer in answers] == expected
    assert time.monotonic() - began < 1.0 * len(PROMPTS)  # two seconds each, if they were kept
    stats = small.connector.hierarchy.stats()
    assert stats['kvtier_store_dropped_total{tier="l2",reason="no_slot"}'] >= 12 * len(PROMPTS)
    gate.breakers["write"].probed(True)
    end(small)


def test_blocks_that_find_no_slot_are_told_of_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    alone = Engine.from_config(
        config_of("llama"),
        EngineConfig(block_size=BLOCK, num_blocks=256, max_num_seqs=8, partial_blocks=False),
        LocalConnector.connect(Config(host={"size": 8 * BLOCK_BYTES}, cache={"block_size": BLOCK})),
        dtype="float32",
    )
    for each in PROMPTS[:2]:
        alone.generate([each], GREEDY)
    settled(alone)
    end(alone)
    told = [record.getMessage() for record in caplog.records if "no slot" in record.getMessage()]
    assert len(told) == 1
    assert "[host] size" in told[0]


def test_a_request_that_is_aborted_between_its_pieces_leaves_nothing(disk: tuple[Path, list[list[int]]]) -> None:
    path, _ = disk
    for num_steps in range(1, brief(8, 24)):
        small = engine(path, 8)
        request = small.add_request(PROMPTS[0], GREEDY)
        for _ in range(num_steps):
            small.step()
        small.abort(request)
        while small.has_unfinished:
            small.step()
        end(small)


def test_kvtier_takes_a_prompt_larger_than_l2(disk: tuple[Path, list[list[int]]]) -> None:
    path, _ = disk
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    model: Any = plain("llama")
    tokens = torch.tensor(PROMPTS[:1])
    own = path / "transformers"
    with KVTier(model, tiers(own, 8)) as kv:
        expected = kv.generate(tokens, **options)
        assert kv.drain()
    with KVTier(model, tiers(own, 8)) as kv:
        assert torch.equal(kv.generate(tokens, **options), expected)
        assert kv.num_cached_tokens == WHOLE
