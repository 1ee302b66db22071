# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""What the last requests were, and what LRU would have found for them. One source: interpreted, or compiled.

A tag is a name's mixed word (`NAME_MIX`). Two names of one tag would be taken for one conversation: it costs a wrong
guess about a return. Arrays alone, of bounded size; nothing here takes a lock.
"""

from collections import OrderedDict
from math import sqrt

import cython
import numpy as np

NUM_REQUESTS = cython.declare(cython.longlong, 65536)  # in the ring
MATCH_NAMES = cython.declare(cython.longlong, 2)  # of a request: if its last block was edited, the one before matches
NUM_PLACES = cython.declare(cython.longlong, 4 * 65536)  # of the table; two tags with one place replace each other
SHARED = cython.declare(cython.int, 3)  # continued so often, a request is a shared beginning and no conversation

MOST_SAMPLED = cython.declare(cython.longlong, 512)  # slots that stand for all; from twice as many on, it samples
TOLERANCE = cython.declare(cython.double, 0.001)  # of a window's blocks: so far behind LRU, besides chance, is a loss
TURNS = cython.declare(cython.longlong, 8)  # a window: lookups of so many times the slots, in which counts fade to a
LEAST = cython.declare(cython.longlong, 16384)  # third, or of at least so many blocks
SHORTEST = cython.declare(cython.double, 2.0)  # LRU's first stay, in windows: each in a row is twice the one before,
LONGEST = cython.declare(cython.double, 16.0)  # up to so many


def _view(array):
    """An array as it is read and written item by item."""
    return array if cython.compiled else memoryview(array)


@cython.cclass
class RecentRequests:
    """A ring of requests, and a table from the tags of their prompts' last full blocks to them: 7 MiB."""

    ended_at = cython.declare(object, visibility="readonly")  # by row: seconds
    kind = cython.declare(object, visibility="readonly")
    account = cython.declare(object, visibility="readonly")  # the promise's account, from 1; 0: no promise
    is_open = cython.declare(object, visibility="readonly")  # it may still return
    head_kind = cython.declare(object, visibility="readonly")
    is_head_open = cython.declare(object, visibility="readonly")
    _end: cython.double[::1]
    _kind: cython.short[::1]
    _account: cython.short[::1]
    _open: cython.uchar[::1]
    _turn: cython.int[::1]
    _length: cython.int[::1]  # of its prompt, in blocks
    _num_head: cython.int[::1]  # leading blocks that others share
    _num_sharing: cython.int[::1]  # requests that shared them by then
    _head_kind: cython.short[::1]
    _head_open: cython.uchar[::1]
    _use: cython.uchar[::1]
    _last: cython.ulonglong[::1]
    _number_of: cython.longlong[::1]  # of the request in each row of the ring
    _tag: cython.ulonglong[::1]  # by place
    _heads: cython.uchar[::1]  # the tag is that of a shared beginning's last block
    _own: cython.int[::1]
    _serial: cython.longlong[::1]  # of the request that wrote the place
    _next: cython.longlong

    def __init__(self):
        size, places = NUM_REQUESTS, NUM_PLACES
        self.ended_at, self.kind, self.account = np.zeros(size), np.zeros(size, np.int16), np.zeros(size, np.int16)
        self.is_open, self.is_head_open = np.zeros(size, np.bool_), np.zeros(size, np.bool_)
        self.head_kind = np.zeros(size, np.int16)
        self._end, self._kind, self._account = _view(self.ended_at), _view(self.kind), _view(self.account)
        self._open, self._head_open = _view(self.is_open.view(np.uint8)), _view(self.is_head_open.view(np.uint8))
        self._turn, self._length = _view(np.zeros(size, np.int32)), _view(np.zeros(size, np.int32))
        self._num_head, self._num_sharing = _view(np.zeros(size, np.int32)), _view(np.zeros(size, np.int32))
        self._head_kind, self._use = _view(self.head_kind), _view(np.zeros(size, np.uint8))
        self._last, self._number_of = _view(np.zeros(size, np.uint64)), _view(np.zeros(size, np.int64))
        self._tag, self._heads = _view(np.zeros(places, np.uint64)), _view(np.zeros(places, np.uint8))
        self._own, self._serial = _view(np.full(places, -1, np.int32)), _view(np.zeros(places, np.int64))
        self._next = 1

    @cython.locals(
        tags=cython.ulonglong[::1], arrived=cython.double, at=cython.longlong, num_common=cython.longlong,
        place=cython.longlong, row=cython.longlong, found=cython.longlong, turn=cython.longlong, gap=cython.double,
    )  # fmt: skip
    def recognise(self, tags, num_prompt: cython.longlong, arrived):
        """The request that a prompt continues, by the tags of its blocks in chain order: (turn, gap, head, return).

        `turn`: the prompt's, 0 if it continues none. `gap`: seconds since the turn before, negative if that was under
        way when the prompt `arrived`. `head`: leading blocks that others share; 0 if none are known. `return`: class,
        end and account of the request before, if it returns for the first time, else None. Three prompts that continue
        one request make it a shared beginning.
        """
        if not cython.compiled:
            tags = memoryview(tags)
        num_prompt = min(num_prompt, len(tags))
        num_common, found, turn, gap, back = 0, -1, 0, 0.0, None
        for at in range(num_prompt - 1, -1, -1):
            place = tags[at] & (NUM_PLACES - 1)
            if self._tag[place] != tags[at]:
                continue
            row = self._own[place]
            if row < 0 or self._number_of[row] != self._serial[place]:
                continue
            num_common = num_common or at + 1
            if self._heads[place]:
                break
            if self._use[row] < SHARED:
                found = row
                break
        if found < 0:
            return turn, gap, num_common, back
        gap = arrived - self._end[found]
        turn = self._turn[found]
        if gap >= 0:
            self._use[found] += 1
            turn += 1
            if self._open[found]:
                self._open[found] = False
                back = self._kind[found], self._end[found], self._account[found]
        elif self._last[found] == tags[num_prompt - 1]:
            self._open[found] = False  # it runs beside this one and ends with the same block: it does not return
        if num_common >= self._length[found]:  # else what it continues is not all in it
            num_common = self._num_head[found]
        return turn, gap, num_common, back

    @cython.locals(tag=cython.ulonglong, place=cython.longlong, row=cython.longlong)
    def head_of(self, tag):
        """(class, end, sharing requests) of the last request whose head ends with this tag; None if none is known.

        Its head counts as used again; the class is 0 if it was before.
        """
        place = tag & (NUM_PLACES - 1)
        row = self._own[place]
        if row < 0 or self._tag[place] != tag or self._number_of[row] != self._serial[place]:
            return None
        if not self._heads[place]:
            return 0, self._end[row], self._use[row]
        kind = self._head_kind[row] if self._head_open[row] else 0
        self._head_open[row] = False
        return kind, self._end[row], self._num_sharing[row]

    @cython.locals(
        tags=cython.ulonglong[::1], num_prompt=cython.longlong, last=cython.longlong, row=cython.longlong,
        at=cython.longlong, place=cython.longlong, owner=cython.longlong, is_known=cython.bint, length=cython.longlong,
    )  # fmt: skip
    def add(self, tags, num_prompt, now: cython.double, kind: cython.int, turn: cython.int, account: cython.int):
        """A request has ended. The next turn continues behind its prompt's last blocks, or its answer's if it has none.

        `turn`: from 0. `account`: that of its promise, from 1, or 0.
        """
        if not cython.compiled:
            tags = memoryview(tags)
        num_prompt = min(max(0, num_prompt), len(tags))
        last = num_prompt if num_prompt else len(tags)
        if last == 0:
            return
        row = self._next % NUM_REQUESTS
        self._end[row], self._kind[row], self._turn[row], self._account[row] = now, kind, turn, account
        self._open[row], self._use[row], self._number_of[row] = True, 0, self._next
        self._last[row] = tags[last - 1]
        for at in range(max(0, last - MATCH_NAMES), last):
            place = tags[at] & (NUM_PLACES - 1)
            owner = self._own[place]
            is_known = owner >= 0 and self._tag[place] == tags[at] and self._number_of[owner] == self._serial[place]
            if not is_known or self._use[owner] < SHARED:
                self._put(place, tags[at], row, False)
        self._length[row], self._num_head[row], self._head_open[row] = num_prompt, 0, False
        self._next += 1

    @cython.locals(tag=cython.ulonglong, row=cython.longlong)
    def add_head(self, tag, num_blocks: cython.longlong, num_sharing: cython.longlong, kind: cython.int):
        """The request added last begins with so many shared blocks, of which the last has this tag."""
        row = (self._next - 1) % NUM_REQUESTS
        self._num_head[row], self._num_sharing[row], self._head_kind[row] = num_blocks, num_sharing, kind
        self._head_open[row] = True
        self._put(tag & (NUM_PLACES - 1), tag, row, True)

    @cython.cfunc
    @cython.inline
    def _put(
        self, place: cython.longlong, tag: cython.ulonglong, row: cython.longlong, is_head: cython.bint
    ) -> cython.void:
        self._tag[place], self._own[place], self._serial[place] = tag, row, self._number_of[row]
        self._heads[place] = is_head

    def waiting(self):
        """The rows of requests that may still return."""
        return np.flatnonzero(self.is_open[: min(self._next, NUM_REQUESTS)])

    def waiting_heads(self):
        """The rows of requests whose shared beginnings no other has used since."""
        return np.flatnonzero(self.is_head_open[: min(self._next, NUM_REQUESTS)])


