"""LruShadow: how many hits LRU would have had for the same requests, and whether the learned order does worse.

LRU is run over one block in `every`. Of each stretch of so many blocks of a chain one is chosen, by the tag of the
stretch's first block: equal beginnings have the same chosen blocks.

Requests differ, so the lead over LRU also varies by chance: after n of them by the root of n times what one differs. So
the learned order has lost only if it is further behind than that, and by a small share of what was looked up.
"""

from collections import OrderedDict
from collections.abc import Sequence
from math import sqrt
from typing import Final

import numpy as np
from numpy.typing import NDArray

_MOST_SAMPLED: Final = 512  # slots that stand for all; from twice as many on, blocks are sampled
_TOLERANCE: Final = 0.001  # of a window's blocks: so far behind LRU, besides chance, the learned order is not used
_TURNS: Final = 8  # a window: lookups of so many times the slots, in which observations fade to a third,
_LEAST: Final = 16384  # or of at least so many blocks
_SHORTEST: Final = 2  # LRU's first stay, in windows: each in a row is twice the one before,
_LONGEST: Final = 16  # up to so many


class LruShadow:
    """LRU's hits beside our own; `leads` while the order should be LRU's. Bounded memory."""

    def __init__(self, num_slots: int, first_stay: float = 0.0) -> None:
        """`first_stay`: blocks looked up before the learned order is tried at all."""
        self._every = max(1, num_slots // _MOST_SAMPLED)
        self._room = max(1, round(num_slots / self._every))
        self._used = OrderedDict[int, None]()  # tags of the blocks that LRU holds, the last used last
        self._window = float(max(_TURNS * num_slots, _LEAST))  # blocks looked up
        self.leads = first_stay > 0
        self.num_takeovers = 0
        self._lookups = 0.0  # blocks, fading
        self._ahead = 0.0  # own hits less LRU's, fading
        self._spread = 0.0  # the sum of its squares by request, fading
        self._stay = first_stay  # blocks until the learned order is tried again
        self._longer = float(_SHORTEST)  # windows that the next stay takes

    def sampled(self, tags: NDArray[np.uint64]) -> Sequence[int]:
        """Which blocks of a chain stand for all, in order. `tags`: of its names."""
        every, length = self._every, len(tags)
        if every == 1:
            return range(length)
        # The upper half of a tag is the better mixed.
        chosen = [every * number + ((tag >> 32) * every >> 32) for number, tag in enumerate(tags[::every].tolist())]
        if chosen and chosen[-1] >= length:
            del chosen[-1]
        return chosen

    def ended(self, tags: Sequence[int], num_looked_up: int, own: int) -> None:
        """A request with these sampled blocks has ended: `num_looked_up` of its prompt, the first `own` are hits."""
        used = self._used
        found = 0  # LRU loses a chain's end first: behind these it has none
        while found < len(tags) and tags[found] in used:
            found += 1
        for tag in reversed(tags[found:]):
            used[tag] = None
        for tag in reversed(tags[:found]):
            used.move_to_end(tag)
        for _ in range(len(used) - self._room):
            used.popitem(last=False)
        self._judge(num_looked_up * self._every, (own - min(found, num_looked_up)) * self._every)

    def forget(self) -> None:
        """No block is there any more."""
        self._used.clear()

    def _judge(self, num_prompt: int, lead: int) -> None:
        if self.leads:
            self._stay -= num_prompt
            if self._stay <= 0:
                self.leads, self._lookups, self._ahead = False, 0.0, 0.0
            return
        kept = 1.0 - min(0.5, num_prompt / self._window)
        self._lookups = kept * self._lookups + num_prompt
        self._spread = kept * self._spread + lead * lead
        # Old hits are no reason to lose now: they count for as much as may be lost.
        most = _TOLERANCE * self._window + sqrt(self._spread)
        self._ahead = min(kept * self._ahead + lead, most)
        if self._ahead < -most:
            self.leads = True
            self.num_takeovers += 1
            self._stay = self._longer * self._window
            self._longer = min(2.0 * self._longer, _LONGEST)
        elif self._lookups > 0.8 * self._window and self._ahead > 0:
            self._longer = float(_SHORTEST)
