/* Descriptors: their numbers, duplicates, inheritance, passing on, limits, and threads. */
#include "case.h"
#include <aio.h>
#include <execinfo.h>
#include <linux/openat2.h>
#include <poll.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/select.h>
#include <sys/sendfile.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/xattr.h>

static void duplicates_share_the_offset(void) {
    make("f", "abcdefghijklmnop");
    int a = SAY(open("f", O_RDWR));
    int b = SAY(dup(a));
    peek(a, 3);
    peek(b, 3);
    int c = SAY(dup2(a, 20));
    int d = SAY(dup3(b, 21, O_CLOEXEC));
    int e = SAY(fcntl(a, F_DUPFD, 30));
    int g = SAY(fcntl(a, F_DUPFD_CLOEXEC, 30));
    SAY(fcntl(c, F_GETFD));
    SAY(fcntl(d, F_GETFD));
    SAY(fcntl(e, F_GETFD));
    SAY(fcntl(g, F_GETFD));
    SAY(close(a));
    peek(e, 2);
    SAY(lseek(g, 1, SEEK_SET));
    peek(b, 2);
    int other = SAY(open("f", O_RDONLY));
    peek(other, 2);
    SAY(dup2(other, other));
    SAY(dup3(other, other, 0));
    SAY(dup2(99, 5));
    SAY(dup(99));
    SAY(close(99));
    SAY(dup2(other, b));
    peek(b, 2);
    SAY(close(b));
    peek(other, 2);
}

static void duplicates_share_status_flags(void) {
    make("f", "0123456789");
    int a = MUST(open("f", O_RDWR));
    int b = MUST(dup(a));
    int c = MUST(open("f", O_WRONLY | O_APPEND | O_NONBLOCK));
    say("%x %x %x", fcntl(a, F_GETFL), fcntl(b, F_GETFL), fcntl(c, F_GETFL));
    SAY(fcntl(a, F_SETFL, O_APPEND));
    say("%x %x", fcntl(a, F_GETFL), fcntl(b, F_GETFL));
    SAY(write(b, "+", 1));
    SAY(lseek(b, 0, SEEK_CUR));
    SAY(lseek(b, 0x7fffffffffffffff, SEEK_CUR));
    SAY(lseek(b, 0x7fffffffffffffff, SEEK_END));
    SAY(fcntl(b, F_SETFL, 0));
    SAY(lseek(a, 2, SEEK_SET));
    SAY(write(a, "-", 1));
    SAY(read(c, (char[4]){0}, 4));
    SAY(write(open("f", O_RDONLY), "x", 1));
    SAY(fcntl(99, F_GETFL));
    show("f");
}

static void children_share_the_offset(void) {
    make("f", "abcdefghijklmnop");
    int fd = MUST(open("f", O_RDWR));
    peek(fd, 2);
    IN_CHILD(peek(fd, 2); lseek(fd, 10, SEEK_SET));
    peek(fd, 2);
    IN_CHILD(close(fd));
    peek(fd, 2);
    IN_CHILD(IN_CHILD(SAY(write(fd, "XY", 2))));
    show("f");
}

static void onto_the_standard_descriptors(void) {
    make("in", "first\nsecond\n");
    IN_CHILD({
        int in = MUST(open("in", O_RDONLY)), out = MUST(open("out", O_WRONLY | O_CREAT, 0644));
        int err = MUST(open("err", O_WRONLY | O_CREAT, 0644));
        MUST(dup2(in, 0));
        MUST(dup2(out, 1));
        MUST(dup2(err, 2));
        MUST(close_range(3, 100, 0));
        char line[64];
        if (fgets(line, sizeof line, stdin)) printf("stdio got %s", line);
        fprintf(stderr, "complaint\n");
        fflush(stdout);
        lseek(0, 6, SEEK_SET);
        system("cat; echo from a shell; echo shell complains >&2");
        write(1, "end\n", 4);
    });
    show("out");
    show("err");
    IN_CHILD({
        MUST(close(0));
        SAY(open("in", O_RDONLY));
        char line[64];
        say("%s", fgets(line, sizeof line, stdin) ? line : "nothing");
        MUST(close(1));
        SAY(open("out", O_WRONLY | O_APPEND));
        puts("by number one");
        fflush(stdout);
    });
    show("out");
}

static void numbers_are_the_lowest_free(void) {
    int fds[6];
    for (int i = 0; i < 6; i++) fds[i] = SAY(open("f", O_RDWR | O_CREAT, 0644));
    SAY(close(fds[1]));
    SAY(close(fds[4]));
    SAY(open("f", O_RDONLY));
    SAY(open("/dev/null", O_RDONLY));
    SAY(open("f", O_RDONLY));
    SAY(close(fds[0]));
    int ends[2];
    SAY(pipe(ends));
    say("%d %d", ends[0], ends[1]);
    SAY(close(fds[2]));
    SAY(open(".", O_RDONLY | O_DIRECTORY));
    /* Bits that mean nothing are ignored. */
    SAY(open(".", O_RDONLY | INT_MIN));
    SAY(open(".", O_RDONLY | 1 << 30));
}

static void limits(void) {
    struct rlimit limit = {24, 24};
    MUST(setrlimit(RLIMIT_NOFILE, &limit));
    int count = 0, last = -1, fd;
    while ((fd = open("f", O_RDWR | O_CREAT, 0644)) >= 0) last = fd, count++;
    say("%d opened, the last is %d, then %s", count, last, strerrorname_np(errno));
    SAY(dup(last));
    SAY(close(last));
    SAY(open("f", O_RDONLY));
    SAY(open("/dev/null", O_RDONLY));
    SAY(dup2(last, 24));
    for (int i = 3; i < 24; i++) close(i);
    SAY(open("f", O_RDONLY));
    struct stat status;
    SAY(stat("f", &status));
}

static void many_are_open(void) {
    struct rlimit limit = {1024, 1024};
    MUST(setrlimit(RLIMIT_NOFILE, &limit));
    make("f", "many");
    int good = 0;
    static int fds[990];
    for (int i = 0; i < 990; i++) good += (fds[i] = open("f", O_RDONLY)) >= 0;
    say("%d open", good);
    peek(700, 4);
    int closed = 0;
    for (int i = 0; i < 990; i++) closed += close(fds[i]) == 0;
    say("%d closed", closed);
    SAY(close_range(3, ~0u, 0));
    MUST(dup2(1, transcript));
    SAY(open("f", O_RDONLY));
}

