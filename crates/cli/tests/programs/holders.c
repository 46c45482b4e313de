/* Who has the offset of a shared file, or a lock, while it is stopped, executes a program, or is the process of the
 * same number in another PID namespace. */
#include "case.h"
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>

enum { LENGTH = 1 << 16 };

static char bytes[LENGTH];

/* Writes at the beginning of the file, for ever. */
static void *write_on(void *fd) {
    for (;;) {
        if (lseek((long)fd, 0, SEEK_SET) != 0 || write((long)fd, bytes, LENGTH) != LENGTH) _exit(95);
    }
    return NULL;
}

/* A process that hangs is ended by the alarm, which a new program keeps. */
static void writing_threads_and_new_programs(void) {
    long fd = MUST(open("f", O_RDWR | O_CREAT, 0644));
    for (int i = 0; i < 8; i++) {
        pid_t child = MUST(fork());
        if (child == 0) {
            pthread_t thread;
            alarm(20);
            pthread_create(&thread, NULL, write_on, (void *)fd);
            usleep(20000);
            char number[16];
            snprintf(number, sizeof number, "%ld", fd);
            execl("/bin/sh", "sh", "-c", "echo hello >&$1", "sh", number, NULL);
            _exit(94);
        }
        reap(child);
    }
    /* Where they wrote depends on when. */
    MUST(ftruncate(fd, 0));
}

/* Stops a child. */
static void stop(pid_t child) {
    int how = 0;
    MUST(kill(child, SIGSTOP));
    MUST(waitpid(child, &how, WUNTRACED));
    if (!WIFSTOPPED(how)) _exit(91);
}

/* Kills a process that writes, and empties its file. What it was writing may still be on its way to the server. */
static void end(pid_t writer, int fd) {
    MUST(kill(writer, SIGKILL));
    reap(writer);
    for (int i = 0; i < 20; i++) {
        usleep(10000);
        MUST(ftruncate(fd, 0));
    }
}

/* Others write while a writer is stopped. */
static void write_beside(pid_t writer, int fd) {
    for (int i = 0; i < 8; i++) {
        usleep(10000);
        stop(writer);
        IN_CHILD(alarm(20); if (write(fd, "hello", 5) != 5) _exit(93));
        MUST(kill(writer, SIGCONT));
    }
    end(writer, fd);
}

static void stopped_writers(void) {
    long fd = MUST(open("f", O_RDWR | O_CREAT, 0644));
    pid_t writer = MUST(fork());
    if (writer == 0) write_on((void *)fd);
    write_beside(writer, fd);
}

/* A process goes on when its first thread has ended, and can be stopped as before. */
static void stopped_writers_without_their_first_thread(void) {
    long fd = MUST(open("f", O_RDWR | O_CREAT, 0644));
    pid_t writer = MUST(fork());
    if (writer == 0) {
        pthread_t thread;
        pthread_create(&thread, NULL, write_on, (void *)fd);
        pthread_exit(NULL);
    }
    usleep(50000);
    write_beside(writer, fd);
}

/* Each record is written once and whole, whoever is stopped while it writes. */
static void records_of_stopped_writers(void) {
    enum { WRITERS = 3, STOPS = 180, RECORD = 64 };
    struct shared { int is_over, written[WRITERS]; };
    volatile struct shared *shared =
        mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    int fd = MUST(open("f", O_RDWR | O_CREAT, 0644));
    pid_t writers[WRITERS];
    for (int i = 0; i < WRITERS; i++) {
        writers[i] = MUST(fork());
        if (writers[i] == 0) {
            char record[RECORD];
            for (int k = 0; !shared->is_over; k++) {
                memset(record, '.', RECORD);
                sprintf(record, "%d %d", i, k);
                if (write(fd, record, RECORD) != RECORD) _exit(92);
                shared->written[i] = k + 1;
            }
            _exit(0);
        }
    }
    for (int i = 0; i < STOPS; i++) {
        stop(writers[i % WRITERS]);
        int before = shared->written[(i + 1) % WRITERS];
        for (int k = 0; k < 10000 && shared->written[(i + 1) % WRITERS] < before + 3; k++) usleep(1000);
        if (shared->written[(i + 1) % WRITERS] < before + 3) say("others wait for a stopped writer");
        MUST(kill(writers[i % WRITERS], SIGCONT));
    }
    shared->is_over = 1;
    for (int i = 0; i < WRITERS; i++) reap(writers[i]);
    char record[RECORD];
    int next[WRITERS] = {0}, others = 0;
    MUST(lseek(fd, 0, SEEK_SET));
    while (read(fd, record, RECORD) == RECORD) {
        int i = -1, k = -1;
        if (sscanf(record, "%d %d", &i, &k) != 2 || i < 0 || i >= WRITERS || next[i] != k) others++;
        else next[i]++;
    }
    for (int i = 0; i < WRITERS; i++) {
        say("writer %d: %s", i, next[i] == shared->written[i] ? "all records" : "records are lost");
    }
    say("%d others", others);
    MUST(ftruncate(fd, 0));
}

