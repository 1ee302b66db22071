"""`kvtier demo rag`: what it shows is so, and where it is not, the demo says it and fails."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_rig import kvtier
from extent import brief
from tiny_models import config_of
from transformers import AutoModelForCausalLM

from kvtier.engine.demo.rag import (
    AS_IT_IS,
    FULL_PREFILL,
    NAMES_SHOWN,
    PREFIX_ONLY,
    REPAIRED,
    RagQuestion,
    RagReport,
    RagResult,
    documents_of,
    draw,
    example,
    recall_questions,
    timed_questions,
)
from kvtier.engine.demo.recall import make_documents
from kvtier.tiers.errors import ConfigError, MissingPackages

pytestmark = pytest.mark.timeout(300)

ASKED = brief(32, 96)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint in the place of the large one, which is timed."""
    directory = tmp_path_factory.mktemp("rag") / "tiny"
    config = config_of("llama")
    config.max_position_embeddings = 1024
    auto: Any = AutoModelForCausalLM  # untyped
    auto.from_config(config).save_pretrained(directory)
    return directory


def result(name: str, right: int | None = 100, **fields: int) -> RagResult:
    counts = {"named_behind": 0, "segments_loaded": 9, "segments_computed": 0, "blends_in_full": 0, **fields}
    sources = {"prefix": 10, "segment": 70, "repaired": 15, "computed": 5}
    return RagResult(name, 100, 100, sources, right, 7.0, **counts)


def report(**right: int) -> RagReport:
    answers = [result(name, right.get(name.replace(" ", "_"), 100)) for name in NAMES_SHOWN]
    return RagReport(answers, [result(name, None) for name in NAMES_SHOWN], "Ada? red", "tiny")


# the demo


def test_repair_gives_back_the_answers_that_reuse_costs(model: Path, tmp_path: Path, programs: Path) -> None:
    arguments = ["demo", "rag", "--model", str(model), "--questions", str(ASKED), "--picture", "p.png", "--json"]
    command = [str(programs / "kvtier"), *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["failures"] == []
    answers, times = ({each["name"]: each for each in told[kind]} for kind in ("answers", "times"))
    assert list(answers) == list(times) == list(NAMES_SHOWN)
    right = {name: each["right"] for name, each in answers.items()}
    assert right[FULL_PREFILL] >= 0.95 * ASKED
    assert right[PREFIX_ONLY] == right[FULL_PREFILL]  # exact
    assert right[REPAIRED] >= 0.95 * right[FULL_PREFILL]
    assert right[AS_IT_IS] <= 0.9 * right[FULL_PREFILL]  # so there is something to repair
    for each in (*answers.values(), *times.values()):
        assert sum(each["sources"].values()) == each["prompt_tokens"]
        assert each["ttft_ms"] > 0
        assert each["named_behind"] == each["segments_computed"] == 0
    for found in (answers, times):
        assert found[FULL_PREFILL]["sources"]["computed"] == found[FULL_PREFILL]["prompt_tokens"]
        assert 0 < found[PREFIX_ONLY]["sources"]["prefix"] < found[PREFIX_ONLY]["sources"]["computed"]
        assert found[AS_IT_IS]["sources"]["repaired"] == 0 < found[AS_IT_IS]["segments_loaded"]
        assert found[REPAIRED]["sources"]["repaired"] > 0
        assert found[REPAIRED]["sources"]["computed"] == found[AS_IT_IS]["sources"]["computed"]
    assert [path.name for path in tmp_path.iterdir()] == ["p.png"]  # it cleaned up after itself


@pytest.mark.exhaustive  # what is said of it: the next story
def test_too_little_repair_is_reported_and_fails(model: Path, programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(programs / "python"))  # of the engines' processes
    asked = ("--questions", 40, "--rule", "first", "--share", 0.02)
    done = kvtier("demo", "rag", "--model", model, *asked)
    assert done.returncode == 1
    lines = [line.split() for line in done.stdout.splitlines()]
    shown = [(" ".join(words[:2]), words[2:]) for words in lines if " ".join(words[:2]) in " ".join(NAMES_SHOWN)]
    assert "a model of 0.2 M parameters" in " ".join(done.stdout.split())
    assert "under 95%" in " ".join(done.stdout.split())
    assert "For example:" in done.stdout
    assert len(shown) >= 2 * len(NAMES_SHOWN) - 2  # both tables


def test_each_claim_that_fails_is_reported() -> None:
    well = report()
    assert well.failures == []
    assert report(segments_repaired=95).failures == []
    [line] = report(segments_repaired=94).failures
    assert "With repair 94 answers are right, under 95% of the 100 of a full prefill." in line
    [line] = report(full_prefill=89, segments_repaired=89).failures
    assert line == "After a full prefill 89 of 100 answers are right: too few to measure anything."
    for spoilt, what in (("named_behind", "behind the exact prefix are named"), ("segments_computed", "computed")):
        [line] = replace(well, times=[result(REPAIRED, None, **{spoilt: 3})]).failures
        assert line.startswith("3 ")
        assert what in line


# what is wrong with a command


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("rag", "--rule", "all"), "repair_rule 'all': use one of deviation, question, first, borders, random"),
        (("--json", "rag"), "write options after `rag`"),
    ],
)
def test_a_wrong_option_is_one_line_and_status_2(arguments: tuple[str, ...], complaint: str) -> None:
    done = kvtier("demo", *arguments)
    assert done.returncode == 2
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr


def test_a_context_too_short_for_the_documents_is_refused() -> None:
    with pytest.raises(ConfigError, match="a context of 100 tokens; the demo needs 105 or more"):
        timed_questions(vocab_size=50, max_model_len=100)
    [length] = {len(document) for document in documents_of(timed_questions(50, 105))}
    assert length == 16


def test_a_picture_needs_matplotlib_and_a_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw(report(), tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match=r"--picture \"nowhere/picture\.png\""):
        draw(report(), Path("nowhere/picture.png"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingPackages, match=r"--picture needs matplotlib: pip install 'matplotlib>=3\.10'"):
        draw(report(), tmp_path / "picture.png")


# questions


def test_questions_are_the_same_each_time_and_their_order_matters() -> None:
    asked = recall_questions(20)
    assert asked == recall_questions(20)
    assert {len(each.documents) for each in asked} == {3, 4, 5}
    assert len(documents_of(asked)) == 15  # eight questions a folder of five documents
    assert "; in the opposite order: " in example(asked)
    assert example([RagQuestion([make_documents(np.random.default_rng(0)).tolist()], [2, 4], 3)]) == ""