/* Any number may be used, whatever the library has it for. */
static void any_number_is_wanted(void) {
    struct rlimit limit = {1024, 1024};
    MUST(setrlimit(RLIMIT_NOFILE, &limit));
    make("f", "some text");
    make("m", "");
    MUST(truncate("m", 1 << 20));
    int fd = MUST(open("f", O_RDWR)), mapped = MUST(open("m", O_RDWR));
    char *shared = mmap(NULL, 1 << 20, PROT_READ | PROT_WRITE, MAP_SHARED, mapped, 0);
    char *own = mmap(NULL, 1 << 20, PROT_READ, MAP_PRIVATE, mapped, 0);
    say("%d", shared != MAP_FAILED && own != MAP_FAILED);
    shared[5000] = 'a';
    int good = 0, bytes = 0;
    for (int to = 64; to < 1024; to++) {
        char byte = 0;
        if (to == transcript) continue;
        good += dup2(fd, to) == to && pread(to, &byte, 1, 5) == 1 && byte == 't';
        shared[to * 1000] = 'b';
        if (to % 32 == 0) good += msync(shared, 1 << 20, MS_SYNC) == 0 && own[to * 512] == 0;
    }
    say("%d", good);
    SAY(msync(shared, 1 << 20, MS_SYNC));
    for (int at = 0; at < 1 << 20; at++) {
        char byte = 0;
        if (shared[at]) bytes += pread(mapped, &byte, 1, at) == 1 && byte == shared[at];
    }
    say("%d, %c", bytes, shared[5000]);
    for (int i = 64; i < 1024; i++) if (i != transcript) good -= close(i) == 0;
    say("%d", good);
    show("f");
}

/* Locks do not depend on the numbers that the library has. */
static void locked_meanwhile(void) {
    make("locked", "text");
    make("f", "some text");
    int locked = MUST(open("locked", O_RDWR)), fd = MUST(open("f", O_RDONLY)), good = 0;
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_len = 3};
    MUST(fcntl(locked, F_SETLK, &lock));
    for (int to = 380; to < 400; to++)
        if (to != transcript) good += dup2(fd, to) == to && lseek(to, 0, SEEK_CUR) == 0;
    say("%d", good);
    IN_CHILD(SAY(fcntl(locked, F_SETLK, &lock)));
    lock.l_start = 3;
    SAY(fcntl(locked, F_SETLK, &lock));
    lock.l_start = 0;
    IN_CHILD(SAY(fcntl(locked, F_SETLK, &lock)));
    lock.l_type = F_UNLCK;
    SAY(fcntl(locked, F_SETLK, &lock));
    lock.l_type = F_WRLCK;
    IN_CHILD(SAY(fcntl(locked, F_SETLK, &lock)));
}

/* A duplicate with a high number is the same file, or there is none. */
static void high_numbers(void) {
    struct rlimit limit = {100000, 100000};
    setrlimit(RLIMIT_NOFILE, &limit);
    make("f", "some text");
    int fd = MUST(open("f", O_RDWR));
    int all[] = {dup2(fd, 70000), dup3(fd, 70001, O_CLOEXEC), fcntl(fd, F_DUPFD, 70002)};
    for (int i = 0; i < 3; i++) {
        char byte = 0;
        say("%s", all[i] < 0 || (pread(all[i], &byte, 1, 5) == 1 && byte == 't') ? "good" : "another file");
    }
    SAY(write(fd, "SOME", 4));
    show("f");
}

static void all_are_closed(void) {
    make("f", "text");
    int fd = MUST(open("f", O_RDONLY));
    IN_CHILD(for (int i = 3; i < 1024; i++) if (i != transcript) close(i); SAY(open("f", O_RDONLY)));
    IN_CHILD(close_range(3, transcript - 1, 0); close_range(transcript + 1, ~0u, 0); peek(fd, 1); show("f"));
    IN_CHILD(closefrom(transcript + 1); peek(fd, 1));
    IN_CHILD({
        SAY(close_range(3, 100, CLOSE_RANGE_CLOEXEC));
        peek(fd, 1);
        again("peek", "3");
    });
    IN_CHILD(SAY(close_range(3, 50, CLOSE_RANGE_UNSHARE)); peek(fd, 1));
    IN_CHILD(SAY(close_range(50, 3, 0)));
    IN_CHILD(SAY(close_range(3, 50, 0x40)); peek(fd, 1));
    peek(fd, 3);
    IN_CHILD({
        DIR *list = opendir("/proc/self/fd");
        int own = dirfd(list), closed = 0;
        for (struct dirent *entry; (entry = readdir(list));) {
            int number = atoi(entry->d_name);
            if (entry->d_name[0] != '.' && number > 2 && number != own && number != transcript)
                closed += close(number) == 0;
        }
        closedir(list);
        show("f");
    });
}

/* Numbers that the program has not opened are free, whatever it does with files. */
static void others_are_free(void) {
    make("f", "text");
    for (int fd = 300; fd < 1024; fd++) {
        if (fcntl(fd, F_GETFD) != -1 || errno != EBADF) say("%d is open", fd);
        if (fcntl(fd, F_SETFD, 0) != -1 || errno != EBADF) say("%d is open", fd);
        if (fcntl(fd, F_DUPFD, 0) != -1 || errno != EBADF) say("%d is open", fd);
    }
    show("f");
}

static void nothing(int signal) { (void)signal; }

static void *waits_for_lock(void *file) {
    struct flock lock = {.l_type = F_WRLCK};
    return fcntl(*(int *)file, F_SETLKW, &lock) == 0 ? file : NULL;
}

/* A program uses numbers that the library may have taken, while one of its threads waits for a lock. */
static void wanted_while_a_thread_waits(void) {
    enum { FIRST = 384, COUNT = 8 };
    struct flock lock = {.l_type = F_WRLCK};
    struct sigaction once = {.sa_handler = nothing, .sa_flags = SA_RESETHAND};
    int ends[2], held[2];
    char text[8];
    MUST(sigaction(SIGUSR1, &once, NULL));
    make("f", "some text");
    MUST(pipe(ends));
    MUST(pipe(held));
    pid_t child = fork();
    if (child == 0) {
        int own = MUST(open("f", O_RDWR));
        MUST(fcntl(own, F_SETLKW, &lock));
        MUST(write(held[1], "x", 1));
        close(ends[1]);
        read(ends[0], text, 1);
        _exit(0);
    }
    MUST(read(held[0], text, 1));
    int fd = MUST(open("f", O_RDWR)), good = 0;
    pthread_t thread;
    pthread_create(&thread, NULL, waits_for_lock, &fd);
    usleep(200000);
    int next = MUST(open("/dev/zero", O_RDONLY));
    for (int i = 3; i < FIRST; i++) {
        if (i != transcript && i != fd && i != next && i != ends[1]) close(i);
    }
    int low = MUST(open("/dev/zero", O_RDONLY));
    for (int i = FIRST; i < FIRST + COUNT; i++) MUST(dup2(low, i));
    MUST(close(ends[1]));
    reap(child);
    void *locked;
    pthread_join(thread, &locked);
    for (int i = FIRST; i < FIRST + COUNT; i++) good += read(i, text, 1) == 1;
    say("%s, %d, %d", locked ? "locked" : "not locked", next, good);
    SAY(read(low, text, 1));
    SAY(write(fd, "SOME", 4));
    show("f");
}

