/* Shows whether a program notices children that are not its own: alone HOW [PROGRAM ARGUMENTS ...]
 *
 * Sets what HOW says and starts the program, if there is one. Otherwise prints whether it adopts orphans,
 * whether it is alone, and its process number. */
#define _GNU_SOURCE
#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static volatile sig_atomic_t signals;

static void count(int signal) {
    (void)signal;
    signals++;
}

/* Long enough for a process that only has to end. */
static void pass(void) { usleep(30000); }

static int is_pending(void) {
    sigset_t set;
    sigpending(&set);
    return sigismember(&set, SIGCHLD);
}

static void block(void) {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGCHLD);
    sigprocmask(SIG_BLOCK, &set, NULL);
}

int main(int words, char **word) {
    if (words < 2) return 2;
    const char *how = word[1];
    if (words > 2) {
        if (strcmp(how, "takes-orphans") == 0) prctl(PR_SET_CHILD_SUBREAPER, 1);
        if (strcmp(how, "blocks") == 0) block();
        if (strcmp(how, "one-processor") == 0) {
            cpu_set_t set;
            CPU_ZERO(&set);
            CPU_SET(sched_getcpu(), &set);
            sched_setaffinity(0, sizeof set, &set);
        }
        execv(word[2], word + 2);
        return 1;
    }
    int takes = 0;
    prctl(PR_GET_CHILD_SUBREAPER, &takes);
    int all = takes ? 0 : __WALL, is_alone = 1;
    siginfo_t info;
    if (strcmp(how, "handles") == 0) {
        signal(SIGCHLD, count);
        pass();
    } else if (strcmp(how, "waits-to-handle") == 0) {
        block();
        pass();
        is_alone = !is_pending();
    } else if (strcmp(how, "has-blocked") == 0) {
        pass();
        is_alone = !is_pending();
    } else if (strcmp(how, "adopts") == 0) {
        prctl(PR_SET_CHILD_SUBREAPER, 1);
        pass();
    } else if (strcmp(how, "calls") == 0) {
        is_alone = syscall(SYS_waitid, P_ALL, 0, &info, WEXITED | all, NULL) < 0 && errno == ECHILD;
    } else if (strcmp(how, "waits") == 0) {
        is_alone = waitid(P_ALL, 0, &info, WEXITED | all) < 0 && errno == ECHILD;
    }
    is_alone &= waitpid(-1, NULL, all) < 0 && errno == ECHILD;
    if (strcmp(how, "handles") != 0) is_alone &= system("exit 3") == 3 << 8;
    is_alone &= waitpid(-1, NULL, all) < 0 && errno == ECHILD;
    printf("%d %d %d\n", takes, is_alone && signals == 0, (int)getpid());
    return 0;
}
