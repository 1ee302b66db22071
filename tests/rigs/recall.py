"""The recall model and its questions, from the folder beside the checkout: its answers tell right KV from wrong."""

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

FIXTURE: Final = Path(__file__).resolve().parents[3] / "shared" / "fixture"
MODEL: Final = FIXTURE / "recall-llama-bf16"
NUM_DOCUMENTS, LENGTH = 4, 24
_ABSENT: Final = "the recall model is not beside this checkout, in ../shared/fixture"


@dataclass(frozen=True, slots=True)
class Asked:
    """One question over its documents, and the token that answers it."""

    documents: list[list[int]]
    question: list[int]
    answer: int

    @property
    def prompt(self) -> list[int]:
        return [token for document in self.documents for token in document] + self.question


def servable(home: Path) -> Path:
    """The model as a checkpoint that can be served: token 7 is written t7. Its chat template adds nothing."""
    if not MODEL.is_dir():
        pytest.skip(_ABSENT)
    directory = home / "recall"
    directory.mkdir()
    for file in MODEL.iterdir():
        (directory / file.name).symlink_to(file)
    vocabulary = {
        f"t{number}": number for number in range(json.loads((MODEL / "config.json").read_text())["vocab_size"])
    }
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(directory / "tokenizer.json"))
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return directory


def written(tokens: list[int]) -> str:
    """The text of these tokens."""
    return " ".join(f"t{token}" for token in tokens)


def asked(
    num_samples: int, num_questions: int = 4, seed: int = 5, form: tuple[int, int] = (NUM_DOCUMENTS, LENGTH)
) -> list[Asked]:
    """Questions of that many samples, each of so many documents of so many tokens (`form`).

    Skips the test where the fixture is not there.
    """
    if not MODEL.is_dir():
        pytest.skip(_ABSENT)
    spec = importlib.util.spec_from_file_location("recall_task", FIXTURE / "task.py")
    assert spec is not None
    assert spec.loader is not None
    task: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(task)
    made = task.gen(num_samples, *form, num_questions, np.random.default_rng(seed))
    return [
        Asked(
            made["docs"][sample].tolist(),
            made["tail"][sample][3 * number : 3 * number + 2].tolist(),
            int(made["qv"][sample, number]),
        )
        for sample in range(num_samples)
        for number in range(num_questions)
    ]
