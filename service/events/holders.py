# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""Which workers hold which blocks: a worker's names → blocks → sets of holders. One source: interpreted, or compiled.

A row of names is one name that one worker has for a block; a row of blocks is one block with a holder. Blocks name
the set of their holders by number. Sets are interned: few are different, so a block costs the same however many hold
it, and a prefix is looked through run by run of equal sets. Nothing here takes a lock.

Workers come from outside as numbers and are checked; rows never leave this file.
"""

import mmap
import os

import cython
import numpy as np

WIDTH = cython.declare(cython.int, 8)  # most tiers: bits of a worker's tiers, and columns of its counts
TIER_BITS = cython.declare(cython.ulonglong, 0xFF)
U64 = cython.declare(cython.ulonglong, 0xFFFFFFFFFFFFFFFF)
U32 = cython.declare(cython.ulonglong, 0xFFFFFFFF)
MOST_WORKERS = cython.declare(cython.longlong, (1 << 24) - 1)
MOST_ROWS = cython.declare(cython.longlong, 1 << 30)
LARGE = cython.declare(cython.longlong, 1 << 18)  # bytes of an array that has pages of its own
FEWEST = cython.declare(cython.longlong, 64)  # rows, or workers, that there is room for at first
MOVES = cython.declare(cython.ulonglong, 4096)  # changes of a set that are remembered
OPEN = cython.declare(cython.int, 1)  # a worker; 0: its number is free
SHUT = cython.declare(cython.int, 2)
FIRST_NAME = cython.declare(cython.longlong, -1)  # of several for one block: the row of the one that was not noted
IDLE_SETS = cython.declare(cython.longlong, 1024)  # unused sets, before they are cleared away


def _view(array):
    """An array as it is read and written item by item."""
    return array if cython.compiled else memoryview(array)


def _grown(view, size: cython.longlong, dtype):
    """A longer array with the same items. What was never written takes no memory: numpy would have it on huge pages."""
    num_bytes: cython.longlong = size * np.dtype(dtype).itemsize
    array = np.frombuffer(mmap.mmap(-1, num_bytes), dtype) if num_bytes >= LARGE else np.zeros(size, dtype)
    array[: len(view)] = np.asarray(view)
    return _view(array)


@cython.cfunc
def _u64(name) -> cython.ulonglong:
    """A block's name in events: 64 bits, signed or not, or the digest that ends with them. TypeError."""
    if isinstance(name, bytes):
        return int.from_bytes(name[-8:], "big")
    if cython.compiled and isinstance(name, int):
        try:
            return name
        except OverflowError:
            pass
    return name & U64


@cython.cfunc
def _members_of(members: bytes) -> list:
    return memoryview(members).cast("I").tolist()


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
def _at(members: bytes, place: cython.Py_ssize_t) -> cython.longlong:
    """The member at this place of a set."""
    if cython.compiled:
        return cython.cast(cython.p_uint, cython.cast(cython.p_char, members))[place]
    return memoryview(members).cast("I")[place]


