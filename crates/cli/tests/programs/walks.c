/* Libc functions that walk directories themselves: fts, and glob with the program's own functions. */
#include "case.h"
#include <fts.h>
#include <ftw.h>
#include <glob.h>

static void plant(void) {
    MUST(mkdir("t", 0755));
    MUST(mkdir("t/a", 0755));
    MUST(mkdir("t/a/deep", 0755));
    MUST(mkdir("t/empty", 0755));
    MUST(mkdir("t/z", 0755));
    make("t/a/deep/f", "12345");
    make("t/a/g", "1");
    make("t/z/h", "");
    make("t/file", "123");
    MUST(symlink("a/g", "t/link"));
    MUST(symlink("nowhere", "t/dangling"));
    MUST(symlink("..", "t/z/up"));
    MUST(mkfifo("t/fifo", 0644));
}

static int by_name(const FTSENT **one, const FTSENT **other) {
    return strcmp((*one)->fts_name, (*other)->fts_name);
}

static int backwards(const FTSENT **one, const FTSENT **other) { return -by_name(one, other); }

static void tell(const FTSENT *entry, int options) {
    static const char *names[] = {"?", "D", "DC", "DEFAULT", "DNR", "DOT", "DP", "ERR", "F", "INIT", "NS", "NSOK", "SL", "SLNONE", "W"};
    int has_status = !(options & FTS_NOSTAT) && entry->fts_info != FTS_NS && entry->fts_info != FTS_NSOK;
    struct stat status;
    say("%*s%s %s (%s) level %d, name %d, path %d, mode %o, size %ld, error %d, parent %s, number %ld%s",
        entry->fts_level * 2, "", names[entry->fts_info], entry->fts_path, entry->fts_name, entry->fts_level,
        entry->fts_namelen, entry->fts_pathlen == strlen(entry->fts_path), has_status ? entry->fts_statp->st_mode : 0,
        has_status && S_ISREG(entry->fts_statp->st_mode) ? (long)entry->fts_statp->st_size : 0L, entry->fts_errno,
        entry->fts_parent->fts_level >= 0 ? entry->fts_parent->fts_name : "-", entry->fts_number,
        lstat(entry->fts_accpath, &status) == 0 ? "" : ", gone");
    if (entry->fts_info == FTS_DC) say("  as %s", entry->fts_cycle->fts_name);
    if (options & FTS_NOCHDIR && strcmp(entry->fts_accpath, entry->fts_path) != 0) say("  by %s", entry->fts_accpath);
}

static void walk(char *const *roots, int options, int (*compare)(const FTSENT **, const FTSENT **)) {
    say("options %x", options);
    FTS *stream = fts_open(roots, options, compare);
    if (!stream) {
        say("not opened: %s", strerrorname_np(errno));
        return;
    }
    FTSENT *entry;
    while ((entry = fts_read(stream))) {
        tell(entry, options);
        entry->fts_number = entry->fts_level + 100;
    }
    say("at the end %s", errno ? strerrorname_np(errno) : "nothing");
    SAY(fts_close(stream));
}

static void walks(void) {
    plant();
    char *one[] = {"t", NULL}, *several[] = {"t/z/", "t/file", "t/none", "t/link", "t/a/deep", NULL}, *none[] = {NULL},
         *empty[] = {"", NULL}, *here[] = {".", NULL};
    char full[PATH_MAX + 2];
    snprintf(full, sizeof full, "%s/t", top);
    char *whole[] = {full, NULL};
    const int options[] = {
        FTS_PHYSICAL,
        FTS_PHYSICAL | FTS_NOCHDIR,
        FTS_LOGICAL,
        FTS_PHYSICAL | FTS_SEEDOT | FTS_NOCHDIR,
        FTS_PHYSICAL | FTS_COMFOLLOW | FTS_XDEV,
        FTS_PHYSICAL | FTS_NOSTAT | FTS_NOCHDIR,
        FTS_LOGICAL | FTS_NOSTAT,
        FTS_NOSTAT | FTS_NOCHDIR,
    };
    for (int i = 0; i < 8; i++) {
        walk(one, options[i], by_name);
        walk(several, options[i], by_name);
        walk(whole, options[i], backwards);
        walk(here, options[i], by_name);
    }
    walk(none, FTS_PHYSICAL, NULL);
    walk(empty, FTS_PHYSICAL, NULL);
    walk(one, 0x1000, NULL);
}

