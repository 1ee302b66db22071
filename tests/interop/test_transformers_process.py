"""transformers in one process after the other over one slab: what a killed one stored is found, and is right."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from tiny_models import plain, prompt

pytestmark = pytest.mark.timeout(300)  # every run is a process that imports everything anew

CHILD: Final = Path(__file__).with_name("_transformers_child.py")
PROMPTS: Final = [prompt(1, 90), prompt(2, 75)]
GREEDY: Final[dict[str, Any]] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


class Processes:
    """Each `run` is a process of its own, over the same checkpoint and the same slab."""

    def __init__(self, checkpoint: Path, slab: Path, model: Any) -> None:
        self.model = model
        self._arguments = [sys.executable, str(CHILD), str(checkpoint), str(slab)]
        self._dtype = str(model.dtype).removeprefix("torch.")

    def run(self, verb: str, prompts: list[list[int]]) -> list[dict[str, Any]]:
        """What the child replied before it was killed."""
        child = subprocess.run(
            [*self._arguments, self._dtype, verb],
            input=json.dumps(prompts),
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert child.returncode == -signal.SIGKILL, child.stderr
        replies: list[dict[str, Any]] = json.loads(child.stdout)
        return replies

    def expected(self, tokens: list[int]) -> list[int]:
        """The same without kvtier."""
        answer: list[int] = self.model.generate(torch.tensor([tokens]), **GREEDY)[0, len(tokens) :].tolist()
        return answer


def processes_of(family: str, dtype: torch.dtype, tmp_path: Path, slab: Path) -> Processes:
    model: Any = plain(family, dtype)
    model.save_pretrained(tmp_path / "model")
    return Processes(tmp_path / "model", slab, model)


@pytest.mark.slow
def test_what_a_killed_process_stored_is_found_by_transformers_and_by_our_engine(
    tmp_path: Path, disk_dir: Path
) -> None:
    processes = processes_of("llama", torch.float32, tmp_path, disk_dir)
    first, second = PROMPTS
    # Cold; then another process finds every full block, and says the same.
    assert processes.run("generate", [first]) == [{"tokens": processes.expected(first), "found": 0}]
    assert processes.run("generate", [first]) == [{"tokens": processes.expected(first), "found": 80}]
    # So does our own engine; what it computes itself …
    assert processes.run("engine", PROMPTS) == [
        {"tokens": processes.expected(first), "found": 80},
        {"tokens": processes.expected(second), "found": 0},
    ]
    # … transformers finds.
    assert processes.run("generate", [second]) == [{"tokens": processes.expected(second), "found": 64}]


@pytest.mark.parametrize("family", ["qwen3", "mistral-window"])
def test_bf16_is_the_same_to_the_last_bit_in_another_process(tmp_path: Path, disk_dir: Path, family: str) -> None:
    processes = processes_of(family, torch.bfloat16, tmp_path, disk_dir)
    stored = processes.run("store", PROMPTS)
    loaded = processes.run("load", PROMPTS)
    assert [one["found"] for one in loaded] == [80, 64]
    assert [one["digest"] for one in loaded] == [one["digest"] for one in stored]
    assert stored[0]["digest"] != stored[1]["digest"]


def test_the_tests_can_fail_a_block_stored_wrong_changes_the_answer(tmp_path: Path, disk_dir: Path) -> None:
    processes = processes_of("llama", torch.float32, tmp_path, disk_dir)
    [spoilt] = processes.run("spoil", PROMPTS[:1])
    [answer] = processes.run("generate", PROMPTS[:1])
    assert answer["found"] == 80
    assert answer["tokens"] != processes.expected(PROMPTS[0])
    assert processes.run("load", PROMPTS[:1])[0]["digest"] == spoilt["digest"]  # as wrong as it was stored
