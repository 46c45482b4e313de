/* Locks of processes that end while they hold them, while they wait for them, and at the moment when they get
 * them. Only counts are printed. */
#include "case.h"
#include <sys/file.h>

enum way { RANGE, OPEN_FILE, WHOLE, WAYS };
static const char *const ways[] = {"process", "open file", "flock"};

static int lock(enum way way, int fd, int type, int wait) {
    struct flock range = {.l_type = type, .l_whence = SEEK_SET};
    if (way == RANGE) return fcntl(fd, wait ? F_SETLKW : F_SETLK, &range);
    if (way == OPEN_FILE) return fcntl(fd, wait ? F_OFD_SETLKW : F_OFD_SETLK, &range);
    return flock(fd, (type == F_WRLCK ? LOCK_EX : LOCK_UN) | (wait ? 0 : LOCK_NB));
}

/* Another process locks the file. Returns 0, or why it cannot. */
static int tried(enum way way, int wait) {
    pid_t child = MUST(fork());
    if (child == 0) {
        alarm(60);
        int fd = MUST(open("f", O_RDWR));
        _exit(lock(way, fd, F_WRLCK, wait) == 0 ? 0 : errno);
    }
    int status;
    MUST(waitpid(child, &status, 0));
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

/* Pauses for a short time, different on each call. */
static void pause_a_bit(int most_us) {
    static unsigned state = 1;
    state = state * 1103515245 + 12345;
    usleep((state >> 8) % most_us);
}

/* A process that learns that a file was closed finds the closer's locks gone, through its own connections. */
static void files_are_closed(void) {
    int ask[2], told[2];
    make("f", "hello");
    for (enum way way = OPEN_FILE; way < WAYS; way++) {
        MUST(pipe(ask));
        MUST(pipe(told));
        pid_t other = MUST(fork());
        if (other == 0) {
            char byte;
            close(ask[1]);
            int fd = MUST(open("f", O_RDWR));
            while (read(ask[0], &byte, 1) == 1) {
                byte = lock(way, fd, F_WRLCK, 0) == 0;
                if (byte) MUST(lock(way, fd, F_UNLCK, 0));
                MUST(write(told[1], &byte, 1));
            }
            _exit(0);
        }
        int good = 0, rounds = 1500;
        for (int round = 0; round < rounds; round++) {
            char byte = 0;
            int fd = MUST(open("f", O_RDWR));
            MUST(lock(way, fd, F_WRLCK, 0));
            MUST(close(fd));
            MUST(write(ask[1], &byte, 1));
            MUST(read(told[0], &byte, 1));
            good += byte;
        }
        say("%s, closed: %d of %d", ways[way], good, rounds);
        close(ask[0]), close(ask[1]), close(told[0]), close(told[1]);
        MUST(waitpid(other, NULL, 0));
    }
}

static void holders_end(void) {
    make("f", "hello");
    for (enum way way = 0; way < WAYS; way++) {
        int good = 0, rounds = 60;
        for (int round = 0; round < rounds; round++) good += tried(way, 0) == 0;
        say("%s: %d of %d", ways[way], good, rounds);
        /* As with flock(1): a child that also had the descriptor has ended before. */
        for (int round = good = 0; round < rounds; round++) {
            pid_t child = MUST(fork());
            if (child == 0) {
                int fd = MUST(open("f", O_RDWR)), status;
                MUST(lock(way, fd, F_WRLCK, 0));
                pid_t inner = MUST(fork());
                if (inner == 0) execl("/bin/true", "true", NULL);
                MUST(waitpid(inner, &status, 0));
                _exit(0);
            }
            int status;
            MUST(waitpid(child, &status, 0));
            good += status == 0 && tried(way, 0) == 0;
        }
        say("%s, with children: %d of %d", ways[way], good, rounds);
    }
}

/* After a process is killed, no other sees its lock or finds it taken. */
static void holders_are_killed(void) {
    make("f", "hello");
    int told[2], status;
    char byte;
    MUST(pipe(told));
    for (enum way way = 0; way < WAYS; way++) {
        int untold = 0, got = 0, rounds = 40;
        for (int round = 0; round < rounds; round++) {
            pid_t child = MUST(fork());
            if (child == 0) {
                int own = MUST(open("f", O_RDWR));
                MUST(lock(way, own, F_WRLCK, 0));
                MUST(write(told[1], "", 1));
                pause();
            }
            MUST(read(told[0], &byte, 1));
            kill(child, SIGKILL);
            MUST(waitpid(child, &status, 0));
            int fd = MUST(open("f", O_RDWR));
            struct flock range = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
            if (way != WHOLE) MUST(fcntl(fd, way == RANGE ? F_GETLK : F_OFD_GETLK, &range));
            untold += way == WHOLE || range.l_type == F_UNLCK;
            MUST(close(fd));
            got += tried(way, 0) == 0;
        }
        say("%s: not told %d, got %d of %d", ways[way], untold, got, rounds);
    }
}

/* Starts a process that waits for the lock, with this descriptor or one of its own. */
static pid_t waiter(enum way way, int fd) {
    pid_t child = MUST(fork());
    if (child == 0) {
        if (fd == -1) fd = MUST(open("f", O_RDWR));
        _exit(lock(way, fd, F_WRLCK, 1) == 0 ? 0 : 1);
    }
    return child;
}

static void waiters_are_killed(void) {
    make("f", "hello");
    int fd = MUST(open("f", O_RDWR)), other = MUST(open("f", O_RDWR)), status;
    for (enum way way = 0; way < WAYS; way++) {
        int good = 0, rounds = 40;
        for (int round = 0; round < rounds; round++) {
            MUST(lock(way, fd, F_WRLCK, 0));
            pid_t waits[2] = {waiter(way, -1), waiter(way, way == RANGE ? -1 : other)};
            pause_a_bit(round % 2 ? 3000 : 30000);
            for (int i = 0; i < 2; i++) {
                kill(waits[i], SIGKILL);
                MUST(waitpid(waits[i], &status, 0));
            }
            MUST(lock(way, fd, F_UNLCK, 0));
            good += tried(way, 0) == 0;
        }
        say("%s: %d of %d", ways[way], good, rounds);
    }
}

static void waiters_are_killed_when_they_get_it(void) {
    make("f", "hello");
    int fd = MUST(open("f", O_RDWR)), other = MUST(open("f", O_RDWR)), status;
    for (enum way way = 0; way < WAYS; way++) {
        int good = 0, rounds = 30;
        for (int round = 0; round < rounds; round++) {
            MUST(lock(way, fd, F_WRLCK, 0));
            pid_t first = waiter(way, -1), second = waiter(way, way == RANGE ? -1 : other);
            pause_a_bit(20000);
            MUST(lock(way, fd, F_UNLCK, 0));
            pause_a_bit(1000);
            kill(first, SIGKILL);
            kill(second, SIGKILL);
            MUST(waitpid(first, &status, 0));
            MUST(waitpid(second, &status, 0));
            /* The second one's lock belongs to the open file, which this process shares. */
            if (way != RANGE) MUST(lock(way, other, F_UNLCK, 0));
            good += tried(way, 1) == 0;
        }
        say("%s: %d of %d", ways[way], good, rounds);
    }
}

static volatile sig_atomic_t came;

static void on_alarm(int signal) {
    (void)signal;
    came++;
}

/* A signal ends the wait at the moment when the lock is released: the call's result says who has the lock. */
static void waits_are_cut_when_they_end(void) {
    make("f", "hello");
    int fd = MUST(open("f", O_RDWR)), status, told[2];
    char byte;
    MUST(pipe(told));
    struct sigaction action = {.sa_handler = on_alarm};
    MUST(sigaction(SIGUSR1, &action, NULL));
    for (enum way way = 0; way < WAYS; way++) {
        int good = 0, rounds = 60;
        for (int round = 0; round < rounds; round++) {
            pid_t parent = getpid(), child = MUST(fork());
            if (child == 0) {
                int own = MUST(open("f", O_RDWR));
                MUST(lock(way, own, F_WRLCK, 0));
                MUST(write(told[1], "", 1));
                pause_a_bit(10000);
                if (round % 2) kill(parent, SIGUSR1);
                MUST(lock(way, own, F_UNLCK, 0));
                if (round % 2 == 0) kill(parent, SIGUSR1);
                _exit(0);
            }
            MUST(read(told[0], &byte, 1));
            int got = lock(way, fd, F_WRLCK, 1), error = errno;
            while (waitpid(child, &status, 0) == -1) {}
            int free = tried(way, 0) == 0;
            good += got == 0 ? !free : error == EINTR && free;
            MUST(lock(way, fd, F_UNLCK, 0));
        }
        say("%s: %d of %d, all signals %d", ways[way], good, rounds, (int)came >= rounds);
        came = 0;
    }
}

static const struct test tests[] = {
    {"ended", holders_end},
    {"closed", files_are_closed},
    {"left", holders_are_killed},
    {"killed", waiters_are_killed},
    {"killed-then", waiters_are_killed_when_they_get_it},
    {"cut", waits_are_cut_when_they_end},
    {NULL, NULL},
};

int main(int count, char **arguments) { return run(count, arguments, tests); }
