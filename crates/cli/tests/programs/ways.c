/* Names that lead from a local directory into the remote one through a link, and out of it, with functions
 * that libc implements itself. */
#include "case.h"
#include <fts.h>
#include <ftw.h>
#include <glob.h>
#include <mntent.h>
#include <spawn.h>
#include <sys/un.h>
#include <wordexp.h>

extern char **environ;
/* The directory, named through the link. */
static char way[PATH_MAX];

static const char *in(const char *name) {
    static char paths[8][PATH_MAX + 16];
    static int next;
    char *path = paths[next++ % 8];
    snprintf(path, sizeof paths[0], "%.4000s/%s", way, name);
    return path;
}

static int visit(const char *path, const struct stat *status, int kind, struct FTW *place) {
    (void)status;
    say("visits %s, %d, level %d", strrchr(path, '/'), kind, place->level);
    return 0;
}

static void temporaries(void) {
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s", in("tXXXXXX"));
    int fd = mkstemp(path);
    say("file %d", fd >= 0);
    SAY(write(fd, "abc", 3));
    SAY(unlink(path));
    snprintf(path, sizeof path, "%s", in("tXXXXXX.c"));
    say("with an end %d", mkostemps(path, 2, O_APPEND) >= 0);
    SAY(remove(path));
    snprintf(path, sizeof path, "%s", in("tXXXXXX"));
    say("directory %d", mkdtemp(path) != NULL);
    SAY(remove(path));
    snprintf(path, sizeof path, "%s", in("tXXXXXX"));
    say("free name %d", strlen(mktemp(path)) > 7);
    snprintf(path, sizeof path, "%s", in("tXXXXX"));
    SAY(mkstemp(path));
    snprintf(path, sizeof path, "%s", in("none/tXXXXXX"));
    SAY(mkstemp(path));
    SAY(remove(in("none")));
}

static void walks(void) {
    struct dirent **list;
    SAY(scandir(way, &list, NULL, alphasort));
    SAY(scandirat(AT_FDCWD, in("d"), &list, NULL, alphasort));
    SAY(scandir(in("none"), &list, NULL, alphasort));
    const char *patterns[] = {"*", "[ab]", "d/*", "{a,b}", "none*"};
    for (int i = 0; i < 5; i++) {
        glob_t found = {0};
        int result = glob(in(patterns[i]), GLOB_BRACE | GLOB_MARK, NULL, &found);
        say("%s: %d, %zu", patterns[i], result, result ? 0 : found.gl_pathc);
    }
    char both[2 * PATH_MAX + 8];
    snprintf(both, sizeof both, "{%s,%s}", in("a"), in("d/*"));
    glob_t found = {0};
    say("both: %d, %zu", glob(both, GLOB_BRACE, NULL, &found), found.gl_pathc);
    wordexp_t words = {0};
    say("words: %d, %zu", wordexp(in("[ab]"), &words, 0), words.we_wordc);
    SAY(nftw(in("d"), visit, 5, 0));
    SAY(nftw(in("d"), visit, 5, FTW_PHYS | FTW_CHDIR | FTW_DEPTH));
    char root[PATH_MAX], *roots[] = {root, NULL};
    snprintf(root, sizeof root, "%s", in("d"));
    for (int options = FTS_PHYSICAL; options; options = options & FTS_NOCHDIR ? 0 : options | FTS_NOCHDIR) {
        FTS *stream = fts_open(roots, options, NULL);
        for (FTSENT *entry; (entry = fts_read(stream));) say("%s, %d", entry->fts_name, entry->fts_info);
        fts_close(stream);
    }
}

static void streams(void) {
    FILE *stream = fopen(in("a"), "r");
    stream = freopen(in("b"), "r", stream);
    say("%c", stream ? fgetc(stream) : '-');
    stream = freopen(in("c"), "wx", stream ? stream : stdin);
    say("new %d", stream != NULL);
    if (stream) fputs("text of c", stream);
    if (stream) SAY(fclose(stream));
    show(in("c"));
    make(in("table"), "device /place kind options 0 0\n");
    stream = setmntent(in("table"), "r");
    struct mntent *entry = stream ? getmntent(stream) : NULL;
    say("%s", entry ? entry->mnt_dir : "none");
}

static struct sockaddr_un address(const char *name) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof address.sun_path, "%s", in(name));
    return address;
}

/* Returns the last part of an address that was returned. */
static const char *last(const struct sockaddr_un *told, socklen_t length) {
    const char *slash = length > 2 ? strrchr(told->sun_path, '/') : NULL;
    return slash ? slash : "none";
}

