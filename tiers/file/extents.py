"""The slab's index and its extents: which block lies in which slot. Filled in chain order, evicted whole. No I/O.

`BareSlab` is the same without a file, for simulations.
"""

import heapq
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from enum import Enum
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtier.tiers import BATCH_BYTES, ChainHash
from kvtier.tiers.file import slab
from kvtier.tiers.pool import EVICTED, REMOVED, RESET, ChangeLog, EvictionLog, Slots, Words, make_index
from kvtier.tiers.reuse import NO_CLASS, ClassifiedEnd, make_shadow

_PIECE: Final = 1 << 14  # names loaded or checked at once


class SlabIndex:
    """One name a slot at most, and one slot a name: 49 to 65 bytes a slot compiled, some 200 interpreted. No lock."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._index = make_index(num_slots)
        self.find_each: Callable[[list[ChainHash]], list[int]] = self._index.find_all
        """The slot of each name, -1 if there is none. ValueError if a name is not 32 bytes."""
        self._words: Words = self._index.names.view(np.uint64).reshape(-1, 4)
        self.is_named = bytearray(num_slots)  # of every slot, and of those behind the last one
        self._named = np.frombuffer(self.is_named, np.bool_)

    @property
    def num_names(self) -> int:
        """Slots that have a name."""
        return self._index.num_names

    def find_one(self, name: ChainHash) -> int:
        """The slot of one name, -1 if it has none."""
        return self.find_each([name])[0]

    def write(self, slots: Slots | slice, words: Words) -> None:
        """Write the names of slots that have none; `load` makes them findable."""
        self._words[slots] = words

    def load(self, slots: Slots) -> list[int]:
        """Make the slots' written names findable. Returns slots whose name another slot already has."""
        others: list[int] = []
        for first in range(0, len(slots), _PIECE):
            others += self._index.load(slots[first : first + _PIECE].tolist())
        self._named[slots] = True
        self._named[others] = False
        return others

    def add(self, hashes: Sequence[ChainHash], places: Sequence[int]) -> None:
        """Name slots that have no name. No name comes twice, and none is in the index."""
        slots = list(places)
        self._index.put_all(list(hashes), slots)
        for slot in slots:
            self.is_named[slot] = 1

    def remove(self, places: Sequence[int]) -> None:
        """Remove the slots' names; each has one. `names` still returns it until the slot is named again."""
        slots = list(places)
        self._index.remove_all(slots)
        for slot in slots:
            self.is_named[slot] = 0

    def holds(self, slots: Slots) -> NDArray[np.bool_]:
        """Whether each of the slots (-1: none; it may lie behind the last one) has a name."""
        held: NDArray[np.bool_] = self._named.take(slots, mode="wrap") & (slots >= 0) & (slots < self.num_slots)
        return held

    def named(self, first: int = 0, end: int | None = None) -> Slots:
        """All slots from `first` to before `end` that have names, ascending."""
        return first + np.flatnonzero(self._named[first:end])

    def names(self, slots: Slots) -> list[ChainHash]:
        """The names of slots that have one, or had one last."""
        joined = self._words.take(slots, 0).tobytes()
        return [joined[i : i + 32] for i in range(0, len(joined), 32)]

    def words(self, slots: Slots) -> Words:
        """The names of slots as `[n, 4]` uint64."""
        return self._words.take(slots, 0)

    def shorten(self, num_slots: int) -> None:
        """Have no more than so many slots; those behind have no names."""
        self.num_slots = num_slots

    def reset(self) -> None:
        """Remove all names."""
        self._index.reset()
        self._named[:] = False

    def check(self) -> Slots:
        """All named slots. Raises AssertionError unless each is found by its name, and nothing else is."""
        named = self.named()
        assert self.num_names == len(named), f"{self.num_names} names for {len(named)} slots"
        assert not len(named) or named[-1] < self.num_slots, "a slot out of range has a name"
        for first in range(0, len(named), _PIECE):
            piece = named[first : first + _PIECE]
            assert self.find_each(self.names(piece)) == piece.tolist(), "a name leads to another slot"
        return named


