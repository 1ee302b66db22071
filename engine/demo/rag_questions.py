"""What `kvtier demo rag` asks: questions over three to five documents of a folder, each in an order of its own."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from kvtier.engine.demo.recall import in_words, linked_names, make_documents, questions, read, right_answers
from kvtier.tiers import ConfigError

# Two models: one that knows the answers, one that is large enough to be timed. Three ways of reuse.
RECALL: Final = "recall"
TIMED: Final = "timed"
FULL: Final = "full"
PREFIX: Final = "prefix"
SEGMENTS: Final = "segments"

TIMED_BLOCK: Final = 16  # tokens
_FOLDER: Final = 5  # documents
_LEAST_ASKED: Final = 3  # of them
_PER_FOLDER: Final = 8  # questions
_LINKED: Final = 0.5  # of the questions: about a name that some document, not the first, states to be as another
_TIMED_QUESTIONS: Final = 4
_TIMED_TOKENS: Final = 480  # of a document; fewer where the model's context is short
_QUESTION_TOKENS: Final = 24


@dataclass(frozen=True, slots=True)
class RagQuestion:
    """A question over documents, in their order, and the token that answers it."""

    documents: list[list[int]]
    question: list[int]
    answer: int | None  # None: unknown, it is only timed

    @property
    def texts(self) -> list[list[int]]:
        return [*self.documents, self.question]


def recall_questions(number: int) -> list[RagQuestion]:
    """So many, with answers: eight for each folder of five documents."""
    rng = np.random.default_rng(5)
    asked: list[RagQuestion] = []
    while len(asked) < number:
        folder = make_documents(rng, _FOLDER)
        for _ in range(min(_PER_FOLDER, number - len(asked))):
            chosen = rng.permutation(_FOLDER)[: rng.integers(_LEAST_ASKED, _FOLDER + 1)]
            known, _ = read(folder[chosen].reshape(1, -1))
            stated, linked = np.flatnonzero(known[0] >= 0), linked_names(folder[chosen[1:]])
            name = rng.choice(linked if len(linked) and rng.random() < _LINKED else stated, 1)
            [answer] = right_answers(known[0], name).tolist()
            asked.append(RagQuestion(folder[chosen].tolist(), questions(name).tolist(), answer))
    return asked


def timed_questions(vocab_size: int, max_model_len: int) -> list[RagQuestion]:
    """Over five long documents of random tokens, without meaning. ConfigError for too short a context."""
    room = (max_model_len - _QUESTION_TOKENS - 1) // _FOLDER
    length = min(_TIMED_TOKENS, room // TIMED_BLOCK * TIMED_BLOCK)
    if length < TIMED_BLOCK:
        least = _FOLDER * TIMED_BLOCK + _QUESTION_TOKENS + 1
        raise ConfigError(f"--model: a context of {max_model_len} tokens; the demo needs {least} or more")
    rng = np.random.default_rng(1)
    folder = rng.integers(0, vocab_size, (_FOLDER, length))
    asked = []
    for number in range(_TIMED_QUESTIONS):
        order = [number % _FOLDER, *rng.permutation([each for each in range(_FOLDER) if each != number % _FOLDER])]
        question = rng.integers(0, vocab_size, _QUESTION_TOKENS).tolist()
        asked.append(RagQuestion(folder[order].tolist(), question, None))
    return asked


def documents_of(asked: list[RagQuestion]) -> list[list[int]]:
    return [list(one) for one in dict.fromkeys(tuple(each) for question in asked for each in question.documents)]


def example(asked: list[RagQuestion]) -> str:
    """A question in words, and what it would be answered were the documents in the opposite order."""
    for each in asked:
        known, _ = read(np.array(each.documents[::-1]).reshape(1, -1))
        name = np.array(each.question[1:]) - questions(np.zeros(1, int))[1]
        [other] = right_answers(known[0], name).tolist()
        if other != each.answer and each.answer is not None:
            documents = " | ".join(in_words(document) for document in each.documents)
            ask, right, wrong = in_words(each.question), in_words([each.answer]), in_words([other])
            return f"{documents} | {ask} {right}; in the opposite order: {wrong}"
    return ""
