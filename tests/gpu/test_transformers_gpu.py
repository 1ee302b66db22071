"""Segments around transformers' generate() on a real device: stored from there, loaded to it, blended on it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import plain, plain_logits, prompt

from kvtier.connector.segments import REPAIR_RULES, Repair, Segment
from kvtier.connector.transformers.adapter import KVTier
from kvtier.tiers.config.config import Config

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # CuPy's and the driver's own
]

DOCUMENTS = [prompt(1, 48), prompt(2, 64)]
PROMPT = [*prompt(8, 5), *DOCUMENTS[0], *DOCUMENTS[1], *prompt(9, 11)]
SEGMENTS = [Segment(5, 53), Segment(53, 117)]


def test_segments_are_stored_from_the_device_and_blended_on_it(disk_dir: Path) -> None:
    model: Any = plain("qwen3").to("cuda")
    file = {"path": str(disk_dir), "size": "64MiB", "deadline": "60s"}
    cache = {"segments": "on", "segment_min_tokens": 16, "load_or_recompute": "load", "prefetch_deadline": "60s"}
    config = Config.load(host={"size": "8MiB"}, file=file, cache=cache)
    tokens = torch.tensor([PROMPT], device="cuda")
    full = plain_logits(plain("qwen3"), PROMPT)[-1]
    for outcome in ("computed", "loaded"):
        with KVTier(model, config) as kv:
            cached, num_tokens = kv.load(tokens, segments=SEGMENTS, repair=Repair(share=1.0))
            with torch.inference_mode():
                found = model(tokens[:, num_tokens:], past_key_values=cached).logits[0, -1]
            assert torch.allclose(found.cpu(), full, atol=1e-3 * float(full.abs().max()))
            assert kv.stats()[f"segments_{outcome}"] == 2
            for rule in REPAIR_RULES:
                kv.generate(tokens, segments=SEGMENTS, repair=Repair(rule, 0.25, max_deviation=9), max_new_tokens=4)
                assert (kv.num_segment_tokens, kv.num_repaired_tokens) == (112, 28)
            assert kv.drain()
