/* XXH3 and SHA-256 for extension modules, which hash without the interpreter's lock.

   Written from the specification of xxHash (doc/xxhash_spec.md, 0.2.0) and from FIPS 180-4. Long inputs of XXH3 take
   AVX-512, AVX2 or SSE2, SHA-256 the processor's own instructions; plain C does the same where there are none.
   tests/tiers/naming/test_compiled_names.py compares every way that the machine has with python-xxhash and hashlib. */

#ifndef KVTIER_DIGESTS_H
#define KVTIER_DIGESTS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#include <sys/auxv.h>
#endif

#define KVTIER_STATIC static __attribute__((unused))
#define KVTIER_INLINE static inline __attribute__((always_inline, unused))

typedef struct {
    uint64_t low, high;
} kvtier_digest128;

/* --- XXH3 ------------------------------------------------------------------------------------------------------- */

#define KVTIER_P32_1 0x9E3779B1U
#define KVTIER_P32_2 0x85EBCA77U
#define KVTIER_P32_3 0xC2B2AE3DU
#define KVTIER_P64_1 0x9E3779B185EBCA87U
#define KVTIER_P64_2 0xC2B2AE3D27D4EB4FU
#define KVTIER_P64_3 0x165667B19E3779F9U
#define KVTIER_P64_4 0x85EBCA77C2B2AE63U
#define KVTIER_P64_5 0x27D4EB2F165667C5U
#define KVTIER_MX1 0x165667919E3779F9U
#define KVTIER_MX2 0x9FB21C651E98DF25U

enum { KVTIER_SECRET = 192, KVTIER_STRIPE = 64, KVTIER_ROUND = 16 * 64, KVTIER_MEDIUM = 240 }; /* bytes */

/* The default secret: part of the format. */
static const uint8_t kvtier_secret[KVTIER_SECRET] __attribute__((aligned(64))) = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

KVTIER_INLINE uint64_t kvtier_u64(const uint8_t *at) {
    uint64_t word;
    memcpy(&word, at, 8);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    word = __builtin_bswap64(word);
#endif
    return word;
}

KVTIER_INLINE uint32_t kvtier_u32(const uint8_t *at) {
    uint32_t word;
    memcpy(&word, at, 4);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    word = __builtin_bswap32(word);
#endif
    return word;
}

/* Both halves of a product, folded into one. */
KVTIER_INLINE uint64_t kvtier_fold(uint64_t a, uint64_t b) {
    unsigned __int128 product = (unsigned __int128) a * b;
    return (uint64_t) product ^ (uint64_t) (product >> 64);
}

KVTIER_INLINE uint64_t kvtier_avalanche(uint64_t x) {
    x = (x ^ x >> 37) * KVTIER_MX1;
    return x ^ x >> 32;
}

KVTIER_INLINE uint64_t kvtier_avalanche64(uint64_t x) {
    x = (x ^ x >> 33) * KVTIER_P64_2;
    x = (x ^ x >> 29) * KVTIER_P64_3;
    return x ^ x >> 32;
}

KVTIER_INLINE uint64_t kvtier_mix(const uint8_t *data, size_t at, uint64_t seed) {
    return kvtier_fold(kvtier_u64(data) ^ (kvtier_u64(kvtier_secret + at) + seed),
                       kvtier_u64(data + 8) ^ (kvtier_u64(kvtier_secret + at + 8) - seed));
}

KVTIER_INLINE void kvtier_mix_two(uint64_t *sums, const uint8_t *one, const uint8_t *two, size_t at, uint64_t seed) {
    sums[0] = (sums[0] + kvtier_mix(one, at, seed)) ^ (kvtier_u64(two) + kvtier_u64(two + 8));
    sums[1] = (sums[1] + kvtier_mix(two, at + 16, seed)) ^ (kvtier_u64(one) + kvtier_u64(one + 8));
}

