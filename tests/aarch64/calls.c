/* calls DIRECTORY
 * Calls functions of libc and the kernel whose interface depends on the processor: layouts, flags, ways to
 * call. Creates the directory and prints what it finds in it. The output has to be the same for a local
 * directory and for a remote one under `towline run`. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fts.h>
#include <ftw.h>
#include <glob.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>
#include <wchar.h>

extern char **environ;
static const char *top;
static __thread char text[4][4096];

static const char *at(const char *name) {
    static __thread int turn;
    char *place = text[turn = (turn + 1) % 4];
    snprintf(place, sizeof *text, "%s/%s", top, name);
    return place;
}
static const char *below(const char *path) { return path + strlen(top); }
static const char *said(long result) { return result >= 0 ? "done" : strerror(errno); }

static void make(const char *name, const char *content) {
    int fd = open(at(name), O_CREAT | O_EXCL | O_WRONLY, 0640);
    printf("make %s: %s\n", name, said(fd));
    if (write(fd, content, strlen(content)) != (ssize_t)strlen(content)) perror("write");
    close(fd);
}

static void flags(void) {
    const int all[] = {O_DIRECTORY, O_NOFOLLOW, O_DIRECT, O_LARGEFILE, O_PATH, O_PATH | O_NOFOLLOW,
                       O_DIRECTORY | O_NOFOLLOW, O_NOATIME, O_SYNC, O_DSYNC, O_RDWR | O_APPEND};
    const char *names[] = {"plain", "link", "folder", "way", "none"};
    for (unsigned i = 0; i < sizeof all / sizeof *all; i++)
        for (unsigned n = 0; n < 5; n++) {
            /* Not every file system refuses O_DIRECT. */
            if (all[i] == O_DIRECT && n > 1 && n < 4) continue;
            int fd = open(at(names[n]), all[i]);
            printf("open %s, flags %u: %s", names[n], i, said(fd));
            if (fd >= 0) printf(", has %x", fcntl(fd, F_GETFL));
            puts("");
            if (fd >= 0) close(fd);
        }
    int fd = open(at("folder"), O_TMPFILE | O_RDWR, 0600);
    struct stat status;
    if (fd >= 0 && !fstat(fd, &status)) printf("unnamed: %lu links\n", (long)status.st_nlink);
    close(fd);
}

static void show(const char *what, const struct stat *s) {
    printf("%s: mode %o links %lu owner %u:%u", what, s->st_mode, (long)s->st_nlink, s->st_uid, s->st_gid);
    if (!S_ISDIR(s->st_mode)) printf(" size %ld device %lu", (long)s->st_size, (long)s->st_rdev);
    if (s->st_mtim.tv_sec < 2000000000 && s->st_mtim.tv_sec % 1000 == 7) printf(" time %ld", (long)s->st_mtim.tv_sec);
    puts("");
}

static void status(void) {
    struct stat s;
    struct timespec times[2] = {{1000000007, 5}, {1000000007, 9}};
    printf("times: %s\n", said(utimensat(AT_FDCWD, at("plain"), times, 0)));
    if (!stat(at("plain"), &s)) show("stat", &s);
    if (!lstat(at("link"), &s)) show("lstat", &s);
    if (!fstatat(AT_FDCWD, at("way"), &s, AT_SYMLINK_NOFOLLOW)) show("fstatat", &s);
    struct statx x;
    if (!statx(AT_FDCWD, at("plain"), 0, STATX_BASIC_STATS, &x))
        printf("statx: mode %o links %u size %lu\n", x.stx_mode, x.stx_nlink, (long)x.stx_size);
    if (!syscall(SYS_newfstatat, AT_FDCWD, at("folder"), &s, 0)) show("by number", &s);
    printf("no such: %s\n", said(stat(at("none"), &s)));
    struct statvfs space;
    printf("statvfs: %s", said(statvfs(at("plain"), &space)));
    printf(", names of %lu\n", space.f_namemax);
}

static int order(const FTSENT **a, const FTSENT **b) { return strcmp((*a)->fts_name, (*b)->fts_name); }
static char seen[64][200];
static int seen_count;
static int visit(const char *path, const struct stat *s, int kind, struct FTW *place) {
    snprintf(seen[seen_count++ % 64], 200, "nftw %s %d %d %d links %lu", below(path), kind, place->level, place->base - (int)strlen(top), (long)s->st_nlink);
    return 0;
}
static int by_text(const void *a, const void *b) { return strcmp(a, b); }

