/* What the shared-memory transport does between two looks of Python: meeting, and adding up.

   The same as `wait.Meeting.meet`, `shm.SharedMemory._small` and `shm.SharedMemory._in_region` do without a
   compiler, bit for bit: each element is ((x_0 + x_1) + x_2) + ... in its own dtype, nothing is contracted.
   `native.py` compiles this file, describes its structures to ctypes, and says what they mean. Whatever isn't
   as it should be (somebody late beyond some microseconds, an alarm) is handed back to Python. */
#define _GNU_SOURCE
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__) && defined(__gnu_linux__)
#define WIDE __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define WIDE
#endif

enum { HERE = 0, MISSING = 1, ALARM = 2, GIVEN_UP = 4, AFTERWARDS = 8 };
enum { NOBODY = -1 };

struct meeting {
    uint64_t *words;          /* shared: everything that is given by index */
    unsigned char *asleep;    /* shared: one byte a member */
    uint64_t *others;         /* arrival words of the others: `count` of even meetings, then of odd ones */
    uint64_t own[2];          /* this member's arrival words */
    uint64_t alarm;           /* index of the alarm */
    uint64_t bell;            /* 32-bit words: index of member 0's bell */
    uint64_t per_member;      /* words of a member */
    uint64_t member, count;   /* this member; how many others */
    uint64_t spins, yields;
    double waited;            /* seconds spent waiting in this call */
    int64_t last;             /* index of the arrival word that came last, or NOBODY */
};

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static uint64_t load(const uint64_t *word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }

static void wake(struct meeting *m) {
    uint32_t *bells = (uint32_t *)m->words;
    for (uint64_t member = 0; member <= m->count; member++) {
        if (member == m->member || !__atomic_load_n(&m->asleep[member], __ATOMIC_ACQUIRE)) continue;
        uint32_t *bell = &bells[m->bell + 2 * member * m->per_member];
        __atomic_fetch_add(bell, 1, __ATOMIC_SEQ_CST);
        syscall(SYS_futex, bell, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
    }
}

static void pause_a_little(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static int meet(struct meeting *m, uint64_t tick, uint64_t signature) {
    uint64_t parity = tick & 1, word = tick << 24 | signature, here = 0;
    const uint64_t *others = m->others + parity * m->count;
    __atomic_store_n(&m->words[m->own[parity]], word, __ATOMIC_SEQ_CST);
    m->last = NOBODY;
    while (here < m->count && load(&m->words[others[here]]) == word) here++;
    if (here < m->count) {
        double start = now();
        uint64_t looks = 0;
        while (here < m->count) {
            if (load(&m->words[others[here]]) == word) {
                m->last = (int64_t)others[here++];
            } else if (looks < m->spins) {
                looks++;
                pause_a_little();
            } else if (looks < m->spins + m->yields) {
                looks++;
                sched_yield();
            } else {
                break;
            }
        }
        m->waited += now() - start;
        if (here < m->count) return MISSING;
    }
    if (load(&m->words[m->alarm])) return ALARM;
    wake(m);
    return HERE;
}

/* Adding up. `out` is none of the rows. A row whose factor is 0 is not read. */

#define KERNEL(T, NAME)                                                                                       \
    WIDE static void NAME##_pair(T *restrict out, const T *a, const T *b, uint64_t n) {                       \
        for (uint64_t i = 0; i < n; i++) out[i] = a[i] + b[i];                                                \
    }                                                                                                         \
    WIDE static void NAME##_add(T *restrict out, const T *a, uint64_t n) {                                    \
        for (uint64_t i = 0; i < n; i++) out[i] = out[i] + a[i];                                              \
    }                                                                                                         \
    static void NAME##_sum(T *out, char **rows, uint64_t shards, uint64_t at, uint64_t n) {                   \
        if (shards == 1) {                                                                                    \
            memcpy(out, (const T *)rows[0] + at, n * sizeof(T));                                              \
            return;                                                                                           \
        }                                                                                                     \
        NAME##_pair(out, (const T *)rows[0] + at, (const T *)rows[1] + at, n);                                \
        for (uint64_t s = 2; s < shards; s++) NAME##_add(out, (const T *)rows[s] + at, n);                    \
    }