/* The three steps over stripes of 64 bytes; `ACCUMULATE(data, secret)` and `SCRAMBLE(secret)` are the caller's. `end` is
   1 if the data ends here, and 0 if more follows behind whole rounds. */
#define KVTIER_STRIPES(data, size, secret, end)                                                                        \
    size_t rounds = (size - end) / KVTIER_ROUND, stripe, stripes;                                                      \
    const uint8_t *last = data + size - KVTIER_STRIPE;                                                                 \
    for (; rounds; rounds--, data += KVTIER_ROUND, size -= KVTIER_ROUND) {                                             \
        for (stripe = 0; stripe < 16; stripe++) ACCUMULATE(data + KVTIER_STRIPE * stripe, secret + 8 * stripe);        \
        SCRAMBLE(secret + KVTIER_SECRET - KVTIER_STRIPE);                                                              \
    }                                                                                                                  \
    if (end) {                                                                                                         \
        stripes = (size - 1) / KVTIER_STRIPE;                                                                          \
        for (stripe = 0; stripe < stripes; stripe++) ACCUMULATE(data + KVTIER_STRIPE * stripe, secret + 8 * stripe);   \
        ACCUMULATE(last, secret + KVTIER_SECRET - 71);                                                                 \
    }

typedef void (*kvtier_long_t)(uint64_t *sums, const uint8_t *data, size_t size, const uint8_t *secret, int end);

#define ACCUMULATE(from, key)                                                                                          \
    for (lane = 0; lane < 8; lane++) {                                                                                 \
        uint64_t value = kvtier_u64((from) + 8 * lane), mixed = value ^ kvtier_u64((key) + 8 * lane);                  \
        sums[lane ^ 1] += value;                                                                                       \
        sums[lane] += (mixed & 0xFFFFFFFFU) * (mixed >> 32);                                                           \
    }
#define SCRAMBLE(key)                                                                                                  \
    for (lane = 0; lane < 8; lane++)                                                                                   \
        sums[lane] = (sums[lane] ^ sums[lane] >> 47 ^ kvtier_u64((key) + 8 * lane)) * KVTIER_P32_1;

KVTIER_STATIC void kvtier_long_plain(uint64_t *sums, const uint8_t *data, size_t size, const uint8_t *secret,
                                     int end) {
    int lane;
    KVTIER_STRIPES(data, size, secret, end)
}

#undef ACCUMULATE
#undef SCRAMBLE

#if defined(__x86_64__)

/* Intrinsics of one width: `P` is their prefix, `W` the bits of a register. */
#define KVTIER_LONG(NAME, TARGET, P, W)                                                                                \
    KVTIER_STATIC __attribute__((target(TARGET))) void NAME(uint64_t *sums, const uint8_t *data, size_t size,          \
                                                            const uint8_t *secret, int end) {                          \
        enum { STEP = W / 8, NUM = 512 / W };                                                                          \
        const __m##W##i prime = P##set1_epi32((int) KVTIER_P32_1);                                                     \
        __m##W##i sum[NUM], value, mixed;                                                                              \
        int i;                                                                                                         \
        for (i = 0; i < NUM; i++) sum[i] = P##loadu_si##W((const void *) ((uint8_t *) sums + STEP * i));               \
        KVTIER_STRIPES(data, size, secret, end)                                                                        \
        for (i = 0; i < NUM; i++) P##storeu_si##W((void *) ((uint8_t *) sums + STEP * i), sum[i]);                     \
    }
#define KVTIER_EACH _Pragma("GCC unroll 4") for (i = 0; i < NUM; i++)
#define KVTIER_ACCUMULATE(from, key, P, W)                                                                             \
    KVTIER_EACH {                                                                                                      \
        value = P##loadu_si##W((const void *) ((from) + STEP * i));                                                    \
        mixed = P##xor_si##W(value, P##loadu_si##W((const void *) ((key) + STEP * i)));                                \
        sum[i] = P##add_epi64(sum[i], P##shuffle_epi32(value, 0x4E));                                                  \
        sum[i] = P##add_epi64(sum[i], P##mul_epu32(mixed, P##srli_epi64(mixed, 32)));                                  \
    }
