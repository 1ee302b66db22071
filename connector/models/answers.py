"""Reads answers with a checkpoint's tokenizer: whether they call a tool, where reasoning begins and ends."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer

from kvtier.tiers import ConfigError

REASONING_MARKS: Final = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))  # where it begins, and where it ends
_LAST: Final = 64  # tokens read at a prompt's end: a template that opens reasoning does so last


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The reasoning marks of a model whose chat template leaves out the reasoning of earlier turns."""

    begins: int  # token ids
    ends: int
    lasts_in_calls: bool  # the template keeps reasoning while tools are called

    def is_open(self, prompt: Sequence[int]) -> bool:
        """Whether an answer to this prompt begins inside reasoning."""
        marks = (self.begins, self.ends)
        return next((each for each in reversed(prompt[-_LAST:]) if each in marks), None) == self.begins


def load_tokenizer(directory: Path, option: str = "--model") -> Tokenizer:
    """A checkpoint's tokenizer, without the truncation and padding that its file may set.

    Raises ConfigError if the file is invalid; `option` is the option that named it.
    """
    try:
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    except Exception as error:  # tokenizers raises no narrower type
        why = f"tokenizer.json is not one: {error}"
        raise ConfigError(f'{option} "{directory}": {why}; name a model\'s folder') from error
    tokenizer.no_truncation()  # a prompt that is too long is refused, never cut
    tokenizer.no_padding()
    return tokenizer


_MARKS: Final = ("<tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "<function=")  # where a call begins
_MOST: Final = 4096  # tokens read: of a longer answer half of them from each end
_JSON_CALL: Final = re.compile(r'\s*(?:```(?:json)?\s*)?\[?\s*\{\s*"(?:name|type|function|parameters|arguments)"\s*:')
_ARGUMENTS: Final = re.compile(r'"(?:parameters|arguments)"\s*:')


class ToolCalls:
    """Detects in token ids of one model's answers whether they call a tool. Keeps no state."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        found = [tokenizer.token_to_id(mark) for mark in _MARKS]
        self._marks = frozenset(each for each in found if each is not None)

    def __call__(self, token_ids: Sequence[int]) -> bool:
        """Whether the answer calls a tool: it has a mark's token, or its text is a call."""
        if not self._marks.isdisjoint(token_ids):
            return True
        if len(token_ids) > _MOST:
            token_ids = [*token_ids[: _MOST // 2], *token_ids[-_MOST // 2 :]]
        return is_call(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))


def is_call(text: str) -> bool:
    """Whether a text is or contains a call: a mark, or one JSON object with a name and arguments."""
    if any(mark in text for mark in _MARKS):
        return True
    return bool(_JSON_CALL.match(text) and _ARGUMENTS.search(text))
