"""Questions of four families over documents in sentences. Each has one right answer, a word: the next token.

Every document says of three of six names how many they have ("Ada has 7 .") or that they have what another has at that
place ("Ben has as Ada ."). A statement's meaning, and how many there were before it, depend on earlier documents.
`recall`: what a name has at last. `comparison`: of the first and the last document about a name, which says more.
`counting`: how many documents are about it. `order`: what the first, second or third of them says.
"""

from typing import Final, NamedTuple

import numpy as np

NAMES: Final = ("Ada", "Ben", "Cleo", "Dan", "Eve", "Finn")
NUMBERS: Final = tuple("123456789")
TIMES: Final = ("none", "once", "twice", "thrice", "four", "five", "six")
FILLERS: Final = ("well", "so", "then", "also", "later", "indeed", "still", "again", "here", "there")
FAMILIES: Final = {
    "recall": ("now",), "comparison": ("change",), "counting": ("count",), "order": ("first", "second", "third"),
}  # fmt: skip
QUESTIONS: Final = {word: family for family, words in FAMILIES.items() for word in words}
FACTS: Final = ("{} has {} .", "{} today keeps {} .")
LINKS: Final = ("{} has as {} .", "{} keeps what {} has .")
WORDS: Final = (
    "", "report", *NAMES, *NUMBERS, *TIMES, *FILLERS, *QUESTIONS, "unknown", "more", "less", "same",
    "has", "today", "keeps", "as", "what", ".",
)  # fmt: skip
CODE: Final = {word: code for code, word in enumerate(WORDS)}
LENGTH: Final = 24  # tokens of a document
STATEMENTS: Final = 3  # of a document, about different names
LINKED: Final = 0.35  # how likely a statement refers to another name
MOST_DOCUMENTS: Final = len(TIMES) - 1

Meaning = tuple[int, str, str, str]
"""The place of the token that completes a statement; about whom, what it says, the how manieth about this name."""


class Text(NamedTuple):
    """Documents one after the other, what they mean, and what was said of each name, in their order."""

    tokens: list[int]
    meanings: list[Meaning]
    said: dict[str, list[str]]


def write(rng: np.random.Generator, num_documents: int) -> Text:
    text = Text([], [], {name: [] for name in NAMES})
    for number in range(num_documents):
        words = ["report"]
        sentences = []
        for name in rng.permutation(NAMES)[:STATEMENTS]:
            others = [other for other in NAMES if other != name and text.said[other]]
            if others and rng.random() < LINKED:
                written = str(rng.choice(others))
                form, value = LINKS[rng.integers(2)], text.said[written][-1]
            else:
                form, value = FACTS[rng.integers(2)], NUMBERS[rng.integers(len(NUMBERS))]
                written = value
            text.said[name].append(value)
            meaning = str(name), value, TIMES[len(text.said[name])]
            sentences.append((form.format(name, written).split(), written, meaning))
        room = LENGTH - 1 - sum(len(sentence) for sentence, _, _ in sentences)
        gaps = np.diff(np.sort(rng.integers(0, room + 1, STATEMENTS)), prepend=0)
        for gap, (sentence, written, meaning) in zip(gaps, sentences, strict=True):
            words += [FILLERS[each] for each in rng.integers(0, len(FILLERS), gap)]
            place = len(words) + max(at for at, word in enumerate(sentence) if word == written)
            text.meanings.append((number * LENGTH + place, *meaning))
            words += sentence
        words += [FILLERS[each] for each in rng.integers(0, len(FILLERS), LENGTH - len(words))]
        text.tokens.extend(CODE[word] for word in words)
    return text


def answer(question: str, said: list[str]) -> str:
    if question == "count":
        return TIMES[len(said)]
    if question == "change" and said:
        return "more" if said[-1] > said[0] else "less" if said[-1] < said[0] else "same"
    place = {"now": len(said) - 1, "second": 1, "third": 2}.get(question, 0)
    return said[place] if said and place < len(said) else "unknown"
