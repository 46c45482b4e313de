/* Actions of programs with their own libc: threads of every kind, stacks for signals, memory by brk, waits
 * that signals end, their own name, and new programs. With "again": prints the file named last. */
#define _GNU_SOURCE
#include <alloca.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

static void put(const char *name, const char *text) {
    int fd = open(name, O_WRONLY | O_CREAT | O_TRUNC, 0644);
    if (fd < 0 || write(fd, text, strlen(text)) < 0 || close(fd)) printf("put %s: %s\n", name, strerror(errno));
}

static const char *get(const char *name) {
    static __thread char text[64];
    int fd = open(name, O_RDONLY);
    ssize_t length = read(fd, text, sizeof text - 1);
    close(fd);
    text[length < 0 ? 0 : length] = 0;
    return text;
}

static __thread int own;
static int together;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t over = PTHREAD_COND_INITIALIZER;

static void *work(void *argument) {
    long number = (long)argument;
    char name[16], text[16];
    own = number;
    snprintf(name, sizeof name, "t%ld", number);
    for (int i = 0; i < 20; i++) {
        snprintf(text, sizeof text, "%ld-%d", number, i);
        put(name, text);
        if (strcmp(get(name), text)) printf("thread %ld reads %s, not %s\n", number, get(name), text);
    }
    unlink(name);
    pthread_mutex_lock(&lock);
    together += own == number;
    pthread_cond_signal(&over);
    pthread_mutex_unlock(&lock);
    return (void *)(number * 2);
}

static int may_end;
static pthread_cond_t ends = PTHREAD_COND_INITIALIZER;

static void *stays(void *argument) {
    pthread_mutex_lock(&lock);
    while (!may_end) pthread_cond_wait(&ends, &lock);
    pthread_mutex_unlock(&lock);
    return argument;
}

/* Libc sends each thread a signal of its own. */
static void user_of_all_threads(void) {
    pthread_t all[4];
    may_end = 0;
    for (long i = 0; i < 4; i++) pthread_create(&all[i], NULL, stays, NULL);
    int result = setgid(getgid());
    printf("setgid %d, setuid %d\n", result, setuid(getuid()));
    fflush(stdout);
    pthread_mutex_lock(&lock);
    may_end = 1;
    pthread_cond_broadcast(&ends);
    pthread_mutex_unlock(&lock);
    for (long i = 0; i < 4; i++) pthread_join(all[i], NULL);
}

static void threads(void) {
    pthread_t all[8];
    long sum = 0;
    for (int round = 0; round < 5; round++) {
        for (long i = 0; i < 8; i++) pthread_create(&all[i], NULL, work, (void *)i);
        for (int i = 0; i < 8; i++) {
            void *result;
            pthread_join(all[i], &result);
            sum += (long)result;
        }
    }
    printf("joined %ld, together %d\n", sum, together);
    together = 0;
    pthread_attr_t detached;
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    for (long i = 0; i < 40; i++) {
        pthread_t one;
        pthread_create(&one, &detached, work, (void *)(i % 8 + 100 * i));
        pthread_mutex_lock(&lock);
        while (together <= i) pthread_cond_wait(&over, &lock);
        pthread_mutex_unlock(&lock);
    }
    printf("detached, together %d\n", together);
}

static char *stack;
static volatile sig_atomic_t came, was_on;

static void arrived(int signal) {
    char here;
    came++;
    was_on = stack && &here > stack && &here < stack + 65536;
    put("from-handler", signal == SIGALRM ? "alarm" : "other");
}

static void handle(int signal, int flags) {
    struct sigaction action = {.sa_handler = arrived, .sa_flags = flags};
    sigaction(signal, &action, NULL);
}

