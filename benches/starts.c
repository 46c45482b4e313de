/* Measures the cost of starting programs:
 * cc -O2 -o starts starts.c; ./starts TURNS COMMAND ... [+++ COMMAND ...] ...
 *
 * Runs the commands in turns, a few milliseconds apart. Prints for each the medians (and first quartiles) of
 * the time until it exits and of its CPU time, the median of its page faults, and CPU time and page faults
 * including those of all processes that it leaves behind, for which this program waits. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { COMMANDS = 32, WALL, CPU, FAULTS, ALL_CPU, ALL_FAULTS, VALUES };

extern char **environ;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}

static double cpu(const struct rusage *r) {
    return (r->ru_utime.tv_sec + r->ru_stime.tv_sec) * 1e6 + r->ru_utime.tv_usec + r->ru_stime.tv_usec;
}

static int order(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int count, char **arguments) {
    if (count < 3) return 2;
    int turns = atoi(arguments[1]), commands = 0;
    char **command[COMMANDS];
    double *values[COMMANDS][VALUES];
    command[commands++] = arguments + 2;
    for (int i = 2; i < count; i++)
        if (strcmp(arguments[i], "+++") == 0 && commands < COMMANDS) {
            arguments[i] = NULL;
            command[commands++] = arguments + i + 1;
        }
    for (int c = 0; c < commands; c++)
        for (int v = WALL; v < VALUES; v++) values[c][v] = calloc(turns, sizeof(double));
    /* Processes that a command leaves behind become children of this one. */
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    posix_spawn_file_actions_t quiet;
    posix_spawn_file_actions_init(&quiet);
    posix_spawn_file_actions_addopen(&quiet, 1, "/dev/null", O_WRONLY, 0);
    for (int turn = 0; turn < turns; turn++)
        for (int c = 0; c < commands; c++) {
            struct rusage used;
            int status;
            pid_t pid;
            double start = now();
            if (posix_spawnp(&pid, command[c][0], &quiet, NULL, command[c], environ) != 0) return 1;
            wait4(pid, &status, 0, &used);
            values[c][WALL][turn] = now() - start;
            values[c][CPU][turn] = values[c][ALL_CPU][turn] = cpu(&used);
            values[c][FAULTS][turn] = values[c][ALL_FAULTS][turn] = used.ru_minflt;
            while (wait4(-1, &status, __WALL, &used) > 0) {
                values[c][ALL_CPU][turn] += cpu(&used);
                values[c][ALL_FAULTS][turn] += used.ru_minflt;
            }
            usleep(3000);
        }
    for (int c = 0; c < commands; c++) {
        for (int v = WALL; v < VALUES; v++) qsort(values[c][v], turns, sizeof(double), order);
        double **of = values[c];
        int half = turns / 2, quarter = turns / 4;
        printf("%5.0f us (%5.0f)  CPU %5.0f (%5.0f)  faults %4.0f  with all: CPU %5.0f (%5.0f)  faults %4.0f  %s %s\n",
               of[WALL][half], of[WALL][quarter], of[CPU][half], of[CPU][quarter], of[FAULTS][half],
               of[ALL_CPU][half], of[ALL_CPU][quarter], of[ALL_FAULTS][half], command[c][0],
               command[c][1] ? command[c][1] : "");
    }
    return 0;
}