static void trees(void) {
    char *roots[] = {(char *)top, NULL};
    FTS *tree = fts_open(roots, FTS_PHYSICAL, order);
    for (FTSENT *e; tree && (e = fts_read(tree));)
        printf("fts %s info %d level %d links %lu mode %o name %d\n", below(e->fts_path), e->fts_info, e->fts_level,
               (long)e->fts_statp->st_nlink == (long)e->fts_nlink ? (long)e->fts_nlink : -1L, e->fts_statp->st_mode, e->fts_namelen);
    printf("fts ends: %s\n", said(tree ? fts_close(tree) : -1));
    nftw(top, visit, 8, FTW_PHYS);
    qsort(seen, seen_count, 200, by_text);
    for (int i = 0; i < seen_count; i++) puts(seen[i]);
    glob_t found;
    printf("glob: %d", glob(at("*l*"), 0, NULL, &found));
    for (size_t i = 0; i < found.gl_pathc; i++) printf(" %s", below(found.gl_pathv[i]));
    puts("");
    struct dirent **entries;
    int count = scandir(top, &entries, NULL, alphasort);
    for (int i = 0; i < count; i++) printf("entry %s %d\n", entries[i]->d_name, entries[i]->d_type);
}

static void streams(void) {
    FILE *f = fopen(at("stream"), "w+");
    for (int i = 0; i < 3000; i++) fprintf(f, "%d %s %.2f\n", i, "word", i / 8.0);
    fseek(f, 12000, SEEK_SET);
    char line[100] = "";
    if (!fgets(line, sizeof line, f) || !fgets(line, sizeof line, f)) perror("fgets");
    fseek(f, 0, SEEK_END);
    printf("stream: %s  at %ld", line, ftell(f));
    printf(", %s\n", said(fclose(f)));
    f = fopen(at("wide"), "w+");
    fwide(f, 1);
    fwprintf(f, L"wide %d\n", 5);
    rewind(f);
    wchar_t wide[20] = L"";
    printf("wide: %d\n", fgetws(wide, 20, f) && !wcscmp(wide, L"wide 5\n"));
    fclose(f);
}

/* Far longer than one read and than every page size. */
enum { LONG = 1 << 20 };
static void mappings(void) {
    long page = sysconf(_SC_PAGESIZE);
    unsigned char *data = malloc(LONG);
    for (int i = 0; i < LONG; i++) data[i] = (i >> 12) * 7 + i;
    int fd = open(at("mapped"), O_CREAT | O_RDWR, 0600);
    if (write(fd, data, LONG - 100) != LONG - 100) perror("write");
    for (int shared = 0; shared < 2; shared++) {
        unsigned char *m = mmap(NULL, LONG, PROT_READ | PROT_WRITE, shared ? MAP_SHARED : MAP_PRIVATE, fd, 0);
        if (m == MAP_FAILED) { perror("mmap"); continue; }
        int wrong = 0;
        for (int i = LONG - 1; i >= 0; i -= 997) wrong += m[i] != (i < LONG - 100 ? data[i] : 0);
        memcpy(m + 3 * page + 17, "stored", 6);
        memcpy(m + 700000, "far", 3);
        printf("mapped %d: %d wrong, %s\n", shared, wrong, said(msync(m, LONG, MS_SYNC)));
        char back[7] = "";
        if (pread(fd, back, 6, 3 * page + 17) != 6) perror("pread");
        printf("  behind it: %s\n", shared ? back : memcmp(back, data + 3 * page + 17, 6) ? "changed" : "as it was");
        pid_t child = fork();
        if (!child) _exit(memcmp(m + 700000, "far", 3) || m[900000] != data[900000]);
        int ended;
        waitpid(child, &ended, 0);
        printf("  child: %d, %s\n", WEXITSTATUS(ended), said(munmap(m, LONG)));
    }
    /* A small mapping that does not begin at offset zero. */
    unsigned char *m = mmap(NULL, 3 * page, PROT_READ, MAP_PRIVATE, fd, 2 * page);
    printf("small: %d\n", m != MAP_FAILED && m[5] == data[2 * page + 5]);
    printf("not of a page: %s\n", mmap(NULL, page, PROT_READ, MAP_PRIVATE, fd, 2048) == MAP_FAILED ? said(-1) : "done");
    close(fd);
    free(data);
}

