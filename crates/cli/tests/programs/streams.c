/* Streams of stdio, and streams of directories. */
#include "case.h"
#include <wchar.h>

static void modes(void) {
    const char *all[] = {"r", "w", "a", "r+", "w+", "a+", "wx", "rb", "w+e"};
    for (int i = 0; i < 9; i++) {
        make("f", "hello\n");
        FILE *stream = fopen("f", all[i]);
        if (!stream) {
            say("%s: %s", all[i], strerrorname_np(errno));
            continue;
        }
        char line[32] = {0};
        say("%s: gets %d", all[i], fgets(line, sizeof line, stream) != NULL);
        clearerr(stream);
        fseek(stream, 0, SEEK_CUR);
        say("puts %d, at %ld", fputs("more", stream) >= 0, ftell(stream));
        say("flags %x %x", fcntl(fileno(stream), F_GETFD), fcntl(fileno(stream), F_GETFL) & 0xfff);
        say("close %d", fclose(stream));
        show("f");
    }
    say("%d", fopen("missing/f", "r") == NULL);
    say("%s", strerrorname_np(errno));
    say("%d", fopen("f", "q") == NULL);
    say("%s", strerrorname_np(errno));
}

static void positions(void) {
    FILE *stream = fopen("f", "w+");
    /* Otherwise the file system decides its length. */
    static char buffer[4096];
    MUST(setvbuf(stream, buffer, _IOFBF, sizeof buffer));
    for (int i = 0; i < 3000; i++) fprintf(stream, "line %d\n", i);
    say("at %ld", ftell(stream));
    rewind(stream);
    char line[64], *more = NULL;
    size_t room = 0;
    fgets(line, sizeof line, stream);
    say("%sat %ld, descriptor at %ld", line, ftell(stream), (long)lseek(fileno(stream), 0, SEEK_CUR));
    say("%d", fseek(stream, -10, SEEK_END));
    say("%zd %s", getline(&more, &room, stream), more);
    fpos_t place;
    fseeko(stream, 100, SEEK_SET);
    fgetpos(stream, &place);
    say("%c", ungetc('Q', stream));
    say("%c%c at %ld", fgetc(stream), fgetc(stream), ftell(stream));
    fsetpos(stream, &place);
    say("at %ld", ftell(stream));
    fseek(stream, 5, SEEK_SET);
    fputs("XYZ", stream);
    fflush(stream);
    say("%ld", (long)lseek(fileno(stream), 0, SEEK_CUR));
    say("%d", ftruncate(fileno(stream), 20));
    fseek(stream, 0, SEEK_END);
    say("at %ld", ftell(stream));
    fclose(stream);
    show("f");
    free(more);
    stream = fopen("f", "r+");
    setvbuf(stream, NULL, _IONBF, 0);
    fputs("un", stream);
    show("f");
    char pair[2];
    say("%zu", fread(pair, 1, 2, stream));
    fclose(stream);
    stream = fopen("f", "a");
    setvbuf(stream, NULL, _IOLBF, 64);
    fputs("line\npart", stream);
    show("f");
    fclose(stream);
    show("f");
}

static void bulk(void) {
    static char data[300000], back[300000];
    for (size_t i = 0; i < sizeof data; i++) data[i] = i * 7 + i / 251;
    FILE *stream = fopen("f", "w+");
    say("%zu", fwrite(data, 1, sizeof data, stream));
    rewind(stream);
    say("%zu", fread(back, 1000, 300, stream));
    say("same %d, at end %d", memcmp(data, back, sizeof data) == 0, fgetc(stream) == EOF);
    say("feof %d ferror %d", feof(stream) != 0, ferror(stream));
    fseek(stream, 123457, SEEK_SET);
    say("%zu %d", fread(back, 1, 50000, stream), memcmp(data + 123457, back, 50000));
    fclose(stream);
    stream = fopen("f", "r");
    fputc('x', stream);
    say("ferror %d", ferror(stream) != 0);
    fclose(stream);
}

