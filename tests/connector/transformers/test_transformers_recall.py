"""What reuse and repair do to transformers' answers, by the model that recalls facts from documents."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from extent import brief
from recall import LENGTH, MODEL, NUM_DOCUMENTS, Asked, asked
from transformers import AutoModelForCausalLM

from kvtier.connector.models import cache_option
from kvtier.connector.segments import Repair, Segment
from kvtier.connector.transformers.adapter import KVTier
from kvtier.tiers.config.config import Config

SEGMENTS = [Segment(place * LENGTH, (place + 1) * LENGTH) for place in range(NUM_DOCUMENTS)]
REUSED = LENGTH * (NUM_DOCUMENTS - 1)  # the first document is an ordinary prefix


@pytest.fixture(scope="module")
def questions() -> list[Asked]:
    return asked(brief(20, 40))


def recall(kv: KVTier, questions: Sequence[Asked], repair: Repair) -> float:
    """The share of right answers, all of them in one batch."""
    prompts = torch.tensor([each.prompt for each in questions])
    cache, num_tokens = kv.load(prompts, segments=[SEGMENTS] * len(prompts), repair=repair)
    with torch.inference_mode():
        found = kv.model(prompts[:, num_tokens:], **cache_option(kv.model, cache)).logits[:, -1].argmax(-1)
    assert kv.num_segment_tokens == REUSED * len(prompts)
    assert kv.num_repaired_tokens == round(repair.share * REUSED) * len(prompts)
    return float(np.mean([answer == each.answer for answer, each in zip(found.tolist(), questions, strict=True)]))


@pytest.mark.parametrize("dtype", brief([torch.bfloat16], [torch.float32, torch.bfloat16]))
def test_repair_restores_what_reuse_costs(questions: list[Asked], dtype: torch.dtype, disk_dir: Path) -> None:
    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(MODEL, dtype=dtype).eval()
    file = {"path": str(disk_dir), "size": "64MiB", "deadline": "60s"}
    cache = {"segments": "on", "segment_min_tokens": 8, "block_size": 8, "prefetch_deadline": "60s"}
    config = Config.load(host={"size": "64MiB"}, file=file, cache={**cache, "load_or_recompute": "load"})
    prompts = torch.tensor([each.prompt for each in questions])
    with torch.inference_mode():
        answers = model(prompts).logits[:, -1].argmax(-1).tolist()
    full = float(np.mean([answer == each.answer for answer, each in zip(answers, questions, strict=True)]))
    assert full >= 0.98
    with KVTier(model, config) as kv:
        kv.precompute([document for each in questions for document in each.documents])
        assert kv.drain()
    with KVTier(model, config) as kv:  # from the slab
        assert recall(kv, questions, Repair(share=0.0)) <= 0.8 * full  # so the ruler still measures
        assert recall(kv, questions, Repair()) >= 0.95 * full  # 15 %
        assert recall(kv, questions, Repair("question", share=0.2)) >= 0.95 * full
        assert recall(kv, questions, Repair("deviation", 0.2, check_layer=2)) >= 0.95 * full
        assert recall(kv, questions, Repair("random", 0.2)) <= 0.85 * full  # it matters which tokens
        stats = kv.stats()
        assert stats["segments_computed"] == 0
        assert stats["segments_loaded"] > 0
