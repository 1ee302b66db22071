"""docs/models.md is what benchmarks/models.py saved; rows of it, run again; each refusal ends with what to do."""

import json
import re
from pathlib import Path
from typing import Any, Final

import pytest
from _architectures import ARCHITECTURES
from _model_trial import attempt
from _models_page import ENGINES, MODELS, general, models_table, saved
from _readme import BEGIN, END

BY_NAME: Final = {one.name: one for one in ARCHITECTURES}
WAY_OUT: Final = r"(use|leave|start|set|name|choose|load) [^;]*$"

# One of each kind: window, chunk, cap and sinks; experts; one head for all; a vision part; and each way to say no.
AGAIN: Final = (
    ("kvtier", ("llama4", "gemma2", "gpt-oss", "gpt2", "mamba")),
    ("transformers", ("gemma3", "falcon-7b", "qwen2-vl", "mamba", "deepseek-v2", "gemma3n", "gemma4", "t5", "lfm2")),
)


def rows() -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["engine"], row["architecture"]): row for row in saved()["results"]}


def test_the_page_shows_what_the_program_saved() -> None:
    """After a run was saved: `python benchmarks/_readme.py`."""
    assert MODELS.read_text().partition(BEGIN)[2].partition(END)[0] == models_table()


def test_every_engine_met_every_architecture() -> None:
    """A row that was not tried is "not tried" in the table."""
    assert len(ARCHITECTURES) >= 30
    assert set(rows()) == {(engine, name) for engine in ENGINES for name in BY_NAME}
    assert {row["status"] for row in rows().values()} <= {"hits", "no hits", "refused", "absent", "not run"}


@pytest.mark.parametrize(
    "message", sorted({general(row["message"]) for row in rows().values() if row["status"] in ("refused", "no hits")})
)
def test_each_refusal_ends_with_what_to_do(message: str) -> None:
    assert re.search(WAY_OUT, message), message


@pytest.mark.parametrize(("engine", "name"), [(engine, name) for engine, names in AGAIN for name in names])
def test_a_row_run_again_says_the_same(engine: str, name: str, tmp_path: Path) -> None:
    found = attempt(engine, BY_NAME[name], tmp_path).row
    row = rows()[engine, name]
    assert found == {key: row[key] for key in found}


def test_a_hit_is_a_hit_in_both_rounds() -> None:
    for row in rows().values():
        assert (row["status"] == "hits") == (min(row["warm"], row["restart"]) >= 128), row


def test_the_saved_file_is_the_programs() -> None:
    document = saved()
    assert document["benchmark"] == "models"
    assert all(target["met"] for target in document["targets"]), json.dumps(document["targets"])