#define WEIGHTED(T, NAME)                                                                                     \
    WIDE static void NAME##_times(T *restrict out, const T *a, T f, uint64_t n) {                             \
        for (uint64_t i = 0; i < n; i++) out[i] = a[i] * f;                                                   \
    }                                                                                                         \
    WIDE static void NAME##_add_times(T *restrict out, const T *a, T f, uint64_t n) {                         \
        for (uint64_t i = 0; i < n; i++) {                                                                    \
            T product = a[i] * f;                                                                             \
            out[i] = out[i] + product;                                                                        \
        }                                                                                                     \
    }                                                                                                         \
    WIDE static void NAME##_pair_times(T *restrict out, const T *a, T f, const T *b, T g, uint64_t n) {       \
        for (uint64_t i = 0; i < n; i++) {                                                                    \
            T one = a[i] * f, other = b[i] * g;                                                               \
            out[i] = one + other;                                                                             \
        }                                                                                                     \
    }                                                                                                         \
    WIDE static void NAME##_divide(T *out, T divisor, uint64_t n) {                                           \
        for (uint64_t i = 0; i < n; i++) out[i] = out[i] / divisor;                                           \
    }                                                                                                         \
    static void NAME##_mean(T *out, char **rows, const double *factors, uint64_t shards, uint64_t at,         \
                            uint64_t n) {                                                                     \
        int64_t first = -1, fresh = 1;                                                                        \
        for (uint64_t s = 0; s < shards; s++) {                                                               \
            const T *row = (const T *)rows[s] + at;                                                           \
            if ((T)factors[s] == 0) continue;                                                                 \
            if (!fresh) {                                                                                     \
                NAME##_add_times(out, row, (T)factors[s], n);                                                 \
            } else if (first < 0) {                                                                           \
                first = (int64_t)s;                                                                           \
            } else {                                                                                          \
                NAME##_pair_times(out, (const T *)rows[first] + at, (T)factors[first], row, (T)factors[s], n); \
                fresh = 0;                                                                                    \
            }                                                                                                 \
        }                                                                                                     \
        if (fresh && first >= 0) NAME##_times(out, (const T *)rows[first] + at, (T)factors[first], n);        \
    }

KERNEL(float, f32)
KERNEL(double, f64)
KERNEL(uint32_t, i32) /* whole numbers wrap around, as NumPy's do */
KERNEL(uint64_t, i64)
WEIGHTED(float, f32)
WEIGHTED(double, f64)

enum { FLOAT32, FLOAT64, INT32, INT64 };

struct sum {
    uint64_t dtype, shards;
    uint64_t divisor; /* of a mean; else 0 */
    double *factors;  /* one a shard, or NULL */
};

static void add_up(const struct sum *s, char *out, char **rows, uint64_t at, uint64_t n) {
    if (s->dtype == FLOAT32) {
        if (s->factors) f32_mean((float *)out, rows, s->factors, s->shards, at, n);
        else f32_sum((float *)out, rows, s->shards, at, n);
        if (s->divisor) f32_divide((float *)out, (float)s->divisor, n);
    } else if (s->dtype == FLOAT64) {
        if (s->factors) f64_mean((double *)out, rows, s->factors, s->shards, at, n);
        else f64_sum((double *)out, rows, s->shards, at, n);
        if (s->divisor) f64_divide((double *)out, (double)s->divisor, n);
    } else if (s->dtype == INT32) {
        i32_sum((uint32_t *)out, rows, s->shards, at, n);
    } else {
        i64_sum((uint64_t *)out, rows, s->shards, at, n);
    }
}

/* Through the slots: everybody copies its rows there, all meet, everybody adds up all of them. */

