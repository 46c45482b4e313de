/* Large mappings, which are read when they are touched: what programs do to them, and what happens to their
 * files. */
#include "pattern.h"
#include <pthread.h>
#include <setjmp.h>

static unsigned char *map(const char *path, long length, int protection, int flags, long offset) {
    int fd = MUST(open(path, O_RDONLY));
    unsigned char *at = mmap(NULL, length, protection, flags, fd, offset);
    MUST((long)at);
    MUST(close(fd));
    return at;
}

/* Touches a byte and prints what happens. */
static sigjmp_buf back;
static void hit(int signal) { siglongjmp(back, signal); }
static void touch(const char *what, volatile unsigned char *at) {
    struct sigaction action = {.sa_handler = hit, .sa_flags = SA_NODEFER};
    sigaction(SIGBUS, &action, NULL);
    sigaction(SIGSEGV, &action, NULL);
    int signal = sigsetjmp(back, 1);
    if (signal == 0) say("%s: %d", what, *at);
    else say("%s: %s", what, sigabbrev_np(signal));
    sigaction(SIGBUS, &(struct sigaction){.sa_handler = SIG_DFL}, NULL);
    sigaction(SIGSEGV, &(struct sigaction){.sa_handler = SIG_DFL}, NULL);
}

static const int kinds[] = {MAP_PRIVATE, MAP_SHARED};
static const char *const names[] = {"private", "shared"};

static void pages_in_any_order(void) {
    pattern("f", LENGTH);
    for (int kind = 0; kind < 2; kind++) {
        say("%s", names[kind]);
        unsigned char *at = map("f", LENGTH, PROT_READ, kinds[kind], 0);
        for (long i = 0, page = 7; i < PAGES; i++, page = (page * 5 + 3) % PAGES) {
            long in = page * PAGE + i % 999;
            if (in < LENGTH && at[in] != byte_at(in)) say("page %ld is wrong", page);
        }
        compare("all", at, 0, LENGTH);
        long sum = 0;
        for (long i = LENGTH; i < PAGES * PAGE; i++) sum += at[i];
        say("behind the end: %ld", sum);
        MUST(munmap(at, LENGTH));
        at = map("f", LENGTH - 5 * PAGE, PROT_READ, kinds[kind], 5 * PAGE);
        compare("from page 5 on, backwards", at + LENGTH - 7 * PAGE, LENGTH - 2 * PAGE, PAGE);
        compare("and all of it", at, 5 * PAGE, LENGTH - 5 * PAGE);
        MUST(munmap(at, LENGTH - 5 * PAGE));
    }
}

static void names_do_not_matter(void) {
    for (int kind = 0; kind < 2; kind++) {
        pattern("f", LENGTH);
        unsigned char *at = map("f", LENGTH, PROT_READ, kinds[kind], 0);
        compare("a page", at + 100 * PAGE, 100 * PAGE, PAGE);
        MUST(rename("f", "g"));
        compare("of a file with another name", at + 300 * PAGE, 300 * PAGE, PAGE);
        MUST(unlink("g"));
        compare("of a file without name", at + 500 * PAGE, 500 * PAGE, PAGE);
        pattern("f", PAGE);
        MUST(chmod("f", 0));
        compare("all", at, 0, LENGTH);
        MUST(munmap(at, LENGTH));
        MUST(unlink("f"));
    }
}

static void beyond_the_end(void) {
    pattern("f", LENGTH);
    for (int kind = 0; kind < 2; kind++) {
        say("%s", names[kind]);
        unsigned char *at = map("f", LENGTH + 9 * PAGE, PROT_READ, kinds[kind], 0);
        touch("last byte", at + LENGTH - 1);
        touch("behind it", at + LENGTH);
        touch("a page behind it", at + PAGES * PAGE);
        touch("again", at + PAGES * PAGE);
        int fd = MUST(open("/dev/null", O_WRONLY)), ends[2];
        MUST(close(fd));
        MUST(pipe(ends));
        SAY(write(ends[1], at + PAGES * PAGE + PAGE, 10));
        SAY(write(ends[1], at + LENGTH - 100, 100));
        MUST(munmap(at, LENGTH + 9 * PAGE));
    }
}

