"""transformers in one process after the other over one slab: what a killed one stored is found, and is right."""

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from fork_rig import ENGINE, Forked
from service_rig import environment
from tiny_models import plain, prompt

pytestmark = pytest.mark.timeout(300)

CHILD: Final = Path(__file__).with_name("_transformers_child.py")
PROMPTS: Final = [prompt(1, 90), prompt(2, 75)]
GREEDY: Final[dict[str, Any]] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


class Processes:
    """Each `run` is a process of its own, over the same checkpoint and the same slab."""

    def __init__(self, checkpoint: Path, slab: Path, model: Any) -> None:
        self.model = model
        self._asked = {
            "checkpoint": str(checkpoint),
            "slab": str(slab),
            "dtype": str(model.dtype).removeprefix("torch."),
        }

    def run(self, verb: str, prompts: list[list[int]]) -> list[dict[str, Any]]:
        """What the child replied before it was killed."""
        asked = json.dumps({**self._asked, "verb": verb, "prompts": prompts})
        variables = {**environment(), "OMP_NUM_THREADS": "1"}
        with Forked([str(CHILD), asked], ENGINE, env=variables, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            told = process.stdout.read()
        assert process.returncode == -signal.SIGKILL
        replies: list[dict[str, Any]] = json.loads(told)
        return replies

    def expected(self, tokens: list[int]) -> list[int]:
        """The same without kvtier."""
        answer: list[int] = self.model.generate(torch.tensor([tokens]), **GREEDY)[0, len(tokens) :].tolist()
        return answer


@pytest.fixture
def processes_of(tmp_path: Path, disk_dir: Path) -> Callable[..., Processes]:
    def make(family: str, dtype: torch.dtype) -> Processes:
        model: Any = plain(family, dtype)
        model.save_pretrained(tmp_path / "model")
        return Processes(tmp_path / "model", disk_dir, model)

    return make


@pytest.mark.slow
def test_what_a_killed_process_stored_is_found_by_both_engines(processes_of: Callable[..., Processes]) -> None:
    processes = processes_of("llama", torch.float32)
    first, second = PROMPTS
    # Cold; then another process finds every full block, and says the same.
    assert processes.run("generate", [first]) == [{"tokens": processes.expected(first), "found": 0}]
    assert processes.run("generate", [first]) == [{"tokens": processes.expected(first), "found": 80}]
    # So does our own engine; what it computes itself …
    assert processes.run("engine", PROMPTS) == [
        {"tokens": processes.expected(first), "found": 89},  # the answer filled the prompt's last block
        {"tokens": processes.expected(second), "found": 0},
    ]
    # … transformers finds.
    assert processes.run("generate", [second]) == [{"tokens": processes.expected(second), "found": 64}]


@pytest.mark.parametrize("family", ["qwen3", "mistral-window"])
def test_bf16_is_the_same_bit_by_bit_in_another_process(processes_of: Callable[..., Processes], family: str) -> None:
    processes = processes_of(family, torch.bfloat16)
    stored = processes.run("store", PROMPTS)
    loaded = processes.run("load", PROMPTS)
    assert [one["found"] for one in loaded] == [80, 64]
    assert [one["digest"] for one in loaded] == [one["digest"] for one in stored]
    assert stored[0]["digest"] != stored[1]["digest"]


def test_a_segment_of_a_killed_process_is_found_elsewhere(processes_of: Callable[..., Processes]) -> None:
    processes = processes_of("llama", torch.float32)
    document, question = prompt(5, 64), prompt(6, 9)
    first, second = ([*prompt(seed, 5), *document, *question] for seed in (7, 8))
    [computed] = processes.run("segments", [first])
    assert (computed["reused"], computed["loaded"], computed["computed"]) == (64, 0, 1)
    [loaded, again] = processes.run("segments", [second, first])
    assert (loaded["reused"], loaded["loaded"], loaded["computed"]) == (64, 1, 0)
    assert again["tokens"] == computed["tokens"]
    # Nothing of the answers has a name, and what stands there exactly is computed as ever.
    assert again["found"] == 0
    assert processes.run("generate", [first]) == [{"tokens": processes.expected(first), "found": 0}]


def test_the_tests_can_fail_a_block_stored_wrong_changes_the_answer(processes_of: Callable[..., Processes]) -> None:
    processes = processes_of("llama", torch.float32)
    [spoilt] = processes.run("spoil", PROMPTS[:1])
    [answer] = processes.run("generate", PROMPTS[:1])
    assert answer["found"] == 80
    assert answer["tokens"] != processes.expected(PROMPTS[0])
    assert processes.run("load", PROMPTS[:1])[0]["digest"] == spoilt["digest"]  # as wrong as it was stored
