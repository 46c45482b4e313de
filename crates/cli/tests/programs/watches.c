/* Watches files and directories with inotify. Events are printed up to a mark: the name of a directory that
 * is created last, in a place that the same queue watches. Open events are left out except for one case: they
 * are reported together with the close. */
#include "case.h"
#include <poll.h>
#include <sys/epoll.h>
#include <sys/inotify.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>

#define CHANGES (IN_ALL_EVENTS & ~(IN_OPEN | IN_ACCESS | IN_CLOSE))

static const struct { uint32_t bit; const char *name; } NAMES[] = {
    {IN_ACCESS, "ACCESS"}, {IN_MODIFY, "MODIFY"}, {IN_ATTRIB, "ATTRIB"}, {IN_CLOSE_WRITE, "CLOSE_WRITE"},
    {IN_CLOSE_NOWRITE, "CLOSE_NOWRITE"}, {IN_OPEN, "OPEN"}, {IN_MOVED_FROM, "MOVED_FROM"}, {IN_MOVED_TO, "MOVED_TO"},
    {IN_CREATE, "CREATE"}, {IN_DELETE, "DELETE"}, {IN_DELETE_SELF, "DELETE_SELF"}, {IN_MOVE_SELF, "MOVE_SELF"},
    {IN_IGNORED, "IGNORED"}, {IN_Q_OVERFLOW, "OVERFLOW"}, {IN_ISDIR, "ISDIR"},
};

enum { LINE = 1024 };

static int queue, mark, marks;

static void begin(void) {
    queue = MUST(inotify_init1(IN_CLOEXEC));
    MUST(mkdir("marks", 0755));
    mark = MUST(inotify_add_watch(queue, "marks", IN_CREATE));
}

/* Adds a watch. Does not print its descriptor: programs that do the same get the same one, but without
 * guarantee. */
static int watch(const char *path, uint32_t mask) {
    int got = inotify_add_watch(queue, path, mask);
    if (got < 0) say("watching %s: %s", path, strerrorname_np(errno));
    return got;
}

static void print(const struct inotify_event *event, uint32_t *cookie, int *moves, char *last) {
    char line[LINE], name[600];
    size_t at = 0;
    line[0] = 0;
    for (size_t i = 0; i < sizeof NAMES / sizeof *NAMES; i++)
        if (event->mask & NAMES[i].bit) at += snprintf(line + at, sizeof line - at, " %s", NAMES[i].name);
    if (event->cookie && event->cookie != *cookie) {
        *cookie = event->cookie;
        ++*moves;
    }
    if (event->cookie) at += snprintf(line + at, sizeof line - at, " (move %d)", *moves);
    size_t to = 0;
    for (const unsigned char *from = (const void *)event->name; event->len && *from && to < 590; from++)
        to += *from > 32 && *from < 127 ? snprintf(name + to, 3, "%c", *from) : snprintf(name + to, 5, "\\%02x", *from);
    name[to] = 0;
    snprintf(line + at, sizeof line - at, " %s%d", name, event->wd - mark);
    /* The kernel merges an event with an equal one before it that has not been read yet. */
    if (!event->cookie && strcmp(last, line) == 0) return;
    strcpy(last, line);
    say("   %s", line);
}

/* Prints the events up to a new mark. */
static void told_of(int from, const char *what) {
    char name[32];
    char events[65536] __attribute__((aligned(8)));
    char last[LINE] = "";
    uint32_t cookie = 0;
    int moves = 0;
    say("%s:", what);
    snprintf(name, sizeof name, "marks/%d", marks++);
    MUST(mkdir(name, 0755));
    for (;;) {
        struct pollfd wait = {.fd = from, .events = POLLIN};
        if (poll(&wait, 1, 60000) == 0) {
            say("nothing more comes");
            _exit(90);
        }
        ssize_t count = MUST(read(from, events, sizeof events));
        const struct inotify_event *event;
        for (char *at = events; at < events + count; at += sizeof *event + event->len) {
            event = (const void *)at;
            if (event->wd == mark && strcmp(event->name, name + 6) == 0) return;
            print(event, &cookie, &moves, last);
        }
    }
}

