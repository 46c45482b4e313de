/* Runs a long random program of system calls, the same for the same seed: `random SEED STEPS KINDS`. It works
 * in the working directory ("data"), whose parent it may reach with "..", and in the directory that the
 * environment variable OUTSIDE names, which is local on both sides. It prints every call and its result.
 * KINDS is the number of kinds of steps to draw from, so that old seeds still mean the same after kinds were
 * added. */
#include "case.h"
#include <ftw.h>
#include <glob.h>
#include <stdint.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/statfs.h>
#include <sys/uio.h>
#include <sys/xattr.h>

static uint64_t state;
static uint32_t kinds;
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

/* Returns a path: relative, absolute, or through a link across the boundary. */
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

/* Returns a directory for the at-functions. */
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

static int visited;
static char walked[6000];

static int visit(const char *name, const struct stat *s, int kind, struct FTW *place) {
    (void)s;
    /* The file system decides the order, so names are combined into a sum. */
    unsigned all = sum((const unsigned char *)name, strlen(name)) + kind * 3 + place->level + place->base;
    snprintf(walked, sizeof walked, "%u", (unsigned)strtoul(walked, NULL, 10) + all);
    return ++visited > 300;
}

/* Prints what walks over trees see. A prefix need not exist, so they do not start above it. */
static void walk(const char *name) {
    /* Directories outside have other names on the other side. */
    if (name[0] == '/' || strstr(name, "..") || strstr(name, "out")) return;
    char here[PATH_MAX];
    if (!getcwd(here, sizeof here) || strncmp(here, top, strlen(top))) return;
    visited = 0, strcpy(walked, "0");
    int flags[] = {FTW_PHYS, FTW_PHYS | FTW_DEPTH, FTW_PHYS | FTW_CHDIR};
    int got = nftw(name, visit, 4, flags[draw(3)]);
    if (got < 0) say("nftw %s: %s", name, strerrorname_np(errno));
    else say("nftw %s: %d %d %s", name, got, visited, walked);
    glob_t found;
    const char *patterns[] = {"*", "?", "d/*", "*/*", "./[a-d]", "d/h/*", "none*"};
    const char *pattern = patterns[draw(7)];
    got = glob(pattern, draw(2) ? GLOB_MARK : 0, NULL, &found);
    say("glob %s: %d %zu", pattern, got, got ? 0 : found.gl_pathc);
    for (size_t i = 0; !got && i < found.gl_pathc && i < 20; i++) say("  %s", found.gl_pathv[i]);
    if (!got) globfree(&found);
}

/* Reads a directory in pieces, goes back to an earlier position, and starts again. */
static void seek_in(const char *name) {
    DIR *stream = opendir(name);
    if (!stream) return;
    int count = 0, until = draw(4);
    struct dirent *entry = NULL;
    for (int i = 0; i <= until; i++) entry = readdir(stream);
    long place = telldir(stream);
    char after[256] = "", again[256] = "";
    if ((entry = readdir(stream))) snprintf(after, sizeof after, "%s", entry->d_name);
    while (readdir(stream)) {}
    seekdir(stream, place);
    if ((entry = readdir(stream))) snprintf(again, sizeof again, "%s", entry->d_name);
    rewinddir(stream);
    for (errno = 0; (entry = readdir(stream));) count += strcmp(entry->d_name, "data") != 0;
    say("seek %s: same %d count %d %s", name, strcmp(after, again) == 0, count, strerrorname_np(errno));
    closedir(stream);
}

/* Any of several conflicting locks may be reported. Several on one byte must be shared. */
static void tell(const char *who, int got, const struct flock *found) {
    if (got < 0) say("%s: %s", who, strerrorname_np(errno));
    else if (found->l_type == F_RDLCK) say("%s: shared", who);
    else say("%s: %d type %d start %ld length %ld", who, got, found->l_type, (long)found->l_start, (long)found->l_len);
}

