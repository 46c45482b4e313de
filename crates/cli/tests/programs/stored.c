/* Stores to large shared mappings: what reaches the file, and who sees it. */
#include "pattern.h"
#include <pthread.h>
#include <setjmp.h>
#include <sys/sendfile.h>
#include <sys/syscall.h>

static unsigned char *map(const char *path, long length, int protection, long offset) {
    int fd = MUST(open(path, O_RDWR));
    unsigned char *at = mmap(NULL, length, protection, MAP_SHARED, fd, offset);
    MUST((long)at);
    MUST(close(fd));
    return at;
}

#define BOTH (PROT_READ | PROT_WRITE)

/* Prints what a file holds at the start of a page. */
static void at_page(const char *path, long page) {
    char text[24] = {0};
    int fd = MUST(open(path, O_RDONLY));
    long got = pread(fd, text, 20, page * PAGE);
    for (long i = 0; i < got; i++)
        if (text[i] < 32 || text[i] > 126) text[i] = '.';
    say("%s, page %ld: %ld %s", path, page, got, text);
    close(fd);
}

/* Prints whether all pages of a file except these hold the pattern. */
static void other_pages(const char *path, int count, const long *but) {
    unsigned char *all = malloc(LENGTH);
    int fd = MUST(open(path, O_RDONLY));
    say("%s has %ld bytes", path, (long)pread(fd, all, LENGTH, 0));
    close(fd);
    for (long page = 0; page < PAGES; page++) {
        int skip = 0, wrong = 0;
        for (int i = 0; i < count; i++) skip |= but[i] == page;
        for (long i = page * PAGE; i < (page + 1) * PAGE && i < LENGTH; i++) wrong |= all[i] != byte_at(i);
        if (wrong && !skip) say("page %ld has changed", page);
    }
    free(all);
}

/* Lets two processes take turns. */
struct turns {
    int ends[2][2];
};

static struct turns turns(void) {
    struct turns new;
    MUST(pipe(new.ends[0]));
    MUST(pipe(new.ends[1]));
    return new;
}

static void tell(struct turns *turns, int who) { MUST(write(turns->ends[who][1], "", 1)); }
static void hear(struct turns *turns, int who) {
    char byte;
    MUST(read(turns->ends[who][0], &byte, 1));
}

static void stores_reach_the_file(void) {
    static const long pages[] = {0, 3, 64, 65, 400, PAGES - 1};
    pattern("f", LENGTH);
    unsigned char *at = map("f", LENGTH, BOTH, 0);
    for (int i = 0; i < 6; i++) memcpy(at + pages[i] * PAGE, "stored", 6);
    SAY(msync(at, LENGTH, MS_SYNC));
    for (int i = 0; i < 6; i++) at_page("f", pages[i]);
    memcpy(at + 64 * PAGE, "again", 5);
    memcpy(at + 200 * PAGE, "elsewhere", 9);
    SAY(msync(at + 64 * PAGE, PAGE, MS_SYNC));
    at_page("f", 64);
    SAY(munmap(at, LENGTH));
    at_page("f", 200);
    other_pages("f", 7, (long[]){0, 3, 64, 65, 400, PAGES - 1, 200});
    /* Nothing is kept beyond the end. */
    at = map("f", LENGTH, BOTH, 0);
    at[LENGTH] = 'x';
    SAY(munmap(at, LENGTH));
    struct stat status;
    MUST(stat("f", &status));
    say("%ld bytes", (long)status.st_size);
}

static void ways_to_end(void) {
    static const char *const names[] = {"msync", "munmap", "close", "fsync", "exit", "_exit", "exec", "mmap", "quick_exit"};
    for (int way = 0; way < 9; way++) {
        pattern("f", LENGTH);
        IN_CHILD({
            int fd = MUST(open("f", O_RDWR));
            unsigned char *at = mmap(NULL, LENGTH, BOTH, MAP_SHARED, fd, 0);
            memcpy(at + 100 * PAGE, names[way], strlen(names[way]));
            switch (way) {
            case 0: MUST(msync(at, LENGTH, MS_ASYNC)); break;
            case 1: MUST(munmap(at + 100 * PAGE, PAGE)); break;
            case 2: MUST(close(fd)); break;
            case 3: MUST(fsync(fd)); break;
            case 4: exit(0);
            case 6: again("say", "another program"); break;
            case 7:
                MUST((long)mmap(at, LENGTH, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0));
                break;
            case 8: quick_exit(0);
            }
            if (way < 4) at_page("f", 100);
        });
        at_page("f", 100);
        other_pages("f", 1, (long[]){100});
    }
}