static void close_on_exec(void) {
    make("f", "abcdefghijklmnop");
    int stays = MUST(open("f", O_RDONLY)), goes = MUST(open("f", O_RDONLY | O_CLOEXEC));
    say("%d %d", stays, goes);
    IN_CHILD(again("peek", "3"));
    IN_CHILD(again("peek", "4"));
    SAY(fcntl(stays, F_SETFD, FD_CLOEXEC));
    SAY(fcntl(goes, F_SETFD, 0));
    IN_CHILD(again("peek", "3"));
    IN_CHILD(again("peek", "4"));
    SAY(ioctl(goes, FIOCLEX));
    SAY(ioctl(stays, FIONCLEX));
    IN_CHILD(again("peek", "3"));
    IN_CHILD(again("peek", "4"));
    int copy = MUST(dup(goes));
    say("%d %d", copy, fcntl(copy, F_GETFD));
    IN_CHILD(again("peek", "5"));
    peek(stays, 2);
    peek(goes, 2);
}

static int pass(int socket, int fd) {
    char byte = 'x', control[CMSG_SPACE(sizeof(int))] = {0};
    struct iovec part = {&byte, 1};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control,
                             .msg_controllen = sizeof control};
    struct cmsghdr *head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(head), &fd, sizeof fd);
    return sendmsg(socket, &message, 0);
}

static int receive(int socket, int flags) {
    char byte, control[CMSG_SPACE(sizeof(int))] = {0};
    struct iovec part = {&byte, 1};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control,
                             .msg_controllen = sizeof control};
    int fd = -1;
    if (recvmsg(socket, &message, flags) == 1) memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof fd);
    return fd;
}

/* Several messages at once, with a descriptor in each. */
static void passed_together(void) {
    make("f", "abcdefgh");
    int ends[2];
    MUST(socketpair(AF_UNIX, SOCK_DGRAM, 0, ends));
    struct mmsghdr messages[2];
    char control[2][CMSG_SPACE(sizeof(int))], byte[2] = {'a', 'b'};
    struct iovec parts[2] = {{&byte[0], 1}, {&byte[1], 1}};
    memset(messages, 0, sizeof messages);
    memset(control, 0, sizeof control);
    pid_t child = fork();
    for (int i = 0; i < 2; i++) {
        messages[i].msg_hdr.msg_iov = &parts[i];
        messages[i].msg_hdr.msg_iovlen = 1;
        messages[i].msg_hdr.msg_control = control[i];
        messages[i].msg_hdr.msg_controllen = sizeof control[i];
        if (child == 0) continue;
        int fd = MUST(open("f", O_RDONLY));
        MUST(lseek(fd, i * 3, SEEK_SET));
        struct cmsghdr *head = CMSG_FIRSTHDR(&messages[i].msg_hdr);
        head->cmsg_level = SOL_SOCKET;
        head->cmsg_type = SCM_RIGHTS;
        head->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(head), &fd, sizeof fd);
    }
    if (child == 0) {
        for (int got = 0; got < 2;) {
            int more = MUST(recvmmsg(ends[1], messages + got, 2 - got, 0, NULL));
            for (; more > 0; more--, got++) {
                int fd;
                memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&messages[got].msg_hdr)), sizeof fd);
                char text[4] = {0};
                say("%zd %s", read(fd, text, 3), text);
            }
        }
        _exit(0);
    }
    int sent = MUST(sendmmsg(ends[0], messages, 2, 0));
    reap(child); // it prints what it got, perhaps before the call has returned
    say("sent %d", sent);
    char list[4096];
    off_t base = -1;
    MUST(mkdir("d", 0755));
    int directory = MUST(open("d", O_RDONLY | O_DIRECTORY));
    ssize_t length = getdirentries(directory, list, sizeof list, &base);
    say("listed %d, from %ld", length > 0, (long)base);
}

static void passed_over_a_socket(void) {
    make("f", "abcdefghijklmnop");
    int ends[2];
    MUST(socketpair(AF_UNIX, SOCK_STREAM, 0, ends));
    pid_t child = fork();
    if (child == 0) {
        close(ends[0]);
        int fd = receive(ends[1], 0);
        say("received %d", fd);
        peek(fd, 3);
        SAY(write(fd, "W", 1));
        int sealed = receive(ends[1], MSG_CMSG_CLOEXEC);
        say("received %d, flags %d", sealed, fcntl(sealed, F_GETFD));
        peek(sealed, 4);
        SAY(pass(ends[1], sealed));
        _exit(0);
    }
    int fd = MUST(open("f", O_RDWR));
    MUST(pass(ends[0], fd));
    MUST(close(fd));
    int gone = MUST(open("gone", O_RDWR | O_CREAT, 0600));
    MUST(write(gone, "unlinked", 8));
    MUST(lseek(gone, 2, SEEK_SET));
    MUST(unlink("gone"));
    MUST(pass(ends[0], gone));
    MUST(close(gone));
    reap(child);
    int back = receive(ends[0], 0);
    peek(back, 10);
    struct stat status;
    MUST(fstat(back, &status));
    say("links %ld, size %ld", (long)status.st_nlink, (long)status.st_size);
    show("f");
    int two[2];
    MUST(socketpair(AF_UNIX, SOCK_DGRAM, 0, two));
    int held = MUST(open("f", O_RDONLY));
    for (int i = 0; i < 5; i++) MUST(pass(two[0], held));
    close(held);
    for (int i = 0; i < 5; i++) peek(receive(two[1], 0), 2);
}