static void told(const char *what) { told_of(queue, what); }

#define TOLD(call) do { SAY(call); told("tells"); } while (0)

static void append(const char *path, const char *text) {
    int fd = MUST(open(path, O_WRONLY | O_APPEND));
    MUST(write(fd, text, strlen(text)));
    MUST(close(fd));
}

static void names_come_and_go(void) {
    begin();
    MUST(mkdir("a", 0755));
    MUST(mkdir("b", 0755));
    MUST(mkdir("aside", 0755));
    make("a/old", "text");
    make("a/other", "text");
    MUST(mkdir("a/olddir", 0755));
    watch("a", CHANGES);
    watch("b", CHANGES);
    TOLD(mkdir("a/dir", 0755));
    TOLD(mknod("a/new", S_IFREG | 0644, 0));
    TOLD(link("a/old", "a/link"));
    TOLD(symlink("nowhere", "a/symlink"));
    TOLD(mkfifo("a/fifo", 0600));
    TOLD(rename("a/new", "a/renamed"));
    TOLD(rename("a/renamed", "b/moved"));
    TOLD(rename("b/moved", "aside/out"));
    TOLD(rename("aside/out", "a/in"));
    TOLD(rename("a/in", "a/old"));
    TOLD(rename("a/other", "a/old"));
    TOLD(rename("a/olddir", "b/dir"));
    TOLD(rename("b/dir", "aside/dir"));
    TOLD(rename("aside/dir", "a/olddir"));
    TOLD(rename("a/dir", "a/olddir"));
    TOLD(rename("a/link", "a/old"));
    TOLD(renameat2(AT_FDCWD, "a/old", AT_FDCWD, "a/olddir", RENAME_EXCHANGE));
    TOLD(renameat2(AT_FDCWD, "a/old", AT_FDCWD, "a/olddir", RENAME_EXCHANGE));
    TOLD(unlink("a/symlink"));
    TOLD(unlink("a/fifo"));
    TOLD(rmdir("a/olddir"));
    TOLD(unlink("a/link"));
    TOLD(unlink("a/old"));
    TOLD(rmdir("a"));
    TOLD(rename("b", "c"));
    TOLD(mkdir("c/still", 0755));
    TOLD(rmdir("c/still"));
    TOLD(rmdir("c"));
}

static void files_are_changed(void) {
    begin();
    MUST(mkdir("d", 0755));
    make("d/f", "text");
    watch("d", CHANGES | IN_CLOSE_WRITE);
    make("d/new", "some text");
    told("made and written");
    append("d/f", "more");
    told("appended to");
    int fd = MUST(open("d/f", O_RDWR));
    SAY(pwrite(fd, "t", 1, 0));
    told("written");
    SAY(ftruncate(fd, 2));
    told("truncated");
    SAY(fchmod(fd, 0600));
    told("changed");
    SAY(close(fd));
    told("closed");
    TOLD(chmod("d/f", 0644));
    TOLD(utimensat(AT_FDCWD, "d/f", NULL, 0));
    TOLD(chmod("d", 0700));
    TOLD(link("d/f", "outside"));
    TOLD(chmod("outside", 0600));
}

static void a_file_is_watched(void) {
    begin();
    make("f", "text");
    watch("f", CHANGES | IN_CLOSE_WRITE);
    append("f", "more");
    told("appended to");
    TOLD(chmod("f", 0600));
    TOLD(link("f", "g"));
    TOLD(rename("f", "h"));
    append("g", "more");
    told("by its other name");
    TOLD(unlink("h"));
    TOLD(unlink("g"));
    make("i", "text");
    make("j", "text");
    watch("i", CHANGES);
    TOLD(rename("j", "i"));
    MUST(symlink("i", "link"));
    watch("link", IN_ATTRIB | IN_DONT_FOLLOW);
    TOLD(chmod("i", 0600));
    TOLD(unlink("link"));
    MUST(mkfifo("fifo", 0600));
    watch("fifo", CHANGES);
    TOLD(chmod("fifo", 0644));
}