static void children_store(void) {
    pattern("f", LENGTH);
    unsigned char *at = map("f", LENGTH, BOTH, 0);
    struct turns both = turns();
    memcpy(at + 5 * PAGE, "parent", 6);
    pid_t child = MUST(fork());
    if (child == 0) {
        say("child sees %.6s", at + 5 * PAGE);
        memcpy(at + 5 * PAGE, "child", 5);
        memcpy(at + 300 * PAGE, "child", 5);
        tell(&both, 0);
        hear(&both, 1);
        say("child sees %.6s", at + 301 * PAGE);
        memcpy(at + 302 * PAGE, "at the end", 10);
        _exit(0);
    }
    hear(&both, 0);
    say("parent sees %.6s %.5s", at + 5 * PAGE, at + 300 * PAGE);
    memcpy(at + 301 * PAGE, "parent", 6);
    tell(&both, 1);
    reap(child);
    SAY(msync(at, LENGTH, MS_SYNC));
    at_page("f", 5);
    at_page("f", 300);
    at_page("f", 301);
    at_page("f", 302);
    IN_CHILD({
        memcpy(at + 400 * PAGE, "by a child", 10);
        MUST(msync(at + 400 * PAGE, PAGE, MS_SYNC));
        at_page("f", 400);
        memcpy(at + 401 * PAGE, "unmapped", 8);
        MUST(munmap(at + 401 * PAGE, PAGE));
        at_page("f", 401);
    });
    SAY(munmap(at, LENGTH));
    other_pages("f", 6, (long[]){5, 300, 301, 302, 400, 401});
}

static void children_outlive_their_parent(void) {
    pattern("f", LENGTH);
    int done[2];
    char byte;
    MUST(pipe(done));
    IN_CHILD({
        unsigned char *at = map("f", LENGTH, BOTH, 0);
        memcpy(at + 7 * PAGE, "parent", 6);
        pid_t parent = getpid();
        if (fork() == 0) {
            for (int i = 0; i < 10000 && getppid() == parent; i++) usleep(1000);
            int right = 1;
            for (long i = 9 * PAGE; i < 99 * PAGE; i++) right &= at[i] == byte_at(i);
            memcpy(at + 8 * PAGE, right ? "orphan" : "wrong!", 6);
            _exit(0);
        }
    });
    MUST(close(done[1]));
    read(done[0], &byte, 1);
    at_page("f", 7);
    at_page("f", 8);
    other_pages("f", 2, (long[]){7, 8});
}

/* As to long mappings. */
static void children_store_to_short_ones(void) {
    make("f", "................................................");
    int fd = MUST(open("f", O_RDWR));
    unsigned char *at = mmap(NULL, 4096, BOTH, MAP_SHARED, fd, 0);
    struct turns both = turns();
    memcpy(at, "parent", 6);
    pid_t child = MUST(fork());
    if (child == 0) {
        memcpy(at + 7, "child", 5);
        show("f");
        tell(&both, 0);
        hear(&both, 1);
        memcpy(at + 13, "later", 5);
        SAY(msync(at, 4096, MS_SYNC));
        show("f");
        memcpy(at + 19, "last", 4);
        SAY(munmap(at, 4096));
        show("f");
        _exit(0);
    }
    hear(&both, 0);
    SAY(munmap(at, 4096));
    show("f");
    tell(&both, 1);
    reap(child);
    show("f");
    /* Only the parent's mapping keeps it open. */
    at = map("f", 4096, BOTH, 0);
    MUST(close(fd));
    IN_CHILD(memcpy(at + 24, "alone", 5); SAY(msync(at, 4096, MS_SYNC)); show("f"));
    IN_CHILD({
        pid_t parent = getpid();
        if (fork() == 0) {
            for (int i = 0; i < 10000 && getppid() == parent; i++) usleep(1000);
            memcpy(at + 30, "orphan", 6);
            tell(&both, 0);
            _exit(0);
        }
    });
    hear(&both, 0);
    SAY(munmap(at, 4096));
    show("f");
}

