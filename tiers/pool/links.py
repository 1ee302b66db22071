"""ChainLinks: which resident block is whose parent, for slots of a pool."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvtier.tiers.pool.index import Slots, int_type

_ONE: Final = np.ones(1, np.int32)  # ufunc.at is 20 times faster when it need not cast


def slots_before(held: Slots, starts: list[int], parents: Slots) -> Slots:
    """For each position the slot of the block before it; chains begin at `starts`, behind `parents` (-1 for none)."""
    before = np.empty_like(held)
    before[1:] = held[:-1]
    before[starts] = parents
    return before


class ChainLinks:
    """Each slot's parent and its number of resident children. It takes no lock.

    A link carries the parent's generation: a parent dropped by force while it had children leaves stale links behind,
    which are told by the generation and ignored. Row `num_slots` is nobody, the parent of blocks without one: that
    spares every batch a mask. Its count of children means nothing.
    """

    def __init__(self, generation: NDArray[np.int64]) -> None:
        rows = len(generation)
        self.nobody = rows - 1
        self.generation = generation  # the pool's; row `nobody` stays 0
        self.children = np.zeros(rows, np.int32)
        self.parent = np.full(rows, self.nobody, int_type(rows))
        self._parent_generation = np.zeros(rows, np.int64)
        # For one at a time: an item of a memoryview costs a third of an array's.
        self.num_children, self._parent_of = memoryview(self.children), memoryview(self.parent)
        self._link_generation, self._now = memoryview(self._parent_generation), memoryview(generation)

    def clear(self, slots: Slots) -> None:
        """These slots lost their blocks: no parent. Children they still have count them down until they are taken."""
        self.parent[slots] = self.nobody
        self._parent_generation[slots] = 0

    def link(self, slots: Slots, parents: Slots) -> None:
        """Note each slot's parent, -1 for none. The slots have no living link yet."""
        parents = np.where(parents < 0, self.nobody, parents)
        self.parent[slots] = parents
        self._parent_generation[slots] = self.generation[parents]
        self.add_children(parents)

    def living_parents(self, slots: Slots) -> Slots:
        """The parents of those slots whose link is not stale; `nobody` for those without parent."""
        parents, alive = self.parents(slots)
        return parents if alive.all() else parents[alive]

    def parents(self, slots: Slots) -> tuple[Slots, NDArray[np.bool_]]:
        """Each slot's parent, and whether the link is not stale."""
        parents = self.parent.take(slots).astype(np.int64)  # as ufunc.at wants them
        return parents, self.generation[parents] == self._parent_generation[slots]

    def add_children(self, parents: Slots) -> None:
        """One child more for each (repeats count)."""
        np.add.at(self.children, parents, _ONE)

    def remove_children(self, parents: Slots) -> None:
        """One child fewer for each (repeats count)."""
        np.subtract.at(self.children, parents, _ONE)

    def parent_of(self, slot: int) -> int:
        """The slot's parent; `nobody` without one, or where the link is stale."""
        parent: int = self._parent_of[slot]
        return parent if self._now[parent] == self._link_generation[slot] else self.nobody

    def clear_one(self, slot: int) -> None:
        """As `clear`, of one slot."""
        self._parent_of[slot] = self.nobody
        self._link_generation[slot] = 0

    def link_one(self, slot: int, parent: int) -> None:
        """As `link`, of one slot; nobody's children are not counted."""
        if parent < 0:
            self.clear_one(slot)
            return
        self._parent_of[slot] = parent
        self._link_generation[slot] = self._now[parent]
        self.num_children[parent] += 1

    def chain_order(self) -> Slots:
        """All slots, each behind its parent."""
        everyone = np.arange(self.nobody + 1)
        parents, alive = self.parents(everyone)
        ancestors = np.where(alive, parents, self.nobody)  # of each slot; twice as far away with each turn
        depths = (ancestors != self.nobody).astype(np.int64)
        while (ancestors != self.nobody).any():
            depths += depths[ancestors]
            ancestors = ancestors[ancestors]
        return np.argsort(depths[:-1], kind="stable")

    def reset(self) -> None:
        self.children[:] = 0
        self.parent[:] = self.nobody
        self._parent_generation[:] = 0

    def check(self, resident: Slots) -> None:
        """Raise AssertionError where a resident slot's count of children is not the number of links to it."""
        children = np.bincount(self.living_parents(resident), minlength=self.nobody + 1)
        assert (children[resident] == self.children[resident]).all(), "counts of children"
