/* A program's own SIGSYS handlers: for signals that others send, that it raises, and that its own filter
 * causes. Compiled for any libc. The output does not depend on time. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>

static volatile int came, on_other, code, masked, given;
static char other[1 << 16];
static sigjmp_buf out;

static void note(int signal, siginfo_t *info, void *context) {
    char here;
    sigset_t now;
    sigprocmask(SIG_BLOCK, NULL, &now);
    masked = sigismember(&now, SIGUSR1);
    came += signal == SIGSYS && context != NULL && getppid() > 0;
    on_other = &here >= other && &here < other + sizeof other;
    code = info->si_code;
    given = info->si_value.sival_int;
}

static void set(void (*handler)(int, siginfo_t *, void *), int flags) {
    struct sigaction action = {.sa_sigaction = handler, .sa_flags = SA_SIGINFO | flags};
    sigaddset(&action.sa_mask, SIGUSR1);
    sigaction(SIGSYS, &action, NULL);
}

static void end_of(pid_t child, const char *what) {
    int status;
    waitpid(child, &status, 0);
    printf("%s: %s %d\n", what, WIFSIGNALED(status) ? "ends by" : "exits", WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
    fflush(stdout);
}

/* Handlers run on the right stack with the right arguments, and the interrupted code goes on unchanged. */
static void raised(void) {
    stack_t stack = {.ss_sp = other, .ss_size = sizeof other}, none = {.ss_flags = SS_DISABLE};
    volatile double sum = 1.5;
    for (int how = 0; how < 3; how++) {
        set(note, SA_RESTART | (how ? SA_ONSTACK : 0));
        if (how == 2) sigaltstack(&stack, NULL);
        came = 0;
        for (int i = 0; i < 100; i++) {
            sum *= 1.01;
            raise(SIGSYS);
            sum /= 1.01;
        }
        sigset_t now;
        sigprocmask(SIG_BLOCK, NULL, &now);
        struct sigaction old;
        sigaction(SIGSYS, NULL, &old);
        printf("%d: %d came, on the other stack %d, by tkill %d, sum %.3f, blocked in it %d, and after it %d, kept %d\n", how, came,
               on_other, code == SI_TKILL, sum, masked, sigismember(&now, SIGUSR1), old.sa_sigaction == note);
    }
    sigqueue(getpid(), SIGSYS, (union sigval){.sival_int = 42});
    printf("queued %d with %d\n", code == SI_QUEUE, given);
    kill(getpid(), SIGSYS);
    printf("sent %d\n", code == SI_USER);
    sigaltstack(&none, NULL);
}

static void leave(int signal) {
    (void)signal;
    siglongjmp(out, 1);
}

static void left(void) {
    volatile int jumps = 0;
    signal(SIGSYS, leave);
    for (volatile int i = 0; i < 50; i++) {
        if (sigsetjmp(out, 1) == 0) raise(SIGSYS);
        else jumps++;
    }
    printf("left %d times\n", jumps);
}

static void *send_until_told(void *told) {
    while (!*(volatile int *)told) {
        kill(getpid(), SIGSYS);
        usleep(200);
    }
    return NULL;
}

static int use(int i) {
    char text[32], back[32] = "";
    struct stat status;
    int fd = open("sys", O_RDWR | O_CREAT, 0600), length = sprintf(text, "%d", i);
    int bad = fd < 0 || pwrite(fd, text, length, 0) != length || pread(fd, back, length, 0) != length || strcmp(text, back);
    return bad + (fstat(fd, &status) || access("/", F_OK) || close(fd));
}

/* Signals arrive in the middle of anything that the program does. */
static void while_files_are_used(int on_stack) {
    stack_t stack = {.ss_sp = other, .ss_size = sizeof other}, none = {.ss_flags = SS_DISABLE};
    if (on_stack) sigaltstack(&stack, NULL);
    set(note, SA_RESTART | (on_stack ? SA_ONSTACK : 0));
    volatile int told = 0;
    pthread_t sender;
    pthread_create(&sender, NULL, send_until_told, (void *)&told);
    int bad = 0;
    came = 0;
    for (int i = 0; i < 2000 || came < 20; i++) bad += use(i);
    told = 1;
    pthread_join(sender, NULL);
    printf("while files are used: %d bad\n", bad);
    sigaltstack(&none, NULL);
}

/* Sends `times` signals or, for 0, sends until `enough` have arrived. */
static void send_to(pid_t target, int times, volatile int *told, int enough) {
    for (int i = 0; times ? i < times : *told < enough; i++) {
        kill(target, SIGSYS);
        usleep(5000);
    }
}

