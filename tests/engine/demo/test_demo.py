"""`kvtier demo` itself, with a tiny checkpoint: two processes, one SIGKILL, every tier; and its words for bad input."""

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_rig import kvtier, kvtier_process
from extent import brief
from tiny_models import config_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM

from kvtier.engine.demo import worker

pytestmark = pytest.mark.timeout(400)

Checkpoint = Callable[..., Path]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    """A directory as `--model` wants it: tiny random weights and a tokenizer of single bytes."""

    def make(*, context: int = 4096) -> Path:
        config = config_of("llama")
        config.vocab_size, config.max_position_embeddings = 256, context
        auto: Any = AutoModelForCausalLM  # untyped
        auto.from_config(config).save_pretrained(tmp_path / "model")
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
        return tmp_path / "model"

    return make


def test_every_tier_is_hit_and_every_answer_is_the_same(checkpoint: Checkpoint, tmp_path: Path, programs: Path) -> None:
    model = checkpoint()
    command = [str(programs / "kvtier"), "demo", "--model", str(model), "--json"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout)
    assert told["identical"]
    assert told["every_tier_hit"]
    runs = {run["name"]: run for run in told["runs"]}
    assert all(run["identical"] and run["ttft_ms"] > 0 for run in runs.values())
    assert runs["cold prefill"]["cached_tokens"] == {"l1": 0, "l2": 0, "file": 0, "peers": 0, "redis": 0, "objects": 0}
    assert runs["L1: a new question"]["cached_tokens"]["l1"] >= 2992
    assert runs["L2: L1 was overwritten"]["cached_tokens"]["l2"] >= 2500
    assert runs["L3: after kill -9"]["cached_tokens"]["file"] >= 2992
    assert min(runs["third turn: every tier"]["cached_tokens"][tier] for tier in ("l1", "l2", "file")) > 0
    assert list(tmp_path.iterdir()) == [model]  # it cleaned up after itself


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda model: (model / "config.json").unlink(), "no config.json there; name a local checkpoint directory"),
        (lambda model: (model / "config.json").write_text("{"), "config.json"),
        (lambda model: (model / "tokenizer.json").unlink(), "no tokenizer.json there; save the tokenizer"),
        (lambda model: (model / "tokenizer.json").write_text("[]"), "tokenizer.json is not one"),
    ],
)
def test_a_broken_checkpoint_is_one_line_and_status_2(
    spoil: Callable[[Path], object],
    complaint: str,
    checkpoint: Checkpoint,
    programs: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = checkpoint()
    spoil(model)
    monkeypatch.setattr(sys, "executable", str(programs / "python"))  # of the engine's process
    result = kvtier("demo", "--model", model)
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("kvtier: ")
    assert complaint in last
    assert "Traceback" not in result.stderr
    assert result.returncode == 2


def test_a_context_too_short_for_a_document_is_refused(
    checkpoint: Checkpoint, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the engine's process opens the model, and says so: by python, all of it, where all runs
    monkeypatch.setattr(sys, "executable", brief(str(programs / "python"), sys.executable))
    result = brief(kvtier, kvtier_process)("demo", "--model", checkpoint(context=300))
    assert "a context of 300 tokens; the demo needs 456 or more" in result.stderr
    assert result.returncode == 2


def test_the_demo_has_tiers_of_its_own_beside_a_daemon(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One whose socket is configured ended it with a traceback."""
    monkeypatch.setenv("KVTIER_SERVICE__SOCKET", str(tmp_path / "s"))
    monkeypatch.setattr(sys, "stdin", io.StringIO('{"verb": "open"}\n{"verb": "settle"}\n'))
    worker.main(tmp_path / "home", checkpoint())
    opened, settled = (json.loads(line) for line in capsys.readouterr().out.splitlines()[-2:])
    assert opened["max_model_len"] > 0
    assert settled == {"settled": True}
