/* New programs and processes: every way to start one, what it inherits, locks, working directory. */
#include "case.h"
#include <pthread.h>
#include <pty.h>
#include <sched.h>
#include <spawn.h>
#include <sys/file.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <utmp.h>

extern char **environ;

static void copy_program(const char *from, const char *to) {
    char command[PATH_MAX * 2];
    snprintf(command, sizeof command, "cp %s %s && chmod +x %s", from, to, to);
    if (system(command) != 0) _exit(90);
}

static void script(const char *path, const char *text) {
    make(path, text);
    MUST(chmod(path, 0755));
}

/* Prints the result of a spawn. In a guest, the child that executes the program has its own memory, so libc
 * does not learn why that failed. */
static void came_of(const char *name, int result, pid_t pid) {
#ifdef GUEST
    int status = 0;
    if (result == 0) waitpid(pid, &status, 0);
    say("%s %s", name, result || status == 127 << 8 ? "failed" : "good");
#else
    if (result == 0) reap(pid);
    say("%s %s", name, result ? strerrorname_np(result) : "good");
#endif
}

/* Every way to execute a program, whose output goes to the transcript as descriptor 1. */
static void every_exec(void) {
    copy_program("/bin/echo", "e");
    script("s", "#!/bin/sh\necho script $0 $1 $2\n");
    script("o", "#!/bin/sh -e\nfalse\necho not reached\n");
    script("n", "echo nobody claims $1\n");
    script("i", "#!./s option\nthe interpreter is a script\n");
    make("p", "#!/bin/sh\n");
    script("w", "#!/no/such/interpreter\n");
    make("m", "\177ELFnot a program");
    chmod("m", 0755);
    MUST(dup2(transcript, 1));
    char *list[] = {"zero", "one", "two", NULL}, *own[] = {"PATH=/bin", "OWN=yes", NULL};
    const char *names[] = {"./e", "./s", "./o", "./n", "./i", "./p", "./w", "./m", "./none", ".", "e"};
    for (int i = 0; i < 11; i++) {
        const char *name = names[i];
        say("-- %s", name);
        IN_CHILD(SAY(execv(name, list)));
        IN_CHILD(SAY(execve(name, list, own)));
        IN_CHILD(SAY(execl(name, "zero", "one", "two", NULL)));
        IN_CHILD(SAY(execlp(name, "zero", "one", "two", NULL)));
        IN_CHILD(SAY(execle(name, "zero", "one", "two", NULL, own)));
        IN_CHILD(SAY(execvp(name, list)));
        IN_CHILD(SAY(execvpe(name, list, own)));
        IN_CHILD(setenv("PATH", ".:/bin", 1); SAY(execvp(name, list)));
        IN_CHILD(setenv("PATH", top, 1); SAY(execlp(name, "zero", "one", NULL)));
        IN_CHILD({
            int fd = open(name, O_RDONLY);
            SAY(fexecve(fd, list, own));
        });
        IN_CHILD(SAY(execveat(AT_FDCWD, name, list, own, 0)));
        pid_t pid = 0;
        int result = posix_spawn(&pid, name, NULL, NULL, list, own);
        came_of("posix_spawn", result, pid);
        result = posix_spawnp(&pid, name, NULL, NULL, list, environ);
        came_of("posix_spawnp", result, pid);
    }
    char path[PATH_MAX + 8];
    snprintf(path, sizeof path, "%s/s", top);
    IN_CHILD(SAY(execl(path, "zero", "absolute", NULL)));
}