@cython.cclass
class Keys:
    """64-bit keys → rows. Compiled: open addressing, 4 bytes an entry, up to three quarters full. Interpreted: a dict.

    An entry is 1 + row, with as many bits of the key's hash above it as 32 bits leave room for. The hash has random
    keys, since publishers choose names. Rows that are free are a list, each with the next one in place of its key.
    """

    num_rows = cython.declare(cython.longlong, visibility="readonly")  # in use
    room = cython.declare(cython.longlong, visibility="readonly")  # rows that arrays over them need
    keys: cython.ulonglong[::1]
    _end: cython.longlong  # rows that were ever used
    _free: cython.ulonglong  # 1 + row
    _table: cython.uint[::1]  # 0: empty
    _bits: cython.int
    _mask: cython.ulonglong
    _key0: cython.ulonglong
    _key1: cython.ulonglong
    _rows: dict

    def __init__(self):
        self.num_rows = self._end = 0
        self._free = 0
        self.room = FEWEST
        self.keys = _view(np.zeros(self.room, np.uint64))
        self._rows = {}
        if cython.compiled:
            self._bits = 7
            self._mask = (1 << self._bits) - 1
            self._table = np.zeros(1 << self._bits, np.uint32)
            keys = np.frombuffer(os.urandom(16), np.uint64).tolist()
            self._key0, self._key1 = keys[0] | 1, keys[1] | 1

    @cython.cfunc
    @cython.inline
    @cython.exceptval(check=False)
    def _mixed(self, key: cython.ulonglong) -> cython.ulonglong:
        mixed: cython.ulonglong = key * self._key0
        mixed ^= mixed >> 32
        return mixed * self._key1

    @cython.cfunc
    @cython.exceptval(check=False)
    def find(self, key: cython.ulonglong) -> cython.longlong:
        """The key's row; -1 if it has none."""
        if cython.compiled:
            mixed: cython.ulonglong = self._mixed(key)
            place: cython.ulonglong = mixed >> (64 - self._bits)
            tag: cython.ulonglong = (mixed << self._bits) & U32
            entry: cython.ulonglong = self._table[place]
            while entry != 0:
                if (entry ^ tag) <= self._mask and self.keys[(entry & self._mask) - 1] == key:
                    return (entry & self._mask) - 1
                place = (place + 1) & self._mask
                entry = self._table[place]
            return -1
        return self._rows.get(key, -1)

    @cython.cfunc
    @cython.exceptval(-1, check=False)
    def add(self, key: cython.ulonglong) -> cython.longlong:
        """A row for a key that has none. MemoryError past `MOST_ROWS`; `room` may have grown."""
        row: cython.longlong
        if self._free != 0:
            row = self._free - 1
            self._free = self.keys[row]
        else:
            if self._end == self.room:
                if self.room >= MOST_ROWS:
                    raise MemoryError(f"{self.room} rows")
                self.keys = _grown(self.keys, 2 * self.room, np.uint64)
                self.room *= 2
            row = self._end
            self._end += 1
        self.keys[row] = key
        self.num_rows += 1
        if cython.compiled:
            if 4 * self.num_rows > 3 * cython.cast(cython.longlong, self._mask):
                self._widen()
            self._enter(key, row)
        else:
            self._rows[key] = row
        return row

    @cython.cfunc
    @cython.inline
    @cython.exceptval(check=False)
    def _enter(self, key: cython.ulonglong, row: cython.longlong) -> cython.void:
        mixed: cython.ulonglong = self._mixed(key)
        place: cython.ulonglong = mixed >> (64 - self._bits)
        while self._table[place] != 0:
            place = (place + 1) & self._mask
        self._table[place] = ((mixed << self._bits) & U32) | (row + 1)

    @cython.cfunc
    def _widen(self):
        """Twice the table. The newest row is not in it yet."""
        old: cython.uint[::1] = self._table
        mask: cython.ulonglong = self._mask
        i: cython.Py_ssize_t
        row: cython.longlong
        self._bits += 1
        self._mask = (1 << self._bits) - 1
        self._table = np.zeros(1 << self._bits, np.uint32)
        for i in range(old.shape[0]):
            if old[i] != 0:
                row = (old[i] & mask) - 1
                self._enter(self.keys[row], row)

    @cython.cfunc
    def remove(self, row: cython.longlong):
        """Free a row that is in use."""
        key: cython.ulonglong = self.keys[row]
        if cython.compiled:
            hole: cython.ulonglong = self._mixed(key) >> (64 - self._bits)
            while (self._table[hole] & self._mask) != cython.cast(cython.ulonglong, row + 1):
                hole = (hole + 1) & self._mask
            place: cython.ulonglong = (hole + 1) & self._mask
            while self._table[place] != 0:  # whatever the hole would cut off from its home moves into it
                home: cython.ulonglong = self._mixed(self.keys[(self._table[place] & self._mask) - 1])
                home >>= 64 - self._bits
                if ((place - home) & self._mask) >= ((place - hole) & self._mask):
                    self._table[hole] = self._table[place]
                    hole = place
                place = (place + 1) & self._mask
            self._table[hole] = 0
        else:
            del self._rows[key]
        self.keys[row] = self._free
        self._free = row + 1
        self.num_rows -= 1


