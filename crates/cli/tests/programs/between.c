/* Other threads and processes act in the middle of a call, at which ptrace holds a thread. The output does
 * not depend on time, but some pauses give errors the time to happen. */
#include "case.h"
#include <pthread.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/syscall.h>

/* Long enough for the process that notices closed files. */
static void settle(void) { usleep(150000); }

/* The system call at which a thread is held. */
struct place {
    int is_entry;
    long number, result;
};

static int pipes[3][2];

static void tell(int which, int value) { MUST(write(pipes[which][1], &value, sizeof value)); }

static int hear(int which) {
    int value;
    if (MUST(read(pipes[which][0], &value, sizeof value)) != sizeof value) _exit(96);
    return value;
}

/* Continues a held thread until the start or end of its next system call. Returns false if it has ended. */
static int step(pid_t thread, struct place *place) {
    static long number;
    for (int passed = 0;;) {
        int status;
        MUST(ptrace(PTRACE_SYSCALL, thread, NULL, (long)passed));
        MUST(waitpid(thread, &status, __WALL));
        if (!WIFSTOPPED(status)) return 0;
        passed = status >> 16 ? 0 : WSTOPSIG(status);
        if (passed != (SIGTRAP | 0x80)) continue;
        struct __ptrace_syscall_info call;
        MUST(ptrace(PTRACE_GET_SYSCALL_INFO, thread, sizeof call, &call));
        place->is_entry = call.op == PTRACE_SYSCALL_INFO_ENTRY;
        place->number = number = place->is_entry ? (long)call.entry.nr : number;
        place->result = place->is_entry ? 0 : (long)call.exit.rval;
        return 1;
    }
}

static void hold(pid_t thread) {
    int status;
    MUST(ptrace(PTRACE_SEIZE, thread, NULL, PTRACE_O_TRACESYSGOOD));
    MUST(ptrace(PTRACE_INTERRUPT, thread, NULL, NULL));
    MUST(waitpid(thread, &status, __WALL));
}

static void let_go(pid_t thread) { MUST(ptrace(PTRACE_DETACH, thread, NULL, NULL)); }

static void begin(void) {
    for (int i = 0; i < 3; i++) MUST(pipe(pipes[i]));
    make("first", "");
}

static int is_open(long number) {
#ifdef SYS_open
    if (number == SYS_open) return 1;
#endif
    return number == SYS_openat;
}

static void *opens(void *unused) {
    (void)unused;
    MUST(open("first", O_RDONLY));
    tell(0, gettid());
    hear(1);
    int fd = MUST(open("made", O_CREAT | O_RDWR, 0644));
    hear(1);
    SAY(write(fd, "text", 4));
    return NULL;
}

/* A thread is opening a file when another one forks; the child closes everything. */
static void forked(void) {
    begin();
    pid_t child = MUST(fork());
    if (child == 0) {
        pthread_t thread;
        pthread_create(&thread, NULL, opens, NULL);
        hear(2);
        pid_t other = MUST(fork());
        if (other == 0) {
            for (int fd = 3; fd < 60; fd++) close(fd);
            _exit(0);
        }
        reap(other);
        tell(1, 0);
        pthread_join(thread, NULL);
        _exit(0);
    }
    pid_t thread = hear(0);
    struct place place = {0};
    hold(thread);
    tell(1, 0);
    while (step(thread, &place) && (place.is_entry || !is_open(place.number))) {}
    tell(2, 0);
    settle();
    let_go(thread);
    reap(child);
    show("made");
}

static void nothing(int signal) { (void)signal; }

static int target, others[2];

static void *replaces(void *unused) {
    (void)unused;
    tell(0, gettid());
    hear(1);
    for (int i = 0; i < 4; i++) dup2(others[i % 2], target);
    getppid();
    return NULL;
}

/* Another file, remote or local, replaces a descriptor while another thread writes to it. */
static void replaced(void) {
    begin();
    pid_t child = MUST(fork());
    if (child == 0) {
        /* A handler that must be kept from running by a mask. */
        struct sigaction action = {.sa_handler = nothing, .sa_flags = SA_NODEFER};
        MUST(sigaction(SIGUSR1, &action, NULL));
        others[0] = MUST(open("second", O_CREAT | O_WRONLY | O_APPEND, 0644));
        others[1] = MUST(open("/dev/null", O_WRONLY));
        target = MUST(open("first", O_WRONLY | O_APPEND));
        pthread_t thread;
        pthread_create(&thread, NULL, replaces, NULL);
        while (hear(2)) tell(0, write(target, "x", 1) == 1 ? 0 : errno);
        _exit(0);
    }
    pid_t thread = hear(0);
    int failed = 0;
    struct place place = {0};
    hold(thread);
    tell(1, 0);
    while (step(thread, &place) && place.number != SYS_getppid) {
        tell(2, 1);
        int error = hear(0);
        if (error && !failed) say("write: %s", strerrorname_np(error));
        failed |= error;
    }
    let_go(thread);
    tell(2, 0);
    reap(child);
    say("written: %d", !failed);
    /* How much went to which file differs from run to run. */
    MUST(unlink("first"));
    MUST(unlink("second"));
}