static void lock(int fd) {
    struct flock lock = {.l_type = (short[]){F_RDLCK, F_WRLCK, F_UNLCK}[draw(3)],
                         .l_whence = draw(3), .l_start = draw(50), .l_len = draw(20)};
    int commands[] = {F_SETLK, F_GETLK, F_OFD_SETLK, F_OFD_GETLK}, command = commands[draw(4)];
    /* Newer kernels then report any lock. */
    if (command == F_OFD_GETLK && lock.l_type == F_UNLCK) lock.l_type = F_WRLCK;
    if (command == F_GETLK || command == F_OFD_GETLK) lock.l_len = 1;
    int got = draw(4) ? fcntl(fd, command, &lock) : flock(fd, (int[]){LOCK_SH, LOCK_EX, LOCK_UN}[draw(3)] | LOCK_NB);
    tell("lock", got, &lock);
    /* Another process sees this one's locks. */
    struct flock probe = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = draw(50), .l_len = 1};
    pid_t child = fork();
    if (child == 0) {
        tell("child lock", fcntl(fd, F_GETLK, &probe), &probe);
        _exit(0);
    }
    waitpid(child, NULL, 0);
}

/* A file without a name, which may or may not get one. */
static void unnamed(int at, const char *name) {
    int fd = openat(at, draw(2) ? "d" : ".", O_TMPFILE | (draw(2) ? O_RDWR : O_WRONLY), 0600 + draw(64));
    result("unnamed", "", "", fd < 0 ? -1 : 0);
    if (fd < 0) return;
    struct stat s;
    result("write", "", "", write(fd, data, draw(500)));
    status("fstat", "", fstat(fd, &s), &s);
    char own[64];
    snprintf(own, sizeof own, "/proc/self/fd/%d", fd);
    if (draw(2)) result("linkat", name, "", linkat(AT_FDCWD, own, AT_FDCWD, name, AT_SYMLINK_FOLLOW));
    close(fd);
}

static void ask_more(int at, const char *name, int fd) {
    struct statx x;
    int flags = (draw(2) ? AT_SYMLINK_NOFOLLOW : 0) | (int[]){0, AT_STATX_FORCE_SYNC, AT_STATX_DONT_SYNC}[draw(3)];
    int got = draw(4) ? statx(at, name, flags, STATX_BASIC_STATS, &x) : statx(fd, "", flags | AT_EMPTY_PATH, STATX_BASIC_STATS, &x);
    if (got) say("statx %s: %s", name, strerrorname_np(errno));
    else say("statx %s: mode %o mask %x size %ld", name, x.stx_mode, x.stx_mask & STATX_BASIC_STATS,
             S_ISDIR(x.stx_mode) ? 0L : (long)x.stx_size);
    struct statfs s;
    result("statfs", name, "", statfs(name, &s));
    result("pathconf", name, "", pathconf(name, _PC_NAME_MAX));
}

static void attributes_of(const char *name, int fd) {
    char all[1000];
    const char *attribute = draw(3) ? "user.test" : draw(2) ? "user.other" : "odd";
    switch (draw(7)) {
    case 0: result("lsetxattr", name, attribute, lsetxattr(name, attribute, data, draw(50), draw(3))); break;
    case 1: result("fsetxattr", attribute, "", fsetxattr(fd, attribute, data, draw(50), draw(3))); break;
    case 2: result("removexattr", name, attribute, removexattr(name, attribute)); break;
    case 3: result("fremovexattr", attribute, "", fremovexattr(fd, attribute)); break;
    case 4: result("lgetxattr", name, attribute, lgetxattr(name, attribute, all, draw(60))); break;
    case 5: result("listxattr", name, "", listxattr(name, all, draw(2) ? sizeof all : draw(40))); break;
    default: result("flistxattr", "", "", flistxattr(fd, NULL, 0));
    }
}

/* Splices through a pipe, both ways. */
static void through_pipe(int from, int to) {
    int ends[2];
    struct stat one, other;
    /* Splicing passes the file's own pages, which might be those written to. */
    if (fstat(from, &one) == 0 && fstat(to, &other) == 0 && one.st_ino == other.st_ino) return;
    if (pipe2(ends, O_NONBLOCK)) return;
    off_t place = draw(1000);
    ssize_t in = splice(from, draw(2) ? &place : NULL, ends[1], NULL, 1 + draw(9000), 0);
    result("splice in", "", "", in);
    if (in > 0) result("splice out", "", "", splice(ends[0], NULL, to, draw(2) ? &place : NULL, in, 0));
    close(ends[0]);
    close(ends[1]);
}

