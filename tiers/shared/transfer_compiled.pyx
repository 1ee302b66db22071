"""Rows of buffers out of and into one socket without the GIL: twin of `PlainTransfer` in `stream.py`, its contract.

Few bytes are under way, so a server's reply buffers stay small. A payload is digested piece by piece, before it is sent
or after it came, while the other end goes on: no second pass over memory.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.errno cimport EAGAIN, EINTR, errno
from libc.stdint cimport uint8_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcmp, memcpy, memset
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

cdef extern from "<sys/socket.h>" nogil:
    cdef struct iovec:
        void* iov_base
        size_t iov_len
    cdef struct msghdr:
        iovec* msg_iov
        size_t msg_iovlen
    ssize_t recvmsg(int, msghdr*, int)
    ssize_t sendmsg(int, const msghdr*, int)
    int MSG_WAITALL, MSG_NOSIGNAL

cdef extern from "digests.h" nogil:
    void kvtier_start(uint64_t *sums)
    size_t kvtier_xxh3_more(uint64_t *sums, const uint8_t *data, size_t done, size_t have, size_t size, uint64_t *digest)

ctypedef void (*mac_reset)(void*) noexcept nogil
ctypedef int (*mac_update)(void*, const uint8_t*, size_t) noexcept nogil
ctypedef int (*mac_final)(void*, uint8_t*, size_t) noexcept nogil

cdef enum:
    MOST = 8  # buffers of one row
    IOVECS = 512  # of one call
    PIECE = 4 << 20  # bytes between digests: in the last cache; smaller ones cost more in calls and wake-ups than they save
    STEP = 64 << 10  # bytes that go into the tag, and from the nearest cache into the checksum
    TAG = 16


cdef struct Rows:
    Py_buffer* first
    Py_ssize_t count, width, row  # of `count` rows with `width` buffers, `row` is under way …
    Py_ssize_t part  # … and this many of its bytes were moved
    Py_ssize_t digested  # the row whose payload is being digested: so much is in its tag, and in its checksum
    Py_ssize_t fed, summed
    uint64_t[8] sums


cdef class Transfer:
    cdef Rows out, into
    cdef Py_ssize_t held, waiting
    cdef bytes opening
    cdef uint64_t* hashes
    cdef uint64_t* expected  # NULL: what is sent is not digested
    cdef uint8_t* tags
    cdef object mac
    cdef void* state
    cdef mac_reset reset
    cdef mac_update update
    cdef mac_final final
    cdef bint ended, rotten  # the connection; a payload to be sent
    cdef readonly bint unlike

    def __cinit__(
        self, sends, receives, bytes opening=b"", Py_ssize_t num_sent=0, Py_ssize_t part=0, mac=None, expected=None
    ):
        cdef Py_ssize_t i
        cdef Py_buffer* first
        self.out.count, self.into.count = len(sends), len(receives)
        if not 0 <= num_sent <= self.out.count or part < 0 or (sends and receives and len(sends) != len(receives)):
            raise ValueError(f"{len(sends)} rows to send, {num_sent} sent, {len(receives)} replies; give one each")
        if expected is not None and len(expected) != self.out.count:
            raise ValueError(f"{len(expected)} checksums for {self.out.count} rows; give one each")
        self.out.width = len(sends[0]) if sends else 1
        self.into.width = len(receives[0]) if receives else 1
        if not (1 <= self.out.width <= MOST and 1 <= self.into.width <= MOST):
            raise ValueError(f"{self.out.width} and {self.into.width} buffers a row; give 1 to {MOST}")
        if (sends and expected is not None and self.out.width != 3) or (receives and mac is not None and self.into.width != 3):
            raise ValueError("give rows to be compared or tagged three buffers: head, payload, tag")
        self.opening, self.out.row = opening, num_sent
        i = self.out.count * self.out.width
        self.out.first = <Py_buffer*>calloc(i + self.into.count * self.into.width + 1, sizeof(Py_buffer))
        self.hashes = <uint64_t*>calloc(max(self.out.count, self.into.count) + 1, sizeof(uint64_t))
        if self.out.first == NULL or self.hashes == NULL:
            raise MemoryError()
        self.into.first = self.out.first + i
        self.hold(sends, self.out.count, self.out.width, PyBUF_SIMPLE)
        self.hold(receives, self.into.count, self.into.width, PyBUF_WRITABLE)
        if expected is not None:
            self.expected = <uint64_t*>calloc(self.out.count + 1, sizeof(uint64_t))
            if self.expected == NULL:
                raise MemoryError()
            for i in range(self.out.count):
                self.expected[i] = expected[i]
        if mac is not None:
            self.tags = <uint8_t*>calloc(max(self.out.count, self.into.count) + 1, TAG)
            if self.tags == NULL:
                raise MemoryError()
            self.mac = mac
            state, reset, update, final = mac.pointers
            self.state, self.reset = <void*><uintptr_t>state, <mac_reset><uintptr_t>reset
            self.update, self.final = <mac_update><uintptr_t>update, <mac_final><uintptr_t>final
        for i in range(self.into.count):
            first = &self.into.first[i * self.into.width]
            if opening and (first.len < len(opening) or first[self.into.width - 1].len < 2):
                raise ValueError(f"places of reply {i} are shorter than what it begins or ends with; give more bytes")
            if self.into.width > 1 and not first[1].len:
                raise ValueError(f"the payload of reply {i} has no place; give some bytes")
        for i in range(self.out.count if self.expected != NULL else 0):
            first = &self.out.first[i * self.out.width]
            if not first[1].len:
                raise ValueError(f"the payload of row {i} is empty; give some bytes")
            if first[2].len != TAG or (mac is None and not first[2].readonly):
                raise ValueError(f"the tag of row {i} has {first[2].len} bytes; give {TAG}, and a MAC if they are to be made")
        kvtier_start(self.out.sums)
        kvtier_start(self.into.sums)
        for i in range(num_sent):
            self.waiting += row_bytes(&self.out, i) + (row_bytes(&self.into, i) if self.into.count else 0)
        if self.into.count:
            self.into.part = min(part, row_bytes(&self.into, 0))
            self.waiting -= self.into.part

    cdef hold(self, rows, Py_ssize_t count, Py_ssize_t width, int flags):
        cdef Py_ssize_t i
        for i in range(count):
            row = tuple(rows[i])
            if len(row) != width:
                raise ValueError(f"{len(row)} buffers where the first row has {width}; give all as many")
            for each in row:
                PyObject_GetBuffer(each, &self.out.first[self.held], flags)
                self.held += 1

    def __dealloc__(self):
        cdef Py_ssize_t i
        for i in range(self.held):
            PyBuffer_Release(&self.out.first[i])
        free(self.out.first)
        free(self.hashes)
        free(self.expected)
        free(self.tags)

    @property
    def whole(self):
        return self.into.row

    @property
    def part(self):
        return self.into.part

    @property
    def num_sent(self):
        return self.out.row

    @property
    def sent(self):
        return self.out.part

    def hash_at(self, Py_ssize_t i):
        if self.into.width < 2 or not 0 <= i < self.into.row:
            raise IndexError(i)
        return self.hashes[i]

    def tag_at(self, Py_ssize_t i):
        if self.tags == NULL or not 0 <= i < self.into.row:
            raise IndexError(i)
        return (<char*>self.tags)[i * TAG : (i + 1) * TAG]

    def run(self, stream, Py_ssize_t under_way, double deadline, Py_ssize_t until):
        cdef int fd = stream.fileno()
        cdef const char* opening = self.opening
        cdef Py_ssize_t opens = len(self.opening)
        cdef Py_ssize_t* asked = &self.out.row
        cdef bint sends
        with nogil:
            self.take(opening, opens)
            while not self.unlike and (self.into.row < min(until, self.into.count) if self.into.count else self.out.row < self.out.count):
                if passed(deadline):
                    break
                sends = self.out.row < self.out.count and not self.ended
                if sends and (self.out.part or self.waiting < under_way or asked[0] <= self.into.row or not self.into.count):
                    if self.send_some(fd, under_way):
                        continue
                if self.into.row < (min(asked[0], self.into.count) if self.out.count else self.into.count):
                    if not self.receive_some(fd, opening, opens):
                        break
                elif self.ended:
                    break

    cdef bint send_some(self, int fd, Py_ssize_t under_way) noexcept nogil:
        """Whether bytes were sent."""
        cdef iovec pieces[IOVECS]
        cdef Py_ssize_t i, size, reply, done, limit = PIECE if self.expected != NULL else 1 << 30
        cdef Py_ssize_t used = 0, room = limit, row = self.out.row, more = 0
        while row < self.out.count and used + self.out.width <= IOVECS and room > 0:
            if self.expected != NULL and not self.checked(row, room + (self.out.part if row == self.out.row else 0)):
                if not used:
                    self.unlike = True
                    return False
                break
            gather(&self.out, row, self.out.part if row == self.out.row else 0, pieces, &used, &room)
            if self.expected != NULL and room <= 0:
                break
            more += row_bytes(&self.out, row) + (row_bytes(&self.into, row) if self.into.count else 0)
            row += 1
            if self.into.count and self.waiting + more >= under_way:
                break
        done = moved(fd, pieces, used, 0, False)
        if done < 0:
            self.ended = errno != EAGAIN and errno != EINTR
            return False
        while True:
            size = row_bytes(&self.out, self.out.row)
            if self.out.part + done < size:
                self.out.part += done
                return True
            done -= size - self.out.part
            self.waiting += size + (row_bytes(&self.into, self.out.row) if self.into.count else 0)
            self.out.part = 0
            self.out.row += 1
            if not done:
                return True

    cdef bint checked(self, Py_ssize_t row, Py_ssize_t have) noexcept nogil:
        """Digest a row to be sent as far as `have`; False once its payload is not what was expected."""
        cdef Py_buffer* first = &self.out.first[row * self.out.width]
        if row < self.out.digested:
            return not (self.rotten and row == self.out.digested - 1)
        if not self.digest(&self.out, have, not first[2].readonly):
            return True
        self.rotten = self.hashes[row] != self.expected[row]
        if not first[2].readonly and not self.rotten:
            memcpy(first[2].buf, self.tags + row * TAG, TAG)
        return not self.rotten

    cdef bint digest(self, Rows* rows, Py_ssize_t have, bint tagged) noexcept nogil:
        """Of the row's payload what is in its first `have` bytes; whether that is all of it."""
        cdef Py_buffer* first = &rows.first[rows.digested * rows.width]
        cdef Py_ssize_t end, there = min(have - first.len, first[1].len)
        if there <= 0:
            return False
        if tagged and not rows.fed:
            self.reset(self.state)
            self.update(self.state, <uint8_t*>first.buf, first.len)
        while rows.fed < there:
            end = min(there, rows.fed + STEP)
            if tagged:
                self.update(self.state, <uint8_t*>first[1].buf + rows.fed, end - rows.fed)
            rows.summed = kvtier_xxh3_more(
                rows.sums, <uint8_t*>first[1].buf, rows.summed, end, first[1].len, &self.hashes[rows.digested]
            )
            rows.fed = end
        if there < first[1].len:
            return False
        if tagged:
            self.final(self.state, self.tags + rows.digested * TAG, TAG)
        kvtier_start(rows.sums)
        rows.fed = 0
        rows.summed = 0
        rows.digested += 1
        return True

    cdef bint receive_some(self, int fd, const char* opening, Py_ssize_t opens) noexcept nogil:
        """False if the connection has ended."""
        cdef iovec pieces[IOVECS]
        cdef Rows* into = &self.into
        cdef Py_ssize_t used = 0, room = PIECE, row = into.row, part = into.part, done
        cdef Py_ssize_t end = self.out.row if self.out.count else into.count
        cdef bint sure = not opens or part >= opens  # what has begun as expected is sure to come
        while row < end and used + into.width <= IOVECS and room > 0:
            gather(into, row, part, pieces, &used, &room)
            part = 0
            row += 1
            if opens and sure:
                break
        done = moved(fd, pieces, used, MSG_WAITALL if sure else 0, True)
        if done <= 0:
            return done < 0 and (errno == EAGAIN or errno == EINTR)
        self.waiting -= done
        into.part += done
        self.take(opening, opens)
        return True

    cdef void take(self, const char* opening, Py_ssize_t opens) noexcept nogil:
        """Look at what came: whole replies, and the beginning of one."""
        cdef Rows* into = &self.into
        cdef Py_buffer* last
        cdef Py_ssize_t size
        while into.row < into.count and into.part:
            size = row_bytes(into, into.row)
            if opens and memcmp(into.first[into.row * into.width].buf, opening, min(into.part, opens)):
                self.unlike = True
                return
            if into.width > 1 and into.digested == into.row:
                self.digest(into, into.part, self.tags != NULL)
            if into.part < size:
                return
            last = &into.first[(into.row + 1) * into.width - 1]
            if opens and memcmp(<char*>last.buf + last.len - 2, b"\r\n", 2):
                self.unlike = True
                return
            if self.out.count:
                self.waiting -= row_bytes(&self.out, into.row)
            into.part -= size
            into.row += 1