static void readiness(void) {
    make("f", "text");
    int fd = MUST(open("f", O_RDWR));
    struct pollfd wait[2] = {{fd, POLLIN | POLLOUT | POLLPRI, 0}, {99, POLLIN, 0}};
    SAY(poll(wait, 2, 1000));
    say("%x %x", wait[0].revents, wait[1].revents);
    fd_set in, out;
    FD_ZERO(&in);
    FD_ZERO(&out);
    FD_SET(fd, &in);
    FD_SET(fd, &out);
    struct timeval second = {1, 0};
    SAY(select(fd + 1, &in, &out, NULL, &second));
    int set = MUST(epoll_create1(0));
    struct epoll_event event = {EPOLLIN, {.fd = fd}};
    SAY(epoll_ctl(set, EPOLL_CTL_ADD, fd, &event));
    SAY(isatty(fd));
    say("%s", strerrorname_np(errno));
    int rest = -1;
    SAY(ioctl(fd, FIONREAD, &rest));
    int on = 1, off = 0;
    SAY(ioctl(fd, FIONBIO, &on));
    SAY(fcntl(fd, F_GETFL) & O_NONBLOCK);
    SAY(ioctl(fd, FIONBIO, &off));
    SAY(fcntl(fd, F_GETFL) & O_NONBLOCK);
    SAY(ioctl(fd, FIONBIO, NULL));
    SAY(ioctl(fd, FIONBIO, (int *)8));
    SAY(ioctl(fd, FIONREAD, (int *)-8));
    int path = MUST(open("f", O_PATH));
    SAY(ioctl(path, FIONBIO, &on));
    SAY(ioctl(path, FIONREAD, &on));
    SAY(ioctl(path, FIOCLEX));
    SAY(ioctl(path, TIOCGWINSZ, &on));
    say("%d to be read", rest);
    SAY(ioctl(fd, TIOCGWINSZ, &rest));
}

static void by_their_names(void) {
    make("f", "abcdefghijklmnop");
    int fd = MUST(open("f", O_RDWR));
    peek(fd, 4);
    char path[64], link[PATH_MAX] = {0};
    for (int form = 0; form < 3; form++) {
        const char *forms[] = {"/proc/self/fd/%d", "/dev/fd/%d", "/proc/%2$d/fd/%1$d"};
        if (form < 2) snprintf(path, sizeof path, forms[form], fd);
        else snprintf(path, sizeof path, "/proc/%d/fd/%d", getpid(), fd);
        int other = open(path, O_RDONLY);
        peek(other, 2);
        memset(link, 0, sizeof link);
        ssize_t length = readlink(path, link, sizeof link - 1);
        say("%zd: %s", length < 0 ? length : (ssize_t)(length - (ssize_t)strlen(top)), link);
        struct stat status;
        SAY(stat(path, &status));
        say("size %ld", (long)status.st_size);
        SAY(access(path, R_OK));
        close(other);
    }
    peek(fd, 2);
    MUST(dup2(fd, 0));
    int in = SAY(open("/dev/stdin", O_RDONLY));
    peek(in, 2);
    /* A link with a text, unlike those in /proc. */
    memset(link, 0, sizeof link);
    SAY(readlink("/dev/stdin", link, sizeof link - 1));
    say("%s", link);
    SAY(truncate("/proc/self/fd/0", 6));
    SAY(lseek(fd, 0, SEEK_END));
    MUST(unlink("f"));
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    memset(link, 0, sizeof link);
    MUST(readlink(path, link, sizeof link - 1));
    say("%s", link);
    in = SAY(open(path, O_RDONLY));
    peek(in, 3);
    snprintf(path, sizeof path, "/proc/self/fd/0%d", fd);
    SAY(open(path, O_RDONLY));
    SAY(open("/proc/self/fd/+0", O_RDONLY));
    SAY(open("/proc/self/fd/0", O_RDWR | O_CREAT | O_EXCL, 0600));
    SAY(open("/dev/stdin", O_RDONLY | O_CREAT | O_EXCL, 0600));
    SAY(open("/proc/self/fd/99", O_RDONLY));
    SAY(open("/dev/fd/99", O_RDONLY));
}

/* Prints what `/proc` says about a descriptor. */
static void name_of(int fd) {
    char path[64], link[PATH_MAX] = {0};
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    if (readlink(path, link, sizeof link - 1) < 0) say("%s", strerrorname_np(errno));
    else say("%s", link);
    snprintf(path, sizeof path, "/dev/fd/%d", fd);
    say("really %s", realpath(path, link) ? link : strerrorname_np(errno));
}

static void names_by_way_of_links(void) {
    MUST(mkdir("folder", 0755));
    make("folder/f", "text");
    MUST(symlink("folder/f", "link"));
    MUST(symlink("folder", "way"));
    MUST(symlink("way/../link", "far"));
    MUST(link("folder/f", "second"));
    const char *paths[] = {"folder/f", "link", "way/f", "far", "second", "way/new", "way"};
    int fds[7];
    for (int i = 0; i < 7; i++) {
        fds[i] = MUST(open(paths[i], i == 5 ? O_RDWR | O_CREAT : O_RDONLY, 0600));
        name_of(fds[i]);
    }
    name_of(MUST(open("link", O_PATH | O_NOFOLLOW)));
    name_of(MUST(open("link", O_PATH)));
    MUST(rename("way/f", "way/g"));
    name_of(fds[1]);
    name_of(fds[4]);
    MUST(unlink("folder/g"));
    name_of(fds[1]);
    name_of(fds[4]);
    MUST(unlink("way/new"));
    name_of(fds[5]);
}

static void unnamed_files(void) {
    int fd = SAY(open(".", O_TMPFILE | O_RDWR, 0600));
    SAY(write(fd, "hidden", 6));
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    SAY(linkat(AT_FDCWD, path, AT_FDCWD, "shown", AT_SYMLINK_FOLLOW));
    show("shown");
    int other = SAY(open(".", O_TMPFILE | O_RDWR | O_EXCL, 0600));
    snprintf(path, sizeof path, "/proc/self/fd/%d", other);
    SAY(linkat(AT_FDCWD, path, AT_FDCWD, "never", AT_SYMLINK_FOLLOW));
    FILE *stream = tmpfile();
    say("%d", fputs("x", stream) >= 0);
    char name[] = "tXXXXXX", folder[] = "dXXXXXX", suffixed[] = "sXXXXXX.c";
    say("%d", mkstemp(name) >= 0 && access(name, F_OK) == 0);
    say("%d", mkdtemp(folder) && access(folder, F_OK) == 0);
    say("%d", mkstemps(suffixed, 2) >= 0 && access(suffixed, F_OK) == 0);
    unlink(name);
    rmdir(folder);
    unlink(suffixed);
}

