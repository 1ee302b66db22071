"""Commands and replies of one shape over one socket, in turn, without the GIL: twin of the lanes' way over `Wire`.

A few commands are under way at once. So a server's reply buffers stay small, and a payload is hashed while it is in the
processor's cache. It stops at whatever is not as usual, and says how far it came: the Python way goes on from there.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcmp, memset
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
    uint64_t kvtier_xxh3_64(const void *data, size_t size)

cdef enum:
    MOST = 8  # buffers of one command, or of one reply


cdef class Turns:
    """`commands`: the buffers of each command; `places`: where each reply goes; as many of each for every one.

    A reply is as usual if it begins with `opening` and ends with CRLF. Of each that is, the second place is hashed.
    `num_sent` commands were sent already, and `part` bytes of the first reply are in their places.
    """

    cdef Py_buffer* buffers
    cdef Py_ssize_t held, count, parts, pieces
    cdef bytes opening
    cdef uint64_t* hashes
    cdef readonly Py_ssize_t whole  # replies received and as usual
    cdef readonly Py_ssize_t part  # bytes of the next one
    cdef readonly Py_ssize_t num_sent  # commands sent
    cdef readonly Py_ssize_t sent  # bytes of the next one

    def __cinit__(
        self, list commands, list places, bytes opening, Py_ssize_t num_sent, Py_ssize_t part
    ):
        cdef Py_ssize_t i
        cdef Py_buffer* first
        self.count = len(commands)
        if self.count < 1 or len(places) != self.count or not 0 <= num_sent <= self.count or part < 0:
            raise ValueError(f"{self.count} commands, {len(places)} replies, {num_sent} sent; give one reply a command")
        self.parts, self.pieces = len(commands[0]), len(places[0])
        if not (1 <= self.parts <= MOST and 1 <= self.pieces <= MOST):
            raise ValueError(f"{self.parts} buffers a command, {self.pieces} places a reply; give 1 to {MOST}")
        self.opening, self.num_sent = opening, num_sent
        self.buffers = <Py_buffer*>calloc(self.count * (self.parts + self.pieces), sizeof(Py_buffer))
        self.hashes = <uint64_t*>calloc(self.count, sizeof(uint64_t))
        if self.buffers == NULL or self.hashes == NULL:
            raise MemoryError()
        self.hold(commands, self.parts, PyBUF_SIMPLE)
        self.hold(places, self.pieces, PyBUF_WRITABLE)
        for i in range(self.count):
            first = &self.buffers[self.count * self.parts + i * self.pieces]
            if first.len < len(opening) or first[self.pieces - 1].len < 2:
                raise ValueError(f"places of reply {i} are shorter than what it begins or ends with")
        first = &self.buffers[self.count * self.parts]
        for i in range(self.pieces):
            part -= first[i].len
            self.part += first[i].len if part >= 0 else first[i].len + part
            if part <= 0:
                break

    cdef hold(self, list rows, Py_ssize_t width, int flags):
        for row in map(tuple, rows):
            if len(row) != width:
                raise ValueError(f"{len(row)} buffers where the first has {width}")
            for each in row:
                PyObject_GetBuffer(each, &self.buffers[self.held], flags)
                self.held += 1

    def __dealloc__(self):
        cdef Py_ssize_t i
        for i in range(self.held):
            PyBuffer_Release(&self.buffers[i])
        free(self.buffers)
        free(self.hashes)

    def hash_at(self, Py_ssize_t i):
        """xxh3-64 of the second place of a reply that is whole; None if it has but one."""
        if not 0 <= i < self.whole:
            raise IndexError(i)
        return self.hashes[i] if self.pieces > 1 else None

    def run(self, int fd, Py_ssize_t depth, double deadline):
        """Go on with at most `depth` commands under way, until all is done, `deadline` (CLOCK_MONOTONIC) passes, a call
        brings less than it should, or a reply is not as usual: that one is then whole in its places.
        """
        cdef const char* opening = self.opening
        cdef Py_ssize_t opens = len(self.opening)
        with nogil:
            while self.whole < self.count and not passed(deadline):
                while self.num_sent < self.count and self.num_sent < self.whole + depth:
                    if not self.send_one(fd):
                        break
                if self.num_sent <= self.whole or not self.receive_one(fd, opening, opens):
                    break

    cdef bint send_one(self, int fd) noexcept nogil:
        cdef Py_buffer* first = &self.buffers[self.num_sent * self.parts]
        cdef Py_ssize_t size, done = moved(fd, first, self.parts, self.sent, &size, False)
        if done > 0:
            self.sent += done
        if self.sent < size:
            return False
        self.sent = 0
        self.num_sent += 1
        return True

    cdef bint receive_one(self, int fd, const char* opening, Py_ssize_t opens) noexcept nogil:
        cdef Py_buffer* first = &self.buffers[self.count * self.parts + self.whole * self.pieces]
        cdef Py_buffer* last = first + self.pieces - 1
        cdef Py_ssize_t size, done = moved(fd, first, self.pieces, self.part, &size, True)
        if done > 0:
            self.part += done
        if self.part < size or memcmp(first.buf, opening, opens):
            return False
        if memcmp(<char*>last.buf + last.len - 2, b"\r\n", 2):
            return False
        if self.pieces > 1:
            self.hashes[self.whole] = kvtier_xxh3_64(first[1].buf, first[1].len)
        self.part = 0
        self.whole += 1
        return True


cdef bint passed(double deadline) noexcept nogil:
    cdef timespec now
    clock_gettime(CLOCK_MONOTONIC, &now)
    return now.tv_sec + now.tv_nsec * 1e-9 >= deadline


cdef Py_ssize_t moved(int fd, Py_buffer* first, Py_ssize_t num, Py_ssize_t skip, Py_ssize_t* size, bint receives) noexcept nogil:
    """One call for `num` buffers but their first `skip` bytes; `size` gets the bytes of all. Returns what the call did."""
    cdef iovec pieces[MOST]
    cdef msghdr message
    cdef Py_ssize_t i, here, used = 0
    size[0] = 0
    for i in range(num):
        size[0] += first[i].len
        here = min(skip, first[i].len)
        skip -= here
        if first[i].len > here:
            pieces[used].iov_base = <char*>first[i].buf + here
            pieces[used].iov_len = first[i].len - here
            used += 1
    if not used:
        return 0
    memset(&message, 0, sizeof(message))
    message.msg_iov = pieces
    message.msg_iovlen = used
    return recvmsg(fd, &message, MSG_WAITALL) if receives else sendmsg(fd, &message, MSG_NOSIGNAL)