/* Prints the peer's address, with each of the calls that return it. */
static void peers(int listens, int gets) {
    struct sockaddr_un name = address("s"), caller = address("c"), told;
    int fd = MUST(socket(AF_UNIX, SOCK_STREAM, 0)), from = MUST(socket(AF_UNIX, SOCK_DGRAM, 0));
    socklen_t length = sizeof told;
    SAY(bind(fd, (struct sockaddr *)&caller, sizeof caller));
    SAY(connect(fd, (struct sockaddr *)&name, sizeof name));
    SAY(getpeername(fd, (struct sockaddr *)&told, &length));
    say("%s", last(&told, length));
    int accepted = MUST(accept(listens, (struct sockaddr *)&told, (length = sizeof told, &length)));
    say("%s", last(&told, length));
    MUST(close(accepted));
    MUST(unlink(in("c")));
    struct sockaddr_un to = address("g");
    caller = address("e");
    SAY(bind(from, (struct sockaddr *)&caller, sizeof caller));
    char text[16];
    for (int i = 0; i < 3; i++) SAY(sendto(from, "m", 1, 0, (struct sockaddr *)&to, sizeof to));
    length = sizeof told;
    SAY(recvfrom(gets, text, sizeof text, 0, (struct sockaddr *)&told, &length));
    say("%s", last(&told, length));
    struct iovec part = {text, sizeof text};
    struct mmsghdr message = {.msg_hdr = {.msg_name = &told, .msg_namelen = sizeof told, .msg_iov = &part, .msg_iovlen = 1}};
    SAY(recvmsg(gets, &message.msg_hdr, 0));
    say("%s", last(&told, message.msg_hdr.msg_namelen));
    message.msg_hdr.msg_namelen = sizeof told;
    SAY(recvmmsg(gets, &message, 1, 0, NULL));
    say("%s", last(&told, message.msg_hdr.msg_namelen));
    SAY(sendto(gets, "a", 1, 0, (struct sockaddr *)&told, message.msg_hdr.msg_namelen));
    SAY(recv(from, text, sizeof text, MSG_DONTWAIT));
    MUST(unlink(in("e")));
}

static void sockets(void) {
    struct sockaddr_un name = address("s"), datagrams = address("g"), none = address("none"), file = address("a");
    int listens = MUST(socket(AF_UNIX, SOCK_STREAM, 0)), fd = MUST(socket(AF_UNIX, SOCK_STREAM, 0));
    SAY(bind(listens, (struct sockaddr *)&name, sizeof name));
    SAY(listen(listens, 3));
    struct sockaddr_un told = {0};
    socklen_t length = sizeof told;
    SAY(getsockname(listens, (struct sockaddr *)&told, &length));
    say("%d, %d", (int)length > 2, strcmp(strrchr(told.sun_path, '/'), "/s"));
    SAY(connect(fd, (struct sockaddr *)&name, sizeof name));
    fd = MUST(socket(AF_UNIX, SOCK_DGRAM, 0));
    int gets = MUST(socket(AF_UNIX, SOCK_DGRAM, 0));
    SAY(bind(gets, (struct sockaddr *)&datagrams, sizeof datagrams));
    SAY(sendto(fd, "one", 3, 0, (struct sockaddr *)&datagrams, sizeof datagrams));
    struct iovec part = {"two", 3};
    struct msghdr message = {.msg_name = &datagrams, .msg_namelen = sizeof datagrams, .msg_iov = &part, .msg_iovlen = 1};
    SAY(sendmsg(fd, &message, 0));
    char text[16] = "";
    SAY(recv(gets, text, 15, MSG_DONTWAIT));
    SAY(recv(gets, text + 3, 12, MSG_DONTWAIT));
    say("%s", text);
    struct mmsghdr several[3] = {{.msg_hdr = message}, {.msg_hdr = message}, {.msg_hdr = message}};
    SAY(sendmmsg(fd, several, 2, 0));
    say("%u %u", several[0].msg_len, several[1].msg_len);
    several[1].msg_hdr.msg_name = &none;
    SAY(sendmmsg(fd, several, 3, 0));
    SAY(sendmmsg(fd, several + 1, 2, 0));
    SAY(sendmmsg(fd, several, 0, 0));
    for (int i = 0; i < 4; i++) SAY(recv(gets, text, 15, MSG_DONTWAIT));
    peers(listens, gets);
    SAY(sendto(fd, "x", 1, 0, (struct sockaddr *)&none, sizeof none));
    SAY(sendto(fd, "x", 1, 0, (struct sockaddr *)&file, sizeof file));
    SAY(sendto(fd, "x", 1, 0, NULL, 0));
    SAY(unlink(in("g")));
    SAY(sendto(fd, "x", 1, 0, (struct sockaddr *)&datagrams, sizeof datagrams));
    SAY(unlink(in("s")));
}

static void spawns(void) {
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 1, in("out"), O_WRONLY | O_CREAT, 0644);
    char *arguments[] = {"echo", "spawned", NULL};
    pid_t child = -1;
    say("spawn %d", posix_spawn(&child, "/bin/echo", &actions, NULL, arguments, environ));
    if (child > 0) reap(child);
    show(in("out"));
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addchdir_np(&actions, in("d"));
    posix_spawn_file_actions_addopen(&actions, 1, "out", O_WRONLY | O_CREAT, 0644);
    child = -1;
    say("spawn %d", posix_spawnp(&child, "echo", &actions, NULL, arguments, environ));
    if (child > 0) reap(child);
    show(in("d/out"));
}

static void all(void) {
    make(in("a"), "a");
    make(in("b"), "b");
    MUST(mkdir(in("d"), 0755));
    make(in("d/f"), "f");
    walks();
    temporaries();
    streams();
    sockets();
    spawns();
}

/* The parent of the remote directory is local. */
static void inward(void) {
    char target[PATH_MAX + 8];
    snprintf(target, sizeof target, "%s/below", top);
    MUST(mkdir("below", 0755));
    MUST(symlink(target, "../../inward"));
    snprintf(way, sizeof way, "../../inward");
    all();
    MUST(unlink("../../inward"));
}

static void outward(void) {
    MUST(mkdir("../../outward", 0755));
    MUST(symlink("../../outward", "link"));
    snprintf(way, sizeof way, "link");
    all();
    SAY(system("rm -r ../../outward"));
}

static void straight(void) {
    snprintf(way, sizeof way, ".");
    all();
}

static const struct test tests[] = {
    {"inward", inward},
    {"outward", outward},
    {"straight", straight},
    {NULL, NULL},
};

int main(int count, char **arguments) { return run(count, arguments, tests); }