static void processes_share(void) {
    pattern("f", LENGTH);
    struct turns both = turns();
    pid_t child = MUST(fork());
    if (child == 0) {
        /* Only read at first; stores come later. */
        unsigned char *at = map("f", LENGTH, PROT_READ, 0);
        compare("before", at, 0, LENGTH / 2);
        tell(&both, 0);
        hear(&both, 1);
        say("%.5s %.5s", at + 10 * PAGE, at + 500 * PAGE);
        SAY(mprotect(at, LENGTH, BOTH));
        memcpy(at + 10 * PAGE + 100, "too", 3);
        memcpy(at + 11 * PAGE, "second", 6);
        memcpy(at + 600 * PAGE, "second", 6);
        tell(&both, 0);
        hear(&both, 1);
        memcpy(at + 601 * PAGE, "second", 6);
        SAY(munmap(at, LENGTH));
        _exit(0);
    }
    hear(&both, 0);
    unsigned char *at = map("f", LENGTH, BOTH, 0);
    memcpy(at + 10 * PAGE, "first", 5);
    memcpy(at + 500 * PAGE, "first", 5);
    tell(&both, 1);
    hear(&both, 0);
    say("%.3s %.6s %.6s", at + 10 * PAGE + 100, at + 11 * PAGE, at + 600 * PAGE);
    SAY(msync(at, LENGTH, MS_SYNC));
    at_page("f", 10);
    at_page("f", 11);
    at_page("f", 500);
    at_page("f", 600);
    memcpy(at + 602 * PAGE, "first", 5);
    tell(&both, 1);
    reap(child);
    say("%.6s", at + 601 * PAGE);
    SAY(munmap(at, LENGTH));
    at_page("f", 601);
    at_page("f", 602);
    other_pages("f", 7, (long[]){10, 11, 500, 600, 601, 602});
}

static void other_calls_and_stores(void) {
    pattern("f", LENGTH);
    int fd = MUST(open("f", O_RDWR));
    unsigned char *at = map("f", LENGTH, BOTH, 0);
    char text[32] = {0};
    memcpy(at + 20 * PAGE, "stored", 6);
    MUST(pread(fd, text, 6, 20 * PAGE));
    say("read: %s", text);
    MUST(pwrite(fd, "written", 7, 20 * PAGE + 50));
    memcpy(at + 20 * PAGE + 100, "more", 4);
    say("%.6s %.7s %.4s", at + 20 * PAGE, at + 20 * PAGE + 50, at + 20 * PAGE + 100);
    MUST(pwrite(fd, "not touched", 11, 300 * PAGE));
    say("%.11s", at + 300 * PAGE);
    memcpy(at + 30 * PAGE, "below a hole", 12);
    memcpy(at + 33 * PAGE, "beside a hole", 13);
    SAY(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 30 * PAGE, 2 * PAGE));
    say("%d %.13s", at[30 * PAGE], at + 33 * PAGE);
    off_t from = 33 * PAGE, to = 40 * PAGE;
    SAY(copy_file_range(fd, &from, fd, &to, PAGE, 0));
    say("%.13s", at + 40 * PAGE);
    memcpy(at + 50 * PAGE, "appended to", 11);
    int end = MUST(open("f", O_WRONLY | O_APPEND));
    SAY(write(end, "the end", 7));
    MUST(close(end));
    SAY(munmap(at, LENGTH));
    for (long page = 20; page <= 50; page += 10) at_page("f", page);
    at_page("f", 33);
    at_page("f", 300);
    MUST(close(fd));
}

/* What descriptors that cannot be read from change, a mapping shows, too. */
static void changed_write_only(void) {
    pattern("f", LENGTH);
    unsigned char *at = map("f", LENGTH, BOTH, 0);
    int to = MUST(open("f", O_WRONLY)), from = MUST(open("g", O_RDWR | O_CREAT, 0644));
    MUST(write(from, "sent by another", 15));
    memcpy(at + 20 * PAGE, "stored before", 13);
    off_t in = 0;
    MUST(lseek(to, 20 * PAGE, SEEK_SET));
    SAY(sendfile(to, from, &in, 4));
    say("%.13s", at + 20 * PAGE);
    loff_t begin = 0, out = 25 * PAGE;
    SAY(copy_file_range(from, &begin, to, &out, 15, 0));
    say("%.15s", at + 25 * PAGE);
    memcpy(at + 30 * PAGE, "below a hole", 12);
    SAY(fallocate(to, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 30 * PAGE, 2 * PAGE));
    say("%d %d", at[30 * PAGE], at[32 * PAGE]);
    SAY(munmap(at, LENGTH));
    for (long page = 20; page <= 30; page += 5) at_page("f", page);
}

/* Mapped read-only, and made writable by calls other than libc's mprotect. */
static void made_writable_otherwise(void) {
    pattern("f", LENGTH);
    unsigned char *at = map("f", LENGTH, PROT_READ, 0);
    SAY(pkey_mprotect(at, PAGE, BOTH, -1));
    memcpy(at, "by a key", 8);
    SAY(syscall(SYS_mprotect, at + 9 * PAGE, PAGE, BOTH));
    memcpy(at + 9 * PAGE, "by number", 9);
    SAY(munmap(at, LENGTH));
    at_page("f", 0);
    at_page("f", 9);
    other_pages("f", 2, (long[]){0, 9});
}

