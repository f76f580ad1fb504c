/* The inner loops of the transports: the barrier in shared memory, sending and receiving over TCP, and sums.

   `Reducer` and `schedule_runner.ScheduleRunner` do the same in Python for other dtypes and encrypted
   connections: each element is ((x_0 + x_1) + x_2) + ... in its own dtype, and nothing is contracted.
   `native.py` and `schedule_runner.py` describe the structures of this file to ctypes. Everything that is not
   the normal course (a member that is late by more than some microseconds, a lost member) returns to Python. */
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

#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__) && defined(__gnu_linux__) && \
    !defined(INSITU_SANITIZE) /* sanitizers can't have functions that are chosen while a program is loaded */
#define WIDE __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define WIDE
#endif

#if defined(__GNUC__) && !defined(__clang__)
#define IVDEP _Pragma("GCC ivdep")
#else
#define IVDEP
#endif

enum { ARRIVED = 0, MISSING = 1, LOSS_FLAGGED = 2, EVICTED = 4, AT_END = 8 };
enum { NOBODY = -1 };

struct barrier {
    uint64_t *words;        /* shared; the fields below that are indexes refer to it */
    unsigned char *asleep;  /* shared: one byte per member */
    uint64_t *others;       /* arrival words of the others: `count` for even phases, then `count` for odd ones */
    uint64_t own[2];        /* this member's arrival words, for even and for odd phases */
    uint64_t loss_flag;     /* index of the word that is not 0 after a loss */
    uint64_t doorbell;      /* index of member 0's doorbell, counted in 32-bit words */
    uint64_t per_member;    /* words per member */
    uint64_t member, count; /* this member; the number of others */
    uint64_t spins, yields; /* polls without and with yielding the processor, before Python takes over */
    double waited;          /* seconds spent waiting in this call */
    int64_t last;           /* index of the arrival word that came last, or NOBODY */
};

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static uint64_t load(const uint64_t *word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }

static void wake(struct barrier *b) {
    uint32_t *doorbells = (uint32_t *)b->words;
    for (uint64_t member = 0; member <= b->count; member++) {
        if (member == b->member || !__atomic_load_n(&b->asleep[member], __ATOMIC_ACQUIRE)) continue;
        uint32_t *doorbell = &doorbells[b->doorbell + 2 * member * b->per_member];
        __atomic_fetch_add(doorbell, 1, __ATOMIC_SEQ_CST);
        syscall(SYS_futex, doorbell, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
    }
}

static void pause_processor(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static int wait_at_barrier(struct barrier *b, uint64_t phase, uint64_t signature) {
    uint64_t parity = phase & 1, word = phase << 24 | signature, arrived = 0;
    const uint64_t *others = b->others + parity * b->count;
    __atomic_store_n(&b->words[b->own[parity]], word, __ATOMIC_SEQ_CST);
    b->last = NOBODY;
    while (arrived < b->count && load(&b->words[others[arrived]]) == word) arrived++;
    if (arrived < b->count) {
        double start = now();
        uint64_t polls = 0;
        while (arrived < b->count) {
            if (load(&b->words[others[arrived]]) == word) {
                b->last = (int64_t)others[arrived++];
            } else if (polls < b->spins) {
                polls++;
                pause_processor();
            } else if (polls < b->spins + b->yields) {
                polls++;
                sched_yield();
            } else {
                break;
            }
        }
        b->waited += now() - start;
        if (arrived < b->count) return MISSING;
    }
    if (load(&b->words[b->loss_flag])) return LOSS_FLAGGED;
    wake(b);
    return ARRIVED;
}

/* Sums. `out` may be one of the first two rows that are added, but none of the others. A row whose factor is 0 is
   not read. */

/* A sum or a quotient that is no number becomes this one: which sign and payload a processor gives it depends on
   the order of the operands, which compilers and NumPy choose. `Reducer` does the same. */
#define UNIFY_NAN(value)                                                                                      \
    __extension__({                                                                                           \
        __typeof__(value) v = (value);                                                                        \
        v == v ? v : (__typeof__(v))__builtin_nan("");                                                        \
    })
#define AS_IT_IS(value) (value)

#define KERNEL(T, NAME, CLEAN)                                                                                \
    WIDE static void NAME##_pair(T *out, const T *a, const T *b, uint64_t n) {                                \
        IVDEP for (uint64_t i = 0; i < n; i++) out[i] = CLEAN(a[i] + b[i]);                                   \
    }                                                                                                         \
    WIDE static void NAME##_add(T *restrict out, const T *a, uint64_t n) {                                    \
        for (uint64_t i = 0; i < n; i++) out[i] = CLEAN(out[i] + a[i]);                                       \
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
        IVDEP for (uint64_t i = 0; i < n; i++) out[i] = UNIFY_NAN(a[i] * f);                                  \
    }                                                                                                         \
    WIDE static void NAME##_add_times(T *restrict out, const T *a, T f, uint64_t n) {                         \
        for (uint64_t i = 0; i < n; i++) {                                                                    \
            T product = a[i] * f;                                                                             \
            out[i] = UNIFY_NAN(out[i] + product);                                                             \
        }                                                                                                     \
    }                                                                                                         \
    WIDE static void NAME##_pair_times(T *out, const T *a, T f, const T *b, T g, uint64_t n) {                \
        IVDEP for (uint64_t i = 0; i < n; i++) {                                                              \
            T one = a[i] * f, other = b[i] * g;                                                               \
            out[i] = UNIFY_NAN(one + other);                                                                  \
        }                                                                                                     \
    }                                                                                                         \
    WIDE static void NAME##_divide(T *out, T divisor, uint64_t n) {                                           \
        for (uint64_t i = 0; i < n; i++) out[i] = UNIFY_NAN(out[i] / divisor);                                \
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