static void instructions(void) {
    plant();
    char *one[] = {"t", NULL};
    for (int physical = 0; physical < 2; physical++) {
        FTS *stream = fts_open(one, FTS_PHYSICAL | (physical ? FTS_NOCHDIR : 0), by_name);
        FTSENT *entry = fts_children(stream, 0);
        say("first: %s", entry ? entry->fts_name : "none");
        int agains = 0;
        while ((entry = fts_read(stream))) {
            tell(entry, 0);
            if (entry->fts_info == FTS_D && strcmp(entry->fts_name, "a") == 0) {
                for (FTSENT *child = fts_children(stream, FTS_NAMEONLY); child; child = child->fts_link)
                    say("has %s", child->fts_name);
            }
            if (entry->fts_info == FTS_D && strcmp(entry->fts_name, "z") == 0) {
                for (FTSENT *child = fts_children(stream, 0); child; child = child->fts_link) {
                    say("has %s, %d", child->fts_name, child->fts_info);
                    if (strcmp(child->fts_name, "h") == 0) SAY(fts_set(stream, child, FTS_SKIP));
                }
            }
            if (entry->fts_info == FTS_D && strcmp(entry->fts_name, "deep") == 0) SAY(fts_set(stream, entry, FTS_SKIP));
            if (entry->fts_info == FTS_SL && strcmp(entry->fts_name, "link") == 0) SAY(fts_set(stream, entry, FTS_FOLLOW));
            if (strcmp(entry->fts_name, "file") == 0 && agains++ == 0) SAY(fts_set(stream, entry, FTS_AGAIN));
            if (entry->fts_info == FTS_F) SAY(fts_set(stream, entry, 99));
        }
        SAY(fts_close(stream));
    }
    FTS *stream = fts_open(one, FTS_PHYSICAL | FTS_NOCHDIR, by_name);
    for (int i = 0; i < 4; i++) fts_read(stream);
    SAY(fts_close(stream));
}

static int opened, asked;

static void own_close(void *stream) { closedir(stream); }

static struct dirent *own_read(void *stream) { return readdir(stream); }

static void *own_open(const char *path) {
    opened++;
    return opendir(path);
}

static int own_stat(const char *path, struct stat *status) {
    asked++;
    return stat(path, status);
}

static int own_lstat(const char *path, struct stat *status) {
    asked++;
    return lstat(path, status);
}

static void patterns(void) {
    plant();
    const char *wanted[] = {"t/*", "t/*/*", "t/{a,z}/*", "t/[fl]*", "t/none*", "*/a/deep/f"};
    for (int own = 0; own < 2; own++) {
        for (int i = 0; i < 6; i++) {
            glob_t found = {0};
            found.gl_closedir = own_close;
            found.gl_readdir = own_read;
            found.gl_opendir = own_open;
            found.gl_lstat = own_lstat;
            found.gl_stat = own_stat;
            int flags = GLOB_BRACE | GLOB_MARK | (own ? GLOB_ALTDIRFUNC : 0);
            say("%s: %d, %zu", wanted[i], glob(wanted[i], flags, NULL, &found), found.gl_pathc);
            for (size_t at = 0; at < found.gl_pathc; at++) say("  %s", found.gl_pathv[at]);
            globfree(&found);
        }
        say("own functions used: %d %d", opened > 0, asked > 0);
    }
}

static int visit(const char *path, const struct stat *status, int kind, struct FTW *place) {
    (void)status;
    say("%s, %d, level %d", strrchr(path, '/') ? strrchr(path, '/') : path, kind, place->level);
    return kind == FTW_F ? FTW_SKIP_SUBTREE : 0;
}

static int end(const char *path, const struct stat *status, int kind, struct FTW *place) {
    visit(path, status, kind, place);
    return FTW_SKIP_SIBLINGS;
}

static int counted;

static int count(const char *path, const struct stat *status, int kind, struct FTW *place) {
    (void)path, (void)status, (void)kind, (void)place;
    counted++;
    return 0;
}

