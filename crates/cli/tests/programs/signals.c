/* Signal handlers that run while files are used. The output does not depend on time: only counts that are
 * certain, and what the program is told about its handlers. */
#include "case.h"
#include <pthread.h>
#include <setjmp.h>
#include <sys/file.h>
#include <sys/syscall.h>
#include <sys/time.h>

static volatile sig_atomic_t count, wrong, sum, last;

static void count_one(int signal) {
    (void)signal;
    count++;
}

/* Makes some calls with files in the working directory. */
static void use_files(void) {
    struct stat status;
    char text[8];
    if (stat("f", &status) != 0 || status.st_size != 5) wrong++;
    int fd = open("f", O_RDWR);
    if (fd < 0 || read(fd, text, 5) != 5 || memcmp(text, "hello", 5) != 0) wrong++;
    if (pwrite(fd, "hello", 5, 0) != 5 || close(fd) != 0) wrong++;
    if (stat("none", &status) != -1 || errno != ENOENT) wrong++;
}

static void on_queued(int signal, siginfo_t *info, void *context) {
    (void)signal;
    (void)context;
    if (info->si_code != SI_QUEUE) wrong++;
    if (info->si_value.sival_int <= last) wrong++;
    last = info->si_value.sival_int;
    sum += info->si_value.sival_int;
    count++;
}

static void queued_signals_all_come(void) {
    make("f", "hello");
    struct sigaction action = {.sa_sigaction = on_queued, .sa_flags = SA_SIGINFO | SA_RESTART};
    MUST(sigaction(SIGRTMIN + 3, &action, NULL));
    pid_t target = getpid(), child = fork();
    if (child == 0) {
        for (int value = 1; value <= 300; value++) {
            union sigval sent = {.sival_int = value};
            while (sigqueue(target, SIGRTMIN + 3, sent) != 0) usleep(1000);
            if (value % 8 == 0) usleep(500);
        }
        _exit(0);
    }
    int status, rounds = 0;
    while (waitpid(child, &status, WNOHANG) == 0 || rounds < 20) {
        use_files();
        rounds++;
    }
    use_files();
    say("%d came, %d in all, %d wrong", (int)count, (int)sum, (int)wrong);
}

static void on_timer(int signal) {
    (void)signal;
    int before = errno;
    use_files();
    errno = before;
    count++;
}

static void start_timer(long us) {
    struct itimerval often = {{0, us}, {0, us}};
    MUST(setitimer(ITIMER_REAL, &often, NULL));
}

static void handlers_use_files(void) {
    make("f", "hello");
    struct sigaction action = {.sa_handler = on_timer, .sa_flags = SA_RESTART};
    MUST(sigaction(SIGALRM, &action, NULL));
    start_timer(700);
    while (count < 200) use_files();
    start_timer(0);
    say("enough: %d, %d wrong", count >= 200, (int)wrong);
}

static sigjmp_buf back;

static void on_timer_jumps(int signal) {
    (void)signal;
    siglongjmp(back, 1);
}

static void handlers_jump(void) {
    make("f", "hello");
    struct sigaction action = {.sa_handler = on_timer_jumps};
    MUST(sigaction(SIGALRM, &action, NULL));
    /* The timer fires once for each jump, so that no handler jumps out of the middle of another one's calls,
     * which would leave files open. */
    volatile int jumps = 0;
    while (jumps < 60) {
        struct stat status;
        struct itimerval once = {{0, 0}, {0, 300 + jumps * 13}};
        if (sigsetjmp(back, 1) == 0) {
            MUST(setitimer(ITIMER_REAL, &once, NULL));
            for (;;)
                if (stat("f", &status) != 0) wrong++;
        }
        jumps++;
    }
    sigset_t mask;
    sigprocmask(SIG_BLOCK, NULL, &mask);
    say("%d jumps, %d wrong, blocked %d", jumps, (int)wrong, sigismember(&mask, SIGALRM));
    use_files();
    say("%d wrong", (int)wrong);
}

/* Waits for a lock that a child holds for a while: with all three functions, and with the program's own
 * system calls. */
enum way { RANGE, WHOLE, LOCKF, RAW, RAW_WHOLE, WAYS };
static const char *const ways[] = {"F_SETLKW", "flock", "lockf", "raw F_SETLKW", "raw flock"};

static long raw_call(long number, long a, long b, long c) {
#ifdef __x86_64__
    long result;
    __asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c) : "rcx", "r11", "memory");
    if (result < 0 && result > -4096) {
        errno = -result;
        return -1;
    }
    return result;