static void unlinked_and_replaced(void) {
    make("f", "old file");
    make("g", "new");
    int fd = MUST(open("f", O_RDWR));
    SAY(rename("g", "f"));
    peek(fd, 8);
    show("f");
    struct stat status;
    MUST(fstat(fd, &status));
    say("links %ld size %ld", (long)status.st_nlink, (long)status.st_size);
    SAY(pwrite(fd, "OLD", 3, 0));
    IN_CHILD(lseek(fd, 0, SEEK_SET); peek(fd, 8));
    IN_CHILD(lseek(fd, 0, SEEK_SET); again("peek", "3"));
    SAY(ftruncate(fd, 100));
    SAY(lseek(fd, 0, SEEK_END));
    SAY(fchmod(fd, 0600));
    SAY(rename("f", "renamed"));
    int named = MUST(open("renamed", O_RDWR));
    SAY(rename("renamed", "again"));
    SAY(write(named, "NEW", 3));
    show("again");
    SAY(unlink("again"));
    SAY(write(named, "more", 4));
    SAY(lseek(named, 0, SEEK_SET));
    peek(named, 10);
    SAY(mkdir("d", 0755));
    int folder = MUST(open("d", O_RDONLY | O_DIRECTORY));
    SAY(rmdir("d"));
    SAY(openat(folder, "x", O_CREAT | O_WRONLY, 0644));
    MUST(fstat(folder, &status));
    say("links %ld", (long)status.st_nlink);
}

static void path_descriptors(void) {
    make("f", "text");
    int fd = SAY(open("f", O_PATH));
    SAY(read(fd, (char[4]){0}, 4));
    SAY(write(fd, "x", 1));
    SAY(lseek(fd, 0, SEEK_SET));
    SAY(fchmod(fd, 0600));
    SAY(ftruncate(fd, 0));
    struct stat status;
    SAY(fstat(fd, &status));
    say("%x", fcntl(fd, F_GETFL));
    symlink("f", "link");
    int link = SAY(open("link", O_PATH | O_NOFOLLOW));
    MUST(fstat(link, &status));
    say("%d", S_ISLNK(status.st_mode));
    char text[16] = {0};
    SAY(readlinkat(link, "", text, sizeof text));
    say("%s", text);
    SAY(open("link", O_RDONLY | O_NOFOLLOW));
    SAY(fstatat(fd, "", &status, AT_EMPTY_PATH));
    SAY(fchdir(fd));
    int folder = SAY(open(".", O_PATH | O_DIRECTORY));
    SAY(openat(folder, "f", O_RDONLY));
    SAY(fchdir(folder));
}

static void moved_without_buffers(void) {
    make("f", "abcdefghijklmnop");
    int in = MUST(open("f", O_RDONLY)), out = MUST(open("g", O_RDWR | O_CREAT, 0644)), ends[2];
    MUST(pipe(ends));
    off_t at = 4;
    SAY(sendfile(out, in, &at, 3));
    say("%ld", (long)at);
    SAY(sendfile(ends[1], in, NULL, 4));
    peek(ends[0], 4);
    SAY(copy_file_range(in, NULL, out, NULL, 100, 0));
    SAY(lseek(in, 0, SEEK_CUR));
    show("g");
    MUST(write(ends[1], "pipe", 4));
    SAY(splice(ends[0], NULL, out, NULL, 10, 0));
    loff_t from = 1;
    SAY(splice(in, &from, ends[1], NULL, 5, 0));
    peek(ends[0], 10);
    show("g");
    SAY(sendfile(in, out, NULL, 3));
    struct iovec parts[2] = {{"ab", 2}, {"cd", 2}};
    SAY(pwritev(out, parts, 2, 2));
    SAY(writev(out, parts, 2));
    SAY(pwritev2(out, parts, 2, -1, RWF_DSYNC));
    SAY(preadv(out, (struct iovec[]){{(char[8]){0}, 8}}, 1, 3));
    volatile int negative = -1;
    SAY(readv(out, parts, negative));
    SAY(readv(out, parts, 0));
    SAY(pread(out, (char[2]){0}, 2, -1));
    SAY(lseek(out, -1, SEEK_SET));
    SAY(lseek(out, 0, 77));
    show("g");
}

/* Says what a file holds. */
static void sum(int fd) {
    static unsigned char data[4000000];
    long length = MUST(pread(fd, data, sizeof data, 0));
    unsigned sum = 0;
    for (long i = 0; i < length; i++) sum = sum * 31 + data[i];
    say("%ld bytes, %x; at %ld", length, sum, (long)lseek(fd, 0, SEEK_CUR));
}

static long copied(int from, loff_t *at, int to, loff_t *where, size_t count) {
    long done = copy_file_range(from, at, to, where, count, 0);
    if (done >= 0 || errno != EXDEV) return done;
    /* The kernel does not copy between file systems by itself. */
    if (where) MUST(lseek(to, *where, SEEK_SET));
    off_t begin = at ? *at : MUST(lseek(from, 0, SEEK_CUR));
    done = sendfile(to, from, &begin, count);
    if (at) *at = begin;
    else MUST(lseek(from, begin, SEEK_SET));
    if (where) *where += done;
    return done;
}

static void moved_between_file_systems(void) {
    enum { LENGTH = 1700000 };
    int memory = MUST(memfd_create("m", 0)), out = MUST(open("out", O_RDWR | O_CREAT, 0644));
    static unsigned char data[LENGTH];
    for (long i = 0; i < LENGTH; i++) data[i] = (unsigned char)(i * 7 + i / 253);
    MUST(write(memory, data, LENGTH));
    off_t at = 1000;
    SAY(sendfile(out, memory, &at, 3 * LENGTH));
    say("%ld", (long)at);
    SAY(sendfile(out, memory, &at, 10));
    sum(out);
    MUST(lseek(memory, LENGTH / 2, SEEK_SET));
    SAY(sendfile(out, memory, NULL, 300000));
    sum(memory);
    sum(out);
    loff_t from = 5, to = 900000;
    SAY(copied(memory, &from, out, &to, 1000000));
    say("%ld %ld", (long)from, (long)to);
    MUST(lseek(memory, 0, SEEK_SET));
    MUST(lseek(out, 123, SEEK_SET));
    SAY(copied(memory, NULL, out, NULL, 262144 * 3));
    sum(memory);
    sum(out);
    /* And back, and between two names. */
    MUST(lseek(out, 77, SEEK_SET));
    SAY(sendfile(memory, out, NULL, 2 * LENGTH));
    sum(memory);
    int other = MUST(open("other", O_RDWR | O_CREAT, 0644));
    MUST(lseek(out, 1, SEEK_SET));
    SAY(sendfile(other, out, NULL, 600000));
    SAY(sendfile(other, out, NULL, 3 * LENGTH));
    sum(out);
    sum(other);
    /* Onto itself, up to the end. */
    MUST(lseek(other, 1000, SEEK_SET));
    SAY(sendfile(other, other, NULL, 500));
    SAY(sendfile(other, other, NULL, 3 * LENGTH));
    sum(other);
    at = -1;
    SAY(sendfile(other, memory, &at, 10));
    SAY(sendfile(other, memory, NULL, 0));
}

