/* What two processes on two cores need at least to exchange something, without any library: floor BYTES...
   prints JSON {bytes: seconds}: the median of sending so many bytes over loopback while receiving as many.
   Sockets as the exchange has them (TCP_NODELAY, reno, asked again and again instead of sleeping). BYTES 0: one
   word each through shared memory, seen by the other. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { ROUNDS = 5000 };

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static int listening(struct sockaddr_in *address) {
    socklen_t size = sizeof *address;
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    setsockopt(listener, IPPROTO_TCP, TCP_CONGESTION, "reno", 4);
    *address = (struct sockaddr_in){.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    if (bind(listener, (struct sockaddr *)address, size) || listen(listener, 1)) exit(1);
    getsockname(listener, (struct sockaddr *)address, &size);
    return listener;
}

static int connected(int parent, int listener, struct sockaddr_in *address) {
    int one = 1, line;
    if (parent) {
        line = accept(listener, NULL, NULL);
    } else {
        line = socket(AF_INET, SOCK_STREAM, 0);
        setsockopt(line, IPPROTO_TCP, TCP_CONGESTION, "reno", 4);
        if (connect(line, (struct sockaddr *)address, sizeof *address)) exit(1);
    }
    setsockopt(line, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    return line;
}

static void over_tcp(int line, char *out, char *in, long bytes) {
    long sent = 0, come = 0;
    while (sent < bytes || come < bytes) {
        if (sent < bytes) {
            ssize_t moved = send(line, out + sent, (size_t)(bytes - sent), MSG_DONTWAIT | MSG_NOSIGNAL);
            if (moved > 0) sent += moved;
        }
        if (come < bytes) {
            ssize_t moved = recv(line, in + come, (size_t)(bytes - come), MSG_DONTWAIT);
            if (moved > 0) come += moved;
        }
    }
}

static void over_memory(volatile uint64_t *own, volatile uint64_t *other, uint64_t turn) {
    *own = turn;
    while (*other < turn) {
    }
}

int main(int argc, char **argv) {
    uint64_t *words = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    printf("{");
    for (int i = 1; i < argc; i++) {
        long bytes = atol(argv[i]);
        struct sockaddr_in address;
        int listener = listening(&address);
        double times[ROUNDS];
        words[0] = words[64] = 0;
        fflush(stdout);
        pid_t parent = fork();
        cpu_set_t core;
        CPU_ZERO(&core);
        CPU_SET(parent ? 0 : 1, &core);
        sched_setaffinity(0, sizeof core, &core);
        int line = connected(parent != 0, listener, &address);
        char *out = calloc(1, (size_t)bytes + 1), *in = calloc(1, (size_t)bytes + 1);
        for (int n = 0; n < ROUNDS; n++) {
            double start = now();
            if (bytes) over_tcp(line, out, in, bytes);
            else over_memory(&words[parent ? 0 : 64], &words[parent ? 64 : 0], (uint64_t)n + 1);
            times[n] = now() - start;
        }
        if (!parent) _exit(0);
        waitpid(parent, NULL, 0);
        qsort(times, ROUNDS, sizeof(double), ascending);
        printf("%s\"%ld\": %.9f", i > 1 ? ", " : "", bytes, times[ROUNDS / 2]);
        close(line);
        close(listener);
        free(out);
        free(in);
    }
    printf("}\n");
    return 0;
}