static void reopened(void) {
    make("f", "one two three\n");
    IN_CHILD({
        FILE *kept = freopen("out", "w", stdout);
        say("%d %d", kept == stdout, fileno(stdout));
        printf("to a file\n");
        fflush(stdout);
        system("echo a child");
        freopen("f", "r", stdin);
        int number = -1;
        char word[16] = {0};
        scanf("%s", word);
        say("%s %d", word, number);
        freopen("out2", "a", stdout);
        puts("second");
        freopen(NULL, "w", stdout);
    });
    show("out");
    show("out2");
    int fd = MUST(open("f", O_RDWR));
    FILE *stream = fdopen(fd, "r+");
    char word[16];
    say("%d", fscanf(stream, "%15s", word));
    say("%s, fileno %d", word, fileno(stream) == fd);
    fclose(stream);
    SAY(close(fd));
    const char *modes[] = {"r", "re", "r+e", "r"};
    stream = fopen("f", "r");
    for (int i = 0; i < 4; i++) {
        stream = freopen(i == 2 ? NULL : "out", modes[i], stream);
        say("%s: %d %x", modes[i], stream != NULL, fcntl(fileno(stream), F_GETFD));
    }
    fclose(stream);
    fd = MUST(open("f", O_RDONLY));
    say("%d", fdopen(fd, "w") == NULL);
    say("%s", strerrorname_np(errno));
}

static void children_and_buffers(void) {
    FILE *stream = fopen("f", "w");
    fputs("buffered once\n", stream);
    fflush(stream);
    fputs("held ", stream);
    IN_CHILD(fputs("child\n", stream); fclose(stream));
    fputs("parent\n", stream);
    fclose(stream);
    show("f");
    stream = popen("exec 2>/dev/null; cat f; cat <&9; wc -c < f", "r");
    char line[64];
    while (fgets(line, sizeof line, stream)) say("%s", line);
    say("%d", pclose(stream));
    stream = popen("cat > written", "w");
    fputs("through a pipe", stream);
    say("%d", pclose(stream));
    show("written");
    MUST(dup2(MUST(open("f", O_RDONLY)), 9));
    stream = popen("head -c 8 <&9", "r");
    say("%s", fgets(line, sizeof line, stream));
    pclose(stream);
    say("%d", system("exit 3") >> 8);
}

static void wide(void) {
    FILE *stream = fopen("f", "w+");
    say("%d", fwprintf(stream, L"wide %d %ls\n", 7, L"text"));
    rewind(stream);
    wchar_t line[64] = {0};
    say("%d", fgetws(line, 64, stream) != NULL);
    say("%ls, orientation %d", line, fwide(stream, 0) > 0);
    fclose(stream);
    show("f");
}

static int by_name(const void *a, const void *b) {
    return strcmp(*(char *const *)a, *(char *const *)b);
}

/* Prints the rest of a listing, sorted. */
static void listed(DIR *list) {
    char *names[200], all[8192] = {0};
    int count = 0;
    for (struct dirent *entry; (entry = readdir(list)) && count < 200;) {
        char name[300];
        snprintf(name, sizeof name, "%s(%d)", entry->d_name, entry->d_type);
        names[count++] = strdup(name);
    }
    qsort(names, count, sizeof *names, by_name);
    for (int i = 0; i < count; i++) strcat(strcat(all, " "), names[i]);
    say("%d:%s", count, all);
}