static sigjmp_buf back;
static void hit(int signal) { siglongjmp(back, signal); }
static void store(const char *what, volatile unsigned char *at) {
    struct sigaction action = {.sa_handler = hit, .sa_flags = SA_NODEFER};
    sigaction(SIGBUS, &action, NULL);
    sigaction(SIGSEGV, &action, NULL);
    int signal = sigsetjmp(back, 1);
    if (signal == 0) {
        unsigned char before = *at;
        *at = 's';
        say("%s: was %d", what, before);
    } else {
        say("%s: %s", what, sigabbrev_np(signal));
    }
    sigaction(SIGBUS, &(struct sigaction){.sa_handler = SIG_DFL}, NULL);
    sigaction(SIGSEGV, &(struct sigaction){.sa_handler = SIG_DFL}, NULL);
}

static void ends_move_and_stores(void) {
    pattern("f", LENGTH);
    int fd = MUST(open("f", O_RDWR));
    unsigned char *at = mmap(NULL, LENGTH + 9 * PAGE, BOTH, MAP_SHARED, fd, 0);
    store("the last byte", at + LENGTH - 1);
    store("a page behind the end", at + PAGES * PAGE);
    store("in the midst", at + 300 * PAGE);
    MUST(ftruncate(fd, 200 * PAGE));
    store("in the midst, now behind the end", at + 300 * PAGE);
    MUST(ftruncate(fd, PAGES * PAGE + PAGE));
    store("zero now", at + 300 * PAGE);
    store("zero, and never touched", at + 301 * PAGE);
    store("the last", at + PAGES * PAGE);
    store("still behind the end", at + (PAGES + 1) * PAGE);
    SAY(munmap(at, LENGTH + 9 * PAGE));
    at_page("f", 199);
    at_page("f", 300);
    at_page("f", 301);
    at_page("f", PAGES);
    MUST(close(fd));
    /* Given only a length, as databases do. */
    fd = MUST(open("made", O_RDWR | O_CREAT, 0644));
    MUST(ftruncate(fd, 8 << 20));
    at = mmap(NULL, 8 << 20, BOTH, MAP_SHARED, fd, 0);
    MUST(close(fd));
    for (long page = 1; page < 2048; page *= 3) memcpy(at + page * PAGE, "made", 4);
    SAY(munmap(at, 8 << 20));
    for (long page = 1; page < 2048; page *= 9) at_page("made", page);
    at_page("made", 2);
}

static void pieces_and_sizes(void) {
    pattern("f", LENGTH);
    unsigned char *at = map("f", 200 * PAGE, BOTH, 10 * PAGE);
    memcpy(at + 20 * PAGE, "before", 6);
    at = mremap(at, 200 * PAGE, 400 * PAGE, MREMAP_MAYMOVE);
    MUST((long)at);
    memcpy(at + 300 * PAGE, "longer", 6);
    compare("moved", at + 21 * PAGE, 31 * PAGE, 200 * PAGE);
    memcpy(at + 399 * PAGE, "cut off", 7);
    at = mremap(at, 400 * PAGE, 350 * PAGE, 0);
    memcpy(at + 349 * PAGE, "shorter", 7);
    SAY(mprotect(at + 100 * PAGE, 10 * PAGE, PROT_READ));
    store("what may not be", at + 105 * PAGE);
    store("beside it", at + 110 * PAGE);
    SAY(mprotect(at + 103 * PAGE, PAGE, PROT_NONE));
    SAY(pkey_mprotect(at + 120 * PAGE, PAGE, PROT_READ, -1));
    store("what a key forbids", at + 120 * PAGE);
    SAY(syscall(SYS_mprotect, at + 120 * PAGE, PAGE, BOTH));
    store("allowed", at + 120 * PAGE);
    SAY(msync(at + 90 * PAGE, 30 * PAGE, MS_SYNC));
    IN_CHILD({
        store("in a child: what may not be", at + 105 * PAGE);
        store("in a child: beside it", at + 111 * PAGE);
    });
    SAY(munmap(at + 200 * PAGE, 50 * PAGE));
    memcpy(at + 340 * PAGE, "behind", 6);
    SAY(madvise(at + 300 * PAGE, 50 * PAGE, MADV_DONTNEED));
    say("%.6s %.6s", at + 300 * PAGE, at + 340 * PAGE);
    SAY(munmap(at, 350 * PAGE));
    static const long pages[] = {30, 310, 409, 359, 120, 121, 350, 130};
    for (int i = 0; i < 8; i++) at_page("f", pages[i]);
    other_pages("f", 8, pages);
}

