"""ToolCalls: whether an answer calls a tool, read from its tokens. The forms of Hermes, Qwen, Mistral and Llama."""

import re
from collections.abc import Sequence
from typing import Final

from tokenizers import Tokenizer

_MARKS: Final = ("<tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "<function=")  # where a call begins
_MOST: Final = 4096  # tokens that are read: of a longer answer the first and the last half of them
_JSON_CALL: Final = re.compile(r'\s*(?:```(?:json)?\s*)?\[?\s*\{\s*"(?:name|type|function|parameters|arguments)"\s*:')
_ARGUMENTS: Final = re.compile(r'"(?:parameters|arguments)"\s*:')


class ToolCalls:
    """Reads answers of one model. Called with token ids, it says whether they call a tool; it keeps nothing."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        found = [tokenizer.token_to_id(mark) for mark in _MARKS]
        self._marks = frozenset(each for each in found if each is not None)

    def __call__(self, token_ids: Sequence[int]) -> bool:
        """Whether the answer calls a tool: its mark is a token, or its text is a call."""
        if not self._marks.isdisjoint(token_ids):
            return True
        if len(token_ids) > _MOST:
            token_ids = [*token_ids[: _MOST // 2], *token_ids[-_MOST // 2 :]]
        return is_call(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))


def is_call(text: str) -> bool:
    """Whether a text is a call, or has one in it: a mark, or one JSON object with a name and arguments."""
    if any(mark in text for mark in _MARKS):
        return True
    return bool(_JSON_CALL.match(text) and _ARGUMENTS.search(text))