@cython.cclass
class Sets:
    """Sets of (worker, its tiers as bits), each one once. Set 0 is empty. A member is `worker << 8 | tiers`.

    A change of a set costs a look into `_moves` if the same was changed before, else a copy of its members. Sets that
    no block names any more are cleared away when they are half of all, so that a change costs little on average.
    """

    unions: cython.uchar[::1]  # by set: tiers of any member
    _members: list  # by set: bytes of u32, by worker; None: free
    _numbers: dict  # members → set
    _uses: cython.uint[::1]  # by set: blocks that name it
    _num_idle: cython.longlong  # sets without any
    _freed: list
    _move_keys: cython.ulonglong[::1]  # set << 32 | member
    _moved: cython.uint[::1]

    def __init__(self):
        self._members, self._numbers, self._freed = [b""], {b"": 0}, []
        self._uses = _view(np.zeros(FEWEST, np.uint32))
        self.unions = _view(np.zeros(FEWEST, np.uint8))
        self._num_idle = 0
        self._move_keys = _view(np.full(MOVES, U64, np.uint64))  # of a member that there is not
        self._moved = _view(np.zeros(MOVES, np.uint32))

    @cython.cfunc
    def members(self, number: cython.longlong) -> bytes:
        return self._members[number]

    @cython.cfunc
    @cython.locals(low=cython.Py_ssize_t, high=cython.Py_ssize_t, middle=cython.Py_ssize_t)
    def _place(self, members: bytes, worker: cython.longlong) -> cython.Py_ssize_t:
        """Where a worker is, or would be, among the members."""
        low, high = 0, len(members) // 4
        while low < high:
            middle = (low + high) >> 1
            if _at(members, middle) >> 8 < worker:
                low = middle + 1
            else:
                high = middle
        return low

    @cython.cfunc
    def tiers(self, number: cython.longlong, worker: cython.longlong) -> cython.longlong:
        """The tiers in which a worker holds the blocks of this set."""
        members: bytes = self._members[number]
        place: cython.Py_ssize_t = self._place(members, worker)
        if 4 * place == len(members) or _at(members, place) >> 8 != worker:
            return 0
        return _at(members, place) & TIER_BITS

    @cython.cfunc
    def move(self, number: cython.longlong, worker: cython.longlong, tiers: cython.longlong) -> cython.longlong:
        """A block goes from this set to the one where the worker has these tiers: returns that."""
        member: cython.longlong = worker << 8 | tiers
        key: cython.ulonglong = cython.cast(cython.ulonglong, number) << 32 | cython.cast(cython.ulonglong, member)
        place: cython.ulonglong = (key ^ key >> 29) % MOVES
        if self._move_keys[place] == key:
            target: cython.longlong = self._moved[place]
        else:
            target = self._changed(number, worker, tiers)
            self._move_keys[place], self._moved[place] = key, target
        if target == number:
            return target
        if number != 0:
            self._uses[number] -= 1
            self._num_idle += self._uses[number] == 0
        if target != 0:
            self._num_idle -= self._uses[target] == 0
            self._uses[target] += 1
        return target

    @cython.cfunc
    def _changed(self, number: cython.longlong, worker: cython.longlong, tiers: cython.longlong) -> cython.longlong:
        members: bytes = self._members[number]
        first: cython.Py_ssize_t = 4 * self._place(members, worker)
        last: cython.Py_ssize_t = first + 4 * (self.tiers(number, worker) != 0)
        member: cython.longlong = worker << 8 | tiers
        changed: bytes = members[:first] + (np.uint32(member).tobytes() if tiers else b"") + members[last:]
        found = self._numbers.get(changed)
        if found is not None:
            return found
        target: cython.longlong = self._freed.pop() if self._freed else len(self._members)
        if target == len(self._members):
            self._members.append(changed)
            if target == len(self._uses):
                self._uses = _grown(self._uses, 2 * target, np.uint32)
                self.unions = _grown(self.unions, 2 * target, np.uint8)
        self._members[target] = changed
        self._numbers[changed] = target
        self._uses[target] = 0
        self._num_idle += 1  # `move` takes it into use
        self.unions[target] = self._union(changed)
        return target

    @cython.cfunc
    @cython.locals(i=cython.Py_ssize_t, union=cython.longlong)
    def _union(self, members: bytes) -> cython.longlong:
        union = 0
        for i in range(len(members) // 4):
            union |= _at(members, i)
        return union & TIER_BITS

    @cython.cfunc
    def tidy(self):
        """Clear away what no block names, if it is much."""
        if self._num_idle <= IDLE_SETS or 2 * self._num_idle <= len(self._numbers):
            return
        number: cython.longlong
        for number in range(1, len(self._members)):
            if self._members[number] is not None and self._uses[number] == 0:
                del self._numbers[self._members[number]]
                self._members[number] = None
                self._freed.append(number)
        self._num_idle = 0
        np.asarray(self._move_keys)[:] = U64

    def check(self, uses: dict):
        """Assert that the sets are these: members as bytes → blocks that name them."""
        found = {each: self._uses[number] for each, number in self._numbers.items() if self._uses[number]}
        assert found == uses, "sets of holders, or how many blocks name them"
        assert len(self._numbers) - 1 - len(found) == self._num_idle, "unused sets"
        for members, number in self._numbers.items():
            workers = [each >> 8 for each in _members_of(members)]
            assert (self._members[number], workers) == (members, sorted(set(workers))), "members of a set"


@cython.cclass
class Holders:
    """Blocks by their sequence hashes, with who holds each in which tiers, and by which name.

    A worker is a number from `open` until its last name is released behind `shut`. It holds a block once for each name
    that it has for it, as after a restart: the block's set has all their tiers.
    """

    num_workers = cython.declare(cython.longlong, visibility="readonly")  # numbers that were ever given
    num_tiers = cython.declare(cython.int, visibility="readonly")
    _names: Keys
    _block: cython.uint[::1]  # by row of names
    _member: cython.uint[::1]  # worker << 8 | tiers
    _older: cython.uint[::1]  # 1 + row of the worker's name before and after it
    _newer: cython.uint[::1]
    _blocks: Keys
    _set: cython.uint[::1]  # by row of blocks
    _seed: cython.ulonglong[::1]  # of chains with a namespace; 0: none
    _has_seeds: cython.bint
    _sets: Sets
    _several: dict  # worker << 32 | row of a block that it has several names for → row of each → tiers
    _secret: cython.ulonglong[::1]  # by worker: its names are found under name ^ secret
    _oldest: cython.uint[::1]
    _newest: cython.uint[::1]
    _sizes: cython.longlong[::1]  # names
    _counts: cython.longlong[::1]  # names by tier, `WIDTH` for each worker
    _is_open: cython.uchar[::1]
    _unused: list  # workers
    _found: cython.uint[::1]  # by worker: leading blocks by the best tier, as `_lead` found them
    _alive: cython.uint[::1]  # members that hold all blocks so far
    _shared: cython.longlong[::1]  # leading blocks that any worker has in each tier

    def __init__(self, num_tiers: cython.int):
        if num_tiers < 1 or num_tiers > WIDTH:
            raise ValueError(f"{num_tiers} tiers: at most {WIDTH}")
        self.num_tiers = num_tiers
        self.num_workers = 0
        self._names, self._blocks, self._sets = Keys(), Keys(), Sets()
        self._block, self._member, self._older, self._newer, self._set = (
            _view(np.zeros(FEWEST, np.uint32)) for _ in range(5)
        )
        self._seed = _view(np.zeros(FEWEST, np.uint64))
        self._has_seeds = False
        self._several, self._unused = {}, []
        self._secret = _view(np.zeros(FEWEST, np.uint64))
        self._oldest, self._newest, self._alive = (_view(np.zeros(FEWEST, np.uint32)) for _ in range(3))
        self._sizes = _view(np.zeros(FEWEST, np.int64))
        self._counts = _view(np.zeros(FEWEST * WIDTH, np.int64))
        self._is_open = _view(np.zeros(FEWEST, np.uint8))
        self._found = _view(np.zeros(FEWEST * WIDTH, np.uint32))
        self._shared = _view(np.zeros(WIDTH, np.int64))

    # --- workers

    def open(self) -> int:
        """A new worker's number. ValueError if there are too many."""
        worker: cython.longlong
        if self._unused:
            worker = self._unused.pop()
        else:
            worker = self.num_workers
            if worker == MOST_WORKERS:
                raise ValueError(f"{worker} workers are followed")
            if worker == len(self._sizes):
                size: cython.longlong = 2 * worker
                self._secret = _grown(self._secret, size, np.uint64)
                self._oldest = _grown(self._oldest, size, np.uint32)
                self._newest = _grown(self._newest, size, np.uint32)
                self._alive = _grown(self._alive, size, np.uint32)
                self._sizes = _grown(self._sizes, size, np.int64)
                self._counts = _grown(self._counts, size * WIDTH, np.int64)
                self._is_open = _grown(self._is_open, size, np.uint8)
                self._found = _grown(self._found, size * WIDTH, np.uint32)
            self.num_workers += 1
            self._secret[worker] = int.from_bytes(os.urandom(8), "little")
        self._is_open[worker] = OPEN
        return worker

    def shut(self, worker: cython.longlong):
        """No prefix shows this worker from now on. Others get its number once `release` has come to its end."""
        if self._is_open[self._checked(worker)] == OPEN:
            self._is_open[worker] = SHUT

    @cython.cfunc
    @cython.inline
    @cython.exceptval(-1, check=False)
    def _checked(self, worker: cython.longlong) -> cython.longlong:
        if worker < 0 or worker >= self.num_workers:
            raise IndexError(f"worker {worker}: there are {self.num_workers}")
        return worker

    @cython.cfunc
    @cython.inline
    @cython.exceptval(-1, check=False)
    def _bit(self, tier: cython.longlong) -> cython.longlong:
        if tier < 0 or tier >= self.num_tiers:
            raise IndexError(f"tier {tier}: there are {self.num_tiers}")
        return cython.cast(cython.longlong, 1) << tier

    @property
    def num_names(self) -> int:
        """Of all workers."""
        return self._names.num_rows

    @property
    def num_blocks(self) -> int:
        """Different ones."""
        return self._blocks.num_rows

    def size(self, worker: cython.longlong) -> int:
        """The names it has."""
        return self._sizes[self._checked(worker)]

    def counts(self, worker: cython.longlong) -> list:
        """The same by tier."""
        first: cython.longlong = WIDTH * self._checked(worker)
        return [self._counts[first + tier] for tier in range(self.num_tiers)]

    # --- what events say

    def sequence_of(self, worker: cython.longlong, name):
        """(sequence hash, seed or 0) of the block that a worker has under this name; None if it has none."""
        row: cython.longlong = self._row(self._checked(worker), _u64(name))
        if row < 0:
            return None
        return self._blocks.keys[self._block[row]], self._seed[self._block[row]]

    @cython.locals(
        i=cython.Py_ssize_t,
        key=cython.ulonglong,
        sequence=cython.ulonglong,
        row=cython.longlong,
        block=cython.longlong,
        here=cython.longlong,
        bit=cython.longlong,
        number=cython.longlong,
    )
    def store(self, worker: cython.longlong, names, sequences: list, tier: cython.longlong, seed: cython.ulonglong):
        """A worker holds blocks in a tier: their names there, their sequence hashes, the seed of their chain or 0.

        Returns the places of names that were another block's, which the worker holds no more. ValueError if the columns
        differ in length; what is no name is a TypeError, and what comes before it is stored.
        """
        others: list = []
        bit = self._bit(tier)
        if len(names) != len(sequences):
            raise ValueError(f"{len(names)} names, {len(sequences)} sequence hashes")
        if self._is_open[self._checked(worker)] != OPEN:
            raise ValueError(f"worker {worker} is shut")
        for i in range(len(names)):
            key, sequence = _u64(names[i]), sequences[i]
            row = self._row(worker, key)
            if row >= 0 and self._blocks.keys[self._block[row]] != sequence:
                others.append(i)
                self._release(row, TIER_BITS)
                row = -1
            if row >= 0:
                block = self._block[row]
                if self._member[row] & bit == 0:
                    self._member[row] |= bit
                    self._counts[WIDTH * worker + tier] += 1
                    if self._several:
                        by_name = self._several.get(worker << 32 | block)
                        if by_name is not None:
                            by_name[row if row in by_name else FIRST_NAME] |= bit
                    here = self._sets.tiers(self._set[block], worker)
                    self._set[block] = self._sets.move(self._set[block], worker, here | bit)
            else:
                block, here = self._blocks.find(sequence), 0
                if block >= 0:
                    number = self._set[block]
                    here = self._sets.tiers(number, worker)
                else:
                    block, number = self._add_block(sequence), 0
                row = self._add_name(worker, key, block, bit)
                if here:  # under another name, too
                    self._several.setdefault(worker << 32 | block, {FIRST_NAME: here})[row] = bit
                self._counts[WIDTH * worker + tier] += 1
                self._set[block] = self._sets.move(number, worker, here | bit)
            if seed != 0:
                self._seed[block] = seed
                self._has_seeds = True
        self._sets.tidy()
        return others

    def remove(self, worker: cython.longlong, names, tier: cython.longlong) -> list:
        """A worker no longer holds blocks in a tier, by its names. Returns the places of names that were not there."""
        i: cython.Py_ssize_t
        unknown: list = []
        bit: cython.longlong = self._bit(tier)
        self._checked(worker)
        for i in range(len(names)):
            row: cython.longlong = self._row(worker, _u64(names[i]))
            if row >= 0 and self._member[row] & bit:
                self._release(row, bit)
            else:
                unknown.append(i)
        self._sets.tidy()
        return unknown

    def forget(self, worker: cython.longlong, most: cython.longlong) -> int:
        """Release a worker's oldest names, at most so many; returns how many."""
        self._checked(worker)
        done: cython.longlong = 0
        while done < most and self._oldest[worker] != 0:
            self._release(cython.cast(cython.longlong, self._oldest[worker]) - 1, TIER_BITS)
            done += 1
        self._sets.tidy()
        return done

    def release(self, worker: cython.longlong, tiers: cython.longlong, most: cython.longlong, after: cython.longlong):
        """Release what a worker holds in these tiers (bits), the newest first: looks at `most` names, and so returns.

        Returns where to go on (`after`), 0 at the end. Begin by -1. What else happens in between does no harm.
        """
        self._checked(worker)
        row: cython.longlong = after - 1
        if row < 0 or row >= len(self._member) or self._member[row] >> 8 != worker or self._member[row] == 0:
            row = cython.cast(cython.longlong, self._newest[worker]) - 1
        while row >= 0 and most > 0:
            older: cython.longlong = cython.cast(cython.longlong, self._older[row]) - 1
            if self._member[row] & tiers:
                self._release(row, tiers)
            row = older
            most -= 1
        self._sets.tidy()
        if self._is_open[worker] == SHUT and self._sizes[worker] == 0:
            self._is_open[worker] = 0
            self._unused.append(worker)
        return row + 1

    # --- rows

    @cython.cfunc
    @cython.inline
    @cython.exceptval(check=False)
    def _row(self, worker: cython.longlong, name: cython.ulonglong) -> cython.longlong:
        row: cython.longlong = self._names.find(name ^ self._secret[worker])
        return row if row >= 0 and self._member[row] >> 8 == worker else -1

    @cython.cfunc
    def _add_block(self, sequence: cython.ulonglong) -> cython.longlong:
        block: cython.longlong = self._blocks.add(sequence)
        if block >= len(self._set):
            self._set = _grown(self._set, self._blocks.room, np.uint32)
            before = self._seed if self._has_seeds else self._seed[:0]
            self._seed = _grown(before, self._blocks.room, np.uint64)
        self._set[block] = 0
        return block

    @cython.cfunc
    def _add_name(
        self, worker: cython.longlong, name: cython.ulonglong, block: cython.longlong, tiers: cython.longlong
    ) -> cython.longlong:
        key: cython.ulonglong = name ^ self._secret[worker]
        while self._names.find(key) >= 0:  # another worker's, by a chance of one in 2**64: that name is dropped
            self._release(self._names.find(key), TIER_BITS)
        row: cython.longlong = self._names.add(key)
        if row >= len(self._member):
            self._block = _grown(self._block, self._names.room, np.uint32)
            self._member = _grown(self._member, self._names.room, np.uint32)
            self._older = _grown(self._older, self._names.room, np.uint32)
            self._newer = _grown(self._newer, self._names.room, np.uint32)
        newest: cython.longlong = self._newest[worker]
        self._block[row], self._member[row] = block, worker << 8 | tiers
        self._older[row], self._newer[row] = newest, 0
        if newest:
            self._newer[newest - 1] = row + 1
        else:
            self._oldest[worker] = row + 1
        self._newest[worker] = row + 1
        self._sizes[worker] += 1
        return row

    @cython.cfunc
    def _release(self, row: cython.longlong, tiers: cython.longlong):
        """A worker holds a block no longer in these tiers under this name."""
        worker: cython.longlong = self._member[row] >> 8
        block: cython.longlong = self._block[row]
        left: cython.longlong = self._member[row] & TIER_BITS & ~tiers
        gone: cython.longlong = self._member[row] & tiers & TIER_BITS
        tier: cython.longlong = 0
        while gone:
            self._counts[WIDTH * worker + tier] -= gone & 1
            gone >>= 1
            tier += 1
        self._member[row] = worker << 8 | left
        held: cython.longlong = left
        if self._several:
            by_name = self._several.get(worker << 32 | block)
            if by_name is not None:
                name = row if row in by_name else FIRST_NAME
                by_name[name] = left
                if not left:
                    del by_name[name]
                    if len(by_name) == 1:
                        del self._several[worker << 32 | block]
                for each in by_name.values():
                    held |= each
        if left == 0:
            self._remove_name(row, worker)
        number: cython.longlong = self._sets.move(self._set[block], worker, held)
        self._set[block] = number
        if number == 0:
            if self._has_seeds:  # else nothing was ever written there
                self._seed[block] = 0
            self._blocks.remove(block)

    @cython.cfunc
    def _remove_name(self, row: cython.longlong, worker: cython.longlong):
        older: cython.longlong = self._older[row]
        newer: cython.longlong = self._newer[row]
        if older:
            self._newer[older - 1] = newer
        else:
            self._oldest[worker] = newer
        if newer:
            self._older[newer - 1] = older
        else:
            self._newest[worker] = older
        self._member[row] = 0
        self._sizes[worker] -= 1
        self._names.remove(row)

    # --- prefixes

    def leading(self, sequences: list) -> list:
        """(worker, its leading blocks by the best tier of each) for each open worker with the first block."""
        found: list = []
        first: cython.longlong = self._lead(sequences, 0)
        for member in _members_of(self._sets.members(first)):
            worker = member >> 8
            counts = [self._found[WIDTH * worker + tier] for tier in range(self.num_tiers)]
            if any(counts):
                found.append((worker, counts))
        self._clear(first)
        return found

    @cython.locals(
        i=cython.Py_ssize_t,
        tier=cython.longlong,
        own=cython.longlong,
        node=cython.longlong,
        known=cython.longlong,
        count=cython.longlong,
        total=cython.longlong,
        each=cython.longlong,
        teller=cython.longlong,
    )
    def prefixes(self, sequences: list, replicas, shared: cython.longlong):
        """Leading blocks of some replicas by tier: `[8 * replicas]` uint32.

        `replicas` is `[3 * replicas]` int64: the worker of its engine, of its node, and the one that says what a tier
        has which all share; -1: none that can be believed. A replica has the best of three: its own, its node's, and
        in `shared` tiers (bits) what any worker has, if its own publisher has blocks there at all. IndexError.
        """
        at: cython.longlong[::1] = _view(replicas)
        for i in range(len(at)):
            if at[i] != -1:
                self._checked(at[i])
        array = np.zeros(len(at) // 3 * WIDTH, np.uint32)
        out: cython.uint[::1] = _view(array)
        first: cython.longlong = self._lead(sequences, shared)
        for i in range(len(at) // 3):
            own, node, teller = at[3 * i], at[3 * i + 1], at[3 * i + 2]
            known = total = 0
            if own >= 0:
                for tier in range(self.num_tiers):
                    count = self._found[WIDTH * own + tier]
                    out[WIDTH * i + tier] = count
                    known += count
                total = known
            if node >= 0:
                for tier in range(self.num_tiers):
                    count = self._found[WIDTH * node + tier]
                    if count > known:
                        out[WIDTH * i + tier] += count - known
                        total += count - known
                    known = known - count if known > count else 0
            if shared != 0 and teller >= 0:
                for tier in range(self.num_tiers):
                    if shared >> tier & 1 and self._counts[WIDTH * teller + tier] != 0 and self._shared[tier] > total:
                        out[WIDTH * i + tier] += self._shared[tier] - total
                        total = self._shared[tier]
        self._clear(first)
        return array

    @cython.cfunc
    @cython.locals(i=cython.Py_ssize_t, tier=cython.longlong)
    def _lead(self, sequences: list, shared: cython.longlong) -> cython.longlong:
        """Fill `_found` and, for `shared` tiers, `_shared`; returns the set of the first block, for `_clear`."""
        first: cython.longlong = 0
        number: cython.longlong = 0
        run: cython.longlong = 0
        num_alive: cython.longlong = 0
        common: cython.longlong = shared
        block: cython.longlong
        for tier in range(WIDTH):
            self._shared[tier] = 0
        for i in range(len(sequences)):
            block = self._blocks.find(sequences[i])
            if block < 0:
                break
            if self._set[block] != number:
                self._add_run(num_alive, common, run)
                run, number = 0, self._set[block]
                if first == 0:
                    first = number
                    num_alive = self._begin(number)
                else:
                    num_alive = self._keep(number, num_alive)
                common &= self._sets.unions[number]
                if num_alive == 0 and common == 0:
                    break
            run += 1
        self._add_run(num_alive, common, run)
        return first

    @cython.cfunc
    @cython.exceptval(check=False)
    @cython.locals(i=cython.longlong, tier=cython.longlong)
    def _add_run(self, num_alive: cython.longlong, common: cython.longlong, run: cython.longlong) -> cython.void:
        for i in range(num_alive):
            self._found[WIDTH * (self._alive[i] >> 8) + (self._alive[i] & TIER_BITS)] += run
        for tier in range(WIDTH):
            if common >> tier & 1:
                self._shared[tier] += run

    @cython.cfunc
    @cython.locals(i=cython.Py_ssize_t, member=cython.longlong)
    def _begin(self, number: cython.longlong) -> cython.longlong:
        """All open workers of a set are alive, each with its best tier there; returns how many."""
        members: bytes = self._sets.members(number)
        num_alive: cython.longlong = 0
        for i in range(len(members) // 4):
            member = _at(members, i)
            if self._is_open[member >> 8] == OPEN:
                self._alive[num_alive] = member >> 8 << 8 | self._best(member)
                num_alive += 1
        return num_alive

    @cython.cfunc
    @cython.locals(i=cython.longlong, j=cython.Py_ssize_t, member=cython.longlong, worker=cython.longlong)
    def _keep(self, number: cython.longlong, num_alive: cython.longlong) -> cython.longlong:
        """Of those alive only the members of this set stay; returns how many."""
        members: bytes = self._sets.members(number)
        size: cython.Py_ssize_t = len(members) // 4
        kept: cython.longlong = 0
        j = 0
        for i in range(num_alive):
            worker = self._alive[i] >> 8
            if size > 16 * num_alive:
                member = worker << 8 | self._sets.tiers(number, worker)
            else:
                while j < size and _at(members, j) >> 8 < worker:
                    j += 1
                if j == size:
                    break
                member = _at(members, j)
            if member >> 8 == worker and member & TIER_BITS:
                self._alive[kept] = worker << 8 | self._best(member)
                kept += 1
        return kept

    @cython.cfunc
    @cython.inline
    @cython.exceptval(check=False)
    def _best(self, tiers: cython.longlong) -> cython.longlong:
        """The nearest of some tiers (bits)."""
        tier: cython.longlong = 0
        while tiers >> tier & 1 == 0:
            tier += 1
        return tier

    @cython.cfunc
    @cython.locals(i=cython.Py_ssize_t, place=cython.longlong)
    def _clear(self, first: cython.longlong):
        members: bytes = self._sets.members(first)
        for i in range(len(members) // 4):
            first = WIDTH * (_at(members, i) >> 8)
            for place in range(first, first + WIDTH):
                self._found[place] = 0

    # --- laws

    def blocks(self) -> dict:
        """Sequence hash → worker → tiers (bits)."""
        return {
            self._blocks.keys[block]: {m >> 8: m & TIER_BITS for m in _members_of(self._sets.members(self._set[block]))}
            for block in range(len(self._set))
            if self._set[block]
        }

    def check(self):
        """Assert that blocks, sets and counts are what the workers' names add up to, and that no row is lost."""
        held: dict = {}
        names: dict = {}
        num_names = 0
        for worker in range(self.num_workers):
            counts, size, row, older = [0] * WIDTH, 0, self._oldest[worker], 0
            while row:
                member, block = self._member[row - 1], self._block[row - 1]
                assert worker << 8 < member <= worker << 8 | TIER_BITS, "a name in its worker's order"
                assert self._older[row - 1] == older, "the order of names"
                assert self._row(worker, self._names.keys[row - 1] ^ self._secret[worker]) == row - 1, "a name is found"
                tiers = held.setdefault(self._blocks.keys[block], {})
                tiers[worker] = tiers.get(worker, 0) | member & TIER_BITS
                by_name = names.setdefault(worker << 32 | block, {})
                by_name[row - 1] = member & TIER_BITS
                for tier in range(WIDTH):
                    counts[tier] += member >> tier & 1
                older, row, size = row, self._newer[row - 1], size + 1
            assert self._newest[worker] == older, "the order's end"
            assert size == self._sizes[worker], "names of a worker"
            assert counts == [self._counts[WIDTH * worker + tier] for tier in range(WIDTH)], "names by tier"
            num_names += size
        assert num_names == self._names.num_rows, "names of all workers"
        several = {key: sorted(each.values()) for key, each in names.items() if len(each) > 1}
        assert several == {key: sorted(each.values()) for key, each in self._several.items()}, "names of one block"
        assert held == self.blocks(), "blocks are not what workers hold"
        assert len(held) == self._blocks.num_rows, "rows of blocks"
        uses: dict = {}
        for sequence in held:
            members = self._sets.members(self._set[self._blocks.find(sequence)])
            uses[members] = uses.get(members, 0) + 1
        self._sets.check(uses)
        assert all(self._set[i] or not self._seed[i] for i in range(len(self._set))), (
            "a seed of a block without holders"
        )
        assert not any(self._found), "counts of an earlier prefix"
