"""HashIndex: which slot holds which chain hash, for whole batches at a time, in numpy.

A dict of a million 32-byte keys costs several cache misses per key, one after the other: 0.2 us where this takes 0.06.
Here a batch's misses overlap: a bucket is half a cache line, and one gather fetches the buckets of all names at once.
For one name numpy's calls would cost twenty times its misses: `find_one`, `add_one` and `remove_one` make none.
"""

from collections.abc import Sequence
from struct import Struct
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvtier.tiers import ChainHash

Slots = NDArray[np.int64]
Words = NDArray[np.uint64]

HASH_BYTES: Final = 32
_WAYS: Final = 4
_PIECE: Final = 2048  # names looked up at once: numpy's temporaries of more are mapped, and fault, at every call
_SLOT_BITS: Final = np.uint64(32)
_SLOT_MASK: Final = np.uint64((1 << 32) - 1)
_EMPTY: Final = np.uint64(0)
_ALL_EQUAL: Final = np.uint32(0x01010101)  # four True bytes
# Odd constants: keys that are no good hashes (a counter, zero padding) must spread over the buckets all the same. Such
# keys differ at one end; words between would cost a name that comes alone a fifth more.
NAME_MIX: Final = np.array([0x9E3779B97F4A7C15, 0, 0, 0x27D4EB2F165667C5], np.uint64)

# The same for one name at a time, in Python's integers.
_FOUR: Final = Struct("4Q")  # a name's words; a bucket's entries
_unpack_words, _pack_words, _words_at = _FOUR.unpack, _FOUR.pack_into, _FOUR.unpack_from
_unpack_bucket: Final = Struct("<8I").unpack_from  # slot + 1 and tag, four times
_MIX_FIRST, _, _, _MIX_LAST = NAME_MIX.tolist()
_U64: Final = (1 << 64) - 1
_U32: Final = (1 << 32) - 1


def int_type(limit: int) -> "np.dtype[Any]":
    """The smaller type of whole numbers below `limit`: arrays of slots are read more often than computed with."""
    return np.dtype(np.int32 if limit < 1 << 31 else np.int64)


def to_words(hashes: Sequence[ChainHash]) -> Words:
    """Chain hashes as `[n, 4]` uint64. ValueError if they are not 32 bytes each."""
    joined = b"".join(hashes)
    if len(joined) != HASH_BYTES * len(hashes):
        raise ValueError(f"chain hashes of {sorted(set(map(len, hashes)))} bytes: must be {HASH_BYTES}")
    return np.frombuffer(joined, np.uint64).reshape(-1, 4)


