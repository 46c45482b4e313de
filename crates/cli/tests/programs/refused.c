/* Arguments that the kernel refuses. */
#include "case.h"
#include <linux/openat2.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#define PAGE 4096
#ifndef MADV_DONTNEED_LOCKED
#define MADV_DONTNEED_LOCKED 24
#endif

/* Creates a file of so many pages, and maps it. */
static char *mapped(const char *path, int pages, int kind) {
    int fd = MUST(open(path, O_RDWR | O_CREAT, 0644));
    for (int page = 0; page < pages; page++) MUST(pwrite(fd, "page", 4, page * PAGE));
    char *at = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, kind, fd, 0);
    MUST(at == MAP_FAILED ? -1 : 0);
    MUST(close(fd));
    return at;
}

static void msyncs(void) {
    for (int pages = 4; pages <= 128; pages += 124) {
        char *at = mapped("f", pages, MAP_SHARED);
        memcpy(at, "stored", 6);
        SAY(msync(at, PAGE, MS_SYNC | MS_ASYNC));
        SAY(msync(at, PAGE, 8));
        SAY(msync(at, PAGE, MS_SYNC | 1 << 20));
        SAY(msync(at + 1, PAGE, MS_SYNC));
        SAY(msync(at + 1, 0, MS_SYNC));
        SAY(msync(at, 0, MS_SYNC));
        SAY(msync(at, 0, 0));
        SAY(msync(at, PAGE, MS_SYNC));
        SAY(msync(at, PAGE, MS_ASYNC | MS_INVALIDATE));
        SAY(msync(at, PAGE - 1, 0));
        SAY(msync(at, SIZE_MAX - PAGE, MS_SYNC));
        MUST(munmap(at + PAGE, PAGE));
        memcpy(at, "at the end", 10);
        SAY(msync(at, 4 * PAGE, MS_SYNC));
        SAY(msync(at, 2 * PAGE, MS_ASYNC));
        SAY(msync(at + PAGE, PAGE, MS_SYNC));
        char text[16] = {0};
        int fd = MUST(open("f", O_RDONLY));
        MUST(read(fd, text, 12));
        say("%s", text);
    }
}

static void advice(void) {
    for (int pages = 4; pages <= 128; pages += 124) {
        char *at = mapped("f", pages, MAP_PRIVATE);
        int last = (pages - 1) * PAGE;
        SAY(madvise(at, pages * PAGE, MADV_DONTNEED));
        say("%.4s %.4s", at, at + last);
        SAY(madvise(at, pages * PAGE, MADV_DONTNEED_LOCKED));
        say("%.4s %.4s", at, at + last);
    }
}

static void statxs(void) {
    struct statx status;
    make("f", "text");
    int fd = MUST(open("f", O_RDONLY));
    int nowhere = AT_EMPTY_PATH;
    SAY(statx(AT_FDCWD, "f", 0, STATX_BASIC_STATS, &status));
    SAY(statx(fd, "", nowhere, 0, &status));
    SAY(statx(AT_FDCWD, "f", AT_SYMLINK_FOLLOW, 0, &status));
    SAY(statx(AT_FDCWD, "f", 1 << 30, 0, &status));
    SAY(statx(AT_FDCWD, "none", 1 << 30, 0, &status));
    status.stx_size = 0;
    SAY(statx(fd, "", nowhere | 1 << 30, 0, &status));
    say("size %llu", (unsigned long long)status.stx_size);
    SAY(statx(AT_FDCWD, "f", 0, STATX__RESERVED, &status));
    SAY(statx(fd, "", nowhere, STATX__RESERVED, &status));
    SAY(statx(AT_FDCWD, "f", AT_STATX_FORCE_SYNC, 0, &status));
    SAY(statx(AT_FDCWD, "f", AT_STATX_SYNC_TYPE, 0, &status));
    SAY(statx(fd, "", nowhere | AT_STATX_SYNC_TYPE, 0, &status));
    const char *volatile null = NULL;
    SAY(statx(AT_FDCWD, null, 0, 0, &status));
    SAY(statx(fd, null, 0, 0, &status));
    struct stat old;
    SAY(fstatat(fd, "", &old, nowhere));
    SAY(fstatat(AT_FDCWD, "f", &old, 1 << 30));
}

static int opens(const char *path, struct open_how how, size_t length) {
    /* What newer kernels may know. */
    struct { struct open_how how; uint64_t more; } given = {how, length == 32};
    int fd = syscall(SYS_openat2, AT_FDCWD, path, &given, length == 32 ? sizeof given : length);
    if (fd >= 0) close(fd);
    return fd < 0 ? -1 : 0;
}

#define HOW(...) (struct open_how){__VA_ARGS__}

static void openat2s(void) {
    make("f", "text");
    size_t all = sizeof(struct open_how);
    SAY(opens("f", HOW(.flags = O_RDWR), all));
    SAY(opens("f", HOW(.flags = O_RDWR), all - 8));
    SAY(opens("f", HOW(.flags = O_RDWR), 0));
    SAY(opens("f", HOW(.flags = O_RDWR), 32));
    SAY(opens("f", HOW(.flags = 1ull << 40), all));
    SAY(opens("f", HOW(.flags = 1 << 30), all));
    SAY(opens("f", HOW(.mode = 0600), all));
    SAY(opens("f", HOW(.flags = O_CREAT | O_RDWR, .mode = 0600), all));
    SAY(opens("new", HOW(.flags = O_CREAT | O_RDWR, .mode = 01000000), all));
    SAY(opens("f", HOW(.flags = O_PATH), all));
    SAY(opens("f", HOW(.flags = O_PATH | O_APPEND), all));
    SAY(opens("f", HOW(.resolve = 1 << 20), all));
    SAY(opens("f", HOW(.resolve = 1ull << 40), all));
    SAY(opens("f", HOW(.resolve = RESOLVE_BENEATH | RESOLVE_IN_ROOT), all));
    SAY(opens("none", HOW(.flags = O_RDONLY), all));
    SAY(syscall(SYS_openat2, AT_FDCWD, "f", NULL, all));
}

/* Nothing can be found from what is no directory; flags that contradict each other are refused first. */
static void from_files(void) {
    make("f", "text");
    int fd = MUST(open("f", O_RDONLY));
    SAY(openat(fd, "x", O_CREAT | O_DIRECTORY, 0644));
    SAY(openat(fd, "../x", O_CREAT | O_DIRECTORY, 0644));
    SAY(openat(fd, "..", O_CREAT | O_DIRECTORY | O_EXCL, 0644));
    SAY(openat(fd, "../f", O_RDONLY));
    SAY(mkdirat(fd, "../x", 0755));
}

int main(int count, char **arguments) {
    static const struct test tests[] = {
        {"msyncs", msyncs}, {"advice", advice}, {"statxs", statxs}, {"openat2s", openat2s}, {"from_files", from_files},
        {0},
    };
    return run(count, arguments, tests);
}
