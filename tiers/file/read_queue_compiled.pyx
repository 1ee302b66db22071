# cython: language_level=3, boundscheck=False, wraparound=False
"""The slab's read path: blocks in flight together, rows checked, payloads hashed as they come.

The interpreter's lock is let go of once for all of a call's blocks: a busy thread beside it may keep it for 5 ms each
time. A call costs no array.
"""

from cpython.buffer cimport Py_buffer, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from cpython.exc cimport PyErr_SetFromErrno
from libc.errno cimport EAGAIN, EINTR, errno
from libc.stdint cimport int64_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcmp, memcpy

cdef extern from "<linux/aio_abi.h>" nogil:
    cdef int IOCB_CMD_PREADV

    struct iocb:
        uint64_t aio_data
        unsigned short aio_lio_opcode
        unsigned int aio_fildes
        uint64_t aio_buf
        uint64_t aio_nbytes
        int64_t aio_offset

    struct io_event:
        uint64_t data
        int64_t res

cdef extern from "<sys/syscall.h>" nogil:
    cdef long SYS_io_setup
    cdef long SYS_io_submit
    cdef long SYS_io_getevents
    cdef long SYS_io_destroy

cdef extern from "<sys/uio.h>" nogil:
    struct iovec:
        void *iov_base
        size_t iov_len

cdef extern from "<unistd.h>" nogil:
    long syscall(long number, ...)
    ssize_t pread(int fd, void *buffer, size_t count, int64_t offset)

cdef extern from "digests.h" nogil:
    uint64_t kvtier_xxh3_64(const void *data, size_t size)
    uint64_t kvtier_xxh3_64_seeded(const void *data, size_t size, uint64_t seed)

cdef enum:
    WAKE = 4  # a wait ends when a quarter of the reads in flight has ended: fewer wake-ups, and the disk stays busy


def open_queue(unsigned int depth):
    """A queue of the kernel's for `BlockReads`, so many reads in flight. OSError if it gives none."""
    cdef uint64_t queue = 0
    if syscall(SYS_io_setup, depth, &queue) < 0:
        PyErr_SetFromErrno(OSError)
    return queue


def close_queue(uint64_t queue):
    with nogil:
        syscall(SYS_io_destroy, queue)


def read_rows(int fd, offsets, size_t size, unsigned char[::1] out):
    """Read a row of `size` bytes from each offset into `out`, neighbours in one call; which came whole, as bytes."""
    cdef long n = len(offsets), first = 0, end = 0, i
    cdef int64_t *places = <int64_t *>calloc(n + 1, sizeof(int64_t))
    cdef char *whole = <char *>calloc(n + 1, 1)
    cdef ssize_t wanted
    try:
        if not (places and whole):
            raise MemoryError
        if out.shape[0] != n * <Py_ssize_t>size:
            raise ValueError(f"{out.shape[0]} bytes for {n} rows of {size}")
        for i in range(n):
            places[i] = offsets[i]
        with nogil:
            while first < n:
                end = first + 1
                while end < n and places[end] == places[end - 1] + <int64_t>size:
                    end += 1
                wanted = (end - first) * size
                if pread(fd, &out[first * size], wanted, places[first]) == wanted:
                    for i in range(first, end):
                        whole[i] = 1
                first = end
        return whole[:n]
    finally:
        free(places)
        free(whole)


cdef packed struct Row:  # `slab.entry_dtype`, of a slab in the clear, up to its tokens
    uint64_t checksum
    uint32_t state
    uint32_t generation
    uint64_t seq
    uint64_t slot
    char name[32]
    char parent[32]
    uint64_t payload_checksum
    uint32_t payload_bytes
    uint32_t num_tokens


cdef struct Rule:  # `slab.find_valid`'s, of a slab in the clear
    uint32_t ready, payload_bytes, most_tokens
    uint64_t least_seq, end_seq, seed


cdef bint is_whole(const Row *row, const unsigned char *at, size_t size, uint64_t slot, const Rule *rule) noexcept nogil:
    return (row.state == rule.ready and row.slot == slot and row.payload_bytes == rule.payload_bytes
            and row.num_tokens <= rule.most_tokens and rule.least_seq <= row.seq < rule.end_seq
            and row.checksum == kvtier_xxh3_64_seeded(at + 8, size - 8, rule.seed))