@cython.cclass
class LruShadow:
    """LRU's hits beside our own; `leads` while the order should be LRU's, since the learned one does worse.

    LRU is run over one block in `every`. Of each stretch of so many blocks of a chain one is chosen, by the tag of the
    stretch's first block: equal beginnings have the same chosen blocks.

    Requests differ, so the lead over LRU also varies by chance: after n of them by the root of n times what one
    differs. So the learned order has lost only if it is further behind than that, and by a small share of what was
    looked up.
    """

    leads = cython.declare(cython.bint, visibility="public")
    num_takeovers = cython.declare(cython.longlong, visibility="readonly")
    lead = cython.declare(cython.longlong, visibility="readonly")  # of the last request: its hits less LRU's
    _every: cython.longlong
    _room: cython.longlong
    _used: object  # tags of the blocks that LRU holds, the last used last
    _window: cython.double  # blocks looked up
    _lookups: cython.double  # blocks, fading
    _ahead: cython.double  # own hits less LRU's, fading
    _spread: cython.double  # the sum of its squares by request, fading
    _stay: cython.double  # blocks until the learned order is tried again
    _longer: cython.double  # windows that the next stay takes

    def __init__(self, num_slots: cython.longlong, first_stay: cython.double = 0.0):
        """`first_stay`: blocks looked up before the learned order is tried at all."""
        self._every = max(1, num_slots // MOST_SAMPLED)
        self._room = max(1, round(num_slots / self._every))
        self._used = OrderedDict()
        self._window = max(TURNS * num_slots, LEAST)
        self.leads = first_stay > 0
        self.num_takeovers = self.lead = 0
        self._lookups = self._ahead = self._spread = 0.0
        self._stay, self._longer = first_stay, SHORTEST

    @cython.locals(tags=cython.ulonglong[::1], every=cython.longlong, at=cython.longlong, chosen=cython.longlong)
    def sampled(self, tags):
        """Which blocks of a chain stand for all, in order, and their tags. `tags`: of its names."""
        if not cython.compiled:
            tags = memoryview(tags)
        every = self._every
        if every == 1:
            return range(len(tags)), [tags[at] for at in range(len(tags))]
        places, found = [], []
        for at in range(0, len(tags), every):
            chosen = at + ((tags[at] >> 32) * every >> 32)  # the upper half of a tag is the better mixed
            if chosen < len(tags):
                places.append(chosen)
                found.append(tags[chosen])
        return places, found

    def ended(self, tags: list, num_looked_up: cython.longlong, own: cython.longlong):
        """A request with these sampled blocks has ended: `num_looked_up` of its prompt, the first `own` are hits."""
        used = self._used
        found: cython.longlong = 0  # LRU loses a chain's end first: behind these it has none
        while found < len(tags) and tags[found] in used:
            found += 1
        for tag in reversed(tags[found:]):
            used[tag] = None
        for tag in reversed(tags[:found]):
            used.move_to_end(tag)
        while len(used) > self._room:
            used.popitem(last=False)
        self.lead = (own - min(found, num_looked_up)) * self._every
        self._judge(num_looked_up * self._every)

    def forget(self):
        """No block is there any more."""
        self._used.clear()

    @cython.cfunc
    def _judge(self, num_prompt: cython.longlong) -> cython.void:
        kept: cython.double
        most: cython.double
        if self.leads:
            self._stay -= num_prompt
            if self._stay <= 0:
                self.leads, self._lookups, self._ahead = False, 0.0, 0.0
            return
        kept = 1.0 - min(0.5, num_prompt / self._window)
        self._lookups = kept * self._lookups + num_prompt
        self._spread = kept * self._spread + self.lead * self.lead
        # Old hits are no reason to lose now: they count for as much as may be lost.
        most = TOLERANCE * self._window + sqrt(self._spread)
        self._ahead = min(kept * self._ahead + self.lead, most)
        if self._ahead < -most:
            self.leads = True
            self.num_takeovers += 1
            self._stay = self._longer * self._window
            self._longer = min(2.0 * self._longer, LONGEST)
        elif self._lookups > 0.8 * self._window and self._ahead > 0:
            self._longer = SHORTEST
