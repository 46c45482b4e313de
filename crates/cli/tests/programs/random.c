/* A long random program of system calls, the same for the same seed: `random SEED STEPS [CASE]`.
 * It works in the working directory ("data"), whose parent it may reach by "..", and in OUTSIDE,
 * a directory of the environment variable of this name that is local on both sides. Every call and
 * what it gave is printed. */
#include "case.h"
#include <stdint.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/uio.h>
#include <sys/xattr.h>

static uint64_t state;
static char outside[PATH_MAX];

static uint32_t draw(uint32_t below) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (uint32_t)(state >> 20) % below;
}

#define FILES 10
static int fds[FILES];

static const char *names[] = {"a", "b", "c", "d", "e", "d/f", "d/g", "d/h/i", "d/h", "x", "x/y", "d/../a",
                              "./b", "../data/c", "../beside", "d/./h/../f", "in", "out", "in/f", "out/o",
                              "none/z", "a/z", "d/", "x/", "loop", "far"};

/* A path: relative, absolute, or by a link across the border. */
static const char *path(void) {
    static char texts[4][PATH_MAX + 64];
    static int turn;
    char *text = texts[turn++ % 4];
    const char *name = names[draw(sizeof names / sizeof *names)];
    switch (draw(12)) {
    case 0: snprintf(text, sizeof texts[0], "%s/%s", top, name); break;
    case 1: snprintf(text, sizeof texts[0], "%s/%s", outside, draw(2) ? "o" : "into/a"); break;
    default: snprintf(text, sizeof texts[0], "%s", name);
    }
    return text;
}

static int file(void) { return fds[draw(FILES)]; }

/* A directory for the at-functions. */
static int base(void) { return draw(4) ? AT_FDCWD : file(); }

static void result(const char *what, const char *first, const char *second, long value) {
    int error = errno;
    if (value < 0) say("%s %s %s: %s", what, first, second, strerrorname_np(error));
    else say("%s %s %s: %ld", what, first, second, value);
}

static unsigned sum(const unsigned char *data, size_t length) {
    unsigned all = 7;
    for (size_t i = 0; i < length; i++) all = all * 31 + data[i];
    return all;
}

static void status(const char *what, const char *name, int failed, const struct stat *s) {
    if (failed) say("%s %s: %s", what, name, strerrorname_np(errno));
    else say("%s %s: mode %o links %ld size %ld uid %d", what, name, s->st_mode,
             S_ISDIR(s->st_mode) ? 0L : (long)s->st_nlink, S_ISDIR(s->st_mode) ? 0L : (long)s->st_size,
             (int)s->st_uid);
}

