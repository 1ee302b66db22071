"""Orders of eviction that kvtier does not have, for comparison: 2Q, ARC and LHD, each in its plain form.

They keep prefixes as kvtier's pool does: a block with a child in the cache does not go, nor one that the request at
hand uses. A request uses its blocks from the last to the first, so that a chain loses its end first. `Lru` is here to
check the rest by: its hits are those of kvtier's own.
"""

import random
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable
from itertools import chain
from typing import Final

import numpy as np

from kvtier.service.traces import RequestTrace

Queue = OrderedDict[int, None]


class Policy(ABC):
    """Which blocks a cache of so many keeps. `pinned`: those that the request at hand uses."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.pinned: Collection[int] = ()
        self._parent: dict[int, int] = {}  # of each block in the cache
        self._children = Counter[int]()

    def __contains__(self, block: int) -> bool:
        return block in self._parent

    def request(self, blocks: list[int], num_prompt: int) -> int:
        """A request uses these blocks. Returns how many leading ones of its prompt were in the cache."""
        found = next((i for i, block in enumerate(blocks) if block not in self), len(blocks))
        self.pinned = {*blocks}
        for i in reversed(range(min(len(blocks), self.size))):
            block = blocks[i]
            if block in self:
                self.hit(block)
            else:
                self.room_for(block)
                self._parent[block] = parent = blocks[i - 1] if i else -1
                self._children[parent] += 1
        return min(found, num_prompt)

    def drop(self, blocks: Iterable[int]) -> int:
        """The first of these blocks that may go leaves the cache, and is returned; -1 if none may."""
        for block in blocks:
            if not self._children[block] and block not in self.pinned:
                self._children[self._parent.pop(block)] -= 1
                return block
        return -1

    @property
    def is_full(self) -> bool:
        return len(self._parent) >= self.size

    @abstractmethod
    def hit(self, block: int) -> None:
        """A block in the cache is used."""

    @abstractmethod
    def room_for(self, block: int) -> None:
        """A block comes; another has to go if the cache `is_full`."""


class Lru(Policy):
    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._used = Queue()

    def hit(self, block: int) -> None:
        self._used.move_to_end(block)

    def room_for(self, block: int) -> None:
        if self.is_full:
            del self._used[self.drop(self._used)]
        self._used[block] = None


class TwoQueues(Policy):
    """2Q (Johnson and Shasha, VLDB 1994): what comes waits in a quarter; who returns after that belongs to the rest."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._new, self._old, self._gone = Queue(), Queue(), Queue()

    def hit(self, block: int) -> None:
        if block in self._old:
            self._old.move_to_end(block)

    def room_for(self, block: int) -> None:
        if self.is_full:
            first, then = (self._new, self._old) if len(self._new) > self.size // 4 else (self._old, self._new)
            victim = self.drop(chain(first, then))
            if victim in self._new:
                del self._new[victim]
                self._gone[victim] = None
                if len(self._gone) > self.size // 2:
                    self._gone.popitem(last=False)
            else:
                del self._old[victim]
        if block in self._gone:
            del self._gone[block]
            self._old[block] = None
        else:
            self._new[block] = None


class Arc(Policy):
    """ARC (Megiddo and Modha, FAST 2003): a share for what was used once, another for the rest, moved by ghosts."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._once, self._often, self._once_gone, self._often_gone = Queue(), Queue(), Queue(), Queue()
        self._target = 0.0  # blocks for what was used once

    def hit(self, block: int) -> None:
        self._once.pop(block, None)
        self._often[block] = None
        self._often.move_to_end(block)

    def room_for(self, block: int) -> None:
        once_gone, often_gone = len(self._once_gone), len(self._often_gone)
        is_often = block in self._often_gone
        if is_often:
            self._target = max(0.0, self._target - max(1.0, once_gone / often_gone))
            del self._often_gone[block]
        elif block in self._once_gone:
            self._target = min(float(self.size), self._target + max(1.0, often_gone / once_gone))
            del self._once_gone[block]
            self._evict(False)
            self._often[block] = None
            return
        self._evict(is_often)
        (self._often if is_often else self._once)[block] = None
        for gone, most in ((self._once_gone, self.size - len(self._once)), (self._often_gone, self.size)):
            while len(gone) > max(0, most):
                gone.popitem(last=False)

    def _evict(self, is_often: bool) -> None:
        if not self.is_full:
            return
        size = len(self._once)
        is_once = size > self._target or (is_often and size == self._target)
        queues = [(self._once, self._once_gone), (self._often, self._often_gone)]
        for queue, gone in queues if size and is_once else reversed(queues):
            if (victim := self.drop(queue)) >= 0:
                del queue[victim]
                gone[victim] = None
                return


class Lhd(Policy):
    """LHD (Beckmann et al., NSDI 2018): of some blocks drawn, that of the lowest hit density by age and hits goes."""

    _NUM_AGES: Final = 128
    _DRAWN: Final = 32

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._dice = random.Random(1)
        self._blocks: list[int] = []
        self._at: dict[int, int] = {}
        self._used: dict[int, int] = {}
        self._num_hits: dict[int, int] = {}
        self._now = 0  # uses
        self._grain = max(1, size // 16)  # uses in an age
        self._hits, self._gone = np.zeros((2, 4, self._NUM_AGES))
        # At first as LRU.
        self._density = np.tile(1.0 / (1.0 + np.arange(self._NUM_AGES)), (4, 1))

    def _cell(self, block: int) -> tuple[int, int]:
        age = (self._now - self._used[block]) // self._grain
        return min(3, self._num_hits[block]), min(self._NUM_AGES - 1, age)

    def _tick(self) -> None:
        self._now += 1
        if self._now % (8 * self.size) == 0:
            hits, events = self._hits, self._hits + self._gone
            ahead = np.cumsum(hits[:, ::-1], 1)[:, ::-1]
            lives = np.cumsum(np.cumsum(events[:, ::-1], 1), 1)[:, ::-1]  # ages still to live, of all that get there
            self._density = (ahead + 1e-9) / (lives + 1.0)
            self._hits *= 0.9
            self._gone *= 0.9

    def hit(self, block: int) -> None:
        self._hits[self._cell(block)] += 1
        self._num_hits[block] += 1
        self._used[block] = self._now
        self._tick()

    def room_for(self, block: int) -> None:
        if self.is_full:
            drawn = [self._dice.choice(self._blocks) for _ in range(self._DRAWN)]
            order = sorted(drawn, key=lambda each: (self._density[self._cell(each)], -self._at[each]))
            victim = self.drop(order)
            if victim < 0:
                victim = self.drop(self._blocks)
            self._gone[self._cell(victim)] += 1
            at, last = self._at.pop(victim), self._blocks.pop()
            if last != victim:
                self._blocks[at], self._at[last] = last, at
            del self._used[victim], self._num_hits[victim]
        self._at[block] = len(self._blocks)
        self._blocks.append(block)
        self._used[block], self._num_hits[block] = self._now, 0
        self._tick()


OTHERS: Final[dict[str, type[Policy]]] = {"2q": TwoQueues, "arc": Arc, "lhd": Lhd}


def share_of(policy: type[Policy], trace: RequestTrace, size: int) -> float:
    """The share of all prompts' blocks that a cache of this size finds, of 1."""
    cache = policy(size)
    found = sum(
        cache.request(trace.chain(request).tolist(), num_prompt)
        for request, num_prompt in enumerate(trace.num_prompt.tolist())
    )
    return found / float(trace.num_prompt.sum())
