/* Shared mappings of files while other processes change the length of the file, map it for the first time, or are killed
 * as they write to it or write it back. Only counts are printed. */
#include "case.h"
#include <pthread.h>
#include <sys/mman.h>

enum { WORKERS = 4, ROUNDS = 30, LENGTH = 4 * 4096 };

struct together {
    pthread_barrier_t barrier;
    int lost;
};

static struct together *together(int processes) {
    struct together *all = mmap(NULL, sizeof *all, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pthread_barrierattr_t shared;
    MUST((long)all);
    pthread_barrierattr_init(&shared);
    pthread_barrierattr_setpshared(&shared, PTHREAD_PROCESS_SHARED);
    pthread_barrier_init(&all->barrier, &shared, processes);
    return all;
}

/* Opens the file as each of several workers does that may be the first, and stores a byte to each page. */
static void work(struct together *all, int worker, int flags) {
    for (int round = 0; round < ROUNDS; round++) {
        if (worker == 0) unlink("f");
        pthread_barrier_wait(&all->barrier);
        int fd = MUST(open("f", O_RDWR | O_CREAT | flags, 0644));
        MUST(ftruncate(fd, LENGTH));
        volatile char *at = mmap(NULL, LENGTH, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        MUST((long)at);
        if (flags & O_TRUNC) pthread_barrier_wait(&all->barrier);
        for (int page = 0; page < LENGTH; page += 4096) at[page + worker * 8] = worker + 1;
        pthread_barrier_wait(&all->barrier);
        for (int page = 0; page < LENGTH; page += 4096) {
            if (at[page + worker * 8] != worker + 1) __sync_fetch_and_add(&all->lost, 1);
        }
        MUST(munmap((void *)at, LENGTH));
        MUST(close(fd));
        pthread_barrier_wait(&all->barrier);
        char bytes[LENGTH] = {0};
        fd = MUST(open("f", O_RDONLY));
        MUST(read(fd, bytes, LENGTH));
        MUST(close(fd));
        for (int page = 0; page < LENGTH; page += 4096) {
            if (bytes[page + worker * 8] != worker + 1) __sync_fetch_and_add(&all->lost, 1);
        }
        pthread_barrier_wait(&all->barrier);
    }
}

static void all_work(int flags) {
    struct together *all = together(WORKERS);
    pid_t workers[WORKERS];
    for (int i = 0; i < WORKERS; i++) {
        workers[i] = MUST(fork());
        if (workers[i] == 0) {
            alarm(60);
            work(all, i, flags);
            _exit(0);
        }
    }
    for (int i = 0; i < WORKERS; i++) reap(workers[i]);
    say("%d stores are lost", all->lost);
}

/* All set the length that it has, or is to have, before they map it. */
static void workers_set_the_length(void) { all_work(0); }

/* All make it empty first, and store when it has its length. */
static void workers_make_it_empty(void) { all_work(O_TRUNC); }

/* A child goes on with the mapping of its parent, which is killed while it writes back. */
static void parents_are_killed(void) {
    enum { TIMES = 12 };
    int went_on = 0;
    for (int time = 0; time < TIMES; time++) {
        int begun[2], over[2], told[2];
        MUST(pipe(begun) + pipe(over) + pipe(told));
        pid_t parent = MUST(fork());
        if (parent == 0) {
            int fd = MUST(open("f", O_RDWR | O_CREAT, 0644));
            MUST(ftruncate(fd, LENGTH));
            volatile char *at = mmap(NULL, LENGTH, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
            MUST((long)at);
            if (MUST(fork()) == 0) {
                char byte;
                alarm(10);
                close(over[1]);
                MUST(read(over[0], &byte, 1));
                at[100] = 1;
                if (msync((void *)at, LENGTH, MS_SYNC) == 0) MUST(write(told[1], "x", 1));
                _exit(0);
            }
            MUST(write(begun[1], "x", 1));
            for (char value = 1;; value++) {
                for (int page = 0; page < LENGTH; page += 4096) at[page] = value;
                MUST(msync((void *)at, LENGTH, MS_SYNC));
            }
        }
        char byte;
        close(told[1]);
        MUST(read(begun[0], &byte, 1));
        usleep(3000 + 700 * time);
        MUST(kill(parent, SIGKILL));
        MUST(waitpid(parent, NULL, 0));
        MUST(write(over[1], "x", 1));
        went_on += read(told[0], &byte, 1) == 1;
        for (int i = 0; i < 2; i++) close(begun[i]), close(over[i]);
        close(told[0]);
    }
    say("%d of %d children went on", went_on, TIMES);
    MUST(unlink("f")); /* what it holds depends on when */
}

/* A process that maps the file sees what another one has written, although that was killed in the midst of it. */
static void writers_are_killed(void) {
    enum { TIMES = 16, BYTES = 1 << 20 };
    static char now[BYTES];
    int seen = 0;
    int fd = MUST(open("f", O_RDWR | O_CREAT, 0644));
    MUST(ftruncate(fd, BYTES));
    volatile char *at = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    MUST((long)at);
    for (int page = 0; page < BYTES; page += 4096) at[page] = 1;
    MUST(msync((void *)at, BYTES, MS_SYNC));
    for (int time = 0; time < TIMES && seen == time; time++) {
        int begun[2];
        MUST(pipe(begun));
        pid_t writer = MUST(fork());
        if (writer == 0) {
            static char bytes[BYTES];
            int own = MUST(open("f", O_WRONLY));
            MUST(write(begun[1], "x", 1));
            for (int value = 1;; value++) {
                memset(bytes, value, sizeof bytes);
                MUST(pwrite(own, bytes, sizeof bytes, 0));
            }
        }
        MUST(read(begun[0], now, 1));
        usleep(3000 + 700 * time);
        MUST(kill(writer, SIGKILL));
        MUST(waitpid(writer, NULL, 0));
        for (int i = 0; i < 2; i++) close(begun[i]);
        for (int wait = 0; seen == time && wait < 2000; wait++) {
            if (wait) usleep(10000);
            MUST(pread(fd, now, BYTES, 0));
            seen += memcmp((void *)at, now, BYTES) == 0;
        }
    }
    say("what %d of %d killed writers wrote is seen", seen, TIMES);
    MUST(munmap((void *)at, BYTES));
    MUST(close(fd));
    MUST(unlink("f")); /* what it holds depends on when */
}

static const struct test tests[] = {
    {"workers-set-the-length", workers_set_the_length},
    {"workers-make-it-empty", workers_make_it_empty},
    {"parents-are-killed", parents_are_killed},
    {"writers-are-killed", writers_are_killed},
    {NULL, NULL},
};

int main(int count, char **arguments) { return run(count, arguments, tests); }
