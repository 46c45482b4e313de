/* Directories that are renamed or removed while processes work in them or have them open, and mappings of
 * files that are changed by other calls. */
#include "case.h"
#include <sys/mman.h>
#include <sys/syscall.h>

static void here(const char *when) {
    char path[PATH_MAX];
    say("%s: %s", when, getcwd(path, sizeof path) ? path : strerrorname_np(errno));
}

static void name_of(int fd) {
    char link[64], path[PATH_MAX] = {0};
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    if (readlink(link, path, sizeof path - 1) < 0) say("no name: %s", strerrorname_np(errno));
    else say("is %s", path);
}

/* Runs a case in its own process. */
static void apart(void (*what)(void)) {
    pid_t child = fork();
    if (child == 0) {
        what();
        _exit(0);
    }
    int status;
    waitpid(child, &status, 0);
    say("child %d", status);
}

static void rename_it(void) { SAY(rename("../../d", "../../e")); }
static void remove_it(void) { SAY(rmdir("../../e/in")); }

static void working_directory_is_renamed(void) {
    MUST(mkdir("d", 0755));
    MUST(mkdir("d/in", 0755));
    SAY(chdir("d/in"));
    SAY(rename("../../d", "../../c"));
    here("by ourselves");
    make("f", "text");
    SAY(access("../../c/in/f", F_OK));
    SAY(rename("../../c", "../../d"));
    apart(rename_it);
    here("by a child");
    show("f");
    show("../../e/in/f");
    if (fork() == 0) {
        execlp("pwd", "pwd", "-P", NULL);
        _exit(9);
    }
    wait(NULL);
    MUST(mkdir("../../other", 0755));
    SAY(renameat2(AT_FDCWD, "../../e", AT_FDCWD, "../../other", RENAME_EXCHANGE));
    here("exchanged");
    SAY(access("f", F_OK));
    SAY(rename("../../other", "../../e"));
    here("over an empty directory");
    MUST(unlink("f"));
    apart(remove_it);
    here("removed");
    SAY(open("new", O_CREAT | O_WRONLY, 0644));
}