/* Threads */

static int shared_offset;

static void *reads(void *counted) {
    char piece[7];
    ssize_t got;
    while ((got = read(shared_offset, piece, sizeof piece)) > 0) *(long *)counted += got;
    return NULL;
}

static void *opens(void *counted) {
    for (int i = 0; i < 60; i++) {
        char text[8] = {0};
        int fd = open("f", O_RDONLY);
        *(long *)counted += fd >= 0 && pread(fd, text, 4, 3) == 4 && memcmp(text, "3456", 4) == 0;
        int copy = dup(fd);
        close(fd);
        close(copy);
    }
    return NULL;
}

static void threads(void) {
    int fd = MUST(open("f", O_RDWR | O_CREAT, 0644));
    for (int i = 0; i < 500; i++) MUST(write(fd, "0123456789", 10));
    MUST(lseek(fd, 0, SEEK_SET));
    shared_offset = fd;
    pthread_t all[8];
    long counts[8] = {0}, sum = 0;
    for (int i = 0; i < 8; i++) pthread_create(&all[i], NULL, reads, &counts[i]);
    for (int i = 0; i < 8; i++) pthread_join(all[i], NULL), sum += counts[i];
    say("read once: %ld", sum);
    memset(counts, sum = 0, sizeof counts);
    for (int i = 0; i < 8; i++) pthread_create(&all[i], NULL, opens, &counts[i]);
    IN_CHILD(show("/dev/null"); long one = 0; opens(&one); say("child %ld", one));
    for (int i = 0; i < 8; i++) pthread_join(all[i], NULL), sum += counts[i];
    say("opened: %ld", sum);
    SAY(open("f", O_RDONLY));
}

/* Signals */

static volatile sig_atomic_t signals;
static int signalled_fd;

static void writes(int signal) {
    (void)signal;
    int error = errno;
    signals += write(signalled_fd, "s", 1) == 1;
    errno = error;
}

static void handlers_use_files(void) {
    signalled_fd = MUST(open("log", O_WRONLY | O_CREAT | O_APPEND, 0644));
    struct sigaction action = {.sa_handler = writes, .sa_flags = SA_RESTART};
    sigaction(SIGUSR1, &action, NULL);
    pid_t parent = getpid(), child = fork();
    if (child == 0) {
        for (int i = 0; i < 50; i++) kill(parent, SIGUSR1), usleep(500);
        _exit(0);
    }
    int status, bad = 0, count = 0, fd = MUST(open("f", O_RDWR | O_CREAT, 0644));
    while (waitpid(child, &status, WNOHANG) == 0 || count < 50) {
        bad += pwrite(fd, "0123456789", 10, 10 * (count % 50)) != 10;
        count++;
    }
    struct stat log;
    MUST(fstat(signalled_fd, &log));
    say("%d failures, every signal written: %d", bad, log.st_size == signals && signals > 0);
    sigset_t set;
    sigprocmask(SIG_SETMASK, NULL, &set);
    say("mask empty: %d", sigisemptyset(&set));
    sigaction(SIGUSR1, NULL, &action);
    say("handler kept: %d", action.sa_handler == writes);
    MUST(unlink("log"));
    SAY(fstat(fd, &log));
    say("size %ld", (long)log.st_size);
}

static void errno_stays(void) {
    make("f", "text");
    errno = EXDEV;
    int fd = open("f", O_RDONLY);
    char byte;
    struct stat status;
    int all = read(fd, &byte, 1) == 1 && stat("f", &status) == 0 && close(fd) == 0;
    say("%d %s", all, strerrorname_np(errno));
    DIR *list = opendir(".");
    while (readdir(list)) {}
    closedir(list);
    say("%s", strerrorname_np(errno));
}

static void *appends(void *unused) {
    (void)unused;
    int fd = open("log", O_WRONLY | O_APPEND);
    for (int i = 0; i < 40; i++) {
        char line[32];
        snprintf(line, sizeof line, "%08d-%08d-%08d\n", getpid(), i, i);
        if (write(fd, line, 27) != 27) _exit(9);
    }
    return NULL;
}

static void many_append(void) {
    close(MUST(open("log", O_WRONLY | O_CREAT, 0644)));
    pid_t children[5];
    for (int i = 0; i < 5; i++)
        if ((children[i] = fork()) == 0) appends(NULL), _exit(0);
    for (int i = 0; i < 5; i++) reap(children[i]);
    FILE *stream = fopen("log", "r");
    char line[64];
    int whole = 0, odd = 0;
    while (fgets(line, sizeof line, stream))
        if (strlen(line) == 27 && line[8] == '-' && memcmp(line + 9, line + 18, 8) == 0) whole++;
        else odd++;
    say("%d whole lines, %d torn", whole, odd);
    MUST(unlink("log"));
}

static void described_calls(void) {
    void *frames[16];
    int count = backtrace(frames, 16), fd = MUST(open("f", O_RDWR | O_CREAT, 0644)), lines = 0;
    backtrace_symbols_fd(frames, count, fd);
    char text[4096];
    ssize_t length = pread(fd, text, sizeof text, 0);
    for (ssize_t i = 0; i < length; i++) lines += text[i] == '\n';
    say("lines for %d of %d calls", lines, count);
    MUST(ftruncate(fd, 0));
}

/* Links and pipes are opened by openat2 as by open. */
static void opened_by_a_structure(void) {
    unsigned long how[] = {O_RDWR | O_CREAT, 0640, 0};
    MUST(symlink("../../outside", "out"));
    int fd = SAY(syscall(SYS_openat2, AT_FDCWD, "out", how, sizeof how));
    SAY(write(fd, "text", 4));
    show("../../outside");
    SAY(unlink("../../outside"));
    how[0] = O_RDWR | O_NONBLOCK;
    how[1] = 0;
    MUST(mkfifo("pipe", 0644));
    fd = SAY(syscall(SYS_openat2, AT_FDCWD, "pipe", how, sizeof how));
    SAY(write(fd, "in the pipe", 11));
    peek(fd, 20);
}

