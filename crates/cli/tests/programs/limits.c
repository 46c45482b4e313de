/* The limit on file lengths: what is written up to it, what fails there, and the signal. */
#include "case.h"
#include <sys/resource.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/uio.h>

static volatile sig_atomic_t signals;

static void count(int signal) {
    (void)signal;
    signals++;
}

static void limit(pid_t who, rlim_t bytes) {
    struct rlimit set = {bytes, RLIM_INFINITY};
    MUST(prlimit(who, RLIMIT_FSIZE, &set, NULL));
}

/* The limit for the tested calls. The transcript may be a file, too, and is written without a limit. */
static rlim_t bytes = RLIM_INFINITY;

/* Prints the result of a call under the limit, and how often the signal came. */
#define TRY(call)                                                     \
    do {                                                              \
        limit(0, bytes);                                              \
        errno = 0;                                                    \
        long result = (long)(call);                                   \
        int error = errno;                                            \
        limit(0, RLIM_INFINITY);                                      \
        say("%s: %ld %s", #call, result, result == -1 ? strerrorname_np(error) : ""); \
        if (signals) say("signals: %d", signals);                     \
        signals = 0;                                                  \
    } while (0)

static void length(const char *path) {
    struct stat status;
    MUST(stat(path, &status));
    say("%s has %lld", path, (long long)status.st_size);
}

static void writes(void) {
    char text[64] = "text";
    signal(SIGXFSZ, count);
    bytes = 100;
    int fd = MUST(open("f", O_RDWR | O_CREAT, 0644));
    TRY(write(fd, text, 64));
    TRY(write(fd, text, 64));
    TRY(write(fd, text, 64));
    TRY(write(fd, text, 0));
    TRY(pwrite(fd, text, 64, 90));
    TRY(pwrite(fd, text, 64, 100));
    TRY(pwrite(fd, text, 64, 1000));
    TRY(pwrite(fd, text, 0, 1000));
    struct iovec parts[] = {{text, 40}, {text, 40}};
    TRY(pwritev(fd, parts, 2, 50));
    int end = MUST(open("f", O_WRONLY | O_APPEND));
    TRY(write(end, text, 4));
    MUST(ftruncate(fd, 98));
    TRY(write(end, text, 4));
    length("f");
    FILE *stream = fopen("s", "w");
    if (!stream) _exit(93);
    for (int i = 0; i < 30; i++) fputs("twelve bytes", stream);
    TRY(fclose(stream));
    MUST(ftruncate(fd, 0));
    MUST(lseek(fd, 0, SEEK_SET));
    TRY(writev(fd, parts, 2));
    TRY(writev(fd, parts, 2));
    length("s");
}

static void lengths(void) {
    signal(SIGXFSZ, count);
    int fd = MUST(open("f", O_RDWR | O_CREAT, 0644));
    MUST(ftruncate(fd, 5000));
    bytes = 1000;
    TRY(ftruncate(fd, 4000));
    TRY(ftruncate(fd, 4001));
    TRY(truncate("f", 4001));
    TRY(truncate("f", 900));
    TRY(truncate("f", 1000));
    TRY(truncate("f", 1001));
    TRY(fallocate(fd, 0, 0, 1000));
    TRY(fallocate(fd, 0, 0, 1001));
    TRY(fallocate(fd, FALLOC_FL_KEEP_SIZE, 0, 5000));
    TRY(posix_fallocate(fd, 900, 200));
    length("f");
    bytes = RLIM_INFINITY;
    TRY(ftruncate(fd, 5000));
    length("f");
}

static void copies(void) {
    signal(SIGXFSZ, count);
    int from = MUST(open("from", O_RDWR | O_CREAT, 0644));
    MUST(ftruncate(from, 500));
    int to = MUST(open("to", O_RDWR | O_CREAT, 0644));
    bytes = 300;
    off64_t at = 0, end = 300;
    TRY(copy_file_range(from, &at, to, NULL, 200, 0));
    TRY(copy_file_range(from, &at, to, NULL, 200, 0));
    TRY(copy_file_range(from, &at, to, &end, 50, 0));
    length("to");
    MUST(ftruncate(to, 0));
    MUST(lseek(to, 0, SEEK_SET));
    TRY(sendfile(to, from, NULL, 300));
    TRY(sendfile(to, from, NULL, 200));
    length("to");
    /* From another file system. */
    int memory = MUST(memfd_create("from", 0));
    MUST(ftruncate(memory, 500));
    MUST(ftruncate(to, 0));
    MUST(lseek(to, 0, SEEK_SET));
    TRY(sendfile(to, memory, NULL, 100));
    TRY(sendfile(to, memory, NULL, 200));
    TRY(sendfile(to, memory, NULL, 200));
    length("to");
    TRY(lseek(memory, 0, SEEK_CUR));
    /* As long as the limit permits. */
    MUST(ftruncate(memory, 300));
    MUST(ftruncate(from, 300));
    int both[2] = {memory, from};
    for (int i = 0; i < 2; i++) {
        MUST(ftruncate(to, 0));
        MUST(lseek(to, 0, SEEK_SET));
        MUST(lseek(both[i], 0, SEEK_SET));
        TRY(sendfile(to, both[i], NULL, 1000));
        TRY(sendfile(to, both[i], NULL, 1000));
        length("to");
    }
}

static void effects(void) {
    int fd = MUST(open("f", O_RDWR | O_CREAT, 0644));
    bytes = 3;
    IN_CHILD({
        TRY(write(fd, "text", 4));
        TRY(write(fd, "text", 4));
    });
    signal(SIGXFSZ, SIG_IGN);
    TRY(write(fd, "text", 4));
    signal(SIGXFSZ, SIG_DFL);
    /* A limit that a parent sets for a running child, and one that a new program inherits. */
    int go[2];
    MUST(pipe(go));
    pid_t child = fork();
    if (child == 0) {
        char byte;
        MUST(write(fd, "t", 1));
        MUST(read(go[0], &byte, 1));
        MUST(write(fd, "text", 4));
        execlp("sh", "sh", "-c", "echo text >> f", (char *)NULL);
        _exit(96);
    }
    limit(child, 6);
    MUST(write(go[1], "x", 1));
    reap(child);
    length("f");
}

int main(int count, char **arguments) {
    static const struct test tests[] = {
        {"writes", writes}, {"lengths", lengths}, {"copies", copies}, {"effects", effects}, {NULL, NULL},
    };
    return run(count, arguments, tests);
}