cdef class BlockReads:
    """Reads blocks of one slab by one queue: `run` or `fill`, once. The slots ascend; neighbours are one read."""

    cdef readonly bint is_lost  # the kernel lost the queue, and has ended all that was in flight
    cdef uint64_t queue
    cdef size_t size, row_bytes
    cdef long depth, num_reads, num_blocks, begun, ended
    cdef int table_fd
    cdef Py_buffer *views
    cdef iovec *parts
    cdef iocb *requests
    cdef iocb **pointers
    cdef io_event *events
    cdef int64_t *row_offsets
    cdef uint64_t *slots
    cdef unsigned char *rows
    cdef uint64_t *digests
    cdef char *came  # of each block: its payload came whole
    cdef char *whole  # … and its row
    cdef long *firsts
    cdef long *fresh  # numbers of reads that came and were not taken yet
    cdef long num_fresh
    cdef bint hashes  # what came

    def __cinit__(self, uint64_t queue, long depth, int fd, int table_fd, list slots, list into, list table_offsets,
                  list payload_offsets, int64_t per_extent, size_t row_bytes, size_t size, size_t longest):
        cdef long i, n = len(slots)
        cdef int64_t extent, at, offset, before = -1
        cdef uint64_t slot
        self.queue, self.depth, self.size, self.row_bytes = queue, depth, size, row_bytes
        self.table_fd = table_fd
        if len(into) != n or depth < 1:
            raise ValueError(f"{len(into)} buffers for {n} slots, {depth} reads in flight")
        self.views = <Py_buffer *>calloc(n + 1, sizeof(Py_buffer))
        self.parts = <iovec *>calloc(n + 1, sizeof(iovec))
        self.requests = <iocb *>calloc(n + 1, sizeof(iocb))
        self.pointers = <iocb **>calloc(n + 1, sizeof(iocb *))
        self.events = <io_event *>calloc(depth, sizeof(io_event))
        self.row_offsets = <int64_t *>calloc(n + 1, sizeof(int64_t))
        self.slots = <uint64_t *>calloc(n + 1, sizeof(uint64_t))
        self.rows = <unsigned char *>calloc(n + 1, row_bytes)
        self.digests = <uint64_t *>calloc(n + 1, sizeof(uint64_t))
        self.came = <char *>calloc(n + 1, 1)
        self.whole = <char *>calloc(n + 1, 1)
        self.firsts = <long *>calloc(n + 1, sizeof(long))
        self.fresh = <long *>calloc(n + 1, sizeof(long))
        if not (self.views and self.parts and self.requests and self.pointers and self.events
                and self.row_offsets and self.slots and self.rows and self.digests and self.came and self.whole
                and self.firsts and self.fresh):
            raise MemoryError
        for i in range(n):
            slot = slots[i]
            extent, at = slot // per_extent, slot % per_extent
            if not 0 <= extent < min(len(table_offsets), len(payload_offsets)):
                raise ValueError(f"slot {slot} lies behind the slab's end")
            PyObject_GetBuffer(into[i], &self.views[i], PyBUF_WRITABLE)
            self.num_blocks += 1
            if self.views[i].len != <Py_ssize_t>size:
                raise ValueError(f"a buffer of {self.views[i].len} bytes, not {size}")
            self.parts[i].iov_base = self.views[i].buf
            self.parts[i].iov_len = size
            self.slots[i] = slot
            self.row_offsets[i] = <int64_t>table_offsets[extent] + at * <int64_t>row_bytes
            offset = <int64_t>payload_offsets[extent] + at * <int64_t>size
            if i and offset == before + <int64_t>size and self.requests[self.num_reads - 1].aio_nbytes < longest:
                self.requests[self.num_reads - 1].aio_nbytes += 1
            else:
                self.firsts[self.num_reads] = i
                self.requests[self.num_reads].aio_data = self.num_reads
                self.requests[self.num_reads].aio_lio_opcode = IOCB_CMD_PREADV
                self.requests[self.num_reads].aio_fildes = fd
                self.requests[self.num_reads].aio_buf = <uint64_t><uintptr_t>&self.parts[i]
                self.requests[self.num_reads].aio_nbytes = 1
                self.requests[self.num_reads].aio_offset = offset
                self.pointers[self.num_reads] = &self.requests[self.num_reads]
                self.num_reads += 1
            before = offset
        self.firsts[self.num_reads] = n

    def __dealloc__(self):
        cdef long i
        with nogil:
            while self.ended < self.begun:  # the buffers must outlive what is in flight
                self.reap()
        for i in range(self.num_blocks):
            PyBuffer_Release(&self.views[i])
        free(self.views)
        free(self.parts)
        free(self.requests)
        free(self.pointers)
        free(self.events)
        free(self.row_offsets)
        free(self.slots)
        free(self.rows)
        free(self.digests)
        free(self.came)
        free(self.whole)
        free(self.firsts)
        free(self.fresh)

    def run(self, list names, record, uint32_t ready, uint32_t most_tokens, uint64_t least_seq, uint64_t end_seq,
            uint64_t seed):
        """Wait for all; returns of each block `record(name, parent, tokens, checksum)`, None where it is not whole.

        Whole: its row is, by `slab.find_valid`'s rule, it has that name, and the payload that came has the row's
        checksum.
        """
        cdef Rule rule
        cdef const Row *row
        cdef const char *tokens
        cdef long i
        cdef list found = []
        names = list(names)  # a copy, which no other thread changes
        if len(names) != self.num_blocks:
            raise ValueError(f"{len(names)} names for {self.num_blocks} slots")
        if self.row_bytes < sizeof(Row) + 4 * <size_t>most_tokens:
            raise ValueError(f"rows of {self.row_bytes} bytes with {most_tokens} tokens")
        rule.ready, rule.payload_bytes, rule.most_tokens = ready, <uint32_t>self.size, most_tokens
        rule.least_seq, rule.end_seq, rule.seed = least_seq, end_seq, seed
        self.hashes = True
        with nogil:
            self.submit()
            self.read_table(&rule)  # while payloads are on their way
            self.finish()
        for i in range(self.num_blocks):
            row = <const Row *>(self.rows + i * self.row_bytes)
            name = <bytes?>names[i]
            if (self.came[i] and self.whole[i] and row.payload_checksum == self.digests[i]
                    and PyBytes_GET_SIZE(name) == 32 and memcmp(PyBytes_AS_STRING(name), row.name, 32) == 0):
                tokens = <const char *>row + sizeof(Row)
                found.append(record(name, row.parent[:32], tokens[:4 * row.num_tokens], row.payload_checksum))
            else:
                found.append(None)
        return found

    def fill(self):
        """Wait for all payloads; returns which came whole."""
        with nogil:
            self.finish()
        return [self.came[i] != 0 for i in range(self.num_blocks)]

    cdef void finish(self) noexcept nogil:
        while self.ended < self.num_reads or self.num_fresh:
            self.submit()
            self.take_fresh()  # while the next ones are on their way
            if self.ended < self.begun:
                self.reap()

    cdef void read_table(self, const Rule *rule) noexcept nogil:
        """The blocks' rows, neighbours in one call, and which are whole."""
        cdef long first = 0, end, i
        cdef unsigned char *at
        cdef ssize_t wanted
        while first < self.num_blocks:
            end = first + 1
            while (end < self.num_blocks
                   and self.row_offsets[end] == self.row_offsets[end - 1] + <int64_t>self.row_bytes):
                end += 1
            at = self.rows + first * self.row_bytes
            wanted = (end - first) * self.row_bytes
            if pread(self.table_fd, at, wanted, self.row_offsets[first]) == wanted:
                for i in range(first, end):
                    at = self.rows + i * self.row_bytes
                    self.whole[i] = is_whole(<const Row *>at, at, self.row_bytes, self.slots[i], rule)
            first = end

    cdef void submit(self) noexcept nogil:
        """As many as there is room for; one that the kernel refuses has ended."""
        cdef long room, taken
        while self.begun < self.num_reads:
            room = min(self.num_reads - self.begun, self.depth - (self.begun - self.ended))
            if room <= 0:
                return
            taken = -1 if self.is_lost else syscall(SYS_io_submit, self.queue, room, &self.pointers[self.begun])
            if taken > 0:
                self.begun += taken
                continue
            if taken < 0 and not self.is_lost and errno == EAGAIN and self.begun > self.ended:
                return  # with others in flight there may be room later
            self.begun += 1
            self.ended += 1

    cdef void reap(self) noexcept nogil:
        """Wait for a quarter of what is in flight, at least for one."""
        cdef long came, i, number
        came = syscall(SYS_io_getevents, self.queue, max(1, (self.begun - self.ended) // WAKE), self.depth,
                       self.events, NULL)
        if came < 0:
            if errno != EINTR:
                self.is_lost = True
                syscall(SYS_io_destroy, self.queue)  # it returns when nothing is in flight any more
                self.ended = self.begun  # the result is unknown, so no read counts
            return
        for i in range(came):
            number = <long>self.events[i].data
            if self.events[i].res == <int64_t>((self.firsts[number + 1] - self.firsts[number]) * self.size):
                self.fresh[self.num_fresh] = number
                self.num_fresh += 1
        self.ended += came

    cdef void take_fresh(self) noexcept nogil:
        cdef long i, at
        for i in range(self.num_fresh):
            for at in range(self.firsts[self.fresh[i]], self.firsts[self.fresh[i] + 1]):
                if self.hashes:
                    self.digests[at] = kvtier_xxh3_64(self.parts[at].iov_base, self.size)
                self.came[at] = 1
        self.num_fresh = 0
