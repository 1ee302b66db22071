"""What reuse and repair do to answers, by a model trained to recall facts from documents that override each other."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from extent import brief
from recall import LENGTH, MODEL, NUM_DOCUMENTS, Asked, asked
from small_engines import end, settled

from kvtier.connector.local import LocalConnector
from kvtier.connector.segments import Repair, Segment
from kvtier.engine.config import EngineConfig
from kvtier.engine.llm import Engine
from kvtier.engine.requests import SamplingParams
from kvtier.tiers.config.config import Config

ONE = SamplingParams(max_tokens=1, ignore_eos=True)
SEGMENTS = [Segment(place * LENGTH, (place + 1) * LENGTH) for place in range(NUM_DOCUMENTS)]
UNREPAIRED = Repair(share=0.0)
QUESTIONS = brief(80, 160)


@pytest.fixture(scope="module")
def questions() -> list[Asked]:
    return asked(QUESTIONS // 4)


def opened(directory: Path | None = None, dtype: str = "float32") -> Engine:
    connect = None
    if directory is not None:
        file = {"path": str(directory), "size": "64MiB", "deadline": "60s"}
        cache = {"block_size": 8, "load_or_recompute": "load", "prefetch_deadline": "60s"}
        connect = LocalConnector.connect(Config.load(host={"size": "64MiB"}, file=file, cache=cache))
    settings = EngineConfig(block_size=8, num_blocks=2000, segments="on", segment_min_tokens=8)
    return Engine.from_pretrained(MODEL, settings, connect, dtype=dtype)


def recall(engine: Engine, questions: Sequence[Asked], repair: Repair | None) -> float:
    """The share of right answers; `repair` None: nothing is reused."""
    found = engine.generate(
        [each.prompt for each in questions],
        ONE,
        cache_salt=None if repair is not None else "nobody's",
        segments=[SEGMENTS if repair is not None else []] * len(questions),
        repair=repair,
    )
    if repair is not None:
        reused = LENGTH * (NUM_DOCUMENTS - 1)  # the first document is an ordinary prefix
        assert {each.num_segment_tokens for each in found} == {reused}
        assert {each.num_repaired_tokens for each in found} == {round(repair.most * reused)}
    return float(np.mean([one.token_ids == [each.answer] for one, each in zip(found, questions, strict=True)]))


@pytest.mark.parametrize("dtype", brief(["bfloat16"], ["float32", "bfloat16"]))
def test_repair_restores_what_reuse_costs(questions: list[Asked], dtype: str) -> None:
    engine = opened(dtype=dtype)
    full = recall(engine, questions, None)
    assert full >= 0.98
    assert recall(engine, questions, UNREPAIRED) <= 0.8 * full  # so the ruler still measures
    assert recall(engine, questions, Repair()) >= 0.95 * full  # 15 %
    assert recall(engine, questions, Repair("question", share=0.2)) >= 0.95 * full
    assert recall(engine, questions, Repair("deviation", 0.2, check_layer=2)) >= 0.95 * full
    assert recall(engine, questions, Repair("random", 0.2)) <= 0.85 * full  # it matters which tokens
    end(engine)


def test_documents_read_back_from_every_tier(questions: list[Asked], disk_dir: Path) -> None:
    some = questions[:40]
    engine = opened(disk_dir)
    full = recall(engine, some, None)
    engine.precompute([document for each in some for document in each.documents])
    settled(engine)
    for tier in ("L1", "L2", "file"):
        before = engine.stats
        if tier != "L1":
            engine.pool.reset()
        if tier == "file":
            engine.connector.hierarchy.host.pool.reset()  # type: ignore[attr-defined]
        assert recall(engine, some, Repair()) >= 0.95 * full
        settled(engine)
        fresh = {name: engine.stats[name] - before[name] for name in ("segments_loaded", "segments_computed")}
        assert fresh["segments_computed"] == 0
        assert (fresh["segments_loaded"] > 0) == (tier != "L1")
    end(engine)


def test_a_reordered_prompt_finds_its_documents(questions: list[Asked]) -> None:
    """Facts override earlier ones, so the answer depends on the order: what is reused must not remember another one."""
    engine = opened()
    turned = [Asked(each.documents[::-1], each.question, each.answer) for each in questions]
    engine.precompute([document for each in turned for document in each.documents])

    def answers(repair: Repair | None) -> list[list[int]]:
        segments = [SEGMENTS if repair is not None else []] * len(turned)
        found = engine.generate([each.prompt for each in turned], ONE, segments=segments, repair=repair)
        return [each.token_ids for each in found]

    full = answers(None)
    agree = [one == other for one, other in zip(answers(Repair(share=0.2)), full, strict=True)]
    assert np.mean(agree) >= 0.9
    assert engine.stats["segments_held"] == 3 * len(turned)
    end(engine)


@pytest.mark.parametrize(("form", "block"), brief([((12, 8), 8)], [((12, 8), 8), ((6, 16), 8), ((4, 24), 16)]))
def test_the_share_auto_repairs_what_five_percent_do_not(form: tuple[int, int], block: int) -> None:
    """Short documents deviate at many tokens: the check shows it, and more of them are repaired."""
    some = asked(QUESTIONS // 4, form=form)
    segments = [[Segment(place * form[1], (place + 1) * form[1]) for place in range(form[0])]] * len(some)
    settings = EngineConfig(block_size=block, num_blocks=3000, segments="on", segment_min_tokens=8)
    engine = Engine.from_pretrained(MODEL, settings, dtype="float32")
    prompts, right = [each.prompt for each in some], {}
    shares: list[Any] = [1.0, 0.05, "auto"]
    for share in shares:
        found = engine.generate(prompts, ONE, segments=segments, repair=Repair(share=share, max_deviation=9))
        right[share] = np.mean([one.token_ids == [each.answer] for one, each in zip(found, some, strict=True)])
        if share == "auto":
            assert all(each.repair_share is not None and 0.04 <= each.repair_share <= 0.21 for each in found)
    assert right["auto"] >= 0.95 * right[1.0]
    assert right["auto"] > right[0.05]
    end(engine)


def test_documents_without_marks_are_recalled_as_marked_ones() -> None:
    form = (4, 96)
    some = asked(QUESTIONS // 2, num_questions=1, form=form)  # each prompt once: what returns is computed exactly
    segments = [[Segment(place * form[1], (place + 1) * form[1]) for place in range(form[0])]] * len(some)
    right = []
    for way in ("on", "auto"):
        of_segments: Any = {"segments": way, "segment_min_tokens": 8, "repair_share": "auto"}
        settings = EngineConfig(block_size=8, num_blocks=12_000, **of_segments)
        engine = Engine.from_pretrained(MODEL, settings, dtype="float32")
        engine.precompute([document for each in some for document in each.documents])
        found = engine.generate([each.prompt for each in some], ONE, segments=segments if way == "on" else None)
        assert sum(each.num_segment_tokens for each in found) >= 0.5 * len(some) * form[0] * form[1]
        right.append(np.mean([one.token_ids == [each.answer] for one, each in zip(found, some, strict=True)]))
        end(engine)
    assert right[1] >= right[0] - 0.05
