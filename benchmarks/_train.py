"""Trains models that answer over documents: `python benchmarks/_train.py recall engine/demo/recall-model`.

`recall` is the model of `kvtier demo rag`, 11 minutes of one core; `tasks` that of benchmarks/task_accuracy.py. What a
document's tokens mean are labels, and questions follow the documents. Weights are saved in bf16. Seed, data and steps
are fixed; sums in another order give other weights. An interrupted training goes on by the same command, from what
DIRECTORY/training.pt kept last. The weights of `tasks-model` were trained in three pieces, each with another number of
steps, so one run gives others.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from _rig import llama
from _tasks import CODE, FAMILIES, LENGTH, MOST_DOCUMENTS, NAMES, QUESTIONS, WORDS, answer, write
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import LlamaForCausalLM

from kvtier.engine import demo

WARM_UP: Final = 100  # steps
NO_LABEL: Final = -100
KEEP: Final = 120.0  # seconds between checkpoints
SIZES: Final[dict[str, Any]] = {"max_position_embeddings": 512, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
ASKED: Final = [(question, name) for question in QUESTIONS for name in NAMES]


class Lesson(NamedTuple):
    """Texts with their questions, and labels in several sets: a token may have one of each."""

    tokens: torch.Tensor
    labels: torch.Tensor  # [texts, sets, tokens]
    how: dict[str, torch.Tensor]  # what else the model takes: where questions stand, what they see

    def loss(self, model: Any) -> Any:
        hidden = model.model(self.tokens, **self.how).last_hidden_state
        asked = [(labels, labels != NO_LABEL) for labels in self.labels.unbind(1)]
        entropy = torch.nn.functional.cross_entropy
        return sum(entropy(model.lm_head(hidden[which]), labels[which]) for labels, which in asked)


class Course(NamedTuple):
    config: Callable[[], Any]
    lesson: Callable[[np.random.Generator, int], Lesson]  # of a step
    right: Callable[[Any], dict[str, float]]  # shares of right answers to what no lesson had
    steps: int
    rate: float


# recall: the model of `kvtier demo rag`


def recall_config() -> Any:
    """A Llama of 0.2 M parameters, four layers deep: a link that leads to a link takes a layer each."""
    sizes = {"head_dim": 32, "intermediate_size": 128, "vocab_size": demo.RECALL_VOCABULARY}
    return llama(64, 4, heads=2, kv_heads=2, **sizes, **SIZES)


def recall_lesson(rng: np.random.Generator, step: int) -> Lesson:
    num_documents = int(rng.integers(1, 6)) if step < 1200 else int(rng.integers(3, 6))
    return recall_texts(rng, 128 // num_documents, num_documents)


def recall_texts(rng: np.random.Generator, num_texts: int, num_documents: int) -> Lesson:
    documents = demo.make_documents(rng, num_texts, num_documents).reshape(num_texts, -1)
    known, said = demo.read(documents)
    names = np.argsort(rng.random((num_texts, len(demo.NAMES))), 1)
    answers = demo.right_answers(known, names)
    labels = np.concatenate([said, np.full((num_texts, 1), -1), answers], 1)[:, None]
    tokens = np.concatenate([documents, demo.questions(names)], 1)
    return Lesson(torch.from_numpy(tokens), torch.from_numpy(np.where(labels < 0, NO_LABEL, labels)), {})


def recall_right(model: Any) -> dict[str, float]:
    """Of the answers about 1,000 texts of four documents."""
    lesson = recall_texts(np.random.default_rng(7), 1000, 4)
    with torch.no_grad():
        found = model(lesson.tokens).logits.argmax(-1)
    return {"recall": float((found == lesson.labels[:, 0])[:, -len(demo.NAMES) :].float().mean())}


# tasks: the model of task_accuracy.py


def tasks_config() -> Any:
    """A Llama of 0.5 M parameters, five layers deep: the first one joins the words of a statement."""
    sizes = {"head_dim": 48, "intermediate_size": 192, "vocab_size": -(-len(WORDS) // 64) * 64}
    return llama(96, 5, heads=2, kv_heads=2, **sizes, **SIZES)


def tasks_lesson(rng: np.random.Generator, step: int) -> Lesson:
    fewest, most = (1, 3) if step < 600 else (2, 5) if step < 1200 else (3, MOST_DOCUMENTS)
    num_documents = int(rng.integers(fewest, most + 1))
    return tasks_texts(rng, 2048 // (num_documents * LENGTH + 2 * len(ASKED)), num_documents)


def tasks_texts(rng: np.random.Generator, num_texts: int, num_documents: int) -> Lesson:
    """Every question of each text, two tokens: all stand right behind the documents, and see these and themselves."""
    begin, size = num_documents * LENGTH, num_documents * LENGTH + 2 * len(ASKED)
    questions = [CODE[word] for asked in ASKED for word in asked]
    texts = [write(rng, num_documents) for _ in range(num_texts)]
    labels = np.full((num_texts, 4, size), NO_LABEL)
    for row, text in zip(labels, texts, strict=True):
        for place, *meaning in text.meanings:
            row[1:, place] = [CODE[word] for word in meaning]
        row[0, begin + 1 :: 2] = [CODE[answer(question, text.said[name])] for question, name in ASKED]
    place = np.arange(size)
    behind = np.maximum(place - begin, 0)
    sees = np.tril(np.ones((size, size), bool)) & ((place < begin) | (place >= begin + behind[:, None] // 2 * 2))
    mask = torch.where(torch.from_numpy(sees), 0.0, torch.finfo(torch.float32).min)[None, None]
    how = {"attention_mask": mask, "position_ids": torch.from_numpy(np.minimum(place, begin) + behind % 2)[None]}
    return Lesson(torch.tensor([text.tokens + questions for text in texts]), torch.from_numpy(labels), how)


def tasks_right(model: Any) -> dict[str, float]:
    """Of the answers about 200 texts of five documents, by family."""
    lesson = tasks_texts(np.random.default_rng(7), 200, 5)
    with torch.no_grad():
        found = model(lesson.tokens, **{**lesson.how, "attention_mask": lesson.how["attention_mask"].to(model.dtype)})
    right = (found.logits.argmax(-1) == lesson.labels[:, 0])[:, 5 * LENGTH + 1 :: 2].float().mean(0)
    of_family = {family: [QUESTIONS[question] == family for question, _ in ASKED] for family in FAMILIES}
    return {family: float(right[torch.tensor(which)].mean()) for family, which in of_family.items()}


COURSES: Final = {
    "recall": Course(recall_config, recall_lesson, recall_right, 6000, 3e-3),
    "tasks": Course(tasks_config, tasks_lesson, tasks_right, 2300, 2e-3),
}


def train(course: Course, num_steps: int, kept: Path | None = None) -> Any:
    """The model, by AdamW; the rate falls to 0 over the second half. It goes on from what is kept, and keeps it."""
    model: Any = LlamaForCausalLM(course.config())
    model.set_attn_implementation("eager")  # the fastest for short texts
    optimizer = torch.optim.AdamW(model.parameters(), lr=course.rate, betas=(0.9, 0.98), weight_decay=0.01)
    rng, begun = np.random.default_rng(0), 0
    if kept is not None and kept.exists():
        state = torch.load(kept)
        begun, rng.bit_generator.state = state["step"], state["rng"]
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        task, last = progress.add_task("training", total=num_steps, completed=begun), time.monotonic()
        for step in range(begun, num_steps):
            for group in optimizer.param_groups:
                group["lr"] = course.rate * min(1, (step + 1) / WARM_UP, 2 * (1 - step / num_steps))
            loss = course.lesson(rng, step).loss(model)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            progress.update(task, completed=step + 1, description=f"training, loss {loss.item():.3f}")
            if kept is not None and time.monotonic() > last + KEEP:
                state = {"step": step + 1, "rng": rng.bit_generator.state, "model": model.state_dict()}
                torch.save(state | {"optimizer": optimizer.state_dict()}, fresh := kept.with_suffix(".new"))
                fresh.replace(kept)
                last = time.monotonic()
    return model


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("course", choices=COURSES)
    options.add_argument("directory", type=Path, help="where the checkpoint goes")
    options.add_argument("--steps", type=int)
    args = options.parse_args()
    course, kept = COURSES[args.course], args.directory / "training.pt"
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("medium")  # bf16 in products, where the processor has it
    args.directory.mkdir(parents=True, exist_ok=True)
    begun = time.process_time()
    model = train(course, args.steps or course.steps, kept).to(torch.bfloat16).eval()
    model.save_pretrained(args.directory)
    kept.unlink(missing_ok=True)
    right = ", ".join(f"{what} {share:.1%}" for what, share in course.right(model).items())
    print(f"{time.process_time() - begun:.0f} s of CPU time; right answers: {right}")


if __name__ == "__main__":
    main()
