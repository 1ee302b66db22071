"""The compiled twin of `BlockRecords.put_columns`: rows are packed by one call, which keeps the GIL all the while."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy, memset

cdef enum:
    HASH_BYTES = 32
    CHECKSUM_AT = 32
    GENERATION_AT = 40
    LENGTHS_AT = 44
    TOKENS_AT = 48
    SIZE_BITS = 26


def put_columns(
    uint8_t[::1] rows,
    const uint8_t[::1] names,
    const int64_t[::1] generations,
    list slots,
    list chain_hashes,
    list parents,
    list tokens,
    list checksums,
):
    """Describe slots, up to the first record that may not be put; returns how many came before it.

    The rows are as long as fit the slots: 48 bytes and the tokens. Lists of one length.
    """
    cdef Py_ssize_t count = len(slots), num_slots = generations.shape[0], i
    if not len(chain_hashes) == len(parents) == len(tokens) == len(checksums) == count:
        return 0
    if names.shape[0] // HASH_BYTES < num_slots:
        num_slots = names.shape[0] // HASH_BYTES
    cdef Py_ssize_t stride = rows.shape[0] // num_slots if num_slots else 0
    cdef Py_ssize_t slot, parent_bytes, token_bytes
    cdef uint8_t *row
    cdef bytes name, parent, block_tokens
    cdef uint64_t checksum
    cdef uint32_t generation, lengths
    for i in range(count):
        try:
            slot, name, parent, block_tokens, checksum = slots[i], chain_hashes[i], parents[i], tokens[i], checksums[i]
        except (OverflowError, TypeError):
            return i
        if name is None or parent is None or block_tokens is None or not 0 <= slot < num_slots:
            return i
        parent_bytes, token_bytes = PyBytes_GET_SIZE(parent), PyBytes_GET_SIZE(block_tokens)
        if parent_bytes > HASH_BYTES or token_bytes > stride - TOKENS_AT or PyBytes_GET_SIZE(name) != HASH_BYTES:
            return i
        if memcmp(&names[slot * HASH_BYTES], PyBytes_AS_STRING(name), HASH_BYTES):
            return i
        row = &rows[slot * stride]
        generation = <uint32_t>generations[slot]
        lengths = <uint32_t>(parent_bytes << SIZE_BITS | token_bytes)
        memset(row, 0, HASH_BYTES)
        memcpy(row, PyBytes_AS_STRING(parent), parent_bytes)
        memcpy(row + CHECKSUM_AT, &checksum, 8)
        memcpy(row + GENERATION_AT, &generation, 4)
        memcpy(row + LENGTHS_AT, &lengths, 4)
        memcpy(row + TOKENS_AT, PyBytes_AS_STRING(block_tokens), token_bytes)
        memset(row + TOKENS_AT + token_bytes, 0, stride - TOKENS_AT - token_bytes)
    return count
