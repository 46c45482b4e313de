/* Descriptors of files that are opened and closed again and again, as most programs do, when other processes
 * may have got them meanwhile. `reused idle FILE` opens and closes a file often, reports that, and waits for
 * the end of its input. */
#include "case.h"
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>

enum { FILES = 6 };

static const char *name(int number) {
    static __thread char text[8];
    snprintf(text, sizeof text, "f%d", number);
    return text;
}

/* Opens and closes a file for so long that a library that caches descriptors does so. */
static void often(const char *path) {
    for (int i = 0; i < 200; i++) {
        close(MUST(open(path, O_RDONLY)));
        if (i % 10 == 0) usleep(1000);
    }
}

static void begin(void) {
    for (int i = 0; i < FILES; i++) {
        char text[32];
        snprintf(text, sizeof text, "this is %s", name(i));
        make(name(i), text);
    }
    often("f0");
}

/* The properties of a newly opened file. */
static void fresh(void) {
    begin();
    for (int i = 0; i < 12; i++) {
        int flags = i % 3 == 0 ? O_CLOEXEC : i % 3 == 1 ? O_APPEND | O_RDWR : O_RDWR;
        int fd = MUST(open(name(i % FILES), flags));
        char link[PATH_MAX] = {0}, path[64];
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        if (readlink(path, link, sizeof link - 1) < 0) say("no link");
        say("%d is %s: flags %x, of the descriptor %d, at %ld", fd, link, fcntl(fd, F_GETFL), fcntl(fd, F_GETFD),
            (long)lseek(fd, 0, SEEK_CUR));
        peek(fd, 10);
        if (i % 4 == 0) MUST(fcntl(fd, F_SETFD, FD_CLOEXEC));
        if (i % 5 == 0) MUST(fcntl(fd, F_SETFL, O_NONBLOCK));
        if (i % 6 == 0) MUST(fcntl(fd, F_SETOWN, getpid()));
        else say("owner %d", fcntl(fd, F_GETOWN));
        SAY(close(fd));
        SAY(read(fd, path, 1));
    }
}

static void duplicates(void) {
    begin();
    for (int i = 0; i < 6; i++) {
        int fd = MUST(open(name(i), O_RDONLY)), copy = MUST(i % 2 ? dup(fd) : fcntl(fd, F_DUPFD_CLOEXEC, 40));
        peek(fd, 4);
        MUST(close(fd));
        int other = MUST(open("f5", O_RDONLY));
        peek(other, 4);
        peek(copy, 9);
        MUST(dup2(copy, other));
        peek(other, 1);
        MUST(close(copy));
        often("f1");
        SAY(lseek(other, 0, SEEK_CUR));
        MUST(close_range(other, other, 0));
        peek(other, 1);
    }
}

/* A child still has the file while the parent opens others. */
static void children(void) {
    begin();
    for (int i = 0; i < 3; i++) {
        int fd = MUST(open(name(i), O_RDONLY)), go[2];
        MUST(pipe(go));
        pid_t child = MUST(fork());
        if (child == 0) {
            char byte;
            close(go[1]);
            MUST(read(go[0], &byte, 1));
            peek(fd, 10);
            if (i == 1) again("peek", i == 1 ? "3" : "");
            int other = MUST(open("f4", O_RDONLY));
            peek(other, 10);
            MUST(close(other));
            often("f3");
            SAY(lseek(fd, 0, SEEK_CUR));
            _exit(0);
        }
        MUST(close(go[0]));
        MUST(close(fd));
        often("f5");
        int other = MUST(open("f5", O_RDONLY));
        peek(other, 10);
        MUST(write(go[1], "", 1));
        reap(child);
        peek(other, 10);
        MUST(close(other));
        MUST(close(go[1]));
        often("f2");
    }
}

/* What a child of clone shares with its parent: an open file, and pipes to take turns. */
static struct {
    int fd, told[2], go[2];
} turns;

static int cloned(void *unused) {
    char byte;
    (void)unused;
    int other = MUST(open("f2", O_RDONLY));
    MUST(write(turns.told[1], "", 1));
    MUST(read(turns.go[0], &byte, 1));
    peek(other, 10);
    peek(turns.fd, 2);
    MUST(close(turns.fd));
    MUST(close(other));
    show("f4");
    return 6;
}

enum how { BY_LIBC, BY_NUMBER, WITHOUT_LIBC };

static char stack_of_child[1 << 18] __attribute__((aligned(16)));

/* Makes a child on a stack of its own without libc. */
static pid_t clone_without_libc(void) {
#ifdef __x86_64__
    void **top = (void **)(stack_of_child + sizeof stack_of_child - 56);
    top[0] = (void *)cloned;
    long result;
    asm volatile("syscall\n test %%rax, %%rax\n jnz 1f\n xor %%ebp, %%ebp\n pop %%rax\n call *%%rax\n"
                 "mov %%eax, %%edi\n mov $231, %%eax\n syscall\n 1:"
                 : "=a"(result)
                 : "a"(SYS_clone), "D"(SIGCHLD), "S"(top), "d"(0)
                 : "rcx", "r11", "memory");
    return result;
#else
    return clone(cloned, stack_of_child + sizeof stack_of_child, SIGCHLD, NULL);
#endif
}