/* Calls that fail, with the kernel's order of checks and without effect. */
static void refused_calls(void) {
    make("f", "abcdefghij");
    make("g", "ABCDEFGHIJ");
    int path = MUST(open("f", O_PATH)), in = MUST(open("f", O_RDONLY)), both = MUST(open("f", O_RDWR | O_APPEND));
    char text[16];
    unsigned long how[] = {O_RDONLY, 0, RESOLVE_NO_SYMLINKS};
    SAY(syscall(SYS_openat2, AT_FDCWD, "/nowhere/f", how, sizeof how));
    SAY(fcntl(path, F_SETFL, O_APPEND));
    SAY(fcntl(path, F_SETFD, FD_CLOEXEC));
    SAY(fsetxattr(path, "user.a", "b", 1, 0));
    SAY(fgetxattr(path, "user.a", text, sizeof text));
    SAY(flistxattr(path, text, sizeof text));
    SAY(fremovexattr(path, "user.a"));
    struct flock lock = {.l_type = F_UNLCK, .l_whence = SEEK_SET};
    SAY(fcntl(in, F_GETLK, &lock));
    struct iovec part = {"xy", 2};
    SAY(pwritev2(in, &part, 1, 0, RWF_APPEND));
    SAY(pwritev2(both, &part, 1, 0, 0x4000000));
    part.iov_base = text;
    SAY(preadv2(both, &part, 1, 0, 0x4000000));
    /* Without O_APPEND from now on. */
    int from = MUST(open("g", O_RDONLY));
    SAY(copy_file_range(from, NULL, both, NULL, 3, 0));
    SAY(fcntl(both, F_SETFL, 0));
    SAY(copy_file_range(from, NULL, both, NULL, 3, 0));
    show("f");
    part.iov_base = "xy";
    SAY(pwritev2(both, &part, 1, 1, RWF_APPEND));
    SAY(lseek(both, 0, SEEK_CUR));
    SAY(pwritev2(both, &part, 1, -1, RWF_APPEND));
    SAY(lseek(both, 0, SEEK_CUR));
    show("f");
    /* Data that cannot be written stays in the pipe. */
    int ends[2];
    MUST(pipe(ends));
    MUST(write(ends[1], "in the pipe", 11));
    off_t place = 2, before = -1;
    SAY(splice(ends[0], NULL, in, NULL, 5, 0));
    SAY(splice(ends[0], NULL, in, &place, 5, 0));
    SAY(splice(ends[0], &place, both, NULL, 5, 0));
    SAY(splice(ends[0], NULL, both, &before, 5, 0));
    SAY(splice(ends[0], NULL, both, NULL, 5, 0x1000));
    SAY(splice(ends[0], NULL, path, NULL, 5, 0));
    SAY(splice(path, NULL, ends[1], NULL, 5, 0));
    SAY(splice(in, NULL, both, NULL, 5, 0));
    SAY(splice(ends[0], NULL, both, &place, 11, 0));
    show("f");
    /* Links to an open file on another file system. */
    char own[64];
    snprintf(own, sizeof own, "/proc/self/fd/%d", in);
    SAY(linkat(AT_FDCWD, own, AT_FDCWD, "/dev/null", AT_SYMLINK_FOLLOW));
    SAY(linkat(AT_FDCWD, own, AT_FDCWD, "/dev/none/f", AT_SYMLINK_FOLLOW));
    SAY(linkat(AT_FDCWD, own, AT_FDCWD, "/dev/shm/linked-by-no-test", AT_SYMLINK_FOLLOW));
    /* And to a file that never had a name. */
    snprintf(own, sizeof own, "/proc/self/fd/%d", (int)MUST(open("/dev/shm", O_TMPFILE | O_RDWR, 0600)));
    SAY(linkat(AT_FDCWD, own, AT_FDCWD, "../../../../../../../../../../dev/null", AT_SYMLINK_FOLLOW));
}

static void pipes_are_full(void) {
    static char bytes[200000];
    int fd = MUST(open("f", O_RDWR | O_CREAT, 0644)), ends[2];
    MUST(write(fd, bytes, sizeof bytes));
    MUST(lseek(fd, 0, SEEK_SET));
    MUST(pipe(ends));
    SAY(splice(ends[0], NULL, fd, NULL, 10, SPLICE_F_NONBLOCK));
    SAY(fcntl(ends[1], F_SETPIPE_SZ, 8192));
    SAY(splice(fd, NULL, ends[1], NULL, 65536, 0));
    SAY(splice(fd, NULL, ends[1], NULL, 65536, SPLICE_F_NONBLOCK));
    SAY(read(ends[0], bytes, 4096));
    off64_t at = 12288;
    SAY(splice(fd, &at, ends[1], NULL, 65536, 0));
    say("%ld %ld", (long)at, (long)lseek(fd, 0, SEEK_CUR));
    SAY(fcntl(ends[1], F_SETPIPE_SZ, 1 << 20));
    SAY(splice(fd, NULL, ends[1], NULL, sizeof bytes, 0));
    SAY(lseek(fd, 0, SEEK_CUR));
    SAY(splice(fd, NULL, ends[1], NULL, 10, 0));
    signal(SIGPIPE, SIG_IGN);
    MUST(close(ends[0]));
    SAY(splice(fd, &at, ends[1], NULL, 10, 0));
}

/* Newer than some headers. */
#define FCHMODAT2 452