#define KVTIER_SCRAMBLE(key, P, W)                                                                                     \
    KVTIER_EACH {                                                                                                      \
        mixed = P##xor_si##W(sum[i], P##srli_epi64(sum[i], 47));                                                       \
        mixed = P##xor_si##W(mixed, P##loadu_si##W((const void *) ((key) + STEP * i)));                                \
        value = P##slli_epi64(P##mul_epu32(P##srli_epi64(mixed, 32), prime), 32);                                      \
        sum[i] = P##add_epi64(value, P##mul_epu32(mixed, prime));                                                      \
    }

#define ACCUMULATE(from, key) KVTIER_ACCUMULATE(from, key, _mm_, 128)
#define SCRAMBLE(key) KVTIER_SCRAMBLE(key, _mm_, 128)
KVTIER_LONG(kvtier_long_sse2, "sse2", _mm_, 128)
#undef ACCUMULATE
#undef SCRAMBLE
#define ACCUMULATE(from, key) KVTIER_ACCUMULATE(from, key, _mm256_, 256)
#define SCRAMBLE(key) KVTIER_SCRAMBLE(key, _mm256_, 256)
KVTIER_LONG(kvtier_long_avx2, "avx2", _mm256_, 256)
#undef ACCUMULATE
#undef SCRAMBLE
#define ACCUMULATE(from, key) KVTIER_ACCUMULATE(from, key, _mm512_, 512)
#define SCRAMBLE(key) KVTIER_SCRAMBLE(key, _mm512_, 512)
KVTIER_LONG(kvtier_long_avx512, "avx512f", _mm512_, 512)
#undef ACCUMULATE
#undef SCRAMBLE

#endif

static kvtier_long_t kvtier_long = kvtier_long_plain;

KVTIER_STATIC void kvtier_start(uint64_t *sums) {
    static const uint64_t start[8] = {KVTIER_P32_3, KVTIER_P64_1, KVTIER_P64_2, KVTIER_P64_3,
                                      KVTIER_P64_4, KVTIER_P32_2, KVTIER_P64_5, KVTIER_P32_1};
    memcpy(sums, start, sizeof(start));
}

KVTIER_STATIC void kvtier_sums(uint64_t *sums, const uint8_t *data, size_t size, const uint8_t *secret) {
    kvtier_start(sums);
    kvtier_long(sums, data, size, secret, 1);
}

KVTIER_STATIC uint64_t kvtier_merge(const uint64_t *sums, uint64_t start, const uint8_t *secret) {
    int i;
    for (i = 0; i < 8; i += 2)
        start += kvtier_fold(sums[i] ^ kvtier_u64(secret + 8 * i), sums[i + 1] ^ kvtier_u64(secret + 8 * i + 8));
    return kvtier_avalanche(start);
}

KVTIER_INLINE uint64_t kvtier_secret_pair(size_t at) {
    return kvtier_u64(kvtier_secret + at) ^ kvtier_u64(kvtier_secret + at + 8);
}

KVTIER_STATIC uint64_t kvtier_short(const uint8_t *data, size_t size, uint64_t seed) {
    uint64_t low, high, value;
    if (size > 8) {
        low = (kvtier_secret_pair(24) + seed) ^ kvtier_u64(data);
        high = (kvtier_secret_pair(40) - seed) ^ kvtier_u64(data + size - 8);
        return kvtier_avalanche(size + __builtin_bswap64(low) + high + kvtier_fold(low, high));
    }
    if (size > 3) {
        seed ^= (uint64_t) __builtin_bswap32((uint32_t) seed) << 32;
        value = kvtier_u32(data + size - 4) | (uint64_t) kvtier_u32(data) << 32;
        value ^= kvtier_secret_pair(8) - seed;
        value ^= (value << 49 | value >> 15) ^ (value << 24 | value >> 40);
        value *= KVTIER_MX2;
        value = (value ^ ((value >> 35) + size)) * KVTIER_MX2;
        return value ^ value >> 28;
    }
    if (size)
        return kvtier_avalanche64(
            ((kvtier_u32(kvtier_secret) ^ kvtier_u32(kvtier_secret + 4)) + seed) ^
            (data[size - 1] | (uint32_t) size << 8 | (uint32_t) data[0] << 16 | (uint32_t) data[size >> 1] << 24));
    return kvtier_avalanche64(seed ^ kvtier_secret_pair(56));
}