/* Also with links to a directory that is visited elsewhere. */
static void each_once(void) {
    MUST(mkdir("t", 0755));
    MUST(mkdir("far", 0755));
    make("far/f", "");
    MUST(symlink("../far", "t/one"));
    SAY(nftw("t", visit, 5, FTW_ACTIONRETVAL));
    MUST(symlink("../far", "t/two"));
    SAY(nftw("t", end, 5, FTW_ACTIONRETVAL));
    SAY(nftw("t", count, 5, 0));
    say("%d", counted);
}

static int reached;

static int reach(const char *path, const struct stat *status, int kind, struct FTW *place) {
    (void)status;
    counted++;
    reached += (kind == FTW_F || kind == FTW_D) && access(path + place->base, F_OK) == 0;
    return 0;
}

/* Names beside a link are found after the walk went through it. */
static void beside_links(void) {
    MUST(mkdir("t", 0755));
    MUST(mkdir("far", 0755));
    MUST(mkdir("far/off", 0755));
    for (int i = 0; i < 12; i++) {
        char name[32];
        snprintf(name, sizeof name, "t/%c", 'a' + i);
        if (i % 4 == 2) {
            MUST(mkdir(name, 0755));
            strcat(name, "/one");
            make(name, "");
        } else make(name, "");
    }
    MUST(symlink("../far/off", "t/link"));
    make("far/off/file", "");
    counted = 0;
    SAY(nftw("t", reach, 5, FTW_CHDIR));
    say("%d of %d", reached, counted);
    say("%d", access("t/link/file", F_OK));
}

static int listed = -1;

static int close_it(const struct dirent *entry) {
    (void)entry;
    if (listed >= 0) close(listed);
    listed = -1;
    errno = EPERM;
    return 1;
}

static int visited, found_there;

static int looks(const char *path, const struct stat *status, int kind, struct FTW *place) {
    (void)status;
    (void)kind;
    visited++;
    found_there += faccessat(AT_FDCWD, path + place->base, F_OK, AT_SYMLINK_NOFOLLOW) == 0;
    return 0;
}

/* A walk that changes the directory goes through a tree outside, and comes back. */
static void elsewhere(void) {
    char tree[PATH_MAX], *roots[] = {tree, NULL};
    MUST(realpath("../..", tree) ? 0 : -1);
    strcat(tree, "/elsewhere");
    make("f", "here");
    MUST(mkdir(tree, 0755));
    MUST(chdir(tree));
    plant();
    MUST(chdir(top));
    FTS *stream = fts_open(roots, FTS_PHYSICAL, NULL);
    for (FTSENT *entry; (entry = fts_read(stream)); visited++)
        found_there += faccessat(AT_FDCWD, entry->fts_accpath, F_OK, AT_SYMLINK_NOFOLLOW) == 0;
    say("%d visited, %d found there", visited, found_there);
    SAY(fts_close(stream));
    SAY(access("f", F_OK));
    SAY(nftw(tree, looks, 5, FTW_PHYS | FTW_CHDIR));
    say("%d visited, %d found there", visited, found_there);
    SAY(access("f", F_OK));
    char command[PATH_MAX + 8];
    snprintf(command, sizeof command, "rm -r %s", tree);
    SAY(system(command));
}

/* A directory that cannot be read to its end has no list. */
static void lists_that_fail(void) {
    MUST(mkdir("t", 0755));
    for (int i = 0; i < 500; i++) {
        char name[256];
        snprintf(name, sizeof name, "t/%0250d", i);
        make(name, "");
    }
    struct dirent **list = NULL;
    errno = ENOTTY;
    int count = scandir("t", &list, close_it, NULL);
    say("%d, %s, %d", count, strerrorname_np(errno), list != NULL);
    list = NULL;
    listed = MUST(open("t", O_RDONLY));
    MUST(close(listed));
    SAY(scandir("t", &list, close_it, NULL));
    say("%d", list != NULL);
}

static const struct test tests[] = {
    {"walks", walks},
    {"instructions", instructions},
    {"patterns", patterns},
    {"once", each_once},
    {"links", beside_links},
    {"elsewhere", elsewhere},
    {"failing-lists", lists_that_fail},
    {NULL, NULL},
};

int main(int count, char **arguments) { return run(count, arguments, tests); }
