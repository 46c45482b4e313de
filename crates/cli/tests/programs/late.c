// To be preloaded: makes the close of a file whose name contains the value of LATE fail after the file was
// closed, like a late report of an exceeded quota.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int close(int fd)
{
    char link[64], name[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, name, sizeof name - 1);
    int (*real)(int) = (int (*)(int))dlsym(RTLD_NEXT, "close");
    int closed = real(fd);
    const char *late = getenv("LATE");
    if (length < 0 || !late)
        return closed;
    name[length] = 0;
    if (!strstr(name, late))
        return closed;
    errno = EDQUOT;
    return -1;
}
