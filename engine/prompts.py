"""What a prompt must be: a list of token ids that the model has."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvtier.tiers import RequestError


def checked_tokens(prompt: ArrayLike, vocab_size: int) -> list[int]:
    """The prompt as a list of token ids; RequestError says what is wrong with it."""
    try:
        tokens: NDArray[Any] = np.asarray(prompt)
    except ValueError as error:
        raise RequestError("the prompt is not one list; give a list of token ids") from error
    if tokens.size == 0:
        raise RequestError("the prompt is empty; give at least one token id")
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise RequestError(f"the prompt is a {tokens.ndim}-dimensional {tokens.dtype}; give a list of token ids")
    if (bad := np.flatnonzero((tokens < 0) | (tokens >= vocab_size))).size:
        token, position = int(tokens[bad[0]]), int(bad[0])
        raise RequestError(f"token id {token} at position {position}: this model's are 0 to {vocab_size - 1}")
    listed: list[int] = tokens.tolist()
    return listed


def is_text(value: object) -> bool:
    """A string that can be encoded, which one with lone surrogates cannot."""
    return isinstance(value, str) and value.encode(errors="replace").decode() == value