static void opening_is_told(void) {
    begin();
    MUST(mkdir("d", 0755));
    MUST(mkdir("e", 0755));
    make("d/f", "text");
    make("e/f", "text");
    int reader = watch("d", IN_CLOSE_NOWRITE);
    say("watched %d", reader >= 0);
    MUST(close(MUST(open("d/f", O_RDONLY))));
    told("opened and closed");
    watch("d", IN_OPEN | IN_CLOSE_NOWRITE | IN_CLOSE_WRITE);
    MUST(close(MUST(open("d/f", O_RDONLY))));
    told("opened and closed");
    MUST(close(MUST(open("d/f", O_WRONLY))));
    told("opened for writing and closed");
    watch("e", IN_OPEN);
    int fd = MUST(open("e/f", O_RDONLY));
    told("opened");
    MUST(close(fd));
    watch("e", IN_ACCESS);
    show("e/f");
    told("read");
    MUST(mkdir("g", 0755));
    make("g/f", "text");
    watch("g", IN_OPEN);
    watch("g", IN_CLOSE_WRITE | IN_MASK_ADD);
    MUST(close(MUST(open("g/f", O_RDONLY))));
    told("opened, where closes after writing are told, too");
}

/* Watches each directory when it appears, as programs do that watch a tree. */
static void trees_are_watched_as_they_grow(void) {
    begin();
    MUST(mkdir("t", 0755));
    watch("t", CHANGES);
    char path[256] = "t";
    for (int depth = 0; depth < 5; depth++) {
        size_t end = strlen(path);
        snprintf(path + end, sizeof path - end, "/n%d", depth);
        MUST(mkdir(path, 0755));
        told(path);
        watch(path, CHANGES);
        char file[300];
        snprintf(file, sizeof file, "%s/file", path);
        make(file, "text");
        told(file);
    }
    for (char *end; (end = strrchr(path, '/')); *end = 0) {
        char file[300];
        snprintf(file, sizeof file, "%s/file", path);
        MUST(unlink(file));
        MUST(rmdir(path));
        told("removed");
    }
}

static void flags_and_errors(void) {
    begin();
    MUST(mkdir("d", 0755));
    make("f", "text");
    int first = watch("d", IN_CREATE);
    say("the same %d", watch("./d", IN_CREATE) == first);
    say("the same %d", watch(top, IN_CREATE) == watch(".", IN_CREATE));
    SAY(inotify_rm_watch(queue, watch(".", IN_CREATE)));
    told("given up");
    watch("d", IN_DELETE | IN_MASK_ADD);
    TOLD(mkdir("d/a", 0755));
    TOLD(rmdir("d/a"));
    watch("d", IN_DELETE);
    TOLD(mkdir("d/a", 0755));
    TOLD(rmdir("d/a"));
    watch("d", IN_CREATE | IN_MASK_CREATE);
    watch("d", IN_CREATE | IN_ONESHOT);
    TOLD(mkdir("d/a", 0755));
    TOLD(mkdir("d/b", 0755));
    watch("d", IN_CREATE | IN_EXCL_UNLINK | IN_ONLYDIR);
    TOLD(mkdir("d/c", 0755));
    watch("f", IN_MODIFY | IN_ONLYDIR);
    watch("none", IN_MODIFY);
    watch("f/none", IN_MODIFY);
    watch("", IN_MODIFY);
    watch("none", 0);
    watch("none", IN_ISDIR);
    watch("f", IN_MASK_ADD | IN_MASK_CREATE | IN_MODIFY);
    char longest[300];
    memset(longest, 'x', sizeof longest - 1);
    longest[sizeof longest - 1] = 0;
    say("too long: %d", watch(longest, IN_MODIFY) < 0);
    MUST(symlink("loop", "loop"));
    watch("loop", IN_MODIFY);
    SAY(inotify_add_watch(-1, "f", IN_MODIFY));
    SAY(inotify_add_watch(0, "f", IN_MODIFY));
    SAY(inotify_add_watch(-1, "none", 0));
    int fd = MUST(open("f", O_RDONLY));
    SAY(inotify_add_watch(fd, "f", IN_MODIFY));
    SAY(inotify_add_watch(queue, (const char *)8, IN_MODIFY));
    SAY(inotify_rm_watch(queue, 12345));
    SAY(syscall(SYS_inotify_add_watch, queue, "none", IN_MODIFY));
    say("the same %d", syscall(SYS_inotify_add_watch, queue, "f", IN_MODIFY) == watch("f", IN_MODIFY));
    append("f", "more");
    told("appended to");
}

