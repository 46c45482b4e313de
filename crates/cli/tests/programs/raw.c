/* Makes system calls without libc, and prints their results. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static long raw(long number, long a, long b, long c, long d, long e, long f)
{
    register long r10 asm("r10") = d;
    register long r8 asm("r8") = e;
    register long r9 asm("r9") = f;
    long result;
    asm volatile("syscall"
                 : "=a"(result)
                 : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                 : "rcx", "r11", "memory");
    return result;
}
#define CALL0(n) raw(n, 0, 0, 0, 0, 0, 0)
#define CALL1(n, a) raw(n, (long)(a), 0, 0, 0, 0, 0)
#define CALL2(n, a, b) raw(n, (long)(a), (long)(b), 0, 0, 0, 0)
#define CALL3(n, a, b, c) raw(n, (long)(a), (long)(b), (long)(c), 0, 0, 0)
#define CALL4(n, a, b, c, d) raw(n, (long)(a), (long)(b), (long)(c), (long)(d), 0, 0)
#define CALL6(n, a, b, c, d, e, f) \
    raw(n, (long)(a), (long)(b), (long)(c), (long)(d), (long)(e), (long)(f))

static int failed;
#define SAY(...) (printf(__VA_ARGS__), fflush(stdout))
static void expect(const char *what, long got, long wanted)
{
    SAY("%s: %ld\n", what, got);
    if (got != wanted) {
        SAY("  FAILED, wanted %ld\n", wanted);
        failed = 1;
    }
}

static volatile int handled;
static char file[4096];

/* Opens, reads and closes the file without libc. Returns the first byte, or the error. */
static long first_byte(void)
{
    char byte = 0;
    long fd = CALL3(SYS_open, file, O_RDONLY, 0);
    if (fd < 0)
        return fd;
    long got = CALL3(SYS_read, fd, &byte, 1);
    CALL1(SYS_close, fd);
    return got == 1 ? byte : got;
}

static void on_signal(int signal)
{
    (void)signal;
    handled += first_byte() == 'a' ? 1 : 100;
}

static void *thread(void *argument)
{
    expect("in a thread", first_byte(), 'a');
    return argument;
}

/* The program's own return from signal handlers. */
asm(".globl own_way_back\nown_way_back:\n mov $15, %eax\n syscall\n");
extern void own_way_back(void);
struct action { void (*handler)(int); unsigned long flags; void *restorer; uint64_t mask; };

static char stack[65536] __attribute__((aligned(16)));
static volatile int shared;
static int child_task(void)
{
    shared = first_byte() == 'a' ? 1 : 2;
    CALL1(SYS_exit, 0);
    return 0;
}

static int child_process(void)
{
    CALL1(SYS_exit_group, first_byte() == 'a' ? 15 : 8);
    return 0;
}

/* clone with a new stack, without libc: the child takes its function from that stack. */
static long clone_raw(unsigned long flags, int (*task)(void))
{
    void **top = (void **)(stack + sizeof stack - 64);
    top[0] = (void *)task;
    long result;
    asm volatile("syscall\n test %%rax, %%rax\n jnz 1f\n xor %%ebp, %%ebp\n pop %%rax\n call *%%rax\n 1:"
                 : "=a"(result)
                 : "a"(SYS_clone), "D"(flags), "S"(top), "d"(0)
                 : "rcx", "r11", "memory");
    return result;
}

/* Creates a child that shares memory and stack until it ends, which it does at once. */
static long clone_waited_for(long number, unsigned long first, unsigned long second, int *told)
{
    long result;
    asm volatile("syscall\n test %%rax, %%rax\n jnz 1f\n mov $231, %%eax\n mov $7, %%edi\n syscall\n 1:"
                 : "=a"(result), "+D"(first), "+S"(second)
                 : "a"(number), "d"(told)
                 : "rcx", "r11", "memory");
    return result;
}

