/* Children of `vfork`, which use their parent's memory until they execute a program or end. Whatever they do
 * meanwhile, the parent goes on as before and sees what they left in its variables. */
#include "case.h"
#include <pthread.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/time.h>

/* Runs a block in a vfork child and waits for it. */
#define VFORKED(...)              \
    do {                          \
        pid_t vforked = vfork();  \
        if (vforked == 0) {       \
            __VA_ARGS__;          \
            _exit(0);             \
        }                         \
        reap(vforked);            \
    } while (0)

static volatile int told;

static int until[2];
static pid_t waiters[100];
static volatile int forking;

/* Forks children that live until the other end of a pipe is closed. */
static void *forks(void *unused) {
    for (int i = 0; i < 100; i++) {
        waiters[i] = MUST(fork());
        if (waiters[i] == 0) {
            char byte;
            close(until[1]);
            _exit(read(until[0], &byte, 1) != 0);
        }
        usleep(1000);
    }
    forking = 0;
    return unused;
}

/* Neither `vfork` nor `posix_spawn` waits for children that another thread forks meanwhile. */
static void beside_forks(void) {
    pthread_t thread;
    posix_spawn_file_actions_t actions;
    char *arguments[] = {"true", NULL};
    make("file", "of the directory");
    MUST(pipe(until));
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 0, "file", O_RDONLY, 0);
    forking = 1;
    if (pthread_create(&thread, NULL, forks, NULL)) _exit(95);
    int made = 0, status, wrong = 0;
    for (; forking || made < 20; made += 2) {
        pid_t child = vfork();
        if (child == 0) _exit(7);
        wrong += waitpid(child, &status, 0) != child || WEXITSTATUS(status) != 7;
        wrong += posix_spawnp(&child, "true", &actions, NULL, arguments, environ) != 0;
        wrong += waitpid(child, &status, 0) != child || status != 0;
    }
    say("wrong %d", wrong);
    pthread_join(thread, NULL);
    close(until[1]);
    for (int i = 0; i < 100; i++) wrong += waitpid(waiters[i], &status, 0) != waiters[i] || status != 0;
    say("wrong %d", wrong);
}

static void fails_to_execute(void) {
    char *arguments[] = {"none", NULL};
    make("plain", "no program");
    VFORKED(execv("./none", arguments); told = errno; _exit(127));
    say("told %s", strerrorname_np(told));
    VFORKED(execv("/none/none", arguments); told = errno; _exit(126));
    say("told %s", strerrorname_np(told));
    VFORKED(execvp("none-at-all", arguments); told = errno; _exit(125));
    say("told %s", strerrorname_np(told));
    VFORKED(execv("./plain", arguments); told = errno; _exit(124));
    say("told %s", strerrorname_np(told));
}

static void redirects(void) {
    int out = MUST(open("out", O_RDWR | O_CREAT, 0644)), other = MUST(open("other", O_RDWR | O_CREAT, 0644));
    MUST(write(other, "abcdef", 6));
    MUST(lseek(other, 1, SEEK_SET));
    VFORKED(dup2(out, 1); close(out); close(other); execlp("echo", "echo", "one", NULL));
    VFORKED(dup2(out, 1); dup2(other, 0); close(out); close(other); execlp("cat", "cat", NULL));
    show("out");
    say("other at %ld", (long)lseek(other, 0, SEEK_CUR));
    VFORKED(dup2(other, out); dup2(out, 17); peek(17, 3); again("peek", "17"));
    SAY(fcntl(17, F_GETFD));
    SAY(write(out, "!", 1));
    SAY(close(out));
    SAY(close(out));
    VFORKED(int fd = open("made", O_WRONLY | O_CREAT, 0600); write(fd, "by the child", 12); dup2(fd, 20);
            close(fd); again("write", "20"));
    show("made");
    SAY(fcntl(20, F_GETFD));
    SAY(lseek(other, 0, SEEK_SET));
    peek(other, 6);
}

static void closes(void) {
    make("f", "0123456789");
    int fds[4];
    for (int i = 0; i < 4; i++) fds[i] = MUST(open("f", O_RDWR));
    int twice = MUST(dup(fds[0]));
    VFORKED(close_range(3, 150, 0); told = fcntl(fds[1], F_GETFD) < 0 ? errno : 0);
    say("told %s", strerrorname_np(told));
    for (int i = 0; i < 4; i++) peek(fds[i], 2);
    peek(twice, 2);
    VFORKED(for (int i = 0; i < 4; i++) close(fds[i]); open("f", O_RDONLY); again("peek", "3"));
    SAY(close(fds[0]));
    peek(twice, 2);
    SAY(close(twice));
    peek(twice, 2);
    int again_open = MUST(open("f", O_RDONLY));
    peek(again_open, 4);
    /* The child does not own the locks of this process, which stay when it closes the file. */
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    SAY(fcntl(fds[1], F_SETLK, &lock));
    VFORKED(close(fds[1]); close(fds[2]));
    IN_CHILD(again("lock", "f"));
    VFORKED(again("lock", "f"));
}

static volatile sig_atomic_t came;

static void on_signal(int signal) { came = signal; }

