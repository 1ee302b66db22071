# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""The policy's rule over columns: which replica has the least work. One source: interpreted, or compiled.

Row i of every column is replica i. `proxy.choose` is its contract.
"""

import cython
import numpy as np

ALIVE = cython.declare(cython.int, 1)
SURE = cython.declare(cython.int, 2)
WIDTH = cython.declare(cython.int, 8)  # tiers in a row of prefixes
CLOSE = cython.declare(cython.double, 1e-6)  # blocks of work; sums in another order may differ by this much

# What `choose` returns besides a row: places in `proxy.REASONS`.
PREFIX = cython.declare(cython.int, 0)
NEARER = cython.declare(cython.int, 1)
LOAD = cython.declare(cython.int, 2)
EQUAL = cython.declare(cython.int, 3)
ONLY = cython.declare(cython.int, 4)
UNSURE = cython.declare(cython.int, 5)
FULL = cython.declare(cython.int, 6)
DEAD = cython.declare(cython.int, 7)


def _view(array):
    return array if cython.compiled else memoryview(array)


@cython.cclass
class Scores:
    """Some replicas: what each has to do, what it holds of a prompt, and so its work before the first token."""

    num_rows = cython.declare(cython.Py_ssize_t, visibility="readonly")
    _load: cython.double[::1]
    _limit: cython.double[::1]
    _num_requests: cython.longlong[::1]
    _flags: cython.uchar[::1]
    _cached: cython.longlong[::1]  # blocks of the prompt that are held
    _saved: cython.double[::1]  # blocks of work that this saves
    _work: cython.double[::1]  # NaN: it can take no request

    def __init__(self, num_rows: cython.Py_ssize_t):
        self.num_rows = num_rows
        self._load, self._limit, self._saved, self._work = (_view(np.zeros(num_rows)) for _ in range(4))
        self._num_requests, self._cached = (_view(np.zeros(num_rows, np.int64)) for _ in range(2))
        self._flags = _view(np.zeros(num_rows, np.uint8))

    def standing(
        self, row: cython.Py_ssize_t, load: cython.double, limit: cython.double, num_requests: cython.longlong
    ):
        """A replica's blocks of work, the limit of these, and its requests, from now on. IndexError."""
        if row < 0 or row >= self.num_rows:
            raise IndexError(f"row {row} of {self.num_rows}")
        self._load[row], self._limit[row], self._num_requests[row] = load, limit, num_requests

    @cython.locals(i=cython.Py_ssize_t, tier=cython.int, cached=cython.longlong, saved=cython.double)
    def hold(self, flags, counts, rows, weights):
        """What each holds of the next prompt, and whether it is alive (1) and sure (2).

        `flags` is `[num_rows]` uint8. `counts` is `[8 * n]` uint32, blocks by tier; `rows` is `[num_rows]` int64, a
        replica's row there, -1 if it holds nothing. `weights` is `[8]` float64, what a block in each tier saves.
        ValueError for other lengths, and for a row that there is not.
        """
        if len(flags) != self.num_rows or len(rows) != self.num_rows or len(weights) != WIDTH or len(counts) % WIDTH:
            raise ValueError(
                f"{len(flags)} flags, {len(rows)} rows, {len(weights)} weights for {self.num_rows} replicas"
            )
        of: cython.longlong[::1] = _view(rows)
        blocks: cython.uint[::1] = _view(counts)
        num_counted: cython.Py_ssize_t = len(blocks) // WIDTH
        each: cython.double[::1] = _view(weights)
        given: cython.uchar[::1] = _view(flags)
        for i in range(self.num_rows):
            self._flags[i] = given[i]
            cached, saved = 0, 0.0
            if of[i] >= num_counted:
                raise ValueError(f"row {of[i]} of {num_counted}")
            if of[i] >= 0 and self._flags[i] & SURE:
                for tier in range(WIDTH):
                    count: cython.uint = blocks[WIDTH * of[i] + tier]
                    if count != 0:
                        cached += count
                        saved += each[tier] * count
            self._cached[i], self._saved[i] = cached, saved

    def credit(self, row: cython.Py_ssize_t, flags: cython.int, cached: cython.longlong, saved: cython.double):
        """The same for one replica, of any media. IndexError."""
        if row < 0 or row >= self.num_rows:
            raise IndexError(f"row {row} of {self.num_rows}")
        self._flags[row], self._cached[row], self._saved[row] = flags, cached, saved

    @cython.locals(
        i=cython.Py_ssize_t,
        row=cython.Py_ssize_t,
        num_able=cython.longlong,
        num_best=cython.longlong,
        fewest=cython.longlong,
        is_alive=cython.bint,
        is_sure=cython.bint,
        can_take=cython.bint,
        is_matched=cython.bint,
        has_most=cython.bint,
        crowds=cython.double,
        least=cython.double,
    )
    def choose(
        self,
        num_blocks: cython.longlong,
        load_weight: cython.double,
        crowd: cython.double,
        turn: cython.longlong,
    ):
        """(row, reason): the replica with the least work; row -1 if none can take a request.

        ValueError for a crowd or turn that there cannot be, and for work that is no number. It looks at each row three
        times, some nanoseconds each: less than to keep replicas ordered by load.
        """
        if turn < 0 or not crowd > 0:
            raise ValueError(f"turn {turn}, crowd {crowd:g}: from 0, and above 0")
        num_able = fewest = 0
        row = -1
        is_alive = is_sure = False
        for i in range(self.num_rows):
            is_alive |= self._flags[i] & ALIVE
            can_take = self._flags[i] & ALIVE and self._load[i] < self._limit[i]
            if can_take:
                if num_able == 0 or self._num_requests[i] < fewest:
                    fewest = self._num_requests[i]
                if num_able == 0:
                    row = i
                num_able += 1
                is_sure |= self._flags[i] & SURE != 0
        least = float("inf")
        for i in range(self.num_rows):
            can_take = self._flags[i] & ALIVE and self._load[i] < self._limit[i]
            if can_take:
                crowds = (self._num_requests[i] - fewest) / crowd - 1
                if crowds < 0:
                    crowds = 0
                self._work[i] = self._load[i] * load_weight + num_blocks * (1 + crowds) - self._saved[i]
                if self._work[i] < least:
                    least = self._work[i]
            else:
                self._work[i] = float("nan")
        if num_able == 0:
            return -1, FULL if is_alive else DEAD
        if num_able == 1:
            return row, ONLY
        if not is_sure:
            return self._nth(turn % num_able, float("inf")), UNSURE
        num_best = 0
        for i in range(self.num_rows):
            if self._work[i] <= least + CLOSE:  # NaN is not
                num_best += 1
        if num_best == 0:
            raise ValueError("the work of no replica is a number")
        row = self._nth(turn % num_best, least + CLOSE)
        if num_best > 1:
            return row, EQUAL
        is_matched, has_most = False, True
        for i in range(self.num_rows):
            if i != row and self._work[i] == self._work[i]:
                is_matched |= self._saved[i] > self._saved[row] - CLOSE
                has_most &= self._cached[i] < self._cached[row]
        return row, LOAD if is_matched else PREFIX if has_most else NEARER

    @cython.cfunc
    @cython.locals(i=cython.Py_ssize_t)
    def _nth(self, number: cython.longlong, most: cython.double) -> cython.Py_ssize_t:
        """The row of the replica of this number among those that can take a request and have at most so much work."""
        for i in range(self.num_rows):
            if self._work[i] <= most:
                if number == 0:
                    return i
                number -= 1
        return -1

    def cached(self, row: cython.Py_ssize_t) -> int:
        """Blocks of the prompt that a replica holds, as far as it is sure; 0 for row -1. IndexError."""
        if row < -1 or row >= self.num_rows:
            raise IndexError(f"row {row} of {self.num_rows}")
        return self._cached[row] if row >= 0 else 0

    def columns(self):
        """Copies of cached, load and work of all, as `choose` left them."""
        return np.array(self._cached), np.array(self._load), np.array(self._work)
