"""The innermost loops of naming: ids into u32, and the chain of names over plain blocks. Twin of chain.py.

For little-endian machines.
"""

from cpython.bytearray cimport PyByteArray_AS_STRING
from cpython.buffer cimport PyBUF_C_CONTIGUOUS, PyBUF_FORMAT, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE, PyList_New, PyList_SET_ITEM
from cpython.ref cimport Py_INCREF
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, strcmp

cdef extern from *:
    """
    #if defined(__GNUC__)
    #define kvtier_prefetch(at) __builtin_prefetch(at)
    #else
    #define kvtier_prefetch(at)
    #endif

    /* A plain int's value, if it is a token. No reference is taken: that would write to each id's memory. */
    static CYTHON_INLINE int kvtier_token_of(PyObject *id, uint32_t *token) {
        unsigned long value;
        if (!PyLong_CheckExact(id)) return 0;
    #if PY_VERSION_HEX >= 0x030C0000
        if (PyUnstable_Long_IsCompact((PyLongObject *) id)) {
            Py_ssize_t small = PyUnstable_Long_CompactValue((PyLongObject *) id);
            *token = (uint32_t) small;
            return small >= 0;
        }
    #else
        if (Py_SIZE(id) == 0 || Py_SIZE(id) == 1) {
            *token = Py_SIZE(id) ? ((PyLongObject *) id)->ob_digit[0] : 0;
            return 1;
        }
    #endif
        value = PyLong_AsUnsignedLong(id);
        if (value == (unsigned long) -1 && PyErr_Occurred()) {
            PyErr_Clear();
            return 0;
        }
        *token = (uint32_t) value;
        return value <= 0xFFFFFFFFUL;
    }
    """
    void prefetch "kvtier_prefetch"(void *at)
    bint token_of "kvtier_token_of"(void *id, uint32_t *token)

cdef enum:
    AHEAD = 24  # ids: their memory is prefetched so far ahead
    NAME = 32  # bytes
    COUNT = 4  # bytes of the token count
    WORD = 4  # bytes of a token
    CHUNK = 64  # bytes that SHA-256 takes at once
    WIDEST = 4  # of the processor's ways
    PATIENCE = 16384  # tokens that are hashed with the GIL kept: getting it back can take longer than they do

cdef extern from "digests.h" nogil:
    ctypedef struct kvtier_digest128:
        uint64_t low
        uint64_t high
    const uint32_t *kvtier_sha256_start
    void kvtier_sha256(uint32_t *state, const uint8_t *data, size_t num_chunks)
    uint64_t kvtier_xxh3_64_seeded(const void *data, size_t size, uint64_t seed)
    kvtier_digest128 kvtier_xxh3_128(const void *data, size_t size)
    int kvtier_take_way(int number)

ctypedef void (*chain_t)(
    uint8_t *frame, const uint32_t *tokens, Py_ssize_t count, size_t size, uint8_t *out
) noexcept nogil

