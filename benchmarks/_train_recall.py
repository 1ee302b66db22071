"""Trains the model of `kvtier demo rag`: `python benchmarks/_train_recall.py engine/demo/recall-model`.

One core needs 11 minutes. Every statement of a document has its meaning as a label, and behind the documents each name
is asked for. The weights are saved in bf16. Seed, data and steps are fixed; sums in another order give other weights.
"""

import argparse
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from _rig import llama
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import LlamaForCausalLM

from kvtier.engine.demo import NAMES, RECALL_VOCABULARY, make_documents, questions, read, right_answers

STEPS: Final = 6000
TEXTS: Final = 128  # documents a step
RATE: Final = 3e-3
WARM_UP: Final = 100  # steps
NO_LABEL: Final = -100


def recall_config() -> Any:
    """A Llama of 0.2 M parameters, four layers deep: a link that leads to a link takes a layer each."""
    sizes = {"head_dim": 32, "intermediate_size": 128, "vocab_size": RECALL_VOCABULARY, "max_position_embeddings": 512}
    return llama(64, 4, heads=2, kv_heads=2, rms_norm_eps=1e-6, tie_word_embeddings=False, **sizes)


def lesson(rng: np.random.Generator, num_texts: int, num_documents: int) -> tuple[torch.Tensor, torch.Tensor]:
    documents = make_documents(rng, num_texts, num_documents).reshape(num_texts, -1)
    known, said = read(documents)
    names = np.argsort(rng.random((num_texts, len(NAMES))), 1)
    answers = right_answers(known, names)
    labels = np.concatenate([said, np.full((num_texts, 1), -1), answers], 1)
    tokens = np.concatenate([documents, questions(names)], 1)
    return torch.from_numpy(tokens), torch.from_numpy(np.where(labels < 0, NO_LABEL, labels))


def train(model: Any, num_steps: int) -> None:
    """AdamW; few documents at first; the rate falls to 0 over the second half."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.98), weight_decay=0.01)
    rng = np.random.default_rng(0)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        task = progress.add_task("training", total=num_steps)
        for step in range(num_steps):
            done = step / num_steps
            for group in optimizer.param_groups:
                group["lr"] = RATE * min(1, (step + 1) / WARM_UP) * min(1, (1 - done) / 0.5)
            num_documents = int(rng.integers(1, 6)) if done < 0.2 else int(rng.integers(3, 6))
            tokens, labels = lesson(rng, TEXTS // num_documents, num_documents)
            asked = labels != NO_LABEL
            logits = model.lm_head(model.model(tokens).last_hidden_state[asked])
            loss: Any = torch.nn.functional.cross_entropy(logits, labels[asked])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            progress.update(task, completed=step + 1, description=f"training, loss {loss.item():.3f}")


def share_right(model: Any) -> float:
    """Of the answers about 1,000 texts of four documents that no lesson had."""
    tokens, labels = lesson(np.random.default_rng(7), 1000, 4)
    with torch.no_grad():
        found = model(tokens).logits.argmax(-1)
    return float((found == labels)[:, -len(NAMES) :].float().mean())


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("directory", type=Path, help="where the checkpoint goes")
    options.add_argument("--steps", type=int, default=STEPS)
    args = options.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    begun = time.process_time()
    model: Any = LlamaForCausalLM(recall_config())
    train(model, args.steps)
    model = model.to(torch.bfloat16)
    print(f"{time.process_time() - begun:.0f} s of CPU time; right answers: {share_right(model):.1%}")
    model.save_pretrained(args.directory)


if __name__ == "__main__":
    main()
