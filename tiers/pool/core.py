# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""The core of a pool: names → slots, references, parents, orders of eviction. One source: interpreted, or compiled.

Cython compiles this very file (pure Python mode), so both forms decide alike, slot by slot. Nothing here takes a lock.
Slots come from outside as lists; each is compared with the table's bounds before it is used.

Rows: slot s is row s of every array. Row `num_slots` is the sentinel: always free, the parent of blocks without one.
"""

import os
import sys
from struct import Struct

import cython
import numpy as np

FREE = cython.declare(cython.int, 0)
FILLING = cython.declare(cython.int, 1)  # taken, and invisible to every lookup
READY = cython.declare(cython.int, 2)
QUARANTINED = cython.declare(cython.int, 3)  # an operation that hangs may still write here

NAME_BYTES = cython.declare(cython.int, 32)
MIX_FIRST = cython.declare(cython.ulonglong, 0x9E3779B97F4A7C15)  # of `changes.py`: tags of names
MIX_LAST = cython.declare(cython.ulonglong, 0x27D4EB2F165667C5)
AT_ONCE = cython.declare(cython.int, 64)  # names looked up together
SLOTS_PER_BUCKET = cython.declare(
    cython.int, 4
)  # so that of blocks with parents of their own one in a hundred is forgotten
MOST_CHILDREN = cython.declare(cython.int, 8)  # entries of a bucket
U64 = cython.declare(cython.ulonglong, 0xFFFFFFFFFFFFFFFF)
U32 = cython.declare(cython.ulonglong, 0xFFFFFFFF)

# The lists of slots. A slot is in one of them at most.
NOWHERE = cython.declare(cython.int, 0)
FIRST = cython.declare(cython.int, 1)  # LRU's only one; S3-FIFO's small one; of the learned order those given back
SECOND = cython.declare(cython.int, 2)  # S3-FIFO's main one; of the learned order all others, by age
DEFERRED = cython.declare(cython.int, 3)  # dirty ones that came up while clean ones were there
PARKED = cython.declare(cython.int, 4)  # those that came up with a resident child; its last child's end frees it
NUM_LISTS = cython.declare(cython.int, 5)

MOST_PASSED = cython.declare(cython.int, 4096)  # dirty slots that one eviction passes over, in search of a clean one
SMALL_SHARE = cython.declare(cython.int, 10)  # S3-FIFO: one slot in so many belongs to the small queue
HOT = cython.declare(cython.int, 2)  # S3-FIFO: uses in the small queue that earn a place in the main one
MOST_USES = cython.declare(cython.int, 3)

LATE = cython.declare(cython.double, 60.0)  # seconds after a request's end in which its blocks still count as its own
MOST_ENDS = cython.declare(cython.int, 255)
GRAIN = cython.declare(cython.double, 1.0)  # seconds: blocks without a request's end that came within it are one row
GOOD_FOR = cython.declare(cython.double, 2.0)  # seconds that rows stay as they were ranked, if few victims are taken
NUM_AGES = cython.declare(cython.int, 22)  # of `eviction_log.NUM_AGES`

_two_words = Struct("<Q16xQ").unpack_from
_NEVER = -(1 << 62)  # the rank of what is no victim


def _view(array):
    """An array as it is read and written item by item."""
    return array if cython.compiled else memoryview(array)


@cython.cfunc
@cython.inline
@cython.exceptval(-1, check=False)
def _require_equal(count: cython.Py_ssize_t, other: cython.Py_ssize_t) -> cython.int:
    if count != other:
        raise ValueError(f"columns of {count} and {other} items")
    return 0


def _slots_of(rows):
    """An array of rows without the sentinel's."""
    array = np.asarray(rows)
    return array[: len(array) - 1]


@cython.cclass
class Index:
    """32-byte names → slots. Compiled: open addressing over arrays, 16 to 32 bytes a slot. Interpreted: a dict.

    An entry is 32 bits of the name's hash (its tag) above 1 + slot. The tag's highest bits are its home; entries that
    find that taken follow it. `names`: each slot's name, or the last it had. Names may be chosen by a client: the hash
    has random keys.
    """

    num_slots = cython.declare(cython.Py_ssize_t, visibility="readonly")
    num_names = cython.declare(cython.Py_ssize_t, visibility="readonly")
    names = cython.declare(object, visibility="readonly")  # `[32 * num_slots]` uint8
    found: cython.longlong[::1]  # the answer of `find_each`
    _bytes: cython.uchar[::1]
    _table: cython.ulonglong[::1]  # 0: empty
    _mask: cython.ulonglong
    _shift: cython.int
    _key0: cython.ulonglong
    _key1: cython.ulonglong
    _key2: cython.ulonglong
    _key3: cython.ulonglong
    _slots: dict

    def __init__(self, num_slots: cython.Py_ssize_t):
        self.num_slots = num_slots
        self.num_names = 0
        self.names = np.zeros(NAME_BYTES * num_slots, np.uint8)  # numpy has large arrays lie on huge pages
        self._bytes = _view(self.names)
        self._slots = {}
        self.found = _view(np.zeros(AT_ONCE, np.int64))
        if cython.compiled:
            bits = max(2, (2 * num_slots - 1).bit_length())
            self._shift = 32 - bits
            self._mask = (1 << bits) - 1
            self._table = np.zeros(1 << bits, np.uint64)
            keys = np.frombuffer(os.urandom(32), np.uint64).tolist()
            self._key0, self._key1, self._key2, self._key3 = (each | 1 for each in keys)

    @cython.cfunc
    @cython.inline
    @cython.exceptval(check=False)
    def _tag(self, words: cython.p_ulonglong) -> cython.ulonglong:
        mixed: cython.ulonglong = (
            words[0] * self._key0 + words[1] * self._key1 + words[2] * self._key2 + words[3] * self._key3
        )
        mixed ^= mixed >> 32
        return (mixed * self._key0) >> 32

    @cython.cfunc
    @cython.inline
    @cython.exceptval(check=False)
    def _is_named(self, slot: cython.longlong, words: cython.p_ulonglong) -> cython.bint:
        own: cython.p_ulonglong = cython.cast(cython.p_ulonglong, cython.address(self._bytes[NAME_BYTES * slot]))
        return own[0] == words[0] and own[1] == words[1] and own[2] == words[2] and own[3] == words[3]

    @cython.cfunc
    @cython.exceptval(-2, check=False)
    def find(self, name: bytes) -> cython.longlong:
        """The slot of a name, -1 if it has none. ValueError if it is not 32 bytes long."""
        if len(name) != NAME_BYTES:
            raise ValueError(f"chain hashes of {[len(name)]} bytes: must be {NAME_BYTES}")
        if cython.compiled:
            words: cython.p_ulonglong = cython.cast(cython.p_ulonglong, cython.cast(cython.p_char, name))
            tag: cython.ulonglong = self._tag(words)
            place: cython.ulonglong = tag >> self._shift
            entry: cython.ulonglong = self._table[place]
            while entry != 0:
                if entry >> 32 == tag and self._is_named((entry & U32) - 1, words):
                    return (entry & U32) - 1
                place = (place + 1) & self._mask
                entry = self._table[place]
            return -1
        return self._slots.get(name, -1)

    @cython.cfunc
    @cython.locals(
        i=cython.Py_ssize_t,
        words=cython.p_ulonglong,
        tag=cython.ulonglong,
        place=cython.ulonglong,
        entry=cython.ulonglong,
        slot=cython.longlong,
    )
    def find_each(self, names: list, first: cython.Py_ssize_t, end: cython.Py_ssize_t):
        """The slots of some names, at most `AT_ONCE`, into `found`; -1 where there is none. ValueError as `find`.

        Compiled, all entries are fetched before the first name is compared: memory is waited for once, not for each.
        """
        if cython.compiled:
            for i in range(first, end):
                name: bytes = names[i]
                if len(name) != NAME_BYTES:
                    raise ValueError(f"chain hashes of {[len(name)]} bytes: must be {NAME_BYTES}")
                tag = self._tag(cython.cast(cython.p_ulonglong, cython.cast(cython.p_char, name)))
                place = tag >> self._shift
                entry = self._table[place]
                while entry != 0 and entry >> 32 != tag:
                    place = (place + 1) & self._mask
                    entry = self._table[place]
                slot = entry & U32
                self.found[i - first] = slot - 1
            for i in range(first, end):
                slot = self.found[i - first]
                if slot >= 0:
                    words = cython.cast(cython.p_ulonglong, cython.cast(cython.p_char, cython.cast(bytes, names[i])))
                    if not self._is_named(slot, words):
                        self.found[i - first] = self.find(names[i])  # another's tag is the same
        else:
            get, found = self._slots.get, self.found
            for i in range(first, end):
                slot = get(names[i], -1)
                found[i - first] = slot if slot >= 0 else self.find(names[i])

    @cython.locals(first=cython.Py_ssize_t, end=cython.Py_ssize_t, i=cython.Py_ssize_t)
    def find_all(self, names: list) -> list:
        """The slot of each name, -1 where there is none. ValueError as `find`."""
        slots: list = []
        for first in range(0, len(names), AT_ONCE):
            end = min(first + AT_ONCE, len(names))
            self.find_each(names, first, end)
            for i in range(end - first):
                slots.append(self.found[i])
        return slots

    def put_all(self, names: list, slots: list):
        """Name slots that have no name. ValueError, from there on nothing is named, where a name is there already."""
        i: cython.Py_ssize_t
        _require_equal(len(names), len(slots))
        for i in range(len(names)):
            if self.put(names[i], self._checked(slots[i])) == 0:
                raise ValueError(f"name {i} of {len(names)} is in the index already")

    def load(self, slots: list) -> list:
        """Make names findable that stand in `names`, of slots that have none; returns slots whose name another has."""
        slot: cython.longlong
        others: list = []
        for slot in slots:
            if self.put(self.name_of(self._checked(slot)), slot) == 0:
                others.append(slot)
        return others

    def remove_all(self, slots: list):
        """Take the names of slots away that have one."""
        for slot in slots:
            self.remove(self._checked(slot))

    @cython.cfunc
    @cython.inline
    @cython.exceptval(-1, check=False)
    def _checked(self, slot: cython.longlong) -> cython.longlong:
        if slot < 0 or slot >= self.num_slots:
            raise IndexError(f"slot {slot}: there are {self.num_slots}")
        return slot

    @cython.cfunc
    @cython.exceptval(-2, check=False)
    def put(self, name: bytes, slot: cython.longlong) -> cython.int:
        """Name a slot that has no name; 0, and no change, if the name is there already."""
        if self.find(name) >= 0:
            return 0
        if self.num_names >= self.num_slots:
            raise ValueError(f"slot {slot} has a name: all {self.num_slots} have one")
        self.num_names += 1
        if cython.compiled:
            source: cython.p_ulonglong = cython.cast(cython.p_ulonglong, cython.cast(cython.p_char, name))
            target: cython.p_ulonglong = cython.cast(cython.p_ulonglong, cython.address(self._bytes[NAME_BYTES * slot]))
            target[0], target[1], target[2], target[3] = source[0], source[1], source[2], source[3]
            tag: cython.ulonglong = self._tag(source)
            place: cython.ulonglong = tag >> self._shift
            while self._table[place] != 0:
                place = (place + 1) & self._mask
            self._table[place] = (tag << 32) | (slot + 1)
        else:
            self._bytes[NAME_BYTES * slot : NAME_BYTES * (slot + 1)] = name
            self._slots[name] = slot
        return 1

    @cython.cfunc
    def remove(self, slot: cython.longlong) -> cython.void:
        """Take a slot's name away. `names` still has it until the slot is named again. KeyError if it has none."""
        if cython.compiled:
            entry: cython.ulonglong = slot + 1
            hole: cython.ulonglong = (
                self._tag(cython.cast(cython.p_ulonglong, cython.address(self._bytes[NAME_BYTES * slot])))
                >> self._shift
            )
            while self._table[hole] & U32 != entry:
                if self._table[hole] == 0:
                    raise KeyError(slot)
                hole = (hole + 1) & self._mask
            place: cython.ulonglong = hole
            while True:  # whatever the hole would cut off from its home moves into it
                place = (place + 1) & self._mask
                entry = self._table[place]
                if entry == 0:
                    break
                if ((place - (entry >> (32 + self._shift))) & self._mask) >= ((place - hole) & self._mask):
                    self._table[hole] = entry
                    hole = place
            self._table[hole] = 0
        else:
            if self._slots.get(self.name_of(slot)) != slot:
                raise KeyError(slot)
            del self._slots[self.name_of(slot)]
        self.num_names -= 1

    @cython.cfunc
    def name_of(self, slot: cython.longlong):
        """The name that a slot has, or had last."""
        if cython.compiled:
            return cython.cast(cython.p_char, cython.address(self._bytes[NAME_BYTES * slot]))[:NAME_BYTES]
        return bytes(self._bytes[NAME_BYTES * slot : NAME_BYTES * (slot + 1)])

    @cython.cfunc
    @cython.exceptval(check=False)
    def tag(self, slot: cython.longlong) -> cython.ulonglong:
        """A slot's name, mixed into one word: what remembers names without keeping them compares these."""
        if cython.compiled:
            words: cython.p_ulonglong = cython.cast(cython.p_ulonglong, cython.address(self._bytes[NAME_BYTES * slot]))
            return words[0] * MIX_FIRST + words[3] * MIX_LAST
        first, last = _two_words(self._bytes, NAME_BYTES * slot)
        return (first * MIX_FIRST + last * MIX_LAST) & U64

    def named(self):
        """All slots that have a name, in order."""
        if cython.compiled:
            entries = np.asarray(self._table)
            return np.sort((entries[entries > 0] & np.uint64(0xFFFFFFFF)).astype(np.int64) - 1)
        return np.array(sorted(self._slots.values()), np.int64)

    def reset(self):
        self._slots.clear()
        self.num_names = 0
        if cython.compiled:
            np.asarray(self._table)[:] = 0