static void directories(void) {
    mkdir("d", 0755);
    mkdir("d/sub", 0755);
    make("d/file", "x");
    symlink("file", "d/link");
    mkfifo("d/fifo", 0644);
    DIR *list = opendir("d");
    say("%d", list != NULL);
    listed(list);
    say("%d", readdir(list) == NULL);
    make("d/new", "x");
    rewinddir(list);
    listed(list);
    say("%d", fcntl(dirfd(list), F_GETFD));
    struct stat status;
    SAY(fstatat(dirfd(list), "file", &status, 0));
    SAY(fstat(dirfd(list), &status));
    SAY(closedir(list));
    say("%d", opendir("d/file") == NULL);
    say("%s", strerrorname_np(errno));
    say("%d", opendir("none") == NULL);
    int fd = MUST(open("d", O_RDONLY));
    list = fdopendir(fd);
    say("%d", dirfd(list) == fd);
    listed(list);
    closedir(list);
    SAY(close(fd));
    fd = MUST(open("d/file", O_RDONLY));
    say("%d", fdopendir(fd) == NULL);
    say("%s", strerrorname_np(errno));
    SAY(read(MUST(open("d", O_RDONLY)), (char[9]){0}, 9));
    SAY(open("d", O_WRONLY));
}

static void large_directories(void) {
    mkdir("d", 0755);
    char name[64];
    for (int i = 0; i < 700; i++) {
        snprintf(name, sizeof name, "d/a-rather-long-name-for-a-file-%04d", i);
        make(name, "");
    }
    DIR *list = opendir("d");
    int count = 0, seen[700] = {0};
    long place = -1;
    for (struct dirent *entry; (entry = readdir(list));) {
        int number = 0;
        if (sscanf(entry->d_name, "a-rather-long-name-for-a-file-%d", &number) == 1) seen[number]++;
        if (++count == 300) place = telldir(list);
    }
    int once = 0;
    for (int i = 0; i < 700; i++) once += seen[i] == 1;
    say("%d entries, %d seen once", count, once);
    seekdir(list, place);
    int rest = 0;
    while (readdir(list)) rest++;
    say("%d from the place", rest);
    rewinddir(list);
    for (int i = 0; i < 100; i++) readdir(list);
    IN_CHILD(readdir(list); closedir(list));
    struct dirent *entry = readdir(list);
    say("%d", entry != NULL);
    rewinddir(list);
    while ((entry = readdir(list)))
        if (entry->d_name[0] == 'a') unlinkat(dirfd(list), entry->d_name, 0);
    closedir(list);
    SAY(rmdir("d"));
}

/* Where append streams start, also on descriptors that had another such stream before. */
static void ends(void) {
    make("other", "something else");
    make("empty", "");
    for (int i = 0; i < 5; i++) {
        close(MUST(open("other", O_RDONLY)));
        FILE *stream = fopen("f", i % 2 ? "a" : "ab");
        say("at %ld", ftell(stream));
        fputs("12345", stream);
        say("at %ld", ftell(stream));
        fclose(stream);
        stream = fopen("f", "a+");
        say("to read, at %ld, reads %c", ftell(stream), fgetc(stream));
        fclose(stream);
        int fd = MUST(open("f", i % 2 ? O_WRONLY : O_WRONLY | O_APPEND));
        stream = fdopen(fd, "a");
        say("of a descriptor, at %ld and %ld, flags %x", ftell(stream), (long)lseek(fd, 0, SEEK_CUR), fcntl(fd, F_GETFL));
        fclose(stream);
        fd = MUST(open("other", O_RDWR));
        say("not appending: flags %x, at %ld", fcntl(fd, F_GETFL), (long)lseek(fd, 0, SEEK_CUR));
        SAY(write(fd, "S", 1));
        MUST(close(fd));
        stream = freopen(i % 2 ? "f" : "empty", "a", fopen("other", "r"));
        say("another file, at %ld", ftell(stream));
        fputs("6", stream);
        fclose(stream);
    }
    show("f");
    show("other");
    show("empty");
}

