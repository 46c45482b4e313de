/* Generated names, patterns in texts, message catalogues, and the file-system user. */
#include "case.h"
#include <libintl.h>
#include <locale.h>
#include <nl_types.h>
#include <sys/fsuid.h>
#include <wordexp.h>

/* Declared under another name, since the linker warns about the function's own. */
extern char *made_up(char *) __asm__("mktemp");

static void made_up_names(void) {
    char seen[20][64];
    for (int i = 0; i < 20; i++) {
        snprintf(seen[i], sizeof seen[i], i % 2 ? "nXXXXXX" : "./pXXXXXX");
        char *got = made_up(seen[i]);
        say("%d %d %zu", got == seen[i], strstr(seen[i], "XXXXXX") == NULL, strlen(seen[i]));
        make(seen[i], "x");
        for (int k = 0; k < i; k++)
            if (strcmp(seen[i], seen[k]) == 0) say("the same again");
    }
    for (int i = 0; i < 20; i++) MUST(unlink(seen[i]));
    char odd[] = "none/nXXXXXX", few[] = "nXXXXX", full[PATH_MAX + 16];
    say("%s|", made_up(odd) ? "made" : "null");
    errno = 0;
    made_up(few);
    say("'%s' %s", few, strerrorname_np(errno));
    snprintf(full, sizeof full, "%s/aXXXXXX", top);
    made_up(full);
    say("%zu", strlen(full) - strlen(top));
}

static void expand(const char *text, wordexp_t *words, int flags) {
    int result = wordexp(text, words, flags);
    say("%s: %d", text, result);
    if (result) return;
    for (size_t i = 0; i < words->we_offs + words->we_wordc; i++)
        say("  %s", words->we_wordv[i] ? words->we_wordv[i] : "(none)");
    if (words->we_wordv[words->we_offs + words->we_wordc]) say("  no end");
}

static void patterns(void) {
    wordexp_t words = {.we_offs = 2};
    MUST(mkdir("d", 0755));
    make("a.t", "a");
    make("b.t", "b");
    make("d/c.t", "c");
    MUST(setenv("PATTERN", "*.t d/?.t", 1));
    MUST(setenv("FOLDER", "d", 1));
    expand("*.t", &words, WRDE_DOOFFS);
    expand("one ?.t two", &words, WRDE_DOOFFS | WRDE_APPEND);
    expand("d/[a-d].t none*", &words, WRDE_DOOFFS | WRDE_REUSE);
    expand("$PATTERN", &words, WRDE_DOOFFS | WRDE_REUSE);
    expand("$FOLDER/*.t", &words, WRDE_DOOFFS | WRDE_REUSE);
    wordfree(&words);
    words.we_offs = 0;
    expand("\"*.t\" \\*.t '?.t'", &words, 0);
    expand("$(echo '*.t') /etc/host[n]ame ~root", &words, WRDE_REUSE);
    expand("a b | c", &words, WRDE_REUSE);
    char text[PATH_MAX + 8];
    snprintf(text, sizeof text, "%s/d/*", top);
    expand(text, &words, 0);
    wordfree(&words);
}

static void catalogue(void) {
    make("m.msg", "$set 1\n1 first\n2 second\n");
    if (system("gencat m.cat m.msg 2>/dev/null") != 0) {
        say("there is no gencat");
        return;
    }
    char path[PATH_MAX + 8];
    snprintf(path, sizeof path, "%s/m.cat", top);
    for (int i = 0; i < 3; i++) {
        nl_catd catalogue = catopen(i == 0 ? "./m.cat" : i == 1 ? path : "./none.cat", 0);
        say("%d %s", catalogue != (nl_catd)-1, catgets(catalogue, 1, 2, "no text"));
        if (catalogue != (nl_catd)-1) SAY(catclose(catalogue));
    }
}

/* Creates a catalogue with one message. */
static void message(const char *folder, const char *text, const char *other) {
    char path[PATH_MAX + 64];
    snprintf(path, sizeof path, "po/%s", folder);
    MUST(mkdir(path, 0755));
    strcat(path, "/LC_MESSAGES");
    MUST(mkdir(path, 0755));
    strcat(path, "/some.mo");
    unsigned head[] = {0x950412de, 0, 1, 28, 36, 0, 0, strlen(text), 44, strlen(other), 44 + strlen(text) + 1};
    int fd = MUST(open(path, O_CREAT | O_WRONLY, 0644));
    MUST(write(fd, head, sizeof head));
    MUST(write(fd, text, strlen(text) + 1));
    MUST(write(fd, other, strlen(other) + 1));
    MUST(close(fd));
}

static void translations(void) {
    MUST(mkdir("po", 0755));
    message("de", "yes", "ja");
    message("fr_FR", "yes", "oui");
    char path[PATH_MAX + 8];
    snprintf(path, sizeof path, "%s/po", top);
    for (int i = 0; i < 3; i++) {
        /* In a child, since libc remembers what it found before. */
        IN_CHILD({
            MUST(setenv("LANGUAGE", i == 0 ? "de_AT.UTF-8" : i == 1 ? "xx:fr_FR" : "it", 1));
            if (!setlocale(LC_ALL, "C.UTF-8")) say("there is no C.UTF-8");
            bindtextdomain("some", path);
            say("%s, %s", dgettext("some", "yes"), dgettext("some", "no"));
        });
    }
}

static void users(void) {
    SAY(setfsuid(-1));
    SAY(setfsuid(1));
    SAY(setfsuid(-1));
    SAY(setfsgid(1));
    SAY(setfsgid(-1));
    SAY(setfsuid(0));
    SAY(setfsgid(0));
}

static const struct test tests[] = {
    {"made-up", made_up_names},     {"patterns", patterns}, {"catalogue", catalogue},
    {"translations", translations}, {"users", users},       {NULL, NULL},
};

int main(int count, char **arguments) {
    /* `texts owner FILE`: creates a file as another file-system user. */
    if (count == 3 && strcmp(arguments[1], "owner") == 0) {
        struct stat found;
        if (stat(arguments[2], &found) == 0) return 3; /* connects as root, since the other user may not */
        setfsgid(2);
        setfsuid(1);
        int fd = open(arguments[2], O_CREAT | O_EXCL | O_WRONLY, 0600);
        if (fd < 0 || fstat(fd, &found)) return 1;
        printf("%d %d, ", (int)found.st_uid, (int)found.st_gid);
        setfsuid(0);
        if (setfsuid(-1) != 0 || open("/nowhere/none", O_RDONLY) >= 0 || stat(arguments[2], &found)) return 2;
        printf("%d %d\n", (int)found.st_uid, (int)found.st_gid);
        return 0;
    }
    return run(count, arguments, tests);
}
