/* Shared by the conformance programs. A program runs its cases one by one, each in its own process and
 * directory below the working directory, and prints what it saw. The transcript must not depend on where that
 * directory is. Process numbers, inode numbers and times are not printed. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

struct test {
    const char *name;
    void (*run)(void);
};

/* The transcript: a descriptor that no case closes by accident, written without stdio. */
static int transcript = -1;
/* The program itself, to execute it again, and the case's directory as an absolute path. */
static char self[PATH_MAX], top[PATH_MAX];

/* Prints a line, with the directory's path replaced by TOP. */
__attribute__((format(printf, 1, 2))) static inline void say(const char *format, ...) {
    char text[8192], line[8192];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text - 1, format, arguments);
    va_end(arguments);
    size_t at = 0, length = strlen(top);
    for (char *from = text; *from && at < sizeof line - 8;) {
        if (length && strncmp(from, top, length) == 0) {
            memcpy(line + at, "TOP", 3);
            at += 3;
            from += length;
        } else {
            line[at++] = *from++;
        }
    }
    line[at++] = '\n';
    if (write(transcript, line, at) < 0) _exit(98);
}

/* Prints the result of a call, and its error if it failed. */
#define SAY(call)                                                         \
    ({                                                                    \
        errno = 0;                                                        \
        long said_result = (long)(call);                                  \
        if (said_result == -1) say("%s: %s", #call, strerrorname_np(errno)); \
        else say("%s: %ld", #call, said_result);                          \
        said_result;                                                      \
    })

/* Makes a call that the case needs to succeed. */
#define MUST(call)                                                              \
    ({                                                                          \
        long must_result = (long)(call);                                        \
        if (must_result == -1) {                                                \
            say("%s at line %d: %s", #call, __LINE__, strerrorname_np(errno));  \
            _exit(97);                                                          \
        }                                                                       \
        must_result;                                                            \
    })

/* Creates a file that holds a text. */
static inline void make(const char *path, const char *text) {
    int fd = MUST(open(path, O_WRONLY | O_CREAT | O_TRUNC, 0644));
    MUST(write(fd, text, strlen(text)));
    MUST(close(fd));
}

/* Prints the contents of a file. */
static inline void show(const char *path) {
    char text[4096];
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        say("%s: %s", path, strerrorname_np(errno));
        return;
    }
    ssize_t length = read(fd, text, sizeof text - 1);
    text[length < 0 ? 0 : length] = 0;
    say("%s holds %zd: %s", path, length, text);
    close(fd);
}

/* Reads a few bytes and prints them. */
static inline void peek(int fd, int count) {
    char text[256] = {0};
    ssize_t got = read(fd, text, count);
    if (got < 0) say("read of %d: %s", fd, strerrorname_np(errno));
    else say("read %zd of %d: %s", got, fd, text);
}

/* Waits for a child and prints how it ended. */
static inline void reap(pid_t child) {
    int status = 0;
    MUST(waitpid(child, &status, 0));
    if (WIFEXITED(status)) say("child exits %d", WEXITSTATUS(status));
    else say("child ends by %s", sigabbrev_np(WTERMSIG(status)));
}

/* Runs a block in a child and waits for it. */
#define IN_CHILD(...)             \
    do {                          \
        pid_t in_child = fork();  \
        if (in_child == 0) {      \
            __VA_ARGS__;          \
            _exit(0);             \
        }                         \
        reap(in_child);           \
    } while (0)

/* Executes this program again for a small job: `peek FD`, `say TEXT`, `cwd`, `lock PATH`. */
static inline void again(const char *job, const char *argument) {
    execl(self, self, "--job", job, argument, top, (char *)NULL);
    _exit(96);
}

static inline int job(char **arguments) {
    const char *name = arguments[0], *argument = arguments[1];
    snprintf(top, sizeof top, "%s", arguments[2]);
    if (strcmp(name, "peek") == 0) peek(atoi(argument), 3);
    else if (strcmp(name, "say") == 0) say("%s", argument);
    else if (strcmp(name, "write") == 0) SAY(write(atoi(argument), "job", 3));
    else if (strcmp(name, "cwd") == 0) {
        char here[PATH_MAX];
        say("working directory %s", getcwd(here, sizeof here) ? here : strerrorname_np(errno));
        show(argument);
    } else if (strcmp(name, "lock") == 0) {
        struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
        int fd = MUST(open(argument, O_RDWR));
        int got = fcntl(fd, F_SETLK, &lock);
        say("lock of %s: %s", argument, got == 0 ? "taken" : strerrorname_np(errno));
    } else if (strcmp(name, "umask") == 0) {
        mode_t mask = umask(0);
        say("umask %o", mask);
    }
    return 0;
}

static inline int run(int count, char **arguments, const struct test *tests) {
    MUST(readlink("/proc/self/exe", self, sizeof self - 1));
    transcript = 200;
    if (count == 5 && strcmp(arguments[1], "--job") == 0) return job(arguments + 2);
    MUST(dup2(1, transcript));
    char home[PATH_MAX];
    if (!getcwd(home, sizeof home)) return 95;
    umask(022);
    for (; tests->name; tests++) {
        if (count > 1 && strcmp(arguments[1], tests->name) != 0) continue;
        if (snprintf(top, sizeof top, "%s/%s", home, tests->name) >= (int)sizeof top) return 94;
        if (mkdir(top, 0755)) return 93; /* two cases of one name: the second would not run, on either side */
        say("== %s", tests->name);
        pid_t child = fork();
        if (child == 0) {
            alarm(100);
            MUST(chdir(top));
            tests->run();
            fflush(NULL);
            _exit(0);
        }
        reap(child);
    }
    return 0;
}