def digests(const uint8_t[::1] data not None, uint64_t seed, int way):
    """(xxh3-64 with this seed, xxh3-128 or None below 17 bytes, SHA-256) by one of the processor's ways; and how many.

    For tests: the plain way is 0. Afterwards the widest is taken again.
    """
    cdef size_t size = data.shape[0]
    cdef const uint8_t *first = &data[0] if size else NULL
    cdef bytearray padded = bytearray(data) + b"\x80" + bytes(-(size + 9) % CHUNK) + (8 * size).to_bytes(8, "big")
    cdef uint8_t *chunks = <uint8_t *> PyByteArray_AS_STRING(padded)
    cdef uint32_t state[8]
    cdef kvtier_digest128 both
    cdef int count = kvtier_take_way(max(0, way))
    memcpy(state, kvtier_sha256_start, NAME)
    kvtier_sha256(state, chunks, len(padded) // CHUNK)
    short = kvtier_xxh3_64_seeded(first, size, seed)
    if size > 16:
        both = kvtier_xxh3_128(first, size)
    kvtier_take_way(WIDEST)
    return short, ((<object> both.high) << 64 | both.low) if size > 16 else None, state, count


def fill(words, list ids not None, Py_ssize_t first, Py_ssize_t end):
    """Write `ids[first:end]` to the same places of `words`. False where one is no plain int in [0, 2**32)."""
    cdef Py_buffer view
    _get_words(words, &view, PyBUF_WRITABLE)
    try:
        if first < 0 or end > PyList_GET_SIZE(ids) or end > view.len // WORD:
            return False
        return _fill(<uint32_t *> view.buf, ids, first, end)
    finally:
        PyBuffer_Release(&view)


cdef bint _fill(uint32_t *words, list ids, Py_ssize_t first, Py_ssize_t end) noexcept:
    """Runs no Python code, so that the list stays as it is."""
    cdef Py_ssize_t i
    for i in range(first, end):
        if i + AHEAD < end:
            prefetch(<void *> PyList_GET_ITEM(ids, i + AHEAD))
        if not token_of(<void *> PyList_GET_ITEM(ids, i), &words[i]):
            return False
    return True


cdef int _get_words(object words, Py_buffer *view, int flags) except -1:
    """A view of an array of u32, which the caller releases."""
    PyObject_GetBuffer(words, view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | flags)
    if view.itemsize != WORD or view.format == NULL or strcmp(view.format, b"I"):
        PyBuffer_Release(view)
        raise TypeError("words: must be an array of u32")
    return 0


def names(str scheme, bytes parent not None, words, Py_ssize_t first, Py_ssize_t count, Py_ssize_t size):
    """The names of `count` blocks of `size` tokens behind `parent`, the first of which begins at word `first`.

    Long ones are hashed without the GIL. ValueError for a scheme that there is not, and for what lies out of bounds.
    """
    cdef Py_buffer view
    cdef bytes joined
    cdef chain_t chain = _sha256_chain if scheme == "sha256" else _xxh3_chain
    if scheme not in ("sha256", "xxh3"):
        raise ValueError(f"scheme {scheme!r}: use sha256 or xxh3")
    if PyBytes_GET_SIZE(parent) != NAME:
        raise ValueError(f"parent of {len(parent)} bytes: must be {NAME}")
    _get_words(words, &view, 0)
    try:
        if size < 1 or first < 0 or count < 0 or first > view.len // WORD or count > (view.len // WORD - first) // size:
            raise ValueError(f"{count} blocks of {size} from word {first}: there are {view.len // WORD} words")
        if not count:
            return []
        joined = PyBytes_FromStringAndSize(NULL, NAME * count)
        _run(chain, parent, <const uint32_t *> view.buf + first, count, size, joined)
    finally:
        PyBuffer_Release(&view)
    return _split(joined, count)


cdef int _run(
    chain_t chain, bytes parent, const uint32_t *tokens, Py_ssize_t count, size_t size, bytes joined
) except -1:
    cdef uint8_t *frame = <uint8_t *> calloc(1, NAME + COUNT + WORD * size + 2 * CHUNK)
    cdef uint8_t *out = <uint8_t *> PyBytes_AS_STRING(joined)
    cdef uint32_t num_tokens = <uint32_t> size
    if frame == NULL:
        raise MemoryError
    memcpy(frame, PyBytes_AS_STRING(parent), NAME)
    memcpy(frame + NAME, &num_tokens, COUNT)
    if count * <Py_ssize_t> size > PATIENCE:
        with nogil:
            chain(frame, tokens, count, size, out)
    else:
        chain(frame, tokens, count, size, out)
    free(frame)
    return 0


cdef list _split(bytes joined, Py_ssize_t count):
    cdef const char *name = PyBytes_AS_STRING(joined)
    cdef list names = PyList_New(count)
    cdef bytes each
    cdef Py_ssize_t i
    for i in range(count):
        each = PyBytes_FromStringAndSize(name + NAME * i, NAME)
        Py_INCREF(each)
        PyList_SET_ITEM(names, i, each)
    return names


cdef inline void _put(uint8_t *to, uint64_t number, int num_bytes) noexcept nogil:
    """A number, its highest byte first."""
    cdef int i
    for i in range(num_bytes):
        to[i] = <uint8_t> (number >> 8 * (num_bytes - 1 - i))


cdef void _sha256_chain(
    uint8_t *frame, const uint32_t *tokens, Py_ssize_t count, size_t size, uint8_t *out
) noexcept nogil:
    """`frame` begins with the parent's name and the token count; it is padded here as FIPS 180-4 says."""
    cdef uint32_t state[8]
    cdef size_t length = NAME + COUNT + WORD * size
    cdef size_t num_chunks = (length + 9 + CHUNK - 1) // CHUNK
    cdef Py_ssize_t i
    cdef int word
    frame[length] = 0x80
    _put(frame + CHUNK * num_chunks - 8, 8 * length, 8)
    for i in range(count):
        memcpy(frame + NAME + COUNT, tokens + i * size, WORD * size)
        memcpy(state, kvtier_sha256_start, NAME)
        kvtier_sha256(state, frame, num_chunks)
        for word in range(8):
            _put(frame + 4 * word, state[word], 4)
        memcpy(out + NAME * i, frame, NAME)


cdef void _xxh3_chain(
    uint8_t *frame, const uint32_t *tokens, Py_ssize_t count, size_t size, uint8_t *out
) noexcept nogil:
    """As `_sha256_chain`: the digest's 16 bytes, highest first, written twice."""
    cdef kvtier_digest128 digest
    cdef Py_ssize_t i
    for i in range(count):
        memcpy(frame + NAME + COUNT, tokens + i * size, WORD * size)
        digest = kvtier_xxh3_128(frame, NAME + COUNT + WORD * size)
        _put(frame, digest.high, 8)
        _put(frame + 8, digest.low, 8)
        memcpy(frame + 16, frame, 16)
        memcpy(out + NAME * i, frame, NAME)


def linked(words, Py_ssize_t size, uint64_t seed, uint64_t link_seed, parent):
    """Dynamo's sequence hashes of the full blocks of `size` tokens, behind a parent's one or None.

    `seed` is of each block's own hash, `link_seed` of its hash with the parent's. ValueError for a size below 1.
    """
    cdef Py_buffer view
    cdef uint64_t pair[2]
    cdef uint64_t own
    cdef bint has_parent = parent is not None
    cdef list hashes = []
    cdef Py_ssize_t i
    if size < 1:
        raise ValueError(f"block_size {size}: must be at least 1")
    pair[0] = parent if has_parent else 0
    _get_words(words, &view, 0)
    try:
        for i in range(view.len // WORD // size):
            own = kvtier_xxh3_64_seeded(<const uint32_t *> view.buf + i * size, WORD * size, seed)
            if has_parent:
                pair[1] = own
                own = kvtier_xxh3_64_seeded(pair, sizeof(pair), link_seed)
            has_parent, pair[0] = True, own
            hashes.append(own)
    finally:
        PyBuffer_Release(&view)
    return hashes


def unpacked(packed):
    """The u32 of a msgpack array of numbers as msgpack writes them shortest, native and back to back; None: another."""
    cdef Py_buffer view
    cdef const uint8_t *at
    cdef uint32_t *out
    cdef Py_ssize_t left, num_ids, head, width, i
    cdef bytes ids
    PyObject_GetBuffer(packed, &view, PyBUF_C_CONTIGUOUS)
    try:
        at, left = <const uint8_t *> view.buf, view.len
        head = 0 if left == 0 else 1 if at[0] >> 4 == 9 else 3 if at[0] == 0xDC else 5 if at[0] == 0xDD else 0
        if head == 0 or left < head:
            return None
        num_ids = at[0] & 15 if head == 1 else _number(at + 1, head - 1)
        at, left = at + head, left - head
        if num_ids > left:
            return None
        ids = PyBytes_FromStringAndSize(NULL, WORD * num_ids)
        out = <uint32_t *> PyBytes_AS_STRING(ids)
        for i in range(num_ids):
            if left < 1:
                return None
            width = 0 if at[0] < 0x80 else 1 << (at[0] - 0xCC) if 0xCC <= at[0] <= 0xCE else -1
            if width < 0 or left < 1 + width:
                return None
            out[i] = at[0] if width == 0 else _number(at + 1, width)
            at, left = at + 1 + width, left - 1 - width
        return ids if left == 0 else None
    finally:
        PyBuffer_Release(&view)


cdef inline uint32_t _number(const uint8_t *at, Py_ssize_t num_bytes) noexcept nogil:
    """Up to four bytes, the highest first."""
    cdef uint32_t number = 0
    cdef Py_ssize_t i
    for i in range(num_bytes):
        number = number << 8 | at[i]
    return number