static void names_of_all_kinds_lead_there(void) {
    begin();
    MUST(mkdir("d", 0755));
    MUST(mkdir("d/in", 0755));
    MUST(symlink("d", "link"));
    MUST(symlink("/", "out"));
    int first = watch("d", CHANGES);
    int fd = MUST(open("d", O_RDONLY | O_DIRECTORY));
    int path = MUST(open("d", O_PATH));
    char name[64];
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    say("by descriptor %d", watch(name, CHANGES) == first);
    snprintf(name, sizeof name, "/dev/fd/%d", path);
    say("by path descriptor %d", watch(name, CHANGES) == first);
    say("by link %d", watch("link", CHANGES) == first);
    say("by link and slash %d", watch("link/", CHANGES | IN_DONT_FOLLOW) == first);
    say("the link itself %d", watch("link", IN_ATTRIB | IN_DONT_FOLLOW) != first);
    MUST(chdir("d/in"));
    say("from within %d", watch("..", CHANGES) == first);
    MUST(chdir(".."));
    say("here %d", watch(".", CHANGES) == first);
    say("working directory %d", watch("/proc/self/cwd", CHANGES) == first);
    say("absolute %d", watch(top, IN_DELETE_SELF) != first);
    MUST(chdir(".."));
    say("out %d", watch("out", IN_DELETE_SELF) >= 0);
    say("further out %d", watch("out/usr/../proc", IN_DELETE_SELF) >= 0);
    fd = MUST(open("f", O_RDWR | O_CREAT, 0600));
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    say("a file by descriptor %d", watch(name, IN_MODIFY) >= 0);
    MUST(write(fd, "text", 4));
    told("written");
}

static void queues_are_waited_for(void) {
    begin();
    MUST(mkdir("d", 0755));
    int quick = MUST(inotify_init1(IN_NONBLOCK));
    MUST(inotify_add_watch(quick, "d", IN_CREATE | IN_MODIFY));
    int epoll = MUST(epoll_create1(0));
    struct epoll_event event = {.events = EPOLLIN};
    MUST(epoll_ctl(epoll, EPOLL_CTL_ADD, quick, &event));
    char events[4096] __attribute__((aligned(8)));
    struct pollfd wait = {.fd = quick, .events = POLLIN};
    SAY(read(quick, events, sizeof events));
    SAY(poll(&wait, 1, 0));
    SAY(epoll_wait(epoll, &event, 1, 0));
    MUST(mkdir("d/name", 0755));
    SAY(poll(&wait, 1, 60000));
    SAY(epoll_wait(epoll, &event, 1, 60000));
    int bytes = 0;
    SAY(ioctl(quick, FIONREAD, &bytes));
    say("%d bytes", bytes);
    SAY(read(quick, events, 4));
    SAY(read(quick, events, sizeof events));
    SAY(read(quick, events, sizeof events));
    SAY(close(quick));
}

