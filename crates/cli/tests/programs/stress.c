/* Threads that read and write a file with their own system calls, some of them with short stacks for signals,
 * while a signal comes again and again whose handler reads the file, too; then children. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <unistd.h>

#define THREADS 6
#define ROUNDS 150
static char path[4096];
static volatile long handled, bad;

static long raw(long number, long a, long b, long c, long d)
{
    register long r10 asm("r10") = d;
    long result;
    asm volatile("syscall"
                 : "=a"(result)
                 : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10)
                 : "rcx", "r11", "memory");
    return result;
}

static void complain(const char *what, long got)
{
    bad = 1;
    printf("%s: %ld\n", what, got);
}

static void on_signal(int signal)
{
    char bytes[8];
    long fd = raw(SYS_open, (long)path, O_RDONLY, 0, 0);
    long got = raw(SYS_pread64, fd, (long)bytes, 8, 0);
    if (got != 8 || memcmp(bytes, "01234567", 8))
        complain(signal ? "in the handler" : "in the child", fd < 0 ? fd : got);
    raw(SYS_close, fd, 0, 0, 0);
    handled++;
}

static void *work(void *argument)
{
    long number = (long)argument, at = 16 + number * 8;
    stack_t stack = {.ss_sp = malloc(16384), .ss_size = 16384};
    if (number % 2)
        raw(SYS_sigaltstack, (long)&stack, 0, 0, 0);
    for (long round = 0; round < ROUNDS; round++) {
        char bytes[8];
        long found = -1, fd = raw(SYS_open, (long)path, O_RDWR, 0, 0);
        if (fd < 0)
            complain("open", fd);
        long got = raw(SYS_pread64, fd, (long)bytes, 8, 0);
        if (got != 8 || memcmp(bytes, "01234567", 8))
            complain("pread64", got);
        raw(SYS_pwrite64, fd, (long)&round, 8, at);
        raw(SYS_pread64, fd, (long)&found, 8, at);
        if (found != round)
            complain("what was written", found);
        if ((got = raw(SYS_close, fd, 0, 0, 0)))
            complain("close", got);
        raw(SYS_sched_yield, 0, 0, 0, 0);
    }
    return 0;
}

int main(int argc, char **argv)
{
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_RESTART | SA_ONSTACK};
    struct itimerval often = {{0, 3000}, {0, 3000}}, never = {{0, 0}, {0, 0}};
    pthread_t threads[THREADS];
    if (argc < 2)
        return 2;
    snprintf(path, sizeof path, "%s/stress", argv[1]);
    int fd = open(path, O_CREAT | O_RDWR | O_TRUNC, 0600);
    if (write(fd, "01234567", 8) != 8)
        return 2;
    close(fd);
    sigaction(SIGALRM, &action, 0);
    setitimer(ITIMER_REAL, &often, 0);
    for (long i = 0; i < THREADS; i++)
        pthread_create(threads + i, 0, work, (void *)i);
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], 0);
    for (long end = handled + 3; handled < end;)
        pause();
    setitimer(ITIMER_REAL, &never, 0);
    for (int i = 0; i < 20; i++) {
        int status = 0;
        long child = raw(SYS_fork, 0, 0, 0, 0);
        if (!child) {
            on_signal(0);
            raw(SYS_exit_group, bad != 0, 0, 0, 0);
        }
        raw(SYS_wait4, child, (long)&status, 0, 0);
        if (status)
            complain("a child", status);
    }
    printf("%s\n", bad ? "FAILED" : "all well");
    return bad != 0;
}