static int is_dup2(long number) {
#ifdef SYS_dup2
    if (number == SYS_dup2) return 1;
#endif
    return number == SYS_dup3;
}

/* A process replaces a file's descriptor and is stopped right after that; others open files before it goes
 * on. */
static void gone(void) {
    enum { OTHERS = 40 };
    begin();
    pid_t child = MUST(fork());
    if (child == 0) {
        int saved = MUST(open("/dev/null", O_RDONLY)), fd = MUST(open("first", O_RDONLY));
        tell(0, 0);
        hear(1);
        MUST(dup2(saved, fd));
        settle();
        _exit(0);
    }
    int fds[OTHERS];
    struct place place = {0};
    hear(0);
    hold(child);
    tell(1, 0);
    int is_there = 0;
    while (!is_there && step(child, &place)) is_there = !place.is_entry && is_dup2(place.number);
    if (!is_there) {
        say("the child ended before");
        return;
    }
    settle();
    for (int i = 0; i < OTHERS; i++) fds[i] = MUST(open(i % 2 ? "new" : "other", O_CREAT | O_RDWR, 0644));
    let_go(child);
    reap(child);
    settle();
    for (int i = 0; i < OTHERS; i++) MUST(write(fds[i], "text", 4));
    show("new");
    show("other");
}

static void *writes(void *unused) {
    (void)unused;
    tell(0, gettid());
    hear(1);
    write(target, "late", 4);
    getppid();
    return NULL;
}

static int has_received(const struct place *place) {
    long number = place->number;
    return !place->is_entry && place->result > 0 &&
           (number == SYS_recvfrom || number == SYS_recvmsg || number == SYS_read || number == SYS_readv);
}

/* A thread has written to a file but does not know it yet, when another one closes the file and others open
 * theirs. */
static void late(void) {
    enum { OTHERS = 40 };
    begin();
    pid_t child = MUST(fork());
    if (child == 0) {
        target = MUST(open("first", O_WRONLY));
        IN_CHILD(); /* has the file, too */
        pthread_t thread;
        pthread_create(&thread, NULL, writes, NULL);
        hear(2);
        MUST(close(target));
        tell(0, 0);
        pthread_join(thread, NULL);
        _exit(0);
    }
    pid_t thread = hear(0);
    int fds[OTHERS];
    struct place place = {0};
    hold(thread);
    tell(1, 0);
    /* The first is the byte that it heard. */
    for (int heard = 0; heard < 2 && step(thread, &place) && place.number != SYS_getppid;) {
        heard += has_received(&place);
    }
    tell(2, 0);
    hear(0);
    settle();
    for (int i = 0; i < OTHERS; i++) fds[i] = MUST(open(i % 2 ? "new" : "other", O_CREAT | O_RDWR, 0644));
    let_go(thread);
    reap(child);
    for (int i = 0; i < OTHERS; i++) MUST(write(fds[i], "text", 4));
    show("first");
    show("new");
    show("other");
}

/* System calls that a process makes when it writes. */
static int is_writing(long number) {
    return number == SYS_write || number == SYS_socket || number == SYS_sendto || number == SYS_sendmsg;
}

/* A process is killed while it writes to a file that it shares, before anybody has waited for the process. */
static void killed(void) {
    begin();
    int fd = MUST(open("first", O_WRONLY));
    pid_t child = MUST(fork());
    if (child == 0) {
        tell(0, 0);
        hear(1);
        MUST(write(fd, "child", 5));
        _exit(0);
    }
    struct place place = {0};
    hear(0);
    hold(child);
    tell(1, 0);
    while (step(child, &place) && !(place.is_entry && is_writing(place.number))) {}
    MUST(kill(child, SIGKILL));
    siginfo_t how;
    do MUST(waitid(P_PID, child, &how, WEXITED | WNOWAIT | __WALL));
    while (how.si_code == CLD_TRAPPED);
    alarm(20);
    SAY(write(fd, "mine", 4));
    reap(child);
    show("first");
}

static int is_done;

static void *goes_on(void *unused) {
    (void)unused;
    while (!__atomic_load_n(&is_done, __ATOMIC_ACQUIRE)) MUST(pwrite(target, "text", 4, 0));
    return NULL;
}