/* Attributes of files named only by their descriptors. */
static void attributes_of_what_is_open(void) {
    make("f", "text");
    int by_path = MUST(open("f", O_PATH)), fd = MUST(open("f", O_RDONLY)), here = MUST(open(".", O_PATH));
    struct timespec times[2] = {{1000, 1}, {2000, 2}};
    struct stat status;
    SAY(utimensat(fd, "", times, AT_EMPTY_PATH));
    SAY(stat("f", &status));
    say("%ld %ld", (long)status.st_atime, (long)status.st_mtime);
    times[1].tv_sec = 3000;
    SAY(utimensat(by_path, "", times, AT_EMPTY_PATH));
    SAY(utimensat(fd, "", times, 0));
    SAY(fchownat(by_path, "", 7, -1, AT_EMPTY_PATH));
    SAY(syscall(FCHMODAT2, by_path, "", 0640, AT_EMPTY_PATH));
    SAY(stat("f", &status));
    say("%ld %o %d", (long)status.st_mtime, status.st_mode, status.st_uid);
    SAY(syscall(FCHMODAT2, here, "f", 0604, AT_SYMLINK_NOFOLLOW));
    SAY(stat("f", &status));
    say("%o", status.st_mode);
    /* The working directory. */
    SAY(fstatat(AT_FDCWD, "", &status, AT_EMPTY_PATH));
    say("%o", status.st_mode & S_IFMT);
    SAY(fchownat(AT_FDCWD, "", 7, -1, AT_EMPTY_PATH));
    SAY(stat(".", &status));
    say("%d", status.st_uid);
    SAY(faccessat(AT_FDCWD, "", R_OK, AT_EMPTY_PATH));
    SAY(utimensat(AT_FDCWD, "", times, AT_EMPTY_PATH));
    /* Flags that do not exist. */
    SAY(unlinkat(here, "f", 0x40000));
    SAY(linkat(here, "f", here, "g", 0x40000));
    SAY(fstatat(here, "f", &status, 0x40000));
    SAY(fchownat(here, "f", 8, -1, 0x40000));
    SAY(fchmodat(here, "f", 0600, 0x40000));
    SAY(faccessat(here, "f", R_OK, 0x40000));
    SAY(utimensat(here, "f", times, 0x40000));
    SAY(stat("f", &status));
    /* Times that there are none of. */
    struct timeval old[2] = {{1, 1000000}, {2, 0}};
    SAY(utimes("f", old));
    old[0].tv_usec = LONG_MAX / 2;
    SAY(futimes(fd, old));
    const long wrong[] = {-1, 1000000000, (1L << 32) + 5, (1L << 32) + UTIME_NOW, (1L << 32) + UTIME_OMIT};
    for (int i = 0; i < 5; i++) {
        times[0].tv_nsec = wrong[i];
        SAY(utimensat(here, "f", times, 0));
        SAY(futimens(fd, times));
    }
    SAY(stat("f", &status));
    say("%ld", (long)status.st_mtime);
    int fresh = MUST(open("g", O_CREAT | O_EXCL | O_RDWR, 0600));
    SAY(futimens(fresh, times));
    times[0].tv_nsec = 1000000000;
    SAY(futimens(fresh, times));
    times[0].tv_nsec = UTIME_OMIT;
    SAY(futimens(fresh, times));
    SAY(close(fresh));
}

/* Refused as a whole if it is not known how to wait for it. */
static void lists_of_requests(void) {
    make("f", "text");
    struct aiocb request = {.aio_fildes = MUST(open("f", O_WRONLY)), .aio_buf = "TE", .aio_nbytes = 2, .aio_lio_opcode = LIO_WRITE};
    struct aiocb *list[] = {&request};
    SAY(lio_listio(77, list, 1, NULL));
    show("f");
    SAY(lio_listio(LIO_WAIT, list, 1, NULL));
    SAY(aio_return(&request));
    show("f");
}

/* Not what they lead to. */
static void access_to_links(void) {
    make("f", "text");
    MUST(chmod("f", 0));
    MUST(symlink("f", "link"));
    MUST(symlink("none", "dangling"));
    SAY(faccessat(AT_FDCWD, "dangling", F_OK, 0));
    SAY(faccessat(AT_FDCWD, "dangling", F_OK, AT_SYMLINK_NOFOLLOW));
    SAY(faccessat(AT_FDCWD, "link", X_OK, 0));
    SAY(faccessat(AT_FDCWD, "link", X_OK, AT_SYMLINK_NOFOLLOW));
    SAY(faccessat(AT_FDCWD, "link", R_OK | W_OK, AT_SYMLINK_NOFOLLOW | AT_EACCESS));
    SAY(faccessat(AT_FDCWD, "f", X_OK, AT_SYMLINK_NOFOLLOW));
    SAY(faccessat(AT_FDCWD, "none", F_OK, AT_SYMLINK_NOFOLLOW));
}

/* What is only advice, or a wish, is checked, too. */
static void advice(void) {
    make("f", "text");
    int fd = MUST(open("f", O_RDONLY)), path = MUST(open("f", O_PATH)), to = MUST(open("f", O_WRONLY)), here = MUST(open(".", O_RDONLY));
    SAY(posix_fadvise(fd, 0, 0, POSIX_FADV_NOREUSE));
    SAY(posix_fadvise(fd, 0, -1, POSIX_FADV_NORMAL));
    SAY(posix_fadvise(fd, 0, 0, 99));
    SAY(posix_fadvise(path, 0, 0, POSIX_FADV_NORMAL));
    SAY(syscall(SYS_fadvise64, fd, 0L, 0L, 99));
    SAY(syscall(SYS_fadvise64, fd, 0L, 0L, POSIX_FADV_WILLNEED));
    SAY(readahead(fd, 0, 10));
    SAY(readahead(to, 0, 10));
    SAY(readahead(here, 0, 10));
    SAY(sync_file_range(fd, 0, 0, SYNC_FILE_RANGE_WRITE));
    SAY(sync_file_range(fd, 0, 0, 0x10));
    SAY(sync_file_range(fd, -1, 0, SYNC_FILE_RANGE_WRITE));
    SAY(sync_file_range(fd, 1, -1, SYNC_FILE_RANGE_WRITE));
    SAY(sync_file_range(fd, LONG_MAX, 1, SYNC_FILE_RANGE_WRITE));
    SAY(syncfs(path));
    SAY(syncfs(fd));
}

static const struct test tests[] = {
    {"duplicates", duplicates_share_the_offset},
    {"status-flags", duplicates_share_status_flags},
    {"children", children_share_the_offset},
    {"standard", onto_the_standard_descriptors},
    {"numbers", numbers_are_the_lowest_free},
    {"limits", limits},
    {"many", many_are_open},
    {"wanted", any_number_is_wanted},
    {"locked-meanwhile", locked_meanwhile},
    {"high-numbers", high_numbers},
    {"close-all", all_are_closed},
    {"others", others_are_free},
    {"wanted-while-waiting", wanted_while_a_thread_waits},
    {"close-on-exec", close_on_exec},
    {"passed", passed_over_a_socket},
    {"together", passed_together},
    {"readiness", readiness},
    {"names", by_their_names},
    {"names-and-links", names_by_way_of_links},
    {"unnamed", unnamed_files},
    {"replaced", unlinked_and_replaced},
    {"path", path_descriptors},
    {"moved", moved_without_buffers},
    {"moved_between_file_systems", moved_between_file_systems},
    {"full-pipes", pipes_are_full},
    {"attributes", attributes_of_what_is_open},
    {"access-to-links", access_to_links},
    {"advice", advice},
    {"lists-of-requests", lists_of_requests},
    {"threads", threads},
    {"handlers", handlers_use_files},
    {"errno", errno_stays},
    {"append", many_append},
    {"described-calls", described_calls},
    {"structure", opened_by_a_structure},
    {"refused", refused_calls},
    {NULL, NULL},
};

int main(int count, char **arguments) { return run(count, arguments, tests); }