_SHARE: Final = 32  # victims planned at once: one extent in so many,
_GOOD_FOR: Final = 15.0  # for so many seconds
_MOST_LATE: Final = 16_384  # blocks whose request ended before they were written: no store queue holds more


class SlabRoom:
    """Which extent is evicted next: the one whose blocks are needed least, by the ends of requests. No lock.

    An extent belongs to the last request that had blocks in it: its class, end and depth are kept, and a byte a slot.
    Before the first end, and so after every start, there is no learned order. While LRU would have kept more
    (`LruShadow`), the order is by when that request ended. The slab's own reads would not do, as L2 answers requests,
    too.
    """

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

    def _make_plan(self, extents: Slots) -> None:
        assert self._last is not None
        now = self._last.clock()
        places: Slots = np.zeros(len(extents), np.int64)  # all equal: the oldest goes first
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


MAX_OPEN: Final = 4  # extents being filled at once: as many chains stay adjacent while they are stored together
_MAX_CHANCES: Final = 64  # extents skipped per eviction because most blocks were hit: bounds the time under the lock
_KEEP_SHARE: Final = 4  # of an evicted extent at most a quarter is stored again
_U32: Final = (1 << 32) - 1


class _ExtentState(Enum):
    FREE = 0  # empty, without an owner
    CLAIMED = 1  # being emptied by one thread
    OPEN = 2  # has room behind its fill mark
    CLOSED = 3  # full, or no longer filled
    RETIRED = 4  # it lies in the part that is being cut off


class SlotRun(NamedTuple):
    """Adjacent slots of one extent that one writer fills. It calls `leave` at the end, whether published or not."""

    extent: int
    first: int
    size: int
    epoch: int
    slots: range  # the same, one by one


class Owner(NamedTuple):
    """A tenant whose blocks lie in extents of their own: at most so many."""

    name: bytes
    limit: int  # at least 1


class ClaimedExtent(NamedTuple):
    """An extent taken to be filled anew, until `opened` or `unclaim`. Its rows on disk are blanked first."""

    extent: int
    dirty: bool  # its rows on disk may name blocks
    epoch: int
    keep: list[int]  # slots hit since they were stored, to be stored again
    keep_hashes: list[ChainHash]