/* By what the kernel takes for words, and by flags. */
static void scripts_and_flags(void) {
    script("crlf", "#!/bin/echo\r\n");
    script("form-feed", "#!/bin/echo\f\n");
    script("option", "#!/bin/echo a\r\n");
    script("blanks", "#! \t/bin/echo  a\tb \t\n");
    MUST(symlink("blanks", "link"));
    make("file", "");
    MUST(mkdir("folder", 0755));
    const char *names[] = {"./crlf", "./form-feed", "./option", "./blanks"};
    char *arguments[] = {"it", "last", NULL};
    MUST(dup2(transcript, 1));
    for (int i = 0; i < 4; i++) IN_CHILD(SAY(execv(names[i], arguments)));
    IN_CHILD(SAY(execveat(AT_FDCWD, "link", arguments, environ, 0)));
    IN_CHILD(SAY(execveat(AT_FDCWD, "./blanks", arguments, environ, AT_SYMLINK_NOFOLLOW)));
    IN_CHILD(SAY(execveat(AT_FDCWD, "link", arguments, environ, AT_SYMLINK_NOFOLLOW)));
    IN_CHILD(SAY(execveat(AT_FDCWD, "link", arguments, environ, 0x8000)));
    IN_CHILD(SAY(execveat(MUST(open("blanks", O_RDONLY)), "", arguments, environ, AT_EMPTY_PATH | 0x8000)));
    const char *paths[] = {"", "folder:", ":folder", "file", "file:folder", "folder:file", "none"};
    for (int i = 0; i < 7; i++) {
        setenv("PATH", paths[i], 1);
        IN_CHILD(SAY(execvp("blanks", arguments)));
    }
}

static void environments(void) {
    make("f", "abcdefgh");
    MUST(open("f", O_RDONLY));
    char *none[] = {NULL};
    char *odd[] = {"LD_PRELOAD=", "LD_LIBRARY_PATH=/nowhere", NULL};
    char *list[] = {self, "--job", "peek", "3", top, NULL};
    IN_CHILD(execve(self, list, none));
    IN_CHILD(execve(self, list, odd));
    IN_CHILD(clearenv(); execv(self, list));
    IN_CHILD(unsetenv("LD_PRELOAD"); execv(self, list));
    IN_CHILD(setenv("LD_PRELOAD", "", 1); setenv("TOWLINE_RUN", "/nowhere", 1); execvp(self, list));
    IN_CHILD(environ = none; execlp(self, self, "--job", "say", "no environment", top, NULL));
    MUST(dup2(transcript, 1));
    IN_CHILD(execle("/usr/bin/env", "env", "-i", "/bin/cat", "f", NULL, none));
    IN_CHILD(execl("/bin/sh", "sh", "-c", "exec env -i sh -c 'cat f; echo; cat < f'", NULL));
}

/* A program that has no environment runs commands. */
static void commands_without_environment(void) {
    make("f", "text\n");
    clearenv();
    SAY(system("cat f"));
    SAY(system("echo \"it's\" > 'a name'; exit 3"));
    show("a name");
    SAY(system(NULL) != 0);
    char line[64] = "";
    FILE *stream = popen("cat 'a name'; cat f", "r");
    while (fgets(line, sizeof line, stream)) say("%s", line);
    say("%d", pclose(stream));
    stream = popen("cat > f", "w");
    fputs("from a pipe", stream);
    say("%d", pclose(stream));
    show("f");
}

static void forks(void) {
    make("f", "abcdefghij");
    int fd = MUST(open("f", O_RDWR));
    pid_t child = vfork();
    if (child == 0) {
        execl(self, self, "--job", "peek", "3", top, NULL);
        _exit(1);
    }
    reap(child);
    peek(fd, 2);
    child = vfork();
    if (child == 0) _exit(7);
    reap(child);
    child = vfork();
    if (child == 0) {
        execl("./none", "none", NULL);
        _exit(errno == ENOENT ? 4 : 5);
    }
    reap(child);
    IN_CHILD(IN_CHILD(IN_CHILD(lseek(fd, 1, SEEK_SET)); peek(fd, 1)); peek(fd, 1));
    child = fork();
    if (child == 0) pause();
    SAY(kill(child, SIGKILL));
    reap(child);
    peek(fd, 1);
    for (int i = 0; i < 30; i++) {
        child = fork();
        if (child == 0) _exit(pread(fd, (char[1]){0}, 1, i % 10) == 1 ? 0 : 1);
        int status;
        waitpid(child, &status, 0);
        if (status) say("child %d failed", i);
    }
    SAY(close(fd));
}