static void signals(void) {
    stack_t new = {.ss_sp = stack = malloc(65536), .ss_size = 65536}, old;
    printf("stack %d\n", sigaltstack(&new, &old));
    printf("before: %s\n", old.ss_flags & SS_DISABLE ? "none" : "some");
    handle(SIGUSR1, SA_ONSTACK);
    raise(SIGUSR1);
    printf("came %d, on its stack %d, wrote %s\n", came, was_on, get("from-handler"));
    new.ss_flags = 64;
    int refused = sigaltstack(&new, NULL);
    printf("unknown flag %d %s\n", refused, strerror(errno));
    raise(SIGUSR1);
    printf("came %d, on its stack %d\n", came, was_on);
    new.ss_flags = SS_DISABLE;
    printf("no stack %d\n", sigaltstack(&new, &old));
    raise(SIGUSR1);
    printf("came %d, on its stack %d\n", came, was_on);
    free(stack);
    stack = NULL;
    sigset_t set, none;
    sigemptyset(&set);
    sigemptyset(&none);
    sigaddset(&set, SIGUSR1);
    sigprocmask(SIG_BLOCK, &set, NULL);
    raise(SIGUSR1);
    printf("blocked, came %d\n", came);
    int result = sigsuspend(&none);
    printf("sigsuspend %d %s, came %d\n", result, strerror(errno), came);
    sigprocmask(SIG_UNBLOCK, &set, NULL);
    sigfillset(&set);
    sigdelset(&set, SIGALRM);
    handle(SIGALRM, 0);
    struct itimerval soon = {.it_value = {.tv_usec = 50000}};
    setitimer(ITIMER_REAL, &soon, NULL);
    result = sigsuspend(&set);
    printf("sigsuspend %d %s, came %d, wrote %s\n", result, strerror(errno), came, get("from-handler"));
    int ends[2];
    char byte;
    result = pipe(ends);
    setitimer(ITIMER_REAL, &soon, NULL);
    ssize_t length = read(ends[0], &byte, 1);
    printf("read %zd %s\n", length, strerror(errno));
    int pair[2];
    result = socketpair(AF_UNIX, SOCK_DGRAM, 0, pair);
    struct iovec part = {&byte, 1};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    setitimer(ITIMER_REAL, &soon, NULL);
    length = recvmsg(pair[0], &message, 0);
    printf("recvmsg %zd %s, came %d\n", length, strerror(errno), came);
    mkfifo("fifo", 0600);
    (void)result;
    /* Waits for a lock that another process has. */
    int fd = open("locked", O_RDWR | O_CREAT, 0600);
    struct flock all = {.l_type = F_WRLCK};
    int ready[2];
    result = pipe(ready);
    pid_t child = fork();
    if (child == 0) {
        fcntl(fd, F_SETLK, &all);
        result = write(ready[1], "r", 1);
        pause();
        _exit(0);
    }
    length = read(ready[0], &byte, 1);
    setitimer(ITIMER_REAL, &soon, NULL);
    result = fcntl(fd, F_SETLKW, &all);
    printf("lock %d %s, came %d\n", result, strerror(errno), came);
    handle(SIGALRM, SA_RESTART);
    setitimer(ITIMER_REAL, &soon, NULL);
    kill(child, SIGTERM);
    result = fcntl(fd, F_SETLKW, &all);
    printf("lock %d\n", result);
    int status;
    while (waitpid(child, &status, 0) != child) {}
    printf("child ended by %d\n", WTERMSIG(status));
    while (came < 9) usleep(1000);
    signal(SIGALRM, SIG_DFL);
}

/* Opening a named pipe waits for the other side; a handler ends the wait or not. */
static void waits(void) {
    struct itimerval often = {.it_value = {.tv_usec = 5000}, .it_interval = {.tv_usec = 5000}}, never = {0};
    printf("pipe %d\n", mkfifo("pipe", 0600));
    handle(SIGALRM, SA_ONSTACK);
    stack_t new = {.ss_sp = stack = malloc(65536), .ss_size = 65536}, old;
    sigaltstack(&new, NULL);
    setitimer(ITIMER_REAL, &often, NULL);
    int fd = open("pipe", O_RDONLY);
    printf("open %d %s, on its stack %d\n", fd, strerror(errno), was_on);
    setitimer(ITIMER_REAL, &never, NULL);
    sigaltstack(NULL, &old);
    printf("the stack is %s\n", old.ss_sp == stack && old.ss_flags == 0 ? "there" : "gone");
    handle(SIGALRM, SA_RESTART);
    fflush(stdout);
    came = 0;
    pid_t parent = getpid(), child = fork();
    if (child == 0) {
        for (int i = 0; i < 5; i++) {
            usleep(5000);
            kill(parent, SIGALRM);
        }
        _exit(write(open("pipe", O_WRONLY), "text", 4) == 4 ? 6 : 1);
    }
    char text[8] = "";
    fd = open("pipe", O_RDONLY);
    ssize_t length = read(fd, text, sizeof text);
    printf("read %zd %s, some came %d\n", length, text, came > 0);
    int status;
    waitpid(child, &status, 0);
    printf("exits %d\n", WEXITSTATUS(status));
    close(fd);
    unlink("pipe");
    new.ss_flags = SS_DISABLE;
    sigaltstack(&new, NULL);
    free(stack);
    stack = NULL;
    signal(SIGALRM, SIG_DFL);
}