class ExtentMap:
    """The index of a slab and the life of its extents: FREE → (CLAIMED) → OPEN → CLOSED → CLAIMED → …

    Not thread-safe: the store's lock guards it, and is never held across I/O. A slot is findable only between
    `publish` and the extent's eviction. An extent that a writer is in (`busy`) is no victim.
    A tenant with a bound (`Owner`) fills extents of its own, one after another, and evicts its oldest at its bound:
    what it stores never costs others more room than that. Owners are forgotten at the end; their blocks are not.
    Law (`check`): the index names exactly the ready slots; live + unused + holes == slots of every extent.
    """

    def __init__(self, num_extents: int, slots_per_extent: int, eviction_log: EvictionLog | None = None) -> None:
        """`eviction_log` records evicted blocks, with an entry for each extent. None: no log."""
        self.num_extents = num_extents
        self.num_in_use = num_extents  # those behind are retired: blocks written there are lost, and not published
        self.per_extent = slots_per_extent
        num_slots = num_extents * slots_per_extent
        self.index = SlabIndex(num_slots)
        self.room = SlabRoom(num_extents, slots_per_extent)
        self.epoch = 0
        self.num_evicted = 0
        self.changes: ChangeLog | None = None  # while a reader listens
        self.eviction_log = eviction_log
        self.generations = np.zeros(num_slots, np.uint32)
        self._generation = memoryview(self.generations)  # one at a time; most reads are of few blocks
        self.hits = bytearray(num_slots)  # 1: used since it was stored, a second chance when its extent is evicted
        self.live = [0] * num_extents
        self._fill = [0] * num_extents
        self._busy = [0] * num_extents
        self._dirty = bytearray(num_extents)
        self._state = [_ExtentState.FREE] * num_extents
        self._free = list(range(num_extents))  # a heap: low extents first, so that a slab can be cut short
        self._withheld: list[int] = []  # free, too, but the disk had no space for them
        self._open: OrderedDict[int, ChainHash | None] = OrderedDict()  # extent -> its last block
        self._order: OrderedDict[int, None] = OrderedDict()  # open and closed extents, next victim first
        self._owner: dict[int, bytes] = {}  # of the extents that have one
        self._owned: dict[bytes, OrderedDict[int, None]] = {}  # each owner's extents, the oldest first

    def restore(self, slots: Slots, seqs: NDArray[np.uint64], dirty: list[int]) -> None:
        """Load the result of a recovery: slots whose names the index has, and extents that are not blank."""
        for extent in dirty:
            self._dirty[extent] = 1
        extents = slots // self.per_extent
        newest = np.zeros(self.num_extents, np.uint64)
        fill = np.zeros(self.num_extents, np.int64)
        np.maximum.at(newest, extents, seqs)
        np.maximum.at(fill, extents, slots % self.per_extent + 1)
        self.live = np.bincount(extents, minlength=self.num_extents).tolist()
        self._fill = fill.tolist()
        used = [extent for extent in np.argsort(newest, kind="stable").tolist() if self.live[extent]]
        self._free = [extent for extent in range(self.num_extents) if not self.live[extent]]
        self._order = OrderedDict.fromkeys(used)
        for extent in used:
            self._state[extent] = _ExtentState.CLOSED
        for extent in [extent for extent in used if self._fill[extent] < self.per_extent][-MAX_OPEN:]:
            self._state[extent] = _ExtentState.OPEN
            last = extent * self.per_extent + self._fill[extent] - 1
            (self._open[extent],) = self.index.names(np.array([last]))

    def find_each(self, hashes: list[ChainHash]) -> tuple[list[int], list[int]]:
        """The slot of each block, -1 for none, and the slot's generation, which differs for the slot's next block."""
        slots = self.index.find_each(hashes)
        return slots, [self._generation[slot] for slot in slots]

    def still_hold(self, slots: Sequence[int], generations: Sequence[int]) -> list[bool]:
        """Whether each slot (-1: none) still holds the block it had when `find_each` returned these generations.

        A slot loses its name before it gets another one, and then has a new generation.
        """
        now, is_named, end = self._generation, self.index.is_named, self.index.num_slots
        return [
            0 <= slot < end and now[slot] == then and bool(is_named[slot])
            for slot, then in zip(slots, generations, strict=True)
        ]

    def enter(self, extent: int) -> None:
        """Keep an extent from being evicted until `leave`."""
        self._busy[extent] += 1

    def take(self, hashes: Sequence[ChainHash], after: ChainHash | None, owner: bytes | None = None) -> SlotRun | None:
        """Slots for leading `hashes`, if possible behind block `after`; None: claim first. `after` None: anywhere."""
        mine = [each for each in self._open.items() if self._owner.get(each[0]) == owner]
        for extent, last in mine:
            if last == after and after is not None:
                return self.take_in(extent, hashes)
        if owner is None and after is not None and self._free and len(mine) < MAX_OPEN:
            return None
        return self.take_in(mine[0][0], hashes) if mine else None

    def take_in(self, extent: int, hashes: Sequence[ChainHash]) -> SlotRun:
        """Slots for leading `hashes` in an open extent."""
        fill = self._fill[extent]
        count = min(len(hashes), self.per_extent - fill)
        first = extent * self.per_extent + fill
        slots, generation = range(first, first + count), self._generation
        for slot in slots:
            generation[slot] = generation[slot] + 1 & _U32  # wraps round
        self._fill[extent] = fill + count
        self._busy[extent] += 1
        self._dirty[extent] = 1
        self._open[extent] = hashes[count - 1]
        self._open.move_to_end(extent)
        if fill + count == self.per_extent:
            self._close(extent)
        return SlotRun(extent, first, count, self.epoch, slots)

    def claim(self, owner: Owner | None = None) -> ClaimedExtent | None:
        """An extent to fill: a free one, else the next victim, whose blocks are dropped at once. None: all are busy.

        Of an owner at its bound it is its oldest.
        """
        own = self._owned.get(owner.name, ()) if owner is not None else ()
        if owner is not None and len(own) >= owner.limit:
            oldest = next(filter(self._is_evictable, own), None)
            victim = None if oldest is None else (oldest, self._kept_of(oldest))
        elif self._free:
            victim = heapq.heappop(self._free), []
        else:
            victim = self._choose_victim() or self._close_one()
        if victim is None:
            return None
        extent, keep = victim
        self._order.pop(extent, None)
        before, name = self._disown(extent), None if owner is None else owner.name
        if before not in (None, name):
            keep = []  # a tenant with a bound has no blocks outside its extents
        if name is not None:
            self._owner[extent] = name
            self._owned.setdefault(name, OrderedDict())[extent] = None
        self._state[extent] = _ExtentState.CLAIMED
        self._busy[extent] += 1
        self.num_evicted += self.live[extent] - len(keep)
        is_named = self.index.is_named
        self._unlink([slot for slot in self._slots(extent) if is_named[slot]], EVICTED, keep)
        self._fill[extent] = 0
        hashes = self.index.names(np.array(keep, np.int64)) if keep else []
        return ClaimedExtent(extent, bool(self._dirty[extent]), self.epoch, keep, hashes)

    def live_of(self, owner: bytes) -> int:
        """Blocks in the owner's extents."""
        return sum(self.live[extent] for extent in self._owned.get(owner, ()))

    def excess(self, owner: Owner) -> list[ChainHash]:
        """Blocks of the owner's oldest idle extents past its bound, which was lowered: the caller drops them."""
        own = self._owned.get(owner.name, ())
        idle = [extent for extent in own if self._is_evictable(extent)] if len(own) > owner.limit else []
        slots = [slot for extent in idle[: len(own) - owner.limit] for slot in self._slots(extent)]
        named = [slot for slot in slots if self.index.is_named[slot]]
        self.num_evicted += len(named)
        return self.index.names(np.array(named, np.int64)) if named else []

    def _close_one(self) -> tuple[int, list[int]] | None:
        """With every extent open, as for many owners: the one that is unused for longest is a victim."""
        for extent in [extent for extent in self._open if not self._busy[extent]]:
            self._close(extent)
            return self._choose_victim()
        return None

    def _kept_of(self, extent: int) -> list[int]:
        """The slots that are stored again if the extent is evicted."""
        slots = self._slots(extent)
        return [slot for slot in slots if self.hits[slot]][: self.per_extent // _KEEP_SHARE]

    def _disown(self, extent: int) -> bytes | None:
        """The extent's owner until now."""
        if (owner := self._owner.pop(extent, None)) is not None:
            del self._owned[owner][extent]
            if not self._owned[owner]:
                del self._owned[owner]
        return owner

    def _choose_victim(self) -> tuple[int, list[int]] | None:
        """The idle extent that is needed least, by the ends of requests; else the oldest not mostly hit lately."""
        most = self.per_extent // _KEEP_SHARE
        chances = _MAX_CHANCES
        for _ in range(2 * len(self._order)):
            extent = self._next_in_line()
            if extent is None:
                return None
            if self.room.decides and self.room.has_ended(extent):
                return extent, []
            slots = self._slots(extent)
            num_hits = self.hits.count(1, slots.start, slots.stop)
            if num_hits > most and chances:
                chances -= 1
                self.hits[slots.start : slots.stop] = bytes(self.per_extent)
                self.room.used(extent)
                continue
            return extent, self._kept_of(extent) if num_hits else []
        return None

    def _next_in_line(self) -> int | None:
        if self.room.decides and (extent := self.room.take(self._order, self._is_evictable)) is not None:
            return extent
        for _ in range(len(self._order)):
            extent = next(iter(self._order))
            self._order.move_to_end(extent)
            if self._is_evictable(extent):
                return extent
        return None

    def _is_evictable(self, extent: int) -> bool:
        return self._state[extent] is _ExtentState.CLOSED and not self._busy[extent]

    def opened(self, claim: ClaimedExtent) -> bool:
        """The claimed extent's rows are blank: it can be filled. False if a reset or a shrink took it meanwhile."""
        extent = claim.extent
        self._dirty[extent] = 0
        self._busy[extent] -= 1
        if self._state[extent] is _ExtentState.RETIRED:
            return False
        self._order[extent] = None
        self.room.opened(extent)
        if claim.epoch != self.epoch:
            self._state[extent] = _ExtentState.CLOSED
            self._free_if_empty(extent)
            return False
        self._state[extent] = _ExtentState.OPEN
        self._open[extent] = None
        if self.eviction_log is not None:
            self.eviction_log.came(extent)
        return True

    def unclaim(self, claim: ClaimedExtent) -> None:
        """The claimed extent could not be emptied: it is evicted last."""
        extent = claim.extent
        self._busy[extent] -= 1
        if self._state[extent] is _ExtentState.RETIRED:
            return
        self._fill[extent] = self.per_extent
        self._state[extent] = _ExtentState.CLOSED
        self._order[extent] = None

    def withhold(self, claim: ClaimedExtent, lacks_space: Callable[[int], bool]) -> None:
        """The disk has no space for the claimed extent. It and free ones that lack space wait until `offer`."""
        self._busy[claim.extent] -= 1
        if self._state[claim.extent] is not _ExtentState.RETIRED:
            self._disown(claim.extent)
            self._state[claim.extent] = _ExtentState.FREE
            self._free.append(claim.extent)
        self._withheld += filter(lacks_space, self._free)
        self._free = [extent for extent in self._free if not lacks_space(extent)]
        heapq.heapify(self._free)

    def offer(self) -> None:
        """Withheld extents are free: the disk may have space again."""
        self._free, self._withheld = [*self._free, *self._withheld], []
        heapq.heapify(self._free)

    def publish(self, run: SlotRun, hashes: list[ChainHash]) -> list[int]:
        """The run's blocks are stored: make them findable. Returns slots of blocks that another writer stored first.

        The caller blanks those rows. It ends every run with `leave`, published or not.
        """
        stored, duplicates = list(run.slots), list[int]()
        held = self.index.find_each(hashes)
        if max(held) >= 0:
            duplicates = [slot for slot, other in zip(stored, held, strict=True) if other >= 0]
            stored = [slot for slot, other in zip(stored, held, strict=True) if other < 0]
            hashes = [name for name, other in zip(hashes, held, strict=True) if other < 0]
        self.index.add(hashes, stored)
        self.hits[run.first : run.first + run.size] = bytes(run.size)
        self.live[run.extent] += len(stored)
        if self.room.late:
            self.room.stored(hashes, stored, self.live)
        if self.changes is not None:
            self.changes.stored(np.array(stored, np.int64))
        return duplicates

    def leave(self, extent: int) -> None:
        self._busy[extent] -= 1
        if not self.live[extent]:
            self._free_if_empty(extent)

    def drop(self, chain_hash: ChainHash, cause: str = REMOVED) -> int | None:
        """Forget a block. Its slot, now a hole, stays busy until the caller has blanked its row and calls `leave`."""
        slot = self.index.find_one(chain_hash)
        if slot < 0:
            return None
        self._busy[slot // self.per_extent] += 1
        self._unlink([slot], cause)
        return slot

    def clear(self) -> None:
        """Forget everything; extents are free again as soon as no call uses them."""
        self.epoch += 1
        if self.changes is not None:
            self.changes.cleared(self.index.words)
        if self.eviction_log is not None:
            self.eviction_log.left(self.index.words(self.index.named()), RESET)
        self.index.reset()
        self.room.reset()
        self.hits = bytearray(len(self.hits))
        self.live = [0] * self.num_extents
        for extent in list(self._open):
            self._close(extent)
        for extent in [extent for extent in self._order if not self._busy[extent]]:
            self._free_if_empty(extent)

    # Cutting the end off: retire → wait until no call uses it → shorten, or else revive.

    def retire(self, first: int) -> int:
        """Forget the blocks of extent `first` and all behind it, and fill them no more. Returns how many blocks."""
        slots = self.index.named(first * self.per_extent).tolist()
        self.num_in_use = first
        self.num_evicted += len(slots)
        self._unlink(slots, EVICTED)
        for extent in range(first, self.num_extents):
            self._open.pop(extent, None)
            self._order.pop(extent, None)
            self._disown(extent)
            self._state[extent] = _ExtentState.RETIRED
        self._free = [extent for extent in self._free if extent < first]
        self._withheld = [extent for extent in self._withheld if extent < first]
        heapq.heapify(self._free)
        return len(slots)

    def revive(self, first: int) -> None:
        """Retired extents are used again, empty, each as soon as no call uses it."""
        self.num_in_use = self.num_extents
        for extent in range(first, self.num_extents):
            self._state[extent] = _ExtentState.CLOSED
            self._order[extent] = None
            self._free_if_empty(extent)

    def shorten(self, num_extents: int) -> None:
        """Reduce the slab to so many extents. Those behind are retired, and no call uses them."""
        num_slots = num_extents * self.per_extent
        self.num_extents = self.num_in_use = num_extents
        for by_extent in (self.live, self._fill, self._busy, self._state, self._dirty):
            del by_extent[num_extents:]
        del self.hits[num_slots:]
        self.room.shorten(num_extents)
        self.index.shorten(num_slots)

    def _slots(self, extent: int) -> range:
        return range(extent * self.per_extent, (extent + 1) * self.per_extent)

    def _unlink(self, slots: Sequence[int], cause: str, kept: Sequence[int] = ()) -> None:
        """Unname slots that hold blocks, ascending; those `kept` are stored again."""
        if self.eviction_log is not None:
            going = np.array(slots, np.int64)
            going = np.setdiff1d(going, kept) if kept else going
            if cause == EVICTED:
                self.eviction_log.evicted(going // self.per_extent, self.index.words(going))
            else:
                self.eviction_log.left(self.index.words(going), cause)
        if self.changes is not None:
            at = np.array(slots, np.int64)
            self.changes.removed(at, self.index.words(at))
        self.index.remove(slots)
        self.room.left(slots)
        for slot in slots:
            self.live[slot // self.per_extent] -= 1
            self.hits[slot] = 0

    def _close(self, extent: int) -> None:
        del self._open[extent]
        self._state[extent] = _ExtentState.CLOSED

    def _free_if_empty(self, extent: int) -> None:
        """An idle closed extent without a block is free again."""
        if not self._busy[extent] and not self.live[extent] and self._state[extent] is _ExtentState.CLOSED:
            del self._order[extent]
            self._disown(extent)
            self._state[extent] = _ExtentState.FREE
            self._fill[extent] = 0
            heapq.heappush(self._free, extent)

    def counts(self) -> dict[str, int]:
        """Slots by state: ready, unused (may be filled), holes (free, but only with their whole extent)."""
        ready = self.index.num_names
        unused = self.per_extent * len(self._free)
        unused += sum(self.per_extent - self._fill[extent] for extent in self._open)
        return {"ready": ready, "unused": unused, "holes": self.num_extents * self.per_extent - ready - unused}

    def check(self) -> None:
        named = self.index.check()
        live = [0] * self.num_extents
        for slot in named.tolist():
            extent, position = divmod(slot, self.per_extent)
            live[extent] += 1
            assert position < self._fill[extent], f"slot {slot} is ready beyond its extent's fill mark"
        if self.changes is not None:
            self.changes.check(named)
        assert live == self.live, "live counts are off"
        assert min(self._busy, default=0) >= 0, "an extent was left more often than entered"
        free = {extent for extent, state in enumerate(self._state) if state is _ExtentState.FREE}
        opened = {extent for extent, state in enumerate(self._state) if state is _ExtentState.OPEN}
        closed = {extent for extent, state in enumerate(self._state) if state is _ExtentState.CLOSED}
        assert sorted(self._free + self._withheld) == sorted(free), "the free heap is off"
        assert set(self._open) == opened, "the open extents are off"
        assert set(self._order) == opened | closed, "the victim order is off"
        assert not any(live[extent] for extent in free), "a free extent holds blocks"
        owned = {extent: owner for owner, extents in self._owned.items() for extent in extents}
        assert owned == self._owner, "the owners' extents are off"
        assert not free & owned.keys(), "a free extent has an owner"


_NO_FINGERPRINT: Final = bytes(32)  # a fingerprint: extents do not depend on it


class BareSlab:
    """A `FileStore` of names alone, for simulations. For one thread. Every write succeeds, and at once."""

    def __init__(self, num_bytes: int, slot_bytes: int, block_size: int) -> None:
        """A slab of at most `num_bytes`, blocks of `slot_bytes` each. Without room for one it holds nothing."""
        shape = slab.plan(_NO_FINGERPRINT, slot_bytes, block_size, num_bytes)
        self._blocks = ExtentMap(shape.num_extents, shape.slots_per_extent) if shape.segments else None
        self._batch = max(1, BATCH_BYTES // slot_bytes)
        self.num_written = 0  # blocks, with those stored again

    @property
    def num_slots(self) -> int:
        """Blocks that it has room for."""
        return self._blocks.num_extents * self._blocks.per_extent if self._blocks is not None else 0

    @property
    def num_evicted(self) -> int:
        """Blocks evicted since the start."""
        return self._blocks.num_evicted if self._blocks is not None else 0

    def lookup(self, hashes: Sequence[ChainHash]) -> int:
        """How many leading blocks it holds."""
        if self._blocks is None:
            return 0
        found = self._blocks.index.find_each(list(hashes))
        return next((i for i, slot in enumerate(found) if slot < 0), len(found))

    def read(self, hashes: Sequence[ChainHash]) -> None:
        """Count a use of each of these blocks."""
        if self._blocks is not None:
            for slot in self._blocks.index.find_each(list(hashes)):
                if slot >= 0:
                    self._blocks.hits[slot] = 1

    def ended(self, end: ClassifiedEnd) -> None:
        """As `Tier.ended`."""
        if (blocks := self._blocks) is not None:
            blocks.room.ended(end, blocks.index.find_each(list(end.names)), blocks.live)

    def write(self, hashes: Sequence[ChainHash], parent: ChainHash | None) -> None:
        """Store consecutive blocks of one chain, `parent` before them, batch by batch as they come from L2."""
        for first in range(0, len(hashes), self._batch):
            self._write(hashes[first : first + self._batch], hashes[first - 1] if first else parent)

    def check(self) -> None:
        """Raise AssertionError if the extents' law is broken."""
        if self._blocks is not None:
            self._blocks.check()

    def _write(self, hashes: Sequence[ChainHash], parent: ChainHash | None) -> None:
        blocks = self._blocks
        if blocks is None:
            return
        slots = blocks.index.find_each(list(hashes))
        held = [slot for slot in slots if slot >= 0]
        entered = {slot // blocks.per_extent for slot in held}
        for extent in entered:
            blocks.enter(extent)
        for slot in held:
            blocks.hits[slot] = 1
        todo = [position for position, slot in enumerate(slots) if slot < 0]
        names, done, filled = [hashes[position] for position in todo], 0, list[tuple[SlotRun, Sequence[ChainHash]]]()
        while done < len(todo):
            before = hashes[todo[done] - 1] if todo[done] else parent
            if (runs := self._reserve(names[done:] if done else names, before)) is None:
                break
            filled += runs
            done += runs[-1][0].size
        for run, stored in filled:
            blocks.publish(run, list(stored))
            self.num_written += run.size
        for extent in [*entered, *(run.extent for run, _ in filled)]:
            blocks.leave(extent)

    def _reserve(
        self, hashes: Sequence[ChainHash], parent: ChainHash | None
    ) -> list[tuple[SlotRun, Sequence[ChainHash]]] | None:
        """Slots for leading hashes, behind those of blocks stored again. None: every extent is being written."""
        blocks = self._blocks
        assert blocks is not None
        run = blocks.take(hashes, parent)
        if run is None and (claim := blocks.claim()) is not None:
            blocks.opened(claim)
            again = blocks.take_in(claim.extent, claim.keep_hashes) if claim.keep else None
            run = blocks.take_in(claim.extent, hashes)
            if again is not None:
                return [(again, claim.keep_hashes), (run, hashes[: run.size])]
        elif run is None:
            run = blocks.take(hashes, None)
        return None if run is None else [(run, hashes[: run.size])]
