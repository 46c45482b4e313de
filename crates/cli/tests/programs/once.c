/* Opens a file with its own system call, in this thread and in one of libc's, and copies it. The path is read
 * from standard input, so that no argument contains it. Before that, libc may open a file: the first
 * argument. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static char path[4096];

static long raw(long number, long a, long b, long c)
{
    long result;
    asm volatile("syscall"
                 : "=a"(result)
                 : "a"(number), "D"(a), "S"(b), "d"(c)
                 : "rcx", "r11", "memory");
    return result;
}

static void *copy(void *unused)
{
    char bytes[4096];
    long fd = raw(SYS_open, (long)path, O_RDONLY, 0);
    if (fd < 0) {
        printf("open: %ld\n", fd);
        return unused;
    }
    long got = raw(SYS_read, fd, (long)bytes, sizeof bytes);
    printf("%ld: %.*s\n", got, got > 0 ? (int)got : 0, bytes);
    raw(SYS_close, fd, 0, 0);
    return unused;
}

int main(int argc, char **argv)
{
    pthread_t thread;
    if (!fgets(path, sizeof path, stdin))
        return 2;
    path[strcspn(path, "\n")] = 0;
    copy(0);
    if (argc > 1) {
        int fd = open(path, O_RDONLY);
        copy(0);
        close(fd);
    }
    pthread_create(&thread, 0, copy, 0);
    pthread_join(thread, 0);
    return 0;
}