static unsigned char *all;

static void *stores(void *argument) {
    long first = (long)argument;
    for (long page = first; page < PAGES - 1; page += 4)
        for (long i = 0; i < 8; i++) all[page * PAGE + i * 512] ^= 0x55;
    return NULL;
}

static void threads_store(void) {
    pattern("f", LENGTH);
    all = map("f", LENGTH, BOTH, 0);
    pthread_t thread[4];
    for (long i = 0; i < 4; i++) pthread_create(&thread[i], NULL, stores, (void *)i);
    for (int i = 0; i < 10; i++) MUST(msync(all, LENGTH, MS_SYNC));
    for (int i = 0; i < 4; i++) pthread_join(thread[i], NULL);
    MUST(munmap(all, LENGTH));
    all = map("f", LENGTH, PROT_READ, 0);
    long wrong = 0;
    for (long i = 0; i < LENGTH; i++)
        wrong += all[i] != (i / PAGE < PAGES - 1 && i % 512 == 0 ? byte_at(i) ^ 0x55 : byte_at(i));
    say("%ld bytes are wrong", wrong);
}

/* Several processes count together. */
static void processes_count(void) {
    int fd = MUST(open("f", O_RDWR | O_CREAT, 0644));
    MUST(ftruncate(fd, 1 << 20));
    pid_t child[4];
    for (int i = 0; i < 4; i++) {
        child[i] = fork();
        if (child[i] == 0) {
            int own = MUST(open("f", O_RDWR));
            unsigned *counts = mmap(NULL, 1 << 20, BOTH, MAP_SHARED, own, 0);
            for (int round = 0; round < 2000; round++) {
                __atomic_add_fetch(&counts[round % 64 * 4096], 1, __ATOMIC_SEQ_CST);
                if (round % 500 == 0) MUST(msync(counts, 1 << 20, MS_SYNC));
            }
            _exit(0);
        }
    }
    for (int i = 0; i < 4; i++) reap(child[i]);
    unsigned counts[64], sum = 0;
    for (int i = 0; i < 64; i++) {
        MUST(pread(fd, &counts[i], 4, i * 4096 * 4));
        sum += counts[i];
    }
    say("%u", sum);
}

/* The mapping stays as it is. */
static void calls_that_fail(void) {
    make("f", "........................");
    unsigned char *at = map("f", PAGE, BOTH, 0);
    int fd = MUST(open("f", O_RDONLY));
    SAY(munmap(at + 1, PAGE));
    SAY(munmap(at, 0));
    SAY(mmap(at, PAGE, BOTH, MAP_SHARED | MAP_FIXED, fd, 0));
    SAY(mmap(at, PAGE, PROT_READ, MAP_PRIVATE | MAP_FIXED, 99, 0));
    memcpy(at, "stored", 6);
    SAY(msync(at, PAGE, MS_SYNC));
    show("f");
    SAY(munmap(at, PAGE));
}

/* Memory by a system call without libc takes the place of a mapping. */
static void replaced_by_number(void) {
    make("f", "text");
    int fd = MUST(open("f", O_RDONLY));
    unsigned char *at = mmap(NULL, PAGE, BOTH, MAP_PRIVATE, fd, 0);
    MUST((long)at);
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
    say("%d", syscall(SYS_mmap, at, PAGE, BOTH, flags, -1, 0L) == (long)at);
    at[0] = 'x';
    SAY(madvise(at, PAGE, MADV_DONTNEED));
    say("%d", at[0]);
}

int main(int count, char **arguments) {
    static const struct test tests[] = {
        {"stores-reach-the-file", stores_reach_the_file},
        {"ways-to-end", ways_to_end},
        {"children-store", children_store},
        {"children-outlive-their-parent", children_outlive_their_parent},
        {"children-store-to-short-ones", children_store_to_short_ones},
        {"processes-share", processes_share},
        {"other-calls-and-stores", other_calls_and_stores},
        {"changed-write-only", changed_write_only},
        {"made-writable-otherwise", made_writable_otherwise},
        {"ends-move-and-stores", ends_move_and_stores},
        {"pieces-and-sizes", pieces_and_sizes},
        {"threads-store", threads_store},
        {"processes-count", processes_count},
        {"calls-that-fail", calls_that_fail},
        {"replaced-by-number", replaced_by_number},
        {NULL, NULL},
    };
    return run(count, arguments, tests);
}