KERNEL(float, f32, UNIFY_NAN)
KERNEL(double, f64, UNIFY_NAN)
KERNEL(uint32_t, i32, AS_IT_IS) /* integers wrap around, as NumPy's do */
KERNEL(uint64_t, i64, AS_IT_IS)
WEIGHTED(float, f32)
WEIGHTED(double, f64)

enum { FLOAT32, FLOAT64, INT32, INT64 };

struct sum {
    uint64_t dtype, shards;
    uint64_t divisor; /* for a mean: the number of shards; else 0 */
    double *factors;  /* one per shard, or NULL */
};

static void compute_sum(const struct sum *s, char *out, char **rows, uint64_t at, uint64_t n) {
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

/* Small rows go through the slots: each member copies its rows there, all wait at a barrier, each sums all slots. */

struct slot_reduction {
    struct barrier *barrier;
    struct sum sum;
    uint64_t signature, bytes, own_count; /* bytes of a row; the number of this member's rows */
    char **rows;            /* this member's rows */
    char **copies;          /* their slots: `own_count` for even phases, then `own_count` for odd ones */
    char **slots;           /* the slots of all shards: for even phases, then for odd ones */
    char *result;
    uint64_t start, length; /* the part of the sum that is wanted, in elements */
};

int insitu_reduce_slots(struct slot_reduction *s, uint64_t phase) {
    uint64_t parity = phase & 1;
    s->barrier->waited = 0;
    for (uint64_t i = 0; i < s->own_count; i++) memcpy(s->copies[parity * s->own_count + i], s->rows[i], s->bytes);
    int state = wait_at_barrier(s->barrier, phase, s->signature);
    if (state == ARRIVED) compute_sum(&s->sum, s->result, s->slots + parity * s->sum.shards, s->start, s->length);
    return state;
}

/* Large rows stay in the members' own memory: each member sums its part of the length, piece after piece. A sum is
   computed in scratch memory, and `progress` tells whether a piece is being summed (even) or copied over the rows
   (odd), so that others can finish the part of a member that dies at any point. */

struct region_reduction {
    struct barrier *barrier;
    struct sum sum;
    uint64_t begin, end;         /* signatures of the barriers before and after */
    uint64_t start, stop, piece; /* in elements */
    uint64_t itemsize, results_count;
    char **rows, **results;
    char *scratch;
    uint64_t *progress, *evicted; /* shared: how far this member is; whether the others have evicted it */
    uint64_t piece_bits;
};

/* Writes two targets at once: two calls of memcpy take a third longer. */
WIDE static void copy_twice(const uint32_t *restrict from, uint32_t *restrict one, uint32_t *restrict other,
                            uint64_t n) {
    for (uint64_t i = 0; i < n; i++) {
        one[i] = from[i];
        other[i] = from[i];
    }
}

static void copy_to_results(const struct region_reduction *p, uint64_t at, uint64_t bytes) {
    uint64_t r = 0;
    for (; r + 1 < p->results_count; r += 2)
        copy_twice((const uint32_t *)p->scratch, (uint32_t *)(p->results[r] + at),
                   (uint32_t *)(p->results[r + 1] + at), bytes / 4);
    if (r < p->results_count) memcpy(p->results[r] + at, p->scratch, bytes);
}

static int reduce_own_part(struct region_reduction *p, uint64_t phase) {
    uint64_t state = phase << p->piece_bits;
    for (uint64_t at = p->start; at < p->stop; at += p->piece) {
        uint64_t n = p->stop - at < p->piece ? p->stop - at : p->piece;
        __atomic_store_n(p->progress, state, __ATOMIC_RELEASE);
        compute_sum(&p->sum, p->scratch, p->rows, at, n);
        /* Sequentially consistent: the load below must not come before this store. Those who evict this member
           store and load in the other order, so at least one side sees the other. */
        __atomic_store_n(p->progress, state + 1, __ATOMIC_SEQ_CST);
        if (__atomic_load_n(p->evicted, __ATOMIC_SEQ_CST)) return EVICTED;
        copy_to_results(p, at * p->itemsize, n * p->itemsize);
        state += 2;
    }
    __atomic_store_n(p->progress, state, __ATOMIC_RELEASE);
    return ARRIVED;
}

static int reduce_and_wait(struct region_reduction *p, uint64_t phase) {
    if (reduce_own_part(p, phase)) return EVICTED;
    int64_t last = p->barrier->last;
    int state = wait_at_barrier(p->barrier, phase + 1, p->end);
    p->barrier->last = last;
    return state ? AT_END | state : ARRIVED;
}

/* This member's part, after the barrier `phase`, and the barrier that follows. */
int insitu_reduce_region(struct region_reduction *p, uint64_t phase) {
    p->barrier->waited = 0;
    return reduce_and_wait(p, phase);
}

/* The barrier `phase`, this member's part, and the barrier that follows. */
int insitu_barrier_and_reduce_region(struct region_reduction *p, uint64_t phase) {
    p->barrier->waited = 0;
    int state = wait_at_barrier(p->barrier, phase, p->begin);
    return state ? state : reduce_and_wait(p, phase);
}

int insitu_barrier_wait(struct barrier *b, uint64_t phase, uint64_t signature) {
    b->waited = 0;
    return wait_at_barrier(b, phase, signature);
}

/* TCP: a queue of transfers out to each peer and one in from it. A transfer may begin once `gate` steps are done; a
   step sums rows that have arrived. */

enum { DONE = 0, WAITING = 1, AGREED = 2, MISMATCH = 3 };
enum { VIEWS = 16 };

struct transfer {
    char *at;
    uint64_t bytes, gate; /* bytes is never 0; gate: steps that must be done before this transfer begins */
};

struct transfer_queue {
    struct transfer *transfers;
    uint64_t count, current, offset; /* transfers; the one under way; bytes of it that have been moved */
};

struct peer {
    int64_t socket;
    uint64_t ended;
    uint64_t preamble; /* transfers in that come before the rows: the header, and perhaps weights */
    uint64_t *needs;   /* by step: transfers in that must be complete */
    struct transfer_queue out, in;
};

struct step {
    char *out, **rows;
    uint64_t length; /* elements */
};

struct schedule {
    struct peer *peers;
    uint64_t peers_count;
    struct step *steps;
    uint64_t steps_count, itemsize, piece;
    struct sum sum;
    char *header;
    uint64_t header_bytes;
    uint64_t stop_when_agreed;    /* whether to return once all have agreed, before the first step */
    uint64_t skip_steps;          /* whether steps count as done without being run */
    uint64_t in_place;            /* whether steps overwrite rows that are sent: they wait until all is sent */
    char *from, *to;
    uint64_t bytes;               /* copied at the end */
    uint64_t max_polls, yields;   /* polls before returning WAITING; whether to yield the processor in between */
    uint64_t done, agreed, moved; /* steps done; whether all have agreed; whether this call moved anything */
    double waited;                /* seconds spent waiting in this call */
    int64_t last, mismatched;     /* peers: whose header came last (NOBODY: none was late); whose header differs */
};

static int views(const struct transfer_queue *f, uint64_t done, struct iovec *v) {
    int n = 0;
    for (uint64_t i = f->current; i < f->count && n < VIEWS && f->transfers[i].gate <= done; i++, n++) {
        v[n].iov_base = f->transfers[i].at;
        v[n].iov_len = f->transfers[i].bytes;
    }
    if (n) {
        v[0].iov_base = (char *)v[0].iov_base + f->offset;
        v[0].iov_len -= f->offset;
    }
    return n;
}

static void advance(struct transfer_queue *f, uint64_t moved) {
    f->offset += moved;
    while (f->current < f->count && f->offset >= f->transfers[f->current].bytes)
        f->offset -= f->transfers[f->current++].bytes;
}

static int record_error(struct peer *peer) {
    if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) peer->ended = 1;
    return 0;
}