/* Streams that convert from and to the code set in their mode. */
static void code_sets(void) {
    make("f", "\xc3\xa4\xe2\x82\xac");
    int next = MUST(dup(0));
    MUST(close(next));
    FILE *stream = fopen("f", "r,ccs=UTF-8");
    say("reads %x %x %d, in order %d", fgetwc(stream), fgetwc(stream), (int)fgetwc(stream), fileno(stream) == next);
    fclose(stream);
    stream = fopen("new", "wxe,ccs=UTF-8");
    say("writes %x, flags %d", fputwc(0x20ac, stream), fcntl(fileno(stream), F_GETFD));
    fclose(stream);
    show("new");
    stream = fopen("new", "a+,ccs=UTF-8");
    say("appends %x", fputwc(0xe4, stream));
    fclose(stream);
    show("new");
    const char *refused[] = {"wx,ccs=UTF-8", "r,ccs=none"};
    for (int i = 0; i < 2; i++) say("%d %s", fopen("new", refused[i]) != NULL, strerrorname_np(errno));
    say("%d %s", fopen("none", "r,ccs=UTF-8") != NULL, strerrorname_np(errno));
    say("nothing left open: %d", MUST(dup(0)) == next);
}

/* The first use of the stream, and later ones. */
static void messages(void) {
    for (int access = O_WRONLY; access <= O_RDWR; access++) {
        IN_CHILD({
            MUST(dup2(MUST(open("f", access | O_CREAT | O_TRUNC, 0644)), 2));
            errno = ENOENT;
            perror("first");
            errno = 12345;
            perror(NULL);
            errno = EPERM;
            perror("");
            fputs("text\n", stderr);
            errno = EIO;
            perror("last");
        });
        show("f");
    }
}

static int print_listed(int fd, const char *format, ...) {
    va_list list;
    va_start(list, format);
    int result = vdprintf(fd, format, list);
    va_end(list);
    return result;
}

#ifdef __GLIBC__
/* What the functions above are with _FORTIFY_SOURCE. */
int __dprintf_chk(int fd, int checks, const char *format, ...);
int __vdprintf_chk(int fd, int checks, const char *format, va_list list);
static int print_checked(int fd, const char *format, ...) {
    va_list list;
    va_start(list, format);
    int result = __vdprintf_chk(fd, 1, format, list);
    va_end(list);
    return result;
}
#else
#define __dprintf_chk(fd, checks, ...) dprintf(fd, __VA_ARGS__)
#define print_checked dprintf
#endif

/* Formatted, without a stream. More arguments than there are registers. */
static void formatted(void) {
#define MANY                                                                                                          \
    "%d %s %ld %g %c %lld %g %x %g %g %u %g %g %g %g %Lg %g %d %s\n", 1, "two", 3L, 4.5, 'c', -6LL, 7.25, 0x8u, 9.5,   \
        10.0, 11u, 12.5, 13.5, 14.5, 15.5, 16.5L, 17.5, 18, "end"
    int fd = MUST(open("f", O_RDWR | O_CREAT | O_TRUNC, 0644));
    say("%d %d", dprintf(fd, MANY), print_listed(fd, MANY));
    say("%d %d", __dprintf_chk(fd, 1, MANY), print_checked(fd, MANY));
    say("%d %d", dprintf(fd, "%*d|", 70000, 5), dprintf(fd, "%s", ""));
    MUST(close(fd));
    show("f");
    say("closed: %d %s", dprintf(fd, "x"), strerrorname_np(errno));
    fd = MUST(open("f", O_RDONLY));
    say("for reading: %d %s", dprintf(fd, "x"), strerrorname_np(errno));
    MUST(close(fd));
}

static const struct test tests[] = {
    {"modes", modes},
    {"positions", positions},
    {"bulk", bulk},
    {"reopened", reopened},
    {"ends", ends},
    {"code-sets", code_sets},
    {"messages", messages},
    {"formatted", formatted},
    {"buffers", children_and_buffers},
    {"wide", wide},
    {"listings", directories},
    {"large-listings", large_directories},
    {NULL, NULL},
};

int main(int count, char **arguments) { return run(count, arguments, tests); }