/* Calls for messages that do not wait, or not for ever. */
static void messages(void) {
    char byte = 0;
    struct iovec part = {&byte, 1};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    int pair[2], ends[2];
    printf("pairs %d %d\n", socketpair(AF_UNIX, SOCK_DGRAM, 0, pair), pipe(ends));
    ssize_t length = recvmsg(ends[0], &message, 0);
    printf("from a pipe %zd %s\n", length, strerror(errno));
    struct timeval limit = {.tv_usec = 50000};
    setsockopt(pair[0], SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    length = recvmsg(pair[0], &message, 0);
    printf("in time %zd %s\n", length, strerror(errno));
    struct mmsghdr list = {.msg_hdr = message};
    length = recvmmsg(pair[0], &list, 1, 0, NULL);
    printf("of several %zd %s\n", length, strerror(errno));
    setsockopt(pair[1], SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    int sent = 0;
    while (sendmsg(pair[1], &message, 0) == 1) sent++;
    printf("until it is full: %s, %s\n", sent > 0 ? "some" : "none", strerror(errno));
    length = recvmsg(pair[0], &message, 0);
    printf("one of them %zd\n", length);
    int internet = socket(AF_INET, SOCK_DGRAM, 0);
    length = recvmsg(internet, &message, MSG_ERRQUEUE);
    printf("an error %zd %s\n", length, strerror(errno));
    int stream[2];
    printf("streams %d\n", socketpair(AF_UNIX, SOCK_STREAM, 0, stream));
    length = recvmsg(stream[0], &message, MSG_OOB);
    printf("urgent %zd\n", length);
    for (int i = 0; i < 2; i++) close(pair[i]), close(ends[i]), close(stream[i]);
    close(internet);
}

static void memory(void) {
    char *end = (char *)syscall(SYS_brk, 0);
    printf("brk %s\n", syscall(SYS_brk, end + (1 << 20)) == (long)end + (1 << 20) ? "good" : "bad");
    memset(end, 7, 1 << 20);
    printf("shorter %s\n", syscall(SYS_brk, end + 4096) == (long)end + 4096 ? "good" : "bad");
    printf("still %d, %s\n", end[4095], syscall(SYS_brk, 0) == (long)end + 4096 ? "there" : "moved");
    printf("back %s\n", syscall(SYS_brk, end) == (long)end ? "good" : "bad");
    long far = 600L << 20;
    printf("far %s\n", syscall(SYS_brk, end + far) == (long)end + far ? "good" : "bad");
    end[far - 1] = 7;
    printf("and back %s\n", syscall(SYS_brk, end) == (long)end ? "good" : "bad");
    struct rlimit before, limit;
    getrlimit(RLIMIT_DATA, &before);
    limit = before;
    limit.rlim_cur = 64 << 20;
    setrlimit(RLIMIT_DATA, &limit);
    printf("limited %s\n", syscall(SYS_brk, end + far) == (long)end ? "good" : "bad");
    setrlimit(RLIMIT_DATA, &before);
    for (int i = 0; i < 200; i++) free(malloc(i * 10000));
    put("m", "mapped text");
    int fd = open("m", O_RDWR);
    char *text = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    printf("%.11s\n", text);
    memcpy(text, "MAPPED", 6);
    munmap(text, 4096);
    close(fd);
    printf("%s\n", get("m"));
}

/* Children are made while another thread moves the end of the heap, and ask for it. */
static volatile int moves = 1;
static void *moves_heap(void *end) {
    while (moves) syscall(SYS_brk, (char *)end + (1 << 20)), syscall(SYS_brk, end);
    return NULL;
}

static void heap_of_children(void) {
    char *end = (char *)syscall(SYS_brk, 0);
    pthread_t other;
    int good = 0;
    pthread_create(&other, NULL, moves_heap, end);
    for (int i = 0; i < 100; i++) {
        pid_t child = fork();
        if (child == 0) _exit(syscall(SYS_brk, 0) >= (long)end ? 5 : 6);
        int status = 0;
        for (int wait = 0; waitpid(child, &status, WNOHANG) == 0; wait++) {
            if (wait == 20000) kill(child, SIGKILL), moves = 0;
            usleep(1000);
        }
        if (!moves) break;
        good += WEXITSTATUS(status) == 5;
    }
    moves = 0;
    pthread_join(other, NULL);
    printf("%d children have a heap\n", good);
}

static void programs(char *self) {
    char name[4096] = "";
    ssize_t length = readlink("/proc/self/exe", name, sizeof name - 1);
    char *last = strrchr(self, '/');
    printf("own name %s\n", length > 0 && !strcmp(strrchr(name, '/'), last ? last : self) ? "good" : name);
    int fd = open("/proc/self/exe", O_RDONLY);
    printf("own program %s\n", read(fd, name, 4) == 4 && !memcmp(name, "\177ELF", 4) ? "good" : "bad");
    struct stat by_name, by_path;
    printf("%d %d\n", stat("/proc/self/exe", &by_name), stat(self, &by_path));
    printf("%s\n", by_name.st_ino == by_path.st_ino ? "the same" : "others");
    close(fd);
    fflush(stdout);
    handle(SIGUSR2, SA_RESTART);
    handle(SIGWINCH, SA_RESTART);
    sigset_t one;
    sigemptyset(&one);
    sigaddset(&one, SIGWINCH);
    sigprocmask(SIG_BLOCK, &one, NULL);
    for (int how = 0; how < 3; how++) {
        pid_t child = how == 1 ? vfork() : fork();
        if (child == 0) {
            char *again[] = {self, "again", "m", NULL};
            char *none[] = {NULL};
            if (how == 2)
                execve("/proc/self/exe", again, none);
            else
                execv(self, again);
            _exit(99);
        }
        int status;
        waitpid(child, &status, 0);
        printf("child exits %d\n", WEXITSTATUS(status));
        fflush(stdout);
    }
    sigprocmask(SIG_UNBLOCK, &one, NULL);
    printf("system %d\n", system("cat < m; echo; echo from the shell > s"));
    printf("%s", get("s"));
    FILE *shell = popen("cat s", "r");
    while (fgets(name, sizeof name, shell)) printf("popen: %s", name);
    printf("pclose %d\n", pclose(shell));
}

static void spawn_one(const char *program, const char *opens) {
    char *again[] = {"again", "again", "m", NULL}, *none[] = {NULL};
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    if (opens) posix_spawn_file_actions_addopen(&actions, 9, opens, O_RDONLY, 0);
    pid_t child = -1;
    int status = 0, failed = posix_spawn(&child, program, &actions, NULL, again, none);
    posix_spawn_file_actions_destroy(&actions);
    if (!failed) waitpid(child, &status, 0);
    printf("spawn %s: %d\n", strerror(failed), WEXITSTATUS(status));
    int left = waitpid(-1, &status, WNOHANG);
    printf("children left: %s\n", left == -1 && errno == ECHILD ? "none" : "some");
}

/* The call returns why a program cannot be executed, and leaves no child behind. */
static void *spawns(void *self) {
    spawn_one(self, NULL);
    spawn_one("m", NULL);
    spawn_one(".", NULL);
    spawn_one("/nonexistent/program", NULL);
    spawn_one("there-is/none", NULL);
    spawn_one(self, "m");
    spawn_one(self, "none");
    return NULL;
}

/* Executes a program without a name, or by one that is gone when the program starts. */
static void by_descriptor(char *self) {
    char *again[] = {self, "again", "m", NULL}, *none[] = {NULL}, name[64];
    char *last = strrchr(self, '/'), folder[4096];
    snprintf(folder, sizeof folder, "%.*s", (int)(last - self), self);
    for (int how = 0; how < 5; how++) {
        fflush(stdout);
        pid_t child = fork();
        if (child == 0) {
            int fd = open(how == 2 || how == 3 ? folder : self, O_RDONLY | O_CLOEXEC);
            if (how == 0) fexecve(fd, again, none);
            if (how == 1) {
                snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
                execve(name, again, none);
            }
            if (how == 2) syscall(SYS_execveat, fd, last + 1, again, none, 0);
            if (how == 3) syscall(SYS_execveat, fd, last + 1, again, none, AT_SYMLINK_NOFOLLOW);
            if (how == 4) {
                static char bytes[1 << 16];
                int copy = syscall(SYS_memfd_create, "copy", 1 /* MFD_CLOEXEC */);
                for (ssize_t got; (got = read(fd, bytes, sizeof bytes)) > 0;) write(copy, bytes, got);
                fexecve(copy, again, none);
            }
            printf("%d: %s\n", how, strerror(errno));
            exit(99);
        }
        int status;
        waitpid(child, &status, 0);
        printf("by descriptor %d: %d\n", how, WEXITSTATUS(status));
    }
}

/* The child of a vfork leaves a value in its parent's stack frame. */
static int vfork_fails(void) {
    volatile int error = 0;
    char *none[] = {NULL};
    pid_t child = vfork();
    if (child == 0) {
        execve("/nonexistent/program", none, none);
        error = errno;
        _exit(1);
    }
    int status;
    waitpid(child, &status, 0);
    return error;
}

static int ends_at_once(void *status) { return *(int *)status; }

/* A process that shares handlers, memory and descriptors, and its own stack. */
static void clones(void) {
    static char own_stack[65536] __attribute__((aligned(16)));
    int status = 5, flags = CLONE_VM | CLONE_SIGHAND | CLONE_FS | CLONE_FILES | SIGCHLD;
    pid_t child = clone(ends_at_once, own_stack + sizeof own_stack, flags, &status);
    printf("clone %s\n", child > 0 ? "good" : strerror(errno));
    if (child > 0) waitpid(child, &status, 0);
    printf("which exits %d, then %s\n", WEXITSTATUS(status), get("m"));
}

/* A child opens a pipe that another thread of its parent opens meanwhile. Returns why that failed. */
static void *opens_pipe(void *name) {
    usleep(100000);
    int fd = open(name, O_WRONLY);
    if (fd < 0) return strerror(errno);
    close(fd);
    return NULL;
}

static void spawns_with_pipe(char *self) {
    pthread_t other;
    printf("mkfifo %d\n", mkfifo("way", 0600));
    pthread_create(&other, NULL, opens_pipe, "way");
    spawn_one(self, "way");
    void *why;
    pthread_join(other, &why);
    printf("pipe of a child: %s\n", why ? (char *)why : "open");
    unlink("way");
}

int main(int count, char **arguments) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (count > 2 && !strcmp(arguments[1], "deep")) {
        /* Uses this many MiB of stack, from the top down. */
        long bytes = atol(arguments[2]) << 20;
        volatile char *stack = alloca(bytes);
        for (long at = bytes - 1; at > 0; at -= 4096) stack[at] = 1;
        return puts("deep") < 0;
    }
    if (count > 1 && !strcmp(arguments[1], "again")) {
        printf("again with %d: %s\n", count, get(arguments[count - 1]));
        sigset_t blocked;
        sigprocmask(SIG_BLOCK, NULL, &blocked);
        for (int signal = 1; signal < 32; signal++)
            if (sigismember(&blocked, signal)) printf("%d is blocked\n", signal);
        if (getenv("TOWLINE_BLOCKED")) printf("it is told more than it should\n");
        return 7;
    }
    threads();
    user_of_all_threads();
    signals();
    waits();
    messages();
    memory();
    heap_of_children();
    programs(arguments[0]);
    spawns(arguments[0]);
    pthread_t spawner;
    pthread_create(&spawner, NULL, spawns, arguments[0]);
    pthread_join(spawner, NULL);
    spawns_with_pipe(arguments[0]);
    clones();
    by_descriptor(arguments[0]);
    printf("vfork: %s\n", strerror(vfork_fails()));
    if (fork() == 0) {
        threads();
        printf("%s\n", get("m"));
        exit(3);
    }
    int status;
    wait(&status);
    printf("child exits %d\n", WEXITSTATUS(status));
    return 0;
}