/* Counts, and tells of the first times, that something is wrong. */
#define WRONG_IF(condition) \
    ((condition) && wrong++ < 10 ? say("%s: %s", #condition, strerrorname_np(errno)) : (void)0)

/* What is in a working directory is found at any moment. */
static void working_directory_is_renamed_meanwhile(void) {
    char d[PATH_MAX + 2], e[PATH_MAX + 2];
    snprintf(d, sizeof d, "%s/d", top), snprintf(e, sizeof e, "%s/e", top);
    MUST(mkdir("d", 0755));
    MUST(mkdir("d/in", 0755));
    MUST(mkdir("d/in/sub", 0755));
    make("d/in/f", "text");
    SAY(chdir("d/in"));
    pid_t child = fork();
    if (child == 0) {
        for (int i = 0; i < 300; i++) MUST(rename(d, e)), MUST(rename(e, d));
        _exit(0);
    }
    int status, wrong = 0;
    while (waitpid(child, &status, WNOHANG) == 0) {
        struct stat s;
        WRONG_IF(open("sub", O_CREAT | O_WRONLY, 0644) != -1 || errno != EISDIR);
        WRONG_IF(open("sub/.", O_CREAT | O_WRONLY, 0644) != -1 || errno != EISDIR);
        WRONG_IF(stat("f", &s) != 0);
        WRONG_IF(rename("f", "sub/g") != 0);
        WRONG_IF(rename("sub/g", "f") != 0);
    }
    say("child %d, %d are wrong", status, wrong);
    SAY(access("f", F_OK));
}

static void rename_by_link(void) { SAY(rename("../../alias/d", "../../alias/e")); }
static void move_by_link(void) { SAY(rename("../../alias/e/", "../../way/deep/../g")); }
static void remove_by_link(void) { SAY(rmdir("../../../way/g/in")); }

/* Renamed by other processes, and by names with links. */
static void working_directory_is_renamed_by_links(void) {
    MUST(mkdir("d", 0755));
    MUST(mkdir("d/in", 0755));
    MUST(mkdir("other", 0755));
    MUST(mkdir("other/deep", 0755));
    MUST(symlink(".", "alias"));
    MUST(symlink("other", "way"));
    SAY(chdir("alias/d/in"));
    here("by a link");
    SAY(rename("../../alias/d", "../../d"));
    here("to its own name");
    apart(rename_by_link);
    here("renamed");
    make("f", "text");
    show("../../e/in/f");
    apart(move_by_link);
    here("moved");
    show("../../../other/g/in/f");
    MUST(unlink("f"));
    apart(remove_by_link);
    here("removed");
    SAY(open("new", O_CREAT | O_WRONLY, 0644));
}

/* Renamed by a name with a link, so that only the file system knows where it is afterwards. */
static void open_directories_are_renamed_by_links(void) {
    MUST(mkdir("d", 0755));
    MUST(symlink("/", "d/out"));
    MUST(symlink(".", "alias"));
    int d = SAY(open("d", O_RDONLY | O_DIRECTORY));
    SAY(rename("alias/d", "alias/e"));
    MUST(mkdir("d", 0755));
    MUST(symlink("out", "d/out"));
    name_of(d);
    SAY(faccessat(d, "out/dev/null", F_OK, 0));
    SAY(openat(d, "out/none", O_RDONLY));
    SAY(renameat(d, "out/dev/none", AT_FDCWD, "f"));
    SAY(linkat(d, "out/dev/null", AT_FDCWD, "f", 0));
    IN_CHILD({
        char *arguments[] = {"sh", "-c", "exit 7", NULL};
        SAY(syscall(SYS_execveat, d, "out/none", arguments, environ, 0));
        SAY(syscall(SYS_execveat, d, "out/bin/sh", arguments, environ, 0));
    });
    IN_CHILD({
        char *arguments[] = {"sh", "-c", "exit 7", NULL};
        SAY(execveat(d, "out/none", arguments, environ, 0));
        SAY(execveat(d, "out/bin/sh", arguments, environ, 0));
    });
    SAY(faccessat(d, "../../../data/renamed-by-links", F_OK, 0));
    SAY(unlink("e/out"));
    SAY(rmdir("alias/e"));
    SAY(faccessat(d, "out", F_OK, 0));
    SAY(faccessat(d, "../d", F_OK, 0));
    SAY(faccessat(d, "../../../data/renamed-by-links", F_OK, 0));
    SAY(renameat(d, "../d/out/none", AT_FDCWD, "f"));
}

static void open_directories_are_renamed(void) {
    MUST(mkdir("d", 0755));
    make("d/f", "text");
    int d = SAY(open("d", O_RDONLY | O_DIRECTORY)), f = SAY(open("./d//f", O_RDONLY));
    name_of(d);
    name_of(f);
    SAY(rename("d", "e"));
    name_of(d);
    name_of(f);
    SAY(mkdir("d", 0755));
    SAY(faccessat(d, "f", F_OK, 0));
    SAY(fchdir(d));
    here("by its descriptor");
    SAY(rename("f", "g"));
    name_of(f);
    SAY(unlink("g"));
    name_of(f);
    SAY(fchdir(f));
    peek(f, 4);
}

static void removed_directories_are_no_way_out(void) {
    MUST(mkdir("d", 0755));
    int d = MUST(open("d", O_RDONLY | O_DIRECTORY));
    MUST(rmdir("d"));
    SAY(renameat(d, "x", AT_FDCWD, "/proc/none"));
    SAY(renameat(d, "x/", AT_FDCWD, "/proc/none"));
    SAY(renameat(AT_FDCWD, "/proc/none", d, "./x//"));
}

static void removed_directories_lead_up(void) {
    struct stat s;
    MUST(mkdir("d", 0755));
    make("beside", "text");
    MUST(symlink("d", "way"));
    int d = MUST(open("way", O_RDONLY | O_DIRECTORY)), held = MUST(open("d", O_PATH));
    SAY(chdir("d"));
    SAY(rmdir("../d"));
    here("removed");
    show("../beside");
    SAY(stat("beside", &s));
    IN_CHILD(again("cwd", "../beside"));
    SAY(fstatat(d, "../beside", &s, 0));
    SAY(unlink("../way"));
    name_of(held);
    SAY(chdir(".."));
    here("above");
    SAY(fchdir(held));
    here("removed");
    show("../beside");
    SAY(mkdir("../e", 0755));
    SAY(rename("../e", "../f"));
    SAY(chdir("../f"));
    here("beside");
    int link = MUST(symlinkat("..", AT_FDCWD, "up")) + MUST(open("up", O_PATH | O_NOFOLLOW));
    SAY(fstatat(link, "x", &s, 0));
    SAY(renameat(link, "x", AT_FDCWD, "/none"));
    SAY(fcntl(link, F_GETFL));
}

static void mappings_see_what_calls_change(void) {
    char text[6000];
    memset(text, 'a', sizeof text);
    int fd = MUST(open("f", O_RDWR | O_CREAT, 0644));
    MUST(write(fd, text, sizeof text));
    char *map = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    char *reader = mmap(NULL, 8192, PROT_READ, MAP_SHARED, fd, 0);
    say("mapped %d", map != MAP_FAILED && reader != MAP_FAILED);
    SAY(pwrite(fd, "written", 7, 100));
    say("%.7s %.7s", map + 100, reader + 100);
    memcpy(map + 4090, "across pages", 12);
    SAY(pread(fd, text, 12, 4090));
    say("%.12s %.12s", text, reader + 4090);
    SAY(ftruncate(fd, 4092));
    say("%.2s %d %d", map + 4090, map[4092], reader[4095]);
    SAY(ftruncate(fd, 6000));
    say("%d %d", map[4092], map[4096]);
    SAY(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096));
    say("%d %d", map[100], reader[0]);
    int other = MUST(open("f", O_WRONLY | O_APPEND));
    SAY(write(other, "appended", 8));
    say("%.8s", map + 6000);
    pid_t child = fork();
    if (child == 0) {
        SAY(pwrite(fd, "child", 5, 200));
        _exit(0);
    }
    waitpid(child, NULL, 0);
    say("%.5s", map + 200);
    SAY(close(open("f", O_WRONLY | O_TRUNC)));
    SAY(ftruncate(fd, 10));
    say("%d %d", map[0], reader[1]);
    map[0] = 'z';
    map[20] = 'y';
    SAY(munmap(map, 8192));
    SAY(munmap(reader, 8192));
    SAY(pread(fd, text, 30, 0));
    say("%c", text[0]);
}

/* By its name, as by a descriptor. The long ones are read when they are touched. */
static void mapped_files_are_truncated(void) {
    const long lengths[] = {8192, 1 << 20};
    for (int i = 0; i < 2; i++) {
        long length = lengths[i];
        int fd = MUST(open("f", O_RDWR | O_CREAT | O_TRUNC, 0644));
        MUST(ftruncate(fd, length));
        char *map = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        char *reader = mmap(NULL, length, PROT_READ, MAP_SHARED, fd, 0);
        memset(map, 'a', length);
        SAY(msync(map, length, MS_SYNC));
        SAY(truncate("f", 100));
        SAY(truncate("f", length));
        say("%c %d %d", map[99], map[100], reader[length - 1]);
        memset(map, 'b', length);
        IN_CHILD(SAY(truncate("f", 5000)); SAY(truncate("f", length)));
        say("%c %d %d", reader[4999], reader[5000], map[length - 1]);
        SAY(munmap(map, length));
        SAY(munmap(reader, length));
        /* Nothing that was cut off comes back. */
        char text[2] = {0};
        SAY(pread(fd, text, 2, 4999));
        say("%c %d", text[0], text[1]);
        MUST(close(fd));
    }
}

static void mappings_that_shrink(void) {
    int fd = MUST(open("f", O_RDWR | O_CREAT, 0644));
    MUST(ftruncate(fd, 8192));
    char *map = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    map[0] = 'a';
    map[5000] = 'b';
    char *less = mremap(map, 8192, 4096, 0);
    say("%d %c", less == map, less[0]);
    less[1] = 'c';
    SAY(munmap(less, 4096));
    char text[2];
    SAY(pread(fd, text, 2, 0));
    say("%.2s", text);
    SAY(pread(fd, text, 1, 5000));
    say("%c", text[0]);
}

static void mappings_that_grow(void) {
    int fd = MUST(open("f", O_RDWR | O_CREAT, 0644));
    MUST(ftruncate(fd, 20000));
    MUST(pwrite(fd, "one", 3, 0));
    MUST(pwrite(fd, "two", 3, 8192));
    MUST(pwrite(fd, "end", 3, 16384));
    char *shared = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    char *own = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE, fd, 0);
    char *shared_more = mremap(shared, 4096, 12288, MREMAP_MAYMOVE);
    char *own_more = mremap(own, 4096, 20480, MREMAP_MAYMOVE);
    if (shared_more == MAP_FAILED || own_more == MAP_FAILED) {
        say("failed: %s", strerrorname_np(errno));
        return;
    }
    say("%.3s %.3s, %.3s %.3s %.3s", shared_more, shared_more + 8192, own_more, own_more + 8192, own_more + 16384);
    memcpy(shared_more + 8192, "TWO", 3);
    SAY(msync(shared_more, 12288, MS_SYNC));
    char text[4] = {0};
    SAY(pread(fd, text, 3, 8192));
    say("%s", text);
    /* Private mappings may or may not see that; their own changes stay. */
    SAY(mprotect(own_more, 20480, PROT_READ | PROT_WRITE));
    memcpy(own_more + 16384, "own", 3);
    SAY(pread(fd, text, 3, 16384));
    say("%s %.3s", text, own_more + 16384);
    MUST(close(fd));
    SAY(munmap(shared_more, 12288));
    SAY(munmap(own_more, 20480));
}

