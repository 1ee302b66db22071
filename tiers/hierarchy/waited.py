"""WaitedBlocks: the blocks that waiting requests hold or wait for, each counted once however many of them do."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import repeat

import numpy as np

from kvtier.tiers import ChainHash


@dataclass(eq=False, slots=True)
class Holding:
    """What one request holds or waits for: blocks that L2 has, by their slots, and the others by their names."""

    run: Sequence[ChainHash]
    slots: list[int]  # of the first blocks of the run
    names: Sequence[ChainHash] = field(default=(), init=False)  # once it is counted: what is counted by name


class WaitedBlocks:
    """Counts by slot what L2 has, since a name costs ten times as much. It takes no lock.

    Nothing is counted block by block while all requests together have room even if they shared none.
    A block that was not in L2 when it was first waited for is counted by its name, also once it has come there. One in
    L2, but behind one that is not, may count by both: then waiting requests get less room, never more.
    """

    def __init__(self, num_slots: int) -> None:
        self._by_slot = np.zeros(num_slots, np.int32)
        self._count = memoryview(self._by_slot)
        self._by_name: Counter[ChainHash] = Counter()
        self._num_slots = 0  # held by some request, and counted
        self._uncounted: dict[Holding, None] = {}  # in the order they came
        self._num_uncounted = 0  # blocks of these, those that several hold as often

    def __len__(self) -> int:
        """Blocks."""
        self._count_all()
        return self._num_slots + len(self._by_name)

    def room(self, run: Sequence[ChainHash], slots: list[int], most: int) -> int:
        """How many leading blocks of a run, the first of which lie in `slots`, may be held: by all `most` at most."""
        if self._num_uncounted + self._num_slots + len(self._by_name) + len(run) <= most:
            return len(run)
        room = most - len(self)
        if room >= len(run):
            return len(run)
        is_new = np.array([name not in self._by_name for name in run])
        is_new[: len(slots)] &= self._by_slot[slots] == 0
        return int(np.searchsorted(is_new.cumsum(), max(0, room), "right"))

    def hold(self, run: Sequence[ChainHash], slots: list[int]) -> Holding:
        """The blocks of a run, the first of which lie in `slots`, are held by one request more."""
        held = Holding(run, slots)
        self._uncounted[held] = None
        self._num_uncounted += len(run)
        return held

    def drop(self, held: Holding) -> None:
        """The request holds them no more."""
        if held in self._uncounted:
            del self._uncounted[held]
            self._num_uncounted -= len(held.run)
            return
        for slot in held.slots:
            self._count[slot] -= 1
            self._num_slots -= not self._count[slot]
        names = self._by_name
        left = list(map(names.pop, held.names, repeat(0)))  # all of them at the speed of C
        if sum(left) > len(left):  # mostly nobody else holds any
            names.update({h: count - 1 for h, count in zip(held.names, left, strict=True) if count > 1})

    def check(self) -> None:
        """Raise AssertionError where the counts contradict each other."""
        assert self._num_uncounted == sum(len(held.run) for held in self._uncounted), "blocks not counted one by one"
        assert self._num_slots == np.count_nonzero(self._by_slot), "blocks held by slot"
        assert (self._by_slot >= 0).all(), "a block is held less than not at all"
        assert all(count > 0 for count in self._by_name.values()), "a name that nobody holds"

    def _count_all(self) -> None:
        """Count block by block what is not counted yet."""
        for held in self._uncounted:
            run, slots = held.run, held.slots
            names = run[len(slots) :]
            if self._by_name and not self._by_name.keys().isdisjoint(run[: len(slots)]):
                known = [name in self._by_name for name in run[: len(slots)]]
                names = [*(name for name, is_known in zip(run, known, strict=False) if is_known), *names]
                slots = held.slots = [slot for slot, is_known in zip(slots, known, strict=True) if not is_known]
            for slot in slots:
                self._num_slots += not self._count[slot]
                self._count[slot] += 1
            self._by_name.update(names)
            held.names = names
        self._uncounted.clear()
        self._num_uncounted = 0