static void wait_for(const char *what, pid_t child) {
    int ended = -1;
    waitpid(child, &ended, 0);
    printf("%s: %d\n", what, WEXITSTATUS(ended));
}
static void children(void) {
    fflush(stdout);
    pid_t child = vfork();
    if (!child) {
        execl("/bin/cat", "cat", at("plain"), at("link"), "/dev/null", "/dev/null", "/dev/null", "/dev/null",
              "/dev/null", "/dev/null", at("hard"), (char *)NULL);
        _exit(99);
    }
    wait_for("vfork", child);
    child = vfork();
    if (!child) {
        dup2(open(at("out"), O_CREAT | O_WRONLY | O_TRUNC, 0600), 1);
        execle("/bin/sh", "sh", "-c", "echo $WORD; ls -l missing", (char *)NULL, (char *[]){"WORD=told", "LC_ALL=C", NULL});
        _exit(99);
    }
    wait_for("redirected", child);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 0, at("plain"), O_RDONLY, 0);
    char *arguments[] = {"cat", NULL};
    int failed = posix_spawnp(&child, "cat", &actions, NULL, arguments, environ);
    if (!failed) wait_for("spawned", child);
    printf("spawn: %d\n", failed);
    fflush(stdout);
    printf("system: %d\n", system("exit 3") >> 8);
}

static volatile sig_atomic_t rang;
static void ring(int signal) { rang += signal == SIGALRM; }
static void *work(void *number) {
    char name[40], data[64] = "";
    for (int i = 0; i < 40; i++) {
        snprintf(name, sizeof name, "t%ld", (long)number);
        int fd = open(at(name), O_CREAT | O_RDWR | O_APPEND, 0600);
        if (fd < 0 || write(fd, name, strlen(name)) < 0 || pread(fd, data, sizeof data, 0) <= 0) return "failed";
        close(fd);
    }
    return NULL;
}
static void signals(void) {
    struct sigaction action = {.sa_handler = ring};
    sigaction(SIGALRM, &action, NULL);
    ualarm(1000, 1000);
    struct stat s;
    for (int i = 0; rang < 20; i++)
        if (stat(at(i % 2 ? "plain" : "folder"), &s)) { perror("interrupted stat"); break; }
    ualarm(0, 0);
    printf("signals came\n");
}
static void threads(void) {
    pthread_t all[4];
    void *failed = NULL, *one;
    for (long i = 0; i < 4; i++) pthread_create(&all[i], NULL, work, (void *)i);
    for (int i = 0; i < 4; i++) {
        pthread_join(all[i], &one);
        failed = one ? one : failed;
    }
    struct stat s = {0};
    stat(at("t3"), &s);
    printf("threads: %s, %ld\n", failed ? (char *)failed : "done", (long)s.st_size);
}

static void locks(void) {
    int fd = open(at("plain"), O_RDWR);
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 2, .l_len = 5};
    printf("lock: %s\n", said(fcntl(fd, F_SETLK, &lock)));
    pid_t child = fork();
    if (!child) {
        struct flock other = {.l_type = F_RDLCK, .l_whence = SEEK_SET, .l_start = 4, .l_len = 1};
        fcntl(open(at("plain"), O_RDWR), F_GETLK, &other);
        _exit(other.l_type == F_WRLCK && other.l_start == 2 && other.l_len == 5 ? 0 : 1);
    }
    wait_for("seen", child);
    close(fd);
}

int main(int count, char **arguments) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    top = count > 1 ? arguments[1] : "calls";
    printf("top: %s\n", said(mkdir(top, 0755)));
    printf("folder: %s\n", said(mkdir(at("folder"), 0750)));
    make("plain", "some words\n");
    make("folder/inner", "inner\n");
    printf("links: %s", said(symlink("plain", at("link"))));
    printf(" %s", said(symlink("folder", at("way"))));
    printf(" %s\n", said(link(at("plain"), at("hard"))));
    printf("node: %s\n", said(mkfifo(at("pipe"), 0600)));
    flags();
    status();
    trees();
    streams();
    mappings();
    children();
    threads();
    signals();
    locks();
    printf("working directory: %s", said(chdir(at("folder"))));
    char *here = getcwd(NULL, 0);
    printf(" %s\n", here ? below(here) : "none");
    printf("rename: %s\n", said(rename("inner", "other")));
    printf("by number: %s", said(syscall(SYS_renameat, AT_FDCWD, "other", AT_FDCWD, "inner")));
    printf(" %s\n", said(syscall(SYS_renameat, AT_FDCWD, "inner", AT_FDCWD, "other")));
    printf("remove: %s\n", said(unlinkat(AT_FDCWD, "other", 0)));
    return 0;
}