static void surroundings(void) {
    char here[PATH_MAX];
    MUST(mkdir("d", 0755));
    make("d/f", "in d");
    make("f", "in top");
    signal(SIGUSR1, on_signal);
    umask(027);
    VFORKED(chdir("d"); umask(077); signal(SIGUSR1, SIG_IGN); signal(SIGUSR2, on_signal); again("cwd", "f"));
    say("at %s", getcwd(here, sizeof here));
    show("f");
    raise(SIGUSR1);
    say("came %s", sigabbrev_np(came));
    struct sigaction known;
    sigaction(SIGUSR2, NULL, &known);
    say("SIGUSR2 is as it was: %d", known.sa_handler == SIG_DFL);
    make("masked", "");
    struct stat s;
    stat("masked", &s);
    say("mode %o", s.st_mode & 0777);
    VFORKED(again("umask", ""));
    VFORKED(chdir("/"); say("in /: %d", open("d/f", O_RDONLY)); again("cwd", "none"));
    show("d/f");
    MUST(chdir("d"));
    VFORKED(chdir(".."); show("d/f"));
    show("f");
}

static void masks(void) {
    sigset_t set, old;
    sigemptyset(&set);
    sigaddset(&set, SIGUSR1);
    signal(SIGUSR1, on_signal);
    VFORKED(sigprocmask(SIG_BLOCK, &set, NULL); kill(getpid(), SIGUSR1); told = came);
    say("told %d", told);
    sigprocmask(SIG_BLOCK, NULL, &old);
    say("blocked %d", sigismember(&old, SIGUSR1));
    VFORKED(kill(getpid(), SIGUSR1); told = came);
    say("told %s", sigabbrev_np(told));
    came = 0;
    sigprocmask(SIG_BLOCK, &set, NULL);
    VFORKED(sigprocmask(SIG_BLOCK, NULL, &old); told = sigismember(&old, SIGUSR1); kill(getppid(), SIGUSR1));
    say("blocked %d came %d", told, came);
    sigprocmask(SIG_UNBLOCK, &set, NULL);
    say("came %s", sigabbrev_np(came));
    VFORKED(kill(getpid(), SIGKILL));
    VFORKED(signal(SIGUSR1, SIG_DFL); raise(SIGUSR1));
    came = 0;
    raise(SIGUSR1);
    say("came %s", sigabbrev_np(came));
}

/* Killed at any moment while it uses files; each time in a process that has had no child before. */
static void killed(void) {
    make("f", "0123456789");
    int fd = MUST(open("f", O_RDWR));
    for (int turn = 0; turn < 30; turn++) {
        pid_t child = fork();
        if (child == 0) {
            char text[4] = {0};
            struct stat s;
            pid_t vforked = vfork();
            if (vforked == 0) {
                struct itimerval soon = {.it_value = {.tv_usec = 1 + turn * 200}};
                setitimer(ITIMER_REAL, &soon, NULL);
                for (;;) {
                    int again = open("f", O_RDONLY);
                    read(again, text, 3);
                    close(again);
                    stat("none", &s);
                    chdir(".");
                }
            }
            int how;
            waitpid(vforked, &how, 0);
            int good = WIFSIGNALED(how) && WTERMSIG(how) == SIGALRM;
            good += pread(fd, text, 3, 4) == 3 && strcmp(text, "456") == 0;
            int more = open("f", O_RDONLY);
            good += more >= 0 && stat("f", &s) == 0 && s.st_size == 10 && close(more) == 0;
            _exit(good);
        }
        int how;
        waitpid(child, &how, 0);
        if (!WIFEXITED(how) || WEXITSTATUS(how) != 3) say("turn %d: %x", turn, how);
    }
    say("done");
}

static void *waits(void *word) {
    while (!*(volatile int *)word) usleep(1000);
    return NULL;
}

static void with_others(void) {
    make("f", "0123456789");
    int fd = MUST(open("f", O_RDWR));
    VFORKED(again("peek", "3"));
    static volatile int end;
    pthread_t thread;
    pthread_create(&thread, NULL, waits, (void *)&end);
    VFORKED(dup2(fd, 9); close(fd); again("peek", "9"));
    end = 1;
    pthread_join(thread, NULL);
    VFORKED(again("peek", "3"));
    char *mapped = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    mapped[0] = 'X';
    VFORKED(close(fd); execlp("true", "true", NULL));
    MUST(munmap(mapped, 4096));
    show("f");
    DIR *stream = opendir(".");
    VFORKED(execlp("true", "true", NULL));
    say("stream %d", readdir(stream) != NULL);
    closedir(stream);
}

static void one_in_the_other(void) {
    make("f", "0123456789");
    int fd = MUST(open("f", O_RDONLY));
    VFORKED(
        pid_t inner = vfork();
        if (inner == 0) {
            dup2(fd, 8);
            close(fd);
            again("peek", "8");
        }
        int how; waitpid(inner, &how, 0); told = WEXITSTATUS(how); peek(fd, 3));
    say("told %d", told);
    peek(fd, 3);
}

static void many(void) {
    make("f", "0123456789");
    int fd = MUST(open("f", O_RDONLY)), good = 0;
    for (int i = 0; i < 200; i++) {
        pid_t child = vfork();
        if (child == 0) {
            dup2(fd, 0);
            close(fd);
            execl("/bin/true", "true", NULL);
            _exit(1);
        }
        int how;
        waitpid(child, &how, 0);
        good += how == 0;
        if (i % 50 == 0) {
            int other = open("f", O_RDONLY);
            good += other >= 0 && close(other) == 0;
        }
    }
    say("good %d", good);
    peek(fd, 3);
}

static const struct test tests[] = {
    {"fails_to_execute", fails_to_execute},
    {"beside_forks", beside_forks},
    {"redirects", redirects},
    {"closes", closes},
    {"surroundings", surroundings},
    {"masks", masks},
    {"killed", killed},
    {"with_others", with_others},
    {"one_in_the_other", one_in_the_other},
    {"many", many},
    {NULL, NULL},
};

int main(int count, char **arguments) { return run(count, arguments, tests); }
