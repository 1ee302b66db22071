"""What reuse and repair of documents do to answers of four families: recall, comparison, counting, order.

A Llama of 0.5 M parameters, trained by `_train.py tasks`, answers questions over five documents of 24 tokens in
sentences (`_tasks.py`). Each document is computed alone; four of them are reused behind the first one. Questions are
about names that two documents or more are about, as many of each family. Figures are right answers over those of a
full prefill, whose own are the first row; by rule and share of reused tokens computed anew, whatever deviation that
leaves.
"""

from statistics import fmean
from typing import Final

import numpy as np
import torch
from _report import ROOT, Given, Result, Row, Target, program
from _tasks import CODE, FAMILIES, LENGTH, NAMES, answer, write
from segments import EVERYTHING, NOTHING, Arm, Asked, answered

MODEL: Final = ROOT / "benchmarks" / "tasks-model"
DOCUMENTS: Final = 5
OF_A_FAMILY: Final = 2  # questions over the same documents
SHARES: Final = (0.05, 0.1, 0.15, 0.2)
DEEP: Final = 3  # a check layer behind those that join the words of a sentence
AUTO: Final[Arm] = ("deviation", "auto")
MOST: Final[Arm] = ("question", SHARES[-1])
ARMS: Final[tuple[Arm, ...]] = (
    EVERYTHING, NOTHING, AUTO, *(("deviation", share) for share in SHARES),
    *(("deviation", share, DEEP) for share in SHARES), *(("question", share) for share in SHARES),
    *((rule, SHARES[-1]) for rule in ("first", "borders", "random")),
)  # fmt: skip
NAMED: Final[dict[Arm, str]] = {EVERYTHING: "everything: right answers", NOTHING: "nothing"}


def drawn(num_texts: int, seed: int = 11) -> tuple[list[Asked], list[str]]:
    """Questions, and the family of each."""
    rng, questions = np.random.default_rng(seed), []
    for _ in range(num_texts):
        text = write(rng, DOCUMENTS)
        documents = [text.tokens[start : start + LENGTH] for start in range(0, len(text.tokens), LENGTH)]
        often = [name for name in NAMES if len(text.said[name]) >= 2]
        for words in FAMILIES.values():
            for _ in range(OF_A_FAMILY):
                word, name = str(rng.choice(words)), str(rng.choice(often))
                questions.append(Asked(documents, [CODE[word], CODE[name]], CODE[answer(word, text.said[name])]))
    return questions, [family for family in FAMILIES for _ in range(OF_A_FAMILY)] * num_texts


@program()
def main(args: Given) -> Result:
    torch.set_num_threads(1)
    arms = [EVERYTHING, NOTHING, AUTO, MOST] if args.quick else ARMS
    questions, families = drawn(10 if args.quick else 50)
    rows: list[Row] = []
    least: dict[Arm, float] = {}
    full = dict.fromkeys(FAMILIES, 1.0)
    for arm, answers in answered(MODEL, questions, OF_A_FAMILY * len(FAMILIES), arms).items():
        hits = [each.token_ids[0] == one.answer for each, one in zip(answers, questions, strict=True)]
        right = {
            family: fmean(hit for hit, its in zip(hits, families, strict=True) if its == family) / full[family]
            for family in FAMILIES
        }
        full, least[arm] = right if arm == EVERYTHING else full, min(right.values())
        repaired = sum(each.num_repaired_tokens for each in answers) / sum(each.num_segment_tokens for each in answers)
        rule = f"{arm[0]} at layer {DEEP}" if len(arm) > 2 else NAMED.get(arm, arm[0])
        anew = arm[1] if arm[1] == "auto" else f"{arm[1]:.0%}"
        rows.append({"rule": rule, "computed anew": anew, **right, "repaired": repaired})
    return rows, [
        Target("tasks repaired by deviation, share auto, over full, least family", 0.95, least[AUTO], at_most=False),
        Target("tasks, 20 % repaired by question, over full, least family", 0.95, least[MOST], at_most=False),
        Target("tasks without repair over full, least family: the ruler measures", 0.8, least[NOTHING]),
    ]
