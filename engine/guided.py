"""What an answer may be, token by token, as the engine sees it: who knows texts and schemas says it. No torch."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class GuidedAnswer(Protocol):
    """One answer on its way."""

    @property
    def is_cut(self) -> bool:
        """Whether it cannot be followed to its end: `allowed` ends it here, unfinished."""

    def allowed(self) -> NDArray[np.uint32]:
        """Which tokens may come next: a bit for each, the lowest first, of at least one."""


class Guide(Protocol):
    """What answers may be. Never changes; one may guide any number of requests."""

    def start(self, token_ids: Sequence[int], num_prompt_tokens: int) -> GuidedAnswer:
        """Follow an answer: what stands in `token_ids`, which grows, behind the prompt. It may stand there already."""
