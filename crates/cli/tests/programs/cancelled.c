/* Threads that are cancelled while they use files: where libc's functions end a thread, and nowhere else. */
#include "case.h"
#include <pthread.h>
#include <sys/uio.h>

static volatile int turns, may_begin;
static int file;

/* Starts a thread, cancels it once it has made some turns, and prints whether that ended it. */
static void cancel(const char *name, void *(*work)(void *)) {
    pthread_t thread;
    void *result = NULL;
    turns = 0;
    MUST(-pthread_create(&thread, NULL, work, NULL));
    while (turns < 3) usleep(1000);
    pthread_cancel(thread);
    MUST(-pthread_join(thread, &result));
    say("%s: %s", name, result == PTHREAD_CANCELED ? "cancelled" : "ends by itself");
}

#define FOR_EVER(name, ...)               \
    static void *name(void *unused) {     \
        for (;; turns++) { __VA_ARGS__; } \
        return unused;                    \
    }

static char text[16] = "0123456789abcde\n";

FOR_EVER(reads, pread(file, text, sizeof text, 0))
FOR_EVER(writes, write(file, text, sizeof text))
FOR_EVER(gathers, pwritev(file, &((struct iovec){text, 4}), 1, 0))
FOR_EVER(opens, open("none", O_RDONLY))
FOR_EVER(synchronizes, fdatasync(file))
FOR_EVER(locks, struct flock lock = {.l_type = F_WRLCK}; fcntl(file, F_SETLKW, &lock))

static void *prints(void *stream) {
    stream = fopen("lines", "w");
    setvbuf(stream, NULL, _IONBF, 0);
    for (;; turns++) fputs("line\n", stream);
    return stream;
}

static void *looks(void *unused) {
    struct stat status;
    for (; turns < 1000; turns++) stat("f", &status);
    return unused;
}

static void threads_end_where_libc_ends_them(void) {
    file = MUST(open("f", O_RDWR | O_CREAT | O_APPEND, 0644));
    cancel("pread", reads);
    cancel("write", writes);
    cancel("pwritev", gathers);
    cancel("open", opens);
    cancel("fdatasync", synchronizes);
    cancel("fcntl", locks);
    cancel("fputs", prints);
    cancel("stat", looks);
    /* Whatever was cancelled, files can be used. */
    struct stat status;
    MUST(fstat(file, &status));
    say("%d bytes too many", (int)(status.st_size % 4));
    SAY(pwrite(file, "done", 4, 0));
    /* How much the threads have written is not the same each time. */
    MUST(unlink("f"));
    MUST(unlink("lines"));
}

static void *begins_with_open(void *unused) {
    turns = 3;
    while (!may_begin) continue;
    open("new", O_RDWR | O_CREAT, 0644);
    return unused;
}

static void *begins_with_stat(void *unused) {
    struct stat status;
    turns = 3;
    while (!may_begin) continue;
    stat("new", &status);
    return unused;
}

static void *allows(void *thread) {
    usleep(20000);
    may_begin = 1;
    return thread;
}

/* A thread that is cancelled before its process has asked for any file. */
static void first_calls(const char *name, void *(*work)(void *)) {
    pthread_t other;
    IN_CHILD({
        pthread_create(&other, NULL, allows, NULL);
        cancel(name, work);
        pthread_join(other, NULL);
        SAY(access("new", F_OK));
    });
}

static void cancelled_before_the_first_call(void) {
    first_calls("open", begins_with_open);
    first_calls("stat", begins_with_stat);
}

static void *waits(void *unused) {
    int own = open("f", O_RDWR);
    struct flock lock = {.l_type = F_WRLCK};
    turns = 3;
    fcntl(own, F_SETLKW, &lock);
    return unused;
}

static void waits_for_locks_end(void) {
    struct flock lock = {.l_type = F_WRLCK};
    int held[2];
    char byte;
    file = MUST(open("f", O_RDWR | O_CREAT, 0644));
    MUST(pipe(held));
    pid_t child = fork();
    if (child == 0) {
        int own = open("f", O_RDWR);
        MUST(fcntl(own, F_SETLKW, &lock));
        write(held[1], "x", 1);
        pause();
    }
    MUST(read(held[0], &byte, 1));
    for (int i = 0; i < 3; i++) cancel("wait", waits);
    MUST(kill(child, SIGKILL));
    reap(child);
    SAY(fcntl(file, F_SETLKW, &lock));
}

static const struct test tests[] = {
    {"calls", threads_end_where_libc_ends_them},
    {"first", cancelled_before_the_first_call},
    {"waits", waits_for_locks_end},
    {NULL, NULL},
};

int main(int count, char **arguments) { return run(count, arguments, tests); }