/* The flags determine how the end of this kind of child is reported, and whether there is a pidfd for it. */
static void waited_for(void)
{
    struct { uint64_t flags, pid_fd, child_tid, parent_tid, exit_signal, stack, stack_bytes, tls; } how = {0};
    int pid_fd = -1, wait_status = 0;
    long child = clone_waited_for(SYS_clone, CLONE_VM | CLONE_VFORK | CLONE_PIDFD, 0, &pid_fd);
    expect("clone tells a descriptor of the child", pid_fd >= 0, 1);
    expect("whose end no signal tells", waitpid((pid_t)child, &wait_status, 0), -1);
    expect("and is waited for as such", waitpid((pid_t)child, &wait_status, __WCLONE) == child, 1);
    expect("with its status", WEXITSTATUS(wait_status), 7);
    close(pid_fd);
    pid_fd = -1;
    how.flags = CLONE_VM | CLONE_VFORK | CLONE_PIDFD;
    how.pid_fd = (uintptr_t)&pid_fd;
    how.exit_signal = SIGCHLD;
    child = clone_waited_for(SYS_clone3, (uintptr_t)&how, sizeof how, 0);
    if (child == -ENOSYS) /* a guest has no clone3 */
        return;
    expect("clone3, too", pid_fd >= 0, 1);
    expect("of a child", waitpid((pid_t)child, &wait_status, 0) == child, 1);
    expect("that ends", WEXITSTATUS(wait_status), 7);
    close(pid_fd);
}

