"""ChildIndex: which slots may hold blocks whose parent has a given name. A hint: its owner verifies each slot."""

import sys
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from kvtier.tiers import ChainHash
from kvtier.tiers.compiled import extension
from kvtier.tiers.pool.names import HASH_BYTES, Slots, Words, to_words

MAX_CHILDREN: Final = 8  # slots told of one parent at most: a bucket's entries
_SLOTS_PER_BUCKET: Final = 4  # half of its entries: of blocks with a parent of their own one in a hundred is forgotten
_FEW: Final = 16  # slots that are entered one by one faster than all at once
_EMPTY: Final = np.uint32(0)
_HALF: Final = np.uint64(32)  # bits of a name's first word


class ChildIndex:
    """Parent's name → slots, 12 bytes a slot. It takes no lock: one thread changes it at a time, `find` may race.

    A name's bucket is told by half of its first word, which is as good as random: names are hashes.
    A bucket, half a cache line, has eight entries of slot + 1. A full one forgets an entry for each that comes, so a
    parent is told with eight slots at most. Nobody has to say that a block left: its slot's entry goes when the slot
    is entered again. So what `find` answers are candidates, also of other parents in the same bucket.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._num_buckets = -(-num_slots // _SLOTS_PER_BUCKET)
        self._entries = np.zeros(self._num_buckets * MAX_CHILDREN, np.uint32)
        self._buckets = self._entries.reshape(-1, MAX_CHILDREN)
        self._where = np.zeros(num_slots, np.uint32)  # a slot's entry, if that is still its own
        # The same for one at a time: a question costs a fraction of a microsecond.
        self._entry, self._place = memoryview(self._entries), memoryview(self._where)
        module = extension("kvtier.tiers.pool.child_index_compiled") if sys.byteorder == "little" else None
        self._enter: Callable[..., bool] | None = None if module is None else module.enter

    @property
    def num_bytes(self) -> int:
        """Memory it takes."""
        return self._entries.nbytes + self._where.nbytes

    def find(self, parent: ChainHash) -> list[int]:
        """Up to eight distinct slots; the blocks in some of them may have another parent, or be gone."""
        first = (int.from_bytes(parent[4:8], "little") * self._num_buckets >> 32) * MAX_CHILDREN
        return [entry - 1 for entry in self._entry[first : first + MAX_CHILDREN].tolist() if entry]

    def enter(self, parents: Sequence[ChainHash], slots: list[int]) -> None:
        """As `add`, of names: for the blocks of one step."""
        if self._enter is not None and self._enter(self._entry, self._place, [*parents], slots):
            return
        if len(slots) > _FEW:
            self.add(to_words(parents), np.array(slots, np.int64))
            return
        entry, place, num_buckets = self._entry, self._place, self._num_buckets
        for slot in slots:  # all first: what one leaves, another may take
            if entry[place[slot]] == slot + 1:
                entry[place[slot]] = 0
        for parent, slot in zip(parents, slots, strict=True):
            at = (int.from_bytes(parent[4:8], "little") * num_buckets >> 32) * MAX_CHILDREN
            row = entry[at : at + MAX_CHILDREN].tolist()
            at += row.index(0) if 0 in row else slot % MAX_CHILDREN
            entry[at] = slot + 1
            place[slot] = at

    def add(self, parents: Words, slots: Slots) -> None:
        """Enter distinct slots under their blocks' parents; what was known of these slots is forgotten."""
        if len(slots) <= _FEW:
            names = parents.tobytes()
            self.enter([names[n : n + HASH_BYTES] for n in range(0, len(names), HASH_BYTES)], slots.tolist())
            return
        self.remove(slots)
        buckets = (((parents[:, 0] >> _HALF) * np.uint64(self._num_buckets)) >> _HALF).astype(np.int64)
        while len(slots):
            places = buckets * MAX_CHILDREN + (self._buckets.take(buckets, 0) == _EMPTY).argmax(1)
            is_full = self._entries.take(places) != _EMPTY  # argmax pointed at the first entry
            if is_full.any():
                places[is_full] = (buckets * MAX_CHILDREN + slots % MAX_CHILDREN)[is_full]
            entries = (slots + 1).astype(np.uint32)
            self._entries[places] = entries
            self._where[slots] = places
            lost = (self._entries.take(places) != entries) & ~is_full  # two chose the same entry
            buckets, slots = buckets[lost], slots[lost]

    def remove(self, slots: Slots) -> None:
        """Forget these slots, entered or not."""
        where = self._where.take(slots)
        is_own = self._entries.take(where) == (slots + 1)
        self._entries[where[is_own]] = _EMPTY

    def reset(self) -> None:
        """Forget every slot."""
        self._entries[:] = _EMPTY

    def check(self) -> None:
        """Raise AssertionError unless each entry is of another slot, in range, that knows where it is. A full scan."""
        places = np.flatnonzero(self._entries)
        slots = self._entries[places].astype(np.int64) - 1
        assert (slots < self.num_slots).all(), "an entry of a slot out of range"
        assert (self._where[slots] == places).all(), "a slot has two entries, or does not know its own"