KVTIER_STATIC uint64_t kvtier_xxh3_64_seeded(const void *from, size_t size, uint64_t seed) {
    const uint8_t *data = (const uint8_t *) from;
    uint64_t sums[8], sum = size * KVTIER_P64_1;
    uint64_t own[KVTIER_SECRET / 8];
    const uint8_t *secret = kvtier_secret;
    size_t i;
    if (size <= 16) return kvtier_short(data, size, seed);
    if (size <= 128) {
        for (i = (size - 1) / 32 + 1; i-- > 0;) {
            sum += kvtier_mix(data + 16 * i, 32 * i, seed);
            sum += kvtier_mix(data + size - 16 * i - 16, 32 * i + 16, seed);
        }
        return kvtier_avalanche(sum);
    }
    if (size <= KVTIER_MEDIUM) {
        for (i = 0; i < 8; i++) sum += kvtier_mix(data + 16 * i, 16 * i, seed);
        sum = kvtier_avalanche(sum);
        for (i = 8; i < size / 16; i++) sum += kvtier_mix(data + 16 * i, 16 * (i - 8) + 3, seed);
        return kvtier_avalanche(sum + kvtier_mix(data + size - 16, 119, seed));
    }
    if (seed) {
        for (i = 0; i < KVTIER_SECRET / 8; i++) {
            own[i] = kvtier_u64(kvtier_secret + 8 * i) + (i % 2 ? 0 - seed : seed);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
            own[i] = __builtin_bswap64(own[i]);
#endif
        }
        secret = (const uint8_t *) own;
    }
    kvtier_sums(sums, data, size, secret);
    return kvtier_merge(sums, sum, secret + 11);
}

KVTIER_STATIC uint64_t kvtier_xxh3_64(const void *from, size_t size) { return kvtier_xxh3_64_seeded(from, size, 0); }

/* XXH3-64 of data that arrives: `sums` (from `kvtier_start`) have its first `done` bytes, and `have` of `size` are there.
   Returns how many `sums` have now; once all are there, `*digest` is that of all, and the return value is `size`. */
KVTIER_STATIC size_t kvtier_xxh3_more(uint64_t *sums, const uint8_t *data, size_t done, size_t have, size_t size,
                                      uint64_t *digest) {
    size_t whole = size ? (size - 1) / KVTIER_ROUND * KVTIER_ROUND : 0;
    if (have == size) {
        if (size <= KVTIER_MEDIUM) *digest = kvtier_xxh3_64(data, size);
        else {
            kvtier_long(sums, data + done, size - done, kvtier_secret, 1);
            *digest = kvtier_merge(sums, size * KVTIER_P64_1, kvtier_secret + 11);
        }
        return size;
    }
    if (whole > have) whole = have / KVTIER_ROUND * KVTIER_ROUND;
    if (whole <= done) return done;
    kvtier_long(sums, data + done, whole - done, kvtier_secret, 0);
    return whole;
}