static void spawned(void) {
    make("f", "abcdefghij");
    mkdir("d", 0755);
    make("d/inside", "inside");
    int fd = MUST(open("f", O_RDONLY | O_CLOEXEC));
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, fd, 5);
    posix_spawn_file_actions_addopen(&actions, 6, "f", O_RDONLY, 0);
    posix_spawn_file_actions_addopen(&actions, 7, "made", O_WRONLY | O_CREAT | O_TRUNC, 0640);
    posix_spawn_file_actions_addclose(&actions, 5);
    posix_spawn_file_actions_adddup2(&actions, 6, 8);
    char *list[] = {"sh", "-c", "head -c 3 <&6 >&7; head -c 2 <&8 >&7; echo >&7; { cat <&5; } 2>&7 || echo closed >&7", NULL};
    pid_t pid = 0;
    say("%d", posix_spawn(&pid, "/bin/sh", &actions, NULL, list, environ));
    reap(pid);
    show("made");
    posix_spawn_file_actions_destroy(&actions);
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 6, "none", O_RDONLY, 0);
    int result = posix_spawn(&pid, "/bin/sh", &actions, NULL, list, environ);
    came_of("posix_spawn", result, pid);
    posix_spawn_file_actions_destroy(&actions);
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addchdir_np(&actions, "d");
    posix_spawn_file_actions_addopen(&actions, 1, "out", O_WRONLY | O_CREAT, 0644);
    char *cat[] = {"sh", "-c", "cat inside; pwd | tail -c 3; ls", NULL};
    say("%d", posix_spawnp(&pid, "sh", &actions, NULL, cat, environ));
    reap(pid);
    show("d/out");
    posix_spawn_file_actions_destroy(&actions);
    posix_spawnattr_t attributes;
    posix_spawnattr_init(&attributes);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
    sigset_t set;
    sigemptyset(&set);
    posix_spawnattr_setsigmask(&attributes, &set);
    sigaddset(&set, SIGPIPE);
    posix_spawnattr_setsigdefault(&attributes, &set);
    script("s", "#!/bin/sh\ntest \"$(ps -o pgid= -p $$ 2>/dev/null || echo $$)\" -eq $$ && echo own group > group\n");
    char *own[] = {"s", NULL};
    say("%d", posix_spawn(&pid, "./s", NULL, &attributes, own, environ));
    reap(pid);
    show("group");
    int before = MUST(open("f", O_RDONLY));
    MUST(close(before));
    for (int i = 0; i < 10; i++) {
        char *none[] = {"true", NULL};
        if (posix_spawnp(&pid, "true", NULL, NULL, none, environ) == 0) waitpid(pid, NULL, 0);
    }
    say("nothing left open: %d", before == open("f", O_RDONLY));
}

/* A failure is reported although the actions want many numbers, and nothing is written to their files. */
static void spawned_with_many_numbers(void) {
    make("f", "text");
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 3, "f", O_RDWR, 0);
    for (int i = 4; i < 400; i++) posix_spawn_file_actions_adddup2(&actions, 3, i);
    char *none[] = {"none", NULL};
    pid_t pid = 0;
    int result = posix_spawn(&pid, "/none", &actions, NULL, none, environ);
    came_of("posix_spawn", result, pid);
    show("f");
}

static void working_directory(void) {
    MUST(mkdir("a", 0755));
    MUST(mkdir("a/b", 0755));
    make("a/f", "in a");
    make("a/b/f", "in b");
    char here[PATH_MAX];
    SAY(chdir("a/b"));
    say("%s", getcwd(here, sizeof here));
    IN_CHILD(again("cwd", "f"));
    IN_CHILD(again("cwd", "../f"));
    SAY(chdir(".."));
    show("f");
    int fd = MUST(open("b", O_RDONLY | O_DIRECTORY));
    IN_CHILD(SAY(fchdir(fd)); again("cwd", "f"));
    show("b/../f");
    int up = SAY(openat(fd, "../f", O_RDONLY));
    peek(up, 4);
    SAY(chdir("f"));
    SAY(chdir("none"));
    SAY(chdir("/"));
    IN_CHILD(again("cwd", "none"));
    SAY(fchdir(fd));
    say("%s", getcwd(here, sizeof here));
    errno = 0;
    say("%d %s", getcwd(here, 3) == NULL, strerrorname_np(errno));
    symlink("b", "../link");
    SAY(chdir("../link"));
    say("%s", getcwd(here, sizeof here));
    make("g", "made here");
    show("../b/g");
    /* A directory opened through a link that leads elsewhere by then. */
    symlink("a/b", "../../way");
    int by_way = MUST(open("../../way", O_RDONLY | O_DIRECTORY));
    SAY(fchdir(by_way));
    say("%s", getcwd(here, sizeof here));
    MUST(symlinkat("..", by_way, "../../other"));
    MUST(rename("../../other", "../../way"));
    SAY(chdir("/"));
    SAY(fchdir(by_way));
    show("g");
    SAY(chdir(".."));
    show("f");
    SAY(chdir(top));
    SAY(chmod("a", 0));
    SAY(chmod("a", 0755));
    char *allocated = getcwd(NULL, 0);
    say("%s", allocated);
    say("%s", get_current_dir_name());
    say("%s", realpath("a/./../a/b", here) ? here : strerrorname_np(errno));
    MUST(dup2(transcript, 1));
    system("cd a/b && pwd && cat ../f && cd / && cat $OLDPWD/f");
}

