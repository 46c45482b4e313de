/* Files of several MiB with known contents. */
#include "case.h"
#include <stdint.h>
#include <sys/mman.h>

#define PAGE 4096L
#define LENGTH (3 * 1048576L + 1000)
#define PAGES ((LENGTH + PAGE - 1) / PAGE)

static inline unsigned char byte_at(long at) { return (uint64_t)at * 2654435761u >> 15 ^ at >> 12; }

/* Creates a file with the pattern. */
static inline void pattern(const char *path, long length) {
    unsigned char *all = malloc(length);
    for (long at = 0; at < length; at++) all[at] = byte_at(at);
    int fd = MUST(open(path, O_WRONLY | O_CREAT | O_TRUNC, 0644));
    for (long done = 0; done < length;) done += MUST(write(fd, all + done, length - done));
    MUST(close(fd));
    free(all);
}

/* Compares pages with the pattern at this offset of the file. */
static inline void compare(const char *what, const unsigned char *at, long offset, long length) {
    for (long i = 0; i < length; i++) {
        if (at[i] != byte_at(offset + i)) {
            say("%s: byte %ld is %d, not %d", what, i, at[i], byte_at(offset + i));
            return;
        }
    }
    say("%s: as written", what);
}
