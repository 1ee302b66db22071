"""longrope under vLLM: one RoPE for all texts, chosen at the start by max_model_len, which blocks' names include."""

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="no vLLM here; run `make test-vllm`")

from _architectures import ARCHITECTURES
from vllm_rig import engine, prompt, said, tiers

pytestmark = pytest.mark.timeout(600)


@pytest.mark.exhaustive  # tests/connector/transformers/test_length_rope.py tells it of one process
def test_blocks_of_another_maximal_length_are_other_blocks(tmp_path: Path, disk_dir: Path) -> None:
    [row] = [one for one in ARCHITECTURES if one.name == "phi3-long"]  # trained with 1,024 tokens
    row.save(tmp_path / "model")
    tokens = [prompt(1, 300), prompt(2, 300)]
    answers = []
    for max_model_len in (1024, 2048):
        with engine(tmp_path / "model", max_model_len=max_model_len) as plain:
            right = plain.text(tokens)
        assert right[0] != right[1]
        for found in (0, 288):
            with engine(tmp_path / "model", tiers(disk_dir), max_model_len=max_model_len) as vllm:
                assert said(vllm.run(tokens)) == (right, [found] * 2)
        answers.append(right)
    assert answers[0] != answers[1]  # the short factors' and the long ones'
