"""Pipeline stages in a real vLLM: each keeps its own layers in one slot, and other numbers of stages find them."""

import time
from pathlib import Path
from typing import Any, Final

import pytest

pytest.importorskip("vllm", reason="no vLLM here; run `make test-vllm`")

from vllm_rig import Engine, engine, make_checkpoint, prompt, said, tiers

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

PROMPTS = [prompt(1, 200), prompt(2, 96), prompt(3, 170)]
CACHED = [192, 95, 160]  # tokens: all but the last one of the second prompt's three blocks
STAGES: Final[dict[str, Any]] = {
    "pipeline_parallel_size": 2,
    "distributed_executor_backend": "mp",
    "worker_cls": "cpu_stages.StageWorker",
}


def settle(vllm: Engine) -> None:
    """As the rig does: every copy has ended. With stages, several steps are under way at once."""
    end = time.monotonic() + 60
    while vllm.half.pending:
        assert time.monotonic() < end
        vllm.core.engine_core.step_fn()
    assert not vllm.half._ops
    assert vllm.hierarchy.drain(60)


@pytest.mark.exhaustive
def test_two_stages_load_what_they_stored_and_what_one_stored(tmp_path: Path) -> None:
    model = make_checkpoint("llama", tmp_path / "llama")
    with engine(model) as plain:
        expected = plain.text(PROMPTS)
    vllm = Engine(model, tiers(tmp_path / "store"), **STAGES)
    try:
        assert said(vllm.run(PROMPTS)) == (expected, [0, 0, 0])
        settle(vllm)
        assert vllm.llm.llm_engine.reset_prefix_cache()
        assert said(vllm.run(PROMPTS)) == (expected, CACHED)
        settle(vllm)
        vllm.hierarchy.check()
    finally:
        vllm.core.shutdown()
    with engine(model, tiers(tmp_path / "store")) as alone:  # after a restart with one stage
        assert said(alone.run(PROMPTS)) == (expected, CACHED)
        more = alone.text([prompt(4, 130)])
    vllm = Engine(model, tiers(tmp_path / "store"), **STAGES)  # and with two again
    try:
        assert said(vllm.run([*PROMPTS, prompt(4, 130)])) == ([*expected, *more], [*CACHED, 128])
        settle(vllm)
        vllm.hierarchy.check()
    finally:
        vllm.core.shutdown()