/* What is written while a process is stopped that reads at the end of the file, or goes there, stays in its place. */
static void stopped_readers(void) {
    enum { STOPS = 100 };
    int fd = MUST(open("f", O_RDWR | O_CREAT, 0644));
    pid_t reader = MUST(fork());
    if (reader == 0) {
        for (;;) {
            if (lseek(fd, 0, SEEK_END) < 0 || read(fd, bytes, 4096) < 0) _exit(90);
        }
    }
    for (int i = 0; i < STOPS; i++) {
        usleep(1000);
        stop(reader);
        MUST(write(fd, "hello", 5));
        MUST(kill(reader, SIGCONT));
    }
    MUST(kill(reader, SIGKILL));
    reap(reader);
    struct stat status;
    MUST(fstat(fd, &status));
    say("%ld bytes", (long)status.st_size);
}

/* The child of a fork has the thread's own mask, and the thread keeps it, although others fork, too. */
static void *forks_on(void *blocks) {
    sigset_t set, now;
    sigemptyset(&set);
    sigaddset(&set, SIGUSR1);
    pthread_sigmask(blocks ? SIG_BLOCK : SIG_UNBLOCK, &set, NULL);
    long wrong = 0;
    for (int i = 0; i < 500; i++) {
        pid_t child = fork();
        if (child == 0) _exit(0);
        pthread_sigmask(SIG_BLOCK, NULL, &now);
        wrong += sigismember(&now, SIGUSR1) != !!blocks;
        waitpid(child, NULL, 0);
    }
    return (void *)wrong;
}

static void masks_and_concurrent_forks(void) {
    pthread_t threads[4];
    for (long i = 0; i < 4; i++) pthread_create(&threads[i], NULL, forks_on, (void *)(i & 1));
    for (int i = 0; i < 4; i++) {
        void *wrong;
        pthread_join(threads[i], &wrong);
        say("thread %d: %ld times another mask", i, (long)wrong);
    }
}

static struct flock whole(short kind) { return (struct flock){.l_type = kind, .l_whence = SEEK_SET}; }

/* Locks a file in a PID namespace of its own, where this is process 1, and keeps it until it is told to end. */
static pid_t locker(const char *path, int until, int told) {
    pid_t outer = MUST(fork());
    if (outer != 0) return outer;
    MUST(unshare(CLONE_NEWPID));
    IN_CHILD({
        int fd = MUST(open(path, O_RDWR | O_CREAT, 0644));
        struct flock lock = whole(F_WRLCK);
        say("process %d", getpid());
        SAY(fcntl(fd, F_SETLK, &lock));
        struct flock other = whole(F_WRLCK);
        MUST(fcntl(fd, F_GETLK, &other));
        say("a lock of %s", other.l_type == F_UNLCK ? "nobody" : other.l_pid == 0 ? "somebody" : "a number");
        char byte;
        write(told, "x", 1);
        read(until, &byte, 1);
    });
    _exit(0);
}

static void locks_in_namespaces(void) {
    int ends[2][2], told[2];
    MUST(pipe2(ends[0], O_CLOEXEC) + pipe2(ends[1], O_CLOEXEC) + pipe(told));
    char byte;
    pid_t first = locker("f", ends[0][0], told[1]);
    MUST(read(told[0], &byte, 1));
    /* Refused, and its end does not end the lock of the first one. */
    pid_t second = locker("f", ends[1][0], told[1]);
    MUST(read(told[0], &byte, 1));
    MUST(write(ends[1][1], "x", 1));
    reap(second);
    second = locker("g", ends[1][0], told[1]);
    MUST(read(told[0], &byte, 1));
    MUST(write(ends[1][1], "x", 1));
    reap(second);
    sleep(4);
    int fd = MUST(open("f", O_RDWR));
    struct flock lock = whole(F_WRLCK);
    SAY(fcntl(fd, F_SETLK, &lock));
    MUST(write(ends[0][1], "x", 1));
    reap(first);
    SAY(fcntl(fd, F_SETLK, &lock));
}

static const struct test tests[] = {
    {"writing-threads-and-new-programs", writing_threads_and_new_programs},
    {"stopped-writers", stopped_writers},
    {"stopped-writers-without-their-first-thread", stopped_writers_without_their_first_thread},
    {"records-of-stopped-writers", records_of_stopped_writers},
    {"stopped-readers", stopped_readers},
    {"masks-and-concurrent-forks", masks_and_concurrent_forks},
    {"locks-in-namespaces", locks_in_namespaces},
    {NULL, NULL},
};

int main(int count, char **arguments) { return run(count, arguments, tests); }
