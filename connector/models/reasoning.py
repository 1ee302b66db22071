"""Reasoning: the tokens by which a model's answers reason before they say something, and what becomes of that text."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

REASONING_MARKS: Final = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))  # where it begins, and where it ends
_LAST: Final = 64  # tokens at a prompt's end that are read: a template opens the reasoning as the last it writes


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Of one model whose chat template leaves the reasoning of earlier turns out."""

    begins: int  # token ids
    ends: int
    lasts_in_calls: bool  # the template keeps it as long as tools are called

    def is_open(self, prompt: Sequence[int]) -> bool:
        """Whether an answer to this prompt begins in the middle of reasoning."""
        marks = (self.begins, self.ends)
        return next((each for each in reversed(prompt[-_LAST:]) if each in marks), None) == self.begins
