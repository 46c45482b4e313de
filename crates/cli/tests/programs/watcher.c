/* Watches the files named by its arguments, reports that, and prints each event as a line: what happened, and
 * to which name. It ends at a name "end" or when nothing more can come. With "-s" first it prints the length
 * of a file that was written, or appeared, in the directory named last; with "-l" it prints the names in that
 * directory, once it watches it; with "-c" it only wants to know which files were written and closed. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <unistd.h>

static const struct { unsigned bit; const char *name; } NAMES[] = {
    {IN_MODIFY, "MODIFY"}, {IN_ATTRIB, "ATTRIB"}, {IN_CLOSE_WRITE, "CLOSE_WRITE"}, {IN_MOVED_FROM, "MOVED_FROM"},
    {IN_MOVED_TO, "MOVED_TO"}, {IN_CREATE, "CREATE"}, {IN_DELETE, "DELETE"}, {IN_DELETE_SELF, "DELETE_SELF"},
    {IN_MOVE_SELF, "MOVE_SELF"}, {IN_IGNORED, "IGNORED"}, {IN_Q_OVERFLOW, "OVERFLOW"}, {0, NULL},
};

int main(int count, char **names) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    int queue = inotify_init1(IN_CLOEXEC), left = 0;
    int sizes = count > 1 && strcmp(names[1], "-s") == 0, lists = count > 1 && strcmp(names[1], "-l") == 0;
    int closes = count > 1 && strcmp(names[1], "-c") == 0;
    for (int i = 1 + (sizes || lists || closes); i < count; i++) {
        unsigned mask = IN_ALL_EVENTS & ~(IN_OPEN | IN_ACCESS | IN_CLOSE_NOWRITE | IN_CLOSE_WRITE);
        if (closes) mask = IN_CLOSE_WRITE;
        if (inotify_add_watch(queue, names[i], mask) < 0) printf("%s: %s\n", names[i], strerrorname_np(errno));
        else left++;
    }
    puts("ready");
    DIR *directory = lists ? opendir(names[count - 1]) : NULL;
    for (struct dirent *entry; directory && (entry = readdir(directory));)
        if (entry->d_name[0] != '.') printf("HAS %s\n", entry->d_name);
    if (directory) closedir(directory);
    char events[65536] __attribute__((aligned(8)));
    while (left > 0) {
        ssize_t bytes = read(queue, events, sizeof events);
        if (bytes < 0) return 1;
        const struct inotify_event *event;
        for (char *at = events; at < events + bytes; at += sizeof *event + event->len) {
            event = (const void *)at;
            const char *name = event->len ? event->name : "";
            for (int i = 0; NAMES[i].bit; i++)
                if (event->mask & NAMES[i].bit) printf("%s %s", NAMES[i].name, name);
            struct stat found;
            char path[4096];
            snprintf(path, sizeof path, "%s/%s", names[count - 1], name);
            if (sizes && event->mask & (IN_MODIFY | IN_MOVED_TO) && stat(path, &found) == 0) printf(" %lld", (long long)found.st_size);
            puts("");
            if (strcmp(name, "end") == 0) return 0;
            if (event->mask & IN_IGNORED) left--;
        }
    }
    return 0;
}