static int order(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

static void list(const char *name) {
    DIR *stream = opendir(name);
    if (!stream) {
        say("list %s: %s", name, strerrorname_np(errno));
        return;
    }
    char *all[256], line[6000] = {0};
    int count = 0;
    /* A prefix need not exist, and is then not listed. */
    for (struct dirent *entry; (entry = readdir(stream)) && count < 256;)
        if (strcmp(entry->d_name, "data")) all[count++] = strdup(entry->d_name);
    qsort(all, count, sizeof *all, order);
    for (int i = 0; i < count; i++) {
        strncat(line, " ", sizeof line - strlen(line) - 1);
        strncat(line, all[i], sizeof line - strlen(line) - 1);
        free(all[i]);
    }
    closedir(stream);
    say("list %s:%s", name, line);
}

static unsigned char data[70000], back[70000];

static size_t length(void) { return draw(8) ? draw(300) : draw(sizeof data); }

static off_t offset(void) { return draw(6) ? draw(2000) : draw(200000); }

static void map(int fd) {
    size_t size = 4096 * (1 + draw(3));
    int shared = draw(2), writes = draw(2);
    struct stat s;
    if (fstat(fd, &s) || !S_ISREG(s.st_mode) || s.st_size == 0) return;
    unsigned char *at = mmap(NULL, size, PROT_READ | (writes ? PROT_WRITE : 0),
                             shared ? MAP_SHARED : MAP_PRIVATE, fd, 0);
    if (at == MAP_FAILED) {
        say("map: %s", strerrorname_np(errno));
        return;
    }
    size_t valid = (size_t)s.st_size < size ? (size_t)s.st_size : size;
    say("map %zu shared %d: %u", size, shared, sum(at, valid));
    if (writes) {
        for (int i = 0; i < 20; i++) at[draw(valid)] = draw(256);
        if (shared && draw(2)) say("msync %d", msync(at, size, MS_SYNC));
    }
    say("unmap %d", munmap(at, size));
    ssize_t got = pread(fd, back, valid, 0);
    say("after %zd %u", got, got > 0 ? sum(back, got) : 0);
}

static void appenders(void) {
    const char *name = "log";
    int fd = open(name, O_CREAT | O_WRONLY | O_APPEND, 0644);
    if (fd < 0) return;
    pid_t children[3];
    for (int i = 0; i < 3; i++) {
        if ((children[i] = fork()) == 0) {
            char record[16];
            memset(record, 'A' + i, sizeof record);
            for (int n = 0; n < 8; n++)
                if (write(fd, record, sizeof record) != sizeof record) _exit(1);
            _exit(0);
        }
    }
    int failed = 0, exit_status;
    for (int i = 0; i < 3; i++) waitpid(children[i], &exit_status, 0), failed += exit_status != 0;
    close(fd);
    fd = open(name, O_RDONLY);
    int counts[3] = {0}, torn = 0;
    char record[16];
    while (read(fd, record, sizeof record) == sizeof record) {
        for (int i = 1; i < 16; i++) torn += record[i] != record[0];
        if (record[0] >= 'A' && record[0] <= 'C') counts[record[0] - 'A']++;
    }
    close(fd);
    say("append: failed %d torn %d counts %d %d %d", failed, torn, counts[0], counts[1], counts[2]);
    unlink(name);
}

/* Not higher than the parent of "data", so that all happens in directories of this program alone. */
static void stay(void) {
    char here[PATH_MAX], parent[PATH_MAX];
    snprintf(parent, sizeof parent, "%s", top);
    *strrchr(parent, '/') = 0;
    if (!getcwd(here, sizeof here) ||
        (strncmp(here, parent, strlen(parent)) && strncmp(here, outside, strlen(outside))))
        result("back", "", "", chdir(top));
}

static void step(void) {
    char text[128] = "", link[PATH_MAX];
    struct stat s;
    int place = draw(FILES), fd = fds[place], at = base();
    const char *first = path(), *second = path();
    ssize_t got;
    /* What is in a removed working directory differs between file systems. */
    if (!getcwd(link, sizeof link)) stay();
    errno = 0;
    switch (draw(46)) {
    case 0: case 1: case 2: case 3: case 4: case 5: {
        const int extra[] = {0, O_TRUNC, O_APPEND, O_EXCL, O_NOFOLLOW, O_DIRECTORY, O_CLOEXEC, O_PATH};
        int flags = (int[]){O_RDONLY, O_WRONLY, O_RDWR, O_RDWR}[draw(4)] | (draw(3) ? O_CREAT : 0);
        flags |= extra[draw(8)] | extra[draw(8)] | O_NONBLOCK;
        /* O_CREAT with O_DIRECTORY or O_PATH differs between kernels. */
        if (flags & (O_DIRECTORY | O_PATH)) flags &= ~(O_CREAT | O_EXCL | O_TRUNC | O_APPEND);
        int opened = draw(2) ? openat(at, first, flags, 0644) : open(first, flags, 0600 + draw(64));
        snprintf(text, sizeof text, "%o", flags);
        result("open", first, text, opened);
        if (opened >= 0) close(fd), fds[place] = opened;
        break;
    }
    case 6: case 7:
        got = read(fd, back, length());
        snprintf(text, sizeof text, "%u", got > 0 ? sum(back, got) : 0);
        result("read", text, "", got);
        break;
    case 8: case 9: case 10: {
        size_t count = length();
        for (size_t i = 0; i < count; i++) data[i] = draw(256);
        result("write", "", "", write(fd, data, count));
        break;
    }
    case 11:
        got = pread(fd, back, length(), offset());
        snprintf(text, sizeof text, "%u", got > 0 ? sum(back, got) : 0);
        result("pread", text, "", got);
        break;
    case 12: result("pwrite", "", "", pwrite(fd, data, length(), offset())); break;
    case 13: {
        struct iovec parts[3] = {{data, draw(100)}, {data + 100, draw(5000)}, {data + 9000, draw(50)}};
        if (draw(2)) result("pwritev", "", "", pwritev(fd, parts, 1 + draw(3), offset()));
        else result("writev", "", "", writev(fd, parts, draw(4)));
        break;
    }
    case 14: {
        memset(back, 0, 20000);
        struct iovec parts[3] = {{back, draw(100)}, {back + 100, draw(5000)}, {back + 9000, draw(50)}};
        got = draw(2) ? preadv(fd, parts, 1 + draw(3), offset()) : readv(fd, parts, draw(4));
        snprintf(text, sizeof text, "%u", sum(back, 20000));
        result("readv", text, "", got);
        break;
    }
    case 15: case 16: {
        int whence = draw(3);
        /* Offsets of directories are the file system's own. */
        if (fstat(fd, &s) == 0 && S_ISDIR(s.st_mode)) break;
        result("lseek", "", "", lseek(fd, (off_t)offset() - (whence ? 500 : 0), whence));
        break;
    }
    case 17: close(fds[place]); fds[place] = dup(file()); result("dup", "", "", fds[place] < 0 ? -1 : 0); break;
    case 18: result("dup2", "", "", dup2(file(), fd) < 0 ? -1 : 0); break;
    case 19: case 20: result("rename", first, second, renameat(at, first, draw(3) ? AT_FDCWD : at, second)); break;
    case 21: result("renameat2", first, second, renameat2(AT_FDCWD, first, AT_FDCWD, second, 1 + draw(2))); break;
    case 22: case 23: result("unlink", first, "", unlinkat(at, first, draw(4) ? 0 : AT_REMOVEDIR)); break;
    case 24: result("link", first, second, linkat(AT_FDCWD, first, AT_FDCWD, second, draw(2) ? AT_SYMLINK_FOLLOW : 0)); break;
    case 25: {
        snprintf(link, sizeof link, "%s", first);
        result("symlink", first, second, symlinkat(link, at, second));
        break;
    }
    case 26: result("mkdir", first, "", mkdirat(at, first, 0755)); break;
    case 27: result("rmdir", first, "", rmdir(first)); break;
    case 28: result("truncate", first, "", truncate(first, offset())); break;
    case 29: result("ftruncate", "", "", ftruncate(fd, offset())); break;
    case 30: {
        off_t from = offset(), count = 1 + offset();
        const int modes[] = {0, FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE};
        result("fallocate", "", "", fallocate(fd, modes[draw(3)], from, count));
        break;
    }
    case 31: case 32: status("stat", first, fstatat(at, first, &s, draw(2) ? AT_SYMLINK_NOFOLLOW : 0), &s); break;
    case 33: status("fstat", "", fstat(fd, &s), &s); break;
    case 34: result("chmod", first, "", chmod(first, 0600 + draw(128))); break;
    case 35: result("fchmod", "", "", fchmod(fd, 0600 + draw(128))); break;
    case 36: {
        struct timespec times[2] = {{draw(1000000), draw(1000)}, {draw(1000000), draw(1000)}};
        result("utimensat", first, "", utimensat(AT_FDCWD, first, times, draw(2) ? AT_SYMLINK_NOFOLLOW : 0));
        if (lstat(first, &s) == 0) say("mtime %s", s.st_mtim.tv_sec < 1000000 ? "set" : "not set");
        break;
    }
    case 37: result("access", first, "", faccessat(at, first, draw(8), 0)); break;
    case 38:
        got = readlinkat(at, first, link, sizeof link - 1);
        link[got > 0 ? got : 0] = 0;
        say("readlink %s: %s", first, got < 0 ? strerrorname_np(errno) : link);
        break;
    case 39: {
        const char *places[] = {"d", "..", "data", "x", "d/h", "in"};
        const char *to = draw(3) ? places[draw(6)] : top;
        result("chdir", to, "", draw(6) ? chdir(to) : fchdir(fd));
        say("cwd %s", getcwd(link, sizeof link) ? link : strerrorname_np(errno));
        stay();
        break;
    }
    case 40: list(draw(2) ? "." : first); break;
    case 41: map(fd); break;
    case 42: {
        off_t from = draw(1000);
        int to = file();
        struct stat other;
        /* How far a file reaches that is copied into itself depends on the size of the kernel's pieces. */
        if (fstat(fd, &s) == 0 && fstat(to, &other) == 0 && s.st_ino == other.st_ino && s.st_dev == other.st_dev)
            break;
        if (draw(2)) result("sendfile", "", "", sendfile(to, fd, &from, length()));
        else result("copy_file_range", "", "", to == fd ? 0 : copy_file_range(fd, &from, to, NULL, length(), 0));
        break;
    }
    case 43: {
        if (draw(2)) result("setxattr", first, "", setxattr(first, "user.test", data, draw(50), draw(3)));
        else {
            got = getxattr(first, "user.test", back, sizeof back);
            snprintf(text, sizeof text, "%u", got > 0 ? sum(back, got) : 0);
            result("getxattr", first, text, got);
        }
        break;
    }
    case 44: {
        int in_child = draw(3);
        pid_t child = fork();
        if (child == 0) {
            if (in_child == 0) result("child write", "", "", write(fd, data, 100));
            else if (in_child == 1) result("child seek", "", "", lseek(fd, 7, SEEK_SET));
            else result("child unlink", first, "", unlink(first));
            _exit(0);
        }
        waitpid(child, NULL, 0);
        break;
    }
    case 45:
        if (draw(4) == 0) appenders();
        else {
            char *resolved = realpath(first, link);
            say("realpath %s: %s", first, resolved ? resolved : strerrorname_np(errno));
        }
        break;
    }
}

int main(int count, char **arguments) {
    if (count < 3 || !getenv("OUTSIDE") || !getcwd(top, sizeof top)) return 99;
    snprintf(outside, sizeof outside, "%s", getenv("OUTSIDE"));
    state = strtoull(arguments[1], NULL, 10) * 0x9E3779B97F4A7C15u + 1;
    transcript = MUST(fcntl(1, F_DUPFD, 200));
    umask(022);
    signal(SIGPIPE, SIG_IGN);
    char into[PATH_MAX + 16];
    snprintf(into, sizeof into, "%s/into", outside);
    MUST(mkdir("d", 0755));
    MUST(mkdir("d/h", 0755));
    /* Links across the border, both ways, and one that leads nowhere. */
    MUST(symlink(outside, "out"));
    MUST(symlink(top, into));
    MUST(symlink("d", "in"));
    MUST(symlink("loop", "loop"));
    MUST(symlink("../beside", "far"));
    for (int i = 0; i < FILES; i++) {
        char name[2] = {(char)('a' + i % 3), 0};
        fds[i] = MUST(open(name, O_RDWR | O_CREAT, 0644));
    }
    long steps = atol(arguments[2]);
    for (long i = 0; i < steps; i++) {
        if (i % 500 == 0) alarm(120);
        char number[32];
        snprintf(number, sizeof number, "%ld", i);
        step();
        if (i % 50 == 49) say("-- %s", number);
    }
    return 0;
}