/* A program uses numbers that the library may have taken, while one of its threads waits for answers. */
static void wanted(void) {
    enum { FIRST = 384, COUNT = 8, TURNS = 200 };
    begin();
    target = MUST(open("first", O_WRONLY));
    int null = MUST(open("/dev/null", O_RDWR));
    pthread_t thread;
    pthread_create(&thread, NULL, goes_on, NULL);
    for (int turn = 0; turn < TURNS; turn++) {
        for (int fd = FIRST; fd < FIRST + COUNT; fd++) MUST(dup2(null, fd));
        for (int fd = FIRST; fd < FIRST + COUNT; fd++) MUST(write(fd, "x", 1));
        for (int fd = FIRST; fd < FIRST + COUNT; fd++) MUST(close(fd));
        usleep(500);
    }
    __atomic_store_n(&is_done, 1, __ATOMIC_RELEASE);
    pthread_join(thread, NULL);
    show("first");
}

/* No descriptor is left for a file that is to be truncated or created. */
static void full(void) {
    begin();
    make("kept", "precious");
    close(MUST(open("first", O_RDONLY)));
    struct rlimit before, limit;
    MUST(getrlimit(RLIMIT_NOFILE, &before));
    limit = before;
    limit.rlim_cur = transcript + 1;
    int fds[512], count = 0;
    while (count < 512 && (fds[count] = dup(transcript)) >= 0 && fds[count] < transcript) count++;
    MUST(setrlimit(RLIMIT_NOFILE, &limit));
    while (dup(transcript) >= 0) {}
    SAY(open("kept", O_WRONLY | O_TRUNC));
    SAY(open("new", O_WRONLY | O_CREAT | O_EXCL, 0644));
    SAY(open(".", O_TMPFILE | O_RDWR, 0644));
    MUST(setrlimit(RLIMIT_NOFILE, &before));
    while (count > 0) close(fds[--count]);
    show("kept");
    show("new");
    SAY(open("new", O_WRONLY | O_CREAT | O_EXCL, 0644) >= 0);
    SAY(open("new", O_WRONLY | O_CREAT | O_EXCL, 0644));
    SAY(open("new", O_WRONLY | O_CREAT | O_EXCL, 0644));
}

static void name_of(int fd, char *path) { snprintf(path, 64, "/proc/%d/fd/%d", getpid(), fd); }

/* Opens another process's descriptor in a way that only the kernel understands. */
static int open_of(pid_t process, int fd, int flags) {
    char folder[64], name[16];
    snprintf(folder, sizeof folder, "/proc/%d/fd", process);
    snprintf(name, sizeof name, "%d", fd);
    int at = MUST(open(folder, O_RDONLY | O_DIRECTORY));
    int opened = MUST(openat(at, name, flags));
    close(at);
    return opened;
}

/* Others open this process's file by its name in /proc. */
static void looked_at(void) {
    enum { OTHERS = 40 };
    begin();
    char path[64], byte;
    int fd = MUST(open("first", O_RDWR)), fds[OTHERS];
    pid_t this = getpid();
    name_of(fd, path);
    MUST(write(fd, "one", 3));
    for (int turn = 0; turn < 3; turn++) {
        IN_CHILD({
            close(fd);
            if (turn < 2) {
                MUST(close(open_of(this, fd, turn ? O_RDWR : O_RDONLY)));
            } else {
                int again = MUST(open(path, O_RDWR));
                peek(again, 3);
                SAY(write(again, "here", 4));
            }
        });
        settle();
        for (int i = 0; turn == 0 && i < OTHERS; i++) {
            fds[i] = MUST(open(i % 2 ? "new" : "other", O_CREAT | O_RDWR, 0644));
        }
        SAY(write(fd, "more", 4));
    }
    show("first");
    show("new");
    for (int i = 0; i < OTHERS; i++) MUST(write(fds[i], "text", 4));
    show("new");
    /* Another process closes it last. */
    pid_t child = MUST(fork());
    if (child == 0) {
        close(fd);
        open_of(this, fd, O_RDONLY);
        tell(0, 0);
        hear(1);
        _exit(0);
    }
    hear(0);
    MUST(close(fd));
    settle();
    fd = MUST(open("first", O_RDWR));
    tell(1, 0);
    reap(child);
    settle();
    SAY(write(fd, "ten", 3));
    /* A file that others have opened in this way is inherited as ever. */
    IN_CHILD(close(fd); close(open_of(this, fd, O_RDONLY)));
    settle();
    MUST(dup2(fd, 60));
    IN_CHILD(again("write", "60"));
    SAY(read(fd, &byte, 1));
    show("first");
}

static const struct test tests[] = {
    {"forked", forked}, {"replaced", replaced}, {"gone", gone}, {"late", late},           {"killed", killed},
    {"wanted", wanted}, {"full", full},         {"looked at", looked_at}, {NULL, NULL},
};

int main(int count, char **arguments) { return run(count, arguments, tests); }