static void process_locks(void) {
    make("f", "0123456789");
    int fd = MUST(open("f", O_RDWR)), other = MUST(open("f", O_RDWR));
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 2, .l_len = 3};
    SAY(fcntl(fd, F_SETLK, &lock));
    IN_CHILD({
        struct flock wanted = {.l_type = F_RDLCK, .l_whence = SEEK_SET, .l_start = 4, .l_len = 1};
        SAY(fcntl(fd, F_SETLK, &wanted));
        wanted.l_type = F_WRLCK;
        SAY(fcntl(fd, F_GETLK, &wanted));
        say("type %d start %ld length %ld mine %d", wanted.l_type, (long)wanted.l_start,
            (long)wanted.l_len, wanted.l_pid == getppid());
        wanted = (struct flock){.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 5, .l_len = 1};
        SAY(fcntl(fd, F_SETLK, &wanted));
    });
    IN_CHILD(SAY(lockf(fd, F_TEST, 10)); lseek(fd, 2, SEEK_SET); SAY(lockf(fd, F_TLOCK, 1)));
    /* Any close of the file by this process releases its locks. */
    MUST(close(other));
    IN_CHILD(again("lock", "f"));
    lock = (struct flock){.l_type = F_WRLCK, .l_whence = SEEK_SET};
    SAY(fcntl(fd, F_SETLK, &lock));
    IN_CHILD(again("lock", "f"));
    lock.l_type = F_UNLCK;
    SAY(fcntl(fd, F_SETLK, &lock));
    IN_CHILD(again("lock", "f"));
    lock.l_type = F_RDLCK;
    SAY(fcntl(fd, F_SETLK, &lock));
    IN_CHILD(SAY(lockf(fd, F_TEST, 0)); SAY(lockf(fd, F_TLOCK, 0)));
    lock.l_type = F_UNLCK;
    SAY(fcntl(fd, F_SETLK, &lock));
    int reader = MUST(open("f", O_RDONLY));
    lock.l_type = F_WRLCK;
    SAY(fcntl(reader, F_SETLK, &lock));
    lock.l_type = 77;
    SAY(fcntl(fd, F_SETLK, &lock));
    lock = (struct flock){.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = -1};
    SAY(fcntl(fd, F_SETLK, &lock));
    lock = (struct flock){.l_type = F_WRLCK, .l_whence = SEEK_END, .l_start = -2, .l_len = -3};
    SAY(fcntl(fd, F_SETLK, &lock));
    IN_CHILD({
        struct flock wanted = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
        SAY(fcntl(fd, F_GETLK, &wanted));
        say("start %ld length %ld", (long)wanted.l_start, (long)wanted.l_len);
    });
    /* Up to the largest offset, and beyond. */
    lock = (struct flock){.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 9, .l_len = LONG_MAX};
    SAY(fcntl(fd, F_SETLK, &lock));
    lock.l_len = LONG_MAX - 8;
    SAY(fcntl(fd, F_SETLK, &lock));
    IN_CHILD({
        struct flock wanted = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 20};
        SAY(fcntl(fd, F_GETLK, &wanted));
        say("start %ld length %ld", (long)wanted.l_start, (long)wanted.l_len);
    });
}

/* A duplicate that is not made is not closed either. */
static void locks_and_failed_duplicates(void) {
    make("f", "x");
    int fd = MUST(open("f", O_RDWR));
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    SAY(fcntl(fd, F_SETLK, &lock));
    SAY(fcntl(fd, F_DUPFD, -1));
    IN_CHILD(again("lock", "f"));
    SAY(dup2(fd, -1));
    IN_CHILD(again("lock", "f"));
    SAY(dup3(fd, 50, 0x77));
    IN_CHILD(again("lock", "f"));
    int other = MUST(dup(fd));
    IN_CHILD(again("lock", "f"));
    MUST(close(other));
    IN_CHILD(again("lock", "f"));
}

