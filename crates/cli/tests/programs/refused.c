/* Arguments that the kernel refuses. */
#include "case.h"
#include <stdint.h>
#include <sys/mman.h>

#define PAGE 4096

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

int main(int count, char **arguments) {
    static const struct test tests[] = {
        {"msyncs", msyncs}, {0},
    };
    return run(count, arguments, tests);
}