static void flagged(int fd) {
    struct iovec parts[2] = {{data, draw(300)}, {data + 500, draw(5000)}};
    struct iovec room[2] = {{back, draw(300)}, {back + 500, draw(5000)}};
    off_t place = draw(4) ? (off_t)draw(3000) : -1;
    if (draw(2)) {
        const int flags[] = {0, RWF_DSYNC, RWF_SYNC, RWF_APPEND, 0x4000000};
        int flag = flags[draw(5)];
        snprintf((char *)back, 20, "%x", flag);
        result("pwritev2", (char *)back, "", pwritev2(fd, parts, 2, place, flag));
    } else {
        memset(back, 0, 6000);
        ssize_t got = preadv2(fd, room, 2, place, draw(5) ? 0 : RWF_HIPRI);
        say("preadv2: %s %zd %u", got < 0 ? strerrorname_np(errno) : "", got, sum(back, 6000));
    }
    result("offset", "", "", lseek(fd, 0, SEEK_CUR) < 0 ? -1 : 0);
}

static void control(int fd) {
    switch (draw(5)) {
    case 0: result("F_GETFL", "", "", fcntl(fd, F_GETFL) & (O_ACCMODE | O_APPEND | O_NONBLOCK)); break;
    case 1: result("F_SETFL", "", "", fcntl(fd, F_SETFL, (draw(2) ? O_APPEND : 0) | (draw(2) ? O_NONBLOCK : 0))); break;
    case 2: result("F_SETFD", "", "", fcntl(fd, F_SETFD, draw(2))); break;
    case 3: result("F_GETFD", "", "", fcntl(fd, F_GETFD)); break;
    default: result("posix_fallocate", "", "", -(errno = posix_fallocate(fd, offset(), 1 + offset()), errno != 0));
    }
    result("fdatasync", "", "", draw(2) ? fdatasync(fd) : fsync(fd));
}

/* Stays within the parent of "data", so that everything happens in directories of this program. */
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
    /* What a removed working directory contains differs between file systems. */
    if (!getcwd(link, sizeof link)) stay();
    errno = 0;
    switch (draw(kinds)) {
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
        /* Offsets in directories depend on the file system. */
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
        /* The length of a file copied into itself depends on the size of the kernel's pieces. */
        if (fstat(fd, &s) == 0 && fstat(to, &other) == 0 && s.st_ino == other.st_ino && s.st_dev == other.st_dev)
            break;
        if (draw(2)) result("sendfile", "", "", sendfile(to, fd, &from, length()));
        else {
            ssize_t done = 0;
            if (to != fd) {
                size_t count = length();
                done = copy_file_range(fd, &from, to, NULL, count, 0);
                /* Between file systems, only remote files are copied. */
                if (done < 0 && errno == EXDEV) done = sendfile(to, fd, &from, count);
            }
            result("copy_file_range", "", "", done);
        }
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
    case 46: walk(first); break;
    case 47: seek_in(draw(2) ? "." : first); break;
    case 48: lock(fd); break;
    case 49: unnamed(at, first); break;
    case 50: ask_more(at, first, fd); break;
    case 51: attributes_of(first, fd); break;
    case 52: through_pipe(fd, file()); break;
    case 53: flagged(fd); break;
    case 54: control(fd); break;
    case 55: {
        const char *pipes[] = {"p", "d/p", "x/p"};
        first = pipes[draw(3)];
        if (draw(2)) result("mkfifo", first, "", mkfifoat(AT_FDCWD, first, 0644));
        int opened = open(first, (draw(2) ? O_RDONLY : O_WRONLY) | O_NONBLOCK);
        result("open", first, "", opened < 0 ? -1 : 0);
        if (opened >= 0) close(opened);
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
    if (count < 4 || !getenv("OUTSIDE") || !getcwd(top, sizeof top)) return 99;
    snprintf(outside, sizeof outside, "%s", getenv("OUTSIDE"));
    state = strtoull(arguments[1], NULL, 10) * 0x9E3779B97F4A7C15u + 1;
    kinds = atoi(arguments[3]);
    transcript = MUST(fcntl(1, F_DUPFD, 200));
    umask(022);
    signal(SIGPIPE, SIG_IGN);
    char into[PATH_MAX + 16];
    snprintf(into, sizeof into, "%s/into", outside);
    MUST(mkdir("d", 0755));
    MUST(mkdir("d/h", 0755));
    /* Links across the boundary in both directions, and one that leads nowhere. */
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