/* A lock is held across exec, and released when the process ends, however it ends. */
static void locks_and_new_programs(void) {
    make("f", "x");
    make("ready", "");
    int told[2], go[2];
    MUST(pipe(told));
    MUST(pipe(go));
    pid_t child = fork();
    if (child == 0) {
        int fd = MUST(open("f", O_RDWR));
        struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
        MUST(fcntl(fd, F_SETLK, &lock));
        MUST(dup2(told[1], 8));
        MUST(dup2(go[0], 9));
        execl("/bin/sh", "sh", "-c", "echo >&8; read x <&9; exec sh -c 'echo >&8; read x <&9'", NULL);
        _exit(1);
    }
    read(told[0], (char[1]){0}, 1);
    IN_CHILD(again("lock", "f"));
    write(go[1], "\n", 1);
    read(told[0], (char[1]){0}, 1);
    IN_CHILD(again("lock", "f"));
    kill(child, SIGKILL);
    reap(child);
    IN_CHILD(again("lock", "f"));
}

static void file_locks(void) {
    make("f", "0123456789");
    int fd = MUST(open("f", O_RDWR)), other = MUST(open("f", O_RDWR));
    SAY(flock(fd, LOCK_EX));
    SAY(flock(other, LOCK_SH | LOCK_NB));
    int copy = MUST(dup(fd));
    SAY(flock(copy, LOCK_SH));
    SAY(flock(other, LOCK_SH | LOCK_NB));
    SAY(flock(other, LOCK_EX | LOCK_NB));
    IN_CHILD(SAY(flock(fd, LOCK_UN)));
    SAY(flock(other, LOCK_EX | LOCK_NB));
    SAY(flock(fd, 0));
    MUST(close(other));
    SAY(flock(fd, LOCK_EX | LOCK_NB));
    MUST(close(fd));
    other = MUST(open("f", O_RDWR));
    SAY(flock(other, LOCK_EX | LOCK_NB));
    MUST(close(copy));
    SAY(flock(other, LOCK_EX | LOCK_NB));
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_len = 4};
    int third = MUST(open("f", O_RDWR));
    SAY(fcntl(other, F_OFD_SETLK, &lock));
    SAY(fcntl(third, F_OFD_SETLK, &lock));
    IN_CHILD(lock.l_type = F_UNLCK; SAY(fcntl(other, F_OFD_SETLK, &lock)));
    SAY(fcntl(third, F_OFD_SETLK, &lock));
    lock.l_pid = 1;
    SAY(fcntl(third, F_OFD_SETLK, &lock));
}

static void rings(int signal) { (void)signal; }