/* Maps and populates much more than the file has, as databases do with files that will grow. */
static void populated(void) {
    long pages = 256, length = 512 << 20;
    unsigned char resident[256];
    pattern("f", 3 * PAGE);
    for (int kind = 0; kind < 2; kind++) {
        unsigned char *at = map("f", length, PROT_READ, kinds[kind] | MAP_POPULATE, 0);
        compare(names[kind], at, 0, 3 * PAGE);
        MUST(mincore(at + length - pages * PAGE, pages * PAGE, resident));
        long count = 0;
        for (long i = 0; i < pages; i++) count += resident[i] & 1;
        say("%ld pages beyond the end take memory", count);
        MUST(munmap(at, length));
        at = map("f", 3 * PAGE, PROT_READ, kinds[kind] | MAP_POPULATE, 0);
        compare("all that there is", at, 0, 3 * PAGE);
        MUST(munmap(at, 3 * PAGE));
    }
}

static void ends_that_move(void) {
    for (int kind = 0; kind < 2; kind++) {
        say("%s", names[kind]);
        pattern("f", LENGTH);
        int fd = MUST(open("f", O_RDWR));
        unsigned char *at = map("f", LENGTH + PAGE, PROT_READ, kinds[kind], 0);
        touch("a page", at + 50 * PAGE);
        touch("one behind the end", at + PAGES * PAGE);
        MUST(ftruncate(fd, 40 * PAGE));
        touch("the same, now behind the end", at + 50 * PAGE);
        touch("another", at + 60 * PAGE);
        touch("before the end", at + 39 * PAGE + 5);
        MUST(ftruncate(fd, LENGTH + PAGE));
        touch("zero now", at + 50 * PAGE);
        touch("another", at + 60 * PAGE);
        touch("the last", at + PAGES * PAGE);
        MUST(pwrite(fd, "written", 7, 70 * PAGE));
        touch("written", at + 70 * PAGE);
        MUST(munmap(at, LENGTH + PAGE));
        MUST(close(fd));
    }
}

static void other_calls_change_the_file(void) {
    pattern("f", LENGTH);
    int fd = MUST(open("f", O_RDWR));
    unsigned char *at = map("f", LENGTH, PROT_READ, MAP_SHARED, 0);
    touch("first", at + 10 * PAGE);
    MUST(pwrite(fd, "touched before", 14, 10 * PAGE));
    say("%.14s", at + 10 * PAGE);
    MUST(pwrite(fd, "not touched", 11, 200 * PAGE));
    say("%.11s", at + 200 * PAGE);
    IN_CHILD(MUST(pwrite(fd, "by a child", 10, 10 * PAGE)));
    say("%.14s", at + 10 * PAGE);
    IN_CHILD(MUST(pwrite(fd, "by a child", 10, 400 * PAGE)));
    say("%.10s", at + 400 * PAGE);
    MUST(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 10 * PAGE, PAGE));
    touch("a hole", at + 10 * PAGE);
    MUST(munmap(at, LENGTH));
    at = map("f", LENGTH, PROT_READ, MAP_PRIVATE, 0);
    MUST(pwrite(fd, "before it is touched", 20, 100 * PAGE));
    say("%.20s", at + 100 * PAGE);
    MUST(munmap(at, LENGTH));
}

static void children(void) {
    pattern("f", LENGTH);
    for (int kind = 0; kind < 2; kind++) {
        say("%s", names[kind]);
        int protection = PROT_READ | (kind == 0 ? PROT_WRITE : 0);
        unsigned char *at = map("f", LENGTH, protection, kinds[kind], 0);
        touch("in the parent", at + 5 * PAGE);
        if (kind == 0) at[6 * PAGE] = 1;
        IN_CHILD({
            touch("what the parent touched", at + 5 * PAGE);
            touch("what the parent changed", at + 6 * PAGE);
            compare("a page of the child", at + 100 * PAGE, 100 * PAGE, PAGE);
            if (kind == 0) at[200 * PAGE] ^= 255;
            IN_CHILD({
                compare("a page of its child", at + 300 * PAGE, 300 * PAGE, PAGE);
                touch("what its parent changed", at + 200 * PAGE);
                MUST(munmap(at, 300 * PAGE));
                compare("the rest", at + 300 * PAGE, 300 * PAGE, LENGTH - 300 * PAGE);
            });
            compare("what its child unmapped", at + 201 * PAGE, 201 * PAGE, 150 * PAGE);
        });
        compare("what the child changed", at + 200 * PAGE, 200 * PAGE, PAGE);
        compare("the rest", at + 7 * PAGE, 7 * PAGE, LENGTH - 7 * PAGE);
        // The parent's mapping is gone before its child reads.
        int ends[2];
        MUST(pipe(ends));
        pid_t child = fork();
        if (child == 0) {
            char byte;
            MUST(close(ends[1]));
            MUST(read(ends[0], &byte, 1));
            compare("alone", at + 7 * PAGE, 7 * PAGE, LENGTH - 7 * PAGE);
            _exit(0);
        }
        MUST(munmap(at, LENGTH));
        MUST(write(ends[1], "x", 1));
        reap(child);
        at = map("f", LENGTH, PROT_READ, kinds[kind], 0);
        if (fork() == 0) again("say", "a program of the child");
        wait(NULL);
        compare("after it", at, 0, LENGTH);
        MUST(munmap(at, LENGTH));
    }
}

