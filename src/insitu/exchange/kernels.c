/* What transports do between two looks of Python: meeting in shared memory, moving bytes over TCP, adding up.

   The same as `shm_barrier.ShmBarrier.wait`, `shm.SharedMemoryTransport._small`, `shm.SharedMemoryTransport._in_region` and `schedule_runner.ScheduleRunner`
   do without a compiler, bit for bit: each element is ((x_0 + x_1) + x_2) + ... in its own dtype, nothing is
   contracted. `native.py` and `compiled_schedule.py` compile this file, describe its structures to ctypes, and say what they
   mean. Whatever isn't as it should be (somebody late beyond some microseconds, an alarm) is handed back to
   Python. */
#define _GNU_SOURCE
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__) && defined(__gnu_linux__)
#define WIDE __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define WIDE
#endif

#if defined(__GNUC__) && !defined(__clang__)
#define SAME_ELEMENTS _Pragma("GCC ivdep")
#else
#define SAME_ELEMENTS
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

/* Adding up. `out` may be one of the first two rows that are added, element by element, and none of the others.
   A row whose factor is 0 is not read. */

#define KERNEL(T, NAME)                                                                                       \
    WIDE static void NAME##_pair(T *out, const T *a, const T *b, uint64_t n) {                                \
        SAME_ELEMENTS for (uint64_t i = 0; i < n; i++) out[i] = a[i] + b[i];                                                \
    }                                                                                                         \
    WIDE static void NAME##_add(T *restrict out, const T *a, uint64_t n) {                                    \
        for (uint64_t i = 0; i < n; i++) out[i] = out[i] + a[i];                                              \
    }                                                                                                         \
    static void NAME##_sum(T *out, char **rows, uint64_t shards, uint64_t at, uint64_t n) {                   \
        if (shards == 1) {                                                                                    \
            memmove(out, (const T *)rows[0] + at, n * sizeof(T));                                             \
            return;                                                                                           \
        }                                                                                                     \
        NAME##_pair(out, (const T *)rows[0] + at, (const T *)rows[1] + at, n);                                \
        for (uint64_t s = 2; s < shards; s++) NAME##_add(out, (const T *)rows[s] + at, n);                    \
    }

#define WEIGHTED(T, NAME)                                                                                     \
    WIDE static void NAME##_times(T *out, const T *a, T f, uint64_t n) {                                      \
        SAME_ELEMENTS for (uint64_t i = 0; i < n; i++) out[i] = a[i] * f;                                                   \
    }                                                                                                         \
    WIDE static void NAME##_add_times(T *restrict out, const T *a, T f, uint64_t n) {                         \
        for (uint64_t i = 0; i < n; i++) {                                                                    \
            T product = a[i] * f;                                                                             \
            out[i] = out[i] + product;                                                                        \
        }                                                                                                     \
    }                                                                                                         \
    WIDE static void NAME##_pair_times(T *out, const T *a, T f, const T *b, T g, uint64_t n) {                \
        SAME_ELEMENTS for (uint64_t i = 0; i < n; i++) {                                                                    \
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

/* Over TCP: what is to be sent to each peer and where what it sends goes, segment after segment. A segment is
   open once so many steps are done; a step adds up rows that have come. */

enum { THROUGH = 0, WAITING = 1, AGREED = 2, DIFFERENT = 3 };
enum { VIEWS = 16 };

struct segment {
    char *at;
    uint64_t bytes, gate; /* never 0 bytes; steps that must be done before it is sent or received */
};

struct flow {
    struct segment *segments;
    uint64_t count, place, offset; /* segments; which one is under way; bytes of it that have been moved */
};

struct line {
    int64_t socket;
    uint64_t ended;
    uint64_t greeting;  /* segments that come before the rows: the header, and perhaps weights */
    uint64_t *needs;    /* by step: segments that must have come */
    struct flow out, in;
};

struct step {
    char *out, **rows;
    uint64_t length; /* elements */
};

struct round {
    struct line *lines;
    uint64_t lines_count;
    struct step *steps;
    uint64_t steps_count, itemsize, piece;
    struct sum sum;
    char *header;
    uint64_t header_bytes;
    uint64_t pauses;  /* whether to go back once all have agreed, before the first step */
    uint64_t skips;   /* whether steps count as done without being done */
    uint64_t in_place; /* whether steps write to what is sent: they wait until that is gone */
    char *from, *to;
    uint64_t bytes;   /* copied at the end */
    uint64_t looks, yields;
    uint64_t done, agreed, moved; /* steps; whether all have agreed; whether this call moved anything */
    double waited;
    int64_t last, different; /* lines: whose header came last, NOBODY if none was waited for; whose differs */
};

static int views(const struct flow *f, uint64_t done, struct iovec *v) {
    int n = 0;
    for (uint64_t i = f->place; i < f->count && n < VIEWS && f->segments[i].gate <= done; i++, n++) {
        v[n].iov_base = f->segments[i].at;
        v[n].iov_len = f->segments[i].bytes;
    }
    if (n) {
        v[0].iov_base = (char *)v[0].iov_base + f->offset;
        v[0].iov_len -= f->offset;
    }
    return n;
}

static void go_on(struct flow *f, uint64_t moved) {
    f->offset += moved;
    while (f->place < f->count && f->offset >= f->segments[f->place].bytes) f->offset -= f->segments[f->place++].bytes;
}

static int failed(struct line *l) {
    if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) l->ended = 1;
    return 0;
}