static void mappings_that_become_writable(void) {
    int fd = MUST(open("f", O_RDWR | O_CREAT, 0644));
    MUST(ftruncate(fd, 8192));
    char *map = mmap(NULL, 8192, PROT_READ, MAP_SHARED, fd, 0);
    int reader = MUST(open("f", O_RDONLY));
    char *fixed = mmap(NULL, 8192, PROT_READ, MAP_SHARED, reader, 0);
    char *own = mmap(NULL, 8192, PROT_READ, MAP_PRIVATE, reader, 0);
    SAY(mprotect(map, 8192, PROT_READ | PROT_WRITE));
    SAY(mprotect(fixed, 8192, PROT_READ | PROT_WRITE));
    SAY(mprotect(own, 8192, PROT_READ | PROT_WRITE));
    memcpy(map, "shared", 6);
    memcpy(own + 4096, "own", 3);
    say("%.6s", fixed);
    SAY(mprotect(map, 8192, PROT_NONE));
    SAY(msync(map, 8192, MS_SYNC));
    char text[8] = {0};
    SAY(pread(fd, text, 6, 0));
    say("%s", text);
    SAY(mprotect(map, 8192, PROT_READ | PROT_WRITE));
    memcpy(map + 4096, "again", 5);
    SAY(mprotect(map + 4096, 4096, PROT_NONE));
    SAY(munmap(map, 8192));
    SAY(pread(fd, text, 6, 4096));
    say("%s", text);
}