/* Of 17 bytes or more. */
KVTIER_STATIC kvtier_digest128 kvtier_xxh3_128(const void *from, size_t size) {
    const uint8_t *data = (const uint8_t *) from;
    uint64_t sums[8] = {size * KVTIER_P64_1, 0};
    kvtier_digest128 digest;
    size_t i;
    if (size > KVTIER_MEDIUM) {
        kvtier_sums(sums, data, size, kvtier_secret);
        digest.low = kvtier_merge(sums, size * KVTIER_P64_1, kvtier_secret + 11);
        digest.high = kvtier_merge(sums, ~(size * KVTIER_P64_2), kvtier_secret + KVTIER_SECRET - 75);
        return digest;
    }
    if (size <= 128) {
        for (i = (size - 1) / 32 + 1; i-- > 0;) kvtier_mix_two(sums, data + 16 * i, data + size - 16 * i - 16, 32 * i, 0);
    } else {
        for (i = 0; i < 4; i++) kvtier_mix_two(sums, data + 32 * i, data + 32 * i + 16, 32 * i, 0);
        sums[0] = kvtier_avalanche(sums[0]);
        sums[1] = kvtier_avalanche(sums[1]);
        for (i = 4; i < size / 32; i++) kvtier_mix_two(sums, data + 32 * i, data + 32 * i + 16, 32 * (i - 4) + 3, 0);
        kvtier_mix_two(sums, data + size - 16, data + size - 32, 103, 0);
    }
    digest.low = kvtier_avalanche(sums[0] + sums[1]);
    digest.high = 0 - kvtier_avalanche(sums[0] * KVTIER_P64_1 + sums[1] * KVTIER_P64_4 + size * KVTIER_P64_2);
    return digest;
}

/* --- SHA-256 ---------------------------------------------------------------------------------------------------- */

static const uint32_t kvtier_sha256_start[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                                0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

static const uint32_t kvtier_sha256_k[64] __attribute__((aligned(64))) = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

/* Takes whole chunks of 64 bytes into the state. */
typedef void (*kvtier_sha256_t)(uint32_t *state, const uint8_t *data, size_t num_chunks);

KVTIER_INLINE uint32_t kvtier_right(uint32_t x, int by) { return x >> by | x << (32 - by); }

/* One round: only d and h change, the names of the others move on. */
#define KVTIER_ROUND1(a, b, c, d, e, f, g, h, at)                                                                      \
    h += (kvtier_right(e, 6) ^ kvtier_right(e, 11) ^ kvtier_right(e, 25)) + (g ^ (e & (f ^ g)));                       \
    h += kvtier_sha256_k[i + (at)] + w[i + (at)];                                                                      \
    d += h;                                                                                                            \
    h += (kvtier_right(a, 2) ^ kvtier_right(a, 13) ^ kvtier_right(a, 22)) + ((a & b) | (c & (a | b)));

KVTIER_STATIC void kvtier_sha256_plain(uint32_t *state, const uint8_t *data, size_t num_chunks) {
    uint32_t w[64], a, b, c, d, e, f, g, h;
    int i;
    for (; num_chunks; num_chunks--, data += 64) {
        for (i = 0; i < 16; i++) w[i] = __builtin_bswap32(kvtier_u32(data + 4 * i));
        for (; i < 64; i++)
            w[i] = w[i - 16] + (kvtier_right(w[i - 15], 7) ^ kvtier_right(w[i - 15], 18) ^ w[i - 15] >> 3) + w[i - 7] +
                   (kvtier_right(w[i - 2], 17) ^ kvtier_right(w[i - 2], 19) ^ w[i - 2] >> 10);
        a = state[0], b = state[1], c = state[2], d = state[3], e = state[4], f = state[5], g = state[6], h = state[7];
        for (i = 0; i < 64; i += 8) {
            KVTIER_ROUND1(a, b, c, d, e, f, g, h, 0) KVTIER_ROUND1(h, a, b, c, d, e, f, g, 1)
            KVTIER_ROUND1(g, h, a, b, c, d, e, f, 2) KVTIER_ROUND1(f, g, h, a, b, c, d, e, 3)
            KVTIER_ROUND1(e, f, g, h, a, b, c, d, 4) KVTIER_ROUND1(d, e, f, g, h, a, b, c, 5)
            KVTIER_ROUND1(c, d, e, f, g, h, a, b, 6) KVTIER_ROUND1(b, c, d, e, f, g, h, a, 7)
        }
        state[0] += a, state[1] += b, state[2] += c, state[3] += d, state[4] += e, state[5] += f, state[6] += g;
        state[7] += h;
    }
}

#if defined(__x86_64__)

/* Four rounds with the words in `a`, which then gets those of sixteen rounds later. */
#define KVTIER_ROUNDS(a, b, c, d, at)                                                                                  \
    mixed = _mm_add_epi32(a, _mm_load_si128((const __m128i *) (kvtier_sha256_k + (at))));                              \
    cdgh = _mm_sha256rnds2_epu32(cdgh, abef, mixed);                                                                   \
    abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(mixed, 0x0E));                                          \
    if ((at) < 48) a = _mm_sha256msg2_epu32(_mm_add_epi32(_mm_sha256msg1_epu32(a, b), _mm_alignr_epi8(d, c, 4)), d);

