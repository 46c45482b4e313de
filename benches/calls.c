// Times one operation after another: `calls OPERATION DIRECTORY FILES SECONDS`.
// Operations: stat, orc (open, read 4 KiB, close), pread (4 KiB, anywhere in the file `big`).
// The directory contains `big` and the files tree/dNNN/fNNNNN, 100 in each directory. Prints the median and
// the mean in microseconds, the number of operations, and the CPU time of each (including the loop itself).
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { BUCKETS = 100000 }; // of 10 ns

static unsigned counts[BUCKETS];

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1e6 + time.tv_nsec / 1e3;
}

static unsigned long random_number(void) {
    static unsigned long state = 88172645463325252ul;
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
}

static void fail(const char *what) {
    perror(what);
    exit(1);
}

int main(int count, char **arguments) {
    if (count != 5) {
        fprintf(stderr, "usage: calls stat|orc|pread DIRECTORY FILES SECONDS\n");
        return 2;
    }
    const char *operation = arguments[1], *directory = arguments[2];
    unsigned long files = strtoul(arguments[3], NULL, 10);
    double until = now() + atof(arguments[4]) * 1e6, sum = 0;
    char name[4096], buffer[4096];
    int big = -1;
    struct stat found;
    if (!strcmp(operation, "pread")) {
        snprintf(name, sizeof name, "%s/big", directory);
        big = open(name, O_RDONLY);
        if (big < 0 || fstat(big, &found) < 0)
            fail(name);
    }
    unsigned long done = 0;
    while (now() < until) {
        unsigned long number = random_number() % files;
        snprintf(name, sizeof name, "%s/tree/d%03lu/f%05lu", directory, number / 100, number);
        double start = now();
        if (big >= 0) {
            off_t at = random_number() % (found.st_size / sizeof buffer) * sizeof buffer;
            if (pread(big, buffer, sizeof buffer, at) != sizeof buffer)
                fail("pread");
        } else if (!strcmp(operation, "stat")) {
            if (stat(name, &found) < 0)
                fail(name);
        } else {
            int file = open(name, O_RDONLY);
            if (file < 0 || read(file, buffer, sizeof buffer) != sizeof buffer)
                fail(name);
            close(file);
        }
        double took = now() - start;
        sum += took;
        done++;
        unsigned bucket = took * 100;
        counts[bucket < BUCKETS ? bucket : BUCKETS - 1]++;
    }
    unsigned long seen = 0;
    unsigned bucket = 0;
    while (bucket < BUCKETS && (seen += counts[bucket]) * 2 < done)
        bucket++;
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    double cpu = (used.ru_utime.tv_sec + used.ru_stime.tv_sec) * 1e6 + used.ru_utime.tv_usec + used.ru_stime.tv_usec;
    printf("%.2f %.2f %lu %.2f\n", bucket / 100.0, sum / done, done, cpu / done);
    return 0;
}
