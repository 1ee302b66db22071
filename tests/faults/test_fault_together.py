"""Every kind of reuse at once, while everything goes wrong: random stories, held to what is true."""

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from extent import brief
from mischief import Mischief
from tiny_models import config_of
from uncached_truth import Truth

from kvtier.connector import overlapped
from kvtier.engine.config import EngineConfig
from kvtier.engine.llm import Engine

ROUNDS = 4


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny matrices: more threads only wait for each other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def truth() -> Truth:
    return Truth()


@pytest.fixture(scope="module")
def cold() -> Iterator[Engine]:
    """An exact engine without a cache."""
    settings = EngineConfig(
        exact=True, exact_rows=128, max_num_batched_tokens=128, max_num_seqs=4, num_blocks=80,
        enable_prefix_caching=False,
    )  # fmt: skip
    engine = Engine.from_config(config_of("llama"), settings)
    yield engine
    engine.close()


@pytest.mark.parametrize(
    ("mode", "seed"),  # blocks of 16 and of 32 tokens
    brief(
        [("exact", 0), ("marked", 1), ("unmarked", 0)],
        [*itertools.product(["exact", "marked", "unmarked"], range(4))],
    ),
)
def test_whatever_goes_wrong_answers_are_right_and_nothing_approximate_is_kept(
    disk_dir: Path, truth: Truth, cold: Engine, mode: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hits inside a block, tails, segments and both ends; aborts, preemption, bad copies, late reads, rotten blocks."""
    dice = random.Random(seed)
    monkeypatch.setattr(overlapped, "_GROUP_BLOCKS", 3)  # short prompts have several groups, too
    monkeypatch.setattr(overlapped.OverlappedLoad, "_is_late", lambda *_: dice.random() < 0.3)
    exact, marks = mode == "exact", mode != "unmarked"
    story = Mischief(disk_dir, seed, exact=exact, marks=marks, block_size=(16, 32)[seed % 2])
    story.play(ROUNDS if marks else 2 * ROUNDS)
    assert exact or story.engine.stats["blends"] > 0
    story.rest()
    assert truth.check_answers(story, cold if exact else None) > 0
    assert truth.check_blocks(story) > 0
    story.close()