@cython.cclass
class ChildIndex:
    """Parent's name → slots that may hold its children, 12 bytes a slot: a hint, whose owner looks at each slot.

    A name's bucket is chosen by half of its first word, which is as good as random: names are hashes. A bucket, half a
    cache line, has eight entries of slot + 1. A full one forgets an entry for each that comes. A block that leaves is
    not reported: its slot's entry goes when the slot is entered again. So what `find` answers are candidates, also of
    other parents in the same bucket. It takes no lock: one thread changes it at a time, `find` may race.
    """

    num_slots = cython.declare(cython.Py_ssize_t, visibility="readonly")
    num_buckets = cython.declare(cython.ulonglong, visibility="readonly")
    _entries: cython.uint[::1]
    _where: cython.uint[::1]  # a slot's entry, if that is still its own

    def __init__(self, num_slots: cython.Py_ssize_t):
        self.num_slots = num_slots
        self.num_buckets = max(1, (num_slots + SLOTS_PER_BUCKET - 1) // SLOTS_PER_BUCKET)
        self._entries = _view(np.zeros(self.num_buckets * MOST_CHILDREN, np.uint32))
        self._where = _view(np.zeros(num_slots, np.uint32))

    @property
    def num_bytes(self):
        """Memory it takes."""
        return np.asarray(self._entries).nbytes + np.asarray(self._where).nbytes

    @cython.cfunc
    @cython.inline
    @cython.exceptval(check=False)
    def _first(self, parent: bytes) -> cython.ulonglong:
        """The first entry of a name's bucket; a name of another length, which no block has, is in bucket 0."""
        half: cython.ulonglong = 0
        if len(parent) == NAME_BYTES:
            if cython.compiled:
                half = cython.cast(cython.p_ulonglong, cython.cast(cython.p_char, parent))[0] >> 32
            else:
                half = _two_words(parent)[0] >> 32
        return ((half * self.num_buckets) >> 32) * MOST_CHILDREN

    @cython.locals(i=cython.int, entry=cython.longlong)
    def find(self, parent: bytes) -> list:
        """Up to eight distinct slots; the blocks in some of them may have another parent, or be gone."""
        first: cython.ulonglong = self._first(parent)
        found: list = []
        for i in range(MOST_CHILDREN):
            entry = self._entries[first + i]
            if entry != 0:
                found.append(entry - 1)
        return found

    @cython.locals(i=cython.Py_ssize_t, slot=cython.longlong, place=cython.ulonglong, first=cython.ulonglong)
    def enter(self, parents: list, slots: list):
        """Enter distinct slots under their blocks' parents; what was known of these slots is forgotten."""
        _require_equal(len(parents), len(slots))
        self.remove(slots)  # all first: what one leaves, another may take
        for i in range(len(slots)):
            slot = slots[i]
            if self._entries[self._where[slot]] == slot + 1:  # it comes twice
                self._entries[self._where[slot]] = 0
            first = self._first(parents[i])
            place = first
            while place < first + MOST_CHILDREN and self._entries[place] != 0:
                place += 1
            if place == first + MOST_CHILDREN:
                place = first + slot % MOST_CHILDREN
            self._entries[place] = slot + 1
            self._where[slot] = place

    def remove(self, slots: list):
        """Forget these slots, entered or not."""
        slot: cython.longlong
        for slot in slots:
            if slot < 0 or slot >= self.num_slots:
                raise IndexError(f"slot {slot}: there are {self.num_slots}")
            if self._entries[self._where[slot]] == slot + 1:
                self._entries[self._where[slot]] = 0

    def reset(self):
        """Forget every slot."""
        np.asarray(self._entries)[:] = 0

    def check(self):
        """Raise AssertionError unless each entry is of another slot, in range, that knows where it is. A full scan."""
        entries = np.asarray(self._entries)
        places = np.flatnonzero(entries)
        slots = entries[places].astype(np.int64) - 1
        assert (slots < self.num_slots).all(), "an entry of a slot out of range"
        assert (np.asarray(self._where)[slots] == places).all(), "a slot has two entries, or does not know its own"


@cython.cclass
class SlotLists:
    """Doubly linked lists of slots, one each at most, heads behind the sentinel's row. Stamps grow along a list."""

    where = cython.declare(cython.uchar[::1], visibility="readonly")  # each slot's list
    stamps = cython.declare(cython.longlong[::1], visibility="readonly")
    sizes = cython.declare(cython.longlong[::1], visibility="readonly")
    _prev: cython.int[::1]
    _next: cython.int[::1]
    _head: cython.longlong  # the row of list 0
    _first_stamp: cython.longlong
    _last_stamp: cython.longlong

    def __init__(self, num_slots: cython.longlong):
        rows: cython.longlong = num_slots + 1 + NUM_LISTS
        self.where = _view(np.zeros(num_slots + 1, np.uint8))
        self.stamps = _view(np.zeros(num_slots + 1, np.int64))
        self.sizes = _view(np.zeros(NUM_LISTS, np.int64))
        self._prev = _view(np.zeros(rows, np.int32))
        self._next = _view(np.zeros(rows, np.int32))
        self._head = num_slots + 1
        self.reset()

    def reset(self):
        each: cython.longlong
        np.asarray(self.where)[:] = NOWHERE
        np.asarray(self.sizes)[:] = 0
        self._first_stamp = self._last_stamp = 0
        for each in range(self._head, self._head + NUM_LISTS):
            self._prev[each] = each
            self._next[each] = each

    @cython.cfunc
    @cython.inline
    @cython.exceptval(check=False)
    def append(self, which: cython.int, slot: cython.longlong) -> cython.void:
        """Add a slot that is in no list, at the end."""
        head: cython.longlong = self._head + which
        self._last_stamp += 1
        self.stamps[slot] = self._last_stamp
        self._insert(which, slot, self._prev[head], head)

    @cython.cfunc
    @cython.inline
    @cython.exceptval(check=False)
    def push(self, which: cython.int, slot: cython.longlong) -> cython.void:
        """Add a slot that is in no list, at the front."""
        head: cython.longlong = self._head + which
        self._first_stamp -= 1
        self.stamps[slot] = self._first_stamp
        self._insert(which, slot, head, self._next[head])

    @cython.cfunc
    @cython.inline
    @cython.exceptval(check=False)
    def _insert(
        self, which: cython.int, slot: cython.longlong, before: cython.longlong, behind: cython.longlong
    ) -> cython.void:
        self._next[before] = self._prev[behind] = slot
        self._prev[slot] = before
        self._next[slot] = behind
        self.where[slot] = which
        self.sizes[which] += 1

    @cython.cfunc
    @cython.inline
    @cython.exceptval(check=False)
    def remove(self, slot: cython.longlong) -> cython.void:
        """Take a slot out of its list, if it is in one."""
        if self.where[slot] != NOWHERE:
            before: cython.longlong = self._prev[slot]
            behind: cython.longlong = self._next[slot]
            self._next[before] = behind
            self._prev[behind] = before
            self.sizes[self.where[slot]] -= 1
            self.where[slot] = NOWHERE

    @cython.cfunc
    @cython.inline
    @cython.exceptval(check=False)
    def first(self, which: cython.int) -> cython.longlong:
        """The first slot of a list, -1 if it is empty."""
        slot: cython.longlong = self._next[self._head + which]
        return slot if slot < self._head else -1

    @cython.cfunc
    @cython.inline
    @cython.exceptval(check=False)
    def pop(self, which: cython.int) -> cython.longlong:
        """Take the first slot out of a list; -1 if it is empty."""
        slot: cython.longlong = self.first(which)
        if slot >= 0:
            self.remove(slot)
        return slot

    def check(self):
        """Raise AssertionError where a list is not the slots that say they are in it, by stamp."""
        each: cython.longlong
        for which in range(1, NUM_LISTS):
            found = []
            each = self._next[self._head + which]
            while each < self._head:
                found.append(each)
                each = self._next[each]
            assert sorted(found) == np.flatnonzero(np.asarray(self.where) == which).tolist(), "a list's slots"
            assert len(found) == self.sizes[which], "a list's size"
            assert (np.diff(np.asarray(self.stamps)[np.array(found, np.int64)]) > 0).all(), "a list's stamps"


@cython.cclass
class LRU:
    """Least recently used first: a block's last use ends when its last lease is released. The base of other orders."""

    lists: SlotLists

    def __init__(self, lists: SlotLists):
        self.lists = lists

    @cython.cfunc
    @cython.exceptval(check=False)
    def admit(self, slot: cython.longlong) -> cython.void:
        """The slot was just given to a new block; it is in use, not yet a victim."""

    @cython.cfunc
    def enter(self, slot: cython.longlong) -> cython.void:
        """The slot is unused: it can be a victim."""
        self.lists.append(FIRST, slot)

    @cython.cfunc
    @cython.exceptval(check=False)
    def leave(self, slot: cython.longlong) -> cython.void:
        """Count a use; the slot is no victim until it enters again. Fine if it is none."""
        self.lists.remove(slot)

    @cython.cfunc
    def pop(self) -> cython.longlong:
        """Take out the next victim; -1 where nothing is left."""
        return self.lists.pop(FIRST)

    @cython.cfunc
    @cython.exceptval(check=False)
    def give_back(self, slot: cython.longlong) -> cython.void:
        """A slot that was popped can be a victim after all, and is the next one."""
        self.lists.push(FIRST, slot)

    @cython.cfunc
    @cython.exceptval(check=False)
    def evicted(self, slot: cython.longlong) -> cython.void:
        """A popped slot loses its block."""

    @cython.cfunc
    def taken(self, slot: cython.longlong) -> cython.void:
        """The slot is for another block from now on."""

    @cython.cfunc
    def tick(self) -> cython.void:
        """A verb begins that moves slots in this order."""

    @cython.cfunc
    @cython.exceptval(check=False)
    def spare(self, is_on: cython.bint) -> cython.bint:
        """Whether `pop` spares blocks that are worth more than new ones. Returns whether it did since this was on."""
        return False

    def ranks(self, slots):
        """Where each of these slots (an array) stands: lower goes earlier, the least of all is no victim now."""
        return np.where(np.asarray(self.lists.where)[slots] == FIRST, np.asarray(self.lists.stamps)[slots], _NEVER)

    def reset(self):
        """Forget everything; the lists are empty already."""

    def check(self, idle):
        """Raise AssertionError where the order contradicts itself; `idle`: each slot that can be a victim, or waits."""
        where = _slots_of(self.lists.where)
        assert (np.isin(where, (FIRST, SECOND, DEFERRED, PARKED)) == idle).all(), "idle slots in no list, or others"


@cython.cclass
class S3FIFO(LRU):
    """S3-FIFO (Yang et al., SOSP 2023): a small queue filters one-hit wonders, a main queue keeps what was used again.

    New blocks enter the small queue, a tenth of the pool, and leave it for the main one if used twice meanwhile, else
    they go. The names of the gone are remembered, about as many as there are slots: a block that returns enters the
    main queue at once. The main queue gives a block as many further rounds as it had uses, at most three. A slot in
    use keeps its place, and is passed over.
    """

    index: Index
    _small_target: cython.longlong
    _uses: cython.uchar[::1]
    _in_use: cython.uchar[::1]
    _in_main: cython.uchar[::1]
    _ghosts: cython.ulonglong[::1]  # tags of names
    _times: cython.longlong[::1]  # when each was written, in names; 0 is never
    _ghost_mask: cython.ulonglong
    _num_ghosts: cython.longlong
    _now: cython.longlong

    def __init__(self, lists: SlotLists, index: Index):
        LRU.__init__(self, lists)
        num_slots = index.num_slots
        self.index = index
        self._small_target = max(1, num_slots // SMALL_SHARE)
        self._uses = _view(np.zeros(num_slots + 1, np.uint8))
        self._in_use = _view(np.zeros(num_slots + 1, np.uint8))
        self._in_main = _view(np.zeros(num_slots + 1, np.uint8))
        size = 1 << (4 * num_slots - 1).bit_length()
        self._ghost_mask = size - 1
        self._ghosts = _view(np.zeros(size, np.uint64))
        self._times = _view(np.zeros(size, np.int64))
        self._num_ghosts = self._now = num_slots

    @cython.cfunc
    @cython.exceptval(check=False)
    def admit(self, slot: cython.longlong) -> cython.void:
        tag: cython.ulonglong = self.index.tag(slot)
        place: cython.ulonglong = tag & self._ghost_mask
        self.lists.remove(slot)
        self._uses[slot] = 0
        self._in_use[slot] = 1
        self._in_main[slot] = self._ghosts[place] == tag and self._times[place] > self._now - self._num_ghosts

    @cython.cfunc
    def enter(self, slot: cython.longlong) -> cython.void:
        self._in_use[slot] = 0
        if self.lists.where[slot] == NOWHERE:
            self.lists.append(SECOND if self._in_main[slot] else FIRST, slot)

    @cython.cfunc
    @cython.exceptval(check=False)
    def leave(self, slot: cython.longlong) -> cython.void:
        self._in_use[slot] = 1
        if self._uses[slot] < MOST_USES:
            self._uses[slot] += 1

    @cython.cfunc
    @cython.locals(slot=cython.longlong, is_small=cython.bint)
    def pop(self) -> cython.longlong:
        """From the small queue while it is above its share or the main one is empty, else from the main one."""
        lists: SlotLists = self.lists
        while True:
            is_small = lists.sizes[FIRST] > self._small_target
            slot = lists.pop(FIRST if is_small else SECOND)
            if slot < 0:
                is_small = not is_small
                slot = lists.pop(FIRST if is_small else SECOND)
                if slot < 0:
                    return -1
            if self._in_use[slot]:
                if is_small:
                    self._in_main[slot] = 1  # used while at the end of the queue: worth keeping when it comes back
            elif is_small and self._uses[slot] >= HOT:
                self._in_main[slot] = 1
                self._uses[slot] = 0
                lists.append(SECOND, slot)
            elif not is_small and self._uses[slot]:
                self._uses[slot] -= 1
                lists.append(SECOND, slot)
            else:
                return slot

    @cython.cfunc
    @cython.exceptval(check=False)
    def give_back(self, slot: cython.longlong) -> cython.void:
        self.lists.push(SECOND if self._in_main[slot] else FIRST, slot)

    @cython.cfunc
    @cython.exceptval(check=False)
    def evicted(self, slot: cython.longlong) -> cython.void:
        if not self._in_main[slot]:
            tag: cython.ulonglong = self.index.tag(slot)
            self._now += 1
            self._ghosts[tag & self._ghost_mask] = tag
            self._times[tag & self._ghost_mask] = self._now

    def ranks(self, slots):
        """Small queue before main queue, each by place in line: an estimate, as uses decide who gets another round."""
        where, stamps = np.asarray(self.lists.where)[slots], np.asarray(self.lists.stamps)[slots]
        ranks = np.where(where == FIRST, stamps, np.where(where == SECOND, stamps + (1 << 61), _NEVER))
        return np.where(np.asarray(self._in_use)[slots], _NEVER, ranks)

    def reset(self):
        np.asarray(self._times)[:] = 0

    def check(self, idle):
        where, in_use = _slots_of(self.lists.where), _slots_of(self._in_use)
        waits = np.isin(where, (DEFERRED, PARKED)) | (np.isin(where, (FIRST, SECOND)) & (in_use == 0))
        assert (waits == idle).all(), "idle slots in no list, or others"


@cython.cclass
class Learned(LRU):
    """The order learned from how requests return (`tiers.reuse`). While LRU would hit more, it is LRU's.

    A row is the end of a request, or a second in which blocks became idle whose request's end was not reported. Each
    idle slot is in one row's list, and in the list of all by age. Rows are ranked, not slots: by its `places`, then
    by age. What was given back goes first. `returns`: what was learned; `clock`: seconds.
    """

    returns = cython.declare(object, visibility="public")
    rival = cython.declare(object, visibility="readonly")
    clock = cython.declare(object, visibility="public")
    num_requests = cython.declare(cython.longlong, visibility="readonly")
    no_class = cython.declare(cython.longlong, visibility="readonly")  # the class of blocks without a request's end
    num_rows = cython.declare(cython.longlong, visibility="readonly")  # those there is room for; row 0 is no request's
    _is_lru: cython.bint
    _now: cython.double
    _num_slots: cython.longlong
    _row: cython.int[::1]  # of each slot, 0: none
    _num_ends: cython.uchar[::1]  # of requests that had each slot's block; up to 255
    _before: cython.int[::1]  # in the row's list; -2: in none
    _behind: cython.int[::1]
    _free_rows: list
    _begin: cython.int[::1]  # by row: its list's ends, -1 if it is empty
    _end: cython.int[::1]
    _members: cython.int[::1]  # slots that carry its number, idle or in use
    _kind: cython.longlong[::1]
    _since: cython.double[::1]
    _is_late: cython.uchar[::1]  # some of its slots are still to become idle
    _born: cython.longlong[::1]  # numbers of rows' uses: a row is used again when no slot carries it
    _num_born: cython.longlong
    _unended_row: cython.longlong
    _plan: cython.longlong[::1]  # rows as they were ranked last
    _plan_born: cython.longlong[::1]
    _plan_size: cython.longlong
    _cursor: cython.longlong
    _plan_places: cython.longlong[::1]
    _newcomer: cython.longlong  # the place of a block that is stored now
    _is_sparing: cython.bint
    _has_spared: cython.bint
    _planned_at: cython.double
    _num_taken: cython.longlong  # victims since then

    def __init__(self, lists: SlotLists, num_slots: cython.longlong, returns, rival, no_class: cython.longlong, clock):
        LRU.__init__(self, lists)
        self.returns, self.rival, self.clock, self.no_class = returns, rival, clock, no_class
        self._num_slots = num_slots
        self._row = _view(np.zeros(self._num_slots + 1, np.int32))
        self._num_ends = _view(np.zeros(self._num_slots + 1, np.uint8))
        self._before = _view(np.zeros(self._num_slots + 1, np.int32))
        self._behind = _view(np.zeros(self._num_slots + 1, np.int32))
        self._allot(64, ())
        self.reset()

    def _allot(self, size, old):
        """Room for so many rows; the first of them are as in `old`."""
        types = (np.int32, np.int32, np.int32, np.int64, np.float64, np.uint8, np.int64)
        new = [np.zeros(size, each) for each in types]
        for source, target in zip(old, new, strict=False):
            target[: len(source)] = source
        self._begin, self._end, self._members = _view(new[0]), _view(new[1]), _view(new[2])
        self._kind, self._since, self._is_late, self._born = _view(new[3]), _view(new[4]), _view(new[5]), _view(new[6])

    def reset(self):
        np.asarray(self._row)[:] = 0
        np.asarray(self._num_ends)[:] = 0
        np.asarray(self._before)[:] = -2
        np.asarray(self._behind)[:] = -2
        self.num_rows, self._free_rows, self._num_born, self._unended_row = 1, [], 0, 0
        self.num_requests = 0
        self._plan = self._plan_born = self._plan_places = _view(np.zeros(0, np.int64))
        self._newcomer, self._is_sparing, self._has_spared = 0, False, False
        self._plan_size = self._cursor = self._num_taken = 0
        self._planned_at = 0.0
        self.rival.forget()
        self._decide()

    @cython.cfunc
    def _decide(self) -> cython.void:
        self._is_lru = self.num_requests == 0 or self.rival.leads

    @cython.cfunc
    def tick(self) -> cython.void:
        self._now = self.clock()

    @cython.cfunc
    @cython.exceptval(check=False)
    def spare(self, is_on: cython.bint) -> cython.bint:
        has_spared: cython.bint = self._has_spared
        self._is_sparing, self._has_spared = is_on, False
        return has_spared

    # --- rows ---------------------------------------------------------------------------------------------------

    @cython.cfunc
    def _new_row(self, kind: cython.longlong, is_late: cython.bint) -> cython.longlong:
        row: cython.longlong
        if self._free_rows:
            row = self._free_rows.pop()
        else:
            row = self.num_rows
            if row == len(self._begin):
                self._allot(
                    2 * row,
                    (self._begin, self._end, self._members, self._kind, self._since, self._is_late, self._born),
                )
            self.num_rows += 1
        self._num_born += 1
        self._begin[row] = self._end[row] = -1
        self._members[row] = 0
        self._kind[row], self._since[row], self._is_late[row] = kind, self._now, is_late
        self._born[row] = self._num_born
        return row

    @cython.cfunc
    def _give(self, slot: cython.longlong, row: cython.longlong) -> cython.void:
        """Have a slot carry a row's number; 0: none's. The slot is in no row's list."""
        old: cython.longlong = self._row[slot]
        if old == row:
            return
        self._row[slot] = row
        if row:
            self._members[row] += 1
        if old:
            self._members[old] -= 1
            if self._members[old] == 0 and old != self._unended_row:
                self._born[old] = 0
                self._free_rows.append(old)

    @cython.cfunc
    @cython.exceptval(check=False)
    def _line_up(self, slot: cython.longlong) -> cython.void:
        """Append a slot to the list of the row whose number it carries."""
        row: cython.longlong = self._row[slot]
        last: cython.longlong = self._end[row]
        self._before[slot] = last
        self._behind[slot] = -1
        if last < 0:
            self._begin[row] = slot
        else:
            self._behind[last] = slot
        self._end[row] = slot

    @cython.cfunc
    @cython.exceptval(check=False)
    def _step_out(self, slot: cython.longlong) -> cython.void:
        """Take a slot out of its row's list, if it is in one. It still carries the row's number."""
        before: cython.longlong = self._before[slot]
        behind: cython.longlong = self._behind[slot]
        row: cython.longlong = self._row[slot]
        if before == -2:
            return
        if before < 0:
            self._begin[row] = behind
        else:
            self._behind[before] = behind
        if behind < 0:
            self._end[row] = before
        else:
            self._before[behind] = before
        self._before[slot] = self._behind[slot] = -2

    # --- the order's verbs --------------------------------------------------------------------------------------

    @cython.cfunc
    def enter(self, slot: cython.longlong) -> cython.void:
        row: cython.longlong = self._row[slot]
        self.lists.append(SECOND, slot)
        if not (row and self._is_late[row] and self._now - self._since[row] < LATE):
            row = self._unended_row
            if not row or self._now - self._since[row] >= GRAIN:
                self._unended_row = self._new_row(self.no_class, False)
                if row and self._members[row] == 0:
                    self._born[row] = 0
                    self._free_rows.append(row)
            self._give(slot, self._unended_row)
        self._line_up(slot)

    @cython.cfunc
    @cython.exceptval(check=False)
    def leave(self, slot: cython.longlong) -> cython.void:
        self.lists.remove(slot)
        self._step_out(slot)

    @cython.cfunc
    def pop(self) -> cython.longlong:
        slot: cython.longlong = self.lists.pop(FIRST)
        if slot < 0:
            slot = self.lists.first(SECOND) if self._is_lru else self._planned()
            if slot >= 0:
                self.leave(slot)
        return slot

    @cython.cfunc
    @cython.exceptval(check=False)
    def give_back(self, slot: cython.longlong) -> cython.void:
        self.lists.push(FIRST, slot)

    @cython.cfunc
    def taken(self, slot: cython.longlong) -> cython.void:
        self._give(slot, 0)
        self._num_ends[slot] = 0

    @cython.cfunc
    def _planned(self) -> cython.longlong:
        """The next victim, still where it was; rows are ranked anew when that has grown old.

        -1: none is left, or the next is spared since a newcomer has no higher place.
        """
        row: cython.longlong
        if self._now - self._planned_at > GOOD_FOR or self._num_taken >= max(256, self._num_slots // 32):
            self._rank()
        while True:
            while self._cursor < self._plan_size:
                row = self._plan[self._cursor]
                if self._born[row] == self._plan_born[self._cursor] and self._begin[row] >= 0:
                    if self._is_sparing and self._plan_places[self._cursor] >= self._newcomer:
                        self._has_spared = True
                        return -1
                    self._num_taken += 1
                    return self._begin[row]
                self._cursor += 1
            self._rank()
            if not self._plan_size:
                return -1

    def _rank(self):
        rows, places = self._ranked()
        self._plan, self._plan_born = _view(rows), _view(np.asarray(self._born)[rows])
        self._plan_places = _view(places)
        self._newcomer = self.returns.place_of_new
        self._plan_size, self._cursor, self._num_taken, self._planned_at = len(rows), 0, 0, self._now

    def _ranked(self):
        """Rows that have idle slots, the first to go first; and each one's place."""
        n = self.num_rows
        rows = np.flatnonzero(np.asarray(self._begin)[1:n] >= 0) + 1
        rows = rows[np.asarray(self._born)[rows] > 0]
        kinds, since = np.asarray(self._kind)[rows], np.asarray(self._since)[rows]
        places = np.asarray(self.returns.places(kinds, self._now - since))
        order = np.lexsort((np.asarray(self._born)[rows], since, places))
        return rows[order], places[order]

    def ranks(self, slots):
        """What was given back first, then by row, then by age."""
        where, stamps = np.asarray(self.lists.where)[slots], np.asarray(self.lists.stamps)[slots]
        if self._is_lru:
            place = np.ones(len(slots), np.int64)
        else:
            self._now = self.clock()
            rows, _ = self._ranked()
            of_row = np.zeros(self.num_rows, np.int64)
            of_row[rows] = np.arange(1, len(rows) + 1)
            place = of_row[np.asarray(self._row)[slots]]
        order = np.empty(len(slots), np.int64)
        order[np.lexsort((stamps, np.where(where == FIRST, 0, place)))] = np.arange(len(slots))
        return np.where((where == FIRST) | (where == SECOND), order, _NEVER)

    # --- what requests' ends report -----------------------------------------------------------------------------

    def num_ended(self, slots, least: cython.longlong = 1):
        """How many leading slots of these (-1: none) have blocks that so many requests that have ended had, or more."""
        count: cython.longlong = 0
        slot: cython.longlong
        for slot in slots:
            if not 0 <= slot < self._num_slots or self._num_ends[slot] < least:
                break
            count += 1
        return count

    @cython.locals(slot=cython.longlong, row=cython.longlong)
    def ended(self, slots, kind: cython.longlong):
        """A request has ended. Blocks of it, in chain order, are of this class; it used them until now. -1: no slot."""
        self._now = self.clock()
        self.num_requests += 1
        row = self._new_row(kind, False)
        for slot in reversed(slots):
            if not 0 <= slot < self._num_slots:
                continue
            if self._num_ends[slot] < MOST_ENDS:
                self._num_ends[slot] += 1
            if self.lists.where[slot] == SECOND:
                self.leave(slot)
                self._give(slot, row)
                self.lists.append(SECOND, slot)
                self._line_up(slot)
            else:
                self._step_out(slot)
                self._give(slot, row)
                self._is_late[row] |= self.lists.where[slot] == NOWHERE
        if self._members[row] == 0:
            self._born[row] = 0
            self._free_rows.append(row)
        self._decide()

    def check(self, idle):
        LRU.check(self, idle)
        where, rows, before = _slots_of(self.lists.where), _slots_of(self._row), _slots_of(self._before)
        assert ((where == SECOND) == (before != -2)).all(), "rows have other slots than the list by age"
        members = np.bincount(rows, minlength=self.num_rows)[1:]
        assert (members == np.asarray(self._members)[1 : self.num_rows]).all(), "members of rows"
        for row in range(1, self.num_rows):
            slot, count = self._begin[row], 0
            while slot >= 0 and self._born[row]:
                assert rows[slot] == row, "a slot in another row's list"
                slot, count = self._behind[slot], count + 1
            listed = np.count_nonzero((rows == row) & (where == SECOND))
            assert count == listed, "a row's list"


@cython.cclass
class SlotCore:
    """The table of a pool's slots and its verbs. Names given are lists of 32 bytes each; slots are lists.

    `order` is how blocks are evicted. `changes`, a `ChangeLog`, gets whole blocks that come and go; `eviction_log` what
    leaves and how old it was. `max_partial`: so many unfinished last blocks at most.
    """

    num_slots = cython.declare(cython.longlong, visibility="readonly")
    num_free = cython.declare(cython.longlong, visibility="readonly")
    num_ready = cython.declare(cython.longlong, visibility="readonly")
    num_leased = cython.declare(cython.longlong, visibility="readonly")  # ready slots with references
    num_quarantined = cython.declare(cython.longlong, visibility="readonly")
    num_dirty = cython.declare(cython.longlong, visibility="readonly")
    num_evicted = cython.declare(cython.longlong, visibility="readonly")
    num_dirty_dropped = cython.declare(cython.longlong, visibility="readonly")
    state = cython.declare(cython.uchar[::1], visibility="readonly")
    refs = cython.declare(cython.int[::1], visibility="readonly")
    generation = cython.declare(cython.longlong[::1], visibility="readonly")
    parent = cython.declare(cython.int[::1], visibility="readonly")
    children = cython.declare(cython.int[::1], visibility="readonly")
    dirty = cython.declare(cython.uchar[::1], visibility="readonly")
    is_partial = cython.declare(cython.uchar[::1], visibility="readonly")
    partial = cython.declare(dict, visibility="readonly")  # slots of unfinished last blocks, oldest first
    free_slots = cython.declare(cython.int[::1], visibility="readonly")  # a stack to `num_free`
    index = cython.declare(Index, visibility="readonly")
    lists = cython.declare(SlotLists, visibility="readonly")
    order = cython.declare(LRU, visibility="readonly")
    changes = cython.declare(object, visibility="public")
    eviction_log = cython.declare(object, visibility="readonly")
    _max_partial: cython.longlong
    _parent_generation: cython.longlong[::1]  # a link to a slot that was taken since is none
    _chosen: cython.int[::1]  # scratch: the slots that a verb works on
    _entries: cython.ulonglong[::1]  # of `eviction_log`
    _came_at: cython.uint[::1]
    _ages: cython.longlong[::1]
    _evicted_code: cython.ulonglong

    def __init__(self, num_slots: cython.longlong, make_order, max_partial=None):
        """`make_order(lists, index)`: the order of eviction. ValueError if `num_slots` is not from 1 to 2³¹ - 16."""
        if not 1 <= num_slots < (1 << 31) - 16:
            raise ValueError(f"num_slots {num_slots}: must be at least 1, and less than {(1 << 31) - 16}")
        rows = num_slots + 1
        self.num_slots = self.num_free = num_slots
        self.num_ready = self.num_leased = self.num_quarantined = self.num_dirty = 0
        self.num_evicted = self.num_dirty_dropped = 0
        self.state, self.dirty, self.is_partial = (_view(np.zeros(rows, np.uint8)) for _ in range(3))
        self.refs, self.children = (_view(np.zeros(rows, np.int32)) for _ in range(2))
        self.generation, self._parent_generation = (_view(np.zeros(rows, np.int64)) for _ in range(2))
        self.parent = _view(np.full(rows, num_slots, np.int32))
        self.free_slots = _view(np.arange(num_slots - 1, -1, -1, dtype=np.int32))
        self._chosen = _view(np.zeros(rows, np.int32))
        self.partial = {}
        self._max_partial = num_slots if max_partial is None else max_partial
        self.index = Index(num_slots)
        self.lists = SlotLists(num_slots)
        self.order = make_order(self.lists, self.index)
        self.changes = self.eviction_log = None

    def remember(self, eviction_log, evicted_code: cython.ulonglong):
        """Note in `eviction_log` what comes and what makes room from now on."""
        if len(eviction_log.came_at) < self.num_slots or not len(eviction_log.entries):
            raise ValueError(f"eviction_log of {len(eviction_log.came_at)} places: there are {self.num_slots} slots")
        self._entries, self._came_at = _view(eviction_log.entries), _view(eviction_log.came_at)
        self._ages, self._evicted_code = _view(eviction_log.ages), evicted_code
        self.eviction_log = eviction_log

    # --- queries ------------------------------------------------------------------------------------------------

    def lookup(self, names: list) -> int:
        """How many leading blocks are ready."""
        return len(self.find_run(names))

    @cython.ccall
    @cython.locals(first=cython.Py_ssize_t, end=cython.Py_ssize_t, i=cython.Py_ssize_t, slot=cython.longlong)
    def find_run(self, names: list) -> list:
        """The slots of the leading ready blocks."""
        slots: list = []
        for first in range(0, len(names), AT_ONCE):
            end = min(first + AT_ONCE, len(names))
            self.index.find_each(names, first, end)
            for i in range(end - first):
                slot = self.index.found[i]
                if slot < 0 or self.state[slot] != READY:
                    return slots
                slots.append(slot)
        return slots

    def find(self, names: list) -> list:
        """The ready slot of each block, -1 where there is none."""
        slots: list = self.index.find_all(names)
        return [slot if slot >= 0 and self.state[slot] == READY else -1 for slot in slots]

    @cython.locals(i=cython.Py_ssize_t)
    def find_tagged(self, names: list) -> tuple:
        """The slot of each name, ready or filling, -1 where there is none; and the names' tags, a word each."""
        slots = self.index.find_all(names)
        tags = np.empty(len(names), np.uint64)
        view: cython.ulonglong[::1] = _view(tags)
        for i in range(len(names)):
            if cython.compiled:
                words: cython.p_ulonglong = cython.cast(cython.p_ulonglong, cython.cast(cython.p_char, names[i]))
                view[i] = words[0] * MIX_FIRST + words[3] * MIX_LAST
            else:
                first, last = _two_words(names[i])
                view[i] = (first * MIX_FIRST + last * MIX_LAST) & U64
        return slots, tags

    def generation_of(self, slot: cython.longlong) -> int:
        """How often the slot was taken."""
        return self.generation[self._checked(slot)]

    def is_ready(self, slot: cython.longlong) -> bool:
        """Whether the slot holds a block that can be found."""
        return self.state[self._checked(slot)] == READY

    def generations(self, slots: list) -> list:
        """How often each slot was taken."""
        return [self.generation[self._checked(slot)] for slot in slots]

    def references(self, slots: list) -> list:
        """How many references each slot has."""
        return [self.refs[self._checked(slot)] for slot in slots]

    def names_of(self, slots: list) -> list:
        """The names that slots have, or had last."""
        return [self.index.name_of(self._checked(slot)) for slot in slots]

    @cython.locals(i=cython.longlong, slot=cython.longlong)
    def own(self, slots: list, generations: list, at, state: cython.int) -> list:
        """Which of these positions, None for all, have a slot that was not taken since, in this state, not leased."""
        found: list = []
        _require_equal(len(slots), len(generations))
        for i in range(len(slots)) if at is None else sorted(set(at)):
            if not 0 <= i < len(slots):
                continue
            slot = self._checked(slots[i])
            is_same: cython.bint = self.generation[slot] == generations[i]
            if is_same and self.state[slot] == state and self.refs[slot] == 0:
                found.append(i)
        return found

    # --- references ---------------------------------------------------------------------------------------------

    def lease(self, names: list) -> tuple:
        """One more reference to each of the leading ready blocks: their slots and generations."""
        slots: list = self.find_run(names)
        return slots, self.lease_found(slots)

    @cython.ccall
    def lease_found(self, slots: list) -> list:
        """One more reference to each of these slots, which `find_run` has just found: their generations."""
        slot: cython.longlong
        generations: list = []
        self.order.tick()
        for slot in slots:
            self._ref(self._checked(slot))
            generations.append(self.generation[slot])
        return generations

    @cython.cfunc
    @cython.inline
    @cython.exceptval(check=False)
    def _ref(self, slot: cython.longlong) -> cython.void:
        if self.refs[slot] == 0:
            self.num_leased += 1
        self.refs[slot] += 1
        self._withdraw(slot)

    @cython.cfunc
    @cython.inline
    @cython.exceptval(check=False)
    def _withdraw(self, slot: cython.longlong) -> cython.void:
        """The slot is used, or leaves by force: it is no victim. Fine if it was none."""
        if self.lists.where[slot] >= DEFERRED:
            self.lists.remove(slot)
        self.order.leave(slot)

    def hold(self, slots: list):
        """One more reference to each slot. ValueError, and no change, if one has none."""
        slot: cython.longlong
        if lacking := [slot for slot in slots if not self.refs[self._checked(slot)]]:
            raise ValueError(f"hold: blocks {lacking} have no reference")
        for slot in slots:
            self.refs[slot] += 1

    @cython.ccall
    @cython.locals(i=cython.Py_ssize_t, slot=cython.longlong)
    def unref(self, slots: list):
        """One reference fewer; ready slots without any can go, the last first. ValueError, no change: too few."""
        count: cython.Py_ssize_t = 0  # slots that have no reference any more: `_chosen` has them
        for slot in slots:
            self._checked(slot)
        self.order.tick()
        for i in range(len(slots)):
            slot = slots[i]
            if self.refs[slot] == 0:
                for slot in slots[:i]:
                    self.refs[slot] += 1
                raise ValueError(
                    f"slots {[each for each in slots if self.refs[each] < slots.count(each)]} have no reference"
                )
            self.refs[slot] -= 1
            if self.refs[slot] == 0:
                self._chosen[count] = slot
                count += 1
        for i in range(count - 1, -1, -1):
            slot = self._chosen[i]
            if self.state[slot] == READY:
                self.num_leased -= 1
                self.order.enter(slot)
            else:
                self._to_free(slot)

    @cython.cfunc
    @cython.exceptval(-1, check=False)
    def _checked(self, slot: cython.longlong) -> cython.longlong:
        if not 0 <= slot < self.num_slots:
            raise ValueError(f"slot {slot}: must be from 0 to {self.num_slots - 1}")
        return slot

    # --- a slot's life ------------------------------------------------------------------------------------------

    @cython.locals(i=cython.Py_ssize_t, slot=cython.longlong)
    def allocate(self, count: cython.longlong):
        """Take slots, with one reference each, whether parents must go for them or not; None: no room."""
        if count < 0 or self._room(count, False, False) < 0:
            return None
        slots: list = [self._chosen[i] for i in range(count)]
        for slot in slots:
            self.refs[slot] = 1
        return slots

    @cython.locals(i=cython.Py_ssize_t)
    def preallocate(self, count: cython.longlong, if_worth: cython.bint = False) -> list:
        """Take up to so many slots, without a name, for blocks that `name` will put there; none: no room."""
        return [self._chosen[i] for i in range(self._room(count, True, if_worth))]

    @cython.locals(i=cython.Py_ssize_t, slot=cython.longlong, before=cython.longlong)
    def reserve(self, names: list, parent, if_worth: cython.bint = False):
        """Take slots for the blocks of a chain that have none, name them and link them to it; None: no room.

        Returns the blocks' positions in `names`, their slots, these slots' generations, and how many names were looked
        at. `if_worth`: those behind a block for which a more valuable one would have to go are not. ValueError if a
        name is given twice.
        """
        first: cython.longlong = -1 if parent is None else self.index.find(parent)
        num_new: cython.longlong = 0
        num_named: cython.longlong = 0
        held: list = self.index.find_all(names)
        guarded: list = []
        for slot in held:
            num_new += slot < 0
        at: list = []
        slots: list = []
        generations: list = []
        if num_new == 0:
            return at, slots, generations, len(names)
        if num_new > self.num_free:  # what new blocks hang on must not go to make room for them
            before = first
            for i in range(len(held)):
                slot = held[i]
                if slot < 0 <= before:
                    self.children[before] += 1
                    guarded.append(before)
                before = slot
        num_new = self._room(num_new, True, if_worth)
        if num_new < 0:
            self.unguard(guarded)
            return None
        before = self.num_slots if first < 0 else first
        for i in range(len(held)):
            slot = held[i]
            if slot >= 0:  # its parent may come back now, if it was not evicted itself
                is_back: cython.bint = i > 0 and held[i - 1] < 0 and self.index.find(names[i]) == slot
                if is_back and self._is_orphan(slot) and not self._is_above(slot, before):
                    self._link(slot, before)
                before = slot
                continue
            if num_named == num_new:
                self.unguard(guarded)
                return at, slots, generations, i
            slot = self._chosen[num_named]
            if not self.index.put(names[i], slot):
                self._undo(num_named, num_new)
                self.unguard(guarded)
                raise ValueError(f"reserve: a hash comes twice among {len(held)}")
            num_named += 1
            self._link(slot, before)
            at.append(i)
            slots.append(slot)
            generations.append(self.generation[slot])
            before = slot
        self.unguard(guarded)
        return at, slots, generations, len(names)

    @cython.cfunc
    @cython.locals(i=cython.Py_ssize_t, slot=cython.longlong)
    def _undo(self, num_named: cython.longlong, count: cython.longlong) -> cython.void:
        """Give chosen slots back, of which the first were named."""
        for i in range(count - 1, -1, -1):
            slot = self._chosen[i]
            if i < num_named:
                self.index.remove(slot)
                self._leave_parent(slot)
                self._unlink(slot)
            self._to_free(slot)

    @cython.cfunc
    @cython.locals(i=cython.Py_ssize_t, slot=cython.longlong)
    def _room(self, count: cython.longlong, spare_parents: cython.bint, if_worth: cython.bint) -> cython.longlong:
        """Take so many slots (→ FILLING, next generation) into `_chosen`: victims, then free ones. -1: no room.

        Returns how many; fewer only `if_worth`, where blocks worth more than new ones are spared.
        """
        short: cython.longlong = count - self.num_free
        num_found: cython.longlong
        if short > self.num_ready - self.num_leased:
            return -1
        now: cython.longlong = 0
        if self.eviction_log is not None:  # as `EvictionLog.now`
            now = min(int(self.eviction_log.clock()) - self.eviction_log.start + 1, (1 << 24) - 1)
        self.order.tick()
        if short > 0:
            num_found = self._evict(short, spare_parents, if_worth, now)
            if num_found < 0:
                return -1
            count -= short - num_found
            short = num_found
        else:
            short = 0
        for i in range(short, count):
            self.num_free -= 1
            self._chosen[i] = self.free_slots[self.num_free]
        for i in range(count):
            slot = self._chosen[i]
            self.order.taken(slot)
            self.state[slot] = FILLING
            self.generation[slot] += 1
            self.children[slot] = 0
            if now:
                self._came_at[slot] = now
        return count

    @cython.cfunc
    @cython.locals(i=cython.Py_ssize_t, slot=cython.longlong, parent=cython.longlong, is_parent=cython.bint)
    def _evict(
        self, count: cython.longlong, spare_parents: cython.bint, if_worth: cython.bint, now: cython.longlong
    ) -> cython.longlong:
        """Victims into `_chosen`, clean first, parents only unless `spare_parents`. -1, and no change: too few.

        Returns how many; fewer only `if_worth`.
        """
        num_found: cython.longlong = 0
        self.order.spare(if_worth)
        while num_found < count:
            slot, is_parent = self._next_victim(), False
            if slot < 0 and not spare_parents:
                slot, is_parent = self.lists.pop(PARKED), True
            if slot < 0:
                break
            if self.children[slot] > 0 and not is_parent:
                self.lists.append(PARKED, slot)
                continue
            self._chosen[num_found] = slot
            num_found += 1
            self._leave_parent(slot)
        if self.order.spare(False):
            count = num_found
        if num_found < count:
            for i in range(num_found - 1, -1, -1):
                slot = self._chosen[i]
                parent = self.parent_of(slot)
                self.children[parent] += 1
                self.order.give_back(slot)
            return -1
        if not count:
            return 0
        for i in range(count):
            slot = self._chosen[i]
            self.order.evicted(slot)
            if now:
                self._depart(slot, now)
        self.num_evicted += count
        self._forget([self._chosen[i] for i in range(count)] if self.changes is not None else None, count)
        return count

    @cython.cfunc
    def _next_victim(self) -> cython.longlong:
        """The order's next clean slot; the first dirty one that was passed over, where no clean one comes soon."""
        slot: cython.longlong
        num_passed: cython.int = 0
        while num_passed < MOST_PASSED:
            slot = self.order.pop()
            if slot < 0:
                break
            if not self.dirty[slot]:
                return slot
            self.lists.append(DEFERRED, slot)
            num_passed += 1
        return self.lists.pop(DEFERRED)

    @cython.cfunc
    @cython.exceptval(check=False)
    def _depart(self, slot: cython.longlong, now: cython.longlong) -> cython.void:
        """Note that a block makes room (`EvictionLog`): its name's tag above the second above the cause."""
        tag: cython.ulonglong = self.index.tag(slot)
        low: cython.ulonglong = (now << 8) | self._evicted_code
        size: cython.ulonglong = len(self._entries)
        self._entries[((tag >> 32) * size) >> 32] = ((tag & U32) << 32) | low
        since: cython.longlong = self._came_at[slot]
        if since:
            age: cython.longlong = now - since
            bucket: cython.int = 0
            while age >> bucket and bucket < NUM_AGES - 1:
                bucket += 1
            self._ages[bucket] += 1
            self._ages[NUM_AGES] += age

    @cython.locals(i=cython.Py_ssize_t, slot=cython.longlong)
    def _forget(self, slots, count: cython.longlong):
        """Ready slots, those chosen or `slots` of them, lose their blocks: their names and what hangs on these."""
        for i in range(count):
            slot = self._chosen[i]
            self.index.remove(slot)
            if self.is_partial[slot]:
                self.is_partial[slot] = 0
                del self.partial[slot]
            if self.dirty[slot]:
                self.dirty[slot] = 0
                self.num_dirty -= 1
                self.num_dirty_dropped += 1
            self._unlink(slot)
        self.num_ready -= count
        if slots is not None:
            at = np.array(slots, np.int64)
            self.changes.removed(at, self.words(at))

    def words(self, slots):
        """The names of slots (an array) as `[n, 4]` uint64."""
        return self.index.names.view(np.uint64).reshape(-1, 4)[slots]

    def publish(self, slots: list, is_partial: cython.bint, refs: cython.int = 1):
        """FILLING → READY: named slots get so many references more; none is a victim yet.

        `is_partial`: unfinished last blocks, unknown to `changes`; too many of them push the oldest out.
        """
        slot: cython.longlong
        self.order.tick()
        for slot in slots:
            self.state[self._checked(slot)] = READY
            self.refs[slot] += refs
            self.order.admit(slot)
            if is_partial:
                self.is_partial[slot] = 1
                self.partial[slot] = None
        self.num_ready += len(slots)
        self.num_leased += len(slots)
        if not is_partial and self.changes is not None and slots:
            self.changes.stored(np.array(slots, np.int64))
        elif is_partial and len(self.partial) > self._max_partial:
            self.drop(list(self.partial)[: len(self.partial) - self._max_partial])

    def lend(self, slots: list):
        """One reference to each of these slots, which stay FILLING: they were reserved before a `reset`."""
        for slot in slots:
            self.refs[self._checked(slot)] += 1

    def close(self, slots: list, is_named: cython.bint):
        """Take filling slots out of their chains and the index; the next call says what becomes of them."""
        slot: cython.longlong
        for slot in slots:
            self._checked(slot)
            if is_named:
                self.index.remove(slot)
            self._leave_parent(slot)
            self._unlink(slot)

    def free(self, slots: list):
        """→ FREE, whatever they were; they have no name. The first of them is taken again first."""
        slot: cython.longlong
        for slot in reversed(slots):
            if self.state[self._checked(slot)] == QUARANTINED:
                self.num_quarantined -= 1
            elif self.state[slot] == FREE:
                raise ValueError(f"slot {slot} is free")
            self._to_free(slot)

    def quarantine(self, slots: list):
        """FILLING → QUARANTINED; they have no name any more."""
        slot: cython.longlong
        for slot in slots:
            self.state[self._checked(slot)] = QUARANTINED
        self.num_quarantined += len(slots)

    @cython.cfunc
    @cython.inline
    @cython.exceptval(check=False)
    def _to_free(self, slot: cython.longlong) -> cython.void:
        self.state[slot] = FREE
        self.free_slots[self.num_free] = slot
        self.num_free += 1

    @cython.locals(i=cython.Py_ssize_t, slot=cython.longlong)
    def drop(self, slots: list) -> int:
        """READY → FREE, children or not; leased ones lose their name now, their slot later. Returns how many."""
        count: cython.Py_ssize_t = 0
        self.order.tick()
        slots = [slot for slot in dict.fromkeys(slots) if self.state[self._checked(slot)] == READY]
        for slot in slots:
            if self.refs[slot] == 0:
                self._withdraw(slot)
            self._leave_parent(slot)
        for slot in slots:  # a parent may have become a victim again with its last child
            if self.refs[slot] == 0:
                self._withdraw(slot)
            self._chosen[count] = slot
            count += 1
        self._forget(slots if self.changes is not None else None, count)
        for i in range(count - 1, -1, -1):
            slot = slots[i]
            if self.refs[slot] == 0:
                self._to_free(slot)
            else:
                self.state[slot] = FILLING
                self.num_leased -= 1
        return count

    def drop_idle(self, names: list) -> list:
        """Drop those without a lease and other children, a chain's end first; True for each block that is gone now."""
        slot: cython.longlong
        slots: list = self.index.find_all(names)
        going: dict = {}
        orphaned: dict = {}  # slot → its children that go
        for slot in slots:
            if slot < 0 or slot in going or self.state[slot] != READY or self.refs[slot]:
                continue
            if self.children[slot] == orphaned.get(slot, 0):
                going[slot] = None
                parent = self.parent_of(slot)
                orphaned[parent] = orphaned.get(parent, 0) + 1
        self.drop(list(going))
        return [slot < 0 or slot in going for slot in slots]

    # --- names given to slots that are in use (L1) --------------------------------------------------------------

    @cython.locals(i=cython.Py_ssize_t, slot=cython.longlong, held=cython.longlong)
    def name(self, slots: list, names: list, parent) -> tuple:
        """Name filling, unnamed slots by new names: (positions, slots before). ValueError, no change: one twice."""
        before: cython.longlong = -1 if parent is None else self.index.find(parent)
        _require_equal(len(slots), len(names))
        mine: dict = {}  # slots named here → their positions
        parents: list = []
        for i in range(len(names)):
            held = self.index.find(names[i])
            slot = self._checked(slots[i])
            if held in mine or slot in mine:
                self.unname(list(mine))
                raise ValueError(f"publish: a hash or a block comes twice among {len(names)}")
            if held < 0 and self.state[slot] == FILLING:
                self.index.put(names[i], slot)
                mine[slot] = i
                parents.append(before)
                held = slot
            before = held
        return list(mine.values()), parents

    def unname(self, slots: list):
        """Take back what `name` gave."""
        for slot in slots:
            self.index.remove(self._checked(slot))

    def link(self, slots: list, parents: list):
        """Note each slot's parent, -1 for none."""
        i: cython.Py_ssize_t
        _require_equal(len(slots), len(parents))
        for i in range(len(slots)):
            self._link(self._checked(slots[i]), self.num_slots if parents[i] < 0 else self._checked(parents[i]))

    def retire(self, slots: list):
        """Unused partial blocks are the next victims, the first of them first."""
        slot: cython.longlong
        for slot in reversed(slots):
            if self.is_partial[self._checked(slot)] and self.refs[slot] == 0:
                self._withdraw(slot)
                self.order.give_back(slot)

    # --- parents and children -----------------------------------------------------------------------------------
    # A link carries the parent's generation: a parent dropped by force while it had children leaves stale links behind.
    # The count of the sentinel's children means nothing.

    @cython.cfunc
    @cython.inline
    @cython.exceptval(check=False)
    def _link(self, slot: cython.longlong, parent: cython.longlong) -> cython.void:
        self.parent[slot] = parent
        self._parent_generation[slot] = self.generation[parent]
        self.children[parent] += 1

    @cython.cfunc
    @cython.inline
    @cython.exceptval(check=False)
    def _unlink(self, slot: cython.longlong) -> cython.void:
        self.parent[slot] = self.num_slots
        self._parent_generation[slot] = 0

    @cython.ccall
    @cython.exceptval(check=False)
    def parent_of(self, slot: cython.longlong) -> cython.longlong:
        """The slot's parent; `num_slots` without one, or where the link is stale."""
        parent: cython.longlong = self.parent[slot]
        return parent if self.generation[parent] == self._parent_generation[slot] else self.num_slots

    def _parents(self):
        parents = np.asarray(self.parent)
        is_alive = np.asarray(self.generation)[parents] == np.asarray(self._parent_generation)
        return np.where(is_alive, parents, self.num_slots)

    @cython.cfunc
    def _is_above(self, slot: cython.longlong, below: cython.longlong) -> cython.bint:
        """Whether a slot is an ancestor of another, or itself. Names that hash their parents' never make a ring."""
        while below != self.num_slots:
            if below == slot:
                return True
            below = self.parent_of(below)
        return False

    @cython.cfunc
    def _is_orphan(self, slot: cython.longlong) -> cython.bint:
        parent: cython.longlong = self.parent_of(slot)
        return parent == self.num_slots or self.state[parent] == FREE or self.state[parent] == QUARANTINED

    @cython.cfunc
    @cython.inline
    @cython.exceptval(check=False)
    def _leave_parent(self, slot: cython.longlong) -> cython.void:
        """The slot's parent has a child fewer; one that was parked for it can go again, and is next."""
        self._one_child_fewer(self.parent_of(slot))

    @cython.cfunc
    @cython.exceptval(check=False)
    def _one_child_fewer(self, parent: cython.longlong) -> cython.void:
        self.children[parent] -= 1
        if parent != self.num_slots and self.children[parent] == 0 and self.lists.where[parent] == PARKED:
            self.lists.remove(parent)
            self.order.give_back(parent)

    def guard(self, names: list) -> list:
        """Keep these blocks, None for none, from making room: what comes hangs on them. `unguard` ends it."""
        slot: cython.longlong
        slots: list = []
        for name in names:
            slot = -1 if name is None else self.index.find(name)
            if slot >= 0:
                self.children[slot] += 1
                slots.append(slot)
        return slots

    def unguard(self, slots: list):
        """What `guard` returned can make room again."""
        for slot in slots:
            self._one_child_fewer(self._checked(slot))

    # --- dirty slots --------------------------------------------------------------------------------------------

    def mark_dirty(self, slots: list):
        """Ready ones among these slots hold what no lower tier has."""
        slot: cython.longlong
        for slot in slots:
            if self.state[self._checked(slot)] == READY and not self.dirty[slot]:
                self.dirty[slot] = 1
                self.num_dirty += 1

    def mark_clean(self, slots: list):
        """Slots may go like any other; those passed over for being dirty are next."""
        slot: cython.longlong
        for slot in slots:
            if self.dirty[self._checked(slot)]:
                self.dirty[slot] = 0
                self.num_dirty -= 1
        for slot in slots:
            if self.lists.where[slot] == DEFERRED:
                self.lists.remove(slot)
                self.order.give_back(slot)

    def oldest_dirty(self, count: cython.Py_ssize_t) -> list:
        """Up to so many dirty blocks' names, those evicted next first, but each after its dirty parents."""
        slot: cython.longlong
        slots = np.flatnonzero(np.asarray(self.dirty))
        where, ranks = np.asarray(self.lists.where)[slots], self.order.ranks(slots)
        group = np.where(where == DEFERRED, 0, np.where(ranks > _NEVER, 1, 2))
        ranks = np.where(where == DEFERRED, np.asarray(self.lists.stamps)[slots], ranks)
        chosen: dict = {}
        for slot in slots[np.lexsort((ranks, group))].tolist():
            if len(chosen) >= count:
                break
            branch: list = []
            while slot not in chosen and self.dirty[slot]:  # the sentinel's row is clean: that ends a chain
                branch.append(slot)
                slot = self.parent_of(slot)
            for slot in reversed(branch):
                chosen[slot] = None
        return self.names_of(list(chosen)[:count])

    # --- the whole ----------------------------------------------------------------------------------------------

    def line(self):
        """A line, empty yet, for blocks of this table."""
        return Line(self)

    def reset(self):
        """Forget every name. Idle slots are freed; those with references become FILLING ones without a name."""
        if self.changes is not None:
            self.changes.cleared(self.words)
        state, refs = _slots_of(self.state), _slots_of(self.refs)
        ready = state == READY
        self.num_ready = self.num_leased = self.num_dirty = 0
        state[ready & (refs > 0)] = FILLING
        for slot in np.flatnonzero(ready & (refs == 0))[::-1].tolist():
            self._to_free(slot)
        self.index.reset()
        self.lists.reset()
        self.order.reset()
        np.asarray(self.children)[:] = 0
        np.asarray(self._parent_generation)[:] = 0
        np.asarray(self.dirty)[:] = 0
        np.asarray(self.is_partial)[:] = 0
        np.asarray(self.parent)[:] = self.num_slots
        self.partial.clear()

    def ready_slots(self):
        """Every slot that holds a block now, an array. O(slots)."""
        return np.flatnonzero(np.asarray(self.state) == READY)

    def whole_slots(self):
        """Every slot with a whole block, an array, each behind its parent. O(slots × log of the longest chain)."""
        ancestors = self._parents()  # of each slot; twice as far away with each turn
        depths = (ancestors != self.num_slots).astype(np.int64)
        while (ancestors != self.num_slots).any():
            assert depths.max() <= self.num_slots, "a block is its own ancestor"
            depths += depths[ancestors]
            ancestors = ancestors[ancestors]
        order = np.argsort(_slots_of(depths), kind="stable")
        return order[(np.asarray(self.state)[order] == READY) & (np.asarray(self.is_partial)[order] == 0)]

    def check(self):
        """Raise AssertionError where the table contradicts itself. A full scan."""
        state, refs = _slots_of(self.state), _slots_of(self.refs)
        ready, filling = state == READY, state == FILLING
        free, dirty, partial = np.asarray(self.free_slots)[: self.num_free], np.asarray(self.dirty), self.is_partial
        assert len(np.unique(free)) == self.num_free, "a slot is free twice"
        assert (state[free] == FREE).all(), "a slot in use is in the free list"
        assert np.count_nonzero(state == FREE) == self.num_free, "free count"
        assert np.count_nonzero(state == QUARANTINED) == self.num_quarantined, "quarantined count"
        assert np.count_nonzero(ready) == self.num_ready, "ready count"
        assert (refs >= 0).all(), "negative references"
        assert not refs[~(ready | filling)].any(), "references to slots that are not in use"
        assert np.count_nonzero(ready & (refs > 0)) == self.num_leased, "leased count"
        assert not _slots_of(dirty)[~ready].any(), "a slot that is not ready is dirty"
        assert np.count_nonzero(dirty) == self.num_dirty, "dirty count"
        self.lists.check()
        self.order.check(ready & (refs == 0))
        self.whole_slots()
        parked = _slots_of(self.lists.where) == PARKED
        assert (_slots_of(self.children)[parked] > 0).all(), "parked without children"
        resident = np.flatnonzero(ready | filling)
        links = np.bincount(self._parents()[resident], minlength=self.num_slots + 1)
        assert (links[resident] == np.asarray(self.children)[resident]).all(), "counts of children"
        assert self.state[self.num_slots] == FREE, "the sentinel's row is taken"
        if self.changes is not None:
            self.changes.check(np.flatnonzero(ready & (_slots_of(partial) == 0)))
        assert sorted(self.partial) == np.flatnonzero(np.asarray(partial)).tolist(), "unfinished blocks"
        assert ready[list(self.partial)].all(), "an unfinished block that is not ready"
        named = self.index.named()
        assert len(named) == self.index.num_names, "names"
        assert self.index.find_all(self.names_of(named.tolist())) == named.tolist(), "a name leads to another slot"
        assert np.count_nonzero(ready[named]) == self.num_ready, "a ready slot has no name"
        is_reserved = filling & (refs == 0)
        assert (ready | is_reserved)[named].all(), "a name leads to a slot that is neither ready nor reserved"


@cython.cclass
class Line:
    """Blocks of a pool in line, oldest first, each once: slots with the generation that they had. It takes no lock."""

    core: SlotCore
    _lists: SlotLists
    _generation: cython.longlong[::1]

    def __init__(self, core: SlotCore):
        self.core = core
        self._lists = SlotLists(core.num_slots)
        self._generation = _view(np.zeros(core.num_slots, np.int64))

    def __len__(self):
        return self._lists.sizes[FIRST]

    @cython.cfunc
    @cython.exceptval(check=False)
    def _is_held(self, slot: cython.longlong) -> cython.bint:
        """Whether the slot's block is the one that is in line."""
        core: SlotCore = self.core
        return core.state[slot] == READY and core.generation[slot] == self._generation[slot]

    def add(self, slots: list) -> int:
        """Put blocks in line, at its end; those in line stay where they are. Returns how many others have left it."""
        slot: cython.longlong
        num_lost: cython.longlong = 0
        for slot in slots:
            if self._lists.where[self.core._checked(slot)] == FIRST:
                if self._is_held(slot):
                    continue
                self._lists.remove(slot)
                num_lost += 1
            self._generation[slot] = self.core.generation[slot]
            self._lists.append(FIRST, slot)
        return num_lost

    def take(self, count: cython.Py_ssize_t) -> tuple:
        """Take the first `count` out of line: the slots whose blocks are still there, and how many have left."""
        slot: cython.longlong
        slots: list = []
        num_lost: cython.longlong = 0
        for _ in range(count):
            slot = self._lists.pop(FIRST)
            if slot < 0:
                break
            if self._is_held(slot):
                slots.append(slot)
            else:
                num_lost += 1
        return slots, num_lost

    def remove(self, slots: list):
        """Blocks leave the line, if they are in it."""
        slot: cython.longlong
        for slot in slots:
            if self._lists.where[self.core._checked(slot)] == FIRST and self._is_held(slot):
                self._lists.remove(slot)

    def drop_lost(self, first: cython.longlong, end: cython.longlong) -> int:
        """Take those of these slots out of line whose blocks have left; returns how many."""
        slot: cython.longlong
        num_lost: cython.longlong = 0
        for slot in range(max(0, first), min(end, self.core.num_slots)):
            if self._lists.where[slot] == FIRST and not self._is_held(slot):
                self._lists.remove(slot)
                num_lost += 1
        return num_lost

    def reset(self):
        self._lists.reset()


@cython.cclass
class SlotCounts:
    """How often each slot was added and not removed again. A slot that is not counted raises ValueError, as elsewhere.

    `counts`: `[num_slots]` int32; `num_slots`: those of at least 1.
    """

    counts = cython.declare(object, visibility="readonly")
    num_slots = cython.declare(cython.longlong, visibility="readonly")
    _counts: cython.int[::1]

    def __init__(self, num_slots: cython.Py_ssize_t):
        self.counts = np.zeros(num_slots, np.int32)
        self._counts = _view(self.counts)
        self.num_slots = 0

    @cython.locals(slot=cython.longlong)
    def add(self, slots: list):
        """Each slot once more."""
        for slot in slots:
            if not 0 <= slot < len(self._counts):
                raise ValueError(f"slot {slot}: must be from 0 to {len(self._counts) - 1}")
            self.num_slots += self._counts[slot] == 0
            self._counts[slot] += 1

    @cython.locals(i=cython.Py_ssize_t, slot=cython.longlong)
    def fitting(self, names, slots: list, known, room: cython.longlong):
        """How many leading names fit if `room` more may be counted. `slots`: of the leading ones.

        A name among the `known`, or whose slot is counted, takes no room.
        """
        for i in range(len(names)):
            if i < len(slots):
                slot = slots[i]
                if not 0 <= slot < len(self._counts):
                    raise ValueError(f"slot {slot}: must be from 0 to {len(self._counts) - 1}")
                if self._counts[slot]:
                    continue
            if known and names[i] in known:
                continue
            if room <= 0:
                return i
            room -= 1
        return len(names)

    @cython.locals(slot=cython.longlong)
    def remove(self, slots: list):
        """Each slot once less."""
        for slot in slots:
            if not 0 <= slot < len(self._counts) or self._counts[slot] == 0:
                raise ValueError(f"slot {slot} is not counted")
            self._counts[slot] -= 1
            self.num_slots -= self._counts[slot] == 0


@cython.cclass
class Lease:
    """Protection of blocks from eviction: while it lives, its slots keep their bytes. Made by `SlotPool`.

    `release` may be called any number of times, by any thread; a lease that is dropped instead counts as leaked.
    """

    hashes = cython.declare(list, visibility="readonly")
    slots = cython.declare(list, visibility="readonly")
    generations = cython.declare(list, visibility="readonly")  # how often each slot had been taken by then
    # (itself, whether it was dropped). Its maker sets this to None, under a lock: then it is released.
    on_release = cython.declare(object, visibility="public")

    def __init__(self, hashes: list, slots: list, generations: list, on_release):
        self.hashes = hashes
        self.slots = slots
        self.generations = generations
        self.on_release = on_release

    def __len__(self):
        return len(self.hashes)

    def __repr__(self):
        return f"Lease({len(self.hashes)} blocks, {'held' if self.on_release is not None else 'released'})"

    @property
    def released(self):
        return self.on_release is None

    def release(self):
        """End the protection: the chain's end becomes evictable before its head. Idempotent."""
        on_release = self.on_release
        if on_release is not None:
            on_release(self, False)

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self.release()

    def __del__(self):
        # An empty lease protects nothing; and nothing may wait for a lock here: the pool may be what was interrupted.
        if self.on_release is not None and self.hashes and not sys.is_finalizing():
            self.on_release(self, True)


@cython.cclass
class Leases:
    """Makes leases of one pool and ends them, under its lock. One that was dropped is left for the pool's next verb."""

    _acquire: object
    _release: object
    _core: SlotCore
    _dropped: object

    def __init__(self, lock, core: SlotCore, dropped):
        self._acquire, self._release = lock.acquire, lock.release
        self._core = core
        self._dropped = dropped

    def whole(self, names: list):
        """A lease of all of these blocks if all are ready, else the slots of the leading ready ones. Has the list."""
        core: SlotCore = self._core
        self._acquire()
        try:
            slots: list = core.find_run(names)
            if len(slots) == len(names):
                return Lease(names, slots, core.lease_found(slots), self)
            return slots
        finally:
            self._release()

    def __call__(self, lease, is_dropped):
        if is_dropped:
            self._dropped.append(lease)
            return
        self._acquire()
        try:
            if lease.on_release is not None:
                lease.on_release = None
                self._core.unref(lease.slots)
        finally:
            self._release()