static void waiting_for_locks(void) {
    make("f", "0123456789");
    int fd = MUST(open("f", O_RDWR)), told[2];
    MUST(pipe(told));
    pid_t child = fork();
    if (child == 0) {
        struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_len = 5};
        MUST(fcntl(fd, F_SETLK, &lock));
        write(told[1], "x", 1);
        usleep(2000000);
        pwrite(fd, "BEFORE", 6, 0);
        _exit(0);
    }
    read(told[0], (char[1]){0}, 1);
    struct sigaction action = {.sa_handler = rings};
    sigaction(SIGALRM, &action, NULL);
    struct itimerval soon = {{0, 100000}, {0, 100000}}, never = {{0, 0}, {0, 0}};
    setitimer(ITIMER_REAL, &soon, NULL);
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_len = 5};
    SAY(fcntl(fd, F_SETLKW, &lock));
    setitimer(ITIMER_REAL, &never, NULL);
    SAY(fcntl(fd, F_SETLKW, &lock));
    show("f");
    reap(child);
    /* A cycle of waits. The locks of the parent were released by the close in show. */
    fd = MUST(open("f", O_RDWR));
    lock = (struct flock){.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 0, .l_len = 1};
    MUST(fcntl(fd, F_SETLK, &lock));
    child = fork();
    if (child == 0) {
        lock.l_start = 1;
        MUST(fcntl(fd, F_SETLK, &lock));
        write(told[1], "x", 1);
        lock.l_start = 0;
        _exit(fcntl(fd, F_SETLKW, &lock) == 0 ? 0 : errno == EDEADLK ? 1 : 2);
    }
    read(told[0], (char[1]){0}, 1);
    usleep(300000);
    lock.l_start = 1;
    /* The process that waits last gets the error; on a busy machine that may be the child. */
    int told_us = fcntl(fd, F_SETLKW, &lock) == -1 && errno == EDEADLK;
    lock = (struct flock){.l_type = F_UNLCK, .l_whence = SEEK_SET};
    SAY(fcntl(fd, F_SETLK, &lock));
    int status = 0;
    MUST(waitpid(child, &status, 0));
    printf("one of the two is told: %d\n", told_us + (WIFEXITED(status) && WEXITSTATUS(status) == 1));
    /* flock waits, too. */
    SAY(flock(fd, LOCK_EX));
    child = fork();
    if (child == 0) {
        int own = MUST(open("f", O_RDWR));
        write(told[1], "x", 1);
        _exit(flock(own, LOCK_EX) == 0 ? 0 : 1);
    }
    read(told[0], (char[1]){0}, 1);
    usleep(100000);
    SAY(flock(fd, LOCK_UN));
    reap(child);
}

static void masks(void) {
    umask(027);
    close(MUST(open("a", O_CREAT | O_WRONLY, 0666)));
    mkdir("d", 0777);
    IN_CHILD(again("umask", ""));
    IN_CHILD(umask(0); close(MUST(open("b", O_CREAT | O_WRONLY, 0666))));
    IN_CHILD(execl("/bin/sh", "sh", "-c", "echo > c; umask 077; echo > e", NULL));
    const char *names[] = {"a", "d", "b", "c", "e"};
    for (int i = 0; i < 5; i++) {
        struct stat status = {0};
        stat(names[i], &status);
        say("%s %o", names[i], status.st_mode);
    }
}

static void opens_the_pipe(const char *path, int flags, char *data) {
    int fd = open(path, flags);
    if (flags == O_WRONLY) MUST(write(fd, data, strlen(data)));
    else peek(fd, 20);
    close(fd);
}

/* Both sides of a named pipe wait for each other, however they name it. */
static void pipes_with_names(void) {
    SAY(mkfifo("p", 0640));
    MUST(symlink("p", "link"));
    MUST(mkdir("d", 0755));
    MUST(symlink("../p", "d/up"));
    MUST(chdir("d"));
    char absolute[PATH_MAX + 8];
    snprintf(absolute, sizeof absolute, "%s/link", top);
    const char *names[] = {"../p", "up", "../link", absolute};
    for (int i = 0; i < 4; i++) {
        pid_t writer = fork();
        if (writer == 0) {
            opens_the_pipe(names[3 - i], O_WRONLY, "through it");
            _exit(0);
        }
        opens_the_pipe(names[i], O_RDONLY, NULL);
        reap(writer);
    }
    SAY(open("up", O_WRONLY | O_NONBLOCK));
    SAY(open("../link", O_RDONLY | O_NOFOLLOW));
    SAY(open("../p", O_WRONLY | O_CREAT | O_EXCL, 0600));
    int both = SAY(open("../p", O_RDWR | O_CREAT, 0600));
    MUST(write(both, "left", 4));
    struct stat s;
    SAY(fstat(both, &s));
    say("is a pipe %d", S_ISFIFO(s.st_mode));
    /* Another pipe with the same name, perhaps with the same inode number. */
    SAY(unlink("../p"));
    SAY(mkfifo("../p", 0600));
    SAY(open("../p", O_WRONLY | O_NONBLOCK));
    int other = SAY(open("../p", O_RDONLY | O_NONBLOCK));
    peek(other, 4);
    peek(both, 4);
    MUST(dup2(transcript, 1));
    pid_t child = fork();
    if (child == 0) {
        execlp("sh", "sh", "-c", "mkfifo q; (cat > out < q) & echo shell > q; wait; cat out; test -p q && echo pipe", NULL);
        _exit(9);
    }
    reap(child);
    /* A signal ends the waiting. */
    child = fork();
    if (child == 0) {
        alarm(1);
        open("q", O_RDONLY);
        _exit(8);
    }
    reap(child);
}