static int push(struct line *l, uint64_t done) {
    struct iovec v[VIEWS];
    struct msghdr message = {.msg_iov = v, .msg_iovlen = (size_t)views(&l->out, done, v)};
    if (!message.msg_iovlen) return 0;
    ssize_t moved = message.msg_iovlen == 1
                        ? send((int)l->socket, v[0].iov_base, v[0].iov_len, MSG_DONTWAIT | MSG_NOSIGNAL)
                        : sendmsg((int)l->socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (moved < 0) return failed(l);
    go_on(&l->out, (uint64_t)moved);
    return 1;
}

static int pull(struct line *l, uint64_t done) {
    struct iovec v[VIEWS];
    struct msghdr message = {.msg_iov = v, .msg_iovlen = (size_t)views(&l->in, done, v)};
    if (!message.msg_iovlen) return 0;
    ssize_t moved = message.msg_iovlen == 1 ? recv((int)l->socket, v[0].iov_base, v[0].iov_len, MSG_DONTWAIT)
                                            : recvmsg((int)l->socket, &message, MSG_DONTWAIT);
    if (moved < 0) return failed(l);
    if (moved == 0) {
        l->ended = 1;
        return 0;
    }
    go_on(&l->in, (uint64_t)moved);
    return 1;
}

static int is_through(const struct line *l) { return l->out.place == l->out.count && l->in.place == l->in.count; }

static int all_through(const struct round *r) {
    for (uint64_t i = 0; i < r->lines_count; i++)
        if (!is_through(&r->lines[i])) return 0;
    return 1;
}

/* Whether all have sent what this member has: then r->agreed. A header that differs: r->different. */
static void compare(struct round *r) {
    for (uint64_t i = 0; i < r->lines_count; i++) {
        struct line *l = &r->lines[i];
        if (l->in.place && memcmp(l->in.segments[0].at, r->header, r->header_bytes)) r->different = (int64_t)i;
    }
    if (r->different >= 0) return;
    for (uint64_t i = 0; i < r->lines_count; i++)
        if (r->lines[i].in.place < r->lines[i].greeting) {
            r->last = (int64_t)i;
            return;
        }
    r->agreed = 1;
}

static int has_come(const struct round *r, uint64_t step) {
    for (uint64_t i = 0; i < r->lines_count; i++)
        if (r->lines[i].in.place < r->lines[i].needs[step]) return 0;
    return !r->in_place || all_through(r);
}

static void perform(const struct round *r, const struct step *s) {
    if (r->skips) return;
    for (uint64_t at = 0; at < s->length; at += r->piece) {
        uint64_t n = s->length - at < r->piece ? s->length - at : r->piece;
        add_up(&r->sum, s->out + at * r->itemsize, s->rows, at, n);
    }
}

static int move(struct round *r) {
    int moved = 0;
    for (uint64_t i = 0; i < r->lines_count; i++) moved |= push(&r->lines[i], r->done);
    for (uint64_t i = 0; i < r->lines_count; i++) moved |= pull(&r->lines[i], r->done);
    return moved;
}

static int progress(struct round *r) {
    double idle = 0;
    uint64_t looks = 0;
    for (;;) {
        int moved = move(r);
        if (moved) {
            r->moved = 1;
            looks = 0;
            if (idle) r->waited += now() - idle;
            idle = 0;
        }
        if (!r->agreed) { /* also what was pulled between two calls */
            compare(r);
            if (r->different >= 0) return DIFFERENT;
            if (r->agreed && r->pauses) return AGREED;
        }
        if (r->agreed) {
            uint64_t before = r->done;
            while (r->done < r->steps_count && has_come(r, r->done)) perform(r, &r->steps[r->done++]);
            if (r->done == r->steps_count && all_through(r)) {
                if (r->bytes) memcpy(r->to, r->from, r->bytes);
                return THROUGH;
            }
            if (r->done != before) continue;
        }
        if (moved) continue;
        if (!idle) idle = now();
        if (looks++ >= r->looks) {
            r->waited += now() - idle;
            return WAITING;
        }
        if (r->yields) sched_yield();
    }
}

/* Begins round `sequence` of the group, whose number stands in the header. */
int insitu_round(struct round *r, uint64_t sequence) {
    for (int byte = 0; byte < 8; byte++) r->header[4 + byte] = (char)(sequence >> (56 - 8 * byte));
    for (uint64_t i = 0; i < r->lines_count; i++) {
        struct line *l = &r->lines[i];
        l->ended = l->out.place = l->out.offset = l->in.place = l->in.offset = 0;
    }
    r->done = r->agreed = r->moved = 0;
    r->waited = 0;
    r->last = r->different = NOBODY;
    return progress(r);
}

/* Goes on with it. */
int insitu_round_on(struct round *r, uint64_t sequence) {
    (void)sequence;
    r->moved = 0;
    r->waited = 0;
    return progress(r);
}

/* Takes what has come from one peer; returns whether that was anything. */
int insitu_round_pull(struct round *r, uint64_t line) { return pull(&r->lines[line], r->done); }
