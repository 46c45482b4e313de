/* Processes that become another user, with files that others of the run have created or left. Where they may
 * not, they stay who they are. They remove what they create, since a server may create it for its own user. */
#include "case.h"
#include <grp.h>
#include <sys/mman.h>
#include <sys/un.h>

/* Becomes the user nobody for good. */
static void become_nobody(void) {
    if (geteuid() != 0) return;
    MUST(setgroups(0, NULL));
    MUST(setgid(65534));
    MUST(setuid(65534));
}

/* Creates a folder that everybody may use, whatever the umask. */
static void make_open(const char *path) {
    MUST(mkdir(path, 0777));
    MUST(chmod(path, 0777));
}

static void here(const char *who) {
    char path[PATH_MAX];
    say("%s is in %s", who, getcwd(path, sizeof path) ? path : strerrorname_np(errno));
}

static void folders(void) {
    umask(077);
    make_open("a");
    make_open("a/of-root");
    MUST(chdir("a"));
    IN_CHILD({
        become_nobody();
        here("child");
        SAY(chdir("of-root"));
        here("child");
        SAY(chdir(".."));
        SAY(mkdir("of-child", 0777));
        SAY(chmod("of-child", 0777));
        SAY(chdir("of-child"));
        here("child");
        SAY(rename("../of-child", "../renamed"));
        here("child");
        SAY(mkdir("../removed", 0777));
        SAY(chdir("../removed"));
        SAY(rmdir("../removed"));
        here("child");
        SAY(chdir(top));
        SAY(chdir("/"));
        SAY(chdir(top));
    });
    SAY(chdir("renamed"));
    here("parent");
    MUST(chdir(".."));
    SAY(rmdir("renamed"));
}

static void mappings(void) {
    umask(077);
    make("f", "first");
    MUST(chmod("f", 0666));
    int fd = MUST(open("f", O_RDWR));
    char *at = mmap(NULL, 5, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED) _exit(93);
    at[0] = 'F';
    IN_CHILD({
        become_nobody();
        int own = SAY(open("f", O_RDWR));
        char *mine = mmap(NULL, 5, PROT_READ | PROT_WRITE, MAP_SHARED, own, 0);
        if (mine == MAP_FAILED) say("mmap: %s", strerrorname_np(errno));
        else say("child sees %.5s", mine), mine[1] = 'I';
    });
    say("parent sees %.5s", at);
}

static void pipes(void) {
    umask(077);
    MUST(mkfifo("p", 0666));
    MUST(chmod("p", 0666));
    int fd = MUST(open("p", O_RDWR));
    MUST(write(fd, "text", 4));
    IN_CHILD({
        become_nobody();
        int own = SAY(open("p", O_RDONLY));
        peek(own, 4);
    });
}

static void sockets(void) {
    umask(077);
    struct sockaddr_un name = {.sun_family = AF_UNIX, .sun_path = "s"};
    int fd = MUST(socket(AF_UNIX, SOCK_STREAM, 0));
    MUST(bind(fd, (struct sockaddr *)&name, sizeof name));
    MUST(listen(fd, 1));
    MUST(chmod("s", 0777));
    IN_CHILD({
        become_nobody();
        int own = MUST(socket(AF_UNIX, SOCK_STREAM, 0));
        SAY(connect(own, (struct sockaddr *)&name, sizeof name));
    });
}

/* Copies this program. */
static void copy_to(const char *path) {
    char bytes[65536];
    int from = MUST(open(self, O_RDONLY));
    int to = MUST(open(path, O_WRONLY | O_CREAT | O_EXCL, 0755));
    ssize_t count;
    while ((count = MUST(read(from, bytes, sizeof bytes))) > 0) MUST(write(to, bytes, count));
    MUST(fchmod(to, 0755));
    MUST(close(from));
    MUST(close(to));
}

static void programs(void) {
    umask(077);
    make_open("bin");
    copy_to("bin/one");
    copy_to("bin/two");
    for (int as_nobody = 0; as_nobody < 2; as_nobody++)
        IN_CHILD({
            if (as_nobody) become_nobody();
            const char *path = as_nobody ? "bin/two" : "bin/one";
            execl(path, path, "--job", "say", path, top, (char *)NULL);
            say("%s: %s", path, strerrorname_np(errno));
        });
}

/* Processes that become as many users at the same time. */
static void at_once(void) {
    enum { USERS = 80, FIRST = 54000 };
    int ready[2], go[2];
    char byte;
    make("f", "text");
    MUST(pipe(ready));
    MUST(pipe(go));
    for (int i = 0; i < USERS; i++) {
        if (MUST(fork())) continue;
        close(ready[0]);
        close(go[1]);
        if (geteuid() == 0) MUST(setuid(FIRST + i));
        close(ready[1]);
        /* All are other users now. */
        MUST(read(go[0], &byte, 1));
        int fd = open("f", O_RDONLY);
        if (fd < 0) say("open: %s", strerrorname_np(errno));
        _exit(fd < 0);
    }
    close(ready[1]);
    close(go[0]);
    MUST(read(ready[0], &byte, 1));
    close(go[1]);
    int failed = 0, status;
    for (int i = 0; i < USERS; i++) {
        MUST(wait(&status));
        failed += status != 0;
    }
    say("%d of %d failed", failed, USERS);
}

int main(int count, char **arguments) {
    static const struct test tests[] = {
        {"folders", folders}, {"mappings", mappings}, {"pipes", pipes},
        {"sockets", sockets}, {"programs", programs}, {"at_once", at_once}, {NULL, NULL},
    };
    return run(count, arguments, tests);
}