class HashIndex:
    """Names of slots: at most one per slot, and one slot per name. Amortised O(1) per name; takes no lock.

    An entry is the low half of the name's mixed word (the tag) above slot + 1; a match is verified against the
    whole name. Names whose bucket is full live in a dict, with a count per bucket that says when to look there.
    """

    def __init__(self, num_slots: int) -> None:
        # An entry a bucket: of names that are hashes one in 230 overflows. Half an entry costs 32 bytes more a slot.
        self._num_buckets = num_slots
        self._entries = np.zeros(_WAYS * num_slots, np.uint64)
        self._buckets = self._entries.reshape(-1, _WAYS)
        self._names = np.zeros((num_slots, 4), np.uint64)
        self._where = np.full(num_slots, -1, int_type(len(self._entries)))  # a slot's entry, -1 if it has none
        self._stash: dict[ChainHash, int] = {}
        self._num_stashed = np.zeros(num_slots, np.int32)  # per bucket
        self.num_names = 0
        # For one at a time: an item of a memoryview costs a third of an array's.
        self._entry, self._place = memoryview(self._entries), memoryview(self._where)
        self._name = self.name_bytes = memoryview(self._names).cast("B")

    @property
    def is_wide(self) -> bool:
        """Whether places of entries need more than 32 bits."""
        return bool(self._where.dtype != np.int32)

    def find(self, hashes: Sequence[ChainHash]) -> tuple[Words, Slots]:
        """The names as words, and the slot of each, -1 where there is none. ValueError as `to_words`."""
        words = to_words(hashes)
        if len(words) <= _PIECE:
            return words, self._find(words)
        return words, np.concatenate([self._find(words[i : i + _PIECE]) for i in range(0, len(words), _PIECE)])

    def _find(self, words: Words) -> Slots:
        mixed = words @ NAME_MIX
        buckets = self._buckets_of(mixed)
        rows = self._buckets.take(buckets, 0)
        matches = np.flatnonzero((rows >> _SLOT_BITS) == (mixed & _SLOT_MASK)[:, None])
        slots = (rows.reshape(-1)[matches] & _SLOT_MASK).astype(np.int64) - 1  # -1: a tag of 0 matches empty entries
        names = self._names.take(slots, 0, mode="wrap")
        if len(slots) == len(words) and (names == words).all() and (slots >= 0).all():
            return slots  # one match for each name, and it is its own
        at = matches // _WAYS
        same = (names == words.take(at, 0)).view(np.uint32).reshape(-1) == _ALL_EQUAL
        same &= slots >= 0
        found = np.full(len(words), -1, np.int64)
        found[at[same]] = slots[same]
        if self._stash:
            for i in np.flatnonzero((found < 0) & (self._num_stashed[buckets] > 0)).tolist():
                found[i] = self._stash.get(words[i].tobytes(), -1)
        return found

    def find_one(self, name: ChainHash) -> int:
        """The slot of one name, -1 if it has none. ValueError as `to_words`."""
        if len(name) != HASH_BYTES:
            to_words([name])
        words = first, _, _, last = _unpack_words(name)
        mixed = first * _MIX_FIRST + last * _MIX_LAST & _U64
        tag = mixed & _U32
        end0: int
        end1: int
        end2: int
        end3: int
        # An entry is looked at in halves: integers of 64 bits cost Python more than twice two of 32.
        bucket = (mixed >> 32) * self._num_buckets >> 32
        end0, tag0, end1, tag1, end2, tag2, end3, tag3 = _unpack_bucket(self._entry, bucket << 5)
        if tag0 == tag and end0 and _words_at(self._name, end0 - 1 << 5) == words:
            return end0 - 1
        if tag1 == tag and end1 and _words_at(self._name, end1 - 1 << 5) == words:
            return end1 - 1
        if tag2 == tag and end2 and _words_at(self._name, end2 - 1 << 5) == words:
            return end2 - 1
        if tag3 == tag and end3 and _words_at(self._name, end3 - 1 << 5) == words:
            return end3 - 1
        return self._stash.get(name, -1) if self._stash else -1

    def add_one(self, name: ChainHash, slot: int) -> None:
        """Name a slot that has no name; the name is not in the index."""
        first, _, _, last = words = _unpack_words(name)
        mixed = first * _MIX_FIRST + last * _MIX_LAST & _U64
        _pack_words(self._name, slot << 5, *words)
        self.num_names += 1
        bucket = (mixed >> 32) * self._num_buckets >> 32
        row = _words_at(self._entry, bucket << 5)
        if 0 in row:
            self._place[slot] = place = bucket * _WAYS + row.index(0)
            self._entry[place] = (mixed & _U32) << 32 | slot + 1
        else:
            self._stash[name] = slot
            self._num_stashed[bucket] += 1

    def remove_one(self, slot: int) -> None:
        """Take a slot's name away; it has one."""
        place = self._place[slot]
        if place < 0:
            self.remove(np.array([slot]))
            return
        self._entry[place] = 0
        self._place[slot] = -1
        self.num_names -= 1

    def find_in(self, states: NDArray[np.uint8], state: int, hashes: Sequence[ChainHash]) -> Slots:
        """The slot of each name, -1 where there is none in this state; the states' last row belongs to nobody."""
        _, slots = self.find(hashes)
        has_state = states[slots] == state  # -1 is nobody's row
        return slots if has_state.all() else np.where(has_state, slots, -1)

    def find_run(self, states: NDArray[np.uint8], state: int, hashes: Sequence[ChainHash]) -> Slots:
        """The slots of the leading names that have one in this state; `states` as in `find_in`."""
        pieces: list[Slots] = []
        for first in range(0, max(1, len(hashes)), _PIECE):
            slots = self._find(to_words(hashes[first : first + _PIECE]))
            has_state = states[slots] == state  # -1 is nobody's row
            if not has_state.all():
                pieces.append(slots[: int(has_state.argmin())])
                break
            pieces.append(slots)
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def add(self, words: Words, slots: Slots) -> bool:
        """Name slots that have no name. The names are not in the index; False, and no change, if one comes twice."""
        self._names[slots] = words
        mixed = words @ NAME_MIX
        buckets = self._buckets_of(mixed)
        entries = ((mixed & _SLOT_MASK) << _SLOT_BITS) | (slots + 1).astype(np.uint64)
        places = buckets * _WAYS + (self._buckets.take(buckets, 0) == _EMPTY).argmax(1)
        vacant = self._entries.take(places) == _EMPTY
        if not vacant.all():  # a full bucket: argmax pointed at its first entry
            self._entries[places[vacant]] = entries[vacant]
        else:
            self._entries[places] = entries
        entered = self._entries.take(places) == entries  # of two names that chose the same entry one lost
        self._where[slots] = np.where(entered, places, -1)
        left = np.flatnonzero(~entered).tolist()
        for n, i in enumerate(left):
            if not self._add_one(words[i], int(slots[i]), int(buckets[i]), entries[i]):
                self._clear(np.delete(slots, left[n:]))
                return False
        self.num_names += len(slots)
        return True

    def remove(self, slots: Slots) -> None:
        """Take the slots' names away; each has one. `names` still tells it until the slot is named again."""
        self._clear(slots)
        self.num_names -= len(slots)

    def names(self, slots: Slots) -> list[ChainHash]:
        """The names of slots that have one, or had one last."""
        joined = self._names[slots].tobytes()
        return [joined[i : i + HASH_BYTES] for i in range(0, len(joined), HASH_BYTES)]

    def words(self, slots: Slots) -> Words:
        """The names of slots as `[n, 4]` uint64."""
        return self._names.take(slots, 0)

    def reset(self) -> None:
        self._entries[:] = _EMPTY
        self._where[:] = -1
        self._stash.clear()
        self._num_stashed[:] = 0
        self.num_names = 0

    def check(self) -> Slots:
        """All named slots. Raises AssertionError unless each is found by its name, and nothing else is."""
        named = np.concatenate([np.flatnonzero(self._where >= 0), np.fromiter(self._stash.values(), np.int64)])
        assert self.num_names == len(named), f"{self.num_names} names for {len(named)} slots"
        assert np.count_nonzero(self._entries) == len(named) - len(self._stash), "entries left over"
        assert (self.find(self.names(named))[1] == named).all(), "a name leads to another slot"
        assert self._num_stashed.sum() == len(self._stash), "stash count"
        return named

    def _buckets_of(self, mixed: NDArray[np.uint64]) -> NDArray[np.int64]:
        """The high half of each mixed word, stretched over the buckets."""
        return ((mixed >> _SLOT_BITS) * np.uint64(self._num_buckets) >> _SLOT_BITS).astype(np.int64)

    def _clear(self, slots: Slots) -> None:
        where = self._where[slots]
        if self._stash and (where < 0).any():
            stashed = slots[where < 0]
            for name in self.names(stashed):
                del self._stash[name]
            buckets = self._buckets_of(self._names[stashed] @ NAME_MIX)
            np.subtract.at(self._num_stashed, buckets, np.ones(1, np.int32))
            slots, where = slots[where >= 0], where[where >= 0]
        self._entries[where] = _EMPTY
        self._where[slots] = -1

    def _add_one(self, words: Words, slot: int, bucket: int, entry: np.uint64) -> bool:
        """Enter one name. False if the bucket or the stash has it already."""
        row: list[int] = self._buckets[bucket].tolist()
        for other in row:
            if other and other >> 32 == int(entry) >> 32 and (self._names[(other & 0xFFFFFFFF) - 1] == words).all():
                return False
        if 0 in row:
            place = bucket * _WAYS + row.index(0)
            self._entries[place] = entry
            self._where[slot] = place
            return True
        name = words.tobytes()
        if name in self._stash:
            return False
        self._stash[name] = slot
        self._num_stashed[bucket] += 1
        return True
