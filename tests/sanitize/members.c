/* Members of one group as threads that share one mapping, so that ThreadSanitizer sees all that they share: barrier,
   slots, and regions. Through Python each member maps the memory at an address of its own, which hides races. */
#include "../../src/insitu/exchange/kernels.c"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

enum { MEMBERS = 3, LENGTH = 3000, PIECE = 256, MEMBER_WORDS = 16, LINE_WORDS = 8 };

static uint64_t words[MEMBERS * MEMBER_WORDS + 2 * LINE_WORDS];
static uint64_t progress[MEMBERS * LINE_WORDS];
static float slots[2][MEMBERS][64], buffers[MEMBERS][LENGTH], scratch[MEMBERS][PIECE];
static uint64_t rounds;

struct member {
    struct barrier barrier;
    struct slot_reduction slot;
    struct region_reduction region;
    uint64_t others[2 * (MEMBERS - 1)];
    char *rows[1], *copies[2], *slots[2 * MEMBERS], *buffers[MEMBERS];
    float own[64], result[64];
    int failures;
};

static void set_up(struct member *m, uint64_t number) {
    memset(m, 0, sizeof *m);
    uint64_t at = 0;
    for (uint64_t parity = 0; parity < 2; parity++)
        for (uint64_t o = 0; o < MEMBERS; o++)
            if (o != number) m->others[at++] = o * MEMBER_WORDS + parity;
    m->barrier = (struct barrier){.words = words, .asleep = (unsigned char *)&words[MEMBERS * MEMBER_WORDS + LINE_WORDS],
        .others = m->others, .own = {number * MEMBER_WORDS, number * MEMBER_WORDS + 1},
        .loss_flag = MEMBERS * MEMBER_WORDS, .doorbell = 2 * LINE_WORDS, .per_member = MEMBER_WORDS, .member = number,
        .count = MEMBERS - 1, .spins = 0, .yields = UINT64_MAX >> 1};
    m->rows[0] = (char *)m->own;
    for (uint64_t parity = 0; parity < 2; parity++) {
        m->copies[parity] = (char *)slots[parity][number];
        for (uint64_t o = 0; o < MEMBERS; o++) m->slots[parity * MEMBERS + o] = (char *)slots[parity][o];
    }
    for (uint64_t o = 0; o < MEMBERS; o++) m->buffers[o] = (char *)buffers[o];
    struct sum sum = {.dtype = FLOAT32, .shards = MEMBERS};
    m->slot = (struct slot_reduction){.barrier = &m->barrier, .sum = sum, .signature = 5, .bytes = sizeof m->own,
        .own_count = 1, .rows = m->rows, .copies = m->copies, .slots = m->slots, .result = (char *)m->result,
        .start = 0, .length = 64};
    m->region = (struct region_reduction){.barrier = &m->barrier, .sum = sum, .begin = 6, .end = 7,
        .start = LENGTH / MEMBERS * number, .stop = LENGTH / MEMBERS * (number + 1), .piece = PIECE, .itemsize = 4,
        .results_count = MEMBERS, .rows = m->buffers, .results = m->buffers, .scratch = (char *)scratch[number],
        .progress = &progress[number * LINE_WORDS], .evicted = &words[number * MEMBER_WORDS + 3], .piece_bits = 20};
}

static void *run(void *argument) {
    uint64_t number = (uint64_t)(uintptr_t)argument, phase = 0;
    struct member *m = malloc(sizeof *m);
    set_up(m, number);
    for (uint64_t round = 0; round < rounds; round++) {
        for (int i = 0; i < 64; i++) m->own[i] = (float)(number + round % 7);
        int state = insitu_reduce_slots(&m->slot, ++phase);
        float want = MEMBERS * (float)(round % 7) + MEMBERS * (MEMBERS - 1) / 2;
        for (int i = 0; i < 64; i++) m->failures += state != ARRIVED || m->result[i] != want;
        for (int i = 0; i < LENGTH; i++) buffers[number][i] = (float)(number + round % 5);
        state = insitu_barrier_and_reduce_region(&m->region, ++phase);
        phase++;
        want = MEMBERS * (float)(round % 5) + MEMBERS * (MEMBERS - 1) / 2;
        for (int i = 0; i < LENGTH; i += 17) m->failures += state != ARRIVED || buffers[number][i] != want;
    }
    return m;
}

int main(int count, char **arguments) {
    rounds = count > 1 ? strtoull(arguments[1], NULL, 10) : 1000;
    pthread_t threads[MEMBERS];
    for (uint64_t i = 0; i < MEMBERS; i++) pthread_create(&threads[i], NULL, run, (void *)(uintptr_t)i);
    int failures = 0;
    for (uint64_t i = 0; i < MEMBERS; i++) {
        void *done;
        pthread_join(threads[i], &done);
        failures += ((struct member *)done)->failures;
        free(done);
    }
    printf("%llu rounds, %d failures\n", (unsigned long long)rounds, failures);
    return failures != 0;
}