/* Children forget nothing of a private mapping either, nor may they lengthen it less. */
static void private_mappings_in_children(void) {
    make("f", "0123456789");
    int fd = MUST(open("f", O_RDWR));
    char *own = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
    MUST(ftruncate(fd, 8192));
    MUST(pwrite(fd, "behind", 6, 4096));
    IN_CHILD({
        SAY(madvise(own, 4096, MADV_DONTNEED));
        say("%.10s", own);
        char *more = mremap(own, 4096, 8192, MREMAP_MAYMOVE);
        say("%.10s %.6s", more, more + 4096);
        SAY(munmap(more, 8192));
    });
    SAY(madvise(own, 4096, MADV_DONTNEED));
    say("%.10s", own);
}

static void long_names(void) {
    const int lengths[] = {255, 256, 4000, 4095, 4096, 7000};
    static char text[8000];
    for (int i = 0; i < 6; i++) {
        char link[16];
        memset(text, 'x', lengths[i]);
        text[lengths[i]] = 0;
        snprintf(link, sizeof link, "l%d", i);
        say("as a target %d: %d %s", lengths[i], symlink(text, link), strerrorname_np(errno));
        say("as a name %d: %d %s", lengths[i], mkdir(text, 0755), strerrorname_np(errno));
        /* A path relative to a remote directory must be shorter by the length of that. */
        if (lengths[i] == 4095) continue;
        for (int k = 0; k + 1 < lengths[i]; k += 2) memcpy(text + k, "./", 2);
        say("as a path %d: %d %s", lengths[i], symlink("t", text), strerrorname_np(errno));
        say("renamed %d: %d %s", lengths[i], rename("l0", text), strerrorname_np(errno));
        errno = 0;
    }
    say("no address: %d %s", rename("l0", NULL), strerrorname_np(errno));
    say("no address: %d %s", link("l0", (char *)-1), strerrorname_np(errno));
    say("no address: %d %s", rename("none/l0", NULL), strerrorname_np(errno));
    /* Also where all names are known, as they were all listed and looked at. */
    struct stat status;
    MUST(mkdir("listed", 0755));
    for (int i = 0; i < 30; i++) {
        snprintf(text, sizeof text, "listed/%d", i);
        make(text, "");
    }
    DIR *list = opendir("listed");
    for (struct dirent *entry; (entry = readdir(list));) {
        snprintf(text, sizeof text, "listed/%s", entry->d_name);
        MUST(lstat(text, &status));
    }
    closedir(list);
    for (int length = 300; length >= 255; length -= 45) {
        snprintf(text, sizeof text, "listed/%0*d", length, 0);
        SAY(lstat(text, &status));
    }
}