/* Names the working directory by its name in /proc. */
static void working_directory_by_its_name(void) {
    MUST(mkdir("d", 0755));
    MUST(chdir("d"));
    make("f", "text");
    MUST(symlink("/dev/null", "null"));
    char target[PATH_MAX] = {0}, name[64];
    MUST(readlink("/proc/self/cwd", target, sizeof target - 1));
    say("here is %s", target);
    snprintf(name, sizeof name, "/proc/%d/cwd", getppid());
    memset(target, 0, sizeof target);
    MUST(readlink(name, target, sizeof target - 1));
    say("our parent has a name %d", strncmp(target, top, strlen(top) - strlen(strrchr(top, '/'))) == 0);
    snprintf(name, sizeof name, "/proc/%d/cwd/f", getpid());
    say("by our number %d", access(name, R_OK));
    show("/proc/self/cwd/../d/f");
    struct stat s;
    SAY(lstat("/proc/self/cwd", &s));
    say("is a link %d", S_ISLNK(s.st_mode));
    SAY(stat("/proc/self/cwd/null", &s));
    say("is a device %d", S_ISCHR(s.st_mode));
    make("/proc/self/cwd/new", "new");
    show("new");
    SAY(unlink("/proc/self/cwd/new"));
    SAY(access("new", F_OK));
    SAY(chdir("/proc/self/cwd/.."));
    SAY(access("d/f", F_OK));
    MUST(dup2(transcript, 1));
    IN_CHILD(execlp("sh", "sh", "-c", "ls /proc/self/cwd/ /proc/self/cwd/d", NULL));
}

/* A process that waits to turn a shared lock into an exclusive one releases its own part first. */
static void turned_locks(void) {
    make("f", "");
    int a = MUST(open("f", O_RDWR)), b = MUST(open("f", O_RDWR)), ready[2], go[2];
    SAY(flock(a, LOCK_SH));
    SAY(flock(b, LOCK_SH));
    SAY(flock(a, LOCK_EX | LOCK_NB));
    SAY(flock(b, LOCK_EX | LOCK_NB));
    SAY(flock(b, LOCK_UN));
    SAY(flock(a, LOCK_UN));
    MUST(pipe(ready));
    MUST(pipe(go));
    pid_t children[2];
    char byte;
    for (int i = 0; i < 2; i++) {
        if ((children[i] = fork()) == 0) {
            int fd = MUST(open("f", O_RDWR));
            SAY(flock(fd, LOCK_SH));
            close(go[1]);
            MUST(write(ready[1], "", 1));
            read(go[0], &byte, 1);
            alarm(20);
            /* The order in which they end is unspecified. */
            _exit(flock(fd, LOCK_EX) == 0 ? 0 : errno);
        }
    }
    for (int i = 0; i < 2; i++) MUST(read(ready[0], &byte, 1));
    MUST(close(go[1]));
    for (int i = 0; i < 2; i++) reap(children[i]);
}

static void *nothing(void *argument) { return argument; }

static void *comes_and_goes(void *argument) {
    for (int i = 0; i < 500; i++) {
        pthread_t one;
        if (pthread_create(&one, NULL, nothing, NULL) == 0) pthread_join(one, NULL);
    }
    return argument;
}

/* Changes the user of all threads while some of them create new threads. */
static void users_of_threads(void) {
    pthread_t all[4];
    long failed = 0;
    MUST(close(MUST(open("f", O_RDWR | O_CREAT, 0644))));
    for (int i = 0; i < 4; i++) pthread_create(&all[i], NULL, comes_and_goes, NULL);
    for (int i = 0; i < 500; i++) failed += setgid(getgid()) != 0;
    for (int i = 0; i < 4; i++) pthread_join(all[i], NULL);
    say("%ld failed", failed);
}

