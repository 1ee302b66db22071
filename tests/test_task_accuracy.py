"""Stories of benchmarks/task_accuracy.py: each question has one right answer; _train.py makes what answers."""

import json
import re
from pathlib import Path
from typing import Any

import _train
import numpy as np
import pytest
import task_accuracy
import torch
from _tasks import CODE, LENGTH, NAMES, STATEMENTS, TIMES, WORDS, answer, write
from command_rig import program
from transformers import AutoConfig, AutoModelForCausalLM

from kvtier.engine.demo.recall import RECALL_MODEL

MODELS = {"recall": RECALL_MODEL, "tasks": task_accuracy.MODEL}
STATED = re.compile(
    r"(?P<name>\w+) (today keeps|has|keeps|has as|keeps what) (?P<value>\d|(?P<other>[A-Z]\w+))( has)? \."
)


def test_what_a_text_means_is_what_its_sentences_say() -> None:
    for seed in range(20):
        text = write(np.random.default_rng(seed), 6)
        assert len(text.tokens) == 6 * LENGTH
        said: dict[str, list[str]] = {name: [] for name in NAMES}
        for found in STATED.finditer(" ".join(WORDS[token] for token in text.tokens)):
            value = said[found["other"]][-1] if found["other"] else found["value"]
            said[found["name"]].append(value)
        assert said == text.said
        assert len(text.meanings) == 6 * STATEMENTS
        for place, name, value, times in text.meanings:
            assert name in NAMES
            assert WORDS[text.tokens[place]] in (value, *NAMES)
            assert times in TIMES[1:]


def test_answers_are_about_the_documents_in_their_order() -> None:
    said = ["4", "7", "2"]
    asked = ("now", "change", "count", "first", "second", "third")
    assert [answer(each, said) for each in asked] == ["2", "less", "thrice", "4", "7", "2"]
    assert [answer(each, said[:1]) for each in asked] == ["4", "same", "once", "4", "unknown", "unknown"]
    assert [answer(each, []) for each in asked] == ["unknown", "unknown", "none", *["unknown"] * 3]
    questions, families = task_accuracy.drawn(3)
    assert len(questions) == len(families) == 24
    assert all(len(each.documents) == 5 and CODE["none"] != each.answer for each in questions)


def test_a_question_sees_the_documents_and_no_other_question() -> None:
    lesson = _train.tasks_texts(np.random.default_rng(0), 2, 2)
    sees = lesson.how["attention_mask"][0, 0] == 0
    assert sees[2 * LENGTH + 5].nonzero().flatten().tolist() == [*range(2 * LENGTH), 2 * LENGTH + 4, 2 * LENGTH + 5]
    assert lesson.how["position_ids"][0, 2 * LENGTH :].unique().tolist() == [2 * LENGTH, 2 * LENGTH + 1]


@pytest.mark.parametrize("name", MODELS)
def test_the_model_is_the_one_that_the_program_trains(name: str, monkeypatch: Any, tmp_path: Path) -> None:
    course, left_out = _train.COURSES[name], ("architectures", "dtype", "_name_or_path", "transformers_version")
    held, made = (config.to_dict() for config in (AutoConfig.from_pretrained(MODELS[name]), course.config()))
    assert {each: held[each] for each in held if each not in left_out} == {
        each: made[each] for each in held if each not in left_out
    }
    auto: Any = AutoModelForCausalLM
    assert min(course.right(auto.from_pretrained(MODELS[name])).values()) >= 0.9

    # What is interrupted goes on as if it had not been.
    def interrupted(rng: np.random.Generator, step: int) -> _train.Lesson:
        if step == 2:
            raise KeyboardInterrupt
        return course.lesson(rng, step)

    monkeypatch.setattr(_train, "KEEP", 0.0)
    torch.manual_seed(0)
    whole = _train.train(course, 4).state_dict()
    torch.manual_seed(0)
    with pytest.raises(KeyboardInterrupt):
        _train.train(course._replace(lesson=interrupted), 4, tmp_path / "training.pt")
    again = _train.train(course, 4, tmp_path / "training.pt").state_dict()
    assert all(torch.equal(whole[each], again[each]) for each in whole)


def test_reuse_without_repair_is_seen_and_repair_gives_answers_back() -> None:
    ended = program(task_accuracy.main, "task_accuracy.py", "--quick", "--json")
    assert ended.returncode == 0, ended.stderr
    targets = {each["name"]: each["measured"] for each in json.loads(ended.stdout)["targets"]}
    _, repaired, without = targets.values()
    assert without < 0.5 < repaired