static void status_of(const char *path) {
    struct stat status;
    if (lstat(path, &status)) say("%s: %s", path, strerrorname_np(errno));
    else say("%s: mode %o, device %ld, %ld links", path, status.st_mode, (long)status.st_rdev, (long)status.st_nlink);
}

/* What names are known to be must not be taken for true any more. Not all file systems have whiteouts. */
static void whiteouts_are_left(void) {
    const char *names[] = {"f", "g", "h", "d", "e", "d/f", "e/f"};
    make("f", "text"), make("g", "other");
    MUST(mkdir("d", 0755));
    make("d/f", "below");
    MUST(chdir("d"));
    SAY(renameat2(AT_FDCWD, "../f", AT_FDCWD, "../g", RENAME_WHITEOUT | RENAME_NOREPLACE));
    SAY(renameat2(AT_FDCWD, "../f", AT_FDCWD, "../g", RENAME_WHITEOUT | RENAME_EXCHANGE));
    SAY(renameat2(AT_FDCWD, "../f", AT_FDCWD, "../g", RENAME_WHITEOUT));
    SAY(renameat2(AT_FDCWD, "../g", AT_FDCWD, "../h", RENAME_WHITEOUT | RENAME_NOREPLACE));
    SAY(syscall(SYS_renameat2, AT_FDCWD, "../d", AT_FDCWD, "../e", RENAME_WHITEOUT));
    show("f"), here("moved");
    MUST(chdir(top));
    for (int i = 0; i < 7; i++) status_of(names[i]);
    show("f"), show("h");
    SAY(rename("h", "f"));
    SAY(unlink("g"));
    for (int i = 0; i < 3; i++) status_of(names[i]);
}

static const struct test tests[] = {
    {"whiteouts", whiteouts_are_left},
    {"long-names", long_names},
    {"working-directory", working_directory_is_renamed},
    {"working-directory-meanwhile", working_directory_is_renamed_meanwhile},
    {"working-directory-by-links", working_directory_is_renamed_by_links},
    {"open-directories", open_directories_are_renamed},
    {"renamed-by-links", open_directories_are_renamed_by_links},
    {"removed-directories", removed_directories_lead_up},
    {"no-way-out", removed_directories_are_no_way_out},
    {"mappings", mappings_see_what_calls_change},
    {"truncated", mapped_files_are_truncated},
    {"shrinking", mappings_that_shrink},
    {"growing", mappings_that_grow},
    {"writable", mappings_that_become_writable},
    {"private-in-children", private_mappings_in_children},
    {NULL, NULL},
};

int main(int count, char **arguments) { return run(count, arguments, tests); }