/* A process that becomes a daemon is in the root directory, and on the null device. */
static void daemons(void) {
    make("f", "");
    for (int keeps = 0; keeps < 4; keeps++) {
        int ends[2];
        MUST(pipe(ends));
        pid_t child = fork();
        if (child == 0) {
            MUST(close(ends[0]));
            int fd = MUST(open("f", O_RDWR | O_APPEND));
            for (int i = 0; i < 3; i++) MUST(dup2(fd, i));
            SAY(daemon(keeps & 1, keeps >> 1));
            char here[PATH_MAX];
            say("in %s", getcwd(here, sizeof here));
            SAY(access("f", F_OK));
            SAY(write(1, "text", 4));
            struct stat status;
            MUST(fstat(0, &status));
            say("a device %d", S_ISCHR(status.st_mode));
            SAY(write(fd, "t", 1));
            _exit(0);
        }
        MUST(close(ends[1]));
        SAY(read(ends[0], &(char){0}, 1));
        reap(child);
        show("f");
    }
}

/* A child on a new terminal writes there, and no longer to the standard descriptors of its parent. */
static void terminals(void) {
    char text[16] = "";
    int fd = MUST(open("f", O_RDWR | O_CREAT, 0644)), terminal = -1, side = -1;
    for (int i = 0; i < 3; i++) MUST(dup2(fd, i));
    pid_t child = forkpty(&terminal, NULL, NULL, NULL);
    if (child == 0) _exit(write(1, "forked", 6) != 6);
    SAY(read(terminal, text, sizeof text - 1));
    say("%s", text);
    reap(child);
    MUST(openpty(&terminal, &side, NULL, NULL, NULL));
    child = fork();
    if (child == 0) {
        SAY(login_tty(side));
        _exit(write(2, "logged", 6) != 6);
    }
    SAY(read(terminal, text, sizeof text - 1));
    say("%s", text);
    reap(child);
    show("f");
}

static void *asks_where_it_is(void *ends) {
    char here[PATH_MAX];
    while (!*(volatile int *)ends) MUST(getcwd(here, sizeof here) ? 0 : -1);
    return ends;
}

/* Children are made while other threads ask for the working directory, and ask for it, too. */
static void forks_of_threads(void) {
    static volatile int ends;
    pthread_t all[2];
    for (int i = 0; i < 2; i++) pthread_create(&all[i], NULL, asks_where_it_is, (void *)&ends);
    int failed = 0;
    for (int i = 0; i < 200 && !failed; i++) {
        pid_t child = fork();
        if (child == 0) {
            alarm(20);
            char here[PATH_MAX];
            _exit(!getcwd(here, sizeof here));
        }
        int status;
        MUST(waitpid(child, &status, 0));
        failed += status != 0;
    }
    ends = 1;
    for (int i = 0; i < 2; i++) pthread_join(all[i], NULL);
    say("%d failed", failed);
}

static int reads(void *path) {
    show(path);
    return 3;
}

/* Children that share descriptors but no memory, and only use descriptors of their own. */
static void children_that_share_descriptors(void) {
    static char stack[1 << 18] __attribute__((aligned(16)));
    make("f", "0123456789");
    int fd = MUST(open("f", O_RDONLY));
    for (int i = 0; i < 2; i++) {
        reap(MUST(clone(reads, stack + sizeof stack, CLONE_FILES | SIGCHLD, "f")));
        peek(fd, 2);
        pid_t child = MUST(syscall(SYS_clone, CLONE_FILES | SIGCHLD, 0, 0, 0, 0));
        if (child == 0) _exit(reads("f"));
        reap(child);
        peek(fd, 2);
    }
}

static const struct test tests[] = {
    {"users-of-threads", users_of_threads},
    {"exec", every_exec},
    {"scripts-and-flags", scripts_and_flags},
    {"environments", environments},
    {"commands-without-environment", commands_without_environment},
    {"forks", forks},
    {"spawn", spawned},
    {"spawn-with-many-numbers", spawned_with_many_numbers},
    {"working-directory", working_directory},
    {"working-directory-by-name", working_directory_by_its_name},
    {"pipes", pipes_with_names},
    {"process-locks", process_locks},
    {"locks-duplicates", locks_and_failed_duplicates},
    {"locks-exec", locks_and_new_programs},
    {"file-locks", file_locks},
    {"turned-locks", turned_locks},
    {"lock-waits", waiting_for_locks},
    {"masks", masks},
    {"forks-of-threads", forks_of_threads},
    {"shared-descriptors", children_that_share_descriptors},
    {"daemons", daemons},
    {"terminals", terminals},
    {NULL, NULL},
};

int main(int count, char **arguments) { return run(count, arguments, tests); }
