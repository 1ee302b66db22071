# cython: language_level=3, boundscheck=True, wraparound=False, cdivision=True, initializedcheck=False, auto_pickle=False
"""The loops of fp8.py, compiled: the same bytes, without the GIL. What it is given is checked once, before them."""

from libc.stdint cimport int32_t, uint8_t, uint16_t, uint32_t

cdef enum:
    BFLOAT16 = 0  # as `_KINDS` of fp8.py has them
    FLOAT16 = 1
    FLOAT32 = 2
    MOST_GROUP = 128
    INFINITY = 0x7F800000
    LEAST_NORMAL = 121 << 23
    REBASED = 120 << 3
    FITS = 0x680000  # the mantissa of 464 / 256
    LAST_SCALE = 247

cdef union Word:
    uint32_t bits
    float number


cdef inline float number_of(uint32_t bits) noexcept nogil:
    cdef Word word
    word.bits = bits
    return word.number


cdef inline uint32_t bits_of(float number) noexcept nogil:
    cdef Word word
    word.number = number
    return word.bits


cdef inline uint32_t widened(uint16_t half) noexcept nogil:
    """A float16 as the bits of a float32; what is not finite stays so."""
    cdef uint32_t sign = <uint32_t> (half & 0x8000) << 16, magnitude = half & 0x7FFF
    if magnitude >= 0x7C00:
        return sign | INFINITY | (magnitude << 13)
    if magnitude < 0x400:  # subnormal
        return sign | bits_of(<float> <int32_t> magnitude * number_of(103 << 23))
    return sign | ((magnitude << 13) + (112 << 23))


cdef inline uint16_t narrowed(uint32_t bits) noexcept nogil:
    """The bits of a float32 as a float16, whose largest number it does not pass: four bits of mantissa, or rounded."""
    cdef uint32_t magnitude = bits & 0x7FFFFFFF
    cdef uint16_t sign = <uint16_t> ((bits >> 16) & 0x8000)
    if magnitude < 113 << 23:
        return sign | <uint16_t> (bits_of(number_of(magnitude) + 0.5) & 0x7FF)
    return sign | <uint16_t> ((magnitude >> 13) - (112 << 10))


cdef inline uint8_t code_of(uint32_t bits) noexcept nogil:
    cdef uint32_t magnitude = bits & 0x7FFFFFFF
    cdef uint8_t sign = <uint8_t> ((bits >> 24) & 0x80)
    if magnitude < LEAST_NORMAL:
        return sign | <uint8_t> (bits_of(number_of(magnitude) + 16384) & 0xF)
    return sign | <uint8_t> (((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - REBASED)


cdef inline int32_t scale_of(uint32_t largest) noexcept nogil:
    """The least by which it fits, as a byte."""
    cdef int32_t scale = <int32_t> (largest >> 23) - 8 + ((largest & 0x7FFFFF) > FITS)
    return scale if scale > 1 else 1


cdef bint packed(
    const uint8_t *numbers, uint8_t *codes, uint8_t *scales, Py_ssize_t groups, Py_ssize_t group, int kind
) noexcept nogil:
    cdef uint32_t[MOST_GROUP] row
    cdef uint32_t largest, magnitude
    cdef Py_ssize_t at, i, first
    cdef int32_t scale
    cdef float factor
    for at in range(groups):
        first, largest = at * group, 0
        if kind == FLOAT32:
            for i in range(group):
                row[i] = (<const uint32_t *> numbers)[first + i]
        elif kind == BFLOAT16:
            for i in range(group):
                row[i] = <uint32_t> (<const uint16_t *> numbers)[first + i] << 16
        else:
            for i in range(group):
                row[i] = widened((<const uint16_t *> numbers)[first + i])
        for i in range(group):
            magnitude = row[i] & 0x7FFFFFFF
            largest = magnitude if magnitude > largest else largest
        if largest >= INFINITY:
            return False
        scale = scale_of(largest)
        scales[at] = <uint8_t> scale
        factor = number_of(<uint32_t> (254 - scale) << 23)
        for i in range(group):
            codes[first + i] = code_of(bits_of(number_of(row[i]) * factor))
    return True


cdef bint unpacked(
    const uint8_t *codes, const uint8_t *scales, uint8_t *numbers, Py_ssize_t groups, Py_ssize_t group, int kind
) noexcept nogil:
    cdef float[256] values
    cdef uint32_t[MOST_GROUP] row
    cdef float factor, number, most
    cdef Py_ssize_t at, i, first
    cdef bint is_code = True
    for i in range(128):
        values[i] = number_of(<uint32_t> (i + REBASED) << 20) if i >= 8 else <float> i * number_of(118 << 23)
        values[i + 128] = -values[i]
    most = 65504 if kind == FLOAT16 else number_of(0x7F7F0000 if kind == BFLOAT16 else 0x7F7FFFFF)
    for at in range(groups):
        if not 1 <= scales[at] <= LAST_SCALE:
            return False
        first, factor = at * group, number_of(<uint32_t> scales[at] << 23)
        for i in range(group):
            is_code &= (codes[first + i] & 0x7F) != 0x7F
            number = values[codes[first + i]] * factor
            number = most if number > most else -most if number < -most else number
            row[i] = bits_of(number)
        if kind == FLOAT32:
            for i in range(group):
                (<uint32_t *> numbers)[first + i] = row[i]
        elif kind == BFLOAT16:
            for i in range(group):
                (<uint16_t *> numbers)[first + i] = <uint16_t> (row[i] >> 16)
        else:
            for i in range(group):
                (<uint16_t *> numbers)[first + i] = narrowed(row[i])
        if not is_code:
            return False
    return True


cdef int required(Py_ssize_t num_bytes, Py_ssize_t codes, Py_ssize_t scales, Py_ssize_t group, int kind) except -1:
    if not 0 < group <= MOST_GROUP or not 0 <= kind <= FLOAT32:
        raise ValueError(f"groups of {group} numbers of kind {kind}")
    if codes != scales * group or num_bytes != codes * (4 if kind == FLOAT32 else 2):
        raise ValueError(f"{num_bytes} bytes, {codes} codes, {scales} scales of groups of {group}")
    return 0


def pack(numbers, uint8_t[::1] codes, uint8_t[::1] scales, Py_ssize_t group, int kind):
    """False if a number is not finite. ValueError for arrays that do not belong together."""
    cdef const uint8_t[::1] given = numbers.view("u1")
    cdef bint is_finite = True
    required(given.shape[0], codes.shape[0], scales.shape[0], group, kind)
    if scales.shape[0]:
        with nogil:
            is_finite = packed(&given[0], &codes[0], &scales[0], scales.shape[0], group, kind)
    return is_finite


def unpack(const uint8_t[::1] codes, const uint8_t[::1] scales, numbers, Py_ssize_t group, int kind):
    """False for a code or a scale that no packer makes. ValueError for arrays that do not belong together."""
    cdef uint8_t[::1] taken = numbers.view("u1")
    cdef bint is_whole = True
    required(taken.shape[0], codes.shape[0], scales.shape[0], group, kind)
    if scales.shape[0]:
        with nogil:
            is_whole = unpacked(&codes[0], &scales[0], &taken[0], scales.shape[0], group, kind)
    return is_whole