static void processes_watch_together(void) {
    begin();
    MUST(mkdir("d", 0755));
    watch("d", CHANGES);
    int ready[2];
    MUST(pipe(ready));
    pid_t child = fork();
    if (child == 0) {
        /* The child's own queue, with a watch on the same directory. */
        queue = MUST(inotify_init1(0));
        mark = MUST(inotify_add_watch(queue, "marks", IN_CREATE));
        watch("d", IN_CREATE | IN_MODIFY);
        MUST(mkdir("d/child", 0755));
        make("d/file", "by the child");
        told("the child");
        MUST(write(ready[1], "x", 1));
        _exit(0);
    }
    char one;
    MUST(read(ready[0], &one, 1));
    reap(child);
    marks++; /* the child's mark */
    told("the parent");
    IN_CHILD(MUST(rmdir("d/child")); told("with the parent's queue"));
    marks++;
    if ((child = fork()) == 0) {
        /* A killed process with its own watch changes nothing for others. */
        watch("d", IN_DELETE | IN_MASK_ADD);
        raise(SIGKILL);
    }
    reap(child);
    TOLD(unlink("d/file"));
}

static void odd_names(void) {
    begin();
    MUST(mkdir("d", 0755));
    watch("d", CHANGES);
    char path[300] = "d/", other[300] = "d/";
    memset(path + 2, 'y', 255);
    for (int i = 0; i < 255; i++) other[2 + i] = "\x01\xff \n\xc3"[i % 5];
    const char *names[] = {path, other, "d/ ", "d/\n", "d/\\", "d/\xff\xfe", "d/...", "d/-rf", "d/aside-0", "d/\xe2\x82\xac"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        MUST(mknod(names[i], S_IFREG | 0644, 0));
        told("made");
        MUST(rename(names[i], "d/plain"));
        told("renamed");
        MUST(rename("d/plain", names[i]));
        MUST(unlink(names[i]));
        told("removed");
    }
}

/* More names than one answer of the server holds, and than one listing holds. */
static void thousands_of_names(void) {
    enum { COUNT = 3000 };
    begin();
    MUST(mkdir("d", 0755));
    char path[64];
    for (int i = 0; i < COUNT; i++) {
        snprintf(path, sizeof path, "d/old-name-%d", i);
        MUST(mknod(path, S_IFREG | 0644, 0));
    }
    watch("d", IN_CREATE | IN_DELETE);
    pid_t child = fork();
    if (child == 0) {
        for (int i = 0; i < COUNT; i++) {
            snprintf(path, sizeof path, "d/old-name-%d", i);
            MUST(unlink(path));
            snprintf(path, sizeof path, "d/new-name-%d", i);
            MUST(mknod(path, S_IFREG | 0644, 0));
        }
        _exit(0);
    }
    char events[65536] __attribute__((aligned(8)));
    static char gone[COUNT], come[COUNT];
    int seen = 0, wrong = 0;
    while (seen < 2 * COUNT) {
        struct pollfd wait = {.fd = queue, .events = POLLIN};
        if (poll(&wait, 1, 60000) == 0) break;
        ssize_t count = MUST(read(queue, events, sizeof events));
        const struct inotify_event *event;
        for (char *at = events; at < events + count; at += sizeof *event + event->len, seen++) {
            event = (const void *)at;
            int number = -1;
            char *which = event->mask == IN_DELETE ? gone : come;
            const char *format = event->mask == IN_DELETE ? "old-name-%d" : "new-name-%d";
            if (!event->len || sscanf(event->name, format, &number) != 1 || number >= COUNT || which[number]++) wrong++;
        }
    }
    reap(child);
    say("%d told, %d wrong", seen, wrong);
}

int main(int count, char **arguments) {
    static const struct test TESTS[] = {
        {"names_come_and_go", names_come_and_go},
        {"files_are_changed", files_are_changed},
        {"a_file_is_watched", a_file_is_watched},
        {"opening_is_told", opening_is_told},
        {"trees_are_watched_as_they_grow", trees_are_watched_as_they_grow},
        {"flags_and_errors", flags_and_errors},
        {"names_of_all_kinds_lead_there", names_of_all_kinds_lead_there},
        {"queues_are_waited_for", queues_are_waited_for},
        {"processes_watch_together", processes_watch_together},
        {"odd_names", odd_names},
        {"thousands_of_names", thousands_of_names},
        {NULL, NULL},
    };
    return run(count, arguments, TESTS);
}