static int send_some(struct peer *peer, uint64_t done) {
    struct iovec v[VIEWS];
    struct msghdr message = {.msg_iov = v, .msg_iovlen = (size_t)views(&peer->out, done, v)};
    if (!message.msg_iovlen) return 0;
    ssize_t moved = message.msg_iovlen == 1
                        ? send((int)peer->socket, v[0].iov_base, v[0].iov_len, MSG_DONTWAIT | MSG_NOSIGNAL)
                        : sendmsg((int)peer->socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (moved < 0) return record_error(peer);
    advance(&peer->out, (uint64_t)moved);
    return 1;
}

static int receive_some(struct peer *peer, uint64_t done) {
    struct iovec v[VIEWS];
    struct msghdr message = {.msg_iov = v, .msg_iovlen = (size_t)views(&peer->in, done, v)};
    if (!message.msg_iovlen) return 0;
    ssize_t moved = message.msg_iovlen == 1 ? recv((int)peer->socket, v[0].iov_base, v[0].iov_len, MSG_DONTWAIT)
                                            : recvmsg((int)peer->socket, &message, MSG_DONTWAIT);
    if (moved < 0) return record_error(peer);
    if (moved == 0) {
        peer->ended = 1;
        return 0;
    }
    advance(&peer->in, (uint64_t)moved);
    return 1;
}

static int is_done(const struct peer *peer) {
    return peer->out.current == peer->out.count && peer->in.current == peer->in.count;
}

static int all_done(const struct schedule *r) {
    for (uint64_t i = 0; i < r->peers_count; i++)
        if (!is_done(&r->peers[i])) return 0;
    return 1;
}

/* Sets r->agreed once all peers have sent the same header, r->mismatched if a header differs. */
static void check_agreement(struct schedule *r) {
    for (uint64_t i = 0; i < r->peers_count; i++) {
        struct peer *peer = &r->peers[i];
        if (peer->in.current && memcmp(peer->in.transfers[0].at, r->header, r->header_bytes))
            r->mismatched = (int64_t)i;
    }
    if (r->mismatched >= 0) return;
    for (uint64_t i = 0; i < r->peers_count; i++)
        if (r->peers[i].in.current < r->peers[i].preamble) {
            r->last = (int64_t)i;
            return;
        }
    r->agreed = 1;
}

static int has_arrived(const struct schedule *r, uint64_t step) {
    for (uint64_t i = 0; i < r->peers_count; i++)
        if (r->peers[i].in.current < r->peers[i].needs[step]) return 0;
    return !r->in_place || all_done(r);
}

static void run_step(const struct schedule *r, const struct step *s) {
    if (r->skip_steps) return;
    for (uint64_t at = 0; at < s->length; at += r->piece) {
        uint64_t n = s->length - at < r->piece ? s->length - at : r->piece;
        compute_sum(&r->sum, s->out + at * r->itemsize, s->rows, at, n);
    }
}

static int transfer_some(struct schedule *r) {
    int moved = 0;
    for (uint64_t i = 0; i < r->peers_count; i++) moved |= send_some(&r->peers[i], r->done);
    for (uint64_t i = 0; i < r->peers_count; i++) moved |= receive_some(&r->peers[i], r->done);
    return moved;
}

static int run_until_blocked(struct schedule *r) {
    double idle = 0;
    uint64_t polls = 0;
    for (;;) {
        int moved = transfer_some(r);
        if (moved) {
            r->moved = 1;
            polls = 0;
            if (idle) r->waited += now() - idle;
            idle = 0;
        }
        if (!r->agreed) { /* also after receives between two calls */
            check_agreement(r);
            if (r->mismatched >= 0) return MISMATCH;
            if (r->agreed && r->stop_when_agreed) return AGREED;
        }
        if (r->agreed) {
            uint64_t before = r->done;
            while (r->done < r->steps_count && has_arrived(r, r->done)) run_step(r, &r->steps[r->done++]);
            if (r->done == r->steps_count && all_done(r)) {
                if (r->bytes) memcpy(r->to, r->from, r->bytes);
                return DONE;
            }
            if (r->done != before) continue;
        }
        if (moved) continue;
        if (!idle) idle = now();
        if (polls++ >= r->max_polls) {
            r->waited += now() - idle;
            return WAITING;
        }
        if (r->yields) sched_yield();
    }
}

/* Starts operation `sequence`, whose number is part of the header. */
int insitu_run_schedule(struct schedule *r, uint64_t sequence) {
    for (int byte = 0; byte < 8; byte++) r->header[4 + byte] = (char)(sequence >> (56 - 8 * byte));
    for (uint64_t i = 0; i < r->peers_count; i++) {
        struct peer *peer = &r->peers[i];
        peer->ended = peer->out.current = peer->out.offset = peer->in.current = peer->in.offset = 0;
    }
    r->done = r->agreed = r->moved = 0;
    r->waited = 0;
    r->last = r->mismatched = NOBODY;
    return run_until_blocked(r);
}

/* Continues the operation under way. */
int insitu_resume_schedule(struct schedule *r, uint64_t sequence) {
    (void)sequence;
    r->moved = 0;
    r->waited = 0;
    return run_until_blocked(r);
}

/* Receives what has arrived from one peer. Returns 1 if anything has. */
int insitu_receive_from(struct schedule *r, uint64_t number) {
    return receive_some(&r->peers[number], r->done);
}
