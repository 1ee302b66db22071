# cython: language_level=3, boundscheck=False, wraparound=False
"""The compiled twin of `read_queue`: reads in flight together, each hashed as it comes, without the interpreter's lock.

The Python way lets go of the lock, and takes it back, for every wait; a busy thread beside it may keep it for 5 ms each
time. Here it is let go of once for all that follows `begin`.
"""

from cpython.buffer cimport Py_buffer, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.errno cimport EAGAIN, EINTR, errno
from libc.stdint cimport int64_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

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

ctypedef uint64_t (*Hash)(const void *, size_t) noexcept nogil
ctypedef uint64_t (*SeededHash)(const void *, size_t, uint64_t) noexcept nogil

cdef enum:
    WAKE = 4  # as `read_queue._WAKE`


cdef class HashedReads:
    """Reads of stretches of a file by one queue; `begin` starts them, `finish` waits for all and says what came."""

    cdef readonly bint is_lost  # the kernel lost the queue, and has ended all that was in flight
    cdef uint64_t queue
    cdef Hash hash
    cdef size_t size
    cdef long depth, num_reads, num_buffers, begun, ended
    cdef Py_buffer *views
    cdef iovec *parts
    cdef iocb *requests
    cdef iocb **pointers
    cdef io_event *events
    cdef int64_t *moved
    cdef uint64_t *digests
    cdef long *firsts
    cdef long *fresh  # numbers of reads that came and are not hashed yet
    cdef long num_fresh

    def __cinit__(self, uint64_t queue, long depth, int fd, offsets, counts, into, size_t size, uintptr_t hash_address):
        cdef long i, first = 0
        self.queue, self.depth, self.size = queue, depth, size
        self.hash = <Hash><void *>hash_address
        self.num_reads = len(offsets)
        if len(counts) != self.num_reads:
            raise ValueError(f"{len(counts)} counts for {self.num_reads} reads")
        self.views = <Py_buffer *>calloc(len(into), sizeof(Py_buffer))
        self.parts = <iovec *>calloc(len(into), sizeof(iovec))
        self.digests = <uint64_t *>calloc(len(into), sizeof(uint64_t))
        self.requests = <iocb *>calloc(self.num_reads, sizeof(iocb))
        self.pointers = <iocb **>calloc(self.num_reads, sizeof(iocb *))
        self.moved = <int64_t *>calloc(self.num_reads, sizeof(int64_t))
        self.firsts = <long *>calloc(self.num_reads + 1, sizeof(long))
        self.fresh = <long *>calloc(self.num_reads, sizeof(long))
        self.events = <io_event *>calloc(depth, sizeof(io_event))
        if not (self.views and self.parts and self.digests and self.requests and self.pointers and self.moved
                and self.firsts and self.fresh and self.events):
            raise MemoryError
        for buffer in into:
            PyObject_GetBuffer(buffer, &self.views[self.num_buffers], PyBUF_WRITABLE)
            self.num_buffers += 1
            if self.views[self.num_buffers - 1].len != <Py_ssize_t>size:
                raise ValueError(f"a buffer of {self.views[self.num_buffers - 1].len} bytes, not {size}")
            self.parts[self.num_buffers - 1].iov_base = self.views[self.num_buffers - 1].buf
            self.parts[self.num_buffers - 1].iov_len = size
        for i in range(self.num_reads):
            self.firsts[i] = first
            self.requests[i].aio_data = i
            self.requests[i].aio_lio_opcode = IOCB_CMD_PREADV
            self.requests[i].aio_fildes = fd
            self.requests[i].aio_buf = <uint64_t><uintptr_t>&self.parts[first]
            self.requests[i].aio_nbytes = counts[i]
            self.requests[i].aio_offset = offsets[i]
            self.pointers[i] = &self.requests[i]
            first += counts[i]
        self.firsts[self.num_reads] = first
        if first != self.num_buffers:
            raise ValueError(f"{self.num_buffers} buffers for {first} slots")

    def __dealloc__(self):
        cdef long i
        with nogil:
            while self.ended < self.begun:  # the buffers must outlive what is in flight
                self.reap()
        for i in range(self.num_buffers):
            PyBuffer_Release(&self.views[i])
        free(self.views)
        free(self.parts)
        free(self.digests)
        free(self.requests)
        free(self.pointers)
        free(self.moved)
        free(self.firsts)
        free(self.fresh)
        free(self.events)

    def begin(self):
        """Hand the first reads to the kernel."""
        with nogil:
            self.submit()

    def finish(self):
        """Wait for all. Returns of each read the bytes read, or minus the errno; and the checksums of all buffers.

        A checksum counts only if its read brought everything.
        """
        cdef long i
        with nogil:
            while self.ended < self.num_reads or self.num_fresh:
                self.submit()
                self.hash_fresh()  # while the next ones are on their way
                if self.ended < self.begun:
                    self.reap()
        return [self.moved[i] for i in range(self.num_reads)], [self.digests[i] for i in range(self.num_buffers)]

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
            self.moved[self.begun] = -errno if taken < 0 and not self.is_lost else -EAGAIN
            self.begun += 1
            self.ended += 1

    cdef void reap(self) noexcept nogil:
        """Wait for a quarter of what is in flight, at least for one."""
        cdef long came, i, number, pending
        came = syscall(SYS_io_getevents, self.queue, max(1, (self.begun - self.ended) // WAKE), self.depth,
                       self.events, NULL)
        if came < 0:
            if errno != EINTR:
                self.is_lost = True
                syscall(SYS_io_destroy, self.queue)  # it returns when nothing is in flight any more
                self.ended = self.begun  # what was: nobody knows, so `moved` says nothing of it was read
            return
        for i in range(came):
            number = <long>self.events[i].data
            self.moved[number] = self.events[i].res
            if self.events[i].res == <int64_t>((self.firsts[number + 1] - self.firsts[number]) * self.size):
                self.fresh[self.num_fresh] = number
                self.num_fresh += 1
        self.ended += came

    cdef void hash_fresh(self) noexcept nogil:
        cdef long i, at
        for i in range(self.num_fresh):
            for at in range(self.firsts[self.fresh[i]], self.firsts[self.fresh[i] + 1]):
                self.digests[at] = self.hash(self.parts[at].iov_base, self.size)
        self.num_fresh = 0


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


def whole_rows(const unsigned char[::1] rows, slots, uint32_t ready, uint32_t payload_bytes, uint32_t most_tokens,
               uint64_t least_seq, uint64_t end_seq, uint64_t seed, uintptr_t hash_address):
    """What each row holds by `slab.find_valid`'s rule: (name, parent, tokens, checksum), or None if it is not whole."""
    cdef Py_ssize_t n = len(slots), i
    cdef size_t size = rows.shape[0] // n if n else 0
    cdef SeededHash hash = <SeededHash><void *>hash_address
    cdef const unsigned char *at
    cdef const char *tokens
    cdef Row row
    cdef list found = []
    if rows.shape[0] != n * <Py_ssize_t>size or (n and size < sizeof(Row) + 4 * <size_t>most_tokens):
        raise ValueError(f"{rows.shape[0]} bytes for {n} rows of {most_tokens} tokens")
    for i in range(n):
        at = &rows[i * size]
        memcpy(&row, at, sizeof(Row))
        if (row.state == ready and row.slot == <uint64_t>slots[i] and row.payload_bytes == payload_bytes
                and row.num_tokens <= most_tokens and least_seq <= row.seq < end_seq
                and row.checksum == hash(at + 8, size - 8, seed)):
            tokens = <const char *>at + sizeof(Row)
            found.append((row.name[:32], row.parent[:32], tokens[:4 * row.num_tokens], row.payload_checksum))
        else:
            found.append(None)
    return found