KVTIER_STATIC __attribute__((target("sha,sse4.1"))) void kvtier_sha256_native(uint32_t *state, const uint8_t *data,
                                                                              size_t num_chunks) {
    const __m128i order = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
    __m128i badc = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *) state), 0xB1);
    __m128i hgfe = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *) (state + 4)), 0x1B);
    __m128i abef = _mm_alignr_epi8(badc, hgfe, 8), cdgh = _mm_blend_epi16(hgfe, badc, 0xF0);
    __m128i abef_before, cdgh_before, mixed, a, b, c, d;
    for (; num_chunks; num_chunks--, data += 64) {
        abef_before = abef;
        cdgh_before = cdgh;
        a = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *) data), order);
        b = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *) (data + 16)), order);
        c = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *) (data + 32)), order);
        d = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *) (data + 48)), order);
        KVTIER_ROUNDS(a, b, c, d, 0) KVTIER_ROUNDS(b, c, d, a, 4) KVTIER_ROUNDS(c, d, a, b, 8)
        KVTIER_ROUNDS(d, a, b, c, 12) KVTIER_ROUNDS(a, b, c, d, 16) KVTIER_ROUNDS(b, c, d, a, 20)
        KVTIER_ROUNDS(c, d, a, b, 24) KVTIER_ROUNDS(d, a, b, c, 28) KVTIER_ROUNDS(a, b, c, d, 32)
        KVTIER_ROUNDS(b, c, d, a, 36) KVTIER_ROUNDS(c, d, a, b, 40) KVTIER_ROUNDS(d, a, b, c, 44)
        KVTIER_ROUNDS(a, b, c, d, 48) KVTIER_ROUNDS(b, c, d, a, 52) KVTIER_ROUNDS(c, d, a, b, 56)
        KVTIER_ROUNDS(d, a, b, c, 60)
        abef = _mm_add_epi32(abef, abef_before);
        cdgh = _mm_add_epi32(cdgh, cdgh_before);
    }
    badc = _mm_shuffle_epi32(abef, 0x1B); /* a, b, e, f */
    hgfe = _mm_shuffle_epi32(cdgh, 0xB1); /* g, h, c, d */
    _mm_storeu_si128((__m128i *) state, _mm_blend_epi16(badc, hgfe, 0xF0));
    _mm_storeu_si128((__m128i *) (state + 4), _mm_alignr_epi8(hgfe, badc, 8));
}

#elif defined(__aarch64__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__

#define KVTIER_ROUNDS(a, b, c, d, at)                                                                                  \
    mixed = vaddq_u32(a, vld1q_u32(kvtier_sha256_k + (at)));                                                           \
    old = abcd;                                                                                                        \
    abcd = vsha256hq_u32(abcd, efgh, mixed);                                                                           \
    efgh = vsha256h2q_u32(efgh, old, mixed);                                                                           \
    if ((at) < 48) a = vsha256su1q_u32(vsha256su0q_u32(a, b), c, d);