struct small {
    struct meeting *meeting;
    struct sum sum;
    uint64_t signature, bytes, mine; /* of a row; how many rows are this member's */
    char **rows;                     /* those */
    char **copies;                   /* where they go: `mine` of even meetings, then of odd ones */
    char **slots;                    /* of all shards: of even meetings, then of odd ones */
    char *result;
    uint64_t start, length; /* elements: which part of the sum is wanted */
};

int insitu_small(struct small *s, uint64_t tick) {
    uint64_t parity = tick & 1;
    s->meeting->waited = 0;
    for (uint64_t i = 0; i < s->mine; i++) memcpy(s->copies[parity * s->mine + i], s->rows[i], s->bytes);
    int state = meet(s->meeting, tick, s->signature);
    if (state == HERE) add_up(&s->sum, s->result, s->slots + parity * s->sum.shards, s->start, s->length);
    return state;
}

/* In the members' own memory: each adds up its part of the length, piece after piece. A sum is put together
   beside the rows, and `work` says whether a piece is being added up (even) or copied over the rows (odd), so
   that others can finish the part of a member that dies at any moment. */

struct part {
    struct meeting *meeting;
    struct sum sum;
    uint64_t begin, end;          /* signatures of the meetings before and after */
    uint64_t start, stop, piece;  /* elements */
    uint64_t itemsize, results_count;
    char **rows, **results;
    char *scratch;
    uint64_t *work, *out;         /* shared: how far this member is; whether the others have given it up */
    uint64_t piece_bits;
};

/* Two targets at once: memcpy, one after the other, takes a third longer. */
WIDE static void copy_twice(const uint32_t *restrict from, uint32_t *restrict one, uint32_t *restrict other,
                            uint64_t n) {
    for (uint64_t i = 0; i < n; i++) {
        one[i] = from[i];
        other[i] = from[i];
    }
}

static void deliver(const struct part *p, uint64_t at, uint64_t bytes) {
    uint64_t r = 0;
    for (; r + 1 < p->results_count; r += 2)
        copy_twice((const uint32_t *)p->scratch, (uint32_t *)(p->results[r] + at),
                   (uint32_t *)(p->results[r + 1] + at), bytes / 4);
    if (r < p->results_count) memcpy(p->results[r] + at, p->scratch, bytes);
}

static int work_off(struct part *p, uint64_t tick) {
    uint64_t state = tick << p->piece_bits;
    for (uint64_t at = p->start; at < p->stop; at += p->piece) {
        uint64_t n = p->stop - at < p->piece ? p->stop - at : p->piece;
        __atomic_store_n(p->work, state, __ATOMIC_RELEASE);
        add_up(&p->sum, p->scratch, p->rows, at, n);
        __atomic_store_n(p->work, state + 1, __ATOMIC_RELEASE);
        if (load(p->out)) return GIVEN_UP;
        deliver(p, at * p->itemsize, n * p->itemsize);
        state += 2;
    }
    __atomic_store_n(p->work, state, __ATOMIC_RELEASE);
    return HERE;
}

static int part(struct part *p, uint64_t tick) {
    if (work_off(p, tick)) return GIVEN_UP;
    int64_t last = p->meeting->last;
    int state = meet(p->meeting, tick + 1, p->end);
    p->meeting->last = last;
    return state ? AFTERWARDS | state : HERE;
}

/* This member's part, after the meeting `tick`; then the meeting that follows. */
int insitu_part(struct part *p, uint64_t tick) {
    p->meeting->waited = 0;
    return part(p, tick);
}

/* Both meetings and what is between. */
int insitu_whole(struct part *p, uint64_t tick) {
    p->meeting->waited = 0;
    int state = meet(p->meeting, tick, p->begin);
    return state ? state : part(p, tick);
}

int insitu_meet(struct meeting *m, uint64_t tick, uint64_t signature) {
    m->waited = 0;
    return meet(m, tick, signature);
}
