"""Prompts of a few documents and a question about them, and where each document lies in its prompt."""

from tiny_models import prompt

from kvtier.connector.segments import Segment

DOCUMENTS = [prompt(seed, length) for seed, length in ((1, 48), (2, 37), (3, 64))]
QUESTION = prompt(9, 11)
REUSED = 48 + 32 + 64  # full blocks of 16


def asked(documents: list[list[int]], lead: int = 5) -> tuple[list[int], list[Segment]]:
    """A prompt of a few tokens, these documents and the question; where the documents lie in it."""
    tokens, segments = prompt(8, lead), []
    for document in documents:
        segments.append(Segment(len(tokens), len(tokens) + len(document)))
        tokens = tokens + document
    return tokens + QUESTION, segments


PROMPT, SEGMENTS = asked(DOCUMENTS)
