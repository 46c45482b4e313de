/* Names that end with slashes, `.` or `..`, also behind links: whether a call looks at what is there, makes it,
 * removes it or renames it, it treats them in a way of its own. */
#include "case.h"

static char w[PATH_MAX + 8];

static const char *in(const char *name) {
    static char texts[4][2 * PATH_MAX];
    static int turn;
    char *text = texts[turn++ % 4];
    snprintf(text, sizeof texts[0], "%s/%s", w, name);
    return text;
}

/* Targets of links: `rN` is a relative one, `aN` one that the server cannot follow. */
static const char *const to[] = {"d",      "f",     "none", "d/.", "d/..", "d/e/../.",
                                 "none/.", "none/", "f/.",  "d/",  "f/",   "d/e/.."};

/* Removes a link: those that lead out say where the directory is, which differs. */
static void no_link(const char *path) {
    struct stat s;
    if (lstat(path, &s) == 0 && S_ISLNK(s.st_mode)) MUST(unlink(path));
}

/* Begins anew, with the link that a path begins with. */
static void build(const char *path) {
    static int number;
    static char name[8];
    char old[PATH_MAX + 32];
    snprintf(w, sizeof w, "%s/w", top);
    snprintf(old, sizeof old, "%s/old%d", top, number++);
    if (number > 1) no_link(in(name)), no_link(in("new")), MUST(rename(w, old));
    MUST(mkdir(w, 0755));
    MUST(mkdir(in("d"), 0755));
    MUST(mkdir(in("d/e"), 0755));
    MUST(mkdir(in("g"), 0755));
    MUST(close(MUST(creat(in("f"), 0644))));
    if (!strchr("ra", *path)) return;
    const char *target = to[atoi(path + 1)];
    snprintf(name, sizeof name, "%.*s", (int)strcspn(path, "/"), path);
    MUST(symlink(*path == 'r' ? target : in(target), in(name)));
}

static const char *const ends[] = {"", "/", "/.", "/./", "/..", "/../"};
static const char *const names[] = {"d",  "f",  "none", "f/x", "d/e", "none/x", "r0",   "r1",   "r2",
                                    "r3", "r4", "r5",   "r6",  "r7",  "r8",     "r9",   "r10",  "r11",
                                    "a0", "a1", "a2",   "a3",  "a4",  "a5",     "a6",   "a7",   "a8",
                                    "a9", "a10", "a11", "r0/e", "a0/e", "a0/x", "a1/x", "a2/x"};

static int opened(const char *path, int flags) {
    int fd = open(path, flags, 0644);
    return fd < 0 ? -1 : close(fd);
}

enum { CALLS = 25, READS = 9 };

/* The first calls change nothing. */
static int call(int number, const char *path) {
    struct stat s;
    char text[PATH_MAX];
    switch (number) {
    case 0: return stat(path, &s);
    case 1: return lstat(path, &s);
    case 2: return readlink(path, text, sizeof text) < 0 ? -1 : 0;
    case 3: return access(path, F_OK);
    case 4: return opened(path, O_RDONLY);
    case 5: return opened(path, O_RDONLY | O_DIRECTORY);
    case 6: return opened(path, O_CREAT | O_PATH | O_TRUNC | O_RDWR);
    case 7: return opened(path, O_CREAT | O_DIRECTORY);
    case 8: return opened(path, O_NOFOLLOW);
    case 9: return opened(path, O_CREAT | O_WRONLY);
    case 10: return opened(path, O_CREAT | O_WRONLY | O_TRUNC);
    case 11: return opened(path, O_CREAT | O_EXCL | O_RDWR);
    case 12: return opened(path, O_CREAT | O_NOFOLLOW | O_RDWR);
    case 13: return mkdir(path, 0755);
    case 14: return mknod(path, S_IFREG | 0644, 0);
    case 15: return symlink("x", path);
    case 16: return rmdir(path);
    case 17: return unlink(path);
    case 18: return truncate(path, 1);
    case 19: return link(in("f"), path);
    case 20: return linkat(AT_FDCWD, path, AT_FDCWD, in("new"), AT_SYMLINK_FOLLOW);
    case 21: return link(path, in("new"));
    case 22: return rename(path, in("new"));
    case 23: return rename(in("f"), path);
    default: return rename(in("g"), path);
    }
}

/* Tries every `step`th name. */
static void all(const char *base, size_t step) {
    for (size_t n = 0; n < sizeof names / sizeof *names; n += step) {
        build(names[n]);
        for (size_t e = 0; e < sizeof ends / sizeof *ends; e++) {
            char path[3 * PATH_MAX], line[CALLS * 16] = {0};
            snprintf(path, sizeof path, "%s%s%s", base, names[n], ends[e]);
            for (int i = 0; i < CALLS; i++) {
                int failed = call(i, path);
                strcat(strcat(line, " "), failed ? strerrorname_np(errno) : "0");
                if (!failed && i >= READS) build(names[n]);
            }
            say("%s%s:%s", names[n], ends[e], line);
        }
    }
    build("d");
}

static void relative(void) { all("w/", 1); }

static void absolute(void) {
    char base[PATH_MAX + 16];
    snprintf(base, sizeof base, "%s/w/", top);
    all(base, 3);
}

/* Returns the last two names of the directory of the case, and cuts them off. */
static const char *cut(char *path) {
    char *name = strrchr(path, '/');
    *name = 0;
    char *cut = strrchr(path, '/');
    *cut = 0, *name = '/';
    return cut + 1;
}

/* Written in an odd way before the working directory of the program comes. */
static void odd(void) {
    char base[2 * PATH_MAX], path[PATH_MAX];
    strcpy(path, top);
    const char *rest = cut(path);
    snprintf(base, sizeof base, "%s//.//%s/w/", path, rest);
    all(base, 3);
}

/* From the local directory above. */
static void from_above(void) {
    char base[2 * PATH_MAX], path[PATH_MAX];
    strcpy(path, top);
    snprintf(base, sizeof base, "./%s/w/", cut(path));
    MUST(chdir(path));
    all(base, 3);
}

static void top_of_all(void) {
    MUST(chdir(".."));
    SAY(rmdir("."));
    SAY(rmdir(".//./"));
    SAY(unlink("."));
    SAY(mkdir(".", 0755));
    SAY(open(".", O_CREAT | O_WRONLY, 0644));
    SAY(open(".", O_CREAT | O_EXCL, 0644));
    SAY(rename(".", "top_of_all/x"));
}

int main(int count, char **arguments) {
    static const struct test tests[] = {
        {"relative", relative}, {"absolute", absolute}, {"odd", odd}, {"from_above", from_above},
        {"top_of_all", top_of_all}, {0},
    };
    return run(count, arguments, tests);
}