#else
    return syscall(number, a, b, c);
#endif
}

static int lock(enum way way, int fd, int wait) {
    struct flock range = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    switch (way) {
    case RANGE: return fcntl(fd, wait ? F_SETLKW : F_SETLK, &range);
    case RAW: return raw_call(SYS_fcntl, fd, wait ? F_SETLKW : F_SETLK, (long)&range);
    case RAW_WHOLE: return raw_call(SYS_flock, fd, LOCK_EX | (wait ? 0 : LOCK_NB), 0);
    case WHOLE: return flock(fd, LOCK_EX | (wait ? 0 : LOCK_NB));
    default: return lockf(fd, wait ? F_LOCK : F_TLOCK, 0);
    }
}

/* Starts a child that holds the lock until it is told to end. */
static pid_t holder(enum way way, int *tell) {
    int held[2], end[2];
    char byte;
    MUST(pipe(held));
    MUST(pipe(end));
    pid_t child = MUST(fork());
    if (child == 0) {
        close(end[1]);
        int fd = MUST(open("f", O_RDWR));
        MUST(lock(way, fd, 0));
        MUST(write(held[1], "", 1));
        read(end[0], &byte, 1);
        _exit(0);
    }
    MUST(read(held[0], &byte, 1));
    close(held[0]);
    close(held[1]);
    close(end[0]);
    *tell = end[1];
    return child;
}

static struct sigaction set_anew;

/* Sets the alarm again and again, since the first may come before the wait. */
static void on_alarm_comes_again(int signal) {
    (void)signal;
    int before = errno;
    struct itimerval soon = {{0, 0}, {0, 10000}};
    use_files();
    count++;
    sigaction(SIGALRM, &set_anew, NULL);
    setitimer(ITIMER_REAL, &soon, NULL);
    errno = before;
}

static int to_close = -1;

/* Ends the holder at the third signal. */
static void on_third_ends_holder(int signal) {
    (void)signal;
    use_files();
    if (++count == 3) {
        close(to_close);
        start_timer(0);
    }
}

static void waits_for_locks_end(void) {
    make("f", "hello");
    const int flags[] = {0, SA_RESETHAND, SA_NODEFER, SA_ONSTACK};
    const char *const kinds[] = {"plain", "reset", "again", "on its stack"};
    stack_t stack = {.ss_sp = malloc(1 << 16), .ss_size = 1 << 16};
    MUST(sigaltstack(&stack, NULL));
    for (enum way way = 0; way < WAYS; way++) {
        int tell;
        pid_t child = holder(way, &tell);
        int fd = MUST(open("f", O_RDWR));
        for (int kind = 0; kind < 4; kind++) {
            /* The wait fails with EINTR. */
            struct sigaction action = {.sa_handler = on_alarm_comes_again, .sa_flags = flags[kind]};
            struct itimerval soon = {{0, 0}, {0, 10000}};
            set_anew = action;
            MUST(sigaction(SIGALRM, &action, NULL));
            count = 0;
            MUST(setitimer(ITIMER_REAL, &soon, NULL));
            int result = lock(way, fd, 1), error = errno;
            start_timer(0);
            say("%s, %s: %d %s, came %d, %d wrong", ways[way], kinds[kind], result, strerrorname_np(error),
                count > 0, (int)wrong);
            /* The handler leaves by a jump, again and again. */
            action.sa_handler = on_timer_jumps;
            volatile int jumps = 0;
            while (jumps < 3) {
                MUST(sigaction(SIGALRM, &action, NULL));
                if (sigsetjmp(back, 1) == 0) {
                    MUST(setitimer(ITIMER_REAL, &soon, NULL));
                    say("%s: %d", ways[way], lock(way, fd, 1));
                }
                jumps++;
                use_files();
            }
            sigset_t mask;
            sigprocmask(SIG_BLOCK, NULL, &mask);
            say("%s, %s: %d jumps, %d wrong, blocked %d", ways[way], kinds[kind], jumps, (int)wrong,
                sigismember(&mask, SIGALRM));
        }
        /* The wait is restarted until the holder releases the lock. */
        struct sigaction action = {.sa_handler = on_third_ends_holder, .sa_flags = SA_RESTART};
        MUST(sigaction(SIGALRM, &action, NULL));
        count = 0;
        to_close = tell;
        start_timer(10000);
        int result = lock(way, fd, 1);
        int status;
        MUST(waitpid(child, &status, 0));
        say("%s, restarted: %d, enough %d, %d wrong", ways[way], result, count >= 3, (int)wrong);
        /* No abandoned wait still waits, or holds the lock. */
        MUST(close(fd));
        child = holder(way, &tell);
        close(tell);
        MUST(waitpid(child, &status, 0));
    }
}

