# cython: language_level=3, boundscheck=True, wraparound=False, cdivision=True, initializedcheck=False, auto_pickle=False
"""CompiledSlots: what FewSlots does, compiled: the same verbs over the same arrays with the same outcome, for any batch.

It takes no lock, and keeps the GIL. What is rare is left to the table, as FewSlots leaves it. Slots and entries are
read from the arrays it was made with; those that callers name are checked against their length.
"""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcmp, memcpy

from collections import Counter

import numpy as np

cdef extern from *:
    void prefetch "__builtin_prefetch" (const void *address) nogil

cdef enum:
    FREE = 0
    FILLING = 1
    READY = 2
    WAYS = 4
    CHUNK = 32  # names whose memory is asked for before the first of them is looked at
    HASH_BYTES = 32
    HOT = 2  # S3-FIFO, as policy.py has them
    MAX_USES = 3
    NO_TICKET = -1
    NOBODY = -1  # of the tails, as tails.py has them
    TAIL_NAMES = 2
    SHARED = 3
    NEAR = 64  # blocks: up to here their arrays lie on the stack

cdef uint64_t MIX_FIRST = 0x9E3779B97F4A7C15
cdef uint64_t MIX_LAST = 0x27D4EB2F165667C5
cdef uint64_t LOW = 0xFFFFFFFF


cdef class Scratch:
    """Arrays of a call: slots, and the mixed words of names."""

    cdef int64_t *slots
    cdef uint64_t *mixed
    cdef void *taken
    cdef int64_t near_slots[NEAR]
    cdef uint64_t near_mixed[NEAR]

    def __cinit__(self):
        self.taken = NULL

    cdef int fit(self, Py_ssize_t count) except -1:
        if count <= NEAR:
            self.slots, self.mixed = self.near_slots, self.near_mixed
            return 0
        self.taken = malloc(2 * count * sizeof(int64_t))
        if self.taken == NULL:
            raise MemoryError
        self.slots = <int64_t *> self.taken
        self.mixed = <uint64_t *> (self.slots + count)
        return 0

    def __dealloc__(self):
        free(self.taken)


cdef class Queue:
    """The memory of a SlotQueue; where it begins and ends is the Python object's."""

    cdef object owner
    cdef int32_t[::1] ring
    cdef int64_t[::1] tickets
    cdef int64_t capacity, mask, head, tail

    def __cinit__(self, owner):
        self.owner = owner
        self.ring, self.tickets = owner._ring, owner._tickets
        self.capacity = owner._capacity
        self.mask = self.capacity - 1

    cdef int read(self) except -1:
        """Where it begins and ends now."""
        self.head, self.tail = self.owner._head, self.owner._tail
        return 0

    cdef int write(self) except -1:
        self.owner._head, self.owner._tail = self.head, self.tail
        return 0

    cdef int room_for(self, Py_ssize_t count) except -1:
        """Make sure that so many can be appended."""
        if self.tail - self.head + count > self.capacity:
            self.write()
            self.owner._compact()
            self.read()
        return 0

    cdef inline int append(self, int64_t slot) except -1:
        self.ring[self.tail & self.mask] = <int32_t> slot
        self.tickets[slot] = self.tail
        self.tail += 1
        return 0

    cdef inline int64_t take(self) except -2:
        """The first slot, -1 if there is none."""
        cdef int64_t slot
        while self.head < self.tail:
            slot = self.ring[self.head & self.mask]
            if self.tickets[slot] == self.head:
                self.tickets[slot] = -1
                self.head += 1
                return slot
            self.head += 1
        return -1


