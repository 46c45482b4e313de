// Measures the cost of storing data from a socket in a file:
// `recvfile tcp|unix copy|splice FILE MIB CHUNK_KIB`.
// copy: recv into a buffer, pwrite from there; splice: into a pipe of 1 MiB, and from there into the file.
// A child process sends. Prints CPU and wall time of the receiver per GiB, and its system calls per MiB.
#define _GNU_SOURCE
#include <err.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { FILE_BYTES = 256 << 20, PIPE_BYTES = 1 << 20 };

static long calls;

static double cpu(void) {
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_utime.tv_sec + usage.ru_stime.tv_sec
        + (usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1e6;
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec / 1e9;
}

static ssize_t counted(const char *what, ssize_t count) {
    calls++;
    if (count <= 0) err(1, "%s", what);
    return count;
}

static void connected(int tcp, int pair[2]) {
    if (!tcp) {
        if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair)) err(1, "socketpair");
        return;
    }
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    pair[1] = socket(AF_INET, SOCK_STREAM, 0);
    if (bind(listener, (void *)&address, length) || listen(listener, 1)
        || getsockname(listener, (void *)&address, &length)
        || connect(pair[1], (void *)&address, length))
        err(1, "tcp");
    pair[0] = accept(listener, NULL, NULL);
}

int main(int count, char **words) {
    if (count != 6) errx(2, "recvfile tcp|unix copy|splice FILE MIB CHUNK_KIB");
    long mib = atol(words[4]), total = mib << 20;
    size_t chunk = atol(words[5]) * 1024;
    int pair[2], in_pipe[2], splices = !strcmp(words[2], "splice");
    connected(!strcmp(words[1], "tcp"), pair);
    char *buffer = aligned_alloc(4096, chunk);
    memset(buffer, 7, chunk);
    if (fork() == 0) {
        close(pair[0]);
        for (long left = total; left > 0;) {
            ssize_t sent = send(pair[1], buffer, left < (long)chunk ? (size_t)left : chunk, 0);
            if (sent <= 0) _exit(1);
            left -= sent;
        }
        _exit(0);
    }
    close(pair[1]);
    int file = open(words[3], O_RDWR | O_CREAT, 0600);
    if (file < 0 || pipe(in_pipe)) err(1, "%s", words[3]);
    fcntl(in_pipe[1], F_SETPIPE_SZ, PIPE_BYTES);
    double cpu_before = cpu(), before = now();
    for (long at = 0; at < total; at += chunk) {
        loff_t offset = at % FILE_BYTES;
        for (size_t got = 0; got < chunk;) {
            if (!splices) {
                got += counted("recv", recv(pair[0], buffer + got, chunk - got, 0));
                continue;
            }
            ssize_t left = counted("splice", splice(pair[0], NULL, in_pipe[1], NULL, chunk - got, SPLICE_F_MOVE));
            for (got += left; left > 0;)
                left -= counted("splice", splice(in_pipe[0], NULL, file, &offset, left, SPLICE_F_MOVE));
        }
        if (!splices) counted("pwrite", pwrite(file, buffer, chunk, offset));
    }
    double gib = mib / 1024.0;
    printf("%s %s, %zu KiB: CPU %.3f s/GiB, wall %.3f s/GiB, %.1f calls/MiB\n", words[1], words[2], chunk / 1024,
           (cpu() - cpu_before) / gib, (now() - before) / gib, (double)calls / mib);
    wait(NULL);
}