static void other(int signal) { (void)signal; }

static const char *name_of(void *handler) {
    if (handler == (void *)SIG_DFL) return "default";
    if (handler == (void *)SIG_IGN) return "ignored";
    if (handler == (void *)SIG_ERR) return "error";
    if (handler == (void *)count_one) return "count_one";
    if (handler == (void *)on_queued) return "on_queued";
    if (handler == (void *)other) return "other";
    return "unknown";
}

static void ask(int signal) {
    struct sigaction now;
    MUST(sigaction(signal, NULL, &now));
    say("%s: %s, flags %x, masks USR2 %d", sigabbrev_np(signal), name_of((void *)now.sa_handler),
        (unsigned)now.sa_flags & ~0x04000000u, sigismember(&now.sa_mask, SIGUSR2));
}

#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
static void dispositions_are_told(void) {
    make("f", "hello");
    ask(SIGUSR1);
    struct sigaction action = {.sa_handler = count_one}, old;
    sigaddset(&action.sa_mask, SIGUSR2);
    const int flags[] = {0, SA_RESTART, SA_RESETHAND, SA_NODEFER, SA_ONSTACK, SA_RESTART | SA_NODEFER};
    for (int i = 0; i < 6; i++) {
        action.sa_flags = flags[i];
        MUST(sigaction(SIGUSR1, &action, &old));
        say("before: %s, flags %x", name_of((void *)old.sa_handler), (unsigned)old.sa_flags & ~0x04000000u);
        ask(SIGUSR1);
        count = 0;
        MUST(raise(SIGUSR1));
        use_files();
        say("came %d", (int)count);
        ask(SIGUSR1);
    }
    action.sa_sigaction = on_queued;
    action.sa_flags = SA_SIGINFO;
    MUST(sigaction(SIGUSR1, &action, NULL));
    ask(SIGUSR1);
    say("signal: %s", name_of((void *)signal(SIGUSR1, count_one)));
    ask(SIGUSR1);
    say("signal: %s", name_of((void *)signal(SIGUSR1, SIG_IGN)));
    say("signal: %s", name_of((void *)signal(SIGUSR1, other)));
    say("sysv_signal: %s", name_of((void *)sysv_signal(SIGUSR1, count_one)));
    ask(SIGUSR1);
    say("sigset: %s", name_of((void *)sigset(SIGUSR1, other)));
    ask(SIGUSR1);
    say("siginterrupt: %d", siginterrupt(SIGUSR1, 0));
    ask(SIGUSR1);
    say("siginterrupt: %d", siginterrupt(SIGUSR1, 1));
    ask(SIGUSR1);
    say("signal: %s", name_of((void *)signal(SIGUSR1, SIG_DFL)));
    ask(SIGUSR1);
    SAY(sigaction(SIGKILL, &action, NULL));
    SAY(sigaction(99, &action, NULL));
    SAY(sigaction(0, &action, NULL));
    say("signal: %s", name_of((void *)signal(SIGKILL, other)));
    ask(SIGKILL);
    IN_CHILD(signal(SIGTERM, count_one); signal(SIGTERM, SIG_DFL); use_files(); raise(SIGTERM));
    say("%d wrong", (int)wrong);
}

static void masks_hold(void) {
    make("f", "hello");
    signal(SIGUSR1, count_one);
    sigset_t set, pending;
    sigemptyset(&set);
    sigaddset(&set, SIGUSR1);
    MUST(sigprocmask(SIG_BLOCK, &set, NULL));
    MUST(kill(getpid(), SIGUSR1));
    for (int i = 0; i < 20; i++) use_files();
    MUST(sigpending(&pending));
    say("came %d, pending %d", (int)count, sigismember(&pending, SIGUSR1));
    MUST(sigprocmask(SIG_UNBLOCK, &set, NULL));
    say("came %d", (int)count);
    /* A new program starts with the mask of this one. */
    signal(SIGALRM, count_one);
    start_timer(500);
    while (count < 50) use_files();
    IN_CHILD(sigset_t mask; use_files(); sigprocmask(SIG_BLOCK, NULL, &mask);
             say("in a child: blocked %d", sigismember(&mask, SIGALRM)));
    start_timer(0);
    int status = system("test $(($(sed -n 's/^SigBlk:.*\\(.\\{8\\}\\)$/0x\\1/p' /proc/self/status) & 0x2000)) = 0");
    say("in a new program: %d, %d wrong", status, (int)wrong);
}

