"""Documents whose meaning depends on those before them: made from a seed, with the right answer to every question.

A document states for names which value they have ("Ada: red") or that they have another's ("Ben: as Ada"). The last
statement in a text counts. So the same documents in another order give other answers, and the KV of "Ben: as Ada" is
useless without the documents before it. `recall-model` was trained to answer, by benchmarks/_train.py.
"""

from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

RECALL_MODEL: Final = Path(__file__).resolve().parent / "recall-model"

NAMES: Final = ("Ada", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hal", "Ida", "Jon", "Kim", "Leo")
VALUES: Final = (
    "red", "blue", "green", "gold", "pink", "grey", "black", "white", "brown", "lilac", "olive", "coral",
)  # fmt: skip
DOCUMENT_TOKENS: Final = 24
_STATEMENTS: Final = 4  # of a document, about different names; the rest is filler
_LINKS: Final = 0.45  # how likely a statement refers to another name
_FILLERS: Final = 24

# A token each: a document's begin, the word "ask", the answer "unknown", names in questions, values, statements.
_DOCUMENT, _ASK, _UNKNOWN = 1, 2, 3
_FIRST_NAME: Final = 4
_FIRST_VALUE: Final = _FIRST_NAME + len(NAMES)
_FIRST_FACT: Final = _FIRST_VALUE + len(VALUES)
_FIRST_LINK: Final = _FIRST_FACT + len(NAMES) * len(VALUES)
_FIRST_FILLER: Final = _FIRST_LINK + len(NAMES) ** 2
RECALL_VOCABULARY: Final = _FIRST_FILLER + _FILLERS

TokenArray = NDArray[np.int64]


def make_documents(rng: np.random.Generator, *shape: int) -> TokenArray:
    """Documents, `[*shape, DOCUMENT_TOKENS]`."""
    names = np.argsort(rng.random((*shape, len(NAMES))), -1)[..., :_STATEMENTS]
    values = rng.integers(0, len(VALUES), names.shape)
    others = (names + rng.integers(1, len(NAMES), names.shape)) % len(NAMES)
    is_link = rng.random(names.shape) < _LINKS
    facts = _FIRST_FACT + names * len(VALUES) + values
    links = _FIRST_LINK + names * len(NAMES) + others
    documents = rng.integers(_FIRST_FILLER, RECALL_VOCABULARY, (*shape, DOCUMENT_TOKENS))
    documents[..., 0] = _DOCUMENT
    places = np.sort(np.argsort(rng.random((*shape, DOCUMENT_TOKENS - 1)), -1)[..., :_STATEMENTS], -1) + 1
    np.put_along_axis(documents, places, np.where(is_link, links, facts), -1)
    return documents


def read(texts: TokenArray) -> tuple[TokenArray, TokenArray]:
    """The final value of each name, and the value of each statement at its position: the tokens that answer.

    `[texts, names]`, -1 for a name that no document states; and `[texts, tokens]`, -1 where nothing is stated.
    """
    known = np.full((len(texts), len(NAMES)), -1)
    stated = np.full(texts.shape, -1)
    rows = np.arange(len(texts))
    for place in range(texts.shape[1]):
        token = texts[:, place]
        is_link = (token >= _FIRST_LINK) & (token < _FIRST_FILLER)
        states = (token >= _FIRST_FACT) & (token < _FIRST_FILLER)
        name = np.where(is_link, (token - _FIRST_LINK) // len(NAMES), (token - _FIRST_FACT) // len(VALUES))
        other = known[rows, np.where(is_link, (token - _FIRST_LINK) % len(NAMES), 0)]
        value = np.where(other < 0, _UNKNOWN, other)
        value = np.where(is_link, value, _FIRST_VALUE + (token - _FIRST_FACT) % len(VALUES))
        known[rows[states], name[states]] = stated[states, place] = value[states]
    return known, stated


def linked_names(documents: TokenArray) -> TokenArray:
    links = documents[(documents >= _FIRST_LINK) & (documents < _FIRST_FILLER)]
    return np.unique((links - _FIRST_LINK) // len(NAMES))


def questions(names: TokenArray) -> TokenArray:
    """The word "ask" and the names in question, which follow the documents, along the last axis."""
    return np.concatenate([np.full((*names.shape[:-1], 1), _ASK), _FIRST_NAME + names], -1)


def right_answers(known: TokenArray, names: TokenArray) -> TokenArray:
    """The token that answers each question; a name that no document states is unknown."""
    answers = np.take_along_axis(known, names, -1)
    return np.where(answers < 0, _UNKNOWN, answers)


def in_words(tokens: list[int]) -> str:
    return ", ".join(word for token in tokens if (word := _word(token)))


def _word(token: int) -> str:
    if token == _UNKNOWN:
        return "unknown"
    if _FIRST_NAME <= token < _FIRST_VALUE:
        return f"{NAMES[token - _FIRST_NAME]}?"
    if _FIRST_VALUE <= token < _FIRST_FACT:
        return VALUES[token - _FIRST_VALUE]
    if _FIRST_FACT <= token < _FIRST_LINK:
        name, value = divmod(token - _FIRST_FACT, len(VALUES))
        return f"{NAMES[name]}: {VALUES[value]}"
    if _FIRST_LINK <= token < _FIRST_FILLER:
        name, other = divmod(token - _FIRST_LINK, len(NAMES))
        return f"{NAMES[name]}: as {NAMES[other]}"
    return ""
