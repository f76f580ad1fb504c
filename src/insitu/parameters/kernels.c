/* What a step with parameter servers does to large arrays and to rows of tables: one sweep over memory where
   NumPy takes several, and rows fetched ahead.

   `native.py` says what the functions mean. Each element is rounded as NumPy rounds
   it; nothing is contracted. Copies that are too large for the caches are written past them, so that nothing
   is fetched only to be overwritten, and what lies in the caches stays there. */
#include <limits.h>
#include <stdint.h>
#include <string.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__) && defined(__gnu_linux__) && \
    !defined(INSITU_SANITIZE) /* sanitizers can't have functions that are chosen while a program is loaded */
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
static void fence_stores(void) {
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
    fence_stores();
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
    fence_stores();
    return 0;
}

/* Rows of tables. What is needed a little later is fetched now: each row is somewhere else in memory. */

enum { STAGE = 16 }; /* keys between one stage of finding their rows and the next */
enum { AHEAD = 64 }; /* keys under way at most */
enum { SOON = 8 };   /* rows between fetching one and using it */

#if defined(__GNUC__)
#define FETCH(address) __builtin_prefetch(address)
#else
#define FETCH(address) ((void)(address))
#endif

/* As `hashing.scramble`. */
static uint64_t scramble(uint64_t word) {
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9u;
    word = (word ^ (word >> 27)) * 0x94D049BB133111EBu;
    return word ^ (word >> 31);
}

/* The row number of each key, -1 for those that aren't there: see `index.py`. Returns how many aren't. Each key
   goes through three stages, in each of which what the next one reads is fetched. */
int insitu_find(const int64_t *keys, uint64_t count, const int32_t *table, uint64_t mask, const int64_t *known,
                int32_t *found) {
    uint64_t places[AHEAD], missing = 0;
    for (uint64_t i = 0; i < count + 2 * STAGE; i++) {
        if (i < count) {
            places[i % AHEAD] = scramble((uint64_t)keys[i]) & mask;
            FETCH(table + places[i % AHEAD]);
        }
        if (i >= STAGE && i - STAGE < count) {
            int32_t row = table[places[(i - STAGE) % AHEAD]];
            if (row >= 0) FETCH(known + row);
        }
        if (i >= 2 * STAGE) {
            uint64_t at = i - 2 * STAGE, place = places[at % AHEAD];
            int32_t row = table[place];
            while (row >= 0 && known[row] != keys[at]) {
                place = (place + 1) & mask;
                row = table[place];
            }
            found[at] = row;
            missing += row < 0;
        }
    }
    return missing < INT_MAX ? (int)missing : INT_MAX;
}

static void fetch(const char *from, uint64_t bytes) {
    for (uint64_t i = 0; i < bytes; i += 64) FETCH(from + i);
}

/* to[i] = rows[numbers[i]], each of `bytes`; what has no number is left alone. */
int insitu_take(const char *rows, const int32_t *numbers, uint64_t count, uint64_t bytes, char *to) {
    for (uint64_t i = 0; i < count; i++) {
        if (i + SOON < count && numbers[i + SOON] >= 0) fetch(rows + (uint64_t)numbers[i + SOON] * bytes, bytes);
        if (numbers[i] >= 0) memcpy(to + i * bytes, rows + (uint64_t)numbers[i] * bytes, bytes);
    }
    return 0;
}

/* rows[numbers[i]] = from[i], each of `bytes`. */
int insitu_put(char *rows, const int32_t *numbers, uint64_t count, uint64_t bytes, const char *from) {
    for (uint64_t i = 0; i < count; i++) {
        if (i + SOON < count) fetch(rows + (uint64_t)numbers[i + SOON] * bytes, bytes);
        memcpy(rows + (uint64_t)numbers[i] * bytes, from + i * bytes, bytes);
    }
    return 0;
}

/* rows[numbers[i]] -= rate * gradients[i], each of `width` elements. */
int insitu_descend_rows(float *rows, const int32_t *numbers, uint64_t count, uint64_t width,
                        const float *gradients, float rate) {
    for (uint64_t i = 0; i < count; i++) {
        if (i + SOON < count)
            fetch((const char *)(rows + (uint64_t)numbers[i + SOON] * width), width * sizeof(float));
        descend(rows + (uint64_t)numbers[i] * width, gradients + i * width, width, rate);
    }
    return 0;
}
