"""A prompt right behind itself, prefix caching off: what is being stored is waited for, not computed again."""

import time
from pathlib import Path

import pytest
from extent import brief

pytest.importorskip("vllm", reason="no vLLM here; run `make test-vllm`")

from vllm_rig import before_copies, engine, prompt, tiers

from kvtier.tiers.checksum import checksum
from kvtier.tiers.host.host import HostRegion

pytestmark = pytest.mark.timeout(300)

PROMPT = prompt(1, 200)  # six blocks can be loaded


def slow_stores(monkeypatch: pytest.MonkeyPatch, stage: str, seconds: float) -> None:
    """Each store takes so long: its copy, or hashing what it copied."""

    def hashed(memory: memoryview) -> int:
        time.sleep(seconds / 6)
        return checksum(memory)

    if stage == "copy":
        before_copies(monkeypatch, lambda direction: time.sleep(seconds * (direction == "store")))
    else:
        monkeypatch.setattr("kvtier.tiers.hierarchy.stores._SEALED_NOW", -1)  # else who stores a few bytes hashes them
        monkeypatch.setattr(HostRegion, "checksums", lambda region, slots: [*map(hashed, map(region.slot, slots))])


@pytest.mark.parametrize("stage", brief(["copy"], ["copy", "hash"]))
def test_a_prompt_right_behind_itself_is_loaded(stage: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.connector.vllm.scheduler._STORED_SOON", 60.0)
    monkeypatch.setattr("kvtier.tiers.hierarchy.hierarchy._SEALING", 60.0)
    slow_stores(monkeypatch, stage, 0.3)
    with engine(model, tiers(), enable_prefix_caching=False) as vllm:
        [first] = vllm.run([PROMPT], 1)
        assert vllm.half.pending or not vllm.hierarchy.stores.sealing_queue.idle  # its blocks are not in L2 yet
        [second] = vllm.run([PROMPT], 1)
        assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 192)
        assert first.outputs[0].token_ids == second.outputs[0].token_ids


@pytest.mark.parametrize("stage", brief(["hash"], ["copy", "hash"]))
def test_a_store_that_takes_too_long_is_not_awaited(stage: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_stores(monkeypatch, stage, 3.0)
    with engine(model, tiers(), enable_prefix_caching=False) as vllm:
        [first] = vllm.run([PROMPT], 1)
        [second] = vllm.run([PROMPT], 1)
        assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 0)
        assert first.outputs[0].token_ids == second.outputs[0].token_ids
