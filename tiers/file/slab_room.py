"""SlabRoom: which extent of a slab is evicted next: the one whose blocks are needed least, by the ends of requests.

An extent belongs to the last request that had blocks in it. Before the first end, and so after every start, there is
no learned order. While LRU would have kept more (`LruShadow`), the order is by when that request ended. The
slab's own reads would not do, as L2 answers requests, too.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvtier.tiers import ChainHash
from kvtier.tiers.pool import Slots
from kvtier.tiers.reuse import NO_CLASS, ClassifiedEnd, make_shadow

Extents = NDArray[np.int64]

_SHARE: Final = 32  # victims planned at once: one extent in so many,
_GOOD_FOR: Final = 15.0  # for so many seconds
_MOST_LATE: Final = 16_384  # blocks whose request ended before they were written: no store queue holds more


class SlabRoom:
    """Per extent: its request's class, end and depth; three numbers each and a byte a slot. No lock."""

    def __init__(self, num_extents: int, slots_per_extent: int) -> None:
        self._per_extent = slots_per_extent
        self._kind = np.full(num_extents, NO_CLASS, np.int64)
        self._since = np.zeros(num_extents)  # seconds
        self._depth = np.zeros(num_extents, np.int64)  # of its deepest block
        self._slots_ended = np.zeros(num_extents * slots_per_extent, np.bool_)  # slots of a request that has ended
        self.late: OrderedDict[ChainHash, tuple[ClassifiedEnd, int]] = OrderedDict()  # unwritten: its end, its depth
        self.rival = make_shadow(len(self._slots_ended))
        self._last: ClassifiedEnd | None = None
        self._plan: list[int] = []  # the next victims, the last of them first
        self._planned_at = 0.0
        self._view()

    def _view(self) -> None:
        """Memoryviews for access to single items: that costs a third of an array's."""
        self._kinds, self._depths = memoryview(self._kind), memoryview(self._depth)
        self._times = memoryview(self._since).cast("B").cast("d")
        self._ended = memoryview(self._slots_ended)

    @property
    def decides(self) -> bool:
        """Whether there is a learned order for `take`."""
        return self._last is not None

    def has_ended(self, extent: int) -> bool:
        """Whether the end of a request with a block in the extent was recorded since it was opened."""
        return self._kinds[extent] != NO_CLASS

    def ended(self, end: ClassifiedEnd, found: list[int], live: Sequence[int]) -> None:
        """A request has ended; its blocks are in these slots, -1 if not here. `live`: the blocks in each extent."""
        slots = np.array(found, np.int64)
        if self._last is None:
            self._since[:] = end.ended_at
        self._last = end
        sampled, their_tags = self.rival.sampled(end.tags)
        num_looked_up = bisect_left(sampled, end.num_prompt)
        at = slots[list(sampled[:num_looked_up])]
        were_here = self._slots_ended[at] & (at >= 0)
        own = num_looked_up if were_here.all() else int(were_here.argmin())
        self.rival.ended(their_tags, num_looked_up, own)
        depths = np.flatnonzero(slots >= 0)
        self._note(end, slots[depths], depths, live)
        if len(depths) < len(slots):
            for depth in np.flatnonzero(slots < 0)[:_MOST_LATE].tolist():
                self.late[end.names[depth]] = end, depth
            while len(self.late) > _MOST_LATE:
                self.late.popitem(last=False)

    def stored(self, hashes: Sequence[ChainHash], slots: Sequence[int], live: Sequence[int]) -> None:
        """Blocks were written to slots of one extent; the ends of their requests may have come before."""
        ends = [self.late.pop(name, None) for name in hashes]
        at = [i for i, found in enumerate(ends) if found is not None]
        if at and (last := ends[at[-1]]) is not None:
            depths = np.array([found[1] for found in ends if found is not None])
            self._note(last[0], np.array(slots, np.int64)[at], depths, live)

    def opened(self, extent: int) -> None:
        """The extent is filled anew."""
        self._kinds[extent] = NO_CLASS
        self._depths[extent] = 0
        self._times[extent] = self._last.clock() if self._last is not None else 0.0

    def used(self, extent: int) -> None:
        """The extent was mostly hit, and no recorded end shows by which request."""
        if self._last is not None:
            self._times[extent] = self._last.clock()

    def left(self, slots: Sequence[int]) -> None:
        """The blocks in these slots were removed."""
        ended = self._ended
        for slot in slots:
            ended[slot] = False

    def take(self, order: Collection[int], is_evictable: Callable[[int], bool]) -> int | None:
        """The next extent of `order` (oldest first) that `is_evictable`, or None. Several are planned at once."""
        assert self._last is not None
        if self._last.clock() - self._planned_at > _GOOD_FOR:
            self._plan.clear()
        for _ in range(2):
            while self._plan:
                extent = self._plan.pop()
                if self._times[extent] <= self._planned_at and is_evictable(extent):
                    return extent
            self._make_plan(np.fromiter(order, np.int64, len(order)))
        return None

    def _make_plan(self, extents: Extents) -> None:
        assert self._last is not None
        now = self._last.clock()
        places: Extents = np.zeros(len(extents), np.int64)  # all equal: the oldest goes first
        if not self.rival.leads:
            places = self._last.order.places(self._kind[extents], now - self._since[extents])
        count = max(len(extents) // _SHARE, 1)
        if count < len(extents):
            is_low = places <= np.partition(places, count)[count]
            extents, places = extents[is_low], places[is_low]
        # A chain's end goes before its beginning: blocks without their parent cannot be reached.
        first = np.lexsort((-self._depth[extents], self._since[extents], places))[:count]
        self._plan, self._planned_at = extents[first][::-1].tolist(), now

    def _note(self, end: ClassifiedEnd, slots: Slots, depths: NDArray[np.int64], live: Sequence[int]) -> None:
        """These slots hold the request's blocks of these depths.

        An extent becomes the request's if at least half of its blocks are, or no other request needs it more.
        """
        if not len(slots):
            return
        self._slots_ended[slots] = True
        mine, deepest, first = slots, depths, depths
        if self._per_extent > 1:
            extents, which, counts = np.unique(slots // self._per_extent, return_inverse=True, return_counts=True)
            deepest, first = np.zeros(len(extents), np.int64), np.full(len(extents), len(end.names))
            np.maximum.at(deepest, which, depths)
            np.minimum.at(first, which, depths)
            is_its = 2 * counts >= np.array([live[extent] for extent in extents.tolist()])
            if not is_its.all():
                kinds, ages = self._kind[extents], end.clock() - self._since[extents]
                places = end.order.places(np.append(kinds, end.kind), np.append(ages, 0.0))  # its own is the last
                is_its |= (kinds == NO_CLASS) | (places[:-1] <= places[-1])
            mine, deepest, first = extents[is_its], deepest[is_its], first[is_its]
        self._kind[mine] = np.where(first < end.num_head, end.head_kind, end.kind)
        self._since[mine], self._depth[mine] = end.ended_at, deepest

    def reset(self) -> None:
        """Every block was forgotten: forget the recorded ends, too."""
        self._kind[:] = NO_CLASS
        self._slots_ended[:] = False
        self.late.clear()
        self._plan.clear()
        self._last = None
        self.rival = make_shadow(len(self._slots_ended))

    def shorten(self, num_extents: int) -> None:
        """Reduce to so many extents."""
        self._kind = self._kind[:num_extents].copy()
        self._since = self._since[:num_extents].copy()
        self._depth = self._depth[:num_extents].copy()
        self._slots_ended = self._slots_ended[: num_extents * self._per_extent].copy()
        self._view()
        self._plan = [extent for extent in self._plan if extent < num_extents]
        self.rival = make_shadow(len(self._slots_ended))