KVTIER_STATIC __attribute__((target("+crypto"))) void kvtier_sha256_native(uint32_t *state, const uint8_t *data,
                                                                           size_t num_chunks) {
    uint32x4_t abcd = vld1q_u32(state), efgh = vld1q_u32(state + 4), abcd_before, efgh_before, mixed, old, a, b, c, d;
    for (; num_chunks; num_chunks--, data += 64) {
        abcd_before = abcd;
        efgh_before = efgh;
        a = vreinterpretq_u32_u8(vrev32q_u8(vld1q_u8(data)));
        b = vreinterpretq_u32_u8(vrev32q_u8(vld1q_u8(data + 16)));
        c = vreinterpretq_u32_u8(vrev32q_u8(vld1q_u8(data + 32)));
        d = vreinterpretq_u32_u8(vrev32q_u8(vld1q_u8(data + 48)));
        KVTIER_ROUNDS(a, b, c, d, 0) KVTIER_ROUNDS(b, c, d, a, 4) KVTIER_ROUNDS(c, d, a, b, 8)
        KVTIER_ROUNDS(d, a, b, c, 12) KVTIER_ROUNDS(a, b, c, d, 16) KVTIER_ROUNDS(b, c, d, a, 20)
        KVTIER_ROUNDS(c, d, a, b, 24) KVTIER_ROUNDS(d, a, b, c, 28) KVTIER_ROUNDS(a, b, c, d, 32)
        KVTIER_ROUNDS(b, c, d, a, 36) KVTIER_ROUNDS(c, d, a, b, 40) KVTIER_ROUNDS(d, a, b, c, 44)
        KVTIER_ROUNDS(a, b, c, d, 48) KVTIER_ROUNDS(b, c, d, a, 52) KVTIER_ROUNDS(c, d, a, b, 56)
        KVTIER_ROUNDS(d, a, b, c, 60)
        abcd = vaddq_u32(abcd, abcd_before);
        efgh = vaddq_u32(efgh, efgh_before);
    }
    vst1q_u32(state, abcd);
    vst1q_u32(state + 4, efgh);
}

#endif

static kvtier_sha256_t kvtier_sha256 = kvtier_sha256_plain;

/* --- The processor's ways ---------------------------------------------------------------------------------------- */

enum { KVTIER_NUM_WAYS = 4 };

/* Takes way `number` of those that this processor has, 0 the plain one; more than there are: the last, the widest. */
KVTIER_STATIC int kvtier_take_way(int number) {
    kvtier_long_t longs[KVTIER_NUM_WAYS] = {kvtier_long_plain};
    kvtier_sha256_t shas[KVTIER_NUM_WAYS] = {kvtier_sha256_plain};
    int num_longs = 1, num_shas = 1;
#if defined(__x86_64__)
    unsigned a, b, c, d;
    longs[num_longs++] = kvtier_long_sse2;
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2")) longs[num_longs++] = kvtier_long_avx2;
    if (__builtin_cpu_supports("avx512f")) longs[num_longs++] = kvtier_long_avx512;
    if (__builtin_cpu_supports("sse4.1") && __get_cpuid_count(7, 0, &a, &b, &c, &d) && b >> 29 & 1)
        shas[num_shas++] = kvtier_sha256_native;
#elif defined(__aarch64__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    if (getauxval(AT_HWCAP) & 1 << 6) shas[num_shas++] = kvtier_sha256_native; /* HWCAP_SHA2 */
#endif
    kvtier_long = longs[number < num_longs ? number : num_longs - 1];
    kvtier_sha256 = shas[number < num_shas ? number : num_shas - 1];
    return num_longs > num_shas ? num_longs : num_shas;
}

static __attribute__((constructor)) void kvtier_take_widest(void) { kvtier_take_way(KVTIER_NUM_WAYS); }

#endif
