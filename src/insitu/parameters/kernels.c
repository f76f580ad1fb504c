/* What a step with parameter servers does to large arrays: one sweep over memory where NumPy takes several.

   `native.py` compiles this file and says what the functions mean. Each element is rounded as NumPy rounds
   it; nothing is contracted. Copies that are too large for the caches are written past them, so that nothing
   is fetched only to be overwritten, and what lies in the caches stays there. */
#include <stdint.h>
#include <string.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__) && defined(__gnu_linux__)
#define WIDE __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define WIDE
#endif

enum { BLOCK = 2048 }; /* elements: what is read twice is in the first-level cache the second time */

static uint64_t at_most(uint64_t count) { return count < BLOCK ? count : BLOCK; }

static void copy(float *restrict to, const float *restrict from, uint64_t count, int past_caches) {
#if defined(__SSE2__)
    if (past_caches) {
        uint64_t i = 0;
        for (; i < count && (uintptr_t)(to + i) % 16; i++) to[i] = from[i];
        for (; i + 16 <= count; i += 16) {
            __m128 a = _mm_loadu_ps(from + i), b = _mm_loadu_ps(from + i + 4);
            __m128 c = _mm_loadu_ps(from + i + 8), d = _mm_loadu_ps(from + i + 12);
            _mm_stream_ps(to + i, a);
            _mm_stream_ps(to + i + 4, b);
            _mm_stream_ps(to + i + 8, c);
            _mm_stream_ps(to + i + 12, d);
        }
        for (; i < count; i++) to[i] = from[i];
        return;
    }
#endif
    (void)past_caches;
    memcpy(to, from, count * sizeof(float));
}

/* What was written past the caches is there for others before anything that is written afterwards. */
static void settle(void) {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

WIDE static uint32_t infinite(const float *from, uint64_t count) {
    uint32_t found = 0;
    for (uint64_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, from + i, sizeof bits);
        found |= (bits & 0x7f800000u) == 0x7f800000u;
    }
    return found;
}

WIDE static void descend(float *restrict value, const float *restrict gradient, uint64_t count, float rate) {
    for (uint64_t i = 0; i < count; i++) value[i] -= rate * gradient[i];
}

/* Whether all are finite. */
int insitu_finite(const float *from, uint64_t count) { return !infinite(from, count); }

/* Copies, past the caches or through them, and says whether all are finite. */
int insitu_copy(float *to, const float *from, uint64_t count, int past_caches) {
    uint32_t found = 0;
    for (uint64_t at = 0; at < count; at += BLOCK) {
        uint64_t size = at_most(count - at);
        found |= infinite(from + at, size);
        copy(to + at, from + at, size, past_caches);
    }
    settle();
    return !found;
}

/* value -= rate * gradient, and a copy of what it comes to (unless `to` is NULL). */
int insitu_descend(float *value, const float *gradient, float *to, uint64_t count, float rate,
                   int past_caches) {
    for (uint64_t at = 0; at < count; at += BLOCK) {
        uint64_t size = at_most(count - at);
        descend(value + at, gradient + at, size, rate);
        if (to) copy(to + at, value + at, size, past_caches);
    }
    settle();
    return 0;
}
