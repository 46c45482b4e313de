/* Reads files from front to back in short pieces while they change. A library may request more than one piece
 * at a time, but reads must return what the file holds at that moment. */
#include "case.h"
#include <pthread.h>
#include <sys/mman.h>
#include <sys/uio.h>

enum { BYTES = 1500000 };

static unsigned char byte_at(long offset, int round) {
    return (unsigned char)(offset * 31 + offset / 251 + round * 97);
}

/* Overwrites a range of the file with this round's contents. */
static void fill(int fd, long from, long count, int round) {
    static unsigned char data[BYTES];
    for (long i = 0; i < count; i++) data[i] = byte_at(from + i, round);
    for (long done = 0; done < count;) done += MUST(pwrite(fd, data + done, count - done, from + done));
}

static int filled(const char *name) {
    int fd = MUST(open(name, O_RDWR | O_CREAT | O_TRUNC, 0644));
    fill(fd, 0, BYTES, 0);
    return fd;
}

/* Returns where the data that was read first differs from a round, or -1 if it does not. */
static long differs(const unsigned char *data, long from, long count, int round) {
    for (long i = 0; i < count; i++)
        if (data[i] != byte_at(from + i, round)) return from + i;
    return -1;
}

/* Reads on, `count` bytes at a time, `times` times or to the end. */
static void read_on(int fd, size_t count, int times, int round) {
    static unsigned char data[BYTES];
    long from = lseek(fd, 0, SEEK_CUR), at = from, wrong = -1, shorter = 0;
    while (times-- > 0) {
        long got = MUST(read(fd, data, count));
        if (wrong < 0) wrong = differs(data, at, got, round);
        at += got;
        if (got == 0) break;
        if (got < (long)count) shorter++;
    }
    say("by %zu from %ld to %ld, %ld short, wrong at %ld, then at %ld", count, from, at, shorter, wrong,
        (long)lseek(fd, 0, SEEK_CUR));
}

static void pieces(void) {
    close(filled("f"));
    size_t counts[] = {1, 511, 4096, 10240, 65536, 131072, 200000, 262144, 300000, BYTES};
    for (unsigned i = 0; i < sizeof counts / sizeof *counts; i++) {
        int fd = MUST(open("f", O_RDONLY));
        read_on(fd, counts[i], counts[i] == 1 ? 70000 : INT_MAX, 0);
        read_on(fd, counts[i], 2, 0);
        MUST(lseek(fd, BYTES / 2, SEEK_SET));
        read_on(fd, 4096, 9, 0);
        MUST(lseek(fd, -8192, SEEK_CUR));
        read_on(fd, counts[i], 5, 0);
        close(fd);
    }
}

static void mixed(void) {
    int fd = filled("f");
    static unsigned char data[3][70000];
    long at = 0, wrong = -1;
    for (int i = 0; at < BYTES; i++) {
        struct iovec parts[3] = {{data[0], 1 + i % 7}, {data[1], 100 * (i % 5)}, {data[2], 3000 + i}};
        long got = i % 4 == 3 ? MUST(pread(fd, data[0], 5000, at)) : MUST(preadv(fd, parts, 3, at));
        long first = i % 4 == 3 ? got : got < (long)parts[0].iov_len ? got : (long)parts[0].iov_len;
        if (wrong < 0) wrong = differs(data[0], at, first, 0);
        at += got;
        if (i % 9 == 8) {
            /* Elsewhere and back. */
            got = MUST(pread(fd, data[1], 4096, (at * 7) % BYTES));
            if (wrong < 0) wrong = differs(data[1], (at * 7) % BYTES, got, 0);
        }
    }
    say("to %ld, wrong at %ld", at, wrong);
}

