"""Rows of docs/models.md, run again: they say what benchmarks/models.py saved."""

from pathlib import Path
from typing import Final

import pytest
from _architectures import ARCHITECTURES
from _model_trial import attempt
from _readme import saved
from extent import brief

BY_NAME: Final = {one.name: one for one in ARCHITECTURES}

# One of each kind: window, chunk, cap and sinks; experts; one head for all; a vision part; and each way to say no.
AGAIN: Final = (
    ("kvtier", ("llama4", "gemma2", "gpt-oss", "gpt2", "mamba")),
    ("transformers", ("gemma3", "falcon-7b", "qwen2-vl", "mamba", "deepseek-v2", "gemma3n", "gemma4", "t5", "lfm2")),
)
HIT_AND_REFUSED: Final = [("kvtier", "gpt-oss"), ("transformers", "t5")]


@pytest.mark.parametrize(
    ("engine", "name"), brief(HIT_AND_REFUSED, [(engine, name) for engine, names in AGAIN for name in names])
)
def test_a_row_run_again_says_the_same(engine: str, name: str, tmp_path: Path) -> None:
    found = attempt(engine, BY_NAME[name], tmp_path)._asdict()
    [row] = [row for row in saved()["models"]["results"] if (row["engine"], row["architecture"]) == (engine, name)]
    assert found == {key: row[key] for key in found}
