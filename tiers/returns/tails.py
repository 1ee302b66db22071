"""RequestTails: the ends of the last requests, by which a prompt that continues one is known, evicted or not."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

Tags = NDArray[np.uint64]

NUM_REQUESTS: Final = 65536  # the last so many are known
NUM_NAMES: Final = 2  # of a request: the last block may be edited, the one before knows it, too
_NUM_PLACES: Final = 4 * NUM_REQUESTS  # of the table; two tags that share one push each other out
_MASK: Final = np.uint64(_NUM_PLACES - 1)
_SHARED: Final = 3  # continued so often, a tail is a shared beginning and no conversation
NOBODY: Final = -1


class RequestTails:
    """A ring of requests, and a table from the tags of their prompts' last full blocks to them. Arrays alone: 7 MiB.

    A tag is a name's mixed word (`NAME_MIX`). Two names of one tag would be taken for one conversation: it costs a
    wrong guess about a return.
    """

    def __init__(self) -> None:
        self.ended_at = np.zeros(NUM_REQUESTS)  # seconds
        self.kind = np.zeros(NUM_REQUESTS, np.int16)
        self.account = np.zeros(NUM_REQUESTS, np.int16)  # whose promise it was, from 1; 0: nobody's
        self.is_open = np.zeros(NUM_REQUESTS, np.bool_)  # it may still return
        self.turn = np.zeros(NUM_REQUESTS, np.int32)
        self._uses = np.zeros(NUM_REQUESTS, np.uint8)
        self._last_tag = np.zeros(NUM_REQUESTS, np.uint64)
        self._tags = np.zeros(_NUM_PLACES, np.uint64)
        self._owner = np.full(_NUM_PLACES, NOBODY, np.int32)
        self._serial = np.zeros(_NUM_PLACES, np.int64)  # of the request that wrote the place
        self._number = np.zeros(NUM_REQUESTS, np.int64)  # of the request in each row of the ring
        self._next = 1

    def continued_by(self, tags: Tags, arrived: float) -> int:
        """The row of the newest request that a prompt of these tags, in chain order, continues; NOBODY.

        If it had ended when the prompt `arrived`, it counts as continued. Who was continued three times is none any
        more.
        """
        if self._next == 1:
            return NOBODY
        places = tags & _MASK
        for known in np.flatnonzero(self._tags[places] == tags)[::-1].tolist():
            place = int(places[known])
            row = int(self._owner[place])
            if row >= 0 and self._number[row] == self._serial[place] and self._uses[row] < _SHARED:
                self._uses[row] += bool(self.ended_at[row] <= arrived)
                return row
        return NOBODY

    def is_twin(self, row: int, tags: Tags) -> bool:
        """Whether that request ends with the same block as a chain of these tags."""
        return bool(len(tags) and self._last_tag[row] == tags[-1])

    def add(self, tags: Tags, now: float, *, kind: int, turn: int, account: int) -> None:
        """A request has ended that the next turn continues behind blocks of these tags."""
        row = self._next % NUM_REQUESTS
        self.ended_at[row], self.kind[row], self.turn[row], self.account[row] = now, kind, turn, account
        self.is_open[row], self._uses[row], self._number[row] = True, 0, self._next
        self._last_tag[row] = tags[-1]
        for tag in tags[-NUM_NAMES:].tolist():
            place = tag & (_NUM_PLACES - 1)
            owner = int(self._owner[place])
            is_known = owner >= 0 and self._tags[place] == tag and self._number[owner] == self._serial[place]
            if not is_known or self._uses[owner] < _SHARED:
                self._tags[place], self._owner[place], self._serial[place] = tag, row, self._next
        self._next += 1

    def waiting(self) -> NDArray[np.intp]:
        """The rows of requests that may still return."""
        return np.flatnonzero(self.is_open[: min(self._next, NUM_REQUESTS)])