/* Changes after the position that is read, by the same descriptor, another one, a name and a child. */
static void changed(void) {
    int fd = filled("f"), other = MUST(open("f", O_RDWR));
    for (int round = 1; round <= 6; round++) {
        MUST(lseek(fd, 0, SEEK_SET));
        read_on(fd, 4096, 20, round - 1);
        long at = lseek(fd, 0, SEEK_CUR);
        if (round == 1) fill(fd, 0, BYTES, round);
        if (round == 2) fill(other, 0, BYTES, round);
        if (round == 3) IN_CHILD({ fill(fd, 0, BYTES, round); });
        if (round == 4) IN_CHILD({ fill(MUST(open("f", O_WRONLY)), 0, BYTES, round); });
        if (round == 5) {
            int new = MUST(open("new", O_RDWR | O_CREAT, 0644));
            fill(new, 0, BYTES, round);
            int to = MUST(open("f", O_WRONLY));
            MUST(lseek(new, 0, SEEK_SET));
            loff_t from = 0, where = 0;
            while (where < BYTES) MUST(copy_file_range(new, &from, to, &where, BYTES, 0));
        }
        if (round == 6) {
            unsigned char *map = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
            for (long i = 0; i < BYTES; i++) map[i] = byte_at(i, round);
            munmap(map, BYTES);
        }
        say("round %d at %ld", round, at);
        read_on(fd, 4096, 20, round);
    }
}

/* The file becomes shorter and longer, gets a hole, and grows at the end. */
static void lengths(void) {
    int fd = filled("f");
    MUST(lseek(fd, 0, SEEK_SET));
    read_on(fd, 4096, 20, 0);
    MUST(ftruncate(fd, 100000));
    read_on(fd, 4096, INT_MAX, 0);
    MUST(truncate("f", 90000));
    read_on(fd, 4096, INT_MAX, 0);
    fill(fd, 90000, 60000, 0);
    read_on(fd, 4096, INT_MAX, 0);
    int end = MUST(open("f", O_WRONLY | O_APPEND));
    for (int i = 0; i < 5; i++) {
        unsigned char more = byte_at(150000 + i, 0);
        MUST(write(end, &more, 1));
        read_on(fd, 4096, INT_MAX, 0);
    }
    MUST(lseek(fd, 16384, SEEK_SET));
    read_on(fd, 1000, 20, 0);
    MUST(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 36384, 4096));
    char hole[1000];
    long got = read(fd, hole, sizeof hole);
    say("hole %ld, %d", got, hole[0] | hole[999]);
}

/* All who have the descriptor share one offset. */
static void shared(void) {
    int fd = filled("f"), again = dup(fd);
    MUST(lseek(fd, 0, SEEK_SET));
    read_on(fd, 3000, 20, 0);
    IN_CHILD({ read_on(fd, 3000, 20, 0); });
    read_on(again, 3000, 20, 0);
    MUST(lseek(again, 700000, SEEK_SET));
    read_on(fd, 3000, 20, 0);
    int pipe_of[2];
    MUST(pipe(pipe_of));
    MUST(splice(fd, NULL, pipe_of[1], NULL, 4096, 0));
    read_on(fd, 3000, 20, 0);
    /* Another file takes the same number. */
    int other = MUST(open("g", O_RDWR | O_CREAT, 0644));
    fill(other, 0, BYTES, 7);
    MUST(lseek(other, 760000, SEEK_SET));
    MUST(dup2(other, fd));
    read_on(fd, 3000, 20, 7);
}

static void *reads_all(void *name) {
    static __thread unsigned char data[5000];
    int fd = MUST(open(name, O_RDONLY)), round = *(char *)name - 'a';
    long at = 0, wrong = -1;
    for (long got; (got = MUST(read(fd, data, 1000 + 500 * round))) > 0; at += got)
        if (wrong < 0) wrong = differs(data, at, got, round);
    close(fd);
    return (void *)(wrong < 0 ? at : -1);
}

/* More files at once than any library would follow. */
static void threads(void) {
    enum { ALL = 12 };
    pthread_t thread[ALL];
    static char names[ALL][2];
    for (int i = 0; i < ALL; i++) {
        names[i][0] = 'a' + i % 8;
        int fd = MUST(open(names[i], O_RDWR | O_CREAT, 0644));
        fill(fd, 0, 300000, i % 8);
        close(fd);
    }
    for (int i = 0; i < ALL; i++) pthread_create(&thread[i], NULL, reads_all, names[i]);
    for (int i = 0; i < ALL; i++) {
        void *read;
        pthread_join(thread[i], &read);
        say("%s to %ld", names[i], (long)read);
    }
}

static const struct test tests[] = {
    {"pieces", pieces}, {"mixed", mixed},     {"changed", changed}, {"lengths", lengths},
    {"shared", shared}, {"threads", threads}, {NULL, NULL},
};

int main(int count, char **arguments) { return run(count, arguments, tests); }