/* Waits are restarted or fail, as the handler's flags say; also waits for file locks. */
static void what_waits(void) {
    int ends[2], lock_fd = open("lock", O_RDWR | O_CREAT, 0600);
    volatile int *told = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    for (int restarts = 0; restarts < 2; restarts++) {
        struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
        int times = restarts ? 10 : 0;
        *told = 0;
        set(note, restarts ? SA_RESTART : 0);
        if (pipe(ends)) return;
        pid_t parent = getpid(), child = fork();
        if (child == 0) {
            fcntl(lock_fd, F_SETLK, &lock);
            write(ends[1], "l", 1);
            send_to(parent, times, told, 1);
            if (restarts) write(ends[1], "x", 1);
            send_to(parent, times, told, 2);
            _exit(0);
        }
        char byte = 0;
        while (read(ends[0], &byte, 1) != 1) {
        }
        ssize_t got = read(ends[0], &byte, 1);
        printf("read %zd %s, %d\n", got, got < 0 ? strerror(errno) : "", came > 0);
        came = 0;
        *told = 1;
        int locked = fcntl(lock_fd, F_SETLKW, &lock);
        printf("lock %d %s, %d\n", locked, locked ? strerror(errno) : "", came > 0);
        *told = 2;
        int status;
        while (waitpid(child, &status, 0) < 0) {
        }
        lock.l_type = F_UNLCK;
        fcntl(lock_fd, F_SETLK, &lock);
        close(ends[0]);
        close(ends[1]);
    }
    close(lock_fd);
}

static void without_handlers(void) {
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        signal(SIGSYS, SIG_IGN);
        int bad = 0;
        for (int i = 0; i < 100; i++) bad += raise(SIGSYS) + use(i);
        _exit(bad);
    }
    end_of(child, "ignored");
    child = fork();
    if (child == 0) {
        signal(SIGSYS, SIG_DFL);
        raise(SIGSYS);
        _exit(0);
    }
    end_of(child, "without a handler");
    child = fork();
    if (child == 0) {
        set(note, SA_RESETHAND);
        raise(SIGSYS);
        if (came == 0) _exit(1);
        raise(SIGSYS);
        _exit(0);
    }
    came = 0;
    end_of(child, "once");
    child = fork();
    if (child == 0) {
        struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
        int fd = open("lock", O_RDWR | O_CREAT, 0600), ends[2];
        signal(SIGSYS, SIG_DFL);
        if (pipe(ends)) _exit(1);
        pid_t parent = getpid();
        if (fork() == 0) {
            fcntl(fd, F_SETLK, &lock);
            write(ends[1], "l", 1);
            usleep(50000);
            while (getppid() == parent && kill(parent, SIGSYS) == 0) usleep(5000);
            _exit(0);
        }
        char byte;
        read(ends[0], &byte, 1);
        fcntl(fd, F_SETLKW, &lock);
        _exit(0);
    }
    end_of(child, "in a wait for a lock");
}

#ifdef __x86_64__
static volatile int trapped, last;

/* Answers calls that the filter did not allow, as a sandbox does. */
static void on_trapped(int signal, siginfo_t *info, void *context) {
    (void)signal;
    trapped += info->si_code == 1;
    last = info->si_syscall;
    ((ucontext_t *)context)->uc_mcontext.gregs[REG_RAX] = 4711;
}

static void trap_calls(const int *numbers, int count) {
    /* As in linux/filter.h and linux/seccomp.h, which not every libc provides. */
    enum { LOAD = 0x20, IS = 0x15, RETURN = 0x06, TRAP = 0x30000, ALLOW = 0x7fff0000, FILTER = 2 };
    struct step {
        uint16_t code;
        uint8_t yes, no;
        uint32_t value;
    } steps[64] = {{LOAD, 0, 0, 0}};
    int length = 1;
    for (int i = 0; i < count; i++) {
        steps[length++] = (struct step){IS, 0, 1, numbers[i]};
        steps[length++] = (struct step){RETURN, 0, 0, TRAP};
    }
    steps[length++] = (struct step){RETURN, 0, 0, ALLOW};
    struct {
        unsigned short length;
        struct step *steps;
    } program = {length, steps};
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    prctl(PR_SET_SECCOMP, FILTER, &program);
}

static void filters(void) {
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        int file = open("before", O_RDWR | O_CREAT, 0600), numbers[] = {SYS_open, SYS_openat, SYS_getpriority, SYS_readlink, SYS_readlinkat};
        set(on_trapped, SA_NODEFER);
        trap_calls(numbers, sizeof numbers / sizeof *numbers);
        char text[8] = "";
        long got = syscall(SYS_getpriority, 0, 0);
        printf("getpriority %ld, trapped %d, its number %d\n", got, trapped, last == SYS_getpriority);
        const char *paths[] = {"/etc/passwd", "/none/none", "before"};
        for (int i = 0; i < 3; i++) {
            got = open(paths[i], O_RDONLY);
            printf("open of %s %ld, trapped %d\n", paths[i], got, trapped);
        }
        got = pwrite(file, "abc", 3, 0) + pread(file, text, 3, 0);
        printf("a file that was open: %ld %s\n", got, text);
        printf("getppid %d\n", getppid() > 0);
        fflush(stdout);
        _exit(3);
    }
    end_of(child, "with a filter");
    child = fork();
    if (child == 0) {
        int numbers[] = {SYS_getpriority};
        signal(SIGSYS, SIG_IGN);
        trap_calls(numbers, 1);
        syscall(SYS_getpriority, 0, 0);
        _exit(3);
    }
    end_of(child, "with a filter and no handler");
}

#else
static void filters(void) {}
#endif

int main(void) {
    setvbuf(stdout, NULL, _IOFBF, 1 << 16);
    raised();
    left();
    while_files_are_used(0);
    while_files_are_used(1);
    what_waits();
    without_handlers();
    filters();
    unlink("sys");
    unlink("lock");
    return 0;
}
