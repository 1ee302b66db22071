"""Rows of docs/models.md through a real vLLM again: windows with experts, shared layers, and one that is refused."""

from pathlib import Path

import pytest
from extent import brief

pytest.importorskip("vllm", reason="no vLLM here; run `make test-vllm`")

from _architectures import ARCHITECTURES
from _model_trial import attempt
from _readme import saved


@pytest.mark.exhaustive  # its families have stories of their own
@pytest.mark.parametrize("name", brief(["gpt-oss"], ["gpt-oss", "gemma3n", "qwen3-next"]))
def test_a_row_run_again_says_the_same(name: str, tmp_path: Path) -> None:
    [architecture] = [one for one in ARCHITECTURES if one.name == name]
    [row] = [row for row in saved()["models"]["results"] if (row["engine"], row["architecture"]) == ("vllm", name)]
    found = attempt("vllm", architecture, tmp_path)._asdict()
    assert found == {key: row[key] for key in found}
