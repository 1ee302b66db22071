"""HintTrust: whose hints count. A client whose "goes on" proved empty is not heard, until its requests return again.

What a client says and what was derived from its answers are judged apart: an account each.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

NUM_CLIENTS: Final = 1024  # clients beyond share an account by their number
NUM_ACCOUNTS: Final = 2 * NUM_CLIENTS  # for what was said, then for what was derived
_PROOF: Final = 4.0  # returns that would have come by now, before a client is judged
_HALF_LIFE: Final = 1800.0  # seconds in which what a client said counts half: nobody is judged for ever


def account_of(client: int, *, is_derived: bool) -> int:
    """Where the client's hints of this kind are counted."""
    return client % NUM_CLIENTS + NUM_CLIENTS * is_derived


class HintTrust:
    """By account: the returns of requests it said would go on, and how many requests without a hint would have had."""

    def __init__(self) -> None:
        self._returned = np.zeros(NUM_ACCOUNTS)
        self._expected = np.zeros(NUM_ACCOUNTS)

    def is_heard(self, account: int) -> bool:
        """Whether its promises hold more than no promise does."""
        return bool(self._expected[account] < _PROOF or self._returned[account] >= self._expected[account])

    def returned(self, account: int) -> None:
        """A request came back of which it had said so."""
        self._returned[account] += 1

    def waited(self, accounts: NDArray[np.int64], expected: NDArray[np.float64]) -> None:
        """Such requests waited: so many returns each would have been usual."""
        self._expected += np.bincount(accounts, expected, NUM_ACCOUNTS)

    def fade(self, seconds: float) -> None:
        """What was seen so far counts less."""
        faded = 0.5 ** (seconds / _HALF_LIFE)
        self._returned *= faded
        self._expected *= faded