static volatile int over;

static void *uses(void *argument) {
    while (!over) use_files();
    return argument;
}

static void threads_are_signalled(void) {
    make("f", "hello");
    struct sigaction action = {.sa_handler = on_timer};
    MUST(sigaction(SIGUSR1, &action, NULL));
    pthread_t threads[3];
    for (int i = 0; i < 3; i++) MUST(-pthread_create(&threads[i], NULL, uses, NULL));
    while (count < 150) {
        for (int i = 0; i < 3; i++) MUST(-pthread_kill(threads[i], SIGUSR1));
        usleep(2000);
    }
    over = 1;
    for (int i = 0; i < 3; i++) pthread_join(threads[i], NULL);
    say("%d wrong", (int)wrong);
}

static void looks_at_file(int signal) {
    (void)signal;
    int before = errno;
    struct stat status;
    if (stat("f", &status) != 0 || status.st_size != 5) wrong++;
    errno = before;
}

static void *forks(void *unused) {
    for (int i = 0; i < 1500; i++) {
        int status = 0;
        pid_t child = fork();
        if (child == 0) _exit(3);
        while (waitpid(child, &status, 0) < 0 && errno == EINTR) continue;
        if (WEXITSTATUS(status) != 3) wrong++;
    }
    __atomic_fetch_add(&count, 1, __ATOMIC_RELAXED);
    return unused;
}

/* Also at the moments at which libc holds the lock that other forks need. */
static void handlers_run_while_threads_fork(void) {
    make("f", "hello");
    struct sigaction action = {.sa_handler = looks_at_file, .sa_flags = SA_RESTART};
    MUST(sigaction(SIGUSR1, &action, NULL));
    pthread_t threads[3];
    for (int i = 0; i < 3; i++) pthread_create(threads + i, NULL, forks, NULL);
    for (int i = 0; count < 3; i++) {
        pthread_kill(threads[i % 3], SIGUSR1);
        usleep(20);
    }
    for (int i = 0; i < 3; i++) pthread_join(threads[i], NULL);
    say("wrong %d", wrong);
}

static volatile int has_begun;

static void *reads_on(void *unused) {
    char text[8];
    for (int fd = MUST(open("f", O_RDONLY));; has_begun = 1)
        if (pread(fd, text, 5, 0) != 5) wrong++;
    return unused;
}

static void *waits_on(void *unused) {
    struct flock lock = {.l_type = F_WRLCK};
    int fd = MUST(open("f", O_RDWR));
    has_begun = 1;
    fcntl(fd, F_SETLKW, &lock);
    return unused;
}

static void looks_and_counts(int signal) {
    looks_at_file(signal);
    count++;
}

/* The first handler of a process is set while a thread of it uses files, and runs in that thread. */
static void first_handler(void *(*work)(void *), int pause_us) {
    pthread_t thread;
    MUST(-pthread_create(&thread, NULL, work, NULL));
    while (!has_begun) usleep(100);
    usleep(pause_us);
    signal(SIGUSR1, looks_and_counts);
    pthread_kill(thread, SIGUSR1);
    while (!count) usleep(100);
    _exit(wrong ? 1 : 0);
}

static void first_handlers_come_late(void) {
    struct flock lock = {.l_type = F_WRLCK};
    int bad = 0;
    make("f", "hello");
    int fd = MUST(open("f", O_RDWR));
    MUST(fcntl(fd, F_SETLKW, &lock));
    for (int turn = 0; turn < 24; turn++) {
        int status;
        pid_t child = fork();
        if (child == 0) {
            alarm(20);
            if (turn % 8 == 0) first_handler(waits_on, 100000);
            first_handler(reads_on, turn * 37);
        }
        MUST(waitpid(child, &status, 0));
        bad += status != 0;
    }
    say("%d bad", bad);
}

static const struct test tests[] = {
    {"queued", queued_signals_all_come},
    {"files", handlers_use_files},
    {"jumps", handlers_jump},
    {"locks", waits_for_locks_end},
    {"dispositions", dispositions_are_told},
    {"masks", masks_hold},
    {"threads", threads_are_signalled},
    {"forks", handlers_run_while_threads_fork},
    {"late", first_handlers_come_late},
    {NULL, NULL},
};

int main(int count, char **arguments) { return run(count, arguments, tests); }
