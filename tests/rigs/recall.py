"""The recall model and its questions, from the folder beside the checkout: its answers tell right KV from wrong."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

FIXTURE: Final = Path(__file__).resolve().parents[3] / "shared" / "fixture"
MODEL: Final = FIXTURE / "recall-llama-bf16"
NUM_DOCUMENTS, LENGTH = 4, 24


@dataclass(frozen=True, slots=True)
class Asked:
    """One question over its documents, and the token that answers it."""

    documents: list[list[int]]
    question: list[int]
    answer: int

    @property
    def prompt(self) -> list[int]:
        return [token for document in self.documents for token in document] + self.question


def asked(num_samples: int, num_questions: int = 4, seed: int = 5) -> list[Asked]:
    """Questions of that many samples of four documents. Skips the test where the fixture is not there."""
    if not MODEL.is_dir():
        pytest.skip("the recall model is not beside this checkout, in ../shared/fixture")
    spec = importlib.util.spec_from_file_location("recall_task", FIXTURE / "task.py")
    assert spec is not None
    assert spec.loader is not None
    task: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(task)
    made = task.gen(num_samples, NUM_DOCUMENTS, LENGTH, num_questions, np.random.default_rng(seed))
    return [
        Asked(
            made["docs"][sample].tolist(),
            made["tail"][sample][3 * number : 3 * number + 2].tolist(),
            int(made["qv"][sample, number]),
        )
        for sample in range(num_samples)
        for number in range(num_questions)
    ]
