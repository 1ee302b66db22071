"""RecentRequests: the ends of the last requests, by which a prompt that continues one is recognised."""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

Tags = NDArray[np.uint64]

NUM_REQUESTS: Final = 65536  # in the ring
MATCH_NAMES: Final = 2  # of a request: if its last block was edited, the one before still matches
_NUM_PLACES: Final = 4 * NUM_REQUESTS  # of the table; two tags with one place replace each other
_MASK: Final = np.uint64(_NUM_PLACES - 1)
_SHARED: Final = 3  # continued so often, a request is a shared beginning and no conversation
NO_ROW: Final = -1


class FoundRequest(NamedTuple):
    """The result of recognising a prompt."""

    continued: int  # the row of the newest request that it continues as a conversation, or NO_ROW
    num_common: int  # leading blocks that it has in common with that request, or else with many


_UNKNOWN: Final = FoundRequest(NO_ROW, 0)


class RecentRequests:
    """A ring of requests, and a table from the tags of their prompts' last full blocks to them. Arrays alone: 7 MiB.

    A tag is a name's mixed word (`NAME_MIX`). Two names of one tag would be taken for one conversation: it costs a
    wrong guess about a return.
    """

    def __init__(self) -> None:
        self.ended_at = np.zeros(NUM_REQUESTS)  # seconds
        self.kind = np.zeros(NUM_REQUESTS, np.int16)
        self.account = np.zeros(NUM_REQUESTS, np.int16)  # the promise's account, from 1; 0: no promise
        self.is_open = np.zeros(NUM_REQUESTS, np.bool_)  # it may still return
        self.turn = np.zeros(NUM_REQUESTS, np.int32)
        self.length = np.zeros(NUM_REQUESTS, np.int32)  # of its prompt, in blocks
        self.num_head = np.zeros(NUM_REQUESTS, np.int32)  # leading blocks that others share
        self.num_sharing = np.zeros(NUM_REQUESTS, np.int32)  # requests that shared them by then
        self.head_kind = np.zeros(NUM_REQUESTS, np.int16)
        self.is_head_open = np.zeros(NUM_REQUESTS, np.bool_)
        self._uses = np.zeros(NUM_REQUESTS, np.uint8)
        self._last_tag = np.zeros(NUM_REQUESTS, np.uint64)
        self._tags = np.zeros(_NUM_PLACES, np.uint64)
        self._is_head = np.zeros(_NUM_PLACES, np.bool_)  # the tag is that of a shared beginning's last block
        self._owner = np.full(_NUM_PLACES, NO_ROW, np.int32)
        self._serial = np.zeros(_NUM_PLACES, np.int64)  # of the request that wrote the place
        self._number = np.zeros(NUM_REQUESTS, np.int64)  # of the request in each row of the ring
        self._next = 1
        # Memoryviews for access to single items: that costs a third of an array's.
        self._own, self._serial_of = memoryview(self._owner), memoryview(self._serial)
        self._number_of, self._use, self._tag = memoryview(self._number), memoryview(self._uses), memoryview(self._tags)
        self._end = memoryview(self.ended_at).cast("B").cast("d")
        self._turn, self._last = memoryview(self.turn), memoryview(self._last_tag)
        self._length, self._num_head = memoryview(self.length), memoryview(self.num_head)
        self._num_sharing, self._head_kind = memoryview(self.num_sharing), memoryview(self.head_kind)
        self._head_open, self._heads = memoryview(self.is_head_open), memoryview(self._is_head)
        self._kind, self._account = memoryview(self.kind), memoryview(self.account)
        self._open = memoryview(self.is_open.view(np.uint8))

    def find(self, tags: Tags, arrived: float) -> FoundRequest:
        """The newest request that a prompt of these tags, in chain order, continues.

        It counts as continued if it had ended when the prompt `arrived`; three times make it a shared beginning.
        """
        if self._next == 1:
            return _UNKNOWN
        num_common = 0
        for known in np.flatnonzero(self._tags[tags & _MASK] == tags)[::-1].tolist():
            place = int(tags[known]) & (_NUM_PLACES - 1)
            row, serial = self._own[place], self._serial_of[place]
            if row < 0 or self._number_of[row] != serial:
                continue
            num_common = num_common or known + 1
            if self._heads[place]:
                break
            if self._use[row] < _SHARED:
                self._use[row] += bool(self.ended_at[row] <= arrived)
                return FoundRequest(row, num_common)
        return FoundRequest(NO_ROW, num_common)

    def end_of(self, row: int) -> float:
        """Seconds at which that request ended."""
        return self._end[row]

    def turn_of(self, row: int, arrived: float, last_tags: Sequence[int]) -> tuple[int, bool]:
        """The turn of a request that continues that one, and whether it came after its end.

        Else it ran beside it; if both end with the same block, that one does not return.
        """
        if self._end[row] <= arrived:
            return self._turn[row] + 1, True
        if last_tags and self._last[row] == last_tags[-1]:
            self._open[row] = False
        return self._turn[row], False

    def came_back(self, row: int) -> tuple[int, float, int] | None:
        """The class, end and account of a request that returned for the first time; None if it had before."""
        if not self._open[row]:
            return None
        self._open[row] = False
        return self._kind[row], self._end[row], self._account[row]

    def add(self, last_tags: Sequence[int], now: float, *, length: int, kind: int, turn: int, account: int) -> None:
        """A request has ended that the next turn continues behind blocks of these tags, at most MATCH_NAMES."""
        row = self._next % NUM_REQUESTS
        self._end[row], self._kind[row], self._turn[row], self._account[row] = now, kind, turn, account
        self._open[row], self._use[row], self._number_of[row] = True, 0, self._next
        self._last[row] = last_tags[-1]
        for tag in last_tags:
            place = tag & (_NUM_PLACES - 1)
            owner = self._own[place]
            is_known = owner >= 0 and self._tag[place] == tag and self._number_of[owner] == self._serial_of[place]
            if not is_known or self._use[owner] < _SHARED:
                self._put(place, tag, row, self._next)
        self._length[row], self._num_head[row], self._head_open[row] = length, 0, False
        self._next += 1

    def _put(self, place: int, tag: int, row: int, number: int, *, is_head: bool = False) -> None:
        self._tag[place], self._own[place], self._serial_of[place] = tag, row, number
        self._heads[place] = is_head

    def head_behind(self, found: FoundRequest) -> int:
        """Leading blocks of a prompt, recognised as this, that others share; 0 if none are known."""
        row = found.continued
        has_left = row == NO_ROW or found.num_common < self._length[row]  # what it continues is not all in it
        return found.num_common if has_left else self._num_head[row]

    def add_head(self, tag: int, num_blocks: int, num_sharing: int, kind: int) -> None:
        """The request added last begins with so many shared blocks, of which the last has this tag."""
        number = self._next - 1
        row = number % NUM_REQUESTS
        self._num_head[row], self._num_sharing[row], self._head_kind[row] = num_blocks, num_sharing, kind
        self._head_open[row] = True
        self._put(tag & (_NUM_PLACES - 1), tag, row, number, is_head=True)

    def head_of(self, tag: int) -> tuple[int, float, int] | None:
        """Class, end and sharing requests of the last request whose head ends with this tag; None if none is known.

        Its head counts as used again; the class is 0 if it was before.
        """
        place = tag & (_NUM_PLACES - 1)
        row = self._own[place]
        if row < 0 or self._tag[place] != tag or self._number_of[row] != self._serial_of[place]:
            return None
        if not self._heads[place]:
            return 0, self._end[row], self._use[row]
        kind = self._head_kind[row] if self._head_open[row] else 0
        self._head_open[row] = False
        return kind, self._end[row], self._num_sharing[row]

    def waiting(self) -> NDArray[np.intp]:
        """The rows of requests that may still return."""
        return np.flatnonzero(self.is_open[: min(self._next, NUM_REQUESTS)])

    def waiting_heads(self) -> NDArray[np.intp]:
        """The rows of requests whose shared beginnings no other has used since."""
        return np.flatnonzero(self.is_head_open[: min(self._next, NUM_REQUESTS)])