static void pieces(void) {
    pattern("f", LENGTH);
    for (int kind = 0; kind < 2; kind++) {
        say("%s", names[kind]);
        unsigned char *at = map("f", LENGTH, PROT_READ, kinds[kind], 0);
        // Not unmapped: something else might then be mapped there, which this program must not touch.
        MUST((long)mmap(at + 100 * PAGE, 100 * PAGE, PROT_NONE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0));
        touch("a hole", at + 150 * PAGE);
        compare("before it", at, 0, 100 * PAGE);
        MUST(mprotect(at + 210 * PAGE, PAGE, PROT_NONE));
        touch("guarded", at + 210 * PAGE);
        IN_CHILD({
            touch("guarded in a child", at + 210 * PAGE);
            touch("a hole in a child", at + 150 * PAGE);
            compare("behind it", at + 211 * PAGE, 211 * PAGE, 100 * PAGE);
        });
        SAY(mprotect(at + 210 * PAGE, PAGE, PROT_READ));
        compare("behind the hole", at + 200 * PAGE, 200 * PAGE, LENGTH - 200 * PAGE);
        unsigned char *other = mmap(at + 300 * PAGE, 10 * PAGE, PROT_READ,
                                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
        say("in its place: %d, and at the end %d", other == at + 300 * PAGE, other[9 * PAGE]);
        compare("behind that", at + 310 * PAGE, 310 * PAGE, LENGTH - 310 * PAGE);
        // Replaced completely by another part of the file.
        int fd = MUST(open("f", O_RDONLY));
        other = mmap(at, LENGTH - 64 * PAGE, PROT_READ, kinds[kind] | MAP_FIXED, fd, 64 * PAGE);
        MUST(close(fd));
        compare("another part", other, 64 * PAGE, LENGTH - 64 * PAGE);
        MUST(munmap(at + 300 * PAGE, 100 * PAGE));
        compare("before what is unmapped", at + 200 * PAGE, 264 * PAGE, 100 * PAGE);
        IN_CHILD(compare("behind it", at + 400 * PAGE, 464 * PAGE, 64 * PAGE));
        compare("behind it", at + 400 * PAGE, 464 * PAGE, LENGTH - 464 * PAGE);
        MUST(munmap(at, 300 * PAGE));
        MUST(munmap(at + 400 * PAGE, LENGTH - 400 * PAGE));
    }
}

static void sizes_and_places(void) {
    pattern("f", LENGTH);
    for (int kind = 0; kind < 2; kind++) {
        say("%s", names[kind]);
        unsigned char *at = map("f", 100 * PAGE, PROT_READ, kinds[kind], 0);
        touch("one", at + 20 * PAGE + 1);
        at = mremap(at, 100 * PAGE, 400 * PAGE, MREMAP_MAYMOVE);
        MUST((long)at);
        compare("longer", at, 0, 400 * PAGE);
        at = mremap(at, 400 * PAGE, 200 * PAGE, 0);
        MUST((long)at);
        void *place = mmap(NULL, LENGTH, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        at = mremap(at, 200 * PAGE, PAGES * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, place);
        say("there: %d", at == place);
        compare("moved", at, 0, LENGTH);
        IN_CHILD(compare("in a child", at + 3 * PAGE, 3 * PAGE, LENGTH - 3 * PAGE));
        MUST(munmap(at, PAGES * PAGE));
        at = map("f", LENGTH, PROT_READ, kinds[kind], 0);
        place = mmap(NULL, LENGTH, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        unsigned char *part = mremap(at + 64 * PAGE, 128 * PAGE, 128 * PAGE,
                                     MREMAP_MAYMOVE | MREMAP_FIXED, place);
        say("a part: %d", part == place);
        compare("the part", part, 64 * PAGE, 128 * PAGE);
        compare("before it", at, 0, 64 * PAGE);
        compare("behind it", at + 192 * PAGE, 192 * PAGE, LENGTH - 192 * PAGE);
        MUST(munmap(at, 64 * PAGE));
        MUST(munmap(at + 192 * PAGE, LENGTH - 192 * PAGE));
        MUST(munmap(place, LENGTH));
    }
}

static void private_changes(void) {
    pattern("f", LENGTH);
    unsigned char *at = map("f", LENGTH, PROT_READ | PROT_WRITE, MAP_PRIVATE, 0);
    at[5] = 1;
    at[100 * PAGE + 5] = 2;
    say("%d %d", at[5], at[100 * PAGE + 5]);
    compare("the rest of a page", at + 100 * PAGE + 6, 100 * PAGE + 6, PAGE - 6);
    SAY(msync(at, LENGTH, MS_SYNC));
    SAY(madvise(at + 100 * PAGE, 10 * PAGE, MADV_DONTNEED));
    compare("forgotten", at + 100 * PAGE, 100 * PAGE, PAGE);
    say("not forgotten: %d", at[5]);
    SAY(madvise(at, LENGTH, MADV_WILLNEED));
    SAY(madvise(at, LENGTH, MADV_RANDOM));
    SAY(mprotect(at, LENGTH, PROT_READ));
    compare("the rest", at + PAGE, PAGE, LENGTH - PAGE);
    unsigned char *shared = map("f", LENGTH, PROT_READ, MAP_SHARED, 0);
    compare("the file", shared, 0, LENGTH);
    SAY(madvise(shared, LENGTH, MADV_DONTNEED));
    compare("the file", shared, 0, LENGTH);
    SAY(mprotect(shared, LENGTH, PROT_READ | PROT_WRITE));
}

static void system_calls_touch(void) {
    pattern("f", LENGTH);
    for (int kind = 0; kind < 2; kind++) {
        say("%s", names[kind]);
        unsigned char *at = map("f", LENGTH, PROT_READ, kinds[kind], 0), *got = malloc(LENGTH);
        int ends[2];
        MUST(pipe(ends));
        SAY(write(ends[1], at + 9 * PAGE + 7, 3 * PAGE));
        SAY(read(ends[0], got, 3 * PAGE));
        compare("through a pipe", got, 9 * PAGE + 7, 3 * PAGE);
        int fd = MUST(open("copy", O_RDWR | O_CREAT | O_TRUNC, 0644));
        SAY(write(fd, at, LENGTH));
        SAY(pread(fd, got, LENGTH, 0));
        compare("a copy", got, 0, LENGTH);
        MUST(munmap(at, LENGTH));
        MUST(ftruncate(fd, 0));
        MUST(pwrite(fd, "f", 2, 0));
        at = map("f", LENGTH, PROT_READ | PROT_WRITE, MAP_PRIVATE, 0);
        SAY(pread(fd, at + 77 * PAGE + 5, 2, 0));
        SAY(access((char *)at + 77 * PAGE + 5, R_OK));
        compare("beside it", at + 77 * PAGE + 7, 77 * PAGE + 7, PAGE);
        SAY(readlink("/proc/self/exe", (char *)at + 200 * PAGE, 1));
        say("%c", at[200 * PAGE]);
        compare("beside that", at + 200 * PAGE + 1, 200 * PAGE + 1, PAGE);
        MUST(munmap(at, LENGTH));
        MUST(close(fd));
        free(got);
    }
}

static void made_writable(void) {
    pattern("f", LENGTH);
    int fd = MUST(open("f", O_RDWR));
    unsigned char *at = mmap(NULL, LENGTH, PROT_READ, MAP_SHARED, fd, 0);
    MUST((long)at);
    MUST(close(fd));
    touch("a page", at + 10 * PAGE);
    SAY(mprotect(at + 100 * PAGE, 100 * PAGE, PROT_READ | PROT_WRITE));
    memcpy(at + 100 * PAGE, "the first", 9);
    memcpy(at + 199 * PAGE, "the last", 8);
    touch("another", at + 300 * PAGE);
    SAY(msync(at, LENGTH, MS_SYNC));
    unsigned char *other = map("f", LENGTH, PROT_READ, MAP_PRIVATE, 0);
    say("%.9s %.8s", other + 100 * PAGE, other + 199 * PAGE);
    compare("the rest", other + 101 * PAGE, 101 * PAGE, 98 * PAGE);
    compare("and what is behind", other + 200 * PAGE, 200 * PAGE, LENGTH - 200 * PAGE);
    memcpy(at + 150 * PAGE, "later", 5);
    SAY(munmap(at + 150 * PAGE, 100 * PAGE));
    memcpy(at + 120 * PAGE, "and more", 8);
    IN_CHILD(memcpy(at + 121 * PAGE, "by a child", 10));
    SAY(munmap(at, 150 * PAGE));
    compare("what is left", at + 250 * PAGE, 250 * PAGE, LENGTH - 250 * PAGE);
    SAY(munmap(at + 250 * PAGE, LENGTH - 250 * PAGE));
}

static unsigned char *all;
static void *look(void *argument) {
    for (long i = 0, page = (long)argument; i < PAGES; i++, page = (page * 5 + 3) % PAGES) {
        long in = page * PAGE + 11;
        if (in < LENGTH && all[in] != byte_at(in)) return "wrong";
    }
    return "right";
}

static void threads(void) {
    pattern("f", LENGTH);
    for (int kind = 0; kind < 2; kind++) {
        all = map("f", LENGTH, PROT_READ, kinds[kind], 0);
        pthread_t thread[8];
        for (long i = 0; i < 8; i++) pthread_create(&thread[i], NULL, look, (void *)(i * 90));
        for (int i = 0; i < 20; i++) {
            if (fork() == 0) _exit(all[i * 30 * PAGE + 1] != byte_at(i * 30 * PAGE + 1));
        }
        int status, bad = 0;
        for (int i = 0; i < 20; i++) bad += wait(&status) < 0 || status != 0;
        say("children that saw something else: %d", bad);
        for (int i = 0; i < 8; i++) {
            void *said;
            pthread_join(thread[i], &said);
            say("%s", (char *)said);
        }
        MUST(munmap(all, LENGTH));
    }
}

/* Mappings come and go at the same addresses while others are read. */
static void *come_and_go(void *argument) {
    const char *path = argument;
    long which = path[0] - 'a';
    for (int i = 0; i < 60; i++) {
        unsigned char *at = map(path, 90 * PAGE, PROT_READ, kinds[i % 2], which * 100 * PAGE);
        for (long page = i % 7; page < 90; page += 13) {
            long in = page * PAGE + 3;
            if (at[in] != byte_at(which * 100 * PAGE + in)) return "wrong";
        }
        MUST(munmap(at, 90 * PAGE));
    }
    return "right";
}

static void addresses_used_again(void) {
    static char *paths[] = {"a", "b", "c", "d"};
    pthread_t thread[4];
    for (int i = 0; i < 4; i++) pattern(paths[i], LENGTH);
    for (int i = 0; i < 4; i++) pthread_create(&thread[i], NULL, come_and_go, paths[i]);
    for (int i = 0; i < 4; i++) {
        void *said;
        pthread_join(thread[i], &said);
        say("%s", (char *)said);
    }
}

static void descriptors_are_closed(void) {
    pattern("f", LENGTH);
    unsigned char *at = map("f", LENGTH, PROT_READ, MAP_PRIVATE, 0);
    compare("a page", at, 0, PAGE);
    transcript = 200;
    for (int fd = 3; fd < 1100; fd++) {
        if (fd != transcript) close(fd);
    }
    compare("all", at, 0, LENGTH);
    unsigned char *other = map("f", LENGTH, PROT_READ, MAP_SHARED, 0);
    compare("another", other, 0, LENGTH);
}

int main(int count, char **arguments) {
    static const struct test tests[] = {
        {"pages-in-any-order", pages_in_any_order},
        {"names-do-not-matter", names_do_not_matter},
        {"beyond-the-end", beyond_the_end},
        {"populated", populated},
        {"ends-that-move", ends_that_move},
        {"other-calls-change-the-file", other_calls_change_the_file},
        {"children", children},
        {"pieces", pieces},
        {"sizes-and-places", sizes_and_places},
        {"private-changes", private_changes},
        {"system-calls-touch", system_calls_touch},
        {"made-writable", made_writable},
        {"threads", threads},
        {"addresses-used-again", addresses_used_again},
        {"descriptors-are-closed", descriptors_are_closed},
        {NULL, NULL},
    };
    return run(count, arguments, tests);
}