cdef class CompiledSlots:
    """The verbs of a `SlotTable`, as `FewSlots` has them, of LRU, of a policy that plans over LRU's queue, or of S3-FIFO.

    Batches of up to `listed` blocks are answered with lists, larger ones with numpy's arrays.
    """

    cdef object table, index, links, idle, policy
    cdef dict stash
    cdef uint8_t[::1] state, parked
    cdef int32_t[::1] refs, free_slots, where, num_stashed, children, parent
    cdef int64_t[::1] generation, parent_generation
    cdef uint64_t[::1] entries
    cdef uint64_t[:, ::1] names
    cdef uint64_t num_buckets
    cdef int64_t rows, nobody
    cdef Py_ssize_t listed
    cdef bint is_lru, is_planned
    cdef Queue queue, main  # LRU's, or S3-FIFO's small one
    cdef uint8_t[::1] uses, in_use, in_main
    cdef object ghosts
    cdef uint64_t[::1] ghost_tags
    cdef int64_t[::1] ghost_times
    cdef int64_t small_target, num_small
    cdef object departures  # None: nobody remembers what leaves
    cdef uint64_t[::1] gone
    cdef uint32_t[::1] came_at
    cdef int64_t[::1] ages
    cdef uint64_t evicted_code
    cdef int64_t[::1] owners  # of the policy that plans, as all that follows
    cdef object plan
    cdef const int64_t[::1] plan_slots, plan_tickets, plan_owners
    cdef const uint64_t[::1] tail_tags
    cdef const int32_t[::1] tail_rows
    cdef const int64_t[::1] tail_serials, tail_numbers
    cdef const double[::1] tail_ends
    cdef uint8_t[::1] tail_uses

    def __cinit__(self, table, is_lru, is_planned, listed):
        index, links = table.index, table.links
        self.table, self.index, self.links, self.idle, self.policy = table, index, links, table.idle, table.policy
        self.stash = index._stash
        self.state, self.refs, self.generation = table.state, table.refs, table.generation
        self.free_slots = table.free_slots
        self.entries, self.names, self.where = index._entries, index._names, index._where
        self.num_stashed, self.num_buckets = index._num_stashed, index._num_buckets
        self.children, self.parent, self.parent_generation = links.children, links.parent, links._parent_generation
        self.parked = table.idle._parked.view(np.uint8)
        self.rows, self.nobody = len(table.state), links.nobody
        self.is_lru, self.is_planned, self.listed = is_lru, is_planned, listed
        policy = table.policy
        if is_lru:
            self.queue = Queue(policy)
            if is_planned:
                tails = policy.returns.tails
                self.owners = policy.owners
                self.tail_tags, self.tail_rows, self.tail_serials = tails._tags, tails._owner, tails._serial
                self.tail_numbers, self.tail_ends, self.tail_uses = tails._number, tails.ended_at, tails._uses
            return
        self.queue, self.main = Queue(policy._small), Queue(policy._main)
        self.uses = policy._uses
        self.in_use, self.in_main = policy._in_use.view(np.uint8), policy._in_main.view(np.uint8)
        self.ghosts, self.ghost_tags, self.ghost_times = policy._ghosts, policy._ghosts._tags, policy._ghosts._times
        self.small_target = policy._small_target

    def remember(self, departures, code):
        """Tell `departures` what comes and leaves from now on; `code` is the cause in its entries."""
        self.departures = departures
        self.gone, self.came_at, self.ages = departures.entries, departures.came_at, departures.ages
        self.evicted_code = code

    # --- names --------------------------------------------------------------------------------------------------

    def find(self, hashes):
        """The ready slot of each block, -1 where there is none."""
        cdef list names = hashes if type(hashes) is list else list(hashes)
        cdef Py_ssize_t count = len(names), i
        cdef Scratch scratch = Scratch()
        scratch.fit(count)
        self.locate(names, 0, count, scratch.slots, scratch.mixed)
        for i in range(count):
            if scratch.slots[i] >= 0 and self.state[scratch.slots[i]] != READY:
                scratch.slots[i] = -1
        return self.answer(scratch.slots, count, count)

    def blocks_of(self, hashes, Py_ssize_t num_prompt, double arrived):
        """As `TailIndex.blocks_of`, by name: a plain tuple of the same."""
        cdef list names = hashes if type(hashes) is list else list(hashes)
        cdef Py_ssize_t count = len(names), num_asked = min(num_prompt, count), num_common = 0, i
        cdef int64_t *slots
        cdef int64_t row = NOBODY, user = 0, ticket, first = NO_TICKET, last = NO_TICKET, own = 0
        cdef bint is_row = count > 0
        cdef Scratch scratch = Scratch()
        scratch.fit(count)
        slots = scratch.slots
        self.locate(names, 0, count, slots, scratch.mixed)
        num_common = self.find_tail(scratch.mixed, num_asked, arrived, &row, &user)
        for i in range(count):
            if slots[i] < 0:
                is_row = False
                continue
            if i < (num_common if user else num_asked):
                own += self.owners[slots[i]] != 0
            ticket = self.queue.tickets[slots[i]]
            if first == NO_TICKET or ticket < first:
                first = ticket
                is_row &= ticket != NO_TICKET
            if ticket > last:
                last = ticket
        is_row &= last - first == count - 1
        i = num_asked if num_prompt else count
        last_tags = [scratch.mixed[i] for i in range(max(<Py_ssize_t> 0, i - TAIL_NAMES), i)]
        found = (row, user, num_common)
        return as_array(slots, count), first if is_row else NO_TICKET, found, own, num_asked, last_tags

    cdef Py_ssize_t find_tail(
        self, const uint64_t *tags, Py_ssize_t count, double arrived, int64_t *continued, int64_t *user
    ) except -1:
        """`RequestTails.find`: the row of the request continued, the user's number, and how many blocks in common."""
        cdef Py_ssize_t i = count, num_common = 0
        cdef uint64_t mask = self.tail_tags.shape[0] - 1, place
        cdef int64_t row, serial
        while i:
            i -= 1
            place = tags[i] & mask
            if self.tail_tags[place] != tags[i]:
                continue
            row, serial = self.tail_rows[place], self.tail_serials[place]
            if row < 0 or self.tail_numbers[row] != serial:
                continue
            if not user[0]:
                user[0], num_common = serial, i + 1
            if self.tail_uses[row] < SHARED:
                self.tail_uses[row] += self.tail_ends[row] <= arrived
                continued[0] = row
                break
        return num_common

    def find_run(self, hashes):
        """The slots of the leading ready blocks."""
        cdef list names = hashes if type(hashes) is list else list(hashes)
        cdef Scratch scratch = Scratch()
        scratch.fit(len(names))
        return self.answer(scratch.slots, self.run(names, scratch), len(names))

    def lease(self, hashes):
        """One more reference to each of the leading ready blocks. Returns their slots and generations."""
        cdef list names = hashes if type(hashes) is list else list(hashes)
        cdef Scratch scratch = Scratch()
        scratch.fit(len(names))
        cdef Py_ssize_t count = self.run(names, scratch)
        self.ref(scratch.slots, count)
        return self.answer(scratch.slots, count, len(names)), self.times(scratch.slots, count, len(names))

    def lease_at(self, slots, generations):
        """As `lease`, of blocks that were ready in these slots at these generations; up to the first that has left."""
        cdef const int64_t[:] at = slots, times = generations
        cdef Py_ssize_t total = at.shape[0], count = 0
        cdef Scratch scratch = Scratch()
        if times.shape[0] != total:
            raise ValueError(f"lease_at: {total} slots and {times.shape[0]} generations")
        scratch.fit(total)
        while count < total:
            self.own(at[count])
            if self.state[at[count]] != READY or self.generation[at[count]] != times[count]:
                break
            scratch.slots[count] = at[count]
            count += 1
        self.ref(scratch.slots, count)
        if count == total:
            return slots, generations
        return slots[:count], generations[:count]

    cdef int locate(self, list names, Py_ssize_t first, Py_ssize_t end, int64_t *slots, uint64_t *mixed) except -1:
        """The slot and the mixed word of names `first` … `end` - 1, at most a chunk at a time; -1 for no slot."""
        cdef uint64_t place, entry, tag
        cdef uint64_t ends[2]
        cdef const char *texts[CHUNK]
        cdef Py_ssize_t start, i, n, way
        cdef int64_t slot
        start = first
        while start < end:
            n = min(<Py_ssize_t> CHUNK, end - start)
            for i in range(n):
                texts[i] = text_of(names[start + i])
                memcpy(&ends[0], texts[i], 8)
                memcpy(&ends[1], texts[i] + 24, 8)
                mixed[start + i] = ends[0] * MIX_FIRST + ends[1] * MIX_LAST
                if n > 1:
                    prefetch(&self.entries[self.place_of(mixed[start + i])])
            if n > 1:
                for i in range(n):  # the name of the likely slot
                    place, tag = self.place_of(mixed[start + i]), mixed[start + i] & LOW
                    for way in range(WAYS):
                        entry = self.entries[place + way]
                        if entry >> 32 == tag and entry & LOW:
                            prefetch(&self.names[(entry & LOW) - 1, 0])
                            break
            for i in range(n):
                place, tag = self.place_of(mixed[start + i]), mixed[start + i] & LOW
                slot = -1
                for way in range(WAYS):
                    entry = self.entries[place + way]
                    if entry >> 32 == tag and entry & LOW:
                        if memcmp(&self.names[(entry & LOW) - 1, 0], texts[i], HASH_BYTES) == 0:
                            slot = (entry & LOW) - 1
                            break
                if slot < 0 and self.stash:
                    slot = self.stash.get(names[start + i], -1)
                slots[start + i] = slot
            start += n
        return 0

    cdef Py_ssize_t run(self, list names, Scratch scratch) except -1:
        """How many leading blocks are ready; their slots are in `scratch`."""
        cdef Py_ssize_t count = len(names), i = 0, end
        while i < count:
            end = min(i + CHUNK, count)
            self.locate(names, i, end, scratch.slots, scratch.mixed)
            while i < end:
                if scratch.slots[i] < 0 or self.state[scratch.slots[i]] != READY:
                    return i
                i += 1
        return count

    cdef inline uint64_t place_of(self, uint64_t mixed):
        """The first entry of a bucket."""
        return (((mixed >> 32) * self.num_buckets) >> 32) * WAYS

    cdef inline int own(self, int64_t slot) except -1:
        """Whether a slot that a caller names is one of ours."""
        if not 0 <= slot < self.rows:
            raise IndexError(f"slot {slot}: there are {self.rows - 1}")
        return 0

    cdef object answer(self, const int64_t *slots, Py_ssize_t count, Py_ssize_t asked):
        """A few as a list, many as an array: by how many were asked for."""
        cdef Py_ssize_t i
        if asked <= self.listed:
            return [slots[i] for i in range(count)]
        return as_array(slots, count)

    cdef object times(self, const int64_t *slots, Py_ssize_t count, Py_ssize_t asked):
        """The slots' generations."""
        cdef Py_ssize_t i
        cdef int64_t[::1] filled
        if asked <= self.listed:
            return [self.generation[slots[i]] for i in range(count)]
        found = np.empty(count, np.int64)
        filled = found
        for i in range(count):
            filled[i] = self.generation[slots[i]]
        return found

    cdef int add(self, name, uint64_t mixed, int64_t slot) except -1:
        """Name a slot that has no name; the name is not in the index."""
        cdef uint64_t place = self.place_of(mixed)
        cdef Py_ssize_t way
        memcpy(&self.names[slot, 0], text_of(name), HASH_BYTES)
        for way in range(WAYS):
            if self.entries[place + way] == 0:
                self.entries[place + way] = (mixed & LOW) << 32 | <uint64_t> (slot + 1)
                self.where[slot] = <int32_t> (place + way)
                return 0
        self.stash[name] = slot
        self.num_stashed[place // WAYS] += 1
        return 0

    # --- references ---------------------------------------------------------------------------------------------

    cdef int ref(self, const int64_t *slots, Py_ssize_t count) except -1:
        """One more reference to each slot, which is READY."""
        cdef Py_ssize_t i
        cdef int64_t slot, num_idle = 0, num_parked
        for i in range(count):
            slot = slots[i]
            num_idle += self.refs[slot] == 0
            self.refs[slot] += 1
            if self.is_lru:
                self.queue.tickets[slot] = -1
            else:
                self.in_use[slot] = 1
                self.uses[slot] += self.uses[slot] < MAX_USES
        if num_idle:
            self.table.num_leased += num_idle
        num_parked = self.idle._num_parked
        if num_parked:
            for i in range(count):
                num_parked -= self.parked[slots[i]]
                self.parked[slots[i]] = 0
            self.idle._num_parked = num_parked
        if self.idle.num_dirty:
            self.idle._deferred.remove_few([slots[i] for i in range(count)])
        return 0

    def unref(self, slots):
        """One reference fewer, as the table does it."""
        cdef list few
        cdef const int64_t[:] many
        cdef Scratch scratch = Scratch()
        cdef Py_ssize_t count = len(slots), i
        cdef int64_t slot, num_free, num_idle = 0
        cdef bint is_whole = True
        scratch.fit(count)
        if type(slots) is list or count <= self.listed:
            few = slots if type(slots) is list else slots.tolist()
            for i in range(count):
                scratch.slots[i] = few[i]
        else:
            many = slots
            for i in range(count):
                scratch.slots[i] = many[i]
        for i in range(count):
            slot = scratch.slots[i]
            if slot >= self.rows:
                raise IndexError(f"slot {slot}: there are {self.rows - 1}")
            is_whole &= slot >= 0 and self.refs[slot] > 0
        if not (is_whole and self.covers(scratch.slots, count)):
            times = Counter([scratch.slots[i] for i in range(count)])
            lacking = [each for each in times if each < 0 or self.refs[each] < times[each]]
            raise ValueError(f"slots {lacking} have no reference")
        num_free = self.table.num_free
        self.begin_entering(count)
        i = count
        while i:
            i -= 1
            slot = scratch.slots[i]
            self.refs[slot] -= 1
            if self.refs[slot]:
                continue
            if self.state[slot] == READY:
                num_idle += 1
                self.enter(slot)
            else:
                self.state[slot] = FREE
                self.free_slots[num_free] = <int32_t> slot
                num_free += 1
        self.table.num_free = num_free
        if num_idle:
            self.table.num_leased -= num_idle
            self.end_entering()

    cdef bint covers(self, const int64_t *slots, Py_ssize_t count) except -1:
        """Whether the slots, some of which may be given twice, have as many references."""
        cdef Py_ssize_t i
        cdef bint is_whole = True
        for i in range(count):
            self.refs[slots[i]] -= 1
            is_whole &= self.refs[slots[i]] >= 0
        for i in range(count):
            self.refs[slots[i]] += 1
        return is_whole

    cdef int begin_entering(self, Py_ssize_t count) except -1:
        self.queue.read()
        self.queue.room_for(count)
        if not self.is_lru:
            self.num_small = self.policy._num_small
            self.main.read()
            self.main.room_for(count)
        return 0

    cdef inline int enter(self, int64_t slot) except -1:
        """An idle slot becomes a victim."""
        if self.is_lru:
            return self.queue.append(slot)
        self.in_use[slot] = 0
        if self.queue.tickets[slot] != -1 or self.main.tickets[slot] != -1:
            return 0
        if self.in_main[slot]:
            return self.main.append(slot)
        self.num_small += 1
        return self.queue.append(slot)

    cdef int end_entering(self) except -1:
        self.queue.write()
        if not self.is_lru:
            self.policy._num_small = self.num_small
            self.main.write()
        return 0

    # --- room ---------------------------------------------------------------------------------------------------

    def allocate(self, count):
        """Take slots (→ FILLING, next generation), with one reference each, parents or not, as the table does it."""
        cdef Py_ssize_t num = count, i
        cdef int64_t slot
        cdef Scratch scratch = Scratch()
        scratch.fit(num)
        if not self.find_room(num, scratch.slots, False):
            return None
        for i in range(num):
            slot = scratch.slots[i]
            self.generation[slot] += 1
            self.state[slot] = FILLING
            self.refs[slot] = 1
            self.children[slot] = 0
        return self.answer(scratch.slots, num, num)

    cdef bint find_room(self, Py_ssize_t count, int64_t *slots, bint spare_parents) except -1:
        """Slots that are nobody's, still marked as they were: free ones, or of evicted blocks. False: no room."""
        cdef int64_t num_free = self.table.num_free
        cdef Py_ssize_t short = count - num_free, i
        cdef int64_t now = 0
        if short <= 0:
            for i in range(count):
                slots[i] = self.free_slots[num_free - 1 - i]
            self.table.num_free = num_free - count
            if self.departures is not None:
                self.came(slots, count, self.departures.now())
            return True
        if short > self.table.num_ready - self.table.num_leased or not self.choose(short, slots, spare_parents):
            return False
        self.table.num_evicted += short
        if self.departures is not None:
            now = self.departures.now()
            self.note_departures(slots, short, now)
        if self.table.changes is not None or self.table.tails or self.idle.num_dirty:
            self.table.forget(as_array(slots, short))
        else:
            for i in range(short):
                self.forget(slots[i])
            self.index.num_names -= short
            self.table.num_ready -= short
        for i in range(num_free):
            slots[short + i] = self.free_slots[num_free - 1 - i]
        if num_free:
            self.table.num_free = 0
        if self.departures is not None:
            self.came(slots, count, now)
        return True

    cdef int came(self, const int64_t *slots, Py_ssize_t count, int64_t now) except -1:
        """Blocks come to these slots."""
        cdef Py_ssize_t i
        for i in range(count):
            self.came_at[slots[i]] = <uint32_t> now
        return 0

    cdef int note_departures(self, const int64_t *slots, Py_ssize_t count, int64_t now) except -1:
        """Blocks leave these slots to make room: `Departures.evicted`."""
        cdef uint64_t mixed, low = (<uint64_t> now << 8) | self.evicted_code, size = self.gone.shape[0]
        cdef int64_t slot, age, left, last = self.ages.shape[0] - 2
        cdef Py_ssize_t i, power
        for i in range(count):
            slot = slots[i]
            mixed = self.names[slot, 0] * MIX_FIRST + self.names[slot, 3] * MIX_LAST
            self.gone[((mixed >> 32) * size) >> 32] = ((mixed & LOW) << 32) | low
            if self.came_at[slot]:
                age = left = now - self.came_at[slot]
                power = 0
                while left:
                    left >>= 1
                    power += 1
                self.ages[min(power, last)] += 1
                self.ages[last + 1] += age
        return 0

    cdef int forget(self, int64_t slot) except -1:
        """A slot loses its name and its place in a chain; whoever calls counts it."""
        cdef int64_t place = self.where[slot]
        if place >= 0:
            self.entries[place] = 0
            self.where[slot] = -1
        else:
            self.index.remove_one(slot)
            self.index.num_names += 1
        self.parent[slot] = <int32_t> self.nobody
        self.parent_generation[slot] = 0
        return 0

    cdef bint choose(self, Py_ssize_t count, int64_t *victims, bint spare_parents) except -1:
        """Take `count` victims out, unlinked from their parents; False if there are fewer."""
        cdef Py_ssize_t found = 0, popped, i
        if not self.idle.num_dirty:
            while found < count:
                popped = self.pop(count - found, victims + found)
                if not popped:
                    break
                found += self.unlink(victims + found, popped)
        if found == count:
            if not self.is_lru:
                self.note_evicted(victims, count)
            elif self.is_planned:
                for i in range(count):
                    self.owners[victims[i]] = 0
            return True
        if found:  # the rest are parked or dirty: all over again, in bulk
            taken = as_array(victims, found)
            self.links.add_children(self.links.living_parents(taken))
            self.policy.give_back(taken)
        chosen = self.idle.choose(count, spare_parents=spare_parents)
        if chosen is None:
            return False
        for i in range(count):
            victims[i] = chosen[i]
        return True

    cdef inline int64_t parent_of(self, int64_t slot) except -1:
        cdef int64_t parent = self.parent[slot]
        return parent if self.generation[parent] == self.parent_generation[slot] else self.nobody

    cdef Py_ssize_t unlink(self, int64_t *slots, Py_ssize_t count) except -1:
        """Have those slots leave their chains all of whose resident children go as well; the others are parked.

        Returns how many go; they come first in `slots` then, in their order.
        """
        cdef Py_ssize_t going = count, i
        cdef int64_t parent, slot, num_parked
        cdef bint is_whole = True
        for i in range(count):
            self.count_child(slots[i], -1)
        for i in range(count):
            is_whole &= self.children[slots[i]] == 0
        if not is_whole:
            for i in range(count):
                self.count_child(slots[i], 1)
            num_parked, going = self.idle._num_parked, 0
            for i in range(count):
                slot = slots[i]
                if self.children[slot]:
                    self.parked[slot] = 1
                    num_parked += 1
                else:
                    self.count_child(slot, -1)
                    slots[going] = slot
                    going += 1
            self.idle._num_parked = num_parked
        if self.idle._num_parked:
            for i in range(going):
                parent = self.parent_of(slots[i])
                if self.parked[parent] and self.children[parent] == 0:
                    self.idle._unpark(parent)
        return going

    cdef inline int count_child(self, int64_t slot, int by) except -1:
        """Its parent has so many children more; nobody's are not counted."""
        cdef int64_t parent = self.parent_of(slot)
        if parent != self.nobody:
            self.children[parent] += by
        return 0

    cdef Py_ssize_t pop(self, Py_ssize_t count, int64_t *victims) except -1:
        """The policy's next victims."""
        cdef Py_ssize_t found = 0
        cdef int64_t slot
        if self.is_planned:
            if self.policy.goes_by_plan(count):
                return self.pop_planned(count, victims)
            for slot in self.policy.pop_few(count):
                victims[found] = slot
                found += 1
            return found
        self.queue.read()
        if not self.is_lru:
            return self.pop_s3fifo(count, victims)
        while found < count:
            slot = self.queue.take()
            if slot < 0:
                break
            victims[found] = slot
            found += 1
        self.queue.write()
        return found

    cdef Py_ssize_t pop_planned(self, Py_ssize_t count, int64_t *victims) except -1:
        """The next of the plan that are still as they were planned; of a new one when it has ended."""
        cdef Py_ssize_t found = 0, cursor
        cdef int64_t slot
        while True:
            plan = self.policy.plan
            if plan is not self.plan:
                self.plan = plan
                self.plan_slots, self.plan_tickets, self.plan_owners = plan
            cursor = self.policy.cursor
            while found < count and cursor < self.plan_slots.shape[0]:
                slot = self.plan_slots[cursor]
                if self.queue.tickets[slot] == self.plan_tickets[cursor]:
                    if self.owners[slot] == self.plan_owners[cursor]:
                        self.queue.tickets[slot] = NO_TICKET
                        victims[found] = slot
                        found += 1
                cursor += 1
            self.policy.cursor = cursor
            if found == count or not self.policy.make_plan(count - found):
                return found

    cdef Py_ssize_t pop_s3fifo(self, Py_ssize_t count, int64_t *victims) except -1:
        """One entry after the other: from the small queue while it is above its share, else from the main one."""
        cdef Py_ssize_t found = 0
        cdef int64_t slot, num_small = self.policy._num_small
        cdef bint from_small
        self.main.read()
        while found < count:
            from_small = num_small > self.small_target
            slot = self.queue.take() if from_small else self.main.take()
            if slot < 0:
                if from_small:
                    num_small = 0
                from_small = not from_small
                slot = self.queue.take() if from_small else self.main.take()
                if slot < 0:
                    num_small = 0
                    break
            num_small -= from_small
            if self.in_use[slot]:
                self.in_main[slot] |= from_small  # used while at the end of the queue: worth keeping
            elif from_small and self.uses[slot] >= HOT:
                self.in_main[slot], self.uses[slot] = 1, 0
                self.main.room_for(1)
                self.main.append(slot)
            elif not from_small and self.uses[slot]:
                self.uses[slot] -= 1
                self.main.room_for(1)
                self.main.append(slot)
            else:
                victims[found] = slot
                found += 1
        self.queue.write()
        self.main.write()
        self.policy._num_small = num_small
        return found

    cdef int note_evicted(self, const int64_t *slots, Py_ssize_t count) except -1:
        """S3-FIFO: remember the blocks that leave from the small queue."""
        cdef uint64_t tag, mask = self.ghost_tags.shape[0] - 1
        cdef int64_t now = self.ghosts._now
        cdef Py_ssize_t i
        for i in range(count):
            if not self.in_main[slots[i]]:
                tag = self.tag_of(slots[i])
                now += 1
                self.ghost_tags[tag & mask] = tag
                self.ghost_times[tag & mask] = now
        self.ghosts._now = now
        return 0

    cdef inline uint64_t tag_of(self, int64_t slot) except? 0:
        return self.names[slot, 0] * MIX_FIRST + self.names[slot, 3] * MIX_LAST

    cdef int admit(self, const int64_t *slots, Py_ssize_t count) except -1:
        """S3-FIFO: choose each block's queue: main if its name is remembered, small if not."""
        cdef uint64_t tag, mask = self.ghost_tags.shape[0] - 1
        cdef int64_t slot, gone = self.ghosts._now - self.ghosts._size, num_small = self.policy._num_small
        cdef Py_ssize_t i
        for i in range(count):
            slot = slots[i]
            tag = self.tag_of(slot)
            num_small -= self.queue.tickets[slot] != -1
            self.uses[slot], self.in_use[slot] = 0, 1
            self.in_main[slot] = self.ghost_tags[tag & mask] == tag and self.ghost_times[tag & mask] > gone
            self.queue.tickets[slot] = self.main.tickets[slot] = -1
        self.policy._num_small = num_small
        return 0

    # --- stores -------------------------------------------------------------------------------------------------

    def reserve(self, hashes, parent):
        """Take slots for the blocks of a chain that have none, as the table does it."""
        cdef list names = hashes if type(hashes) is list else list(hashes)
        cdef Py_ssize_t count = len(names), num_held = 0, num_new, i
        cdef int64_t before = -1, anchor, slot
        cdef uint64_t mixed
        cdef bint guarded, is_chain = True
        cdef list new
        cdef Scratch scratch = Scratch(), taken = Scratch()
        scratch.fit(count)
        self.locate(names, 0, count, scratch.slots, scratch.mixed)
        while num_held < count and scratch.slots[num_held] >= 0:
            num_held += 1
        num_new = count - num_held
        if not num_new:
            return [], [], []
        for i in range(num_held, count):
            is_chain &= scratch.slots[i] < 0
        new = names[num_held:]
        if not is_chain or (num_new > 1 and len(set(new)) < num_new):
            return self.table.reserve(hashes, parent)  # a parent comes back to its child; or names that are no chain
        if num_held:
            before = scratch.slots[num_held - 1]
        elif parent is not None:
            self.locate([parent], 0, 1, &before, &mixed)
        guarded = before >= 0 and num_new > self.table.num_free
        if guarded:
            self.children[before] += 1  # it must not go to make room for what hangs on it
        anchor = before
        taken.fit(num_new)
        if not self.find_room(num_new, taken.slots, True):
            if guarded:
                self.idle.release_few([anchor])
            return None
        for i in range(num_new):
            slot = taken.slots[i]
            self.generation[slot] += 1
            self.state[slot] = FILLING
            self.children[slot] = 0
            self.add(new[i], scratch.mixed[num_held + i], slot)
            self.link(slot, before)
            before = slot
        self.index.num_names += num_new
        if guarded:
            self.idle.release_few([anchor])
        positions, slots = list(range(num_held, count)), self.answer(taken.slots, num_new, num_new)
        return positions, slots, self.times(taken.slots, num_new, num_new)

    def reserve_ones(self, list names, list parents):
        """As the table's `reserve_chains`, of chains of one block each, in one pass; no parent is among the names."""
        cdef Py_ssize_t count = len(names), num_new = 0, i, next_taken = 0
        cdef int64_t slot
        cdef list anchors = []
        cdef Scratch held = Scratch(), before = Scratch(), taken = Scratch()
        held.fit(count)
        before.fit(count)
        self.locate(names, 0, count, held.slots, held.mixed)
        is_new = np.zeros(count, np.bool_)
        cdef uint8_t[::1] new = is_new.view(np.uint8)
        for i in range(count):
            new[i] = held.slots[i] < 0
            num_new += new[i]
        if not num_new:
            return as_array(held.slots, count), is_new
        self.locate(parents, 0, count, before.slots, before.mixed)
        if num_new > self.table.num_free:
            for i in range(count):
                if new[i] and before.slots[i] >= 0:
                    self.children[before.slots[i]] += 1  # it must not go to make room for what hangs on it
                    anchors.append(before.slots[i])
        taken.fit(num_new)
        if not self.find_room(num_new, taken.slots, True):
            self.idle.release_few(anchors)
            return None
        for i in range(count):
            if not new[i]:
                continue
            slot = held.slots[i] = taken.slots[next_taken]
            next_taken += 1
            self.generation[slot] += 1
            self.state[slot] = FILLING
            self.children[slot] = 0
            self.add(names[i], held.mixed[i], slot)
            self.link(slot, before.slots[i])
        self.index.num_names += num_new
        if anchors:
            self.idle.release_few(anchors)
        return as_array(held.slots, count), is_new

    cdef inline int link(self, int64_t slot, int64_t parent) except -1:
        if parent < 0:
            self.parent[slot] = <int32_t> self.nobody
            self.parent_generation[slot] = 0
            return 0
        self.parent[slot] = <int32_t> parent
        self.parent_generation[slot] = self.generation[parent]
        self.children[parent] += 1
        return 0

    def seal(self, reservation, positions, *, named):
        """Publish a reservation's blocks with one reference each, as the table does it."""
        cdef Py_ssize_t count, i
        cdef bint is_named = named
        cdef Scratch scratch
        if positions is not None or not reservation.is_whole or reservation.is_tail:
            return self.table.seal(reservation, positions, named=named)
        slots = reservation.places
        count = len(slots)
        scratch = Scratch()
        scratch.fit(count)
        self.read_slots(slots, scratch.slots, count)
        for i in range(count):
            self.refs[scratch.slots[i]] = 1
            if is_named:
                self.state[scratch.slots[i]] = READY
        if is_named:
            self.table.num_ready += count
            self.table.num_leased += count
            if not self.is_lru:
                self.admit(scratch.slots, count)
            if self.table.changes is not None:
                self.table.changes.stored(as_array(scratch.slots, count))
        return reservation.indices, slots, reservation.times

    cdef int read_slots(self, slots, int64_t *target, Py_ssize_t count) except -1:
        """Slots that a caller names, checked."""
        cdef const int64_t[:] many
        cdef Py_ssize_t i
        if type(slots) is list:
            for i in range(count):
                target[i] = (<list> slots)[i]
        else:
            many = slots
            for i in range(count):
                target[i] = many[i]
        for i in range(count):
            self.own(target[i])
        return 0


cdef inline const char *text_of(name) except NULL:
    """A name's 32 bytes. ValueError if they are not."""
    if not isinstance(name, bytes):
        raise TypeError(f"chain hash {name!r}: must be bytes")
    if len(<bytes> name) == HASH_BYTES:
        return <const char *> <bytes> name
    raise ValueError(f"chain hashes of [{len(name)}] bytes: must be {HASH_BYTES}")


cdef object as_array(const int64_t *slots, Py_ssize_t count):
    found = np.empty(count, np.int64)
    cdef int64_t[::1] filled = found
    if count:
        memcpy(&filled[0], slots, count * sizeof(int64_t))
    return found
