"""SlabIndex: which slot of a slab holds which block, as arrays: 49 bytes a slot, no Python object a block.

L2's `HashIndex` is made for speed: 100 to 180 bytes a slot. A slab holds ten times as many blocks, so here an entry has
half its width and four times its density; a batch is still found by one gather.
"""

from collections import Counter
from collections.abc import Sequence
from types import ModuleType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvtier.tiers import ChainHash
from kvtier.tiers.compiled import extension
from kvtier.tiers.pool import Slots, Words, to_words

_WAYS: Final = 8  # entries of a bucket, half a cache line
_SLOTS_PER_BUCKET: Final = 2  # one name in some thousands finds its bucket full
_FEW: Final = 6  # names that are found, added or removed one by one faster than all at once,
_FEW_COMPILED: Final = 2  # and found so faster than by the extension module
_PIECE: Final = 1 << 14  # names that a check looks for at once
_EMPTY: Final = np.uint32(0)
_HALF: Final = np.uint64(32)
# Odd constants: names that are no good hashes (a counter, zero padding) must spread over the buckets all the same.
_MIX_FIRST: Final = 0x9E3779B97F4A7C15
_MIX_LAST: Final = 0x27D4EB2F165667C5
_U64: Final = (1 << 64) - 1


class SlabIndex:
    """Names of slots: at most one per slot, and one slot per name. It takes no lock.

    An entry, four bytes, is slot + 1 below a tag: as many bits of the mixed name as are left over. A match is verified
    against the whole name. Names whose bucket is full live in a dict: a few in ten thousand of a full slab.
    """

    def __init__(self, num_slots: int) -> None:
        """ValueError if a slot's number does not fit an entry."""
        if num_slots >= 1 << 32:
            raise ValueError(f"{num_slots} slots: a slab has fewer than {1 << 32}")
        self.num_slots = num_slots
        self.num_names = 0
        self._num_buckets = -(-num_slots // _SLOTS_PER_BUCKET)
        self._slot_bits = num_slots.bit_length()
        self._slot_mask = (1 << self._slot_bits) - 1
        self._tag_mask = (1 << (32 - self._slot_bits)) - 1
        self._entries = np.zeros(self._num_buckets * _WAYS, np.uint32)
        self._buckets = self._entries.reshape(-1, _WAYS)
        self._words = np.zeros((num_slots, 4), np.uint64)
        self._named = np.zeros(num_slots, np.bool_)
        self._stash: dict[ChainHash, int] = {}
        # For one at a time: an item of a memoryview costs a third of an array's.
        self._entry = memoryview(self._entries)
        self._name = memoryview(self._words).cast("B")
        self.is_named = memoryview(self._named)  # of every slot, and of those behind the last one
        self._compiled = extension("kvtier.tiers.file.slab_index_compiled")

    def find(self, hashes: Sequence[ChainHash]) -> Slots:
        """The slot of each name, -1 where there is none. ValueError if a name is not 32 bytes."""
        if self._compiled is not None:
            return self._find_compiled(hashes, self._compiled)
        if len(hashes) <= _FEW:
            return np.array(list(map(self.find_one, hashes)), np.int64)
        words = to_words(hashes)
        buckets, tags = self._places(words)
        rows = self._buckets.take(buckets, 0)
        matches = np.flatnonzero((rows >> np.uint32(self._slot_bits)) == tags[:, None])
        slots = (rows.reshape(-1)[matches] & np.uint32(self._slot_mask)).astype(np.int64) - 1
        at = matches // _WAYS
        same = (self._words.take(slots, 0, mode="wrap") == words.take(at, 0)).all(1)
        same &= slots >= 0  # a tag of 0 matches empty entries
        found = np.full(len(words), -1, np.int64)
        found[at[same]] = slots[same]
        if self._stash:
            for i in np.flatnonzero(found < 0).tolist():
                found[i] = self._stash.get(hashes[i], -1)
        return found

    def _find_compiled(self, hashes: Sequence[ChainHash], compiled: ModuleType) -> Slots:
        names = hashes if isinstance(hashes, list) else list(hashes)
        found = np.empty(len(names), np.int64)
        shape = self._num_buckets, _WAYS, self._slot_bits
        try:
            compiled.find(names, self._entries, self._name, *shape, _MIX_FIRST, _MIX_LAST, found)
        except (TypeError, ValueError):
            to_words(names)  # it says what is wrong with them
            raise
        if self._stash:
            for i in np.flatnonzero(found < 0).tolist():
                found[i] = self._stash.get(names[i], -1)
        return found

    def find_each(self, hashes: Sequence[ChainHash]) -> list[int]:
        """As `find`, as a list: a few cost little."""
        if len(hashes) <= (_FEW if self._compiled is None else _FEW_COMPILED):
            return list(map(self.find_one, hashes))
        found: list[int] = self.find(hashes).tolist()
        return found

    def find_one(self, name: ChainHash) -> int:
        """The slot of one name, -1 if it has none. ValueError as `find`."""
        if len(name) != 32:
            to_words([name])
        first, tag = self._place(name)
        slot_bits, slot_mask = self._slot_bits, self._slot_mask
        for entry in self._entry[first : first + _WAYS].tolist():
            if entry and entry >> slot_bits == tag:
                slot: int = (entry & slot_mask) - 1
                if self._name[slot << 5 : slot + 1 << 5] == name:
                    return slot
        return self._stash.get(name, -1) if self._stash else -1

    def write(self, slots: Slots | slice, words: Words) -> None:
        """Note the names of slots that have none; `load` makes them findable."""
        self._words[slots] = words

    def ordered(self, slots: Slots) -> Words:
        """One number for each of these slots, whose names are noted: its name's bucket above its entry; ascending."""
        words = self._words if len(slots) == len(self._words) else self._words.take(slots, 0)
        buckets, tags = self._places(words)
        numbers = (buckets.astype(np.uint64) << _HALF) | self._entries_of(tags, slots)
        numbers.sort()
        return numbers

    def twins_in(self, ordered: Words) -> list[int]:
        """Slots whose noted name is another's too."""
        marks = ordered >> np.uint64(self._slot_bits)  # bucket and tag
        alike = marks[1:] == marks[:-1]
        some = np.flatnonzero(np.concatenate([alike, [False]]) | np.concatenate([[False], alike]))
        slots = self._slots_of(ordered[some])
        names = self.names(slots)
        times = Counter(names)
        return [slot for slot, name in zip(slots.tolist(), names, strict=True) if times[name] > 1]

    def load(self, ordered: Words) -> None:
        """Make these names findable, of which no two are equal; until now none was."""
        buckets = (ordered >> _HALF).astype(np.int64)
        begins = np.flatnonzero(np.concatenate([[True], buckets[1:] != buckets[:-1]]))[: len(ordered)]
        ranks = np.arange(len(ordered)) - np.repeat(begins, np.diff(begins, append=len(ordered)))
        has_room = ranks < _WAYS
        self._entries[(buckets * _WAYS + ranks)[has_room]] = ordered[has_room].astype(np.uint32)
        slots = self._slots_of(ordered)
        self._named[slots] = True
        self.num_names = len(slots)
        left = slots[~has_room]
        self._stash = dict(zip(self.names(left), left.tolist(), strict=True))

    def add(self, hashes: Sequence[ChainHash], places: Sequence[int]) -> None:
        """Name slots that have no name. No name comes twice, and none is in the index."""
        if len(hashes) <= _FEW:
            for name, slot in zip(hashes, places, strict=True):
                self._add_one(name, slot)
            return
        words, slots = to_words(hashes), np.array(places, np.int64)
        self.write(slots, words)
        self._named[slots] = True
        self.num_names += len(slots)
        buckets, tags = self._places(words)
        entries = self._entries_of(tags, slots).astype(np.uint32)
        left = np.arange(len(slots))
        while len(left):
            at = buckets[left]
            places = at * _WAYS + (self._buckets.take(at, 0) == _EMPTY).argmax(1)
            has_room = self._entries.take(places) == _EMPTY  # argmax pointed at the first entry of a full bucket
            for i in left[~has_room].tolist():
                self._stash[words[i].tobytes()] = int(slots[i])
            left, places = left[has_room], places[has_room]
            self._entries[places] = entries[left]
            left = left[self._entries.take(places) != entries[left]]  # of names that chose one entry all but one lost

    def remove(self, places: Sequence[int]) -> None:
        """Take the slots' names away; each has one. `names` still tells it until the slot is named again."""
        if len(places) <= _FEW:
            for slot in places:
                self._remove_one(slot)
            return
        slots = np.array(places, np.int64)
        self._named[slots] = False
        self.num_names -= len(slots)
        buckets, _ = self._places(self._words.take(slots, 0))
        rows = self._buckets.take(buckets, 0)
        is_own = (rows & np.uint32(self._slot_mask)) == (slots + 1).astype(np.uint32)[:, None]
        has_entry = is_own.any(1)
        self._entries[(buckets * _WAYS + is_own.argmax(1))[has_entry]] = _EMPTY
        if not has_entry.all():
            for name in self.names(slots[~has_entry]):
                del self._stash[name]

    def _add_one(self, name: ChainHash, slot: int) -> None:
        first, tag = self._place(name)
        self._name[slot << 5 : slot + 1 << 5] = name
        self.is_named[slot] = True
        self.num_names += 1
        for place in range(first, first + _WAYS):
            if not self._entry[place]:
                self._entry[place] = tag << self._slot_bits | slot + 1
                return
        self._stash[name] = slot

    def _remove_one(self, slot: int) -> None:
        name = self._name[slot << 5 : slot + 1 << 5].tobytes()
        self.is_named[slot] = False
        self.num_names -= 1
        first, tag = self._place(name)
        own = tag << self._slot_bits | slot + 1
        for place in range(first, first + _WAYS):
            if self._entry[place] == own:
                self._entry[place] = 0
                return
        del self._stash[name]

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
        """Take all names away."""
        self._entries[:] = _EMPTY
        self._named[:] = False
        self._stash.clear()
        self.num_names = 0

    def check(self) -> Slots:
        """All named slots. Raises AssertionError unless each is found by its name, and nothing else is."""
        named = self.named()
        assert self.num_names == len(named), f"{self.num_names} names for {len(named)} slots"
        assert not len(named) or named[-1] < self.num_slots, "a slot out of range has a name"
        assert np.count_nonzero(self._entries) == len(named) - len(self._stash), "entries left over"
        for first in range(0, len(named), _PIECE):
            piece = named[first : first + _PIECE]
            assert (self.find(self.names(piece)) == piece).all(), "a name leads to another slot"
        return named

    def _places(self, words: Words) -> tuple[Slots, NDArray[np.uint32]]:
        """The names' buckets and tags."""
        mixed = words[:, 0] * np.uint64(_MIX_FIRST)
        mixed += words[:, 3] * np.uint64(_MIX_LAST)
        buckets = ((mixed >> _HALF) * np.uint64(self._num_buckets)) >> _HALF
        return buckets.astype(np.int64), (mixed & np.uint64(self._tag_mask)).astype(np.uint32)

    def _place(self, name: ChainHash) -> tuple[int, int]:
        """The first entry of a name's bucket, and the name's tag."""
        first, last = int.from_bytes(name[:8], "little"), int.from_bytes(name[24:], "little")
        mixed = first * _MIX_FIRST + last * _MIX_LAST & _U64
        return ((mixed >> 32) * self._num_buckets >> 32) * _WAYS, mixed & self._tag_mask

    def _entries_of(self, tags: NDArray[np.uint32], slots: Slots) -> Words:
        entries: Words = (tags.astype(np.uint64) << np.uint64(self._slot_bits)) | (slots + 1).astype(np.uint64)
        return entries

    def _slots_of(self, ordered: Words) -> Slots:
        return (ordered & np.uint64(self._slot_mask)).astype(np.int64) - 1
