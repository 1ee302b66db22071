"""LruShadow: how many hits LRU would have had for the same requests, and whether the learned order does worse.

LRU holds the blocks that were used last, as many as there are slots. So it holds a request's blocks if fewer other
blocks were used since. Each request counts the blocks of which it was the last user. A line moves on over the requests
while those behind it have more blocks than slots: LRU has lost the blocks before the line.
"""

from typing import Final

import numpy as np

from kvtier.tiers.reuse.recent_requests import NUM_REQUESTS

_TOLERANCE: Final = 0.007  # of a window's blocks: if it is so far behind LRU, the learned order is not used
_TURNS: Final = 8  # a window: lookups of so many times the slots, in which observations fade to a third,
_LEAST: Final = 16384  # or of at least so many blocks
_SHORTEST: Final = 2  # LRU's first stay, in windows: each in a row is twice the one before,
_LONGEST: Final = 16  # up to so many


class LruShadow:
    """LRU's hits beside our own; `leads` while the order should be LRU's. Bounded memory, O(1) a request."""

    def __init__(self, num_slots: int, first_stay: float = 0.0) -> None:
        """`first_stay`: blocks looked up before the learned order is tried at all."""
        self._num_slots = num_slots
        self._blocks = np.zeros(NUM_REQUESTS, np.int32)  # of which this request was the last user
        self._heir = np.zeros(NUM_REQUESTS, np.int64)  # the number of the last request that continued it, or its own
        self._block, self._last_user = memoryview(self._blocks), memoryview(self._heir)
        self._line = 1  # the number of the oldest request that LRU still holds blocks of
        self._held = 0  # blocks behind the line
        self._window = float(max(_TURNS * num_slots, _LEAST))  # blocks looked up
        self.leads = first_stay > 0
        self.num_takeovers = 0
        self._lookups = 0.0  # blocks, fading
        self._ahead = 0.0  # own hits less LRU's, fading
        self._stay = first_stay  # blocks until the learned order is tried again
        self._longer = float(_SHORTEST)  # windows that the next stay takes

    def ended(self, number: int, num_blocks: int, continued: int, num_common: int, num_prompt: int, own: int) -> None:
        """Request `number` has ended. It had `num_blocks`, of which the first `num_common` are those of `continued`.

        `continued` is that request's number, 0 for none. `own`: blocks of the prompt that were still here, with a known
        user; of those in common, if there are any.
        """
        block, last_user, row = self._block, self._last_user, number % NUM_REQUESTS
        if self._line <= number - NUM_REQUESTS:  # the row is taken again
            self._held -= block[row]
            self._line = number - NUM_REQUESTS + 1
        rival, mine = own, num_blocks - own
        if continued:
            at = continued % NUM_REQUESTS
            user = last_user[at]
            if user >= self._line:
                rival, moved = num_common, min(block[user % NUM_REQUESTS], num_common)
                block[user % NUM_REQUESTS] -= moved
                self._held -= moved
                mine = num_blocks - num_common + moved
            else:
                rival, mine = 0, num_blocks
            last_user[at] = number
        block[row] = mine
        last_user[row] = number
        held, line = self._held + mine, self._line
        while held > self._num_slots and line < number:
            held -= block[line % NUM_REQUESTS]
            block[line % NUM_REQUESTS] = 0
            line += 1
        self._held, self._line = held, line
        self._judge(num_prompt, own - rival)

    def _judge(self, num_prompt: int, lead: int) -> None:
        if self.leads:
            self._stay -= num_prompt
            if self._stay <= 0:
                self.leads, self._lookups, self._ahead = False, 0.0, 0.0
            return
        kept = 1.0 - min(0.5, num_prompt / self._window)
        self._lookups = kept * self._lookups + num_prompt
        # Old hits are no reason to lose now: they count for as much as may be lost.
        most = _TOLERANCE * self._window
        self._ahead = min(kept * self._ahead + lead, most)
        if self._ahead < -most:
            self.leads = True
            self.num_takeovers += 1
            self._stay = self._longer * self._window
            self._longer = min(2.0 * self._longer, _LONGEST)
        elif self._lookups > 0.8 * self._window and self._ahead > 0:
            self._longer = float(_SHORTEST)