static pid_t clone_in_this_way(enum how how) {
    if (how == BY_LIBC) return clone(cloned, stack_of_child + sizeof stack_of_child, SIGCHLD, NULL);
    if (how == WITHOUT_LIBC) return clone_without_libc();
    unsigned long all[11] = {[4] = SIGCHLD};
    pid_t child = syscall(SYS_clone3, all, sizeof all);
    if (child < 0) child = fork(); /* where clone3 is forbidden */
    if (child == 0) _exit(cloned(NULL));
    return child;
}

/* A child of clone opens and closes files while its parent does. */
static void clones(enum how how) {
    begin();
    turns.fd = MUST(open("f1", O_RDWR));
    MUST(pipe(turns.told));
    MUST(pipe(turns.go));
    often("f5");
    pid_t child = MUST(clone_in_this_way(how));
    char byte;
    MUST(read(turns.told[0], &byte, 1));
    int other = MUST(open("f3", O_RDONLY));
    MUST(write(turns.go[1], "", 1));
    reap(child);
    peek(other, 10);
    SAY(write(turns.fd, "IS", 2));
    show("f1");
}

static void clones_by_libc(void) { clones(BY_LIBC); }
static void clones_by_number(void) { clones(BY_NUMBER); }
static void clones_without_libc(void) { clones(WITHOUT_LIBC); }

static void send_one(int socket, int fd) {
    char byte = 0, room[CMSG_SPACE(sizeof(int))] = {0};
    struct iovec part = {&byte, 1};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof room};
    struct cmsghdr *head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(head), &fd, sizeof fd);
    MUST(sendmsg(socket, &message, 0));
}

static int receive_one(int socket) {
    char byte, room[CMSG_SPACE(sizeof(int))];
    struct iovec part = {&byte, 1};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof room};
    int fd = -1;
    MUST(recvmsg(socket, &message, 0));
    if (CMSG_FIRSTHDR(&message)) memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof fd);
    return fd;
}

/* Descriptors are in transit in a socket when this process has closed them and opened others. */
static void passed(void) {
    begin();
    int ends[2];
    MUST(socketpair(AF_UNIX, SOCK_STREAM, 0, ends));
    for (int i = 0; i < 4; i++) {
        int fd = MUST(open(name(i), O_RDONLY));
        peek(fd, 8);
        send_one(ends[0], fd);
        MUST(close(fd));
        often("f5");
        int other = MUST(open("f4", O_RDONLY)), came = receive_one(ends[1]);
        peek(came, 10);
        peek(other, 10);
        MUST(close(came));
        MUST(close(other));
    }
}

/* Names that are created, removed and created again. */
static void names(void) {
    begin();
    for (int i = 0; i < 5; i++) {
        make("new", i % 2 ? "odd" : "even");
        int fd = MUST(open("new", O_RDONLY));
        MUST(unlink("new"));
        peek(fd, 10);
        MUST(close(fd));
        SAY(open("new", O_RDONLY));
        show("f1");
    }
}

static void *thread(void *argument) {
    long number = (long)argument, wrong = 0;
    for (int i = 0; i < 300; i++) {
        char text[32] = {0};
        int fd = open(name(number), O_RDONLY);
        if (fd < 0 || read(fd, text, 31) != 10 || text[9] != '0' + number || lseek(fd, 0, SEEK_CUR) != 10) wrong++;
        close(fd);
    }
    return (void *)wrong;
}

static void threads(void) {
    begin();
    pthread_t all[FILES];
    for (long i = 0; i < FILES; i++) pthread_create(&all[i], NULL, thread, (void *)i);
    long wrong = 0;
    for (int i = 0; i < FILES; i++) {
        void *result;
        pthread_join(all[i], &result);
        wrong += (long)result;
    }
    say("%ld wrong", wrong);
}

static const struct test tests[] = {
    {"fresh", fresh}, {"duplicates", duplicates}, {"children", children}, {"passed", passed},
    {"names", names}, {"threads", threads}, {"clones", clones_by_libc},
    {"clones-by-number", clones_by_number}, {"clones-without-libc", clones_without_libc}, {NULL, NULL},
};

int main(int count, char **arguments) {
    if (count == 3 && strcmp(arguments[1], "idle") == 0) {
        char byte;
        for (int i = 0; i < 1000; i++) close(open(arguments[2], O_RDONLY));
        puts("idle");
        fflush(stdout);
        return read(0, &byte, 1) != 0;
    }
    return run(count, arguments, tests);
}