int main(int argc, char **argv)
{
    struct stat status;
    char text[64], name[4200];
    int wait_status;
    if (argc < 2)
        return 2;
    snprintf(file, sizeof file, "%s/raw-file", argv[1]);
    long fd = CALL3(SYS_open, file, O_RDWR | O_CREAT | O_TRUNC, 0644);
    expect("open", fd >= 0, 1);
    expect("write", CALL3(SYS_write, fd, "abcdef", 6), 6);
    expect("lseek", CALL3(SYS_lseek, fd, 2, SEEK_SET), 2);
    expect("read", CALL3(SYS_read, fd, text, 2), 2);
    expect("what was read", text[0], 'c');
    expect("pread", CALL4(SYS_pread64, fd, text, 9, 4), 2);
    expect("pwrite", CALL4(SYS_pwrite64, fd, "XY", 2, 6), 2);
    expect("fstat", CALL2(SYS_fstat, fd, &status), 0);
    expect("size", status.st_size, 8);
    expect("stat", CALL2(SYS_stat, file, &status), 0);
    expect("mode", status.st_mode, S_IFREG | 0644);
    expect("stat of a missing file", CALL2(SYS_stat, "/nowhere/at/all", &status), -ENOENT);
    expect("ftruncate", CALL2(SYS_ftruncate, fd, 5), 0);
    long copy = CALL1(SYS_dup, fd);
    expect("dup", copy > fd, 1);
    expect("fcntl", CALL2(SYS_fcntl, copy, F_GETFL) & O_ACCMODE, O_RDWR);
    expect("the offset is one", CALL3(SYS_lseek, copy, 0, SEEK_CUR), 4);
    expect("dup2", CALL2(SYS_dup2, fd, 77), 77);
    char *mapped = (char *)CALL6(SYS_mmap, 0, 5, PROT_READ, MAP_PRIVATE, 77, 0);
    expect("mmap", (long)mapped > 0 ? mapped[4] : (long)mapped, 'e');
    expect("munmap", CALL2(SYS_munmap, mapped, 5), 0);
    expect("close", CALL1(SYS_close, 77), 0);
    expect("close again", CALL1(SYS_close, 77), -EBADF);
    expect("a bad descriptor", CALL3(SYS_read, 77, text, 1), -EBADF);
    CALL1(SYS_close, copy);
    CALL1(SYS_close, fd);

    snprintf(name, sizeof name, "%s/raw-directory", argv[1]);
    expect("mkdir", CALL2(SYS_mkdir, name, 0755), 0);
    expect("mkdir again", CALL2(SYS_mkdir, name, 0755), -EEXIST);
    long directory = CALL3(SYS_open, name, O_RDONLY | O_DIRECTORY, 0);
    expect("openat", CALL4(SYS_openat, directory, "inner", O_CREAT | O_WRONLY, 0600) > 0, 1);
    char entries[1024];
    expect("getdents64", CALL3(SYS_getdents64, directory, entries, sizeof entries) > 60, 1);
    expect("renameat", CALL4(SYS_renameat, directory, "inner", directory, "other"), 0);
    expect("unlinkat", CALL3(SYS_unlinkat, directory, "other", 0), 0);
    expect("chdir", CALL1(SYS_chdir, name), 0);
    long length = CALL2(SYS_getcwd, name, sizeof name);
    expect("getcwd", length, (long)strlen(argv[1]) + 15);
    expect("symlink", CALL2(SYS_symlink, "../raw-file", "link"), 0);
    expect("readlink", CALL3(SYS_readlink, "link", text, sizeof text), 11);
    expect("open by a relative path", CALL3(SYS_open, "link", O_RDONLY, 0) > 0, 1);
    expect("chdir back", CALL1(SYS_chdir, ".."), 0);
    /* A second argument means that this is under `towline run`, which refuses rings. */
    expect("io_uring_setup", argc < 3 || CALL2(SYS_io_uring_setup, 4, text) == -ENOSYS, 1);
    expect("io_setup", argc < 3 || CALL2(SYS_io_setup, 4, text) == -ENOSYS, 1);

    /* Local files. */
    expect("open of a local file", CALL3(SYS_open, "/etc/passwd", O_RDONLY, 0) > 0, 1);
    int ends[2];
    expect("pipe", CALL1(SYS_pipe, ends), 0);
    expect("write to a pipe", CALL3(SYS_write, ends[1], "p", 1), 1);
    expect("read from a pipe", CALL3(SYS_read, ends[0], text, 9), 1);
    expect("getpid", CALL0(SYS_getpid) == getpid(), 1);

    /* Through syscall(2). */
    fd = syscall(SYS_open, file, O_RDONLY);
    expect("syscall: open", fd >= 0, 1);
    expect("syscall: read", syscall(SYS_read, fd, text, 3), 3);
    expect("syscall: fstat", syscall(SYS_fstat, fd, &status), 0);
    expect("syscall: lseek", syscall(SYS_lseek, fd, 1, SEEK_SET), 1);
    expect("syscall: close", syscall(SYS_close, fd), 0);
    expect("syscall: close again", syscall(SYS_close, fd) == -1 ? errno : 0, EBADF);
    expect("syscall: unlink", syscall(SYS_unlink, "raw-directory/link"), 0);

    /* Processes and threads. */
    long child = CALL0(SYS_fork);
    if (child == 0)
        CALL1(SYS_exit_group, first_byte() == 'a' ? 7 : 8);
    expect("fork", child > 0 ? waitpid((pid_t)child, &wait_status, 0) == child : child, 1);
    expect("in the forked child", WEXITSTATUS(wait_status), 7);
    child = fork();
    if (child == 0)
        CALL1(SYS_exit_group, first_byte() == 'a' ? 9 : 8);
    waitpid((pid_t)child, &wait_status, 0);
    expect("in libc's forked child", WEXITSTATUS(wait_status), 9);
    child = syscall(SYS_fork);
    if (child == 0)
        CALL1(SYS_exit_group, first_byte() == 'a' ? 13 : 8);
    waitpid((pid_t)child, &wait_status, 0);
    expect("in a child by syscall", WEXITSTATUS(wait_status), 13);
    child = _Fork();
    if (child == 0)
        CALL1(SYS_exit_group, first_byte() == 'a' ? 14 : 8);
    waitpid((pid_t)child, &wait_status, 0);
    expect("in a child of _Fork", WEXITSTATUS(wait_status), 14);
    child = CALL6(SYS_clone, SIGCHLD, 0, 0, 0, 0, 0);
    if (child == 0)
        CALL1(SYS_exit_group, first_byte() == 'a' ? 10 : 8);
    waitpid((pid_t)child, &wait_status, 0);
    expect("in the cloned child", WEXITSTATUS(wait_status), 10);
    child = CALL0(SYS_vfork);
    if (child == 0) {
        char *arguments[] = {"sh", "-c", "exit 11", 0};
        CALL3(SYS_execve, "/bin/sh", arguments, environ);
        CALL1(SYS_exit_group, 12);
    }
    waitpid((pid_t)child, &wait_status, 0);
    expect("a child of vfork executes", WEXITSTATUS(wait_status), 11);
    waited_for();
    pthread_t other;
    pthread_create(&other, 0, thread, 0);
    pthread_join(other, 0);
    child = clone_raw(SIGCHLD, child_process);
    waitpid((pid_t)child, &wait_status, 0);
    expect("in a child on a stack of its own", WEXITSTATUS(wait_status), 15);
    child = clone_raw(CLONE_VM | SIGCHLD, child_task);
    waitpid((pid_t)child, &wait_status, 0);
    expect("a task on a stack of its own ends", WEXITSTATUS(wait_status), 0);
    expect("and has run", shared != 0, 1);

    /* Signals. */
    signal(SIGUSR1, on_signal);
    expect("kill", CALL2(SYS_kill, getpid(), SIGUSR1), 0);
    expect("handlers may call, too", handled, 1);
    struct action action = {on_signal, 0x04000000, (void *)own_way_back, 0};
    expect("rt_sigaction", CALL4(SYS_rt_sigaction, SIGUSR2, &action, 0, 8), 0);
    CALL2(SYS_kill, getpid(), SIGUSR2);
    expect("back from a handler by a way of its own", handled, 2);
    uint64_t all = ~0ul, old = 0;
    expect("rt_sigprocmask", CALL4(SYS_rt_sigprocmask, SIG_SETMASK, &all, &old, 8), 0);
    expect("with all signals blocked", first_byte(), 'a');
    CALL2(SYS_kill, getpid(), SIGUSR1);
    expect("a blocked signal waits", handled, 2);
    CALL4(SYS_rt_sigprocmask, SIG_SETMASK, &old, 0, 8);
    CALL0(SYS_getpid);
    expect("until it is let in", handled, 3);
    sigset_t set;
    sigfillset(&set);
    sigprocmask(SIG_BLOCK, &set, 0);
    expect("with all signals blocked by libc", first_byte(), 'a');
    sigprocmask(SIG_UNBLOCK, &set, 0);
    sigemptyset(&set);
    sigaddset(&set, SIGUSR1);
    sigprocmask(SIG_BLOCK, &set, 0);
    CALL2(SYS_kill, getpid(), SIGUSR1);
    sigfillset(&set);
    sigdelset(&set, SIGUSR1);
    expect("sigsuspend", sigsuspend(&set), -1);
    expect("its handler has all signals blocked", handled, 4);
    CALL2(SYS_kill, getpid(), SIGUSR1);
    expect("ppoll", ppoll(0, 0, 0, &set), -1);
    expect("its handler has them, too", handled, 5);
    uint64_t others = ~(1ul << (SIGUSR1 - 1));
    CALL2(SYS_kill, getpid(), SIGUSR1);
    expect("rt_sigsuspend", CALL2(SYS_rt_sigsuspend, &others, 8), -EINTR);
    expect("and its handler", handled, 6);
    struct { uint64_t *set; size_t bytes; } nested = {&others, 8};
    CALL2(SYS_kill, getpid(), SIGUSR1);
    expect("pselect6", CALL6(SYS_pselect6, 0, 0, 0, 0, 0, &nested), -EINTR);
    expect("and its handler", handled, 7);
    sigprocmask(SIG_UNBLOCK, &set, 0);
    sigemptyset(&set);
    sigaddset(&set, SIGUSR1);
    sigprocmask(SIG_UNBLOCK, &set, 0);
    signal(SIGSYS, on_signal);
    expect("with a handler of SIGSYS", first_byte(), 'a');
    expect("which was not called", handled, 7);
    raise(SIGSYS);
    expect("but is when it should be", handled, 8);
    static char small[16384];
    stack_t alternative = {small, 0, sizeof small}, found;
    expect("sigaltstack before", CALL2(SYS_sigaltstack, 0, &found), 0);
    expect("has none", found.ss_flags, SS_DISABLE);
    expect("sigaltstack", CALL2(SYS_sigaltstack, &alternative, 0), 0);
    expect("sigaltstack again", CALL2(SYS_sigaltstack, 0, &found), 0);
    expect("is what was set", found.ss_sp == small, 1);
    expect("with a short stack for signals", first_byte(), 'a');
    alternative.ss_flags = 64;
    expect("sigaltstack with an unknown flag", CALL2(SYS_sigaltstack, &alternative, 0), -EINVAL);
    expect("sigaltstack then", CALL2(SYS_sigaltstack, 0, &found), 0);
    expect("is unchanged", found.ss_sp == small && found.ss_flags == 0, 1);

    expect("rename", CALL2(SYS_rename, file, "moved"), 0);
    expect("unlink", CALL1(SYS_unlink, "moved"), 0);
    expect("rmdir", CALL1(SYS_rmdir, "raw-directory"), 0);
    SAY(failed ? "FAILED\n" : "all well\n");
    return failed;
}
