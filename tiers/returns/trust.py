"""HintTrust: whose hints count. A client whose "goes on" proved empty is not heard, until its requests return again."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

NUM_CLIENTS: Final = 1024  # accounts; clients beyond share one by their number
_PROOF: Final = 4.0  # returns that would have come by now, before a client is judged
_HALF_LIFE: Final = 1800.0  # seconds in which what a client said counts half: nobody is judged for ever


class HintTrust:
    """For each client: the returns of requests it said would go on, and how many any requests would have had."""

    def __init__(self) -> None:
        self._returned = np.zeros(NUM_CLIENTS)
        self._expected = np.zeros(NUM_CLIENTS)

    def is_heard(self, client: int) -> bool:
        """Whether the client's promises hold more than no promise does."""
        account = client % NUM_CLIENTS
        return bool(self._expected[account] < _PROOF or self._returned[account] >= self._expected[account])

    def returned(self, client: int) -> None:
        """A request came back of which the client had said so."""
        self._returned[client % NUM_CLIENTS] += 1

    def waited(self, clients: NDArray[np.int64], expected: NDArray[np.float64]) -> None:
        """Such requests waited: so many returns each would have been usual."""
        self._expected += np.bincount(clients % NUM_CLIENTS, expected, NUM_CLIENTS)

    def fade(self, seconds: float) -> None:
        """What was seen so far counts less."""
        faded = 0.5 ** (seconds / _HALF_LIFE)
        self._returned *= faded
        self._expected *= faded
