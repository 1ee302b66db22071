"""`kvtier model` and `kvtier generate`: a model to try things with, and where a prompt's KV came from."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command_rig import kvtier
from extent import brief
from tiny_models import SIZES
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

from kvtier.cli.program import VERBS
from kvtier.engine.demo import generation, worker
from kvtier.engine.demo.story import train_tokenizer

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a tiny Llama with the demo's tokenizer."""
    directory = tmp_path_factory.mktemp("model")
    set_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES | {"vocab_size": 8192})).save_pretrained(directory)
    train_tokenizer().save(str(directory / "tokenizer.json"))
    return directory


def test_a_second_process_finds_what_the_first_computed(model: Path, tmp_path: Path, programs: Path) -> None:
    config, prompt = tmp_path / "kvtier.toml", tmp_path / "prompt.txt"
    config.write_text(
        f'[host]\nsize = "8MiB"\n[file]\npath = "{tmp_path / "slabs"}"\nsize = "32MiB"\ndeadline = "60s"\n'
        '[cache]\nblock_size = 16\nload_or_recompute = "load"\nprefetch_deadline = "60s"\npartial_blocks = false\n'
    )
    prompt.write_text("Blocks of a prompt are named by the chain hash of their tokens. " * 20)
    arguments = ("generate", "--model", model, "--config", config, "--prompt-file", prompt, "--max-tokens", 6)
    command = list(map(str, (brief(programs, Path(sys.executable).parent) / "kvtier", *arguments, "--json")))
    first = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    second = json.loads(kvtier(*arguments, "--json").stdout)
    assert first["cached_tokens"] == {"L1": 0, "L2": 0, "file": 0, "peers": 0, "redis": 0, "objects": 0}
    assert second["cached_tokens"]["file"] == (first["prompt_tokens"] - 1) // 16 * 16
    assert second["text"] == first["text"]
    shown = kvtier(*arguments).stdout
    assert first["text"] in shown
    from_file, computed = second["cached_tokens"]["file"], second["computed_tokens"]
    assert f"file {from_file:,} · peers 0 · redis 0 · objects 0 · computed {computed:,}" in shown


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--prompt", ""], "kvtier: --prompt: it has no tokens; write some text"),
        ([], "kvtier: --prompt, --prompt-file: give one of them"),
        (["--prompt-file", "nowhere.txt"], 'kvtier: --prompt-file "nowhere.txt": '),
    ],
)
def test_a_prompt_that_is_none_is_one_line(model: Path, arguments: list[str], line: str) -> None:
    done = kvtier("generate", "--model", model, *arguments)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(line)
    assert done.stdout == ""


def test_a_model_is_not_saved_over_another(model: Path) -> None:
    done = kvtier("model", model)
    assert (done.returncode, done.stderr) == (
        2,
        f'kvtier: "{model}": a model exists there already; name another directory\n',
    )
    before = sorted(model.iterdir())
    assert kvtier("model", model, "--if-missing").returncode == 0
    assert sorted(model.iterdir()) == before


def test_the_model_has_the_size_that_its_help_says() -> None:
    """The stories of README and the pages have a tiny one in its place."""
    with torch.device("meta"):
        model = LlamaForCausalLM(worker.demo_model())
    assert 45e6 < sum(weights.numel() for weights in model.parameters()) < 55e6
    assert "50 M random weights" in VERBS["model"].help


def test_a_model_is_there_when_its_configuration_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def break_off(special: object) -> Tokenizer:
        raise KeyboardInterrupt

    monkeypatch.setattr(generation, "demo_model", lambda: LlamaConfig(**SIZES))
    monkeypatch.setattr(generation, "train_tokenizer", break_off)
    with pytest.raises(KeyboardInterrupt):
        generation.save_model(tmp_path)
    assert list(tmp_path.iterdir()) == []  # nobody takes it for one
    monkeypatch.setattr(generation, "train_tokenizer", lambda special: Tokenizer(models.BPE()))
    generation.save_model(tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= names
    assert not [name for name in names if name.startswith("unfinished")]
