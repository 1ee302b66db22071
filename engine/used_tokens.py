"""Which tokens a sequence has, for the penalties that it asks for. No torch."""

from collections import Counter
from typing import Final

import numpy as np
from numpy.typing import NDArray

_NONE: Final = np.empty(0, np.int64)


class UsedTokens:
    """Kept up to date from the sequence's tokens alone: a step that failed, or was made again, leaves no trace."""

    def __init__(self, token_ids: list[int], num_prompt_tokens: int, *, repeats: bool) -> None:
        """`token_ids`: the sequence's own list, which grows. `repeats`: its prompt counts, too."""
        self._token_ids = token_ids
        self._counts: Counter[int] = Counter()  # of the answer
        self._num_seen = num_prompt_tokens
        self._prompt = np.unique(token_ids[:num_prompt_tokens]) if repeats else _NONE

    def answer(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The answer's tokens so far, each once, and how often it has them."""
        self._counts.update(self._token_ids[self._num_seen :])
        self._num_seen = len(self._token_ids)
        return np.fromiter(self._counts.keys(), np.int64), np.fromiter(self._counts.values(), np.int64)

    def all(self, answer: NDArray[np.int64]) -> NDArray[np.int64]:
        """The tokens of prompt and answer, each once."""
        return np.union1d(self._prompt, answer)