cdef bint passed(double deadline) noexcept nogil:
    cdef timespec now
    clock_gettime(CLOCK_MONOTONIC, &now)
    return now.tv_sec + now.tv_nsec * 1e-9 >= deadline


cdef Py_ssize_t row_bytes(Rows* rows, Py_ssize_t row) noexcept nogil:
    cdef Py_ssize_t i, size = 0
    for i in range(row * rows.width, (row + 1) * rows.width):
        size += rows.first[i].len
    return size


cdef void gather(
    Rows* rows, Py_ssize_t row, Py_ssize_t skip, iovec* pieces, Py_ssize_t* used, Py_ssize_t* room
) noexcept nogil:
    """Append the buffers of a row but for its first `skip` bytes, as far as there is room."""
    cdef Py_ssize_t i, here, size
    for i in range(row * rows.width, (row + 1) * rows.width):
        here = min(skip, rows.first[i].len)
        skip -= here
        size = min(rows.first[i].len - here, room[0])
        if size > 0:
            pieces[used[0]].iov_base = <char*>rows.first[i].buf + here
            pieces[used[0]].iov_len = size
            used[0] += 1
            room[0] -= size


cdef Py_ssize_t moved(int fd, iovec* pieces, Py_ssize_t used, int flags, bint receives) noexcept nogil:
    cdef msghdr message
    memset(&message, 0, sizeof(message))
    message.msg_iov = pieces
    message.msg_iovlen = used
    return recvmsg(fd, &message, flags) if receives else sendmsg(fd, &message, MSG_NOSIGNAL)
